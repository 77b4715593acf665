"""The causal test: exchange two keys' coordinates in a subspace, see where attention goes.

Lee et al., Eq. 8-10: with a projector P onto the subspace, the keys a and b become::

    k̃_a = k_a + P (k_b − k_a),   k̃_b = k_b + P (k_a − k_b)

Only two logits of the row move, by opposite amounts ``δ = scale · qᵀ P (k_b − k_a)``, so the edited
attention has a closed form: no second forward pass, and a thousand random subspaces cost a matrix
product.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput
from qkscope.attention import AttentionRows
from qkscope.heads import Head
from qkscope.results.result import Rows
from qkscope.seeds import draw_bits
from qkscope.sums.bases import Projector
from qkscope.sums.intervals import clustered_bootstrap

#: A way to choose k directions of every head; see `qkscope.sums.swap_methods`.
Method = Callable[[int | Sequence[int]], Projector]
Slots = Int[Tensor, " n"]  # a key of each row
Beside = Mapping[Any, Any] | None  # for a condition, what it is compared with
# kinds that are another way to swap the feature itself
_VERSIONS = ("oblique", "oracle", "summed", "trained")
_MEASURES = ("shift", "gain", "carried", "carried_gain", "left")
_OVER_BASELINE = ("gain", "carried_gain")
_ENDS = ("", "_low", "_high")
_ATTENTION = ("orig_before", "target_before", "orig_after", "target_after")


class Condition(NamedTuple):
    """Condition of a swap: a feature, or by its ``kind`` another version or a baseline of its size.

    >>> [Condition("order", kind).name for kind in ("feature", "oblique", "random")]
    ['order', 'order_oblique', 'random_order']
    """

    feature: str
    kind: str = "feature"

    @property
    def name(self) -> str:
        """Name of feature and kind together; not unique, as a feature may be called anything."""
        if self.kind == "feature":
            return self.feature
        parts = [self.kind, self.feature]
        if self.kind in _VERSIONS:
            parts = [self.feature, self.kind]
        return "_".join(part for part in parts if part)


Comparison = tuple[Condition, Condition]  # to be compared


def swapped_keys(k_orig: Tensor, k_target: Tensor, projector: Projector) -> tuple[Tensor, Tensor]:
    """The two keys (``*n d``) after the exchange (Eq. 9, 10), as a patched run writes them."""
    difference = k_target - k_orig
    inside = difference @ projector.right.to(difference)
    moved = inside @ projector.left.to(difference).mT
    return k_orig + moved, k_target - moved


class SwapEffect(NamedTuple):
    """Attention on the original and the target key, before and after a swap.

    ``draws`` is above 1 for random subspaces. ``flipped``: of all tokens of the row, the original
    key had the most attention, and the target has it afterwards; ``flipped_named``: the same of the
    named keys alone. ``gap`` is the logit of the original key less that of the target; ``moved``
    is how much of it the swap moves.
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
        """How far ``p = a_target / (a_orig + a_target)`` moved, averaged over draws.

        1 is from none to all. A row that gives neither key any attention has nothing to move, and
        counts as 0.
        """
        before = self.orig_before + self.target_before
        after = self.orig_after + self.target_after
        moved = self.target_after / after - self.target_before / before
        attended = (before > 0) & (after > 0)
        shift = torch.where(attended, moved, torch.zeros_like(moved))
        return shift.mean(dim=0)

    @property
    def left(self) -> Float[Tensor, "n h"]:
        """Attention that leaves the original key, averaged over draws."""
        return self.orig_before - self.orig_after.mean(dim=0)

    @property
    def carried(self) -> Float[Tensor, "n h"]:
        """Part of the logit between the two keys that lies in the subspace, linearised by row.

        With the means m of ``moved`` and g of ``gap``, a row gives
        ``m/g + (moved − gap · m/g) / g``: the mean is ``m/g``, and an interval of it knows that the
        denominator was measured too. It adds up to 1 over subspaces that make up the head; NaN
        where the head does not clearly prefer ``orig``.
        """
        gap = self.gap.double()
        moved = self.moved.double().mean(dim=0)
        mean = gap.mean(dim=0)
        error = torch.full_like(mean, torch.inf)
        if len(gap) > 1:
            error = gap.std(dim=0) / len(gap) ** 0.5
        mean = torch.where(mean > 3 * error, mean, torch.nan)
        share = moved.mean(dim=0) / mean
        return share + (moved - share * gap) / mean

    @property
    def vacuous(self) -> Bool[Tensor, " h"]:
        """Whether the subspace fills the head, so that any other of its rank swaps as much."""
        return self.rank >= self.d_head


