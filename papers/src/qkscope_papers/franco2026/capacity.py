"""Figure 23: more pairs of interest than the head has dimensions.

Surplus pairs, those with the lowest target logits, are said to share the last singular vector.
Beside the cosines stand the norms of their features, as a cosine hides that a feature has all but
vanished; controls are the same features before training, under the same measure.
A feature lies *on* the vector with which its |cos| is largest. A query is *confused* by the keys of
other pairs of its kind (surplus, or within capacity) by ``Σ_{j≠i} |f_qi Ω f_kj| / ((m − 1) |f_qi Ω
f_ki|)``. Toys are the runs: one for each number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope.sums.singular import sparsity
from qkscope_papers.figures import ORIGINAL, REST, TARGET, new_figure
from qkscope_papers.franco2026.cells import WORK, Cells, toy_figure, toys_of, train
from qkscope_papers.franco2026.token_pairs import coordinates, draw_token_pairs
from qkscope_papers.franco2026.toy.alignment import cosines
from qkscope_papers.franco2026.toy.measure import before_and_after
from qkscope_papers.franco2026.toy.superposition import Superposition, Toy, by_logit, linear_pairs
from qkscope_papers.registry import Settings
from qkscope_papers.tables import (
    Estimate,
    Files,
    Row,
    column,
    files_of,
    heat_map,
    mean,
    mean_of,
    over_runs,
    pick,
)


def _by_pairs(preset: str) -> dict[str, Superposition]:
    small, large = (
        (range(5, 11, 5), range(0)) if preset == "smoke" else (range(5, 11), range(10, 21))
    )
    found = {
        f"d_head=5 m={m}": Superposition(d_head=5, pairs=linear_pairs(m, 1.0 + m)) for m in small
    }
    for m in large:
        if preset == "paper" or m % 5 == 0:
            wide = Superposition(n=40, d=20, d_head=10, pairs=linear_pairs(m, 1.0 + m))
            found[f"d_head=10 m={m}"] = wide
    return found


@toy_figure("fig23", "More pairs than the head has dimensions", toys_of(_by_pairs, crowded=True))
def run(settings: Settings, cells: Cells) -> Result:
    """Alignment of every number of pairs, with the surplus apart."""
    toys = train(cells, settings)
    rows = before_and_after(toys)
    for row in rows:
        task = toys[row["config"]][0].cell.task
        order = [f"{pair[0]}-{pair[1]}" for pair in by_logit(task.pairs)]
        row["surplus"] = order.index(row["pair"]) >= task.d_head
        row["on_last"] = row["best_index"] == task.d_head - 1
        row["on_own"] = row["best_index"] == order.index(row["pair"])
    summary = []
    for config, (trained, *_) in toys.items():
        toy = trained.toy
        width = trained.cell.task.d_head
        seed = derived_seed(settings.seed, 38)
        groups = {"fitting": range(width), "surplus": range(width, len(toy.task.pairs))}
        row = _summary(config, rows, width) | {
            f"{name}_confusion": _confusion(toy, own) for name, own in groups.items()
        }
        contexts = WORK[settings.preset].contexts // 4
        for name, when, own in (
            *((name, -1, own) for name, own in groups.items()),
            ("untrained", 0, groups["fitting"]),
        ):
            row[f"{name}_sparsity"] = _sparsity(trained.at(when), own, contexts, seed)
        summary.append(row)
    arrays = {}
    for config, found in toys.items():
        toy = found[0].toy
        basis = found[0].toy.basis()
        pairs = by_logit(toy.task.pairs)
        for side, vectors in ((0, basis.u), (1, basis.v)):
            wanted = toy.W.double()[:, [pair[side] for pair in pairs]]
            arrays[f"{('query', 'key')[side]}/{config}"] = cosines(wanted, vectors).float()
    surplus = [row for row in pick(rows, control=False) if row["surplus"]]
    fitting = pick(rows, control=False, surplus=False)
    answer = (
        f"{sum(column(surplus, 'on_last'))} of {len(surplus)} surplus features lie on the "
        f"last singular vector (mean |cos| {mean_of(surplus, 'matched'):.2f}); their norms "
        f"are {_span(surplus)}, those of the others {_span(fitting)}."
    )
    tables = {"alignment": rows, "capacity": summary}
    about = {"work": vars(WORK[settings.preset])}
    return settings.result(answer, tables, _claims(rows, summary), arrays, about=about)


def _summary(config: str, rows: list[Row], d_head: int, control: bool = False) -> Row:
    own = pick(rows, config=config, control=control)
    surplus = pick(own, surplus=True)
    fitting = pick(own, surplus=False)
    return {
        "config": config,
        "d_head": d_head,
        "pairs": len(own) // 2,
        "surplus": len(surplus) // 2,
        "fitting_on_own": mean(float(r["on_own"]) for r in fitting),
        "fitting_matched": mean_of(fitting, "matched"),
        "surplus_on_last": mean(float(r["on_last"]) for r in surplus),
        "surplus_cosine": mean_of(surplus, "matched"),
        "fitting_norm": mean_of(fitting, "feature_norm"),
        "surplus_norm": mean_of(surplus, "feature_norm"),
        "last_singular_value": min(column(own, "singular_value")),
    }


def _confusion(toy: Toy, ranked: Sequence[int]) -> float:
    """How strongly queries of some pairs meet the keys of the others, relative to their own; mean
    over the queries.
    """
    pairs = by_logit(toy.task.pairs)
    query = toy.W.double()[:, [pairs[i][0] for i in ranked]]
    key = toy.W.double()[:, [pairs[i][1] for i in ranked]]
    logits = ((toy.W_Q.double() @ query).mT @ (toy.W_K.double() @ key)).abs()
    others = (logits.sum(1) - logits.diagonal()) / max(len(ranked) - 1, 1)
    return float((others / logits.diagonal()).mean()) if len(ranked) > 1 else math.nan


def _sparsity(toy: Toy, ranked: Sequence[int], contexts: int, seed: int) -> float:
    """Sparsity of relative attention where one of these pairs is present, mean over pairs."""
    pairs = by_logit(toy.task.pairs)
    places = [toy.task.pairs.index(pairs[i]) for i in ranked]
    drawn = (draw_token_pairs(toy.task, "one", contexts, seed, place) for place in places)
    return mean(float(sparsity(coordinates(toy, own).terms).nanmean()) for own in drawn)


def _claims(rows: list[Row], summary: list[Row]) -> list[Claim]:
    crowded = [row for row in summary if row["surplus"]]
    before = [_summary(row["config"], rows, row["d_head"], control=True) for row in crowded]

    def over(name: str, widths: Sequence[int] = (5, 10)) -> Estimate:
        return over_runs(row[name] for row in crowded if row["d_head"] in widths)

    last = over("surplus_on_last")
    kept = over("fitting_on_own")
    norms = over("surplus_norm")
    wide = over("surplus_on_last", (10,))
    confused = over("surplus_confusion")
    sparse = over("fitting_sparsity")
    less = over_runs(row["surplus_sparsity"] - row["fitting_sparsity"] for row in crowded)
    on_last = Claim(
        "surplus pairs map to the last singular vector (share of their features, mean over "
        "toys; control: untrained)",
        paper="App. E, Fig. 23: all of the features having the lowest target logits",
        **last.measured,
        control=mean_of(before, "surplus_on_last"),
        rule="ours >= 0.9",
    )
    on_last_wide = Claim(
        "... in heads of width 10 too",
        paper="App. E, Fig. 23(b): persists when model capacities are higher",
        **wide.measured,
        control=last.mean,
        rule="ours >= 0.9",
    )
    on_own = Claim(
        "pairs within capacity keep a vector of their own (share of features that lie on "
        "theirs, mean over toys; control: untrained)",
        paper="App. E, Fig. 23: high-logit features one-to-one",
        **kept.measured,
        control=mean_of(before, "fitting_on_own"),
        rule="ours >= 0.9",
        changed=(
            "It was the mean matched |cos| >= 0.95, which one toy more or less decides; the "
            "share is on the scale of the claim above."
        ),
    )
    represented = Claim(
        "surplus features are still represented (norm, mean over toys; control: features "
        "within capacity)",
        paper=(
            "implied by Sec. 4: some features move into superposition within the head's "
            "representation space"
        ),
        **norms.measured,
        control=over("fitting_norm").mean,
        rule="ours > 0.5 * control",
        why=(
            "They lie on the vector by their angle, which has no length: what is left of them "
            "is a fraction of the others' norm, so they are given up rather than superposed."
        ),
    )
    confusable = Claim(
        "features of different surplus pairs are confused (a foreign key's logit over its "
        "own key's, mean over toys; control: pairs within capacity)",
        paper="App. E, Fig. 23: can mistakenly associate features from different pairs",
        **confused.measured,
        control=over("fitting_confusion").mean,
        rule="ours > 0.5 and ours > 2 * control",
    )
    decomposed = Claim(
        "a pair within capacity is decomposed sparsely still (sparsity, mean over toys; "
        "control: untrained)",
        paper="App. E, after Fig. 23: sparse decomposition will still arise",
        **sparse.measured,
        control=mean_of(crowded, "untrained_sparsity"),
        rule="ours < 0.75 * control",
    )
    less_sparse = Claim(
        "... a surplus pair less so (sparsity, difference to pairs within capacity; "
        "control: theirs)",
        paper="App. E, after Fig. 23: although less robustly",
        **less.measured,
        control=sparse.mean,
        rule="ours > 0",
    )
    return [on_last, on_last_wide, on_own, represented, confusable, decomposed, less_sparse]


def _span(rows: list[Row]) -> str:
    values = sorted(column(rows, "feature_norm"))
    return f"{values[0]:.2f} to {values[-1]:.2f}" if values else "none"


# ---------------------------------------------------------------------- the drawing


@run.drawing
def draw(result: Result) -> Files:
    """Heat maps of the query side by number of pairs; below them feature norms by rank of the
    target logit.
    """
    configs = [key.split("/", 1)[1] for key in result.arrays if key.startswith("query/")]
    columns = min(len(configs), 6)
    lines = -(-len(configs) // columns)
    figure = new_figure(2.1 * columns + 0.8, (2.9 + 1.7) * lines)
    axes = figure.subplots(2 * lines, columns, squeeze=False, height_ratios=[2.9, 1.7] * lines)
    image = None
    for place in range(lines * columns):
        line, column = divmod(place, columns)
        above = axes[2 * line][column]
        below = axes[2 * line + 1][column]
        if place >= len(configs):
            above.set_axis_off()
            below.set_axis_off()
            continue
        config = configs[place]
        image = heat_map(above, result.arrays[f"query/{config}"].numpy())
        width = result.arrays[f"query/{config}"].shape[1]
        above.axhline(width - 0.5, color=TARGET, lw=1)
        above.set_title(config, fontsize=8.5)
        above.set(xlabel="u_k", ylabel="pair, by logit" if column == 0 else "")
        for side in (above.xaxis, above.yaxis, below.xaxis):
            side.set_major_locator(MaxNLocator(4, integer=True))
        _norms(below, result, config, width, column == 0)
    assert image is not None
    figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.4, pad=0.01).set_label(
        "|cos| of query features and u_k"
    )
    return files_of(result, figure)


def _norms(axis: Any, result: Result, config: str, width: int, first: bool) -> None:
    rows = pick(result.tables["alignment"], config=config, side="query", control=False)
    top = max(
        r["feature_norm"] for r in result.tables["alignment"] if not r["control"]
    )  # one scale for all panels
    colours = [TARGET if i >= width else ORIGINAL for i in range(len(rows))]
    axis.bar(range(len(rows)), [r["feature_norm"] for r in rows], color=colours)
    axis.axhline(1, color=REST, lw=0.8, ls=":")
    axis.set(
        xlabel="pair (orange: surplus)",
        ylabel="feature norm" if first else "",
        ylim=(0, 1.05 * top),
    )
