"""Figures 3 and 13: how alignment comes about over training, and how its speed depends on p.

Figure 3 compares vectors across training: ``|cos(u_k(s), u_k(s'))|``, the same for features, and
one with the other. As numbers: the step at which the head has learned half of a pair's target
logit, ``f_qᵀ Ω f_k ≥ M/2``, the one from which the pair stays aligned (both |cos| ≥ 0.95 to the
end), and the one from which u_k stays where it ends, each against the order of the target logits.
An untrained head gives the value at step 0, a random direction the best that chance finds. The
paper's loss is lost in our copy, and its two readings differ here: both are trained, as long as the
paper trains. Every claim is decided on reading C, that of all other figures; reading B stands
beside it as the control. The same is asked once more of toys that start and slow down as a
co-author's draft has them, as claims of ours: nothing says that the paper's figure was made so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope_papers.figures import INK, new_figure, shades
from qkscope_papers.franco2026.cells import (
    DRAFTED,
    OVER_P,
    WORK,
    Cells,
    toy_figure,
    train,
    watched,
)
from qkscope_papers.franco2026.toy.alignment import cosines
from qkscope_papers.franco2026.toy.measure import alignment_rows
from qkscope_papers.franco2026.toy.superposition import Pair, by_logit
from qkscope_papers.franco2026.toy.trained import ToyRun
from qkscope_papers.registry import Settings
from qkscope_papers.tables import (
    Estimate,
    Files,
    Row,
    column,
    distinct,
    files_of,
    mean,
    mean_of,
    over_seeds,
    pick,
    share_of,
)

STAYS = 0.95
READING = "reading C"
OTHER = "reading B"
_SHOWN = 60  # checkpoints of figure 3
_SEEDS = 5  # of which its table and its curves show them


@toy_figure("fig3", "Alignment across training, pair by pair", watched)
def run(settings: Settings, cells: Cells) -> Result:
    """The four pairs under both readings of the loss, and the vectors of the first seed of
    `READING`.
    """
    toys = train(cells, settings)
    rows: list[Row] = []
    onsets: list[Row] = []
    for config, found in toys.items():
        for trained in found[:_SEEDS]:
            rows += _along(config, trained, _SHOWN)
        for trained in found:
            onsets += onset_rows(config, trained)
    tables = {"alignment": rows, "onsets": onsets}
    claims = _order_claims(onsets) + _drafted_claims(onsets)
    arrays = across_training(toys[READING][0])
    return settings.result(_answer(onsets), tables, claims, arrays, about=_about(settings))


@toy_figure("fig13", "Alignment over training, by p", OVER_P)
def run_by_p(settings: Settings, cells: Cells) -> Result:
    """Alignment along training for each p and seed."""
    points = WORK[settings.preset].points
    rows: list[Row] = []
    onsets: list[Row] = []
    for config, found in train(cells, settings).items():
        for trained in found:
            rows += _along(config, trained, points)
            onsets += onset_rows(config, trained)
    tables = {"alignment": rows, "onsets": onsets}
    claims = _speed_claims(onsets)
    return settings.result(_answer_by_p(onsets), tables, claims, about=_about(settings))


def _about(settings: Settings) -> Row:
    return {"work": vars(WORK[settings.preset]), "stays": STAYS}


def _along(config: str, trained: ToyRun, points: int) -> list[Row]:
    """Alignment at some of a toy's checkpoints."""
    rows: list[Row] = []
    for check in checkpoints(len(trained.steps), points):
        step = trained.steps[check]
        toy = trained.at(check)
        rows += alignment_rows(config, trained.cell.seed, step, toy, control=check == 0)
    return rows


def checkpoints(count: int, points: int) -> list[int]:
    """Some of the checkpoints, closer together early on; the first and the last among them."""
    if count <= points:
        return list(range(count))
    spread = torch.linspace(0, 1, points) ** 2 * (count - 1)
    return sorted({round(x) for x in spread.tolist()})


