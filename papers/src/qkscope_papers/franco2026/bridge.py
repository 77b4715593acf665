"""The bridge: are the subspaces that contrasts find spanned by singular vectors?

No paper asks this. Heads are found on the binding task, features fitted in the query's frame;
`qkscope.sums.alignment` says which singular vectors carry them. How much of their swaps the
singular vectors alone reproduce is seen on held-out prompts, for each number k of dimensions: the
first k directions of the contrast; the k singular vectors that carry most of it (`singular`, chosen
on the prompts the contrast was fitted on); the k with the largest singular values (`omega_svd`,
from the weights alone); the best k of rotated singular vectors, by the same choice (`rotated`); key
PCA; and random subspaces. Singular vectors are swapped as components of the logit, ``P = Σ n_j
m_jᵀ``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import tasks
from qkscope.errors import BadInput
from qkscope.findings.fit import Fit
from qkscope.findings.singular_rows import singular_basis
from qkscope.findings.swap_rows import capture_rows, draw_pairs
from qkscope.heads import Head
from qkscope.model.scope import Scope
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope.sums import swap_methods as methods
from qkscope.sums.bases import Projector
from qkscope.sums.feature_split import Alignment, alignment, carried
from qkscope.sums.singular import SingularBasis, components, dual, random_rotations
from qkscope.sums.subspace import Subspace
from qkscope.sums.swap_algebra import Condition, SwapRows
from qkscope.texts.task import Unit
from qkscope.verbs.decompose import decompose
from qkscope.verbs.find_heads import find_heads
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import Row, column, over_key_heads, pick


@dataclass(frozen=True)
class BridgeWork:
    """Counts of one preset."""

    choose: int
    fit: int
    test: int
    heads: int
    draws: int


WORK = {
    "smoke": BridgeWork(32, 32, 32, 2, 4),
    "default": BridgeWork(128, 256, 192, 4, 20),
    "paper": BridgeWork(256, 1000, 1000, 9, 50),
}
BindingForm = Literal["list", "sentence"]
SIZES = (1, 2, 4, 8, 12, 16)
_CONTRASTS = ("lexical", "order")
_VECTORS = 8  # singular vectors of a feature in the table


@figure("franco2026", "bridge", "Contrasts against singular vectors")
def run(settings: Settings) -> Result:
    """Alignment and swaps at the best binding heads."""
    work = WORK[settings.preset]
    scope = Scope.load(settings.model, device=settings.device)
    # a nano answers lists by looking at the colons, and the other forms by looking at the boxes
    form: BindingForm = "sentence" if settings.model.startswith("nano:") else "list"
    task = tasks.binding(9, form, settings.seed)
    ranking = find_heads(scope, task, work.choose)
    best = ranking.top("row_accuracy")[: work.heads]
    heads = column(best, "head")
    asked: Any = {"contrasts": list(_CONTRASTS), "space": "query_frame", "seed": settings.seed}
    fit = decompose(scope, task, heads, work.fit, **asked)
    basis = singular_basis(scope, heads)
    units = task.test(work.test)
    tables, arrays = bridge(scope, fit, basis, units, draws=work.draws, seed=settings.seed)
    tables["heads"] = best
    claims = _claims(pick(tables["alignment"], contrast="lexical"), scope.group_size)
    about = {**fit.provenance.get("asked", {}), "test_units": len(units), "draws": work.draws}
    answer = _answer(tables["alignment"])
    return settings.result(answer, tables, claims, arrays, settings.model, about)


def bridge(
    scope: Scope,
    fit: Fit,
    basis: SingularBasis,
    units: Sequence[Unit],
    *,
    sizes: Sequence[int] = SIZES,
    draws: int = 20,
    batch_size: int = 32,
    seed: int = 0,
) -> tuple[dict[str, list[Row]], dict[str, Tensor]]:
    """Tables of how every fitted feature lies on the singular vectors of its head, and of swaps of
    both; and arrays.

    Parameters
    ----------
    scope : the model.
    fit : fitted in ``query_frame``, where one basis serves all positions (or in a model without
        RoPE).
    basis : the singular vectors of its heads.
    units : from ``task.test(n)``: words that nothing was fitted on.
    sizes : numbers of dimensions swapped; those that fit into a head.
    draws : random subspaces and rotations per size.
    batch_size : prompts that run together.
    seed : of everything that is drawn.
    """
    if fit.space != "query_frame" and any(basis[head].rotary for head in fit.heads):
        raise BadInput(
            "the bridge needs queries and keys in the query's frame, but this fit is in "
            f"{fit.space}: fit with space='query_frame'."
        )
    rows = capture_rows(scope, units, fit, fit.heads, draw_pairs(units, batch_size, seed))
    fitting = [k for k in sizes if k <= scope.d_head]
    found: list[Alignment] = []
    curve: list[Row] = []
    for name in fit.contrasts:
        found += [alignment(basis, fit[name, head], seed=seed) for head in fit.heads]
        curve += _curve(rows, fit, basis, name, fitting, draws, seed)
    vectors: list[Row] = []
    for one in found:
        place = {"head": str(one.head), "contrast": one.contrast}
        vectors += [place | row for row in one.table()[:_VECTORS]]
    aligned = [_with_swaps(one, curve) for one in found]
    arrays = {f"carried/{one.contrast}/{one.head}": one.carried for one in found}
    return {"alignment": aligned, "curve": curve, "vectors": vectors}, arrays


def _curve(
    rows: SwapRows,
    fit: Fit,
    basis: SingularBasis,
    name: str,
    sizes: Sequence[int],
    draws: int,
    seed: int,
) -> list[Row]:
    """Swaps of one contrast's directions, of singular vectors, and of their nulls, by size."""
    heads = list(fit.heads)
    features = [fit[name, head] for head in heads]
    deltas = torch.stack([_delta(feature) for feature in features])
    directions = [feature.V.double().cpu() for feature in features]
    cov_k = [feature.cov_k for feature in features if feature.cov_k is not None]  # a fit has it
    known: dict[str | Condition, methods.Method] = {
        "contrast": methods.leading(directions),
        "singular": singular(basis, heads, deltas),
        "omega_svd": methods.omega_svd(basis, heads),
        "rotated": rotated(basis, heads, deltas, draws, seed),
        "key_pca": methods.key_pca(torch.stack(cov_k).cpu()),
        "random": methods.random(heads, features[0].d_head, draws, seed),
    }
    against = {"singular": "rotated", "contrast": "rotated", "omega_svd": "random"}
    found = rows.curve(known, sizes, against=against, seed=seed)
    return [{"contrast": name, **row} for row in found]


