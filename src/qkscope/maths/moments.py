"""The streaming sums of a contrast, for many heads at once.

With a constant 1 appended to queries and keys, everything ΔC needs is one matrix per head, contrast and sign::

    M± = Σ w [q; 1] [k; 1]ᵀ  =  [ Σ w q kᵀ   Σ w q ]
                                [ Σ w kᵀ     Σ w   ]

Its size does not depend on how much data went in. Conditional averages are ``M± / Σw``; centring is a shear; and

    ΔC = E[q kᵀ | +] − E[q kᵀ | −]        (averages over (query, key) pairs of the condition)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import Count, checked_class
from qkscope.maths import significance
from qkscope.maths.significance import NullKind
from qkscope.maths.sums import Accumulator, Center, add_outer, augmented, centred_delta, check_shape

SIGNS = ("positive", "negative")
_AT_ONCE = 2**27  # bytes of replicated key sums: what the nulls of a batch take at once, however large it is


class _Rows(NamedTuple):
    """A batch of one contrast: augmented queries, keys and their labels, the label-weighted sums of each row's keys."""

    queries: Float[Tensor, "b h a"]
    keys: Float[Tensor, "b g k d"]
    labels: Int[Tensor, "b k"]
    sums: Float[Tensor, "b g 2 a"]


