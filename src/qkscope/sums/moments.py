"""Streaming sums: batches, pieces and machines add up to the same numbers, to rounding.

An accumulator is tensors that grow by addition, and a manifest that says what they are sums of; a
file holds both.

Vectors are summed with a constant 1 appended, so everything ΔC needs is one matrix per head,
contrast and sign::

    M± = Σ w [q; 1] [k; 1]ᵀ  =  [ Σ w q kᵀ   Σ w q ]
                                [ Σ w kᵀ     Σ w   ]

Its size does not depend on how much data went in. Conditional averages are ``M± / Σw``; centring is
a shear; and

    ΔC = E[q kᵀ | +] − E[q kᵀ | −]        (averages over (query, key) pairs of the condition)
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.checking import Count, Natural, checked_class
from qkscope.errors import BadInput
from qkscope.heads import Center, Head, parse_heads
from qkscope.results.folder import read_tensors, tensor_bytes
from qkscope.seeds import draw_bits, draw_signs
from qkscope.sums.nulls import centred_delta, interaction_deltas, key_sums, row_scale

Device = torch.device | str
FOLDS = 8  # of units, for cross-validation
# units are counted in buckets: the counts add up over pieces, and do not grow with the data
_BUCKETS = 2**14
_FOLD_STREAM = 101
# bytes of replicated key sums that the nulls of a batch take at once, however large the batch is
_AT_ONCE = 2**27


class Covariance:
    """Covariance of vectors for many heads, from the sums ``Σ [x; 1][x; 1]ᵀ`` in float64.

    >>> covariance = Covariance(columns=2, d_head=4)
    >>> covariance.update(torch.randn(100, 2, 4))
    >>> covariance.matrix().shape
    torch.Size([2, 4, 4])
    """

    def __init__(self, columns: int, d_head: int, device: torch.device | str = "cpu") -> None:
        a = d_head + 1
        self.sums = torch.zeros(columns, a, a, dtype=torch.float64, device=device)

    def update(self, x: Float[Tensor, "n c d"]) -> None:
        """Add n vectors per column."""
        rows = _augmented(x.transpose(0, 1))
        self.sums.baddbmm_(rows.mT, rows)

    def matrix(self) -> Float[Tensor, "c d d"]:
        """Covariance of every column."""
        count = self.sums[:, -1:, -1:]
        if bool((count < 2).any()):
            raise BadInput("a covariance needs at least two vectors: fit on more prompts.")
        averages = self.sums / count
        mean = averages[:, :-1, -1:]
        mean_products = averages[:, :-1, :-1]
        return mean_products - mean @ mean.mT

    def merge(self, *others: Covariance) -> Covariance:
        """Merge with others: the covariance of all their vectors."""
        merged = deepcopy(self)
        merged.sums += sum(other.sums for other in others)
        return merged


@checked_class
class Moments:
    """Sums of ``w [q; 1] [k; 1]ᵀ`` over + and − pairs, per head and contrast, in float64.

    Parameters
    ----------
    heads : heads to accumulate, in the order in which results come back.
    contrasts : names of the contrasts.
    d_head : width of queries and keys.
    group_size : query heads per key head (grouped-query attention); 1 when every head has its own
        keys.
    replicates, seed : how many draws of the nulls to carry (see `qkscope.sums.nulls`), and
        their seed; with them, the sums are also kept in folds of units, for cross-validation. Each
        head costs ``2 · replicates · (d_head + 1)² · 8`` bytes per contrast.
    about : what the sums were made from (model, weights hash, tokenizer, …); kept in the file,
        compared on merge.
    device : where the sums are kept, which is where batches come from.

    Examples
    --------
    >>> moments = Moments(["L0H0", "L0H1"], ["order"], d_head=4, group_size=2)
    >>> q = torch.randn(8, 2, 4)  # 8 prompts; 2 heads
    >>> k = torch.randn(8, 1, 3, 4)  # 1 key head, 3 keys each
    >>> moments.update(q, k, {"order": torch.tensor([[1, -1, 0]]).expand(8, 3)})
    >>> moments.delta("order").shape
    torch.Size([2, 4, 4])
    """

    kind: ClassVar[str] = "moments"  # of its files

    def __init__(
        self,
        heads: str | Sequence[Head | str],
        contrasts: Sequence[str],
        d_head: Count,
        *,
        group_size: Count = 1,
        replicates: Natural = 0,
        seed: int = 0,
        about: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.heads = parse_heads(heads)
        self.contrasts = list(contrasts)
        self.d_head = d_head
        self.group_size = group_size
        self.replicates = replicates
        self.seed = seed
        self.about = dict(about or {})
        readers = [(head.layer, head.kv(group_size)) for head in self.heads]
        self.key_heads = list(dict.fromkeys(readers))
        self._kv_of_head = [self.key_heads.index(reader) for reader in readers]
        new = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        self.state: dict[str, dict[str, Tensor]] = {}
        for name, shape in self._shapes().items():
            self.state[name] = {contrast: new(shape) for contrast in contrasts}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the sums of one contrast, by name.

        With replicates these are the sums; ``Σ [q; 1] a±``, a row's scale; the sums of each fold of
        units; how many rows a unit has; and the sums and scales under the signs of each replicate.
        """
        h = len(self.heads)
        a = self.d_head + 1
        if not self.replicates:
            return {"sums": (h, a, 2, a)}
        return {
            "sums": (h, a, 2, a),
            "scales": (h, a, 2),
            "folds": (FOLDS, h, a, 2, a),
            "units": (_BUCKETS,),
            "flips": (h, a, self.replicates, 2, a + 1),
        }

    def update(
        self, q: Tensor, k: Tensor, labels: Mapping[str, Tensor], *, prompts: Tensor | None = None
    ) -> None:
        """Add one batch of rows: a query and its labelled keys.

        Parameters
        ----------
        q : queries (rows, heads, d), one column per accumulated head, in the order of ``heads``.
        k : keys (rows, key heads, keys, d), in the order of ``key_heads``; those with label 0 are
            ignored.
        labels : for each contrast, +1, −1 or 0 per key (rows, keys). One left out gets nothing from
            this batch.
        prompts : the number of the random unit that each row belongs to: of its prompt, or of all
            the prompts that share a word or are copies. Needed when nulls are carried; unique over
            all pieces.
        """
        if prompts is None and self.replicates:
            raise BadInput(
                "null replicates need to know which prompt each row belongs to: pass prompts=."
            )
        queries = _augmented(q)
        keys = k.to(torch.float64)
        for contrast, label in labels.items():
            sums = self._key_sums(q, keys, label.to(keys.device), prompts)
            state = self.state["sums"][contrast]
            _add_outer(state, queries, sums.flatten(2), self._kv_of_head)
            if prompts is not None and self.replicates:
                self._add_nulls(contrast, queries, sums, prompts.to(keys.device))

    def _key_sums(
        self,
        q: Float[Tensor, "b h d"],
        keys: Float[Tensor, "b g k d"],
        label: Int[Tensor, "b k"],
        prompts: Tensor | None,
    ) -> Float[Tensor, "b g 2 d+1"]:
        """Label-weighted sums of each row's keys; those that take part must be finite."""
        sums = key_sums(label, keys)
        checksum = sums.sum() + q.sum(dtype=torch.float64)
        if bool(torch.isfinite(checksum)):
            return sums
        # NaN or Inf in an ignored key is harmless, but 0 · NaN is NaN: blank it out
        ignored = (label == 0)[:, None, :, None]
        labelled = keys.masked_fill(ignored, 0.0)
        self._check_finite("query", q, prompts)
        self._check_finite("key", labelled, prompts)
        return key_sums(label, labelled)

    def _check_finite(
        self, side: str, vectors: Float[Tensor, "b c *k d"], prompts: Tensor | None
    ) -> None:
        """Refuse vectors that are NaN or infinite, naming the first."""
        is_finite = torch.isfinite(vectors).all(dim=-1)
        bad = (~is_finite).nonzero().tolist()
        if not bad:
            return
        row, column, *slot = bad[0]
        if side == "key":
            column = self._kv_of_head.index(column)
        if prompts is not None:
            row = int(prompts[row])
        vector = f"the {side} of {self.heads[column]} at example {row}"
        if slot:
            vector += f", key {slot[0]}"
        advice = "check the model's dtype (float16 can overflow; try bfloat16 or float32)"
        raise BadInput(f"{vector} is NaN or infinite: {advice}.")

    def _add_nulls(
        self,
        contrast: str,
        queries: Float[Tensor, "b h a"],
        sums: Float[Tensor, "b g 2 a"],
        unit: Int[Tensor, " b"],
    ) -> None:
        """Add one batch of a contrast to row scales, unit counts, folds and null replicates."""
        state = {name: by_contrast[contrast] for name, by_contrast in self.state.items()}
        scale = row_scale(sums)
        scale_of_head = scale[:, self._kv_of_head, :, 0]
        state["scales"] += torch.einsum("bha,bhs->has", queries, scale_of_head)
        bucket = draw_bits(unit).remainder(_BUCKETS)
        state["units"].index_add_(0, bucket, torch.ones_like(unit, dtype=torch.float64))
        # the folds are the same whatever the seed of the nulls
        fold = draw_bits(_FOLD_STREAM, unit).remainder(FOLDS)
        for number in fold.unique().tolist():
            inside = fold == number
            keys = sums[inside].flatten(2)
            _add_outer(state["folds"][number], queries[inside], keys, self._kv_of_head)
        scaled = torch.cat([sums, scale], dim=-1)
        self._add_flips(state["flips"], queries, scaled, unit)

    def _add_flips(
        self,
        flips: Float[Tensor, "h a r 2 a+1"],
        queries: Float[Tensor, "b h a"],
        scaled: Float[Tensor, "b g 2 a+1"],
        unit: Int[Tensor, " b"],
    ) -> None:
        """Add one batch to the replicates: the same sums, each unit's with a random sign."""
        replicate = torch.arange(self.replicates, device=unit.device)[:, None]
        width = scaled.shape[-1] - 1
        numbers = scaled[0, ..., :width].numel() * self.replicates
        row_bytes = numbers * scaled.element_size()
        rows_at_once = max(_AT_ONCE // max(row_bytes, 1), 1)
        for rows in torch.arange(len(unit), device=unit.device).split(rows_at_once):
            signs = draw_signs(self.seed, 0, replicate, unit[rows]).T
            # rows by key heads by replicates by ± by a + 1
            sign = signs.to(scaled.dtype)[:, None, :, None, None]
            flipped = scaled[rows, :, None] * sign
            # head by head: the replicates of all heads at once would not fit in memory
            for i, kv in enumerate(self._kv_of_head):
                one_head = slice(i, i + 1)
                keys = flipped[:, kv, None].flatten(2)
                _add_outer(flips[one_head], queries[rows, one_head], keys, [0])

    def count(self, contrast: str) -> Float[Tensor, "h 2"]:
        """Total pair weight of + and of − for every head.

        Parameters
        ----------
        contrast : its name.
        """
        sums = self.state["sums"][contrast]
        return sums[:, -1, :, -1]

    def delta(self, contrast: str, center: Center = "none") -> Float[Tensor, "h d d"]:
        """ΔC of every head, rows in query space and columns in key space.

        Parameters
        ----------
        contrast : its name.
        center : ``"none"`` is the papers'. ``"query"`` takes out ``q̄ (μ⁺ − μ⁻)ᵀ``, what every
            query sees alike, with ``q̄`` halfway between the conditions' mean queries.
        """
        return centred_delta(self._filled(contrast), center)

    def sizes(self, contrast: str) -> Float[Tensor, " h"]:
        """Size of the two averages that ΔC is the difference of, which sets its rounding.

        Parameters
        ----------
        contrast : its name.
        """
        sums = self._filled(contrast)
        count = sums[:, -1:, :, -1:]
        averages = sums / count
        products = averages[:, :-1, :, :-1].transpose(1, 2)
        norms = torch.linalg.matrix_norm(products, ord=2)
        return norms.amax(dim=1)

    def flipped_nulls(self, contrast: str, head: Head | str) -> Float[Tensor, "r d d"]:
        """ΔC of one head with the signs of its units flipped, of every replicate.

        Parameters
        ----------
        contrast, head : whose replicates.
        """
        column = self.heads.index(Head.parse(head))
        flipped = self._flipped(contrast, column)[..., :-1]
        # Flipped signs cancel in Σw, so a flipped sum is divided by what the data itself gave.
        reference = self._filled(contrast)[column]
        return centred_delta(flipped, reference=reference[None])

    def _flipped(self, contrast: str, column: int) -> Float[Tensor, "r a 2 a+1"]:
        """Sums and scales of one head under the signs of each replicate."""
        return self.state["flips"][contrast][column].transpose(0, 1)

    def interaction_nulls(
        self, contrast: str, head: Head | str
    ) -> tuple[Float[Tensor, "d d"], Float[Tensor, "r d d"]]:
        """Part of ΔC that the rows' scale makes of a difference of means, and its replicates.

        The replicates hold that part too.

        Parameters
        ----------
        contrast, head : whose replicates.
        """
        column = self.heads.index(Head.parse(head))
        sums = self._filled(contrast)[column]
        scales = self.state["scales"][contrast][column]
        observed = torch.cat([sums, scales[..., None]], dim=-1)
        _, effective_units = self.unit_count(contrast)
        return interaction_deltas(
            observed, self._flipped(contrast, column), max(effective_units, 2.0)
        )

    def unit_count(self, contrast: str) -> tuple[int, float]:
        """Number of random units added, and of equally large ones that they are worth.

        Parameters
        ----------
        contrast : its name.
        """
        rows = self.state["units"][contrast]
        filled = int((rows > 0).sum())
        # two units in one bucket look like one: how many units fill that many buckets at random
        # (exact while they are few)
        empty = max(_BUCKETS - filled, 1)
        count = round(-_BUCKETS * math.log(empty / _BUCKETS))
        squares = rows.square().sum().clamp_min(1e-300)
        equally_large = float(rows.sum() ** 2 / squares)
        return count, equally_large * count / max(filled, 1)

    def _filled(self, contrast: str) -> Float[Tensor, "h a 2 a"]:
        """The sums of a contrast, which has + and − pairs for every head or is refused."""
        missing = (self.count(contrast) <= 0).nonzero().tolist()
        if missing:
            head, sign = missing[0]
            kind = "negative" if sign else "positive"
            pairs = f"{kind} pairs for {self.heads[head]}"
            raise BadInput(f"contrast {contrast!r} has no {pairs}: it needs both + and − keys.")
        return self.state["sums"][contrast]

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        tensors = {}
        for name, by_contrast in self.state.items():
            for contrast, value in by_contrast.items():
                tensors[f"{name}/{contrast}"] = value
        return tensors

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        return {
            "heads": [str(head) for head in self.heads],
            "contrasts": self.contrasts,
            "d_head": self.d_head,
            "group_size": self.group_size,
            "replicates": self.replicates,
            "seed": self.seed,
            "about": json.loads(json.dumps(self.about)),
        }

    def to_bytes(self) -> bytes:
        """The content of the file that `load` reads."""
        return tensor_bytes(self.kind, self.tensors(), self.manifest())

    @classmethod
    def load(cls, path: str | Path, *, device: Device = "cpu") -> Self:
        """Read a file of what `to_bytes` gave.

        Parameters
        ----------
        path : of the file.
        device : where the sums go.
        """
        tensors, manifest = read_tensors(path, cls.kind)
        damaged = cls._first_damaged(tensors, manifest)
        if damaged is not None:
            problem = f"{damaged} is missing or of another shape or type"
            raise BadInput(f"{path} is damaged: {problem}: make it again.")
        moments = cls(**manifest, device=device)
        for name, value in moments.tensors().items():
            value.copy_(tensors[name])
        return moments

    @classmethod
    def _first_damaged(
        cls, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]
    ) -> str | None:
        """Name of the first tensor that is promised and missing; None if all is well."""
        try:
            # on tensors without memory, as a manifest may promise anything
            promised = cls(**manifest, device="meta").tensors()
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
            return "its manifest"
        for name, expected in promised.items():
            value = tensors.get(name)
            if value is None:
                return name
            if (value.shape, value.dtype) != (expected.shape, expected.dtype):
                return name
        return None


def _augmented(vectors: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d+1"]:
    """``[v; 1]`` in float64."""
    return pad(vectors.to(torch.float64), (0, 1), value=1.0)


def _add_outer(
    state: Float[Tensor, "h a *x"],
    queries: Float[Tensor, "b h a"],
    keys: Float[Tensor, "b g x"],
    kv_of_head: list[int],
) -> None:
    """``state[h] += Σ_b queries[b, h] keys[b, kv_of_head[h]]ᵀ``, in place."""
    groups = keys.shape[1]
    group_size = len(kv_of_head) // groups
    whole_groups = [head // group_size for head in range(len(kv_of_head))]
    flat = state.flatten(2)
    if kv_of_head == whole_groups:
        # the queries of a group stand side by side and meet their shared keys in one product
        stacked = queries.unflatten(1, (groups, group_size)).flatten(2)
        by_group = flat.view(groups, -1, keys.shape[2])
        left = stacked.permute(1, 2, 0)
        by_group.baddbmm_(left, keys.transpose(0, 1))
    else:
        keys_of_heads = keys.transpose(0, 1)[kv_of_head]
        flat += queries.permute(1, 2, 0) @ keys_of_heads
