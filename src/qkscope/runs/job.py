"""A long run: what is asked, the folder that keeps what is done of it, and one writer; said again, it goes on.

What is done is kept in pieces, each one safetensors file, written whole or not at all. They stand in ``OUT/.work/JOB``
until the whole is written, JOB being a fingerprint of all that decides the numbers: the model's weights, the tokenizer,
the examples, every option, the versions. So pieces of another job are never taken for ours; they stay where they are
until that job is finished or someone deletes them. A run whose sums are part of its result also writes ``job.json``,
which says what was asked: its folder takes that one job and refuses others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkscope.errors import BadInput, Terminated
from qkscope.runs import folder as disk
from qkscope.runs.folder import Kinds
from qkscope.runs.provenance import provenance
from qkscope.runs.shards import Part, stream
from qkscope.runs.store import read_tensors, write_tensors

log = logging.getLogger(__name__)

T = TypeVar("T")

_EVERY = 30.0  # seconds between two saves: what a kill can lose, and little beside what saving takes
_TENSOR = "tensor"


class Job:
    """Where a run keeps what is done; without a folder nothing is written, and every piece is made anew.

    Parameters
    ----------
    out : the run's folder.
    """

    def __init__(self, out: str | Path | None = None) -> None:
        self.out = None if out is None else Path(out)
        self.folder: Path | None = None
        self.name = ""

    # ------------------------------------------------------------------ which job it is, and whose folder

    def begin(self, scope: Any, examples: Any, **asked: Any) -> Job:
        """Say which job the pieces in ``.work`` are of; those of other jobs are left alone, and said to be there."""
        if self.out is None:
            return self
        said = {
            "weights": scope.weights_hash, "tokenizer": scope.tokenizer_hash, "dtype": str(scope.model.dtype),
            "device": torch.device(scope.device).type, "model": scope.name, "examples": _hash(repr(examples)), **asked,
        }  # fmt: skip
        return self.open(said)

    def open(self, asked: Mapping[str, Any]) -> Job:
        """As `begin`, of a job that these facts tell from others, and the versions."""
        assert self.out is not None
        said = {**asked, "versions": provenance()["versions"]}
        text, work = json.dumps(said, sort_keys=True, default=str), self.out / disk.WORK
        self.name = _hash(text)
        self.folder = work / self.name
        link = next((path for path in (work, *work.rglob("*")) if path.is_symlink()), None)
        if link is not None:
            raise BadInput(f"{link} is a link, and leads elsewhere: delete it, or name a new folder.")
        with disk.writing(self.folder):
            others = [file.parent.name for file in work.glob(f"*/{disk.JOB}") if file.parent != self.folder]
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / disk.JOB).exists():
                disk.write_file(self.folder / disk.JOB, text)
            elif self._pieces():
                log.info("Going on from what is done in %s.", self.folder)
        if others and asked.get("verb") != "downstream":  # which stands beside its swap's
            log.warning(
                "%s also keeps the unfinished work of another job (%s): say that command again to finish it, or delete "
                "it.",
                work,
                ", ".join(sorted(others)),
            )
        return self

    def check(
        self, asked: Mapping[str, Any], kind: str, called: str, fields: Mapping[str, Kinds] | None = None
    ) -> None:
        """Refuse a folder of another job, or with anything of anyone's; ask before long work.

        Parameters
        ----------
        asked : the job as far as it is known.
        kind, called : as in `qkscope.runs.folder.check_folder`.
        fields : of what kind parts of ``job.json`` are.
        """
        assert self.out is not None
        if (self.out / disk.JOB).exists():
            whole = {"shard": None}  # what a job that has none does not say
            there, here = {**whole, **disk.read_json(self.out / disk.JOB, fields)}, {**whole, **asked}
            differs = [name for name in here if name not in there or there[name] != here[name]]
            if differs:
                raise BadInput(f"{self.out} holds another job ({', '.join(differs)} differ): name another folder.")
        disk.check_folder(self.out, kind, called=called)
        if (self.out / disk.RESULTS).exists() and not (self.out / disk.JOB).exists():
            raise BadInput(f"{self.out} has lost its {disk.JOB}, which says what it is of: name another folder.")

    @contextmanager
    def hold(self) -> Iterator[Job]:
        """Be the folder's one writer, and say where the pieces are when the run is stopped."""
        if self.out is None:
            yield self
            return
        with disk.kept_if_stopped(self.out, self._pieces), disk.only_writer(self.out):
            try:
                yield self
            except BadInput:
                if not self._pieces():
                    self.clear()
                raise

    def clear(self) -> None:
        """The whole is written: pieces that only serve to go on have done their work."""
        if self.out is None or self.folder is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if (self.out / disk.WORK).is_dir() and not any((self.out / disk.WORK).iterdir()):
            (self.out / disk.WORK).rmdir()

    # ------------------------------------------------------------------ what is done, kept and taken up

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, or gave in an earlier run: plain values and tensors in dicts and lists (no tuples)."""
        if self.folder is None:
            return make()
        found = self._read(name)
        if found is None:
            found = {"value": make()}
            self._write(name, found)
        return found["value"]

    def stream(
        self,
        name: str,
        batches: list[list[int]],
        run: Callable[[list[int]], T],
        progress: bool | None = None,
        sums: Mapping[str, Tensor] | None = None,
        add: Callable[[Part[T]], Any] = lambda part: part.value,
    ) -> list[Any]:
        """What ``add`` makes of each part of a batch, in order, saved now and then, and read back where it was done.

        ``sums`` are tensors that ``run`` or ``add`` add to in place; they are saved together with the batches they
        hold. Being asked to stop waits for the end of a batch, so that sums are never half added, and saves first.
        """
        if self.folder is None:
            return [add(part) for part in stream(batches, run, progress)]
        pieces = _Pieces(self, name, sums or {})
        done, saved = pieces.take_up(), time.monotonic()
        with _patient_interrupt() as interrupted:
            for part in stream(batches, run, progress, done):
                pieces.fresh.append(add(part))
                count = part.number + 1
                if part.last and (interrupted() or time.monotonic() - saved >= _EVERY or count == len(batches)):
                    pieces.save(count)
                    saved = time.monotonic()
                if part.last and interrupted():
                    raise KeyboardInterrupt
        return pieces.kept

    # ------------------------------------------------------------------ files

    def _pieces(self) -> bool:
        return self.folder is not None and any(self.folder.glob("**/*.safetensors"))

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{disk.file_name(name)}.safetensors"

    def _write(self, name: str, value: Any) -> None:
        assert self.folder is not None
        assert self.out is not None
        if not self.folder.is_dir():
            raise disk.removed(self.out)
        tensors: dict[str, Tensor] = {}
        plain = _apart(value, tensors)
        write_tensors(self._path(name), "piece", tensors, {"value": plain})

    def _read(self, name: str) -> Any:
        """A piece of this job; None where there is none that can be read."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            tensors, manifest = read_tensors(path, "piece")
            return _together(manifest["value"], tensors)
        except (BadInput, KeyError) as error:
            log.warning("%s So this piece is made again.", error)
            return None


