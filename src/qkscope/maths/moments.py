"""The streaming sums of a contrast, for many heads at once.

With a constant 1 appended to queries and keys, everything ΔC needs is one matrix per head, contrast and sign::

    M± = Σ w [q; 1] [k; 1]ᵀ  =  [ Σ w q kᵀ   Σ w q ]
                                [ Σ w kᵀ     Σ w   ]

It grows by addition, so batches, shards and machines merge exactly, and its size does not depend on how much data went
in. Conditional averages are ``M± / Σw``; centring is the shear ``[I, −q̄] M [I, −k̄]ᵀ``; and

    ΔC = E[q kᵀ | +] − E[q kᵀ | −]        (averages over (query, key) pairs of the condition)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.devices import check_device
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import checked_class
from qkscope.maths.batches import check_batch
from qkscope.maths.nulls import (
    BUCKETS,
    DEALS,
    FLIPS,
    FOLDS,
    NULL_KINDS,
    NullKind,
    bucket_of,
    carried,
    count_units,
    fold_of,
    interaction_deltas,
    key_sums,
    replicate_sums,
    row_scale,
    signed_weights,
)
from qkscope.maths.sums import Accumulator, Center, add_outer, augmented, centred_delta

SIGNS = ("positive", "negative")
_AT_ONCE = 2**27  # bytes of replicated key sums: what the nulls of a batch take at once, however large it is


class _Layout(NamedTuple):
    """The heads of a batch: their rows in the sums, their key heads, which key head each reads, and null rows."""

    where: list[int]
    key_heads: list[tuple[int, int]]
    kv_of_head: list[int]
    nulled: list[tuple[int, int]]  # (column of the batch, row of the null sums)


@checked_class
class Moments(Accumulator):
    """Sums of ``w``, ``w q``, ``w k`` and ``w q kᵀ`` over + and − pairs, per head and contrast, in float64.

    Parameters
    ----------
    heads : heads to accumulate, in the order in which results come back.
    contrasts : names of the contrasts.
    d_head : width of queries and keys.
    group_size : query heads per key head (grouped-query attention); 1 when every head has its own keys.
    nulls : the nulls to carry replicates for (see `qkscope.maths.nulls`); with them, the sums are also kept in
        folds of units, for cross-validation.
    null_heads : the heads that carry them; all by default. Each costs ``2 · replicates · (d_head + 1)² · 8`` bytes
        per contrast, and as much again where labels are dealt besides.
    replicates, seed : how many draws of each null, and their seed.
    about : what the sums were made from (model, weights hash, tokenizer, …); kept in the file, compared on merge.

    Examples
    --------
    >>> moments = Moments(["L0H0", "L0H1"], ["order"], d_head=4, group_size=2)
    >>> q, k = torch.randn(8, 2, 4), torch.randn(8, 1, 3, 4)  # 8 prompts; 2 heads; 1 key head, 3 keys each
    >>> moments.update(q, k, {"order": torch.tensor([[1, -1, 0]]).expand(8, 3)})
    >>> moments.delta("order").shape
    torch.Size([2, 4, 4])
    """

    kind = "moments"

    def __init__(
        self,
        heads: str | Sequence[Head | str],
        contrasts: Sequence[str],
        d_head: int,
        *,
        group_size: int = 1,
        nulls: Sequence[NullKind] = (),
        null_heads: str | Sequence[Head | str] | None = None,
        replicates: int = 199,
        seed: int = 0,
        about: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.heads = parse_heads(heads)
        self.contrasts = list(contrasts)
        self.d_head = d_head
        self.group_size = group_size
        self.nulls = list(nulls)
        self.null_heads = (self.heads if null_heads is None else parse_heads(null_heads)) if self.nulls else []
        self.replicates = replicates
        self.seed = seed
        self.about = dict(about or {})
        self._check_parameters()
        device = device if str(device) == "meta" else check_device(device)

        self.key_heads = list(dict.fromkeys(self._key_head(i) for i in range(len(self.heads))))
        self._layouts: dict[int | None, _Layout] = {}
        h, a = len(self.heads), d_head + 1

        def zeros(*shape: int) -> dict[str, Tensor]:
            return {c: torch.zeros(shape, dtype=torch.float64, device=device) for c in self.contrasts}

        self.sums = zeros(h, a, 2, a)
        self.null_sums: dict[tuple[str, str], Tensor] = {
            (kind, contrast): tensor
            for kind in carried(self.nulls)
            for contrast, tensor in zeros(len(self.null_heads), a, replicates, 2, a + (kind == FLIPS)).items()
        }
        # Beside the nulls: Σ [q; 1] a± (a row's scale), the sums of each fold of units, and how many rows a unit has.
        self.scales = zeros(h, a, 2) if self.nulls else {}
        self.folds = zeros(FOLDS, h, a, 2, a) if self.nulls else {}
        self.units = zeros(BUCKETS) if self.nulls else {}

    def _check_parameters(self) -> None:
        if not self.contrasts or len(set(self.contrasts)) < len(self.contrasts):
            raise BadInput(f"a contrast needs a name of its own, but got {self.contrasts}.")
        if self.d_head < 1 or self.group_size < 1:
            raise BadInput(f"d_head and group_size must be at least 1, but got {self.d_head} and {self.group_size}.")
        for kind in self.nulls:
            if kind not in NULL_KINDS:
                raise BadInput(f"there is no null called {kind!r}: take one of {', '.join(NULL_KINDS)}.")
        if self.nulls and self.replicates < 1:
            raise BadInput(f"a null needs replicates, but got {self.replicates}: take 199 or more.")
        for head in self.null_heads:
            if head not in self.heads:
                raise BadInput(f"null replicates were asked for {head}, which is not among the accumulated heads.")

    def _key_head(self, i: int) -> tuple[int, int]:
        return self.heads[i].layer, self.heads[i].kv(self.group_size)

    def _layout(self, layer: int | None) -> _Layout:
        """Which heads and key heads a batch of this layer (or of all) brings; worked out once."""
        if layer not in self._layouts:
            where = [i for i, head in enumerate(self.heads) if layer is None or head.layer == layer]
            key_heads = [g for g in self.key_heads if layer is None or g[0] == layer]
            place = {key_head: g for g, key_head in enumerate(key_heads)}
            nulled = [
                (n, self.null_heads.index(self.heads[i]))
                for n, i in enumerate(where)
                if self.heads[i] in self.null_heads
            ]
            self._layouts[layer] = _Layout(where, key_heads, [place[self._key_head(i)] for i in where], nulled)
        return self._layouts[layer]

    # ------------------------------------------------------------------ data in

    def update(
        self,
        q: Float[Tensor, "b h d"],
        k: Float[Tensor, "b g k d"],
        labels: Mapping[str, Int[Tensor, "b k"]],
        *,
        weights: Float[Tensor, "b k"] | None = None,
        prompts: Int[Tensor, " b"] | None = None,
        layer: int | None = None,
    ) -> None:
        """Add one batch of rows: a query and its labelled keys.

        Parameters
        ----------
        q : queries, one column per accumulated head (of ``layer``, where one is given), in the order of ``heads``.
        k : keys, once per key head, in the order of ``key_heads``; slots with label 0 are ignored.
        labels : for each contrast, +1, −1 or 0 per key. A contrast left out gets nothing from this batch.
        weights : weight of each (query, key) pair; 1 by default.
        prompts : the number of the random unit that each row belongs to: of its prompt, or of all the prompts that
            share a word or are copies. Needed when nulls are carried; unique over all shards.
        layer : the layer these queries and keys come from, when a batch brings one layer at a time.
        """
        where, key_heads, kv_of_head, nulled = self._layout(layer)
        check_batch(self, q, k, labels, weights, prompts, len(where), len(key_heads), layer)

        queries, keys = augmented(q), k.to(torch.float64)
        for contrast, label in labels.items():
            label = label.to(keys.device)
            if weights is not None:  # a pair without weight takes no part, in the nulls neither
                label = label.masked_fill(weights.to(keys.device) == 0, 0)
            sums, clean = self._key_sums(keys, label, weights, q, where, key_heads, prompts)
            add_outer(self.sums[contrast], where, queries, sums.flatten(2), kv_of_head)
            if self.nulls:
                assert prompts is not None
                unit = prompts.to(keys.device)
                self._add_folds(contrast, where, queries, sums, kv_of_head, unit)
                if nulled:
                    self._add_nulls(contrast, nulled, queries, sums, kv_of_head, clean, label, weights, unit)

    def _add_folds(
        self, contrast: str, where: list[int], queries: Tensor, sums: Tensor, kv_of_head: list[int], unit: Tensor
    ) -> None:
        scale = row_scale(sums)[..., 0]
        self.scales[contrast][where] += torch.einsum("bha,bhs->has", queries, scale[:, kv_of_head])
        # a batch of one layer counts as the share of the heads that it brings
        share = torch.full_like(unit, len(where) / len(self.heads), dtype=torch.float64)
        self.units[contrast].index_add_(0, bucket_of(unit), share)
        fold = fold_of(unit)
        for own in fold.unique().tolist():
            rows = (fold == own).nonzero()[:, 0]
            add_outer(self.folds[contrast][own], where, queries[rows], sums[rows].flatten(2), kv_of_head)

    def _add_nulls(
        self, contrast: str, nulled: list[tuple[int, int]], queries: Tensor, sums: Tensor, kv_of_head: list[int],
        keys: Tensor, label: Tensor, weights: Tensor | None, unit: Tensor,
    ) -> None:  # fmt: skip
        each = sums[0].numel() * self.replicates * sums.element_size()
        for rows in torch.arange(len(sums), device=sums.device).split(max(_AT_ONCE // max(each, 1), 1)):
            own_weights = None if weights is None else weights.to(keys.device)[rows]
            for kind in carried(self.nulls):
                drawn = replicate_sums(
                    kind, self.seed, self.replicates, keys=keys[rows], sums=sums[rows], labels=label[rows],
                    weights=own_weights, prompts=unit[rows],
                )  # fmt: skip
                state = self.null_sums[kind, contrast]
                for n, row in nulled:  # a head at a time: replicates of all heads at once would not fit in memory
                    own = drawn[:, kv_of_head[n], None].flatten(2)
                    add_outer(state, [row], queries[rows, n : n + 1], own, [0])

    def _key_sums(
        self,
        keys: Float[Tensor, "b g k d"],
        label: Int[Tensor, "b k"],
        weights: Float[Tensor, "b k"] | None,
        q: Float[Tensor, "b h d"],
        where: list[int],
        key_heads: list[tuple[int, int]],
        prompts: Int[Tensor, " b"] | None,
    ) -> tuple[Float[Tensor, "b g 2 a"], Float[Tensor, "b g k d"]]:
        """Label-weighted sums of each row's keys, and the keys with NaN and Inf out of the ignored ones."""
        sums = key_sums(signed_weights(label, weights), keys)
        if bool(torch.isfinite(sums.sum() + q.sum(dtype=torch.float64))):
            return sums, keys
        # NaN or Inf somewhere. In an ignored key it is harmless (0 · NaN is NaN: blank it out); elsewhere it is named.
        keys = keys.masked_fill((label == 0)[:, None, :, None], 0.0)
        for side, vectors in (("query", q), ("key", keys)):
            bad = (~torch.isfinite(vectors)).any(dim=-1).nonzero()
            if len(bad):
                row, column, *slot = bad[0].tolist()
                readers = where if side == "query" else [i for i in where if self._key_head(i) == key_heads[column]]
                head = self.heads[readers[column if side == "query" else 0]]
                example = row if prompts is None else int(prompts[row])
                place = f", key {slot[0]}" if slot else ""
                raise BadInput(
                    f"the {side} of {head} at example {example}{place} is NaN or infinite: "
                    "check the model's dtype (float16 can overflow; try bfloat16 or float32)."
                )
        return key_sums(signed_weights(label, weights), keys), keys

    # ------------------------------------------------------------------ results out

    def count(self, contrast: str) -> Float[Tensor, "h 2"]:
        """Total pair weight of + and of − for every head."""
        return self._sums_of(contrast)[:, -1, :, -1]

    def means(self, contrast: str) -> tuple[Float[Tensor, "h 2 d"], Float[Tensor, "h 2 d"]]:
        """Mean query and mean key of + and of −."""
        sums, count = self._filled(contrast), self.count(contrast)[..., None]
        return sums[:, :-1, :, -1].transpose(1, 2) / count, sums[:, -1, :, :-1] / count

    def delta(self, contrast: str, center: Center = "none") -> Float[Tensor, "h d d"]:
        """ΔC of every head, rows in query space and columns in key space.

        ``center="none"`` is the papers'. ``"query"`` takes out ``q̄ (μ⁺ − μ⁻)ᵀ``, what every query sees alike, with
        ``q̄`` halfway between the conditions' mean queries; ``"both"`` is the difference of the two covariances.
        """
        return centred_delta(self._filled(contrast), center)

    def sizes(self, contrast: str) -> Float[Tensor, " h"]:
        """Size of the two averages that ΔC is the difference of: what it is rounded by."""
        sums = self._filled(contrast)
        return torch.linalg.matrix_norm((sums / sums[:, -1:, :, -1:])[:, :-1, :, :-1].transpose(1, 2), ord=2).amax(
            dim=1
        )

    def null_deltas(self, kind: NullKind, contrast: str, head: Head | str, center: Center = "none") -> Tensor:
        """ΔC of every null replicate of one head, shape (replicates, d_head, d_head).

        Those of ``interaction`` are of the query-centred ΔC, or of the one centred on ``both``.
        """
        head = Head.parse(head)
        if kind not in self.nulls or head not in self.null_heads:
            raise BadInput(f"no {kind} replicates were carried for {head}: ask for them when the moments are made.")
        row, null_row = self.heads.index(head), self.null_heads.index(head)
        observed = self._filled(contrast)[row]
        if kind == "label_permutation":
            return centred_delta(self.null_sums[DEALS, contrast][null_row].transpose(0, 1), center)
        drawn = self.null_sums[FLIPS, contrast][null_row].transpose(0, 1)
        if kind == "sign_flip":
            # Flipped signs cancel in Σw, so a flipped sum is divided by, and centred on, what the data itself gave.
            return centred_delta(drawn[..., :-1], center, reference=observed[None])
        return self.interaction_nulls(contrast, head, center)[1]

    def interaction_nulls(self, contrast: str, head: Head | str, center: Center = "query") -> tuple[Tensor, Tensor]:
        """What rows' own scale makes of a difference of means at one head, and the replicates that hold it too."""
        row, null_row = self.heads.index(Head.parse(head)), self.null_heads.index(Head.parse(head))
        whole = torch.cat([self._filled(contrast)[row], self.scales[contrast][row][..., None]], dim=-1)
        drawn = self.null_sums[FLIPS, contrast][null_row].transpose(0, 1)
        units = max(self.unit_count(contrast)[1], 2.0)
        return interaction_deltas(whole, drawn, "query" if center == "none" else center, units)

    def fold_sums(self, contrast: str) -> Float[Tensor, "f h a 2 a"]:
        """The sums over each fold of units; they add up to the whole."""
        if not self.nulls:
            raise BadInput("sums are kept in folds beside nulls: ask for nulls when the moments are made.")
        return self.folds[contrast]

    def unit_count(self, contrast: str) -> tuple[int, float]:
        """How many random units went in, and how many equally large ones they are worth."""
        return count_units(self.units[contrast])

    def _sums_of(self, contrast: str) -> Tensor:
        if contrast not in self.sums:
            raise BadInput(f"there is no contrast {contrast!r} here: there is {', '.join(self.contrasts)}.")
        return self.sums[contrast]

    def _filled(self, contrast: str) -> Tensor:
        sums = self._sums_of(contrast)
        empty = (sums[:, -1, :, -1] <= 0).nonzero()
        if len(empty):
            head, sign = empty[0].tolist()
            raise BadInput(f"contrast {contrast!r} has no {SIGNS[sign]} pairs for {self.heads[head]}: "
                           "it needs both + and − keys.")  # fmt: skip
        return sums

    # ------------------------------------------------------------------ what the sums are

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        state = {f"sums/{contrast}": tensor for contrast, tensor in self.sums.items()}
        state |= {f"{kind}/{contrast}": tensor for (kind, contrast), tensor in self.null_sums.items()}
        beside = {"scales": self.scales, "folds": self.folds, "units": self.units}
        return state | {
            f"{name}/{contrast}": tensor for name, own in beside.items() for contrast, tensor in own.items()
        }

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        return {
            "heads": [str(head) for head in self.heads],
            "contrasts": self.contrasts,
            "d_head": self.d_head,
            "group_size": self.group_size,
            "nulls": self.nulls,
            "null_heads": [str(head) for head in self.null_heads],
            "replicates": self.replicates,
            "seed": self.seed,
            "about": json.loads(json.dumps(self.about)),
        }

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """An empty `Moments` for the same job."""
        given = dict(manifest)
        lacking = [name for name in ("heads", "contrasts", "d_head", "null_heads") if name not in given]
        if lacking:
            raise BadInput(f"a manifest of moments names {', '.join(lacking)}, and this one does not: take manifest().")
        given["null_heads"] = given["null_heads"] or None
        return cls(**given, device=device)
