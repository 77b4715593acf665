"""The files that make a model: which of them are loaded, whether they can be read, their fingerprint; the user's cache.

transformers takes the file its config names (``transformers_weights``), else one whole file, else the parts an index
names, safetensors before pickles; what is hashed is found in the same order. Nothing is opened that is no plain file
or larger than such a file can be, and a config that asks for more layers than its weights could fill is not built.

A fingerprint of files is the SHA-256 of their contents. Without files it is a checksum of the tensors' bits, sums over
them as integers: exact, so the same on every device and with any number of threads. Weights alone
are not a model: its config (RoPE's base, softcaps, the window) is hashed beside them, ``WEIGHTS-CONFIG``, so whoever
compares the one compares the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.kinds import verb_under_way

_TICK = 3 * 10**9  # ns: the coarsest clock of a file system counts in two seconds
_NO_MATTER = {  # parts of a config that say where a model came from, or how it is run
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip


def cache_dir(*parts: str) -> Path:
    """A folder in the user's cache (``$XDG_CACHE_HOME/qkscope``, or ``~/.cache/qkscope``); not created."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("qkscope", *parts)


@contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Say in one sentence that a folder in the cache cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"the cache {folder} cannot be written ({why}): set XDG_CACHE_HOME to a writable folder."
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write a small file so that a reader sees all of it or none; a cache that cannot be written is no error."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def read_json(path: Path) -> Any | None:
    """Read what `write_json` wrote; None where there is nothing readable."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def file_hash(path: Path) -> str:
    """SHA-256 of a file; it is read once and remembered until it changes.

    Size and times of writing can be put back; the inode's own clock (ctime) cannot. A file written in the last moments
    is not remembered: the next write could fall into the same tick of that clock.
    """
    path = path.resolve()
    memo = cache_dir("hashes", hashlib.sha256(str(path).encode()).hexdigest()[:32] + ".json")
    with path.open("rb") as file:
        stamp = _stamp(path, file.fileno())
        known = read_json(memo)
        if isinstance(known, dict) and known == _record(stamp, known.get("sha256")):
            return str(known["sha256"])
        settled = time.time_ns() - max(stamp[2:4]) > _TICK
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _stamp(path, file.fileno()) != stamp:
            raise BadInput(f"{path} changed while it was read: try again when it is written.")
    if settled:
        write_json(memo, _record(stamp, digest))
    return digest


def _stamp(path: Path, opened: int) -> list[Any]:
    status = os.fstat(opened)
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _record(stamp: list[Any], digest: Any) -> dict[str, Any]:
    """What is remembered of a file, with a checksum of its own: a damaged record is no record."""
    check = hashlib.sha256(json.dumps([stamp, digest]).encode()).hexdigest()
    return {"stamp": stamp, "sha256": digest, "check": check}


def files_hash(files: Iterable[Path]) -> str:
    """One hash for the weight files of a model, whatever folder they are in."""
    lines = sorted(f"{path.name} {file_hash(path)}" for path in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def model_hash(weights: str, config: Mapping[str, Any]) -> str:
    """The hash of a model's weights with that of its config behind it."""
    content = json.dumps(_that_matters(config), sort_keys=True, default=str)
    return f"{weights}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def weights_part(digest: str) -> str:
    """The weights of a `model_hash`, whatever the config."""
    return digest.partition("-")[0]


def _that_matters(config: Any) -> Any:
    if isinstance(config, Mapping):  # its parts may be configs too: of text, of vision
        return {str(name): _that_matters(value) for name, value in config.items() if name not in _NO_MATTER}
    return config


@torch.no_grad()
def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """One hash for named tensors, of their bits."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)}\n".encode())
    return digest.hexdigest()


def _checksum(tensor: Tensor) -> tuple[int, ...]:
    """Sums of a tensor's bits as integers of 8 bytes, 64 to a row: of its rows and of its columns, by their number."""
    if tensor.device.type == "meta":  # offloaded: there is nothing to read
        return ()
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = data if data.storage_offset() % 8 == 0 else data.clone()
    whole = len(data) // 512 * 512
    tail = torch.nn.functional.pad(data[whole:], (0, 512 - (len(data) - whole)))
    sums: list[int] = []
    for part in (data[:whole], tail):
        bits = part.view(torch.int64).view(-1, 64)
        for one in (bits.sum(0), bits.sum(1)):  # int64 wraps around, which is exact too
            sums.append(int((one * torch.arange(1, len(one) + 1, device=one.device)).sum()))
    return tuple(sums)


def tokenizer_hash(tokenizer: Any | None) -> str | None:
    """Hash of what decides about ids: the tokenizer's rules and vocabulary, and its chat template."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules = {name: rules[name] for name in rules if name not in ("padding", "truncation")}  # state, not rules
    else:
        rules = dict(sorted(tokenizer.get_vocab().items()))
    content = json.dumps([rules, getattr(tokenizer, "chat_template", None)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


class Fingerprint:
    """The hash of a model: that of the files it came from, or of what is in memory where that changed since.

    Every weight is read, once for each verb, a tenth of a second for 135 million: an edit through ``.data`` leaves no
    other mark.
    """

    def __init__(self, model: Any, of_files: str | None) -> None:
        self._model = model
        self._known: tuple[int | None, str] = (None, "")
        self._loaded = (self._in_memory(), of_files) if of_files is not None else None

    def _in_memory(self) -> str:
        return model_hash(tensors_hash(self._model.state_dict().items()), self._model.config.to_diff_dict())

    def __call__(self) -> str:
        """The hash of the model as it is now."""
        verb = verb_under_way()
        if verb is None or self._known[0] != verb:
            self._known = verb, self._in_memory()
        now = self._known[1]
        return self._loaded[1] if self._loaded is not None and self._loaded[0] == now else now


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
