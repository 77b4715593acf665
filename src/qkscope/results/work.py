"""Work in pieces, for resuming, several processes and job arrays; and the frame of every verb.

The work of a long verb is a fixed list of batches, cut into a fixed list of pieces. A finished
piece is one file in ``OUT/.work/ASKED``, written to a temporary name and renamed; ASKED is a hash
of everything that decides the numbers (weights, tokenizer, examples, options, seed, versions), so
that stale pieces cannot mix. The same command again makes what is missing. Of several processes on
one folder each makes every n-th piece: torchrun says which, or ``part=(3, 16)``. When all are there
they are added in order, so the numbers do not depend on who made what, bit for bit.

A verb is a public function that returns a `Result`. With ``out`` it writes its folder itself, page
included; the folder is checked before anything runs. A verb that takes ``part`` shares its pieces
among processes.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import os
import re
import shutil
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from qkscope.checking import checked_call
from qkscope.errors import BadInput
from qkscope.results import folder as disk
from qkscope.results.progress import counting
from qkscope.results.result import Result, provenance

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R", bound=Result)
T = TypeVar("T")

#: The most pieces of a list of batches.
PIECES = 16
_LEAST = 2  # batches of a piece, so that writing and adding up cost little beside them
_TENSOR = "tensor"  # the only key of the mapping that stands for a tensor in a piece's JSON
_POLL = 0.1  # seconds between two looks for the pieces of other processes


class PartDone(Exception):
    """Raised when this process has made its pieces, and another one adds them up."""


@dataclass(frozen=True)
class Stage:
    """A list of batches that is run in pieces.

    Parameters
    ----------
    name : of the pieces.
    batches : the examples of each batch, by number.
    run : runs one batch.
    sums : tensors that ``run`` or ``add`` make or add to in place, from zero on for each piece;
        they end as the total.
    add : called with what each batch gave, or each part of one that did not fit into memory;
        returns what is kept of it.
    merge : adds one more piece to the total of the sum of this name; addition by default.
    """

    name: str
    batches: list[list[int]]
    run: Callable[[list[int]], Any]
    sums: dict[str, Tensor] = field(default_factory=dict)
    add: Callable[[Any], Any] = lambda value: value
    merge: Callable[[str, Tensor, Tensor], Tensor] = lambda name, total, piece: total.add_(piece)

    @property
    def groups(self) -> list[list[list[int]]]:
        """The batches of each piece: the same for any number of processes."""
        size = max(math.ceil(len(self.batches) / PIECES), _LEAST)
        starts = range(0, len(self.batches), size)
        return [self.batches[start : start + size] for start in starts]

    def make(self, number: int, advance: Callable[[int], None]) -> dict[str, Any]:
        """Make one piece: what its batches give, and their sums."""
        for tensor in self.sums.values():
            tensor.zero_()
        values = _fitting(self.groups[number], self.run, advance)
        return {"values": [self.add(value) for value in values], "sums": dict(self.sums)}

    def total(self, pieces: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Add up the pieces in order, into ``sums``; returns what all batches gave."""
        values = list[Any]()
        totals = dict[str, Tensor]()
        for piece in pieces:
            values += piece["values"]
            for name, tensor in piece["sums"].items():
                term = tensor.cpu()
                if name in totals:
                    totals[name] = self.merge(name, totals[name], term)
                else:
                    totals[name] = term.clone()
        for name, total in totals.items():
            self.sums.setdefault(name, torch.empty_like(total)).copy_(total)
        return values


