"""Dictionaries on disk and on the hub: which files a folder holds, what they call things, and what
is refused.

A folder is SAELens' (``cfg.json``, ``sae_weights.safetensors``) or Gemma Scope 2's
(``config.json``, ``params.safetensors``, the layer in the folder's name); or there is one
safetensors file. What SAELens folds when it codes is folded here when it is read: a top-k
dictionary whose codes are measured in lengths of its rows, and a gated one, ``[z > −b_gate] ·
relu(z eʳ + b_mag)``, which is a JumpReLU whose threshold is ``b_mag − b_gate eʳ``. Pickles are not
opened: reading one runs what it holds.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkscope.errors import BadInput

_TABLE = tomllib.loads(Path(__file__).with_name("dictionary_files.toml").read_text("utf-8"))
#: By format, the files of a folder, and what it calls tensors and settings that have another name here.
LAYOUTS = {name: SimpleNamespace(**said) for name, said in _TABLE["formats"].items()}
_NEEDS = _TABLE["needs"]
_KINDS = _TABLE["kinds"]
_SITES = _TABLE["sites"]
_PLACE = re.compile(r"(?:.*\.)?(?:blocks|layers|h)\.(\d+)\.?([\w.]*)")
#: Folders of Gemma Scope 2, which say where a dictionary stands if its settings do not.
_FOLDER = re.compile(r"(resid_post|mlp_out|attn_out|transcoder)(?:_all)?/layer_(\d+)_[^/]*$")
_SCALES = ("none", "constant_norm_rescale", "layer_norm")
_ADVICE = "save W_enc, W_dec, b_enc and b_dec with safetensors"


def read_dictionary(
    path: str | Path, folder: str | None, layer: int | None, k: int | None
) -> dict[str, Any]:
    """The fields of a `Dictionary`, from a folder here or on the hub, or a file of tensors."""
    place = _find(path, folder)
    layout = next((own for own in LAYOUTS.values() if (place / own.weights).is_file()), None)
    if layout is not None:
        said, (tensors, _) = _settings(place, layout), _read_tensors(place / layout.weights)
        tensors = {layout.called.get(name, name): value for name, value in tensors.items()}
    elif place.is_dir():
        files = " or ".join(
            f"{own.settings} and {own.weights} ({name})" for name, own in LAYOUTS.items()
        )
        raise BadInput(
            f"{place} holds no dictionary: name a folder with {files}, or a .safetensors file."
        )
    else:
        tensors, said = _read_tensors(place)
        said = {"architecture": "jumprelu" if "threshold" in tensors else "standard", **said}
        k = int(said["k"]) if k is None and "k" in said else k
    coded = said.get("activation_fn") or said.get("activation_fn_str") or "relu"  # before SAELens 6
    kind = (
        "topk"
        if k is not None or coded == "topk"
        else _KINDS.get(said["architecture"], said["architecture"])
    )
    k = k or said.get("k") or (said.get("activation_fn_kwargs") or {}).get("k")
    missing = [name for name in ("W_enc", "W_dec", *_NEEDS.get(kind, ())) if name not in tensors]
    normalises = said.get("normalize_activations") or "none"
    scaled = said.get("finetuning_scaling_factor")
    hooks = [said[name] for name in ("hf_hook_name", "hook_name", "hook_point") if said.get(name)]
    stands = [
        (int(at[1]), *_SITES[at[2]])
        for hook in hooks
        if (at := _PLACE.fullmatch(hook)) and at[2] in _SITES
    ]
    before, splits, on = stands[0] if layer is None and stands else (layer or 0, "stream", 0)
    out = _PLACE.fullmatch(said.get("hook_name_out") or "")
    transcodes = "transcoder" in said["architecture"] or splits == "transcoder"
    refusals = {
        f"is a {kind} dictionary, which is not served: {', '.join(_NEEDS)} and transcoders are": kind
        not in _NEEDS,
        f"codes with {coded!r}, which is not served: relu, topk and jumprelu are": coded
        not in ("relu", "topk"),
        "codes with topk and does not say how many features are active: give k": kind == "topk"
        and not k,
        "scales its codes after training, which is not served: fold the factor into W_dec": scaled,
        f"was trained on activations scaled by {normalises}, and does not say by how much: fold the scale into its"
        " weights and save it again": normalises not in _SCALES[: 1 if transcodes else None],
        f"has no {' and no '.join(missing)}, from which codes are made; it holds {', '.join(tensors)}": missing,
        "holds features of several layers, which is not served: take a dictionary of one": not missing
        and tensors["W_dec"].ndim != 2,
        "does not say where it stands: name the layer whose input it describes (`--dictionary-layer 18` in the shell,"
        " layer=18 in Python)": layer is None and not hooks,
        f"stands at {hooks[:1]}, and trace splits the residual stream between layers or what an MLP writes: take a"
        " dictionary of hook_resid_pre, hook_resid_post or hook_mlp_out, or a transcoder": layer
        is None
        and not stands,
        f"reads {hooks[:1]} and writes {said.get('hook_name_out')}, and a transcoder reads what the MLP of one layer is"
        " given (pre_feedforward_layernorm.output, mlp.input) and writes what it puts out": transcodes
        and (splits != "transcoder" or out is None or int(out[1]) != before),
    }
    for why, holds in refusals.items():
        if holds:
            raise BadInput(f"{place} {why}.")
    loaded = said.get("model_from_pretrained_kwargs")
    return {
        **_folded(kind, tensors, bool(said.get("rescale_acts_by_decoder_norm"))),
        "layer": before + on,
        "splits": splits,
        "k": k if kind == "topk" else None,
        "apply_b_dec_to_input": not transcodes
        and str(said.get("apply_b_dec_to_input", True)).lower() != "false",
        "normalize_activations": normalises,
        "centred": isinstance(loaded, dict)
        and bool(loaded.get("center_writing_weights"))
        and not transcodes,
        "name": place.name if layout else place.stem,
    }


def _find(path: str | Path, folder: str | None) -> Path:
    """The folder or file of a dictionary; what is not here, and could be a name on the hub, is
    asked for there.
    """
    place = Path(path).expanduser() / (folder or "")
    if place.name in {own.weights for own in LAYOUTS.values()} and place.is_file():
        return place.parent
    owner, name, *inside = (*place.parts, "", "")[: max(len(place.parts), 2)]
    if place.exists() or not inside or owner in ("/", ".", "..", "~"):
        return place
    return _from_hub(f"{owner}/{name}", "/".join(inside))


def _from_hub(repository: str, folder: str) -> Path:
    """The files of a dictionary, downloaded or from the local cache; whether the hub answers is
    asked once.
    """
    from huggingface_hub import constants, get_session, snapshot_download

    wanted = [
        f"{folder}/{file}" for own in LAYOUTS.values() for file in (own.settings, own.weights)
    ]
    answers = False
    with suppress(Exception):  # no name, no route, no proxy, or told to stay offline
        get_session().head(constants.ENDPOINT, timeout=2)
        answers = True
    with suppress(Exception):  # no such repository, one that is gated, or none in the cache
        place = (
            Path(snapshot_download(repository, allow_patterns=wanted, local_files_only=not answers))
            / folder
        )
        if place.is_dir():
            return place
    where = "on the hub for you" if answers else "in the local cache, and the hub cannot be reached"
    raise BadInput(
        f"there is no dictionary {repository}/{folder} here or {where}: check both names, or give a folder."
    )


def _settings(folder: Path, layout: SimpleNamespace) -> dict[str, Any]:
    """What a folder's settings say, and its name where they are silent."""
    file = folder / layout.settings
    stands = _FOLDER.search(folder.absolute().as_posix())
    at = f"layers.{stands[2]}" if stands else ""
    usual = {
        **layout.by_default,
        **({"hook_name": f"{at}.{stands[1]}", "hook_name_out": at} if stands else {}),
    }
    if stands and not file.is_file():
        return usual
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        said = {
            layout.called.get(name, name): value
            for name, value in {**said.get("metadata", {}), **said}.items()
        }
        return usual | said
    except FileNotFoundError:
        why = (
            f"holds no {layout.settings}: name a folder that SAELens wrote, or a .safetensors file"
        )
    except (OSError, ValueError, AttributeError, TypeError):
        why = f"holds a {layout.settings} that is damaged: it should be the one that came with the weights"
    raise BadInput(f"{folder} {why}.")


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise BadInput(
            f"there is no dictionary {path}: name a folder of SAELens or Gemma Scope 2, or a .safetensors."
        )
    if path.suffix != ".safetensors":
        raise BadInput(
            f"{path} is no .safetensors file, and pickles run what they hold when read: {_ADVICE}."
        )
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).float() for name in list(file.keys())}, dict(
                file.metadata() or {}
            )
    except (OSError, SafetensorError):
        raise BadInput(f"{path} is damaged or no safetensors file: {_ADVICE}.") from None


def _folded(kind: str, tensors: Mapping[str, Tensor], rescaled: bool) -> dict[str, Tensor | None]:
    """Encoder and decoder as `Dictionary` codes with them."""
    encoder = tensors["W_enc"]
    decoder = tensors["W_dec"]
    bias = tensors.get("b_enc")
    threshold = tensors["threshold"] if kind == "jumprelu" else None
    if kind == "gated":
        size = tensors["r_mag"].exp()
        bias = tensors["b_mag"]
        encoder = encoder * size
        threshold = bias - tensors["b_gate"] * size
    if kind == "topk" and rescaled:
        lengths = decoder.norm(dim=-1)
        encoder = encoder * lengths
        bias = None if bias is None else bias * lengths
        decoder = decoder / lengths.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    skip = tensors["W_skip"].T if "W_skip" in tensors else tensors.get("affine_skip_connection")
    return {"decoder": decoder, "encoder": encoder, "decoder_bias": tensors.get("b_dec"), "encoder_bias": bias,
            "threshold": threshold, "skip": skip}  # fmt: skip
