"""A small copy of any config, and loud weights for its model, to check what is slow at full size.

Sizes shrink by the names of their fields (``[sizes]`` in tiny_copy.toml), so no family has a config
of its own here. So do lengths (``[lengths]``): a window, a chunk, the length a rotation was
extended from. Whatever begins beyond one of them begins in the small copy at a few tokens. Of the
layers one of each kind is kept, as the config lists them.

The weights are *loud* enough to catch mistakes: matrices are drawn from N(0, 0.2²), so that
attention is far from uniform, and everything else (norm gains, biases, sinks) is moved from its
initial value to ``p₀ + 0.4 ε``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import torch


def _rules(table: Mapping[str, Any]) -> list[tuple[re.Pattern[str], Any]]:
    """Patterns of field names, each with what such a field comes to at most."""
    return [(re.compile(pattern), at_most) for pattern, at_most in table.items()]


_TABLE = tomllib.loads(files("qkscope.model").joinpath("tiny_copy.toml").read_text("utf-8"))
_LENGTHS = _rules(_TABLE["lengths"])
_SIZES = _rules(_TABLE["sizes"])
_DEPTH = re.compile(
    r"(num_hidden|num_decoder|num_encoder|num|n|decoder|encoder)_layers|n_layer|num_blocks|depth"
)
_MOST_LAYERS = 4

#: Fields that a config makes itself, or that are of no matter to its copy.
_DERIVED = [
    "model_type", "transformers_version", "architectures", "dtype", "out_features", "out_indices",
    "stage_names",
]  # fmt: skip


def named_lengths(config: Any) -> dict[str, int]:
    """Lengths that a config names, by field: beyond one of them the model may do something else."""
    return dict(_lengths(config.to_dict()))


def _lengths(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the lengths among a config's fields, at any depth."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
            if value.get("rope_type") == "dynamic" and "max_position_embeddings" in fields:
                yield "max_position_embeddings", fields["max_position_embeddings"]
        elif _is_count(value) and value > 1 and _at_most(name, _LENGTHS) is not None:
            yield name, value


def _at_most(name: str, rules: Sequence[tuple[re.Pattern[str], Any]]) -> Any | None:
    """What a field of this name comes to at most, by the first rule that fits, or None."""
    return next((at_most for rule, at_most in rules if rule.fullmatch(name)), None)


def _is_count(value: Any) -> bool:
    """Whether a field is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _depth(fields: Mapping[str, Any]) -> int:
    """The number of layers that some fields name; 0 where they name none."""
    values = (value for name, value in fields.items() if _DEPTH.fullmatch(name))
    return next((value for value in values if _is_count(value)), 0)


def small_config(config: Any, **settings: Any) -> Any:
    """A config of the same class with small sizes and lengths, but for the ``settings`` given."""
    settings = {config.attribute_map.get(name, name): value for name, value in settings.items()}
    n_layers = next((n for name, n in settings.items() if _DEPTH.fullmatch(name)), None)
    fields = _small(config.to_dict(), n_layers)
    for name in _DERIVED:
        fields.pop(name, None)
    if "max_position_embeddings" in named_lengths(config):  # dynamic RoPE changes beyond it
        fields["max_position_embeddings"] = 16
    return type(config)(**fields | settings)


def _small(fields: Mapping[str, Any], n_layers: int | None = None) -> dict[str, Any]:
    """The fields of a config made small, with as many layers as given, or one of each kind."""
    depth = _depth(fields)
    by_layer = {}
    for name, value in fields.items():
        values = _by_layer(value, depth)
        if values is not None:
            by_layer[name] = values
    kept = _kept_layers(by_layer, depth, n_layers)
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


def _kept_layers(by_layer: Mapping[str, list[Any]], depth: int, n_layers: int | None) -> list[int]:
    """Numbers of the layers to keep: the first of each kind, then the first of the others."""
    first_of: dict[str, int] = {}
    for i, kind in enumerate(zip(*by_layer.values(), strict=True)):
        first_of.setdefault(json.dumps(kind, default=str), i)
    firsts = list(first_of.values())
    others = [i for i in range(depth) if i not in firsts]
    number = n_layers or min(max(len(firsts), 2), _MOST_LAYERS)
    return sorted([*firsts, *others][:number])


def _by_layer(value: Any, depth: int) -> list[Any] | None:
    """What a field says of each layer; None where it says nothing of layers.

    It says so in a list, in a list of the layers' numbers, or in a mapping by their numbers.
    """
    if isinstance(value, Mapping):
        if not _is_by_number(value, depth):
            return None
        return [value.get(i, value.get(str(i))) for i in range(depth)]
    if not isinstance(value, list | tuple) or depth <= 2:
        return None
    if _are_layers(value, depth):
        return [i in value for i in range(depth)]
    return list(value) if len(value) == depth else None


def _is_by_number(value: Mapping[Any, Any], depth: int) -> bool:
    """Whether the keys of a mapping are numbers of layers; labels of classes are numbered, too."""
    numbers = [int(name) for name in value if str(name).isdigit()]
    if not numbers or len(numbers) < len(value) or max(numbers) >= depth:
        return False
    return not isinstance(value.get(0), str)


def _are_layers(numbers: Sequence[Any], depth: int) -> bool:
    """Whether a list is one of layers' numbers: several, rising, and below the depth."""
    if len(numbers) < 2 or not all(_is_count(number) for number in numbers):
        return False
    return list(numbers) == sorted(set(numbers)) and numbers[-1] < depth


def _of_layers(name: str, value: Any, by_layer: list[Any], kept: list[int]) -> Any:
    """A field for the layers kept, in the form that it had."""
    values = [by_layer[i] for i in kept]
    if isinstance(value, Mapping):
        return {i: _small(fields) for i, fields in enumerate(values) if fields is not None}
    flags = all(isinstance(flag, bool) for flag in values)
    if flags and not isinstance(value[0], bool):  # it was a list of layers' numbers
        return [i for i, flag in enumerate(values) if flag]
    return [_smaller(name, entry) for entry in values]


def _smaller(name: str, value: Any) -> Any:
    """A field of a config made small by its name, or left as it is."""
    if name.endswith("_token_id") and value is not None:
        value = 10**9  # some are larger than the vocabulary, some are lists
    if name in ("short_factor", "long_factor"):  # one number for each pair of rotated dimensions
        return value[:8] if value else value
    at_most = _at_most(name, [*_LENGTHS, *_SIZES])
    if at_most is None or isinstance(value, bool) or value is None:
        return value
    if _is_count(value) and _is_count(at_most):
        return min(value, at_most)
    return at_most


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
            if is_matrix:
                weight.copy_(0.2 * noise)
            else:
                weight.copy_(weight + 0.4 * noise)
    return model