class Work:
    """The pieces of a verb's work, as files in its folder.

    Parameters
    ----------
    out : the run's folder; without one nothing is written, and every piece is made.
    part : ``(i, n)``: this process is number i of the n that share the folder; torchrun gives its
        own.
    """

    def __init__(self, out: str | Path | None = None, part: tuple[int, int] | None = None) -> None:
        self.out = None if out is None else Path(out)
        if part is not None and out is None:
            raise BadInput(
                "a part leaves its pieces in a folder that all parts share: name it with out."
            )
        process = torchrun_process() if out is not None and part is None else None
        self.together = process is not None  # the other processes run now, and can be waited for
        self.part = process or parse_part(part or (0, 1))
        self.folder: Path | None = None
        self.device: torch.device | str = "cpu"

    def begin(self, scope: Any, examples: Any, **asked: Any) -> Work:
        """Identify the work by everything that decides its numbers; other pieces are not used.

        Parameters
        ----------
        scope : the model.
        examples : all that are run.
        asked : everything else that decides the numbers.
        """
        self.device = scope.device
        if self.out is None:
            return self
        facts = {
            "model": scope.name,
            "weights": scope.weights_hash,
            "tokenizer": scope.tokenizer_hash,
            "dtype": str(scope.model.dtype),
            "device": torch.device(scope.device).type,
            "examples": disk.sha256(repr(examples))[:16],
        }
        return self.open({**facts, **asked})

    def open(self, asked: Mapping[str, Any]) -> Work:
        """Open the folder of the work that is identified by these facts and the versions."""
        assert self.out is not None
        facts = json.dumps(
            {**asked, "versions": provenance()["versions"]}, sort_keys=True, default=str
        )
        self.folder = self.out / disk.WORK / disk.sha256(facts)[:16]
        number, count = self.part
        may_be_late = number > 0 if self.together else count > 1
        if may_be_late and disk.read_run(self.out).get("work") == self.folder.name:
            done = f"All parts are done and added up in {self.out}."
            raise PartDone("" if self.together else done)
        if self.begun:
            log.info("Going on from what is done in %s.", self.folder)
        return self

    @property
    def begun(self) -> bool:
        """Whether there are pieces already."""
        if self.folder is None or not self.folder.is_dir():
            return False
        return any(self.folder.iterdir())

    def finish(self) -> None:
        """Remove the pieces once the run is written."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # it holds the pieces of other work
                self.folder.parent.rmdir()

    # ------------------------------------------------------------------ pieces

    def run(self, stage: Stage, progress: bool | None = None, *, last: bool = False) -> list[Any]:
        """Make a stage's missing pieces and add all up; returns what its batches gave, in order.

        Parameters
        ----------
        stage : the batches and how they are run.
        progress : as in `stream`.
        last : whether this stage is the last that parts share: a part then ends here, unless it
            adds up.
        """
        groups = stage.groups
        missing = 0
        for number, group in enumerate(groups):
            if not self._is_there(stage.name, number):
                missing += sum(map(len, group))
        with counting(missing, shown=progress) as advance:

            def piece(number: int) -> Any:
                return self.once(stage.name, lambda: stage.make(number, advance), number)

            first, step = self.part
            if step > 1:
                for number in range(first, len(groups), step):
                    piece(number)
                self._meet(stage, last)
            return stage.total(map(piece, range(len(groups))))

    def _meet(self, stage: Stage, last: bool) -> None:
        """Wait until the other processes have made their pieces, or end this one.

        Processes of torchrun wait for each other; after the last stage the first one adds up.
        Parts do not wait: the first that finds all pieces adds them up, the others end.
        """
        count = len(stage.groups)
        if self.together:
            if last and self.part[0] > 0:
                raise PartDone
            while self._pieces_there(stage) < count:  # if a process dies, torchrun ends all
                time.sleep(_POLL)
        elif last:
            done = self._pieces_there(stage)
            if done < count:
                raise PartDone(
                    f"This part is done: {done} of {count} pieces are there. The last adds them up."
                )
            self._claim_adding()

    def _claim_adding(self) -> None:
        """End this part if another one has begun to add up."""
        assert self.folder is not None
        try:
            (self.folder / "adding").mkdir()
        except OSError:
            stopped = (
                "Another part adds them up; if it was stopped, run the command without --part."
            )
            raise PartDone(stopped) from None

    def _pieces_there(self, stage: Stage) -> int:
        """How many pieces of a stage are finished."""
        numbers = range(len(stage.groups))
        return sum(self._is_there(stage.name, number) for number in numbers)

    def _path(self, name: str, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{disk.file_name(name)}-{number}.safetensors"

    def _is_there(self, name: str, number: int) -> bool:
        return self.folder is not None and self._path(name, number).exists()

    def once(self, name: str, make: Callable[[], Any], number: int = 0) -> Any:
        """Read a piece if it is there; make and write it if not.

        Parameters
        ----------
        name : of the work it is a piece of.
        make : returns it: plain values and tensors in dicts and lists (no tuples).
        number : of the piece, where there are several.
        """
        if self._is_there(name, number):
            try:
                return _read_piece(self._path(name, number), self.device)
            except BadInput as error:
                log.warning("%s This piece is made again.", error)
        value = make()
        if self.folder is not None:
            _write_piece(self._path(name, number), value)
        return value


def _write_piece(path: Path, value: Any) -> None:
    """Write a piece: its plain values as JSON, and its tensors, named by their device."""
    tensors = dict[str, Tensor]()

    def put_apart(tensor: Tensor) -> dict[str, str]:
        key = f"{tensor.device.type} {len(tensors)}"
        tensors[key] = tensor.detach().cpu().clone()
        return {_TENSOR: key}

    plain = json.dumps(value, default=put_apart)
    disk.write_tensors(path, "piece", tensors, {"value": plain})


def _read_piece(path: Path, device: torch.device | str) -> Any:
    """Read a piece; tensors that were not on the CPU go to the device."""
    tensors, manifest = disk.read_tensors(path, "piece")

    def put_back(value: dict[str, Any]) -> Any:
        if value.keys() != {_TENSOR}:
            return value
        key = value[_TENSOR]
        return tensors[key] if key.startswith("cpu") else tensors[key].to(device)

    return json.loads(manifest["value"], object_hook=put_back)


# ---------------------------------------------------------------- batches and memory


def stream(
    batches: list[list[int]], run: Callable[[list[int]], T], progress: bool | None = None
) -> Iterator[T]:
    """Run batches in order; one that does not fit into memory is halved, and so are those after it.

    Parameters
    ----------
    batches : the examples of each batch, by number.
    run : runs one batch.
    progress : whether to show progress; by default on a terminal, and once a minute in a log.
    """
    with counting(sum(map(len, batches)), shown=progress) as advance:
        yield from _fitting(batches, run, advance)


def _fitting(
    batches: list[list[int]], run: Callable[[list[int]], T], advance: Callable[[int], None]
) -> Iterator[T]:
    """Run each batch in as many parts as memory takes.

    Every piece starts with whole batches, so that no piece depends on another.
    """
    most: int | None = None  # examples that fit into memory at once; None: none was too large yet
    for batch in batches:
        rest = batch
        while rest:
            fitting = rest[:most]
            try:
                value = run(fitting)
            except (MemoryError, RuntimeError) as error:
                if len(fitting) < 2 or not _is_out_of_memory(error):
                    raise
                most = len(fitting) // 2
                log.warning("out of memory: going on with batches of %d", most)
                torch.cuda.empty_cache()
                continue
            rest = rest[len(fitting) :]
            advance(len(fitting))
            yield value


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short: torch's CPU allocator raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "allocate memory" in str(error)


# ---------------------------------------------------------------- several processes


def parse_part(part: str | tuple[int, int]) -> tuple[int, int]:
    """Read a part ``i/n``, counted from 0 or from 1: part n of n is part 0.

    >>> parse_part("0/4"), parse_part((3, 4)), parse_part("4/4")
    ((0, 4), (3, 4), (0, 4))
    """
    text = part if isinstance(part, str) else "/".join(map(str, part))
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    number = int(numbers[1]) if numbers else 1
    count = int(numbers[2]) if numbers else 0
    if number > count or count < 1:
        raise BadInput(f"a part is i/n, as 0/4 to 3/4 or 1/4 to 4/4, but got {text}.")
    return number % count, count


def torchrun_process() -> tuple[int, int] | None:
    """The number of this process and how many there are, under torchrun; None elsewhere.

    RANK alone does not say it: other launchers set it too.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def torchrun_device(device: str | None) -> str | None:
    """The device of this process: under torchrun each has its own GPU, unless one was named."""
    if torchrun_process() is None or device not in (None, "cuda"):
        return device
    if not torch.cuda.is_available():
        return device
    rank = int(os.environ["LOCAL_RANK"])
    return f"cuda:{rank % torch.cuda.device_count()}"


