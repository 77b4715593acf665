"""A job is a fixed list of batches: run one after the other (`stream`), or shared among processes.

Memory that runs out makes batches smaller, it does not fail. A process takes its shard of the batches into a folder of
its own, and the sums are added: a scheduler starts each shard ``i/n`` by itself and `merge` puts the folders together;
under ``torchrun`` a process is a shard, and the first one merges when all are done. Batches are whole and sums are
float64, so the numbers are those of one process to rounding, however many there were.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from qkscope.errors import BadInput
from qkscope.runs.folder import WORK
from qkscope.runs.progress import counting

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
        Whether to say how far it is; if not given, on a terminal, and once a minute in a log.
    first : int
        The batch to begin with; those before it are done.
    """
    size = max(map(len, batches[first:]), default=1)
    with counting(sum(map(len, batches[first:])), shown=progress) as advance:
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


Shard = tuple[int, int]
SHARDS = "shards"
"""Folder in our work in which processes that share a job keep their sums until they are merged."""
MOST_SHARDS = 10**6


def parse_shard(text: str) -> Shard:
    """``i/n``, counted from 0 or from 1: shard n of n is shard 0, so that both ways of counting cover all of them.

    >>> parse_shard("0/4"), parse_shard("3/4"), parse_shard("4/4")
    ((0, 4), (3, 4), (0, 4))
    """
    found = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    i, n = (int(found[1]), int(found[2])) if found else (0, 0)
    if n < 1 or i > n:
        raise BadInput(f"a shard is i/n, as 0/4 to 3/4 or 1/4 to 4/4, but got {text!r}.")
    return i % n, n


def is_shard(value: Any) -> bool:
    """Whether a file's word for its shard is one: ``[i, n]`` with 0 <= i < n."""
    if not isinstance(value, list) or [type(part) for part in value] != [int, int]:
        return False
    return 0 <= value[0] < value[1] <= MOST_SHARDS


def check_split(shards: Sequence[tuple[str | Path, Shard]]) -> None:
    """Refuse folders that are not the shards of one split, each once."""
    first, (_, count) = shards[0]
    seen: dict[int, str | Path] = {}
    for folder, (index, of) in shards:
        if of != count:
            raise BadInput(
                f"{first} is of a split into {count}, {folder} of one into {of}: merge the shards of one split."
            )
        if index in seen:
            raise BadInput(f"{seen[index]} and {folder} are the same shard {index}/{count}: name each once.")
        seen[index] = folder
    missing = [index for index in range(count) if index not in seen]
    if missing:
        raise BadInput(f"shard {missing[0]}/{count} is missing: run it, and name its folder too.")


def torchrun_shard() -> Shard | None:
    """Which process of how many this is, where torchrun started it; it also says where the processes meet."""
    rank, world, port = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    numbered = rank.isdecimal() and world.isdecimal() and port.isdecimal() and "MASTER_ADDR" in os.environ
    if not numbered or not int(rank) < int(world) > 1:
        return None
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # left over from something else: nobody would come to meet us
        log.warning(
            "RANK and WORLD_SIZE are set, but torchrun did not start this process: it does the whole job alone."
        )
        return None
    return int(rank), int(world)


def shard_folder(out: str | Path, shard: Shard) -> Path:
    """Where a process under torchrun keeps its share until it is merged."""
    return Path(out) / WORK / SHARDS / f"{shard[0]}-of-{shard[1]}"


def torchrun_device(device: str | None) -> str | None:
    """The device of this process: under torchrun each takes a GPU of its own, unless another device was named."""
    shard = torchrun_shard()
    if shard is None or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    local = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{(int(local) if local.isdecimal() else shard[0]) % torch.cuda.device_count()}"
