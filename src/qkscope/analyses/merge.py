"""Shards of one job put together: their sums are added, as if one process had made them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkscope.analyses.contrast_sums import sums_file
from qkscope.analyses.fit import Fit, fit_of
from qkscope.analyses.fit_folder import FitJob, read_job, read_sums, task_file, task_of
from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.maths.subspace import Rank
from qkscope.maths.sums import Center
from qkscope.runs.provenance import MADE
from qkscope.runs.shards import SHARDS, Shard, shard_folder


@checked_call
def merge(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    rank: Rank | Mapping[str, Rank] = "energy",
    center: Mapping[str, Center] | None = None,
    show: Callable[[Fit], object] | None = None,
) -> Fit:
    """Add up the shards of one job into a folder that is as if one process had made it.

    Parameters
    ----------
    folders : those that `decompose` wrote with a ``shard``, all of one job, in any order.
    out : the folder of the whole.
    rank, center, show : as in `decompose`.
    """
    if not folders:
        raise BadInput("no shard was named: name the folders that decompose wrote, one for each shard.")
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
        differs = [name for name in sorted({*job, *other} - {"shard", *MADE}) if job.get(name) != other.get(name)]
        if other["shard"][1] != job["shard"][1]:
            raise BadInput(
                f"{first} is of a split into {job['shard'][1]}, {folder} of one into {other['shard'][1]}: merge the "
                "shards of one split."
            )
        if differs:
            raise BadInput(f"{first} and {folder} are not shards of one job ({', '.join(differs)} differ).")
    missing = [index for index in range(job["shard"][1]) if index not in parts]
    if missing:
        raise BadInput(f"shard {missing[0]}/{job['shard'][1]} is missing: run it, and name its folder too.")
    ordered = [parts[index][0] for index in sorted(parts)]
    whole = FitJob(out, {name: value for name, value in job.items() if name not in ("shard", "schema", *MADE)})
    task = task_of(job, first)
    read = [read_sums(folder, job, task, (i, len(ordered))) for i, folder in enumerate(ordered)]
    sums = {name: one.merge(*(other[name] for other in read[1:])) for name, one in read[0].items()}
    about = {**next(iter(sums.values())).moments.about}
    made_from = {name: value for name, value in about.items() if name not in ("n", "batch_size", "examples")}
    fit = fit_of(sums, task, made_from, rank=rank, center=center)
    with whole.hold():
        whole.start(about, task_file(job, first))
        for name, one in sums.items():
            one.save(sums_file(out, name))
        if show is not None:
            show(fit)
        whole.finish(fit)
    return fit


def merge_together(out: str | Path, shard: Shard, **options: Any) -> Fit | None:
    """The first process merges what all have left in the folder of the run; the others have nothing more to do."""
    if shard[0] != 0:
        return None
    fit = merge([shard_folder(out, (index, shard[1])) for index in range(shard[1])], out, **options)
    for part in (Path(out) / SHARDS).glob("*-of-*"):  # of another split too; what is in them is ours, as was asked
        shutil.rmtree(part, ignore_errors=True)
    with suppress(OSError):
        (Path(out) / SHARDS).rmdir()
    return fit
