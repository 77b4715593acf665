"""A head's logits on one prompt, split among features (Lee et al. 2026, Fig. 10).

The logit of every token is split, exactly before the softmax: in the paper's way, one feature after
the other with the smaller rank first, and order-free beside it; what no feature explains is the
residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from qkscope import Example, Result, Scope
from qkscope.findings.fit import Fit
from qkscope.findings.fitted_features import features_of
from qkscope.findings.prompt_trace import AskedPrompt
from qkscope.findings.task_batches import made_with
from qkscope.heads import Head
from qkscope.results.work import verb
from qkscope.sums.feature_split import Attribution, Split, attribute_logits, part_name, split_rows
from qkscope.sums.subspace import Subspace


@verb("explain")
def attribute(
    scope: Scope,
    prompt: str | Example,
    head: str | Head,
    features: Fit | Mapping[str, Subspace],
    *,
    split: Split = "sequential",
    chat: bool | None = None,
    out: str | Path | None = None,
) -> Result:
    """Split the logits of every token of a prompt among features.

    They are the logits that the last token, or the marked query, gives.

    Parameters
    ----------
    scope : the model.
    prompt : a text, or an example with at most one marked query.
    head : the head that looks.
    features : a `Fit`, or subspaces of this head by name.
    split : ``sequential`` (the paper's), ``average`` over all orders, or ``oblique``.
    chat : whether the prompt goes into the chat template; as the features were fitted, if not
        given.
    out : folder for the result and its page; nothing is written by default.

    Returns
    -------
    Result
        ``tables["tokens"]``: attention, logit and its parts, token by token; ``tables["split"]``:
        the same parts, one a row; ``tables["summary"]``: the share of each feature, also in the
        reverse order; ``tables["overlap"]``.

    Examples
    --------
    >>> import torch, qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> feature = qk.sums.Subspace.from_delta(torch.eye(scope.d_head), rank=2)
    >>> found = qk.sums.attribute(scope, "hat: O jam:", "L1H3", {"first two": feature})
    >>> [row["part"] for row in found.tables["split"][:2]]
    ['first two', 'residual']
    """
    head = scope.check(head)
    chosen, space = features_of(features, head, scope)
    if chat is None:
        chat = isinstance(features, Fit) and features.chat
    question = AskedPrompt.first_of(scope, scope.encode([prompt], chat=chat))
    captured = scope.capture_inputs(
        question.inputs, places=question.places, heads=[head], space=space
    )
    query = question.query
    # what features share goes to the smaller
    ordered = dict(sorted(chosen.items(), key=lambda item: item[1].rank))
    named = {part_name(name): subspace for name, subspace in ordered.items()}
    bases = {name: subspace.basis("query") for name, subspace in named.items()}
    ranks = {name: subspace.rank for name, subspace in named.items()}
    q = captured.q[0, 0]
    kv = captured.kv_of_head[0]
    k = captured.k[0, kv, : query + 1]
    scale = float(captured.scale[0])
    parts = attribute_logits(q, k, scale, bases, split)
    reverse = attribute_logits(q, k, scale, dict(reversed(bases.items())))
    attention = captured.attention()[0, 0, : query + 1]
    rows = _token_rows(question.tokens[: query + 1], attention, parts)
    best = max(rows, key=lambda row: row["attention"])
    bias = float(captured.bias[0, 0, best["position"]])
    overlap = []
    for (one, other), cosine in parts.overlap.items():
        overlap.append({"one": one, "other": other, "cosine": cosine})
    keys = range(query + 1)
    tables = {
        "tokens": rows,
        "summary": _summary(parts, reverse, ranks),
        "overlap": overlap,
        "split": split_rows(head, query, keys, parts.logits, parts.parts, "query"),
    }
    answer = _answer(head, best, list(parts.parts), bias)
    about = question.told(prompt)
    about |= {"head": str(head), "split": split, "space": space}
    return Result("explain", tables, answer=answer, **made_with(scope, **about))


def _token_rows(
    tokens: Sequence[str], attention: Float[Tensor, " t"], parts: Attribution
) -> list[dict[str, Any]]:
    """Attention, logit and its parts, token by token."""
    values = {name: part.tolist() for name, part in parts.parts.items()}
    weights = attention.tolist()
    logits = parts.logits.tolist()
    rows = []
    for position, token in enumerate(tokens):
        row = {
            "position": position,
            "token": token,
            "attention": weights[position],
            "logit": logits[position],
        }
        for name, column in values.items():
            row[name] = column[position]
        rows.append(row)
    return rows


def _summary(
    parts: Attribution, reverse: Attribution, ranks: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The share of each part, also with features taken in the reverse order."""
    rows = []
    for name, part in parts.parts.items():
        row = {
            "feature": name,
            "rank": ranks.get(name),
            "variance_share": _share(part, parts.logits),
            "reverse_order": _share(reverse.parts[name], parts.logits),
        }
        rows.append(row)
    return rows


def _answer(head: Head, best: Mapping[str, Any], parts: Sequence[str], bias: float) -> str:
    """Say which token gets most attention, and what its logit is made of."""
    terms = ", ".join(f"{name} {best[name]:.2f}" for name in parts)
    if bias:
        terms += f", and {bias:+.2f} for the distance"
    token = f"{best['token']!r} (token {best['position']})"
    attends = f"{head} gives {best['attention']:.2f} of its attention to {token}"
    return f"{attends}: logit {best['logit']:.2f} = {terms}."


def _share(part: Tensor, logits: Tensor) -> float:
    """Share of the logits' variance over tokens that a part carries.

    It is their covariance over the variance, so that shares sum to 1. A constant added to all
    logits changes no attention, so only what varies over tokens counts.
    """
    varies = logits - logits.mean()
    total = float((varies * varies).sum())
    if not total > 0:
        return 0.0
    part_varies = part - part.mean()
    return float((part_varies * varies).sum()) / total
