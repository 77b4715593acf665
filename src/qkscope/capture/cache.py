"""The user's cache, and fingerprints: what was measured on which weights.

A fingerprint of files is the SHA-256 of their contents. Without files it is a checksum of the tensors' bits, ``Σ x_i``
and ``Σ i·x_i`` over them as integers: exact, so the same on every device and with any number of threads. Weights alone
are not a model: its config (RoPE's base, softcaps, the window) is hashed beside them, ``WEIGHTS-CONFIG``, so whoever
compares the one compares the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkscope.errors import BadInput

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
_TICK = 3 * 10**9  # ns: the coarsest clock of a file system counts in two seconds
_NO_MATTER = {  # parts of a config that say where a model came from, or how it is run
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip


def cache_dir(*parts: str) -> Path:
    """A folder in the user's cache (``$XDG_CACHE_HOME/qkscope``, or ``~/.cache/qkscope``); not created."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("qkscope", *parts)


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


def _checksum(tensor: Tensor) -> tuple[int, int]:
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGERS[tensor.element_size()]) if tensor.dtype != torch.bool else flat.to(torch.uint8)
    plain = weighted = 0
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].long()  # int64 sums wrap around, which is exact too
        plain += int(part.sum())
        weighted += int((part * torch.arange(1, len(part) + 1, device=part.device)).sum()) * (start // _CHUNK + 1)
    return plain, weighted


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
    """The hash of a model: that of the files it came from, or of what is in memory where it changed since.

    What changes when a tensor does is seen without reading it all: its place, its version, and a few of its numbers. An
    edit in place counts the version up; one that goes around the counter (``.data``) mostly shows in the numbers.
    """

    def __init__(self, model: Any, of_files: str | None) -> None:
        self._model = model
        self._known = (self._trace(), of_files) if of_files is not None else None

    def _trace(self) -> tuple[object, ...]:
        config = model_hash("", self._model.config.to_diff_dict())  # parts of it are read anew at every run
        return config, *(
            (name, x.data_ptr(), x._version, *x.detach().flatten()[:: max(x.numel() // 8, 1)].tolist())
            if x.device.type != "meta"
            else (name, "meta")
            for name, x in self._model.state_dict().items()
        )

    def __call__(self) -> str:
        """The hash of the model as it is now."""
        trace = self._trace()
        if self._known is None or self._known[0] != trace:
            weights = tensors_hash(self._model.state_dict().items())
            self._known = trace, model_hash(weights, self._model.config.to_diff_dict())
        return self._known[1]
