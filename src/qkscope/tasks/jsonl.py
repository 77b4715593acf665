"""A task of your own: one JSON object per line, with the prompt, the query, the keys and their labels.

::

    {"prompt": "hat O, jam Z. The jam is in",
     "keys": [{"text": "O", "labels": {"mine": -1}}, {"text": "Z", "labels": {"mine": 1}}]}

(on one line). A key or query is named by ``text``, which must stand in the prompt once, or by ``span``. Without
``query`` the last token asks. ``group`` names lines that belong together (a prompt and its copy): they are one random
unit. ``use`` (choose, fit or test) puts a line into one pool; lines without it are dealt out by group. Keys labelled
``answer`` decide what counts as right; without such labels the first contrast does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkscope.errors import BadInput
from qkscope.examples import Example, Key, Span, find_span
from qkscope.tasks.task import ANSWER, USES, Contrast, Task, Unit, Use, seeded

_FIELDS = {"prompt", "query", "keys", "group", "use"}
_KEY_FIELDS = {"text", "span", "labels"}


def from_jsonl(path: str | Path, *, seed: int = 0, center: str = "none", chat: bool = False) -> Task:
    """Read a task from a file; every line is checked, and an error names the line."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}.") from None
    read = [_line(text, f"{path}, line {number}") for number, text in enumerate(lines, 1) if text.strip()]
    if not read:
        raise BadInput(f"{path} holds no examples: write one JSON object per line.")
    names = list(dict.fromkeys(name for example, *_ in read for key in example.keys for name in key.labels))
    contrasts = [name for name in names if name != ANSWER] or names
    groups: dict[str, list[Example]] = {}
    uses: dict[str, Use | None] = {}
    for number, (example, group, use) in enumerate(read):
        name = group if group is not None else f"line {number}"
        groups.setdefault(name, []).append(_with_answer(example, contrasts[0]))
        if uses.setdefault(name, use) != use:
            raise BadInput(f"{path}: the lines of group {name!r} have different uses: give them the same.")
    free = [name for name, use in uses.items() if use is None]
    seeded(seed, "jsonl", path.name).shuffle(free)
    for i, name in enumerate(free):
        uses[name] = USES[i % len(USES)]

    def draw(use: Use, contrast: str, n: int) -> list[Unit]:
        own = [
            tuple(examples)
            for name, examples in groups.items()
            if uses[name] == use and any(key.label(contrast) for example in examples for key in example.keys)
        ]
        if not own:
            raise BadInput(f"{path} has no example for {use} with labels of {contrast!r}: add lines, or set their use.")
        return own[:n]

    made = {name: Contrast(name, "as labelled", center=center, paired=False) for name in contrasts}  # type: ignore[arg-type]
    return Task(
        "jsonl",
        made,
        draw,
        seed,
        chat,
        {
            "file": str(path),
            "hash": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32],
            "center": center,
            "chat": chat,
        },
    )


def _line(text: str, where: str) -> tuple[Example, str | None, Use | None]:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise BadInput(f"{where} is not JSON: write one object per line.") from None
    if not isinstance(data, dict):
        raise BadInput(f'{where} is not a JSON object: write {{"prompt": …, "keys": […]}}.')
    unknown = sorted(set(data) - _FIELDS)
    if unknown:
        raise BadInput(f"{where} has a field {unknown[0]!r}: the fields are {', '.join(sorted(_FIELDS))}.")
    prompt = data.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise BadInput(f"{where} needs a prompt: a text that is not empty.")
    if not isinstance(data.get("keys"), list) or not data["keys"]:
        raise BadInput(f"{where} needs keys: a list of pieces of the prompt with their labels.")
    keys = [_key(prompt, key, f"{where}, key {i}") for i, key in enumerate(data["keys"], 1)]
    if not any(sign > 0 for key in keys for sign in key.labels.values()):
        raise BadInput(f"{where} marks no positive key: give at least one key a label of 1.")
    use, group = data.get("use"), data.get("group")
    if use is not None and use not in USES:
        raise BadInput(f"{where} has use {use!r}: it is one of {', '.join(USES)}.")
    query = (_span(prompt, data["query"], f"{where}, query"),) if data.get("query") is not None else ()
    return Example(text=prompt, queries=query, keys=tuple(keys)), None if group is None else str(group), use


def _key(prompt: str, data: Any, where: str) -> Key:
    if not isinstance(data, Mapping) or set(data) - _KEY_FIELDS:
        raise BadInput(f"{where} should be an object with text or span, and labels.")
    labels = data.get("labels", {})
    if not isinstance(labels, Mapping) or any(type(v) is not int or v not in (-1, 0, 1) for v in labels.values()):
        raise BadInput(f"{where} needs labels of 1, -1 or 0 by contrast, but has {json.dumps(labels)[:80]}.")
    return Key(_span(prompt, data, where), {str(name): sign for name, sign in labels.items()})


def _span(prompt: str, data: Any, where: str) -> Span:
    if isinstance(data, str):
        data = {"text": data}
    if not isinstance(data, Mapping) or ("text" in data) == ("span" in data):
        raise BadInput(f"{where} should name either its text or its span [start, stop].")
    if "text" in data:
        if not isinstance(data["text"], str) or not data["text"]:
            raise BadInput(f"{where} has an empty text: name the piece of the prompt.")
        try:
            return find_span(prompt, data["text"])
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None
    span = data["span"]
    right = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
    if not right or not 0 <= span[0] < span[1] <= len(prompt):
        raise BadInput(
            f"{where} has span {json.dumps(span)[:40]}, which is not in the prompt of {len(prompt)} characters."
        )
    return span[0], span[1]


def _with_answer(example: Example, contrast: str) -> Example:
    if any(ANSWER in key.labels for key in example.keys):
        return example
    keys = tuple(Key(key.span, {**key.labels, ANSWER: key.label(contrast)}) for key in example.keys)
    return Example(text=example.text, queries=example.queries, keys=keys)
