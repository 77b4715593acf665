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
from torch import Tensor

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
from qkscope_papers.franco2026.toy.trained import ToyRun
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
    """Numbers of pairs for a head of width 5, and for one of width 10 in a larger space."""
    few = preset == "smoke"
    found = {}
    for m in range(5, 11, 5 if few else 1):
        found[f"d_head=5 m={m}"] = Superposition(d_head=5, pairs=linear_pairs(m, 1.0 + m))
    for m in () if few else range(10, 21, 1 if preset == "paper" else 5):
        pairs = linear_pairs(m, 1.0 + m)
        found[f"d_head=10 m={m}"] = Superposition(n=40, d=20, d_head=10, pairs=pairs)
    return found


@toy_figure("fig23", "More pairs than the head has dimensions", toys_of(_by_pairs, crowded=True))
def run(settings: Settings, cells: Cells) -> Result:
    """Alignment of every number of pairs, with the surplus apart."""
    toys = train(cells, settings)
    rows = before_and_after(toys)
    for row in rows:
        row |= _places(row, toys[row["config"]][0].cell.task)
    summary = []
    arrays: dict[str, Tensor] = {}
    for config, (trained, *_) in toys.items():
        summary.append(_capacity_row(config, trained, rows, settings))
        arrays |= _cosines(config, trained.toy)
    after = pick(rows, control=False)
    surplus = [row for row in after if row["surplus"]]
    fitting = pick(after, surplus=False)
    answer = (
        f"{sum(column(surplus, 'on_last'))} of {len(surplus)} surplus features lie on the "
        f"last singular vector (mean |cos| {mean_of(surplus, 'matched'):.2f}); their norms "
        f"are {_span(surplus)}, those of the others {_span(fitting)}."
    )
    tables = {"alignment": rows, "capacity": summary}
    about = {"work": vars(WORK[settings.preset])}
    return settings.result(answer, tables, _claims(rows, summary), arrays, about=about)


def _places(row: Row, task: Superposition) -> Row:
    """Whether a pair is beyond the head's width, and on which vector its feature lies."""
    order = [f"{query}-{key}" for query, key, _ in by_logit(task.pairs)]
    rank = order.index(row["pair"])
    return {
        "surplus": rank >= task.d_head,
        "on_last": row["best_index"] == task.d_head - 1,
        "on_own": row["best_index"] == rank,
    }


def _capacity_row(config: str, trained: ToyRun, rows: list[Row], settings: Settings) -> Row:
    """One number of pairs: where features lie, how confused, how sparse their terms are."""
    toy = trained.toy
    width = trained.cell.task.d_head
    fitting = range(width)
    surplus = range(width, len(toy.task.pairs))
    contexts = WORK[settings.preset].contexts // 4
    seed = derived_seed(settings.seed, 38)
    row = _summary(config, rows, width)
    row["fitting_confusion"] = _confusion(toy, fitting)
    row["surplus_confusion"] = _confusion(toy, surplus)
    row["fitting_sparsity"] = _sparsity(toy, fitting, contexts, seed)
    row["surplus_sparsity"] = _sparsity(toy, surplus, contexts, seed)
    row["untrained_sparsity"] = _sparsity(trained.at(0), fitting, contexts, seed)
    return row


def _cosines(config: str, toy: Toy) -> dict[str, Tensor]:
    """``|cos|`` of the features of every pair with the singular vectors of their side."""
    basis = toy.basis()
    W = toy.W.double()
    pairs = by_logit(toy.task.pairs)
    queries = W[:, [query for query, _, _ in pairs]]
    keys = W[:, [key for _, key, _ in pairs]]
    return {
        f"query/{config}": cosines(queries, basis.u).float(),
        f"key/{config}": cosines(keys, basis.v).float(),
    }


def _summary(config: str, rows: list[Row], d_head: int, control: bool = False) -> Row:
    """Where features lie and how long they are, within the head's capacity and beyond it."""
    own = pick(rows, config=config, control=control)
    surplus = pick(own, surplus=True)
    fitting = pick(own, surplus=False)
    return {
        "config": config,
        "d_head": d_head,
        "pairs": len(own) // 2,
        "surplus": len(surplus) // 2,
        "fitting_on_own": mean_of(fitting, "on_own"),
        "fitting_matched": mean_of(fitting, "matched"),
        "surplus_on_last": mean_of(surplus, "on_last"),
        "surplus_cosine": mean_of(surplus, "matched"),
        "fitting_norm": mean_of(fitting, "feature_norm"),
        "surplus_norm": mean_of(surplus, "feature_norm"),
        "last_singular_value": min(column(own, "singular_value")),
    }


def _confusion(toy: Toy, ranked: Sequence[int]) -> float:
    """How strongly queries of some pairs meet the keys of the others, relative to their own; mean
    over the queries.
    """
    if len(ranked) <= 1:
        return math.nan
    pairs = [by_logit(toy.task.pairs)[i] for i in ranked]
    W = toy.W.double()
    query = toy.W_Q.double() @ W[:, [pair[0] for pair in pairs]]
    key = toy.W_K.double() @ W[:, [pair[1] for pair in pairs]]
    logits = (query.mT @ key).abs()
    own = logits.diagonal()
    others = (logits.sum(1) - own) / (len(ranked) - 1)
    return float((others / own).mean())


def _sparsity(toy: Toy, ranked: Sequence[int], contexts: int, seed: int) -> float:
    """Sparsity of relative attention where one of these pairs is present, mean over pairs."""
    pairs = by_logit(toy.task.pairs)
    found = []
    for i in ranked:
        place = toy.task.pairs.index(pairs[i])
        drawn = draw_token_pairs(toy.task, "one", contexts, seed, only=place)
        found.append(float(sparsity(coordinates(toy, drawn).terms).nanmean()))
    return mean(found)


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
    for axis in axes.ravel():
        axis.set_axis_off()
    for place, config in enumerate(configs):
        line, i = divmod(place, columns)
        above = axes[2 * line][i]
        below = axes[2 * line + 1][i]
        above.set_axis_on()
        below.set_axis_on()
        matrix = result.arrays[f"query/{config}"].numpy()
        width = matrix.shape[1]
        image = heat_map(above, matrix)
        above.axhline(width - 0.5, color=TARGET, lw=1)
        above.set_title(config, fontsize=8.5)
        above.set(xlabel="u_k", ylabel="pair, by logit" if i == 0 else "")
        for side in (above.xaxis, above.yaxis, below.xaxis):
            side.set_major_locator(MaxNLocator(4, integer=True))
        _norms(below, result, config, width, i == 0)
    assert image is not None
    bar = figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.4, pad=0.01)
    bar.set_label("|cos| of query features and u_k")
    return files_of(result, figure)


def _norms(axis: Any, result: Result, config: str, width: int, first: bool) -> None:
    """Feature norms of one number of pairs, on one scale for all panels."""
    after = pick(result.tables["alignment"], control=False)
    top = max(column(after, "feature_norm"))
    norms = column(pick(after, config=config, side="query"), "feature_norm")
    colours = [TARGET if i >= width else ORIGINAL for i in range(len(norms))]
    axis.bar(range(len(norms)), norms, color=colours)
    axis.axhline(1, color=REST, lw=0.8, ls=":")
    axis.set(
        xlabel="pair (orange: surplus)",
        ylabel="feature norm" if first else "",
        ylim=(0, 1.05 * top),
    )
