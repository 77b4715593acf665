"""Work in pieces: resuming, several processes and job arrays by one idea.

The work of a long verb is a fixed list of batches, cut into a fixed list of pieces. A finished piece is one file in
``OUT/.work/ASKED``, written to a temporary name and renamed; ASKED is a hash of all that decides the numbers (weights,
tokenizer, examples, options, seed, versions), so that stale pieces cannot mix. The same command again makes what is
missing. Of several processes on one folder each makes every n-th piece: torchrun says which, or ``part=(3, 16)``. When
all are there they are added in order, so the numbers do not depend on who made what, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.runs.folder import WORK, file_name, read_run, write_file, writing
from qkscope.runs.progress import counting
from qkscope.runs.provenance import provenance

log = logging.getLogger(__name__)

T = TypeVar("T")

PIECES = 16
"""The most pieces of a list of batches."""
_LEAST = 2  # batches of a piece: adding up and writing are little beside them
_TENSOR = "tensor"


class PartDone(Exception):
    """Raised where this process has made its pieces, and others are to add them up."""


class BatchPart(NamedTuple, Generic[T]):
    """What a batch gave, or one part of a batch that did not fit into memory; and whether it is the batch's last."""

    last: bool
    value: T


@dataclass(frozen=True)
class Stage:
    """A list of batches that is run in pieces.

    Parameters
    ----------
    name : of the pieces.
    batches : numbers of the examples of each.
    run : runs one batch.
    sums : tensors that ``run`` or ``add`` make or add to in place, from zero on for each piece; they end as the total.
    add : takes in each part of a batch.
    merge : gives the total of the sum of this name with one more piece; addition by default.
    """

    name: str
    batches: list[list[int]]
    run: Callable[[list[int]], Any]
    sums: dict[str, Tensor] = field(default_factory=dict)
    add: Callable[[BatchPart[Any]], Any] = lambda part: part.value
    merge: Callable[[str, Tensor, Tensor], Tensor] = lambda name, total, piece: total.add_(piece)

    @property
    def groups(self) -> list[list[list[int]]]:
        """The batches of each piece: the same, whoever makes them."""
        size = max(-(-len(self.batches) // PIECES), _LEAST)
        return [self.batches[start : start + size] for start in range(0, len(self.batches), size)]

    def make(self, memory: _Memory, advance: Callable[[int], None], number: int) -> dict[str, Any]:
        """One piece: what its batches give, and their sums."""
        for tensor in self.sums.values():
            tensor.zero_()
        parts = (part for batch in self.groups[number] for part in memory.run(batch, self.run, advance))
        return {"values": [self.add(part) for part in parts], "sums": dict(self.sums)}

    def total(self, pieces: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Add the pieces up in order: what all batches gave, and in ``sums`` their total."""
        values, totals = list[Any](), dict[str, Tensor]()
        for piece in pieces:
            values += piece["values"]
            for name, tensor in piece["sums"].items():
                own = tensor.cpu()
                totals[name] = self.merge(name, totals[name], own) if name in totals else own.clone()
        for name, total in totals.items():
            self.sums.setdefault(name, torch.empty_like(total)).copy_(total)
        return values


class Work:
    """The pieces of a verb's work in its folder; without a folder nothing is written, and every piece is made.

    Parameters
    ----------
    out : the run's folder.
    part : ``(i, n)``: which process of how many on this folder this is, where torchrun does not say it.
    """

    def __init__(self, out: str | Path | None = None, part: tuple[int, int] | None = None) -> None:
        self.out = None if out is None else Path(out)
        if part is not None and out is None:
            raise BadInput("a part leaves its pieces in a folder that all parts share: name it with out.")
        process = None if out is None or part is not None else torchrun_process()
        self.together = process is not None  # the others run now, and can be waited for
        self.part = process or checked_part(part or (0, 1))
        self.folder: Path | None = None
        self.device: torch.device | str = "cpu"

    def begin(self, scope: Any, examples: Any, **asked: Any) -> Work:
        """Say what is asked: pieces that were made for anything else are not taken.

        Parameters
        ----------
        scope : the model.
        examples : all that are run.
        asked : everything else that decides the numbers.
        """
        self.device = scope.device
        if self.out is None:
            return self
        said = {
            "weights": scope.weights_hash, "tokenizer": scope.tokenizer_hash, "dtype": str(scope.model.dtype),
            "device": torch.device(scope.device).type, "model": scope.name, "examples": _hash(repr(examples)), **asked,
        }  # fmt: skip
        return self.open(said)

    def open(self, asked: Mapping[str, Any]) -> Work:
        """As `begin`, of work that these facts tell from other work, and the versions."""
        assert self.out is not None
        said = {**asked, "versions": provenance()["versions"]}
        self.folder = self.out / WORK / _hash(json.dumps(said, sort_keys=True, default=str))
        waits = self.part[0] > 0 if self.together else self.part[1] > 1
        if waits and read_run(self.out).get("work") == self.folder.name:
            raise PartDone("" if self.together else f"All parts are done and added up in {self.out}.")
        if any(self.folder.glob("*.safetensors")):
            log.info("Going on from what is done in %s.", self.folder)
        return self

    def finish(self) -> None:
        """The whole is written: the pieces have done their work."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # there is other work
                self.folder.parent.rmdir()

    @property
    def asked(self) -> dict[str, str]:
        """What a manifest says of the pieces that the result was made of."""
        return {} if self.folder is None else {"work": self.folder.name}

    # ------------------------------------------------------------------ pieces

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, or gave in an earlier run: plain values and tensors in dicts and lists (no tuples)."""
        return next(self._pieces(name, 1, lambda _: make()))

    def run(self, stages: Sequence[Stage], progress: bool | None = None, *, last: bool = False) -> list[list[Any]]:
        """Make what is missing of some stages, and add up each; what its batches gave comes back, in order.

        Parameters
        ----------
        progress : as in `stream`.
        last : whether nothing is shared after this: a part then ends here, unless all pieces are there.
        """
        (index, of), memory = self.part, _Memory()
        every = [(stage.name, number) for stage in stages for number in range(len(stage.groups))]
        todo = [group for stage in stages for i, group in enumerate(stage.groups) if not self._is_there(stage.name, i)]
        with counting(sum(len(batch) for group in todo for batch in group), shown=progress) as advance:
            makes = {stage.name: partial(stage.make, memory, advance) for stage in stages}
            if of > 1:
                for name, number in every[index::of]:
                    if not self._is_there(name, number):
                        self._write(name, number, makes[name](number))
                self._meet(every, last)
            return [stage.total(self._pieces(stage.name, len(stage.groups), makes[stage.name])) for stage in stages]

    def _meet(self, every: Sequence[tuple[str, int]], last: bool) -> None:
        """Wait for the other processes of torchrun; end a part that is not the one to add up, the first to see all."""
        if self.together:
            if last and self.part[0] > 0:
                raise PartDone  # the first process adds up, and tells
            while not all(self._is_there(*piece) for piece in every):  # where one dies, torchrun ends all
                time.sleep(0.1)
        elif last:
            assert self.folder is not None
            there = sum(self._is_there(*piece) for piece in every)
            if there < len(every):
                raise PartDone(f"This part is done: {there} of {len(every)} pieces are there. The last adds them up.")
            try:
                (self.folder / "adding").mkdir()
            except OSError:
                raise PartDone(
                    "Another part adds them up; if it was stopped, run the command without --part."
                ) from None

    def _pieces(self, name: str, count: int, make: Callable[[int], Any]) -> Iterator[Any]:
        """Every piece in order: read where it is there, made where it is not."""
        for number in range(count):
            piece = self._read(name, number)
            if piece is None:
                piece = make(number)
                self._write(name, number, piece)
            yield piece

    # ------------------------------------------------------------------ files

    def _path(self, name: str, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{file_name(name)}-{number}.safetensors"

    def _is_there(self, name: str, number: int) -> bool:
        path = self._path(name, number)
        return path is not None and path.exists()

    def _write(self, name: str, number: int, value: Any) -> None:
        path, tensors = self._path(name, number), dict[str, Tensor]()
        if path is not None:
            plain = json.dumps(_apart(value, tensors))
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, save(tensors, {"value": plain}))

    def _read(self, name: str, number: int) -> Any:
        """A finished piece; None where there is none that can be read."""
        path = self._path(name, number)
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                tensors = {name: x if name.startswith("cpu") else x.to(self.device) for name, x in read.items()}
                return _together(json.loads(file.metadata()["value"]), tensors)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            log.warning("%s cannot be read, so this piece is made again.", path)
            return None


# ---------------------------------------------------------------- batches and memory


def stream(batches: list[list[int]], run: Callable[[list[int]], T], progress: bool | None = None) -> Iterator[T]:
    """Run batches in order; one that does not fit into memory is halved, and so are those after it.

    Parameters
    ----------
    batches : numbers of the examples of each.
    run : runs one batch.
    progress : whether to say how far it is; if not given, on a terminal, and once a minute in a log.
    """
    memory = _Memory()
    with counting(sum(map(len, batches)), shown=progress) as advance:
        for batch in batches:
            yield from (part.value for part in memory.run(batch, run, advance))


class _Memory:
    """How many examples fit into memory at once, as far as was seen."""

    def __init__(self) -> None:
        self.most: int | None = None

    def run(
        self, batch: list[int], run: Callable[[list[int]], T], advance: Callable[[int], None]
    ) -> Iterator[BatchPart[T]]:
        """Run a batch in as many parts as it takes."""
        while batch:
            some = batch[: self.most]
            try:
                value = run(some)
            except (MemoryError, RuntimeError) as error:
                if len(some) < 2 or not out_of_memory(error):
                    raise
                self.most = len(some) // 2
                log.warning("out of memory: going on with batches of %d", self.most)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            batch = batch[len(some) :]
            advance(len(some))
            yield BatchPart(not batch, value)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory is what an error is about, on whatever device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


# ---------------------------------------------------------------- several processes


def parse_part(text: str) -> tuple[int, int]:
    """``i/n`` as two numbers, counted as in `checked_part`.

    >>> parse_part("3/16")
    (3, 16)
    """
    numbers = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    return checked_part((int(numbers[1]), int(numbers[2])) if numbers else (0, 0), text)


def checked_part(part: tuple[int, int], said: object = None) -> tuple[int, int]:
    """A part, counted from 0 or from 1: part n of n is part 0, so that both ways of counting cover all of them.

    >>> checked_part((0, 4)), checked_part((3, 4)), checked_part((4, 4))
    ((0, 4), (3, 4), (0, 4))
    """
    i, n = part
    if not 0 <= i <= n or n < 1:
        raise BadInput(f"a part is i/n, as 0/4 to 3/4 or 1/4 to 4/4, but got {said or part}.")
    return i % n, n


def torchrun_process() -> tuple[int, int] | None:
    """Which process of how many this is, where torchrun started it; it also says where the processes meet."""
    rank, world, port = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    numbered = rank.isdecimal() and world.isdecimal() and port.isdecimal() and "MASTER_ADDR" in os.environ
    if not numbered or not int(rank) < int(world) > 1:
        return None
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # left over from something else: nobody would come to meet us
        log.warning("RANK and WORLD_SIZE are set, but torchrun did not start this process: it does all alone.")
        return None
    return int(rank), int(world)


def torchrun_device(device: str | None) -> str | None:
    """The device of this process: under torchrun each takes a GPU of its own, unless another device was named."""
    process = torchrun_process()
    if process is None or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    local = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{(int(local) if local.isdecimal() else process[0]) % torch.cuda.device_count()}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON can have it, with its tensors taken out: by the kind of device they belong on, and a number."""
    if isinstance(value, Tensor):
        name = f"{value.device.type} {len(tensors)}"
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _apart(item, tensors) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_apart(item, tensors) for item in value]
    return value


def _together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {name: _together(item, tensors) for name, item in value.items()}
    return [_together(item, tensors) for item in value] if isinstance(value, list) else value
