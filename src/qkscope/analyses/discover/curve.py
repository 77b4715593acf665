"""How much attention a subspace of k dimensions moves: the self-contrast, its rivals, the labelled contrasts and the
trained ceiling on the same held-out rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.discover.evidence import curve_rows, singular_projector
from qkscope.analyses.discover.rows import QueryRows
from qkscope.analyses.fit import Fit
from qkscope.analyses.swap import SIZES as SIZES
from qkscope.analyses.swap import capture_rows, draw_pairs
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.baselines import cov_qk, key_pca
from qkscope.maths.bases import Projector, random_bases
from qkscope.maths.ceiling import learned_basis
from qkscope.maths.discovery import SelfContrast, moving_basis
from qkscope.maths.singular import SingularBasis
from qkscope.maths.sums import Covariance
from qkscope.maths.svd import checked_svd
from qkscope.maths.swap import SwapRows
from qkscope.runs.job import Job
from qkscope.tasks.task import ANSWER, Task, Unit

log = logging.getLogger(__name__)

_Bases = Callable[[int], Float[Tensor, "h d r"]]


def blind_methods(contrast: SelfContrast, heads: Sequence[Head]) -> dict[str, _Bases]:
    """Bases of k dimensions that need no labels, for each head."""
    index = [contrast.heads.index(head) for head in heads]
    delta, uncentred = (contrast.delta(center)[index].cpu() for center in (True, False))
    cov_q, cov_k = (c[index].cpu() for c in contrast.covariances())
    v = checked_svd(delta)[2]
    return {
        "self_contrast": lambda k: moving_basis(delta, k),
        "self_contrast_svd": lambda k: v[..., :k],
        "self_contrast_uncentred": lambda k: moving_basis(uncentred, k),
        "cov_qk_all": lambda k: cov_qk(cov_q, cov_k, k),
        "cov_qk_all_moving": lambda k: moving_basis(cov_q @ cov_k, k),
        "key_pca_all": lambda k: key_pca(cov_k, k),
    }


def _random(heads: int, d: int, k: int, draws: int, seed: int) -> Projector:
    return Projector.orthogonal(torch.stack([random_bases(d, k, draws, seed + i) for i in range(heads)], dim=1))


def labelled_curve(
    scope: Scope,
    task: Task,
    fit: Fit,
    contrast: SelfContrast,
    singular: SingularBasis | None,
    n: int,
    sizes: Sequence[int],
    draws: int,
    batch_size: int,
    seed: int,
    progress: bool | None,
    job: Job,
) -> list[dict[str, Any]]:
    """The curve on held-out units of a task: the right key is swapped with a wrong one.

    ``key_pca`` and ``cov_qk`` are made from the keys that the task names, as in `swap`; ``…_all`` from all tokens, as
    the self-contrast is. The ceiling is trained on the fitting words and stopped by those for choosing heads, so that
    none of the three sets share words. ``…_moving`` takes the eigenvectors that the self-contrast takes, of a labelled
    contrast or of ``Cov_q Cov_k``: how much of a lead is due to them alone.
    """
    heads = list(fit.heads)

    def captured(units: Sequence[Unit], seed: int, name: str) -> SwapRows:
        pairs = draw_pairs(units, 2 * batch_size, seed)
        return capture_rows(scope, units, fit, heads, pairs, progress, job, name)

    rows = captured(task.test(n), seed, "curve test")
    train: SwapRows | None = None
    aside: SwapRows | None = None
    try:
        train = captured(task.draw("fit", ANSWER, n), seed + 17, "curve fit")
        aside = captured(task.choose(n), seed + 19, "curve choose")
    except BadInput as error:  # nothing says which keys are right where one fits
        log.info("no ceiling: %s", error)
    methods = blind_methods(contrast, heads)
    index = [fit.heads.index(head) for head in heads]
    deltas = {name: _delta(fit, name)[index] for name in fit.contrasts}
    for name in fit.contrasts:
        v = torch.stack([fit[name, head].V for head in heads])
        methods[name] = lambda k, v=v: v[..., :k]  # type: ignore[misc]
        methods[f"{name}_moving"] = lambda k, d=deltas[name]: moving_basis(d, k)  # type: ignore[misc]
    cov_q, cov_k = _named_covariances(fit, index)
    methods["cov_qk"] = lambda k: cov_qk(cov_q, cov_k, k)
    methods["cov_qk_moving"] = lambda k: moving_basis(cov_q @ cov_k, k)
    methods["key_pca"] = lambda k: key_pca(cov_k, k)

    def of_size(k: int) -> list[dict[str, Any]]:
        projectors = {name: Projector.orthogonal(make(k)) for name, make in methods.items()}
        if singular is not None:
            projectors["omega_svd"] = singular_projector(singular, heads, k)
        if train is not None and aside is not None:
            best = learned_basis(train, methods["self_contrast"](k), aside, lr=0.01, seed=seed)
            projectors["ceiling"] = Projector.orthogonal(best)
        projectors["random"] = _random(len(heads), scope.d_head, k, draws, seed)
        return curve_rows(rows.rows, rows.orig, rows.target, rows.cluster, heads, projectors, k, seed)

    return [row for k in sizes for row in job.once(f"curve {k}", partial(of_size, k))]


def _delta(fit: Fit, name: str) -> Float[Tensor, "h d d"]:
    """ΔC as the fitted subspaces have it, centring included."""
    subspaces = [fit[name, head] for head in fit.heads]
    return torch.stack([s.U @ torch.diag(s.S) @ s.V.mT for s in subspaces]).cpu()


def _named_covariances(fit: Fit, index: list[int]) -> tuple[Tensor, Tensor]:
    sums = list(fit.sums.values())
    both: list[Covariance] = [
        getattr(sums[0], name).merge(*(getattr(other, name) for other in sums[1:])) for name in ("cov_q", "cov_k")
    ]
    return both[0].matrix()[index].cpu(), both[1].matrix()[index].cpu()


def text_curve(
    fitted: QueryRows,
    tested: QueryRows,
    contrast: SelfContrast,
    singular: SingularBasis | None,
    sizes: Sequence[int],
    draws: int,
    seed: int,
    job: Job,
) -> list[dict[str, Any]]:
    """The curve on held-out text: the key with most attention is swapped with one drawn by lot."""
    table: list[dict[str, Any]] = []
    for h, head in enumerate(tested.heads):
        rows, keep = tested.own_swaps(h)
        train, train_keep = fitted.own_swaps(h)
        if len(keep) < 8 or len(train_keep) < 8:
            continue
        orig, target = torch.zeros(len(keep), dtype=torch.long), torch.ones(len(keep), dtype=torch.long)
        methods = blind_methods(contrast, [head])
        methods = {name.replace("_all", ""): make for name, make in methods.items()}  # there are no others
        zeros = torch.zeros(len(train_keep), dtype=torch.long)
        taught = SwapRows(train, zeros, zeros + 1, train_keep, [head])

        def of_size(k: int) -> list[dict[str, Any]]:
            projectors = {name: Projector.orthogonal(make(k)) for name, make in methods.items()}  # noqa: B023
            if singular is not None:
                projectors["omega_svd"] = singular_projector(singular, [head], k)  # noqa: B023
            best = learned_basis(taught, methods["self_contrast"](k), seed=seed)  # noqa: B023
            projectors["ceiling"] = Projector.orthogonal(best)
            projectors["random"] = _random(1, rows.d_head, k, draws, seed)  # noqa: B023
            return curve_rows(rows, orig, target, tested.example[keep], [head], projectors, k, seed)  # noqa: B023

        for k in sizes:
            table += job.once(f"curve {head} {k}", partial(of_size, k))
    return table
