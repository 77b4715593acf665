"""Effect of a swap on the model's answer: edited keys are written, and the model runs on.

Candidates for the answer are those that an example names (`Example.answers`: " is" and " are"), or
else the key tokens themselves (the box labels, the list's items); a result says which. For each
held-out prompt we read the next-token logits of the right and of the target candidate, and which
candidate is likeliest, before and after. Of named answers the first right and the first wrong one
are the two; of keys, those that are swapped. All heads are edited at once, with the keys of the
unedited run; of several random subspaces each prompt takes one, by turns, so that many cost no more
runs than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput, Example, Scope
from qkscope.findings.swap_rows import Pairs, check_swappable
from qkscope.heads import Head
from qkscope.model.capture_types import Capture
from qkscope.model.encode import Encoding
from qkscope.model.inputs import answer_tokens, check_visible
from qkscope.model.patch import Edit
from qkscope.rerun.rerun_layers import Batch
from qkscope.results.result import Rows
from qkscope.sums.bases import Projector
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.sums.swap_algebra import Condition, swapped_keys
from qkscope.texts.task import Units
from qkscope.verbs.swap.features import Features

_NAMED = 4  # candidates in a sentence
AnswerLogits = Float[Tensor, "r n 4"]
"""Logits of the right and of the target answer, whether the likeliest is a right one, and whether
it is the target: first of the unedited run, then with each projector."""


def patched_runner(
    scope: Scope, units: Units, what: Features, pairs: Pairs, projectors: Mapping[str, Projector]
) -> Callable[[list[int]], tuple[Capture, AnswerLogits]]:
    """Make the function that runs units unchanged and with each swap.

    It returns queries, keys and answers.
    """
    check_swappable(what.fit.space, downstream=True)
    for example in pairs.examples:
        if len(example.queries) > 1:
            raise BadInput(
                "a patched run answers one query per example,"
                f" but there are more in {example.show(80)}."
            )
    first_layer = min(head.layer for head in what.heads)
    last_head = scope.heads()[-1:]

    def run(indices: list[int]) -> tuple[Capture, AnswerLogits]:
        examples = [example for i in indices for example in units[i]]
        encoded = scope.encode(examples, chat=what.fit.chat)
        batch = Batch(scope, encoded, what.heads, first_layer)
        before = batch.before
        check_visible(encoded, what.heads, before.bias)
        rows = pairs.rows_of(indices)
        edits = []
        for projector in projectors.values():
            edits.append([_edit(before, head, projector, pairs, rows) for head in what.heads])
        candidates = Candidates.of(scope, encoded, what.fit.chat, pairs, rows)
        answers = [candidates.answers(before.logits)]
        for after in batch.run(edits, last_head):
            answers.append(candidates.answers(after.logits))
        return before, torch.stack(answers)

    return run


def _edit(
    before: Capture, head: Head, projector: Projector, pairs: Pairs, rows: Int[Tensor, " b"]
) -> Edit:
    """The swap of two keys of each prompt, at one head.

    Of several draws, the prompt at place i of all takes the i-th, by turns.
    """
    column = before.heads.index(head)
    factors = []
    for factor in projector:
        if factor.ndim == 4:
            of_rows = factor[rows % len(factor), column]
        else:
            of_rows = factor[column].expand(len(rows), -1, -1)
        factors.append(of_rows)
    keys = before.k[:, before.kv_of_head[column]]
    places = before.key_positions
    orig = pairs.orig[rows].to(keys.device)
    target = pairs.target[rows].to(keys.device)
    n = torch.arange(len(rows), device=keys.device)
    orig_keys = keys[n, orig, None]
    target_keys = keys[n, target, None]
    swapped = swapped_keys(orig_keys, target_keys, Projector(*factors))
    orig_at = places[n, orig]
    target_at = places[n, target]
    at = torch.stack([orig_at, target_at], dim=1)
    return Edit.keys(head, at, torch.cat(swapped, dim=1))


class Candidates(NamedTuple):
    """The tokens that a batch's answers are read among, and which two of them are compared."""

    tokens: Int[Tensor, "b c"]
    signs: Int[Tensor, "b c"]  # 1 right, -1 wrong, 0 none
    right: Int[Tensor, "b 1"]  # columns of the two
    wrong: Int[Tensor, "b 1"]

    @classmethod
    def of(
        cls, scope: Scope, encoded: Encoding, chat: bool, pairs: Pairs, rows: Int[Tensor, " b"]
    ) -> Candidates:
        """Candidates of some rows: named answers, or else the keys themselves."""
        tokens, signs = answer_tokens(scope.encoder, encoded, chat)
        examples = [pairs.examples[row] for row in rows.tolist()]
        named = torch.tensor([example.answers is not None for example in examples])
        # right answers stand before wrong ones
        first_wrong = (signs > 0).sum(1)
        right = torch.where(named, 0, pairs.orig[rows])
        wrong = torch.where(named, first_wrong, pairs.target[rows])
        return cls(tokens, signs, right[:, None], wrong[:, None])

    def answers(self, logits: Float[Tensor, "b v"] | None) -> Float[Tensor, "b 4"]:
        """`AnswerLogits` of one run."""
        assert logits is not None  # they were asked for
        is_empty = self.signs == 0
        of_tokens = logits.cpu().gather(1, self.tokens)
        scores = of_tokens.masked_fill(is_empty, -torch.inf)
        best = scores.argmax(1, keepdim=True)
        right = scores.gather(1, self.right)
        wrong = scores.gather(1, self.wrong)
        is_right = self.signs.gather(1, best) > 0
        return torch.cat([right, wrong, is_right, best == self.wrong], dim=1)