def singular(
    basis: SingularBasis, heads: Sequence[Head], deltas: Float[Tensor, "h d d"]
) -> methods.Method:
    """Components of the logit, those that carry most of each head's ``ΔC`` first."""
    each = []
    for head, delta in zip(heads, deltas, strict=True):
        vectors = basis[head]
        order = carried(delta, vectors.read, vectors.write).argsort(descending=True)
        each.append(components(vectors.read, order))
    return methods.leading(Projector.stack(each))


def rotated(
    basis: SingularBasis,
    heads: Sequence[Head],
    deltas: Float[Tensor, "h d d"],
    draws: int,
    seed: int,
) -> methods.Method:
    """Components of rotated singular vectors, those that carry most of ``ΔC`` first; as many draws
    for each head.
    """
    left = []
    right = []
    for head, delta in zip(heads, deltas, strict=True):
        read = basis[head].read
        own_seed = derived_seed(seed, "rotated", head.layer, head.index)
        turns = random_rotations(read.shape[1], draws, own_seed)
        m = read.double() @ turns
        n = dual(read) @ turns
        first = carried(delta, m, n).argsort(-1, descending=True)
        order = first[:, None].expand_as(m)
        left.append(n.gather(-1, order))
        right.append(m.gather(-1, order))
    return methods.leading(Projector(torch.stack(left, dim=1), torch.stack(right, dim=1)))


def _delta(feature: Subspace) -> Float[Tensor, "d d"]:
    """``ΔC`` of a feature, of its rank."""
    u = feature.basis("query").double().cpu()
    v = feature.basis("key").double().cpu()
    values = feature.S[: feature.rank].double().cpu()
    return u @ torch.diag(values) @ v.mT


