"""A logit followed down to the words: who wrote it, what these writers read, and who wrote there.

One walk, whatever it starts from: the relative attention logit of a head (`trace_graph`), which is
the sum of its query writers and the sum of its key writers, or the lead of an answer over its rival
(`qkscope.verbs.why.circuit`), which is the sum of all that is written at the last token. A node is a
(writer, token), however many ways lead to it, and the directions in which it is asked add up, so
that each is followed once, from the last layer down:

- a head splits over the tokens it read, with attention held, and over the writers of what stood
  there;
- an MLP splits by its gradient, norms frozen; what the gradient misses is rest;
- the embedding is a word of the prompt, where a way ends.

Edges of kind *value* into a node sum to it, with one edge of no source for all that is not shown.
Why a head looked at the token it brought most from is another logit (``of``), that token against
all others it saw but the first: edges of kind *query* and *key*.

At the keys a part is the key's less the mean of the others', and so it stays on the way down: what
the key read two tokens back stands against what each other key read two tokens back. The first
token, where attention rests, is the same token to all. What others read at a distance at which the
key has no token is rest.

Over many prompts (`sources_of`) a head's part ``x_c(p)·g = Σ_s a(p,s) v(s)·G`` is summed by the
offset ``s − p``; at the keys, what the right key read at an offset less the mean of what the others
read there. The first token stands apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.findings.head_rows import HeadRows
from qkscope.findings.prompt_trace import PromptTrace, Question
from qkscope.heads import BIAS, EMBEDDING, Head, Writer
from qkscope.linear.layer import PartLayer
from qkscope.linear.run import Answer, Direction, Run, Side
from qkscope.model.encode import token_texts

Row = dict[str, Any]
Kind = Literal["value", "query", "key"]
_AT_ONCE = 2**11  # tokens whose MLP is run again at once
_SLOTS = 256  # tokens whose attention is made at once
_SOURCES = 3  # tokens of a writer that are named, over many prompts
# of many prompts
FIRST = "(first token)"
SOURCE_REST = "(rest)"


class Graph(NamedTuple):
    """One prompt's graph.

    Attributes
    ----------
    nodes : ``head, id, side, writer, layer, position, token, value, share, rest``; the first is the
        root, and shares are of it. Rest: what the edges that are shown leave out; no value: met in
        another logit alone. Of a head that is followed ``towards, attention, look``: the token it
        brought most from, and its relative logit there.
    edges : ``head, source, target, kind`` (value, query, key), ``of, attention, value, share``. Of
        is the node whose attention logit shares are of, none where they are of the root. Those of
        one kind into a node sum to it; the one without a source is all that is not shown.
    prompt : ``head, position, token, attention``, of every token that the query sees.
    error : largest difference between a node and what it is the sum of, beside the largest term of
        its logit.
    """

    nodes: list[Row]
    edges: list[Row]
    prompt: list[Row]
    error: float

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The tables of a result."""
        return {"nodes": self.nodes, "graph": self.edges, "prompt": self.prompt}


def trace_graph(one: PromptTrace, depth: int = 2, width: int = 3, smallest: float = 0.05) -> Graph:
    """Follow one relative logit of one prompt down its writers; empty where the key has nothing to
    be compared with.

    Parameters
    ----------
    one : the prompt, in a run with every layer kept.
    depth : how often writers are followed to what they read; 0 names the writers alone.
    width : how many tokens and writers of a node are shown.
    smallest : share of the root below which nothing is shown.

    Examples
    --------
    >>> import qkscope as qk
    >>> from qkscope.findings.prompt_trace import PromptRun
    >>> one = PromptRun(qk.Scope.load("nano:mixed"), "hat: O jam: Z jam:").head("L2H3", key=6)
    >>> graph = trace_graph(one, depth=0, width=1)
    >>> [(row["side"], row["writer"], row["token"]) for row in graph.nodes]
    [(None, 'L2H3', ':'), ('query', 'M0', ':'), ('key', 'L1H0', 'Z')]
    """
    if not one.against:
        return Graph([], [], [], 0.0)
    walk = Walk(one.run, one.asked, str(one.head), width, smallest)
    root = walk.node(None, str(one.head), one.asked.query, one.total)
    root |= {"towards": one.key, "attention": float(one.attention[one.key])}
    for side, asked in one.directions.items():
        walk.follow(root, side, one.run.answer(asked), asked.slots, depth)
    return walk.graph(dict(enumerate(one.attention[: one.asked.query + 1].tolist())))


