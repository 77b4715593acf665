"""The folder of a fit: the job that it is of, the sums of each contrast, and a copy of a task that is a file.

The sums of a contrast are its moments, and the covariances of queries and keys for the baselines. The list of batches
is fixed by the task and the batch size. A shard takes every n-th of it, whole, and sums add, so neither how many
processes share the work nor where one of them died changes the numbers (to rounding).

Subspaces are not stored, but made again from the sums: they are cheap, and then they cannot disagree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from qkscope import tasks
from qkscope.analyses.prompts import units_hash
from qkscope.errors import BadInput
from qkscope.maths.moments import Moments
from qkscope.maths.sums import Accumulator, Covariance
from qkscope.runs.folder import JOB, RESULTS, SCHEMA, WORK, as_json, file_name, read_json, write_run
from qkscope.runs.job import Job
from qkscope.runs.provenance import MADE, provenance
from qkscope.runs.result import Result, write_result
from qkscope.runs.shards import Shard, is_shard
from qkscope.runs.store import read_tensors, tensor_bytes
from qkscope.tasks.task import Task


class ContrastSums(Accumulator):
    """What the pass of one contrast adds up, and how much of it there is.

    Parameters
    ----------
    moments : of the contrast; their tensors are shared.
    cut : how many batches did not fit into memory and came in parts: the model ran on the parts, so another run
        agrees to rounding and not bit for bit.
    shard : which share of the job it is.
    """

    kind = "sums"

    def __init__(self, moments: Moments, cut: int = 0, shard: Sequence[int] = (0, 1)) -> None:
        self.moments, self.cut, self.shard = moments, cut, (shard[0], shard[1])
        device = next(iter(moments.sums.values())).device
        self.cov_q, self.cov_k = (Covariance(len(moments.heads), moments.d_head, device) for _ in range(2))

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        return {**self.moments.tensors(), "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        return {"moments": self.moments.manifest(), "cut": self.cut, "shard": list(self.shard)}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Empty sums for the same job.

        Parameters
        ----------
        manifest : what `manifest` gave.
        device : where the sums are kept.
        """
        return cls(Moments.from_manifest(manifest["moments"], device), manifest["cut"], manifest["shard"])

    def merge(self, *others: Accumulator) -> Self:
        """The sums of all shards, added in this order.

        Parameters
        ----------
        others : the other shards of the job.
        """
        merged = super().merge(*others)
        merged.shard = (0, 1)
        for other in others:
            assert isinstance(other, ContrastSums)
            merged.cut += other.cut
        return merged

    def _check_same_job(self, other: Accumulator) -> None:
        assert isinstance(other, ContrastSums)
        self.moments._check_same_job(other.moments)

    def to_bytes(self) -> bytes:
        """The content of the file that `read` takes."""
        return tensor_bytes(self.kind, self.tensors(), self.manifest())

    @classmethod
    def read(cls, path: Path, shard: Shard = (0, 1), device: torch.device | str = "cpu") -> Self:
        """The sums of a file, of whatever job made them.

        Parameters
        ----------
        path : the file.
        shard : whose it must be.
        device : where the sums are kept.
        """
        tensors, manifest = _read(path, shard)
        return cls.from_tensors(manifest, tensors, path, device)


def _read(path: Path, shard: Shard) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A file of sums with a manifest that can be believed; refused where it is another shard's."""
    tensors, manifest = read_tensors(path, ContrastSums.kind)
    moments, cut = manifest.get("moments"), manifest.get("cut")
    about = moments.get("about") if isinstance(moments, dict) else None
    counted = type(cut) is int and cut >= 0
    known = isinstance(about, dict) and {"model", "space", "n"} <= set(about)
    if not (counted and known and is_shard(manifest.get("shard"))):
        raise BadInput(f"{path} is damaged: its manifest is not what a run writes; make it again, elsewhere.")
    if tuple(manifest["shard"]) != shard:
        (i, n), (mine, all_of) = manifest["shard"], shard
        raise BadInput(
            f"{path} holds the sums of shard {i}/{n} and stands where those of {mine}/{all_of} belong: put it back, or "
            "run the shard again into another folder."
        )
    odd = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if odd:
        raise BadInput(f"{path} is damaged: {odd[0]} holds NaN or infinity; make it again, elsewhere.")
    return tensors, manifest


def sums_file(folder: str | Path, contrast: str) -> Path:
    """Where a contrast's sums are kept. A name is not a path: it may hold anything a user calls a contrast."""
    return Path(folder) / f"{file_name(contrast)}.safetensors"


_MODEL = ("model", "weights", "dtype", "tokenizer")
_FIELDS: dict[str, tuple[type, ...]] = {
    "weights": (str,), "tokenizer": (str, type(None)), "model": (str,), "task": (str,), "asked": (dict,),
    "task_seed": (int,), "heads": (list,), "n": (int,), "contrasts": (list,), "space": (str,), "batch_size": (int,),
    "seed": (int,),
}  # fmt: skip


