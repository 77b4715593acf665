"""Work in pieces: resuming, several processes and job arrays by one idea; and the frame of every
verb.

The work of a long verb is a fixed list of batches, cut into a fixed list of pieces. A finished
piece is one file in ``OUT/.work/ASKED``, written to a temporary name and renamed; ASKED is a hash
of all that decides the numbers (weights, tokenizer, examples, options, seed, versions), so that
stale pieces cannot mix. The same command again makes what is missing. Of several processes on one
folder each makes every n-th piece: torchrun says which, or ``part=(3, 16)``. When all are there
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
import os
import re
import shutil
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
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
_LEAST = 2  # batches of a piece: adding up and writing are little beside them
_TENSOR = "tensor"


class PartDone(Exception):
    """Raised where this process has made its pieces, and others are to add them up."""


@dataclass(frozen=True)
class Stage:
    """A list of batches that is run in pieces.

    Parameters
    ----------
    name : of the pieces.
    batches : numbers of the examples of each.
    run : runs one batch.
    sums : tensors that ``run`` or ``add`` make or add to in place, from zero on for each piece;
        they end as the total.
    add : takes in what each batch gave, or each part of one that did not fit into memory.
    merge : gives the total of the sum of this name with one more piece; addition by default.
    """

    name: str
    batches: list[list[int]]
    run: Callable[[list[int]], Any]
    sums: dict[str, Tensor] = field(default_factory=dict)
    add: Callable[[Any], Any] = lambda value: value
    merge: Callable[[str, Tensor, Tensor], Tensor] = lambda name, total, piece: total.add_(piece)

    @property
    def groups(self) -> list[list[list[int]]]:
        """The batches of each piece: the same, whoever makes them."""
        size = max(-(-len(self.batches) // PIECES), _LEAST)
        return [self.batches[start : start + size] for start in range(0, len(self.batches), size)]

    def make(self, number: int, advance: Callable[[int], None]) -> dict[str, Any]:
        """One piece: what its batches give, and their sums."""
        for tensor in self.sums.values():
            tensor.zero_()
        values = _fitting(self.groups[number], self.run, advance)
        return {"values": [self.add(value) for value in values], "sums": dict(self.sums)}

    def total(self, pieces: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Add up the pieces in order: results of all batches, and their total in ``sums``."""
        values = list[Any]()
        totals = dict[str, Tensor]()
        for piece in pieces:
            values += piece["values"]
            for name, tensor in piece["sums"].items():
                term = tensor.cpu()
                totals[name] = (
                    self.merge(name, totals[name], term) if name in totals else term.clone()
                )
        for name, total in totals.items():
            self.sums.setdefault(name, torch.empty_like(total)).copy_(total)
        return values


