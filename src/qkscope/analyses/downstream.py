"""What a swap does to the model's answer: the edited keys are written into the heads, and the model runs on.

Candidates for the answer are those that an example names (`Example.answers`: " is" and " are"), or else the key tokens
themselves (the box labels, the list's items); a result says which. For each held-out prompt we read the next-token
logits of the right and of the target candidate, and which candidate is likeliest, before and after. Of named answers
the first right and the first wrong one are the two; of keys, those that are swapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.analyses.fit import Fit
from qkscope.analyses.pairs import draw_pairs
from qkscope.analyses.swap import Features, Swaps, check_rows, check_swappable
from qkscope.capture.inputs import answer_ids, check_visible
from qkscope.capture.patch import Edit
from qkscope.capture.pick import Capture
from qkscope.capture.scope import Scope
from qkscope.capture.tokens import token_texts
from qkscope.change.whole import Batch
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.kinds import Count, Seed
from qkscope.maths import methods
from qkscope.maths.bases import Projector
from qkscope.maths.significance import clustered_bootstrap
from qkscope.maths.swap import Condition, swapped_keys
from qkscope.runs.result import provenance
from qkscope.runs.work import Stage, current_work, verb
from qkscope.tasks.task import ANSWER, UnitsToTest


@verb("swap", beside="fit")
def swap_downstream(
    scope: Scope,
    units: UnitsToTest,
    fit: Fit,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    features: Sequence[str] | None = None,
    together: bool = True,
    draws: Count = 20,
    batch_size: Count = 32,
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Swaps:
    """Patch the swap into the heads, all ``together`` or one at a time, and read the answer's logits.

    Random subspaces and the rivals of `swap` of the same size stand beside the features; each prompt takes one of
    ``draws`` random subspaces, by turns, so that many cost no more runs than one. The pairs of keys are those that
    `swap` draws with the same seed; all edits are of the keys of the unedited run. An answer counts as right when the
    likeliest candidate is a right one. Intervals are clustered as those of `swap` are: by the word that is asked for,
    where one is marked.

    Parameters
    ----------
    scope : the model.
    units : from ``task.test(n)``, with one query in each prompt.
    fit : features fitted in ``post_rope``, as `decompose` gives them.
    heads : which heads; all of the fit by default.
    features : contrasts of the fit that are swapped together; by default those that `swap` takes.
    together : whether all heads are patched at once, or one after the other.
    draws : random subspaces that the prompts take by turns.
    batch_size : prompts that run together.
    seed : of the keys that are drawn and of the random subspaces.
    out, part : as in `swap`.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import Scope, decompose, swap_downstream, tasks
    >>> scope, task = Scope.load("nano:mixed"), tasks.binding(5, form="sentence")
    >>> fit = decompose(scope, task, "L1H0", 8, contrasts=["lexical"], replicates=3, progress=False)
    >>> answers = swap_downstream(scope, task.test(4), fit, progress=False)
    >>> [(row["feature"], row["kind"]) for row in answers.tables["downstream"]]
    [('lexical', 'feature'), ('lexical', 'random'), ('lexical', 'key_pca'), ('lexical', 'cov_qk')]
    """
    check_swappable(fit.space, downstream=True)
    what = Features.of(scope, fit, heads, features)
    check_rows(scope, fit)
    pairs = draw_pairs(units, batch_size, seed)
    for example in pairs.examples:
        if len(example.queries) > 1:
            raise BadInput(f"a patched run answers one query per example, but there are more in {example.show(80)}.")
    every = what.conditions(draws, seed)[0]
    projectors = {kind: every[Condition(what.joint, kind)] for kind in methods.SHOWN}
    groups = [what.heads] if together else [[head] for head in what.heads]
    cases = [(kind, group) for group in groups for kind in projectors]
    named = answer_ids(scope, pairs.examples, chat=fit.chat)

    def run(indices: list[int]) -> dict[str, Any]:
        """Logits of the right and of the target answer, and which is likeliest: unedited, then in each case."""
        encoded = scope.encode([example for i in indices for example in units[i]], chat=fit.chat)
        batch = Batch(scope, encoded, what.heads, min(head.layer for head in what.heads))
        before = batch.before
        check_visible(encoded, what.heads, before.bias)
        own = pairs.rows_of(indices)
        orig, target = (keys[own].to(scope.device) for keys in (pairs.orig, pairs.target))
        tokens = encoded.inputs["input_ids"].gather(1, before.key_positions)
        of_keys = [
            sorted(set(tokens[r, : len(e.keys)].tolist())) for r, e in enumerate(encoded.examples) if not e.answers
        ]
        labels = encoded.labels[ANSWER].masked_fill(~before.key_mask, 0)
        read = _candidates(tokens, labels, orig, target, [named[i] for i in own.tolist()])
        answers = [read.answers(before.logits)]
        changes = [
            [_edit(before, head, projectors[kind], orig, target, own) for head in group] for kind, group in cases
        ]
        answers += [read.answers(after.logits) for after in batch.run(changes, scope.heads()[-1:])]
        return {"answers": torch.stack(answers), "tokens": list(dict.fromkeys(t for row in of_keys for t in row))}

    asked = {
        "verb": "downstream", "heads": [str(h) for h in what.heads], "features": what.names, "together": together,
        "kinds": list(projectors), "draws": draws, "batch_size": batch_size, "seed": seed, "chat": fit.chat,
        "projectors": _hashed(projectors),
    }  # fmt: skip
    work = current_work().begin(scope, list(units), **asked)
    (pieces,) = work.run([Stage("answers", pairs.batches, run)], progress, last=True)
    tokens = dict.fromkeys(token for piece in pieces for token in piece["tokens"])
    shown = dict.fromkeys(token_texts(scope, [token])[0] for token in tokens)
    clean, *edited = torch.cat([piece["answers"] for piece in pieces], dim=1)
    table: list[dict[str, Any]] = []
    for (kind, group), values in zip(cases, edited, strict=True):
        fell = (clean[:, 0] - clean[:, 1]) - (values[:, 0] - values[:, 1])
        low, high = clustered_bootstrap(fell, pairs.cluster)
        table.append({
            "heads": ",".join(map(str, group)), "condition": Condition(what.joint, kind).name, "feature": what.joint,
            "kind": kind,
            "accuracy_before": float(clean[:, 2].mean()), "accuracy_after": float(values[:, 2].mean()),
            "target_before": float(clean[:, 3].mean()), "target_after": float(values[:, 3].mean()),
            "logit_difference_before": float((clean[:, 0] - clean[:, 1]).mean()),
            "logit_difference_after": float((values[:, 0] - values[:, 1]).mean()),
            "fell": float(fell.mean()), "low": float(low), "high": float(high), "n": len(values),
            "draws": min(draws, len(values)) if kind == "random" else 1,
        })  # fmt: skip
    row = table[0]
    said = _read(pairs.examples, list(shown))
    return Swaps(
        experiment="swap/downstream",
        answer=(
            f"Swapping {what.joint} in {row['heads']} takes the model's answer, read among {said}, from "
            f"{row['accuracy_before']:.0%} right to {row['accuracy_after']:.0%}, and to the target in "
            f"{row['target_after']:.0%} (before: {row['target_before']:.0%}).{pairs.one_cluster()}"
        ),
        tables={"downstream": table},
        model=scope.name,
        seed=seed,
        provenance=provenance(**{**fit.provenance.get("asked", {}), "test_units": len(units), "read": said}),
    )


class _Read(NamedTuple):
    """Candidates of each row: their tokens, +1 or −1 (0: none), and which stand for the right and the target answer."""

    tokens: Int[Tensor, "b c"]
    signs: Int[Tensor, "b c"]
    right: Int[Tensor, " b"]
    wrong: Int[Tensor, " b"]

    def answers(self, logits: Float[Tensor, "b v"] | None) -> Float[Tensor, "b 4"]:
        """Logits of the right and of the target answer, and whether the likeliest is a right one, or the target."""
        assert logits is not None  # they were asked for
        scores = logits.gather(1, self.tokens).masked_fill(self.signs == 0, -torch.inf)
        best, rows = scores.argmax(1), torch.arange(len(scores), device=scores.device)
        right = self.signs[rows, best] > 0
        columns = [scores[rows, self.right], scores[rows, self.wrong], right, best == self.wrong]
        return torch.stack(columns, dim=1).cpu()


def _candidates(
    tokens: Int[Tensor, "b k"],
    labels: Int[Tensor, "b k"],
    orig: Int[Tensor, " b"],
    target: Int[Tensor, " b"],
    named: Sequence[tuple[list[int], list[int]] | None],
) -> _Read:
    """The keys' own tokens, or in rows that name answers, those."""
    extra = max((len(right) + len(wrong) for right, wrong in filter(None, named)), default=0) - tokens.shape[1]
    tokens, signs = (pad(x.long(), (0, max(extra, 0))) for x in (tokens, labels))
    right, wrong = orig.clone(), target.clone()
    for row, answers in enumerate(named):
        if answers is None:
            continue
        count, every = len(answers[0]), [*answers[0], *answers[1]]
        signs[row] = 0
        tokens[row, : len(every)] = torch.tensor(every, device=tokens.device)
        signs[row, :count], signs[row, count : len(every)] = 1, -1
        right[row], wrong[row] = 0, count
    return _Read(tokens, signs, right, wrong)


