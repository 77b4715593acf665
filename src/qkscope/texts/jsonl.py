"""A task of your own: one JSON object per line, with the prompt, the query, the keys and their
labels.

::

    {"prompt": "hat O, jam Z. The jam is in",
     "keys": [{"text": "O", "labels": {"mine": -1}}, {"text": "Z", "labels": {"mine": 1}}]}

(on one line). A key or query is named by ``text``, which must stand in the prompt once, or by
``span``. Without ``query`` the last token asks. ``group`` names lines that belong together (a
prompt and its copy): they are one random unit. ``use`` (choose, fit or test) puts a line into one
pool; lines without it are dealt out by what they say. Keys labelled ``answer`` decide what counts
as right; in lines without such labels, the first contrast that labels them does. ``answers`` names
what the model may go on with: ``{"right": " is", "wrong": [" are"]}``. A file of prompts for `why`
needs none of it: ``{"prompt": "…"}`` is enough, with ``"answer": " Mary"`` where the right one is
known.

Each line labelled for a contrast has + and − keys of it, or each group does and no line: then the
group's signs are flipped together under the null, instead of the labels within a line.

Lines with the same prompt are copies: they are never of different uses, and count as one random
unit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired

from typing_extensions import TypedDict  # pydantic reads Python's own from 3.12 on

from qkscope.checking import Seed, checked_call
from qkscope.errors import BadInput
from qkscope.examples import Answers, Example, Key, Sign, Span, find_span
from qkscope.results.folder import sha256
from qkscope.text import describe, grouped
from qkscope.texts.documents import read_text
from qkscope.texts.task import ANSWER, USES, Center, Contrast, Task, Unit, Use, connected

log = logging.getLogger(__name__)


class PieceSchema(TypedDict):
    """A piece of the prompt, by its text or by its span; of a key, its labels."""

    text: NotRequired[str]
    span: NotRequired[tuple[int, int]]
    labels: NotRequired[dict[str, Literal[-1, 0, 1]]]


class AnswersSchema(TypedDict):
    """What the model may go on with."""

    right: str | list[str]
    wrong: str | list[str]


class LineSchema(TypedDict):
    """One line of the file."""

    prompt: str
    keys: NotRequired[list[PieceSchema]]
    query: NotRequired[str | PieceSchema | None]
    group: NotRequired[str | int | None]
    use: NotRequired[Use | None]
    answers: NotRequired[AnswersSchema | None]
    answer: NotRequired[str | list[str] | None]


class _Line(NamedTuple):
    example: Example
    group: str
    use: Use | None
    right: tuple[str, ...]

    def signs(self, contrast: str) -> set[Sign]:
        return {key.label(contrast) for key in self.example.keys} - {0}


@checked_call
def from_jsonl(
    path: str | Path, *, seed: Seed = 0, center: Center = "none", chat: bool = False
) -> Task:
    """Read a task from a file; every line is checked, and an error names the line.

    Parameters
    ----------
    path : a UTF-8 text file with one JSON object per line.
    seed : of dealing out lines that do not say their use; what the file is called and how it is
        sorted do not matter.
    center : centring of every contrast: take out of ΔC what all queries see alike (``query``), or
        nothing.
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
    text, lines = _read(path)
    names = list(
        dict.fromkeys(name for line in lines for key in line.example.keys for name in key.labels)
    )
    contrasts = [name for name in names if name != ANSWER] or names
    dealt = (
        line._replace(example=_with_answer(line.example, contrasts)) for line in _dealt(lines, seed)
    )
    groups = grouped(dealt, lambda line: line.group)
    digest = sha256(text)[:32]
    notes = tuple[str, ...]()
    if copies := len(groups) - len({group[0].example.cluster for group in groups.values()}):
        notes = (
            f"{copies} of the file's {len(groups)} examples repeat the prompt of another: copies count as one.",
        )

    def draw(use: Use, contrast: str, n: int) -> list[Unit]:
        """To fit, lines with labels; to score or swap, lines with right and wrong keys."""
        of_use = [group for group in groups.values() if group[0].use == use]
        least = 1 if use == "fit" else 2
        drawn = [
            tuple(line.example for line in group if len(line.signs(contrast)) >= least)
            for group in of_use
        ]
        drawn = [unit for unit in drawn if unit]
        if not drawn:
            needed = "a right and a wrong key" if use != "fit" else f"labels of {contrast!r}"
            raise BadInput(
                f"{path} has no example for {use} with {needed}: add lines, or set their use."
            )
        if n > len(drawn):
            _say_once(
                f"{path} holds {len(drawn)} examples to {use}, fewer than {n}: taking all.", digest
            )
        return drawn[:n]

    for name in contrasts:
        _check_signs(name, list(groups.values()))
    asked = {"file": str(path), "hash": digest, "center": center, "chat": chat}
    keys = [
        (str(line.example.text)[: key.span[0]], key) for line in lines for key in line.example.keys
    ]
    first = not chat and any(not before.strip() for before, key in keys if any(key.labels.values()))
    every = {name: Contrast(name, "as labelled", center=center) for name in contrasts}
    return Task("jsonl", every, draw, seed, chat, asked, notes, first)


def read_prompts(path: str | Path) -> list[tuple[Example, tuple[str, ...]]]:
    """Prompts of a file, and the answers that are right, where lines name some: they need no keys."""
    return [(line.example, line.right) for line in _read(path, marked=False)[1]]


