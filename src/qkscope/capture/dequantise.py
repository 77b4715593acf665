"""A GGUF file as a model folder in the user's cache: dequantised once, and checked before it is believed.

Only the file itself is read, never its neighbours. Every number of it must end up in the model and every weight of the
model must come from it; the tokenizer must follow the file's own rules (`gguf_tokens`). The folder keeps the hashes of
its files, so that what was changed there is made anew instead of being loaded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from qkscope.capture.cache import cache_dir, file_hash, read_json, write_json
from qkscope.capture.files import check_report
from qkscope.capture.gguf_tokens import TokenRules, follow_rules, token_rules
from qkscope.capture.told import quiet, told
from qkscope.errors import BadInput

log = logging.getLogger(__name__)

_LAYOUT = 2  # 1 kept neither the hashes nor the tokenizer's first token
_MANIFEST = "made.json"
_DAY = 86_400
_STRETCH = "rope_freqs.weight"


@dataclass(frozen=True)
class _Told:
    """What a GGUF file says of itself."""

    architecture: str
    fields: Mapping[str, Any]
    sizes: Mapping[str, int]  # how many numbers each tensor holds
    stretch: Tensor | None  # by how much each of RoPE's wavelengths is longer


def dequantised(file: Path, digest: str) -> Path:
    """The folder with a GGUF file's weights as safetensors, made on first use."""
    folder = cache_dir("gguf", digest)
    _sweep(folder.parent)
    if _is_whole(folder):
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"reading {file.name} needs the package {package}: run `pip install 'qkscope[gguf]'`.")
    log.info("dequantising %s once; later loads take a moment", file.name)
    # a folder appears under its name only when it is complete, so two processes or a crash cannot leave half of one
    temporary = _beside(folder)
    try:
        temporary.mkdir(parents=True)
        _make(file, temporary)
        if file_hash(file) != digest:
            raise BadInput(f"{file} changed while it was read: try again when it is written.")
        _put(temporary, folder)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"the cache {folder.parent} cannot be written ({why}): set XDG_CACHE_HOME to a writable folder."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _make(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a file, and the hashes of both."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    alone = folder / "alone"  # what lies beside the file is none of its business
    alone.mkdir()
    try:
        (alone / "model.gguf").symlink_to(file.resolve())
    except OSError:
        shutil.copy(file, alone / "model.gguf")
    with told(f"{file.name} could not be read as GGUF", str(file), None), quiet():
        said = _read(file)
        options = {"gguf_file": "model.gguf", "trust_remote_code": False}
        model, report = AutoModelForCausalLM.from_pretrained(
            str(alone), dtype=torch.float32, output_loading_info=True, **options
        )
        check_report(str(file), report)
        _check_whole(file, said, model)
        rules = token_rules(said.fields)
        tokenizer = AutoTokenizer.from_pretrained(str(alone), **options) if rules is not None else None
    with quiet():
        _save(model, tokenizer, rules, folder, file.name)
    shutil.rmtree(alone)
    write_json(folder / _MANIFEST, {"layout": _LAYOUT, "files": _hashes(folder)})


def _save(model: Any, tokenizer: Any | None, rules: TokenRules | None, folder: Path, name: str) -> None:
    from transformers import AutoTokenizer

    # the weights are plain floats now, but transformers refuses to save a model marked as quantised
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    if tokenizer is None or rules is None:
        return
    follow_rules(tokenizer, rules)
    tokenizer.save_pretrained(folder)
    broken = rules.broken_by(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False))
    if broken is not None:
        raise BadInput(f"the tokenizer of {name} cannot be made as the file says ({broken}): give a folder instead.")


def _read(file: Path) -> _Told:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    architecture = str(fields["general.architecture"])
    layers = fields.get(f"{architecture}.block_count", 0)
    if not isinstance(layers, int) or layers > len(sizes):
        raise BadInput(f"{file} asks for {layers:,} layers, but holds {len(sizes)} tensors: download it again.")
    over = [name for name in sizes if (at := re.match(r"blk\.(\d+)\.", name)) and layers and int(at[1]) >= layers]
    if over:
        raise BadInput(
            f"{file} says that it has {layers} layers, but holds weights such as {over[0]}: download it again."
        )
    stretch = next((torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name == _STRETCH), None)
    sizes.pop(_STRETCH, None)
    return _Told(architecture, fields, sizes, stretch)


def _check_whole(file: Path, said: _Told, model: Any) -> None:
    """Every number of the file is in the model, and what it says of RoPE was heard."""
    scaling = said.fields.get(f"{said.architecture}.rope.scaling.type", "none")
    rope = getattr(model.config, "rope_parameters", None) or {}
    heard = scaling == "none" or rope.get("rope_type", "default") != "default"
    if not heard or (said.stretch is not None and not _stretched_as_llama3(model.config, said.stretch)):
        raise BadInput(f"{file} stretches RoPE in a way that transformers leaves out when it reads GGUF, so its "
                       "attention would be wrong: give the model as a folder or a hub id.")  # fmt: skip
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    theirs, ours = sum(said.sizes.values()), sum(sizes.values())
    if theirs != ours:
        raise BadInput(f"{file} holds {theirs:,} numbers, but the model that transformers makes of it has {ours:,}, so "
                       "it would compute something else: give the model as a folder or a hub id.")  # fmt: skip


def _stretched_as_llama3(config: Any, factors: Tensor) -> bool:
    """Whether a file's factors for RoPE's wavelengths are those of Llama 3; the config then says so too.

    Such a file holds the factors alone. Llama 3's rule makes them of the largest one and three numbers that all of its
    releases share; what the rule makes is compared with what the file holds.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = dict(config.rope_parameters)
    if plain.get("rope_type", "default") != "default":
        return False
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    given = plain["rope_theta"] ** (-torch.arange(0, width, 2) / width) / factors
    config.rope_parameters = plain | {
        "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    ruled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    return ruled.shape == given.shape and bool(torch.allclose(ruled, given, rtol=1e-3, atol=0))


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: file_hash(path) for path in sorted(folder.iterdir()) if path.name != _MANIFEST}


def _is_whole(folder: Path) -> bool:
    """Whether a cached folder is what was written there."""
    if not folder.is_dir():
        return False
    made = read_json(folder / _MANIFEST)
    if not isinstance(made, dict) or made.get("layout") != _LAYOUT:
        log.info("%s is of an older layout, and is made anew", folder)
        return False
    try:
        whole = made.get("files") == _hashes(folder)
    except OSError:  # a folder among the files, or one that is gone
        whole = False
    if not whole:
        log.warning("%s was changed since it was written, and is made anew", folder)
    return whole


def _put(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name; one that was there and is not whole makes way."""
    aside = _beside(folder)
    with suppress(FileNotFoundError):
        folder.rename(aside)
    try:
        temporary.rename(folder)
    except OSError:
        if not _is_whole(folder):  # otherwise another process was first, and its folder is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _beside(folder: Path) -> Path:
    """A name for a folder in the making, which says whose it is."""
    return folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}")


def _sweep(cache: Path) -> None:
    """Remove what killed processes left: theirs, if they ran here and are gone, or a day old."""
    for left in cache.glob(".*"):
        whose, _, process = left.name.rpartition(".")[0].rpartition(".")
        with suppress(OSError):
            here = whose.endswith(f".{socket.gethostname()}") and process.isdecimal()
            if (here and not _runs(int(process))) or time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
