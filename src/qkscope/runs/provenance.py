"""What made a result: its command, what was asked, versions and threads. No time, no host: a rerun says the same."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qkscope.errors import BadInput
from qkscope.runs.folder import MANIFEST, check_unchanged, read_json
from qkscope.runs.store import read_manifest

_FIRST = ("model", "revision", "weights", "tokenizer", "dtype", "seed")


def provenance(**asked: Any) -> dict[str, Any]:
    """What made a result: command, what was asked, versions, threads. No time, no host: a rerun gives the same."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("qkscope", "transformers", "numpy", "safetensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"command": command_line(), "asked": asked, "versions": versions, "threads": torch.get_num_threads()}


def command_line() -> str | None:
    """The command that runs, as a shell takes it; none where Python called us."""
    program = Path(sys.argv[0]).parts[-2:]
    ours = program[-1:] == ("qkscope",) or program == ("qkscope", "__main__.py")  # and not pytest
    return shlex.join(["qkscope", *sys.argv[1:]]) if ours else None


def made(path: str | Path, *, load: Callable[[str, str | None], Any] | None = None) -> list[dict[str, Any]]:
    """One row ``{"what", "there", "here", "same"}`` per fact; what is not compared has nothing ``here``.

    Parameters
    ----------
    path : a run folder, or a .safetensors file of ours.
    load : gives the scope of a model by name and revision, to compare its weights and its tokenizer too.
    """
    found = _read(Path(path))
    asked, here = dict(found.get("asked") or {}), provenance()
    compared = {**{name: found.get("versions", {}).get(name) for name in here["versions"]}, "threads": found["threads"]}
    now = {**here["versions"], "threads": here["threads"]}
    if load is not None:
        model, weights, revision = (asked.get(name) for name in ("model", "weights", "revision"))
        if not isinstance(model, str) or not isinstance(weights, str) or not isinstance(revision, str | None):
            raise BadInput(f"{path} names no single model that could be compared.")
        scope = load(model, revision)
        now |= {"weights": scope.weights_hash, "tokenizer": scope.tokenizer_hash}
    order = [name for name in _FIRST if name in asked] + [name for name in asked if name not in _FIRST]
    command = re.sub(r" --part \S+", "", found.get("command") or "") or None  # a part alone makes no run
    files = found.get("files") or {}
    if files:
        compared["files"], now["files"] = len(files), sum(_is_unchanged(Path(path), name, found) for name in files)
    there = {"command": command, **{name: asked[name] for name in order}, **compared}
    return [
        {"what": what, "there": value, "here": now.get(what), "same": value == now[what] if what in now else None}
        for what, value in there.items()
        if value is not None
    ]


def _is_unchanged(folder: Path, name: str, manifest: dict[str, Any]) -> bool:
    try:
        check_unchanged(folder, name, manifest)
    except BadInput:
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        manifest = read_manifest(path)
        moments = manifest.get("moments")
        asked = manifest.get("about") or (moments.get("about") if isinstance(moments, dict) else None)
        if not isinstance(asked, dict | None):
            raise BadInput(f"{path} is damaged or not a qkscope file; make it again.")
        return {"asked": asked, "threads": None}
    if (path / MANIFEST).is_file():
        return {"threads": None, **read_json(path / MANIFEST)}
    raise BadInput(f"{path} holds no manifest.json: name a folder or a .safetensors file that qkscope wrote.")
