"""Relative logits: key weights, measures of attention rows, sums by word, random writers.

Weights w sum to 0 over the keys, + on the right ones and − on the others::

    ℓ = Σ_t w_t scale q·k_t

A `Tally` adds up what prompts give, by the word they ask for: any number of them takes the
same room, and intervals resample words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.attention import AttentionRows, soft
from qkscope.heads import Head, Side, Writer
from qkscope.sums.intervals import clustered_bootstrap

#: Attention on the right keys and on the first token, softmax and accuracy among the named keys,
#: relative logit.
METRICS = ("attention", "first", "among", "accuracy", "logit")

SIDES: tuple[Side, Side] = ("query", "key")
Marks = Int[Tensor, "n k"]  # a number for each named key
PAIRS = 20
_NEAREST = 8  # MLPs that may stand in for one


def relative_weights(signs: Marks) -> Float[Tensor, "n k"]:
    """Weights of keys: the mean of those marked + less the mean of those marked −.

    >>> relative_weights(torch.tensor([[1, -1, -1, 0]]))
    tensor([[ 1.0000, -0.5000, -0.5000,  0.0000]])
    """
    return _mean_weights(signs > 0) - _mean_weights(signs < 0)


def _mean_weights(chosen: Bool[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Weights that give the mean over the chosen keys of each row."""
    weights = chosen.float()
    count = weights.sum(1, keepdim=True).clamp_min(1)
    return weights / count


def metrics(
    rows: AttentionRows,
    named: Marks,
    signs: Marks,
    q: Float[Tensor, "x n d"] | None = None,
    k: Float[Tensor, "x n k d"] | None = None,
    P: Float[Tensor, "d d"] | None = None,
) -> Float[Tensor, "x n m"]:
    """`METRICS` of one head's rows over all tokens, x times over with other queries and named keys.

    Parameters
    ----------
    rows : the head's queries with every token of the prompt as a key.
    named, signs : columns of the named keys, and +1 for right, −1 for other, 0 for none.
    q, k : what stands instead; the first token's key stays, named or not.
    P : a projector put between query and key, to look inside a feature; for the relative logit
        alone.
    """
    # padding stands before the first token, or behind the prompt
    first = rows.present().int().argmax(1)[:, None]
    all_keys = rows.k[:, 0]
    keys_at = named[..., None].expand(-1, -1, rows.d_head)
    keys = all_keys.gather(1, keys_at)
    if q is None:
        q = rows.q[None, :, 0]
    if k is None:
        k = keys[None]
    else:
        is_first = (named == first)[..., None]
        k = torch.where(is_first, keys, k)
    scale = float(torch.as_tensor(rows.scale).flatten()[0])
    all_products = torch.einsum("xnd,ntd->nxt", q, all_keys) * scale
    at_named = torch.einsum("xnd,xnkd->nxk", q, k) * scale
    takes_part = signs[:, None] != 0
    columns = named[:, None].expand_as(at_named)
    products = _replaced(all_products, columns, at_named, takes_part)
    attention = rows.attention(products)
    named_logits = rows.logits(products).gather(-1, columns)
    logits = named_logits.masked_fill(~takes_part, -torch.inf)
    if P is not None:
        projected = q @ P.to(q)
        at_named = torch.einsum("xnd,xnkd->nxk", projected, k) * scale
    is_right = (signs > 0)[:, None]
    times = attention.shape[1]
    first_column = first[:, None].expand(-1, times, 1)
    largest = logits.argmax(-1, keepdim=True)
    weights = relative_weights(signs)[:, None].to(q)
    on_named = attention.gather(-1, columns)
    among_named = soft(logits)
    is_largest_right = is_right.expand_as(logits).gather(-1, largest)[..., 0]
    measures = {
        "attention": (on_named * is_right).sum(-1),
        "first": attention.gather(-1, first_column)[..., 0],
        "among": (among_named * is_right).sum(-1),
        "accuracy": is_largest_right.to(q),
        "logit": (at_named * weights).sum(-1),
    }
    by_name = [measures[name] for name in METRICS]
    return torch.stack(by_name, dim=-1).transpose(0, 1)


