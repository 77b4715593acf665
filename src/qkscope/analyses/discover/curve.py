"""How much attention a subspace of k dimensions moves: the self-contrast, its rivals, the labelled contrasts and the
learned ceiling on the same held-out rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from qkscope.analyses.discover.rows import QueryRows
from qkscope.analyses.discover.study import Study
from qkscope.analyses.fit import Fit
from qkscope.analyses.pairs import draw_pairs
from qkscope.analyses.swap import capture_rows
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths import methods
from qkscope.maths.bases import checked_svd
from qkscope.maths.discovery import SelfContrast
from qkscope.maths.singular import SingularBasis
from qkscope.maths.swap import Condition, Method, SwapRows
from qkscope.tasks.task import ANSWER, Task, Unit

log = logging.getLogger(__name__)

Rows = list[dict[str, Any]]
_FEWEST = 8  # rows that a basis can be learned from


class Curve:
    """The methods of a curve, and its sizes.

    Parameters
    ----------
    study, contrast : whose options and sums these are.
    singular : singular vectors of the weights; None where they cannot be read off.
    sizes : numbers of dimensions.
    ceiling : whether a basis is learned by gradient too, which is most of the work.
    """

    def __init__(
        self, study: Study, contrast: SelfContrast, singular: SingularBasis | None, sizes: Sequence[int], ceiling: bool
    ) -> None:
        self.study, self.contrast, self.singular, self.sizes, self.ceiling = study, contrast, singular, sizes, ceiling

    def on_text(self, fitted: QueryRows, tested: QueryRows) -> Rows:
        """On held-out text: the key with most attention is swapped with one drawn by lot."""
        table: Rows = []
        for h, head in enumerate(tested.heads):
            (train, _), (rows, _) = fitted.swaps(h), tested.swaps(h)
            if min(len(train), len(rows)) < _FEWEST:
                continue
            blind = {name.replace("_all", ""): method for name, method in self._blind([head]).items()}  # no others
            seed = self.study.options.seed
            learned = methods.learned(train, blind["self_contrast"], seed=seed) if self.ceiling else None
            table += self._rows(rows, blind, learned, f"curve {head}")
        return table

    def on_task(self, task: Task, fit: Fit, n: int) -> Rows:
        """On held-out units of a task: the right key is swapped with a wrong one.

        ``key_pca`` and ``cov_qk`` are made from the keys that the task names, as in `swap`; ``…_all`` from all tokens,
        as the self-contrast is. The ceiling is learned from the fitting words and stopped by those for choosing heads,
        so that none of the three sets share words. ``…_moving`` takes the eigenvectors that the self-contrast takes, of
        a labelled contrast or of ``Cov_q Cov_k``: how much of a lead is due to them alone.
        """
        heads, study = list(fit.heads), self.study
        every = self._blind(heads)
        for name in fit.contrasts:
            every[name] = methods.leading(torch.stack([fit[name, head].V for head in heads]))
            deltas = torch.stack([fit.delta(name, head) for head in heads])
            every[f"{name}_moving"] = methods.moving(deltas.cpu())
        cov_q, cov_k = fit.covariances(heads)
        every["cov_qk"] = methods.cov_qk(cov_q, cov_k)
        every["cov_qk_moving"] = methods.moving(cov_q @ cov_k)
        every["key_pca"] = methods.key_pca(cov_k)

        def captured(units: Sequence[Unit], seed: int, name: str) -> SwapRows:
            pairs = draw_pairs(units, study.options.labelled_batch_size, seed)
            return capture_rows(study.scope, units, fit, heads, pairs, study.options.progress, study.job, name)

        seed = study.options.seed
        rows = captured(task.test(n), seed, "curve test")
        learned = None
        if self.ceiling:
            try:
                train = captured(task.draw("fit", ANSWER, n), derived_seed(seed, "curve fit"), "curve fit")
                aside = captured(task.choose(n), derived_seed(seed, "curve choose"), "curve choose")
                learned = methods.learned(train, every["self_contrast"], aside, lr=0.01, seed=seed)
            except BadInput as error:  # nothing says which keys are right where one fits
                log.info("no ceiling: %s", error)
        return self._rows(rows, every, learned, "curve")

    def _blind(self, heads: Sequence[Head]) -> dict[str, Method]:
        """Methods that need no labels."""
        index = [self.contrast.heads.index(head) for head in heads]
        delta, uncentred = (self.contrast.delta(center)[index].cpu() for center in (True, False))
        cov_q, cov_k = (c[index].cpu() for c in self.contrast.covariances())
        return {
            "self_contrast": methods.moving(delta),
            "self_contrast_svd": methods.leading(checked_svd(delta)[2]),
            "self_contrast_uncentred": methods.moving(uncentred),
            "cov_qk_all": methods.cov_qk(cov_q, cov_k),
            "cov_qk_all_moving": methods.moving(cov_q @ cov_k),
            "key_pca_all": methods.key_pca(cov_k),
        }

    def _rows(self, rows: SwapRows, found: dict[str, Method], learned: Method | None, name: str) -> Rows:
        """Every size, kept as it is done; ``gain`` is a method's over the self-contrast, paired by prompt."""
        options = self.study.options
        every: dict[str | Condition, Method] = dict(found.items())
        if self.singular is not None:
            every["omega_svd"] = methods.omega_svd(self.singular, rows.heads)
        if learned is not None:
            every["ceiling"] = learned
        every["random"] = methods.random(rows.heads, rows.rows.d_head, options.draws, options.seed)
        of_size = partial(rows.curve, every, against="self_contrast", seed=options.seed)
        return [row for k in self.sizes for row in self.study.job.once(f"{name} {k}", partial(of_size, sizes=[k]))]