def answer_rows(
    values: AnswerLogits, kinds: Iterable[str], what: Features, pairs: Pairs, draws: int
) -> Rows:
    """The table ``downstream``: a row for each kind of swap."""
    before, *after = values
    table = Rows()
    heads = ",".join(map(str, what.heads))
    for kind, swapped in zip(kinds, after, strict=True):
        n = len(swapped)
        row = {
            "heads": heads,
            "condition": Condition(what.joint, kind).name,
            "feature": what.joint,
            "kind": kind,
            **_change(before, swapped, pairs),
            "n": n,
            "draws": min(draws, n) if kind == "random" else 1,
        }
        table.append(row)
    return table


def _change(
    before: Float[Tensor, "n 4"], after: Float[Tensor, "n 4"], pairs: Pairs
) -> dict[str, float]:
    """How often the answer is right and the target, and how far right is ahead of the target."""
    right_before, wrong_before, is_right_before, is_target_before = before.unbind(1)
    right_after, wrong_after, is_right_after, is_target_after = after.unbind(1)
    lead_before = right_before - wrong_before
    lead_after = right_after - wrong_after
    fell = lead_before - lead_after
    low, high = clustered_bootstrap(fell, pairs.cluster)
    means = {
        "accuracy_before": is_right_before,
        "accuracy_after": is_right_after,
        "target_before": is_target_before,
        "target_after": is_target_after,
        "logit_difference_before": lead_before,
        "logit_difference_after": lead_after,
        "fell": fell,
    }
    row = {name: float(values.mean()) for name, values in means.items()}
    return {**row, "low": float(low), "high": float(high)}


def answers_read(examples: Sequence[Example]) -> str:
    """Say what answers are read among: those that are named, or the keys' tokens."""
    named = dict[str, None]()
    keys = dict[str, None]()
    for example in examples:
        if example.answers:
            named |= dict.fromkeys((*example.answers.right, *example.answers.wrong))
        else:
            for key in example.keys:
                keys[str(example.piece(key.span))] = None
    parts = []
    if named:
        parts.append(f"the answers that are named ({_listed(list(named))})")
    if keys:
        parts.append(f"the key tokens themselves ({_listed(list(keys))})")
    return " and ".join(parts)


def _listed(texts: Sequence[str]) -> str:
    """The first few texts, and whether there are more."""
    listed = ", ".join(map(repr, texts[:_NAMED]))
    return f"{listed}, …" if len(texts) > _NAMED else listed


def answer_sentence(row: Mapping[str, Any], read: str) -> str:
    """Say the first row of ``downstream`` in words."""
    swapping = f"Swapping {row['feature']} in {row['heads']}"
    right = f"from {row['accuracy_before']:.0%} right to {row['accuracy_after']:.0%}"
    target = f"{row['target_after']:.0%} (before: {row['target_before']:.0%})"
    answer = f"the model's answer, read among {read}"
    return f"{swapping} takes {answer}, {right}, and to the target in {target}."
