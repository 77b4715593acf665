"""Text with marked spans: `binding`, `filter`, `ioi`, `induction`, `greater_than`, `pronoun`, or your own file."""

from __future__ import annotations

from qkscope.tasks.boxes import binding
from qkscope.tasks.indirect import ioi
from qkscope.tasks.jsonl import from_jsonl
from qkscope.tasks.lists import filter_task as filter
from qkscope.tasks.pronouns import pronoun
from qkscope.tasks.repeats import induction
from qkscope.tasks.task import Contrast, Task
from qkscope.tasks.years import greater_than

BUILT_IN = {
    task.__name__.removesuffix("_task"): task for task in (binding, filter, ioi, induction, greater_than, pronoun)
}
"""Makers of tasks by the name that their tasks carry; ``maker(seed=task.seed, **task.asked)`` makes a task again."""

__all__ = [
    "BUILT_IN",
    "Contrast",
    "Task",
    "binding",
    "filter",
    "from_jsonl",
    "greater_than",
    "induction",
    "ioi",
    "pronoun",
]
