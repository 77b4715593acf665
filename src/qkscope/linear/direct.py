"""Direct effects: what writers add to the next token's logits by themselves, later blocks only handing it on.

With every norm frozen, what leaves the last block goes to the logits by a linear map (`Run.left` and `Run.logits` are
tied by it), and a block hands on what enters it. So a vector is pushed up to all logits, or one token's logit is pulled
down to every writer: gradient times activation, one backward for all.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.capture.blocks import Entered, Heads, Node, Normed, Scaled, Sum
from qkscope.linear.run import Direction, Run, centred


def direct_effect(run: Run, layer: int, written: Float[Tensor, "n d_model"]) -> Float[Tensor, "n v"] | None:
    """What vectors that heads of a layer write at the query add to the next token's logits.

    None where what stands between the last block and the logits is not linear.

    Parameters
    ----------
    run : with logits.
    layer : of the heads.
    written : behind W_O.
    """
    values = written[:, None]
    for later in range(layer, len(run.reader.blocks)):
        source = Heads if later == layer else Entered
        carried = _carried(run, run.reader.blocks[later].tree, source, values)
        values = torch.zeros_like(values) if carried is None else carried
    left, logits = _end(run)
    with torch.enable_grad():
        v = torch.zeros_like(logits, requires_grad=True)
        (pulled,) = torch.autograd.grad(logits, left, v, create_graph=True, retain_graph=True)
        at = run.row.to(pulled.device), run.columns[:, 0].to(pulled.device)
        pushed = (pulled[at] * values[:, 0].to(pulled)).sum()
        found, bent = torch.autograd.grad(pushed, (v, left), allow_unused=True, retain_graph=True)
    return None if bent is not None and bool(bent.any()) else found.to(run.row.device)


def direct_effects(run: Run, token: int) -> dict[str, Float[Tensor, "n 1"]] | None:
    """What every writer adds, at the query, to a token's logit over the mean of all; None where `direct_effect` is."""
    if direct_effect(run, len(run.reader.blocks) - 1, torch.zeros_like(run.entered[0][:, 0])) is None:
        return None
    left, logits = _end(run)
    with torch.enable_grad():
        logit = (logits[:, token] - logits.mean(1)).sum()
        (g,) = torch.autograd.grad(logit, left, retain_graph=True)
    g = g[run.row.to(g.device), run.columns[:, 0].to(g.device)][:, None].to(run.entered[0])
    slots = torch.zeros(1, dtype=torch.long, device=g.device)
    return run.answer(Direction(len(run.reader.blocks), slots, g, torch.zeros_like(g[..., 0]))).values


def _end(run: Run) -> tuple[Tensor, Tensor]:
    assert run.left is not None
    assert run.logits is not None
    return run.left, run.logits


def _carried(run: Run, node: Node, source: type, values: Tensor) -> Float[Tensor, "n 1 d"] | None:
    """What vectors that enter a block, or that its heads write, are behind it, at the query; None: nothing."""
    match node:
        case Scaled(_, gain, inner):
            found = _carried(run, inner, source, values)
            return None if found is None else found * gain.to(found)
        case Sum(terms):
            every = [(number, _carried(run, term, source, values)) for number, term in terms]
            parts = [number * part for number, part in every if part is not None]
            return torch.stack(parts).sum(0) if parts else None
        case Normed(norm, inner):
            found = _carried(run, inner, source, values)
            own, scale = run.scale(norm, slice(0, 1))
            return None if found is None else centred(found, own) * scale
    return values if isinstance(node, source) else None
