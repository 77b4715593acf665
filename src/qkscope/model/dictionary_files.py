"""Dictionaries on disk and on the hub: files, what they call things, and what is refused.

A folder is SAELens' (``cfg.json``, ``sae_weights.safetensors``) or Gemma Scope 2's
(``config.json``, ``params.safetensors``, the layer in the folder's name); or there is one
safetensors file. What SAELens folds when it codes is folded here when it is read: a top-k
dictionary whose codes are measured in lengths of its rows, and a gated one::

    [z > −b_gate] · relu(z eʳ + b_mag)

which is a JumpReLU whose threshold is ``b_mag − b_gate eʳ``. Pickles are not opened: reading one
runs what it holds.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkscope.errors import BadInput


@dataclass(frozen=True)
class Layout:
    """What a format calls its files, tensors and settings, and which settings it leaves unsaid."""

    settings: str
    weights: str
    called: Mapping[str, str]
    by_default: Mapping[str, Any]

    def renamed(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The same values under the names that are used here."""
        return {self.called.get(name, name): value for name, value in named.items()}


class HookSite(NamedTuple):
    """Where a dictionary stands: a layer, what it splits, and how many layers on it enters."""

    layer: int
    splits: str
    layers_on: int


class Files(NamedTuple):
    """A dictionary as it lies on the disk; ``single_file``: without a folder's settings."""

    place: Path
    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    single_file: bool

    def refuse(self, why: str) -> NoReturn:
        """Raise `BadInput` about this dictionary."""
        raise BadInput(f"{self.place} {why}.")


_TABLE = tomllib.loads(Path(__file__).with_name("dictionary_files.toml").read_text("utf-8"))
LAYOUTS = {name: Layout(**fields) for name, fields in _TABLE["formats"].items()}
_NEEDS = _TABLE["needs"]
_KINDS = _TABLE["kinds"]
_SITES = _TABLE["sites"]
_PLACE = re.compile(r"(?:.*\.)?(?:blocks|layers|h)\.(\d+)\.?([\w.]*)")
#: Folders of Gemma Scope 2, which say where a dictionary stands if its settings do not.
_FOLDER = re.compile(r"(resid_post|mlp_out|attn_out|transcoder)(?:_all)?/layer_(\d+)_[^/]*$")
_ACTIVATIONS = ("relu", "topk")
_SCALES = ("none", "constant_norm_rescale", "layer_norm")
_TRANSCODER_SCALES = ("none",)
_ADVICE = "save W_enc, W_dec, b_enc and b_dec with safetensors"


def read_dictionary(
    path: str | Path, folder: str | None, layer: int | None, k: int | None
) -> dict[str, Any]:
    """The fields of a `Dictionary`, from a folder here or on the hub, or a file of tensors."""
    files = _read(_find(path, folder))
    settings = files.settings
    if k is None and files.single_file and "k" in settings:
        k = int(settings["k"])
    activation = _activation(settings)
    kind = _KINDS.get(settings["architecture"], settings["architecture"])
    if k is not None or activation == "topk":
        kind = "topk"
    k = k or _active_features(settings)
    hooks = _hooks(settings)
    sites = _sites(hooks)
    site = HookSite(layer or 0, "stream", layers_on=0)
    if layer is None and sites:
        site = sites[0]
    transcodes = "transcoder" in settings["architecture"] or site.splits == "transcoder"
    _check_codes(files, kind, activation, k, transcodes)
    _check_tensors(files, kind)
    if layer is None:
        _check_site(files, hooks, sites)
    if transcodes:
        _check_transcoder(files, hooks, site)
    takes_bias_off = str(settings.get("apply_b_dec_to_input", True)).lower() != "false"
    return {
        **_folded(files, kind),
        "layer": site.layer + site.layers_on,
        "splits": site.splits,
        "k": k if kind == "topk" else None,
        "apply_b_dec_to_input": takes_bias_off and not transcodes,
        "normalize_activations": _scale(settings),
        "centred": _was_centred(settings) and not transcodes,
        "name": files.place.stem if files.single_file else files.place.name,
    }


# ---------------------------------------------------------------------- files


def _find(path: str | Path, folder: str | None) -> Path:
    """The folder or file of a dictionary, here or, if its name could be one, from the hub."""
    place = Path(path).expanduser() / (folder or "")
    weights = [layout.weights for layout in LAYOUTS.values()]
    if place.name in weights and place.is_file():
        return place.parent
    if place.exists() or len(place.parts) < 3:
        return place
    owner, name, *inside = place.parts
    if owner in ("/", ".", "..", "~"):
        return place
    return _from_hub(f"{owner}/{name}", "/".join(inside))


