"""What the data would have looked like under a null hypothesis, one replicate per random relabelling.

Each row of data is a query and the label-weighted sums of its keys, ``s± = Σ_j w_j [k_j; 1]`` over the keys labelled ±.
A null changes only those sums, so replicates stream beside the data and nothing is stored:

- ``sign_flip``: multiply a prompt's sums by one random sign. H0: the conditions do not differ (paired keys).
- ``label_permutation``: deal a prompt's labels out again among its keys. The same H0, for unpaired keys.
- ``query_shuffle``: give a query the keys of another prompt of the batch. H0: a difference that ignores the query.

The random unit is the **prompt**: signs per (query, key) pair would inflate the significance tenfold.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.maths.draws import draw_bits, draw_signs

NullKind = Literal["sign_flip", "label_permutation", "query_shuffle"]
NULL_KINDS: tuple[NullKind, ...] = get_args(NullKind)


def signed_weights(labels: Int[Tensor, "*r b k"], weights: Float[Tensor, "b k"] | None) -> Float[Tensor, "*r b 2 k"]:
    """Weight of each key in the + sum and in the − sum."""
    both = torch.stack([labels > 0, labels < 0], dim=-2).to(torch.float64)
    return both if weights is None else both * weights.to(torch.float64)[:, None, :]


def key_sums(weights: Float[Tensor, "b s k"], keys: Float[Tensor, "b g k d"]) -> Float[Tensor, "b g s d+1"]:
    """``Σ_j w_j [k_j; 1]`` of every row, for s sets of weights (a row's keys share its q, so they meet it summed)."""
    out = keys.new_empty((*keys.shape[:2], weights.shape[1], keys.shape[3] + 1))
    out[..., :-1] = weights[:, None] @ keys
    out[..., -1] = weights.sum(dim=-1)[:, None]
    return out


def replicate_sums(
    kind: NullKind,
    seed: int,
    count: int,
    *,
    keys: Float[Tensor, "b g k d"],
    sums: Float[Tensor, "b g 2 a"],
    labels: Int[Tensor, "b k"],
    weights: Float[Tensor, "b k"] | None,
    prompts: Int[Tensor, " b"],
) -> Float[Tensor, "b g r 2 a"]:
    """The key sums ``s±`` of every row under ``count`` draws of the null.

    ``sums`` are the observed ``s±``, with the summed weight in their last place: ``a = d_head + 1``.
    """
    replicate = torch.arange(count, device=keys.device)[:, None]
    stream = NULL_KINDS.index(kind)
    if kind == "sign_flip":
        signs = draw_signs(seed, stream, replicate, prompts).T.to(sums.dtype)
        return sums[:, :, None] * signs[:, None, :, None, None]
    if kind == "label_permutation":
        dealt = signed_weights(_deal_labels(labels, prompts, seed, stream, replicate), weights)
        return key_sums(dealt.transpose(0, 1).flatten(1, 2), keys).unflatten(2, (count, 2))
    partner = _partners(prompts, seed, stream, replicate)
    return sums[partner].permute(1, 2, 0, 3, 4)


def _deal_labels(
    labels: Int[Tensor, "b k"], prompts: Int[Tensor, " b"], seed: int, stream: int, replicate: Int[Tensor, "r 1"]
) -> Int[Tensor, "r b k"]:
    """Labels dealt out again among the labelled keys of each row; the same deal for all rows of a prompt."""
    slot = torch.arange(labels.shape[1], device=labels.device)
    priority = draw_bits(seed, stream, replicate[..., None], prompts[:, None], slot)
    ignored = labels == 0
    last = torch.iinfo(torch.int64).max  # ignored keys sort last, so that they keep their label 0
    receivers = priority.masked_fill(ignored, last).argsort(dim=-1)
    givers = ignored.to(torch.int8).argsort(dim=-1, stable=True).expand_as(receivers)
    dealt = labels.expand_as(receivers).gather(-1, givers)
    return torch.zeros_like(dealt).scatter(-1, receivers, dealt)


def _partners(prompts: Int[Tensor, " b"], seed: int, stream: int, replicate: Int[Tensor, "r 1"]) -> Int[Tensor, "r b"]:
    """Whose keys each row gets: the batch's prompts permuted, the n-th row of one to the n-th row of another.

    Uniform permutations form a group, which makes the test exact; a prompt that draws itself only costs power.
    """
    same = prompts[:, None] == prompts[None, :]
    occurrence = same.tril(-1).sum(dim=1)
    rows = occurrence.argsort(stable=True)
    shuffled = draw_bits(seed, stream, replicate, prompts).argsort(dim=-1)
    by_occurrence = occurrence[shuffled].argsort(dim=-1, stable=True)
    return torch.empty_like(shuffled).index_copy(1, rows, shuffled.gather(1, by_occurrence))
