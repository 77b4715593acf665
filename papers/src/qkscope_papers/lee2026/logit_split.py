"""Figure 10: one prompt's attention logits, as order + lexical + what neither explains.

One prompt is an anecdote, so the same split is averaged over held-out prompts, in both orders and
order-free, beside random subspaces of the same ranks. A share is of the variance of the logits over
the boxes of a prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from torch import Tensor

from qkscope.heads import Head
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope.sums.bases import random_bases
from qkscope.sums.feature_split import RESIDUAL, Split, attribute_logits
from qkscope.verbs.attribute import attribute
from qkscope_papers.figures import INK, ORIGINAL, colours_of, new_figure
from qkscope_papers.lee2026.binding_views import FEATURES, binding_points
from qkscope_papers.lee2026.language import ESTIMATORS, FigureSession, session_of
from qkscope_papers.lee2026.points import Points, share_of
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import Files, Row, column, files_of, model_name, pick

_DRAWS = 20


@figure("lee2026", "fig10", "One prompt's attention logits, split")
def run(settings: Settings) -> Result:
    """The first held-out prompt, and shares over all of them."""
    session = session_of(settings)
    found = session.found("binding")
    fit = session.fit("binding")
    head = found.heads[0]
    points = binding_points(session)
    example = points.units[0][0]
    parts = attribute(session.scope, example, head, fit, chat=session.chat)
    cluster = _answer_words(session, points)
    shares: list[Row] = []
    for estimator in ESTIMATORS:
        own = session.binding_fit(estimator)
        bases = {name: own[name, head].basis("query").cpu() for name in FEATURES}
        for row in _shares(points, head, bases, cluster, session.seed):
            shares.append({"estimator": estimator, **row})
    theirs, ours = (_by_split(shares, estimator) for estimator in ESTIMATORS)
    tokens = [dict(row) for row in parts.tables["tokens"]]
    tables = {
        "tokens": tokens,
        "summary": [dict(row) for row in parts.tables["summary"]],
        "shares": shares,
        "overlap": [dict(row) for row in parts.tables["overlap"]],
        "prompt": [{"head": str(head), "text": example.text, "keys": len(example.keys)}],
    }
    claims = _claims(theirs, ours, _sum_error(tokens))
    answer = f"{parts.answer} {_shares_said(theirs, ours, len(points.units))}"
    about = session.about(form=session.form("binding"), head=str(head))
    return settings.result(answer, tables, claims, model=session.scope.name, about=about)


def _answer_words(session: FigureSession, points: Points) -> Int[Tensor, " n"]:
    """Which word every prompt asks about, as a number."""
    words = points.key_words(session.binding_task().asked["words"])
    asked = [row[i] for row, i in zip(words, points.answers().tolist(), strict=True)]
    known = sorted(set(asked))
    return torch.tensor([known.index(word) for word in asked])


def _by_split(shares: list[Row], estimator: str) -> dict[str, Row]:
    return {row["split"]: row for row in pick(shares, estimator=estimator)}


def _sum_error(tokens: list[Row]) -> float:
    """The largest difference of a logit to the sum of its parts."""
    errors = []
    for row in tokens:
        errors.append(abs(row["logit"] - sum(row[name] for name in (*FEATURES, RESIDUAL))))
    return max(errors)


def _shares_said(theirs: dict[str, Row], ours: dict[str, Row], prompts: int) -> str:
    first = ours["order first"]
    last = ours["lexical first"]
    as_paper = theirs["order first"]
    return (
        f"Over {prompts} held-out prompts, of the variance of the "
        f"boxes' logits order carries {first['order']:.0%}, lexical "
        f"{first['lexical']:.0%}, and {first[RESIDUAL]:.0%} is "
        f"unexplained (lexical first: order {last['order']:.0%}, lexical "
        f"{last['lexical']:.0%}; random subspaces of these ranks leave "
        f"{ours['random'][RESIDUAL]:.0%}); as the paper estimates them, order "
        f"{as_paper['order']:.0%} and lexical {as_paper['lexical']:.0%}."
    )


def _shares(
    points: Points, head: Head, bases: dict[str, Tensor], cluster: Int[Tensor, " n"], seed: int
) -> list[Row]:
    """Mean share of each part, for each way of splitting; and of differences that claims are about,
    with intervals.
    """
    q, k = points.at(head)
    scale = float(points.scale[points.heads.index(head)])

    def split(own: dict[str, Tensor], how: Split = "sequential") -> dict[str, Tensor]:
        found = attribute_logits(q, k, scale, own, how)
        return {name: _share(found.parts[name], found.logits) for name in (*FEATURES, RESIDUAL)}

    first = split(bases)
    turned = split(dict(reversed(bases.items())))
    drawn = [_means(split(_random_like(bases, seed, draw))) for draw in range(_DRAWS)]
    random = {name: sum(column(drawn, name)) / _DRAWS for name in drawn[0]}
    rows: list[Row] = [
        {"split": "order first", **_means(first), **_gaps(first, turned, bases, cluster)},
        {"split": "lexical first", **_means(turned)},
        {"split": "average", **_means(split(bases, "average"))},
        {"split": "random", **random},
    ]
    sizes = {f"{name}_rank": basis.shape[1] for name, basis in bases.items()}
    return [{**row, "n": len(q), **sizes} for row in rows]


def _means(parts: dict[str, Tensor]) -> Row:
    return {name: float(part.mean()) for name, part in parts.items()}


def _gaps(
    first: dict[str, Tensor],
    turned: dict[str, Tensor],
    bases: dict[str, Tensor],
    cluster: Int[Tensor, " n"],
) -> Row:
    """Differences of shares with their intervals: of lexical and order, whole and per dimension; of
    order by being first; and what is left.
    """
    lexical = first["lexical"]
    order = first["order"]
    per_lexical = lexical / bases["lexical"].shape[1]
    per_order = order / bases["order"].shape[1]
    told: Row = {}
    for name, values in (
        ("more", lexical - order),
        ("taken", order - turned["order"]),
        ("left", first[RESIDUAL]),
        ("denser", per_lexical - per_order),
    ):
        mean, low, high = share_of(values, cluster)
        told |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return told


def _random_like(bases: dict[str, Tensor], seed: int, draw: int) -> dict[str, Tensor]:
    """Random subspaces of the same sizes."""
    found = {}
    for i, (name, basis) in enumerate(bases.items()):
        own_seed = derived_seed(seed, "random", draw, i)
        width, size = basis.shape
        found[name] = random_bases(width, size, 1, own_seed)[0].to(basis)
    return found


def _share(part: Float[Tensor, "n k"], logits: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Covariance of a part with the logits over their variance, both within a prompt; the parts'
    shares sum to 1.

    It is a ratio of means, linearised row by row, so that an interval of its mean knows that the
    variance is measured.
    """
    part = part - part.mean(dim=1, keepdim=True)
    logits = logits - logits.mean(dim=1, keepdim=True)
    held = (part * logits).sum(dim=1)
    all_of = logits.square().sum(dim=1)
    mean = all_of.mean().clamp_min(torch.finfo(logits.dtype).tiny)
    share = held.mean() / mean
    return share + (held - share * all_of) / mean


