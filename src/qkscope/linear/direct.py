"""Direct effects: what writers add to the next token's logits by themselves, later blocks only handing it on.

With every norm frozen, what leaves the last block goes to the logits by a linear map (`Run.left` and `Run.logits` are
tied by it), and a block hands on what enters it. So a vector is pushed up to all logits, or one token's logit is pulled
down to every writer: gradient times activation, one backward for all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.capture.blocks import Entered, Heads, Node, Normed, Scaled, Sum
from qkscope.linear.run import Direction, Run


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
    end = _End.of(run)
    if not end.linear:
        return None
    with torch.enable_grad():
        v = torch.zeros_like(end.logits, requires_grad=True)
        (pulled,) = torch.autograd.grad(end.logits, end.left, v, create_graph=True, retain_graph=True)
        pushed = (pulled[end.at] * values[:, 0].to(pulled)).sum()
        (found,) = torch.autograd.grad(pushed, v, retain_graph=True)
    return found.to(run.row.device)


def direct_effects(run: Run, token: int) -> dict[str, Float[Tensor, "n 1"]] | None:
    """What every writer adds, at the query, to a token's logit over the mean of all; None where `direct_effect` is."""
    end = _End.of(run)
    if not end.linear:
        return None
    with torch.enable_grad():
        logit = end.logits[:, token] - end.logits.mean(1)
        (g,) = torch.autograd.grad(logit.sum(), end.left, retain_graph=True)
    constants = logit.detach() - (g[end.at].float() * end.left.detach()[end.at].float()).sum(-1)
    g, slots = g[end.at][:, None].to(run.entered[0]), torch.zeros(1, dtype=torch.long, device=run.row.device)
    return run.answer(Direction(len(run.reader.blocks), slots, g, constants[:, None].to(g))).values


class _End(NamedTuple):
    """What leaves the last block, next-token logits before any soft-cap, where the queries are, and if it is linear."""

    left: Float[Tensor, "b t d_model"]
    logits: Float[Tensor, "n v"]
    at: tuple[Tensor, Tensor]
    linear: bool

    @classmethod
    def of(cls, run: Run) -> _End:
        """The end of a run with logits."""
        left, logits = run.left, run.logits
        assert left is not None
        assert logits is not None
        cap = getattr(run.reader.scope.model.config.get_text_config(), "final_logit_softcapping", None)
        with torch.enable_grad():
            logits = logits if cap is None else (logits / cap).atanh() * cap
            along = torch.linspace(-1, 1, logits.shape[-1]).to(logits).expand_as(logits)
            (g,) = torch.autograd.grad(logits, left, along, create_graph=True, retain_graph=True)
            bent = None
            if g.requires_grad:
                (bent,) = torch.autograd.grad(g.square().sum(), left, allow_unused=True, retain_graph=True)
        # a cap undone rounds
        linear = bent is None or bool((bent * left).abs().max() <= 1e-2 * g.detach().square().max())
        return cls(left, logits, (run.row.to(left.device), run.columns[:, 0].to(left.device)), linear)


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
            return None if found is None else own.centred(found) * scale
    return values if isinstance(node, source) else None
