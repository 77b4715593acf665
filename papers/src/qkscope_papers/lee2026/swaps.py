"""Figures 4, 14 and 15: exchange two keys in a recovered subspace, beside every control.

The **oracle** exchanges the true latent, ``k̃_a = k_a + W_K A_k (z_{k,b} − z_{k,a})``: what a
subspace swap tries to be. Where subspaces overlap, the orthogonal projector of one latent takes
part of the other along; the oblique one does not. Random subspaces, the keys' principal components
and ``Cov_q Cov_k`` of the same size say what size alone does. How much of a *logit gap* is
exchanged is comparable between a trained head and an untrained one, whose attention is flat::

    exchanged = Σ (g − g̃) g / 2 Σ g²,        g = ℓ_orig − ℓ_target        (1: the keys have changed
    places; 0: nothing)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope.sums import swap_methods as methods
from qkscope.sums.bases import Projector, principal_cosines, random_bases
from qkscope.sums.moments import Covariance
from qkscope.sums.subspace import Subspace
from qkscope.sums.swap_algebra import Condition, SwapEffect, draw_targets, swap_attention
from qkscope_papers.figures import INK, ORIGINAL, legend_below, new_figure, paired_bars
from qkscope_papers.fleet import side_by_side
from qkscope_papers.lee2026.cells import (
    WAS_IMPLIED,
    WORK,
    Cells,
    example_head,
    some_cells,
    toy_figure,
    train,
)
from qkscope_papers.lee2026.toy.retrieval import Contexts, RetrievalHead
from qkscope_papers.lee2026.toy.trained import HeadRun
from qkscope_papers.registry import Settings
from qkscope_papers.tables import Estimate, Files, Row, files_of, over_runs, pick

Swap = Callable[[AttentionRows, Contexts, Int[Tensor, " n"]], SwapEffect]
_DRAWS = 20
_WIDE = ((4, 4), (4, 8), (6, 6), (6, 8), (8, 8))
_NARROW = ((2, 2), (2, 4), (3, 3), (3, 4), (4, 4))
_ROWS_AT_ONCE = 6400


@toy_figure("fig4", "Swapping latents, discrete (3,5)", example_head("discrete"))
@toy_figure("fig14", "Swapping latents, d_head 16", some_cells(16, _WIDE, smoke=((4, 4), (4, 10))))
@toy_figure("fig15", "Swapping latents, d_head 8", some_cells(8, _NARROW, smoke=((2, 2), (2, 5))))
def run(settings: Settings, cells: Cells) -> Result:
    """Swaps at every head of the figure."""
    work = WORK[settings.preset]
    n = work.swaps // work.seeds

    def swapped(head: HeadRun) -> tuple[list[Row], Row]:
        return swap_rows(head, work.contrast_pairs, n, settings.seed)

    rows: list[Row] = []
    overlaps: list[Row] = []
    for found, overlap in side_by_side(swapped, train(cells, settings)):
        rows += found
        overlaps.append(overlap)
    about = {
        "lr": work.lr,
        "swaps": work.swaps,
        "contrast_pairs": work.contrast_pairs,
        "random_draws": _DRAWS,
    }
    tables = {"swap": rows, "subspaces": overlaps}
    return settings.result(_answer(rows), tables, _claims(rows), about=about)


def _answer(rows: list[Row]) -> str:
    """What a swap of both does at the first head where it could do less."""
    fair = pick(rows, vacuous=False)
    both = pick(fair, condition="both")[0]
    random = pick(fair, condition="random_both")[0]
    return (
        "Swapping both latents moves attention on the right key from "
        f"{both['orig_before']:.3f} to {both['orig_after']:.3f} (target "
        f"{both['target_before']:.3f} to {both['target_after']:.3f}) at "
        f"({both['r1']},{both['r2']}), d_head {both['d_head']}; random subspaces of the same "
        f"size leave {random['orig_after']:.3f}."
    )


def swap_rows(trained: HeadRun, pairs: int, n: int, seed: int) -> tuple[list[Row], Row]:
    """Every condition on the same contexts and the same targets: rows of the table, and how the
    subspaces lie.
    """
    task = trained.cell.task
    head = trained.head
    variables = list(range(len(task.ranks)))
    projectors, overlap = projectors_of(head, pairs, seed)
    swaps: dict[Condition, Swap] = {}
    for condition, projector in projectors.items():
        swaps[condition] = _subspace_swap(projector)
    for k in variables:
        swaps[Condition(f"z{k + 1}", "oracle")] = _oracle_swap(head, [k])
    swaps[Condition("both", "oracle")] = _oracle_swap(head, variables)
    untrained = trained.cell.untrained()
    joint = projectors_of(untrained, pairs, seed)[0][Condition("both")]
    before: dict[Condition, Swap] = {Condition("both", "untrained"): _subspace_swap(joint)}
    where = {"variant": task.variant, "d_head": head.d_head, "seed": trained.cell.seed}
    where |= {f"r{k + 1}": rank for k, rank in enumerate(task.ranks)}
    rows = measure(head, swaps, n, seed) + measure(untrained, before, n, seed)
    return [{**where, **row} for row in rows], {**where, **overlap}


def projectors_of(
    head: RetrievalHead, pairs: int, seed: int
) -> tuple[dict[Condition, Projector], Row]:
    """Recovered subspaces and the baselines of the same size, fitted on contrast pairs and contexts
    of their own.
    """
    d = head.d_head
    bases: dict[str, Tensor] = {}
    for k, rank in enumerate(head.encoders.task.ranks):
        delta = head.sampled_delta(k, pairs, derived_seed(seed, 12))
        subspace = Subspace.from_delta(delta, min(rank, d))
        bases[f"z{k + 1}"] = subspace.basis("key")[None]

    def random(sizes: int | Sequence[int]) -> Projector:  # a toy has one head, and no layers
        size = sizes if isinstance(sizes, int) else sizes[0]
        drawn = random_bases(d, size, _DRAWS, derived_seed(seed, 13, size))
        return Projector.orthogonal(drawn[:, None])

    covariances = dict.fromkeys([*bases, "both"], _covariances(head, seed))
    found, (number,) = methods.conditions(bases, covariances, random)
    if number is None:
        found = {condition: p for condition, p in found.items() if condition.kind != "oblique"}
    overlap = {
        "joint_rank": int(found[Condition("both")].rank),
        "top_cosine": float(principal_cosines(bases["z1"][0], bases["z2"][0])[0]),
        "oblique_condition": number or math.nan,
    }
    return found, overlap


def _covariances(head: RetrievalHead, seed: int) -> tuple[Tensor, Tensor]:
    """Of the head's queries and of its keys, on contexts of their own."""
    x_q, x_k, *_ = head.encoders.contexts(4096, derived_seed(seed, 14))
    of_queries = Covariance(1, head.d_head)
    of_keys = Covariance(1, head.d_head)
    of_queries.update(head.queries(x_q)[:, None])
    of_keys.update(head.keys(x_k).flatten(0, 1)[:, None])
    return of_queries.matrix(), of_keys.matrix()


