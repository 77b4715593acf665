"""Tiny random models of every architecture we look into, so that support is measured and never claimed.

A family is transformers' ``model_type``. Each tiny model is small enough to build in milliseconds and *loud* enough to
catch mistakes: matrices are drawn from N(0, 0.2²), so that attention is far from uniform, and everything else (norm
gains, biases, sinks) is moved from its initial value to ``p₀ + 0.4 ε``, so that a forgotten gain or bias shows.
Windows are shorter than the test batch and, where a family allows it, ``d_head · heads ≠ d_model``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)

from qkscope.capture.inputs import model_pad_id
from qkscope.errors import BadInput

_SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_WINDOW = 4
_LOCAL_GLOBAL = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 10}
_HYBRID = {"num_hidden_layers": 4, "head_dim": 16}
_ROBERTA = {"pad_token_id": 1, "bos_token_id": 0}  # positions are counted from the ids that are not the padding id
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mistral": {"head_dim": 12, "sliding_window": _WINDOW},
    "mixtral": {"num_local_experts": 4},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma": {"head_dim": 12},
    "gemma2": {
        "head_dim": 12,
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "attn_implementation": "eager",  # sdpa, the default of some versions, drops the soft-cap
    },
    "gemma3_text": {
        "head_dim": 12,
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 24,
        "layer_types": _LOCAL_GLOBAL,
    },
    "gemma3": {},
    "olmo": {"clip_qkv": None},
    "olmo2": {},
    "olmo3": {"sliding_window": _WINDOW, "layer_types": _LOCAL_GLOBAL},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_oss": {
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": _WINDOW,
        "layer_types": _LOCAL_GLOBAL,
        "rope_parameters": _YARN,
    },
    "starcoder2": {"sliding_window": _WINDOW},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": _WINDOW, "layer_types": _LOCAL_GLOBAL},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "granitemoe": {"num_local_experts": 4, "attention_multiplier": 0.2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi": {"qk_layernorm": True},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "head_dim": 12},
    "glm": {"head_dim": 12},
    "glm4": {"head_dim": 12},
    "glm4_moe": {**_EXPERTS, "head_dim": 12, "n_routed_experts": 4, "use_qk_norm": True},
    "nemotron": {},
    "helium": {"head_dim": 16},
    "ministral": {"head_dim": 12, "sliding_window": _WINDOW, "layer_types": _LOCAL_GLOBAL},
    "exaone4": {"sliding_window": _WINDOW, "layer_types": _LOCAL_GLOBAL},
    "arcee": {},
    "seed_oss": {"head_dim": 12},
    "ernie4_5": {"head_dim": 12},
    "persimmon": {},
    "gpt_bigcode": {},
    "biogpt": {},
    "ctrl": {"dff": 96},
    "jetmoe": {"kv_channels": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "apertus": {"rope_parameters": _DEFAULT_ROPE},
    "nanochat": {},
    "diffllama": {},
    "hunyuan_v1_dense": {"head_dim": 12},
    "qwen2_vl": {"rope_parameters": {**_DEFAULT_ROPE, "mrope_section": [2, 3, 3]}},
    "gemma3n_text": {
        **_HYBRID,
        "num_kv_shared_layers": 2,
        "layer_types": 2 * _LOCAL_GLOBAL,
        "sliding_window": _WINDOW,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
        "laurel_rank": 4,
    },
    "falcon_h1": {
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "llama4_text": {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 96},
    "bert": {},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "layoutlm": {"hidden_size": 128},
    "electra": {"embedding_size": 64},
    "distilbert": {"hidden_dim": 96},
    "modernbert": {"local_attention": 2 * _WINDOW, "cls_token_id": 1, "sep_token_id": 2},
    "vit": _IMAGE,
    "dinov2": _IMAGE,
    "falcon": {},
    "bloom": {},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": _WINDOW},
    "codegen": {"rotary_dim": 8},
    "mpt": {},
    "mamba": {},
    "qwen3_next": {
        **_HYBRID,
        **_EXPERTS,
        "layer_types": 2 * ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": 2 * ["conv", "full_attention"]},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": 2 * ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "mllama": {"num_hidden_layers": 4, "cross_attention_layers": [1], "rope_parameters": _DEFAULT_ROPE},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_OWN_NAMES: dict[str, dict[str, Any]] = {  # families whose configs call their sizes otherwise
    **{name: _SEQ2SEQ for name in ("bart", "mbart", "pegasus", "blenderbot", "blenderbot-small", "plbart")},
    "marian": _SEQ2SEQ | {"pad_token_id": 99, "decoder_start_token_id": 99},
    "whisper": _SEQ2SEQ | {"max_target_positions": 128, "max_source_positions": 32, "num_mel_bins": 8},
    "xglm": {"vocab_size": 100, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
    "t5": {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
}
_TEXT_PART = {"gemma3": "gemma3_text"}  # families that carry a vision tower beside a text model of another name
_TOWER = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
_TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": _TOWER | _IMAGE,
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 4},
    "mllama": _IMAGE
    | {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 32,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    },
}
_TEXT_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "layoutlm", "electra", "distilbert", "modernbert"})
_IMAGE_ENCODERS = frozenset({"vit", "dinov2"})


def _config(family: str, **overrides: Any) -> PretrainedConfig:
    if family in _OWN_NAMES:
        return AutoConfig.for_model(family, **_OWN_NAMES[family] | overrides)
    if family in _TEXT_PART:
        text = _config(_TEXT_PART[family], **overrides).to_dict()
        return AutoConfig.for_model(
            family, text_config=text, vision_config=_TOWERS[family], mm_tokens_per_image=4, image_token_id=99
        )
    if family in _TOWERS:
        text = {**_SIZES, **_OVERRIDES[family], **overrides}
        return AutoConfig.for_model(family, text_config=text, vision_config=_TOWERS[family])
    settings = {**_SIZES, **_OVERRIDES[family], **overrides}
    if family in _TEXT_ENCODERS | _IMAGE_ENCODERS:  # encoders know no KV heads and no cache
        settings = {name: value for name, value in settings.items() if name not in ("num_key_value_heads", "use_cache")}
    return AutoConfig.for_model(family, **settings)


FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    family: partial(_config, family) for family in [*_OVERRIDES, *_OWN_NAMES]
}
"""Every family we try, in the order of the table: ``FAMILIES[name](**overrides)`` makes its tiny config."""


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a tiny random model of one architecture, the same one for the same seed, without touching the global RNG.

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
        In float32 and eval mode, with the head that gives ``logits`` (next token, masked token or image class).
    """
    if family not in FAMILIES:
        raise BadInput(f"no tiny model for the family {family!r}: choose one of {', '.join(FAMILIES)}.")
    build: Any = AutoModelForCausalLM
    if family in _TEXT_ENCODERS:
        build = AutoModelForMaskedLM
    elif family in _IMAGE_ENCODERS:
        build = AutoModelForImageClassification
    elif family in _TOWERS and family not in _TEXT_PART:
        build = AutoModelForImageTextToText
    elif family == "t5":
        build = AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build.from_config(FAMILIES[family](**overrides), dtype=torch.float32).eval()
    _draw_weights(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        is_matrix = weight.ndim > 1 and bool((weight != weight.flatten()[0]).any())  # Cohere's gains are [head, d_head]
        weight.copy_(0.2 * noise if is_matrix else weight + 0.4 * noise)


def tiny_batch(model: PreTrainedModel, seed: int = 0, lengths: tuple[int, ...] = (11, 7)) -> dict[str, Tensor]:
    """Make the inputs a check runs on: a left-padded batch of random ids, or random images for an image encoder.

    Parameters
    ----------
    model : PreTrainedModel
        Any model; decides between ids and pixels, the vocabulary and the padding side (encoders pad on the right).
    seed : int
        Seed of the ids.
    lengths : tuple of int
        Tokens of each sequence, before padding.

    Returns
    -------
    dict
        ``input_ids`` and ``attention_mask``, or ``pixel_values``: keyword arguments of the model's forward.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if model.main_input_name == "pixel_values":
        shape = (len(lengths), config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator).to(model.device)}
    width = max(lengths)
    # ids from 5 on: the low ones are special in some families (padding moves RoBERTa's positions)
    ids = torch.randint(5, config.get_text_config().vocab_size, (len(lengths), width), generator=generator)
    start = width - torch.tensor(lengths)[:, None]
    mask = (torch.arange(width) >= start).long()
    if config.model_type in _TEXT_ENCODERS:
        mask = mask.flip(-1)
    ids = ids.masked_fill(mask == 0, model_pad_id(model) or 0)
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