def onset_rows(config: str, trained: ToyRun) -> list[Row]:
    """The steps from which each pair stays aligned and its u_k stays in place (NaN if never)."""
    pairs = by_logit(trained.cell.task.pairs)
    checks = range(len(trained.steps))
    both = torch.stack([_matched(trained, check) for check in checks])  # checks pairs
    vectors = torch.stack([trained.at(check).basis().u for check in checks])[:, :, : len(pairs)]
    placed = (vectors * vectors[-1]).sum(1).abs()
    queries = [query for query, _, _ in pairs]
    features = trained.weights["W"].double()[:, :, queries]
    features = features / features.norm(dim=1, keepdim=True)
    turned = (features * features[-1]).sum(1).abs()
    overlap = (features * features[:, :, :1]).sum(1).abs()  # with the first pair's
    rows = []
    for i, pair in enumerate(pairs):
        rows.append(
            {
                "config": config,
                "seed": trained.cell.seed,
                "pair": f"{pair[0]}-{pair[1]}",
                "target_logit": pair[2],
                "learned": _learned(trained, pair),
                "onset": _stays(both[:, i], trained.steps),
                "settled": _stays(placed[:, i], trained.steps),
                "final": float(both[-1, i]),
                "feature_settled": _stays(turned[:, i], trained.steps),
                "kept_feature": float(turned[0, i]),
                "kept_vector": float(placed[0, i]),
                "overlap_change": float(overlap[-1, i] - overlap[0, i]),
            }
        )
    return rows


def _stays(cosine: Float[Tensor, " checks"], steps: Sequence[int]) -> float:
    """The step from which a cosine stays up to the end; NaN if it is low there."""
    below = (cosine < STAYS).nonzero()
    after = int(below[-1]) + 1 if len(below) else 0
    return float(steps[after]) if after < len(steps) else math.nan


def _learned(trained: ToyRun, pair: Pair) -> float:
    """The first step at which the pair adds half of its target to a logit."""
    query_feature, key_feature, target = pair
    W = trained.weights["W"].double()
    query = trained.weights["W_Q"].double() @ W[:, :, query_feature, None]
    key = trained.weights["W_K"].double() @ W[:, :, key_feature, None]
    logits = trained.cell.task.scale * (query * key).sum((1, 2))
    reached = (logits >= target / 2).nonzero()
    return float(trained.steps[int(reached[0])]) if len(reached) else math.nan


def _matched(trained: ToyRun, check: int) -> Float[Tensor, " pairs"]:
    """The lower matched cosine of both sides."""
    toy = trained.at(check)
    basis = toy.basis()
    W = toy.W.double()
    pairs = by_logit(toy.task.pairs)
    query = cosines(W[:, [pair[0] for pair in pairs]], basis.u)
    key = cosines(W[:, [pair[1] for pair in pairs]], basis.v)
    return torch.minimum(query.diagonal(), key.diagonal())


def across_training(trained: ToyRun) -> dict[str, Tensor]:
    """The three comparisons of figure 3 for the query side of every pair: steps by steps."""
    picked = checkpoints(len(trained.steps), _SHOWN)
    toys = [trained.at(check) for check in picked]
    vectors = [toy.basis().u for toy in toys]
    arrays: dict[str, Tensor] = {"steps": torch.tensor([trained.steps[check] for check in picked])}
    for k, pair in enumerate(by_logit(trained.cell.task.pairs)):
        u = torch.stack([basis[:, k] for basis in vectors], dim=1)
        f = torch.stack([toy.W.double()[:, pair[0]] for toy in toys], dim=1)
        arrays[f"vector/{k}"] = cosines(u, u).float()
        arrays[f"feature/{k}"] = cosines(f, f).float()
        arrays[f"both/{k}"] = cosines(f, u).float()
    return arrays


def order_agreement(onsets: Sequence[Row], name: str) -> float:
    """Share of pairs of pairs in which the one with the larger logit comes first, of those that
    checkpoints tell apart.

    Two that come between the same checkpoints are no evidence either way. 0.5 by chance; NaN where
    all are ties.
    """
    agreed = []
    for row, other in product(onsets, onsets):
        same_toy = (other["config"], other["seed"]) == (row["config"], row["seed"])
        if not same_toy or row["target_logit"] <= other["target_logit"]:
            continue
        first = _or_never(row[name])
        second = _or_never(other[name])
        if first != second:
            agreed.append(float(first < second))
    return mean(agreed) if agreed else math.nan