def _replaced(
    products: Float[Tensor, "n x t"],
    columns: Int[Tensor, "n x k"],
    values: Float[Tensor, "n x k"],
    takes_part: Bool[Tensor, "n 1 k"],
) -> Float[Tensor, "n x t"]:
    """Products with other values in the columns of the named keys that take part."""
    # padded slots may point at a named key's column: they write to one beyond, which is cut off
    beyond = products.shape[-1]
    targets = columns.masked_fill(~takes_part, beyond)
    replaced = pad(products, (0, 1)).scatter(-1, targets, values)
    return replaced[..., :-1]


# ---------------------------------------------------------------------- sums by word, and tables
# ---------------------------------------------------------------------- sums by word, and their
# tables


class Measurement(NamedTuple):
    """Values of every prompt of a batch.

    Values by name, how far parts miss their sum, and which prompts count.
    """

    values: Mapping[Any, Float[Tensor, " n *v"]]
    error: Float[Tensor, " n"] | None = None
    used: Bool[Tensor, " n"] | None = None
    kept: Any = None


class Tally:
    """Sums of named vectors by word, how many prompts each word has, and the largest sum error.

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
    def of_prompt(cls, measurement: Measurement) -> Tally:
        """Tally of a single prompt, without intervals."""
        tally = cls([""])
        tally.add([""], measurement)
        return tally

    def add(self, words: Sequence[str], measurement: Measurement) -> None:
        """Add prompts: all of them, or those that count."""
        used = torch.ones(len(words), dtype=torch.bool)
        if measurement.used is not None:
            used = measurement.used.cpu()
        place_of_prompt = [self._place[word] for word in words]
        places = torch.tensor(place_of_prompt)[used]
        values = {**measurement.values, "count": torch.ones(len(words))}
        for name, value in values.items():
            if name not in self.sums:
                shape = (len(self.words), *value.shape[1:])
                self.sums[name] = torch.zeros(shape, dtype=torch.float64)
            added = value.cpu().double()[used]
            self.sums[name].index_add_(0, places, added)
        error = self.sums.setdefault("error", torch.zeros(1, dtype=torch.float64))
        if measurement.error is not None and used.any():
            missed = measurement.error.cpu()[used]
            error.clamp_(min=float(missed.max()))

    @property
    def error(self) -> float:
        """Largest error of a sum of parts."""
        return float(self.sums["error"])

    @property
    def rows(self) -> int:
        """Number of prompts."""
        return int(self.sums["count"].sum())

    def mean(self, name: Any) -> Float[Tensor, "*v"]:
        """Mean over all prompts."""
        return self.sums[name].sum(0) / self.rows

    def interval(
        self, name: Any, columns: Any = slice(None)
    ) -> tuple[Float[Tensor, "*v"], Float[Tensor, "*v"]]:
        """95% interval of the mean, resampling words; NaN if there is one word only."""
        with_prompts = self.sums["count"].nonzero()[:, 0]
        sizes = self.sums["count"][with_prompts]
        sums = self.sums[name][with_prompts]
        if sums.ndim > 1:
            sums = sums[:, columns]
        behind = [1] * (sums.ndim - 1)
        means = sums / sizes.view(-1, *behind)
        # a word's mean stands once for each of its prompts
        rows = torch.repeat_interleave(torch.arange(len(sizes)), sizes.long())
        return clustered_bootstrap(means[rows], rows)

    def ends(self, name: str, columns: Any = slice(None)) -> list[list[float | None]]:
        """Ends of intervals for a table: None where there is no interval."""
        low, high = self.interval(name, columns)
        if len(self.words) > 1:
            return [low.tolist(), high.tolist()]
        return [[None] * len(low), [None] * len(high)]

    def writer_rows(
        self, head: Head, names: Sequence[str], count: int | None = None
    ) -> list[dict[str, Any]]:
        """The table of writers: both sides, the largest first (the first ``count``)."""
        table = []
        total = float(self.mean("total"))
        for side in SIDES:
            values = self.mean(side)
            order = values.abs().argsort(descending=True).tolist()[:count]
            lows, highs = self.ends(side, order)
            for i, low, high in zip(order, lows, highs, strict=True):
                value = float(values[i])
                row = {
                    "head": str(head),
                    "side": side,
                    "writer": names[i],
                    "value": value,
                    "share": value / total if total else None,
                    "low": low,
                    "high": high,
                }
                table.append(row)
        return table

    def pair_rows(
        self, head: Head, names: Sequence[str], pairs: Sequence[tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """The table of pairs."""
        values = self.mean("pairs").tolist()
        lows, highs = self.ends("pairs")
        table = []
        for (query, key), value, low, high in zip(pairs, values, lows, highs, strict=True):
            row = {
                "head": str(head),
                "query_writer": names[query],
                "key_writer": names[key],
                "value": value,
                "low": low,
                "high": high,
            }
            table.append(row)
        return table

    def check_row(self, head: Head, **more: Any) -> dict[str, Any]:
        """The row of this head in the table ``check``.

        ``cancels``: how many times over writers give the logit, their signs left out: 1 where no
        share is negative, 3 where the negative ones take back half of what the positive ones give.
        """
        total = float(self.mean("total"))
        sizes = [self.mean(side).abs().sum() for side in SIDES]
        gross = max(float(size) for size in sizes)
        cancels = gross / abs(total) if total else float("inf")
        return {
            "head": str(head),
            "sum_error": self.error,
            "logit": total,
            "cancels": cancels,
            **more,
            "n": self.rows,
        }


def strongest_pairs(pairs: Float[Tensor, "c c"]) -> list[tuple[int, int]]:
    """The largest pairs by size, biases left out."""
    writers = len(pairs) - 1
    sizes = pairs[:-1, :-1].abs().flatten()
    largest = sizes.argsort(descending=True)[:PAIRS]
    return [divmod(place, writers) for place in largest.tolist()]


# ---------------------------------------------------------------------- some of the writers


def first_by(scores: Float[Tensor, " c"], size: int, signed: bool = False) -> list[int]:
    """The writers with the largest scores, by size or signed; not the biases, which are last.

    >>> scores = torch.tensor([1.0, -3.0, 2.0, 9.0])
    >>> first_by(scores, 2), first_by(scores, 2, signed=True)
    ([1, 2], [2, 0])
    """
    of_writers = scores[:-1]
    if not signed:
        of_writers = of_writers.abs()
    return of_writers.argsort(descending=True)[:size].tolist()


def draw_alike(
    chosen: Sequence[int], writers: Sequence[Writer], seed: int, least: int = 1
) -> list[int]:
    """Draw other writers, one for each chosen, of its kind and layer or of the nearest.

    A layer has many heads and one MLP, so that for an MLP those of the nearest layers stand in, and
    for a head where there are fewer than ``least`` others.

    >>> from qkscope.heads import parse_writers
    >>> draw_alike([0, 3], parse_writers(["L0H0", "L0H1", "L0H2", "M0", "M1"]), seed=0)[1]
    4
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    for index in chosen:
        taken = {*chosen, *drawn}
        free = [c for c in range(len(writers)) if c not in taken]
        if not free:
            break
        alike = _alike(writers[index], free, writers, least)
        place = torch.randint(len(alike), (1,), generator=generator)
        drawn.append(alike[int(place)])
    return drawn


def _alike(writer: Writer, free: Sequence[int], writers: Sequence[Writer], least: int) -> list[int]:
    """Free writers that may stand in for another: of its kind, if any is, and of near layers."""
    same_kind = [c for c in free if writers[c].kind == writer.kind] or free
    count = least if writer.kind == "head" else _NEAREST
    distances = [abs(writers[c].layer - writer.layer) for c in same_kind]
    farthest = sorted(distances)[:count][-1]
    return [c for c, distance in zip(same_kind, distances, strict=True) if distance <= farthest]


def different(draws: Iterable[Mapping[str, list[int]]]) -> list[Mapping[str, list[int]]]:
    """The different sets of writers (by side) among some draws.

    Of few writers alike, many draws are one set.

    >>> different([{"key": [1, 2]}, {"key": [2, 1]}, {"key": [1, 3]}])
    [{'key': [2, 1]}, {'key': [1, 3]}]
    """
    sets = {}
    for draw in draws:
        members = [(side, *sorted(writers)) for side, writers in draw.items()]
        sets[tuple(members)] = draw
    return list(sets.values())
