"""The verbs as tools for agents: what `qkscope mcp` offers, without the protocol.

A tool is a function under ``@tool``: its annotations are checked at the call and make the schema of
its inputs; its docstring is what an agent reads. A tool reads no file, writes none and loads no
model: all ask the one model that the server was started with. What it returns is a `Result`, and
`reply` cuts that to a size.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Event
from typing import Annotated, Any, Literal

from annotated_types import Interval

import qkscope as qk
from qkscope import BadInput, Example, Result
from qkscope.checking import Seed, checked_call
from qkscope.cli.declarations import COMMANDS
from qkscope.findings.prompt_trace import AskedPrompt
from qkscope.findings.shipped_atlas import known_atlas
from qkscope.heads import parse_heads
from qkscope.results.tables import tables_of
from qkscope.show.session import Session
from qkscope.texts.tasks import BUILT_IN

TOKENS = 2048
"""Tokens that a prompt may have."""
CHARACTERS = 50_000
"""Characters that a prompt may have, before it is cut into tokens."""
ROWS = 10
"""Rows of each table in a reply, unless more are asked for."""
_HEADS = 4  # traced at once
_CHANGES = 8  # made at once

Some = Annotated[int, Interval(ge=1, le=256)]
"""Prompts of a task."""
Rows = Annotated[int, Interval(ge=1, le=200)]
Levels = Annotated[int, Interval(ge=1, le=4)]
TaskName = Literal["binding", "filter", "ioi", "induction", "greater_than", "pronoun"]
Place = int | str | None
"""A token of a prompt, by place or by text."""

TABLES: dict[str, tuple[str, ...]] = {
    "why": ("heads", "attention", "because", "relation", "carriers", "output"),
    "circuit": ("paths", "roles", "kept"),
    "heads": ("heads",),
    "trace": ("writers", "cuts"),
    "what_if": ("changes", "next"),
    "atlas": ("heads",),
}
"""By tool, the tables of a reply; others are in it if they are named."""
_SCHEMAS = {"circuit": "why", "what_if": "what if"}
"""Whose tables a tool gives, where that is not the verb of its own name."""
_HELP = {
    "task": "A built-in task: prompts with marked spans.",
    "heads": "Heads like L18H6.",
    "changes": (
        "Each one of: 'ablate L17H8' (or 'ablate M9'), 'hide L18H6 4 13' (the head may not look at"
        " token 4 from token 13), 'replace 9  Peter' (token 9 reads ' Peter')."
    ),
    "depth": "Levels of the graph of writers and what they read.",
    "tables": "Names of other tables of the result to return.",
    "rows": f"Rows of each table to return; {ROWS} by default.",
}


_TOOLS: dict[str, Callable[..., Result]] = {}
"""Tools by name."""


def tool(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator of a tool; its first argument is the model's session, the others are its inputs."""
    _TOOLS[function.__name__] = checked_call(function)
    return function


@tool
def why(
    session: Session,
    prompt: str,
    head: str | None = None,
    query: Place = None,
    key: Place = None,
    versus: str | None = None,
    seed: Seed = 0,
) -> Result:
    """Why a head attends to a token of a prompt: because of which words, carried by which
    upstream components, with what effect on the next token. Without a head: which heads decide
    the next token.
    """
    example = _example(session, prompt)
    return qk.why(session.scope, example, head, query, key, versus=versus, seed=seed)


@tool
def circuit(session: Session, prompt: str, versus: str | None = None, seed: Seed = 0) -> Result:
    """The circuit of a prompt: from the next token's lead over its rival back to the words."""
    example = _example(session, prompt)
    return qk.why(session.scope, example, versus=versus, circuit=True, seed=seed)


@tool
def heads(session: Session, task: TaskName, n: Some = 64, seed: Seed = 0) -> Result:
    """Rank all heads by how often they attend to the right token of a task."""
    return qk.find_heads(session.scope, BUILT_IN[task](seed=seed), n, progress=False)


