"""Tables of distances: a head's mean row by how far back a key stands, the first token apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput

#: Distances that a table holds apart; between two of them it is constant.
STEPS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 14, 18, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Distances:
    """A head's mean row by distance, the first token apart.

    Parameters
    ----------
    back : mean attention on one token that stands so far back, at each of `STEPS`.
    first : mean attention on the first token from a query at each of `STEPS`.
    """

    back: tuple[float, ...]
    first: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.back) != len(STEPS) or len(self.first) != len(STEPS):
            raise BadInput(f"a table of distances has {len(STEPS)} numbers for each of its sides.")

    @classmethod
    def of(cls, mean: Float[Tensor, "t t"]) -> Distances:
        """Read the table off a mean pattern; rows are queries."""
        length = len(mean)
        steps = torch.arange(length)
        number = step_number(steps)
        # no row holds a last distance without the first token, so its mean is over none
        counted = torch.arange(length - 1, -1, -1).clamp(min=0)
        sums = torch.stack([mean.diagonal(-step)[1:].sum() for step in range(length)])
        back = _mean_by(number, sums, counted)
        first = _mean_by(number, mean[:, 0], torch.ones(length))
        return cls(_digits(back), _digits(first))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"back": list(self.back), "first": list(self.first)}


def step_number(steps: Int[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    """The number of the entry of a table of distances that holds each distance.

    >>> step_number(torch.tensor([0, 9, 10, 500])).tolist()
    [0, 9, 9, 18]
    """
    return torch.bucketize(steps, torch.tensor(STEPS, device=steps.device), right=True) - 1


def _mean_by(
    number: Int[Tensor, " t"], sums: Float[Tensor, " t"], counts: Float[Tensor, " t"]
) -> Float[Tensor, " n"]:
    """Means by entry; one that nothing falls into has that of the entry before."""
    size = len(STEPS)
    total = torch.zeros(size).index_add(0, number, sums.float())
    count = torch.zeros(size).index_add(0, number, counts.float())
    means = total / count.clamp(min=1)
    last = int((count > 0).nonzero().max())
    return torch.where(torch.arange(size) > last, means[last], means)


def _digits(values: Iterable[float] | Tensor) -> tuple[float, ...]:
    """Numbers of three digits."""
    return tuple(float(f"{float(value):.3g}") for value in values)
