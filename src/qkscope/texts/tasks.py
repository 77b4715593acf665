"""Tasks by name: `binding`, `filter`, `ioi`, `induction`, `greater_than`, `pronoun`, or your file.

`BUILT_IN` is the one list of them: one function each.
"""

from __future__ import annotations

from collections.abc import Callable

from qkscope.texts.jsonl import from_jsonl
from qkscope.texts.list_tasks import binding, induction
from qkscope.texts.list_tasks import filter_task as filter
from qkscope.texts.sentence_tasks import greater_than, ioi, pronoun
from qkscope.texts.task import Contrast, Task

#: Makers of tasks by name; ``BUILT_IN[task.name](seed=task.seed, **task.asked)`` makes it again.
BUILT_IN: dict[str, Callable[..., Task]] = {
    "binding": binding,
    "filter": filter,
    "ioi": ioi,
    "induction": induction,
    "greater_than": greater_than,
    "pronoun": pronoun,
}

__all__ = [*BUILT_IN, "BUILT_IN", "Contrast", "Task", "from_jsonl"]
