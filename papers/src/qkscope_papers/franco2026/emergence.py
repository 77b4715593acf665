"""Figure 7a: sparsity of relative attention over training, with one pair of interest present, two,
and none.

At every checkpoint three nulls of the same weights: U and V rotated independently (spectrum and
rank stay), one rotation of the head's space (every logit stays), and, for the count, random terms
of the same sum. Claims are about differences, means over seeds with their intervals; the bands of
the drawing resample contexts.
"""

from __future__ import annotations

import torch

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope.sums import singular
from qkscope.sums.intervals import clustered_bootstrap
from qkscope_papers.figures import ORIGINAL, REST, TARGET, new_figure
from qkscope_papers.franco2026.cells import (
    BEYOND,
    DEFAULT_RUN,
    WAS_LESS,
    WORK,
    Cells,
    ToyWork,
    toy_figure,
    train,
)
from qkscope_papers.franco2026.dynamics import checkpoints
from qkscope_papers.franco2026.token_pairs import (
    PRESENT,
    Present,
    TokenPairs,
    coordinates,
    draw_token_pairs,
)
from qkscope_papers.franco2026.toy.measure import alignment_rows
from qkscope_papers.franco2026.toy.superposition import Toy
from qkscope_papers.registry import Settings
from qkscope_papers.tables import Files, Row, column, files_of, mean, over_runs, over_seeds, pick

TOLERANCE = 0.99
_RESAMPLES = 400


@toy_figure("fig7a", "Sparsity over training, beside its nulls", DEFAULT_RUN)
def run(settings: Settings, cells: Cells) -> Result:
    """Sparsity and counts of every seed and checkpoint."""
    work = WORK[settings.preset]
    rows: list[Row] = []
    for trained in next(iter(train(cells, settings).values())):
        seed = trained.cell.seed
        for present in PRESENT:
            pairs = draw_token_pairs(
                trained.cell.task, present, work.contexts, derived_seed(settings.seed, 35, seed)
            )
            for check in checkpoints(len(trained.steps), work.points):
                toy = trained.at(check)
                found = sparsity_row(toy, pairs, work, derived_seed(settings.seed, 36, seed))
                matched = mean(r["matched"] for r in alignment_rows("", seed, 0, toy))
                rows.append(
                    {
                        "seed": seed,
                        "step": trained.steps[check],
                        "present": present,
                        "matched": matched,
                        **found,
                    }
                )
    last = max(row["step"] for row in rows)
    ends = {present: pick(rows, present=present, step=last) for present in PRESENT}
    answer = (
        "Sparsity after training: "
        + ", ".join(
            f"{name} {mean(r['sparsity'] for r in ends[name]):.3f} (rotated "
            f"{mean(r['rotated'] for r in ends[name]):.3f})"
            for name in PRESENT
        )
        + f"; before training {mean(r['sparsity'] for r in pick(rows, step=0)):.3f}."
    )
    about = {"work": vars(work), "tolerance": TOLERANCE}
    return settings.result(answer, {"sparsity": rows}, _claims(rows, ends), about=about)


def sparsity_row(toy: Toy, pairs: TokenPairs, work: ToyWork, seed: int) -> Row:
    """One checkpoint and kind of token pair, beside its nulls."""
    at = coordinates(toy, pairs)
    terms = at.terms
    turned = singular.sparsity(
        singular.rotated_terms(at.query, at.s, at.difference, work.rotations, seed)
    ).mean(0)
    # a basis of the head's space, up to a rotation
    q = at.query * at.s.sqrt()
    k = at.difference * at.s.sqrt()
    rotation = singular.random_rotations(q.shape[-1], work.rotations, seed).to(q)
    q = torch.einsum("...m,rmn->r...n", q, rotation)
    k = torch.einsum("...m,rmn->r...n", k, rotation)
    shared = singular.sparsity(q * k).mean(0)
    own = singular.sparsity(terms)
    exact = singular.reconstruction_count(terms)
    close = singular.reconstruction_count(terms, TOLERANCE)
    context = torch.arange(len(own))
    columns = torch.stack([own, turned, own - turned], dim=1)
    low, high = clustered_bootstrap(columns, context, draws=_RESAMPLES, seed=seed)
    counted = exact[exact.isfinite()]
    count_low, count_high = (
        clustered_bootstrap(
            counted[:, None], torch.arange(len(counted)), draws=_RESAMPLES, seed=seed
        )
        if len(counted)
        else (torch.full((1,), torch.nan),) * 2
    )
    return {
        "sparsity": float(own.mean()), "low": float(low[0]), "high": float(high[0]),
        "rotated": float(turned.mean()), "rotated_low": float(low[1]), "rotated_high": float(high[1]),
        "difference": float((own - turned).mean()), "difference_low": float(low[2]), "difference_high": float(high[2]),
        "shared": float(shared.mean()), "count": float(exact.nanmean()), "count_low": float(count_low[0]),
        "count_high": float(count_high[0]), "count_tol": float(close.nanmean()),
        "null_count": float(singular.null_count(terms, TOLERANCE, seed=seed).nanmean()),
        "cancellation": float(singular.cancellation(terms).nanmean()),
        "positive": float((terms.sum(-1) > 0).double().mean()), "n": len(own),
    }  # fmt: skip


