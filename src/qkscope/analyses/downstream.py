"""What a swap does to the model's answer: the edited keys are written into the heads, and the model runs on.

Candidates for the answer are the key tokens themselves (the box labels, the list's items). For each held-out prompt we
read the next-token logits of the right and of the target token, and which candidate is likeliest, before and after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from qkscope.analyses.decompose import Fit
from qkscope.analyses.find import check_same_model
from qkscope.analyses.swap import (
    Swaps,
    check_answers,
    check_swappable,
    checked_features,
    conditions,
    draw_pairs,
    joint_name,
)
from qkscope.analyses.units import batches_of
from qkscope.capture.patch import Edit
from qkscope.capture.scope import Scope
from qkscope.capture.stream import stream
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_call
from qkscope.maths.bases import Projector
from qkscope.maths.intervals import clustered_bootstrap
from qkscope.maths.swap import swapped_keys
from qkscope.result import provenance
from qkscope.tasks.task import ANSWER, Unit


@checked_call
def swap_downstream(
    scope: Scope,
    units: Sequence[Unit],
    fit: Fit,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    features: Sequence[str] | None = None,
    together: bool = True,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool | None = None,
) -> Swaps:
    """Patch the swap into the heads, all ``together`` or one at a time, and read the answer's logits.

    Random subspaces (one draw) and key PCA of the same size stand beside the features. The pairs of keys are those that
    `swap` draws with the same seed; all edits are of the keys of the unedited run. An answer counts as right when the
    likeliest candidate is a right one.
    """
    start = time.perf_counter()
    check_swappable(fit.space, downstream=True)
    chosen, names = checked_features(fit, heads, features)
    check_same_model(fit.provenance.get("asked", {}), scope, "this fit")
    if not units:
        raise BadInput("there are no examples: give at least one.")
    check_answers(units)
    joint = joint_name(names)
    every, _ = conditions(fit, chosen, names, draws=1, seed=seed)
    projectors = {name: every[name] for name in (joint, f"random_{joint}", f"key_pca_{joint}")}
    sets = [chosen] if together else [[head] for head in chosen]
    parts: dict[tuple[str, str], list[torch.Tensor]] = {}
    unit_of: list[torch.Tensor] = []
    batches = batches_of(units, batch_size)
    # the same rows in the same order as those of `swap`, so that the same pairs are drawn
    listed = [(i, example) for batch in batches for i in batch for example in units[i]]
    row_of: dict[int, list[int]] = {}
    width = max(len(example.keys) for _, example in listed)
    labels_of = torch.zeros(len(listed), width, dtype=torch.long)
    for place, (i, example) in enumerate(listed):
        row_of.setdefault(i, []).append(place)
        labels_of[place, : len(example.keys)] = torch.tensor([key.label(ANSWER) for key in example.keys])
        if len(example.queries) > 1:
            raise BadInput(f"a patched run answers one query per example, but there are more in {example.show(80)}.")
    pairs = draw_pairs(labels_of, seed)

    def run(indices: list[int]) -> None:
        encoded = scope.encode([example for i in indices for example in units[i]], chat=fit.chat)
        before = scope.capture_inputs(encoded, heads=chosen, rest=False, logits=True)
        own = torch.tensor([place for i in indices for place in row_of[i]])
        orig, target = (chosen_keys[own].to(scope.device) for chosen_keys in pairs)
        labels = encoded.labels[ANSWER]
        rows = torch.arange(len(orig), device=orig.device)
        candidates = encoded.inputs["input_ids"].gather(1, before.key_positions)
        assert before.logits is not None
        values = {("before", ""): before.logits}
        for group in sets:
            for name, projector in projectors.items():
                edits = [_edit(before, head, chosen, projector, orig, target, rows) for head in group]
                last = Head(scope.n_layers - 1, 0)
                after = scope.capture_inputs(encoded, heads=[last], rest=False, logits=True, edits=edits)
                assert after.logits is not None
                values[name, ",".join(map(str, group))] = after.logits
        for key, logits in values.items():
            scores = logits.gather(1, candidates).masked_fill(~before.key_mask, -torch.inf)
            scores = scores.masked_fill(labels == 0, -torch.inf)
            best = scores.argmax(1)
            right = labels[rows, best] > 0
            parts.setdefault(key, []).append(
                torch.stack([scores[rows, orig], scores[rows, target], right, best == target], dim=1).cpu()
            )
        unit_of.append(torch.tensor([i for i in indices for _ in units[i]]))

    for _ in stream(batches, run, progress):
        pass
    unit = torch.cat(unit_of)
    found = {key: torch.cat(value) for key, value in parts.items()}
    clean = found.pop(("before", ""))
    table: list[dict[str, Any]] = []
    for (name, group), values in found.items():
        fell = (clean[:, 0] - clean[:, 1]) - (values[:, 0] - values[:, 1])
        low, high = clustered_bootstrap(fell, unit)
        table.append({
            "heads": group, "condition": name,
            "accuracy_before": float(clean[:, 2].mean()), "accuracy_after": float(values[:, 2].mean()),
            "target_before": float(clean[:, 3].mean()), "target_after": float(values[:, 3].mean()),
            "logit_difference_before": float((clean[:, 0] - clean[:, 1]).mean()),
            "logit_difference_after": float((values[:, 0] - values[:, 1]).mean()),
            "fell": float(fell.mean()), "low": float(low), "high": float(high), "n": len(values),
        })  # fmt: skip
    row = table[0]
    return Swaps(
        experiment="swap/downstream",
        answer=(
            f"Swapping {joint} in {row['heads']} takes the model's answer from {row['accuracy_before']:.0%} right to "
            f"{row['accuracy_after']:.0%}, and to the target in {row['target_after']:.0%} (before: "
            f"{row['target_before']:.0%})."
        ),
        tables={"downstream": table},
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**{**fit.provenance.get("asked", {}), "test_units": len(units)}),
    )


def _edit(
    before: Any, head: Head, heads: list[Head], projector: Projector, orig: torch.Tensor, target: torch.Tensor,
    rows: torch.Tensor,
) -> Edit:  # fmt: skip
    column = heads.index(head)
    factors = [factor[0] if factor.ndim == 4 else factor for factor in projector]
    own = Projector(*(factor[column] for factor in factors))
    keys = before.k[:, before.kv_of_head[column]]
    pair = swapped_keys(keys[rows, orig], keys[rows, target], own)
    positions = torch.stack([before.key_positions[rows, orig], before.key_positions[rows, target]], dim=1)
    return Edit.keys(head, positions, torch.stack(pair, dim=1))
