"""Published circuits (``published.toml``): edges of heads, and how to find such heads elsewhere.

An edge is a head with the roles it connects: ``L9H9 (name mover): END → IO``. A circuit is a list
of edges. Where none is known for a model, `find_circuit` takes the heads that attend most from one
role to the other on prompts used for nothing else, and `outside` draws heads that are in no
circuit, at the same roles: the control.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.examples import Example, Span
from qkscope.findings.task_batches import batches_of
from qkscope.heads import Head
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


def _duties(table: Mapping[str, str]) -> tuple[Duty, ...]:
    """Read ``role = "query > key"`` lines."""
    duties = []
    for role, way in table.items():
        query, key = way.split(" > ")
        duties.append(Duty(role, query, key))
    return tuple(duties)


def _edges(rows: Iterable[Sequence[str]]) -> list[Edge]:
    """Read rows of role, ``query > key`` and heads like ``9.9 10.0``."""
    edges = []
    for role, way, heads in rows:
        duty = Duty(role, *way.split(" > "))
        for numbers in heads.split():
            layer, index = numbers.split(".")
            edges.append(Edge(Head(int(layer), int(index)), duty))
    return edges


_TABLE = tomllib.loads(files("qkscope.findings").joinpath("published.toml").read_text("utf-8"))
#: What to look for in a model whose circuit nobody has published, by task.
DUTIES = {task: _duties(table) for task, table in _TABLE["duties"].items()}
#: Published circuits, by model and task.
CIRCUITS: dict[tuple[str, str], list[Edge]] = {}
for _model, _circuit in _TABLE["circuits"].items():
    for _name in (_model, _circuit["also"]):
        CIRCUITS[_name, _circuit["task"]] = _edges(_circuit["edges"])
_CIRCUIT_NAMES = {name for name, _ in CIRCUITS}
_ANSWERING = Duty("answer", QUERY, ANSWER)


def parse_edges(heads: str | Head | Sequence[str | Head | Edge], task: Task) -> list[Edge]:
    """Read ``L9H9,L5H5:S2>S1+1``, or the name of a circuit.

    A head alone looks from the query to the answer.
    """
    edges: list[Edge] = []
    for part in [heads] if isinstance(heads, str | Head) else heads:
        if isinstance(part, Edge):
            edges.append(part)
        else:
            edges += _parse_list(str(part), task.name)
    if not edges:
        raise BadInput(
            f"no head was named, or the circuit of another task than {task.name}:"
            " write L9H9,L5H5:S2>S1+1."
        )
    (prompt, *_), *_ = task.test(1)
    roles = [*prompt.roles, QUERY, ANSWER]
    for edge in edges:
        for role in (edge.duty.query, edge.duty.key):
            if role not in roles:
                unknown = f"{edge} names a role {role!r} that {task.name} does not have"
                raise BadInput(f"{unknown}: there is {', '.join(roles)}.")
    return list(dict.fromkeys(edges))


def _parse_list(text: str, task: str) -> list[Edge]:
    """Read edges and names of circuits, separated by commas."""
    edges: list[Edge] = []
    for part in text.split(","):
        name = part.strip()
        if name in _CIRCUIT_NAMES:
            edges += CIRCUITS.get((name, task), [])
        elif name:
            edges.append(_parse(name, task))
    return edges


def _parse(text: str, task: str) -> Edge:
    """Read one edge; a way to look that the task knows has the role's name."""
    name, colon, way = text.partition(":")
    if not colon:
        return Edge(Head.parse(name), _ANSWERING)
    query, _, key = way.partition(">")
    query = query.strip()
    key = key.strip()
    if not (query and key):
        raise BadInput(f"{text!r} should say from where to where a head looks, like L5H5:S2>S1+1.")
    head = Head.parse(name)
    for duty in DUTIES.get(task, ()):
        if (duty.query, duty.key) == (query, key):
            return Edge(head, duty)
    return Edge(head, Duty(f"{query} to {key}", query, key))


def span_of(example: Example, role: str) -> Span | None:
    """Find the span of a role; None is the last token.

    ``answer`` is the first right key, ``query`` the marked query, or None where none is marked.
    """
    if role in example.roles:
        return example.roles[role]
    if role == QUERY:
        return example.queries[0] if example.queries else None
    right = [key.span for key in example.keys if key.label(ANSWER) > 0]
    return right[0]


