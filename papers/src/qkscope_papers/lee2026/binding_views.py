"""Figures 8 and 17: boxes and questions as points, in the order and lexical subspaces, and without
projecting.

The subspaces are the paper's and ours (column ``estimator``); what the paper says is judged by its
own, and drawn are ours, as an order of one dimension makes no picture.
Prompts are held out: other words than those the subspaces were fitted on, so a cluster of a word is
no memory of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from typing import Any, Literal

import matplotlib
import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.findings.fit import Fit
from qkscope.heads import Head
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope_papers.figures import new_figure, shades
from qkscope_papers.lee2026.language import ESTIMATORS, Estimator, FigureSession, session_of
from qkscope_papers.lee2026.points import (
    Points,
    capture_points,
    ends_of,
    nearest_hits,
    share_of,
    view,
)
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import (
    Files,
    Row,
    column,
    figure_name,
    files_of,
    model_name,
    pick,
    plane_axes,
    scatter_sides,
)
from qkscope_papers.tables import share_of as share_of_runs

log = logging.getLogger(__name__)
_WORDS = 9  # lexical labels drawn; more colours cannot be told apart
_SHOWN = 1200
FEATURES = ("order", "lexical")


@figure("lee2026", "fig8", "Order and lexical subspaces, seen", projected=True)
@figure("lee2026", "fig17", "Keys and queries, not projected", projected=False)
def run(settings: Settings, projected: bool) -> Result:
    """Figure 8 projects on each feature's subspaces, figure 17 does not; the numbers of both stand
    in both.
    """
    session = session_of(settings)
    found = session.found("binding")
    best = found.heads[0]
    points = binding_points(session)
    labels = _labels(session, points)
    rows: list[Row] = []
    arrays: dict[str, Tensor] = {}
    for head in found.all:
        for feature in FEATURES:
            for estimator in (*ESTIMATORS, None):
                fit = None if estimator is None else session.binding_fit(estimator)
                shown = head == best and estimator == ("ours" if projected else None)
                mapped = shown and projected and feature == "lexical"
                row, drawn = _view(
                    points, labels[feature][1], fit, head, feature, session.seed, mapped
                )
                where = {
                    "head": str(head),
                    "is_control": head == found.control,
                    "estimator": estimator or "",
                }
                rows.append({**where, **row})
                if shown:
                    arrays |= {f"{feature}/{name}": value for name, value in drawn.items()}
    named = [{"feature": feature, "index": i, "label": name} for feature in FEATURES
             for i, name in enumerate(labels[feature][0][:_WORDS])]  # fmt: skip
    answer = _answer(rows, str(best))
    claims = _claims(rows, str(best), str(found.control), projected)
    about = session.about(form=session.form("binding"), head=str(best))
    tables = {"views": rows, "labels": named}
    return settings.result(answer, tables, claims, arrays, session.scope.name, about)


def binding_points(session: FigureSession) -> Points:
    """Held-out queries and keys of the found heads and the control."""
    task = session.binding_task()
    work = session.work
    heads = session.found("binding").all
    return session.once(
        ("points", "binding"),
        lambda: capture_points(session.scope, task, task.test(work.test), heads, work.batch_size),
    )


def _labels(
    session: FigureSession, points: Points
) -> dict[str, tuple[list[str], Int[Tensor, "n k"]]]:
    """Names of the labels, and the label of every key: its place in the prompt, and the word in the
    box.
    """
    words = points.key_words(session.binding_task().asked["words"])
    names = sorted({word for row in words for word in row})
    n, k = points.k.shape[:2]
    return {
        "order": ([str(i + 1) for i in range(k)], torch.arange(k).expand(n, k)),
        "lexical": (names, torch.tensor([[names.index(word) for word in row] for row in words])),
    }


def _view(
    points: Points,
    labels: Int[Tensor, "n k"],
    fit: Fit | None,
    head: Head,
    feature: str,
    seed: int,
    mapped: bool,
) -> tuple[Row, dict[str, Tensor]]:
    q, k = points.at(head)
    asked = labels[torch.arange(len(labels)), points.answers()]
    flat = k.flatten(0, 1)
    of_key = labels.flatten()
    if fit is not None:
        q = fit[feature, head].project(q, "query")
        flat = fit[feature, head].project(flat, "key")
    seen = view(q, asked, flat, of_key, seed)
    prompt = torch.arange(len(labels)).repeat_interleave(k.shape[1])
    early = prompt % 2 == 0  # centroids from every other prompt

    def clusters(name: str, x: Tensor) -> Row:
        found = share_of(nearest_hits(x, of_key, early), prompt[~early])
        return {name: found.mean, **{f"{name}_{end}": value for end, value in found.ends.items()}}

    space, size = ("whole head", q.shape[1]) if fit is None else (feature, fit[feature, head].rank)
    row = {
        "feature": feature, "space": space, "dimensions": size, **seen.row,
        **clusters("clusters", flat), **clusters("clusters_3_pcs", seen.k),
    }  # fmt: skip
    shown = (of_key < _WORDS).nonzero()[:_SHOWN, 0]
    shown_q = (asked < _WORDS).nonzero()[:, 0]
    drawn = {
        "keys": seen.k[shown].float(), "key_labels": of_key[shown],
        "queries": seen.q[shown_q].float(), "query_labels": asked[shown_q],
    }  # fmt: skip
    if mapped:
        flattened = _umap(torch.cat([q[shown_q], flat[shown]]), seed)
        if flattened is not None:
            drawn |= {
                "umap_queries": flattened[: len(shown_q)],
                "umap_keys": flattened[len(shown_q) :],
            }
    return row, drawn


def _umap(x: Float[Tensor, "n d"], seed: int) -> Float[Tensor, "n 2"] | None:
    """UMAP in two dimensions, where the extra is installed."""
    if importlib.util.find_spec("umap") is None:
        log.info(
            "umap-learn is not installed (pip install 'qkscope-papers[umap]'): the figure has PCA alone."
        )
        return None
    umap = importlib.import_module("umap")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that a fixed seed makes it use one thread
        return torch.from_numpy(
            umap.UMAP(n_components=2, random_state=seed).fit_transform(x.float().numpy())
        ).float()


def _row(rows: list[Row], head: str, feature: str, estimator: Estimator | Literal[""]) -> Row:
    return pick(rows, head=head, feature=feature, estimator=estimator)[0]


def _answer(rows: list[Row], head: str) -> str:
    parts = []
    for feature in FEATURES:
        theirs, own, whole = (_row(rows, head, feature, which) for which in (*ESTIMATORS, ""))
        parts.append(
            f"{feature} ({theirs['dimensions']} dimensions as in the paper, {own['dimensions']} as we fit it): "
            f"centroid cosine {theirs['cosine']:.2f} and {own['cosine']:.2f} (95% of random pairings below "
            f"{own['cosine_shuffled_high']:.2f}; unprojected {whole['cosine']:.2f}), keys nearest to their own label's "
            f"centroid {theirs['clusters']:.0%} and {own['clusters']:.0%} (unprojected, three PCs "
            f"{whole['clusters_3_pcs']:.0%}, chance {own['chance']:.0%})"
        )
    return f"At {head}, words not fitted on. " + "; ".join(parts) + "."


def _claims(rows: list[Row], head: str, control: str, projected: bool) -> list[Claim]:
    if not projected:
        return _unprojected_claims(rows, head)
    claims = []
    for feature in FEATURES:
        theirs, own, whole = (_row(rows, head, feature, which) for which in (*ESTIMATORS, ""))
        other, ours_there = (_row(rows, control, feature, estimator) for estimator in ESTIMATORS)
        size = "1 dimension" if theirs["dimensions"] == 1 else f"{theirs['dimensions']} dimensions"
        here = f"At {head}, which binds best, the paper's estimate of {feature} has {size}"
        others = pick(rows, feature=feature, estimator="paper", is_control=False)
        apart = [row["head"] for row in others if row["apart_on_pc1"] >= 0.95]
        aligned = [row["head"] for row in others if row["cosine"] > row["cosine_shuffled_high"]]
        clustered = [row["head"] for row in others if row["clusters_low"] > 2 * row["chance"]]
        most_align = share_of_runs(row["head"] in aligned for row in others)
        most_cluster = share_of_runs(row["head"] in clustered for row in others)
        claims += [
            Claim(f"{feature}: at most heads that bind keys and queries of one label align (share of heads above 95% "
                  "of random pairings, the paper's subspace)", "§5.2, Fig. 8: alignment between keys and queries",
                  most_align.mean, None, "ours > 0.5", **most_align.ends, **_elsewhere(here, aligned)),
            Claim(f"{feature}: at most heads that bind keys cluster by label (share of heads above twice chance, the "
                  "paper's subspace)", "§5.2, Fig. 8: clear clusters", most_cluster.mean, None, "ours > 0.5",
                  **most_cluster.ends, **_elsewhere(here, clustered)),
            Claim(f"{feature}: PC 1 separates keys from queries (AUC, the paper's subspace; control: a head at "
                  "chance)", "Fig. 8: PC 1 encodes keys versus queries", theirs["apart_on_pc1"],
                  other["apart_on_pc1"], "ours >= 0.95", **ends_of(theirs, "apart_on_pc1"), **_elsewhere(here, apart)),
            Claim(f"{feature}: keys and queries of one label align (cosine of centroids, the paper's subspace; "
                  "control: 95% of random pairings)", "§5.2, Fig. 8: alignment between keys and queries",
                  theirs["cosine"], theirs["cosine_shuffled_high"], "ours > control", **_elsewhere(here, aligned)),
            Claim(f"{feature}: keys cluster by label (nearest centroid, other prompts, the paper's subspace; control: "
                  "chance)", "§5.2, Fig. 8: clear clusters", theirs["clusters"], theirs["chance"],
                  "ours > 2 * control", theirs["clusters_low"], theirs["clusters_high"],
                  **_elsewhere(here, clustered)),
            Claim(f"{feature}: keys and queries align in our subspace (cosine of centroids; control: 95% of random "
                  "pairings)", "", own["cosine"], own["cosine_shuffled_high"], "ours > control"),
            Claim(f"{feature}: the alignment is this head's (cosine, our subspace; control: a head at chance)", "",
                  own["cosine"], ours_there["cosine"], "ours > control + 0.1",
                  **ends_of(own, "cosine", ours_there["cosine_half"])),
            Claim(f"{feature}: keys cluster in our subspace (nearest centroid, other prompts; control: chance)", "",
                  own["clusters"], own["chance"], "ours > 2 * control", own["clusters_low"], own["clusters_high"]),
            Claim(f"{feature}: our subspace shows clusters that the first three PCs do not (three PCs each; control: "
                  "unprojected)", "", own["clusters_3_pcs"], whole["clusters_3_pcs"], "ours > control",
                  own["clusters_3_pcs_low"], own["clusters_3_pcs_high"]),
        ]  # fmt: skip
    return claims


def _elsewhere(here: str, heads: list[str]) -> dict[str, Any]:
    """The paper shows one head: where others that bind would pass, it is the head, and not the
    model.
    """
    if not heads:
        return {
            "reason": "small model",
            "why": f"{here}, and at no other head that binds it would hold.",
        }
    return {"reason": "other setting", "why": f"{here}; the paper shows a head of its choice, and it would hold "
            f"at {', '.join(heads)}."}  # fmt: skip


def _unprojected_claims(rows: list[Row], head: str) -> list[Claim]:
    order, lexical = (_row(rows, head, feature, "") for feature in FEATURES)
    own = _row(rows, head, "lexical", "paper")
    others = pick(rows, feature="order", estimator="", is_control=False)
    passing = [row["head"] for row in others if row["clusters_3_pcs_low"] > 2 * row["chance"]]
    return [
        Claim("order is in the first three PCs of the whole head (nearest centroid; control: chance)",
              "§F.2, Fig. 17: order-ID is embedded in the first few principal components", order["clusters_3_pcs"],
              order["chance"], "ours > 2 * control", order["clusters_3_pcs_low"], order["clusters_3_pcs_high"],
              **_elsewhere(f"At {head}, which binds best, it is not twice chance", passing)),
        Claim("lexical is not in the first three PCs of the whole head (nearest centroid; control: its own subspace, "
              "the paper's)", "§F.2, Fig. 17: PCA alone cannot inform us where other features are encoded",
              lexical["clusters_3_pcs"], own["clusters"], "ours < 0.5 * control", lexical["clusters_3_pcs_low"],
              lexical["clusters_3_pcs_high"], reason="small model", why="The paper's model has 8B weights."),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the drawing


@run.drawing
def draw(result: Result) -> Files:
    """One line per feature: three components, the plane of the last two, and UMAP where it was
    installed.
    """
    arrays = {key: value.numpy() for key, value in result.arrays.items()}
    projected = figure_name(result) == "fig8"
    mapped = "lexical/umap_keys" in arrays
    columns = 3 if mapped else 2
    figure = new_figure(4.3 * columns + 0.4, 8.0)
    for line, feature in enumerate(FEATURES):
        labels = column(pick(result.tables["labels"], feature=feature), "label")
        space = feature if projected else "whole head"
        which = "ours" if projected else ""
        row = pick(result.tables["views"], feature=feature, estimator=which)[0]
        solid: Any = figure.add_subplot(2, columns, line * columns + 1, projection="3d")
        plane = figure.add_subplot(2, columns, line * columns + 2)
        colours: Any = matplotlib.colormaps["tab10"](range(len(labels)))
        if feature == "order":
            colours = shades(len(labels), 1.0)
        scatter_sides(solid, arrays, feature, labels, colours, slice(0, 3))
        scatter_sides(plane, arrays, feature, labels, colours, slice(1, 3))
        where = (
            f"{feature} subspace ({row['dimensions']} dimensions)"
            if projected
            else f"{space}, by {feature}"
        )
        solid.set_title(
            f"{row['head']}, {where}\nkeys • and queries ▴ apart on PC 1: AUC {row['apart_on_pc1']:.2f}"
        )
        plane.set_title(
            f"PCs 2, 3: cosine {row['cosine_pc23']:.2f} (random {row['cosine_pc23_shuffled_high']:.2f}); whole "
            f"space {row['cosine']:.2f} ({row['cosine_shuffled_high']:.2f})\n"
            f"keys nearest to their own label {row['clusters_3_pcs']:.0%} in 3 PCs, {row['clusters']:.0%} in all"
        )
        look: Any = {
            "loc": "center left",
            "bbox_to_anchor": (1, 0.5),
            "markerscale": 1.8,
            "fontsize": 7.5,
        }
        plane_axes(plane, title="place" if feature == "order" else "word", **look)
        if f"{feature}/umap_keys" in arrays:
            flat = figure.add_subplot(2, columns, line * columns + 3)
            shown = {
                f"{feature}/{side}": arrays[f"{feature}/umap_{side}"]
                for side in ("keys", "queries")
            }
            scatter_sides(flat, {**arrays, **shown}, feature, labels, colours, slice(0, 2))
            flat.set(xlabel="UMAP 1", ylabel="UMAP 2", xticks=[], yticks=[], title="UMAP")
    figure.suptitle(f"{model_name(result)}: held-out prompts", fontsize=10)
    return files_of(result, figure)
