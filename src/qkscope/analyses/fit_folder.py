"""The folder of a fit: what was asked (in its manifest), the sums of each contrast, and a copy of the task's file.

The sums of a contrast are its moments, and the covariances of queries and keys for the baselines. Subspaces are not
stored, but made again from the sums: they are cheap, and then they cannot disagree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from qkscope import tasks
from qkscope.analyses.prompts import units_hash
from qkscope.errors import BadInput
from qkscope.maths.moments import Accumulator, Covariance, Moments
from qkscope.runs.folder import MANIFEST, RESULTS, WORK, check_unchanged, file_name, read_json, read_run
from qkscope.tasks.task import Task


class ContrastSums(Accumulator):
    """What the pass of one contrast adds up.

    Parameters
    ----------
    moments : of the contrast; their tensors are shared.
    cut : how many batches did not fit into memory and came in parts: the model ran on the parts, so another run
        agrees to rounding and not bit for bit.
    """

    kind = "sums"

    def __init__(self, moments: Moments, cut: int = 0) -> None:
        self.moments, self.cut = moments, cut
        device = next(iter(moments.tensors().values())).device
        self.cov_q, self.cov_k = (Covariance(len(moments.heads), moments.d_head, device) for _ in range(2))

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        return {**self.moments.tensors(), "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        return {"moments": self.moments.manifest(), "cut": self.cut}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Empty sums for the same job.

        Parameters
        ----------
        manifest : what `manifest` gave.
        device : where the sums are kept.
        """
        return cls(Moments.from_manifest(manifest["moments"], device), manifest["cut"])


def sums_file(contrast: str) -> str:
    """The name of a contrast's file; what a user calls a contrast may hold anything."""
    return f"{file_name(contrast)}.safetensors"


class _Asked(BaseModel):
    """What a fit was asked for, as its manifest says it."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    weights: str
    dtype: str
    tokenizer: str | None
    task: str
    asked: dict[str, Any]
    task_seed: int
    heads: list[str]
    n: int
    contrasts: list[str]
    space: str
    batch_size: int
    replicates: int
    seed: int


def asked_of(task: Task) -> dict[str, Any]:
    """What a fit says of its task, as JSON has it."""
    return {"task": task.name, "asked": json.loads(json.dumps(dict(task.asked))), "task_seed": task.seed}


def check_job(out: str | Path | None, asked: Mapping[str, Any]) -> None:
    """Refuse a folder that holds a fit of anything else; ask before long work, of what is known by then."""
    if out is None or not (Path(out) / MANIFEST).exists():
        return
    there = read_job(out)
    differs = [name for name in asked if name in _Asked.model_fields and there[name] != asked[name]]
    if differs:
        raise BadInput(f"{out} holds another fit ({', '.join(differs)} differ): name another folder.")


def read_job(folder: str | Path) -> dict[str, Any]:
    """What the fit in a folder was asked for."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        if (folder / WORK).is_dir():
            raise BadInput(f"{folder} is not finished: run the same decompose command again, it goes on from there.")
        raise BadInput(f"{folder} is not a folder that decompose wrote: run qkscope decompose … --out {folder} first.")
    manifest = read_json(folder / MANIFEST)
    experiment = str(manifest.get("experiment", "decompose/"))
    if not experiment.startswith("decompose/"):
        raise BadInput(
            f"{folder} is not a folder that decompose wrote, but a run of {experiment}: name the folder of a fit; "
            "qkscope view shows this one."
        )
    try:
        asked = _Asked.model_validate(manifest.get("asked")).model_dump()
    except ValidationError:
        asked = {}
    if not asked.get("heads") or not asked.get("contrasts"):
        raise BadInput(f"{folder / MANIFEST} is damaged: run decompose again into another folder.")
    return {**asked, "command": manifest.get("command")}


def is_finished(out: str | Path | None, names: Sequence[str]) -> bool:
    """Whether a folder holds a whole fit, with the sums of these contrasts."""
    return out is not None and all((Path(out) / name).is_file() for name in (RESULTS, *map(sums_file, names)))


def read_sums(
    folder: Path, job: Mapping[str, Any], task: Task, device: torch.device | str = "cpu"
) -> dict[str, ContrastSums]:
    """The sums of every contrast of a folder's fit."""
    every, manifest = {}, read_run(folder)
    for name in checked_contrasts(task, job["contrasts"]):
        path = folder / sums_file(name)
        if not path.is_file():
            again = f"`{job['command']}`" if job.get("command") else "the same decompose command"
            raise BadInput(f"{path} is missing, the sums that {folder} is made of: run {again} again to make it.")
        check_unchanged(folder, path.name, manifest)
        every[name] = sums = ContrastSums.load(path, device=device)
        if sums.moments.about.get("examples") != units_hash(task.fit(name, job["n"])):
            raise BadInput(
                f"{folder} was fitted on other prompts of {name} than this qkscope draws: run decompose again into "
                "another folder."
            )
    return every


def task_file(asked: Mapping[str, Any], folder: Path | None = None) -> Path | None:
    """The file of a task that is one: the copy in this folder, or where it was named; none of another task."""
    if asked["task"] in tasks.BUILT_IN or not isinstance(asked["asked"].get("file"), str):
        return None
    path = Path(asked["asked"]["file"])
    return folder / path.name if folder is not None and (folder / path.name).is_file() else path


def task_of(job: Mapping[str, Any], folder: str | Path) -> Task:
    """The task that a fit folder was made from, made again; of a file, the folder keeps a copy."""
    asked, seed = dict(job["asked"]), job["task_seed"]
    if job["task"] in tasks.BUILT_IN:
        try:
            task = tasks.BUILT_IN[job["task"]](seed=seed, **asked)
            list(task.fit(next(iter(task.contrasts)), 1))
        except BadInput:
            raise
        except Exception:  # whatever numbers for words, or words for numbers, lead to
            raise BadInput(f"{Path(folder) / MANIFEST} is damaged: run decompose again into another folder.") from None
        return task
    texts = all(isinstance(asked.get(name), str) for name in ("file", "hash", "center"))
    if not texts or not isinstance(asked.get("chat"), bool):
        raise BadInput(f"{Path(folder) / MANIFEST} names no task that can be made: run decompose again.")
    kept = Path(folder) / Path(asked["file"]).name
    if not kept.is_file():
        raise BadInput(f"{kept} is missing, the copy of the task that {folder} was made from: run decompose again.")
    task = tasks.from_jsonl(kept, seed=seed, chat=asked["chat"], center=asked["center"])
    if task.asked["hash"] != asked["hash"]:
        raise BadInput(f"{kept} has changed since {folder} was made from it: run decompose again.")
    return replace(task, asked=asked)  # its sums know it by the name it was given


def checked_contrasts(task: Task, contrasts: Sequence[str] | None) -> list[str]:
    """The contrasts to fit, all by default; an unknown one is refused before the model runs."""
    names = list(task.contrasts) if contrasts is None else list(contrasts)
    for i, name in enumerate(names):
        task.fit(name, 1)
        if name in names[:i]:
            raise BadInput(f"contrast {name!r} is named twice: name each once.")
    if not names:
        raise BadInput(f"no contrast was named: there is {', '.join(task.contrasts)}.")
    return names
