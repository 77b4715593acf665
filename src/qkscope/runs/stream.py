"""A job is a fixed list of batches, run one after the other; memory that runs out makes them smaller, not fail."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


class Part(NamedTuple, Generic[T]):
    """What a batch gave, or one part of a batch that did not fit into memory: its number, whether it is the last."""

    number: int
    last: bool
    value: T


def stream(
    batches: list[list[int]], run: Callable[[list[int]], T], progress: bool | None = None, first: int = 0
) -> Iterator[Part[T]]:
    """Run the batches in order; one that does not fit into memory is halved, and so are those after it.

    Parameters
    ----------
    batches : list of list of int
        Indices of the examples of each batch.
    run : callable
        Runs one batch.
    progress : bool, optional
        Whether to show a bar; if not given, where stderr is a terminal.
    first : int
        The batch to begin with; those before it are done.
    """
    size = max(map(len, batches[first:]), default=1)
    shown = sys.stderr.isatty() if progress is None else progress
    with _bar(sum(map(len, batches[first:])), shown) as advance:
        for number, batch in enumerate(batches[first:], first):
            todo = [batch[start : start + size] for start in range(0, len(batch), size)]
            while todo:
                try:
                    result = run(todo[0])
                except (MemoryError, RuntimeError) as error:
                    if len(todo[0]) < 2 or not out_of_memory(error):
                        raise
                    size = len(todo[0]) // 2
                    log.warning("out of memory: going on with batches of %d", size)
                    left = [i for part in todo for i in part]
                    todo = [left[start : start + size] for start in range(0, len(left), size)]
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()
                    continue
                advance(len(todo.pop(0)))
                yield Part(number, not todo, result)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory is what an error is about, on whatever device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("examples"), BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, rate="")

        def advance(count: int) -> None:
            progress.advance(task, count)
            speed_now = progress.tasks[0].speed
            progress.update(task, rate=f"{speed_now:.1f}/s" if speed_now else "")

        yield advance