def _claims(rows: list[Row], ends: dict[Present, list[Row]]) -> list[Claim]:
    one, two, none = (ends[name] for name in PRESENT)
    start = pick(rows, step=0)
    fewer = over_runs(a["sparsity"] - b["sparsity"] for a, b in zip(one, two, strict=True))
    absent = over_runs(a["sparsity"] - b["sparsity"] for a, b in zip(two, none, strict=True))
    empty = mean(r["sparsity"] for r in none)
    before = mean(r["sparsity"] for r in pick(start, present="one"))
    after = over_runs(r["sparsity"] for r in one)
    seeds = "It compared the worst seed with the best; seeds are paired, and their mean difference has an interval."
    claims = [
        Claim("sparser with one pair than with two (difference of sparsity, mean over seeds; control: before training)",
              "Sec. 5, Fig. 7(a): sparser when fewer features are present", fewer.mean,
              before - mean(r["sparsity"] for r in pick(start, present="two")), "ours < 0", fewer.low, fewer.high,
              changed=seeds),
        Claim("... and with two pairs at most half as much as with none (sparsity, mean over seeds; "
              "control: with none)", "Sec. 5, Fig. 7(a): when absent, much less sparse", empty + absent.mean, empty,
              "ours <= 0.5 * control", empty + absent.low, empty + absent.high,
              changed="was any difference, where the paper says much."),
        Claim("sparsity emerges (one pair, after training; control: before)", "Sec. 5, Fig. 7(a): how sparsity emerges",
              after.mean, before, "ours < 0.5 * control", after.low, after.high),
    ]  # fmt: skip
    follows = over_seeds(pick(rows, present="one"), _follows)
    without = over_seeds(pick(rows, present="none"), _follows)
    claims.append(Claim(
        "sparsity comes as singular vectors align (rank correlation of sparsity and matched |cos| over checkpoints, "
        "mean over seeds; control: no pair present)", "Sec. 5, Fig. 7(a): consistent with the evolution of SVF "
        "alignment seen in Figure 3", follows.mean, without.mean, "ours < -0.5", **follows.ends))  # fmt: skip
    for name, own in (("one", one), ("two", two)):
        gap = over_runs(r["difference"] for r in own)
        claims.append(Claim(
            f"{name} present: sparser than a rotated basis of the same weights (sparsity − rotated, mean over seeds; "
            "control: before training)", "", gap.mean, mean(r["difference"] for r in pick(start, present=name)),
            BEYOND, gap.low, gap.high,
            changed="Rotated bases are the paper's control in Pythia, not here; with no pair present the paper sees no "
            f"sparsity, and Fig. 24 asks that. {WAS_LESS}"))  # fmt: skip
    shared = over_runs(r["sparsity"] - r["shared"] for r in one)
    count = over_runs(r["count_tol"] for r in one)
    claims += [
        Claim("one present: sparser than in a rotated head space, where every logit is the same (mean over seeds; "
              "control: before training)", "", shared.mean,
              mean(r["sparsity"] - r["shared"] for r in pick(start, present="one")), BEYOND, **shared.ends,
              changed=WAS_LESS),
        Claim(f"one pair is reconstructed by one term (mean count at tolerance {TOLERANCE}; control: random terms of "
              "the same sum and norm)", "", count.mean, mean(r["null_count"] for r in one), "ours < 1.1", **count.ends),
    ]  # fmt: skip
    return claims


def _follows(rows: list[Row]) -> float:
    """Rank correlation of sparsity and alignment, of one seed's checkpoints."""
    from scipy.stats import spearmanr

    return float(spearmanr(column(rows, "sparsity"), column(rows, "matched")).statistic)


# ---------------------------------------------------------------------- the drawing

_COLOURS = {"one": ORIGINAL, "two": TARGET, "none": REST}
_NAMES = {"one": "one pair present", "two": "two pairs", "none": "none"}


@run.drawing
def draw(result: Result) -> Files:
    """Mean over seeds; bands from the lowest to the highest end of the seeds' intervals; dashed the
    rotated basis.
    """
    rows = list(result.tables["sparsity"])
    figure = new_figure(10.2, 4.0)
    left, right = figure.subplots(1, 2)
    for present, colour in _COLOURS.items():
        own = pick(rows, present=present)
        steps = sorted({r["step"] for r in own})
        at = [pick(own, step=step) for step in steps]
        left.plot(
            steps,
            [mean(column(x, "sparsity")) for x in at],
            "-o",
            ms=3,
            color=colour,
            label=_NAMES[present],
        )
        low = [min(column(x, "low")) for x in at]
        high = [max(column(x, "high")) for x in at]
        left.fill_between(steps, low, high, color=colour, alpha=0.25, lw=0)
        left.plot(steps, [mean(column(x, "rotated")) for x in at], "--", color=colour, lw=1)
        right.plot(
            steps,
            [mean(column(x, "count_tol")) for x in at],
            "-o",
            ms=3,
            color=colour,
            label=_NAMES[present],
        )
        right.plot(steps, [mean(column(x, "null_count")) for x in at], "--", color=colour, lw=1)
    left.axhline(0.1, color="#666b75", lw=0.8, ls=":")
    left.set(xlabel="step", ylabel="sparsity (mean |c|)² / mean c²", ylim=(0, None))
    left.set_title("dashed: U and V rotated; dotted: one term")
    right.set(xlabel="step", ylabel="terms to reach 99% of r", ylim=(0.9, None))
    right.set_title("dashed: random terms of the same sum and norm")
    left.legend(frameon=False, fontsize=8)
    return files_of(result, figure)
