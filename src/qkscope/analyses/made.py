"""What made an artifact: its command, what was asked, with which versions; and whether they are the same here.

A folder says it in ``manifest.json``, or in ``job.json`` while it is unfinished or only a shard; a file in its header.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkscope.analyses.fit_folder import JOB
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.runs.folder import read_json
from qkscope.runs.provenance import provenance
from qkscope.runs.store import read_manifest

Row = dict[str, Any]
_FIRST = ("model", "revision", "weights", "tokenizer", "dtype", "seed")


def made(path: str | Path, *, check: bool = False) -> list[Row]:
    """One row ``{"what", "there", "here", "same"}`` per fact; what is not compared has nothing ``here``.

    Parameters
    ----------
    path : a run folder, or a .safetensors file of ours.
    check : also load the model, and compare its weights and its tokenizer.
    """
    found = _read(Path(path))
    asked, here = dict(found.get("asked") or {}), provenance()
    compared = {**{name: found.get("versions", {}).get(name) for name in here["versions"]}, "threads": found["threads"]}
    now = {**here["versions"], "threads": here["threads"]}
    if check:
        model, weights, revision = (asked.get(name) for name in ("model", "weights", "revision"))
        if not isinstance(model, str) or not isinstance(weights, str) or not isinstance(revision, str | None):
            raise BadInput(f"{path} names no single model that could be compared: leave out --check.")
        scope = Scope.load(model, revision=revision)
        now |= {"weights": scope.weights_hash, "tokenizer": scope.tokenizer_hash}
    order = [name for name in _FIRST if name in asked] + [name for name in asked if name not in _FIRST]
    there = {"command": found.get("command"), **{name: asked[name] for name in order}, **compared}
    return [
        {"what": what, "there": value, "here": now.get(what), "same": value == now[what] if what in now else None}
        for what, value in there.items()
        if value is not None
    ]


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        manifest = read_manifest(path)
        moments = manifest.get("moments")
        asked = manifest.get("about") or (moments.get("about") if isinstance(moments, dict) else None)
        if not isinstance(asked, dict | None):
            raise BadInput(f"{path} is damaged or not a qkscope file; make it again.")
        return {"asked": asked, "threads": None}
    if (path / "manifest.json").is_file():
        return {"threads": None, **read_json(path / "manifest.json")}
    if (path / JOB).is_file():
        job = read_json(path / JOB)
        ours = ("schema", "command", "versions", "threads")
        return {"threads": None, **job, "asked": {name: value for name, value in job.items() if name not in ours}}
    raise BadInput(f"{path} holds no manifest.json: name a folder or a .safetensors file that qkscope wrote.")
