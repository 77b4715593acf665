"""A fit as a folder: the sums of each contrast, and the job that made them, so that later verbs need no second pass.

``job.json`` is written before the model runs and says what was asked; a folder of another job is refused, and one whose
job died is taken up. Subspaces are recomputed from the sums: they are cheap, and then they cannot disagree.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkscope import tasks
from qkscope.analyses.decompose import Fit, checked_contrasts, decompose
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space, check_space
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.result import SCHEMA
from qkscope.tasks.task import Task

_JOB = "job.json"
_FIELDS = ("weights", "tokenizer", "model", "task", "asked", "task_seed", "heads", "n", "contrasts", "space",
           "batch_size", "seed")  # fmt: skip


def plan_decompose(
    task: Task,
    heads: Sequence[Head],
    n: int,
    out: str | Path,
    *,
    contrasts: Sequence[str] | None = None,
    space: Space = "post_rope",
    batch_size: int = 32,
    seed: int = 0,
) -> dict[str, Any]:
    """The job as far as it is known without the model, checked: its examples, its options and its folder."""
    names = checked_contrasts(task, contrasts)
    for name in names:
        task.fit(name, n)
    check_space(space)
    if batch_size < 1:
        raise BadInput(f"batch_size is at least 1, but got {batch_size}.")
    plan = {
        "task": task.name, "asked": json.loads(json.dumps(dict(task.asked))), "task_seed": task.seed,
        "heads": [str(head) for head in heads], "n": n, "contrasts": names, "space": space,
        "batch_size": batch_size, "seed": seed,
    }  # fmt: skip
    folder = Path(out)
    if (folder / _JOB).exists():
        _check_same(folder, plan)
        return plan
    if folder.is_file() or (folder.is_dir() and any(path.suffix != ".part" for path in folder.iterdir())):
        raise BadInput(f"{folder} holds other things than a fit: name an empty or a new folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror}): choose another folder.") from None
    return plan


def _check_same(folder: Path, job: dict[str, Any]) -> None:
    found = read_job(folder)
    differs = [name for name in job if found[name] != job[name]]
    if differs:
        raise BadInput(f"{folder} holds another job ({', '.join(differs)} differ): name another folder.")


def run_decompose(
    scope: Scope,
    task: Task,
    heads: Sequence[Head],
    n: int,
    out: str | Path,
    *,
    contrasts: Sequence[str] | None = None,
    space: Space = "post_rope",
    batch_size: int = 32,
    seed: int = 0,
) -> Fit:
    """Decompose into a folder, going on where an earlier run of the same job stopped."""
    folder = Path(out)
    heads = [scope.check(head) for head in heads]
    plan = plan_decompose(
        task, heads, n, out, contrasts=contrasts, space=space, batch_size=batch_size, seed=seed
    )  # fmt: skip
    job = {
        "model": scope.name, "weights": scope.weights_hash, "dtype": str(scope.model.dtype),
        "tokenizer": scope.tokenizer_hash, **plan,
    }  # fmt: skip
    if (folder / _JOB).exists():
        _check_same(folder, job)
    else:
        _write(folder / _JOB, json.dumps({"schema": SCHEMA, **job}, indent=1, ensure_ascii=False))
    for left_over in folder.glob("*.part"):  # what a killed run was writing
        left_over.unlink(missing_ok=True)
    if task.name not in tasks.BUILT_IN:
        shutil.copyfile(job["asked"]["file"], folder / Path(job["asked"]["file"]).name)
    fit = decompose(
        scope, task, heads, n, contrasts=job["contrasts"], space=space, batch_size=batch_size, seed=seed, out=folder
    )
    text = json.dumps(fit.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    _write(folder / "results.json", text)
    _write(folder / "manifest.json", json.dumps({"schema": SCHEMA, **fit.provenance}, indent=1, default=str))
    return fit


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def read_job(folder: str | Path) -> dict[str, Any]:
    """What a fit folder was made from."""
    path = Path(folder) / _JOB
    if not path.is_file():
        raise BadInput(f"{folder} is not a folder that decompose wrote: run qkscope decompose … --out {folder} first.")
    try:
        job = json.loads(path.read_text(encoding="utf-8"))
        schema = int(job["schema"])
        missing = [name for name in _FIELDS if name not in job] if schema <= SCHEMA else []
        if missing:
            raise KeyError(missing[0])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{path} is damaged: run decompose again into another folder.") from None
    if schema > SCHEMA:
        raise BadInput(
            f"{folder} was written by a newer qkscope (schema {schema}; this one reads {SCHEMA}): update it."
        )
    return job


def load_fit(folder: str | Path, scope: Scope) -> tuple[Fit, Task]:
    """The fit of a finished folder, and its task; refused for other weights or another tokenizer."""
    job = read_job(folder)
    for field, here in (("weights", scope.weights_hash), ("tokenizer", scope.tokenizer_hash)):
        if job[field] != here:
            raise BadInput(f"{folder} was made with other {field} than {scope.name} has here: load the same model.")
    if not (Path(folder) / "results.json").exists():
        raise BadInput(f"{folder} is not finished: run the same decompose command again, it goes on where it stopped.")
    task = task_of(job, folder)
    fit = decompose(
        scope, task, job["heads"], job["n"], contrasts=job["contrasts"], space=job["space"],
        batch_size=job["batch_size"], seed=job["seed"], out=folder,
    )  # fmt: skip
    return fit, task


def task_of(job: dict[str, Any], folder: str | Path) -> Task:
    """The task that a fit folder was made from, made again; of a file, the folder keeps a copy."""
    asked, seed = dict(job["asked"]), job["task_seed"]
    if job["task"] in tasks.BUILT_IN:
        return tasks.BUILT_IN[job["task"]](seed=seed, **asked)
    kept = Path(folder) / Path(asked["file"]).name
    if not kept.is_file():
        raise BadInput(f"{kept} is missing, the copy of the task that {folder} was made from: run decompose again.")
    task = tasks.from_jsonl(kept, seed=seed, chat=asked["chat"], center=asked["center"])
    if task.asked["hash"] != asked["hash"]:
        raise BadInput(f"{kept} has changed since {folder} was made from it: run decompose again.")
    return replace(task, asked=asked)  # its sums know it by the name it was given