def total_variation(
    one: Float[Tensor, "*n k"], other: Float[Tensor, "*n k"]
) -> Float[Tensor, "*n"]:
    """Distance of two attention rows, 0 to 1.

    What the named keys leave to other tokens counts as one key.

    >>> total_variation(torch.tensor([0.5, 0.2]), torch.tensor([0.1, 0.2]))
    tensor(0.4000)
    """
    difference = one - other
    on_named = difference.abs().sum(-1)
    elsewhere = difference.sum(-1).abs()
    return (on_named + elsewhere) / 2


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
        """Swap the two keys of every row; in a sham, swap the ``others`` and look at the two."""
        watched = (self.orig, self.target)
        pair = self.others if kind == "sham" and self.others is not None else watched
        return swap_attention(self._rows(kind), *pair, projector, read=watched)

    def _rows(self, kind: str) -> AttentionRows:
        """The rows in which a kind of condition is swapped."""
        if kind == "omega_svd" and self.frame is not None:
            return self.frame
        return self.rows

    def table(self, conditions: Mapping[Condition, Projector], *, seed: int = 0) -> Rows:
        """One row per head and condition: its effect, and its distance to the truth if known.

        Gains are over random subspaces of the same size.
        """
        effects = {}
        against = {}
        for condition, projector in conditions.items():
            effects[condition] = self.swap(projector, condition.kind)
            random = Condition(condition.feature, "random")
            if condition.kind not in ("random", "sham") and random in conditions:
                against[condition] = random
        table = swap_table(effects, self.heads, self.cluster, against=against, seed=seed)
        if not self.truth:
            return table
        distances = self._distances(conditions, seed)
        columns = [name for row in distances.values() for name in row]
        empty: dict[str, Any] = dict.fromkeys(columns)
        if distances:
            empty["tested"] = 0
        rows = []
        for row in table:
            place = (row["head"], row["feature"], row["kind"])
            rows.append({**row, **empty, **distances.get(place, {})})
        return rows

    def distance(
        self,
        projector: Projector,
        true: Float[Tensor, "n h k"],
        pair: tuple[Slots, Slots],
        kind: str = "",
    ) -> Float[Tensor, "n h"]:
        """Distance of each row to the true one after two keys changed places in a subspace.

        Over several draws, it is their mean.
        """
        rows = self._rows(kind)
        before = rows.products()
        drawn = []
        for change in key_changes(rows, *pair, projector):
            edited = rows.attention(before + change)
            drawn.append(total_variation(edited, true))
        return torch.stack(drawn).double().mean(0)

    def _distances(
        self, conditions: Mapping[Condition, Projector], seed: int
    ) -> dict[tuple[str, str, str], dict[str, Any]]:
        """Distances to the truth by head, feature and kind, and how much nearer than key PCA.

        Both stand there with their intervals.
        """
        table = dict[tuple[str, str, str], dict[str, Any]]()
        for (feature, reading), true in self.truth.items():
            tested = true.isfinite().flatten(1).all(1)
            if not bool(tested.any()):
                continue
            compared = {}
            for condition, projector in conditions.items():
                if condition.feature == feature and condition.kind != "sham":
                    compared[condition] = projector
            numbers = self._distances_to(true, reading, compared, tested, seed)
            for condition, by_head in zip(compared, numbers, strict=True):
                for head, values in zip(self.heads, by_head, strict=True):
                    row = table.setdefault((str(head), *condition), {})
                    row |= values
                    if reading == "distance":
                        row["tested"] = int(tested.sum())
        return table

    def _distances_to(
        self,
        true: Float[Tensor, "n h k"],
        reading: str,
        compared: Mapping[Condition, Projector],
        tested: Bool[Tensor, " n"],
        seed: int,
    ) -> list[list[dict[str, float]]]:
        """Columns of one truth, of every condition and head: distance and gain, with intervals."""
        pair = (self.orig, self.target)
        if reading == "other_distance" and self.others is not None:
            pair = self.others
        distances = []
        for condition, projector in compared.items():
            distances.append(self.distance(projector, true, pair, condition.kind))
        distance = torch.stack(distances, dim=1)[tested]
        pca = [i for i, condition in enumerate(compared) if condition.kind == "key_pca"]
        beside = distance[:, pca] if pca else distance.new_tensor(torch.nan)
        both = torch.stack([distance, beside - distance], dim=1)
        low, high = clustered_bootstrap(both, self.cluster[tested], seed=seed)
        # by measure and end, condition, head
        ends = torch.stack([both.mean(0), low, high], dim=1)
        numbers = ends.flatten(0, 1)
        measures = (reading, reading.replace("distance", "nearer"))
        names = [f"{measure}{end}" for measure in measures for end in _ENDS]
        table = []
        for by_head in numbers.permute(1, 2, 0).tolist():
            table.append([dict(zip(names, values, strict=True)) for values in by_head])
        return table

    def paired(
        self, pairs: Sequence[Comparison], effects: Mapping[Condition, Projector], *, seed: int = 0
    ) -> Rows:
        """How much more one condition shifts than another on the same rows, with the interval."""
        shifts = {}
        for pair in pairs:
            for condition in pair:
                if condition not in shifts:
                    shifts[condition] = self.swap(effects[condition]).shift.double()
        differences = [shifts[first] - shifts[second] for first, second in pairs]
        values = torch.stack(differences, dim=-1)
        low, high = clustered_bootstrap(values, self.cluster, seed=seed)
        # heads by pairs by mean and ends
        numbers = torch.stack([values.mean(0), low, high], dim=-1)
        table = []
        for of_head, head in zip(numbers.tolist(), self.heads, strict=True):
            for (first, second), (mean, least, most) in zip(pairs, of_head, strict=True):
                row = {
                    "head": str(head),
                    "one": first.name,
                    "other": second.name,
                    "difference": mean,
                    "low": least,
                    "high": most,
                    "n": len(values),
                }
                table.append(row)
        return table

    def curve(
        self,
        methods: Mapping[Any, Method],
        sizes: Sequence[int],
        against: Beside = None,
        seed: int = 0,
    ) -> Rows:
        """One row per size, head and method.

        ``against`` names for a method the one that its gains are over; there are no gains without.
        """
        pairs = {}
        for method, baseline in (against or {}).items():
            pairs[_condition(method)] = _condition(baseline)
        table = []
        for k in sizes:
            effects = {}
            for name, method in methods.items():
                effects[_condition(name)] = self.swap(method(k))
            for row in swap_table(effects, self.heads, self.cluster, against=pairs, seed=seed):
                table.append(_curve_row(row, k))
        return table


