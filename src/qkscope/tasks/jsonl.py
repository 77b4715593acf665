"""A task of your own: one JSON object per line, with the prompt, the query, the keys and their labels.

::

    {"prompt": "hat O, jam Z. The jam is in",
     "keys": [{"text": "O", "labels": {"mine": -1}}, {"text": "Z", "labels": {"mine": 1}}]}

(on one line). A key or query is named by ``text``, which must stand in the prompt once, or by ``span``. Without
``query`` the last token asks. ``group`` names lines that belong together (a prompt and its copy): they are one random
unit. ``use`` (choose, fit or test) puts a line into one pool; lines without it are dealt out by what they say. Keys
labelled ``answer`` decide what counts as right; in lines without such labels, the first contrast that labels them does.
``answers`` names what the model may go on with: ``{"right": " is", "wrong": [" are"]}``.

Each line labelled for a contrast has + and − keys of it, or each group does and no line: then the group's signs are
flipped together under the null, instead of the labels within a line.

Lines with the same prompt are copies: they are never of different uses, and count as one random unit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkscope.errors import BadInput
from qkscope.examples import Answers, Example, Key, Span, find_span
from qkscope.kinds import checked_call
from qkscope.tasks.task import ANSWER, USES, Center, Contrast, Task, Unit, Use, checked_name
from qkscope.tasks.texts import read_plain

log = logging.getLogger(__name__)

_FIELDS = {"prompt", "query", "keys", "group", "use", "answers"}
_SAID: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class _Line:
    number: int
    example: Example
    group: str | None
    use: Use | None

    def signs(self, contrast: str) -> set[int]:
        return {key.label(contrast) for key in self.example.keys} - {0}


@checked_call
def from_jsonl(path: str | Path, *, seed: int = 0, center: Center = "none", chat: bool = False) -> Task:
    """Read a task from a file; every line is checked, and an error names the line.

    Parameters
    ----------
    path : a UTF-8 text file with one JSON object per line.
    seed : of dealing out lines that do not say their use; what the file is called and how it is sorted do not matter.
    center : centring of every contrast: take out of ΔC what all queries (``query``), or also all keys, see alike.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> import json, tempfile
    >>> keys = [{"text": "O", "labels": {"mine": -1}}, {"text": "Z", "labels": {"mine": 1}}]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "mine.jsonl").write_text(json.dumps({"prompt": "hat O, jam Z. The jam:", "keys": keys}))
    ...     task = from_jsonl(f"{folder}/mine.jsonl")
    >>> list(task.contrasts)
    ['mine']
    """
    path = Path(path)
    lines = _lines(path)
    read = [_line(text, number, f"{path}, line {number}") for number, text in enumerate(lines, 1) if text.strip()]
    _need(read, f"{path} holds no examples: write one JSON object per line.")
    names = list(dict.fromkeys(name for line in read for key in line.example.keys for name in key.labels))
    contrasts = [name for name in names if name != ANSWER] or names
    groups = _groups(read, contrasts)
    alike = _alike(groups)
    uses = _uses(groups, alike, seed)
    units = {
        name: [replace(line, example=replace(line.example, cluster=alike[name])) for line in group]
        for name, group in groups.items()
    }
    digest, notes = _digest("\n".join(lines))[:32], list[str]()
    if copies := len(groups) - len(set(alike.values())):
        said = f"{copies} of the file's {len(groups)} examples repeat the prompt of another: copies count as one."
        notes.append(said)
        _say_once(f"{path}: {said}", digest)

    def draw(use: Use, contrast: str, n: int) -> list[Unit]:
        """To fit, lines with labels; to score or swap, lines with right and wrong keys."""
        least = 1 if use == "fit" else 2
        found = [
            tuple(line.example for line in group if len(line.signs(contrast)) >= least)
            for name, group in units.items()
            if uses[name] == use
        ]
        own = [unit for unit in found if unit]
        needed = "a right and a wrong key" if use != "fit" else f"labels of {contrast!r}"
        _need(own, f"{path} has no example for {use} with {needed}: add lines, or set their use.")
        if n > len(own):
            _say_once(f"{path} holds {len(own)} examples to {use}, fewer than {n}: taking all.", digest)
        return own[:n]

    paired = {name: _paired(name, groups.values()) for name in contrasts}
    made = {name: Contrast(name, "as labelled", center=center, paired=paired[name]) for name in contrasts}
    asked = {"file": str(path), "hash": digest, "center": center, "chat": chat}
    first = not chat and any(_begins(line.example) for line in read)
    return Task("jsonl", made, draw, seed, chat, asked, tuple(notes), first)


def _say_once(sentence: str, about: str) -> None:
    """Warn, unless this process has said the same of the same file: one command may read a file several times."""
    if (sentence, about) not in _SAID:
        _SAID.add((sentence, about))
        log.warning("%s", sentence)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- lines that belong together


def _groups(read: Sequence[_Line], contrasts: Sequence[str]) -> dict[str, list[_Line]]:
    """The lines by group; a line of its own gets a name that no group can have: groups are named by text."""
    groups: dict[str, list[_Line]] = {}
    for number, line in enumerate(read):
        own = groups.setdefault(f"group {line.group}" if line.group is not None else f"line {number}", [])
        same, where = not own or own[0].use == line.use, line.example.where
        _need(same, f"{where} has another use than its group {line.group!r}: give them the same.")
        own.append(replace(line, example=_with_answer(line.example, contrasts)))
    return groups


def _with_answer(example: Example, contrasts: Sequence[str]) -> Example:
    if any(ANSWER in key.labels for key in example.keys):
        return example
    first = next((name for name in contrasts if any(key.label(name) for key in example.keys)), contrasts[0])
    return replace(example, keys=tuple(Key(k.span, {**k.labels, ANSWER: k.label(first)}) for k in example.keys))


def _alike(groups: Mapping[str, Sequence[_Line]]) -> dict[str, str]:
    """A name for each group, made of its prompts: the same for groups that share one, be it through others."""
    parent = {name: name for name in groups}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    home: dict[str | None, str] = {}
    for name, group in groups.items():
        for line in group:
            parent[root(name)] = root(home.setdefault(line.example.text, name))
    prompts: dict[str, set[str]] = {}
    for name, group in groups.items():
        prompts.setdefault(root(name), set()).update(str(line.example.text) for line in group)
    digests = {name: _digest("\0".join(sorted(texts)))[:16] for name, texts in prompts.items()}
    return {name: digests[root(name)] for name in groups}


def _uses(groups: Mapping[str, Sequence[_Line]], alike: Mapping[str, str], seed: int) -> dict[str, Use]:
    """The use of each group. Copies have one use; those that do not say theirs are dealt out by what they say."""
    said: dict[str, _Line] = {}
    for line, name in ((line, alike[name]) for name, group in groups.items() for line in group if line.use):
        before = said.setdefault(name, line)
        if before.use != line.use:
            same = [a for b in groups.values() for a in b if a.example.text == line.example.text and a.use]
            other = next((a for a in same if a.use != line.use), before)
            raise BadInput(
                f"{line.example.where} is for {line.use}, but its prompt is that of line {other.number}, which is for "
                f"{other.use}: what is tested must be new, so take one of them out, or give both the same use."
            )
    free = sorted({name for name in alike.values() if name not in said}, key=lambda name: _digest(f"{seed}/{name}"))
    dealt = {name: USES[i % len(USES)] for i, name in enumerate(free)}
    return {name: said[own].use or "fit" if own in said else dealt[own] for name, own in alike.items()}


def _paired(contrast: str, groups: Iterable[Sequence[_Line]]) -> bool:
    """Whether + and − stand in different lines of a group; a mixture has no null, so it is refused."""
    labelled = [[(line, signs) for line in group if (signs := line.signs(contrast))] for group in groups]
    whole = any(len(signs) == 2 for group in labelled for _, signs in group)
    for group in labelled:
        together = {sign for _, signs in group for sign in signs}
        for line, signs in group:
            if len(signs) == 1 and (whole or len(together) == 1):
                has, lacks = ("+", "−") if signs == {1} else ("−", "+")
                raise BadInput(
                    f"{line.example.where} has {has} but no {lacks} keys of {contrast!r}: label both in every line, or"
                    " put the two lines of each pair into one group."
                )
    return not whole


def _begins(example: Example) -> bool:
    """Whether a labelled key is the first thing in a prompt."""
    text = str(example.text)
    return any(not text[: key.span[0]].strip() for key in example.keys if any(key.labels.values()))


# ---------------------------------------------------------------- one line


def _lines(path: Path) -> list[str]:
    """Lines as JSON Lines has them: a line separator of Unicode inside a prompt does not end its line."""
    shown = str(path).encode("utf-8", "backslashreplace").decode()
    _need(shown == str(path), f"the name of {shown} is not UTF-8: rename the file.")
    try:
        text = read_plain(path, "a file with one JSON object per line").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {number} is not UTF-8: save the file as UTF-8 text.") from None
    return re.split(r"\r\n|\n|\r", text)


def _need(holds: object, sentence: str) -> None:
    if not holds:
        raise BadInput(sentence)


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Say where in the file it was that something was refused."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _line(text: str, number: int, where: str) -> _Line:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            _need(name not in found, f"{where} names {name[:80]!r} twice in one object: keep one.")
            found[name] = value
        return found

    try:
        return _parsed(json.loads(text, object_pairs_hook=unique), number, where)
    except BadInput:
        raise
    except RecursionError:
        raise BadInput(f"{where} is nested too deeply: write one flat object per line.") from None
    except ValueError:  # not only JSONDecodeError: a number of 5,000 digits is one too
        raise BadInput(f"{where} is not JSON: write one object per line.") from None


def _parsed(data: Any, number: int, where: str) -> _Line:
    _need(isinstance(data, dict), f'{where} is not a JSON object: write {{"prompt": …, "keys": […]}}.')
    if unknown := sorted(set(data) - _FIELDS):
        fields = ", ".join(sorted(_FIELDS))
        raise BadInput(f"{where} has a field {unknown[0][:80]!r}: the fields are {fields}.")
    prompt, listed, query = data.get("prompt"), data.get("keys"), data.get("query")
    use, group, answers = data.get("use"), data.get("group"), data.get("answers")
    _need(isinstance(prompt, str) and prompt, f"{where} needs a prompt: a text that is not empty.")
    whole = not any("\ud800" <= character <= "\udfff" for character in prompt)
    _need(whole, f"{where} has half a surrogate pair in its prompt, which no tokenizer reads: take it out.")
    _need(isinstance(listed, list) and listed, f"{where} needs keys: a list of pieces of the prompt with their labels.")
    keys = [_key(prompt, key, f"{where}, key {i}") for i, key in enumerate(listed, 1)]
    seen: dict[Span, int] = {}
    for i, key in enumerate(keys, 1):
        same = seen.setdefault(key.span, i)
        _need(same == i, f"{where}, key {i} is key {same} again: name each piece once.")
    labelled = any(sign for key in keys for sign in key.labels.values())
    _need(labelled, f"{where} labels no key: give at least one key a label of 1 or -1.")
    _need(use is None or use in USES, f"{where} has use {_short(use)}: it is one of {', '.join(USES)}.")
    fine = group is None or type(group) in (str, int)
    _need(fine, f"{where} has group {_short(group)}: name it by a text or a number.")
    fine = not isinstance(query, dict) or not set(query) - {"text", "span"}
    _need(fine, f"{where}, query should be a text, or an object with text or span.")
    example = Example(
        text=prompt,
        queries=() if query is None else (_span(prompt, query, f"{where}, query"),),
        keys=tuple(keys),
        answers=None if answers is None else _answers(answers, where),
        where=where,
    )
    return _Line(number, example, None if group is None else str(group), use)


def _answers(data: Any, where: str) -> Answers:
    sides: list[tuple[str, ...]] = []
    for side in ("right", "wrong"):
        value = data.get(side) if isinstance(data, dict) else None
        listed: Any = [value] if isinstance(value, str) else value
        fine = isinstance(listed, list) and listed and all(isinstance(text, str) and text for text in listed)
        _need(fine, f'{where} needs answers like {{"right": " is", "wrong": [" are"]}}, but has {_short(data)}.')
        sides.append(tuple(dict.fromkeys(listed)))
    _need(len(data) == len(sides), f"{where} has answers that are neither right nor wrong: name these two.")
    with _at(where):
        return Answers(*sides)


def _key(prompt: str, data: Any, where: str) -> Key:
    fine = isinstance(data, dict) and not set(data) - {"text", "span", "labels"}
    _need(fine, f"{where} should be an object with text or span, and labels.")
    labels = data.get("labels", {})
    fine = isinstance(labels, dict) and all(type(v) is int and v in (-1, 0, 1) for v in labels.values())
    _need(fine, f"{where} needs labels of 1, -1 or 0 by contrast, but has {_short(labels)}.")
    with _at(where):
        named = {checked_name(name): sign for name, sign in labels.items()}
    return Key(_span(prompt, data, where), named)


def _span(prompt: str, data: Any, where: str) -> Span:
    data = {"text": data} if isinstance(data, str) else data
    fine = isinstance(data, dict) and ("text" in data) != ("span" in data)
    _need(fine, f"{where} should name either its text or its span [start, stop].")
    if "text" in data:
        piece = data["text"]
        _need(isinstance(piece, str) and piece, f"{where} has an empty text: name the piece of the prompt.")
        try:
            return find_span(prompt, piece)
        except BadInput as error:
            says, often, _ = str(error).partition(": mark it by its offsets")  # advice for those who write Python
            raise BadInput(f"{where}: {says}" + (': name it by "span": [start, stop].' if often else "")) from None
    span = data["span"]
    fine = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
    fine = fine and 0 <= span[0] < span[1] <= len(prompt)
    _need(fine, f"{where} has span {_short(span, 40)}, which is not in the prompt of {len(prompt)} characters.")
    return span[0], span[1]


def _short(value: Any, limit: int = 80) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
