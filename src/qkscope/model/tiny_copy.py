"""A small copy of any config, and loud weights for its model: what is slow to check at full size is
checked there.

Sizes shrink by the names of their fields (``[sizes]`` in tiny_copy.toml), so no family has a config of
its own here. So do lengths (``[lengths]``): a window, a chunk, the length a rotation was extended
from. Whatever begins beyond one of them begins in the small copy at a few tokens. Of the layers one
of each kind is kept, as the config lists them.

The weights are *loud* enough to catch mistakes: matrices are drawn from N(0, 0.2²), so that
attention is far from uniform, and everything else (norm gains, biases, sinks) is moved from its
initial value to ``p₀ + 0.4 ε``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any

import torch

_TABLE = tomllib.loads(files("qkscope.model").joinpath("tiny_copy.toml").read_text("utf-8"))
_LENGTHS = [(re.compile(name), at_most) for name, at_most in _TABLE["lengths"].items()]
_SIZES = [(re.compile(name), at_most) for name, at_most in _TABLE["sizes"].items()]
_DEPTH = re.compile(
    r"(num_hidden|num_decoder|num_encoder|num|n|decoder|encoder)_layers|n_layer|num_blocks|depth"
)
_LAYERS = 4  # at most
_DERIVED = [
    "model_type", "transformers_version", "architectures", "dtype", "out_features", "out_indices", "stage_names",
]  # fmt: skip


def named_lengths(config: Any) -> dict[str, int]:
    """Lengths that a config names, by field: beyond one of them the model may do something else."""
    return dict(_lengths(config.to_dict()))


def _lengths(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
            if value.get("rope_type") == "dynamic" and "max_position_embeddings" in fields:
                yield "max_position_embeddings", fields["max_position_embeddings"]
        elif _is_count(value) and value > 1 and any(rule.fullmatch(name) for rule, _ in _LENGTHS):
            yield name, value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def small_config(config: Any, **settings: Any) -> Any:
    """A config of the same class with small sizes and lengths; ``settings`` replace what came out."""
    settings = {config.attribute_map.get(name, name): value for name, value in settings.items()}
    fields = _small(
        config.to_dict(), next((n for name, n in settings.items() if _DEPTH.fullmatch(name)), None)
    )
    for name in _DERIVED:
        fields.pop(name, None)
    if "max_position_embeddings" in named_lengths(config):  # dynamic RoPE changes beyond it
        fields["max_position_embeddings"] = 16
    return type(config)(**fields | settings)


def _small(fields: Mapping[str, Any], layers: int | None = None) -> dict[str, Any]:
    depth = next(
        (value for name, value in fields.items() if _DEPTH.fullmatch(name) and _is_count(value)), 0
    )
    by_layer = {
        name: there
        for name, value in fields.items()
        if (there := _by_layer(value, depth)) is not None
    }
    first: dict[str, int] = {}
    for i, kind in enumerate(zip(*by_layer.values(), strict=True)):
        first.setdefault(json.dumps(kind, default=str), i)
    some = [*first.values(), *(i for i in range(depth) if i not in first.values())]
    kept = sorted(some[: layers or min(max(len(first), 2), _LAYERS)])
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in by_layer:
            small[name] = _of_layers(name, value, by_layer[name], kept)
        elif isinstance(value, Mapping) and name not in ("id2label", "label2id"):
            small[name] = _small(value)
        elif _DEPTH.fullmatch(name) and _is_count(value):
            small[name] = min(value, len(kept))
        else:
            small[name] = _smaller(name, value)
    if "attention_types" in small:  # GPT-Neo says it twice
        small["attention_types"] = [[small.pop("attention_layers"), 1]]
    if "kv_lora_rank" in fields:  # latent attention has no groups
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _by_layer(value: Any, depth: int) -> list[Any] | None:
    """What a field says of each layer: in a list, in a list of layers' numbers, or by layers'
    numbers.
    """
    if isinstance(value, Mapping):
        numbers = [int(name) for name in value if str(name).isdigit()]
        inside = (
            numbers
            and len(numbers) == len(value)
            and max(numbers) < depth
            and not isinstance(value.get(0), str)
        )
        return [value.get(i, value.get(str(i))) for i in range(depth)] if inside else None
    if not isinstance(value, list | tuple) or depth <= 2:
        return None
    if (
        len(value) > 1
        and all(map(_is_count, value))
        and list(value) == sorted(set(value))
        and value[-1] < depth
    ):
        return [i in value for i in range(depth)]
    return list(value) if len(value) == depth else None


def _of_layers(name: str, value: Any, by_layer: list[Any], kept: list[int]) -> Any:
    there = [by_layer[i] for i in kept]
    if isinstance(value, Mapping):
        return {i: _small(kind) for i, kind in enumerate(there) if kind is not None}
    if all(isinstance(kind, bool) for kind in there) and not isinstance(value[0], bool):
        return [i for i, kind in enumerate(there) if kind]
    return [_smaller(name, kind) for kind in there]


def _smaller(name: str, value: Any) -> Any:
    if name.endswith("_token_id") and value is not None:
        value = 10**9  # some are larger than the vocabulary, some are lists
    if name in ("short_factor", "long_factor"):  # one number for each pair of rotated dimensions
        return value[:8] if value else value
    at_most = next(
        (at_most for rule, at_most in (*_LENGTHS, *_SIZES) if rule.fullmatch(name)), None
    )
    if at_most is None or isinstance(value, bool) or value is None:
        return value
    return min(value, at_most) if _is_count(value) and _is_count(at_most) else at_most


def loud_model(build: Callable[..., Any], config: Any, seed: int = 0) -> Any:
    """A model in float32 and eval mode with loud random weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            # Cohere's gains are [head, d_head]: a matrix is what does not begin as one number
            is_matrix = weight.ndim > 1 and bool((weight != weight.flatten()[0]).any())
            weight.copy_(0.2 * noise if is_matrix else weight + 0.4 * noise)
    return model
