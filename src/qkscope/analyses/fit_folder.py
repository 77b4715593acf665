"""A fit as a folder: the sums of each contrast, and the job that made them, so that later verbs need no second pass.

``job.json`` is written before the model runs and says what was asked; a folder of another job is refused, and one whose
job died is taken up. Subspaces are recomputed from the sums: they are cheap, and then they cannot disagree.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkscope import tasks
from qkscope.analyses.about import check_same_model, made_from
from qkscope.analyses.decompose import check_replicates, checked_contrasts, collect
from qkscope.analyses.fit import Fit, fit_of
from qkscope.analyses.prompts import batches_of, units_hash
from qkscope.analyses.sums import Sums, sums_file
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space, check_space
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.runs.folder import (
    JOB,
    LOCK,
    PAGE,
    RESULTS,
    SCHEMA,
    as_json,
    check_folder,
    clear_left_over,
    kept_if_stopped,
    only_writer,
    read_json,
    write_run,
    write_text,
    writing,
)
from qkscope.runs.provenance import provenance
from qkscope.runs.result import plain_value
from qkscope.runs.shards import SHARDS, Shard, is_shard
from qkscope.tasks.task import Task

MADE = ("command", "versions", "threads")
"""What a job's file says besides the job: two shards may differ in it."""
_FIELDS: dict[str, tuple[type, ...]] = {
    "weights": (str,), "tokenizer": (str, type(None)), "model": (str,), "task": (str,), "asked": (dict,),
    "task_seed": (int,), "heads": (list,), "n": (int,), "contrasts": (list,), "space": (str,), "batch_size": (int,),
    "seed": (int,),
}  # fmt: skip


def plan_decompose(
    task: Task,
    heads: Sequence[Head],
    n: int,
    out: str | Path,
    *,
    contrasts: Sequence[str] | None = None,
    space: Space = "post_rope",
    batch_size: int = 32,
    replicates: int = 199,
    seed: int = 0,
    shard: Shard | None = None,
) -> dict[str, Any]:
    """The job as far as it is known without the model, checked: its examples, its options and its folder."""
    names = checked_contrasts(task, contrasts)
    if batch_size < 1:
        raise BadInput(f"batch_size is at least 1, but got {batch_size}.")
    check_replicates(replicates)
    for name in names:
        units = task.fit(name, n)
        if shard is not None and len(batches_of(units, batch_size)) < shard[1]:
            raise BadInput(f"{len(units)} examples of {name} in batches of {batch_size} cannot be shared among "
                           f"{shard[1]}: take fewer shards or smaller batches.")  # fmt: skip
    check_space(space)
    plan = {
        "task": task.name, "asked": json.loads(json.dumps(dict(task.asked))), "task_seed": task.seed,
        "heads": [str(head) for head in heads], "n": n, "contrasts": names, "space": space,
        "batch_size": batch_size, "replicates": replicates, "seed": seed,
        **({} if shard is None else {"shard": list(shard)}),
    }  # fmt: skip
    check_place(Path(out), plan)
    return plan


def check_place(folder: Path, job: dict[str, Any]) -> None:
    """A folder takes one job: the same one again, or nothing of anyone's yet."""
    if folder.is_file():
        raise BadInput(f"{folder} is a file and holds other things than a fit: name a new folder.")
    if (folder / JOB).exists():
        found = read_job(folder)
        differs = [name for name in dict.fromkeys((*job, "shard")) if found.get(name) != job.get(name)]
        if differs:
            raise BadInput(f"{folder} holds another job ({', '.join(differs)} differ): name another folder.")
    check_folder(folder, "decompose", state=_state(folder, job), called="other things than a fit")


def _state(folder: Path, job: dict[str, Any]) -> str:
    """What a fit keeps besides what it lists: job, sums, the copy of its task (once there is a job), and shares."""
    own = [JOB, *(sums_file(folder, name).name for name in job["contrasts"])]
    copy = [Path(job["asked"]["file"]).name] if isinstance(job["asked"].get("file"), str) else []
    names, shares = (
        "|".join(map(re.escape, given))
        for given in ([*own, *(copy if (folder / JOB).exists() else [])], [*own, *copy, LOCK])
    )
    return rf"{names}|{SHARDS}/\d+-of-\d+/({shares})"


def run_decompose(
    scope: Scope,
    task: Task,
    heads: Sequence[Head],
    n: int,
    out: str | Path,
    *,
    shard: Shard | None = None,
    show: Callable[[Fit], object] = lambda fit: None,
    **options: Any,
) -> Fit | None:
    """Decompose into a folder, going on where an earlier run of the same job stopped; a shard leaves its sums alone.

    Parameters
    ----------
    show : told the fit before it is written, as the disk may be full.
    options : those of `plan_decompose`.
    """
    start, folder = time.perf_counter(), Path(out)
    heads = [scope.check(head) for head in heads]
    plan = plan_decompose(task, heads, n, out, shard=shard, **options)
    job = {
        "model": scope.name, "weights": scope.weights_hash, "dtype": str(scope.model.dtype),
        "tokenizer": scope.tokenizer_hash, **plan,
    }  # fmt: skip
    with only_writer(folder):
        check_place(folder, job)
        with writing(folder):
            clear_left_over(folder)
        write_job(folder, job)
        copy_task(task, job, Path(), folder)
        same = {name: plan[name] for name in ("contrasts", "space", "batch_size", "replicates", "seed")}
        with kept_if_stopped(folder, lambda: any(sums_file(folder, name).exists() for name in plan["contrasts"])):
            sums = collect(scope, task, heads, n, **same, out=folder, shard=shard or (0, 1))
        if shard is not None:
            return None
        fit = fit_of(sums, task, made_from(scope, task, plan["space"]))
        fit = replace(fit, seconds=time.perf_counter() - start)
        show(fit)
        write_fit(folder, fit, job)
    return fit


