"""Tensors and a manifest in one safetensors file, written whole or not at all, and never read as something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.runs.folder import write_file, writing

SCHEMA = 1


def write_tensors(path: str | Path, kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Write to a temporary name beside ``path``, then rename: a reader never sees half a file."""
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, tensor_bytes(kind, tensors, manifest))


def tensor_bytes(kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> bytes:
    """The content of such a file; of the same tensors, the same bytes."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = save(plain, {"schema": str(SCHEMA), "kind": kind, "manifest": json.dumps(manifest, sort_keys=True)})
    size = 8 + int.from_bytes(content[:8], "little")
    ordered = json.dumps(json.loads(content[8:size]), sort_keys=True).encode()  # safetensors shuffles the header
    ordered += b" " * (-len(ordered) % 8)
    return b"".join([len(ordered).to_bytes(8, "little"), ordered, memoryview(content)[size:]])


def read_tensors(
    path: str | Path, kind: str, expect: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of this kind; refuse another kind, a newer schema, or one made from something else than expected."""
    tensors, manifest = _read(Path(path), kind)
    about = manifest.get("about") or {}
    for field, want in (expect or {}).items():
        if about.get(field) != want:
            raise BadInput(f"{path} was made with another {field}: {about.get(field)} there, {want} here.")
    return tensors, manifest


def read_manifest(path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """What a file says of itself, of this kind or of any; its tensors are left where they are."""
    return _read(Path(path), kind, tensors=False)[1]


def check_replaceable(path: str | Path, kind: str) -> None:
    """Refuse to write where a file stands that is not an earlier one of this kind: it may be somebody's weights."""
    path = Path(path)
    if not path.exists() and not path.is_symlink():
        return
    try:
        read_manifest(path, kind)
    except BadInput:
        raise BadInput(f"{path} is there already and is no {kind} of ours: name a new file.") from None


def check_shapes(path: str | Path, wanted: Callable[[], Mapping[str, Tensor]], tensors: Mapping[str, Tensor]) -> None:
    """What a manifest promises is what the file holds; asked of tensors without memory, as it may promise anything."""
    held = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    try:
        wrong = [name for name, tensor in wanted().items() if held.get(name) != (tensor.shape, tensor.dtype)]
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        wrong = ["its manifest"]
    if wrong:
        raise BadInput(
            f"{path} is damaged: {wrong[0]} is missing or of another shape or type; make it again, elsewhere."
        )


def _read(path: Path, kind: str | None, *, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            held = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError):
        header, held = {}, {}
    schema = header.get("schema", "")
    if schema.isdecimal() and int(schema) > SCHEMA:
        raise BadInput(
            f"{path} was written by a newer qkscope (schema {schema}; this one reads {SCHEMA}): update qkscope."
        )
    if header and kind is not None and header.get("kind") != kind:
        raise BadInput(f"{path} holds {header.get('kind') or 'something else'}, not {kind}.")
    try:
        manifest = json.loads(header["manifest"])
    except (ValueError, KeyError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("about") or {}, dict):
        raise BadInput(f"{path} is damaged or not a qkscope file; make it again.")
    return held, manifest
