"""Figures 3 and 13: how alignment comes about over training, and how its speed depends on p.

Figure 3 compares vectors across training: ``|cos(u_k(s), u_k(s'))|``, the same for features, and one with the other.
As numbers: the step at which the head has learned half of a pair's target logit, ``f_qᵀ Ω f_k ≥ M/2``, and the one from
which the pair stays aligned (both |cos| ≥ 0.95 to the end), each against the order of the target logits. An untrained
head gives the value at step 0, a random direction the best that chance finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.page.figures import INK, new_figure
from qkscope.papers.franco2026.cells import DEFAULT_RUN, OVER_P, WORK, Cells, toy_figure, train
from qkscope.papers.franco2026.toy.alignment import cosines
from qkscope.papers.franco2026.toy.measure import alignment_rows
from qkscope.papers.franco2026.toy.superposition import Pair, by_logit
from qkscope.papers.franco2026.toy.trained import TrainedToy
from qkscope.papers.registry import Settings
from qkscope.papers.tables import Files, Row, column, files_of, mean, pick
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result

STAYS = 0.95
_SHOWN = 60  # checkpoints of figure 3


@toy_figure("fig3", "Alignment across training, pair by pair", DEFAULT_RUN)
def run(settings: Settings, cells: Cells) -> Result:
    """The four pairs of one configuration, and its first seed's vectors across training."""
    toys = train(cells, settings)
    rows, onsets = _along(toys, _SHOWN)
    first = next(iter(toys.values()))[0]
    tables = {"alignment": rows, "onsets": onsets}
    return settings.result(
        _answer(onsets), tables, _order_claims(onsets), across_training(first), about=_about(settings)
    )


@toy_figure("fig13", "Alignment over training, by p", OVER_P)
def run_by_p(settings: Settings, cells: Cells) -> Result:
    """Alignment along training for each p and seed."""
    rows, onsets = _along(train(cells, settings), WORK[settings.preset].points)
    tables = {"alignment": rows, "onsets": onsets}
    return settings.result(_answer_by_p(onsets), tables, _speed_claims(rows, onsets), about=_about(settings))


def _about(settings: Settings) -> Row:
    return {"work": vars(WORK[settings.preset]), "stays": STAYS}


def _along(toys: Mapping[str, Sequence[TrainedToy]], points: int) -> tuple[list[Row], list[Row]]:
    """Alignment at some of the checkpoints, and when each pair aligned."""
    rows: list[Row] = []
    onsets: list[Row] = []
    for config, found in toys.items():
        for trained in found:
            for check in checkpoints(len(trained.steps), points):
                step, toy = trained.steps[check], trained.at(check)
                rows += alignment_rows(config, trained.cell.seed, step, toy, control=check == 0)
            onsets += onset_rows(config, trained)
    return rows, onsets


def checkpoints(count: int, points: int) -> list[int]:
    """Some of the checkpoints, closer together early on; the first and the last among them."""
    if count <= points:
        return list(range(count))
    spread = torch.linspace(0, 1, points) ** 2 * (count - 1)
    return sorted({round(x) for x in spread.tolist()})


def onset_rows(config: str, trained: TrainedToy) -> list[Row]:
    """For every pair the step from which it stays aligned (NaN if never)."""
    pairs = by_logit(trained.cell.task.pairs)
    table = []
    both = torch.stack([_matched(trained, check) for check in range(len(trained.steps))])  # checks pairs
    for i, pair in enumerate(pairs):
        below = (both[:, i] < STAYS).nonzero()
        after = int(below[-1]) + 1 if len(below) else 0
        step = float(trained.steps[after]) if after < len(trained.steps) else math.nan
        table.append({"config": config, "seed": trained.cell.seed, "pair": f"{pair[0]}-{pair[1]}",
                      "target_logit": pair[2], "learned": _learned(trained, pair), "onset": step,
                      "final": float(both[-1, i])})  # fmt: skip
    return table


def _learned(trained: TrainedToy, pair: Pair) -> float:
    """The first step at which the pair adds half of its target to a logit."""
    W, scale = trained.weights["W"].double(), trained.cell.task.scale
    query, key = (
        trained.weights[name].double() @ W[:, :, feature, None]
        for name, feature in (("W_Q", pair[0]), ("W_K", pair[1]))
    )
    reached = (scale * (query * key).sum((1, 2)) >= pair[2] / 2).nonzero()
    return float(trained.steps[int(reached[0])]) if len(reached) else math.nan