def _subspace_swap(projector: Projector) -> Swap:
    return lambda rows, contexts, target: swap_attention(rows, contexts.asked, target, projector)


def _oracle_swap(head: RetrievalHead, variables: list[int]) -> Swap:
    """Exchange the true latents in the two keys; noise and payload stay."""
    slices = head.encoders.task.latent_slices()
    columns = torch.cat([torch.arange(slices[k].start, slices[k].stop) for k in variables])
    write = head.encoders.A[:, columns].mT @ head.W_K.mT  # how these latents enter a key

    def swap(rows: AttentionRows, contexts: Contexts, target: Tensor) -> SwapEffect:
        n = torch.arange(len(target))
        asked = contexts.asked
        z = contexts.latents[..., columns]
        moved = (z[n, target] - z[n, asked]) @ write
        shift = head.scale * (rows.q[:, 0] * moved).sum(dim=-1)
        before = rows.products()
        after = before.clone()
        after[n, 0, asked] += shift
        after[n, 0, target] -= shift
        a = rows.attention(before)
        b = rows.attention(after)
        flipped = ((a.argmax(-1) == asked[:, None]) & (b.argmax(-1) == target[:, None]))[None]
        sides = (a[n, :, asked], a[n, :, target], b[n, :, asked][None], b[n, :, target][None])
        gap = before[n, :, asked] - before[n, :, target]
        # all tokens are named: flipped among these is flipped among all
        rank = torch.tensor([len(columns)])
        return SwapEffect(*sides, flipped, flipped, rank, head.d_head, gap, -shift[None, :, None])

    return swap