def _with_swaps(one: Alignment, curve: Sequence[Row]) -> Row:
    """The feature's row, with the swaps of as many dimensions as its rank (the next size of the
    curve).
    """
    own = pick(curve, head=str(one.head), contrast=one.contrast)
    sizes = column(own, "k")
    k = min((size for size in sizes if size >= one.rank), default=max(sizes))
    at = {row["method"]: row for row in pick(own, k=k)}
    shifts = {f"shift_{method}": row["shift"] for method, row in at.items()}
    singular_row = at["singular"]
    whole = at["contrast"]["shift"]
    return {
        **one.row(),
        "k": k,
        **shifts,
        "gain_singular": singular_row["gain"],
        "gain_singular_low": singular_row["gain_low"],
        "gain_singular_high": singular_row["gain_high"],
        "reproduced": singular_row["shift"] / whole if whole > 0 else None,
        "reproduced_rotated": at["rotated"]["shift"] / whole if whole > 0 else None,
    }


@dataclass(frozen=True)
class _Asked:
    """A claim as two columns of the table: ours, and its control."""

    claim: str
    ours: str
    control: str
    rule: str
    why: str = ""


_KEYS_KNOW = (
    "The keys' own axes know the prompts: singular vectors are no special coordinates of this "
    "feature."
)


_ASKED = [
    _Asked(
        "Singular vectors that carry 90% of the lexical feature (control: rotated vectors)",
        ours="vectors",
        control="vectors_rotated",
        rule="ours < 0.5 * control",
    ),
    _Asked(
        "... fewer than principal axes of the keys, which know the prompts and no weights",
        ours="vectors",
        control="vectors_key_pca",
        rule="ours < control",
        why=_KEYS_KNOW,
    ),
    _Asked(
        "Share of its key subspace in the span of as many singular vectors as its rank (control: "
        "random axes, chosen alike)",
        ours="key",
        control="key_random",
        rule="ours > 1.5 * control",
    ),
    _Asked(
        "... more than in that of as many principal axes of the keys, chosen alike",
        ours="key",
        control="key_key_pca",
        rule="ours > control",
        why=_KEYS_KNOW,
    ),
    _Asked(
        "Share of its query subspace (control: random axes, chosen alike)",
        ours="query",
        control="query_random",
        rule="ours > 1.5 * control",
    ),
    _Asked(
        (
            "Shift of attention when these vectors are swapped (control: rotated vectors, "
            "chosen alike)"
        ),
        ours="shift_singular",
        control="shift_rotated",
        rule="ours > 1.5 * control",
    ),
    _Asked(
        "... more than by as many principal components of the keys",
        ours="shift_singular",
        control="shift_key_pca",
        rule="ours > control",
        why=_KEYS_KNOW,
    ),
    _Asked(
        "... and nine tenths of what the contrast's own directions do",
        ours="shift_singular",
        control="shift_contrast",
        rule="ours > 0.9 * control",
        why="They span most of the feature, not the whole of it.",
    ),
]


def _answer(table: Sequence[Row]) -> str:
    """The answer at the head and contrast whose own swap moves most, whatever it is."""
    row = max(table, key=lambda row: row["shift_contrast"])
    return (
        f"{row['contrast']} at {row['head']} (rank {row['rank']}): {row['vectors']:.0f} "
        "singular vectors carry 90% of it where rotated ones need "
        f"{row['vectors_rotated']:.0f} and principal axes of the keys "
        f"{row['vectors_key_pca']:.0f}; the best {row['rank']} span {row['key']:.0%} of its "
        f"keys (key PCA {row['key_key_pca']:.0%}, random axes {row['key_random']:.0%}), and "
        f"swapping {row['k']} of them shifts attention by {row['shift_singular']:.2f} where "
        f"the contrast's own {row['k']} directions shift {row['shift_contrast']:.2f}, "
        f"rotated vectors {row['shift_rotated']:.2f}, key PCA {row['shift_key_pca']:.2f} and "
        f"random {row['shift_random']:.2f}."
    )


def _claims(rows: list[Row], group_size: int) -> list[Claim]:
    """Of the lexical feature, means over key heads with their intervals; no paper asks this.

    Heads are paired: the interval is of the difference, moved to where ours stands.
    """
    claims = []
    for asked in _ASKED:
        ours = {row["head"]: row[asked.ours] for row in rows}
        gaps = {row["head"]: row[asked.ours] - row[asked.control] for row in rows}
        mean = over_key_heads(ours, group_size).mean
        gap = over_key_heads(gaps, group_size)
        other = mean - gap.mean
        claim = Claim(
            asked.claim,
            paper="",
            ours=mean,
            control=other,
            rule=asked.rule,
            low=other + gap.low,
            high=other + gap.high,
            why=asked.why,
        )
        claims.append(claim)
    return claims