class Work:
    """The pieces of a verb's work in its folder; without a folder nothing is written, and every
    piece is made.

    Parameters
    ----------
    out : the run's folder.
    part : ``(i, n)``: which process of how many on this folder this is, where torchrun does not say
        it.
    """

    def __init__(self, out: str | Path | None = None, part: tuple[int, int] | None = None) -> None:
        self.out = None if out is None else Path(out)
        if part is not None and out is None:
            raise BadInput(
                "a part leaves its pieces in a folder that all parts share: name it with out."
            )
        process = None if out is None or part is not None else torchrun_process()
        self.together = process is not None  # the others run now, and can be waited for
        self.part = process or parse_part(part or (0, 1))
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
        model = {
            "model": scope.name,
            "weights": scope.weights_hash,
            "tokenizer": scope.tokenizer_hash,
        }
        kind = {"dtype": str(scope.model.dtype), "device": torch.device(scope.device).type}
        return self.open({**model, **kind, "examples": disk.sha256(repr(examples))[:16], **asked})

    def open(self, asked: Mapping[str, Any]) -> Work:
        """Begin work that is identified by these facts and the versions."""
        assert self.out is not None
        facts = {**asked, "versions": provenance()["versions"]}
        self.folder = (
            self.out / disk.WORK / disk.sha256(json.dumps(facts, sort_keys=True, default=str))[:16]
        )
        waits = self.part[0] > 0 if self.together else self.part[1] > 1
        if waits and disk.read_run(self.out).get("work") == self.folder.name:
            raise PartDone(
                "" if self.together else f"All parts are done and added up in {self.out}."
            )
        if self.begun:
            log.info("Going on from what is done in %s.", self.folder)
        return self

    @property
    def begun(self) -> bool:
        """Whether there are pieces already."""
        return self.folder is not None and any(
            self.folder.iterdir() if self.folder.is_dir() else ()
        )

    def finish(self) -> None:
        """Remove the pieces once the whole is written."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # there is other work
                self.folder.parent.rmdir()

    # ------------------------------------------------------------------ pieces

    def run(self, stage: Stage, progress: bool | None = None, *, last: bool = False) -> list[Any]:
        """Make what is missing of a stage, and add it up; what its batches gave comes back, in
        order.

        Parameters
        ----------
        progress : as in `stream`.
        last : whether nothing is shared after this: a part then ends here, unless all pieces are
            there.
        """
        every = range(len(stage.groups))
        missing = [stage.groups[i] for i in every if not self._is_there(stage.name, i)]
        with counting(
            sum(len(batch) for group in missing for batch in group), shown=progress
        ) as advance:

            def piece(number: int) -> Any:
                return self.once(stage.name, lambda: stage.make(number, advance), number)

            if self.part[1] > 1:
                for number in every[self.part[0] :: self.part[1]]:
                    piece(number)
                self._meet(
                    lambda: sum(self._is_there(stage.name, i) for i in every), len(every), last
                )
            return stage.total(map(piece, every))

    def _meet(self, there: Callable[[], int], every: int, last: bool) -> None:
        """Wait for the other processes of torchrun; end a part that is not the one to add up, the
        first to see all.
        """
        if self.together:
            if last and self.part[0] > 0:
                raise PartDone  # the first process adds up, and tells
            while there() < every:  # where one dies, torchrun ends all
                time.sleep(0.1)
        elif last:
            assert self.folder is not None
            if (done := there()) < every:
                raise PartDone(
                    f"This part is done: {done} of {every} pieces are there. The last adds them up."
                )
            try:
                (self.folder / "adding").mkdir()
            except OSError:
                stopped = (
                    "Another part adds them up; if it was stopped, run the command without --part."
                )
                raise PartDone(stopped) from None

    def _path(self, name: str, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{disk.file_name(name)}-{number}.safetensors"

    def _is_there(self, name: str, number: int) -> bool:
        return self.folder is not None and self._path(name, number).exists()

    def once(self, name: str, make: Callable[[], Any], number: int = 0) -> Any:
        """A piece: read where it is there, made and written where it is not.

        Parameters
        ----------
        name : of what it is a piece of.
        make : gives it: plain values and tensors in dicts and lists (no tuples).
        number : of the piece, where there are several.
        """
        if self._is_there(name, number):
            try:
                stored, manifest = disk.read_tensors(self._path(name, number), "piece")
                tensors = {
                    name: x if name.startswith("cpu") else x.to(self.device)
                    for name, x in stored.items()
                }
                back = lambda value: tensors[value[_TENSOR]] if value.keys() == {_TENSOR} else value  # noqa: E731
                return json.loads(manifest["value"], object_hook=back)
            except BadInput as error:
                log.warning("%s This piece is made again.", error)
        value = make()
        apart = dict[str, Tensor]()

        def put_apart(tensor: Tensor) -> dict[str, str]:
            apart[f"{tensor.device.type} {len(apart)}"] = tensor.detach().cpu().clone()
            return {_TENSOR: next(reversed(apart))}

        if self.folder is not None:
            plain = json.dumps(value, default=put_apart)
            disk.write_tensors(self._path(name, number), "piece", apart, {"value": plain})
        return value


# ---------------------------------------------------------------- batches and memory


def stream(
    batches: list[list[int]], run: Callable[[list[int]], T], progress: bool | None = None
) -> Iterator[T]:
    """Run batches in order; one that does not fit into memory is halved, and so are those after it.

    Parameters
    ----------
    batches : numbers of the examples of each.
    run : runs one batch.
    progress : whether to say how far it is; if not given, on a terminal, and once a minute in a
        log.
    """
    with counting(sum(map(len, batches)), shown=progress) as advance:
        yield from _fitting(batches, run, advance)


def _fitting(
    batches: list[list[int]], run: Callable[[list[int]], T], advance: Callable[[int], None]
) -> Iterator[T]:
    """Run each batch in as many parts as memory takes: asked anew for each piece, so that none
    depends on another.
    """
    most: int | None = None  # examples that fit at once, as far as was seen
    for batch in batches:
        while batch:
            some = batch[:most]
            try:
                value = run(some)
            except (MemoryError, RuntimeError) as error:
                memory = isinstance(
                    error, torch.OutOfMemoryError | MemoryError
                ) or "allocate memory" in str(error)
                if len(some) < 2 or not memory:
                    raise
                most = len(some) // 2
                log.warning("out of memory: going on with batches of %d", most)
                torch.cuda.empty_cache()
                continue
            batch = batch[len(some) :]
            advance(len(some))
            yield value


# ---------------------------------------------------------------- several processes


def parse_part(part: str | tuple[int, int]) -> tuple[int, int]:
    """A part ``i/n``, counted from 0 or from 1: part n of n is part 0, so that both ways of
    counting cover all of them.

    >>> parse_part("0/4"), parse_part((3, 4)), parse_part("4/4")
    ((0, 4), (3, 4), (0, 4))
    """
    text = part if isinstance(part, str) else "/".join(map(str, part))
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    i, n = map(int, numbers.groups()) if numbers else (1, 0)
    if i > n or n < 1:
        raise BadInput(f"a part is i/n, as 0/4 to 3/4 or 1/4 to 4/4, but got {text}.")
    return i % n, n


def torchrun_process() -> tuple[int, int] | None:
    """Which process of how many this is, where torchrun started it: others number their processes
    too.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def torchrun_device(device: str | None) -> str | None:
    """The device of this process: under torchrun each takes a GPU of its own, unless another device
    was named.
    """
    if torchrun_process() is None or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


