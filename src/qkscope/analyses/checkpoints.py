"""The checkpoints of one training run, by name: revisions on the hub, steps of a nano model, subfolders of a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkscope.capture.files import folder_hash, local_hash, weights_part
from qkscope.capture.load import check_revisions, revisions_of
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
        return [Checkpoint("", model, weights=local_hash(model))]
    listed = revisions.split(",") if isinstance(revisions, str) else revisions
    names = [name for name in (str(part).strip() for part in listed) if name]
    if not names or len(set(names)) < len(names):
        raise BadInput("name each revision once, like step1000,step2000, or leave them out.")
    if names == ["all"]:
        there = revisions_of(model)
        if there is None:
            raise BadInput(f"the revisions of {model} are not known here: name them, like step1000,step2000.")
        names = there or names
    check_revisions(model, names)
    folder = Path(model).expanduser()
    if folder.is_dir():
        points = [Checkpoint(name, str(folder / name), weights=folder_hash(folder / name)) for name in names]
    else:
        points = [Checkpoint(name, model, name) for name in names]
    seen: dict[str, str] = {}
    for point in points:
        if point.weights is not None:
            refuse_copy(model, point.label, point.weights, seen)
    numbered = all(isinstance(point.step, int) for point in points)
    return sorted(points, key=lambda point: int(point.step)) if numbered else points


def refuse_copy(model: str, label: str, weights: str, seen: dict[str, str]) -> None:
    """Refuse a checkpoint whose weights another one had already; hubs have served such copies for whole sweeps."""
    first = seen.setdefault(weights_part(weights), label)  # with another config they are a copy all the same
    if first != label:
        raise BadInput(
            f"revisions {first!r} and {label!r} of {model} hold the same weights (hash {weights[:12]}): one of them is"
            " not the checkpoint it is called; leave it out."
        )
