"""What a swap does to the model's answer: the edited keys are written into the heads, and the model runs on.

Candidates for the answer are those that an example names (`Example.answers`: " is" and " are"), or else the key tokens
themselves (the box labels, the list's items); a result says which. For each held-out prompt we read the next-token
logits of the right and of the target candidate, and which candidate is likeliest, before and after. Of named answers
the first right and the first wrong one are the two; of keys, those that are swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.fit import Fit
from qkscope.analyses.swap import Features, Swaps, check_swappable, draw_pairs
from qkscope.capture.inputs import answer_tokens, check_visible
from qkscope.capture.patch import Edit
from qkscope.capture.scope import Scope
from qkscope.change.whole import Batch
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import Count, Seed
from qkscope.maths import methods
from qkscope.maths.bases import Projector
from qkscope.maths.significance import clustered_bootstrap
from qkscope.maths.swap import Condition, swapped_keys
from qkscope.runs.folder import sha256
from qkscope.runs.result import provenance
from qkscope.runs.work import Stage, current_work, verb
from qkscope.tasks.task import UnitsToTest

_NAMED = 4  # candidates in a sentence


@verb("swap", beside="fit")
def swap_downstream(
    scope: Scope,
    units: UnitsToTest,
    fit: Fit,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    features: Sequence[str] | None = None,
    draws: Count = 20,
    batch_size: Count = 32,
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Swaps:
    """Patch the swap into all heads at once, and read the answer's logits.

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
    what, pairs = Features.of(scope, fit, heads, features), draw_pairs(units, batch_size, seed)
    for example in pairs.examples:
        if len(example.queries) > 1:
            raise BadInput(f"a patched run answers one query per example, but there are more in {example.show(80)}.")
    every, joint = what.conditions(draws, seed)[0], what.joint
    projectors = {kind: every[Condition(joint, kind)] for kind in methods.SHOWN}

    def run(indices: list[int]) -> Float[Tensor, "r b 4"]:
        """Logits of the right and of the target answer, and whether the likeliest is a right one, or the target.

        First of the unedited run, then with each projector.
        """
        encoded = scope.encode([example for i in indices for example in units[i]], chat=fit.chat)
        batch = Batch(scope, encoded, what.heads, min(head.layer for head in what.heads))
        before = batch.before
        check_visible(encoded, what.heads, before.bias)
        own = torch.cat([(pairs.unit == i).nonzero()[:, 0] for i in indices])
        orig, target = (keys[own].to(scope.device) for keys in (pairs.orig, pairs.target))
        tokens, signs = answer_tokens(scope.encoder, encoded, fit.chat)
        named = torch.tensor([pairs.examples[at].answers is not None for at in own.tolist()])
        right = torch.where(named, 0, orig.cpu())[:, None]
        wrong = torch.where(named, (signs > 0).sum(1), target.cpu())[:, None]

        def answers(logits: Float[Tensor, "b v"] | None) -> Float[Tensor, "b 4"]:
            assert logits is not None  # they were asked for
            scores = logits.cpu().gather(1, tokens).masked_fill(signs == 0, -torch.inf)
            best = scores.argmax(1, keepdim=True)
            columns = [scores.gather(1, right), scores.gather(1, wrong), signs.gather(1, best) > 0, best == wrong]
            return torch.cat(columns, dim=1)

        def edit(head: Head, projector: Projector) -> Edit:
            """The edit of one head; of several draws, the prompt at place i of all takes the i-th, by turns."""
            column, rows = before.heads.index(head), torch.arange(len(own), device=orig.device)
            each = [f[own % len(f), column] if f.ndim == 4 else f[column].expand(len(own), -1, -1) for f in projector]
            keys, at = before.k[:, before.kv_of_head[column]], before.key_positions
            pair = swapped_keys(keys[rows, orig, None], keys[rows, target, None], Projector(*each))
            return Edit.keys(head, torch.stack([at[rows, orig], at[rows, target]], dim=1), torch.cat(pair, dim=1))

        edits = [[edit(head, projector) for head in what.heads] for projector in projectors.values()]
        runs = [before, *batch.run(edits, scope.heads()[-1:])]
        return torch.stack([answers(captured.logits) for captured in runs])

    factors = [factor.detach().cpu().double().flatten() for projector in projectors.values() for factor in projector]
    asked = {
        "verb": "downstream", "heads": [str(h) for h in what.heads], "features": what.names, "draws": draws,
        "batch_size": batch_size, "seed": seed, "chat": fit.chat,  # and a fit of the same name may have been made anew:
        "projectors": sha256(torch.cat(factors).numpy().tobytes()),
    }  # fmt: skip
    work = current_work().begin(scope, list(units), **asked)
    pieces = work.run(Stage("answers", pairs.batches, run), progress, last=True)
    clean, *edited = torch.cat(pieces, dim=1)
    gap = clean[:, 0] - clean[:, 1]
    table: list[dict[str, Any]] = []
    for kind, values in zip(projectors, edited, strict=True):
        after = values[:, 0] - values[:, 1]
        low, high = clustered_bootstrap(gap - after, pairs.cluster)
        table.append({
            "heads": ",".join(map(str, what.heads)), "condition": Condition(joint, kind).name, "feature": joint,
            "kind": kind,
            "accuracy_before": float(clean[:, 2].mean()), "accuracy_after": float(values[:, 2].mean()),
            "target_before": float(clean[:, 3].mean()), "target_after": float(values[:, 3].mean()),
            "logit_difference_before": float(gap.mean()), "logit_difference_after": float(after.mean()),
            "fell": float((gap - after).mean()), "low": float(low), "high": float(high), "n": len(values),
            "draws": min(draws, len(values)) if kind == "random" else 1,
        })  # fmt: skip
    row = table[0]
    texts = dict.fromkeys(t for e in pairs.examples if e.answers for t in (*e.answers.right, *e.answers.wrong))
    keys = dict.fromkeys(e.piece(key.span) for e in pairs.examples if not e.answers for key in e.keys)
    read = " and ".join(
        f"{which} ({', '.join(map(repr, list(every)[:_NAMED]))}{', …' if len(every) > _NAMED else ''})"
        for which, every in (("the answers that are named", texts), ("the key tokens themselves", keys))
        if every
    )
    answer = (
        f"Swapping {joint} in {row['heads']} takes the model's answer, read among {read}, from "
        f"{row['accuracy_before']:.0%} right to {row['accuracy_after']:.0%}, and to the target in "
        f"{row['target_after']:.0%} (before: {row['target_before']:.0%}).{pairs.one_cluster()}"
    )
    made = provenance(**{**fit.provenance.get("asked", {}), "test_units": len(units), "read": read})
    return Swaps("swap/downstream", {"downstream": table}, model=scope.name, seed=seed, answer=answer, provenance=made)
