"""What a head matches on, from its own attention: the contrast that needs no labels.

The head says itself which keys are positive, those it attends to::

    ΔC_self = E[(q − q̄) (Σ_i a_i k_i − mean_i k_i)ᵀ]        attended key against mean key, query-centred

As in `qkscope.maths.moments`, one augmented matrix ``M = Σ [q; 1][δ; 1]ᵀ`` per head is all that is kept; it streams and
merges, and so do its null replicates, of two kinds by turns (row j is of the prompt that takes the place of row i's)::

    whole:       δ'_i = δ_j                     prompts exchange what they attended to
    directions:  δ'_i = |δ_i| δ_j / |δ_j|       they exchange its direction, and each row keeps its own length

The first asks whether δ has anything to do with q. Prompts in which queries and keys are all larger go together in
length alone, and that is no match: the second holds there (the direction of δ knows nothing of q, nor of its own
length), but not quite where rows of one prompt are alike. So what is called above the null stands above both.

A swap moves the logit of a pair by ``qᵀ P (k_b − k_a)``, on average ``−tr(P ΔCᵀ)``. So among the subspaces of k
dimensions that one projector cuts out of queries and keys alike, the first k eigenvectors of the symmetric part
``(ΔC + ΔCᵀ)/2`` move the most (`qkscope.maths.methods.moving`); singular vectors answer another question (which
directions go together).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from qkscope.draws import shuffled_rows
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.maths.bases import ROUNDING
from qkscope.maths.controls import rank_above
from qkscope.maths.significance import false_discovery, left_out
from qkscope.maths.sums import Accumulator, Covariance, augmented

_KINDS = 2  # of replicates, by turns: whole, and directions alone
_AT_ONCE = {"cpu": 2**21, "gpu": 2**28}  # bytes of exchanged keys: what stays in a cache, what fills a GPU


class SelfContrast(Accumulator):
    """Sums of ``[q; 1][δ; 1]ᵀ`` with δ = attended − mean key, of the same with its replicates, and covariances.

    Parameters
    ----------
    heads : heads to accumulate; attended keys are a query head's own, also where heads share keys.
    d_head : width of the heads.
    kv_of_head : which of the drawn keys each head reads; 0, 1, … by default.
    replicates, seed : null replicates per head (``(d_head + 1)² · 8`` bytes each), and the seed of their draws.
    about : what the sums were made from; compared on merge.
    device : where the sums are kept.

    Examples
    --------
    >>> contrast = SelfContrast(["L0H0"], d_head=4)
    >>> q, attended, mean = torch.randn(3, 8, 1, 4)
    >>> contrast.update(q, attended, mean, prompts=torch.arange(8))
    >>> contrast.delta().shape
    torch.Size([1, 4, 4])
    """

    kind = "self-contrast"

    def __init__(
        self,
        heads: str | Sequence[Head | str],
        d_head: int,
        *,
        kv_of_head: Sequence[int] | None = None,
        replicates: int = 0,
        seed: int = 0,
        about: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.heads = parse_heads(heads)
        self.d_head, self.replicates, self.seed, self.about = d_head, replicates, seed, dict(about or {})
        self.kv_of_head = list(range(len(self.heads))) if kv_of_head is None else list(kv_of_head)
        if d_head < 1 or replicates < 0:
            raise BadInput(f"d_head is at least 1 and replicates at least 0, but got {d_head} and {replicates}.")
        if len(self.kv_of_head) != len(self.heads):
            raise BadInput(f"{len(self.heads)} heads read {len(self.kv_of_head)} key heads: name one for each.")
        h, a = len(self.heads), d_head + 1
        self.sums = torch.zeros(h, a, a, dtype=torch.float64, device=device)
        self.null_sums = torch.zeros(h, a, replicates, a, dtype=torch.float64, device=device)
        self.cov_q = Covariance(h, d_head, device)
        self.cov_k = Covariance(max(self.kv_of_head) + 1, d_head, device)

    def update(
        self,
        q: Float[Tensor, "b h d"],
        attended: Float[Tensor, "b h d"],
        mean: Float[Tensor, "b h d"],
        *,
        prompts: Int[Tensor, " b"],
        valid: Bool[Tensor, "b h"] | None = None,
        drawn: Float[Tensor, "b g s d"] | None = None,
        drawn_mask: Bool[Tensor, "b g s"] | None = None,
    ) -> None:
        """Add one batch of rows: queries, what they attended to, and keys drawn by lot for the covariance of keys.

        ``prompts`` are the random unit of the null: they exchange their keys within the batch.
        """
        shape = (len(q), len(self.heads), self.d_head)
        for name, x in (("queries", q), ("attended keys", attended), ("mean keys", mean)):
            if tuple(x.shape) != shape:
                raise BadInput(f"{name} should have shape {shape} (rows, heads, d_head), but have {tuple(x.shape)}.")
        if not bool(torch.isfinite(q.sum() + attended.sum())):
            raise BadInput("a query or an attended key is NaN or infinite: load the model with dtype='float32'.")
        weight = torch.ones(shape[:2], device=q.device) if valid is None else valid.to(q)
        delta = torch.cat([(attended - mean) * weight[..., None], weight[..., None]], dim=-1).transpose(0, 1)
        delta, queries = delta.contiguous(), augmented(q.transpose(0, 1))  # h b a
        self.sums.baddbmm_(queries.mT, delta.double())
        self.cov_q.add(queries)
        if self.replicates:
            self._add_replicates(queries.float(), delta.float(), prompts)
        if drawn is not None:
            keep = torch.ones(drawn.shape[:3], dtype=torch.bool, device=q.device) if drawn_mask is None else drawn_mask
            every = keep.all(dim=1)  # a layer with a window may see fewer: a slot counts where all of them have it
            self.cov_k.update(drawn.transpose(1, 2)[every])

    def _add_replicates(self, queries: Float[Tensor, "h b a"], delta: Float[Tensor, "h b a"], prompts: Tensor) -> None:
        """``Σ_i [q_i; 1][δ'_i; 1]ᵀ`` over rows that count on both sides, for each kind of δ'.

        Products in float32, sums in float64: a null needs no more, and this is most of what the pass adds.
        """
        draw = torch.arange(self.replicates, device=prompts.device)[:, None]
        partners = shuffled_rows(prompts, self.seed, draw).mT
        keys, counts = delta[..., :-1], delta[..., -1:]
        length, rows = keys.norm(dim=-1, keepdim=True), delta.shape[1]
        room = _AT_ONCE["cpu" if delta.device.type == "cpu" else "gpu"]
        for kind, (given, taking) in enumerate(((keys, queries), (normalize(keys, dim=-1), queries * length))):
            partner = partners[:, kind::_KINDS].flatten()
            step = max(room // max(partner.numel() * self.d_head * given.element_size(), 1), 1)
            for start in range(0, len(self.heads), step):
                own = slice(start, start + step)
                null = self.null_sums[own, :, kind::_KINDS]
                moved = given[own].index_select(1, partner).view(-1, rows, null.shape[2] * self.d_head)
                moved_counts = counts[own].index_select(1, partner).view(-1, rows, null.shape[2])
                null[..., :-1] += ((taking[own] * counts[own]).mT @ moved).view(*null.shape[:3], -1)
                null[..., -1] += queries[own].mT @ (counts[own] * moved_counts)

    # ------------------------------------------------------------------ results

    @property
    def count(self) -> Float[Tensor, " h"]:
        """Rows that count, for each head."""
        return self.sums[:, -1, -1]

    def delta(self, center: bool = True) -> Float[Tensor, "h d d"]:
        """``ΔC_self`` of every head, rows in query space and columns in key space.

        Not centred, it holds ``q̄ (mean attended − mean key)ᵀ`` too: what the head looks for whatever is asked.
        """
        return _centred(self.sums) if center else _means(self.sums)[..., :-1, :-1]

    def null_deltas(self, head: Head | str) -> Float[Tensor, "r d d"]:
        """The same for every null replicate of one head."""
        if not self.replicates:
            raise BadInput("no null replicates were carried: make the self-contrast with replicates=199.")
        return _centred(self.null_sums[self.heads.index(Head.parse(head))].transpose(0, 1))

    def covariances(self) -> tuple[Float[Tensor, "h d d"], Float[Tensor, "h d d"]]:
        """Covariance of queries and of keys, for each head."""
        return self.cov_q.matrix(), self.cov_k.matrix()[self.kv_of_head]

    # ------------------------------------------------------------------ what they are sums of

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        return {"sums": self.sums, "null": self.null_sums, "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        return {
            "heads": [str(head) for head in self.heads],
            "d_head": self.d_head,
            "kv_of_head": self.kv_of_head,
            "replicates": self.replicates,
            "seed": self.seed,
            "about": self.about,
        }


def _means(sums: Float[Tensor, "*n a a"]) -> Float[Tensor, "*n a a"]:
    count = sums[..., -1:, -1:]
    if bool((count <= 0).any()):
        raise BadInput("a head has no query that sees more than the first token: give longer texts.")
    return sums / count


def _centred(sums: Float[Tensor, "*n a a"]) -> Float[Tensor, "*n d d"]:
    means = _means(sums)
    return means[..., :-1, :-1] - means[..., :-1, -1:] * means[..., -1:, :-1]


class HeadTest(NamedTuple):
    """How many directions of one head stand above the null, and how surely there is one at all."""

    rank: int
    z: float
    p: float
    q: float  # after false-discovery control over all heads
    tested: bool  # False where its replicates do not differ, or are too few to reach ``alpha`` among these heads


def head_tests(contrast: SelfContrast, *, alpha: float = 0.05) -> list[HeadTest]:
    """Directions above the null for many heads, with as many replicates of each as there are.

    A head's p-value is that of its own replicates, ``(1 + how many reach σ)/(R + 1)``, as long as one of them reaches
    it: that is exact, whatever the other heads are. Where none does, it can only be below ``1/(R + 1)``, and the other
    heads say how far: singular values are put into units of the largest one of their own null, ``z = (σ − mean)/sd``,
    so is each replicate among the others of its head, and in these units the replicates of all heads are pooled. So a
    head far above its null is not lost among many that are asked beside it. Of the two kinds of replicates the larger
    p-value counts.

    Every direction is held against the largest one of the null, nothing projected out: that counts too few rather than
    too many (`directions_in_order` is sharper, and dear). What is below the rounding of float32 is no direction.
    """
    if contrast.replicates < 8:
        raise BadInput(f"pooling needs 8 replicates or more of each head, but there are {contrast.replicates}.")
    s, seen = torch.linalg.svdvals(contrast.delta()), above_rounding(contrast)
    nulls = torch.stack([_largest(contrast.null_deltas(head)) for head in contrast.heads])
    kinds = [_against(s, nulls[:, kind::_KINDS]) for kind in range(_KINDS)]
    p, z = torch.stack([k.p for k in kinds]).amax(dim=0), torch.stack([k.z for k in kinds]).amin(dim=0)
    moves = torch.stack([k.moves for k in kinds]).all(dim=0)
    finest = max(k.finest for k in kinds)
    adjusted = false_discovery(p[:, 0].tolist())
    tests = []
    for i, q in enumerate(adjusted):
        rank = int((p[i, : int(seen[i])] <= alpha).cumprod(dim=0).sum()) if q <= alpha else 0
        tested = bool(moves[i]) and (q <= alpha or float(p[i, 0]) > 1.01 * finest)
        tests.append(HeadTest(rank, float(z[i]), float(p[i, 0]), q, tested))
    return tests


class _Against(NamedTuple):
    """Singular values of many heads against replicates of one kind."""

    p: Float[Tensor, "h m"]
    z: Float[Tensor, " h"]
    moves: Bool[Tensor, " h"]  # whether replicates differ at all: prompts alone in their batches exchange nothing
    finest: float  # the smallest p-value that can be had


def _against(s: Float[Tensor, "h m"], nulls: Float[Tensor, "h r"]) -> _Against:
    least = 1 / (nulls.shape[1] + 1)
    mean, spread = nulls.mean(dim=1, keepdim=True), nulls.std(dim=1, correction=0, keepdim=True)
    moves = (spread > ROUNDING * mean)[:, 0]
    z = (s - mean) / spread.clamp_min(1e-300)
    own = (1 + (nulls[:, :, None] >= s[:, None, :]).sum(dim=1)).double() / (nulls.shape[1] + 1)
    pooled = torch.cat([left_out(null) for null in nulls[moves]] or [s.new_zeros(0)]).sort().values
    reached = len(pooled) - torch.searchsorted(pooled, z.contiguous())
    p = torch.where(own > 1.5 * least, own, own.minimum((1 + reached).double() / (len(pooled) + 1)))
    p[~moves] = 1.0
    return _Against(p, torch.where(moves, z[:, 0], 0.0), moves, min(least, 1 / (len(pooled) + 1)))


def directions_in_order(contrast: SelfContrast, h: int, most: int, alpha: float = 0.01) -> tuple[int, list[float]]:
    """Directions of one head above both kinds of replicates, those found projected out, ``most`` at most; and the 95%
    quantile of the null beside each one tested.
    """
    nulls = contrast.null_deltas(contrast.heads[h])
    kinds = [nulls[kind::_KINDS] for kind in range(_KINDS)]
    limit = max(min(most, int(above_rounding(contrast)[h])), 1)
    level = max(alpha, 1 / (min(map(len, kinds)) + 1))
    tests = [rank_above(contrast.delta()[h], null, level, limit) for null in kinds]
    highs = zip(*(test.null_high for test in tests), strict=False)
    return min(test.rank for test in tests), [max(pair) for pair in highs]


def above_rounding(contrast: SelfContrast) -> Int[Tensor, " h"]:
    """How many directions of each head are more than rounding errors of the float32 numbers they were computed from."""
    centred, whole = (torch.linalg.svdvals(contrast.delta(center)) for center in (True, False))
    return (centred > ROUNDING * torch.maximum(centred[:, :1], whole[:, :1])).sum(dim=1)


def _largest(x: Float[Tensor, "r a b"]) -> Float[Tensor, " r"]:
    return torch.linalg.eigvalsh(x.mT @ x)[..., -1].clamp_min(0).sqrt()