@dataclass
class _Asked:
    """A request to a node: its value so far, and directions on its output at some slots, one column
    per row.
    """

    value: float = 0.0
    slots: list[Int[Tensor, " p"]] = field(default_factory=list)
    along: list[Float[Tensor, "1 p e"]] = field(default_factory=list)
    level: int = 0

    def directions(self) -> tuple[Int[Tensor, " p"], Float[Tensor, "1 p e"]]:
        """Directions at each slot once."""
        slots, place = torch.cat(self.slots).unique(return_inverse=True)
        along = torch.cat(self.along, dim=1)
        return slots, along.new_zeros(1, len(slots), along.shape[-1]).index_add_(1, place, along)


class Walk:
    """A walk down one prompt's run: nodes and edges, as they are met.

    Parameters
    ----------
    run : of the prompt, with every token as a key and every layer kept.
    asked : the prompt.
    head : what the graph is of.
    width, smallest : as in `trace_graph`.
    deeper : how far the writers of a head's query and key are followed, where it is asked why it
        looked somewhere.
    """

    def __init__(
        self, run: Run, asked: Question, head: str, width: int, smallest: float, deeper: int = 0
    ) -> None:
        self.run = run
        self.asked = asked
        self.head = head
        self.width = width
        self.smallest = smallest
        self.deeper = deeper
        self.edges = list[Row]()
        self.error = 0.0
        self._nodes: dict[tuple[str | None, str, int], Row] = {}

    def node(self, side: str | None, writer: str, position: int, value: float | None = None) -> Row:
        """The row of a node, made where it is met first."""
        key = (side, writer, position)
        layer = None if writer in (EMBEDDING, self.head) else Writer.parse(writer).block
        if key not in self._nodes:
            self._nodes[key] = {
                "head": self.head, "id": len(self._nodes), "side": side, "writer": writer, "layer": layer,
                "position": position, "token": self.asked.tokens[position], "value": value, "share": None, "rest": None,
                "towards": None, "attention": None, "look": None,
            }  # fmt: skip
        return self._nodes[key]

    def graph(self, attention: Mapping[int, float | None]) -> Graph:
        """All that was met, nodes with their shares of the root, which is the first; attention is
        the query's.
        """
        rows = list(self._nodes.values())
        tokens = self.asked.tokens
        total = rows[0]["value"]
        for row in rows:
            row["share"] = row["value"] / total if total and row["value"] is not None else None
        prompt = [
            {"head": self.head, "position": i, "token": tokens[i], "attention": a}
            for i, a in attention.items()
        ]
        return Graph(rows, self.edges, prompt, self.error)

    def follow(
        self, root: Row, kind: Kind, answer: Answer, slots: Tensor, depth: int, look: bool = False
    ) -> None:
        """Split a logit among writers, and follow these down.

        Parameters
        ----------
        root : the node whose value, or whose attention logit, is split.
        kind : of its edges.
        answer, slots : what its writers say, and where.
        depth : levels below the first.
        look : whether it is the attention logit of the root, a head that was met; its own value by
            default.
        """
        logit = _Logit(self, root, kind, look, depth)
        logit.spread(root, logit.total, kind, self._said(answer, slots), 0)
        logit.expand()

    def _said(self, answer: Answer, slots: Tensor, token: int | None = None) -> Iterator[_Child]:
        """Every writer's value and the direction to follow it in, all slots together."""
        position = int(slots[0]) - 1 if token is None else token
        for name, values in answer.values.items():
            yield _Child(name, position, values[0], slots, partial(self._along, answer, name))

    def _along(self, answer: Answer, name: str) -> Float[Tensor, "1 p e"] | None:
        """The followed direction, expressed on a writer's output (for a head, before W_O)."""
        writer = Writer.parse(name)
        return (
            answer.parts.get(name)
            if writer.head is None
            else self.run.on_output(answer, writer.head)
        )

    def read(
        self, head: Head, position: int, asked: _Asked, least: float
    ) -> tuple[list[_Child], dict[int, float], int]:
        """The writers of what a head read at its main tokens, its attention to these, and the first
        of them.
        """
        run, (slots, along) = self.run, asked.directions()
        tokens = torch.arange(run.calls[head.layer].k.shape[2], device=slots.device)
        sums = torch.zeros(len(tokens) + 1, device=slots.device)

        def parts() -> Iterator[Float[Tensor, "p t"]]:  # of some slots at a time, by token
            for some, own in zip(slots.split(_SLOTS), along.split(_SLOTS, dim=1), strict=True):
                brought = (run.attention(head, some) * run.brought(head, own))[0]
                same = (
                    position + tokens - (some - 1)[:, None]
                )  # where the node's own token at this distance stands
                same = torch.where((same <= 0) | (same >= len(tokens)), -1, same).where(
                    tokens > 0, 0
                )
                sums.index_add_(0, same.flatten() + 1, brought.flatten())
                yield brought

        self.check(asked.value, parts())
        values = sums[1:].tolist()
        largest = sorted(range(len(values)), key=lambda i: -abs(values[i]))[: self.width]
        main = [i for i in largest if abs(values[i]) >= least]
        there = (
            torch.stack([slots - 1 + i - position if i else slots * 0 for i in main])
            if main
            else slots[None, :0]
        )
        near = (
            zip(slots.split(_SLOTS), there.clamp(0, len(tokens) - 1).T.split(_SLOTS), strict=True)
            if main
            else ()
        )
        weights = [run.attention(head, some)[0].gather(1, at) for some, at in near]
        children = list[_Child]()
        for number, token in enumerate(main):
            kept = (there[number] < len(tokens)) & (there[number] >= min(token, 1))
            turned = torch.cat(weights)[kept, number, None] * along[:, kept]
            onto = run.enter(head, "v", there[number, kept] + 1, turned)
            answer = run.answer(onto)
            self.check(values[token], answer.values.values())
            children += self._said(answer, onto.slots, token)
        own = run.attention(head, slots[slots - 1 == position])[0]
        return (
            children,
            {i: float(own[0, i]) if len(own) else 0.0 for i in main},
            next((i for i in main if i), 0),
        )

    def through(self, writer: Writer, position: int, asked: _Asked) -> list[_Child]:
        """The writers of what an MLP was given, by its gradient."""
        run, layer, (slots, along) = self.run, writer.layer, asked.directions()
        module = run.reader.blocks[layer].parts[writer.index[0] if writer.index else 0]
        # a part may mix tokens, so that all run, but those of a long prompt
        tokens = (
            slots - 1
            if len(self.asked.tokens) > _AT_ONCE
            else torch.arange(len(self.asked.tokens)).to(slots)
        )
        at = torch.searchsorted(tokens, slots - 1)
        wanted = along.new_zeros(1, len(tokens), along.shape[-1]).index_copy(1, at, along)
        some = zip(tokens.split(_AT_ONCE), wanted.split(_AT_ONCE, dim=1), strict=True)
        parts = zip(
            *(PartLayer(run, layer, own).pull(module, directions) for own, directions in some),
            strict=True,
        )
        x, z, missed = (torch.cat(values, dim=1)[:, at] for values in parts)
        children = [*self._said(run.answer(Direction(layer, slots, x, missed)), slots, position)]
        if layer in run.heads:
            names = run.reader.head_names(layer)
            gave = run.heads[layer][:, slots].unflatten(-1, (len(names), -1))
            along_z = z.unflatten(-1, (len(names), -1))
            for i, name in enumerate(names):
                said = (gave * along_z)[0, :, i].sum(-1)
                children.append(_Child(name, position, said, slots, partial(along_z.select, 2, i)))
        self.check(asked.value, [child.values.sum() for child in children])
        return children

    def why(self, row: Row, head: Head, key: int) -> None:
        """Follow why a head looked at a token, once for each; the first token is left out (it is a
        sink).
        """
        seen = self.run.seen(head, row["position"])
        query = row["position"]
        if key > 0 and {*seen} - {0, key} and key in seen and row["look"] is None:
            one = PromptTrace(self.run, replace(self.asked, query=query), head, key)
            row |= {"look": one.total, "towards": key, "attention": float(one.attention[key])}
            for kind, asked in one.directions.items():
                self.follow(row, kind, self.run.answer(asked), asked.slots, self.deeper, look=True)

    def check(self, value: float, terms: Iterable[Tensor]) -> None:
        """Note what the terms of a value miss of it, beside the largest of them."""
        sums, sizes = zip(
            *((float(some.double().sum()), float(some.abs().max())) for some in terms), strict=True
        )
        largest = max(sizes)
        missed = abs(sum(sums) - value)
        self.error = max(self.error, missed / largest if largest > 0 else missed)


