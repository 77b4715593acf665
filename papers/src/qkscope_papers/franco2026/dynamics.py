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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    rows, _ = _along({config: found[:_SEEDS] for config, found in toys.items()}, _SHOWN)
    onsets = [
        row
        for config, found in toys.items()
        for trained in found
        for row in onset_rows(config, trained)
    ]
    tables = {"alignment": rows, "onsets": onsets}
    first = toys[READING][0]
    return settings.result(
        _answer(onsets),
        tables,
        _order_claims(onsets) + _drafted_claims(onsets),
        across_training(first),
        about=_about(settings),
    )


@toy_figure("fig13", "Alignment over training, by p", OVER_P)
def run_by_p(settings: Settings, cells: Cells) -> Result:
    """Alignment along training for each p and seed."""
    rows, onsets = _along(train(cells, settings), WORK[settings.preset].points)
    tables = {"alignment": rows, "onsets": onsets}
    return settings.result(
        _answer_by_p(onsets), tables, _speed_claims(onsets), about=_about(settings)
    )


def _about(settings: Settings) -> Row:
    return {"work": vars(WORK[settings.preset]), "stays": STAYS}


def _along(toys: Mapping[str, Sequence[ToyRun]], points: int) -> tuple[list[Row], list[Row]]:
    """Alignment at some of the checkpoints, and when each pair aligned."""
    rows: list[Row] = []
    onsets: list[Row] = []
    for config, found in toys.items():
        for trained in found:
            for check in checkpoints(len(trained.steps), points):
                step = trained.steps[check]
                toy = trained.at(check)
                rows += alignment_rows(config, trained.cell.seed, step, toy, control=check == 0)
            onsets += onset_rows(config, trained)
    return rows, onsets


def checkpoints(count: int, points: int) -> list[int]:
    """Some of the checkpoints, closer together early on; the first and the last among them."""
    if count <= points:
        return list(range(count))
    spread = torch.linspace(0, 1, points) ** 2 * (count - 1)
    return sorted({round(x) for x in spread.tolist()})


def onset_rows(config: str, trained: ToyRun) -> list[Row]:
    """For every pair the steps from which it stays aligned and its u_k stays in place (NaN if
    never).
    """
    pairs = by_logit(trained.cell.task.pairs)
    checks = range(len(trained.steps))
    both = torch.stack([_matched(trained, check) for check in checks])  # checks pairs
    vectors = torch.stack([trained.at(check).basis().u[:, : len(pairs)] for check in checks])
    placed = (vectors * vectors[-1]).sum(1).abs()
    features = trained.weights["W"].double()[:, :, [pair[0] for pair in pairs]]
    features = features / features.norm(dim=1, keepdim=True)
    turned = (features * features[-1]).sum(1).abs()
    overlap = (features * features[:, :, :1]).sum(1).abs()  # with the first pair's
    return [
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
        for i, pair in enumerate(pairs)
    ]


def _stays(cosine: Float[Tensor, " checks"], steps: Sequence[int]) -> float:
    """The step from which a cosine stays up to the end; NaN if it is low there."""
    below = (cosine < STAYS).nonzero()
    after = int(below[-1]) + 1 if len(below) else 0
    return float(steps[after]) if after < len(steps) else math.nan


def _learned(trained: ToyRun, pair: Pair) -> float:
    """The first step at which the pair adds half of its target to a logit."""
    W = trained.weights["W"].double()
    scale = trained.cell.task.scale
    query = trained.weights["W_Q"].double() @ W[:, :, pair[0], None]
    key = trained.weights["W_K"].double() @ W[:, :, pair[1], None]
    reached = (scale * (query * key).sum((1, 2)) >= pair[2] / 2).nonzero()
    return float(trained.steps[int(reached[0])]) if len(reached) else math.nan


def _matched(trained: ToyRun, check: int) -> Float[Tensor, " pairs"]:
    """The lower matched cosine of both sides."""
    toy = trained.at(check)
    basis = toy.basis()
    pairs = by_logit(toy.task.pairs)
    sides = [
        cosines(toy.W.double()[:, [pair[side] for pair in pairs]], vectors).diagonal()
        for side, vectors in ((0, basis.u), (1, basis.v))
    ]
    return torch.minimum(*sides)


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
    for row in onsets:
        for other in onsets:
            if (other["config"], other["seed"]) == (row["config"], row["seed"]) and (
                row["target_logit"] > other["target_logit"]
            ):
                first = row[name] if math.isfinite(row[name]) else math.inf
                second = other[name] if math.isfinite(other[name]) else math.inf
                agreed += [] if first == second else [float(first < second)]
    return mean(agreed) if agreed else math.nan


