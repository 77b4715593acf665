"""The checkpoints of one training run, named and checked before any of them is loaded.

A revision is a branch or tag of a hub model, a step of a shipped ``nano:`` model, or a subfolder of a folder that holds
one model folder per checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkscope.capture.cache import weights_part
from qkscope.capture.load import EMBEDDED, folder_hash
from qkscope.errors import BadInput


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its name in the run, and what `Scope.load` takes. ``weights`` is known for local files."""

    label: str
    model: str
    revision: str | None = None
    weights: str | None = None

    @property
    def step(self) -> int | str:
        """The number in its name (``step1000`` is 1000), or the name."""
        numbers = re.findall(r"\d+", self.label)
        return int(numbers[-1]) if numbers else self.label


def checkpoints(model: str, revisions: str | Sequence[str] | None = None) -> list[Checkpoint]:
    """The checkpoints asked for, by step where all have one; those that cannot exist are refused by name.

    Parameters
    ----------
    model : hub id, ``nano:NAME``, or a folder; one without ``config.json`` holds one subfolder per checkpoint.
    revisions : ``"a,b,c"``, a list, or ``all`` (of a folder or a nano); None is the model as it is.
    """
    if revisions is None:
        return [Checkpoint("", model)]
    names = [part.strip() for part in revisions.split(",")] if isinstance(revisions, str) else list(map(str, revisions))
    names = [name for name in names if name]
    if not names:
        raise BadInput("no revision was named: write --revisions a,b,c, or leave it out.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"revision {twice!r} is named twice: name each once.")
    folder = Path(model).expanduser()
    if model.startswith("nano:"):
        found = _of_nano(model, names)
    elif folder.is_dir() and not (folder / "config.json").is_file():
        found = _of_folder(folder, names)
    elif folder.exists() or model.lower() in EMBEDDED or model.lower().endswith(".gguf"):
        raise BadInput(f"{model} is one checkpoint: leave --revisions out, or name a hub id, a nano model or a folder "
                       "with a subfolder per checkpoint.")  # fmt: skip
    elif names == ["all"]:
        raise BadInput(f"the revisions of {model} are not known here: name them, like step1000,step2000.")
    else:
        found = [Checkpoint(name, model, name) for name in names]
    _refuse_copies(model, found)
    numbered = all(isinstance(checkpoint.step, int) for checkpoint in found)
    return sorted(found, key=lambda checkpoint: int(checkpoint.step)) if numbered else found


def _of_nano(model: str, names: list[str]) -> list[Checkpoint]:
    from qkscope.capture.nano import nano_steps

    steps = [str(step) for step in nano_steps(model.removeprefix("nano:"))]
    wanted = steps if names == ["all"] else names
    missing = [name for name in wanted if name not in steps]
    if missing:
        raise BadInput(f"{model} has no revision {missing[0]!r}: there is {', '.join(steps)}.")
    return [Checkpoint(name, model, name) for name in wanted]


def _of_folder(folder: Path, names: list[str]) -> list[Checkpoint]:
    there = sorted(path.name for path in folder.iterdir() if (path / "config.json").is_file())
    wanted = there if names == ["all"] else names
    if not wanted:
        raise BadInput(f"{folder} is not a model folder (no config.json) and holds none: name another.")
    missing = [name for name in wanted if name not in there]
    if missing:
        shown = ", ".join(there[:12]) or "nothing"
        raise BadInput(f"{folder} has no revision {missing[0]!r}: there is {shown}.")
    return [Checkpoint(name, str(folder / name), weights=folder_hash(folder / name)) for name in wanted]


def _refuse_copies(model: str, found: Sequence[Checkpoint]) -> None:
    seen: dict[str, str] = {}
    for checkpoint in found:
        if checkpoint.weights is not None:
            refuse_copy(model, checkpoint.label, checkpoint.weights, seen)


def refuse_copy(model: str, label: str, weights: str, seen: dict[str, str]) -> None:
    """Refuse a checkpoint whose weights another one had already; hubs have served such copies for whole sweeps."""
    weights = weights_part(weights)  # with another config they are a copy all the same
    if weights in seen:
        raise BadInput(f"revisions {seen[weights]!r} and {label!r} of {model} hold the same weights (hash "
                       f"{weights[:12]}): one of them is not the checkpoint it is called; leave it out.")  # fmt: skip
    seen[weights] = label
