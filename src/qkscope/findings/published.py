"""Which heads look from where to where: published circuits (``published.toml``), and how to find
such heads elsewhere.

An edge is a head with the roles it connects: ``L9H9 (name mover): END → IO``. A circuit is a list
of edges. Where none is known for a model, `find_circuit` takes the heads that attend most from one
role to the other on prompts used for nothing else, and `outside` draws heads that are in no
circuit, at the same roles: the control.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput, Head, Scope
from qkscope.examples import Example, Span
from qkscope.findings.task_batches import batches_of
from qkscope.model.capture_types import Places
from qkscope.results.work import stream
from qkscope.texts.task import ANSWER, Task, Unit

#: Roles of every task: its own query, and its right key (``answer``).
QUERY = "query"


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


def _duty(role: str, way: str) -> Duty:
    return Duty(role, *way.split(" > "))


_TABLE = tomllib.loads(files("qkscope.findings").joinpath("published.toml").read_text("utf-8"))
#: What to look for in a model whose circuit nobody has published, by task.
DUTIES = {
    task: tuple(_duty(*row) for row in duties.items()) for task, duties in _TABLE["duties"].items()
}
#: Published circuits, by model and task.
CIRCUITS = {
    (name, found["task"]): [
        Edge(Head.parse(f"L{head.replace('.', 'H')}"), _duty(role, way))
        for role, way, heads in found["edges"]
        for head in heads.split()
    ]
    for model, found in _TABLE["circuits"].items()
    for name in (model, found["also"])
}
_ANSWERING = Duty("answer", QUERY, ANSWER)


def parse_edges(heads: str | Head | Sequence[str | Head | Edge], task: Task) -> list[Edge]:
    """Read ``L9H9,L5H5:S2>S1+1``; a head alone looks from the query to the answer; a circuit's name
    is all of it.
    """
    edges: list[Edge] = []
    for part in [heads] if isinstance(heads, str | Head) else heads:
        if isinstance(part, Edge):
            edges.append(part)
            continue
        for text in filter(None, map(str.strip, str(part).split(","))):
            if text in {name for name, _ in CIRCUITS}:
                edges += CIRCUITS.get((text, task.name), [])
            else:
                edges.append(_parse(text, task.name))
    if not edges:
        raise BadInput(
            f"no head was named, or the circuit of another task than {task.name}: write L9H9,L5H5:S2>S1+1."
        )
    roles = [*task.test(1)[0][0].roles, QUERY, ANSWER]
    for edge in edges:
        for role in {edge.duty.query, edge.duty.key}.difference(roles):
            there = ", ".join(roles)
            raise BadInput(
                f"{edge} names a role {role!r} that {task.name} does not have: there is {there}."
            )
    return list(dict.fromkeys(edges))


def _parse(text: str, task: str) -> Edge:
    name, colon, way = text.partition(":")
    query, _, key = (piece.strip() for piece in way.partition(">"))
    if colon and not (query and key):
        raise BadInput(f"{text!r} should say from where to where a head looks, like L5H5:S2>S1+1.")
    known = (duty for duty in DUTIES.get(task, ()) if (duty.query, duty.key) == (query, key))
    return Edge(
        Head.parse(name),
        next(known, Duty(f"{query} to {key}", query, key)) if colon else _ANSWERING,
    )


def span_of(example: Example, role: str) -> Span | None:
    """Find the span of a role; ``answer`` is the first right key, ``query`` the marked query, or
    None (the last).
    """
    if role in example.roles:
        return example.roles[role]
    if role == QUERY:
        return example.queries[0] if example.queries else None
    return next(key.span for key in example.keys if key.label(ANSWER) > 0)


def locate(
    scope: Scope, examples: Sequence[Example], roles: Sequence[str], chat: bool = False
) -> tuple[dict[str, Tensor], Int[Tensor, "n roles"]]:
    """A left-padded batch, and the column of each role's (last) token in it; two roles may share a
    token.
    """
    spans = [[span_of(example, role) for role in roles] for example in examples]
    pairs = zip(examples, spans, strict=True)
    marked = [
        replace(example, queries=tuple(filter(None, own)), keys=(), answers=None)
        for example, own in pairs
    ]
    encoded = scope.encode(marked, chat=chat)
    last = encoded.inputs["input_ids"].shape[1] - 1
    found = [encoded.places.query[encoded.places.row == i].tolist() for i in range(len(examples))]
    columns = [
        [last if span is None else left.pop(0) for span in own]
        for own, left in zip(spans, found, strict=True)
    ]
    return encoded.inputs, torch.tensor(columns)


def rows_from(inputs: dict[str, Tensor], columns: Int[Tensor, "n q"] | int) -> Places:
    """One row per example and query column, example by example, with every token of the example as
    a key.
    """
    mask = inputs["attention_mask"]
    columns = torch.as_tensor(columns).view(len(inputs["input_ids"]), -1)
    row = torch.arange(len(columns), device=mask.device).repeat_interleave(columns.shape[1])
    return Places.everywhere(row, columns.flatten().to(mask.device), mask)


def find_circuit(
    scope: Scope, task: Task, n: int = 64, *, top: int = 2, batch_size: int = 32
) -> list[Edge]:
    """For each duty of the task the heads that do it most, on prompts for choosing.

    A head's score is its mean attention from the query role to the key role, less that to the other
    named roles, so that a head which looks at every name is not taken for one that looks at this
    one.
    """
    duties = DUTIES.get(task.name, (_ANSWERING,))
    units: list[Unit] = [unit[:1] for unit in task.choose(n)]
    queries = list(dict.fromkeys(duty.query for duty in duties))
    keys = list(dict.fromkeys([*(duty.key for duty in duties), *units[0][0].roles]))

    def run(indices: list[int]) -> Float[Tensor, "n duties h"]:
        inputs, columns = locate(
            scope, [units[i][0] for i in indices], [*queries, *keys], task.chat
        )
        attention = scope.capture_inputs(
            inputs, places=rows_from(inputs, columns[:, : len(queries)])
        ).attention()
        by_query = attention.cpu().unflatten(0, (len(indices), len(queries)))
        slots = columns[:, None, len(queries) :].expand(-1, by_query.shape[2], -1)
        out = []
        for duty in duties:
            own = by_query[:, queries.index(duty.query)].gather(-1, slots)
            target = slots[..., keys.index(duty.key), None]
            others = (slots != target) & (
                slots != columns[:, None, queries.index(duty.query), None]
            )
            rest = (own * others).sum(-1) / others.sum(-1).clamp_min(1)
            out.append(own[..., keys.index(duty.key)] - rest)
        return torch.stack(out, dim=1)

    scores = torch.cat(list(stream(batches_of(units, batch_size), run))).double().mean(0)
    best = scores.argsort(dim=-1, descending=True)[:, :top]
    return [
        Edge(scope.heads()[i], duty)
        for duty, own in zip(duties, best.tolist(), strict=True)
        for i in own
    ]


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
