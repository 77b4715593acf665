"""A task of your own: one JSON object per line, with a prompt, its query, keys and labels.

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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired

from typing_extensions import TypedDict  # pydantic reads Python's own from 3.12 on

from qkscope.checking import Seed, checked_call
from qkscope.errors import BadInput
from qkscope.examples import Answers, Example, Key, Sign, Span, find_span
from qkscope.heads import Center
from qkscope.results.folder import sha256
from qkscope.text import describe, grouped
from qkscope.texts.documents import read_text
from qkscope.texts.task import ANSWER, USES, Contrast, Task, Unit, Use, connected

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
    """One line: its prompt, what it belongs to, and the answers that are right."""

    example: Example
    group: str
    use: Use | None
    right: tuple[str, ...]

    def signs(self, contrast: str) -> set[Sign]:
        """Signs of a contrast that its keys have."""
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
    >>> line = json.dumps({"prompt": "hat O, jam Z. The jam:", "keys": keys})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "mine.jsonl").write_text(line)
    ...     task = from_jsonl(f"{folder}/mine.jsonl")
    >>> list(task.contrasts)
    ['mine']
    """
    text, lines = _read(path)
    contrasts = _contrasts_of(lines)
    placed = []
    for line in _with_places(lines, seed):
        placed.append(line._replace(example=_with_answer(line.example, contrasts)))
    groups = list(grouped(placed, lambda line: line.group).values())
    digest = sha256(text)[:32]

    def draw(use: Use, contrast: str, n: int) -> list[Unit]:
        """To fit, lines with labels; to score or swap, lines with right and wrong keys."""
        least_signs = 1 if use == "fit" else 2
        units = []
        for group in groups:
            if group[0].use == use:
                labelled = [line for line in group if len(line.signs(contrast)) >= least_signs]
                units.append(tuple(line.example for line in labelled))
        units = [unit for unit in units if unit]
        if not units:
            needed = "a right and a wrong key" if use != "fit" else f"labels of {contrast!r}"
            raise BadInput(
                f"{path} has no example for {use} with {needed}: add lines, or set their use."
            )
        if n > len(units):
            fewer = f"{path} holds {len(units)} examples to {use}, fewer than {n}"
            _warn_once(f"{fewer}: taking all.", digest)
        return units[:n]

    described = {}
    for name in contrasts:
        _check_signs(name, groups)
        described[name] = Contrast(name, "as labelled", center=center)
    starts_with_key = any(_starts_with_key(line.example) for line in lines)
    return Task(
        name="jsonl",
        contrasts=described,
        draw=draw,
        seed=seed,
        chat=chat,
        asked={"file": str(path), "hash": digest, "center": center, "chat": chat},
        notes=_notes(groups),
        starts_with_key=starts_with_key and not chat,
    )


def read_prompts(path: str | Path) -> list[tuple[Example, tuple[str, ...]]]:
    """Read a file's prompts, which need no keys, and the right answers of lines that name some."""
    _, lines = _read(path, marked=False)
    return [(line.example, line.right) for line in lines]


# ---------------------------------------------------------------------- what a file's lines make


def _contrasts_of(lines: Sequence[_Line]) -> list[str]:
    """Names of the file's contrasts, in order; `ANSWER` only if there is no other."""
    names: dict[str, None] = {}
    for line in lines:
        for key in line.example.keys:
            names |= dict.fromkeys(key.labels)
    return [name for name in names if name != ANSWER] or list(names)


def _notes(groups: Sequence[Sequence[_Line]]) -> tuple[str, ...]:
    """A note on groups that repeat the prompt of another, if there are any."""
    prompts = {group[0].example.cluster for group in groups}
    copies = len(groups) - len(prompts)
    if not copies:
        return ()
    note = (
        f"{copies} of the file's {len(groups)} examples repeat the prompt of another: "
        "copies count as one."
    )
    return (note,)


def _starts_with_key(example: Example) -> bool:
    """Whether a labelled key is the first thing in a prompt."""
    for key in example.keys:
        before = str(example.text)[: key.span[0]]
        if not before.strip() and any(key.labels.values()):
            return True
    return False


@cache
def _warn_once(sentence: str, about: str) -> None:
    """Warn once per process and file: one command may read a file several times."""
    log.warning("%s", sentence)


def _with_places(lines: Sequence[_Line], seed: int) -> list[_Line]:
    """Give the lines their clusters and uses.

    Lines of a group, and lines with the same prompt, are one cluster, be it through others. A
    cluster has one use; those that do not name theirs are dealt out by their prompts.
    """
    clusters = _clusters(lines)
    prompts: dict[int, set[str]] = {}
    for cluster, line in zip(clusters, lines, strict=True):
        prompts.setdefault(cluster, set()).add(str(line.example.text))
    names = {cluster: _name(texts) for cluster, texts in prompts.items()}
    uses = _named_uses(lines, clusters)
    unnamed = [cluster for cluster in names if cluster not in uses]
    unnamed.sort(key=lambda cluster: sha256(f"{seed}/{names[cluster]}"))
    for number, cluster in enumerate(unnamed):
        uses[cluster] = USES[number % len(USES)]
    placed = []
    for cluster, line in zip(clusters, lines, strict=True):
        example = replace(line.example, cluster=names[cluster])
        placed.append(line._replace(use=uses[cluster], example=example))
    return placed


def _name(prompts: Iterable[str]) -> str:
    """The name of a cluster: a hash of its prompts."""
    together = "\0".join(sorted(prompts))
    return sha256(together)[:16]


