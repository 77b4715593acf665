"""Figures 2 and 11: which singular vector points along which feature, for 1 and 20 pairs.

Figure 11 shows all features and all vectors of the same toys: what the paper says of it stands with
figure 2.

Besides the matched cosines: whether singular values are the target logits (their largest relative
difference), the best cosine that a random direction finds, and the same numbers before training.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from torch import Tensor

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope_papers.figures import INK, ORIGINAL, REST, TARGET, new_figure
from qkscope_papers.franco2026.cells import (
    MANY,
    MANY_PAIRS,
    ONE,
    ONE_PAIR,
    WORK,
    Cells,
    toy_figure,
    toys_of,
    train,
)
from qkscope_papers.franco2026.toy.alignment import cosines
from qkscope_papers.franco2026.toy.measure import before_and_after, divergence_and_error
from qkscope_papers.franco2026.toy.trained import ToyRun
from qkscope_papers.registry import Settings
from qkscope_papers.tables import (
    Files,
    Row,
    column,
    distinct,
    files_of,
    heat_map,
    mean,
    mean_of,
    over_runs,
    over_seeds,
    pick,
)

_TOYS = toys_of(lambda preset: {ONE_PAIR: ONE, MANY_PAIRS: MANY})


@toy_figure("fig2", "Features and singular vectors: one pair, twenty", _TOYS, decides=True)
@toy_figure("fig11", "All features and all singular vectors", _TOYS, decides=False)
def run(settings: Settings, cells: Cells, decides: bool) -> Result:
    """Alignment of both configurations, and all cosines of the first seed as arrays."""
    toys = train(cells, settings)
    rows = before_and_after(toys)
    arrays: dict[str, Tensor] = {}
    spectra: list[Row] = []
    for config, found in toys.items():
        toy = found[0].toy
        basis = toy.basis()
        arrays[f"query/{config}"] = cosines(toy.W.double(), basis.u).float()
        arrays[f"key/{config}"] = cosines(toy.W.double(), basis.v).float()
        for trained in found:
            spectra.append(_spectrum_row(config, trained, -1, settings.seed))
            spectra.append(_spectrum_row(config, trained, 0, settings.seed))
    after = pick(rows, control=False)
    before = pick(rows, control=True)
    one = pick(after, config=ONE_PAIR)
    many = pick(after, config=MANY_PAIRS)
    answer = (
        f"One pair: matched |cos| at least {min(column(one, 'matched')):.3f} in "
        f"{len(one) // 2} seeds (before training "
        f"{mean_of(pick(before, config=ONE_PAIR), 'matched'):.2f}). Twenty pairs: mean "
        f"{mean_of(many, 'matched'):.3f}, least {min(column(many, 'matched')):.3f}; a random "
        f"direction finds {many[0]['best_random']:.2f} at best."
    )
    claims = _claims(after, before, spectra) if decides else []
    tables = {"alignment": rows, "spectra": spectra}
    about = {"work": vars(WORK[settings.preset])}
    return settings.result(answer, tables, claims, arrays, about=about)


def _spectrum_row(config: str, trained: ToyRun, check: int, seed: int) -> Row:
    """Singular values and losses at the last checkpoint, or, as the control, before training."""
    toy = trained.at(check)
    s = toy.basis().s
    count = len(trained.cell.task.pairs)
    kl, error = divergence_and_error(toy, 4096, derived_seed(seed, 31))
    return {
        "config": config,
        "seed": trained.cell.seed,
        "control": check == 0,
        "kl": kl,
        "reconstruction": error,
        "next_over_last": float(s[count] / s[count - 1]),
        "singular_values": [float(x) for x in s],
    }


def _claims(after: list[Row], before: list[Row], spectra: list[Row]) -> list[Claim]:
    one = pick(after, config=ONE_PAIR)
    many = pick(after, config=MANY_PAIRS)
    trained = pick(spectra, config=ONE_PAIR, control=False)
    untrained = pick(spectra, config=ONE_PAIR, control=True)
    least_of = "least matched |cos|; control: what random directions find at best"
    worst = over_seeds(one, lambda own: min(column(own, "matched")))
    second = over_runs(column(trained, "next_over_last"))
    off = over_runs(_value_errors(many))
    one_aligned = Claim(
        f"one pair: both features align with their singular vectors ({least_of}, mean over seeds)",
        paper="Sec. 4, Fig. 2(a): aligned",
        **worst.measured,
        control=one[0]["best_random"],
        rule="ours >= 0.95 and ours > control",
    )
    one_value = Claim(
        "one pair: a single large singular value (second over first, mean over seeds; "
        "control: untrained)",
        paper="Sec. 4, Fig. 2(a): only a single large singular value",
        **second.measured,
        control=mean_of(untrained, "next_over_last"),
        rule="ours < 0.05",
    )
    many_aligned = Claim(
        f"20 pairs: all features align with singular vectors ({least_of})",
        paper="Sec. 4, Fig. 2(b), Fig. 11: all features align",
        ours=min(column(many, "matched")),
        control=many[0]["best_random"],
        rule="ours >= 0.95 and ours > control",
    )
    many_values = Claim(
        "20 pairs: singular values are the target logits (σ‖f_q‖‖f_k‖, mean relative "
        "difference; control: untrained)",
        paper="Sec. 4, Fig. 2(b): reflect the values of the target logits",
        **off.measured,
        control=mean(_value_errors(pick(before, config=MANY_PAIRS))),
        rule="ours < 0.25",
    )
    return [one_aligned, one_value, many_aligned, many_values]


def _value_errors(rows: list[Row]) -> list[float]:
    """Singular value times a pair's norms (what the head adds at full strength) against its target
    logit, by pair.
    """
    found = []
    for query in pick(rows, side="query"):
        key = pick(rows, side="key", seed=query["seed"], pair=query["pair"])[0]
        logit = query["singular_value"] * query["feature_norm"] * key["feature_norm"]
        found.append(abs(logit - query["target_logit"]) / query["target_logit"])
    return found


# ---------------------------------------------------------------------- the drawing

_SHOWN = 24  # singular vectors of the short figure


@run.drawing
def draw(result: Result) -> Files:
    """Features of interest and spectra; where the figure decides nothing, all features and all
    vectors.
    """
    configs = [key.split("/", 1)[1] for key in result.arrays if key.startswith("query/")]
    figure = new_figure(11.5, 4.0 * len(configs))
    axes = figure.subplots(len(configs), 3, squeeze=False)
    image = None
    for line, config in zip(axes, configs, strict=True):
        for axis, side in zip(line[:2], ("query", "key"), strict=True):
            image = _heat_map(axis, result, side, config)
        _spectrum(line[2], result, config)
    assert image is not None
    bar = figure.colorbar(image, ax=axes[:, :2].ravel().tolist(), shrink=0.5, pad=0.01)
    bar.set_label("|cos|")
    return files_of(result, figure)


def _heat_map(axis: Axes, result: Result, side: str, config: str) -> Any:
    """Cosines of one side: of the features of interest, or, without claims, of all."""
    shown = result.arrays[f"{side}/{config}"]
    features: list[int] = []
    if result.claims:
        pairs = distinct(pick(result.tables["alignment"], config=config), "pair")
        features = [int(pair.split("-")[side == "key"]) for pair in pairs]
        shown = shown[features][:, :_SHOWN]
    image = heat_map(axis, shown.numpy())
    letter = "u" if side == "query" else "v"
    axis.set(xlabel=f"singular vector {letter}_k", ylabel="feature")
    axis.set_title(f"{config}: {side} features")
    if features:
        axis.set(yticks=range(len(features)), yticklabels=[str(f) for f in features])
    return image


def _spectrum(axis: Axes, result: Result, config: str) -> None:
    """Singular values before and after training, beside the target logits."""
    spectra = pick(result.tables["spectra"], config=config)
    trained = pick(spectra, control=False)[0]["singular_values"][:_SHOWN]
    untrained = pick(spectra, control=True)[0]["singular_values"][:_SHOWN]
    rows = pick(result.tables["alignment"], config=config, side="query", control=False)
    targets = column(pick(rows, seed=rows[0]["seed"]), "target_logit")
    bars: Any = {"color": INK, "ms": 11, "mew": 1.6, "label": "target logit of the pair"}
    dots: Any = {"color": ORIGINAL, "ms": 4, "label": "singular value, trained"}
    small: Any = {"color": REST, "ms": 3, "label": "singular value, untrained"}
    axis.plot(range(len(targets)), targets, "_", **bars)
    axis.plot(range(len(trained)), trained, "o", **dots)
    axis.plot(range(len(untrained)), untrained, "o", **small)
    low = min(column(rows, "matched"))
    chance = rows[0]["best_random"]
    axis.set(xlabel="k", ylim=(-0.05 * max(targets), None))
    title = f"{config}: least matched |cos| {low:.3f}\n(best of random {chance:.2f})"
    axis.set_title(title, fontsize=9)
    axis.title.set_color(TARGET if low < 0.9 else INK)
    axis.legend(frameon=False, fontsize=8)