def _read(path: str | Path, marked: bool = True) -> tuple[str, list[_Line]]:
    text = read_text(Path(path), "a file with one JSON object per line")
    lines = [
        _line(line, f"{path}, line {n}", marked)
        for n, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise BadInput(f"{path} holds no examples: write one JSON object per line.")
    return text, lines


@cache
def _say_once(sentence: str, about: str) -> None:
    """Warn once per process and file: one command may read a file several times."""
    log.warning("%s", sentence)


def _dealt(lines: Sequence[_Line], seed: int) -> list[_Line]:
    """The lines with their clusters and uses.

    Lines of a group, and lines with the same prompt, are one cluster, be it through others. A
    cluster has one use; those that do not say theirs are dealt out by what they say.
    """
    home: dict[tuple[int, str], int] = {}
    shared = [(line.group, str(line.example.text)) for line in lines]
    links = [(i, home.setdefault(x, i)) for i, two in enumerate(shared) for x in enumerate(two)]
    clusters = connected(len(lines), links)
    prompts: dict[int, set[str]] = {}
    said: dict[int, _Line] = {}
    for cluster, line in zip(clusters, lines, strict=True):
        prompts.setdefault(cluster, set()).add(str(line.example.text))
        before = said.setdefault(cluster, line) if line.use else line
        if before.use != line.use:
            other = f"{before.example.where.rpartition(', ')[2]}, which is for {before.use}"
            both = f"{line.example.where} is for {line.use}, but its prompt is that of {other}"
            raise BadInput(
                f"{both}: what is tested must be new, so take one of them out, or give both the same use."
            )
    names = {cluster: sha256("\0".join(sorted(texts)))[:16] for cluster, texts in prompts.items()}
    free = sorted(
        (cluster for cluster in names if cluster not in said),
        key=lambda c: sha256(f"{seed}/{names[c]}"),
    )
    uses = {c: USES[i % len(USES)] for i, c in enumerate(free)} | {
        c: line.use for c, line in said.items()
    }
    placed = zip(clusters, lines, strict=True)
    return [
        line._replace(use=uses[c], example=replace(line.example, cluster=names[c]))
        for c, line in placed
    ]


def _with_answer(example: Example, contrasts: Sequence[str]) -> Example:
    if any(ANSWER in key.labels for key in example.keys):
        return example
    first = next(name for name in contrasts if any(key.label(name) for key in example.keys))
    return replace(
        example, keys=tuple(Key(k.span, {**k.labels, ANSWER: k.label(first)}) for k in example.keys)
    )


def _check_signs(contrast: str, groups: Sequence[Sequence[_Line]]) -> None:
    """Refuse a contrast with + and − in some lines and in different lines of a group in others: it
    has no null.
    """
    whole = any(len(line.signs(contrast)) == 2 for group in groups for line in group)
    for unit in [[line] for group in groups for line in group] if whole else groups:
        signs = {sign for line in unit for sign in line.signs(contrast)}
        if len(signs) == 1:
            lacking = f"{unit[0].example.where} has {'+ but no −' if 1 in signs else '− but no +'} keys of {contrast!r}"
            raise BadInput(
                f"{lacking}: label both in every line, or put the two lines of each pair into one group."
            )


@cache
def _reader() -> Any:
    from pydantic import TypeAdapter

    for schema in (PieceSchema, AnswersSchema, LineSchema):
        schema.__pydantic_config__ = {"extra": "forbid", "strict": True}  # type: ignore[union-attr]
    return TypeAdapter(LineSchema)


def _line(text: str, where: str, marked: bool) -> _Line:
    from pydantic import ValidationError

    try:
        line: LineSchema = _reader().validate_json(text)
        prompt = line["prompt"]
        query = line.get("query")
        answers = line.get("answers")
        group = line.get("group")
        keys = tuple(Key(_span(prompt, key), key.get("labels", {})) for key in line.get("keys", ()))
        if len({key.span for key in keys}) < len(keys):
            raise BadInput("a piece of the prompt is named twice as a key: name each piece once.")
        if marked and not any(sign for key in keys for sign in key.labels.values()):
            raise BadInput("no key is labelled: give at least one key a label of 1 or -1.")
        queries = (
            ()
            if query is None
            else (_span(prompt, {"text": query} if isinstance(query, str) else query),)
        )
        sides = (answers["right"], answers["wrong"]) if answers else ()
        said = [(side,) if isinstance(side, str) else tuple(dict.fromkeys(side)) for side in sides]
        example = Example(
            prompt, None, queries, keys, answers=Answers(*said) if said else None, where=where
        )
        right = line.get("answer") or (example.answers.right if example.answers else ())
        right = (right,) if isinstance(right, str) else tuple(right)
        return _Line(
            example, f"line {where}" if group is None else f"group {group}", line.get("use"), right
        )
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ", ".join(
            [where, *(str(part + 1 if isinstance(part, int) else part) for part in wrong["loc"])]
        )
        raise BadInput(f"{place}: {wrong['msg']}, but got {describe(wrong['input'])}.") from None
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _span(prompt: str, piece: PieceSchema) -> Span:
    if ("text" in piece) == ("span" in piece):
        raise BadInput("a key or query names either its text or its span [start, stop].")
    return piece["span"] if "span" in piece else find_span(prompt, piece["text"])
