"""The truth of a swap: the feature is exchanged in the text, and the row that the head then has is
what an edit should give.

That attention moves shows only that a subspace holds what keys differ by, which their principal
components do as well. Whether it holds one feature *apart from the others* is another question: a
task exchanges the feature of two keys in its text (`Task.exchange`), the model runs on that text,
and every edited row is held against the true one.

A swap edits keys and leaves the query, but another text changes the query too: in ``jam: O, hat: Z,
jam:`` it looks for the place where the jam is now. So there are two truths: the other text's keys,
met by the query that the prompt itself has (``distance``), and the other text as it is
(``text_distance``). One run gives both: it is captured with every token as a key. Rows whose text
cannot be exchanged, or has other token positions then, are untested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkscope import BadInput, Scope, tasks
from qkscope.findings.fit import Fit
from qkscope.findings.singular_rows import singular_basis
from qkscope.findings.swap_rows import Pairs, capture_rows, draw_pairs
from qkscope.model.capture_types import Capture
from qkscope.model.encode import Encoding
from qkscope.results.result import Rows
from qkscope.sums import swap_methods as methods
from qkscope.sums.bases import Projector
from qkscope.sums.swap_algebra import Condition
from qkscope.texts.task import ANSWER, Task
from qkscope.verbs.swap.features import Features

_NAMES = {
    "feature": "ΔC", "oblique": "oblique ΔC", "summed": "summed ΔC", "trained": "a trained subspace",
    "omega_svd": "Ω", "key_pca": "key PCA", "cov_qk": "Cov_q Cov_k", "random": "random subspaces",
    "nothing": "nothing done",
}  # fmt: skip


def exchanging_task(fit: Fit | None) -> Task:
    """The task of a fit, if it can exchange features in its text."""
    job: Mapping[str, Any] = {} if fit is None else fit.provenance.get("asked", {})
    name = job.get("task", "a swap without a fit")
    task = (
        tasks.BUILT_IN[name](seed=job["task_seed"], **job["asked"])
        if name in tasks.BUILT_IN
        else None
    )
    if task is None or task.exchange is None:
        raise BadInput(
            f"{name} cannot exchange a feature in its text: fit binding, filter or ioi to ask for the truth."
        )
    return task


def truth_runner(
    scope: Scope, what: Features, pairs: Pairs, task: Task, tested: bool = True
) -> Callable[[list[int], Capture], dict[str, Any]]:
    """Make the function that runs the other texts of a batch of units beside its capture:
    `SwapRows.truth`, ``frame``.

    Without ``tested``, only what a subspace is trained on.
    """
    sets = {name: [name] for name in what.names} | {what.joint: what.names}
    exchanges: Any = {("distance", "text_distance"): (pairs.orig, pairs.target)}
    exchanges |= {("other_distance",): pairs.others} if tested and pairs.others is not None else {}
    where: Any = {"heads": what.heads, "space": what.fit.space}
    exchange = task.exchange
    width = max(len(example.keys) for example in pairs.examples)
    assert exchange is not None  # as `exchanging_task` gave it

    def run(indices: list[int], before: Capture) -> dict[str, Any]:
        own = torch.cat([(pairs.unit == i).nonzero()[:, 0] for i in indices]).tolist()
        examples = [pairs.examples[row] for row in own]
        chat = what.fit.chat
        found = dict[str, Any](truth={})
        usual = scope.encode(examples, chat=chat)
        for readings, pair in exchanges.items():
            for name, features in sets.items():
                texts = [
                    exchange(pairs.examples[row], features, *(int(slots[row]) for slots in pair))
                    for row in own
                ]
                encoded = scope.encode(
                    [text or e for text, e in zip(texts, examples, strict=True)], chat=chat
                )
                live = scope.capture_inputs(encoded, places=encoded.everywhere(), **where).rows()
                at = encoded.places.keys[:, None].expand(-1, len(what.heads), -1)
                known = encoded.places.key_mask
                there = torch.tensor([text is not None for text in texts]).to(known.device)
                same = there & _same_places(usual, encoded)
                for reading, rows in zip(readings, (replace(live, q=before.q), live), strict=False):
                    true = rows.attention().gather(-1, at).masked_fill(~known[:, None], 0.0)
                    true = pad(true, (0, width - true.shape[-1])).where(
                        same[:, None, None], torch.nan
                    )
                    found["truth"][f"{reading}/{name}"] = true.cpu()
        if tested and what.fit.space != "query_frame" and not _refused(scope, what):
            found["frame"] = dict(
                vars(scope.capture_inputs(usual, heads=what.heads, space="query_frame").rows())
            )
        return found

    return run


def _refused(scope: Scope, what: Features) -> bool:
    """Whether the components of Ω cannot be swapped: that takes the query's frame."""
    return any("query_frame" in scope.facts.layers[head.layer].refusals for head in what.heads)


def _same_places(one: Encoding, other: Encoding) -> Tensor:
    """Whether two texts have as many tokens, and their keys stand at the same places, in whichever
    order.
    """
    sides = []
    for encoded in (one, other):
        mask = encoded.inputs["attention_mask"]
        places = encoded.places
        away = (
            (places.query[:, None] - places.keys)
            .masked_fill(~places.key_mask, -1)
            .sort(dim=1)
            .values
        )
        sides.append(torch.cat([away, mask.sum(1)[places.row, None]], dim=1))
    return (sides[0] == sides[1]).all(1)


def more_conditions(
    scope: Scope,
    what: Features,
    task: Task,
    projectors: Mapping[Condition, Projector],
    n: int,
    seed: int,
) -> dict[Condition, Projector]:
    """What is held against the truth beside the usual conditions; subspaces are trained on words of
    the fit, with twice as many prompts as are tested.
    """
    units = task.draw("fit", ANSWER, 2 * n)
    pairs = draw_pairs(units, seed=seed)
    exchanged = truth_runner(scope, what, pairs, task, tested=False)
    rows = capture_rows(scope, units, what.fit, what.heads, pairs, more=(None, exchanged))
    singular = None
    with suppress(BadInput):  # weights of which no components can be made
        singular = None if _refused(scope, what) else singular_basis(scope, what.heads)
    return methods.beside_truth(projectors, rows, singular, seed)


def truth_sentence(table: Rows, head: str, names: Sequence[str]) -> str:
    """Which conditions are nearest to the truth at one head, beside key PCA."""
    said = []
    for name in dict.fromkeys(names):
        rows = {row["kind"]: row for row in table if (row["head"], row["feature"]) == (head, name)}
        if not rows["feature"]["tested"]:
            said.append(f"{name} cannot be exchanged in these texts, and is untested.")
            continue
        far = {kind: row["distance"] for kind, row in rows.items() if row["tested"]}
        best = min((kind for kind in _NAMES if kind in far), key=far.__getitem__)
        ours = rows["feature"]
        beside = ""
        if "key_pca" in far:
            low = ours["nearer_low"]
            high = ours["nearer_high"]
            verdict = "nearer" if low > 0 else "farther" if high < 0 else "a tie"
            beside = f", key PCA's {far['key_pca']:.2f} ({verdict}: {ours['nearer']:.2f} [{low:.2f}, {high:.2f}])"
        said.append(
            f"With {name} exchanged in the text, the row that ΔC gives {head} is {far['feature']:.2f} from the true one"
            f"{beside}; nearest is {_NAMES[best]}, {far[best]:.2f}; nothing done {far['nothing']:.2f}, the whole key "
            f"{far['whole']:.2f} ({ours['tested']} prompts)."
        )
    return " ".join(said)