def _or_never(step: float) -> float:
    """The step, after any other where it never came."""
    return step if math.isfinite(step) else math.inf


def _aligned(onsets: list[Row]) -> Estimate:
    """Share of pairs that end aligned, over seeds."""
    return over_seeds(onsets, lambda own: mean(float(r["final"] >= STAYS) for r in own))


def _drafted_claims(onsets: list[Row]) -> list[Claim]:
    """The claims of figure 3 on toys as a co-author's draft has them: claims of ours."""
    drafted = []
    for reading in (READING, OTHER):
        for row in pick(onsets, config=f"{reading}, {DRAFTED}"):
            drafted.append(row | {"config": reading})
    claims = []
    for claim in _order_claims(drafted):
        said = f"{DRAFTED}: {claim.claim}"
        claims.append(replace(claim, claim=said, paper="", changed=""))
    return claims


@dataclass(frozen=True)
class _Asked:
    """What figure 3 is asked of one reading of the loss, and of the other as its control."""

    claim: str
    paper: str
    score: Callable[[list[Row]], Estimate]
    rule: str
    changed: str = ""


def _order_claims(onsets: list[Row]) -> list[Claim]:
    """Each question on reading C, with reading B as the control."""
    own = pick(onsets, config=READING)
    other = pick(onsets, config=OTHER)
    first, second, *_ = distinct(own, "pair")
    claims = []
    for asked in [*_asked_of_all(), *_asked_of_first(first), *_asked_of_second(second)]:
        found = asked.score(own)
        claim = Claim(
            f"{asked.claim}; mean over seeds, {READING} of the loss; control: {OTHER})",
            paper=asked.paper,
            **found.measured,
            control=asked.score(other).mean,
            rule=asked.rule,
            reason="other setting",
            why="The loss is lost in our copy: a reading that is neither of ours may do otherwise.",
            changed=asked.changed,
        )
        claims.append(claim)
    return claims


def _ordered(name: str) -> Callable[[list[Row]], Estimate]:
    """How far pairs come in the order of their target logits, over seeds."""
    return lambda rows: over_seeds(rows, lambda own: order_agreement(own, name))


def _at_pair(pair: str, score: Callable[[Row], float]) -> Callable[[list[Row]], Estimate]:
    """A number of one pair, over seeds."""
    return lambda rows: over_seeds(pick(rows, pair=pair), lambda own: score(own[0]))


def _asked_of_all() -> list[_Asked]:
    settle = _Asked(
        "pairs settle on their singular vectors in the order of their target logits (share of "
        "comparisons that checkpoints tell apart, 0.5 by chance",
        paper="Sec. 4, Fig. 3: individually over time, in order of their impact on attention loss",
        score=_ordered("onset"),
        rule="ours > 0.5",
        changed=(
            "Was decided on the reading of the loss that fits it better, B (0.57 [0.42, 0.72], a "
            "tie); before that >= 0.75 after 40,000 steps."
        ),
    )
    end_aligned = _Asked(
        f"all pairs are aligned at the end (share with both |cos| ≥ {STAYS}",
        paper="Sec. 4, Fig. 3: at the end of 10,000 steps features have aligned",
        score=_aligned,
        rule="ours >= 1",
        changed="Was decided on the reading of the loss that fits it better, B (1, held).",
    )
    learned = _Asked(
        "pairs are learned in the order of their target logits (half of the target reached; "
        "share of comparisons",
        paper="",
        score=_ordered("learned"),
        rule="ours > 0.5",
    )
    return [settle, end_aligned, learned]


def _asked_of_first(pair: str) -> list[_Asked]:
    less = _Asked(
        "the first pair's feature changes less than its singular vector (|cos| of start and "
        "end: feature − vector",
        paper=(
            "Sec. 4, Fig. 3: feature changes little over training, while left singular vector moves"
        ),
        score=_at_pair(pair, lambda row: row["kept_feature"] - row["kept_vector"]),
        rule="ours > 0",
    )
    little = _Asked(
        f"... it changes little (|cos| of start and end ≥ {STAYS}",
        paper="Sec. 4, Fig. 3: feature changes little over training",
        score=_at_pair(pair, lambda row: row["kept_feature"]),
        rule=f"ours >= {STAYS}",
    )
    return [less, little]


