"""What several bases are to each other: angles, a joint basis, oblique projectors, and random ones to compare with.

A projector is kept as two thin factors, ``P = left rightᵀ``: ``xᵀ P y = (xᵀ left)(rightᵀ y)`` never needs d × d.
An orthogonal projector has ``left = right``; an oblique one takes ``right`` from the dual basis of the whole set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput

_DEPENDENT = 1e-8  # relative size under which a direction of a joint basis is a copy of the others


class Projector(NamedTuple):
    """``P = left rightᵀ``; columns of zeros (where heads differ in rank) do nothing."""

    left: Float[Tensor, "*n d r"]
    right: Float[Tensor, "*n d r"]

    @property
    def rank(self) -> Tensor:
        """Number of directions that are not zero columns."""
        return (self.left.abs().amax(dim=-2) > 0).sum(dim=-1)

    def matrix(self) -> Float[Tensor, "*n d d"]:
        """``P`` itself, for small d."""
        return self.left @ self.right.mT

    def cut(self, k: int | Sequence[int]) -> Projector:
        """Its first k columns; of k per head, zeros fill up those that have fewer."""
        width = k if isinstance(k, int) else max(k)
        if not 1 <= width <= self.left.shape[-1]:
            raise BadInput(f"rank {width} does not fit into the {self.left.shape[-1]} dimensions of the head.")
        left, right = (factor[..., :width] for factor in self)
        if isinstance(k, int):
            return Projector(left, right)
        keep = (torch.arange(width) < torch.tensor(k)[:, None])[:, None].to(left.device)
        return Projector(left.where(keep, 0.0), right.where(keep, 0.0))

    @classmethod
    def orthogonal(cls, basis: Float[Tensor, "*n d r"]) -> Projector:
        """Projector onto an orthonormal basis."""
        return cls(basis, basis)

    @classmethod
    def stack(cls, projectors: Sequence[Projector]) -> Projector:
        """One per head, padded with zero columns to a common rank."""
        if len(projectors) == 1:
            return cls(*(factor[None] for factor in projectors[0]))
        width = max(p.left.shape[-1] for p in projectors)
        return cls(
            *(torch.stack([_padded(factor, width) for factor in factors]) for factors in zip(*projectors, strict=True))
        )


def _padded(factor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(factor, (0, width - factor.shape[-1]))


def principal_cosines(a: Float[Tensor, "*n d r"], b: Float[Tensor, "*n d s"]) -> Float[Tensor, "*n m"]:
    """Cosines of the principal angles between the spans of two orthonormal bases, largest first."""
    if a.shape[-2] != b.shape[-2]:
        raise BadInput(
            f"subspaces of different spaces have no angle: one has d_head {a.shape[-2]}, the other {b.shape[-2]}."
        )
    return torch.linalg.svdvals(a.mT @ b.to(a)).clamp_max(1.0)


def principal_angles(a: Float[Tensor, "d r"], b: Float[Tensor, "d s"]) -> Float[Tensor, " m"]:
    """Principal angles in radians, smallest first; small ones by their sine, as their cosine has no digits left."""
    cosines = principal_cosines(a, b)
    a, b = (a, b.to(a)) if a.shape[-1] >= b.shape[-1] else (b.to(a), a)
    sines = torch.linalg.svdvals(b - a @ (a.mT @ b)).flip(-1).clamp_max(1.0)
    return torch.where(cosines.square() > 0.5, sines.arcsin(), cosines.arccos())


def joint_basis(bases: Sequence[Float[Tensor, "d r"]]) -> Float[Tensor, "d r_joint"]:
    """Orthonormal basis of the sum of several subspaces; shared directions count once."""
    _check_bases(bases)
    u, s, _ = torch.linalg.svd(torch.cat(list(bases), dim=-1).to(torch.float64), full_matrices=False)
    return u[:, s > _DEPENDENT * s[0]]


def oblique_projectors(bases: Sequence[Float[Tensor, "d r"]]) -> tuple[list[Projector], float]:
    """For each subspace the projector onto it along all the others, and the condition number of the set.

    They act on their own subspace as the identity and annihilate the others, so they sum to a projector onto the joint
    span. They need independent subspaces; the condition number says how close to dependent these are (1: orthogonal).
    """
    _check_bases(bases)
    whole = torch.cat(list(bases), dim=-1).to(torch.float64)
    s = torch.linalg.svdvals(whole)
    if whole.shape[1] > whole.shape[0] or s[-1] <= _DEPENDENT * s[0]:
        raise BadInput(
            f"oblique projectors need independent subspaces, but {whole.shape[1]} directions span "
            f"{int((s > _DEPENDENT * s[0]).sum())} dimensions: lower a rank or join them."
        )
    dual = torch.linalg.pinv(whole).mT
    widths = [basis.shape[-1] for basis in bases]
    pairs = zip(whole.split(widths, dim=-1), dual.split(widths, dim=-1), strict=True)
    return [Projector(left, right) for left, right in pairs], float(s[0] / s[-1])


def random_bases(d: int, rank: int, draws: int, seed: int) -> Float[Tensor, "draws d r"]:
    """Orthonormal bases of uniformly random subspaces."""
    if not 1 <= rank <= d:
        raise BadInput(f"a random subspace of rank {rank} does not fit into {d} dimensions.")
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(draws, d, rank, generator=generator, dtype=torch.float64))[0]


def _check_bases(bases: Sequence[Tensor]) -> None:
    if not bases:
        raise BadInput("no subspace was given: name at least one.")
    if len({basis.shape[-2] for basis in bases}) > 1:
        raise BadInput(
            f"subspaces of different heads cannot be joined: their widths are {[b.shape[-2] for b in bases]}."
        )
