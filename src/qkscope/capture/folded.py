"""One head's queries and keys at many tokens, added up without carrying writers to each token.

Between a writer and a head's vector stand numbers that differ from token to token (the scalars of norms) and matrices
that do not. So tokens are added up first, each times its number, and the matrices applied once:

    ``Σ_t u_t k_c(t) = W_K W_O Σ_t u_t σ_t z_c(t)``.

Where each token asks in a direction of its own, directions are followed back instead (`qkscope.capture.sources`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.capture.held import centred, norm_scalar
from qkscope.capture.sources import Direction, answer_of
from qkscope.capture.stream import Block, Entered, Heads, Node, Normed, Part, Scaled, Sum
from qkscope.capture.writers import BIAS, EMBEDDING, Parts, Reader, Recorded, Side, part_name
from qkscope.heads import Head


@torch.no_grad()
def mean_parts(
    reader: Reader, found: Recorded, head: Head, side: Side, slots: Sequence[int]
) -> Float[Tensor, "n c d_head"]:
    """The mean over some slots of what `Reader.read` gives there, read as this side, split among writers.

    Not of `held` layers, whose parts are pushed through their own code.

    Parameters
    ----------
    reader : of the head.
    found : from its `record`.
    head, side : whose weights read the stream.
    slots : where; of keys, also when they are read as queries.
    """
    layer = head.layer
    W, c = reader.matrix(head, side)
    x, sigma = found.entered[layer][:, slots], reader.scalar(found, layer)[:, slots]
    u = torch.full_like(sigma, 1 / len(slots))
    if reader.calls[layer].qk_norms:
        linear = (x * sigma[..., None]) @ W[:, :-1].T + W[:, -1]
        true = reader.vectors(head, side, x) - c
        u = u * (true * linear).sum(-1) / linear.square().sum(-1).clamp_min(1e-30)
    pieces = _entering(reader, found, layer, u * sigma, slots)
    named = [p.values[:, :, 0] @ W[:, :-1].T for p in pieces if p.writers != [BIAS]]
    bias = u.sum(1)[:, None, None] * W[:, -1] + c
    for piece in pieces:
        if piece.writers == [BIAS]:
            bias = bias + piece.values[:, :, 0] @ W[:, :-1].T
    return torch.cat([*named, bias], dim=1)


def _entering(reader: Reader, found: Recorded, layer: int, u: Tensor, slots: Sequence[int]) -> list[Parts]:
    """``Σ_t u_t x_c(t)`` of what entered a layer, in the order of `Reader.writers`."""
    if layer == 0:
        return [Parts([EMBEDDING], _summed(found.entered[0], u, slots))]
    block = reader.blocks[layer - 1]
    return _folded(reader, found, block, layer - 1, block.tree, u, slots)


def _folded(
    reader: Reader, found: Recorded, block: Block, layer: int, node: Node, u: Tensor, slots: Sequence[int]
) -> list[Parts]:
    match node:
        case Entered():
            return _entering(reader, found, layer, u, slots)
        case Heads():
            W, b = (value.to(u.device) for value in reader.output_weights(layer))
            z = _summed(found.heads[layer], u, slots).unflatten(-1, (len(W), -1))[:, 0]
            names = [str(Head(layer, i)) for i in range(len(W))]
            return [Parts(names, torch.einsum("npha,hda->nhpd", z, W)), *_constant(b, u)]
        case Part(module):
            return [Parts([part_name(block, layer, module)], _summed(found.gave[module], u, slots))]
        case Scaled(_, gain, inner):
            pieces = _folded(reader, found, block, layer, inner, u, slots)
            return [Parts(p.writers, p.values * gain.to(p.values)) for p in pieces]
        case Sum(terms):
            every = [(number, _folded(reader, found, block, layer, term, u, slots)) for number, term in terms]
            return [Parts(p.writers, p.values * number) for number, pieces in every for p in pieces]
        case Normed(norm, inner):
            given = found.given[norm][:, slots]
            own = reader.taken_apart(norm, given)
            pieces = _folded(reader, found, block, layer, inner, u * norm_scalar(norm, own, given), slots)
            turned = [Parts(p.writers, centred(p.values, own) * own.gain.to(u)) for p in pieces]
            return [*turned, *_constant(own.bias, u)]


def _summed(values: Float[Tensor, "n p d"], u: Float[Tensor, "n t"], slots: Sequence[int]) -> Float[Tensor, "n 1 1 d"]:
    return torch.einsum("nt,ntd->nd", u, values[:, slots].to(u))[:, None, None]


def _constant(bias: Tensor, u: Tensor) -> list[Parts]:
    if not bool(bias.any()):
        return []
    return [Parts([BIAS], u.sum(1)[:, None, None, None] * bias.to(u))]


@torch.no_grad()
def key_marginals(
    reader: Reader, found: Recorded, head: Head, query: Float[Tensor, " d_head"], weights: Float[Tensor, " k"]
) -> Float[Tensor, " c"]:
    """``Σ_t w_t query·k_c(t)`` for each writer c of the keys of one row: its keys ask with directions of their own.

    Not of `held` layers.

    Parameters
    ----------
    reader : of the head.
    found : from its `record`, one row.
    head : whose keys.
    query : what meets them, as the dot product sees it.
    weights : of the key slots, any scale included.
    """
    layer = head.layer
    along = (weights[:, None] * query)[None]
    along = reader.turn(found, layer, along[:, None], "key", back=True)[:, 0]
    W, c = reader.matrix(head, "key")
    constants = along @ c
    if reader.calls[layer].qk_norms:
        x = found.entered[layer][:, 1:] * reader.scalar(found, layer)[:, 1:, None]
        linear = x @ W[:, :-1].T + W[:, -1]
        along = along * reader.qk_scalar(found, head, "key", linear, c)[..., None]
    vectors = (along @ W[:, :-1]) * reader.scalar(found, layer)[:, 1:, None]
    slots = torch.arange(1, found.columns.shape[1], device=vectors.device)
    answer = answer_of(reader, found, Direction(layer, slots, vectors, constants + along @ W[:, -1]))
    return torch.stack([answer.values[name].sum() for name in reader.writers(layer)])
