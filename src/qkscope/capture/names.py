"""What a model's name stands for, and the checkpoints of one training run.

A name is a hub id, a folder, a ``.gguf`` file, ``smollm2-135m`` or ``gemma3-270m`` (inside installed packages), or
``nano:NAME@STEP`` (shipped; without the step, the last one). A revision is a branch, tag or commit of a hub model, a
step of a nano model, or a subfolder of a folder that holds one model folder per checkpoint, as ``qkscope train nano``
writes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from qkscope.capture.files import folder_hash, local_hash, weights_part
from qkscope.capture.packages import EMBEDDED, packaged_file
from qkscope.errors import BadInput

_NANO = "nano:"
_SHIPPED = Path(__file__).parents[1] / "data" / "nano"


class Place(NamedTuple):
    """Where a model is: its name and revision in results, and its folder or GGUF file; None for one on the hub."""

    name: str
    revision: str | None
    path: Path | None


def locate(name: str | Path, revision: str | None = None) -> Place:
    """The place of a model's files; a name that leads nowhere is refused."""
    model, path = str(name), Path(name).expanduser()
    if model.startswith(_NANO):
        model, at, step = model.partition("@")
        if at and revision not in (None, step):
            raise BadInput(f"{name} names step {step!r}, but the revision is {revision!r}: give one of them.")
        revision = step if at else str(nano_steps(model)[-1]) if revision is None else revision
        path = _SHIPPED / model.removeprefix(_NANO)
    if revision is not None:
        _check_there(model, [revision])
    if model.lower() in EMBEDDED:
        return Place(model, revision, packaged_file(model.lower()))
    if path.is_dir():  # of a model, of checkpoints, or of none, which is said when it is opened
        return Place(model, revision, path / (revision or ""))
    gguf = model.lower().endswith(".gguf")
    if gguf and path.is_file():
        return Place(model, revision, path)
    if gguf or path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        what = "is no model folder and no .gguf file" if path.exists() else "does not exist"
        raise BadInput(f"{name} {what}: give a folder with config.json, a .gguf file or a hub id.")
    return Place(model, revision, None)


def nano_names() -> list[str]:
    """The nano models that ship with the package.

    >>> nano_names()
    ['mixed']
    """
    return sorted(path.name for path in _SHIPPED.iterdir() if path.is_dir())


def nano_steps(name: str) -> list[int]:
    """The training steps at which a nano model can be had, in order; ``nano:`` before the name is welcome."""
    name = name.removeprefix(_NANO)
    if name not in nano_names():
        raise BadInput(f"there is no nano model {name!r}: there is {', '.join(nano_names())}.")
    return sorted(int(path.name) for path in (_SHIPPED / name).iterdir() if path.name.isdecimal())


# ---------------------------------------------------------------- the checkpoints of one training run


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
        return [Checkpoint("", model, weights=local_hash(model))]
    listed = revisions.split(",") if isinstance(revisions, str) else revisions
    names = [name for name in (str(part).strip() for part in listed) if name]
    if not names:
        raise BadInput("no revision was named: name some, like step1000,step2000, or leave them out.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"revision {twice!r} is named twice: name each once.")
    if names == ["all"]:
        there = _revisions(model)
        if there is None:
            raise BadInput(f"the revisions of {model} are not known here: name them, like step1000,step2000.")
        names = there or names
    _check_there(model, names)
    folder = Path(model).expanduser()
    if folder.is_dir():
        found = [Checkpoint(name, str(folder / name), weights=folder_hash(folder / name)) for name in names]
    else:
        found = [Checkpoint(name, model, name) for name in names]
    seen: dict[str, str] = {}
    for checkpoint in found:
        if checkpoint.weights is not None:
            refuse_copy(model, checkpoint.label, checkpoint.weights, seen)
    numbered = all(isinstance(checkpoint.step, int) for checkpoint in found)
    return sorted(found, key=lambda checkpoint: int(checkpoint.step)) if numbered else found


def _revisions(model: str) -> list[str] | None:
    """The checkpoints that there are, none of what is one model; None where only the hub knows."""
    path = Path(model).expanduser()
    if model.startswith(_NANO):
        return list(map(str, nano_steps(model)))
    if path.is_dir() and not (path / "config.json").exists():
        return sorted(inner.name for inner in path.iterdir() if (inner / "config.json").is_file())
    return [] if path.exists() or model.lower() in EMBEDDED or model.lower().endswith(".gguf") else None


def _check_there(model: str, names: Sequence[str]) -> None:
    there = _revisions(model)
    if there == []:
        raise BadInput(f"{model} is one model, not a folder of checkpoints: leave out the revision {names[0]!r}.")
    if there and (missing := [name for name in names if name not in there]):
        raise BadInput(f"{model} has no revision {missing[0]!r}: there is {', '.join(there[:20])}.")


def refuse_copy(model: str, label: str, weights: str, seen: dict[str, str]) -> None:
    """Refuse a checkpoint whose weights another one had already; hubs have served such copies for whole sweeps."""
    weights = weights_part(weights)  # with another config they are a copy all the same
    if weights in seen:
        raise BadInput(
            f"revisions {seen[weights]!r} and {label!r} of {model} hold the same weights (hash {weights[:12]}): one of "
            "them is not the checkpoint it is called; leave it out."
        )
    seen[weights] = label
