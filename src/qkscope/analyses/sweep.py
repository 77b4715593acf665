"""Sparsity over training: the same edges and the same prompts at every checkpoint, each checkpoint's numbers kept.

The manifest says what was asked and which edges were chosen; ``checkpoints/NAME.safetensors`` holds one checkpoint's
values for every prompt. A sweep that died goes on with the checkpoints that are missing, and a finished one takes
further ones. Weights are hashed, and two revisions with the same weights are refused. Where the model has no published
circuit, its heads are chosen on the last checkpoint, on prompts used for nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from qkscope.analyses import sparsity as measure
from qkscope.analyses.checkpoints import Checkpoint, checkpoints, refuse_copy
from qkscope.analyses.circuits import Duty, Edge, check_roles, circuit_of, outside
from qkscope.analyses.prompts import units_hash
from qkscope.analyses.sparsity import Sparsity
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import Count, Natural, Seed, checked_call
from qkscope.runs.folder import MANIFEST, check_folder, file_name, read_json, read_tensors, write_tensors
from qkscope.runs.progress import doing
from qkscope.runs.result import provenance, write_result
from qkscope.runs.work import Work
from qkscope.tasks.task import Task

_KIND, _CHECKPOINTS = "sparsity_checkpoint", "checkpoints"
_COPYING = ("binding", "induction", "ioi")  # tasks whose answer is the word at the right key
_MEANS = ("sparsity", "rotated", "rotated_shared", "count", "count_tol", "count_null", "count_tol_null", "attention")


@checked_call
def plan_sweep(
    model: str,
    task: Task,
    revisions: str | Sequence[str] | None = None,
    heads: str | None = None,
    n: int = 128,
    *,
    out: str | Path,
    controls: Natural = 12,
    draws: Count = 20,
    seed: Seed = 0,
    dtype: str | None = None,
) -> dict[str, Any]:
    """The job as far as it is known without a model, checked; a folder of another job is refused.

    Heads that are looked for are those of the last checkpoint: with another one as the last it is another job.
    """
    found = checkpoints(model, revisions)
    if heads is not None:
        measure.named_edges(heads, task)
    elif (known := circuit_of(model, task.name)) is not None:
        check_roles(task, known.edges)
    searched = heads is None and circuit_of(model, task.name) is None
    plan = {
        "model": model, "task": task.name, "asked": json.loads(json.dumps(dict(task.asked))), "task_seed": task.seed,
        "heads": heads, "n": n, "controls": controls, "draws": draws, "seed": seed,
        "examples": units_hash(task.test(n)), "dtype": dtype, "heads_from": found[-1].label if searched else None,
    }  # fmt: skip
    if (Path(out) / MANIFEST).exists():
        read_json(Path(out) / MANIFEST)  # one of a newer version is told from a folder that is not ours
    check_folder(out, "sparsity")
    if there := _asked(Path(out)):
        differs = [name for name in plan if there.get(name) != plan[name]]
        if differs:
            raise BadInput(f"{out} holds another sweep ({', '.join(differs)} differ): name another folder.")
    return {**plan, "checkpoints": found}


def sweep(
    model: str,
    task: Task,
    revisions: str | Sequence[str] | None = None,
    heads: str | None = None,
    n: int = 128,
    *,
    out: str | Path,
    controls: Natural = 12,
    draws: Count = 20,
    seed: Seed = 0,
    batch_size: Count = 32,
    device: str | None = None,
    dtype: str | None = None,
) -> Sparsity:
    """How few singular vectors carry the attention of a circuit's heads, at one checkpoint or over training.

    What an earlier run of the same job stored is not measured again.

    Parameters
    ----------
    model : as in `Scope.load`.
    task : whose roles are looked at.
    revisions : checkpoints like step1000,step2000; all, of a nano or a folder of checkpoints.
    heads : edges like L9H9:END>IO,L5H5:S2>S1+1, or a circuit as gpt2; by default published ones, or those found.
    n : prompts.
    out : folder for the results.
    controls : heads outside the circuit for each way to look.
    draws : rotations of each null.
    seed : of all draws.
    batch_size : prompts run together.
    device, dtype : as in `Scope.load`.
    """
    start = time.perf_counter()
    asked: Any = {"controls": controls, "draws": draws, "seed": seed, "dtype": dtype}
    plan = plan_sweep(model, task, revisions, heads, n, out=out, **asked)
    found: list[Checkpoint] = plan.pop("checkpoints")
    work = Work(out).open(plan)
    result, files = _measured(task, plan, found, work, batch_size, device)
    result = replace(result, seconds=time.perf_counter() - start)
    write_result(result, out, files, keep=f"{_CHECKPOINTS}/.*")
    work.finish()
    return result


def _measured(
    task: Task, plan: Mapping[str, Any], found: Sequence[Checkpoint], job: Work, batch_size: int, device: str | None
) -> tuple[Sparsity, dict[str, str | bytes]]:
    """Every checkpoint's numbers, read where they are stored and made where not; and the files of what was made."""
    model, n, draws, seed, dtype = (plan[name] for name in ("model", "n", "draws", "seed", "dtype"))
    loaded: dict[str, Scope] = {}

    def scope_at(checkpoint: Checkpoint) -> Scope:
        if checkpoint.label not in loaded:
            loaded.clear()
            loaded[checkpoint.label] = Scope.load(
                checkpoint.model, revision=checkpoint.revision, device=device, dtype=dtype
            )
        return loaded[checkpoint.label]

    out, work = job.out, job.folder
    assert out is not None
    assert work is not None
    files: dict[str, str | bytes] = {}
    listed = job.once("edges", lambda: _edges(out, plan, task, batch_size, lambda: scope_at(found[-1])))
    edges = [Edge(Head.parse(e["head"]), Duty(e["role"], e["from"], e["to"]), e["circuit"]) for e in listed]
    about = {
        "examples": plan["examples"], "edges": [str(edge) for edge in edges], "draws": draws, "seed": seed,
        "asked_dtype": dtype,
    }  # fmt: skip
    stored: dict[str, Mapping[str, Tensor]] = {}
    weights: dict[str, str] = {}
    for checkpoint in sorted(found, key=lambda one: one.label not in loaded):  # the one in memory, then the rest
        path, piece = (_stored_at(folder, checkpoint.label) for folder in (out, work))
        if path.exists() or piece.exists():
            arrays, manifest = read_tensors(path if path.exists() else piece, _KIND, about)
            digest = manifest["about"]["weights"]
            if checkpoint.weights not in (None, digest):
                raise BadInput(
                    f"{path} was made from other weights than {checkpoint.model} holds now: delete the file "
                    "to measure them again."
                )
            refuse_copy(model, checkpoint.label, digest, weights)
        else:
            scope = scope_at(checkpoint)
            refuse_copy(model, checkpoint.label, scope.weights_hash, weights)
            with doing(f"{model} {checkpoint.label} ({len(stored) + 1} of {len(found)})"):
                arrays = measure.measure_edges(scope, task, edges, n, draws=draws, batch_size=batch_size, seed=seed)
                if task.name in _COPYING:
                    arrays["right"] = measure.answers_right(scope, task, n, batch_size)
            manifest = {"about": {**about, "weights": scope.weights_hash, "dtype": str(scope.model.dtype)}}
            write_tensors(piece, _KIND, arrays, manifest)
        stored[checkpoint.label] = arrays
        if not path.exists():
            files[path.relative_to(out).as_posix()] = piece.read_bytes()
    return _result(task, {**plan, "edges": listed}, found, edges, stored, weights), files