def _matched(trained: TrainedToy, check: int) -> Float[Tensor, " pairs"]:
    """The lower matched cosine of both sides."""
    toy = trained.at(check)
    basis, pairs = toy.basis(), by_logit(toy.task.pairs)
    sides = [
        cosines(toy.W.double()[:, [pair[side] for pair in pairs]], vectors).diagonal()
        for side, vectors in ((0, basis.u), (1, basis.v))
    ]
    return torch.minimum(*sides)


def across_training(trained: TrainedToy) -> dict[str, Tensor]:
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
    """Share of pairs of pairs in which the one with the larger logit comes first, of those that checkpoints tell apart.

    Two that come between the same checkpoints are no evidence either way. 0.5 by chance; NaN where all are ties.
    """
    agreed = []
    for row in onsets:
        for other in onsets:
            if (other["config"], other["seed"]) == (row["config"], row["seed"]) and (
                row["target_logit"] > other["target_logit"]
            ):
                first, second = (r[name] if math.isfinite(r[name]) else math.inf for r in (row, other))
                agreed += [] if first == second else [float(first < second)]
    return mean(agreed) if agreed else math.nan


def _order_claims(onsets: list[Row]) -> list[Claim]:
    return [
        Claim("pairs are learned in the order of their target logits (half of the target reached; share of "
              "comparisons that checkpoints tell apart; control: chance)", "in order",
              order_agreement(onsets, "learned"), 0.5, "ours >= 0.75"),
        Claim("... and settle on their singular vectors in that order (share of comparisons; control: chance)",
              "in order", order_agreement(onsets, "onset"), 0.5, "ours >= 0.75"),
        Claim(f"all pairs align by the end (share with both |cos| ≥ {STAYS}; control: at the start)", "yes",
              mean(float(r["final"] >= STAYS) for r in onsets), 0.0, "ours >= 1"),
    ]  # fmt: skip


def _speed_claims(rows: list[Row], onsets: list[Row]) -> list[Claim]:
    configs = list(dict.fromkeys(row["config"] for row in onsets))
    speed = [mean(_late(r) for r in pick(onsets, config=config)) for config in configs]
    ordered = [float(a < b) for i, a in enumerate(speed) for b in speed[i + 1 :]]
    last = max(row["step"] for row in rows)
    early = min(row["step"] for row in rows if row["step"] >= last / 5)
    ends = [mean(r["matched"] for r in pick(rows, config=config, step=early)) for config in (configs[0], configs[-1])]
    return [
        Claim("alignment comes earlier the more often features are present (share of pairs of p in that order; "
              "control: chance)", "more readily", mean(ordered), 0.5, "ours > 0.75"),
        Claim(f"... after a fifth of the training: mean matched |cos| at p = 1 (control: at p = {configs[-1][2:]})",
              "more readily", ends[0], ends[1], "ours > control"),
    ]  # fmt: skip


def _late(row: Row) -> float:
    """The onset; one that never came counts as later than any."""
    return row["onset"] if math.isfinite(row["onset"]) else 1e9


def _answer(onsets: list[Row]) -> str:
    said = {}
    for name in ("learned", "onset"):
        steps = {r["pair"]: mean(x[name] for x in pick(onsets, pair=r["pair"])) for r in onsets}
        said[name] = ", ".join(
            f"{pair} at {step:,.0f}" if math.isfinite(step) else f"{pair} never" for pair, step in steps.items()
        )
    return f"Half of the target is learned: {said['learned']}. Both |cos| stay ≥ {STAYS} from: {said['onset']}."


def _answer_by_p(onsets: list[Row]) -> str:
    reached = {
        config: mean(float(math.isfinite(r["onset"])) for r in pick(onsets, config=config))
        for config in dict.fromkeys(r["config"] for r in onsets)
    }
    return "Share of pairs that align: " + ", ".join(f"{config} {share:.2f}" for config, share in reached.items()) + "."


# ---------------------------------------------------------------------- the drawing

_LINES = (("vector", "u_k(s) and u_k(s')"), ("feature", "f(s) and f(s')"), ("both", "f(s) and u_k(s')"))