class FitJob(Job):
    """A job of `decompose` in its folder, checked when it is made: the folder is for this job or for none yet.

    Parameters
    ----------
    out : the folder; without one nothing is written.
    asked : the job, as far as it is known without the model.
    """

    def __init__(self, out: str | Path | None, asked: Mapping[str, Any]) -> None:
        super().__init__(out)
        self.asked = dict(asked)
        self._check()

    def _check(self) -> None:
        if self.out is not None:
            self.check(self.asked, "decompose", "other things than a fit", _FIELDS)

    def of_model(self, about: Mapping[str, Any]) -> None:
        """Ask again, now that the model is known."""
        self.asked = {**{name: about[name] for name in _MODEL}, **self.asked}
        self._check()

    def finish(self, sums: Mapping[str, ContrastSums], file: Path | None, fit: Result | None = None) -> None:
        """Write the sums, what they are of, a copy of the task's file if it is one, and of a whole job the results."""
        if self.out is None:
            return
        made = {name: value for name, value in provenance().items() if name in MADE}
        files: dict[str, str | bytes] = {sums_file("", name).name: one.to_bytes() for name, one in sums.items()}
        if file is not None:
            files[file.name] = file.read_bytes()
        files[JOB] = as_json({"schema": SCHEMA, **made, **self.asked})
        if fit is None:
            write_run(self.out, f"decompose/{self.asked['task']}", files, {**made, "asked": self.asked})
        else:
            write_result(fit, self.out, files)
        self.clear()

    @property
    def is_finished(self) -> bool:
        """Whether the folder holds all of its sums."""
        names = [JOB, *(sums_file("", name).name for name in self.asked["contrasts"])]
        return self.out is not None and all((self.out / name).is_file() for name in names)


def asked_of(task: Task) -> dict[str, Any]:
    """What a job says of its task, as JSON has it."""
    return {"task": task.name, "asked": json.loads(json.dumps(dict(task.asked))), "task_seed": task.seed}


def job_of(sums: Mapping[str, ContrastSums]) -> dict[str, Any]:
    """The job that finished sums are of, as its ``job.json`` would say it."""
    some = next(iter(sums.values())).moments
    about = json.loads(json.dumps(some.about))
    return {
        **{name: about[name] for name in (*_MODEL, "task", "asked", "task_seed")},
        "heads": [str(head) for head in some.heads], "n": about["n"], "contrasts": list(sums),
        "space": about["space"], "batch_size": about["batch_size"], "replicates": some.replicates, "seed": some.seed,
    }  # fmt: skip


def task_file(asked: Mapping[str, Any], source: str | Path | None = None) -> Path | None:
    """The file of a task that is one: in the folder ``source``, or where it was named; none of another task."""
    if asked["task"] in tasks.BUILT_IN or not isinstance(asked["asked"].get("file"), str):
        return None
    path = Path(asked["asked"]["file"])
    return path if source is None else Path(source) / path.name


def read_job(folder: str | Path) -> dict[str, Any]:
    """What a fit folder was made from."""
    path = Path(folder) / JOB
    if not path.is_file():
        other = path.with_name(RESULTS)
        if other.is_file():
            kind = str(read_json(other).get("experiment", "another verb"))
            raise BadInput(
                f"{folder} is not a folder that decompose wrote, but a run of {kind}: name the folder of a fit; "
                "qkscope view shows this one."
            )
        if (path.parent / WORK).is_dir():
            raise BadInput(
                f"{folder} is not finished: run the same decompose command again, it goes on where it stopped."
            )
        raise BadInput(f"{folder} is not a folder that decompose wrote: run qkscope decompose … --out {folder} first.")
    job = read_json(path, _FIELDS)
    named = all(isinstance(name, str) for name in [*job["heads"], *job["contrasts"]])
    if not named or not job["heads"] or not (job.get("shard") is None or is_shard(job["shard"])):
        raise BadInput(f"{path} is damaged: run decompose again into another folder.")
    return job


def read_sums(
    folder: Path, job: Mapping[str, Any], task: Task, shard: Shard = (0, 1), device: torch.device | str = "cpu"
) -> dict[str, ContrastSums]:
    """The finished sums of every contrast of a folder's job; never made anew."""
    found = {}
    for name in checked_contrasts(task, job["contrasts"]):
        path = sums_file(folder, name)
        if not path.is_file():
            again = f"`{job['command']}`" if job.get("command") else "the same decompose command"
            raise BadInput(f"{path} is missing, the sums that {folder} is made of: run {again} again to make it.")
        found[name] = sums = ContrastSums.read(path, shard, device)
        made = sums.moments
        said = {**made.about, "heads": [str(h) for h in made.heads], "seed": made.seed, "replicates": made.replicates}
        differs = [fact for fact, value in said.items() if job.get(fact, value) != value]
        if differs or made.contrasts != [name]:
            raise BadInput(
                f"{path} was made by another job than {folder} says ({', '.join(differs) or 'contrast'} differs): run "
                "decompose again into another folder."
            )
        if made.about.get("examples") != units_hash(task.fit(name, job["n"])):
            raise BadInput(
                f"{folder} was fitted on other prompts of {name} than this qkscope draws: run decompose again into "
                "another folder."
            )
    return found


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
