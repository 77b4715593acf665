"""Figure 7b: sparsity of relative attention over the training of a language model, for heads of the IOI circuit.

Beside it the rotated bases of the same checkpoint, heads outside the circuit, and how often the model answers right.
The claim is the change of ``sparsity − rotated``, with its interval over prompts (the same ones at every checkpoint).
A second one resamples templates instead of prompts. Both speak for these heads; whether heads of the circuit differ
from others is asked with heads as units, by dealing out "in the circuit" among them again.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from qkscope import tasks
from qkscope.analyses.sparsity import group_difference, head_changes
from qkscope.maths.relabelling import relabelled
from qkscope.papers.franco2026.model_sweep import WORK, Row, Swept, swept
from qkscope.papers.registry import Settings
from qkscope.result import Claim, Result
from qkscope.tasks.indirect import TEMPLATES

Values = dict[str, Tensor]
_END = "at the end"


def run(settings: Settings) -> Result:
    """Sparsity at every checkpoint, with its nulls."""
    found = swept(settings)
    periods = _periods(found)
    units = [{"when": when, **row} for when, (before, after) in periods.items()
             for row in head_changes(after, found.edges, before)]  # fmt: skip
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=found.result.answer,
        tables={
            **{name: found.result.tables[name] for name in ("training", "sparsity") if name in found.result.tables},
            "heads": units,
        },
        claims=_claims(found, periods, units, templates_of(settings)),
        preset=settings.preset,
        model=settings.model,
        seed=settings.seed,
        provenance=found.about(settings),
    )


def _periods(found: Swept) -> dict[str, tuple[Values | None, Values]]:
    """What is compared with what: the steps in which the task is learned, all of training, and the end by itself."""
    periods: dict[str, tuple[Values | None, Values]] = {}
    learned = found.learned()
    if learned is not None:
        before, after = (found.values[checkpoint.label] for checkpoint in learned)
        periods[f"while the task is learned (steps {learned[0].step} to {learned[1].step})"] = (before, after)
    if found.trained:
        periods["over training"] = (found.first, found.last)
    return {**periods, _END: (None, found.last)}


def templates_of(settings: Settings) -> Tensor:
    """Which template each test prompt was made from."""
    shapes = [re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(template))) for template in TEMPLATES]
    prompts = [unit[0].text or "" for unit in tasks.ioi(seed=settings.seed).test(WORK[settings.preset].n)]
    return torch.tensor([next(i for i, shape in enumerate(shapes) if shape.fullmatch(text)) for text in prompts])


def _claims(
    found: Swept, periods: dict[str, tuple[Values | None, Values]], units: list[Row], templates: Tensor
) -> list[Claim]:
    inside, outside = ([i for i, edge in enumerate(found.edges) if edge.circuit is wanted] for wanted in (True, False))
    claims: list[Claim] = []
    for when, (before, after) in periods.items():
        if before is not None:
            claims += _falls(when, before, after, inside, outside, templates)
            claims.append(_by_heads(when, units))
    if found.trained:
        rotated, plain = (
            float(found.last[name][inside].nanmean() - found.first[name][inside].nanmean())
            for name in ("rotated", "sparsity")
        )
        claims.append(
            Claim(
                "Under rotated vectors there is no such fall: change of the rotated sparsity over training (control: "
                "the change of the sparsity itself)",
                "the decline disappears when the SVD basis is rotated", rotated, plain,
                "ours > 0.5 * control and control < 0",
            )
        )  # fmt: skip
    at_end, control = group_difference(found.last, inside), group_difference(found.last, outside)
    said = "sparsity is not the spectrum's: rotating U and V removes it"
    return [
        *claims,
        Claim("At the end, terms are sparser than over rotated singular vectors: upper end of the interval of sparsity "
              "− rotated", said, at_end[2], 0.0, "ours < control"),
        Claim("The same, more so than at heads outside the circuit (control: their mean)", said, at_end[0], control[0],
              "ours < control"),
        _by_heads(_END, units),
    ]  # fmt: skip


def _by_heads(when: str, units: list[Row]) -> Claim:
    own, other = ([row["value"] for row in units if row["when"] == when and row["circuit"] is flag]
                  for flag in (True, False))  # fmt: skip
    return Claim(
        f"The same with heads as units {when}: share of relabellings of the heads ({len(own)} inside, "
        f"{len(other)} outside) with as low a mean inside (one-sided p; control: the level)", "not in the paper",
        relabelled(own, other), 0.05, "ours < control",
    )  # fmt: skip


def _falls(
    when: str, before: Values, after: Values, inside: list[int], outside: list[int], templates: Tensor
) -> list[Claim]:
    """The difference to the null falls, by prompts and by templates, and it falls more than outside the circuit."""
    change, other = group_difference(after, inside, before), group_difference(after, outside, before)
    said = "sparsity emerges during training, as singular vectors align with features"
    return [
        Claim(f"Sparsity less that of rotated vectors falls {when}: upper end of the change's 95% interval", said,
              change[2], 0.0, "ours < control"),
        Claim(f"The same, resampled by template ({len(templates.unique())} of them)", said,
              group_difference(after, inside, before, templates)[2], 0.0, "ours < control"),
        Claim(f"It falls more than at heads outside the circuit {when} (control: their mean change)", said,
              change[0], other[0], "ours < control"),
    ]  # fmt: skip
