"""Text with marked spans: `binding`, `filter`, `ioi`, `induction`, `greater_than`, `pronoun`, or your own file.

In: a few numbers and a seed, or a file. Out: a `Task`, which draws units of `Example` for choosing heads, for fitting
each contrast and for testing. In reading order: `task` (what a task is, and how one is made of a walk), `words` (and
``words.toml``: the words), one file per task (`binding`, `filter`, `ioi`, `induction`, `greater_than`, `pronoun`),
`jsonl` (a file of your own); and natural text without marks: `texts` (by document), `sides` (split so that no text
stands on two). `BUILT_IN` is the one list of tasks: a new one is a file and an entry there.
"""

from __future__ import annotations

from qkscope.tasks.binding import binding
from qkscope.tasks.filter import filter_task as filter
from qkscope.tasks.greater_than import greater_than
from qkscope.tasks.induction import induction
from qkscope.tasks.ioi import ioi
from qkscope.tasks.jsonl import from_jsonl
from qkscope.tasks.pronoun import pronoun
from qkscope.tasks.task import Contrast, Task

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
