"""One job in many processes: each takes its shard of the batches into a folder of its own, and the sums are added.

``--shard i/n`` is for schedulers, `merge` puts the folders together; under ``torchrun`` a process is a shard, and the
first one merges when all are done. Batches are whole and sums are float64, so the numbers are those of one process to
rounding, however many there were.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from qkscope.analyses.decompose import Fit, fit_of
from qkscope.analyses.fit_folder import (
    MADE,
    SHARDS,
    check_place,
    copy_task,
    finished_sums,
    read_job,
    task_of,
    write_fit,
    write_job,
)
from qkscope.analyses.sums import Shard, sums_file
from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.runs.folder import only_writer

log = logging.getLogger(__name__)

_LONGEST_WAIT = timedelta(days=7)  # for the slowest process; torch's own limit is half an hour
_MEETING = timedelta(minutes=5)  # until all processes have started


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


@checked_call
def merge(
    folders: Sequence[str | Path], out: str | Path, show: Callable[[Fit], object] = lambda fit: None
) -> Fit:  # fmt: skip
    """Add up the shards of one job into a folder that is as if one process had made it.

    Parameters
    ----------
    folders : those that ``decompose --shard`` wrote, all of one job, in any order.
    out : the folder of the whole.
    show : told the fit before it is written.
    """
    if not folders:
        raise BadInput("no shard was named: name the folders that decompose --shard wrote.")
    parts: dict[int, tuple[Path, dict[str, Any]]] = {}
    for folder in map(Path, folders):
        job = read_job(folder)
        if not job.get("shard"):
            raise BadInput(f"{folder} is no shard but a whole fit: there is nothing to merge.")
        index, count = job["shard"]
        if index in parts:
            raise BadInput(f"{parts[index][0]} and {folder} are the same shard {index}/{count}: name each once.")
        parts[index] = folder, job
    (first, job), *rest = parts.values()
    for folder, other in rest:
        named = sorted({*job, *other} - {"shard", *MADE})
        differs = [name for name in named if job.get(name) != other.get(name)]
        if other["shard"][1] != job["shard"][1]:
            raise BadInput(f"{first} is of a split into {job['shard'][1]}, {folder} of one into {other['shard'][1]}: "
                           "merge the shards of one split.")  # fmt: skip
        if differs:
            raise BadInput(f"{first} and {folder} are not shards of one job ({', '.join(differs)} differ).")
    missing = [index for index in range(job["shard"][1]) if index not in parts]
    if missing:
        raise BadInput(f"shard {missing[0]}/{job['shard'][1]} is missing: run it, and name its folder too.")
    ordered = [parts[index][0] for index in sorted(parts)]
    return _merged(ordered, job, Path(out), show)


def _merged(folders: Sequence[Path], job: dict[str, Any], out: Path, show: Callable[[Fit], object]) -> Fit:
    whole = {name: value for name, value in job.items() if name not in ("shard", "schema", *MADE)}
    check_place(out, whole)
    task = task_of(job, folders[0])
    read = [finished_sums(folder, job, task, (i, len(folders))) for i, folder in enumerate(folders)]
    sums, batches = {}, {}
    for name in read[0]:
        one, *others = (part[name][0] for part in read)
        sums[name], batches[name] = one.merge(*others), sum(part[name][1] for part in read)
    about = dict(next(iter(sums.values())).moments.about)
    fit = fit_of(sums, task, {name: about[name] for name in about if name not in ("n", "batch_size", "examples")})
    with only_writer(out):
        check_place(out, whole)
        write_job(out, whole)
        copy_task(task, whole, folders[0], out)
        for name, one in sums.items():
            one.save(sums_file(out, name), batches[name], batches[name])
        show(fit)
        write_fit(out, fit, whole)
    return fit


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
    return Path(out) / SHARDS / f"{shard[0]}-of-{shard[1]}"


@contextmanager
def together(shard: Shard | None, device: str | None) -> Iterator[str | None]:
    """Join the other processes of torchrun, and wait for them at the end; gives the device of this one's own."""
    if shard is None:
        yield device
        return
    import torch
    from torch import distributed

    gpu = torch.cuda.is_available() and device in (None, "cuda")
    if gpu:
        local = os.environ.get("LOCAL_RANK", "")
        device = f"cuda:{(int(local) if local.isdecimal() else shard[0]) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    try:
        store, rank, world = next(distributed.rendezvous("env://", timeout=_MEETING))
    except (RuntimeError, ValueError) as error:  # nobody is there, or they are too few
        raise BadInput(f"the {shard[1]} processes of torchrun did not meet within {_MEETING.seconds // 60} minutes "
                       f"({str(error).splitlines()[0]}): start them all again.") from None  # fmt: skip
    store.set_timeout(_LONGEST_WAIT)
    distributed.init_process_group(
        "nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=_LONGEST_WAIT
    )
    try:
        yield device
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all is saved, and nothing else could end the wait
        try:
            distributed.barrier()
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    finally:
        distributed.destroy_process_group()


def merge_together(out: str | Path, shard: Shard, show: Callable[[Fit], object] = lambda fit: None) -> Fit | None:
    """The first process merges what all have left in the folder of the run; the others have nothing more to do."""
    if shard[0] != 0:
        return None
    parts = [shard_folder(out, (index, shard[1])) for index in range(shard[1])]
    fit = merge(parts, out, show)
    for part in (Path(out) / SHARDS).glob("*-of-*"):  # of another split too; what is in them is ours, as was asked
        shutil.rmtree(part, ignore_errors=True)
    with suppress(OSError):
        (Path(out) / SHARDS).rmdir()
    return fit
