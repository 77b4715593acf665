"""Run several trainers side by side: threads on CPU cores, one recorded graph on a GPU.

Trainers do not talk to each other. On CPUs each one has a thread with one core's arithmetic
(threads inside such small products only wait for each other). On a GPU one training step of all of
them is recorded once as a graph, each trainer on a stream of its own, and replayed: launching its
hundreds of tiny kernels one by one would take longer than running them. Recording needs warm
memory, so the first two steps after a change are taken one by one; they are real steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from qkscope.errors import BadInput
from qkscope.results.folder import kept_if_stopped
from qkscope.results.progress import doing
from qkscope.results.result import Result
from qkscope_papers.registry import Experiment, Figure, Settings, figure
from qkscope_papers.trainer import Outcome, Trainer

C = TypeVar("C")
T = TypeVar("T")

_WARM_UP = 2


def check_trained(folder: Path) -> None:
    """Refuse a folder that holds anything but trained toys, or what a killed run was writing of
    one.
    """
    for path in sorted(folder.rglob("*")):
        if (
            path.is_symlink()
            or path.parent != folder
            or not re.search(r"\.safetensors(\w{8}\.part)?$", path.name)
        ):
            raise BadInput(
                f"{folder} holds other files than trained toys, {path.name}: name a new folder."
            )


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside; as a context or a decorator.

    Of tiny products two threads mostly wait for each other, and on a busy machine that costs
    tenfold.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(measure: Callable[[C], T], heads: Sequence[C]) -> list[T]:
    """What is measured of each head, on all cores: a head is small, so that each gets one."""
    with ThreadPoolExecutor(
        os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return list(pool.map(measure, heads))


def toy_figures(
    paper: str, prepare: Callable[[Sequence[Figure], Settings], None]
) -> Callable[..., Callable[[Callable[..., Result] | Experiment], Experiment]]:
    """Decorator of a paper's figures of toys: those asked for together have theirs trained together
    (``prepare``).
    """

    def toy_figure(name: str, title: str, cells: Any, **asked: Any) -> Callable[..., Experiment]:
        register = figure(paper, name, title, prepare=prepare, cells=cells, **asked)
        return lambda run: register(run if isinstance(run, Experiment) else one_thread()(run))

    return toy_figure


class Progress:
    """How far the trainers are, in one line that ``tell`` shows."""

    def __init__(self, trainers: Sequence[Trainer], tell: Callable[[str], None]) -> None:
        self.trainers = list(trainers)
        self.tell = tell
        self.started = time.monotonic()

    def __call__(self) -> None:
        """Say where things stand."""
        self.tell(self.line())

    def line(self) -> str:
        """How many heads still train, at which steps, since when."""
        running = [trainer for trainer in self.trainers if not trainer.done]
        total = sum(len(trainer.names) for trainer in self.trainers)
        left = sum(trainer.running for trainer in running)
        steps = sorted({trainer.step for trainer in running})
        at = (
            f"step {steps[0]:,}" + (f"-{steps[-1]:,}" if len(steps) > 1 else "")
            if steps
            else "done"
        )
        return (
            f"training: {left} of {total} models running, {at}, "
            f"{time.monotonic() - self.started:.0f} s"
        )


def train_all(trainers: Sequence[Trainer], workers: int | None = None) -> list[Outcome]:
    """Train everything to its end; `workers` CPU threads (as many as cores by default)."""
    saved = [trainer.checkpoint for trainer in trainers if trainer.checkpoint is not None]
    where = saved[0].parent if saved else Path()
    with (
        kept_if_stopped(where, lambda: any(path.exists() for path in saved)),
        doing("training") as tell,
    ):
        progress = Progress(trainers, tell)
        if all(trainer.task.device.type == "cuda" for trainer in trainers):
            _run_graphs(trainers, progress)
        else:
            _run_threads(trainers, progress, workers or _cores())
    return [trainer.result() for trainer in trainers]


def train_missing(
    paths: Mapping[C, Path],
    trainers: Callable[[list[C]], list[Trainer]],
    keep: Callable[[Trainer, Outcome], None],
    workers: int | None,
) -> None:
    """Train the cells whose files are not there; interrupted training goes on where its last
    checkpoint stands.

    Parameters
    ----------
    paths : the file of every cell.
    trainers : makes the trainers of the cells that are missing.
    keep : writes the files of a trainer's cells when it is done.
    """
    if all(path.exists() for path in paths.values()):
        return
    every = trainers([cell for cell, path in paths.items() if not path.exists()])
    for trainer, outcome in zip(every, train_all(every, workers), strict=True):
        keep(trainer, outcome)
        if trainer.checkpoint is not None:
            trainer.checkpoint.unlink(missing_ok=True)


def short_hash(value: Any) -> str:
    """What tells one cell's file from another's: a hash of everything that made it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def _cores() -> int:
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )


def _run_threads(trainers: Sequence[Trainer], progress: Progress, workers: int) -> None:
    before = torch.get_num_threads()
    stop = threading.Event()

    def train(trainer: Trainer) -> None:
        torch.set_num_threads(1)
        trainer.run(progress, stop.is_set)
        if stop.is_set() and not trainer.done and trainer.checkpoint is not None:
            trainer.save()  # at a check, so that it goes on as if it had not stopped

    try:
        with ThreadPoolExecutor(max_workers=min(workers, len(trainers))) as pool:
            jobs = [pool.submit(train, trainer) for trainer in trainers]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                stop.set()
                raise
    finally:
        torch.set_num_threads(before)


def _run_graphs(trainers: Sequence[Trainer], progress: Progress) -> None:
    for trainer in trainers:
        trainer.begin()
    streams = {id(trainer): torch.cuda.Stream() for trainer in trainers}
    graph: torch.cuda.CUDAGraph | None = None
    recorded: list[Trainer] = []
    while live := [trainer for trainer in trainers if not trainer.done]:
        steps = live[0].until_check()
        live = [trainer for trainer in live if trainer.until_check() == steps]
        taken = 0
        if graph is None or recorded != live:
            graph = None
            recorded = live
            taken = min(_WARM_UP, steps)
            for _ in range(taken):
                _step_all(live, streams)
            if taken < steps:
                graph = _record(live, streams)
        for _ in range(steps - taken):
            assert graph is not None
            graph.replay()
        changes = [trainer.check(steps) for trainer in live]
        if any(changes):
            graph = None  # rows have left a stack: its tensors are new ones
        progress()


def _step_all(trainers: Sequence[Trainer], streams: dict[int, torch.cuda.Stream]) -> None:
    """One step of every trainer, each on its own stream, between a fork and a join."""
    here = torch.cuda.current_stream()
    for trainer in trainers:
        stream = streams[id(trainer)]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            trainer.train_step()
    for trainer in trainers:
        here.wait_stream(streams[id(trainer)])


def _record(
    trainers: Sequence[Trainer], streams: dict[int, torch.cuda.Stream]
) -> torch.cuda.CUDAGraph:
    """One step of every trainer as a graph; recording does not run it."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for trainer in trainers:
        graph.register_generator_state(trainer.generator)
    with torch.cuda.graph(graph):
        _step_all(trainers, streams)
    return graph
