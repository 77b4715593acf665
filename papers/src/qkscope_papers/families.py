"""Tiny models of every family, and the error of their traces.

A family is transformers' ``model_type``. A tiny model is built in milliseconds from its family's
default config made small (`small`), and set besides as families.toml says: where a family allows
it, ``d_head · heads ≠ d_model``.

A family is traced (`trace_error`) if parts sum to the logit: for a query, a key and a head, with
the true vectors q and k and their parts, ``error = max |Σ_c q_c·k − q·k|, |Σ_c q·k_c − q·k|`` over
``max |q_c·k|, |q·k_c|``.
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run
from qkscope.model.capture_types import Places
from qkscope.model.inputs import (
    PaddingSide,
    input_device,
    model_pad_id,
    pad_rows,
    short_ids,
    short_inputs,
)
from qkscope.model.scope import Scope
from qkscope.model.tap import Call, Stop
from qkscope.model.tiny_copy import loud_model, small_config

_TABLE = tomllib.loads(files("qkscope_papers").joinpath("families.toml").read_text("utf-8"))
_HEADS: dict[str, Any] = {
    "masked": transformers.AutoModelForMaskedLM,
    "image": transformers.AutoModelForImageClassification,
    "image_text": transformers.AutoModelForImageTextToText,
    "sequence": transformers.AutoModelForSeq2SeqLM,
}


def _rows() -> dict[str, dict[str, Any]]:
    """Rows of the table, then every other type of causal model; one that stands there with another
    head comes again.
    """
    rows = dict(_TABLE["families"])
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        again = rows.get(family, {}).get("kind") == "masked"
        rows.setdefault(f"{family} (decoder)" if again else family, {"type": family})
    return rows


FAMILIES: dict[str, dict[str, Any]] = _rows()
"""Every family we try, in the order of the table, and what its tiny model sets besides small sizes.
"""


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """The config of a family's tiny model; ``overrides`` replace the family's own settings."""
    if family not in FAMILIES:
        close = " or ".join(get_close_matches(family, FAMILIES)) or "llama"
        raise BadInput(
            f"no tiny model for the family {family!r}: try {close}; `qkscope models --all` names "
            "all."
        )
    row = FAMILIES[family]
    parts = [_TABLE["parts"][name] for name in row.get("is", ())]
    own = {name: value for name, value in row.items() if name not in ("type", "is", "kind")}
    settings = {name: value for part in (*parts, own, overrides) for name, value in part.items()}
    config = transformers.AutoConfig.for_model(row.get("type", family))
    if "kind" not in row and hasattr(
        config, "is_decoder"
    ):  # BERT and its relatives look both ways unless told
        settings = {"is_decoder": True, **settings}
    if "text_config" in config.sub_configs:
        settings = {"text_config": small_config(config.text_config, **settings).to_dict()}
    return small_config(config, **settings)


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """Build a tiny random model of one architecture, the same one for the same seed, without
    touching the global RNG.

    Parameters
    ----------
    family : str
        A key of `FAMILIES`: transformers' ``model_type``.
    seed : int
        Seed of the weights.
    **overrides
        Config values that replace the family's own, for example ``use_qk_norm=False``.

    Returns
    -------
    PreTrainedModel
        In float32 and eval mode, with the head that gives ``logits`` (next token, masked token or
        image class).
    """
    config = tiny_config(family, **overrides)
    head = _HEADS.get(FAMILIES[family].get("kind", ""), transformers.AutoModelForCausalLM)
    return loud_model(head.from_config, config, seed)


LENGTHS = (37, 33)
"""Tokens of the two prompts: beyond every length that a tiny config names."""


def two_prompts(
    scope: Scope, side: PaddingSide | None = None, lengths: tuple[int, ...] = (9, 7)
) -> tuple[dict[str, Tensor], Places]:
    """Two prompts, padded where they can be, or two images; the last token of each is the query."""
    model = scope.model
    sides = scope.facts.sides
    if model.main_input_name == "pixel_values":
        inputs = short_inputs(model, lengths)
        tokens = []

        def count(call: Call) -> None:
            tokens.append(call.k.shape[2])
            raise Stop

        scope.watch(inputs, count)
        mask = torch.ones(len(lengths), tokens[0], device=input_device(model))
    else:
        rows = short_ids(model, lengths if sides else lengths[:1] * len(lengths))
        inputs = pad_rows(
            rows, model_pad_id(model) or 0, side or (*sides, "left")[0], scope.facts.takes_positions
        )
        inputs = {name: value.to(input_device(model)) for name, value in inputs.items()}
        mask = inputs["attention_mask"]
    row = torch.arange(len(mask), device=mask.device)
    last = mask.shape[1] - 1 - mask.flip(-1).long().argmax(-1)
    return inputs, Places.everywhere(row, last, mask)


def sum_error(run: Run, head: Head, key_mask: Tensor) -> float:
    """The largest difference between a head's logits and the sum of their parts, over the largest
    part.

    Parameters
    ----------
    run : of a batch.
    head : whose logits.
    key_mask : which of the places are keys.
    """
    pieces = run.stream(head.layer)
    (q, q_parts), (k, k_parts) = (
        (run.true(head, side), run.read(head, side, pieces)) for side in ("query", "key")
    )
    logits = torch.einsum("nd,nkd->nk", q[:, 0], k)
    split = (
        torch.einsum("ncd,nkd->nck", q_parts[:, :, 0], k),
        torch.einsum("nd,nckd->nck", q[:, 0], k_parts),
    )
    errors = [((parts.sum(1) - logits) * key_mask).abs().max() for parts in split]
    largest = [(parts * key_mask[:, None]).abs().max() for parts in split]
    return float(max(errors) / max(largest))


def trace_error(scope: Scope, side: PaddingSide | None = None) -> float:
    """The largest `sum_error` of all heads but those of layer 0, on a short batch of prompts of two
    lengths.

    Raises
    ------
    BadInput
        If the model cannot be traced; the sentence says why.
    """
    heads = [head for head in scope.heads() if head.layer > 0]
    if not heads:
        raise BadInput(
            f"{scope.name} cannot be traced: only the embedding writes before its heads."
        )
    inputs, places = two_prompts(scope, side, LENGTHS)
    widths = {scope.facts.layers[head.layer].d_head for head in heads}
    errors = []
    for width in sorted(widths):
        some = [head for head in heads if scope.facts.layers[head.layer].d_head == width]
        run = Reader(scope, some).record(inputs, places)
        errors += [sum_error(run, head, places.key_mask) for head in some]
    return max(errors)
