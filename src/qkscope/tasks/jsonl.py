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
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from qkscope.errors import BadInput
from qkscope.examples import Answers, Example, Key, Span, find_span
from qkscope.kinds import checked_call
from qkscope.tasks.task import ANSWER, USES, Contrast, Task, Unit, Use, checked_name

log = logging.getLogger(__name__)

_FIELDS = {"prompt", "query", "keys", "group", "use", "answers"}
_LARGEST = 1 << 30  # bytes: some millions of lines
_KEY_FIELDS = {"text", "span", "labels"}
_SAID: set[tuple[str, str]] = set()
_CENTERS = ("none", "query", "both")


@dataclass(frozen=True)
class _Line:
    number: int
    where: str
    example: Example
    group: str | None
    use: Use | None


@checked_call
def from_jsonl(
    path: str | Path, *, seed: int = 0, center: Literal["none", "query", "both"] = "none", chat: bool = False
) -> Task:
    """Read a task from a file; every line is checked, and an error names the line.

    Parameters
    ----------
    path : a UTF-8 text file with one JSON object per line.
    seed : of dealing out lines that do not say their use; what the file is called and how it is sorted do not matter.
    center : centring of every contrast: take out of ΔC what all queries (``query``), or also all keys, see alike.
    chat : whether prompts go into the model's chat template.
    """
    path = Path(path)
    if center not in _CENTERS:
        raise BadInput(f"center is one of {', '.join(_CENTERS)}, but got {center!r}.")
    lines = _lines(path)
    read = [_line(text, number, f"{path}, line {number}") for number, text in enumerate(lines, 1) if text.strip()]
    if not read:
        raise BadInput(f"{path} holds no examples: write one JSON object per line.")
    names = list(dict.fromkeys(name for line in read for key in line.example.keys for name in key.labels))
    contrasts = [name for name in names if name != ANSWER] or names
    groups = _groups(read, contrasts)
    alike = _alike(groups)
    uses = _uses(groups, alike, seed)
    groups = {
        name: [replace(line, example=replace(line.example, cluster=alike[name])) for line in group]
        for name, group in groups.items()
    }
    digest = _digest("\n".join(lines))[:32]
    copies, notes = len(groups) - len(set(alike.values())), list[str]()
    if copies:
        notes.append(
            f"{copies} of the file's {len(groups)} examples repeat the prompt of another: copies count as one."
        )
        _say_once(f"{path}: {notes[0]}", digest)

    def draw(use: Use, contrast: str, n: int) -> list[Unit]:
        own = [unit for name, group in groups.items() if uses[name] == use and (unit := _unit(group, use, contrast))]
        if not own:
            needed = "a right and a wrong key" if use != "fit" else f"labels of {contrast!r}"
            raise BadInput(f"{path} has no example for {use} with {needed}: add lines, or set their use.")
        if n > len(own):
            _say_once(f"{path} holds {len(own)} examples to {use}, fewer than {n}: taking all.", digest)
        return own[:n]

    made = {
        name: Contrast(name, "as labelled", center=center, paired=_paired(name, list(groups.values())))
        for name in contrasts
    }
    asked = {"file": str(path), "hash": digest, "center": center, "chat": chat}
    first = not chat and any(_begins(line.example) for line in read)
    return Task("jsonl", made, draw, seed, chat, asked, tuple(notes), first)


def _say_once(sentence: str, about: str) -> None:
    """Warn, unless this process has said the same of the same file: one command may read a file several times."""
    if (sentence, about) not in _SAID:
        _SAID.add((sentence, about))
        log.warning("%s", sentence)


