"""Text with marked spans: `binding`, `filter`, `ioi`, `induction`, `greater_than`, `pronoun`, or
your own file.

In: a few numbers and a seed, or a file. Out: a `Task`, which draws units of `Example` for choosing
heads, for fitting each contrast and for testing. In reading order: `task` (what a task is, and how
one is made of a walk), `words` (and ``words.toml``: the words and the forms of prompts), the tasks
(`lists`: `binding`, `filter`, `induction`; `sentences`: `ioi`, `greater_than`, `pronoun`), `jsonl`
(a file of your own); and natural text without marks: `texts` (by document), `sides` (split so that
no text stands on two). `BUILT_IN` is the one list of tasks: one function each.
"""

from __future__ import annotations

from collections.abc import Callable

from qkscope.tasks.jsonl import from_jsonl
from qkscope.tasks.lists import binding, induction
from qkscope.tasks.lists import filter_task as filter
from qkscope.tasks.sentences import greater_than, ioi, pronoun
from qkscope.tasks.task import Contrast, Task

#: Makers of tasks by the name that their tasks carry; ``maker(seed=task.seed, **task.asked)`` makes a task again.
BUILT_IN: dict[str, Callable[..., Task]] = {
    "binding": binding, "filter": filter, "ioi": ioi, "induction": induction, "greater_than": greater_than,
    "pronoun": pronoun,
}  # fmt: skip

__all__ = [*BUILT_IN, "BUILT_IN", "Contrast", "Task", "from_jsonl"]