def _from_hub(repository: str, folder: str) -> Path:
    """The files of a dictionary, downloaded or from the local cache.

    Whether the hub answers is asked once.
    """
    from huggingface_hub import constants, get_session, snapshot_download

    wanted = []
    for layout in LAYOUTS.values():
        wanted += [f"{folder}/{layout.settings}", f"{folder}/{layout.weights}"]
    answers = False
    with suppress(Exception):  # no name, no route, no proxy, or told to stay offline
        get_session().head(constants.ENDPOINT, timeout=2)
        answers = True
    with suppress(Exception):  # no such repository, one that is gated, or none in the cache
        snapshot = snapshot_download(
            repository, allow_patterns=wanted, local_files_only=not answers
        )
        place = Path(snapshot) / folder
        if place.is_dir():
            return place
    where = "on the hub for you" if answers else "in the local cache, and the hub cannot be reached"
    raise BadInput(
        f"there is no dictionary {repository}/{folder} here or {where}: check both names, or give a folder."
    )


def _read(place: Path) -> Files:
    """Tensors and settings of a folder or of one file."""
    for layout in LAYOUTS.values():
        weights = place / layout.weights
        if weights.is_file():
            settings = _settings(place, layout)
            tensors, _ = _read_tensors(weights)
            return Files(place, layout.renamed(tensors), settings, single_file=False)
    if place.is_dir():
        formats = [
            f"{layout.settings} and {layout.weights} ({name})" for name, layout in LAYOUTS.items()
        ]
        files = " or ".join(formats)
        raise BadInput(
            f"{place} holds no dictionary: name a folder with {files}, or a .safetensors file."
        )
    tensors, header = _read_tensors(place)
    architecture = "jumprelu" if "threshold" in tensors else "standard"
    return Files(place, tensors, {"architecture": architecture, **header}, single_file=True)


def _settings(folder: Path, layout: Layout) -> dict[str, Any]:
    """What a folder's settings say, and its name where they are silent."""
    file = folder / layout.settings
    defaults = dict(layout.by_default)
    folder_name = _FOLDER.search(folder.absolute().as_posix())
    if folder_name is not None:
        site, number = folder_name.groups()
        defaults["hook_name"] = f"layers.{number}.{site}"
        defaults["hook_name_out"] = f"layers.{number}"
        if not file.is_file():
            return defaults
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        return defaults | layout.renamed({**written.get("metadata", {}), **written})
    except FileNotFoundError:
        why = (
            f"holds no {layout.settings}: name a folder that SAELens wrote, or a .safetensors file"
        )
    except (OSError, ValueError, AttributeError, TypeError):
        why = f"holds a {layout.settings} that is damaged: it should be the one that came with the weights"
    raise BadInput(f"{folder} {why}.")


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a safetensors file, in float32, and its header."""
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
            tensors = {name: file.get_tensor(name).float() for name in list(file.keys())}
            return tensors, dict(file.metadata() or {})
    except (OSError, SafetensorError):
        raise BadInput(f"{path} is damaged or no safetensors file: {_ADVICE}.") from None


# ---------------------------------------------------------------------- what settings say


def _activation(settings: Mapping[str, Any]) -> str:
    """Name of the activation function of the codes."""
    before_saelens_6 = settings.get("activation_fn_str")
    return settings.get("activation_fn") or before_saelens_6 or "relu"


def _active_features(settings: Mapping[str, Any]) -> int | None:
    """How many features are active in a token, of a top-k dictionary."""
    options = settings.get("activation_fn_kwargs") or {}
    return settings.get("k") or options.get("k")


def _hooks(settings: Mapping[str, Any]) -> list[str]:
    """Names of the place that a dictionary was trained on, in Hugging Face's words first."""
    names = [settings.get(key) for key in ("hf_hook_name", "hook_name", "hook_point")]
    return [name for name in names if name]


def _sites(hooks: Iterable[str]) -> list[HookSite]:
    """Sites that these hooks name, as far as they are known."""
    sites = []
    for hook in hooks:
        match = _PLACE.fullmatch(hook)
        if match is not None and match[2] in _SITES:
            splits, layers_on = _SITES[match[2]]
            sites.append(HookSite(int(match[1]), splits, layers_on))
    return sites