class _Child(NamedTuple):
    """A writer's value at the slots of one token, and the direction on its output there."""

    writer: str
    position: int
    values: Float[Tensor, " p"]
    slots: Int[Tensor, " p"]
    along: Callable[[], Float[Tensor, "1 p e"] | None]


class _Logit:
    """One logit that is followed down a walk: its own values of nodes, each followed when all that
    ask it are known.
    """

    def __init__(self, walk: Walk, root: Row, kind: Kind, look: bool, depth: int) -> None:
        self.walk = walk
        self.depth = depth
        self.of = root if look else None
        self.total = root["look" if look else "value"]
        self.side = root["side"] if look or kind == "value" else kind
        self.pending: dict[tuple[Writer, int], _Asked] = {}
        self.least = walk.smallest * abs(self.total)

    def spread(
        self,
        parent: Row,
        value: float,
        kind: Kind,
        children: Iterable[_Child],
        level: int,
        attention: Any = None,
    ) -> None:
        """Add the edges of a node's main writers, at most `width` of each token, and one of all the
        rest.
        """
        by_token: dict[int, list[tuple[float, _Child]]] = {}
        for child in children:
            by_token.setdefault(child.position, []).append((float(child.values.sum()), child))
        largest = [
            sorted(own, key=lambda pair: -abs(pair[0]))[: self.walk.width]
            for own in by_token.values()
        ]
        shown = [(said, child) for own in largest for said, child in own if abs(said) >= self.least]
        shown = [(said, child) for said, child in shown if child.writer != BIAS]
        for said, child in shown:
            node = self.walk.node(self.side, child.writer, child.position)
            asked = self.pending.setdefault(
                (Writer.parse(child.writer), child.position), _Asked(level=level)
            )
            asked.value = asked.value + said
            asked.level = min(asked.level, level)
            if self.of is None:
                node["value"] = (node["value"] or 0.0) + said
            if (along := child.along()) is not None:
                asked.slots.append(child.slots)
                asked.along.append(along)
            self._edge(node["id"], parent, kind, said, (attention or {}).get(child.position))
        rest = value - sum(said for said, _ in shown)
        self._edge(None, parent, kind, rest)
        if self.of is None and kind == "value":
            parent["rest"] = rest

    def _edge(
        self,
        source: int | None,
        parent: Row,
        kind: Kind,
        value: float,
        attention: float | None = None,
    ) -> None:
        self.walk.edges.append({
            "head": self.walk.head, "source": source, "target": parent["id"], "kind": kind,
            "of": None if self.of is None else self.of["id"], "attention": attention, "value": value,
            "share": value / self.total if self.total else None,
        })  # fmt: skip

    def expand(self) -> None:
        """Follow nodes from the last layer down, so that all that ask one are known before it is
        asked.
        """
        while self.pending:
            writer, position = max(self.pending)
            asked = self.pending.pop((writer, position))
            row = self.walk.node(self.side, str(writer), position)
            if asked.level >= self.depth or not asked.along or abs(asked.value) < self.least:
                continue
            attention = None
            key = 0
            if writer.head is None:
                children = self.walk.through(writer, position, asked)
            else:
                children, attention, key = self.walk.read(writer.head, position, asked, self.least)
            self.spread(row, asked.value, "value", children, asked.level + 1, attention)
            if writer.head is not None and self.of is None:
                self.walk.why(row, writer.head, key)