class _Pieces:
    """What batches gave, in chunks of what came between two saves, and the sums that they added to."""

    def __init__(self, job: Job, name: str, sums: Mapping[str, Tensor]) -> None:
        self.job, self.name, self.sums = job, name, sums
        self.kept: list[Any] = []
        self.fresh: list[Any] = []
        self.chunks: list[int] = []

    def save(self, batches: int) -> None:
        """The fresh batches first, then the sums with how far they reach: a kill in between loses the fresh ones."""
        self.job._write(f"{self.name}.{batches}", {"value": self.fresh})
        self.chunks.append(batches)
        self.job._write(self.name, {"batches": batches, "chunks": self.chunks, "sums": dict(self.sums)})
        self.kept += self.fresh
        self.fresh = []

    def take_up(self) -> int:
        found = self.job._read(self.name)
        if found is None:
            return 0
        chunks = [self.job._read(f"{self.name}.{number}") for number in found["chunks"]]
        if None in chunks:
            log.warning("A part of %s is missing in %s: it is made again.", self.name, self.job.folder)
            return 0
        self.kept, self.chunks = [value for chunk in chunks for value in chunk["value"]], list(found["chunks"])
        for name, tensor in self.sums.items():
            tensor.copy_(found["sums"][name])
        return int(found["batches"])


@contextmanager
def _patient_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether to stop, asked between batches. Asked twice, it stops now.

    Ctrl-C asks for it, and so does a scheduler (SIGTERM), which ends in `Terminated`.
    """
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    except KeyboardInterrupt:
        if signal.SIGTERM in asked:
            raise Terminated from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value with its tensors taken out and numbered, as JSON can have it."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
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