def _stored_at(folder: Path, label: str) -> Path:
    """Where a checkpoint's values are kept, of a run or of one that is under way."""
    return folder / _CHECKPOINTS / f"{file_name(label) or 'model'}.safetensors"


def _edges(
    out: Path, plan: Mapping[str, Any], task: Task, batch_size: int, last: Callable[[], Scope]
) -> list[dict[str, Any]]:
    """The edges of the job: as its file has them, or as asked, published or found on the last checkpoint."""
    if there := _asked(out):
        return list(there["edges"])
    scope, heads = last(), plan["heads"]
    wanted = heads if heads is not None or circuit_of(plan["model"], task.name) is None else plan["model"]
    own = measure.edges_for(scope, task, wanted, batch_size)
    edges = [*own, *outside(scope, own, plan["controls"], plan["seed"])]
    return [{"head": str(e.head), "role": e.duty.role, "from": e.duty.query, "to": e.duty.key, "circuit": e.circuit}
            for e in edges]  # fmt: skip


def _result(
    task: Task,
    plan: Mapping[str, Any],
    found: Sequence[Checkpoint],
    edges: Sequence[Edge],
    stored: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, str],
) -> Sparsity:
    by_checkpoint = [
        measure.sparsity_rows(edges, stored[c.label], plan["model"], c.step if c.label else None, plan["seed"])
        for c in found
    ]
    tables: dict[str, list[dict[str, Any]]] = {"sparsity": [row for rows in by_checkpoint for row in rows]}
    answer = measure.answer_of(by_checkpoint[-1])
    if len(found) > 1:
        tables["training"] = training_rows(found, edges, stored)
        inside = [row for row in tables["training"] if row["circuit"]]
        answer = (
            f"From {found[0].label} to {found[-1].label}, sparsity less that of rotated vectors goes from "
            f"{inside[0]['difference']:.3f} to {inside[-1]['difference']:.3f} over the circuit (change "
            f"{inside[-1]['change']:.3f}, 95% interval {inside[-1]['change_low']:.3f} to "
            f"{inside[-1]['change_high']:.3f}). At {found[-1].label}: {answer[0].lower()}{answer[1:]}"
        )
    last = stored[found[-1].label]
    return Sparsity(
        experiment=f"sparsity/{task.name}",
        answer=answer,
        tables=tables,
        arrays={name: last[name] for name in (*measure.VALUES, "terms_first", "terms_rotated", "terms_mean", "sigma")},
        model=plan["model"],
        seed=plan["seed"],
        provenance=provenance(**plan, weights={label: digest for digest, label in weights.items()}),
        edges=tuple(edges),
    )