def measure(head: RetrievalHead, swaps: dict[Condition, Swap], n: int, seed: int) -> list[Row]:
    """Attention before and after, for every condition on the same pairs of keys."""
    parts: dict[Condition, list[SwapEffect]] = {condition: [] for condition in swaps}
    for part, start in enumerate(range(0, n, _ROWS_AT_ONCE)):
        count = min(_ROWS_AT_ONCE, n - start)
        contexts = head.encoders.contexts(count, derived_seed(seed, 15, part))
        q = head.queries(contexts.x_q)[:, None]
        k = head.keys(contexts.x_k)[:, None]
        rows = AttentionRows(q, k, scale=head.scale)
        allowed = torch.ones_like(contexts.payload, dtype=torch.bool)
        target_seed = derived_seed(seed, 16, part)
        target = draw_targets(contexts.asked, allowed, target_seed, torch.arange(len(allowed)))
        for condition, swap in swaps.items():
            parts[condition].append(swap(rows, contexts, target))
    return [_row(condition, effects) for condition, effects in parts.items()]


def _row(condition: Condition, effects: list[SwapEffect]) -> Row:
    """Means, and 95% intervals from independent contexts (a context's value is its mean over
    draws).
    """
    joined: dict[str, Tensor] = {}
    for field in ("orig_before", "target_before", "orig_after", "target_after"):
        joined[field] = torch.cat([getattr(e, field)[..., 0] for e in effects], dim=-1)
    flipped = torch.cat([e.flipped[..., 0] for e in effects], dim=-1).double()
    shift = torch.cat([e.shift[:, 0] for e in effects])
    low, high = _interval(joined["target_after"].mean(dim=0))
    shift_low, shift_high = _interval(shift)
    effect = effects[0]
    means = {field: float(value.double().mean()) for field, value in joined.items()}
    return {
        "condition": condition.name,
        "feature": condition.feature,
        "kind": condition.kind,
        "rank": int(effect.rank[0]),
        **means,
        "low": low,
        "high": high,
        "shift": float(shift.double().mean()),
        "shift_low": shift_low,
        "shift_high": shift_high,
        "exchanged": _exchanged(joined),
        "flip": float(flipped.mean()),
        "n": len(shift),
        "draws": effect.orig_after.shape[0],
        "vacuous": bool(effect.vacuous[0]),
    }


def _exchanged(attention: dict[str, Tensor]) -> float:
    """Share of the logit gap between both keys that the swap exchanges: 1 where it is turned
    around.
    """
    gap = attention["orig_before"].log() - attention["target_before"].log()
    after = attention["orig_after"].log() - attention["target_after"].log()
    moved = ((gap - after) * gap).double().mean()
    return float(moved / (2 * gap.double().square().mean()))


Conditions = dict[str, Row]


"""One head's rows, by condition."""


Cell = list[Conditions]


"""Heads that differ in their seed alone."""


Score = Callable[[Conditions], float]


def _cells(rows: list[Row]) -> list[Cell]:
    """The heads whose joint swap is no swap of everything, by cell."""
    heads: dict[tuple[Any, ...], Conditions] = {}
    for row in rows:
        key = (row["variant"], row["d_head"], row["r1"], row["r2"], row["seed"])
        heads.setdefault(key, {})[row["condition"]] = row
    cells: dict[tuple[Any, ...], Cell] = {}
    for (*cell, _), head in heads.items():
        if not head["both"]["vacuous"]:
            cells.setdefault(tuple(cell), []).append(head)
    return list(cells.values())


def _over(cell: Cell, score: Score) -> Estimate:
    """A number's mean over a cell's heads."""
    return over_runs(map(score, cell))


def _most(cells: list[Cell], score: Score) -> Cell:
    """The cell with the largest mean."""
    return max(cells, key=lambda cell: _over(cell, score).mean)


def _value(condition: str, name: str) -> Score:
    return lambda head: float(head[condition][name])


def _ahead(one: str, other: str) -> Score:
    """How much further one condition shifts attention than another."""
    return lambda head: float(head[one]["shift"] - head[other]["shift"])


def _size(cell: Cell) -> float:
    """The dimensions swapped, as a share of the head's."""
    both = cell[0]["both"]
    return both["rank"] / both["d_head"]