def _asked_of_second(pair: str) -> list[_Asked]:
    def settles_later(rows: list[Row]) -> Estimate:
        own = pick(rows, pair=pair)
        return share_of(row["feature_settled"] >= row["settled"] for row in own)

    later = _Asked(
        "the second pair's feature shifts after its singular vector (share of seeds in which it "
        "settles no earlier",
        paper="Sec. 4, Fig. 3: after which the middle heatmap shows feature abruptly shifting",
        score=settles_later,
        rule="ours > 0.5",
        changed="Was of all later pairs (none of 60, reading C), whose interval had no width.",
    )
    apart = _Asked(
        "... and towards orthogonality with the first feature (change of |cos| from start to end",
        paper="Sec. 4, Fig. 3: shifts toward a position orthogonal",
        score=_at_pair(pair, lambda row: row["overlap_change"]),
        rule="ours < 0",
    )
    return [later, apart]


def _speed_claims(onsets: list[Row]) -> list[Claim]:
    found = over_seeds(onsets, _speed_agreement)
    earlier = Claim(
        "alignment comes earlier the more often features are present (share of pairs of p in "
        "that order, mean over seeds; control: chance)",
        paper="A.2, Fig. 13: more readily when features are present more often",
        **found.measured,
        control=0.5,
        rule="ours > control",
        changed=(
            "It was > 0.75 on the mean over seeds; a second claim said the same after a fifth of "
            "training."
        ),
    )
    return [earlier]


def _speed_agreement(onsets: list[Row]) -> float:
    """Share of pairs of configurations in which the first, where p is larger, aligns earlier."""
    steps = []
    for config in distinct(onsets, "config"):
        steps.append(mean(_late(row) for row in pick(onsets, config=config)))
    agreed = [float(a < b) for a, b in combinations(steps, 2) if a != b]
    return mean(agreed)


def _late(row: Row) -> float:
    """The onset; one that never came counts as later than any."""
    return row["onset"] if math.isfinite(row["onset"]) else 1e9


def _answer(onsets: list[Row]) -> str:
    said = []
    for config in (READING, OTHER):
        own = pick(onsets, config=config)
        steps = [mean_of(pick(own, pair=pair), "onset") for pair in distinct(own, "pair")]
        shown = " ".join(f"{step:,.0f}" for step in steps)
        order = over_seeds(own, lambda rows: order_agreement(rows, "onset")).mean
        said.append(
            f"{config} of the loss: {_aligned(own).mean:.0%} of pairs align, at steps {shown} on "
            f"average (largest logit first), in that order in {order:.0%}"
        )
    return "; ".join(said) + "."


def _answer_by_p(onsets: list[Row]) -> str:
    said = []
    for config in distinct(onsets, "config"):
        own = pick(onsets, config=config)
        share = mean(float(math.isfinite(row["onset"])) for row in own)
        said.append(f"{config} {share:.2f}")
    return f"Share of pairs that align: {', '.join(said)}."


# ---------------------------------------------------------------------- the drawing

_LINES = (
    ("vector", "u_k(s) and u_k(s')"),
    ("feature", "f(s) and f(s')"),
    ("both", "f(s) and u_k(s')"),
)