def _condition(name: str | Condition) -> Condition:
    """Parse a condition: itself, or a method by its name."""
    if isinstance(name, str):
        return Condition("", name)
    return name


def _curve_row(row: Mapping[str, Any], k: int) -> dict[str, Any]:
    """Row of a curve over sizes, from the row of `swap_table` at one size."""
    gains = [f"{name}{end}" for name in ("gain", "carried", "carried_gain") for end in _ENDS]
    return {
        "head": row["head"],
        "method": row["condition"],
        "feature": row["feature"],
        "kind": row["kind"],
        "k": k,
        **{name: row[name] for name in _ATTENTION},
        "shift": row["shift"],
        "low": row["shift_low"],
        "high": row["shift_high"],
        **{name: row[name] for name in gains},
        "n": row["n"],
    }


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
    watched, wanted = read or (orig, target)
    before = rows.products()
    attention = rows.attention(before)
    had_most = rows.largest(before) == watched[:, None]
    had_most_named = attention.argmax(-1) == watched[:, None]
    orig_after = []
    target_after = []
    flipped = []
    flipped_named = []
    moved = []
    for change in key_changes(rows, orig, target, projector):
        after = rows.attention(before + change)
        has_most = rows.largest(before + change) == wanted[:, None]
        has_most_named = after.argmax(-1) == wanted[:, None]
        orig_after.append(_at_slot(after, watched))
        target_after.append(_at_slot(after, wanted))
        flipped.append(had_most & has_most)
        flipped_named.append(had_most_named & has_most_named)
        towards_wanted = _at_slot(change, wanted) - _at_slot(change, watched)
        moved.append(towards_wanted / 2)
    rank = projector.rank
    if projector.left.ndim == 4:
        rank = rank[0]
    return SwapEffect(
        orig_before=_at_slot(attention, watched),
        target_before=_at_slot(attention, wanted),
        orig_after=torch.stack(orig_after),
        target_after=torch.stack(target_after),
        flipped=torch.stack(flipped),
        flipped_named=torch.stack(flipped_named),
        rank=rank,
        d_head=rows.d_head,
        gap=_at_slot(before, watched) - _at_slot(before, wanted),
        moved=torch.stack(moved),
    )