def columns_of_roles(
    scope: Scope, examples: Sequence[Example], roles: Sequence[str], chat: bool = False
) -> tuple[dict[str, Tensor], Int[Tensor, "n roles"]]:
    """Encode a left-padded batch, and find the column of each role's (last) token in it.

    Two roles may share a token.
    """
    spans = [[span_of(example, role) for role in roles] for example in examples]
    marked = []
    for example, of_roles in zip(examples, spans, strict=True):
        queries = tuple(span for span in of_roles if span)
        marked.append(replace(example, queries=queries, keys=(), answers=None))
    encoded = scope.encode(marked, chat=chat)
    last = encoded.inputs["input_ids"].shape[1] - 1
    columns = []
    for i, of_roles in enumerate(spans):
        is_of_example = encoded.places.row == i
        of_queries = iter(encoded.places.query[is_of_example].tolist())
        columns.append([last if span is None else next(of_queries) for span in of_roles])
    return encoded.inputs, torch.tensor(columns)


def rows_from(inputs: dict[str, Tensor], columns: Int[Tensor, "n q"] | int) -> Places:
    """Make one row per example and query column, with every token of the example as a key."""
    mask = inputs["attention_mask"]
    examples = len(inputs["input_ids"])
    columns = torch.as_tensor(columns).view(examples, -1)
    example = torch.arange(examples, device=mask.device)
    row = example.repeat_interleave(columns.shape[1])
    return Places.everywhere(row, columns.flatten().to(mask.device), mask)


def find_circuit(
    scope: Scope, task: Task, n: int = 64, *, top: int = 2, batch_size: int = 32
) -> list[Edge]:
    """Find the heads that do each duty of the task most, on prompts for choosing.

    A head's score is its mean attention from the query role to the key role, less that to the other
    named roles, so that a head which looks at every name is not taken for one that looks at this
    one.
    """
    duties = DUTIES.get(task.name, (_ANSWERING,))
    units: list[Unit] = [unit[:1] for unit in task.choose(n)]
    first = units[0][0]
    queries = list(dict.fromkeys(duty.query for duty in duties))
    duty_keys = [duty.key for duty in duties]
    keys = list(dict.fromkeys([*duty_keys, *first.roles]))

    def run(indices: list[int]) -> Float[Tensor, "n duties h"]:
        examples = [units[i][0] for i in indices]
        inputs, columns = columns_of_roles(scope, examples, [*queries, *keys], task.chat)
        of_queries = columns[:, : len(queries)]
        of_keys = columns[:, len(queries) :]
        captured = scope.capture_inputs(inputs, places=rows_from(inputs, of_queries))
        # prompts by queries by heads by tokens
        by_query = (len(indices), len(queries))
        attention = captured.attention().cpu().unflatten(0, by_query)
        scores = []
        for duty in duties:
            query = queries.index(duty.query)
            key = keys.index(duty.key)
            of_query = of_queries[:, query]
            scores.append(_preference(attention[:, query], of_keys, key, of_query))
        return torch.stack(scores, dim=1)

    batches = stream(batches_of(units, batch_size), run)
    scores = torch.cat(list(batches)).double().mean(0)
    best = scores.argsort(dim=-1, descending=True)[:, :top].tolist()
    heads = scope.heads()
    edges = []
    for duty, first in zip(duties, best, strict=True):
        edges += [Edge(heads[i], duty) for i in first]
    return edges


def _preference(
    attention: Float[Tensor, "n h t"],
    of_keys: Int[Tensor, "n k"],
    key: int,
    of_query: Int[Tensor, " n"],
) -> Float[Tensor, "n h"]:
    """Attention on one of the key roles, less the mean on the others that are other tokens."""
    heads = attention.shape[1]
    slots = of_keys[:, None].expand(-1, heads, -1)
    on_keys = attention.gather(-1, slots)
    is_other_key = slots != slots[..., key, None]
    is_other_token = slots != of_query[:, None, None]
    others = is_other_key & is_other_token
    on_others = (on_keys * others).sum(-1)
    rest = on_others / others.sum(-1).clamp_min(1)
    return on_keys[..., key] - rest


def outside(scope: Scope, edges: Sequence[Edge], count: int, seed: int = 0) -> list[Edge]:
    """Draw heads that are in no circuit, this many for each way to look: the control."""
    inside = {edge.head for edge in edges}
    free = [head for head in scope.heads() if head not in inside]
    generator = torch.Generator().manual_seed(seed)
    # in the order in which each way to look is last named
    last_named = [(edge.duty.query, edge.duty.key) for edge in reversed(edges)]
    ways = list(dict.fromkeys(last_named))
    controls = []
    for query, key in reversed(ways):
        drawn = torch.randperm(len(free), generator=generator)[:count].tolist()
        duty = Duty("control", query, key)
        controls += [Edge(free[i], duty, circuit=False) for i in sorted(drawn)]
    return controls