@tool
def trace(
    session: Session,
    prompt: str,
    heads: list[str],
    query: Place = None,
    key: Place = None,
    versus: Place = None,
    depth: Levels = 1,
    seed: Seed = 0,
) -> Result:
    """Which upstream components wrote what a head matched on: the split of its attention logit
    among them (QK attribution), and what ablating them leaves.
    """
    if not 1 <= len(heads) <= _HEADS:
        raise BadInput(f"trace takes 1 to {_HEADS} heads, but got {len(heads)}.")
    example = _example(session, prompt)
    return qk.trace(
        session.scope, example, heads, query=query, key=key, versus=versus, depth=depth, seed=seed
    )


@tool
def what_if(
    session: Session,
    prompt: str,
    head: str,
    changes: list[str],
    query: Place = None,
    key: Place = None,
    versus: str | None = None,
) -> Result:
    """Run a prompt with heads ablated, keys hidden or tokens replaced: what becomes of a head's
    attention and of the next token, beside the same change elsewhere.
    """
    if not 1 <= len(changes) <= _CHANGES:
        raise BadInput(f"what_if takes 1 to {_CHANGES} changes, but got {len(changes)}.")
    _example(session, prompt)
    return session.what_if(prompt, query, head, key, changes, versus)


@tool
def atlas(session: Session, heads: list[str] | None = None) -> Result:
    """What heads do on plain text, as rules, where an atlas of this model ships with qkscope."""
    shipped = known_atlas(session.scope.weights_hash)
    if shipped is None:
        raise BadInput(
            f"no atlas of {session.scope.name} ships with qkscope: run `qkscope atlas` to make one."
        )
    chosen = parse_heads(heads) if heads else session.scope.heads()
    names = {str(session.scope.check(head)) for head in chosen}
    rows = [row for row in shipped.table() if row["head"] in names]
    return replace(shipped, tables={"heads": rows}, arrays={})


def _example(session: Session, prompt: str) -> Example:
    """A prompt as text, whatever it is called: never a file; refused if it is too long."""
    if len(prompt) > CHARACTERS:
        raise BadInput(
            f"the prompt has {len(prompt)} characters: at most {CHARACTERS} are taken here."
        )
    example = Example(text=prompt)
    tokens = len(AskedPrompt.of(session.scope, prompt, None, chat=False).tokens)
    if tokens > TOKENS:
        raise BadInput(f"the prompt has {tokens} tokens: at most {TOKENS} are taken here.")
    return example


# ---------------------------------------------------------------------- what can be asked


def names() -> list[str]:
    """The names of all tools."""
    return [*_TOOLS]


def description(name: str) -> str:
    """What a tool is for, in a line."""
    return " ".join((inspect.getdoc(_TOOLS[name]) or "").split())


def input_schema(name: str) -> dict[str, Any]:
    """The JSON schema of what a tool takes."""
    from pydantic import TypeAdapter

    function = inspect.unwrap(_TOOLS[name])
    signature = inspect.signature(function, eval_str=True)
    properties = dict[str, Any]()
    required = list[str]()
    for option, parameter in list(signature.parameters.items())[1:]:
        about = TypeAdapter(parameter.annotation).json_schema()
        about["description"] = _help(name, option)
        if parameter.default is inspect.Parameter.empty:
            required.append(option)
        else:
            about["default"] = parameter.default
        properties[option] = about
    for option, kind in (("tables", list[str]), ("rows", Rows)):
        properties[option] = {**TypeAdapter(kind).json_schema(), "description": _HELP[option]}
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _help(name: str, option: str) -> str:
    """What an input means: as `_HELP` says, or else as the command of the same name has it."""
    if option in _HELP:
        return _HELP[option]
    declared = COMMANDS.get(name, COMMANDS["why"])
    options = [*declared.options, *COMMANDS["why"].options]
    return next(other.help for other in options if other.name == option)