def _at_slot(values: Float[Tensor, "n h k"], slot: Slots) -> Float[Tensor, "n h"]:
    """The value of one key of each row."""
    return (values * _is_slot(values.shape[-1], slot)).sum(dim=-1)


def _is_slot(keys: int, slot: Slots) -> Bool[Tensor, "n 1 k"]:
    """Mask of the key in each row's slot."""
    slots = torch.arange(keys, device=slot.device)
    return (slots == slot[:, None])[:, None]


def key_changes(
    rows: AttentionRows, orig: Slots, target: Slots, projector: Projector
) -> Iterator[Tensor]:
    """Changes that a swap of two keys makes to the products (n h k), draw by draw.

    Memory then holds one copy of the rows.
    """
    left = projector.left.to(rows.q)
    right = projector.right.to(rows.q)
    if left.ndim == 3:
        left = left[None]
        right = right[None]
    difference = rows.keys_of_heads(target) - rows.keys_of_heads(orig)
    scale = torch.as_tensor(rows.scale, dtype=rows.q.dtype, device=rows.q.device)
    inside = torch.einsum("nhd,shdr->snhr", difference, right)
    # to the logit of the original key, and from that of the target
    moves = scale * torch.einsum("nhd,shdr,snhr->snh", rows.q, left, inside)
    keys = rows.k.shape[2]
    at_orig = _is_slot(keys, orig)
    at_target = _is_slot(keys, target)
    for move in moves:
        at_key = move[..., None]
        yield at_key * at_orig - at_key * at_target


def draw_targets(orig: Slots, allowed: Bool[Tensor, "n k"], *address: int | Slots) -> Slots:
    """One key per row other than ``orig``, uniform over the allowed ones.

    It is drawn once, for all conditions alike. ``address`` names the draw and in it the rows: a row
    draws the same key whichever rows stand beside it.
    """
    slots = torch.arange(allowed.shape[1], device=allowed.device)
    free = allowed & (slots != orig[:, None])
    stuck = (~free.any(dim=1)).nonzero()
    if len(stuck):
        row = int(stuck[0])
        raise BadInput(
            f"row {row} has no other key to swap with: give each example at least two keys."
        )
    parts = []
    for part in address:
        if isinstance(part, Tensor):
            part = part[:, None].to(slots.device)
        parts.append(part)
    lowest = torch.iinfo(torch.int64).min
    return draw_bits(*parts, slots).masked_fill(~free, lowest).argmax(dim=1)


