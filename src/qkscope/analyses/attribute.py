"""Why this token: the logit of every token of a prompt, split among a head's features (Lee et al. 2026, Fig. 10).

The split is exact before the softmax. It is given in the paper's way, one feature after the other with the smaller rank
first, and order-free beside it; what no feature explains is the residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qkscope.analyses.fit import Fit
from qkscope.analyses.prompts import check_same_model, made_with
from qkscope.analyses.swap import default_features
from qkscope.capture.encode import token_texts
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.maths.attribution import Split, attribute_logits, part_name, split_rows
from qkscope.maths.subspace import Subspace
from qkscope.runs.result import Result
from qkscope.runs.work import verb

_BAR = 40  # characters of the longest bar


class Explanation(Result):
    """Logits of one prompt's tokens, split among features."""

    def show(self) -> str:
        """A chart for the terminal: one line per token, a bar of its attention, and the parts of its logit."""
        rows = self.tables["tokens"]
        names = [name for name in rows[0] if name not in ("position", "token", "attention", "logit")]
        head = " ".join(f"{name[:9]:>9}" for name in names)
        lines = [self.answer, f"{'token':>16} {'attention':>9} {'':{_BAR}} {'logit':>7} {head}"]
        for row in rows:
            bar, parts = "█" * round(row["attention"] * _BAR), " ".join(f"{row[name]:9.2f}" for name in names)
            lines.append(f"{row['token']!r:>16} {row['attention']:9.3f} {bar:{_BAR}} {row['logit']:7.2f} {parts}")
        return "\n".join(lines)

    __str__ = show


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
) -> Explanation:
    """Split the logits of every token of a prompt, as the last token (or the marked query) sees them.

    Parameters
    ----------
    scope : the model.
    prompt : a text, or an example with at most one marked query.
    head : the head that looks.
    features : a `Fit`, or subspaces of this head by name.
    split : ``sequential`` (the paper's), ``average`` over all orders, or ``oblique``.
    chat : whether the prompt goes into the chat template; as the features were fitted, if not given.
    out : folder for the result and its page; nothing is written by default.

    Returns
    -------
    Explanation
        ``tables["tokens"]``: attention, logit and its parts, token by token; ``tables["split"]``: the same parts, one a
        row; ``tables["summary"]``: the share of each feature, also in the reverse order; ``tables["overlap"]``.

    Examples
    --------
    >>> import torch, qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> feature = qk.Subspace.from_delta(torch.eye(scope.d_head), rank=2)
    >>> found = qk.attribute(scope, "hat: O jam:", "L1H3", {"first two": feature})
    >>> [row["part"] for row in found.tables["split"][:2]]
    ['first two', 'residual']
    """
    head = scope.check(head)
    chosen, space = features_of(features, head)
    for name, subspace in chosen.items():
        check_same_model(subspace.about, scope, f"feature {name!r}")
    if isinstance(prompt, Example) and len(prompt.queries) > 1:
        raise BadInput(f"a prompt is explained from one query, but {len(prompt.queries)} are marked: mark one.")
    fitted_chat = isinstance(features, Fit) and features.chat
    encoded = scope.encode([prompt], chat=fitted_chat if chat is None else chat)
    query = int(encoded.places.query[0])
    seen = encoded.inputs["attention_mask"][:, : query + 1]
    places = Places.everywhere(encoded.places.row, encoded.places.query, seen)
    captured = scope.capture_inputs(encoded.inputs, places=places, heads=[head], space=space)
    ids = encoded.inputs["input_ids"][0, : query + 1].tolist()
    ordered = sorted(chosen.items(), key=lambda item: item[1].rank)  # what features share goes to the smaller
    bases = {part_name(name): subspace.basis("query") for name, subspace in ordered}
    q, k, scale = captured.q[0, 0], captured.k[0, captured.kv_of_head[0]], float(captured.scale[0])
    parts = attribute_logits(q, k, scale, bases, split)
    reverse = attribute_logits(q, k, scale, dict(reversed(bases.items())))
    attention, logits = captured.attention()[0, 0].tolist(), parts.logits.tolist()
    columns: dict[str, Any] = {"position": range(len(ids)), "token": token_texts(scope, ids), "attention": attention}
    columns |= {"logit": logits, **{name: part.tolist() for name, part in parts.parts.items()}}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    best = max(rows, key=lambda row: row["attention"])
    shown = ", ".join(f"{name} {best[name]:.2f}" for name in parts.parts)
    bias = float(captured.bias[0, 0, best["position"]])
    ranks = {part_name(name): subspace.rank for name, subspace in ordered}
    orders = (parts, reverse)
    shares, backward = ({name: _share(part, parts.logits) for name, part in order.parts.items()} for order in orders)
    answer = (
        f"{head} gives {best['attention']:.2f} of its attention to {best['token']!r} (token {best['position']}): "
        f"logit {best['logit']:.2f} = {shown}{f', and {bias:+.2f} for the distance' if bias else ''}."
    )
    tables = {
        "tokens": rows,
        "summary": [
            {"feature": name, "rank": ranks.get(name), "variance_share": share, "reverse_order": backward[name]}
            for name, share in shares.items()
        ],
        "overlap": [{"one": a, "other": b, "cosine": cosine} for (a, b), cosine in parts.overlap.items()],
        "split": split_rows(head, query, range(query + 1), parts.logits, parts.parts, "query"),
    }
    asked = {"head": str(head), "prompt": Example(ids=tuple(ids)).show(2000), "split": split, "space": space}
    return Explanation("explain", tables, answer=answer, **made_with(scope, **asked))


def features_of(features: Fit | Mapping[str, Subspace], head: Head) -> tuple[dict[str, Subspace], Space]:
    """The features of this head by name, and the space they were all fitted in."""
    if isinstance(features, Fit):
        return {name: features[name, head] for name in default_features(features.contrasts)}, features.space
    for name, subspace in features.items():
        if subspace.head not in (None, head):
            raise BadInput(f"feature {name!r} belongs to {subspace.head}, not to {head}: name features of one head.")
    spaces: set[Any] = {subspace.about.get("space", "post_rope") for subspace in features.values()}
    if len(spaces) != 1:
        there = ", ".join(sorted(spaces))
        raise BadInput(f"no feature was given, or of different spaces ({there}): name those of one.")
    return dict(features), spaces.pop()


def _share(part: Tensor, logits: Tensor) -> float:
    """Share of the logits' variance over tokens that a part carries: covariance over variance; shares sum to 1.

    A constant added to all logits changes no attention, so only what varies over tokens counts.
    """
    varies = logits - logits.mean()
    total = float((varies * varies).sum())
    return float(((part - part.mean()) * varies).sum()) / total if total > 0 else 0.0