def _interval(values: Float[Tensor, " n"]) -> tuple[float, float]:
    mean = float(values.double().mean())
    half = 1.96 * float(values.double().std()) / math.sqrt(len(values))
    return mean - half, mean + half


_CLOSEST = (
    "The rule asks it of the closest cell, at three quarters of d_head, where a random "
    "subspace of that size exchanges most of the logit gap."
)


def _claims(rows: list[Row]) -> list[Claim]:
    """Each of the cell where it holds least, its interval widened for that choice."""
    cells = _cells(rows)
    claims = [
        _all_moved_claim(cells),
        _random_claim(cells),
        _added_claim(cells),
        _key_pca_claim(cells),
        _single_swap_claim(cells),
        _learned_claim(cells),
    ]
    if len(cells) > 1:
        claims.append(_near_width_claim(cells))
    return claims


def _all_moved_claim(cells: list[Cell]) -> Claim:
    left = _value("both", "orig_after")
    worst = _most(cells, left)
    rest = _over(worst, left).among(len(cells))
    return Claim(
        "swapping both latents moves all the attention (largest rest on the original key; "
        "control: the oracle)",
        paper="§4, Fig. 4: moves all the attention",
        **rest.measured,
        control=_over(worst, _value("both_oracle", "orig_after")).mean,
        rule="ours <= max(0.01, control + 0.005)",
    )


def _random_claim(cells: list[Cell]) -> Claim:
    roomy = [cell for cell in cells if _size(cell) <= 0.75]
    close = _most(roomy, _ahead("random_both", "both"))
    less = _over(close, _ahead("both", "random_both")).among(len(roomy))
    return Claim(
        "random subspaces of the same size move less (difference of shifts, closest cell "
        "with r1 + r2 at most three quarters of d_head; control: random's shift)",
        paper="§4, Fig. 4, 14, 15: a much smaller shift",
        **less.measured,
        control=_over(close, _value("random_both", "shift")).mean,
        rule="ours > control",
        why=_CLOSEST,
        changed=(
            "was the closest cell of all: near d_head every subspace swaps everything, which "
            "F.1 excepts."
        ),
    )


def _added_claim(cells: list[Cell]) -> Claim:
    ahead = _ahead("both", "both_summed")
    summed = _over(_most(cells, ahead), ahead).among(len(cells))
    return Claim(
        "adding the projectors, as the authors' scripts do, moves less than one joint basis "
        "(difference of shifts, cell where they differ most)",
        paper="",
        **summed.measured,
        control=None,
        rule="ours > 0",
    )


def _key_pca_claim(cells: list[Cell]) -> Claim:
    close = _most(cells, _ahead("key_pca_both", "both"))
    pca = _over(close, _ahead("both", "key_pca_both")).among(len(cells))
    return Claim(
        "the contrast moves more than the keys' principal components of the same size "
        "(difference of shifts, closest cell)",
        paper="",
        **pca.measured,
        control=None,
        rule="ours > 0.01",
        changed="was ours > 0, which a difference of 5e-7 passed.",
    )


def _single_swap_claim(cells: list[Cell]) -> Claim:
    worst = _most(cells, lambda head: _leak(head, "z1"))
    moved = _over(worst, lambda head: _leak(head, "z1")).among(len(cells))
    return Claim(
        "swapping V of z1 alone does what swapping the true z1 does (difference in target "
        "attention, worst cell); control: the oblique projector",
        paper="implied by §4, Eqs. 8-10: replace the coordinates in these subspaces",
        **moved.measured,
        control=_over(worst, lambda head: _leak(head, "z1_oblique")).mean,
        rule="ours <= 0.01",
        why=(
            "The subspaces of z1 and z2 overlap, so the orthogonal projector of one takes part "
            "of the other along; the oblique one does not."
        ),
    )


def _learned_claim(cells: list[Cell]) -> Claim:
    untrained = _value("untrained_both", "exchanged")
    closest = _most(cells, untrained)
    works = _over(closest, _value("both", "exchanged")).among(len(cells))
    return Claim(
        "that a joint swap works shows that the head learned the latents (share of the "
        "logit gap exchanged); control: untrained",
        paper="",
        **works.measured,
        control=_over(closest, untrained).mean,
        rule="control < 0.5 * ours",
        why=(
            "A swap shows where the latents lie: in r1 + r2 directions of an untrained head's "
            "keys, too. Only the attention that it would move is not there yet."
        ),
        changed=WAS_IMPLIED,
    )


