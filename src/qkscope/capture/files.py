"""The files that make a model: which of them are loaded, whether they can be read, their fingerprint; the user's cache.

transformers takes the file its config names (``transformers_weights``), else one whole file, else the parts an index
names, safetensors before pickles; what is hashed is found in the same order. Nothing is opened that is no plain file
or larger than such a file can be, and a config that asks for more layers than any model has is not built.

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
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.kinds import verb_under_way
from qkscope.runs.folder import write_file

_DAY = 86_400
_TICK = 3 * 10**9  # ns: the coarsest clock of a file system counts in two seconds
_NO_MATTER = {  # parts of a config that say where a model came from, or how it is run
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip
_AGAIN = "download or save the model again."
_SMALL, _LARGEST = {".json", ".txt", ".jinja", ".model"}, 256 << 20  # such files are read whole
_COUNTED = re.compile(r"(layer|head|expert|block|stage|depth|codebook)(s|_count)?$")  # of modules, not their sizes
_MOST = 10_000
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_NO_PART = re.compile(  # tensors that a model does well without: old buffers, and heads that stand on top of it
    r"(^|\.)(inv_freq|masked_bias|position_ids|num_batches_tracked)$|(^|\.)(attn|attention)\.bias$"
    r"|(^|\.)(pooler|cls|classifier|seq_relationship|qa_outputs|score|lm_head|v_head|mtp)\."
)


def cache_dir(*parts: str) -> Path:
    """A folder in the user's cache (``$XDG_CACHE_HOME/qkscope``, or ``~/.cache/qkscope``); not created."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("qkscope", *parts)


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """A place for what shall be a file or folder of the cache: it gets its name when it is complete, or leaves nothing.

    So two processes or a crash cannot leave half of one; what a killed process left is swept away a day later.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(".*"):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)
        with TemporaryDirectory(dir=target.parent, prefix=".") as temporary:
            made = Path(temporary, target.name)
            yield made
            if not target.is_dir():  # otherwise another process was first, and its folder is as good
                made.replace(target)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"the cache {target.parent} cannot be written ({why}): set XDG_CACHE_HOME to a writable folder."
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write a small file so that a reader sees all of it or none; a cache that cannot be written is no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(content))


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote; None where there is nothing readable."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text())
    return None


def file_hash(path: Path) -> str:
    """SHA-256 of a file; it is read once and remembered until it changes: one of 16 GB takes 12 s.

    Size and times of writing can be put back; the inode's own clock (ctime) cannot. A file written in the last moments
    is not remembered: the next write could fall into the same tick of that clock.
    """
    with path.open("rb") as file:
        stamp = os.fstat(file.fileno())
        about = f"{path.resolve()} {[stamp.st_size, stamp.st_mtime_ns, stamp.st_ctime_ns, stamp.st_ino, stamp.st_dev]}"
        memo = cache_dir("hashes", f"{hashlib.sha256(about.encode()).hexdigest()}.json")
        known = read_json(memo)
        if isinstance(known, str):
            return known
        settled = time.time_ns() - stamp.st_ctime_ns > _TICK
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if os.fstat(file.fileno()).st_ctime_ns != stamp.st_ctime_ns:
            raise BadInput(f"{path} changed while it was read: try again when it is written.")
    if settled:
        write_json(memo, digest)
    return digest


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


def folder_hash(folder: Path) -> str:
    """Fingerprint of a model folder, without loading it; one that is no whole model by itself is refused."""
    if not (folder / "config.json").exists():
        raise BadInput(f"{folder} is not a model folder: it has no config.json.")
    for path in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
        _check_file(path)
        if path.name == "adapter_config.json" or re.match(r"shard-\d+-model-", path.name):  # loaded over the weights
            raise BadInput(
                f"{folder} is an adapter to another model or a part of a distributed run ({path.name}): save the whole "
                "model, and give the folder it is saved in."
            )
    config = read_config(folder / "config.json")
    return model_hash(files_hash(_weight_files(folder, config)), config)


def local_hash(model: str) -> str | None:
    """Fingerprint of a model that is a folder; None for any other name."""
    folder = Path(model).expanduser()
    return folder_hash(folder) if (folder / "config.json").is_file() else None


def _check_file(path: Path) -> None:
    """Refuse what cannot be read to its end; a link that leads nowhere is as good as missing."""
    if path.is_file():
        if path.suffix in _SMALL and (size := path.stat().st_size) > _LARGEST:
            raise BadInput(f"{path} has {size >> 20:,} MB, more than any such file: {_AGAIN}")
    elif path.exists() and not path.is_dir():
        raise BadInput(f"{path} is no plain file, so it could be waited for without end: {_AGAIN}")


def read_config(path: Path) -> dict[str, Any]:
    """The config of a model, if it can be one."""
    _check_file(path)
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadInput(f"{path} is damaged: {_AGAIN}")
    check_counts(config, str(path))
    return config


def check_counts(said: Mapping[str, Any], name: str) -> None:
    """Refuse a config with more layers, heads or experts than any model has: building it would not end."""
    for key, value in said.items():
        if isinstance(value, Mapping):
            check_counts(value, name)
        elif isinstance(value, int) and value > _MOST and _COUNTED.search(key):
            raise BadInput(f"{name} asks for {value:,} as its {key}, more than any model has: {_AGAIN}")


def _weight_files(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """The files transformers will load, all of them in the folder; or what is missing."""
    named = config.get("transformers_weights")
    there = [path.name for path in folder.iterdir() if path.is_file()]
    names = [name for name in _WEIGHTS if name in there][:1] if named is None else [named]
    if not names:
        raise BadInput(f"{folder} holds no weights (no model.safetensors): {_AGAIN}")
    if names[0] in there and names[0].endswith(".index.json"):
        index = read_json(folder / names[0])
        parts = index.get("weight_map") if isinstance(index, dict) else None
        names = list(parts.values()) if isinstance(parts, dict) else [names[0]]
    for name in names:
        if name not in there or not name.endswith((".safetensors", ".bin")):
            raise BadInput(f"{folder} is incomplete or damaged: {name!r:.80} is no file of weights in it: {_AGAIN}")
    return [folder / name for name in sorted(set(names))]


def check_report(name: str, report: Mapping[str, Any]) -> None:
    """Every weight of the model comes from its files, and every tensor of its files went into the model."""
    other = [f"{key} ({list(theirs)} instead of {list(ours)})" for key, theirs, ours in report["mismatched_keys"]]
    unused = [key for key in report["unexpected_keys"] if not _NO_PART.search(key)]
    for keys, wrong in (
        (report["missing_keys"], "are missing from its files"),
        (other, "have another shape than its config says"),
        (unused, "have no place in the model its config describes"),
    ):
        if keys:
            raise BadInput(
                f"{name} does not fit its config: {len(keys)} weights such as {min(keys)} {wrong}, so it would compute "
                "something else: mend the config (its number of layers, its biases), or download the model again."
            )
