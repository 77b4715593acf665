"""A relative logit split among writers, and the causal test of that split: edges cut, and edges kept.

With ``q = Σ_c q_c`` and ``k_t = Σ_c k_c(t)``, and weights w that sum to 0 over the keys (+ on the right ones, − on the
others),

    ``ℓ = Σ_t w_t scale q·k_t = scale Σ_{c,c'} q_c · Σ_t w_t k_c'(t)``        (pairs; summed over one side: writers)

An edge is one writer's part in one side of one head. To *cut* edges their parts are replaced (by a mean, or by those of
another prompt) and all else stays; to *keep* edges all the others are replaced. Keys that are not named, the first
token among them, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.attention import AttentionRows
from qkscope.draws import derived_seed
from qkscope.heads import Writer

METRICS = ("attention", "first", "among", "accuracy", "logit")
"""Attention on the right keys and on the first token, softmax and accuracy among the named keys, relative logit."""

EdgeSide = Literal["key", "query", "both"]
EdgeKind = Literal["cut", "keep"]
SIDES: tuple[EdgeSide, ...] = ("key", "query", "both")
SIZES = (1, 2, 3, 5, 10)
RANDOM = "random"
_NEAREST = 8  # MLPs that may stand in for one


def relative_weights(signs: Int[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Weights of keys: the mean of those marked + less the mean of those marked −.

    >>> relative_weights(torch.tensor([[1, -1, -1, 0]]))
    tensor([[ 1.0000, -0.5000, -0.5000,  0.0000]])
    """
    right, other = ((signs * sign > 0).float() for sign in (1, -1))
    return right / right.sum(1, keepdim=True).clamp_min(1) - other / other.sum(1, keepdim=True).clamp_min(1)


def cancelling(values: Float[Tensor, " c"], total: float) -> float:
    """How many times over writers give the logit, their signs left out: 1 where no share is negative.

    At 3 the negative shares take back half of what the positive ones give.

    >>> cancelling(torch.tensor([4.0, -2.0]), 2.0)
    3.0
    """
    return float(values.abs().sum()) / abs(total) if total else float("inf")


@dataclass(frozen=True)
class Edge:
    """A row of the table of edges: which were replaced, how they were chosen, and what with."""

    side: EdgeSide
    kind: EdgeKind
    by: str
    k: int
    replaced: Literal["mean", "resample"] = "mean"
    norms: Literal["held", "live"] = "held"
    draw: int = 0


def first_by(scores: Float[Tensor, " c"], size: int, signed: bool = False) -> list[int]:
    """The writers with the largest scores, by size or by signed value; biases, the last writer, are none.

    >>> first_by(torch.tensor([1.0, -3.0, 2.0, 9.0]), 2), first_by(torch.tensor([1.0, -3.0, 2.0, 9.0]), 2, signed=True)
    ([1, 2], [2, 0])
    """
    values = scores[:-1] if signed else scores[:-1].abs()
    return values.argsort(descending=True)[:size].tolist()


