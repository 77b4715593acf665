"""Figures 12 and 14-18: alignment against p, λ, n, d_head, context and seeds.

Each is one call of the trainer. One sweep has 20 to 35 models: too few to tell a share of 95% from
all. ``sweeps`` asks it of all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope_papers.figures import INK, REST, new_figure, shades
from qkscope_papers.franco2026.cells import (
    OVER_P,
    WORK,
    Cells,
    toy_figure,
    toys_of,
    toys_over,
    train,
)
from qkscope_papers.franco2026.toy.measure import before_and_after
from qkscope_papers.franco2026.toy.stack import ToyCell
from qkscope_papers.franco2026.toy.superposition import Superposition
from qkscope_papers.registry import Settings
from qkscope_papers.tables import (
    Estimate,
    Files,
    Row,
    column,
    distinct,
    files_of,
    mean_of,
    pick,
    share_of,
)

ALIGNED = 0.99
_WEIGHTS = tuple(4 * 10 ** (k / 3) for k in range(-3, 4))  # two orders of magnitude around 4
_CONTEXTS = (2, 4, 8, 16, 32, 64)
_LEAST_P = 0.05  # below it, the paper says, pairs are too rare to learn from
_READINGS = {"default": Superposition(), "reading B": Superposition(reading="B")}


_OVER = {
    "p": OVER_P,
    "λ": toys_over("weight", _WEIGHTS, 3, "λ"),
    "n": toys_over("n", (10, 15, 20, 25, 30), 2),
    "d_head": toys_over("d_head", (10, 8, 6, 4)),
    "context": toys_over("context", _CONTEXTS, 2),
    "seeds": toys_of(lambda _: _READINGS),
}


def _everything(settings: Settings) -> dict[str, list[ToyCell]]:
    """Every toy of the sweeps once, without the rare features of which the paper says that they do
    not align.

    One that several sweeps share goes by its name in the last of them.
    """
    names: dict[ToyCell, str] = {}
    for over in _OVER.values():
        for name, own in over(settings).items():
            names |= dict.fromkeys(own, name)
    cells: dict[str, list[ToyCell]] = {}
    for cell, name in names.items():
        if cell.task.p > _LEAST_P and cell.task.reading == "C":
            cells.setdefault(name, []).append(cell)
    return cells


@toy_figure("fig12", "Alignment against p", _OVER["p"], over="p")
@toy_figure("fig14", "Alignment against the loss weight λ", _OVER["λ"], over="λ")
@toy_figure("fig15", "Alignment against the number of features", _OVER["n"], over="n")
@toy_figure("fig16", "Alignment against the width of the head", _OVER["d_head"], over="d_head")
@toy_figure(
    "fig17", "Alignment against the length of the context", _OVER["context"], over="context"
)
@toy_figure(
    "fig18", "Alignment over seeds, both readings of the loss", _OVER["seeds"], over="seeds"
)
def run(settings: Settings, cells: Cells, over: str) -> Result:
    """Matched cosines of every configuration and seed, before and after training."""
    toys = train(cells, settings)
    rows = before_and_after(toys)
    summary = summarise(rows)
    after = pick(rows, control=False)
    good = sum(column(summary, "seeds_aligned"))
    total = sum(column(summary, "seeds"))
    answer = (
        f"Over {over}: all four pairs reach |cos| {ALIGNED} in {good} of {total} models; mean "
        f"matched |cos| {mean_of(after, 'matched'):.3f} (untrained "
        f"{mean_of(pick(rows, control=True), 'matched'):.2f}, best of random "
        f"{after[0]['best_random']:.2f})."
    )
    tables = {"alignment": rows, "summary": summary}
    return settings.result(
        answer, tables, _claims(over, rows, summary), about={"work": vars(WORK[settings.preset])}
    )


@toy_figure("sweeps", "Alignment over all settings that are varied, together", _everything)
def run_together(settings: Settings, cells: Cells) -> Result:
    """Run all sweeps as one figure."""
    return run(settings, cells=cells, over="everything")


def summarise(rows: list[Row]) -> list[Row]:
    """Per configuration: mean and least matched cosine, the control's, and in how many seeds all
    pairs align.
    """
    table = []
    for config in distinct(rows, "config"):
        after = pick(rows, config=config, control=False)
        before = pick(rows, config=config, control=True)
        seeds = sorted({row["seed"] for row in after})
        lows = [min(column(pick(after, seed=seed), "matched")) for seed in seeds]
        table.append(
            {
                "config": config,
                "seeds": len(seeds),
                "seeds_aligned": sum(low >= ALIGNED for low in lows),
                "matched": mean_of(after, "matched"),
                "least": min(lows),
                "best": mean_of(after, "best"),
                "untrained": mean_of(before, "matched"),
                "untrained_best": mean_of(before, "best"),
                "best_random": after[0]["best_random"],
                "steps": max(column(after, "step")),
            }
        )
    return table


def _claims(over: str, rows: list[Row], summary: list[Row]) -> list[Claim]:
    """Few models cannot pass by their interval: `_everything` makes the claim of most sweeps."""
    untrained = mean_of(pick(rows, control=True), "matched")
    if over == "everything":
        what = "every pair aligns in every setting that is varied"
        said = "Sec. 4, Fig. 12-18: robust over a wide range of model parameters"
        return [_all_align(what, said, summary, untrained)]
    if over == "p":
        return [_rare_claim(summary)]
    return []


def _rare_claim(summary: list[Row]) -> Claim:
    common: list[Row] = []
    rare: list[Row] = []
    for row in summary:
        p = float(row["config"].removeprefix("p="))
        (common if p > _LEAST_P else rare).append(row)
    few = _share(rare)
    return Claim(
        "... and no longer where pairs are too rare, p ≤ 0.038 (share of models with all "
        f"|cos| ≥ {ALIGNED}; control: the least share at larger p)",
        paper="A.2, Fig. 12: 0.038 or less, not often enough",
        **few.measured,
        control=min(_share([row]).mean for row in common),
        rule="ours < 0.5",
        changed="It was p = 0.02 alone, without an interval.",
    )


def _all_align(
    what: str,
    said: str,
    summary: list[Row],
    untrained: float,
) -> Claim:
    found = _share(summary)
    return Claim(
        f"{what} (share of models with all |cos| ≥ {ALIGNED}; control: the untrained mean |cos|)",
        paper=said,
        **found.measured,
        control=untrained,
        rule="ours >= 0.95",
    )


def _share(summary: list[Row]) -> Estimate:
    """Share of models in which all pairs align."""
    aligned: list[bool] = []
    for row in summary:
        aligned += [i < row["seeds_aligned"] for i in range(row["seeds"])]
    return share_of(aligned)


# ---------------------------------------------------------------------- the drawing

_LABELS = {
    "p": "probability p of a feature",
    "λ": "weight λ of the head's loss",
    "n": "features n",
    "d_head": "width of the head d_head",
    "context": "keys in the context",
}


@run.drawing
def draw(result: Result) -> Files:
    """One panel per side; a dot per pair and seed; grey crosses before training, dotted what chance
    finds.
    """
    rows = list(result.tables["alignment"])
    varied, _, by_value = rows[0]["config"].partition("=")
    by_seed = not by_value
    figure = new_figure(9.6, 3.7)
    axes = figure.subplots(1, 2, sharey=True)
    keys = distinct(rows, "config", "seed") if by_seed else distinct(rows, "config")
    labels = [_label(key) for key in keys]
    for axis, side, letter in zip(axes, ("query", "key"), "uv", strict=True):
        _dots(axis, pick(rows, side=side), keys, by_seed)
        axis.set_xticks(range(len(keys)), labels)
        axis.set(title=f"{side} features and {letter}_k", ylim=(-0.03, 1.05))
        axis.set_xlabel("reading of the loss and seed" if by_seed else _LABELS[varied])
    axes[0].set_ylabel("matched |cos|")
    axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return files_of(result, figure)


def _label(key: str | tuple[str, int]) -> str:
    """The value of ``p=0.14``, or the reading and seed of ``("reading B", 3)``, B3."""
    if isinstance(key, str):
        return key.split("=")[1]
    config, seed = key
    return f"{'B' if 'B' in config else 'C'}{seed}"


def _dots(axis: Any, rows: Sequence[Any], keys: Sequence[Any], by_seed: bool) -> None:
    """Matched |cos| of every pair, side by side, over its controls."""
    pairs = distinct(rows, "pair")
    middle = (len(pairs) - 1) / 2
    for i, (pair, shade) in enumerate(zip(pairs, shades(len(pairs)), strict=True)):
        for control in (True, False):
            own = pick(rows, pair=pair, control=control)
            places = _places(own, keys, by_seed)
            x = [place + (i - middle) * 0.13 for place in places]
            look: Any = {"linewidths": 0.8}
            if control:
                look |= {"s": 12, "marker": "x", "color": REST}
                look["label"] = "untrained" if i == 0 else None
            else:
                logit = f"{own[0]['target_logit']:g}" if own else ""
                look |= {"s": 20, "marker": "o", "color": shade}
                look["label"] = f"pair {pair}, logit {logit}"
            axis.scatter(x, column(own, "matched"), **look)
    axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random, mean")


def _places(rows: Sequence[Any], keys: Sequence[Any], by_seed: bool) -> list[int]:
    """Where the configuration of each row stands on the axis."""
    named = column(rows, "config")
    if by_seed:
        return [keys.index(key) for key in zip(named, column(rows, "seed"), strict=True)]
    return [keys.index(key) for key in named]
