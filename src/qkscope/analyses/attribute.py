"""Why this token: the logit of every token of a prompt, split among a head's features (Lee et al. 2026, Fig. 10).

The split is exact before the softmax. It is given in the paper's way, one feature after the other with the smaller rank
first, and order-free beside it; what no feature explains is the residual.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from qkscope.analyses.decompose import Fit
from qkscope.analyses.find import check_same_model
from qkscope.analyses.swap import default_features
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput, check_kind, check_least
from qkscope.examples import Example, Key
from qkscope.heads import Head
from qkscope.kinds import checked_call, checked_class
from qkscope.maths.attribution import RESIDUAL, Split, attribute_logits
from qkscope.maths.subspace import Subspace
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result


@checked_class
@dataclass(frozen=True)
class Explanation(Result):
    """Logits of one prompt's tokens, split among features."""

    def show(self, width: int = 40) -> str:
        """A chart for the terminal: one line per token, a bar of its attention, and the parts of its logit."""
        check_least(1, width=width)
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


@checked_call
def attribute(
    scope: Scope,
    prompt: str | Example,
    head: str | Head,
    features: Fit | Mapping[str, Subspace],
    *,
    split: Split = "sequential",
    chat: bool | None = None,
) -> Explanation:
    """Split the logits of every token of a prompt, as the last token (or the marked query) sees them.

    Parameters
    ----------
    features : a `Fit`, or subspaces of this head by name.
    split : ``sequential`` (the paper's), ``average`` over all orders, or ``oblique``.
    chat : whether the prompt goes into the chat template; as the features were fitted, if not given.
    """
    start = time.perf_counter()
    head = scope.check(head)
    if isinstance(features, Fit):
        chosen = {name: features[name, head] for name in default_features(features)}
        space = features.space
    else:
        check_kind(
            features, Mapping, "features are a fit, or subspaces by name, as {'lexical': fit['lexical', 'L18H6']}"
        )
        chosen = dict(features)
        spaces = {str(subspace.about.get("space", "post_rope")) for subspace in chosen.values()}
        if len(spaces) > 1:
            raise BadInput(f"the features were fitted in different spaces ({', '.join(sorted(spaces))}): take one.")
        space = cast(Space, spaces.pop() if spaces else "post_rope")
    if isinstance(prompt, Example) and len(prompt.queries) > 1:
        raise BadInput(f"a prompt is explained from one query, but {len(prompt.queries)} are marked: mark one.")
    for name, subspace in chosen.items():
        if subspace.head is not None and subspace.head != head:
            raise BadInput(f"feature {name!r} belongs to {subspace.head}, not to {head}: name features of one head.")
        check_same_model(subspace.about, scope, f"feature {name!r}")
    chosen = dict(sorted(chosen.items(), key=lambda item: item[1].rank))
    if chat is None:
        chat = isinstance(features, Fit) and features.chat
    encoded = scope.encode([prompt], chat=chat)
    ids = encoded.inputs["input_ids"][0]
    query = int(encoded.places.query[0])
    every = tuple(Key((i, i + 1)) for i in range(query + 1))
    whole = Example(ids=tuple(ids.tolist()), queries=((query, query + 1),), keys=every)
    captured = next(iter(scope.capture([whole], [head], space=space, progress=False)))
    q, k = captured.q[0, 0], captured.k[0, 0]
    bases = {name: subspace.basis("query") for name, subspace in chosen.items()}
    found = attribute_logits(q, k, float(captured.scale[0]), bases, split)
    reverse = attribute_logits(q, k, float(captured.scale[0]), dict(reversed(bases.items())), "sequential")
    attention = captured.attention()[0, 0]
    tokens = scope.tokenizer.convert_ids_to_tokens(ids[: query + 1].tolist()) if scope.tokenizer else None
    texts = [scope.tokenizer.decode([i]) for i in ids[: query + 1].tolist()] if scope.tokenizer else None
    rows = [
        {"position": i, "token": texts[i] if texts else str(int(ids[i])), "attention": float(attention[i]),
         "logit": float(found.logits[i])} | {name: float(part[i]) for name, part in found.parts.items()}
        for i in range(query + 1)
    ]  # fmt: skip
    best = max(range(len(rows)), key=lambda i: rows[i]["attention"])
    explained = _explained(found.logits, found.parts[RESIDUAL])
    shown = ", ".join(f"{name} {rows[best][name]:.2f}" for name in found.parts)
    return Explanation(
        experiment="explain",
        answer=(
            f"{head} gives {rows[best]['attention']:.2f} of its attention to {rows[best]['token']!r} "
            f"(token {best}): logit {rows[best]['logit']:.2f} = {shown}."
        ),
        tables={
            "tokens": rows,
            "summary": [
                {
                    "feature": name, "rank": chosen[name].rank if name in chosen else None,
                    "variance_share": _share(part, found.logits),
                    "reverse_order": _share(reverse.parts[name], found.logits),
                }
                for name, part in found.parts.items()
            ],
            "overlap": [{"one": a, "other": b, "cosine": cosine} for (a, b), cosine in found.overlap.items()],
        },
        model=scope.name,
        seconds=time.perf_counter() - start,
        provenance=provenance(
            model=scope.name, weights=scope.weights_hash, head=str(head), prompt=str(whole.show(2000)), split=split,
            tokens=tokens, explained=explained, space=space,
        ),
    )  # fmt: skip


def _share(part: torch.Tensor, logits: torch.Tensor) -> float:
    """Share of the logits' variance over tokens that a part carries: covariance over variance; shares sum to 1.

    A constant added to all logits changes no attention, so only what varies over tokens counts.
    """
    centred, of = part - part.mean(), logits - logits.mean()
    total = float((of * of).sum())
    return float((centred * of).sum()) / total if total > 0 else 0.0


def _explained(logits: torch.Tensor, residual: torch.Tensor) -> float:
    return 1 - _share(residual, logits)
