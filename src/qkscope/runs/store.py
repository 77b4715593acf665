"""Tensors and a manifest in one safetensors file, written whole or not at all, and never read as something else.

The header holds a checksum of both: a disk that gives back another bit is found out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.runs.folder import removed, write_file, writing

SCHEMA = 1


def write_tensors(
    path: str | Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    manifest: Mapping[str, Any],
    *,
    new_folder: bool = True,
) -> None:
    """Write to a temporary name beside ``path``, then rename: a reader never sees half a file.

    Parameters
    ----------
    new_folder : whether to make the folder where there is none; a run that has made its own says no, as one that is
        gone was taken away.
    """
    path = Path(path)
    if not new_folder and not path.parent.is_dir():
        raise removed(path.parent)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, tensor_bytes(kind, tensors, manifest))


def tensor_bytes(kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> bytes:
    """The content of such a file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    said = json.dumps(manifest, sort_keys=True)
    header = {"schema": str(SCHEMA), "kind": kind, "manifest": said, "sha256": _checksum(plain, said)}
    content = save(plain, header)
    size = 8 + int.from_bytes(content[:8], "little")
    ordered = json.dumps(json.loads(content[8:size]), sort_keys=True).encode()  # safetensors shuffles the header
    ordered += b" " * (-len(ordered) % 8)
    return b"".join([len(ordered).to_bytes(8, "little"), ordered, memoryview(content)[size:]])


def _checksum(tensors: Mapping[str, Tensor], manifest: str) -> str:
    digest = hashlib.sha256(manifest.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(
    path: str | Path, kind: str, expect: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of this kind; refuse another kind, a newer schema, or one made from something else than expected."""
    path = Path(path)
    with _opened(path) as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    _check_header(path, kind, header)
    manifest = _manifest(path, header)
    if header.get("sha256") != _checksum(tensors, header["manifest"]):
        wrong = "its checksum is not that of what it holds" if header.get("sha256") else "it has no checksum"
        raise BadInput(f"{path} is damaged: {wrong}; make it again, elsewhere.")
    about = manifest.get("about") or {}
    for field, want in (expect or {}).items():
        if about.get(field) != want:
            raise BadInput(f"{path} was made with another {field}: {about.get(field)} there, {want} here.")
    return tensors, manifest


def check_replaceable(path: str | Path, kind: str) -> None:
    """Refuse to write where a file stands that is not an earlier one of this kind: it may be somebody's weights."""
    path = Path(path)
    if not path.exists() and not path.is_symlink():
        return
    try:
        with _opened(path) as file:
            _check_header(path, kind, file.metadata() or {})
    except BadInput:
        raise BadInput(f"{path} is there already and is no {kind} of ours: name a new file.") from None


def check_shapes(path: str | Path, wanted: Callable[[], Mapping[str, Tensor]], tensors: Mapping[str, Tensor]) -> None:
    """What a manifest promises is what the file holds; asked of tensors without memory, as it may promise anything."""
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    try:
        wrong = [name for name, tensor in wanted().items() if found.get(name) != (tensor.shape, tensor.dtype)]
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        wrong = ["its manifest"]
    if wrong:
        raise BadInput(
            f"{path} is damaged: {wrong[0]} is missing or of another shape or type; make it again, elsewhere."
        )


def read_manifest(path: str | Path) -> dict[str, Any]:
    """What a file of any kind says of itself; its tensors are left where they are."""
    path = Path(path)
    with _opened(path) as file:
        return _manifest(path, file.metadata() or {})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError):
        raise BadInput(f"{path} is damaged or not a qkscope file; make it again.") from None


def _manifest(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    try:
        manifest = json.loads(header["manifest"])
    except (ValueError, KeyError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("about") or {}, dict):
        raise BadInput(f"{path} is damaged or not a qkscope file; make it again.")
    return manifest


def _check_header(path: Path, kind: str, header: Mapping[str, str]) -> None:
    schema = header.get("schema", "")
    if schema.isdecimal() and int(schema) > SCHEMA:
        raise BadInput(
            f"{path} was written by a newer qkscope (schema {schema}; this one reads {SCHEMA}): update qkscope."
        )
    if header.get("kind") != kind:
        raise BadInput(f"{path} holds {header.get('kind') or 'something else'}, not {kind}.")
