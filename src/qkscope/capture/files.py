"""The files that make a model: which of them are loaded, whether they can be read, and their fingerprint.

transformers takes the file its config names (``transformers_weights``), else one whole file, else the parts an index
names, safetensors before pickles; what is hashed is found in the same order. Nothing is opened that is no plain file
or larger than such a file can be, and a config that asks for more layers than its weights could fill is not built.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qkscope.capture.cache import files_hash, model_hash
from qkscope.errors import BadInput

_LARGEST = {".json": 256 << 20, ".txt": 64 << 20, ".jinja": 4 << 20, ".model": 256 << 20}
_LARGEST_CONFIG = 16 << 20
_MOST = 10_000
_COUNTED = re.compile(r"(layer|head|expert|block|stage|depth|codebook)s?$")  # numbers of modules, not their sizes
_LAYERS = re.compile(r"(n|num|encoder|decoder)_(\w+_)?layers?")  # that have weights; max_window_layers is a bound
_AGAIN = "download or save the model again."

_NO_PART = re.compile(  # tensors that a model does well without: old buffers, and heads that stand on top of it
    r"(^|\.)(inv_freq|masked_bias|position_ids|num_batches_tracked)$|(^|\.)(attn|attention)\.bias$"
    r"|(^|\.)(pooler|cls|classifier|seq_relationship|qa_outputs|score|lm_head|v_head|mtp)\."
)


def folder_hash(folder: Path) -> str:
    """Fingerprint of a model folder, without loading it; one that is no whole model by itself is refused."""
    if not (folder / "config.json").exists():
        raise BadInput(f"{folder} is not a model folder: it has no config.json.")
    inner = folder / "additional_chat_templates"
    for path in [*folder.iterdir(), *(inner.iterdir() if inner.is_dir() else ())]:
        _check_file(path)
    if (folder / "adapter_config.json").exists():
        raise BadInput(
            f"{folder} is an adapter to another model: merge the two, and give the folder they are saved in."
        )
    if any(re.match(r"shard-\d+-model-", path.name) for path in folder.iterdir()):
        raise BadInput(f"{folder} holds the parts of a distributed run: save the whole model, and give that folder.")
    config = read_config(folder / "config.json")
    files = _weight_files(folder, config)
    digest = files_hash(files)
    check_config(config, str(folder / "config.json"), _count_tensors(files))
    return model_hash(digest, config)


def local_hash(model: str) -> str | None:
    """Fingerprint of a model that is a folder; None for any other name."""
    folder = Path(model).expanduser()
    return folder_hash(folder) if (folder / "config.json").is_file() else None


def _check_file(path: Path) -> None:
    """Refuse what cannot be read to its end."""
    try:
        status = path.stat()
    except OSError:  # a link that leads nowhere is as good as missing
        return
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"{path} is no plain file, so it could be waited for without end: {_AGAIN}")
    most = _LARGEST_CONFIG if path.name == "config.json" else _LARGEST.get(path.suffix)
    if most is not None and status.st_size > most:
        raise BadInput(f"{path} has {status.st_size >> 20:,} MB, more than any such file: {_AGAIN}")


def read_config(path: Path) -> dict[str, Any]:
    """The config of a model, if it can be one."""
    _check_file(path)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise BadInput(f"{path} is damaged: {_AGAIN}")
    check_config(config, str(path))
    return config


def check_config(config: Mapping[str, Any], name: str, tensors: int | None = None) -> None:
    """Refuse a config with more layers, heads or experts than a model has, or more layers than there are tensors."""
    for key, value in _numbers(config):
        if value > _MOST:
            raise BadInput(f"{name} asks for {value:,} as its {key}, more than any model has: {_AGAIN}")
        if tensors is not None and _LAYERS.fullmatch(key) and value > tensors:
            raise BadInput(f"{name} asks for {value:,} as its {key}, but the weights are {tensors:,} tensors: {_AGAIN}")


def _numbers(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and depth < 8:
            yield from _numbers(value, depth + 1)
        elif isinstance(value, int) and _COUNTED.search(str(key)):
            yield str(key), value


def _weight_files(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """The files transformers will load, or what is missing."""
    whole = ("model.safetensors", "pytorch_model.bin")
    names = [name + end for name in whole for end in ("", ".index.json")]
    if (named := config.get("transformers_weights")) is not None:
        ends = (".safetensors", ".safetensors.index.json")
        if not isinstance(named, str) or Path(named).name != named or not named.endswith(ends):
            raise BadInput(
                f"{folder} has a config that names {named!r:.80} as its weights: name a safetensors file beside it."
            )
        names = [named]
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is None:
        raise BadInput(f"{folder} holds no weights (no model.safetensors): {_AGAIN}")
    if not name.endswith(".index.json"):
        return [folder / name]
    parts = _indexed(folder / name)
    missing = [part for part in parts if not (folder / part).is_file()]
    if missing:
        raise BadInput(
            f"{folder} is incomplete: {missing[0]} is missing ({len(missing)} of {len(parts)} weight files): {_AGAIN}"
        )
    return [folder / part for part in parts]


def _indexed(index: Path) -> list[str]:
    """The files that an index of weights names, all of them beside it."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        names = {None}
    if not all(isinstance(name, str) for name in names):
        raise BadInput(f"{index} is damaged: {_AGAIN}")
    if any(Path(name).name != name for name in names):
        raise BadInput(f"{index} names files outside of its folder: {_AGAIN}")
    return sorted(names)


def _count_tensors(files: Sequence[Path]) -> int | None:
    """How many tensors the files hold; None where that cannot be known without loading them."""
    total = 0
    for path in files:
        if path.suffix != ".safetensors":
            return None
        try:
            with safe_open(path, "pt") as opened:
                total += len(opened.keys())
        except (OSError, SafetensorError, MemoryError):  # loading will say what is wrong
            return None
    return total


def check_report(name: str, report: Mapping[str, Any]) -> None:
    """Every weight of the model comes from its files, and every tensor of its files went into the model."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise BadInput(f"{name} is incomplete: {len(missing)} weights such as {missing[0]} are missing from its files.")
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        weight, theirs, ours = mismatched[0]
        raise BadInput(
            f"{name} has {len(mismatched)} weights of another shape than its config says, such as {weight} "
            f"({list(theirs)} instead of {list(ours)}): {_AGAIN}"
        )
    unused = sorted(key for key in report["unexpected_keys"] if not _NO_PART.search(key))
    if unused:
        raise BadInput(
            f"{name} holds {len(unused)} weights such as {unused[0]} that have no place in the model its config "
            "describes, so it would compute something else: mend the config (its number of layers, its biases), or "
            "download the model again."
        )
