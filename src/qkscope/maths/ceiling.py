"""How well a subspace could do: an orthonormal basis learned by gradient to move the attention when it is swapped.

``max_V E[a_target / (a_orig + a_target)]`` after the exchange, over ``V = qr(A)`` of k columns, by Adam on A through
the closed form of the swap. The step that does best on rows kept aside is taken, so that it is a ceiling for new rows
and not for those it was trained on: with other words, where the rows to come have other words. As in
distributed alignment search, it needs to be told which keys to exchange.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.maths.bases import Projector
from qkscope.maths.swap import SwapRows


def learned_basis(
    rows: SwapRows,
    start: Float[Tensor, "h d r"],
    kept: SwapRows | None = None,
    *,
    steps: int = 150,
    lr: float = 0.03,
    aside: float = 0.25,
    seed: int = 0,
) -> Float[Tensor, "h d r"]:
    """The basis of each head, from ``start`` on; rows ``kept`` (or a share ``aside`` of all) decide when to stop."""
    n = len(rows)
    if n < 8:
        raise BadInput(f"a basis cannot be learned from {n} rows: give 8 or more.")
    if kept is None:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(rows.orig.device)
        cut = max(int(n * (1 - aside)), 1)
        rows, kept = rows.at(order[:cut]), rows.at(order[cut:])
    free = start.to(rows.rows.q).clone().requires_grad_()
    optimiser = torch.optim.Adam([free], lr=lr)
    best = start.to(rows.rows.q).clone()
    reached = _moved(kept, best).detach()
    for step in range(steps):
        optimiser.zero_grad()
        (-_moved(rows, torch.linalg.qr(free)[0]).sum()).backward()
        optimiser.step()
        if step % 5 == 4:
            with torch.no_grad():
                basis = torch.linalg.qr(free)[0]
                now = _moved(kept, basis)
                better = now > reached
                best = torch.where(better[:, None, None], basis, best)
                reached = torch.where(better, now, reached)
    return best.double()


def _moved(rows: SwapRows, basis: Float[Tensor, "h d r"]) -> Float[Tensor, " h"]:
    return rows.swap(Projector.orthogonal(basis)).shift.mean(dim=0)