def _scale(settings: Mapping[str, Any]) -> str:
    """How activations were normalised before coding."""
    return settings.get("normalize_activations") or "none"


def _was_centred(settings: Mapping[str, Any]) -> bool:
    """Whether the model's writing weights were centred in training."""
    model = settings.get("model_from_pretrained_kwargs")
    return isinstance(model, dict) and bool(model.get("center_writing_weights"))


# ---------------------------------------------------------------------- what is refused


def _check_codes(files: Files, kind: str, activation: str, k: int | None, transcodes: bool) -> None:
    """Refuse ways to code that `Dictionary` has not."""
    if kind not in _NEEDS:
        files.refuse(
            f"is a {kind} dictionary, which is not served: {', '.join(_NEEDS)} and transcoders are"
        )
    if activation not in _ACTIVATIONS:
        files.refuse(f"codes with {activation!r}, which is not served: relu, topk and jumprelu are")
    if kind == "topk" and not k:
        files.refuse("codes with topk and does not say how many features are active: give k")
    if files.settings.get("finetuning_scaling_factor"):
        files.refuse(
            "scales its codes after training, which is not served: fold the factor into W_dec"
        )
    scale = _scale(files.settings)
    if scale not in (_TRANSCODER_SCALES if transcodes else _SCALES):
        files.refuse(
            f"was trained on activations scaled by {scale}, and does not say by how much: fold the scale into its"
            " weights and save it again"
        )


def _check_tensors(files: Files, kind: str) -> None:
    """Refuse what lacks a tensor, or describes several layers."""
    needed = ["W_enc", "W_dec", *_NEEDS[kind]]
    missing = [name for name in needed if name not in files.tensors]
    if missing:
        files.refuse(
            f"has no {' and no '.join(missing)}, from which codes are made; it holds {', '.join(files.tensors)}"
        )
    if files.tensors["W_dec"].ndim != 2:
        files.refuse(
            "holds features of several layers, which is not served: take a dictionary of one"
        )


def _check_site(files: Files, hooks: list[str], sites: list[HookSite]) -> None:
    """Refuse what does not say where it stands, or stands where nothing is split."""
    if not hooks:
        files.refuse(
            "does not say where it stands: name the layer whose input it describes"
            " (`--dictionary-layer 18` in the shell, layer=18 in Python)"
        )
    if not sites:
        files.refuse(
            f"stands at {hooks[:1]}, and trace splits the residual stream between layers or what an MLP writes: take a"
            " dictionary of hook_resid_pre, hook_resid_post or hook_mlp_out, or a transcoder"
        )


def _check_transcoder(files: Files, hooks: list[str], site: HookSite) -> None:
    """Refuse a transcoder that does not read and write at the MLP of one layer."""
    written = files.settings.get("hook_name_out")
    out = _PLACE.fullmatch(written or "")
    if site.splits != "transcoder" or out is None or int(out[1]) != site.layer:
        files.refuse(
            f"reads {hooks[:1]} and writes {written}, and a transcoder reads what the MLP of one layer is"
            " given (pre_feedforward_layernorm.output, mlp.input) and writes what it puts out"
        )


# ---------------------------------------------------------------------- what is folded


def _folded(files: Files, kind: str) -> dict[str, Tensor | None]:
    """Encoder and decoder as `Dictionary` codes with them."""
    tensors = files.tensors
    encoder = tensors["W_enc"]
    decoder = tensors["W_dec"]
    bias = tensors.get("b_enc")
    threshold = tensors["threshold"] if kind == "jumprelu" else None
    if kind == "gated":
        size = tensors["r_mag"].exp()
        bias = tensors["b_mag"]
        encoder = encoder * size
        threshold = bias - tensors["b_gate"] * size
    if kind == "topk" and files.settings.get("rescale_acts_by_decoder_norm"):
        lengths = decoder.norm(dim=-1)
        encoder = encoder * lengths
        bias = None if bias is None else bias * lengths
        tiny = torch.finfo(torch.float32).tiny
        decoder = decoder / lengths.clamp_min(tiny)[:, None]
    skip = tensors.get("affine_skip_connection")
    if "W_skip" in tensors:
        skip = tensors["W_skip"].T
    return {
        "decoder": decoder,
        "encoder": encoder,
        "decoder_bias": tensors.get("b_dec"),
        "encoder_bias": bias,
        "threshold": threshold,
        "skip": skip,
    }
