"""Figure 6: categories in filter heads. Are queries and keys of one category neighbours, and is a
rank of 1 news?

Within one category all queries are alike, so ``ΔC ≈ q̄ (μ⁺ − μ⁻)ᵀ`` has rank 1 in any head. Each
rank therefore stands beside its mean dominance, its null, its query-centred ranks, and the same
numbers of a head at chance. The picture is drawn from prompts with words that nothing was fitted
on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.findings.fit import Fit
from qkscope.heads import Head, Side
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.sums.bases import joint_basis
from qkscope.sums.swap_methods import key_pca
from qkscope.texts.list_tasks import POOLED
from qkscope.texts.task import Task
from qkscope_papers.figures import new_figure
from qkscope_papers.lee2026.language import FigureSession, HeadChoice, session_of
from qkscope_papers.lee2026.points import (
    Points,
    capture_points,
    ends_of,
    nearest_hits,
    principal,
    share_of,
    view,
)
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import (
    Files,
    Row,
    files_of,
    model_name,
    over_key_heads,
    pick,
    plane_axes,
    scatter_sides,
)

_FINE = 13  # categories of panel b
_ITEMS = 5  # of each category, as in the paper: a list of 65 items
_SHOWN = 1500  # keys in a picture
_BEST = "Was of the best head alone; now the mean over key heads of the three."
SIDES: tuple[Side, Side] = ("query", "key")
_ATTEND = (
    "filter heads attend to the asked category (ratio of the best head; interval corrected for "
    "choosing it among all heads; control: chance)"
)
_ALIGN = (
    "on PCs 2 and 3 keys and queries of one category align (cosine of centroids; control: 95% of "
    "random pairings)"
)
_OF_A_FILTER_HEAD = (_ATTEND, _ALIGN)
"""Claims that say nothing where no head attends to the asked items."""


@figure("lee2026", "fig6", "Categories in filter heads, seen")
def run(settings: Settings) -> Result:
    """Heads, ranks, the five categories seen with their queries, and thirteen categories of keys."""
    session = session_of(settings)
    found = session.found("filter")
    fit = session.fit("filter")
    best = found.heads[0]
    task = session.filter_task()
    seen = session.once(("points", "filter"), lambda: _points(session, task, found.all))
    views: list[Row] = []
    arrays: dict[str, Tensor] = {}
    for head in found.all:
        row, drawn = _view(seen, task, fit, head, session.seed)
        views.append({"head": str(head), "is_control": head == found.control, **row})
        if head in (best, found.control):
            arrays |= {
                f"{'best' if head == best else 'control'}/{name}": value
                for name, value in drawn.items()
            }
    clusters, keys = _fine(session, best)
    ranks = [{**row, "is_control": row["head"] == str(found.control)} for row in fit.table()]
    names = [name for name in task.contrasts if name != POOLED]
    labels = [{"panel": panel, "index": i, "label": name}
              for panel, own in (("a", names), ("b", _fine_names(session))) for i, name in enumerate(own)]  # fmt: skip
    tables = {"ranks": ranks, "views": views, "clusters": clusters, "labels": labels}
    tables["heads"] = found.ranking.top("ratio")
    claims = _claims(found, ranks, views, clusters, session.scope.group_size)
    no_head = session.no_such_head(found)
    claims = [replace(claim, lenient=no_head) if claim.claim in _OF_A_FILTER_HEAD else claim
              for claim in claims]  # fmt: skip
    about = session.about(form=session.form("filter"))
    return settings.result(
        _answer(found, ranks, views), tables, claims, {**arrays, **keys}, session.scope.name, about
    )


def _points(session: FigureSession, task: Task, heads: list[Head]) -> Points:
    return capture_points(
        session.scope, task, task.test(session.work.test), heads, session.work.batch_size
    )


def _span(fit: Fit, head: Head, categories: list[str], side: Side) -> Float[Tensor, "d r"]:
    """The categorical subspace: the span of every category's top direction."""
    return joint_basis(
        [fit[name, head].cut(1).basis(side).cpu() for name in categories]
    )  # points are on the CPU


def _labels(points: Points, task: Task) -> tuple[list[str], Int[Tensor, "n k"]]:
    """Category names, and the category of every key."""
    words: dict[str, list[str]] = task.asked["words"]
    category = {word: i for i, own in enumerate(words.values()) for word in own}
    return list(words), torch.tensor(
        [[category[text] for text in row] for row in points.key_texts()]
    )


def _view(
    points: Points, task: Task, fit: Fit, head: Head, seed: int
) -> tuple[Row, dict[str, Tensor]]:
    """One head: PCA of projected queries and keys together, and the numbers of what it shows."""
    names, category = _labels(points, task)
    q, k = points.at(head)
    asked = category[torch.arange(len(category)), points.answers()]
    flat = k.flatten(0, 1)
    of_key = category.flatten()
    row: Row = {}
    drawn: dict[str, Tensor] = {}
    for space in ("projected", "whole"):
        if space == "projected":
            u, v = (_span(fit, head, names, side) for side in SIDES)
            q_in = q @ u @ u.mT
            k_in = flat @ v @ v.mT
        else:
            q_in = q
            k_in = flat
        seen = view(q_in, asked, k_in, of_key, seed)
        prefix = "" if space == "projected" else "whole_"
        row |= {f"{prefix}{name}": number for name, number in seen.row.items()}
        if space == "projected":
            drawn = {"queries": seen.q.float(), "query_labels": asked, "keys": seen.k[:_SHOWN].float(),
                     "key_labels": of_key[:_SHOWN]}  # fmt: skip
    return row, drawn