def _read(examples: Sequence[Example], tokens: list[str]) -> str:
    """Which tokens were taken for answers, in words."""
    texts = list(dict.fromkeys(text for e in examples if e.answers for text in (*e.answers.right, *e.answers.wrong)))
    parts = []
    for what, every in (("the answers that are named", texts), ("the key tokens themselves", tokens)):
        if every:
            parts.append(f"{what} ({', '.join(map(repr, every[:4]))}{', …' if len(every) > 4 else ''})")
    return " and ".join(parts)


def _edit(
    before: Capture,
    head: Head,
    projector: Projector,
    orig: Int[Tensor, " b"],
    target: Int[Tensor, " b"],
    places: Int[Tensor, " b"],
) -> Edit:
    """The edit of one head; of several draws, the prompt at place i of all takes the i-th, by turns."""
    column, rows = before.heads.index(head), torch.arange(len(orig), device=orig.device)
    factors = [f[places % len(f), column] if f.ndim == 4 else f[column].expand(len(rows), -1, -1) for f in projector]
    keys = before.k[:, before.kv_of_head[column]]
    pair = [key[:, 0] for key in swapped_keys(keys[rows, orig, None], keys[rows, target, None], Projector(*factors))]
    positions = torch.stack([before.key_positions[rows, orig], before.key_positions[rows, target]], dim=1)
    return Edit.keys(head, positions, torch.stack(pair, dim=1))


def _hashed(projectors: Mapping[str, Projector]) -> str:
    """What the edits are made with: a fit of the same name may have been made anew."""
    digest = hashlib.sha256()
    for name, projector in projectors.items():
        digest.update(name.encode())
        for factor in projector:
            digest.update(factor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
