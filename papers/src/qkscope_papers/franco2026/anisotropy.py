"""Figure 4: a head on given features, made anisotropic along one direction, ``W Wᵀ = I + ε v vᵀ``.

The raw score is ``max_j |cos(f, u_j)|``, the anti-whitened one ``max_j |cos(f, G u_j)|``, averaged
over the pairs and both sides. A maximum over all ten singular vectors is large for any direction,
so two more stand beside: the maximum over the top four, the only ones that the head uses, and what
random directions score under the same maxima. ‖E‖ is given on both scales, with the undistorted c =
1 (it is ε) and with ``c = tr G / d`` (it cannot exceed d − 1). The paper does not say from which
entries the head starts, and directions that it does not use keep them: 0.02 was chosen as it
reproduces the paper's number, and at the largest ε other starts stand beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope_papers.figures import INK, ORIGINAL, REST, TARGET, new_figure
from qkscope_papers.franco2026.cells import WORK, Cells, toy_figure, train
from qkscope_papers.franco2026.theory import sharp_bound, theorem2_bound
from qkscope_papers.franco2026.toy.alignment import (
    anti_whiten,
    cosines,
    gram,
    isotropy_error,
    random_best,
    whiten,
)
from qkscope_papers.franco2026.toy.measure import alignment_rows
from qkscope_papers.franco2026.toy.stack import ToyCell
from qkscope_papers.franco2026.toy.superposition import (
    Superposition,
    Toy,
    by_logit,
    distort,
    isotropic_dictionary,
)
from qkscope_papers.franco2026.toy.trained import ToyRun
from qkscope_papers.registry import Settings
from qkscope_papers.tables import (
    Estimate,
    Files,
    Row,
    column,
    differences,
    distinct,
    files_of,
    mean,
    mean_of,
    over_runs,
    pick,
)

_EPSILONS = (0.0, 0.05, 0.1, 0.15, 1.0, 5.0, 10.0, 25.0, 40.0, 55.0)
_KINDS = ("raw", "raw_top", "anti_whitened", "anti_whitened_top", "whitened")


START = 0.02  # of the head's entries, chosen to reproduce the paper's 0.75
_STARTS = (0.005, 0.05, 0.1, 0.18, 0.32)  # 0.18 is nn.Linear's, 0.32 Xavier's


def _distorted(settings: Settings) -> dict[str, list[ToyCell]]:
    """Heads on the dictionary of C.3, distorted along random directions; at the largest ε from
    other starts too.
    """
    few = settings.preset == "smoke"
    wanted = {}
    for epsilon in _EPSILONS[::3] if few else _EPSILONS:
        wanted[f"ε={epsilon:g}"] = _distorted_heads(settings, epsilon, START)
    for start in (0.18,) if few else _STARTS:
        wanted[f"start {start:g}"] = _distorted_heads(settings, _EPSILONS[-1], start)
    return wanted


def _distorted_heads(settings: Settings, epsilon: float, start: float) -> list[ToyCell]:
    """One head for each direction of distortion."""
    work = WORK[settings.preset]
    cells = []
    for seed in range(settings.seed, settings.seed + work.directions):
        features = distort(isotropic_dictionary(), epsilon, seed)
        task = Superposition.frozen(features.float(), scaled=True, head_std=start)
        cells.append(ToyCell(task, seed, work.frozen, work.lr, "constant", work.every))
    return cells


@toy_figure("fig4", "Alignment under controlled anisotropy", _distorted)
def run(settings: Settings, cells: Cells) -> Result:
    """Scores of every ε and direction, after training and before."""
    toys = train(cells, settings)
    rows: list[Row] = []
    starts: list[Row] = []
    alignment: list[Row] = []
    for config, found in toys.items():
        for trained in found:
            if config.startswith("ε="):
                epsilon = float(config.removeprefix("ε="))
                for check in (-1, 0):
                    rows.append(_row_at(trained, epsilon, check))
                    alignment += _alignment_at(config, trained, check)
            else:
                start = trained.cell.task.head_std
                starts.append({"start": start, **_row_at(trained, _EPSILONS[-1], -1)})
    for row in pick(rows, epsilon=_EPSILONS[-1], control=False):
        starts.append({"start": START, **row})
    summary = summarise(rows)
    by_start = _by_start(starts)
    claims = _claims(summary, by_start, rows)
    tables = {"anisotropy": summary, "starts": by_start, "directions": rows, "alignment": alignment}
    about = {"work": vars(WORK[settings.preset])}
    return settings.result(_answer(summary, by_start), tables, claims, about=about)


def _row_at(trained: ToyRun, epsilon: float, check: int) -> Row:
    """The head's scores at one checkpoint; the first is the control."""
    toy = trained.at(check)
    return anisotropy_row(epsilon, trained.cell.seed, trained.steps[check], toy, check == 0)