# ---------------------------------------------------------------- the frame of a verb

_WORK: ContextVar[Work] = ContextVar("work")


def current_work() -> Work:
    """The running verb's pieces; without a folder, nothing is kept."""
    return _WORK.get(Work())


def verb(kind: str, *, beside: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a public verb: time, folder, pieces and page; its arguments are checked against
    their annotations.

    Parameters
    ----------
    kind : of its folders, as their ``experiment`` begins.
    beside : the name of an argument whose own folder (``kept_in``) may be ``out``: then its page is
        drawn anew and tells both results.
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
            home = other is not None and out is not None and other.kept_in == Path(out)
            if out is not None:
                disk.check_folder(out, None if home else kind)
            work = Work(out, given.get("part"))
            token = _WORK.set(work)
            try:
                with disk.kept_if_stopped(Path(out or ""), lambda: work.begun):
                    if work.part[0] > 0 and "part" not in signature.parameters:
                        raise PartDone  # of torchrun, and there is nothing to share
                    result = replace(function(*args, **kwargs), seconds=time.perf_counter() - start)
            except PartDone as done:
                return typing.cast(R, Result(kind, {}, answer=str(done)))
            finally:
                _WORK.reset(token)
            if out is not None and not (work.together and work.part[0]):
                page = import_module(
                    "qkscope.show.page"
                )  # a room below this one, so it is found by name
                if home:
                    disk.add_to_run(Path(out), {disk.PAGE: page.report_html([result, other])})
                else:
                    pieces = {} if work.folder is None else {"work": work.folder.name}
                    result = replace(result, provenance={**result.provenance, **pieces})
                    result.write(out, files={disk.PAGE: page.report_html([result])})
                work.finish()
            return result

        return run

    return decorate
