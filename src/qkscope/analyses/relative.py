"""Relative attention of real heads, split over their singular basis: ``r = ℓ_i − mean_{j≠i} ℓ_j = Σ_m c_m``.

Queries and keys are taken in the query's frame, where the split is exact under RoPE too (`qkscope.maths.singular`); the
mean runs over the other keys that the query sees, so a sliding window counts its own keys alone. A sink has a logit but
no key, and takes no part. Where a family caps its logits, r is the logit before the cap: ``scale · qᵀ Δk``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.about import check_same_model
from qkscope.analyses.singular import singular_basis
from qkscope.capture.encode import Encoding
from qkscope.capture.pick import Capture, Places
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput, check_least
from qkscope.examples import Example, Key
from qkscope.heads import Head
from qkscope.kinds import checked_call, checked_class
from qkscope.maths.relative import (
    cancellation,
    key_difference,
    null_count,
    reconstruction_count,
    rotated_sparsity,
    shared_sparsity,
    sparsity,
)
from qkscope.maths.singular import SingularBasis, singular_coordinates
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result

TOLERANCE = 0.99


@dataclass(frozen=True)
class RelativeRows:
    """Terms of rows (an example and one of its queries) and heads; NaN where a query does not see the key.

    ``terms = query · s · key``, with ``query = α`` (QK-norm's scalar included), ``key = γ / σ`` times the call's scale.
    ``constant`` is the part of QK-norm's own bias: ``terms.sum(-1) + constant = relative``.
    """

    terms: Float[Tensor, "b h m"]
    constant: Float[Tensor, "b h"]
    relative: Float[Tensor, "b h"]
    attention: Float[Tensor, "b h"]
    query: Float[Tensor, "b h m"]
    key: Float[Tensor, "b h m"]
    q: Float[Tensor, "b h d"]
    difference: Float[Tensor, "b h d"]
    seen: Int[Tensor, "b h"]

    def nulls(
        self, s: Float[Tensor, "h m"], draws: int, seed: int, prompts: Sequence[int]
    ) -> tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]:
        """Sparsity under independently rotated singular vectors, and under one rotation of the head space."""
        turned = rotated_sparsity(self.query * self.key, s, draws, prompts, seed)
        return turned, shared_sparsity(self.q, self.difference, draws, prompts, seed + 1)


def relative_rows(
    scope: Scope,
    inputs: Encoding | dict[str, Tensor],
    places: Places,
    attended: Int[Tensor, "b h"] | Int[Tensor, " b"],
    basis: SingularBasis,
    heads: list[Head] | None = None,
) -> RelativeRows:
    """Run one batch and split the relative attention of every row on its attended key.

    Parameters
    ----------
    places : the rows, with every key of their sequences (`Encoding.everywhere`).
    attended : slot of the key asked about, for each row, or for each row and head.
    basis, heads : the singular basis, and which of its heads; all by default.
    """
    chosen = list(basis.heads) if heads is None else heads
    given = inputs.inputs if isinstance(inputs, Encoding) else inputs
    captured = scope.capture_inputs(given, places=places, heads=chosen, space="query_frame")
    return split_captured(captured, attended, basis)


def split_captured(
    captured: Capture,
    attended: Int[Tensor, "b h"] | Int[Tensor, " b"],
    basis: SingularBasis,
    rows: Sequence[int] | slice = slice(None),
    heads: Sequence[int] | None = None,
) -> RelativeRows:
    """Split whole rows that were captured in the query's frame; ``rows`` and ``heads`` (columns) pick some of them."""
    columns = list(range(len(captured.heads))) if heads is None else list(heads)
    index = basis.index([captured.heads[column] for column in columns])
    k = captured.k[rows][:, captured.kv_of_head[columns]].double().cpu()
    q, scale = captured.q[rows][:, columns].double().cpu(), captured.scale[columns].double().cpu()[:, None]
    slot = (attended if attended.ndim == 2 else attended[:, None].expand(-1, len(columns))).cpu().long()
    seen = captured.bias[rows][:, columns].isfinite().cpu()
    valid = seen.gather(-1, slot[..., None])[..., 0] & (seen.sum(-1) > 1)
    difference = key_difference(k, slot, torch.where(valid[..., None], seen, torch.ones_like(seen)))
    difference = difference.masked_fill(~valid[..., None], torch.nan)
    constant = basis.c_Q[index].double()
    read, s = basis.read[index], basis.S[index].double()
    alpha, gamma = singular_coordinates(read, q - constant, difference)
    floor = torch.finfo(torch.float64).eps * s.amax(-1, keepdim=True)
    attention = captured.attention()[rows][:, columns].cpu().gather(-1, slot[..., None])[..., 0].double()
    return RelativeRows(
        terms=scale * alpha * gamma,
        constant=scale[:, 0] * (constant * difference).sum(-1),
        relative=scale[:, 0] * (q * difference).sum(-1),
        attention=attention.masked_fill(~valid, torch.nan),
        query=alpha,
        key=scale * torch.where(s > floor, gamma / s.clamp_min(torch.finfo(s.dtype).tiny), 0.0),
        q=q,
        difference=scale * difference,
        seen=seen.sum(-1),
    )


@checked_class
@dataclass(frozen=True)
class RelativeAttention(Result):
    """Why this token rather than the others: the terms of one head's relative logit, largest first."""

    def show(self, rows: int = 8, width: int = 32) -> str:
        """A chart for the terminal: the largest terms as bars, and how few of them it takes."""
        check_least(1, rows=rows, width=width)
        terms = self.tables["terms"][:rows]
        top = max((abs(row["term"]) for row in self.tables["terms"]), default=0.0) or 1.0
        lines = [self.answer, f"{'vector':>7} {'sigma':>8} {'term':>8}"]
        for row in terms:
            bar = ("█" if row["term"] > 0 else "░") * round(abs(row["term"]) / top * width)
            lines.append(f"{row['vector']:>7} {row['sigma']:8.3f} {row['term']:8.3f} {bar}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.show()


@checked_call
def relative_attention(
    scope: Scope,
    example: Example | str,
    head: str | Head,
    *,
    query: str | int | None = None,
    key: str | int | None = None,
    basis: SingularBasis | None = None,
    chat: bool = False,
    draws: int = 20,
    seed: int = 0,
) -> RelativeAttention:
    """Split the relative attention of one head on one token over its singular vectors.

    Parameters
    ----------
    query, key : where the head looks from and at: a role of the example ("END", "IO") or a token's position. By default
        the example's own query (or the last token), and its key labelled as the answer, or else the token that gets
        the most attention beside the first.
    basis : of this head, if there is one already.
    draws, seed : of the rotated bases beside the sparsity.

    Returns
    -------
    RelativeAttention
        ``tables["terms"]`` (vector, sigma, query and key coordinate, term) sums with ``constant`` to ``relative``
        in ``tables["relative"]``.
    """
    start = time.perf_counter()
    head = scope.check(head)
    if draws < 1:
        raise BadInput(f"draws is the number of rotated bases, at least 1, but got {draws}.")
    example = Example(text=example) if isinstance(example, str) else example
    own = singular_basis(scope, [head]) if basis is None else basis
    check_same_model(own.about, scope, "this basis")
    encoded, slot = _row(scope, example, head, query, key, chat)
    places = encoded.everywhere()
    found = relative_rows(scope, encoded, places, slot, own, [head])
    (i,) = own.index([head])
    s, terms = own.S[i].double(), found.terms[0, 0]
    if bool(terms.isnan().any()):
        raise BadInput(f"{head} does not see token {int(slot[0])} from token {int(places.query[0])}, or sees no other:"
                       " ask about a key inside its window.")  # fmt: skip
    rotated, shared = found.nulls(own.S[[i]], draws, seed, [0])
    order = terms.abs().argsort(descending=True).tolist()
    rows = [
        {"vector": j, "sigma": float(s[j]), "query": float(found.query[0, 0, j]), "key": float(found.key[0, 0, j]),
         "term": float(terms[j])}
        for j in order
    ]  # fmt: skip
    ids = encoded.inputs["input_ids"][0]
    shown = [scope.tokenizer.decode([int(ids[x])]) if scope.tokenizer else str(int(ids[x]))
             for x in (int(places.query[0]), int(slot[0]))]  # fmt: skip
    relative, count = float(found.relative[0, 0]), float(reconstruction_count(terms))
    summary = {
        "head": str(head), "query": int(places.query[0]), "key": int(slot[0]), "query_token": shown[0],
        "key_token": shown[1], "attention": float(found.attention[0, 0]), "relative": relative,
        "constant": float(found.constant[0, 0]), "sparsity": float(sparsity(terms)), "rotated": float(rotated),
        "rotated_shared": float(shared), "count": count,
        "count_tol": float(reconstruction_count(terms, TOLERANCE)), "count_null": float(null_count(terms, seed=seed)),
        "count_tol_null": float(null_count(terms, TOLERANCE, seed=seed)),
        "cancellation": float(cancellation(terms)), "others": int(found.seen[0, 0]) - 1,
    }  # fmt: skip
    carried = f"{count:.0f} of {len(terms)} singular vectors reach it" if count == count else "it is not positive"
    return RelativeAttention(
        experiment="relative",
        answer=(
            f"From {shown[0]!r}, {head} gives {summary['attention']:.2f} of its attention to {shown[1]!r}, a logit "
            f"{relative:.2f} above the mean of the other {summary['others']}: {carried} (sparsity "
            f"{summary['sparsity']:.2f}, under rotated vectors {summary['rotated']:.2f})."
        ),
        tables={"relative": [summary], "terms": rows},
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(
            model=scope.name,
            weights=scope.weights_hash,
            head=str(head),
            prompt=example.show(2000),
            chat=chat,
            draws=draws,
        ),
    )


def _row(
    scope: Scope, example: Example, head: Head, query: str | int | None, key: str | int | None, chat: bool
) -> tuple[Encoding, Int[Tensor, " b"]]:
    """The example with the one query and key asked about, encoded, and the key's column."""
    asked: dict[str, Any] = {"text": example.text, "ids": example.ids, "roles": example.roles}
    if isinstance(query, str):
        asked["queries"] = (_role(example, query),)
    elif query is None:
        asked["queries"] = example.queries
        if len(example.queries) > 1:
            raise BadInput(f"the example marks {len(example.queries)} queries: say which with query=.")
    span = _role(example, key) if isinstance(key, str) else None
    if key is None:
        right = [k.span for k in example.keys if k.label("answer") > 0]
        span = right[0] if len(right) == 1 else None
    asked["keys"] = () if span is None else (Key(span),)
    encoded = scope.encode([Example(**asked)], chat=chat)
    length = int(encoded.inputs["input_ids"].shape[1])
    if isinstance(query, int):
        if not 0 <= query < length:
            raise BadInput(f"there is no token {query}: the prompt has {length}, counted from 0.")
        places = encoded.places
        encoded = Encoding(
            encoded.inputs, Places(places.row, torch.full_like(places.query, query), places.keys, places.key_mask),
            encoded.example, encoded.labels,
        )  # fmt: skip
    if span is not None:
        return encoded, encoded.places.keys[:, 0]
    if isinstance(key, int):
        if not 0 <= key < length:
            raise BadInput(f"there is no token {key}: the prompt has {length}, counted from 0.")
        return encoded, torch.tensor([key])
    attention = scope.capture_inputs(encoded.inputs, places=encoded.everywhere(), heads=[head]).attention()[0, 0]
    if length < 2:
        raise BadInput("relative attention needs another key beside the attended one: give a longer prompt.")
    return encoded, attention[1:].argmax()[None].cpu() + 1  # the first token is where idle heads look


def _role(example: Example, name: str) -> tuple[int, int]:
    if name not in example.roles:
        there = ", ".join(example.roles) or "none"
        raise BadInput(f"the example has no role {name!r}: there is {there}; or give a token's position.")
    return example.roles[name]
