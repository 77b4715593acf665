"""Which architectures can be looked into: answered by looking into a tiny random model of each, never from a list.

A family is transformers' ``model_type``. It is supported when `Scope` takes its tiny model and the self-check holds;
the error shown is ``max |softmax([cap(scale · q·k) + mask, rest]) − eager attention|`` over all heads: of a padded
batch against itself, and against each prompt alone. The second error is that of the split of its logits among writers
(`trace_error`).

Each tiny model is small enough to build in milliseconds and *loud* enough to catch mistakes: matrices are drawn from
N(0, 0.2²), so that attention is far from uniform, and everything else (norm gains, biases, sinks) is moved from its
initial value to ``p₀ + 0.4 ε``, so that a forgotten gain or bias shows. Windows are shorter than the test batch and,
where a family allows it, ``d_head · heads ≠ d_model``.

A family is traced (`trace_error`) if parts sum to the logit: for a query, a key and a head, with the true vectors q and
k and their parts, ``error = max |Σ_c q_c·k − q·k|, |Σ_c q·k_c − q·k|`` over ``max |q_c·k|, |q·k_c|``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

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
from transformers.utils import logging

from qkscope.capture.inputs import input_device, model_pad_id, pad_rows, short_ids, short_inputs
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop
from qkscope.capture.weights import head_weights
from qkscope.capture.writers import Reader, Recorded
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_call

_SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip
_BART: dict[str, Any] = {
    "vocab_size": 100, "d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 128,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_NARROW = {"head_dim": 12}  # four such heads are narrower than the stream
_WINDOW = {"sliding_window": 4}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention"]
_MIXED = {**_WINDOW, "layer_types": _LOCAL_GLOBAL}
_FOUR = {"num_hidden_layers": 4}
_LOCAL_EXPERTS = {"num_local_experts": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_ROBERTA = {"pad_token_id": 1, "bos_token_id": 0}  # positions are counted from the ids that are not the padding id
_IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 10}
_TOWER = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
_GEMMA = {**_NARROW, "query_pre_attn_scalar": 24}

_OWN: dict[str, dict[str, Any]] = {  # what a family sets besides the sizes
    "llama": {}, "qwen2": {}, "qwen3": _NARROW, "mistral": _NARROW | _WINDOW, "mixtral": _LOCAL_EXPERTS,
    "phi3": {"partial_rotary_factor": 0.5}, "gemma": _NARROW,
    # sdpa, the default of some versions, drops the soft-cap
    "gemma2": _GEMMA | _WINDOW | {"attn_logit_softcapping": 5.0, "attn_implementation": "eager"},
    "gemma3_text": _GEMMA | _MIXED, "gemma3": _GEMMA | _MIXED,
    "olmo": {"clip_qkv": None}, "olmo2": {}, "olmo3": _MIXED, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25}}, "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_oss": _NARROW | _LOCAL_EXPERTS | _MIXED | {"num_experts_per_tok": 2, "rope_parameters": _YARN},
    "starcoder2": _WINDOW, "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "cohere": {"use_qk_norm": True}, "cohere2": _MIXED,
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
                "logits_scaling": 2.0},
    "granitemoe": _LOCAL_EXPERTS | {"attention_multiplier": 0.2}, "smollm3": {"no_rope_layers": [1, 0]},
    "phi": {"qk_layernorm": True}, "phimoe": _LOCAL_EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32}, "qwen3_moe": _EXPERTS | _NARROW,
    "glm": _NARROW, "glm4": _NARROW, "glm4_moe": _EXPERTS | _NARROW | {"n_routed_experts": 4, "use_qk_norm": True},
    "nemotron": {}, "helium": {"head_dim": 16}, "ministral": _NARROW | _MIXED, "exaone4": _MIXED, "arcee": {},
    "seed_oss": _NARROW, "ernie4_5": _NARROW, "persimmon": {}, "gpt_bigcode": {}, "biogpt": {}, "ctrl": {"dff": 96},
    "jetmoe": _LOCAL_EXPERTS | {"kv_channels": 64, "num_experts_per_tok": 2}, "apertus": {"rope_parameters": _ROPE},
    "nanochat": {}, "diffllama": {}, "hunyuan_v1_dense": _NARROW,
    "qwen2_vl": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}},
    "gemma3n_text": _FOUR | _WINDOW | {
        "head_dim": 16, "num_kv_shared_layers": 2, "layer_types": 2 * _LOCAL_GLOBAL,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100, "laurel_rank": 4,
    },
    "falcon_h1": _MAMBA | {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "attention_in_multiplier": 1.5,
                           "attention_out_multiplier": 0.7, "key_multiplier": 0.8},
    "llama4_text": _LOCAL_EXPERTS | {"head_dim": 16, "intermediate_size_mlp": 96},
    "bert": {}, "roberta": _ROBERTA, "xlm-roberta": _ROBERTA, "layoutlm": {"hidden_size": 128},
    "electra": {"embedding_size": 64}, "distilbert": {"hidden_dim": 96},
    "modernbert": {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}, "vit": _IMAGE, "dinov2": _IMAGE,
    "falcon": {}, "bloom": {}, "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4}, "codegen": {"rotary_dim": 8},
    "mpt": {}, "openai-gpt": {}, "mpnet": {}, "mamba": {},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    "qwen3_next": _FOUR | _EXPERTS | {
        "head_dim": 16, "layer_types": 2 * ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": _FOUR | {"layer_types": 2 * ["conv", "full_attention"]},
    "jamba": _FOUR | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4,
                      "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "granitemoehybrid": _FOUR | _MAMBA | {"layer_types": 2 * ["mamba", "attention"], "num_local_experts": 0,
                                          "shared_intermediate_size": 96, "mamba_n_heads": 8},
    "mllama": _FOUR | {"cross_attention_layers": [1], "rope_parameters": _ROPE},
    "deepseek_v3": {
        "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: _SIZES | own for family, own in _OWN.items()},
    # families whose configs call their sizes otherwise
    "bart": _BART, "mbart": _BART, "pegasus": _BART, "blenderbot": _BART, "blenderbot-small": _BART, "plbart": _BART,
    "marian": _BART | {"pad_token_id": 99, "decoder_start_token_id": 99},
    "whisper": _BART | {"max_target_positions": 128, "max_source_positions": 32, "num_mel_bins": 8},
    "xglm": {"vocab_size": 100, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
    "t5": {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
}  # fmt: skip
"""Every family we try, in the order of the table, and what its tiny config sets."""

_BESIDE_TEXT: dict[str, dict[str, Any]] = {  # families with a vision tower: their settings are those of the text part
    "gemma3": {"vision_config": _TOWER | _IMAGE | {"num_attention_heads": 2}, "mm_tokens_per_image": 4,
               "image_token_id": 99},
    "qwen2_vl": {"vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 4}},
    "mllama": {"vision_config": _TOWER | _IMAGE | {
        "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64, "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }},
}  # fmt: skip
_READERS = ["bert", "roberta", "xlm-roberta", "layoutlm", "electra", "distilbert", "modernbert", "mpnet", "deberta-v2"]
_ENCODERS: dict[str, Any] = dict.fromkeys(_READERS, AutoModelForMaskedLM) | dict.fromkeys(
    ("vit", "dinov2"), AutoModelForImageClassification
)
_BUILDERS: dict[str, Any] = {
    **_ENCODERS, "qwen2_vl": AutoModelForImageTextToText, "mllama": AutoModelForImageTextToText,
    "t5": AutoModelForSeq2SeqLM,
}  # fmt: skip


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """The config of a family's tiny model; ``overrides`` replace the family's own settings."""
    if family not in FAMILIES:
        raise BadInput(f"no tiny model for the family {family!r}: choose one of {', '.join(FAMILIES)}.")
    settings = FAMILIES[family] | overrides
    if family in _ENCODERS:  # encoders know no KV heads and no cache
        settings = {name: value for name, value in settings.items() if name not in ("num_key_value_heads", "use_cache")}
    if family in _BESIDE_TEXT:
        settings = {"text_config": settings, **_BESIDE_TEXT[family]}
    return AutoConfig.for_model(family, **settings)


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
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS.get(family, AutoModelForCausalLM).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            # Cohere's gains are [head, d_head]: a matrix is what does not begin as one number
            is_matrix = weight.ndim > 1 and bool((weight != weight.flatten()[0]).any())
            weight.copy_(0.2 * noise if is_matrix else weight + 0.4 * noise)
    return model


class FamilyRow(TypedDict):
    """One row of the table: `reason` says why a family is refused, or what a supported one cannot do."""

    family: str
    supported: bool
    reason: str
    max_error: float | None
    trace_error: float | None


@checked_call
def list_families(families: Iterable[str] | None = None) -> list[FamilyRow]:
    """Check live which architectures can be looked into.

    Parameters
    ----------
    families : iterable of str, optional
        Names of families (transformers' ``model_type``), all that are known by default.

    Returns
    -------
    list of FamilyRow
        In the order asked for: ``family``, ``supported``, ``reason``, ``max_error`` of the attention and
        ``trace_error`` of its split among writers (None where there is none; the reason says why).

    Examples
    --------
    >>> import qkscope as qk
    >>> [(row["family"], row["supported"]) for row in qk.list_families(["bloom", "mamba"])]
    [('bloom', True), ('mamba', False)]
    """
    with _quietly():
        return [check_family(family) for family in (FAMILIES if families is None else families)]


def check_family(family: str) -> FamilyRow:
    """Build one tiny model, look into it, and say what came out."""
    try:
        scope = Scope.from_model(tiny_model(family), check=False)
        check = scope.self_check()
        error = max(check.attention_error, check.padding_error)
    except Exception as failure:  # one family that breaks (or that this transformers lacks) must not hide the others
        if family not in FAMILIES:
            raise
        return FamilyRow(family=family, supported=False, reason=_why(failure), max_error=None, trace_error=None)
    limits, split = list(_limits(scope)), None
    try:
        split = trace_error(scope)
    except Exception as failure:
        limits.append(f"no trace: {_why(failure)}")
    return FamilyRow(family=family, supported=True, reason="; ".join(limits), max_error=error, trace_error=split)


def _why(failure: Exception) -> str:
    if isinstance(failure, BadInput):
        return str(failure)
    return f"its tiny model failed with {type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"


def _limits(scope: Scope) -> Iterator[str]:
    refused = {(space, why) for layer in scope.facts.layers for space, why in layer.refusals.items()}
    for kind in dict.fromkeys(layer.instead for layer in scope.facts.layers if layer.instead):
        layers = ", ".join(str(i) for i, layer in enumerate(scope.facts.layers) if layer.instead == kind)
        yield f"no heads in layers {layers}: these have a {kind} instead of attention"
    for space, why in sorted(refused):
        yield f"no {space}: {why}"
    try:
        head_weights(scope)
    except BadInput as refusal:
        yield f"no weights: {refusal}"


@contextmanager
def _quietly() -> Iterator[None]:
    """No warnings (tiny configs make transformers warn about ratios and kernels that do not matter) and one thread.

    On matrices this small a second thread does nothing but wait, and on a busy machine it waits long.
    """
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)


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
