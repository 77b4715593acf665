"""How well a subspace could do: an orthonormal basis learned by gradient to move the attention when it is swapped.

``max_V E[a_target / (a_orig + a_target)]`` after the exchange, over ``V = qr(A)`` of k columns, by Adam on A through
the closed form of the swap. The step that does best on rows kept aside is taken, so that it is a ceiling for new rows
and not for those it was trained on: with other words, where the rows to come have other words. As in
distributed alignment search, it needs to be told which keys to exchange.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.maths.attention import AttentionRows
from qkscope.maths.bases import Projector
from qkscope.maths.swap import swap_attention


def learned_basis(
    rows: AttentionRows,
    orig: Int[Tensor, " n"],
    target: Int[Tensor, " n"],
    start: Float[Tensor, "h d r"],
    *,
    kept: tuple[AttentionRows, Int[Tensor, " m"], Int[Tensor, " m"]] | None = None,
    steps: int = 150,
    lr: float = 0.03,
    aside: float = 0.25,
    seed: int = 0,
) -> Float[Tensor, "h d r"]:
    """The basis of each head, from ``start`` on; rows ``kept`` (or a share ``aside`` of all) decide when to stop."""
    n = len(orig)
    if n < 8:
        raise BadInput(f"a basis cannot be learned from {n} rows: give 8 or more.")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(orig.device)
    cut = max(int(n * (1 - aside)), 1)
    if kept is None:
        fit, kept = (_part(rows, orig, target, index) for index in (order[:cut], order[cut:]))
    else:
        fit = rows, orig, target
    free = start.to(rows.q).clone().requires_grad_()
    optimiser = torch.optim.Adam([free], lr=lr)
    best = start.to(rows.q).clone()
    reached = _moved(kept, best).detach()
    for step in range(steps):
        optimiser.zero_grad()
        (-_moved(fit, torch.linalg.qr(free)[0]).sum()).backward()
        optimiser.step()
        if step % 5 == 4:
            with torch.no_grad():
                basis = torch.linalg.qr(free)[0]
                now = _moved(kept, basis)
                better = now > reached
                best = torch.where(better[:, None, None], basis, best)
                reached = torch.where(better, now, reached)
    return best.double()


_Rows = tuple[AttentionRows, Tensor, Tensor]


def _moved(part: _Rows, basis: Float[Tensor, "h d r"]) -> Float[Tensor, " h"]:
    return swap_attention(*part, Projector.orthogonal(basis)).shift.mean(dim=0)


def _part(rows: AttentionRows, orig: Tensor, target: Tensor, index: Tensor) -> _Rows:
    own = {
        name: value[index]
        for name in ("q", "k", "bias", "rest", "key_mask")
        if (value := getattr(rows, name)) is not None
    }
    return replace(rows, **own), orig[index], target[index]