def _aligned(onsets: list[Row]) -> Estimate:
    """Share of pairs that end aligned, over seeds."""
    return over_seeds(onsets, lambda own: mean(float(r["final"] >= STAYS) for r in own))


def _drafted_claims(onsets: list[Row]) -> list[Claim]:
    """The claims of figure 3 on toys as a co-author's draft has them: claims of ours."""
    readings = {READING: f"{READING}, {DRAFTED}", OTHER: f"{OTHER}, {DRAFTED}"}
    drafted = []
    for ours, name in readings.items():
        drafted += [row | {"config": ours} for row in pick(onsets, config=name)]
    return [
        replace(claim, claim=f"{DRAFTED}: {claim.claim}", paper="", changed="")
        for claim in _order_claims(drafted)
    ]


def _order_claims(onsets: list[Row]) -> list[Claim]:
    asked: list[tuple[str, str, Callable[[list[Row]], Estimate], str, str]] = [
        (
            "pairs settle on their singular vectors in the order of their target logits (share "
            "of comparisons that checkpoints tell apart, 0.5 by chance",
            "Sec. 4, Fig. 3: individually over time, in order of their impact on attention loss",
            lambda rows: over_seeds(rows, lambda own: order_agreement(own, "onset")),
            "ours > 0.5",
            "Was decided on the reading of the loss that fits it better, B (0.57 [0.42, 0.72], "
            "a tie); before that >= 0.75 after 40,000 steps.",
        ),
        (
            f"all pairs are aligned at the end (share with both |cos| ≥ {STAYS}",
            "Sec. 4, Fig. 3: at the end of 10,000 steps features have aligned",
            _aligned,
            "ours >= 1",
            "Was decided on the reading of the loss that fits it better, B (1, held).",
        ),
        (
            "pairs are learned in the order of their target logits (half of the target reached; "
            "share of comparisons",
            "",
            lambda rows: over_seeds(rows, lambda own: order_agreement(own, "learned")),
            "ours > 0.5",
            "",
        ),
    ]
    own = pick(onsets, config=READING)
    other = pick(onsets, config=OTHER)
    first, second, *_ = distinct(own, "pair")
    asked += [
        (
            "the first pair's feature changes less than its singular vector (|cos| of start and "
            "end: feature − vector",
            "Sec. 4, Fig. 3: feature changes little over training, while left singular vector "
            "moves",
            lambda rows: over_seeds(
                pick(rows, pair=first), lambda r: r[0]["kept_feature"] - r[0]["kept_vector"]
            ),
            "ours > 0",
            "",
        ),
        (
            f"... it changes little (|cos| of start and end ≥ {STAYS}",
            "Sec. 4, Fig. 3: feature changes little over training",
            lambda rows: over_seeds(pick(rows, pair=first), lambda r: r[0]["kept_feature"]),
            f"ours >= {STAYS}",
            "",
        ),
        (
            "the second pair's feature shifts after its singular vector (share of seeds in "
            "which it settles no earlier",
            "Sec. 4, Fig. 3: after which the middle heatmap shows feature abruptly shifting",
            lambda rows: share_of(
                r["feature_settled"] >= r["settled"] for r in pick(rows, pair=second)
            ),
            "ours > 0.5",
            "Was of all later pairs (none of 60, reading C), whose interval had no width.",
        ),
        (
            "... and towards orthogonality with the first feature (change of |cos| from start "
            "to end",
            "Sec. 4, Fig. 3: shifts toward a position orthogonal",
            lambda rows: over_seeds(pick(rows, pair=second), lambda r: r[0]["overlap_change"]),
            "ours < 0",
            "",
        ),
    ]
    lost = "The loss is lost in our copy: a reading that is neither of ours may do otherwise."
    claims = []
    for what, paper, score, rule, changed in asked:
        found = score(own)
        claims.append(
            Claim(
                f"{what}; mean over seeds, {READING} of the loss; control: {OTHER})",
                paper=paper,
                **found.measured,
                control=score(other).mean,
                rule=rule,
                reason="other setting",
                why=lost,
                changed=changed,
            )
        )
    return claims