def output_schema(name: str) -> dict[str, Any]:
    """The JSON schema of a reply: the answer, its lines, and the tables that it has unasked."""
    known = tables_of(_SCHEMAS.get(name, name))
    tables = dict[str, Any]()
    for table in TABLES[name]:
        # types stand in words: a client refuses a reply whose types a schema had forgotten
        rows = {}
        for column in known[table].columns.values():
            rows[column.name] = {"description": ", ".join(column.types)}
        items = {"type": "object", "properties": rows}
        tables[table] = {"type": "array", "items": items}
    text = {"type": "string"}
    counts = {"type": "object", "additionalProperties": {"type": "integer"}}
    properties = {
        "answer": text,
        "lines": {"type": "array", "items": text},
        "tables": {"type": "object", "properties": tables},
        "rows": counts,
    }
    return {"type": "object", "properties": properties, "required": [*properties]}


# ---------------------------------------------------------------------- one call


def call(
    session: Session,
    name: str,
    given: Mapping[str, Any],
    seconds: float = 120,
    stopped: Event | None = None,
) -> dict[str, Any]:
    """Call a tool and cut its result to a size; what cannot be asked is refused in a sentence.

    Parameters
    ----------
    session : the model.
    name : of the tool.
    given : its inputs, with ``tables`` and ``rows``.
    seconds : after which it is refused; every layer that runs asks.
    stopped : set when nobody waits for the answer any more.
    """
    if name not in names():
        raise BadInput(f"there is no tool {name!r}: there is {', '.join(names())}.")
    arguments = dict(given)
    more = arguments.pop("tables", None) or []
    rows = _checked_rows(arguments.pop("rows", ROWS))
    known = input_schema(name)["properties"]
    unknown = sorted(arguments.keys() - known.keys())
    if unknown:
        raise BadInput(f"{name} has no input {unknown[0]!r}: it takes {', '.join(known)}.")
    end = time.monotonic() + seconds

    def ask(_early: dict[str, Any]) -> None:
        if stopped is not None and stopped.is_set():
            raise BadInput(f"{name} was cancelled.")
        if time.monotonic() > end:
            raise BadInput(
                f"{name} took over {seconds:g} s and was stopped: ask about a shorter prompt, or"
                " start the server with more --seconds."
            )

    with session.told(ask):
        result = _TOOLS[name](session, **arguments)
    return reply(result, TABLES[name], more, rows)


def reply(
    result: Result, tables: tuple[str, ...], more: list[str] | None = None, rows: int = ROWS
) -> dict[str, Any]:
    """A result as JSON: its answer, its lines, the first rows of some tables, and their counts.

    Parameters
    ----------
    result : what a verb returned.
    tables : those that are given unasked, if the result has them.
    more : others, by name.
    rows : of each table.
    """
    asked = _checked_names(result, more or [])
    whole = result.to_json()["tables"]
    lines = [row["line"] for row in result.tables.get("said", ())]
    first = {name: whole[name][:rows] for name in (*tables, *asked) if name in whole}
    totals = {name: len(table) for name, table in whole.items() if name != "said"}
    return {"answer": result.answer, "lines": lines, "tables": first, "rows": totals}


def _checked_names(result: Result, more: list[str]) -> list[str]:
    """Names of tables that the result has."""
    if not isinstance(more, list):
        raise BadInput(f"tables is a list of names, but got {more!r}.")
    missing = [name for name in more if name not in result.tables]
    if missing:
        known = ", ".join(result.tables)
        raise BadInput(f"there is no table {missing[0]!r} in this result: there is {known}.")
    return more


def _checked_rows(rows: int) -> int:
    """How many rows of each table."""
    if not isinstance(rows, int) or not 1 <= rows <= 200:
        raise BadInput(f"rows is a number from 1 to 200, but got {rows!r}.")
    return rows
