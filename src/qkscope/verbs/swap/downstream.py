"""What a swap does to the model's answer: the edited keys are written into the heads, and the model
runs on.

Candidates for the answer are those that an example names (`Example.answers`: " is" and " are"), or
else the key tokens themselves (the box labels, the list's items); a result says which. For each
held-out prompt we read the next-token logits of the right and of the target candidate, and which
candidate is likeliest, before and after. Of named answers the first right and the first wrong one
are the two; of keys, those that are swapped. All heads are edited at once, with the keys of the
unedited run; of several random subspaces each prompt takes one, by turns, so that many cost no more
runs than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Head, Scope
from qkscope.findings.swap_rows import Pairs, check_swappable
from qkscope.model.capture_types import Capture
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
Answers = Float[Tensor, "r n 4"]
"""Logits of the right and of the target answer, whether the likeliest is a right one, and whether
it is the target: first of the unedited run, then with each projector."""


def patched_runner(
    scope: Scope, units: Units, what: Features, pairs: Pairs, projectors: Mapping[str, Projector]
) -> Callable[[list[int]], tuple[Capture, Answers]]:
    """Make the function that runs units unchanged and with each swap, and returns queries, keys and
    answers.
    """
    check_swappable(what.fit.space, downstream=True)
    for example in pairs.examples:
        if len(example.queries) > 1:
            raise BadInput(
                f"a patched run answers one query per example, but there are more in {example.show(80)}."
            )

    def run(indices: list[int]) -> tuple[Capture, Answers]:
        encoded = scope.encode(
            [example for i in indices for example in units[i]], chat=what.fit.chat
        )
        batch = Batch(scope, encoded, what.heads, min(head.layer for head in what.heads))
        before = batch.before
        check_visible(encoded, what.heads, before.bias)
        own = torch.cat([(pairs.unit == i).nonzero()[:, 0] for i in indices])
        orig = pairs.orig[own].to(scope.device)
        target = pairs.target[own].to(scope.device)
        tokens, signs = answer_tokens(scope.encoder, encoded, what.fit.chat)
        named = torch.tensor([pairs.examples[at].answers is not None for at in own.tolist()])
        right = torch.where(named, 0, orig.cpu())[:, None]
        wrong = torch.where(named, (signs > 0).sum(1), target.cpu())[:, None]

        def answers(logits: Float[Tensor, "b v"] | None) -> Float[Tensor, "b 4"]:
            assert logits is not None  # they were asked for
            scores = logits.cpu().gather(1, tokens).masked_fill(signs == 0, -torch.inf)
            best = scores.argmax(1, keepdim=True)
            columns = [
                scores.gather(1, right),
                scores.gather(1, wrong),
                signs.gather(1, best) > 0,
                best == wrong,
            ]
            return torch.cat(columns, dim=1)

        def edit(head: Head, projector: Projector) -> Edit:
            """The edit of one head; of several draws, the prompt at place i of all takes the i-th,
            by turns.
            """
            column = before.heads.index(head)
            rows = torch.arange(len(own), device=orig.device)
            each = [
                f[own % len(f), column] if f.ndim == 4 else f[column].expand(len(own), -1, -1)
                for f in projector
            ]
            keys = before.k[:, before.kv_of_head[column]]
            at = before.key_positions
            pair = swapped_keys(keys[rows, orig, None], keys[rows, target, None], Projector(*each))
            return Edit.keys(
                head, torch.stack([at[rows, orig], at[rows, target]], dim=1), torch.cat(pair, dim=1)
            )

        edits = [
            [edit(head, projector) for head in what.heads] for projector in projectors.values()
        ]
        runs = [before, *batch.run(edits, scope.heads()[-1:])]
        return before, torch.stack([answers(captured.logits) for captured in runs])

    return run


def answer_rows(
    values: Answers, kinds: Iterable[str], what: Features, pairs: Pairs, draws: int
) -> tuple[Rows, str, str]:
    """The table ``downstream``, a row for each kind of swap; its first row in words; what answers
    were read among.
    """
    clean, *edited = values
    gap = clean[:, 0] - clean[:, 1]
    heads = ",".join(map(str, what.heads))
    table = Rows()
    for kind, own in zip(kinds, edited, strict=True):
        after = own[:, 0] - own[:, 1]
        low, high = clustered_bootstrap(gap - after, pairs.cluster)
        table.append({
            "heads": heads, "condition": Condition(what.joint, kind).name, "feature": what.joint, "kind": kind,
            "accuracy_before": float(clean[:, 2].mean()), "accuracy_after": float(own[:, 2].mean()),
            "target_before": float(clean[:, 3].mean()), "target_after": float(own[:, 3].mean()),
            "logit_difference_before": float(gap.mean()), "logit_difference_after": float(after.mean()),
            "fell": float((gap - after).mean()), "low": float(low), "high": float(high), "n": len(own),
            "draws": min(draws, len(own)) if kind == "random" else 1,
        })  # fmt: skip
    row = table[0]
    texts = dict.fromkeys(
        t for e in pairs.examples if e.answers for t in (*e.answers.right, *e.answers.wrong)
    )
    keys = dict.fromkeys(
        e.piece(key.span) for e in pairs.examples if not e.answers for key in e.keys
    )
    read = " and ".join(
        f"{which} ({', '.join(map(repr, list(every)[:_NAMED]))}{', …' if len(every) > _NAMED else ''})"
        for which, every in (
            ("the answers that are named", texts),
            ("the key tokens themselves", keys),
        )
        if every
    )
    said = (
        f"Swapping {what.joint} in {heads} takes the model's answer, read among {read}, from "
        f"{row['accuracy_before']:.0%} right to {row['accuracy_after']:.0%}, and to the target in "
        f"{row['target_after']:.0%} (before: {row['target_before']:.0%})."
    )
    return table, said, read
