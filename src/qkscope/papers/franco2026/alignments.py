"""Figures 2 and 11: one pair of interest, and twenty: which singular vector points along which feature.

Besides the matched cosines: whether singular values are the target logits (their largest relative difference), the
best cosine that a random direction finds, and the same numbers before training.
"""

from __future__ import annotations

from qkscope.maths.draws import derived_seed
from qkscope.papers.fleet import one_thread
from qkscope.papers.franco2026.cells import MANY_PAIRS, ONE_PAIR, PRESETS, toys_of
from qkscope.papers.franco2026.toy.alignment import cosines
from qkscope.papers.franco2026.toy.measure import before_and_after, divergence_and_error
from qkscope.papers.registry import Settings
from qkscope.papers.rows import Row, least, mean, pick
from qkscope.result import Claim, Result, provenance


@one_thread()
def run(settings: Settings) -> Result:
    """Alignment of both configurations, and all cosines of the first seed as arrays."""
    work, toys = PRESETS[settings.preset], toys_of(settings)
    rows = before_and_after(toys)
    arrays, spectra = {}, []
    for config, found in toys.items():
        toy, basis = found[0].toy, found[0].toy.basis()
        for side, vectors in (("query", basis.u), ("key", basis.v)):
            arrays[f"{side}/{config}"] = cosines(toy.W.double(), vectors).float()
        for trained in found:
            for check, control in ((-1, False), (0, True)):
                s, count = trained.at(check).basis().s, len(trained.cell.task.pairs)
                kl, error = divergence_and_error(trained.at(check), 4096, derived_seed(settings.seed, 31))
                spectra.append({"config": config, "seed": trained.cell.seed, "control": control, "kl": kl,
                                "reconstruction": error, "next_over_last": float(s[count] / s[count - 1]),
                                "singular_values": [float(x) for x in s]})  # fmt: skip
    after, before = pick(rows, control=False), pick(rows, control=True)
    one, many = (pick(after, config=name) for name in (ONE_PAIR, MANY_PAIRS))
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=(
            f"One pair: matched |cos| at least {least(r['matched'] for r in one):.3f} in {len(one) // 2} seeds (before "
            f"training {mean(r['matched'] for r in pick(before, config=ONE_PAIR)):.2f}). Twenty pairs: mean "
            f"{mean(r['matched'] for r in many):.3f}, least {least(r['matched'] for r in many):.3f}; a random "
            "direction "
            f"finds {many[0]['best_random']:.2f} at best."
        ),
        tables={"alignment": rows, "spectra": spectra},
        claims=_claims(after, before, spectra),
        arrays=arrays,
        preset=settings.preset,
        seed=settings.seed,
        provenance=provenance(figure=settings.figure, preset=settings.preset, work=vars(work)),
    )


def _claims(after: list[Row], before: list[Row], spectra: list[Row]) -> list[Claim]:
    one, many = (pick(after, config=name) for name in (ONE_PAIR, MANY_PAIRS))
    claims = []
    for name, rows in ((ONE_PAIR, one), (MANY_PAIRS, many)):
        control = mean(r["matched"] for r in pick(before, config=name))
        claims.append(
            Claim(
                f"{name}: features align with their singular vectors (mean matched |cos|; control: untrained)",
                "aligned",
                mean(r["matched"] for r in rows),
                control,
                "ours >= 0.98",
            )
        )
        claims.append(Claim(f"{name}: every one of them does (least matched |cos|; control: what random directions "
                            "find "
                            "at best)", "aligned", least(r["matched"] for r in rows), rows[0]["best_random"],
                            "ours >= 0.95 and ours > control"))  # fmt: skip
    ratios = {control: max(r["next_over_last"] for r in pick(spectra, config=ONE_PAIR, control=control))
              for control in (False, True)}  # fmt: skip
    claims.append(Claim("one pair: a single large singular value (second over first, worst seed; control: untrained)",
                        "single", ratios[False], ratios[True], "ours < 0.05"))  # fmt: skip
    claims.append(Claim(
        "20 pairs: singular values are the target logits (mean relative difference; control: untrained)",
        "reflect the target logits", _value_error(many), _value_error(pick(before, config=MANY_PAIRS)),
        "ours < 0.25"))  # fmt: skip
    return claims


def _value_error(rows: list[Row]) -> float:
    """Singular value times the pair's norms against the target logit: what the head adds to it at full strength."""
    found = []
    for query in pick(rows, side="query"):
        key = next(r for r in pick(rows, side="key", seed=query["seed"]) if r["pair"] == query["pair"])
        logit = query["singular_value"] * query["feature_norm"] * key["feature_norm"]
        found.append(abs(logit - query["target_logit"]) / query["target_logit"])
    return mean(found)
