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
    work = WORK[settings.preset]

    def cell(epsilon: float, start: float, seed: int) -> ToyCell:
        features = distort(isotropic_dictionary(), epsilon, seed)
        task = Superposition.frozen(features.float(), scaled=True, head_std=start)
        return ToyCell(task, seed, work.frozen, work.lr, "constant", work.every)

    few = settings.preset == "smoke"
    wanted = {f"ε={e:g}": (e, START) for e in (_EPSILONS[::3] if few else _EPSILONS)}
    wanted |= {
        f"start {start:g}": (_EPSILONS[-1], start) for start in ((0.18,) if few else _STARTS)
    }
    return {
        name: [cell(*asked, settings.seed + k) for k in range(work.directions)]
        for name, asked in wanted.items()
    }


@toy_figure("fig4", "Alignment under controlled anisotropy", _distorted)
def run(settings: Settings, cells: Cells) -> Result:
    """Scores of every ε and direction, after training and before."""
    work = WORK[settings.preset]
    toys = train(cells, settings)
    rows = []
    starts = []
    alignment = []
    for config, found in toys.items():
        for trained in found:
            for check, control in ((-1, False), (0, True)):
                toy = trained.at(check)
                step = trained.steps[check]
                seed = trained.cell.seed
                if config.startswith("ε="):
                    rows.append(anisotropy_row(float(config[2:]), seed, step, toy, control))
                    alignment += alignment_rows(config, seed, step, toy, control=control)
                elif not control:
                    row = anisotropy_row(_EPSILONS[-1], seed, step, toy, control)
                    starts.append({"start": trained.cell.task.head_std, **row})
    starts += [{"start": START, **row} for row in pick(rows, epsilon=_EPSILONS[-1], control=False)]
    summary = summarise(rows)
    by_start = _by_start(starts)
    last = summary[-1]
    spread = sorted(column(by_start, "raw"))
    answer = (
        f"At ε = {last['epsilon']:g}: raw |cos| {last['raw']:.3f} (best of ten; "
        f"{spread[0]:.3f} to {spread[-1]:.3f} over {len(by_start)} starts of the head; "
        f"random directions score {last['random']:.3f}), {last['raw_top']:.3f} over the four "
        f"vectors in use (random {last['random_top']:.3f}), anti-whitened "
        f"{last['anti_whitened']:.3f}."
    )
    tables = {"anisotropy": summary, "starts": by_start, "directions": rows, "alignment": alignment}
    return settings.result(
        answer, tables, _claims(summary, by_start, rows), about={"work": vars(work)}
    )


def _by_start(rows: list[Row]) -> list[Row]:
    """Scores at the largest ε by the size of the entries that the head starts from, with intervals
    over directions.
    """
    table = []
    for start in sorted({row["start"] for row in rows}):
        own = pick(rows, start=start)
        raw = over_runs(column(own, "raw"))
        table.append(
            {
                "start": start,
                "raw": raw.mean,
                "low": raw.low,
                "high": raw.high,
                "n": len(own),
                **{kind: mean_of(own, kind) for kind in ("raw_top", "anti_whitened")},
            }
        )
    return table


def anisotropy_row(epsilon: float, seed: int, step: int, toy: Toy, control: bool) -> Row:
    """One head on one dictionary."""
    basis = toy.basis()
    pairs = by_logit(toy.task.pairs)
    g = gram(toy.W)
    scores: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for side, vectors in ((0, basis.u), (1, basis.v)):
        wanted = toy.W.double()[:, [pair[side] for pair in pairs]]
        top = slice(len(pairs))
        for name, found in (
            ("raw", cosines(wanted, vectors)),
            ("anti_whitened", cosines(wanted, anti_whiten(g, vectors))),
        ):
            scores[name] += found.amax(1).tolist()
            scores[f"{name}_top"] += found[:, top].amax(1).tolist()
        scores["whitened"] += cosines(whiten(g, wanted), vectors).diagonal().tolist()
    return {
        "epsilon": epsilon,
        "seed": seed,
        "step": step,
        "control": control,
        "error_trace": isotropy_error(g),
        "error_undistorted": isotropy_error(g, 1.0),
        **{kind: mean(found) for kind, found in scores.items()},
        "sharp": sharp_bound(g),
    }