def _fine_names(session: FigureSession) -> list[str]:
    return [name for name in session.filter_task(_FINE, items=_ITEMS).contrasts if name != POOLED]


def _fine(session: FigureSession, head: Head) -> tuple[list[Row], dict[str, Tensor]]:
    """Thirteen categories, keys alone: does a word fall among words of its category that the
    centroids never saw?
    """
    task = session.filter_task(_FINE, items=_ITEMS)
    names = _fine_names(session)
    fit = session.decompose(task, [head], session.work.fine, contrasts=names, rank=1, replicates=19)
    few = task.test(max(session.work.test // 4, 4))  # 65 keys in each
    points = capture_points(session.scope, task, few, [head], session.work.batch_size)
    _, category = _labels(points, task)
    _, k = points.at(head)
    basis = _span(fit, head, names, "key")
    flat = k.flatten(0, 1)
    labels = category.flatten()
    words = [text for row in points.key_texts() for text in row]
    own = task.asked["words"]
    place = {
        word: i for name in names for i, word in enumerate(sorted(set(own[name]) & set(words)))
    }
    even = torch.tensor([place[word] % 2 == 0 for word in words])
    projected = flat @ basis
    cov_k = [
        fit.sums[name].cov_k for name in names
    ]  # of the keys that the directions were fitted on, as theirs are
    pca = key_pca(cov_k[0].merge(*cov_k[1:]).matrix()[fit.heads.index(head)].cpu())(
        basis.shape[1]
    ).left.to(flat)
    generator = torch.Generator().manual_seed(session.seed)
    # words, not keys, are dealt out to categories: a word's many keys are one observation
    shuffled = []
    vocabulary = sorted(set(words))
    index = torch.tensor([vocabulary.index(word) for word in words])
    of_word = torch.zeros(len(vocabulary), dtype=torch.long)
    of_word[index] = labels
    for _ in range(20):
        dealt = of_word[torch.randperm(len(vocabulary), generator=generator)][index]
        shuffled.append(float(nearest_hits(projected, dealt, even).mean()))
    spaces = {"category directions": projected, "key PCA": flat @ pca, "whole head": flat}
    found = {space: nearest_hits(x, labels, even) for space, x in spaces.items()}
    found["category directions less key PCA"] = found["category directions"] - found["key PCA"]
    rows = []
    for space, own in found.items():
        share = share_of(own, index[~even])  # words are resampled
        size = flat.shape[1] if space == "whole head" else basis.shape[1]
        rows.append({"space": space, "dimensions": size, "accuracy": share.mean, **share.ends})
    rows.append({"space": "category directions, shuffled words", "dimensions": basis.shape[1],
                 "accuracy": sum(shuffled) / len(shuffled), "low": None, "high": None})  # fmt: skip
    drawn = {"fine/keys": principal(projected)[:_SHOWN].float(), "fine/key_labels": labels[:_SHOWN]}
    return [
        {**row, "head": str(head), "chance": 1 / len(names), "words": len(vocabulary)}
        for row in rows
    ], drawn


def _answer(found: HeadChoice, ranks: list[Row], views: list[Row]) -> str:
    best = views[0]
    own = [row for row in ranks if row["head"] == best["head"] and row["contrast"] != POOLED]
    pooled = pick(ranks, head=best["head"], contrast=POOLED)[0]
    score = found.row(found.heads[0])
    return (
        f"{best['head']} gives the asked category {score['ratio']:.2f} of its attention on items (chance "
        f"{score['chance']:.2f}). Its category ranks are {_listed(row['rank_99'] for row in own)}, with a mean "
        f"dominance of at least {min(row['mean_dominance'] for row in own):.4f}; centred on the query they are "
        f"{_listed(row['rank_99_centred'] for row in own)}, {_listed(row['interaction_rank'] for row in own)} above "
        f"the query shuffle. Pooled over categories and centred: rank {pooled['rank_99_centred']}, "
        f"{pooled['interaction_rank']} above its null."
    )


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values)


def _claims(
    found: HeadChoice, ranks: list[Row], views: list[Row], clusters: list[Row], group_size: int
) -> list[Claim]:
    best = views[0]
    other = views[-1]
    own = [row for row in ranks if row["contrast"] != POOLED]
    largest = {
        str(head): max(row["rank_99"] for row in pick(own, head=str(head))) for head in found.all
    }
    pooled = {row["head"]: row["interaction_rank"] for row in pick(ranks, contrast=POOLED)}
    theirs = largest.pop(other["head"])
    pooled_control = pooled.pop(other["head"])
    ours = over_key_heads(largest, group_size)
    above = over_key_heads(pooled, group_size)
    score = found.row(found.heads[0])
    by_space = {row["space"]: row for row in clusters}
    fine = by_space["category directions"]
    ahead = by_space["category directions less key PCA"]
    return [
        Claim(_ATTEND, "§5.1: they attend to items pertaining to a queried category",
              score["ratio"], score["chance"], "ours > control", score["ratio_low"], score["ratio_high"],
              reason="small model", why="The paper's model has 8B weights."),
        Claim("category contrasts have rank 1 (largest of five, 99% rule; control: a head at chance)",
              "§5.1: all result in rank 1", ours.mean, theirs, "ours == 1", **ours.ends, changed=_BEST),
        Claim("pooled and query-centred, categories have directions above their null (control: a head at chance)", "",
              above.mean, pooled_control, "ours >= 2 and ours > control", **above.ends, changed=_BEST),
        Claim("PC 1 separates keys from queries (AUC; control: a head at chance)",
              "§5.1, Fig. 6a: PC 1 separates keys from queries", best["apart_on_pc1"], other["apart_on_pc1"],
              "ours >= 0.95", **ends_of(best, "apart_on_pc1")),
        Claim(_ALIGN, "§5.1, Fig. 6a: symmetric in PC 2 and 3", best["cosine_pc23"],
              best["cosine_pc23_shuffled_high"], "ours > control", reason="small model",
              why="The paper's model has 8B weights."),
        Claim("they align more than without projecting (cosine on PCs 2 and 3; control: whole head)", "",
              best["cosine_pc23"], best["whole_cosine_pc23"], "ours > control",
              **ends_of(best, "cosine_pc23", best["whole_cosine_pc23_half"])),
        Claim("13 categories form clusters of keys (unseen words nearest to their category; control: shuffled words)",
              "Fig. 6b: clear semantic clusters", fine["accuracy"],
              by_space["category directions, shuffled words"]["accuracy"], "ours > 2 * control", fine["low"],
              fine["high"]),
        Claim("the category directions cluster them better than key PCA of the same size (difference)", "",
              ahead["accuracy"], None, "ours > 0", ahead["low"], ahead["high"]),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the drawing

_COLOURS = ("#c0392b", "#2f7d4f", "#2d6cb5", "#d98e04", "#7d4fa3")


@run.drawing
def draw(result: Result) -> Files:
    """(a) three components and the plane of the last two, for the best head; (b) keys of thirteen
    categories.
    """
    figure = new_figure(13.4, 4.7)
    names = {
        panel: [row["label"] for row in pick(result.tables["labels"], panel=panel)]
        for panel in "ab"
    }
    view = dict(result.tables["views"][0])
    arrays = {name: value.numpy() for name, value in result.arrays.items()}
    solid: Any = figure.add_subplot(1, 3, 1, projection="3d")
    plane = figure.add_subplot(1, 3, 2)
    fine = figure.add_subplot(1, 3, 3)
    for axis, components in ((solid, slice(0, 3)), (plane, slice(1, 3))):
        scatter_sides(axis, arrays, "best", names["a"], _COLOURS, components)
    solid.set_title(
        f"{view['head']}: keys • and queries ▴\napart on PC 1: AUC {view['apart_on_pc1']:.2f}"
    )
    plane_axes(plane, fontsize=8, markerscale=1.6, loc="best")
    plane.set_title(
        f"PCs 2 and 3: cosine of centroids {view['cosine_pc23']:.2f}\n"
        f"(95% of random pairings below {view['cosine_pc23_shuffled_high']:.2f})"
    )
    _draw_fine(fine, arrays, names["b"])
    clusters = {row["space"]: row["accuracy"] for row in result.tables["clusters"]}
    fine.set_title(
        f"13 categories, keys: nearest centroid {clusters['category directions']:.0%}\n"
        f"(key PCA {clusters['key PCA']:.0%}, shuffled words {clusters['category directions, shuffled words']:.0%})"
    )
    figure.suptitle(
        f"{model_name(result)}: items of lists in the categorical subspace, held-out words",
        fontsize=10,
    )
    return files_of(result, figure)


def _draw_fine(axis: Any, arrays: dict[str, Any], names: list[str]) -> None:
    """Keys on the two of their first three components that tell categories apart best; the third is
    mostly position.
    """
    colours = matplotlib.colormaps["tab20"]
    points = arrays["fine/keys"]
    labels = arrays["fine/key_labels"]
    means = np.stack([points[labels == i].mean(axis=0) for i in np.unique(labels)])
    x, y = sorted(np.argsort(means.var(axis=0) / points.var(axis=0))[-2:])
    for i, name in enumerate(names):
        own = points[labels == i]
        axis.scatter(
            own[:, x], own[:, y], s=9, alpha=0.6, color=colours(i), linewidths=0, label=name
        )
    look: Any = {
        "fontsize": 7.5,
        "loc": "center left",
        "bbox_to_anchor": (1, 0.5),
        "markerscale": 1.6,
    }
    plane_axes(axis, f"PC {x + 1}, PC {y + 1}", **look)
