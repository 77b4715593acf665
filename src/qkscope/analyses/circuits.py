"""Which heads look from where to where: published circuits (``circuits.toml``), and how to find such heads elsewhere.

An edge is a head with the roles it connects: ``L9H9 (name mover): END → IO``. A circuit is a list of edges. Where none
is known for a model, `find_circuit` takes the heads that attend most from one role to the other on prompts used for
nothing else, and `outside` draws heads that are in no circuit, at the same roles: the control.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.prompts import batches_of
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.examples import Example, Span
from qkscope.heads import Head, parse_heads
from qkscope.runs.work import stream
from qkscope.tasks.task import ANSWER, Task, Unit

QUERY = "query"
"""Roles of every task: its own query, and its right key (``answer``)."""


@dataclass(frozen=True)
class Duty:
    """What heads of a kind do: they look from one role to another."""

    role: str
    query: str
    key: str


@dataclass(frozen=True)
class Edge:
    """One head at its duty; ``circuit`` is False for a control."""

    head: Head
    duty: Duty
    circuit: bool = True

    def __str__(self) -> str:
        return f"{self.head}:{self.duty.query}>{self.duty.key}"


@dataclass(frozen=True)
class Circuit:
    """A published list of heads, and where it was published."""

    task: str
    source: str
    edges: tuple[Edge, ...]


def _duty(role: str, way: str) -> Duty:
    return Duty(role, *way.split(" > "))


def _circuit(task: str, source: str, edges: Sequence[tuple[str, str, str]], **_: str) -> Circuit:
    every = [(name.split("."), _duty(role, way)) for role, way, names in edges for name in names.split()]
    return Circuit(task, source, tuple(Edge(Head(int(layer), int(index)), duty) for (layer, index), duty in every))


_TABLE = tomllib.loads(files("qkscope.analyses").joinpath("circuits.toml").read_text("utf-8"))
DUTIES = {task: tuple(_duty(*one) for one in duties.items()) for task, duties in _TABLE["duties"].items()}
"""What to look for in a model whose circuit nobody has published."""
CIRCUITS: dict[str, Circuit] = {model: _circuit(**found) for model, found in _TABLE["circuits"].items()}
_ALSO: dict[str, str] = {found["also"]: model for model, found in _TABLE["circuits"].items()}
_ANSWERING = Duty("answer", QUERY, ANSWER)


def circuit_of(name: str, task: str) -> Circuit | None:
    """The published circuit of a model for a task, if there is one."""
    found = CIRCUITS.get(_ALSO.get(name, name))
    return found if found is not None and found.task == task else None


def parse_edges(text: str, task: str) -> list[Edge]:
    """Read ``L9H9,L5H5:S2>S1+1``; a head alone looks from the query to the answer; a circuit's name is all of it."""
    named = circuit_of(text.strip(), task)
    if named is not None:
        return list(named.edges)
    if text.strip() in {*CIRCUITS, *_ALSO}:
        raise BadInput(f"the circuit of {text.strip()} is one of task ioi, not of {task}: name heads instead.")
    edges = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            continue
        name, colon, way = part.partition(":")
        query, arrow, key = (piece.strip() for piece in way.partition(">"))
        if colon and not (arrow and query and key):
            raise BadInput(f"{part!r} should say from where to where a head looks, like L5H5:S2>S1+1.")
        (head,) = parse_heads(name)
        edges.append(Edge(head, _duty_between(query, key, task) if colon else _ANSWERING))
    if not edges:
        raise BadInput("no head was named: write heads like L9H9,L5H5:S2>S1+1, or a circuit's name.")
    twice = [edge for i, edge in enumerate(edges) if edge in edges[:i]]
    if twice:
        raise BadInput(f"{twice[0]} is named twice: name each head and way once.")
    return edges


def _duty_between(query: str, key: str, task: str) -> Duty:
    known = (duty for duty in DUTIES.get(task, ()) if (duty.query, duty.key) == (query, key))
    return next(known, Duty(f"{query} to {key}", query, key))


def check_roles(task: Task, edges: Sequence[Edge]) -> None:
    """Refuse a role that the task's prompts do not have, before a model is loaded."""
    example = task.test(1)[0][0]
    for edge in edges:
        for role in (edge.duty.query, edge.duty.key):
            if role not in (QUERY, ANSWER) and role not in example.roles:
                there = ", ".join([*example.roles, QUERY, ANSWER])
                raise BadInput(f"{edge} names a role {role!r} that {task.name} does not have: there is {there}.")


