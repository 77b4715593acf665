"""Why this token: the logit of every token of a prompt, split among a head's features (Lee et al. 2026, Fig. 10).

The split is exact before the softmax. It is given in the paper's way, one feature after the other with the smaller rank
first, and order-free beside it; what no feature explains is the residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from qkscope.analyses.fit import Fit
from qkscope.analyses.prompts import check_same_model, made_with
from qkscope.analyses.swap import default_features
from qkscope.capture.pick import Capture, Places
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.capture.tokens import token_texts
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.kinds import Count, checked_class
from qkscope.maths.attribution import RESIDUAL, Attribution, Split, attribute_logits, part_name, split_rows
from qkscope.maths.subspace import Subspace
from qkscope.runs.result import Result
from qkscope.runs.work import verb


@checked_class
@dataclass(frozen=True)
class Explanation(Result):
    """Logits of one prompt's tokens, split among features."""

    def show(self, width: Count = 40) -> str:
        """A chart for the terminal: one line per token, a bar of its attention, and the parts of its logit.

        Parameters
        ----------
        width : of the longest bar, in characters.
        """
        rows = self.tables["tokens"]
        names = [name for name in rows[0] if name not in ("position", "token", "attention", "logit")]
        head = f"{'token':>16} {'attention':>9} {'':{width}} {'logit':>7} " + " ".join(f"{n[:9]:>9}" for n in names)
        lines = [self.answer, head]
        for row in rows:
            bar = "█" * round(row["attention"] * width)
            parts = " ".join(f"{row[name]:9.2f}" for name in names)
            lines.append(f"{row['token']!r:>16} {row['attention']:9.3f} {bar:{width}} {row['logit']:7.2f} {parts}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.show()


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
    >>> import qkscope as qk
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
    if chat is None:
        chat = isinstance(features, Fit) and features.chat
    encoded = scope.encode([prompt], chat=chat)
    query = int(encoded.places.query[0])
    places = Places.everywhere(
        encoded.places.row, encoded.places.query, encoded.inputs["attention_mask"][:, : query + 1]
    )
    captured = scope.capture_inputs(encoded.inputs, places=places, heads=[head], space=space)
    ids = encoded.inputs["input_ids"][0, : query + 1].tolist()
    texts = token_texts(scope, ids)
    found, reverse = split_logits(captured, head, chosen, split), split_logits(captured, head, chosen, reverse=True)
    rows = token_rows(captured, head, found, texts)
    best = max(range(len(rows)), key=lambda i: rows[i]["attention"])
    shown = ", ".join(f"{name} {rows[best][name]:.2f}" for name in found.parts)
    ranks = {part_name(name): subspace.rank for name, subspace in chosen.items()}
    summary = [
        {"feature": name, "rank": ranks.get(name),
         "variance_share": _share(part, found.logits), "reverse_order": _share(reverse.parts[name], found.logits)}
        for name, part in found.parts.items()
    ]  # fmt: skip
    return Explanation(
        experiment="explain",
        answer=(
            f"{head} gives {rows[best]['attention']:.2f} of its attention to {rows[best]['token']!r} "
            f"(token {best}): logit {rows[best]['logit']:.2f} = {shown}{_biased(captured, best)}."
        ),
        tables={
            "tokens": rows,
            "summary": summary,
            "overlap": [{"one": a, "other": b, "cosine": cosine} for (a, b), cosine in found.overlap.items()],
            "split": split_rows(head, query, range(query + 1), found.logits, found.parts, "query"),
        },
        **made_with(
            scope,
            head=str(head),
            prompt=Example(ids=tuple(ids)).show(2000),
            split=split,
            tokens=scope.tokenizer.convert_ids_to_tokens(ids) if scope.tokenizer else None,
            explained=1 - _share(found.parts[RESIDUAL], found.logits),
            space=space,
        ),
    )


def _biased(captured: Capture, key: int) -> str:
    bias = float(captured.bias[0, 0, key])
    return f", and {bias:+.2f} for the distance" if bias else ""


def features_of(features: Fit | Mapping[str, Subspace], head: Head) -> tuple[dict[str, Subspace], Space]:
    """The features of this head by name, and the space they were all fitted in."""
    if isinstance(features, Fit):
        return {name: features[name, head] for name in default_features(features.contrasts)}, features.space
    if not features:
        raise BadInput("no feature was given: name at least one to split the logits among.")
    for name, subspace in features.items():
        if subspace.head not in (None, head):
            raise BadInput(f"feature {name!r} belongs to {subspace.head}, not to {head}: name features of one head.")
    spaces = {str(subspace.about.get("space", "post_rope")) for subspace in features.values()}
    if len(spaces) > 1:
        raise BadInput(f"the features were fitted in different spaces ({', '.join(sorted(spaces))}): take one.")
    return dict(features), cast(Space, spaces.pop())


def split_logits(
    captured: Capture,
    head: Head,
    features: Mapping[str, Subspace],
    split: Split = "sequential",
    *,
    reverse: bool = False,
) -> Attribution:
    """One head's logits on the keys of the first captured row, split among features, the smaller rank first."""
    column = captured.heads.index(head)
    q, k = captured.q[0, column], captured.k[0, captured.kv_of_head[column]]
    ordered = sorted(features.items(), key=lambda item: item[1].rank)
    ordered = ordered[::-1] if reverse else ordered
    bases = {part_name(name): subspace.basis("query") for name, subspace in ordered}
    return attribute_logits(q, k, float(captured.scale[column]), bases, split)


def token_rows(captured: Capture, head: Head, found: Attribution, texts: Sequence[str]) -> list[dict[str, Any]]:
    """One row per token: the head's attention to it, its logit, and the logit's parts (of no feature, none)."""
    attention = captured.attention()[0, captured.heads.index(head)].tolist()
    logits, parts = found.logits.tolist(), {name: part.tolist() for name, part in found.parts.items()}
    return [
        {"position": i, "token": text, "attention": attention[i], "logit": logits[i]}
        | ({name: part[i] for name, part in parts.items()} if len(parts) > 1 else {})
        for i, text in enumerate(texts)
    ]


def _share(part: torch.Tensor, logits: torch.Tensor) -> float:
    """Share of the logits' variance over tokens that a part carries: covariance over variance; shares sum to 1.

    A constant added to all logits changes no attention, so only what varies over tokens counts.
    """
    centred, of = part - part.mean(), logits - logits.mean()
    total = float((of * of).sum())
    return float((centred * of).sum()) / total if total > 0 else 0.0