def _groups(read: Sequence[_Line], contrasts: Sequence[str]) -> dict[str, list[_Line]]:
    """The lines by group; a line of its own gets a name that no group can have: groups are named by text."""
    groups: dict[str, list[_Line]] = {}
    for number, line in enumerate(read):
        own = groups.setdefault(f"group {line.group}" if line.group is not None else f"line {number}", [])
        if own and own[0].use != line.use:
            raise BadInput(f"{line.where} has another use than its group {line.group!r}: give them the same.")
        own.append(replace(line, example=_with_answer(line.example, contrasts)))
    return groups


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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _uses(groups: Mapping[str, Sequence[_Line]], alike: Mapping[str, str], seed: int) -> dict[str, Use]:
    """The use of each group. Copies have one use; those that do not say theirs are dealt out by what they say."""
    said: dict[str, _Line] = {}
    for name, group in groups.items():
        for line in group:
            before = said.setdefault(alike[name], line) if line.use is not None else line
            if before.use != line.use:
                same = [a for b in groups.values() for a in b if a.example.text == line.example.text and a.use]
                other = next((a for a in same if a.use != line.use), before)
                raise BadInput(
                    f"{line.where} is for {line.use}, but its prompt is that of line {other.number}, which is for "
                    f"{other.use}: what is tested must be new, so take one of them out, or give both the same use."
                )
    free = sorted({name for name in alike.values() if name not in said}, key=lambda name: _digest(f"{seed}/{name}"))
    dealt: dict[str, Use] = {name: USES[i % len(USES)] for i, name in enumerate(free)}
    own: dict[str, Use] = {name: line.use for name, line in said.items() if line.use is not None}
    of_cluster = {**dealt, **own}
    return {name: of_cluster[cluster] for name, cluster in alike.items()}


def _begins(example: Example) -> bool:
    """Whether a labelled key is the first thing in a prompt."""
    text = str(example.text)
    return any(not text[: key.span[0]].strip() for key in example.keys if any(key.labels.values()))


def _lines(path: Path) -> list[str]:
    """Lines as JSON Lines has them: a line separator of Unicode inside a prompt does not end its line."""
    shown = str(path).encode("utf-8", "backslashreplace").decode()
    if shown != str(path):
        raise BadInput(f"the name of {shown} is not UTF-8: rename the file.")
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a pipe or a device may never end
            raise BadInput(f"{path} is not a plain file: name a file with one JSON object per line.")
        if found.st_size > _LARGEST:
            raise BadInput(
                f"{path} has {found.st_size:,} bytes, more than the {_LARGEST:,} of a task: take fewer lines."
            )
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {number} is not UTF-8: save the file as UTF-8 text.") from None
    except BadInput:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"{path} cannot be read ({reason}): name a file with one JSON object per line.") from None
    return re.split(r"\r\n|\n|\r", text)


def _signs(line: _Line, contrast: str) -> set[int]:
    return {key.label(contrast) for key in line.example.keys} - {0}


def _unit(group: Sequence[_Line], use: Use, contrast: str) -> Unit:
    """The lines of a group that count: to fit, those with labels; to score or swap, those with right and wrong keys."""
    wanted = 1 if use == "fit" else 2
    return tuple(line.example for line in group if len(_signs(line, contrast)) >= wanted)


def _paired(contrast: str, groups: Sequence[Sequence[_Line]]) -> bool:
    """Whether + and − stand in different lines of a group; a mixture has no null, so it is refused."""
    labelled = [[line for line in group if _signs(line, contrast)] for group in groups]
    whole = [line for group in labelled for line in group if len(_signs(line, contrast)) == 2]
    for group in labelled:
        together = {sign for line in group for sign in _signs(line, contrast)}
        for line in group:
            has = _signs(line, contrast)
            if len(has) == 1 and (whole or len(together) == 1):
                sign, other = ("+", "−") if has == {1} else ("−", "+")
                raise BadInput(
                    f"{line.where} has {sign} but no {other} keys of {contrast!r}: label both in every line, or put"
                    " the two lines of each pair into one group."
                )
    return not whole


def _line(text: str, number: int, where: str) -> _Line:
    try:
        return _parsed(_json(text, where), number, where)
    except RecursionError:
        raise BadInput(f"{where} is nested too deeply: write one flat object per line.") from None


