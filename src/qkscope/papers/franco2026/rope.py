"""Figures 21 and 22: a head that rotates, three pairs that do not care for positions and one that does.

The singular vectors are those of the un-rotated Ω. For each feature: the share of ``‖W_Q f‖`` (or ``‖W_K f‖``) that
lies in each band of two dimensions. A pair with target ``cos(θ_1 Δ)`` should sit in band 1, the others in slow bands.
"""

from __future__ import annotations

import math

from qkscope.maths.draws import derived_seed
from qkscope.papers.fleet import one_thread
from qkscope.papers.franco2026.cells import PRESETS, toys_of
from qkscope.papers.franco2026.toy.alignment import cosines
from qkscope.papers.franco2026.toy.measure import before_and_after, divergence_and_error
from qkscope.papers.franco2026.toy.superposition import Toy, band_frequencies
from qkscope.papers.registry import Settings
from qkscope.papers.rows import Row, least, mean, pick
from qkscope.result import Claim, Result, provenance


@one_thread()
def run(settings: Settings) -> Result:
    """Alignment and bands of every seed."""
    work, toys = PRESETS[settings.preset], toys_of(settings)
    found = next(iter(toys.values()))
    rows = before_and_after(toys, joint=True)
    for row in rows:
        trained = next(t for t in found if t.cell.seed == row["seed"])
        row["in_span"] = _in_span(trained.at(0 if row["control"] else -1), row)
    bands = [row for trained in found for check, control in ((-1, False), (0, True))
             for row in band_rows(trained.at(check), trained.cell.seed, trained.steps[check], control)]  # fmt: skip
    toy, basis = found[0].toy, found[0].toy.basis()
    arrays = {"query": cosines(toy.W.double(), basis.u).float(), "key": cosines(toy.W.double(), basis.v).float()}
    losses = [{"seed": t.cell.seed, **dict(zip(("kl", "reconstruction"), divergence_and_error(
        t.toy, 1024, derived_seed(settings.seed, 37)), strict=True))} for t in found]  # fmt: skip
    after = pick(rows, control=False)
    positional = [r for r in pick(bands, control=False) if r["positional"]]
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=(
            f"Under RoPE the joint matched |cos| is at least {least(r['matched'] for r in after):.3f} over "
            f"{len(found)} seeds (untrained {mean(r['matched'] for r in pick(rows, control=True)):.2f}); the "
            "positional "
            f"pair has at least {least(r['band_1'] for r in positional):.3f} of its norm in band 1."
        ),
        tables={"alignment": rows, "bands": bands, "losses": losses},
        claims=_claims(rows, bands),
        arrays=arrays,
        preset=settings.preset,
        seed=settings.seed,
        provenance=provenance(figure=settings.figure, preset=settings.preset, work=vars(work),
                              periods=[2 * math.pi / float(t) for t in band_frequencies(toy.task.d_head)]),
    )  # fmt: skip


def band_rows(toy: Toy, seed: int, step: int, control: bool) -> list[Row]:
    """For each feature of interest the share of its norm in each band, on its own side of the head."""
    table = []
    named = [(pair[:2], False) for pair in toy.task.pairs] + [(tuple(pair[:2]), True) for pair in toy.task.positional]
    for features, positional in named:
        for side, feature, weight in (("query", features[0], toy.W_Q), ("key", features[1], toy.W_K)):
            projected = weight.double() @ toy.W.double()[:, feature]
            shares = projected.unflatten(0, (-1, 2)).norm(dim=1) / projected.norm()
            slow = float(shares[2:].square().sum().sqrt())
            table.append({"seed": seed, "step": step, "pair": f"{features[0]}-{features[1]}", "side": side,
                          "positional": positional, **{f"band_{j}": float(x) for j, x in enumerate(shares)},
                          "slow": slow, "control": control})  # fmt: skip
    return table


def _in_span(toy: Toy, row: Row) -> float:
    """|cos| of the feature with the span of as many top singular vectors as there are pairs.

    Vectors whose singular values are nearly equal mix freely: only their span is determined.
    """
    used = len(toy.task.pairs) + len(toy.task.positional)
    side = row["side"] == "key"
    basis, feature = toy.basis(), int(row["pair"].split("-")[side])
    f = toy.W.double()[:, feature]
    return float(((basis.v if side else basis.u)[:, :used].mT @ f).norm() / f.norm())


def _claims(rows: list[Row], bands: list[Row]) -> list[Claim]:
    after, before = pick(rows, control=False), pick(rows, control=True)
    trained, untrained = pick(bands, control=False), pick(bands, control=True)
    return [
        Claim("features align with singular vectors of the un-rotated Ω (least joint matched |cos|; control: untrained "
              "mean)", "strong", least(r["matched"] for r in after), mean(r["matched"] for r in before),
              "ours >= 0.9"),
        Claim("... with the span of the four vectors in use, where singular values are close (least |cos|; control: "
              "untrained mean)", "not in the paper", least(r["in_span"] for r in after),
              mean(r["in_span"] for r in before), "ours >= 0.95"),
        Claim("the positional pair lies in band 1 (least share of its norm; control: untrained mean)", "band 1",
              least(r["band_1"] for r in trained if r["positional"]),
              mean(r["band_1"] for r in untrained if r["positional"]), "ours >= 0.95"),
        Claim("pairs without position lie in the slow bands 2 to 4 (least share of norm; control: untrained mean)",
              "low frequencies", least(r["slow"] for r in trained if not r["positional"]),
              mean(r["slow"] for r in untrained if not r["positional"]), "ours >= 0.95"),
    ]  # fmt: skip