def _near_width_claim(cells: list[Cell]) -> Claim:
    by_size = sorted(cells, key=_size)
    shift = _value("random_both", "shift")
    near = _over(by_size[-1], shift)
    return Claim(
        "the random baseline grows as r1 + r2 nears d_head (shift; control: smallest r1 + r2)",
        paper="§F.1: the performance of the random baseline increases",
        **near.measured,
        control=_over(by_size[0], shift).mean,
        rule="ours > control",
    )


def _leak(cell: dict[str, Row], condition: str) -> float:
    """Distance of a swap of z1 from the oracle's, in attention on the target."""
    if condition not in cell:
        return math.nan
    return abs(cell[condition]["target_after"] - cell["z1_oracle"]["target_after"])


# ---------------------------------------------------------------------- the drawing

_FULL = (
    ("z1", "z1"),
    ("z1_oblique", "z1, oblique"),
    ("z1_oracle", "z1, oracle"),
    ("z2", "z2"),
    ("z2_oblique", "z2, oblique"),
    ("z2_oracle", "z2, oracle"),
    ("both", "z1 + z2"),
    ("both_summed", "summed, not joined"),
    ("both_oracle", "both, oracle"),
    ("random_z1", "random r1"),
    ("random_z2", "random r2"),
    ("random_both", "random r1 + r2"),
    ("key_pca_both", "key PCA r1 + r2"),
    ("cov_qk_both", "Cov_q Cov_k r1 + r2"),
    ("untrained_both", "untrained, z1 + z2"),
)
_SHORT = (
    ("z1", "z1"),
    ("z2", "z2"),
    ("both", "z1+z2"),
    ("both_oracle", "oracle"),
    ("random_both", "random"),
    ("key_pca_both", "key PCA"),
    ("cov_qk_both", "Cov·Cov"),
)


@run.drawing
def draw(result: Result) -> Files:
    """One wide panel for a single head, small multiples for several."""
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    first = result.tables["swap"][0]["seed"]  # the other heads of a cell are in the table
    for row in pick(result.tables["swap"], seed=first):
        cells.setdefault((row["variant"], row["d_head"], row["r1"], row["r2"]), {})[
            row["condition"]
        ] = dict(row)
    variants = list(dict.fromkeys(key[0] for key in cells))
    single = len(cells) == 1
    columns = 1 if single else max(sum(key[0] == v for key in cells) for v in variants)
    figure = (
        new_figure(10.5, 4.4)
        if single
        else new_figure(2.75 * columns + 0.6, 3.1 * len(variants) + 0.4)
    )
    axes = figure.subplots(len(variants), columns, squeeze=False, sharey=True)
    for line, variant in zip(axes, variants, strict=True):
        own = [(key, cell) for key, cell in cells.items() if key[0] == variant]
        for axis, (key, cell) in zip(line, own, strict=False):
            title = f"{key[0]}, ({key[2]}, {key[3]}), d_head {key[1]}"
            _bars(axis, cell, _FULL if single else _SHORT, title)
        for axis in line[len(own) :]:
            axis.set_axis_off()
        line[0].set_ylabel("attention")
    legend_below(figure, axes[0][0], 3)
    return files_of(result, figure)


def _bars(
    axis: Axes, cell: dict[str, Row], conditions: tuple[tuple[str, str], ...], title: str
) -> None:
    shown = [(label, cell[name]) for name, label in conditions if name in cell]
    start = cell["both"]
    labels = ["start", *(label for label, _ in shown)]
    orig = [start["orig_before"], *(row["orig_after"] for _, row in shown)]
    target = [start["target_before"], *(row["target_after"] for _, row in shown)]
    paired_bars(axis, orig, target, "original")
    places = range(len(labels))
    errors = [0.0, *((row["high"] - row["low"]) / 2 for _, row in shown)]
    axis.errorbar([x + 0.2 for x in places], target, errors, fmt="none", ecolor=INK, elinewidth=0.8)
    axis.set_xticks(
        list(places), labels, rotation=55, ha="right", rotation_mode="anchor", fontsize=8
    )
    axis.set_ylim(0, 1.05)
    axis.axhline(start["orig_before"], color=ORIGINAL, lw=0.7, ls=":")
    axis.set_title(
        title + ("\nvacuous: z1 + z2 fill the head" if start["vacuous"] else ""), fontsize=8.5
    )