def span_of(example: Example, role: str) -> Span | None:
    """Where a role stands; ``answer`` is the first right key, ``query`` the marked query or None, the last token."""
    if role in example.roles:
        return example.roles[role]
    if role == QUERY:
        return example.queries[0] if example.queries else None
    right = [key.span for key in example.keys if key.label(ANSWER) > 0]
    if role != ANSWER or not right:
        there = ", ".join([*example.roles, QUERY, *([ANSWER] if right else [])])
        raise BadInput(f"the example has no role {role!r}: there is {there}; or give a token's position.")
    return right[0]


def locate(
    scope: Scope, examples: Sequence[Example], roles: Sequence[str], chat: bool = False
) -> tuple[dict[str, Tensor], Int[Tensor, "n roles"]]:
    """A left-padded batch, and the column of each role's (last) token in it; two roles may share a token."""
    spans = [[span_of(example, role) for role in roles] for example in examples]
    marked = [
        Example(text=example.text, ids=example.ids, queries=tuple(filter(None, own)), roles=example.roles)
        for example, own in zip(examples, spans, strict=True)
    ]
    encoded = scope.encode(marked, chat=chat)
    last = encoded.inputs["input_ids"].shape[1] - 1
    found = [encoded.places.query[encoded.places.row == i].tolist() for i in range(len(examples))]
    columns = [[last if span is None else left.pop(0) for span in own] for own, left in zip(spans, found, strict=True)]
    return encoded.inputs, torch.tensor(columns)


def rows_from(inputs: dict[str, Tensor], columns: Int[Tensor, "n q"]) -> Places:
    """One row per example and query column, example by example, with every token of the example as a key."""
    mask = inputs["attention_mask"]
    row = torch.arange(len(columns), device=mask.device).repeat_interleave(columns.shape[1])
    return Places.everywhere(row, columns.flatten().to(mask.device), mask)


def find_circuit(
    scope: Scope, task: Task, n: int = 64, *, top: int = 2, batch_size: int = 32, progress: bool | None = None
) -> list[Edge]:
    """For each duty of the task the heads that do it most, on prompts for choosing.

    A head's score is its mean attention from the query role to the key role, less that to the other named roles, so
    that a head which looks at every name is not taken for one that looks at this one.
    """
    duties = DUTIES.get(task.name, (_ANSWERING,))
    units: list[Unit] = [unit[:1] for unit in task.choose(n)]
    queries = list(dict.fromkeys(duty.query for duty in duties))
    keys = list(dict.fromkeys([*(duty.key for duty in duties), *units[0][0].roles]))

    def run(indices: list[int]) -> Float[Tensor, "n duties h"]:
        inputs, columns = locate(scope, [units[i][0] for i in indices], [*queries, *keys], task.chat)
        attention = scope.capture_inputs(inputs, places=rows_from(inputs, columns[:, : len(queries)])).attention()
        by_query = attention.cpu().unflatten(0, (len(indices), len(queries)))
        slots = columns[:, None, len(queries) :].expand(-1, by_query.shape[2], -1)
        out = []
        for duty in duties:
            own = by_query[:, queries.index(duty.query)].gather(-1, slots)
            target = slots[..., keys.index(duty.key), None]
            others = (slots != target) & (slots != columns[:, None, queries.index(duty.query), None])
            rest = (own * others).sum(-1) / others.sum(-1).clamp_min(1)
            out.append(own[..., keys.index(duty.key)] - rest)
        return torch.stack(out, dim=1)

    scores = torch.cat(list(stream(batches_of(units, batch_size), run, progress))).double().mean(0)
    best = scores.argsort(dim=-1, descending=True)[:, :top]
    return [Edge(scope.heads()[i], duty) for duty, own in zip(duties, best.tolist(), strict=True) for i in own]


def outside(scope: Scope, edges: Sequence[Edge], count: int, seed: int = 0) -> list[Edge]:
    """For each way to look, this many heads that are in no circuit, drawn at random: the control."""
    inside = {edge.head for edge in edges}
    free = [head for head in scope.heads() if head not in inside]
    generator = torch.Generator().manual_seed(seed)
    ways = list(dict.fromkeys((edge.duty.query, edge.duty.key) for edge in reversed(edges)))[::-1]
    return [
        Edge(free[i], Duty("control", query, key), circuit=False)
        for query, key in ways
        for i in sorted(torch.randperm(len(free), generator=generator)[:count].tolist())
    ]