def _json(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise BadInput(f"{where} names {name[:80]!r} twice in one object: keep one.")
            found[name] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except BadInput:
        raise
    except ValueError:  # not only JSONDecodeError: a number of 5,000 digits is one too
        raise BadInput(f"{where} is not JSON: write one object per line.") from None


def _parsed(data: Any, number: int, where: str) -> _Line:
    if not isinstance(data, dict):
        raise BadInput(f'{where} is not a JSON object: write {{"prompt": …, "keys": […]}}.')
    unknown = sorted(set(data) - _FIELDS)
    if unknown:
        raise BadInput(f"{where} has a field {unknown[0][:80]!r}: the fields are {', '.join(sorted(_FIELDS))}.")
    prompt = data.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise BadInput(f"{where} needs a prompt: a text that is not empty.")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise BadInput(f"{where} has half a surrogate pair in its prompt, which no tokenizer reads: take it out.")
    if not isinstance(data.get("keys"), list) or not data["keys"]:
        raise BadInput(f"{where} needs keys: a list of pieces of the prompt with their labels.")
    keys = [_key(prompt, key, f"{where}, key {i}") for i, key in enumerate(data["keys"], 1)]
    seen: dict[Span, int] = {}
    for i, key in enumerate(keys, 1):
        if seen.setdefault(key.span, i) < i:
            raise BadInput(f"{where}, key {i} is key {seen[key.span]} again: name each piece once.")
    if not any(sign for key in keys for sign in key.labels.values()):
        raise BadInput(f"{where} labels no key: give at least one key a label of 1 or -1.")
    use, group = data.get("use"), data.get("group")
    if use is not None and use not in USES:
        raise BadInput(f"{where} has use {_short(use)}: it is one of {', '.join(USES)}.")
    if group is not None and type(group) not in (str, int):
        raise BadInput(f"{where} has group {_short(group)}: name it by a text or a number.")
    query = data.get("query")
    if isinstance(query, dict) and set(query) - {"text", "span"}:
        raise BadInput(f"{where}, query should be a text, or an object with text or span.")
    queries = () if query is None else (_span(prompt, query, f"{where}, query"),)
    answers = _answers(data["answers"], where) if data.get("answers") is not None else None
    example = Example(text=prompt, queries=queries, keys=tuple(keys), answers=answers, where=where)
    return _Line(number, where, example, None if group is None else str(group), use)


def _answers(data: Any, where: str) -> Answers:
    sides = []
    for side in ("right", "wrong"):
        value = data.get(side) if isinstance(data, dict) else None
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed or not all(isinstance(text, str) and text for text in listed):
            raise BadInput(f'{where} needs answers like {{"right": " is", "wrong": [" are"]}}, but has {_short(data)}.')
        sides.append(tuple(dict.fromkeys(listed)))
    if set(data) - {"right", "wrong"}:
        raise BadInput(f"{where} has answers that are neither right nor wrong: name these two.")
    try:
        return Answers(*sides)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _short(value: Any, limit: int = 80) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _key(prompt: str, data: Any, where: str) -> Key:
    if not isinstance(data, Mapping) or set(data) - _KEY_FIELDS:
        raise BadInput(f"{where} should be an object with text or span, and labels.")
    labels = data.get("labels", {})
    if not isinstance(labels, Mapping) or any(type(v) is not int or v not in (-1, 0, 1) for v in labels.values()):
        raise BadInput(f"{where} needs labels of 1, -1 or 0 by contrast, but has {_short(labels)}.")
    try:
        return Key(_span(prompt, data, where), {checked_name(name): sign for name, sign in labels.items()})
    except BadInput as error:
        raise BadInput(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


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
            says, often, _ = str(error).partition(": mark it by its offsets")  # advice for those who write Python
            raise BadInput(f"{where}: {says}" + (': name it by "span": [start, stop].' if often else "")) from None
    span = data["span"]
    right = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
    if not right or not 0 <= span[0] < span[1] <= len(prompt):
        raise BadInput(f"{where} has span {_short(span, 40)}, which is not in the prompt of {len(prompt)} characters.")
    return span[0], span[1]


def _with_answer(example: Example, contrasts: Sequence[str]) -> Example:
    if any(ANSWER in key.labels for key in example.keys):
        return example
    first = next((name for name in contrasts if any(key.label(name) for key in example.keys)), contrasts[0])
    return replace(example, keys=tuple(Key(k.span, {**k.labels, ANSWER: k.label(first)}) for k in example.keys))
