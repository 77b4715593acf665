"""Categories as the released script sums them: is a rank of 1 built in?

The text defines ``ΔC = E[q kᵀ | +] − E[q kᵀ | −]``, averages over pairs. The released category
script divides the sums over items by the number of *prompts*: with a asked and b other items in a
prompt it computes ``a E⁺ − b E⁻``. Where b is larger than a, most of that is the mean,

    a E⁺ − b E⁻ = a ΔC − (b − a) E⁻,        E⁻ ≈ q̄ k̄ᵀ,

which has rank 1 in any head, and whose key direction is the mean key. Both are shown here, from the
same sums: the rank, and the cosine of each category's first key direction with the mean key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.findings.fit import Fit
from qkscope.heads import Head
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.sums.bases import energy_rank
from qkscope.texts.list_tasks import POOLED
from qkscope_papers.figures import new_figure
from qkscope_papers.lee2026.language import session_of
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import (
    Estimate,
    Files,
    Row,
    distinct,
    files_of,
    model_name,
    over_key_heads,
    pick,
)

DEFINITIONS = ("released", "text")


class CategorySums(NamedTuple):
    """ΔC of one category at one head by both definitions, and the mean key of all its items."""

    released: Float[Tensor, "d d"]
    text: Float[Tensor, "d d"]
    mean_key: Float[Tensor, " d"]


@figure("lee2026", "category_sums", "Category contrasts as the released script sums them")
def run(settings: Settings) -> Result:
    """Rank and first key direction of every category, by both definitions."""
    session = session_of(settings)
    found = session.found("filter")
    fit = session.fit("filter")
    names = [name for name in session.filter_task().contrasts if name != POOLED]
    rows: list[Row] = []
    for head in found.all:
        is_control = head == found.control
        for name in names:
            rows += [
                {"head": str(head), "is_control": is_control, "category": name, **row}
                for row in definition_rows(category_sums(fit, name, head))
            ]
    own = [row for row in rows if not row["is_control"]]
    about = session.about(form=session.form("filter"))
    return settings.result(
        _answer(own),
        {"directions": rows},
        _claims(own, session.scope.group_size),
        model=session.scope.name,
        about=about,
    )


def category_sums(fit: Fit, category: str, head: Head) -> CategorySums:
    """Both definitions from the sums of a fit."""
    moments = fit.sums[category].state["sums"][category]
    sums = moments[fit.heads.index(head)].cpu()
    plus = sums[:, 0]
    minus = sums[:, 1]
    # the last entries are Σw: how many pairs there were
    text = plus[:-1, :-1] / plus[-1, -1] - minus[:-1, :-1] / minus[-1, -1]
    released = plus[:-1, :-1] - minus[:-1, :-1]
    # Σ w k stands in the row of the constant 1 beside each query
    keys = plus[-1, :-1] + minus[-1, :-1]
    return CategorySums(released, text, keys / (plus[-1, -1] + minus[-1, -1]))


def definition_rows(sums: CategorySums) -> list[Row]:
    """A row for each definition: 99% rank, |cos| of its first key direction and the mean key."""
    rows = []
    for definition in DEFINITIONS:
        _, values, right = torch.linalg.svd(getattr(sums, definition))
        cosine = torch.cosine_similarity(right[0], sums.mean_key, dim=0).abs()
        rows.append(
            {
                "definition": definition,
                "rank_99": int(energy_rank(values)),
                "cosine": float(cosine),
            }
        )
    return rows


def _answer(rows: list[Row]) -> str:
    ends = {}
    for definition in DEFINITIONS:
        own = [row["cosine"] for row in pick(rows, definition=definition)]
        ends[definition] = f"{min(own):.2f} to {max(own):.2f}"
    return (
        "As the released script sums them, the first key direction of a category is the mean key "
        f"(|cos| {ends['released']}); as the text defines ΔC, |cos| is {ends['text']}."
    )


def _claims(rows: list[Row], group_size: int) -> list[Claim]:
    released = _over_heads(rows, "released", min, group_size)
    text = _over_heads(rows, "text", max, group_size)
    return [
        Claim(
            "by the released script's sums the first key direction of every category is the "
            "mean key (least |cos| of five categories, mean over key heads; control: the "
            "largest by the text's)",
            paper="",
            **released.measured,
            control=text.mean,
            rule="ours > 0.95 and control < 0.7",
        )
    ]


def _over_heads(
    rows: list[Row], definition: str, which: Callable[[list[float]], float], group_size: int
) -> Estimate:
    """The least or largest cosine of a head's categories, over key heads."""
    own = pick(rows, definition=definition)
    by_head = {
        head: which([row["cosine"] for row in pick(own, head=head)])
        for head in distinct(own, "head")
    }
    return over_key_heads(by_head, group_size)


@run.drawing
def draw(result: Result) -> Files:
    """A dot for each category and head, by definition."""
    rows = [row for row in result.tables["directions"] if not row["is_control"]]
    drawing = new_figure(6.4, 3.4)
    axis = drawing.subplots()
    heads = distinct(rows, "head")
    for definition, colour in zip(DEFINITIONS, ("#c0392b", "#2d6cb5"), strict=True):
        own = pick(rows, definition=definition)
        places = [heads.index(row["head"]) for row in own]
        label = {"released": "the released script's sums", "text": "the text's definition"}
        axis.scatter(
            places, [row["cosine"] for row in own], color=colour, s=26, label=label[definition]
        )
    axis.set_xticks(range(len(heads)), heads)
    axis.set(ylabel="|cos| with the mean key", ylim=(-0.03, 1.05), xlim=(-0.5, len(heads) - 0.5))
    axis.set_title(f"{model_name(result)}: first key direction of each category", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return files_of(result, drawing)
