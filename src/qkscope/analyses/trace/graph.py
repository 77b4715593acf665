"""The depth of a trace: one prompt's relative logit, split among writers, over the tokens they read, and down again.

The logit ``Σ_t w_t ℓ(p,t)``, with +1 on a key and −1/m on each of m others, is the sum of its query writers and the sum
of its key writers. A writer that is a head splits on over the tokens it read, with attention held, and what stands at
such a token is again a sum of writers one layer down: *content*, every parent the sum of its children. Why a writer
looked there is another question, with a logit of its own (*why*): that token against all others it saw but the first.

At the keys a part is the key's less the mean of the others', and so it stays on the way down: what the key read two
tokens back stands against what each other key read two tokens back. The first token, where attention rests, is the same
token to all. What others read at a distance at which the key has no token is one child, `OTHERS`.

Over many prompts (`sources_of`) a head's part ``x_c(p)·g = Σ_s a(p,s) v(s)·G`` is summed by the offset ``s − p``; at
the keys, what the right key read at an offset less the mean of what the others read there. The first token stands
apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.capture.encode import Encoding
from qkscope.capture.tokens import token_texts
from qkscope.errors import BadInput
from qkscope.heads import Head, Writer
from qkscope.linear.reader import Reader
from qkscope.linear.run import Direction, Run, Side

REST, OTHERS = "rest", "other keys"
FIRST, SOURCE_REST = "(first token)", "(rest)"  # of many prompts


@dataclass(frozen=True)
class Graph:
    """One prompt's graph: rows, each with its parent's ``id``, and the prompt it stands on.

    Attributes
    ----------
    rows : ``head, id, parent, kind`` (root, content, why), ``side, writer, layer, position, token, attention, value,
        share``. A row without writer is a token that the head above it read. Shares are of the root; below a *why*,
        of that logit. The children of a parent on one side sum to it.
    prompt : ``head, position, token, attention``, of every token that the query sees.
    total : the relative logit.
    error : largest difference between a parent and what it is the sum of, beside the largest term of its logit.
    """

    rows: list[dict[str, Any]]
    prompt: list[dict[str, Any]]
    total: float
    error: float


def trace_graph(
    run: Run,
    head: Head,
    query: int,
    key: int,
    *,
    others: Sequence[int] | None = None,
    depth: int = 2,
    width: int = 3,
    smallest: float = 0.05,
    projector: Float[Tensor, "d d"] | None = None,
) -> Graph:
    """Follow one relative logit of one prompt down its writers.

    Parameters
    ----------
    run : of the prompt, alone, with every token as a key, every layer kept.
    head : that looks from the query to the key.
    query, key : tokens, counted from 0.
    others : tokens that the key is compared with; all that the query sees but the first, if not given.
    depth : how often writers are followed to what they read; 0 names the writers alone.
    width : how many children of a node are shown; the others are one, `REST`.
    smallest : share of the root below which a child is not shown.
    projector : of a feature, between query and key.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope, head = qk.Scope.load("nano:mixed"), Head.parse("L2H3")
    >>> run = Reader(scope, [head]).record_prompt(scope.encode(["hat: O jam: Z jam:"]))
    >>> found = trace_graph(run, head, query=8, key=6, depth=0, width=1)
    >>> [(row["side"], row["writer"], row["token"]) for row in found.rows]
    [(None, 'L2H3', ':'), ('query', 'M0', ':'), ('query', 'rest', ':'), ('key', 'L1H0', 'Z'), ('key', 'rest', 'Z')]
    """
    texts = token_texts(run.reader.scope, run.ids.tolist())
    attention = run.attention(head, torch.tensor([query + 1], device=run.row.device))[0, 0].tolist()
    seen = run.seen(head, query)
    if key not in seen:
        raise BadInput(f"{head} cannot see token {key} from token {query}.")
    others = [i for i in seen if i not in (0, key)] if others is None else list(others)
    if not others:
        raise BadInput(f"there is nothing that token {key} could be compared with: name a later query.")
    builder = _Builder(run, str(head), texts, width, smallest)
    total = builder.logit(head, query, key, others, depth, projector, attention[key])
    prompt = [
        {"head": str(head), "position": i, "token": texts[i], "attention": attention[i]} for i in range(query + 1)
    ]
    return Graph(builder.rows, prompt, total, builder.error)


@dataclass
class _Builder:
    """Rows of a graph, as they come."""

    run: Run
    head: str
    texts: list[str]
    width: int
    smallest: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: float = 0.0
    root: float = 0.0  # whose shares are given
    largest: float = 0.0  # of all terms of that logit
    asked_why: set[tuple[Head, int, int]] = field(default_factory=set)

    def logit(
        self,
        head: Head,
        query: int,
        key: int,
        others: Sequence[int],
        depth: int,
        projector: Tensor | None = None,
        attention: float | None = None,
        parent: dict[str, Any] | None = None,
    ) -> float:
        """A root of its own, and its writers on both sides."""
        device = self.run.row.device
        keys = torch.tensor([key, *others], device=device) + 1
        weights = torch.tensor([[1.0, *[-1 / len(others)] * len(others)]], device=device)
        logit, sides = self.run.ask(head, query + 1, keys, weights, projector)
        before = self.root, self.largest
        self.root = total = float(logit)
        self.largest = 0.0
        kind = "root" if parent is None else "why"
        row = self._add(
            parent, kind, None, self.root, str(head), head.layer, position=query, attention=attention, towards=key
        )
        for side, direction in sides.items():
            self._writers(row, side, direction, depth)
        self.root, self.largest = before
        return total

    def _writers(self, parent: dict[str, Any], side: Side, asked: Direction, depth: int) -> None:
        """What stands at a token (and at those it is compared with), split among writers."""
        answer = self.run.answer(asked)
        values = {name: float(value.sum()) for name, value in answer.values.items()}
        self._check(parent, torch.stack([*answer.values.values()]))
        at = {"position": int(asked.slots[0]) - 1}
        for name, row in self._children(
            parent, side, values, lambda name: {"writer": name, "layer": Writer.parse(name).block, **at}, at
        ):
            if depth > 0 and (head := Writer.parse(name).head):
                self._sources(row, side, head, asked.slots, answer.asks[head.layer][:, :, head.index], depth)

    def _sources(
        self, parent: dict[str, Any], side: Side, head: Head, slots: Int[Tensor, " p"], along: Tensor, depth: int
    ) -> None:
        """A head's part, split over the tokens that it read."""
        run, positions = self.run, slots - 1
        attention = run.attention(head, slots)
        brought = (attention * run.brought(head, along))[0]  # of each slot, by token
        self._check(parent, brought)
        tokens = torch.arange(brought.shape[1], device=slots.device)
        same = positions[0] + tokens - positions[:, None]  # where the first slot's token at this distance stands
        same = torch.where((same <= 0) | (same >= len(tokens)), -1, same).where(tokens > 0, 0)
        sums = torch.zeros(len(tokens) + 1, device=slots.device).index_add_(0, same.flatten() + 1, brought.flatten())
        values = {OTHERS if i == 0 else i - 1: value for i, value in enumerate(sums.tolist()) if value}

        def said(token: Any) -> dict[str, Any]:
            if token == OTHERS:
                return {"writer": OTHERS}
            return {"layer": head.layer, "position": token, "attention": float(attention[0, 0, token])}

        for token, row in self._children(parent, side, values, said, {}):
            if token == OTHERS:
                continue
            slot, read = (same == token).nonzero().T
            asked = run.enter(head, "v", read + 1, attention[:, slot, read, None] * along[:, slot])
            self._writers(row, side, asked, depth - 1)
            self._why(row, head, int(positions[0]), token)

    def _why(self, row: dict[str, Any], head: Head, query: int, key: int) -> None:
        """Why a writer looked at a token, once for each; nothing looks at the first for what it says."""
        seen = self.run.seen(head, query)
        others = [i for i in seen if i not in (0, key)]
        if key > 0 and key in seen and others and (head, query, key) not in self.asked_why:
            self.asked_why.add((head, query, key))
            self.logit(head, query, key, others, 0, attention=row["attention"], parent=row)

    def _check(self, parent: dict[str, Any], terms: Tensor) -> None:
        """What a parent's terms miss of it, beside the largest term of this logit."""
        self.largest = max(self.largest, float(terms.abs().max()))
        missed = abs(float(terms.double().sum()) - parent["value"])
        self.error = max(self.error, missed / self.largest if self.largest > 0 else missed)

    def _children(
        self, parent: dict[str, Any], side: Side, values: Mapping[Any, float], said: Any, rest: dict[str, Any]
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The largest children of a node, and all others as one."""
        order = sorted(values, key=lambda name: -abs(values[name]))
        shown = [name for name in order[: self.width] if abs(values[name]) >= self.smallest * abs(self.root)]
        kind = "why" if parent["kind"] == "why" else "content"
        rows = [(name, self._add(parent, kind, side, values[name], **said(name))) for name in shown]
        if len(shown) < len(values):
            left = sum(value for name, value in values.items() if name not in shown)
            self._add(parent, kind, side, left, writer=REST, **rest)
        yield from rows

    def _add(
        self,
        parent: dict[str, Any] | None,
        kind: str,
        side: Side | None,
        value: float,
        writer: str | None = None,
        layer: int | None = None,
        position: int | None = None,
        attention: float | None = None,
        towards: int | None = None,
    ) -> dict[str, Any]:
        row = {
            "head": self.head, "id": len(self.rows), "parent": None if parent is None else parent["id"], "kind": kind,
            "side": side, "writer": writer, "layer": layer, "position": position,
            "token": None if position is None else self.texts[position], "towards": towards, "attention": attention,
            "value": value, "share": value / self.root if self.root else None,
        }  # fmt: skip
        self.rows.append(row)
        return row


def sources_of(
    reader: Reader,
    batches: Iterable[tuple[Encoding, Float[Tensor, "n k"]]],
    head: Head,
    writers: Mapping[Side, Sequence[str]],
    *,
    width: int = 3,
) -> list[dict[str, Any]]:
    """Which tokens a head's writers read, over many prompts.

    Parameters
    ----------
    reader : of the head.
    batches : prompts, each with the weights of its keys in the logit: +1 on the right one, −1/m on m others, 0 in
        padded slots.
    head : whose logit it is.
    writers : by side, whose sources are wanted; those that are no heads have none.
    width : how many offsets are named for each writer.

    Returns
    -------
    list of dict
        ``head, side, writer, token, frequency, offset, share``: the share is of the logit, so that a writer's rows sum
        to its own share; the token is the most frequent one at that offset from the query or from the right key, and
        stands there in this fraction of the prompts that have one. What the first token gave and the rest have no
        offset.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope, head = qk.Scope.load("nano:mixed"), Head.parse("L2H3")
    >>> prompt = qk.Example.mark("hat: O jam: Z jam:", keys=["O", "Z"])
    >>> batch = scope.encode([prompt]), torch.tensor([[-1.0, 1.0]])
    >>> sources_of(Reader(scope, [head]), [batch], head, {"key": ["L1H0"]}, width=1)[0]["side"]
    'key'
    """
    named = {side: [other for name in names if (other := Writer.parse(name).head)] for side, names in writers.items()}
    for other in (other for heads in named.values() for other in heads):
        if other.layer >= head.layer:
            raise BadInput(f"{other} does not write before {head}: its sources are not asked for.")
    layers = [other.layer for heads in named.values() for other in heads]
    total, sums, tokens = 0.0, dict[tuple[Side, Head], Counter[int | str]](), dict[tuple[Side, int], Counter[int]]()
    for encoded, weights in batches:
        run = reader.record(encoded.inputs, encoded.places, layers=layers)
        keys = torch.arange(1, run.columns.shape[1], device=weights.device)
        logit, sides = run.ask(head, 0, keys, weights)
        total += float(logit.double().sum())
        ids, mask = encoded.inputs["input_ids"][run.row], encoded.inputs["attention_mask"][run.row]
        first = mask.argmax(dim=1)
        right = run.columns[:, 1:].gather(1, weights.argmax(dim=1, keepdim=True))[:, 0]
        for side, direction in sides.items():
            if named.get(side):
                answer = run.answer(direction)
                for other in named[side]:
                    along = answer.asks[other.layer][:, :, other.index]
                    brought = run.attention(other, direction.slots) * run.brought(other, along)
                    found = _by_offset(brought, run.columns[:, direction.slots], first)
                    sums.setdefault((side, other), Counter()).update(found)
                _count(tokens, side, ids, mask, run.columns[:, 0] if side == "query" else right)
    return [
        {"head": str(head), "side": side, "writer": str(other), **row}
        for (side, other), found in sums.items()
        for row in _source_rows(
            found, total, {at: own for (of, at), own in tokens.items() if of == side}, reader, width
        )
    ]


def _by_offset(brought: Float[Tensor, "n p t"], columns: Tensor, first: Tensor) -> dict[int | str, float]:
    """Sums by the distance from a slot to a token, and of the first tokens."""
    length = brought.shape[-1]
    tokens = torch.arange(length, device=brought.device)
    offsets = tokens - columns[..., None] + length
    offsets = torch.where(tokens == first[:, None, None], 2 * length, offsets)
    sums = torch.zeros(2 * length + 1, dtype=torch.float64, device=brought.device)
    sums.index_add_(0, offsets.flatten(), brought.double().flatten())
    *others, at_first = sums.tolist()
    return {FIRST: at_first} | {i - length: value for i, value in enumerate(others) if value}


def _count(tokens: dict[tuple[Side, int], Counter[int]], side: Side, ids: Tensor, mask: Tensor, at: Tensor) -> None:
    """Which ids stand at which distance from a place."""
    for row, shown, place in zip(ids.tolist(), mask.tolist(), at.tolist(), strict=True):
        for column, (token, is_token) in enumerate(zip(row, shown, strict=True)):
            if is_token:
                tokens.setdefault((side, column - place), Counter())[token] += 1


def _source_rows(
    found: Counter[int | str], total: float, tokens: Mapping[int, Counter[int]], reader: Reader, width: int
) -> list[dict[str, Any]]:
    largest = sorted(found, key=lambda at: -abs(found[at]))[:width]
    rows = []
    for at in largest:
        text, often = str(at), None
        if isinstance(at, int) and at in tokens:
            (token, count), *_ = tokens[at].most_common(1)
            text = token_texts(reader.scope, [token])[0]
            often = count / tokens[at].total()
        offset = at if isinstance(at, int) else None
        rows.append({"token": text, "frequency": often, "offset": offset, "share": found[at] / total})
    left = sum(value for at, value in found.items() if at not in largest)
    return [*rows, {"token": SOURCE_REST, "frequency": None, "offset": None, "share": left / total}]