def _alignment_at(config: str, trained: ToyRun, check: int) -> list[Row]:
    toy = trained.at(check)
    step = trained.steps[check]
    return alignment_rows(config, trained.cell.seed, step, toy, control=check == 0)


def _answer(summary: list[Row], by_start: list[Row]) -> str:
    last = summary[-1]
    raw = column(by_start, "raw")
    return (
        f"At ε = {last['epsilon']:g}: raw |cos| {last['raw']:.3f} (best of ten; {min(raw):.3f} to "
        f"{max(raw):.3f} over {len(raw)} starts of the head; random directions score "
        f"{last['random']:.3f}), {last['raw_top']:.3f} over the four vectors in use (random "
        f"{last['random_top']:.3f}), anti-whitened {last['anti_whitened']:.3f}."
    )


def _by_start(rows: list[Row]) -> list[Row]:
    """Scores at the largest ε by the size of the entries that the head starts from, with intervals
    over directions.
    """
    table = []
    for start in sorted(set(column(rows, "start"))):
        own = pick(rows, start=start)
        raw = over_runs(column(own, "raw"))
        table.append(
            {
                "start": start,
                "raw": raw.mean,
                "low": raw.low,
                "high": raw.high,
                "n": len(own),
                "raw_top": mean_of(own, "raw_top"),
                "anti_whitened": mean_of(own, "anti_whitened"),
            }
        )
    return table


def anisotropy_row(epsilon: float, seed: int, step: int, toy: Toy, control: bool) -> Row:
    """One head on one dictionary; scores are means over pairs and both sides."""
    basis = toy.basis()
    W = toy.W.double()
    pairs = by_logit(toy.task.pairs)
    g = gram(toy.W)
    scores: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for side, vectors in ((0, basis.u), (1, basis.v)):
        wanted = W[:, [pair[side] for pair in pairs]]
        raw = cosines(wanted, vectors)
        turned = cosines(wanted, anti_whiten(g, vectors))
        white = cosines(whiten(g, wanted), vectors)
        scores["raw"] += raw.amax(1).tolist()
        scores["raw_top"] += raw[:, : len(pairs)].amax(1).tolist()
        scores["anti_whitened"] += turned.amax(1).tolist()
        scores["anti_whitened_top"] += turned[:, : len(pairs)].amax(1).tolist()
        scores["whitened"] += white.diagonal().tolist()
    means = {kind: mean(found) for kind, found in scores.items()}
    return {
        "epsilon": epsilon,
        "seed": seed,
        "step": step,
        "control": control,
        "error_trace": isotropy_error(g),
        "error_undistorted": isotropy_error(g, 1.0),
        **means,
        "sharp": sharp_bound(g),
    }