@run.drawing
def draw(result: Result) -> Files:
    """Three rows of heat maps, a column per pair; below, matched |cos| over the steps, for each
    reading of the loss.

    Steps stand on a square-root scale, as pairs are learned in the first few per cent of training.
    """
    pairs = distinct(result.tables["onsets"], "pair", "target_logit")
    steps = result.arrays["steps"].tolist()
    figure = new_figure(2.7 * len(pairs) + 0.8, 10.4)
    parts: Any = figure.subfigures(2, 1, height_ratios=[3, 1])
    axes = parts[0].subplots(3, len(pairs), squeeze=False, sharex=True, sharey=True)
    look: Any = {"cmap": "magma_r", "vmin": 0, "vmax": 1, "rasterized": True}
    edges = _edges(steps)
    image = None
    for line, (kind, label) in zip(axes, _LINES, strict=True):
        for k, axis in enumerate(line):
            matrix = result.arrays[f"{kind}/{k}"].numpy()
            image = axis.pcolormesh(edges, edges, matrix, **look)
            _spread(axis, steps[-1], "xy")
            axis.tick_params(labelsize=7)
        line[0].set_ylabel(f"|cos| of {label}\nstep s")
    for k, (axis, (pair, logit)) in enumerate(zip(axes[0], pairs, strict=True), start=1):
        axis.set_title(f"k = {k}: pair {pair}, logit {logit:g}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("step s'")
        axis.tick_params(axis="x", rotation=45)
    parts[0].colorbar(image, ax=axes, shrink=0.5, pad=0.01).set_label("|cos|")
    axes[0, 0].invert_yaxis()  # shared by all
    for axis, config in zip(parts[1].subplots(1, 2, sharey=True), (READING, OTHER), strict=True):
        _curves(axis, pick(result.tables["alignment"], config=config), pairs, config)
    return files_of(result, figure)


def _edges(steps: list[int]) -> np.ndarray:
    """Where one checkpoint's cell ends and the next begins: half way on the scale that is shown."""
    roots = np.sqrt(np.array(steps, dtype=float))
    between = (roots[1:] + roots[:-1]) / 2
    return np.concatenate([roots[:1], between, roots[-1:]]) ** 2


def _spread(axis: Any, last: int, which: str) -> None:
    """A square-root scale for the axes named, as in ``xy``, up to the last step."""
    shares = (0, 0.0125, 0.05, 0.125, 0.25, 0.5, 1)
    ticks = [round(last * share) for share in shares]
    labels = [f"{tick:,}" for tick in ticks]
    scale = (lambda x: np.sqrt(np.abs(x)), np.square)
    for name in which:
        getattr(axis, f"set_{name}scale")("function", functions=scale)
        getattr(axis, f"set_{name}lim")(0, last)
        getattr(axis, f"set_{name}ticks")(ticks, labels)


def _curves(axis: Any, table: list[Row], pairs: list[tuple[str, float]], config: str) -> None:
    """Matched |cos| of every pair and seed over the steps; the first seed's line is thick."""
    rows = pick(table, side="query")
    for (pair, logit), colour in zip(pairs, shades(len(pairs)), strict=True):
        look: Any = {"color": colour, "lw": 1.2, "label": f"pair {pair}, logit {logit:g}"}
        for seed in distinct(rows, "seed"):
            own = pick(rows, pair=pair, seed=seed)
            axis.plot(column(own, "step"), column(own, "matched"), "-", **look)
            look = {"color": colour, "lw": 0.5}
    axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random")
    _spread(axis, max(column(rows, "step")), "x")
    axis.set(xlabel="step (thin: other seeds)", ylabel="matched |cos|, query side", ylim=(0, 1.05))
    axis.set_title(f"{config} of the loss", fontsize=9)
    axis.tick_params(axis="x", rotation=45)
    axis.legend(frameon=False, fontsize=7, loc="lower right")


@run_by_p.drawing
def draw_by_p(result: Result) -> Files:
    """A line for the mean at each p, a thin one for the least."""
    rows = list(result.tables["alignment"])
    figure = new_figure(7.6, 4.0)
    configs = distinct(rows, "config")
    axis = figure.subplots()
    for config, colour in zip(configs, shades(len(configs), 0.92), strict=True):
        own = pick(rows, config=config)
        steps = sorted(set(column(own, "step")))
        at = [column(pick(own, step=step), "matched") for step in steps]
        means = [mean(values) for values in at]
        lows = [min(values) for values in at]
        axis.plot(steps, means, "-o", color=colour, ms=3, lw=1.4, label=config)
        axis.plot(steps, lows, "-", color=colour, lw=0.6, alpha=0.5)
    axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random")
    axis.set(xlabel="step", ylabel="matched |cos|: mean (thick), least (thin)", ylim=(-0.03, 1.05))
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return files_of(result, figure)