# ---------------------------------------------------------------------- over many prompts


def sources_of(
    batches: Iterable[HeadRows], writers: Mapping[Side, Sequence[str]]
) -> list[dict[str, Any]]:
    """Which tokens a head's writers read, over many prompts.

    Parameters
    ----------
    batches : of the head, with the layers of the writers kept.
    writers : by side, whose sources are wanted; those that are no heads have none.

    Returns
    -------
    list of dict
        ``head, side, writer, token, frequency, offset, share``: the share is of the logit, so that
        a writer's rows sum to its own share; the token is the most frequent one at that offset from
        the query or from the right key, and stands there in this fraction of the prompts that have
        one. What the first token gave and the rest have no offset.
    """
    named = {
        side: [other for name in names if (other := Writer.parse(name).head)]
        for side, names in writers.items()
    }
    total = 0.0
    sums = defaultdict[Any, Any](Counter)
    tokens = defaultdict[Any, Counter[int]](Counter)
    for batch in batches:
        run = batch.run
        total += float(batch.logit().double().sum())
        ids = run.inputs["input_ids"][run.row]
        mask = run.inputs["attention_mask"][run.row]
        right = run.columns[:, 1:].gather(1, batch.signs.argmax(dim=1, keepdim=True))[:, 0]
        for side, direction in batch.directions.items():
            answer = run.answer(direction)
            for other in named[side]:
                brought = run.attention(other, direction.slots) * run.brought(
                    other, run.on_output(answer, other)
                )
                sums[side, other].update(
                    _by_offset(brought, run.columns[:, direction.slots], mask.argmax(dim=1))
                )
            places = (run.columns[:, 0] if side == "query" else right).tolist()
            for (row, column), token in zip(
                mask.nonzero().tolist(), ids[mask.bool()].tolist(), strict=True
            ):
                tokens[side, column - places[row]][token] += 1  # by their distance
    rows = []
    for (side, other), offsets in sums.items():
        largest = sorted(offsets, key=lambda at: -abs(offsets[at]))[:_SOURCES]
        shares: dict[int | str, float] = {at: offsets[at] for at in largest}
        shares[SOURCE_REST] = sum(value for at, value in offsets.items() if at not in largest)
        for at, value in shares.items():
            text = str(at)
            often = None
            if there := tokens.get((side, at)):
                (token, count), *_ = there.most_common(1)
                text = token_texts(run.reader.scope, [token])[0]
                often = count / there.total()
            rows.append({
                "head": str(batch.head), "side": side, "writer": str(other), "token": text, "frequency": often,
                "offset": at if isinstance(at, int) else None, "share": value / total,
            })  # fmt: skip
    return rows


def _by_offset(
    brought: Float[Tensor, "n p t"], columns: Tensor, first: Tensor
) -> dict[int | str, float]:
    """Sums by the distance from a slot to a token, and of the first tokens."""
    length = brought.shape[-1]
    tokens = torch.arange(length, device=brought.device)
    offsets = tokens - columns[..., None] + length
    offsets = torch.where(tokens == first[:, None, None], 2 * length, offsets)
    sums = torch.zeros(2 * length + 1, dtype=torch.float64, device=brought.device)
    sums.index_add_(0, offsets.flatten(), brought.double().flatten())
    *others, at_first = sums.tolist()
    return {FIRST: at_first} | {i - length: value for i, value in enumerate(others) if value}
