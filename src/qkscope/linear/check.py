"""Whether parts sum to the whole, on a short batch of prompts: what a model must show before it is traced."""

from __future__ import annotations

import torch
from torch import Tensor

from qkscope.capture.families import LENGTHS, two_prompts
from qkscope.capture.inputs import PaddingSide
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run


def sum_error(run: Run, head: Head, key_mask: Tensor) -> float:
    """The largest difference between a head's logits and the sum of their parts, over the largest part.

    Parameters
    ----------
    run : of a batch.
    head : whose logits.
    key_mask : which of the places are keys.
    """
    pieces = run.stream(head.layer)
    (q, q_parts), (k, k_parts) = ((run.true(head, side), run.read(head, side, pieces)) for side in ("query", "key"))
    logits = torch.einsum("nd,nkd->nk", q[:, 0], k)
    split = (torch.einsum("ncd,nkd->nck", q_parts[:, :, 0], k), torch.einsum("nd,nckd->nck", q[:, 0], k_parts))
    errors = [((parts.sum(1) - logits) * key_mask).abs().max() for parts in split]
    largest = [(parts * key_mask[:, None]).abs().max() for parts in split]
    return float(max(errors) / max(largest))


def trace_error(scope: Scope, side: PaddingSide | None = None) -> float:
    """The largest `sum_error` of all heads but those of layer 0, on a short batch of prompts of two lengths.

    Raises
    ------
    BadInput
        If the model cannot be traced; the sentence says why.
    """
    heads = [head for head in scope.heads() if head.layer > 0]
    if not heads:
        raise BadInput(f"{scope.name} cannot be traced: only the embedding writes before its heads.")
    inputs, places = two_prompts(scope, side, LENGTHS)
    widths = {scope.facts.layers[head.layer].d_head for head in heads}
    errors = []
    for width in sorted(widths):
        some = [head for head in heads if scope.facts.layers[head.layer].d_head == width]
        run = Reader(scope, some).record(inputs, places)
        errors += [sum_error(run, head, places.key_mask) for head in some]
    return max(errors)