def summarise(rows: list[Row]) -> list[Row]:
    """Mean and standard deviation over directions, beside the bounds and chance."""
    d = 10
    used = 4
    chance = random_best(d, d).mean
    chance_top = random_best(d, used).mean
    table = []
    for epsilon in distinct(rows, "epsilon"):
        after = pick(rows, epsilon=epsilon, control=False)
        before = pick(rows, epsilon=epsilon, control=True)
        line: Row = {
            "epsilon": epsilon,
            "error_trace": mean_of(after, "error_trace"),
            "n": len(after),
        }
        for kind in _KINDS:
            values = column(after, kind)
            line[kind] = mean(values)
            line[f"{kind}_sd"] = statistics.stdev(values) if len(values) > 1 else 0.0
            line[f"{kind}_untrained"] = mean_of(before, kind)
        line["random"] = chance
        line["random_top"] = chance_top
        line["bound"] = theorem2_bound(epsilon)
        line["sharp"] = mean_of(after, "sharp")
        table.append(line)
    return table


def _gains(rows: list[Row], control: bool) -> list[float]:
    """What anti-whitening adds to the raw score in each direction, mean over ε ≥ 5."""
    strong = [row for row in pick(rows, control=control) if row["epsilon"] >= 5]
    gains = []
    for seed in sorted(set(column(strong, "seed"))):
        gains.append(mean(differences(pick(strong, seed=seed), "anti_whitened", "raw")))
    return gains


def _claims(summary: list[Row], by_start: list[Row], rows: list[Row]) -> list[Claim]:
    most = summary[-1]
    none = summary[0]
    covered = [row for row in summary if math.isfinite(row["bound"])]
    (own,) = pick(by_start, start=START)
    others = [row for row in by_start if row["start"] != START]
    worst = min(others, key=lambda row: row["raw"])
    least = min(covered, key=lambda row: row["raw"] - row["bound"])

    def over(name: str, at: Row) -> Estimate:
        return over_runs(column(pick(rows, epsilon=at["epsilon"], control=False), name))

    top = over("raw_top", most)
    exact = over("raw", none)
    nearest = over("raw", least).among(len(covered))
    after = _gains(rows, False)
    before = _gains(rows, True)
    gain = over_runs(after)
    beyond = over_runs(a - b for a, b in zip(after, before, strict=True))
    aligned = Claim(
        "isotropic features align exactly (raw |cos| at ε = 0; control: untrained)",
        paper="C.3: in the absence of anisotropy, exactly",
        **exact.measured,
        control=none["raw_untrained"],
        rule="ours >= 0.99",
    )
    above = Claim(
        "alignment stays above 0.75 (raw, best of all ten vectors, at the largest ε, mean "
        f"over directions; the head's start, {START:g}, is chosen to reproduce it; control: "
        "random directions)",
        paper="Sec. 4, Fig. 4: mean cosine similarity above 0.75",
        ours=own["raw"],
        control=most["random"],
        rule="ours > 0.75",
        low=own["low"],
        high=own["high"],
        reason="other setting",
        why="From which entries the head starts is not said.",
    )
    other_starts = Claim(
        f"... from whatever entries the head starts (the worst of {len(others)} other "
        f"starts, {worst['start']:g}; control: the one chosen)",
        paper="",
        ours=worst["raw"],
        control=own["raw"],
        rule="ours > 0.75",
        low=worst["low"],
        high=worst["high"],
        reason="other setting",
        why=(
            "From which entries the head starts is not said; unused directions keep them and "
            "enter the maximum."
        ),
    )
    in_use = Claim(
        "... among the vectors that the head uses (raw, best of the four with the largest "
        "singular values; control: random directions, best of four)",
        paper="",
        **top.measured,
        control=most["random_top"],
        rule="ours > 0.75",
        why=(
            "The maximum over ten counts vectors along which Ω is nearly 0; the four in use "
            "score little more than random directions do."
        ),
        changed="It asked for more than random directions find among ten.",
    )
    improved = Claim(
        "anti-whitening improves alignment (what it adds to the raw score at ε ≥ 5, mean "
        "over directions; control: untrained)",
        paper="Sec. 4, Fig. 4 (b): can significantly improve SVF alignment",
        **gain.measured,
        control=mean(before),
        rule="ours > 0",
        changed=(
            "It asked for more than in an untrained head, which the paper does not say: the "
            "claim below."
        ),
    )
    beyond_untrained = Claim(
        "... more than in the same head untrained, as G pulls any vector to where features "
        "lean (difference of the gains; control: the gain untrained)",
        paper="",
        **beyond.measured,
        control=mean(before),
        rule="ours > 0",
    )
    bounded = Claim(
        "Theorem 2 bounds alignment from below where it speaks, loosely (least raw |cos| "
        "minus bound; control: the largest)",
        paper="Sec. 4, Fig. 4 (a): a lower bound that can be quite loose",
        ours=nearest.mean - least["bound"],
        control=max(r["raw"] - r["bound"] for r in covered),
        rule="ours >= -0.001 and control >= 0.1",
        low=nearest.low - least["bound"],
        high=nearest.high - least["bound"],
        changed="Looseness was not asked for.",
    )
    return [aligned, above, other_starts, in_use, improved, beyond_untrained, bounded]


