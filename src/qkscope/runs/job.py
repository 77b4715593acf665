"""A long run in pieces: what is done is kept beside the results to come, and the same command takes it up.

Pieces live in ``OUT/.work/JOB`` until the whole is written, JOB being a fingerprint of all that decides the numbers:
the model's weights, the tokenizer, the examples, every option, the versions. So pieces of another job are never taken
for ours; they stay where they are until that job is finished or someone deletes them. A piece is one safetensors file,
written whole or not at all, and one that cannot be read is made again.
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
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from qkscope.errors import BadInput, Terminated
from qkscope.runs.folder import WORK, clear_left_over, file_name, only_writer, write_text, writing
from qkscope.runs.provenance import provenance
from qkscope.runs.store import read_tensors, write_tensors
from qkscope.runs.stream import stream

log = logging.getLogger(__name__)

_REST = 100  # times what a save takes, until the next: saving is 1% of a run ...
_LONGEST_REST = 45.0  # ... but never longer than this many seconds, which is what a kill can lose,
_SHORTEST_REST = 10  # nor shorter than this many times a save: where sums are huge, saving would be all the work
_FIRST = 0.01  # seconds that the first save is taken to cost
_TENSOR = "tensor"


class Job:
    """Where a run keeps its pieces; without a folder nothing is written, and every piece is made anew."""

    def __init__(self, out: str | Path | None = None) -> None:
        self.work = None if out is None else Path(out) / WORK
        self.folder: Path | None = None
        self.name = ""

    def begin(self, scope: Any, examples: Any, **asked: Any) -> Job:
        """Say which job the pieces are of; those of other jobs are left alone, and said to be there."""
        if self.work is None:
            return self
        said = {
            "weights": scope.weights_hash, "tokenizer": scope.tokenizer_hash, "dtype": str(scope.model.dtype),
            "device": torch.device(scope.device).type, "model": scope.name, "examples": _hash(repr(examples)), **asked,
            "versions": provenance()["versions"],
        }  # fmt: skip
        text = json.dumps(said, sort_keys=True, default=str)
        self.name = _hash(text)
        self.folder = self.work / self.name
        with writing(self.folder):
            others = [path.name for path in self.work.iterdir() if path != self.folder] if self.work.is_dir() else []
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_left_over(self.folder)
            if not (self.folder / "job.json").exists():
                write_text(self.folder / "job.json", text)
            elif any(self.folder.glob("*.safetensors")):
                log.info("Going on from what is done in %s.", self.folder)
        if others and asked.get("verb") != "downstream":  # which stands beside its swap's
            log.warning("%s also keeps the unfinished work of another job (%s): say that command again to finish it, "
                        "or delete it.", self.work, ", ".join(sorted(others)))  # fmt: skip
        return self

    def sub(self, name: str) -> Path | None:
        """A folder for those who keep their pieces themselves."""
        return None if self.folder is None else self.folder / name

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, or gave in an earlier run: plain values and tensors in dicts and lists (no tuples)."""
        path = self._path(name)
        if path is None:
            return make()
        found = self._read(path)
        if found is None:
            found = {"value": make()}
            self._write(path, found)
        return found["value"]

    def stream(
        self,
        name: str,
        batches: list[list[int]],
        run: Callable[[list[int]], Any],
        progress: bool | None = None,
        sums: Mapping[str, Tensor] | None = None,
    ) -> list[Any]:
        """What ``run`` gives for each batch, in order, saved now and then, and read back where it was done before.

        ``sums`` are tensors that ``run`` adds to in place; they are saved together with the batches they hold.
        """
        if self.folder is None:
            return list(stream(batches, run, progress))
        done, found, chunks = self._taken_up(name, sums)
        fresh: list[Any] = []
        sizes: list[int] = []
        ends = {count: number for number, count in enumerate(accumulate(map(len, batches)), 1)}
        so_far = sum(map(len, batches[:done]))
        saved, cost = time.monotonic(), _FIRST

        def measured(indices: list[int]) -> Any:
            result = run(indices)
            sizes.append(len(indices))
            return result

        with patient_interrupt() as interrupted:
            for result in stream(batches[done:], measured, progress):
                fresh.append(result)
                so_far += sizes.pop()
                number = ends.get(so_far, 0)  # 0: in the middle of a batch that memory cut into parts
                rest = max(min(_REST * cost, _LONGEST_REST), _SHORTEST_REST * cost)
                due = interrupted() or time.monotonic() - saved >= rest or number == len(batches)
                if number and due:
                    start = time.monotonic()
                    self._keep(name, number, chunks, fresh, sums)
                    found += fresh
                    fresh = []
                    saved = time.monotonic()
                    cost = saved - start
                if number and interrupted():
                    raise KeyboardInterrupt
        return found + fresh

    def clear(self) -> None:
        """The whole is written: its pieces have done their work."""
        if self.work is None or self.folder is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.work.is_dir() and not any(self.work.iterdir()):
            self.work.rmdir()

    # ------------------------------------------------------------------ files

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{file_name(name)}.safetensors"

    def _keep(
        self, name: str, number: int, chunks: list[int], fresh: list[Any], sums: Mapping[str, Tensor] | None
    ) -> None:
        """The fresh batches first, then the sums with how far they reach: a kill in between loses the fresh ones."""
        path, chunk = self._path(name), self._path(f"{name}.{number}")
        assert path is not None
        assert chunk is not None
        self._write(chunk, {"value": fresh})
        self._write(path, {"batches": number, "chunks": [*chunks, number], "sums": dict(sums or {})})
        chunks.append(number)

    def _taken_up(self, name: str, sums: Mapping[str, Tensor] | None) -> tuple[int, list[Any], list[int]]:
        path = self._path(name)
        assert path is not None
        found = self._read(path)
        if found is None:
            return 0, [], []
        parts: list[Any] = []
        for number in found["chunks"]:
            chunk = self._path(f"{name}.{number}")
            part = None if chunk is None else self._read(chunk)
            if part is None:
                log.warning("A part of %s is missing in %s: it is made again.", name, self.folder)
                return 0, [], []
            parts += part["value"]
        for own, tensor in (sums or {}).items():
            tensor.copy_(found["sums"][own])
        return int(found["batches"]), parts, list(found["chunks"])

    def _write(self, path: Path, value: Any) -> None:
        tensors: dict[str, Tensor] = {}
        plain = _apart(value, tensors)
        write_tensors(path, "piece", tensors, {"job": self.name, "value": plain})

    def _read(self, path: Path) -> Any:
        """A piece of this job; None where there is none that can be read."""
        if not path.exists():
            return None
        try:
            tensors, manifest = read_tensors(path, "piece")
            if manifest.get("job") != self.name:
                raise BadInput(f"{path} is of another job.")
            return _together(manifest["value"], tensors)
        except (BadInput, KeyError) as error:
            log.warning("%s So this piece is made again.", error)
            return None


@contextmanager
def patient_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether to stop, asked between batches: sums are never half added. Asked twice, it stops now.

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


@contextmanager
def keeping(out: Path) -> Iterator[Job]:
    """Hold a run folder while a long run writes to it, and say where its pieces are when it is stopped."""
    job = Job(out)
    try:
        with only_writer(out):
            yield job
    except KeyboardInterrupt:
        if job.folder is not None and any(job.folder.glob("*.safetensors")):
            log.info("What is done is kept in %s: say the same again, and it goes on from there.", job.folder)
        raise
    except BadInput:
        if job.folder is not None and not any(job.folder.glob("*.safetensors")):
            job.clear()
        raise


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
        return (
            tensors[value[_TENSOR]] if set(value) == {_TENSOR} else {k: _together(v, tensors) for k, v in value.items()}
        )
    return [_together(item, tensors) for item in value] if isinstance(value, list) else value
