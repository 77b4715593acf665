"""Relative logits in numbers: weights of keys, what is measured of attention rows, sums by word,
and writers at random.

Weights w sum to 0 over the keys, + on the right ones and − on the others: ``ℓ = Σ_t w_t scale
q·k_t``. A `Tally` adds up what prompts give, by the word they ask for: any number of them takes the
same room, and intervals resample words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.attention import AttentionRows, soft
from qkscope.heads import Head, Writer
from qkscope.sums.intervals import clustered_bootstrap

#: Attention on the right keys and on the first token, softmax and accuracy among the named keys, relative logit.
METRICS = ("attention", "first", "among", "accuracy", "logit")

Side = Literal["query", "key"]
SIDES: tuple[Side, Side] = ("query", "key")
Marks = Int[Tensor, "n k"]  # a number for each named key
PAIRS = 20
_NEAREST = 8  # MLPs that may stand in for one


def relative_weights(signs: Marks) -> Float[Tensor, "n k"]:
    """Weights of keys: the mean of those marked + less the mean of those marked −.

    >>> relative_weights(torch.tensor([[1, -1, -1, 0]]))
    tensor([[ 1.0000, -0.5000, -0.5000,  0.0000]])
    """
    right, other = ((signs * sign > 0).float() for sign in (1, -1))
    return right / right.sum(1, keepdim=True).clamp_min(1) - other / other.sum(
        1, keepdim=True
    ).clamp_min(1)


def metrics(
    rows: AttentionRows, named: Marks, signs: Marks, q: Any = None, k: Any = None, P: Any = None
) -> Float[Tensor, "x n m"]:
    """`METRICS` of one head's rows over all tokens, x times over with other queries and other named
    keys.

    Parameters
    ----------
    rows : the head's queries with every token of the prompt as a key.
    named, signs : columns of the named keys, and +1 for right, −1 for other, 0 for none.
    q, k : what stands instead, Float [x, n, d] and [x, n, k, d]; the first token's key stays, named
        or not.
    P : a projector (d, d) put between query and key, to look inside a feature; for the relative
        logit alone.
    """
    first = (
        rows.present().int().argmax(1)[:, None]
    )  # padding stands before it, or behind the prompt
    keys = rows.k[:, 0].gather(1, named[..., None].expand(-1, -1, rows.d_head))
    q = rows.q[None, :, 0] if q is None else q
    k = keys[None] if k is None else torch.where((named == first)[..., None], keys, k)
    scale = float(torch.as_tensor(rows.scale).flatten()[0])
    products = torch.einsum("xnd,ntd->nxt", q, rows.k[:, 0]) * scale
    at_named = torch.einsum("xnd,xnkd->nxk", q, k) * scale
    columns = named[:, None].expand_as(at_named)
    shown = signs[:, None] != 0
    right = (signs > 0)[:, None]
    beyond = columns.masked_fill(
        ~shown, products.shape[-1]
    )  # padded slots, which may point at a named key's column
    products = pad(products, (0, 1)).scatter(-1, beyond, at_named)[..., :-1]
    attention = rows.attention(products)
    own = rows.logits(products).gather(-1, columns).masked_fill(~shown, -torch.inf)
    if P is not None:
        at_named = torch.einsum("xnd,xnkd->nxk", q @ P.to(q), k) * scale
    measured = [
        (attention.gather(-1, columns) * right).sum(-1),
        attention.gather(-1, first[:, None].expand(-1, attention.shape[1], 1))[..., 0],
        (soft(own) * right).sum(-1),
        right.expand_as(own).gather(-1, own.argmax(-1, keepdim=True))[..., 0].to(q),
        (at_named * relative_weights(signs)[:, None].to(q)).sum(-1),
    ]
    return torch.stack(measured, dim=-1).transpose(0, 1)


# ---------------------------------------------------------------------- sums by word, and their
# tables


class Measurement(NamedTuple):
    """What every prompt of a batch gives: values by name, how far parts miss their sum, which
    prompts count.
    """

    values: Mapping[Any, Float[Tensor, "n *v"]]
    error: Float[Tensor, " n"] | None = None
    used: Bool[Tensor, " n"] | None = None
    kept: Any = None


class Tally:
    """Sums of named vectors by word, how many prompts each word has, and how far parts were from
    summing, at most.

    Its tensors are as large after the last prompt as after the first.

    Parameters
    ----------
    words : all that will come; intervals resample them in this order.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(dict.fromkeys(words))
        self._place = {word: i for i, word in enumerate(self.words)}
        self.sums: dict[Any, Tensor] = {}

    @classmethod
    def of_prompt(cls, given: Measurement) -> Tally:
        """Tally of a single prompt, without intervals."""
        tally = cls([""])
        tally.add([""], given)
        return tally

    def add(self, words: Sequence[str], given: Measurement) -> None:
        """Add prompts: all of them, or those that count."""
        used = torch.ones(len(words), dtype=torch.bool) if given.used is None else given.used.cpu()
        places = torch.tensor([self._place[word] for word in words])[used]
        for name, value in {**given.values, "count": torch.ones(len(words))}.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros(
                    len(self.words), *value.shape[1:], dtype=torch.float64
                )
            self.sums[name].index_add_(0, places, value.cpu().double()[used])
        missed = (
            torch.zeros(1) if given.error is None or not used.any() else given.error.cpu()[used]
        )
        self.sums.setdefault("error", torch.zeros(1, dtype=torch.float64)).clamp_(
            min=float(missed.max())
        )

    @property
    def error(self) -> float:
        """How far parts were from summing, at most."""
        return float(self.sums["error"])

    @property
    def rows(self) -> int:
        """How many prompts there were."""
        return int(self.sums["count"].sum())

    def mean(self, name: Any) -> Float[Tensor, "*v"]:
        """The mean over all prompts."""
        return self.sums[name].sum(0) / self.rows

    def interval(
        self, name: Any, columns: Any = slice(None)
    ) -> tuple[Float[Tensor, "*v"], Float[Tensor, "*v"]]:
        """95% interval of the mean, resampling words; NaN if there is one word only."""
        there = self.sums["count"].nonzero()[:, 0]
        sizes = self.sums["count"][there]
        means = self.sums[name][there]
        means = means[:, columns] if means.ndim > 1 else means
        means = means / sizes.view(-1, *[1] * (means.ndim - 1))
        rows = torch.repeat_interleave(torch.arange(len(there)), sizes.long())
        return clustered_bootstrap(means[rows], rows)

    def ends(self, name: str, columns: Any = slice(None)) -> list[list[float | None]]:
        """The ends of intervals as tables have them: None where there are none."""
        ends: list[list[float | None]] = [end.tolist() for end in self.interval(name, columns)]
        return ends if len(self.words) > 1 else [[None] * len(end) for end in ends]

    def writer_rows(
        self, head: Head, names: Sequence[str], count: int | None = None
    ) -> list[dict[str, Any]]:
        """The table of writers: both sides, the largest first (the first ``count``)."""
        made = []
        total = float(self.mean("total"))
        for side in SIDES:
            values = self.mean(side)
            order = values.abs().argsort(descending=True).tolist()[:count]
            made += [
                {"head": str(head), "side": side, "writer": names[i], "value": float(values[i]),
                 "share": float(values[i]) / total if total else None, "low": low, "high": high}
                for i, low, high in zip(order, *self.ends(side, order), strict=True)
            ]  # fmt: skip
        return made

    def pair_rows(
        self, head: Head, names: Sequence[str], pairs: Sequence[tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """The table of pairs."""
        columns = self.mean("pairs").tolist(), *self.ends("pairs")
        return [
            {
                "head": str(head),
                "query_writer": names[a],
                "key_writer": names[b],
                "value": v,
                "low": low,
                "high": high,
            }
            for (a, b), v, low, high in zip(pairs, *columns, strict=True)
        ]

    def check_row(self, head: Head, **more: Any) -> dict[str, Any]:
        """The row of this head in the table ``check``.

        ``cancels``: how many times over writers give the logit, their signs left out: 1 where no
        share is negative, 3 where the negative ones take back half of what the positive ones give.
        """
        total = float(self.mean("total"))
        gross = max(float(self.mean(side).abs().sum()) for side in SIDES)
        cancels = gross / abs(total) if total else float("inf")
        return {"head": str(head), "sum_error": self.error, "logit": total, "cancels": cancels, **more,
                "n": self.rows}  # fmt: skip


def strongest_pairs(pairs: Float[Tensor, "c c"]) -> list[tuple[int, int]]:
    """The largest pairs by size, biases left out."""
    flat = pairs[:-1, :-1].abs().flatten().argsort(descending=True)[:PAIRS].tolist()
    return [divmod(i, len(pairs) - 1) for i in flat]


# ---------------------------------------------------------------------- some of the writers


def first_by(scores: Float[Tensor, " c"], size: int, signed: bool = False) -> list[int]:
    """The writers with the largest scores, by size or by signed value; biases, the last writer, are
    none.

    >>> first_by(torch.tensor([1.0, -3.0, 2.0, 9.0]), 2), first_by(torch.tensor([1.0, -3.0, 2.0, 9.0]), 2, signed=True)
    ([1, 2], [2, 0])
    """
    return (scores[:-1] if signed else scores[:-1].abs()).argsort(descending=True)[:size].tolist()


def draw_alike(
    chosen: Sequence[int], writers: Sequence[Writer], seed: int, least: int = 1
) -> list[int]:
    """Other writers at random, one for each chosen: of its kind and layer, or of the nearest where
    there are too few.

    A layer has many heads and one MLP, so that for an MLP those of the nearest layers stand in, and
    for a head where there are fewer than ``least`` others.

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
        far = sorted(abs(writers[c].layer - own.layer) for c in same)[
            : _NEAREST if own.head is None else least
        ][-1]
        alike = [c for c in same if abs(writers[c].layer - own.layer) <= far]
        drawn.append(alike[int(torch.randint(len(alike), (1,), generator=generator))])
    return drawn


def different(draws: Iterable[Mapping[str, list[int]]]) -> list[Mapping[str, list[int]]]:
    """The different sets of writers (by side) among some draws: of few writers alike, many draws
    are one set.

    >>> different([{"key": [1, 2]}, {"key": [2, 1]}, {"key": [1, 3]}])
    [{'key': [2, 1]}, {'key': [1, 3]}]
    """
    return list(
        {tuple((side, *sorted(own)) for side, own in one.items()): one for one in draws}.values()
    )
