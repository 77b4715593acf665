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
NORMALISATIONS = ("none", "constant_norm_rescale", "layer_norm")
_SERVED = ("standard", "topk", "jumprelu", "gated")
_PLACE = re.compile(r"(?:.*\.)?(?:blocks|layers|h)\.(\d+)(?:\.(\w+))?")
_BEFORE, _BEHIND = ("hook_resid_pre", "hook_in", "input"), ("hook_resid_post", "hook_out", "output", None)
_ADVICE = "save W_enc, W_dec, b_enc and b_dec with safetensors"


def read_dictionary(path: Path, layer: int | None, k: int | None) -> dict[str, Any]:
    """The fields of a `Dictionary`, from a folder of SAELens or a file of tensors."""
    if path.name == WEIGHTS and (path.parent / CONFIG).is_file():
        path = path.parent
    if not path.exists():
        raise BadInput(f"there is no dictionary {path}: name a SAELens folder or a .safetensors file.")
    if path.is_dir():
        settings = _settings(path)
        tensors, _ = _tensors(path / WEIGHTS)
    else:
        tensors, header = _tensors(path)
        settings = {**header, "architecture": "jumprelu" if "threshold" in tensors else "standard"}
        k = int(header["k"]) if k is None and header.get("k", "").isdecimal() else k
    if k is not None:
        settings |= {"architecture": "topk", "k": k}
    return _fields(path, tensors, settings, layer)


def _settings(folder: Path) -> dict[str, Any]:
    """What ``cfg.json`` says, under the names of today; before SAELens 6 some had others."""
    if not (folder / CONFIG).is_file():
        raise BadInput(f"{folder} holds no {CONFIG}: name a folder that SAELens wrote, or a .safetensors file.")
    try:
        said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("metadata") or {}, dict):
        raise BadInput(f"{folder / CONFIG} is damaged: it should hold what SAELens wrote.")
    about = said.get("metadata") or {}
    found = {"architecture": "standard", "hook_name": said.get("hook_point"), **about, **said}
    coded = str(said.get("activation_fn") or said.get("activation_fn_str") or "relu")
    if coded == "topk":
        found |= {"architecture": "topk", "k": (said.get("activation_fn_kwargs") or {}).get("k")}
    elif coded != "relu":
        raise BadInput(f"{folder} codes with {coded!r}, which is not served: relu, topk and jumprelu are.")
    if said.get("finetuning_scaling_factor"):
        raise BadInput(f"{folder} scales its codes after training, which is not served: fold the factor into W_dec.")
    return found


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise BadInput(f"there is no file {path}, which holds a dictionary's weights: {_ADVICE}.")
    if path.suffix != ".safetensors":
        raise BadInput(f"{path} is no .safetensors file, and pickles run what they hold when read: {_ADVICE}.")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name).float() for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError):
        raise BadInput(f"{path} is damaged or no safetensors file: {_ADVICE}.") from None


def _fields(path: Path, tensors: dict[str, Tensor], said: Mapping[str, Any], layer: int | None) -> dict[str, Any]:
    kind, normalises = str(said["architecture"]), said.get("normalize_activations") or "none"
    if kind not in _SERVED:
        raise BadInput(f"{path} is a {kind} dictionary, which is not served: {', '.join(_SERVED)} are.")
    if normalises not in NORMALISATIONS:
        raise BadInput(
            f"{path} was trained on activations scaled by {normalises}, and does not say by how much: fold the scale "
            "into its weights and save it again."
        )
    if kind == "jumprelu" and "log_threshold" in tensors:
        tensors["threshold"] = tensors["log_threshold"].exp()
    if kind == "gated":
        _check_there(path, tensors, ("W_enc", "W_dec", "b_gate", "b_mag", "r_mag"))
        size = tensors["r_mag"].exp()
        tensors |= {"W_enc": tensors["W_enc"] * size, "b_enc": tensors["b_mag"],
                    "threshold": tensors["b_mag"] - tensors["b_gate"] * size}  # fmt: skip
    _check_there(path, tensors, ("W_enc", "W_dec", *(("threshold",) if kind in ("jumprelu", "gated") else ())))
    fields = {"decoder": tensors["W_dec"], "encoder": tensors["W_enc"], "encoder_bias": tensors.get("b_enc"),
              "decoder_bias": tensors.get("b_dec"), "threshold": tensors.get("threshold")}  # fmt: skip
    if kind == "topk":
        _fold_lengths(fields, said)
    loaded = said.get("model_from_pretrained_kwargs")
    return {
        **fields,
        "layer": _layer(path, said, layer),
        "activation": {"standard": "relu", "gated": "jumprelu"}.get(kind, kind),
        "k": said.get("k") if kind == "topk" else None,
        "apply_b_dec_to_input": str(said.get("apply_b_dec_to_input", True)).lower() != "false",
        "normalize_activations": normalises,
        "centred": isinstance(loaded, dict) and bool(loaded.get("center_writing_weights")),
        "name": path.name if path.is_dir() else path.stem,
    }


def _fold_lengths(fields: dict[str, Any], said: Mapping[str, Any]) -> None:
    """Codes in lengths of the decoder's rows: the encoder takes the lengths, and the rows lose them."""
    if not said.get("rescale_acts_by_decoder_norm"):
        return
    lengths = fields["decoder"].norm(dim=-1)
    fields["encoder"] = fields["encoder"] * lengths
    fields["decoder"] = fields["decoder"] / lengths.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    if fields["encoder_bias"] is not None:
        fields["encoder_bias"] = fields["encoder_bias"] * lengths


def _check_there(path: Path, tensors: Mapping[str, Tensor], wanted: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in tensors]
    if missing:
        there = ", ".join(list(tensors)[:8]) or "nothing"
        codes = ": codes come from its encoder, and none is made up" if missing == ["W_enc"] else ""
        raise BadInput(f"{path} has no {' and no '.join(missing)}{codes}; it holds {there}.")


def _layer(path: Path, said: Mapping[str, Any], layer: int | None) -> int:
    """The layer whose input is described; what leaves a layer enters the next."""
    hook = said.get("hook_name")
    if layer is not None or not hook:
        if layer is None:
            raise BadInput(
                f"{path} does not say where it stands: name the layer whose input it describes (`--dictionary-layer 18`"
                " in the shell, layer=18 in Python)."
            )
        return layer
    found = _PLACE.fullmatch(str(hook))
    if found is None or found[2] not in (*_BEFORE, *_BEHIND):
        raise BadInput(
            f"{path} stands at {hook}, and trace splits the residual stream between layers: take a dictionary of "
            "hook_resid_pre or hook_resid_post."
        )
    return int(found[1]) + (found[2] in _BEHIND)