@run.drawing
def draw(result: Result) -> Files:
    """Three rows of heat maps, a column per pair; below, matched |cos| over the steps.

    Steps stand on a square-root scale, as pairs are learned in the first few per cent of training.
    """
    pairs = list(dict.fromkeys((row["pair"], row["target_logit"]) for row in result.tables["onsets"]))
    steps = result.arrays["steps"].tolist()
    figure = new_figure(2.7 * len(pairs) + 0.8, 10.4)
    parts: Any = figure.subfigures(2, 1, height_ratios=[3, 1])
    axes = parts[0].subplots(3, len(pairs), squeeze=False, sharex=True, sharey=True)
    image, edges = None, _edges(steps)
    for line, (kind, label) in zip(axes, _LINES, strict=True):
        for k, axis in enumerate(line):
            image = axis.pcolormesh(
                edges, edges, result.arrays[f"{kind}/{k}"].numpy(), cmap="magma_r", vmin=0, vmax=1, rasterized=True
            )
            if kind == "vector":
                axis.set_title(f"k = {k + 1}: pair {pairs[k][0]}, logit {pairs[k][1]:g}", fontsize=9)
            _spread(axis, steps[-1], "xy")
            axis.tick_params(labelsize=7)
        line[0].set_ylabel(f"|cos| of {label}\nstep s")
    for axis in axes[-1]:
        axis.set_xlabel("step s'")
        axis.tick_params(axis="x", rotation=45)
    parts[0].colorbar(image, ax=axes, shrink=0.5, pad=0.01).set_label("|cos|")
    axes[0, 0].invert_yaxis()  # shared by all
    _curves(parts[1].subplots(), result, pairs)
    return files_of(result, figure)


def _edges(steps: list[int]) -> np.ndarray:
    """Where one checkpoint's cell ends and the next begins: half way on the scale that is shown."""
    roots = np.sqrt(np.array(steps, dtype=float))
    return np.concatenate([[roots[0]], (roots[1:] + roots[:-1]) / 2, [roots[-1]]]) ** 2


def _spread(axis: Any, last: int, which: str) -> None:
    ticks = [round(last * share) for share in (0, 0.0125, 0.05, 0.125, 0.25, 0.5, 1)]
    for name in which:
        getattr(axis, f"set_{name}scale")("function", functions=(lambda x: np.sqrt(np.abs(x)), np.square))
        getattr(axis, f"set_{name}lim")(0, last)
        getattr(axis, f"set_{name}ticks")(ticks, [f"{tick:,}" for tick in ticks])


def _curves(axis: Any, result: Result, pairs: list[tuple[str, float]]) -> None:
    colours = matplotlib.colormaps["viridis"]
    rows = [r for r in result.tables["alignment"] if r["side"] == "query"]
    for i, (pair, logit) in enumerate(pairs):
        colour = colours(i / max(len(pairs) - 1, 1) * 0.85)
        for n, seed in enumerate(dict.fromkeys(r["seed"] for r in rows)):
            own = [r for r in rows if r["pair"] == pair and r["seed"] == seed]
            label, width = (f"pair {pair}, logit {logit:g}", 1.2) if n == 0 else (None, 0.5)
            axis.plot(column(own, "step"), column(own, "matched"), "-", color=colour, lw=width, label=label)
    axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random")
    _spread(axis, max(r["step"] for r in rows), "x")
    axis.set(xlabel="step (thin: other seeds)", ylabel="matched |cos|, query side", ylim=(0, 1.05))
    axis.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)


@run_by_p.drawing
def draw_by_p(result: Result) -> Files:
    """A line for the mean at each p, a thin one for the least."""
    rows = list(result.tables["alignment"])
    figure = new_figure(7.6, 4.0)
    colours = matplotlib.colormaps["viridis"]
    configs = list(dict.fromkeys(row["config"] for row in rows))
    axis = figure.subplots()
    for i, config in enumerate(configs):
        own = [r for r in rows if r["config"] == config]
        steps = sorted({r["step"] for r in own})
        means = [mean(r["matched"] for r in own if r["step"] == step) for step in steps]
        lows = [min(r["matched"] for r in own if r["step"] == step) for step in steps]
        colour = colours(i / max(len(configs) - 1, 1) * 0.92)
        axis.plot(steps, means, "-o", color=colour, ms=3, lw=1.4, label=config)
        axis.plot(steps, lows, "-", color=colour, lw=0.6, alpha=0.5)
    axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random")
    axis.set(xlabel="step", ylabel="matched |cos|: mean (thick), least (thin)", ylim=(-0.03, 1.05))
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return files_of(result, figure)