def swap_table(
    effects: Mapping[Any, SwapEffect],
    heads: Sequence[Head],
    prompts: Tensor,
    *,
    against: Beside = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One row per head and `Condition` (or name), with intervals clustered by prompt.

    ``against`` names, for a condition, the baseline its shift is compared with on the same examples
    and resamples: ``gain`` is the difference and ``gain_low``, ``gain_high`` its paired interval
    (None where there is no baseline). ``carried`` and ``carried_gain`` are the same for the logit;
    ``left`` is the attention that leaves the original key. ``prompts`` numbers what is resampled.
    """
    pairs = dict(against or {})
    names = list(effects)
    base = [names.index(pairs.get(name, name)) for name in names]
    shown = _shown_names(names)
    # rows by conditions by heads
    shifts = _side_by_side(effect.shift for effect in effects.values())
    carries = _side_by_side(effect.carried for effect in effects.values())
    leaves = _side_by_side(effect.left for effect in effects.values())
    table = []
    for column, head in enumerate(heads):
        shift = shifts[..., column]
        carried = carries[..., column]
        gain = shift - shift[:, base]
        carried_gain = carried - carried[:, base]
        left = leaves[..., column]
        values = torch.stack([shift, gain, carried, carried_gain, left], dim=1)
        low, high = clustered_bootstrap(values, prompts, seed=seed)
        # measures by ends by conditions
        ends = torch.stack([values.mean(0), low, high], dim=1)
        for i, (name, effect) in enumerate(effects.items()):
            condition = _condition(name)
            row = {
                "head": str(head),
                "condition": shown[name],
                "feature": condition.feature,
                "kind": condition.kind,
                "rank": int(effect.rank[column]),
                **_mean_attention(effect, column),
                **_measured(ends[..., i], has_baseline=name in pairs),
                "flip": _share(effect.flipped[..., column]),
                "flip_named": _share(effect.flipped_named[..., column]),
                "n": len(prompts),
                "draws": effect.orig_after.shape[0],
                "vacuous": bool(effect.vacuous[column]),
            }
            table.append(row)
    return table


def _side_by_side(measures: Iterable[Tensor]) -> Float[Tensor, "n c h"]:
    """Stack one measure of every condition, in float64."""
    return torch.stack([measure.double() for measure in measures], dim=1)


def _share(is_so: Bool[Tensor, "*n"]) -> float:
    """Share of the draws and rows where it is so."""
    return float(is_so.double().mean())


def _shown_names(names: Sequence[Any]) -> dict[Any, str]:
    """Names of conditions in a table: a feature that is called like another condition is quoted."""
    conditions = [_condition(name) for name in names]
    times = Counter(condition.name for condition in conditions)
    shown = {}
    for name, condition in zip(names, conditions, strict=True):
        is_ambiguous = condition.kind == "feature" and times[condition.name] > 1
        shown[name] = f"'{condition.name}'" if is_ambiguous else condition.name
    return shown


def _mean_attention(effect: SwapEffect, column: int) -> dict[str, float]:
    """Mean attention of one head on the two keys, before and after."""
    means = {}
    for name in _ATTENTION:
        attention = getattr(effect, name)
        means[name] = float(attention[..., column].mean())
    return means


def _measured(ends: Float[Tensor, "m 3"], has_baseline: bool) -> dict[str, float | None]:
    """The measures of one head and condition with their intervals; no gains without a baseline."""
    columns: dict[str, float | None] = {}
    for measure, values in zip(_MEASURES, ends.tolist(), strict=True):
        is_known = has_baseline or measure not in _OVER_BASELINE
        for end, value in zip(_ENDS, values, strict=True):
            columns[f"{measure}{end}"] = value if is_known else None
    return columns