# ---------------------------------------------------------------- the frame of a verb

_WORK: ContextVar[Work] = ContextVar("work")


def current_work() -> Work:
    """The work of the running verb; outside a verb, one that keeps nothing."""
    return _WORK.get(Work())


def verb(kind: str, *, beside: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a public verb: time, folder, pieces, page, and arguments checked by annotation.

    Parameters
    ----------
    kind : of its folders, as their ``experiment`` begins.
    beside : the name of an argument whose own folder (``kept_in``) may be ``out``: then its page
        is drawn anew with both results.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @checked_call
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            given = signature.bind(*args, **kwargs).arguments
            out = given.get("out")
            other = given.get(beside)
            shares_folder = out is not None and other is not None and other.kept_in == Path(out)
            if out is not None:
                disk.check_folder(out, None if shares_folder else kind)
            work = Work(out, given.get("part"))
            try:
                with _working(work):
                    if work.part[0] > 0 and "part" not in signature.parameters:
                        raise PartDone  # a process of torchrun, and the verb shares no work
                    result = function(*args, **kwargs)
                    result = replace(result, seconds=time.perf_counter() - start)
            except PartDone as done:
                return typing.cast(R, Result(kind, {}, answer=str(done)))
            if out is not None and not (work.together and work.part[0]):
                if other is not None and shares_folder:
                    _draw_page(Path(out), [result, other])
                else:
                    result = _write_with_page(result, Path(out), work)
                work.finish()
            return result

        return run

    return decorate


@contextmanager
def _working(work: Work) -> Iterator[None]:
    """Let `current_work` return this work inside the block."""
    token = _WORK.set(work)
    try:
        with disk.kept_if_stopped(work.out or Path(), lambda: work.begun):
            yield
    finally:
        _WORK.reset(token)


def _write_with_page(result: R, out: Path, work: Work) -> R:
    """Write a result's folder with its page; the result returned names the work it came from."""
    if work.folder is not None:
        result = replace(result, provenance={**result.provenance, "work": work.folder.name})
    result.write(out, files={disk.PAGE: _page([result])})
    return result


def _draw_page(out: Path, results: list[Result]) -> None:
    """Draw the page of a run's folder anew, with further results."""
    disk.add_to_run(out, {disk.PAGE: _page(results)})


def _page(results: list[Result]) -> str:
    """The page of some results as HTML."""
    page = import_module("qkscope.show.page")  # by name: a room that imports this one
    return str(page.report_html(results))
