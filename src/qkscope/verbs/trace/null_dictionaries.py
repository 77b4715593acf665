"""Dictionaries without meaning, beside which a dictionary's numbers stand.

`NULLS` keep as many active features at every token: ``rotated``, the dictionary turned about its
bias by a random rotation; ``random``, random rows, the nearest to each token; ``features``, the
codes of other features; ``tokens``, the codes of other tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from qkscope.model.dictionary import Coded, Dictionary
from qkscope.sums.singular import random_rotations

NULLS = ("rotated", "random", "features", "tokens")
_RIDGE = 1e-8


def null_code(
    kind: str,
    dictionary: Dictionary,
    x: Float[Tensor, "n p d"],
    coded: Coded,
    seed: int,
    there: Bool[Tensor, "n p"] | None = None,
    target: Float[Tensor, "n p d"] | None = None,
) -> Coded:
    """Codes of a dictionary without meaning, one of `NULLS`.

    What is coded is ``x``, what is described ``target``, which differs from it for a transcoder.
    Codes of places that are not ``there`` go to no other place.
    """
    generator = torch.Generator().manual_seed(seed)
    features, width = dictionary.decoder.shape
    if kind == "rotated":
        rotation = random_rotations(width, 1, seed)[0]
        return dictionary.code(x, rotation.to(x))
    if kind == "random":
        drawn = torch.randn(features, width, generator=generator)
        unit = normalize(drawn, dim=-1).to(x)
        described = x if target is None else target
        return _nearest(unit, described - coded.bias - coded.skip, coded)
    if kind == "features":
        order = torch.randperm(features, generator=generator).to(coded.ids.device)
        other = order[coded.ids.clamp_min(0)]
        return coded._replace(ids=torch.where(coded.ids >= 0, other, -1))
    order = _other_places(x.shape[:2], there, generator).to(coded.ids.device)
    order = order[..., None].expand_as(coded.ids)
    ids = coded.ids.gather(1, order)
    values = coded.values.gather(1, order)
    return coded._replace(ids=ids, values=values)


def _other_places(
    shape: tuple[int, ...], there: Bool[Tensor, "n p"] | None, generator: torch.Generator
) -> Tensor:
    """Another place of the prompt for each place, Int [n, p]; absent places keep theirs."""
    prompts, places = shape
    order = torch.arange(places).repeat(prompts, 1)
    for row in range(prompts):
        free = torch.arange(places)
        if there is not None:
            free = there[row].cpu().nonzero()[:, 0]
        free = free[torch.randperm(len(free), generator=generator)]
        order[row, free] = free.roll(1)  # one cycle: no place keeps its own
    return order


def _nearest(unit: Float[Tensor, "f d"], x: Float[Tensor, "n p d"], coded: Coded) -> Coded:
    """The nearest directions, as many as were active at each place, with the best strengths."""
    slots = coded.ids.shape[-1]
    ids = (x @ unit.mT).topk(slots).indices
    used = torch.arange(slots, device=ids.device) < coded.active[..., None]
    rows = (unit[ids] * used[..., None]).double()
    ridge = (~used).double() + _RIDGE
    gram = rows @ rows.mT + torch.diag_embed(ridge)
    products = rows @ x.double()[..., None]
    values = torch.linalg.solve(gram, products)[..., 0].to(x)
    used_ids = ids.masked_fill(~used, -1)
    return Coded(used_ids, values * used, coded.bias, coded.skip, unit)
