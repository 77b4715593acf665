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

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.prompt import PromptTrace
from qkscope.analyses.trace.rows import HeadRows
from qkscope.capture.encode import token_texts
from qkscope.heads import Head, Writer
from qkscope.linear.run import Direction, Side

Row = dict[str, Any]
REST, OTHERS = "rest", "other keys"
_SOURCES = 3  # tokens of a writer that are named, over many prompts
FIRST, SOURCE_REST = "(first token)", "(rest)"  # of many prompts


class Graph(NamedTuple):
    """One prompt's graph: rows, each with its parent's ``id``, and the prompt it stands on.

    Attributes
    ----------
    rows : ``head, id, parent, kind`` (root, content, why), ``side, writer, layer, position, token, attention, value,
        share``. A row without writer is a token that the head above it read. Shares are of the root; below a *why*,
        of that logit. The children of a parent on one side sum to it.
    prompt : ``head, position, token, attention``, of every token that the query sees.
    error : largest difference between a parent and what it is the sum of, beside the largest term of its logit.
    """

    rows: list[Row]
    prompt: list[Row]
    error: float


def trace_graph(one: PromptTrace, depth: int = 2, width: int = 3, smallest: float = 0.05) -> Graph:
    """Follow one relative logit of one prompt down its writers; empty where the key has nothing to be compared with.

    Parameters
    ----------
    one : the prompt, in a run with every layer kept.
    depth : how often writers are followed to what they read; 0 names the writers alone.
    width : how many children of a node are shown; the others are one, `REST`.
    smallest : share of the root below which a child is not shown.

    Examples
    --------
    >>> import qkscope as qk
    >>> from qkscope.analyses.trace.prompt import Probe
    >>> one = Probe(qk.Scope.load("nano:mixed"), "hat: O jam: Z jam:").head("L2H3", key=6)
    >>> [(row["side"], row["writer"], row["token"]) for row in trace_graph(one, depth=0, width=1).rows]
    [(None, 'L2H3', ':'), ('query', 'M0', ':'), ('query', 'rest', ':'), ('key', 'L1H0', 'Z'), ('key', 'rest', 'Z')]
    """
    if not one.against:
        return Graph([], [], 0.0)
    builder = _Builder(one, width, smallest)
    builder.logit(one, depth, None)
    prompt = [
        {"head": str(one.head), "position": i, "token": token, "attention": float(one.attention[i])}
        for i, token in enumerate(one.asked.tokens[: one.asked.query + 1])
    ]
    return Graph(builder.rows, prompt, builder.error)


class _Builder:
    """Rows of a graph, as they come."""

    def __init__(self, one: PromptTrace, width: int, smallest: float) -> None:
        self.one, self.run, self.width, self.smallest = one, one.run, width, smallest
        self.rows: list[dict[str, Any]] = []
        self.error = self.root = self.largest = 0.0  # the root's shares are given; the largest of all its terms
        self.asked_why: set[tuple[Head, int, int]] = set()

    def logit(self, one: PromptTrace, depth: int, parent: dict[str, Any] | None) -> None:
        """A root of its own, and its writers on both sides."""
        before = self.root, self.largest
        self.root, self.largest = one.total, 0.0
        about: dict[str, Any] = {
            "writer": str(one.head), "layer": one.head.layer, "position": one.asked.query, "towards": one.key,
            "attention": float(one.attention[one.key]),
        }  # fmt: skip
        row = self._add(parent, "root" if parent is None else "why", None, one.total, **about)
        for side, direction in one.directions.items():
            self._writers(row, side, direction, depth)
        self.root, self.largest = before

    def _writers(self, parent: dict[str, Any], side: Side, asked: Direction, depth: int) -> None:
        """What stands at a token (and at those it is compared with), split among writers."""
        answer, position = self.run.answer(asked), int(asked.slots[0]) - 1
        self._check(parent, torch.stack([*answer.values.values()]))
        values = {name: float(value.sum()) for name, value in answer.values.items()}
        every = [(Writer.parse(name), value, {"writer": name, "position": position}) for name, value in values.items()]
        for writer, row in self._children(parent, side, every, position=position):
            row["layer"] = writer.block
            if depth > 0 and writer.head:
                self._sources(row, side, writer.head, asked.slots, self.run.on_output(answer, writer.head), depth)

    def _sources(self, parent: Row, side: Side, head: Head, slots: Tensor, along: Tensor, depth: int) -> None:
        """A head's part, split over the tokens that it read."""
        run, positions, attention = self.run, slots - 1, self.run.attention(head, slots)
        brought = (attention * run.brought(head, along))[0]  # of each slot, by token
        self._check(parent, brought)
        tokens = torch.arange(brought.shape[1], device=slots.device)
        same = positions[0] + tokens - positions[:, None]  # where the first slot's token at this distance stands
        same = torch.where((same <= 0) | (same >= len(tokens)), -1, same).where(tokens > 0, 0)
        sums = torch.zeros(len(tokens) + 1, device=slots.device).index_add_(0, same.flatten() + 1, brought.flatten())
        there, *values = sums.tolist()
        seen = zip(range(len(values)), values, attention[0, 0].tolist(), strict=True)
        every = [(i, value, {"layer": head.layer, "position": i, "attention": a}) for i, value, a in seen if value]
        every += [(-1, there, {"writer": OTHERS})] if there else []
        for token, row in self._children(parent, side, every):
            if token >= 0:
                slot, read = (same == token).nonzero().T
                asked = run.enter(head, "v", read + 1, attention[:, slot, read, None] * along[:, slot])
                self._writers(row, side, asked, depth - 1)
                self._why(row, head, int(positions[0]), token)

    def _why(self, row: dict[str, Any], head: Head, query: int, key: int) -> None:
        """Why a writer looked at a token, once for each; nothing looks at the first for what it says."""
        seen = self.run.seen(head, query)
        if key > 0 and {*seen} - {0, key} and key in seen and (head, query, key) not in self.asked_why:
            self.asked_why.add((head, query, key))
            self.logit(PromptTrace(self.run, replace(self.one.asked, query=query), head, key), 0, row)

    def _check(self, parent: dict[str, Any], terms: Tensor) -> None:
        """What a parent's terms miss of it, beside the largest term of this logit."""
        self.largest = max(self.largest, float(terms.abs().max()))
        missed = abs(float(terms.double().sum()) - parent["value"])
        self.error = max(self.error, missed / self.largest if self.largest > 0 else missed)

    def _children(
        self, parent: Row, side: Side, every: list[tuple[Any, float, Row]], **rest: Any
    ) -> list[tuple[Any, Row]]:
        """The largest children of a node, each a name, a value and its columns; all others are one row."""
        every = sorted(every, key=lambda child: -abs(child[1]))
        shown = [child for child in every[: self.width] if abs(child[1]) >= self.smallest * abs(self.root)]
        kind = "why" if parent["kind"] == "why" else "content"
        rows = [(name, self._add(parent, kind, side, value, **about)) for name, value, about in shown]
        if left := every[len(shown) :]:
            self._add(parent, kind, side, sum(value for _, value, _ in left), writer=REST, **rest)
        return rows

    def _add(self, parent: Row | None, kind: str, side: Side | None, value: float, **about: Any) -> Row:
        row = {
            "head": str(self.one.head), "id": len(self.rows), "parent": None if parent is None else parent["id"],
            "kind": kind, "side": side,
            **dict.fromkeys(("writer", "layer", "position", "token", "towards", "attention")), **about,
            "value": value, "share": value / self.root if self.root else None,
        }  # fmt: skip
        if row["position"] is not None:
            row["token"] = self.one.asked.tokens[row["position"]]
        self.rows.append(row)
        return row