@checked_class
class Moments(Accumulator):
    """Sums of ``w``, ``w q``, ``w k`` and ``w q kᵀ`` over + and − pairs, per head and contrast, in float64.

    Parameters
    ----------
    heads : heads to accumulate, in the order in which results come back.
    contrasts : names of the contrasts.
    d_head : width of queries and keys.
    group_size : query heads per key head (grouped-query attention); 1 when every head has its own keys.
    nulls : the nulls to carry replicates for (see `qkscope.maths.significance`); with them, the sums are also kept in
        folds of units, for cross-validation. Each head costs ``2 · replicates · (d_head + 1)² · 8`` bytes per
        contrast, and as much again where labels are dealt besides.
    replicates, seed : how many draws of each null, and their seed.
    about : what the sums were made from (model, weights hash, tokenizer, …); kept in the file, compared on merge.
    device : where the sums are kept, which is where batches come from.

    Examples
    --------
    >>> moments = Moments(["L0H0", "L0H1"], ["order"], d_head=4, group_size=2)
    >>> q, k = torch.randn(8, 2, 4), torch.randn(8, 1, 3, 4)  # 8 prompts; 2 heads; 1 key head, 3 keys each
    >>> moments.update(q, k, {"order": torch.tensor([[1, -1, 0]]).expand(8, 3)})
    >>> moments
    Moments(order at 2 heads of width 4: 8 + and 8 − pairs)
    >>> moments.delta("order").shape
    torch.Size([2, 4, 4])
    """

    kind = "moments"

    def __init__(
        self,
        heads: str | Sequence[Head | str],
        contrasts: Sequence[str],
        d_head: Count,
        *,
        group_size: Count = 1,
        nulls: Sequence[NullKind] = (),
        replicates: Count = 199,
        seed: int = 0,
        about: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.heads = parse_heads(heads)
        self.contrasts, self.nulls = list(contrasts), list(nulls)
        self.d_head, self.group_size, self.replicates, self.seed = d_head, group_size, replicates, seed
        self.about = dict(about or {})
        readers = [(head.layer, head.kv(group_size)) for head in self.heads]
        self.key_heads = list(dict.fromkeys(readers))
        self._kv_of_head = [self.key_heads.index(reader) for reader in readers]
        h, a = len(self.heads), d_head + 1

        def zeros(*shape: int) -> dict[str, Tensor]:
            return {c: torch.zeros(shape, dtype=torch.float64, device=device) for c in self.contrasts}

        self.sums = zeros(h, a, 2, a)
        self.null_sums: dict[tuple[str, str], Tensor] = {
            (kind, contrast): tensor
            for kind in significance.carried(self.nulls)
            for contrast, tensor in zeros(h, a, replicates, 2, a + (kind == significance.FLIPS)).items()
        }
        # Beside the nulls: Σ [q; 1] a± (a row's scale), the sums of each fold of units, and how many rows a unit has.
        self.scales = zeros(h, a, 2) if self.nulls else {}
        self.folds = zeros(significance.FOLDS, h, a, 2, a) if self.nulls else {}
        self.units = zeros(significance.BUCKETS) if self.nulls else {}

    def __repr__(self) -> str:
        plus, minus = (sum(float(self.count(c)[0, sign]) for c in self.contrasts) for sign in (0, 1))
        where = f"{', '.join(self.contrasts)} at {len(self.heads)} heads of width {self.d_head}"
        return f"Moments({where}: {plus:g} + and {minus:g} − pairs)"

    # ------------------------------------------------------------------ data in

    def update(
        self,
        q: Float[Tensor, "b h d"],
        k: Float[Tensor, "b g k d"],
        labels: Mapping[str, Int[Tensor, "b k"]],
        *,
        prompts: Int[Tensor, " b"] | None = None,
    ) -> None:
        """Add one batch of rows: a query and its labelled keys.

        Parameters
        ----------
        q : queries, one column per accumulated head, in the order of ``heads``.
        k : keys, once per key head, in the order of ``key_heads``; slots with label 0 are ignored.
        labels : for each contrast, +1, −1 or 0 per key. A contrast left out gets nothing from this batch.
        prompts : the number of the random unit that each row belongs to: of its prompt, or of all the prompts that
            share a word or are copies. Needed when nulls are carried; unique over all pieces.
        """
        self._check_batch(q, k, labels, prompts)
        queries, keys = augmented(q), k.to(torch.float64)
        for contrast, label in labels.items():
            label = label.to(keys.device)
            labelled, sums = keys, significance.key_sums(significance.by_sign(label), keys)
            if not bool(torch.isfinite(sums.sum() + q.sum(dtype=torch.float64))):
                # NaN or Inf somewhere. In an ignored key it is harmless (0 · NaN is NaN: blank it out), elsewhere not.
                labelled = keys.masked_fill((label == 0)[:, None, :, None], 0.0)
                self._check_finite(q, labelled, prompts)
                sums = significance.key_sums(significance.by_sign(label), labelled)
            rows = _Rows(queries, labelled, label, sums)
            add_outer(self.sums[contrast], queries, sums.flatten(2), self._kv_of_head)
            if prompts is not None and self.nulls:
                self._add_folds(contrast, rows, prompts.to(keys.device))
                self._add_nulls(contrast, rows, prompts.to(keys.device))

    def _check_batch(self, q: Tensor, k: Tensor, labels: Mapping[str, Tensor], prompts: Tensor | None) -> None:
        """Refuse a batch that does not fit these sums."""
        b, slots = q.shape[0], k.shape[2]
        check_shape("queries", q, (b, len(self.heads), self.d_head), "rows, heads, d_head")
        check_shape("keys", k, (b, len(self.key_heads), slots, self.d_head), "rows, key heads, keys, d_head")
        for contrast, label in labels.items():
            self._sums_of(contrast)
            check_shape(f"labels of {contrast!r}", label, (b, slots), "rows, keys")
            if bool((label.abs() > 1).any()):
                raise BadInput(f"labels of {contrast!r} are 1, -1 or 0.")
        if prompts is None and self.nulls:
            raise BadInput("null replicates need to know which prompt each row belongs to: pass prompts=.")

    def _check_finite(self, q: Tensor, keys: Tensor, prompts: Tensor | None) -> None:
        for side, vectors in (("query", q), ("key", keys)):
            for row, column, *slot in (~torch.isfinite(vectors)).any(dim=-1).nonzero()[:1].tolist():
                head = self.heads[column if side == "query" else self._kv_of_head.index(column)]
                example = row if prompts is None else int(prompts[row])
                raise BadInput(
                    f"the {side} of {head} at example {example}{f', key {slot[0]}' if slot else ''} is NaN or infinite:"
                    " check the model's dtype (float16 can overflow; try bfloat16 or float32)."
                )

    def _add_folds(self, contrast: str, rows: _Rows, unit: Int[Tensor, " b"]) -> None:
        scale = significance.row_scale(rows.sums)[..., 0]
        self.scales[contrast] += torch.einsum("bha,bhs->has", rows.queries, scale[:, self._kv_of_head])
        self.units[contrast].index_add_(0, significance.bucket_of(unit), torch.ones_like(unit, dtype=torch.float64))
        fold = significance.fold_of(unit)
        for number in fold.unique().tolist():
            some = fold == number
            keys = rows.sums[some].flatten(2)
            add_outer(self.folds[contrast][number], rows.queries[some], keys, self._kv_of_head)

    def _add_nulls(self, contrast: str, rows: _Rows, unit: Int[Tensor, " b"]) -> None:
        each = rows.sums[0].numel() * self.replicates * rows.sums.element_size()
        for some in torch.arange(len(unit), device=unit.device).split(max(_AT_ONCE // max(each, 1), 1)):
            part = _Rows(*(x[some] for x in rows))
            for kind in significance.carried(self.nulls):
                drawn = significance.replicate_sums(kind, self.seed, self.replicates, *part[1:], unit[some])
                state = self.null_sums[kind, contrast]
                for n, g in enumerate(self._kv_of_head):  # all heads' replicates at once would not fit in memory
                    add_outer(state[n : n + 1], part.queries[:, n : n + 1], drawn[:, g, None].flatten(2), [0])

    # ------------------------------------------------------------------ results out

    def count(self, contrast: str) -> Float[Tensor, "h 2"]:
        """Total pair weight of + and of − for every head.

        Parameters
        ----------
        contrast : its name.
        """
        return self._sums_of(contrast)[:, -1, :, -1]

    def delta(self, contrast: str, center: Center = "none") -> Float[Tensor, "h d d"]:
        """ΔC of every head, rows in query space and columns in key space.

        Parameters
        ----------
        contrast : its name.
        center : ``"none"`` is the papers'. ``"query"`` takes out ``q̄ (μ⁺ − μ⁻)ᵀ``, what every query sees alike, with
            ``q̄`` halfway between the conditions' mean queries; ``"both"`` is the difference of the two covariances.
        """
        return centred_delta(self._filled(contrast), center)

    def sizes(self, contrast: str) -> Float[Tensor, " h"]:
        """Size of the two averages that ΔC is the difference of: what it is rounded by.

        Parameters
        ----------
        contrast : its name.
        """
        sums = self._filled(contrast)
        averages = (sums / sums[:, -1:, :, -1:])[:, :-1, :, :-1]
        return torch.linalg.matrix_norm(averages.transpose(1, 2), ord=2).amax(dim=1)

    def null_deltas(
        self, kind: NullKind, contrast: str, head: Head | str, center: Center = "none"
    ) -> Float[Tensor, "r d d"]:
        """ΔC of every null replicate of one head.

        Parameters
        ----------
        kind : which null.
        contrast, head : whose replicates.
        center : as in `delta`; those of ``interaction`` are query-centred where it is ``"none"``.
        """
        head = Head.parse(head)
        if kind not in self.nulls or head not in self.heads:
            raise BadInput(f"no {kind} replicates were carried for {head}: ask for them when the moments are made.")
        if kind == "interaction":
            return self.interaction_nulls(contrast, head, center)[1]
        observed, row = self._filled(contrast), self.heads.index(head)
        if kind == "label_permutation":
            return centred_delta(self.null_sums[significance.DEALS, contrast][row].transpose(0, 1), center)
        # Flipped signs cancel in Σw, so a flipped sum is divided by, and centred on, what the data itself gave.
        drawn = self.null_sums[significance.FLIPS, contrast][row].transpose(0, 1)
        return centred_delta(drawn[..., :-1], center, reference=observed[row][None])

    def interaction_nulls(
        self, contrast: str, head: Head | str, center: Center = "query"
    ) -> tuple[Float[Tensor, "d d"], Float[Tensor, "r d d"]]:
        """What rows' own scale makes of a difference of means at one head, and the replicates that hold it too.

        Parameters
        ----------
        contrast, head : whose replicates.
        center : as in `delta`, where ``"none"`` is ``"query"``.
        """
        row = self.heads.index(Head.parse(head))
        whole = torch.cat([self._filled(contrast)[row], self.scales[contrast][row][..., None]], dim=-1)
        drawn = self.null_sums[significance.FLIPS, contrast][row].transpose(0, 1)
        units = max(self.unit_count(contrast)[1], 2.0)
        return significance.interaction_deltas(whole, drawn, "query" if center == "none" else center, units)

    def unit_count(self, contrast: str) -> tuple[int, float]:
        """How many random units went in, and how many equally large ones they are worth.

        Parameters
        ----------
        contrast : its name.
        """
        return significance.count_units(self.units[contrast])

    def _sums_of(self, contrast: str) -> Tensor:
        if contrast not in self.sums:
            raise BadInput(f"there is no contrast {contrast!r} here: there is {', '.join(self.contrasts)}.")
        return self.sums[contrast]

    def _filled(self, contrast: str) -> Tensor:
        sums = self._sums_of(contrast)
        empty = (sums[:, -1, :, -1] <= 0).nonzero()
        if len(empty):
            head, sign = empty[0].tolist()
            raise BadInput(
                f"contrast {contrast!r} has no {SIGNS[sign]} pairs for {self.heads[head]}: it needs both + and − keys."
            )
        return sums

    # ------------------------------------------------------------------ what the sums are

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        named = {"sums": self.sums, "scales": self.scales, "folds": self.folds, "units": self.units}
        state = {(name, c): x for name, by_contrast in named.items() for c, x in by_contrast.items()} | self.null_sums
        return {f"{name}/{contrast}": tensor for (name, contrast), tensor in state.items()}

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        return {
            "heads": [str(head) for head in self.heads],
            "contrasts": self.contrasts,
            "d_head": self.d_head,
            "group_size": self.group_size,
            "nulls": self.nulls,
            "replicates": self.replicates,
            "seed": self.seed,
            "about": json.loads(json.dumps(self.about)),
        }
