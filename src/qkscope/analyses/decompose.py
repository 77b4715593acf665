"""The features of chosen heads: one pass over the contrasts' prompts, with the nulls and the baselines beside it.

A null flips or deals what each unit adds to ΔC as if units were independent. The prompts of a file may stand in an
order that matters: what units add, ``X_i``, is compared with what the next one in the file adds,
``r = Σ ⟨X_i − X̄, X_{i+1} − X̄⟩ / Σ ‖X_i − X̄‖²``, beside the same in random orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.analyses import prompts
from qkscope.analyses.fit import ContrastSums, Fit, check_job, checked_contrasts, fit_of, read_sums, sums_file
from qkscope.capture.spaces import Space
from qkscope.heads import Head, parse_heads
from qkscope.kinds import Count, Interval, Seed
from qkscope.maths.significance import Center, NullKind, lag_one
from qkscope.maths.subspace import Rank
from qkscope.runs.folder import RESULTS, read_run
from qkscope.runs.work import Stage, current_work, verb
from qkscope.tasks.task import Contrast, Task

#: The p-value from which on a file's neighbours are said to be alike.
ALIKE = 0.01
_HEADS, _UNITS, _LEAST = 8, 512, 12  # looked at for that, at most, and under how many units nothing is said
Replicates = Annotated[int, Interval(ge=1, le=100_000)]


@verb("decompose")
def decompose(
    scope: Scope,
    task: Task,
    heads: str | Head | Sequence[str | Head],
    n: Count = 256,
    *,
    contrasts: Sequence[str] | None = None,
    rank: Rank | Mapping[str, Rank] = "energy",
    center: Mapping[str, Center] | None = None,
    space: Space = "post_rope",
    batch_size: Count = 32,
    replicates: Replicates = 199,
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Fit:
    """Find the features of chosen heads: the directions that tell a task's contrasts apart, with their nulls.

    Parameters
    ----------
    scope : the model.
    task : whose contrasts are fitted.
    heads : like ``"L18H6,L18H7"``, or a list.
    n : units of each contrast: a prompt, or a prompt and its copy. A prompt that several contrasts label runs once.
    contrasts : names; all of the task's by default.
    rank : how subspaces are cut: the paper's 99% ``energy``, the directions detected against the ``null`` of the
        matrix that the contrast's centring gives, a number, or one of these per contrast. One direction is kept also
        where there is none.
    center : overrides a contrast's own centring: ``none``, ``query`` or ``both``.
    space : ``post_rope`` (the papers'), ``pre_rope`` or ``query_frame``.
    batch_size : prompts that run together.
    replicates : of each null; they are pooled over heads, so that 199 do for any number of them.
    seed : of the nulls.
    out : folder for the sums and the results, which `load` reads; a run that died there is taken up where it stopped,
        and a folder of another job is refused.
    part : ``(i, n)``: make every n-th piece of the work into ``out``, which n processes share; the last of them adds
        all up, and the others return a fit without subspaces. Under torchrun each process is a part by itself.
    progress : whether to show a bar; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import Scope, decompose, tasks
    >>> scope = Scope.load("nano:mixed")
    >>> fit = decompose(scope, tasks.binding(5), "L1H0", 32, contrasts=["lexical"], replicates=19, progress=False)
    >>> fit["lexical", "L1H0"].U.shape == (scope.d_head, scope.d_head)
    True
    >>> [(row["head"], row["contrast"]) for row in fit.table()]
    [('L1H0', 'lexical')]
    """
    chosen, names = parse_heads(heads), checked_contrasts(task, contrasts)
    for what, given in (("rank", rank if isinstance(rank, Mapping) else {}), ("center", center or {})):
        for name in given:
            if name not in names:
                raise BadInput(f"{what} is given for {name!r}, which is not fitted: there is {', '.join(names)}.")
    asked: Any = {
        "task": task.name, "asked": dict(task.asked), "task_seed": task.seed, "heads": [str(head) for head in chosen],
        "n": n, "contrasts": names, "space": space, "batch_size": batch_size, "replicates": replicates, "seed": seed,
    }  # fmt: skip
    check_job(out, asked)
    units = {name: task.fit(name, n) for name in names}
    chosen = [scope.check(head) for head in chosen]
    for value in rank.values() if isinstance(rank, Mapping) else [rank]:
        if not isinstance(value, str) and not 1 <= value <= scope.d_head:
            raise BadInput(f"rank is 'energy', 'null' or a number from 1 to {scope.d_head}, but got {value!r}.")
    about = prompts.made_from(scope, task, space)
    check_job(out, {**about, **asked})
    hashes = {name: prompts.units_hash(own) for name, own in units.items()}
    work = current_work().begin(scope, hashes, verb="decompose", **asked)
    if out is not None and all((Path(out) / file).is_file() for file in (RESULTS, *map(sums_file, names))):
        sums = read_sums(Path(out), asked, task, scope.device)
        notes = read_run(Path(out))["asked"].get("notes", [])
    else:
        common: Any = {"group_size": scope.group_size, "replicates": replicates, "seed": seed, "device": scope.device}
        nulls = {name: _nulls(task.contrasts[name]) for name in names}
        sums = {name: ContrastSums(chosen, [name], scope.d_head, nulls=nulls[name], **common) for name in names}
        for name, own in sums.items():
            own.about = {**about, "n": n, "batch_size": batch_size, "examples": hashes[name]}
        joints = prompts.joined(units)
        together = [tuple(prompt for prompt, _ in joint.values()) for joint in joints]
        numbers = {name: prompts.null_units(units[name], task.contrasts[name]) for name in names}

        def add(whole: prompts.UnitBatch) -> dict[str, list[Tensor]]:
            parts = {}
            for name, own in sums.items():
                batch = prompts.rows_of(whole, joints, name)
                if batch is not None:
                    q, k, labels, _ = rows = prompts.contrast_rows(batch, task.contrasts[name])
                    own.update(q, k, {name: labels}, prompts=numbers[name](batch))
                    captured = batch.captured
                    own.cov_q.update(captured.q)
                    own.cov_k.update(captured.k[:, captured.kv_of_head].transpose(1, 2)[captured.key_mask])
                    if "file" in task.asked:  # tasks that draw their prompts have no order
                        parts[name] = _adds(rows, captured.kv_of_head)
            return parts

        run = prompts.unit_runner(scope, together, chosen, space=space, chat=task.chat, rest=False)
        state = {f"{name}/{what}": tensor for name, own in sums.items() for what, tensor in own.tensors().items()}
        stage = Stage(names[0], prompts.batches_of(together, batch_size), run, state, add)
        values = work.run(stage, progress, last=True)
        added = {name: [parts[name] for parts in values if name in parts] for name in names}
        alike = [_neighbours(task, name, parts, seed) for name, parts in added.items()]
        notes = [*about.get("notes", ()), *(note for note in alike if note)]
    about = {**about, "notes": notes} if notes else about
    fit = fit_of(sums, task, about, rank=rank, center=center)
    return fit if out is None else replace(fit, kept_in=Path(out))


def _nulls(contrast: Contrast) -> tuple[NullKind, ...]:
    """Which nulls a contrast needs.

    Across a prompt and its copy each difference stands with both signs, so there is nothing but the interaction. Labels
    are dealt out again within a prompt; where words are the unit, their signs are flipped instead.
    """
    if contrast.across:
        return ("interaction",)
    return ("label_permutation" if contrast.unit == "prompt" and not contrast.paired else "sign_flip", "interaction")


def _adds(rows: prompts.Rows, kv_of_head: Tensor) -> list[Tensor]:
    """What rows of the first units add at the first heads: query, sums and counts of + and of − keys, and the unit."""
    q, k, labels, unit = rows
    some, keys = unit < _UNITS, k[:, kv_of_head[:_HEADS]].double()
    signs = [(labels == sign).double() for sign in (1, -1)]
    sums = [torch.einsum("bk,bhkd->bhd", sign, keys) for sign in signs]
    return [x[some].cpu() for x in (q[:, :_HEADS].double(), *sums, *(sign.sum(1) for sign in signs), unit)]


def _neighbours(task: Task, contrast: str, parts: Sequence[Sequence[Tensor]], seed: int) -> str:
    """Warn, in a sentence, if neighbouring prompts of a task's file add alike and so are not independent."""
    if not parts:
        return ""
    q, plus, minus, n_plus, n_minus, unit = (torch.cat(column) for column in zip(*parts, strict=True))
    if len(unit.unique()) < _LEAST:
        return ""
    correlation, p = lag_one(q, plus / n_plus.sum() - minus / n_minus.sum(), unit, seed=seed)
    if p > ALIKE:
        return ""
    return (
        f"Neighbouring prompts of {task.asked['file']} are alike in {contrast} (correlation {correlation:.2f} with the"
        f" next one, p = {p:.2g}), so they are not independent, and the p-values are too small: give prompts of one"
        ' text the same "group" (`cluster` of an Example).'
    )
