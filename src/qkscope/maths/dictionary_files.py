"""A dictionary on disk: a SAELens folder (``cfg.json`` and ``sae_weights.safetensors``), or one safetensors file.

What SAELens folds when it codes is folded here when it is read: a top-k dictionary whose codes are measured in lengths
of its rows, and a gated one, ``[z > −b_gate] · relu(z eʳ + b_mag)``, which is a JumpReLU whose threshold is
``b_mag − b_gate eʳ``. Pickles are not opened: reading one runs what it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkscope.errors import BadInput

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_NORMALISATIONS = ("none", "constant_norm_rescale", "layer_norm")
_NEEDS = {"standard": (), "topk": (), "jumprelu": ("threshold",), "gated": ("b_gate", "b_mag", "r_mag")}
_PLACE = re.compile(r"(?:.*\.)?(?:blocks|layers|h)\.(\d+)(?:\.(\w+))?")
_BEFORE, _BEHIND = ("hook_resid_pre", "hook_in", "input"), ("hook_resid_post", "hook_out", "output", None)
_ADVICE = "save W_enc, W_dec, b_enc and b_dec with safetensors"


def read_dictionary(path: Path, layer: int | None, k: int | None) -> dict[str, Any]:
    """The fields of a `Dictionary`, from a folder of SAELens or a file of tensors."""
    if path.name == WEIGHTS and (path.parent / CONFIG).is_file():
        path = path.parent
    if path.is_dir():
        said, (tensors, _) = _settings(path), _read_tensors(path / WEIGHTS)
    else:
        tensors, header = _read_tensors(path)
        said = {**header, "architecture": "jumprelu" if "threshold" in tensors else "standard"}
        k = int(header["k"]) if k is None and header.get("k", "").isdecimal() else k
    if k is not None:
        said |= {"architecture": "topk", "k": k}
    kind = said["architecture"]
    if kind == "topk" and not said.get("k"):
        raise BadInput(f"{path} codes with topk and does not say how many features are active: give k.")
    loaded = said.get("model_from_pretrained_kwargs")
    return {
        **_folded(path, tensors, said),
        "layer": _layer(path, said.get("hook_name")) if layer is None else layer,
        "k": said.get("k") if kind == "topk" else None,
        "apply_b_dec_to_input": str(said.get("apply_b_dec_to_input", True)).lower() != "false",
        "normalize_activations": said.get("normalize_activations") or "none",
        "centred": isinstance(loaded, dict) and bool(loaded.get("center_writing_weights")),
        "name": path.name if path.is_dir() else path.stem,
    }


def _settings(folder: Path) -> dict[str, Any]:
    """What ``cfg.json`` says, under the names of today; before SAELens 6 some had others."""
    try:
        said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        settings = {"architecture": "standard", "hook_name": said.get("hook_point"), **said.get("metadata", {}), **said}
    except FileNotFoundError:
        raise BadInput(
            f"{folder} holds no {CONFIG}: name a folder that SAELens wrote, or a .safetensors file."
        ) from None
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        raise BadInput(f"{folder / CONFIG} is damaged: it should hold what SAELens wrote.") from None
    coded = str(said.get("activation_fn") or said.get("activation_fn_str") or "relu")
    if coded == "topk":
        settings |= {"architecture": "topk", "k": (said.get("activation_fn_kwargs") or {}).get("k")}
    elif coded != "relu":
        raise BadInput(f"{folder} codes with {coded!r}, which is not served: relu, topk and jumprelu are.")
    if said.get("finetuning_scaling_factor"):
        raise BadInput(f"{folder} scales its codes after training, which is not served: fold the factor into W_dec.")
    return settings


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise BadInput(f"there is no dictionary {path}: name a SAELens folder or a .safetensors file.")
    if path.suffix != ".safetensors":
        raise BadInput(f"{path} is no .safetensors file, and pickles run what they hold when read: {_ADVICE}.")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name).float() for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError):
        raise BadInput(f"{path} is damaged or no safetensors file: {_ADVICE}.") from None


def _folded(path: Path, tensors: dict[str, Tensor], said: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Encoder and decoder as `Dictionary` codes with them."""
    kind, normalises = said["architecture"], said.get("normalize_activations") or "none"
    if kind not in _NEEDS:
        raise BadInput(f"{path} is a {kind} dictionary, which is not served: {', '.join(_NEEDS)} are.")
    if normalises not in _NORMALISATIONS:
        raise BadInput(
            f"{path} was trained on activations scaled by {normalises}, and does not say by how much: fold the scale "
            "into its weights and save it again."
        )
    if "log_threshold" in tensors:
        tensors["threshold"] = tensors["log_threshold"].exp()
    if missing := [name for name in ("W_enc", "W_dec", *_NEEDS[kind]) if name not in tensors]:
        there = ", ".join(list(tensors)[:8]) or "nothing"
        raise BadInput(f"{path} has no {' and no '.join(missing)}, from which codes are made; it holds {there}.")
    encoder, decoder, bias = tensors["W_enc"], tensors["W_dec"], tensors.get("b_enc")
    threshold = tensors["threshold"] if kind == "jumprelu" else None
    if kind == "gated":
        size, bias = tensors["r_mag"].exp(), tensors["b_mag"]
        encoder, threshold = encoder * size, bias - tensors["b_gate"] * size
    if kind == "topk" and said.get("rescale_acts_by_decoder_norm"):
        lengths = decoder.norm(dim=-1)
        encoder, bias = encoder * lengths, None if bias is None else bias * lengths
        decoder = decoder / lengths.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return {"decoder": decoder, "encoder": encoder, "encoder_bias": bias, "decoder_bias": tensors.get("b_dec"),
            "threshold": threshold}  # fmt: skip


def _layer(path: Path, hook: Any) -> int:
    """The layer whose input is described; what leaves a layer enters the next."""
    if not hook:
        raise BadInput(
            f"{path} does not say where it stands: name the layer whose input it describes (`--dictionary-layer 18`"
            " in the shell, layer=18 in Python)."
        )
    place = _PLACE.fullmatch(str(hook))
    if place is None or place[2] not in (*_BEFORE, *_BEHIND):
        raise BadInput(
            f"{path} stands at {hook}, and trace splits the residual stream between layers: take a dictionary of "
            "hook_resid_pre or hook_resid_post."
        )
    return int(place[1]) + (place[2] in _BEHIND)
