"""Whether the parts sum to the logit: the one fact behind a trace, asked of a live model.

For a query, a key and a head, with the true vectors q and k and their parts,

    ``error = max |Σ_c q_c·k − q·k|, |Σ_c q·k_c − q·k|``   over   ``max |q_c·k|, |q·k_c|``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkscope.capture.inputs import input_device, model_pad_id, pad_rows, short_ids, short_inputs
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop
from qkscope.capture.writers import Reader, Recorded
from qkscope.errors import BadInput
from qkscope.heads import Head

_LENGTHS = (9, 7)


@torch.no_grad()
def sum_error(reader: Reader, found: Recorded, head: Head, key_mask: Tensor) -> float:
    """The largest difference between a head's logits and the sum of their parts, over the largest part.

    Parameters
    ----------
    reader : of this head.
    found : what one batch left.
    head : whose logits.
    key_mask : which of the places are keys.
    """
    vectors = []
    for side in ("query", "key"):
        parts = reader.turn(found, head.layer, reader.read(found, head, side), side)
        vectors += [reader.true(found, head, side), parts]
    q, q_parts, k, k_parts = vectors
    logits = torch.einsum("nd,nkd->nk", q[:, 0], k)
    split = (torch.einsum("ncd,nkd->nck", q_parts[:, :, 0], k), torch.einsum("nd,nckd->nck", q[:, 0], k_parts))
    errors = [((parts.sum(1) - logits) * key_mask).abs().max() for parts in split]
    largest = [(parts * key_mask[:, None]).abs().max() for parts in split]
    return float(max(errors) / max(largest))


def trace_error(scope: Scope) -> float:
    """The largest `sum_error` of all heads but those of layer 0, on a short batch of prompts of two lengths.

    Raises
    ------
    BadInput
        If the model cannot be traced; the sentence says why.
    """
    if scope.n_layers < 2:
        raise BadInput(f"{scope.name} cannot be traced: it has one layer, so only the embedding writes before it.")
    inputs, places = _batch(scope)
    heads = [head for head in scope.heads() if head.layer > 0]
    widths = {scope.facts.layers[head.layer].d_head for head in heads}
    errors = []
    for width in sorted(widths):
        some = [head for head in heads if scope.facts.layers[head.layer].d_head == width]
        reader = Reader(scope, some)
        found = reader.record(inputs, places)
        errors += [sum_error(reader, found, head, places.key_mask) for head in some]
    return max(errors)


def _batch(scope: Scope) -> tuple[dict[str, Tensor], Places]:
    """Two prompts, padded where they can be, or two images; each asks from its last token."""
    model, sides = scope.model, scope.facts.sides
    if model.main_input_name == "pixel_values":
        inputs, tokens = short_inputs(model, _LENGTHS), []

        def count(call: Call) -> None:
            tokens.append(call.k.shape[2])
            raise Stop

        scope.watch(inputs, count)
        mask = torch.ones(len(_LENGTHS), tokens[0], device=input_device(model))
    else:
        rows = short_ids(model, _LENGTHS if sides else (_LENGTHS[0],) * len(_LENGTHS))
        inputs = pad_rows(rows, model_pad_id(model) or 0, sides[0] if sides else "left", scope.facts.takes_positions)
        inputs = {name: value.to(input_device(model)) for name, value in inputs.items()}
        mask = inputs["attention_mask"]
    row = torch.arange(len(mask), device=mask.device)
    last = mask.shape[1] - 1 - mask.flip(-1).long().argmax(-1)
    return inputs, Places.everywhere(row, last, mask)