def _clusters(lines: Sequence[_Line]) -> list[int]:
    """The cluster of each line: lines that share a group or a prompt, be it through others."""
    first_of_group: dict[str, int] = {}
    first_of_prompt: dict[str, int] = {}
    links = []
    for number, line in enumerate(lines):
        links.append((number, first_of_group.setdefault(line.group, number)))
        links.append((number, first_of_prompt.setdefault(str(line.example.text), number)))
    return connected(len(lines), links)


def _named_uses(lines: Sequence[_Line], clusters: Sequence[int]) -> dict[int, Use]:
    """The use of each cluster that has a line with one; a cluster with two is refused."""
    first: dict[int, _Line] = {}
    uses: dict[int, Use] = {}
    for cluster, line in zip(clusters, lines, strict=True):
        if line.use is None:
            continue
        before = first.setdefault(cluster, line)
        if before.use != line.use:
            other = before.example.where.rpartition(", ")[2]
            raise BadInput(
                f"{line.example.where} is for {line.use}, but its prompt is that of {other}, which "
                f"is for {before.use}: what is tested must be new, so take one of them out, or "
                "give both the same use."
            )
        uses[cluster] = line.use
    return uses


def _with_answer(example: Example, contrasts: Sequence[str]) -> Example:
    """The example with its keys labelled `ANSWER`: as the first contrast that labels any."""
    if any(ANSWER in key.labels for key in example.keys):
        return example
    labelled: set[str] = set()
    for key in example.keys:
        labelled |= {name for name in contrasts if key.label(name)}
    first = next(name for name in contrasts if name in labelled)
    keys = []
    for key in example.keys:
        keys.append(Key(key.span, {**key.labels, ANSWER: key.label(first)}))
    return replace(example, keys=tuple(keys))


def _check_signs(contrast: str, groups: Sequence[Sequence[_Line]]) -> None:
    """Refuse a contrast with + and − within some lines and between lines in others: no null."""
    lines = [line for group in groups for line in group]
    within_lines = any(len(line.signs(contrast)) == 2 for line in lines)
    units: Sequence[Sequence[_Line]] = [[line] for line in lines] if within_lines else groups
    for unit in units:
        signs = {sign for line in unit for sign in line.signs(contrast)}
        if len(signs) == 1:
            present = "+ but no −" if 1 in signs else "− but no +"
            lacking = f"{unit[0].example.where} has {present} keys of {contrast!r}"
            raise BadInput(
                f"{lacking}: label both in every line, "
                "or put the two lines of each pair into one group."
            )


# ---------------------------------------------------------------------- reading


def _read(path: str | Path, marked: bool = True) -> tuple[str, list[_Line]]:
    """The text of a file and its lines; ``marked``: keys must be labelled."""
    text = read_text(Path(path), "a file with one JSON object per line")
    lines = []
    for number, raw in enumerate(text.split("\n"), 1):
        if raw.strip():
            lines.append(_line(raw, f"{path}, line {number}", marked))
    if not lines:
        raise BadInput(f"{path} holds no examples: write one JSON object per line.")
    return text, lines


@cache
def _reader() -> Any:
    from pydantic import TypeAdapter

    for schema in (PieceSchema, AnswersSchema, LineSchema):
        schema.__pydantic_config__ = {"extra": "forbid", "strict": True}  # type: ignore[union-attr]
    return TypeAdapter(LineSchema)


def _line(text: str, where: str, marked: bool) -> _Line:
    """Read one line; an error names it."""
    from pydantic import ValidationError

    try:
        return _parsed(_reader().validate_json(text), where, marked)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        places = [where]
        for part in wrong["loc"]:
            places.append(str(part + 1) if isinstance(part, int) else part)
        place = ", ".join(places)
        got = describe(wrong["input"])
        raise BadInput(f"{place}: {wrong['msg']}, but got {got}.") from None
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _parsed(line: LineSchema, where: str, marked: bool) -> _Line:
    """One line as an example, its marks found in its text."""
    prompt = line["prompt"]
    keys = _keys(prompt, line.get("keys", []), marked)
    query = line.get("query")
    queries: tuple[Span, ...] = ()
    if query is not None:
        queries = (_span(prompt, {"text": query} if isinstance(query, str) else query),)
    answers = _answers(line.get("answers"))
    example = Example(prompt, None, queries, keys, answers=answers, where=where)
    right = line.get("answer") or (answers.right if answers else ())
    if isinstance(right, str):
        right = (right,)
    group = f"line {where}"
    if line.get("group") is not None:
        group = f"group {line.get('group')}"
    return _Line(example=example, group=group, use=line.get("use"), right=tuple(right))


def _keys(prompt: str, pieces: Sequence[PieceSchema], marked: bool) -> tuple[Key, ...]:
    """The keys that a line names; none twice, and one labelled where marks are needed."""
    keys = []
    for piece in pieces:
        keys.append(Key(_span(prompt, piece), piece.get("labels", {})))
    if len({key.span for key in keys}) < len(keys):
        raise BadInput("a piece of the prompt is named twice as a key: name each piece once.")
    if marked and not any(any(key.labels.values()) for key in keys):
        raise BadInput("no key is labelled: give at least one key a label of 1 or -1.")
    return tuple(keys)


def _answers(answers: AnswersSchema | None) -> Answers | None:
    if not answers:
        return None
    return Answers(_texts(answers["right"]), _texts(answers["wrong"]))


def _texts(value: str | list[str]) -> tuple[str, ...]:
    """One text, or several without repeats."""
    return (value,) if isinstance(value, str) else tuple(dict.fromkeys(value))


def _span(prompt: str, piece: PieceSchema) -> Span:
    if ("text" in piece) == ("span" in piece):
        raise BadInput("a key or query names either its text or its span [start, stop].")
    return piece["span"] if "span" in piece else find_span(prompt, piece["text"])