def draw_alike(chosen: Sequence[int], writers: Sequence[Writer], seed: int, least: int = 1) -> list[int]:
    """Other writers at random, one for each chosen: of its kind and layer, or of the nearest where there are too few.

    A layer has many heads and one MLP, so that for an MLP those of the nearest layers stand in, and for a head where
    there are fewer than ``least`` others.

    >>> from qkscope.heads import parse_writers
    >>> draw_alike([0, 3], parse_writers(["L0H0", "L0H1", "L0H2", "M0", "M1"]), seed=0)[1]
    4
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    for own in (writers[c] for c in chosen):
        free = [c for c in range(len(writers)) if c not in chosen and c not in drawn]
        same = [c for c in free if writers[c].kind == own.kind] or free
        if not same:
            break
        far = sorted(abs(writers[c].layer - own.layer) for c in same)[: _NEAREST if own.head is None else least][-1]
        alike = [c for c in same if abs(writers[c].layer - own.layer) <= far]
        drawn.append(alike[int(torch.randint(len(alike), (1,), generator=generator))])
    return drawn


def different(draws: Iterable[Mapping[str, list[int]]]) -> list[Mapping[str, list[int]]]:
    """The different sets of writers (by side) among some draws: of few writers alike, many draws are one set.

    >>> different([{"key": [1, 2]}, {"key": [2, 1]}, {"key": [1, 3]}])
    [{'key': [2, 1]}, {'key': [1, 3]}]
    """
    return list({tuple((side, *sorted(own)) for side, own in one.items()): one for one in draws}.values())


def edge_masks(
    edges: Sequence[Edge],
    scores: Mapping[str, Mapping[str, Float[Tensor, " c"]]],
    writers: Sequence[Writer],
    seed: int = 0,
) -> tuple[Bool[Tensor, "x c"], Bool[Tensor, "x c"]]:
    """Which parts of the query, and which of the keys, each condition replaces.

    Parameters
    ----------
    edges : the conditions.
    scores : of each way to choose, by side (``query``, ``key``).
    writers : all but the last, the biases.
    seed : of the random writers.
    """
    masks = torch.zeros(2, len(edges), len(writers) + 1, dtype=torch.bool)
    for row, edge in enumerate(edges):
        for side, mask in zip(("query", "key"), masks, strict=True):
            if edge.side not in (side, "both"):
                continue
            own = scores["share" if edge.by == RANDOM else edge.by][side]
            chosen = first_by(own, edge.k, signed=edge.by == "signed")
            if edge.by == RANDOM:
                chosen = draw_alike(chosen, writers, derived_seed(seed, "edges", side, edge.k, edge.draw))
            mask[row, chosen] = True
            if edge.kind == "keep":
                mask[row, :-1] = ~mask[row, :-1]
    return masks[0], masks[1]


@dataclass(frozen=True)
class EdgeRows:
    """Attention rows of one head in which parts of the query and of named keys can be replaced.

    Parameters
    ----------
    rows : the head's queries with every token of the prompt as a key.
    named, signs : columns of the named keys, and +1 for right, −1 for other, 0 for none.
    first : column of each prompt's first token.
    dq, dk : what each writer's part is, less what it is replaced by.
    projector : put between query and key, to look inside a feature; for the relative logit alone.
    """

    rows: AttentionRows
    named: Int[Tensor, "n k"]
    signs: Int[Tensor, "n k"]
    first: Int[Tensor, " n"]
    dq: Float[Tensor, "n c d"]
    dk: Float[Tensor, "n c k d"]
    projector: Float[Tensor, "d d"] | None = None

    def keys(self) -> Float[Tensor, "n k d"]:
        """The named keys as they are."""
        every = self.rows.k[:, 0]
        return every.gather(1, self.named[..., None].expand(-1, -1, every.shape[-1]))

    def replaced(self, query: Bool[Tensor, "x c"], key: Bool[Tensor, "x c"]) -> Float[Tensor, "x n m"]:
        """What is measured once the parts that each condition names are replaced."""
        q = self.rows.q[None, :, 0] - torch.einsum("xc,ncd->xnd", query.to(self.dq), self.dq)
        flat = self.dk.flatten(2).transpose(0, 1)  # c n kd
        moved = (key.to(self.dk) @ flat.flatten(1)).unflatten(1, (len(self.dk), *self.dk.shape[2:]))
        return self.measure(q, self.keys()[None] - moved)

    def measure(self, q: Float[Tensor, "x n d"], k: Float[Tensor, "x n k d"]) -> Float[Tensor, "x n m"]:
        """`METRICS` with other queries and other named keys in the rows; the first token's key stays, named or not."""
        k = torch.where((self.named == self.first[:, None])[..., None], self.keys(), k)
        scale = float(torch.as_tensor(self.rows.scale).flatten()[0])
        products = torch.einsum("xnd,ntd->nxt", q, self.rows.k[:, 0]) * scale
        at_named = torch.einsum("xnd,xnkd->nxk", q, k) * scale
        columns = self.named[:, None].expand_as(at_named)
        shown = self.signs[:, None] != 0
        beyond = columns.masked_fill(
            ~shown, products.shape[-1]
        )  # padded slots, which may point at a named key's column
        products = pad(products, (0, 1)).scatter(-1, beyond, at_named)[..., :-1]
        logits, attention = self.rows.logits(products), self.rows.attention(products)
        own = logits.gather(-1, columns).masked_fill(~shown, -torch.inf)
        right = (self.signs > 0)[:, None]
        among = own.softmax(-1)
        inside = at_named
        if self.projector is not None:
            inside = torch.einsum("xnd,xnkd->nxk", q @ self.projector.to(q), k) * scale
        found = [
            (attention.gather(-1, columns) * right).sum(-1),
            attention.gather(-1, self.first[:, None, None].expand(-1, attention.shape[1], 1))[..., 0],
            (among * right).sum(-1),
            right.expand_as(own).gather(-1, own.argmax(-1, keepdim=True))[..., 0].to(q),
            (inside * relative_weights(self.signs)[:, None].to(q)).sum(-1),
        ]
        return torch.stack(found, dim=-1).transpose(0, 1)