def summarise(rows: list[Row]) -> list[Row]:
    """Mean and standard deviation over directions, beside the bounds and chance."""
    table = []
    d = 10
    used = 4
    chance = random_best(d, d).mean
    chance_top = random_best(d, used).mean
    for epsilon in distinct(rows, "epsilon"):
        after = pick(rows, epsilon=epsilon, control=False)
        before = pick(rows, epsilon=epsilon, control=True)
        line: Row = {
            "epsilon": epsilon,
            "error_trace": mean_of(after, "error_trace"),
            "n": len(after),
        }
        for kind in _KINDS:
            values = [r[kind] for r in after]
            line |= {
                kind: mean(values),
                f"{kind}_sd": statistics.stdev(values) if len(values) > 1 else 0.0,
                f"{kind}_untrained": mean_of(before, kind),
            }
        table.append(
            {
                **line,
                "random": chance,
                "random_top": chance_top,
                "bound": theorem2_bound(epsilon),
                "sharp": mean_of(after, "sharp"),
            }
        )
    return table


def _gains(rows: list[Row], control: bool) -> list[float]:
    """What anti-whitening adds to the raw score in each direction, mean over ε ≥ 5."""
    strong = [row for row in pick(rows, control=control) if row["epsilon"] >= 5]
    seeds = sorted({row["seed"] for row in strong})
    return [mean(r["anti_whitened"] - r["raw"] for r in pick(strong, seed=seed)) for seed in seeds]


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
    axes = figure.subplots(1, 2, sharey=True, width_ratios=[1, 2])
    for axis, part in zip(axes, ([r for r in rows if r["epsilon"] <= 0.2], rows), strict=True):
        x = [r["epsilon"] for r in part]
        for kind, label, colour, style in (
            ("raw", "raw, best of all ten vectors", ORIGINAL, "-o"),
            ("raw_top", "raw, best of the four in use", ORIGINAL, "--s"),
            ("anti_whitened", "anti-whitened, best of ten", TARGET, "-o"),
        ):
            look: Any = {"color": colour, "ms": 4, "lw": 1.3, "capsize": 2, "label": label}
            axis.errorbar(x, column(part, kind), column(part, f"{kind}_sd"), fmt=style, **look)
        axis.plot(
            x,
            [r["raw_untrained"] for r in part],
            "x",
            color=REST,
            ms=5,
            label="untrained head, best of ten",
        )
        axis.axhline(
            rows[0]["random"], color=INK, lw=0.9, ls=":", label="random direction, best of ten"
        )
        axis.axhline(
            rows[0]["random_top"],
            color=INK,
            lw=0.9,
            ls="-.",
            label="random direction, best of four",
        )
        axis.plot(
            x,
            [r["bound"] for r in part],
            "-",
            color="#7a4fa3",
            lw=1.6,
            label="Theorem 2 (where it speaks)",
        )
        axis.plot(
            x,
            [r["sharp"] for r in part],
            "--",
            color="#7a4fa3",
            lw=1,
            label="sharp bound, 2√c/(1+c)",
        )
        axis.set(xlabel="ε = ‖E‖ with c = 1", ylim=(0, 1.04))
    for row in result.tables["starts"]:
        axes[1].plot(rows[-1]["epsilon"] + 1.5, row["raw"], "_", color=ORIGINAL, ms=8, mew=1.2)
    axes[1].plot(
        [], [], "_", color=ORIGINAL, ms=8, mew=1.2, label="raw at ε = 55, other starts of the head"
    )
    axes[0].set(
        ylabel="|cos|, mean over pairs, sides and directions", title="where Theorem 2 speaks"
    )
    axes[1].set_title("the range of GPT-2's dictionaries, on another scale (see text)")
    axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return files_of(result, figure)