def training_rows(
    found: Sequence[Checkpoint], edges: Sequence[Edge], stored: Mapping[str, Mapping[str, Tensor]]
) -> list[dict[str, Any]]:
    """Per checkpoint, circuit and control: the mean over heads, and its change since the first, with intervals."""
    rows = []
    first = stored[found[0].label]
    for checkpoint in found:
        arrays = stored[checkpoint.label]
        for circuit in (True, False):
            chosen = [i for i, edge in enumerate(edges) if edge.circuit is circuit]
            if not chosen:
                continue
            gap, change = measure.group_difference(arrays, chosen), measure.group_difference(arrays, chosen, first)
            means = {name: float(arrays[name][chosen].nanmean()) for name in _MEANS}
            accuracy = float(arrays["right"].mean()) if "right" in arrays else None
            rows.append({
                "step": checkpoint.step, "circuit": circuit, "accuracy": accuracy, **means, "difference": gap[0],
                "low": gap[1], "high": gap[2], "change": change[0], "change_low": change[1],
                "change_high": change[2], "heads": len(chosen),
            })  # fmt: skip
    return rows


def stored_terms(folder: str | Path, label: str) -> Mapping[str, Tensor]:
    """What a finished sweep holds of one checkpoint."""
    return read_tensors(_stored_at(Path(folder), label), _KIND)[0]


def _asked(folder: Path) -> dict[str, Any]:
    """What the sweep in a folder was asked for, with its edges; nothing where there is none."""
    if not (folder / MANIFEST).exists():
        return {}
    asked = dict(read_json(folder / MANIFEST).get("asked", {}))
    kinds, edges = {"head": str, "role": str, "from": str, "to": str, "circuit": bool}, asked.get("edges")
    whole = isinstance(edges, list) and all(isinstance(edge, dict) for edge in edges)
    if not whole or any(type(edge.get(name)) is not kind for edge in asked["edges"] for name, kind in kinds.items()):
        raise BadInput(f"{folder / MANIFEST} is damaged: sweep into another folder.")
    return asked
