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
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import MinLen
from typing_extensions import TypedDict  # pydantic reads Python's own from 3.12 on

from qkscope.errors import BadInput
from qkscope.examples import Answers, Example, Key, Sign, Span, find_span
from qkscope.kinds import Seed, came, checked_call
from qkscope.tasks.task import ANSWER, USES, Center, Contrast, Task, Unit, Use
from qkscope.tasks.texts import read_plain

log = logging.getLogger(__name__)

_STRICT = {"extra": "forbid", "strict": True}
Text = Annotated[str, MinLen(1)]
Texts = Text | Annotated[list[Text], MinLen(1)]


class PieceSchema(TypedDict):
    """A piece of the prompt, by its text or by its span."""

    text: NotRequired[Text]
    span: NotRequired[tuple[int, int]]


class KeySchema(PieceSchema):
    """A piece that the query may attend to."""

    labels: NotRequired[dict[Text, Literal[-1, 0, 1]]]


class AnswersSchema(TypedDict):
    """What the model may go on with."""

    right: Texts
    wrong: Texts


class LineSchema(TypedDict):
    """One line of the file."""

    prompt: Text
    keys: Annotated[list[KeySchema], MinLen(1)]
    query: NotRequired[Text | PieceSchema | None]
    group: NotRequired[str | int | None]
    use: NotRequired[Use | None]
    answers: NotRequired[AnswersSchema | None]


@cache
def _reader() -> Any:
    from pydantic import TypeAdapter

    for schema in (PieceSchema, KeySchema, AnswersSchema, LineSchema):
        schema.__pydantic_config__ = _STRICT  # type: ignore[union-attr]
    return TypeAdapter(LineSchema)


@dataclass(frozen=True)
class _Line:
    number: int
    example: Example
    group: str | None
    use: Use | None

    def signs(self, contrast: str) -> set[Sign]:
        return {key.label(contrast) for key in self.example.keys} - {0}


@checked_call
def from_jsonl(path: str | Path, *, seed: Seed = 0, center: Center = "none", chat: bool = False) -> Task:
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
    if not read:
        raise BadInput(f"{path} holds no examples: write one JSON object per line.")
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
        drawn = [
            tuple(line.example for line in group if len(line.signs(contrast)) >= least)
            for name, group in units.items()
            if uses[name] == use
        ]
        drawn = [unit for unit in drawn if unit]
        if not drawn:
            needed = "a right and a wrong key" if use != "fit" else f"labels of {contrast!r}"
            raise BadInput(f"{path} has no example for {use} with {needed}: add lines, or set their use.")
        if n > len(drawn):
            _say_once(f"{path} holds {len(drawn)} examples to {use}, fewer than {n}: taking all.", digest)
        return drawn[:n]

    paired = {name: _paired(name, groups.values()) for name in contrasts}
    made = {name: Contrast(name, "as labelled", center=center, paired=paired[name]) for name in contrasts}
    asked = {"file": str(path), "hash": digest, "center": center, "chat": chat}
    first = not chat and any(_begins(line.example) for line in read)
    return Task("jsonl", made, draw, seed, chat, asked, tuple(notes), first)


@cache
def _say_once(sentence: str, about: str) -> None:
    """Warn, unless this process has said the same of the same file: one command may read a file several times."""
    log.warning("%s", sentence)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- lines that belong together


def _groups(read: Sequence[_Line], contrasts: Sequence[str]) -> dict[str, list[_Line]]:
    """The lines by group; a line of its own gets a name that no group can have: groups are named by text."""
    groups: dict[str, list[_Line]] = {}
    for number, line in enumerate(read):
        group = groups.setdefault(f"group {line.group}" if line.group is not None else f"line {number}", [])
        if group and group[0].use != line.use:
            raise BadInput(f"{line.example.where} has another use than its group {line.group!r}: give them the same.")
        group.append(replace(line, example=_with_answer(line.example, contrasts)))
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
    try:
        text = read_plain(path, "a file with one JSON object per line").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {number} is not UTF-8: save the file as UTF-8 text.") from None
    return re.split(r"\r\n|\n|\r", text)


def _line(text: str, number: int, where: str) -> _Line:
    from pydantic import ValidationError

    try:
        line: LineSchema = _reader().validate_json(text)
        group = line.get("group")
        return _Line(number, _example(line, where), None if group is None else str(group), line.get("use"))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ", ".join([where, *(str(part + 1 if isinstance(part, int) else part) for part in wrong["loc"])])
        raise BadInput(f"{place}: {wrong['msg']}, but got {came(wrong['input'])}.") from None
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _example(line: LineSchema, where: str) -> Example:
    prompt, query, answers = line["prompt"], line.get("query"), line.get("answers")
    keys = [Key(_span(prompt, key), key.get("labels", {})) for key in line["keys"]]
    spans = Counter(key.span for key in keys)
    for span in (span for span, count in spans.items() if count > 1):
        raise BadInput(f"{prompt[slice(*span)]!r} is named twice as a key: name each piece once.")
    if not any(sign for key in keys for sign in key.labels.values()):
        raise BadInput("no key is labelled: give at least one key a label of 1 or -1.")
    queries = () if query is None else (_span(prompt, {"text": query} if isinstance(query, str) else query),)
    sides = [] if answers is None else [answers["right"], answers["wrong"]]
    said = [(side,) if isinstance(side, str) else tuple(dict.fromkeys(side)) for side in sides]
    return Example(prompt, queries=queries, keys=tuple(keys), answers=Answers(*said) if said else None, where=where)


def _span(prompt: str, piece: PieceSchema) -> Span:
    if len({"text", "span"} & set(piece)) != 1:
        raise BadInput("a key or query names either its text or its span [start, stop].")
    return piece["span"] if "span" in piece else find_span(prompt, piece["text"])
