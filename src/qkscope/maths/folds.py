"""How many directions of a contrast predict units that took no part in finding them.

The sums are kept in folds of units (of words, where words are the unit). Each fold is left out in turn: the others give
singular vectors, and the fold says how well the first r of them, with their singular values, rebuild its own ΔC; the
fewest that rebuild 99% of what any number of them can are the rank (the paper's 99%, of data that took no part). Noise
that one fold has is not in another, so what only this sample of units shows does not help: pure noise has rank 0.
Unlike the number of directions *detected*, this does not go on growing with the number of prompts when words are what
is scarce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qkscope.maths.augmented import Center, centred_delta
from qkscope.maths.moments import Moments
from qkscope.maths.svd import ROUNDING, checked_svd

_FEWEST = 3  # folds with both signs
_ENOUGH = 0.99


def cross_validated_rank(moments: Moments, contrast: str, center: Center, rows: Sequence[int]) -> list[int]:
    """Rank by cross-validation over units, of the heads in these rows of the sums."""
    folds = moments.fold_sums(contrast)[:, list(rows)]
    whole, sizes = folds.sum(dim=0), moments.sizes(contrast)[list(rows)]
    gains = []
    for own in folds:
        count, rest = own[:, -1, :, -1], whole - own
        if not bool((count > 0).all()) or not bool((rest[:, -1, :, -1] > 0).all()):
            continue
        u, s, v = checked_svd(centred_delta(rest, center))
        s = torch.where(s > ROUNDING * sizes[:, None], s, torch.zeros_like(s))
        held = (u.mT @ centred_delta(own, center, reference=_means_of(rest, count)) @ v).diagonal(dim1=-2, dim2=-1)
        gain = (2 * held - s) * s  # how much less of the fold's ‖ΔC‖² is left when the j-th component is taken out
        share = count.sum(dim=1) / whole[:, -1, :, -1].sum(dim=1)
        gains.append(gain.cumsum(dim=1) * share[:, None])
    if len(gains) < _FEWEST:
        return [0] * len(rows)
    rebuilt = torch.stack(gains).sum(dim=0)  # heads, components; each fold by its share of the data
    rebuilt = torch.cat([torch.zeros_like(rebuilt[:, :1]), rebuilt], dim=1)
    enough = rebuilt >= _ENOUGH * rebuilt.amax(dim=1, keepdim=True)
    return enough.int().argmax(dim=1).tolist()  # the first


def _means_of(rest: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The mean query and key of the other folds, with the weights of the fold that was left out."""
    return rest / rest[:, -1:, :, -1:] * count[:, None, :, None]
