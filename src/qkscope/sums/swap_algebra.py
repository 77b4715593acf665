"""The causal test: exchange two keys' coordinates in a subspace, see where attention goes (Lee et
al., Eq. 8-10).

``k̃_a = k_a + P (k_b − k_a)``, ``k̃_b = k_b + P (k_a − k_b)``. Only two logits of the row move, by
opposite amounts ``δ = scale · qᵀ P (k_b − k_a)``, so the edited attention has a closed form: no
second forward pass, and a thousand random subspaces cost a matrix product.

Where attention goes is not all: directions whose parts of the logit cancel each other blur a sharp
choice when one of them is swapped alone, and move attention without carrying anything. Logits add
up, so what is carried can be told: ``E[qᵀ P (k_a − k_b)] / E[qᵀ (k_a − k_b)]``, 1 for the whole
space.

Nor does attention that goes elsewhere say that the *feature* was exchanged. Where it can be
exchanged in the input, the row that the head then has is the truth, and an edited row is as good as
it is near: ``½ Σ |a − a_true|``, with all tokens that are not named as one more key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput, Head
from qkscope.attention import AttentionRows
from qkscope.results.result import Rows
from qkscope.seeds import draw_bits
from qkscope.sums.bases import Projector
from qkscope.sums.intervals import clustered_bootstrap

#: A way to choose k directions of every head; see `qkscope.sums.swap_methods`.
Method = Callable[[int | Sequence[int]], Projector]
Slots = Int[Tensor, " n"]  # a key of each row
Pairs = Mapping[Any, Any] | None  # for a condition, what it is compared with
_VERSIONS = (
    "oblique",
    "oracle",
    "summed",
    "trained",
)  # kinds that are another way to swap the feature itself
_MEASURES = ("shift", "gain", "carried", "carried_gain", "left")
_ENDS = ("", "_low", "_high")
_ATTENTION = ("orig_before", "target_before", "orig_after", "target_after")


class Condition(NamedTuple):
    """What is swapped: a feature, or by its ``kind`` another version of it or a baseline of its
    size.

    >>> [Condition("order").name, Condition("order", "oblique").name, Condition("order", "random").name]
    ['order', 'order_oblique', 'random_order']
    """

    feature: str
    kind: str = "feature"

    @property
    def name(self) -> str:
        """One name for both; a feature may be called anything, so that only both columns tell all
        rows apart.
        """
        if self.kind == "feature":
            return self.feature
        parts = (self.feature, self.kind) if self.kind in _VERSIONS else (self.kind, self.feature)
        return "_".join(part for part in parts if part)


Pair = tuple[Condition, Condition]  # to be compared


def swapped_keys(k_orig: Tensor, k_target: Tensor, projector: Projector) -> tuple[Tensor, Tensor]:
    """The two keys (``*n d``) after the exchange (Eq. 9, 10): what a patched forward pass writes."""
    difference = k_target - k_orig
    moved = (difference @ projector.right.to(difference)) @ projector.left.to(difference).mT
    return k_orig + moved, k_target - moved


class SwapEffect(NamedTuple):
    """Attention on the original and the target key, before and after; ``draws`` > 1 for random
    subspaces.

    ``flipped``: of all tokens of the row, the original key had the most attention, and the target
    has it afterwards; ``flipped_named``: the same of the named keys alone.
    """

    orig_before: Float[Tensor, "n h"]
    target_before: Float[Tensor, "n h"]
    orig_after: Float[Tensor, "draws n h"]
    target_after: Float[Tensor, "draws n h"]
    flipped: Bool[Tensor, "draws n h"]
    flipped_named: Bool[Tensor, "draws n h"]
    rank: Int[Tensor, " h"]
    d_head: int
    gap: Float[Tensor, "n h"]
    moved: Float[Tensor, "draws n h"]

    @property
    def shift(self) -> Float[Tensor, "n h"]:
        """How far ``p = a_target / (a_orig + a_target)`` moved, averaged over draws; 1 is from none
        to all.

        A row that gives neither key any attention has nothing to move, and counts as 0.
        """
        before = self.orig_before + self.target_before
        after = self.orig_after + self.target_after
        moved = self.target_after / after - self.target_before / before
        return torch.where((before > 0) & (after > 0), moved, torch.zeros_like(moved)).mean(dim=0)

    @property
    def left(self) -> Float[Tensor, "n h"]:
        """Attention that leaves the original key, averaged over draws."""
        return self.orig_before - self.orig_after.mean(dim=0)

    @property
    def carried(self) -> Float[Tensor, "n h"]:
        """Part of the logit between the two keys that lies in the subspace: the ratio of the means,
        row by row.

        It is linearised, so that an interval of its mean knows that the denominator was measured
        too. It adds up to 1 over subspaces that make up the head; NaN where the head does not
        clearly prefer ``orig``.
        """
        gap = self.gap.double()
        moved = self.moved.double().mean(dim=0)
        mean = gap.mean(dim=0)
        error = (
            gap.std(dim=0) / len(gap) ** 0.5 if len(gap) > 1 else torch.full_like(mean, torch.inf)
        )
        mean = torch.where(mean > 3 * error, mean, torch.nan)
        share = moved.mean(dim=0) / mean
        return share + (moved - share * gap) / mean

    @property
    def vacuous(self) -> Bool[Tensor, " h"]:
        """Whether the subspace fills the head: then any subspace of its rank swaps everything, and
        nothing is shown.
        """
        return self.rank >= self.d_head


def total_variation(
    one: Float[Tensor, "*n k"], other: Float[Tensor, "*n k"]
) -> Float[Tensor, "*n"]:
    """Distance of two attention rows, 0 to 1; what the named keys leave to other tokens counts as
    one key.

    >>> total_variation(torch.tensor([0.5, 0.2]), torch.tensor([0.1, 0.2]))
    tensor(0.4000)
    """
    difference = one - other
    return (difference.abs().sum(-1) + difference.sum(-1).abs()) / 2


@dataclass(frozen=True)
class SwapRows:
    """Attention rows of some heads, ready for swaps in any subspace.

    Parameters
    ----------
    rows : attention rows.
    orig, target : the two keys of each row that change places; ``orig`` is the one the head should
        prefer.
    cluster : equal for rows that are not independent, which are resampled together.
    heads : the heads of ``rows``.
    others : two further keys of each row for the sham swap; None where there are none.
    answers : what the model answers, unedited and with each swap written into it, where that was
        asked for.
    truth : attention where a feature is exchanged in the text, NaN in rows without such a text, by
        feature and column: ``distance`` of the prompt's own query, as a swap edits keys alone,
        ``text_distance`` of the other text's query, and ``other_distance`` where ``others`` are
        exchanged.
    frame : the rows in the frame of their query, in which the components of Ω are swapped.
    """

    rows: AttentionRows
    orig: Slots
    target: Slots
    cluster: Int[Tensor, " n"]
    heads: Sequence[Head]
    others: tuple[Slots, Slots] | None = None
    answers: Float[Tensor, "r n 4"] | None = None
    truth: Mapping[tuple[str, str], Float[Tensor, "n h k"]] = field(default_factory=dict)
    frame: AttentionRows | None = None

    def swap(self, projector: Projector, kind: str = "feature") -> SwapEffect:
        """Swap the two keys of every row, or the ``others`` and look at the two all the same (a
        sham).
        """
        read = self.orig, self.target
        pair = (self.others if kind == "sham" else None) or read
        return swap_attention(self._rows(kind), *pair, projector, read=read)

    def _rows(self, kind: str) -> AttentionRows:
        return self.frame if kind == "omega_svd" and self.frame is not None else self.rows

    def table(self, conditions: Mapping[Condition, Projector], *, seed: int = 0) -> Rows:
        """One row per head and condition, with what each gains over random subspaces of its size,
        and its distance to the truth where there is one.
        """
        effects = {what: self.swap(p, what.kind) for what, p in conditions.items()}
        random = {
            what: Condition(what.feature, "random")
            for what in conditions
            if what.kind not in ("random", "sham")
        }
        against = {what: other for what, other in random.items() if other in conditions}
        table = swap_table(effects, self.heads, self.cluster, against=against, seed=seed)
        far = self._distances(conditions, seed) if self.truth else {}
        empty = dict.fromkeys(name for columns in far.values() for name in columns) | (
            {"tested": 0} if far else {}
        )
        return [
            {**row, **empty, **far.get((row["head"], row["feature"], row["kind"]), {})}
            for row in table
        ]

    def distance(
        self, projector: Projector, true: Tensor, pair: tuple[Slots, Slots], kind: str = ""
    ) -> Tensor:
        """How far each row (n h) is from the true one after two keys changed places in a subspace;
        mean of draws.
        """
        rows = self._rows(kind)
        before = rows.products()
        drawn = [
            total_variation(rows.attention(before + x), true)
            for x in key_changes(rows, *pair, projector)
        ]
        return torch.stack(drawn).double().mean(0)

    def _distances(
        self, conditions: Mapping[Condition, Projector], seed: int
    ) -> dict[tuple[str, str, str], Any]:
        """By head, feature and kind: distances to the truth, and how much nearer than key PCA, with
        their intervals.
        """
        columns: dict[tuple[str, str, str], Any] = {}
        for (feature, reading), true in self.truth.items():
            every = [what for what in conditions if what.feature == feature and what.kind != "sham"]
            pair = (self.others if reading == "other_distance" else None) or (
                self.orig,
                self.target,
            )
            tested = true.isfinite().flatten(1).all(1)
            pca = Condition(feature, "key_pca")
            if not bool(tested.any()):
                continue
            far = torch.stack(
                [self.distance(conditions[what], true, pair, what.kind) for what in every], dim=1
            )[tested]
            beside = far[:, [every.index(pca)]] if pca in every else far.new_tensor(torch.nan)
            both = torch.stack([far, beside - far], dim=1)
            ends = both.mean(0), *clustered_bootstrap(both, self.cluster[tested], seed=seed)
            names = [
                f"{name}{end}"
                for name in (reading, reading.replace("distance", "nearer"))
                for end in _ENDS
            ]
            numbers = torch.stack(ends, dim=1).flatten(0, 1)
            for i, what in enumerate(every):
                for column, head in enumerate(self.heads):
                    told = dict(zip(names, numbers[:, i, column].tolist(), strict=True))
                    tally = {"tested": int(tested.sum())} if reading == "distance" else {}
                    columns[str(head), *what] = columns.get((str(head), *what), {}) | told | tally
        return columns

    def paired(
        self, pairs: Sequence[Pair], effects: Mapping[Condition, Projector], *, seed: int = 0
    ) -> Rows:
        """How much more one condition shifts than another on the same rows, with the interval of
        the difference.
        """
        shifts = {
            what: self.swap(effects[what]).shift.double()
            for what in dict.fromkeys(c for p in pairs for c in p)
        }
        values = torch.stack([shifts[one] - shifts[other] for one, other in pairs], dim=-1)
        mean, (low, high) = values.mean(0), clustered_bootstrap(values, self.cluster, seed=seed)
        return [
            {"head": str(head), "one": one.name, "other": other.name, "difference": float(mean[column, i]),
             "low": float(low[column, i]), "high": float(high[column, i]), "n": len(values)}
            for column, head in enumerate(self.heads)
            for i, (one, other) in enumerate(pairs)
        ]  # fmt: skip

    def curve(
        self,
        methods: Mapping[Any, Method],
        sizes: Sequence[int],
        against: Pairs = None,
        seed: int = 0,
    ) -> Rows:
        """One row per size, head and method.

        ``against`` names for a method the one that its gains are over; there are no gains without.
        """
        pairs = {_condition(one): _condition(other) for one, other in (against or {}).items()}
        table = []
        for k in sizes:
            effects = {_condition(name): self.swap(method(k)) for name, method in methods.items()}
            for row in swap_table(effects, self.heads, self.cluster, against=pairs, seed=seed):
                gains = {
                    f"{name}{end}": row[f"{name}{end}"] for name in _MEASURES[1:4] for end in _ENDS
                }
                table.append({
                    "head": row["head"], "method": row["condition"], "feature": row["feature"], "kind": row["kind"],
                    "k": k, **{name: row[name] for name in (*_ATTENTION, "shift")},
                    "low": row["shift_low"], "high": row["shift_high"], **gains, "n": row["n"],
                })  # fmt: skip
        return table


def _condition(name: str | Condition) -> Condition:
    return Condition("", name) if isinstance(name, str) else name


def swap_attention(
    rows: AttentionRows,
    orig: Slots,
    target: Slots,
    projector: Projector,
    *,
    read: tuple[Slots, Slots] | None = None,
) -> SwapEffect:
    """Swap slots ``orig`` and ``target`` of every row in the subspace of each head.

    Parameters
    ----------
    projector : factors of shape (h, d, r), or (draws, h, d, r) for many subspaces of the same rank
        at once.
    read : the slots whose attention is reported, where they are not the swapped ones (a sham swap).
    """
    before = rows.products()
    slots, (watched, wanted) = (
        torch.arange(before.shape[-1], device=before.device),
        read or (orig, target),
    )

    def pick(values: Tensor, slot: Tensor) -> Tensor:
        return (values * (slots == slot[:, None])[:, None]).sum(dim=-1)

    attention = rows.attention(before)
    first = rows.largest(before)
    first_named = attention.argmax(-1)
    drawn = []
    for change in key_changes(rows, orig, target, projector):
        after = rows.attention(before + change)
        flipped = (first == watched[:, None]) & (rows.largest(before + change) == wanted[:, None])
        flipped_named = (first_named == watched[:, None]) & (after.argmax(-1) == wanted[:, None])
        moved = (pick(change, wanted) - pick(change, watched)) / 2
        drawn.append((pick(after, watched), pick(after, wanted), flipped, flipped_named, moved))
    after_orig, after_target, flipped, flipped_named, moved = map(
        torch.stack, zip(*drawn, strict=True)
    )
    attended = (pick(attention, watched), pick(attention, wanted))
    gap = pick(before, watched) - pick(before, wanted)
    rank = projector.rank[0] if projector.left.ndim == 4 else projector.rank
    return SwapEffect(
        *attended, after_orig, after_target, flipped, flipped_named, rank, rows.d_head, gap, moved
    )


def key_changes(
    rows: AttentionRows, orig: Slots, target: Slots, projector: Projector
) -> Iterator[Tensor]:
    """What a swap of two keys adds to the products (n h k), draw by draw: that keeps memory at one
    copy of the rows.
    """
    left, right = (f.to(rows.q) if f.ndim == 4 else f[None].to(rows.q) for f in projector)
    difference = rows.keys_of_heads(target) - rows.keys_of_heads(orig)
    scale = torch.as_tensor(rows.scale, dtype=rows.q.dtype, device=rows.q.device)
    inside = torch.einsum("nhd,shdr->snhr", difference, right)
    moves = scale * torch.einsum(
        "nhd,shdr,snhr->snh", rows.q, left, inside
    )  # to the original, and from the target
    slots = torch.arange(rows.k.shape[2], device=rows.q.device)
    first = (slots == orig[:, None])[:, None]
    second = (slots == target[:, None])[:, None]
    return (move[..., None] * first - move[..., None] * second for move in moves)


def draw_targets(orig: Slots, allowed: Bool[Tensor, "n k"], *address: int | Slots) -> Slots:
    """One key per row other than ``orig``, uniform over the allowed ones; drawn once, for all
    conditions alike.

    ``address`` names the draw and in it the rows: a row draws the same key whichever rows stand
    beside it.
    """
    slots = torch.arange(allowed.shape[1], device=allowed.device)
    free = allowed & (slots != orig[:, None])
    if not bool(free.any(dim=1).all()):
        row = int((~free.any(dim=1)).nonzero()[0])
        raise BadInput(
            f"row {row} has no other key to swap with: give each example at least two keys."
        )
    rows = (
        part[:, None].to(slots.device) if isinstance(part, Tensor) else part for part in address
    )
    return draw_bits(*rows, slots).masked_fill(~free, torch.iinfo(torch.int64).min).argmax(dim=1)


def swap_table(
    effects: Mapping[Any, SwapEffect],
    heads: Sequence[Head],
    prompts: Tensor,
    *,
    against: Pairs = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One row per head and `Condition` (or name), with intervals clustered by prompt (or by what
    ``prompts`` numbers).

    ``against`` names, for a condition, the baseline its shift is compared with on the same examples
    and resamples: ``gain`` is the difference and ``gain_low``, ``gain_high`` its paired interval
    (None where there is no baseline). ``carried`` and ``carried_gain`` are the same for the logit;
    ``left`` is the attention that leaves the original key.
    """
    pairs = dict(against or {})
    conditions = {name: _condition(name) for name in effects}
    taken = Counter(what.name for what in conditions.values())
    base = [list(effects).index(pairs.get(name, name)) for name in effects]
    table = []
    sides = ("shift", "carried", "left")
    every = [
        torch.stack([getattr(effect, side).double() for effect in effects.values()], dim=1)
        for side in sides
    ]
    for column, head in enumerate(heads):
        shift, carried, left = (values[..., column] for values in every)
        values = torch.stack(
            [shift, shift - shift[:, base], carried, carried - carried[:, base], left], dim=1
        )
        ends = values.mean(0), *clustered_bootstrap(values, prompts, seed=seed)
        for i, (name, effect) in enumerate(effects.items()):
            told = {
                f"{measure}{end}": float(x[m, i])
                if name in pairs or not measure.endswith("gain")
                else None
                for m, measure in enumerate(_MEASURES)
                for end, x in zip(_ENDS, ends, strict=True)
            }
            what = conditions[name]
            ours = (
                what.kind == "feature" and taken[what.name] > 1
            )  # a feature that is called as a row of ours
            table.append({
                "head": str(head), "condition": f"'{what.name}'" if ours else what.name, "feature": what.feature,
                "kind": what.kind, "rank": int(effect.rank[column]),
                **{name: float(getattr(effect, name)[..., column].mean()) for name in _ATTENTION}, **told,
                "flip": float(effect.flipped[..., column].double().mean()),
                "flip_named": float(effect.flipped_named[..., column].double().mean()), "n": len(prompts),
                "draws": effect.orig_after.shape[0], "vacuous": bool(effect.vacuous[column]),
            })  # fmt: skip
    return table
