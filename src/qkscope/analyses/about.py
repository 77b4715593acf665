"""What an analysis was made from, and whether a model is the one that something was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkscope.capture.cache import weights_part
from qkscope.capture.marks import notes_of
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.tasks.task import Task


def made_from(scope: Scope, task: Task, space: Space = "post_rope") -> dict[str, Any]:
    """What an analysis was made from, for manifests and for refusing to mix."""
    notes = notes_of(scope, task)
    return {
        "model": scope.name, "revision": scope.revision, "weights": scope.weights_hash,
        "dtype": str(scope.model.dtype), "tokenizer": scope.tokenizer_hash, "task": task.name, "task_seed": task.seed,
        "asked": dict(task.asked), "space": space, **({"notes": notes} if notes else {}),
    }  # fmt: skip


def with_notes(answer: str, about: Mapping[str, Any]) -> str:
    """An answer, and what its reader must know of the task, where there is anything."""
    return " ".join([answer, *about.get("notes", ())])


def check_same_model(about: Mapping[str, Any], scope: Scope, what: str) -> None:
    """Refuse to use with a model what says that it was made with another one, or with another tokenizer."""
    for part, here in (("weights", scope.weights_hash), ("tokenizer", scope.tokenizer_hash)):
        there = about.get(part, here)
        if there != here:
            same = part == "weights" and weights_part(str(there)) == weights_part(str(here))
            part = "settings (config.json, with the same weights)" if same else part
            raise BadInput(f"{what} was made with other {part} than {scope.name} has here: load the same model.")
