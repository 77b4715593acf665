"""Shards of one job put together: their sums are added, as if one process had made them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkscope.analyses.fit import Fit, fit_of
from qkscope.analyses.fit_folder import (
    MADE,
    check_place,
    copy_task,
    finished_sums,
    read_job,
    task_of,
    write_fit,
    write_job,
)
from qkscope.analyses.sums import sums_file
from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.runs.folder import only_writer
from qkscope.runs.shards import SHARDS, Shard, shard_folder


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
