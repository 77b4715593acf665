"""Direct effects: what writers add to the next token's logits by themselves, later blocks only handing it on.

With every norm frozen, what leaves the last block goes to the logits by a linear map (`Run.left` and `Run.logits` are
tied by it), and a block hands on what enters it. So a direction on the logits is pulled down to every writer, one
backward for all; that map, transposed by one more gradient, pushes what a head writes up to all logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.linear.run import Answer, Direction, Run


def direct_effect(run: Run, layers: Sequence[int], written: Float[Tensor, "n d_model"]) -> Float[Tensor, "n v"] | None:
    """What vectors that heads write at the query add to the next token's logits.

    None where what stands between the last block and the logits is not linear.

    Parameters
    ----------
    run : with logits.
    layers : of each row's head.
    written : behind W_O.
    """
    assert run.logits is not None
    with torch.enable_grad():
        along = torch.zeros_like(run.logits, requires_grad=True)
        answer = _pulled(run, along)
        if answer is None:
            return None
        along_heads = torch.stack([answer.heads[layer][i, 0] for i, layer in enumerate(layers)])
        (effect,) = torch.autograd.grad((along_heads * written).sum(), along)
    return effect.to(run.row.device)


def direct_effects(run: Run, token: int) -> dict[str, Float[Tensor, "n 1"]] | None:
    """What every writer adds, at the query, to a token's logit over the mean of all; None where `direct_effect` is."""
    assert run.logits is not None
    along = torch.full_like(run.logits, -1 / run.logits.shape[1])
    along[:, token] += 1
    answer = _pulled(run, along.detach())
    return None if answer is None else {name: value.detach() for name, value in answer.values.items()}


def _pulled(run: Run, along: Float[Tensor, "n v"]) -> Answer | None:
    """What every writer says in a direction on the logits, before any soft-cap; None where they are not linear."""
    left, logits = run.left, run.logits
    assert left is not None
    assert logits is not None
    cap = getattr(run.reader.scope.model.config.get_text_config(), "final_logit_softcapping", None)
    at, slots = (run.row.to(left.device), run.columns[:, 0].to(left.device)), torch.zeros(1, dtype=torch.long)
    with torch.enable_grad():
        logits = logits if cap is None else (logits / cap).atanh() * cap
        tried = torch.linspace(-1, 1, logits.shape[-1]).to(logits).expand_as(logits)
        (g,) = torch.autograd.grad(logits, left, tried, create_graph=True, retain_graph=True)
        bent = None
        if g.requires_grad:
            (bent,) = torch.autograd.grad(g.square().sum(), left, allow_unused=True, retain_graph=True)
        # a cap undone rounds
        if bent is not None and bool((bent * left).abs().max() > 1e-2 * g.detach().square().max()):
            return None
        (g,) = torch.autograd.grad(logits, left, along, create_graph=along.requires_grad, retain_graph=True)
    g = g[at].to(run.entered[0])
    said = (logits * along).sum(1).detach().to(g) - (g.detach() * left.detach()[at].to(g)).sum(-1)
    asked = Direction(len(run.reader.blocks), slots.to(run.row.device), g[:, None], said[:, None])
    return run.answer(asked)
