"""Figure 23: more pairs of interest than the head has dimensions.

Surplus pairs, those with the lowest target logits, are said to share the last singular vector. Beside the cosines
stand the norms of their features, as a cosine hides that a feature has all but vanished; controls are the same features
before training, under the same measure.
A feature lies *on* the vector with which its |cos| is largest.
"""

from __future__ import annotations

from qkscope.papers.fleet import one_thread
from qkscope.papers.franco2026.cells import PRESETS, toys_of
from qkscope.papers.franco2026.toy.alignment import cosines
from qkscope.papers.franco2026.toy.measure import before_and_after
from qkscope.papers.franco2026.toy.superposition import by_logit
from qkscope.papers.registry import Settings
from qkscope.papers.rows import Row, mean, pick
from qkscope.result import Claim, Result, provenance


@one_thread()
def run(settings: Settings) -> Result:
    """Alignment of every number of pairs, with the surplus apart."""
    toys = toys_of(settings)
    rows = before_and_after(toys)
    for row in rows:
        task = toys[row["config"]][0].cell.task
        order = [f"{pair[0]}-{pair[1]}" for pair in by_logit(task.pairs)]
        row["surplus"] = order.index(row["pair"]) >= task.d_head
        row["on_last"] = row["best_index"] == task.d_head - 1
    summary = [_summary(config, rows, found[0].cell.task.d_head) for config, found in toys.items()]
    arrays = {}
    for config, found in toys.items():
        toy, basis = found[0].toy, found[0].toy.basis()
        pairs = by_logit(toy.task.pairs)
        for side, vectors in ((0, basis.u), (1, basis.v)):
            wanted = toy.W.double()[:, [pair[side] for pair in pairs]]
            arrays[f"{('query', 'key')[side]}/{config}"] = cosines(wanted, vectors).float()
    surplus = [row for row in pick(rows, control=False) if row["surplus"]]
    fitting = [row for row in pick(rows, control=False) if not row["surplus"]]
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=(
            f"{sum(r['on_last'] for r in surplus)} of {len(surplus)} surplus features lie on the last singular vector "
            f"(mean |cos| {mean(r['matched'] for r in surplus):.2f}); their norms are {_span(surplus)}, those of the "
            f"others {_span(fitting)}."
        ),
        tables={"alignment": rows, "capacity": summary},
        claims=_claims(rows, surplus, fitting),
        arrays=arrays,
        preset=settings.preset,
        seed=settings.seed,
        provenance=provenance(figure=settings.figure, preset=settings.preset, work=vars(PRESETS[settings.preset])),
    )


def _summary(config: str, rows: list[Row], d_head: int) -> Row:
    own = pick(rows, config=config, control=False)
    surplus, fitting = ([r for r in own if r["surplus"] is flag] for flag in (True, False))
    return {
        "config": config, "d_head": d_head, "pairs": len(own) // 2, "surplus": len(surplus) // 2,
        "fitting_matched": mean(r["matched"] for r in fitting),
        "surplus_on_last": mean(float(r["on_last"]) for r in surplus),
        "surplus_cosine": mean(r["matched"] for r in surplus),
        "fitting_norm": mean(r["feature_norm"] for r in fitting),
        "surplus_norm": mean(r["feature_norm"] for r in surplus),
        "last_singular_value": min(r["singular_value"] for r in own),
    }  # fmt: skip


def _claims(rows: list[Row], surplus: list[Row], fitting: list[Row]) -> list[Claim]:
    before, before_fitting = ([r for r in pick(rows, control=True) if r["surplus"] is flag] for flag in (True, False))
    return [
        Claim("surplus pairs all map to the last singular vector (share of their features; control: untrained)", "all",
              mean(float(r["on_last"]) for r in surplus), mean(float(r["on_last"]) for r in before),
              "ours >= 0.9"),
        Claim("pairs within capacity keep a vector of their own (mean matched |cos|; control: untrained)",
              "one to one", mean(r["matched"] for r in fitting), mean(r["matched"] for r in before_fitting),
              "ours >= 0.95"),
        Claim("surplus features are still represented (mean norm; control: features within capacity)", "implied",
              mean(r["feature_norm"] for r in surplus), mean(r["feature_norm"] for r in fitting),
              "ours > 0.5 * control"),
    ]  # fmt: skip


def _span(rows: list[Row]) -> str:
    values = sorted(row["feature_norm"] for row in rows)
    return f"{values[0]:.2f} to {values[-1]:.2f}" if values else "none"
