"""What a greedy continuation asks of transformers, and what it cannot be asked of.

Greedy: each next token is the argmax of the model's logits. A model's own generation config may ask
for something else (a penalty on repetition, n-grams that may not repeat, guidance, beams, a time
limit), so a fresh one takes its place, of which the end tokens alone are the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from qkscope.errors import BadInput
from qkscope.model.inputs import forward_arguments

# arguments of a forward that are no part of a prompt, or that begin in the middle of one
_NO_PROMPT = (
    "cache_position",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "return_dict",
    "use_cache",
)


def greedy_config(model: Any, pad_id: int, most: int) -> GenerationConfig:
    """The config of a greedy continuation of at most so many tokens, which ends as the model says."""
    own = model.generation_config
    return GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        num_beams=1,
        # without a cache every step is a whole forward, so that what patches a forward holds
        # wherever it points
        use_cache=False,
        pad_token_id=pad_id,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )


def check_prompts(model: Any, inputs: dict[str, Tensor], sides: Sequence[str]) -> None:
    """Refuse a model that does not generate, and a batch that is no prompts or ends unevenly."""
    if not hasattr(model, "generate") or not model.can_generate():
        raise BadInput(f"{type(model).__name__} generates nothing: load a model with an LM head.")
    if "input_ids" not in inputs:
        raise BadInput("generation continues prompts: give a text, or a batch with input_ids.")
    taken = forward_arguments(model) - {"kwargs", *_NO_PROMPT}
    others = sorted(inputs.keys() - taken)
    if others:
        raise BadInput(
            f"generation here is greedy, from a prompt alone: leave {', '.join(others)} out."
        )
    mask = inputs.get("attention_mask")
    if mask is not None and not bool(mask[:, -1].all()):
        how = "generate from one at a time"
        if "left" in sides:
            how = "encode with padding_side='left'"
        raise BadInput(f"generation needs prompts that end together: {how}.")