def _claims(theirs: dict[str, Row], ours: dict[str, Row], error: float) -> list[Claim]:
    first = theirs["order first"]
    per_rank = [first[name] / first[f"{name}_rank"] for name in ("lexical", "order")]
    small: dict[str, Any] = {
        "reason": "small model",
        "why": "It is one head of a small model; the paper shows one of an 8B model.",
    }
    sums = Claim(
        "the parts sum to the logit (largest error over tokens)",
        paper="§5.3, Eq. 13-15: by construction",
        ours=error,
        control=None,
        rule="ours < 1e-3",
    )
    lexical_more = Claim(
        "the head relies on lexical more than on order (difference of shares, the paper's "
        "estimators)",
        paper="§5.3, Fig. 10: relies on lexical-IDs more than order-IDs",
        ours=first["more"],
        control=None,
        rule="ours > 0",
        low=first["more_low"],
        high=first["more_high"],
        **small,
    )
    unexplained = Claim(
        "some of the logits is left unexplained (share, the paper's estimators)",
        paper="§5.3, Fig. 10: residual logits that are left unexplained",
        ours=first["left"],
        control=None,
        rule="ours > 0.01",
        low=first["left_low"],
        high=first["left_high"],
        **small,
    )
    overlap = Claim(
        "what overlaps counts towards the first feature (order's share when it is first, "
        "less when it is last; the paper's estimators)",
        paper=(
            "§5.3: sensitive to the order, as the overlapping space will count towards the "
            "first feature"
        ),
        ours=first["taken"],
        control=None,
        rule="ours > 0",
        low=first["taken_low"],
        high=first["taken_high"],
        changed=(
            "was 'the order of projecting hardly matters', the opposite of what the paper says."
        ),
        **small,
    )
    per_dimension = Claim(
        "per dimension, too, lexical carries more than order (share per dimension; control: "
        "order's)",
        paper="",
        ours=per_rank[0],
        control=per_rank[1],
        rule="ours > control",
        low=per_rank[1] + first["denser_low"],
        high=per_rank[1] + first["denser_high"],
    )
    beyond_random = Claim(
        "the two features explain more than random subspaces of their ranks (share left "
        "unexplained, our estimators; control: random)",
        paper="",
        ours=ours["order first"]["left"],
        control=ours["random"][RESIDUAL],
        rule="ours < 0.5 * control",
        low=ours["order first"]["left_low"],
        high=ours["order first"]["left_high"],
    )
    return [sums, lexical_more, unexplained, overlap, per_dimension, beyond_random]