def _speed_claims(onsets: list[Row]) -> list[Claim]:
    configs = distinct(onsets, "config")

    def ordered(own: list[Row]) -> float:
        speed = [mean(_late(r) for r in pick(own, config=config)) for config in configs]
        return mean(float(a < b) for i, a in enumerate(speed) for b in speed[i + 1 :] if a != b)

    found = over_seeds(onsets, ordered)
    return [
        Claim(
            "alignment comes earlier the more often features are present (share of pairs of p "
            "in that order, mean over seeds; control: chance)",
            paper="A.2, Fig. 13: more readily when features are present more often",
            **found.measured,
            control=0.5,
            rule="ours > control",
            changed=(
                "It was > 0.75 on the mean over seeds; a second claim said the same after a fifth "
                "of training."
            ),
        ),
    ]


def _late(row: Row) -> float:
    """The onset; one that never came counts as later than any."""
    return row["onset"] if math.isfinite(row["onset"]) else 1e9


def _answer(onsets: list[Row]) -> str:
    said = []
    for config in (READING, OTHER):
        own = pick(onsets, config=config)
        steps = " ".join(
            f"{mean_of(pick(own, pair=pair), 'onset'):,.0f}" for pair in distinct(own, "pair")
        )
        order = over_seeds(own, lambda rows: order_agreement(rows, "onset")).mean
        aligned = f"{config} of the loss: {_aligned(own).mean:.0%} of pairs align"
        said.append(
            f"{aligned}, at steps {steps} on average (largest logit first), in that order in "
            f"{order:.0%}"
        )
    return "; ".join(said) + "."


def _answer_by_p(onsets: list[Row]) -> str:
    reached = {
        config: mean(float(math.isfinite(r["onset"])) for r in pick(onsets, config=config))
        for config in distinct(onsets, "config")
    }
    return (
        "Share of pairs that align: "
        + ", ".join(f"{config} {share:.2f}" for config, share in reached.items())
        + "."
    )


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
    image = None
    edges = _edges(steps)
    for line, (kind, label) in zip(axes, _LINES, strict=True):
        for k, axis in enumerate(line):
            image = axis.pcolormesh(
                edges,
                edges,
                result.arrays[f"{kind}/{k}"].numpy(),
                cmap="magma_r",
                vmin=0,
                vmax=1,
                rasterized=True,
            )
            if kind == "vector":
                axis.set_title(
                    f"k = {k + 1}: pair {pairs[k][0]}, logit {pairs[k][1]:g}", fontsize=9
                )
            _spread(axis, steps[-1], "xy")
            axis.tick_params(labelsize=7)
        line[0].set_ylabel(f"|cos| of {label}\nstep s")
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
    return np.concatenate([[roots[0]], (roots[1:] + roots[:-1]) / 2, [roots[-1]]]) ** 2


def _spread(axis: Any, last: int, which: str) -> None:
    ticks = [round(last * share) for share in (0, 0.0125, 0.05, 0.125, 0.25, 0.5, 1)]
    for name in which:
        getattr(axis, f"set_{name}scale")(
            "function", functions=(lambda x: np.sqrt(np.abs(x)), np.square)
        )
        getattr(axis, f"set_{name}lim")(0, last)
        getattr(axis, f"set_{name}ticks")(ticks, [f"{tick:,}" for tick in ticks])


def _curves(axis: Any, table: list[Row], pairs: list[tuple[str, float]], config: str) -> None:
    rows = pick(table, side="query")
    for (pair, logit), colour in zip(pairs, shades(len(pairs)), strict=True):
        for n, seed in enumerate(distinct(rows, "seed")):
            own = pick(rows, pair=pair, seed=seed)
            label, width = (f"pair {pair}, logit {logit:g}", 1.2) if n == 0 else (None, 0.5)
            axis.plot(
                column(own, "step"),
                column(own, "matched"),
                "-",
                color=colour,
                lw=width,
                label=label,
            )
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
        steps = sorted({r["step"] for r in own})
        means = [mean(r["matched"] for r in own if r["step"] == step) for step in steps]
        lows = [min(r["matched"] for r in own if r["step"] == step) for step in steps]
        axis.plot(steps, means, "-o", color=colour, ms=3, lw=1.4, label=config)
        axis.plot(steps, lows, "-", color=colour, lw=0.6, alpha=0.5)
    axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random")
    axis.set(xlabel="step", ylabel="matched |cos|: mean (thick), least (thin)", ylim=(-0.03, 1.05))
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return files_of(result, figure)
