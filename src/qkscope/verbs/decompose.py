"""The features of chosen heads: one pass over the prompts of a task's contrasts.

The nulls and the baselines come from the same pass. A null flips or deals what each unit adds
to ΔC as if units were independent. The prompts of a file may stand in an order that matters: what a
unit adds, ``X_i``, is compared with what the next one in the file adds,
``r = Σ ⟨X_i − X̄, X_{i+1} − X̄⟩ / Σ ‖X_i − X̄‖²``, beside the same in random orders.

All heads of the model are captured: those that prefer the right key as often as chance (Wilson's
95% interval over prompts covers it) are the reference of the others (`qkscope.sums.controls`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.checking import Count, Interval, Seed
from qkscope.findings import task_batches as prompts
from qkscope.findings.fit import (
    ContrastSums,
    Fit,
    check_job,
    checked_contrasts,
    fit_of,
    read_sums,
    sums_file,
)
from qkscope.findings.task_batches import ContrastRows, UnitBatch
from qkscope.heads import Center, Head, parse_heads
from qkscope.model.capture_types import Capture
from qkscope.model.spaces import Space
from qkscope.results.folder import RESULTS, read_run
from qkscope.results.work import Stage, Work, current_work, verb
from qkscope.sums.controls import Gain
from qkscope.sums.intervals import lag_one, wilson
from qkscope.sums.moments import Moments
from qkscope.sums.nulls import key_sums, mean_difference
from qkscope.sums.subspace import Rank
from qkscope.texts.task import ANSWER, Task, Unit

#: The p-value from which on a file's neighbours are said to be alike.
ALIKE = 0.01
_HEADS = 8  # looked at for that, at most
_UNITS = 512  # looked at for that, at most
_LEAST = 12  # units under which nothing is said of neighbours
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
    """Find the features of chosen heads, with their nulls.

    Features are the directions that tell a task's contrasts apart.

    Parameters
    ----------
    scope : the model.
    task : whose contrasts are fitted.
    heads : like ``"L18H6,L18H7"``, or a list.
    n : units of each contrast: a prompt, or a prompt and its copy. A prompt that several contrasts
        label runs once.
    contrasts : names; all of the task's by default.
    rank : how subspaces are cut: the paper's 99% ``energy``, the directions detected against the
        ``null`` of the matrix that the contrast's centring gives, a number, or one of these per
        contrast. One direction is kept also where there is none.
    center : overrides a contrast's own centring: ``none`` or ``query``.
    space : ``post_rope`` (the papers'), ``pre_rope`` or ``query_frame``.
    batch_size : prompts that run together.
    replicates : of each null; they are pooled over heads, so that 199 do for any number of them.
    seed : of the nulls.
    out : folder for the sums and the results, which `load_fit` reads; a run that died there is
        taken up where it stopped, and a folder of another job is refused.
    part : ``(i, n)``: make every n-th piece of the work into ``out``, which n processes share; the
        last of them adds all up, and the others return a fit without subspaces. Under torchrun each
        process is a part by itself.
    progress : whether to show a bar; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import Scope, decompose, tasks
    >>> scope = Scope.load("nano:mixed")
    >>> quick = {"replicates": 19, "progress": False}
    >>> fit = decompose(scope, tasks.binding(5), "L1H0", 32, contrasts=["lexical"], **quick)
    >>> fit["lexical", "L1H0"].U.shape == (scope.d_head, scope.d_head)
    True
    >>> [(row["head"], row["contrast"]) for row in fit.table()]
    [('L1H0', 'lexical')]
    """
    chosen = parse_heads(heads)
    names = checked_contrasts(task, contrasts)
    _check_fitted("rank", rank if isinstance(rank, Mapping) else {}, names)
    _check_fitted("center", center or {}, names)
    asked: Any = {
        "task": task.name,
        "asked": dict(task.asked),
        "task_seed": task.seed,
        "heads": [str(head) for head in chosen],
        "n": n,
        "contrasts": names,
        "space": space,
        "batch_size": batch_size,
        "replicates": replicates,
        "seed": seed,
    }
    check_job(out, asked)
    units = {name: task.fit(name, n) for name in names}
    chosen = [scope.check(head) for head in chosen]
    for value in rank.values() if isinstance(rank, Mapping) else [rank]:
        _check_rank(value, scope.d_head)
    about = prompts.made_from(scope, task, space)
    check_job(out, {**about, **asked})
    hashes = {name: prompts.units_hash(drawn) for name, drawn in units.items()}
    work = current_work().begin(scope, hashes, verb="decompose", **asked)
    if _is_finished(out, names):
        sums = read_sums(Path(out), asked, task, scope.device)  # type: ignore[arg-type]
        notes = read_run(Path(out))["asked"].get("notes", [])  # type: ignore[arg-type]
    else:
        run = ContrastPass(scope, task, chosen, units, replicates, seed)
        terms = run.over_prompts(work, space, batch_size, progress)
        notes = list(about.get("notes", ()))
        for name in names:
            warning = neighbours_warning(task, name, terms[name], seed)
            if warning:
                notes.append(warning)
        sums = run.sums
        for name in names:
            run_of = {"n": n, "batch_size": batch_size, "examples": hashes[name]}
            sums[name].about = {**about, **run_of, "gains": run.gains(name)}
    if notes:
        about = {**about, "notes": notes}
    fit = fit_of(sums, task, about, rank=rank, center=center)
    return fit if out is None else replace(fit, kept_in=Path(out))


def _check_fitted(what: str, given: Iterable[str], names: Sequence[str]) -> None:
    """Refuse an option for a contrast that is not fitted."""
    for name in given:
        if name not in names:
            fitted = ", ".join(names)
            raise BadInput(f"{what} is given for {name!r}, which is not fitted: there is {fitted}.")


def _check_rank(rank: Rank, d_head: int) -> None:
    """Refuse a number of directions that a head does not have."""
    if not isinstance(rank, str) and not 1 <= rank <= d_head:
        raise BadInput(
            f"rank is 'energy', 'null' or a number from 1 to {d_head}, but got {rank!r}."
        )


def _is_finished(out: str | Path | None, contrasts: Sequence[str]) -> bool:
    """Whether the folder holds the results and the sums of all contrasts already."""
    if out is None:
        return False
    files = [RESULTS, *map(sums_file, contrasts)]
    return all((Path(out) / file).is_file() for file in files)


# ---------------------------------------------------------------------- the pass


class ContrastPass:
    """One pass over the prompts of some contrasts, and the sums that it fills.

    Attributes
    ----------
    sums : those of the chosen heads, by contrast.
    reference : those of all heads: the ones at chance are what the others are held against.
    """

    def __init__(
        self,
        scope: Scope,
        task: Task,
        heads: Sequence[Head],
        units: Mapping[str, Sequence[Unit]],
        replicates: int,
        seed: int,
    ) -> None:
        self.scope = scope
        self.task = task
        self.units = units
        self.all_heads = scope.heads()
        self.columns = [self.all_heads.index(head) for head in heads]
        common: Any = {"group_size": scope.group_size, "device": scope.device}
        nulls: Any = {"replicates": replicates, "seed": seed}
        self.reference = Moments(self.all_heads, list(units), scope.d_head, **common)
        shape = (4, len(self.all_heads))
        scores = torch.zeros(shape, dtype=torch.float64, device=scope.device)
        self.reference.state["scores"] = {name: scores.clone() for name in units}
        self._joints = prompts.joined(units)
        self.sums: dict[str, ContrastSums] = {}
        self._null_units = {}
        for name, drawn in units.items():
            self.sums[name] = ContrastSums(heads, [name], scope.d_head, **nulls, **common)
            self._null_units[name] = prompts.null_units(drawn, task.contrasts[name])

    def over_prompts(
        self, work: Work, space: Space, batch_size: int, progress: bool | None
    ) -> dict[str, list[dict[str, Tensor]]]:
        """Run every prompt once; what units add to ΔC comes back, by contrast and batch."""
        together = []
        for joint in self._joints:
            together.append(tuple(prompt for prompt, _ in joint.values()))
        run = prompts.unit_runner(
            self.scope,
            together,
            self.all_heads,
            asked=self.columns,
            space=space,
            chat=self.task.chat,
            rest=False,
        )
        names = list(self.units)
        batches = prompts.batches_of(together, batch_size)
        stage = Stage(names[0], batches, run, self._state(), self.add)
        values = work.run(stage, progress, last=True)
        by_contrast = {}
        for name in names:
            by_contrast[name] = [terms[name] for terms in values if name in terms]
        return by_contrast

    def _state(self) -> dict[str, Tensor]:
        """All sums by name, sharing memory."""
        state = {}
        for name, sums in self.sums.items():
            for what, tensor in sums.tensors().items():
                state[f"{name}/{what}"] = tensor
        for what, tensor in self.reference.tensors().items():
            state[f"every/{what}"] = tensor
        return state

    def add(self, batch: UnitBatch) -> dict[str, dict[str, Tensor]]:
        """Add a batch to all sums; give what its units add to ΔC, of tasks that are a file.

        Tasks that draw their prompts have no order in which neighbours could be alike.
        """
        terms = {}
        for name in self.units:
            batch_of_contrast = prompts.rows_of(batch, self._joints, name)
            if batch_of_contrast is None:
                continue
            rows = prompts.contrast_rows(batch_of_contrast, self.task.contrasts[name])
            captured = batch_of_contrast.captured
            scaled = rows.q * captured.scale[:, None]
            self.reference.update(scaled, rows.k, {name: rows.labels})
            self.reference.state["scores"][name] += _scores(captured)
            self._add_chosen(name, batch_of_contrast, rows)
            if "file" in self.task.asked:
                terms[name] = self._unit_terms(captured, rows)
        return terms

    def _add_chosen(self, name: str, batch: UnitBatch, rows: ContrastRows) -> None:
        """Add the rows of a contrast to the moments and covariances of the chosen heads."""
        sums = self.sums[name]
        captured = batch.captured
        q = rows.q[:, self.columns]
        key_heads = [self.reference.key_heads.index(key_head) for key_head in sums.key_heads]
        numbers = self._null_units[name](batch)
        k = rows.k[:, key_heads]
        sums.update(q, k, {name: rows.labels}, prompts=numbers)
        read_heads = captured.kv_of_head[self.columns]
        # prompts by tokens by heads by d
        keys = captured.k[:, read_heads].transpose(1, 2)
        sums.cov_q.update(captured.q[:, self.columns])
        sums.cov_k.update(keys[captured.key_mask])

    def _unit_terms(self, captured: Capture, rows: ContrastRows) -> dict[str, Tensor]:
        """The query and the difference of keys of the first units, whose product adds to ΔC."""
        columns = self.columns[:_HEADS]
        keys = rows.k[:, captured.kv_of_head[columns]].double()
        difference = mean_difference(key_sums(rows.labels, keys))
        first = rows.unit < _UNITS
        terms = {"q": rows.q[:, columns], "difference": difference, "unit": rows.unit}
        return {name: values[first].cpu() for name, values in terms.items()}

    def gains(self, contrast: str) -> dict[str, Gain]:
        """Gain of each head's query-centred ΔC in the + key's logit, and if it is at chance."""
        delta = self.reference.delta(contrast, "query")
        trace = delta.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        logits = trace.abs().tolist()
        right, chance, scale, rows = self.reference.state["scores"][contrast]
        accuracies = (right / rows).tolist()
        chances = (chance / rows).tolist()
        scales = (scale / rows).tolist()
        units = enumerate(self.units[contrast])
        clusters = {prompts.cluster_of(unit, i) for i, unit in units}
        trials = len(clusters)  # copies are one trial
        gains = {}
        for i, head in enumerate(self.reference.heads):
            low, high = wilson(accuracies[i] * trials, trials)
            at_chance = low <= chances[i] <= high
            gains[str(head)] = Gain(logits[i], scales[i], at_chance)
        return gains


def _scores(captured: Capture) -> Float[Tensor, "4 h"]:
    """Sums over rows, by head: right among the named keys, chance, scale, and 1.

    Right is NaN where a named key is out of sight, and where vectors do not give the model's
    attention.
    """
    labels = captured.labels.get(ANSWER, torch.zeros_like(captured.key_positions))
    named = labels != 0
    right = labels > 0
    logits = replace(captured, space="post_rope").rows().logits()
    is_named = named[:, None]
    named_logits = logits.masked_fill(~is_named, -torch.inf)
    likeliest = named_logits.argmax(dim=-1)
    hits = right.gather(1, likeliest).double()
    unseen = (captured.bias == -torch.inf) & is_named
    is_unknown = unseen.any(dim=-1) | (captured.space == "pre_rope")
    hits[is_unknown] = torch.nan
    chance_of_row = right.sum(dim=1) / named.sum(dim=1)
    chance = chance_of_row[:, None].expand_as(hits)
    scale = captured.scale.expand_as(hits)
    count = torch.ones_like(hits)
    return torch.stack([hits, chance, scale, count]).sum(dim=1)


def neighbours_warning(
    task: Task, contrast: str, terms: Sequence[Mapping[str, Tensor]], seed: int
) -> str:
    """Warn, in a sentence, if neighbouring prompts of a task's file are not independent.

    Nothing is said of few units, or where neighbours are no more alike than in random orders.
    """
    if not terms:
        return ""
    unit = torch.cat([batch["unit"] for batch in terms])
    if len(unit.unique()) < _LEAST:
        return ""
    q = torch.cat([batch["q"] for batch in terms]).double()
    difference = torch.cat([batch["difference"] for batch in terms])
    correlation, p = lag_one(q, difference, unit, seed=seed)
    if p > ALIKE:
        return ""
    alike = f"Neighbouring prompts of {task.asked['file']} are alike in {contrast}"
    measured = f"correlation {correlation:.2f} with the next one, p = {p:.2g}"
    return (
        f"{alike} ({measured}), so they are not independent, and the p-values are too small:"
        ' give prompts of one text the same "group".'
    )