# ---------------------------------------------------------------------- over many prompts


def sources_of(batches: Iterable[HeadRows], writers: Mapping[Side, Sequence[str]]) -> list[dict[str, Any]]:
    """Which tokens a head's writers read, over many prompts.

    Parameters
    ----------
    batches : of the head, with the layers of the writers kept.
    writers : by side, whose sources are wanted; those that are no heads have none.
    width : how many offsets are named for each writer.

    Returns
    -------
    list of dict
        ``head, side, writer, token, frequency, offset, share``: the share is of the logit, so that a writer's rows sum
        to its own share; the token is the most frequent one at that offset from the query or from the right key, and
        stands there in this fraction of the prompts that have one. What the first token gave and the rest have no
        offset.
    """
    named = {side: [other for name in names if (other := Writer.parse(name).head)] for side, names in writers.items()}
    total, sums, tokens = 0.0, defaultdict[Any, Any](Counter), defaultdict[Any, Counter[int]](Counter)
    for batch in batches:
        run = batch.run
        total += float(batch.logit().double().sum())
        ids, mask = (run.inputs[name][run.row] for name in ("input_ids", "attention_mask"))
        right = run.columns[:, 1:].gather(1, batch.signs.argmax(dim=1, keepdim=True))[:, 0]
        for side, direction in batch.directions.items():
            answer = run.answer(direction)
            for other in named[side]:
                along = run.on_output(answer, other)
                brought = run.attention(other, direction.slots) * run.brought(other, along)
                read = _by_offset(brought, run.columns[:, direction.slots], mask.argmax(dim=1))
                sums[side, other].update(read)
            places = (run.columns[:, 0] if side == "query" else right).tolist()
            for (row, column), token in zip(mask.nonzero().tolist(), ids[mask.bool()].tolist(), strict=True):
                tokens[side, column - places[row]][token] += 1  # by their distance
    rows = []
    for (side, other), offsets in sums.items():
        largest = sorted(offsets, key=lambda at: -abs(offsets[at]))[:_SOURCES]
        shares: dict[int | str, float] = {at: offsets[at] for at in largest}
        shares[SOURCE_REST] = sum(value for at, value in offsets.items() if at not in largest)
        for at, value in shares.items():
            text, often = str(at), None
            if there := tokens.get((side, at)):
                (token, count), *_ = there.most_common(1)
                text, often = token_texts(run.reader.scope, [token])[0], count / there.total()
            rows.append({
                "head": str(batch.head), "side": side, "writer": str(other), "token": text, "frequency": often,
                "offset": at if isinstance(at, int) else None, "share": value / total,
            })  # fmt: skip
    return rows


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
