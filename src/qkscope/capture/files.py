"""The files that make a model: which of them are loaded, whether they can be read, their fingerprint; the user's cache.

transformers takes the file its config names (``transformers_weights``), else one whole file, else the parts an index
names, safetensors before pickles; what is hashed is found in the same order. Nothing is opened that is no plain file
or larger than such a file can be.

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

_TICK = 3.0  # seconds: the coarsest clock of a file system counts in two
_NO_MATTER = {  # parts of a config that say where a model came from, or how it is run
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip
_AGAIN = "download or save the model again."
_SMALL, _LARGEST = {".json", ".txt", ".jinja", ".model"}, 256 << 20  # such files are read whole
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_NO_PART = re.compile(  # tensors that a model does well without: old buffers, and heads that stand on top of it
    r"(^|\.)(inv_freq|masked_bias|position_ids|num_batches_tracked)$|(^|\.)(attn|attention)\.bias$"
    r"|(^|\.)(pooler|cls|classifier|seq_relationship|qa_outputs|score|lm_head|v_head|mtp)\."
)

# ---------------------------------------------------------------- the user's cache


def cache_dir(*parts: str) -> Path:
    """A folder in the user's cache (``$XDG_CACHE_HOME/qkscope``, or ``~/.cache/qkscope``); not created."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("qkscope", *parts)


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes a file or folder of the cache when the block ends without an error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=".") as temporary:
            path = Path(temporary, target.name)
            yield path
            if not target.is_dir():  # otherwise another process was first, and its folder is as good
                path.replace(target)
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
    """Read a JSON file; None where there is nothing readable."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text())
    return None


# ---------------------------------------------------------------- fingerprints


def file_hash(path: Path) -> str:
    """SHA-256 of a file; it is read once and remembered until it changes: one of 16 GB takes 12 s.

    Size and times of writing can be put back; the inode's own clock (ctime) cannot. A file written in the last moments
    is not remembered: the next write could fall into the same tick of that clock.
    """
    stamp = path.stat()
    about = f"{path.resolve()} {[stamp.st_size, stamp.st_mtime_ns, stamp.st_ctime_ns, stamp.st_ino, stamp.st_dev]}"
    memo = cache_dir("hashes", f"{_sha(about)}.json")
    digest = read_json(memo)
    if not isinstance(digest, str):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time() - stamp.st_ctime > _TICK:
            write_json(memo, digest)
    return digest


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def files_hash(files: Iterable[Path]) -> str:
    """One hash for the weight files of a model, whatever folder they are in."""
    return _sha("\n".join(sorted(f"{path.name} {file_hash(path)}" for path in files)))


def model_hash(weights: str, config: Mapping[str, Any]) -> str:
    """The hash of a model's weights with that of its config behind it."""
    return f"{weights}-{_sha(json.dumps(_that_matters(config), sort_keys=True, default=str))[:16]}"


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
    return _sha("".join(f"{name} {tuple(x.shape)} {x.dtype} {_checksum(x)}\n" for name, x in tensors))


def _checksum(tensor: Tensor) -> tuple[int, ...]:
    """Sums of a tensor's bits as integers of 8 bytes, 64 to a row: of its rows and of its columns, by their number."""
    if tensor.device.type == "meta":  # offloaded: there is nothing to read
        return ()
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = data if data.storage_offset() % 8 == 0 else data.clone()
    whole = len(data) // 512 * 512
    tail = torch.nn.functional.pad(data[whole:], (0, 512 - (len(data) - whole)))
    sums = []
    for part in (data[:whole], tail):
        bits = part.view(torch.int64).view(-1, 64)
        for line in (bits.sum(0), bits.sum(1)):  # int64 wraps around, which is exact too
            sums.append(int((line * torch.arange(1, len(line) + 1, device=line.device)).sum()))
    return tuple(sums)


def tokenizer_hash(tokenizer: Any | None) -> str | None:
    """Hash of what decides about ids: the tokenizer's rules and vocabulary, and its chat template."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = dict(sorted(tokenizer.get_vocab().items())) if backend is None else json.loads(backend.to_str())
    if backend is not None:
        rules = {name: rules[name] for name in rules if name not in ("padding", "truncation")}  # state, not rules
    return _sha(json.dumps([rules, getattr(tokenizer, "chat_template", None)], sort_keys=True))


class Fingerprint:
    """The hash of a model: that of the files it came from, or of what is in memory where that changed since.

    Every weight is read, once for each verb, a tenth of a second for 135 million: an edit through ``.data`` leaves no
    other mark.
    """

    def __init__(self, model: Any, of_files: str | None) -> None:
        self._model, self._of_files = model, of_files
        self._known: tuple[int | None, str] = (None, "")
        self._loaded = None if of_files is None else self._in_memory()

    def _in_memory(self) -> str:
        return model_hash(tensors_hash(self._model.state_dict().items()), self._model.config.to_diff_dict())

    def __call__(self) -> str:
        """The hash of the model as it is now."""
        verb = verb_under_way()
        if verb is None or self._known[0] != verb:
            self._known = verb, self._in_memory()
        now = self._known[1]
        return self._of_files if self._of_files is not None and now == self._loaded else now


# ---------------------------------------------------------------- a model's folder


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
    endless = path.exists() and not path.is_dir() and not path.is_file()
    if endless or (path.suffix in _SMALL and path.is_file() and path.stat().st_size > _LARGEST):
        raise BadInput(f"{path} is no plain file, or larger than any such file ({_LARGEST >> 20} MB): {_AGAIN}")


def read_config(path: Path) -> dict[str, Any]:
    """The config of a model."""
    _check_file(path)
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadInput(f"{path} is damaged: {_AGAIN}")
    return config


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
        names = list(parts.values()) if isinstance(parts, dict) else names
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