def write_job(folder: Path, job: dict[str, Any]) -> None:
    """Say what a folder is made from, before it is made."""
    if not (folder / JOB).exists():
        made = {"schema": SCHEMA, **{name: value for name, value in provenance().items() if name in MADE}, **job}
        write_text(folder / JOB, json.dumps(made, indent=1, ensure_ascii=False))


def copy_task(task: Task, job: dict[str, Any], source: Path, folder: Path) -> None:
    """Keep the file of a task that is one; it stands in ``source``, or where it was named."""
    if task.name not in tasks.BUILT_IN:
        name = Path(job["asked"]["file"])
        own, copy = source / (name.name if source.name else name), folder / name.name
        with writing(copy):
            if not (copy.exists() and own.samefile(copy)):
                shutil.copyfile(own, copy)


def write_fit(folder: Path, fit: Fit, job: dict[str, Any]) -> None:
    """The finished numbers beside the sums they come from; their page is written by itself."""
    contents = {RESULTS: as_json(fit.to_json())}
    write_run(folder, fit.experiment, contents, plain_value(fit.provenance), state=_state(folder, job), later=[PAGE])


def is_finished(folder: str | Path, job: dict[str, Any]) -> bool:
    """Whether a folder, of this job, holds its results and all of its sums."""
    folder = Path(folder)
    return (folder / RESULTS).is_file() and all(sums_file(folder, name).is_file() for name in job["contrasts"])


def read_job(folder: str | Path) -> dict[str, Any]:
    """What a fit folder was made from."""
    path = Path(folder) / JOB
    if not path.is_file():
        raise BadInput(f"{folder} is not a folder that decompose wrote: run qkscope decompose … --out {folder} first.")
    job = read_json(path, _FIELDS)
    named = all(isinstance(name, str) for name in [*job["heads"], *job["contrasts"]])
    if not named or not job["heads"] or not (job.get("shard") is None or is_shard(job["shard"])):
        raise BadInput(f"{path} is damaged: run decompose again into another folder.")
    return job


def load_fit(folder: str | Path, scope: Scope) -> tuple[Fit, Task]:
    """The fit of a finished folder, and its task; refused for other weights or another tokenizer."""
    job = read_job(folder)
    check_same_model(job, scope, str(folder))
    if job.get("shard"):
        raise BadInput(f"{folder} is one shard of {job['shard'][1]}: run qkscope merge on all of them first.")
    if not (Path(folder) / "results.json").exists():
        raise BadInput(f"{folder} is not finished: run the same decompose command again, it goes on where it stopped.")
    task = task_of(job, folder)
    read = finished_sums(Path(folder), job, task, device=scope.device)
    for name, (one, _) in read.items():
        if one.moments.about.get("examples") != units_hash(task.fit(name, job["n"])):
            raise BadInput(f"{folder} was fitted on other prompts of {name} than this qkscope draws: run decompose "
                           "again into another folder.")  # fmt: skip
    return fit_of({name: one for name, (one, _) in read.items()}, task, made_from(scope, task, job["space"])), task


def finished_sums(
    folder: Path, job: dict[str, Any], task: Task, shard: Shard = (0, 1), device: Any = "cpu"
) -> dict[str, tuple[Sums, int]]:
    """The sums of every contrast of a folder's job, and their numbers of batches; never made anew."""
    found = {}
    for name in checked_contrasts(task, job["contrasts"]):
        path = sums_file(folder, name)
        if not path.is_file():
            again = f"`{job['command']}`" if job.get("command") else "the same decompose command"
            raise BadInput(f"{path} is missing, the sums that {folder} is made of: run {again} again to make it.")
        found[name] = sums, _ = Sums.read(path, shard, device)
        made = sums.moments
        said = {**made.about, "heads": [str(h) for h in made.heads], "seed": made.seed, "replicates": made.replicates}
        differs = [fact for fact, value in said.items() if job.get(fact, value) != value]
        if differs or sums.moments.contrasts != [name]:
            raise BadInput(f"{path} was made by another job than {folder} says ({', '.join(differs) or 'contrast'} "
                           "differs): run decompose again into another folder.")  # fmt: skip
    return found


def task_of(job: dict[str, Any], folder: str | Path) -> Task:
    """The task that a fit folder was made from, made again; of a file, the folder keeps a copy."""
    asked, seed = dict(job["asked"]), job["task_seed"]
    if job["task"] in tasks.BUILT_IN:
        try:
            task = tasks.BUILT_IN[job["task"]](seed=seed, **asked)
            list(task.fit(next(iter(task.contrasts)), 1))
        except BadInput:
            raise
        except Exception:  # whatever numbers for words, or words for numbers, lead to
            raise BadInput(f"{Path(folder) / JOB} is damaged: run decompose again into another folder.") from None
        return task
    texts = all(isinstance(asked.get(name), str) for name in ("file", "hash", "center"))
    if not texts or not isinstance(asked.get("chat"), bool):
        raise BadInput(f"{Path(folder) / JOB} names no task that can be made: run decompose again.")
    kept = Path(folder) / Path(asked["file"]).name
    if not kept.is_file():
        raise BadInput(f"{kept} is missing, the copy of the task that {folder} was made from: run decompose again.")
    task = tasks.from_jsonl(kept, seed=seed, chat=asked["chat"], center=asked["center"])
    if task.asked["hash"] != asked["hash"]:
        raise BadInput(f"{kept} has changed since {folder} was made from it: run decompose again.")
    return replace(task, asked=asked)  # its sums know it by the name it was given