# ---------------------------------------------------------------------- the drawing


@run.drawing
def draw(result: Result) -> Files:
    """Left: where Theorem 2 speaks; right: the range of the paper."""
    rows = list(result.tables["anisotropy"])
    figure = new_figure(10.4, 4.2)
    near, whole = figure.subplots(1, 2, sharey=True, width_ratios=[1, 2])
    _curves(near, [row for row in rows if row["epsilon"] <= 0.2], rows[0])
    _curves(whole, rows, rows[0])
    dashes: Any = {"color": ORIGINAL, "ms": 8, "mew": 1.2}
    for row in result.tables["starts"]:
        whole.plot(rows[-1]["epsilon"] + 1.5, row["raw"], "_", **dashes)
    whole.plot([], [], "_", label="raw at ε = 55, other starts of the head", **dashes)
    near.set(ylabel="|cos|, mean over pairs, sides and directions", title="where Theorem 2 speaks")
    whole.set_title("the range of GPT-2's dictionaries, on another scale (see text)")
    whole.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return files_of(result, figure)


_DRAWN = (
    ("raw", "raw, best of all ten vectors", ORIGINAL, "-o"),
    ("raw_top", "raw, best of the four in use", ORIGINAL, "--s"),
    ("anti_whitened", "anti-whitened, best of ten", TARGET, "-o"),
)


_PURPLE = "#7a4fa3"


def _curves(axis: Any, rows: Sequence[Any], first: Any) -> None:
    """Scores over ε, with chance and the bounds; ``first`` has what random directions score."""
    x = column(rows, "epsilon")
    for kind, label, colour, style in _DRAWN:
        look: Any = {"color": colour, "ms": 4, "lw": 1.3, "capsize": 2, "label": label}
        axis.errorbar(x, column(rows, kind), column(rows, f"{kind}_sd"), fmt=style, **look)
    untrained: Any = {"color": REST, "ms": 5, "label": "untrained head, best of ten"}
    of_ten: Any = {"color": INK, "lw": 0.9, "ls": ":"}
    of_four: Any = {"color": INK, "lw": 0.9, "ls": "-."}
    bound: Any = {"color": _PURPLE, "lw": 1.6, "label": "Theorem 2 (where it speaks)"}
    sharp: Any = {"color": _PURPLE, "lw": 1, "label": "sharp bound, 2√c/(1+c)"}
    axis.plot(x, column(rows, "raw_untrained"), "x", **untrained)
    axis.axhline(first["random"], label="random direction, best of ten", **of_ten)
    axis.axhline(first["random_top"], label="random direction, best of four", **of_four)
    axis.plot(x, column(rows, "bound"), "-", **bound)
    axis.plot(x, column(rows, "sharp"), "--", **sharp)
    axis.set(xlabel="ε = ‖E‖ with c = 1", ylim=(0, 1.04))
