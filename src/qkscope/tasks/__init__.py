"""Text with marked spans: `binding`, `filter`, and `from_jsonl` for a contrast of your own."""

from __future__ import annotations

from qkscope.tasks.boxes import binding
from qkscope.tasks.jsonl import from_jsonl
from qkscope.tasks.lists import filter_task as filter
from qkscope.tasks.task import Contrast, Task

__all__ = ["Contrast", "Task", "binding", "filter", "from_jsonl"]
