"""Tensors and a manifest in one safetensors file, written whole or not at all, and never read as something else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qkscope.errors import BadInput

SCHEMA = 1


def write_tensors(path: str | Path, kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Write to a temporary name beside ``path``, then rename: a reader never sees half a file."""
    path = Path(path)
    header = {"schema": str(SCHEMA), "kind": kind, "manifest": json.dumps(manifest, sort_keys=True)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}): choose another place.") from None
    os.close(handle)
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, header)
        with open(temporary, "r+b") as written:
            os.fsync(written.fileno())  # else a power failure could leave the new name on an empty file
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # most likely the disk is full
        raise BadInput(f"{path} could not be written ({error}): make room and say the same again; an earlier state is "
                       "kept.") from None  # fmt: skip
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_tensors(
    path: str | Path, kind: str, expect: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of this kind; refuse another kind, a newer schema, or one made from something else than expected."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(path, kind, header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            manifest = json.loads(header["manifest"])
    except (SafetensorError, json.JSONDecodeError, KeyError):
        raise BadInput(f"{path} is damaged or not a qkscope file; make it again.") from None
    about = manifest.get("about", {})
    for field, want in (expect or {}).items():
        if about.get(field) != want:
            raise BadInput(f"{path} was made with another {field}: {about.get(field)} there, {want} here.")
    return tensors, manifest


def check_shapes(path: str | Path, wanted: Callable[[], Mapping[str, Tensor]], tensors: Mapping[str, Tensor]) -> None:
    """What a manifest promises is what the file holds; asked of tensors without memory, as it may promise anything."""
    try:
        wrong = [
            name for name, tensor in wanted().items() if name not in tensors or tensors[name].shape != tensor.shape
        ]
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        wrong = ["its manifest"]
    if wrong:
        raise BadInput(f"{path} is damaged: {wrong[0]} is missing or of another shape; make it again, elsewhere.")


def read_manifest(path: str | Path) -> dict[str, Any]:
    """What a file of any kind says of itself; its tensors are left where they are."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})["manifest"]))
    except (SafetensorError, ValueError, KeyError, TypeError):
        raise BadInput(f"{path} is damaged or not a qkscope file; make it again.") from None


def _check_header(path: Path, kind: str, header: Mapping[str, str]) -> None:
    schema = header.get("schema", "")
    if schema.isdecimal() and int(schema) > SCHEMA:
        raise BadInput(
            f"{path} was written by a newer qkscope (schema {schema}; this one reads {SCHEMA}): update qkscope."
        )
    if header.get("kind") != kind:
        raise BadInput(f"{path} holds {header.get('kind') or 'something else'}, not {kind}.")