# ---------------------------------------------------------------------- the drawing

_PARTS = tuple(colours_of(["order", "lexical", RESIDUAL]).items())


@run.drawing
def draw(result: Result) -> Files:
    """Bars per token above, attention below; shares over held-out prompts at the right."""
    rows = [dict(row) for row in result.tables["tokens"]]
    # the first token is a sink whose logit dwarfs the others; the page's table has it
    rows = rows[1:] if len(rows) > 2 else rows
    width = 0.19 * len(rows)
    figure = new_figure(max(9.0, width + 3.6), 4.9)
    sizes: Any = {"width_ratios": [max(6.0, width), 2.6], "height_ratios": [3, 1]}
    axes = figure.subplots(2, 2, **sizes)
    parts = axes[0][0]
    attention = axes[1][0]
    places = range(len(rows))
    for i, (name, colour) in enumerate(_PARTS):
        shifted = [x + (i - 1) * 0.27 for x in places]
        parts.bar(shifted, column(rows, name), 0.26, color=colour, label=name)
    parts.plot(places, column(rows, "logit"), "_", color=INK, ms=7, label="logit")
    parts.axhline(0, color=INK, lw=0.6)
    parts.set(ylabel="logit", xticks=[])
    parts.legend(frameon=False, ncols=4, fontsize=8, loc="best")
    named = f"{model_name(result)} {result.tables['prompt'][0]['head']}"
    parts.set_title(f"{named}: logits of one held-out prompt, as its last token sees them")
    attention.bar(places, column(rows, "attention"), 0.7, color=ORIGINAL)
    attention.set_ylabel("attention")
    tokens = [_shown(row["token"]) for row in rows]
    attention.set_xticks(list(places), tokens, rotation=90, fontsize=6.5)
    for axis in (parts, attention):
        axis.set_xlim(-0.8, len(rows) - 0.2)
    _draw_shares(axes[0][1], result)
    axes[1][1].set_axis_off()
    return files_of(result, figure)


def _shown(token: str) -> str:
    return token.replace("\n", "⏎").strip() or "·"


def _draw_shares(axis: Axes, result: Result) -> None:
    """Each part's share, for every way of splitting; small ones without their number."""
    rows = pick(result.tables["shares"], estimator="ours")
    bottom = [0.0] * len(rows)
    for name, colour in _PARTS:
        values = column(rows, name)
        look: Any = {"color": INK if name == RESIDUAL else "white", "fontsize": 7}
        axis.bar(range(len(rows)), values, 0.7, bottom=bottom, color=colour)
        for x, (value, base) in enumerate(zip(values, bottom, strict=True)):
            if abs(value) >= 0.06:
                axis.text(x, base + value / 2, f"{value:.0%}", ha="center", va="center", **look)
        bottom = [base + value for base, value in zip(bottom, values, strict=True)]
    labels = [row["split"].replace(" ", "\n") for row in rows]
    axis.set_xticks(range(len(rows)), labels, fontsize=7.5)
    axis.set(title=f"share of the boxes' logits,\n{rows[0]['n']} prompts", yticks=[])
