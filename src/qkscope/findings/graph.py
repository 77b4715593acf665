"""Graph of a logit down to the words: who wrote it, what these writers read, who wrote there.

One walk, whatever it starts from: the relative attention logit of a head (`trace_graph`), which is
the sum of its query writers and the sum of its key writers, or the lead of an answer over its rival
(`qkscope.verbs.why.circuit`), which is the sum of all that is written at the last token. A node is
a (writer, token), however many ways lead to it, and the directions in which it is asked add up, so
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
from qkscope.findings.prompt_trace import AskedPrompt, PromptTrace
from qkscope.heads import BIAS, EMBEDDING, Head, Side, Writer
from qkscope.linear.layer import PartLayer
from qkscope.linear.run import Answer, Direction, Run
from qkscope.model.encode import token_texts

Row = dict[str, Any]
#: What an edge is part of: what a writer left, or the query or key of why it looked somewhere.
Kind = Literal["value", "query", "key"]
_AT_ONCE = 2**11  # tokens whose MLP is run again at once
_SLOTS = 256  # tokens whose attention is made at once
_SOURCES = 3  # tokens of a writer that are named, over many prompts
# what stands for the first tokens, and for all that is not named, over many prompts
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
        """Tables of a result, by name."""
        return {"nodes": self.nodes, "graph": self.edges, "prompt": self.prompt}


def trace_graph(one: PromptTrace, depth: int = 2, width: int = 3, smallest: float = 0.05) -> Graph:
    """Follow one relative logit of one prompt down its writers.

    The graph is empty where the key has nothing to be compared with.

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
    for side, direction in one.directions.items():
        walk.follow(root, side, one.run.answer(direction), direction.slots, depth)
    attention = one.attention[: one.asked.query + 1].tolist()
    return walk.graph(dict(enumerate(attention)))


@dataclass
class _Request:
    """A request to a node: its value so far, and directions on its output at some slots.

    Slots and directions are those of all readers that ask the node, in turn.
    """

    value: float = 0.0
    slots: list[Int[Tensor, " p"]] = field(default_factory=list)
    along: list[Float[Tensor, "1 p e"]] = field(default_factory=list)
    level: int = 0

    def directions(self) -> tuple[Int[Tensor, " p"], Float[Tensor, "1 p e"]]:
        """Slots, each once, with the sum of the directions there."""
        slots, place = torch.cat(self.slots).unique(return_inverse=True)
        along = torch.cat(self.along, dim=1)
        sums = along.new_zeros(1, len(slots), along.shape[-1])
        return slots, sums.index_add_(1, place, along)


class _Child(NamedTuple):
    """A writer's value at the slots of one token, and the direction on its output there."""

    writer: str
    position: int
    values: Float[Tensor, " p"]
    slots: Int[Tensor, " p"]
    along: Callable[[], Float[Tensor, "1 p e"] | None]


class _HeadRead(NamedTuple):
    """What a head read: writers at its main tokens, its attention there, the first of these tokens.

    The first is 0 where the head brought most from the first token alone.
    """

    children: list[_Child]
    attention: dict[int, float]
    towards: int


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
        self, run: Run, asked: AskedPrompt, head: str, width: int, smallest: float, deeper: int = 0
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
        """Row of a node, made where the node is met first."""
        key = (side, writer, position)
        if key not in self._nodes:
            self._nodes[key] = self._new_node(side, writer, position, value)
        return self._nodes[key]

    def _new_node(
        self, side: str | None, writer: str, position: int, value: float | None = None
    ) -> Row:
        """Row of a node that was not met before."""
        layer = None
        if writer not in (EMBEDDING, self.head):
            layer = Writer.parse(writer).block
        return {
            "head": self.head,
            "id": len(self._nodes),
            "side": side,
            "writer": writer,
            "layer": layer,
            "position": position,
            "token": self.asked.tokens[position],
            "value": value,
            "share": None,
            "rest": None,
            "towards": None,
            "attention": None,
            "look": None,
        }

    def graph(self, attention: Mapping[int, float | None]) -> Graph:
        """All nodes and edges that were met, with shares of the root, which is the first node.

        Parameters
        ----------
        attention : of the query, by token.
        """
        rows = list(self._nodes.values())
        total = rows[0]["value"]
        for row in rows:
            if total and row["value"] is not None:
                row["share"] = row["value"] / total
        prompt = list[Row]()
        for position, weight in attention.items():
            token = self.asked.tokens[position]
            about = {"head": self.head, "position": position, "token": token}
            prompt.append({**about, "attention": weight})
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
        logit.spread(root, logit.total, kind, self._writers(answer, slots), 0)
        logit.expand()

    def _writers(self, answer: Answer, slots: Tensor, token: int | None = None) -> Iterator[_Child]:
        """Every writer's value and the direction to follow it in, all slots together."""
        position = int(slots[0]) - 1 if token is None else token
        for name, values in answer.values.items():
            along = partial(self._along, answer, name)
            yield _Child(name, position, values[0], slots, along)

    def _along(self, answer: Answer, name: str) -> Float[Tensor, "1 p e"] | None:
        """The followed direction, expressed on a writer's output (for a head, before W_O)."""
        head = Writer.parse(name).head
        if head is None:
            return answer.parts.get(name)
        return self.run.on_output(answer, head)

    def read(self, head: Head, position: int, request: _Request, least: float) -> _HeadRead:
        """Read of a head at its main tokens: those that gave at least so much to its value."""
        slots, along = request.directions()
        given = self._given_by_token(head, position, request)
        values = given.tolist()
        by_size = sorted(range(len(values)), key=lambda token: -abs(values[token]))
        main = [token for token in by_size[: self.width] if abs(values[token]) >= least]
        towards = next((token for token in main if token > 0), 0)
        if not main:
            return _HeadRead([], {}, towards)
        children = list[_Child]()
        # of every slot the token at the same distance; the first token is the same to all
        same_distance = []
        for token in main:
            shift = token - position
            same_distance.append(slots - 1 + shift if token else slots * 0)
        at = torch.stack(same_distance)
        last = len(values) - 1
        weights = self._attention_at(head, slots, at.clamp(0, last))
        for there, weight, token in zip(at, weights, main, strict=True):
            kept = (there <= last) & (there >= min(token, 1))
            turned = weight[kept, None] * along[:, kept]
            onto = self.run.enter(head, "v", there[kept] + 1, turned)
            answer = self.run.answer(onto)
            self.check(values[token], answer.values.values())
            children += self._writers(answer, onto.slots, token)
        return _HeadRead(children, self._attention_of(head, slots, position, main), towards)

    def _attention_of(
        self, head: Head, slots: Int[Tensor, " p"], position: int, tokens: Sequence[int]
    ) -> dict[int, float]:
        """A head's attention from a position to some tokens; 0 where it is not among the slots."""
        at_position = slots[slots - 1 == position]
        rows = self.run.attention(head, at_position)[0]
        if not len(rows):
            return dict.fromkeys(tokens, 0.0)
        return {token: float(rows[0, token]) for token in tokens}

    def _attention_at(
        self, head: Head, slots: Int[Tensor, " p"], tokens: Int[Tensor, "m p"]
    ) -> Float[Tensor, "m p"]:
        """Attention from every slot to one token for each row, some slots at a time."""
        weights = []
        for some, at in zip(slots.split(_SLOTS), tokens.T.split(_SLOTS), strict=True):
            attention = self.run.attention(head, some)[0]
            weights.append(attention.gather(1, at))
        return torch.cat(weights).T

    def _given_by_token(self, head: Head, position: int, request: _Request) -> Float[Tensor, " t"]:
        """Value that a head brought from each token, as the node's own position sees it.

        What other slots read stands at the node's token at the same distance; the first token is
        the first to all, and what has no such token counts nowhere.
        """
        slots, along = request.directions()
        length = self.run.calls[head.layer].k.shape[2]
        tokens = torch.arange(length, device=slots.device)
        sums = torch.zeros(length + 1, device=slots.device)  # in front, what has no such token

        def brought_from() -> Iterator[Float[Tensor, "p t"]]:
            pieces = zip(slots.split(_SLOTS), along.split(_SLOTS, dim=1), strict=True)
            for some, directions in pieces:
                weights = self.run.attention(head, some)
                brought = (weights * self.run.brought(head, directions))[0]
                same = position + tokens - (some - 1)[:, None]
                same = torch.where((same <= 0) | (same >= length), -1, same)
                same = same.where(tokens > 0, 0)
                sums.index_add_(0, same.flatten() + 1, brought.flatten())
                yield brought

        self.check(request.value, brought_from())
        return sums[1:]

    def through(self, writer: Writer, position: int, request: _Request) -> list[_Child]:
        """The writers of what an MLP was given, by its gradient."""
        run = self.run
        layer = writer.layer
        slots, along = request.directions()
        part = writer.index[0] if writer.index else 0
        module = run.reader.blocks[layer].parts[part]
        # a part may mix tokens, so that all run, but those of a long prompt
        tokens = torch.arange(len(self.asked.tokens)).to(slots)
        if len(tokens) > _AT_ONCE:
            tokens = slots - 1
        places = torch.searchsorted(tokens, slots - 1)
        nothing = along.new_zeros(1, len(tokens), along.shape[-1])
        wanted = nothing.index_copy(1, places, along)
        on_stream = []
        on_heads = []
        missed = []
        for some, directions in zip(
            tokens.split(_AT_ONCE), wanted.split(_AT_ONCE, dim=1), strict=True
        ):
            stream, heads, miss = PartLayer(run, layer, some).pull(module, directions)
            on_stream.append(stream)
            on_heads.append(heads)
            missed.append(miss)
        stream_direction = torch.cat(on_stream, dim=1)[:, places]
        missed_there = torch.cat(missed, dim=1)[:, places]
        answer = run.answer(Direction(layer, slots, stream_direction, missed_there))
        children = [*self._writers(answer, slots, position)]
        if layer in run.heads:
            heads_direction = torch.cat(on_heads, dim=1)[:, places]
            children += self._heads_of_block(layer, position, slots, heads_direction)
        self.check(request.value, [child.values.sum() for child in children])
        return children

    def _heads_of_block(
        self, layer: int, position: int, slots: Int[Tensor, " p"], along: Float[Tensor, "1 p z"]
    ) -> Iterator[_Child]:
        """The heads of the MLP's own block, which it reads beside the stream."""
        names = self.run.reader.head_names(layer)
        by_head = (len(names), -1)
        outputs = self.run.heads[layer][:, slots].unflatten(-1, by_head)
        directions = along.unflatten(-1, by_head)
        for i, name in enumerate(names):
            values = (outputs * directions)[0, :, i].sum(-1)
            along_head = partial(directions.select, 2, i)
            yield _Child(name, position, values, slots, along_head)

    def why(self, row: Row, head: Head, key: int) -> None:
        """Follow why a head looked at a token, once for each head.

        The first token is left out: it is a sink.
        """
        query = row["position"]
        seen = self.run.seen(head, query)
        compared = set(seen) - {0, key}
        was_followed = row["look"] is not None
        if key == 0 or key not in seen or not compared or was_followed:
            return
        one = PromptTrace(self.run, replace(self.asked, query=query), head, key)
        row |= {"look": one.total, "towards": key, "attention": float(one.attention[key])}
        for kind, direction in one.directions.items():
            answer = self.run.answer(direction)
            self.follow(row, kind, answer, direction.slots, self.deeper, look=True)

    def check(self, value: float, terms: Iterable[Tensor]) -> None:
        """Note what the terms of a value miss of it, beside the largest of them."""
        total = 0.0
        largest = 0.0
        for term in terms:
            total += float(term.double().sum())
            largest = max(largest, float(term.abs().max()))
        missed = abs(total - value)
        if largest > 0:
            missed /= largest
        self.error = max(self.error, missed)


class _Logit:
    """One logit that is followed down a walk, with its own values of nodes.

    A node is followed when all that ask it are known.
    """

    def __init__(self, walk: Walk, root: Row, kind: Kind, look: bool, depth: int) -> None:
        self.walk = walk
        self.depth = depth
        self.of = root if look else None
        self.total = root["look" if look else "value"]
        self.side = root["side"] if look or kind == "value" else kind
        self.pending: dict[tuple[Writer, int], _Request] = {}
        self.least = walk.smallest * abs(self.total)

    def spread(
        self,
        parent: Row,
        value: float,
        kind: Kind,
        children: Iterable[_Child],
        level: int,
        attention: Mapping[int, float] | None = None,
    ) -> None:
        """Add the edges of a node's main writers, `width` a token at most, and one of the rest."""
        shown = self._largest(children)
        for child, given in shown:
            node = self.walk.node(self.side, child.writer, child.position)
            self._ask(child, given, level)
            if self.of is None:
                node["value"] = (node["value"] or 0.0) + given
            looked = None if attention is None else attention.get(child.position)
            self._edge(node["id"], parent, kind, given, looked)
        rest = value - sum(given for _, given in shown)
        self._edge(None, parent, kind, rest)
        if self.of is None and kind == "value":
            parent["rest"] = rest

    def _largest(self, children: Iterable[_Child]) -> list[tuple[_Child, float]]:
        """The main writers at each token, biases aside, with what they give."""
        by_token = defaultdict[int, list[tuple[_Child, float]]](list)
        for child in children:
            given = float(child.values.sum())
            by_token[child.position].append((child, given))
        shown = []
        for writers in by_token.values():
            writers.sort(key=lambda pair: -abs(pair[1]))
            for child, given in writers[: self.walk.width]:
                if abs(given) >= self.least and child.writer != BIAS:
                    shown.append((child, given))
        return shown

    def _ask(self, child: _Child, given: float, level: int) -> None:
        """Add a reader's request to those of the same writer at the same token."""
        key = (Writer.parse(child.writer), child.position)
        request = self.pending.setdefault(key, _Request(level=level))
        request.value += given
        request.level = min(request.level, level)
        along = child.along()
        if along is not None:
            request.slots.append(child.slots)
            request.along.append(along)

    def _edge(
        self,
        source: int | None,
        parent: Row,
        kind: Kind,
        value: float,
        attention: float | None = None,
    ) -> None:
        edge = {
            "head": self.walk.head,
            "source": source,
            "target": parent["id"],
            "kind": kind,
            "of": None if self.of is None else self.of["id"],
            "attention": attention,
            "value": value,
            "share": value / self.total if self.total else None,
        }
        self.walk.edges.append(edge)

    def expand(self) -> None:
        """Follow nodes from the last layer down, so that all readers of a node come before it."""
        while self.pending:
            writer, position = max(self.pending)
            request = self.pending.pop((writer, position))
            is_small = abs(request.value) < self.least
            if request.level >= self.depth or not request.along or is_small:
                continue
            row = self.walk.node(self.side, str(writer), position)
            level = request.level + 1
            if writer.head is None:
                children = self.walk.through(writer, position, request)
                self.spread(row, request.value, "value", children, level)
                continue
            read = self.walk.read(writer.head, position, request, self.least)
            self.spread(row, request.value, "value", read.children, level, read.attention)
            if self.of is None:
                self.walk.why(row, writer.head, read.towards)


# ---------------------------------------------------------------------- over many prompts


def _counters() -> dict[Any, Counter[Any]]:
    """An empty counter for every key."""
    return defaultdict(Counter)


@dataclass
class _Sources:
    """Sources of one head's writers: what they read, summed over prompts.

    Attributes
    ----------
    logit : the sum of all relative logits.
    given : by side and writer, and by offset, what came from there.
    tokens : by side and offset, which tokens stand there, and how often.
    """

    logit: float = 0.0
    given: dict[tuple[Side, Head], Counter[int | str]] = field(default_factory=_counters)
    tokens: dict[tuple[Side, int | str], Counter[int]] = field(default_factory=_counters)

    def add(self, batch: HeadRows, heads: Mapping[Side, Sequence[Head]]) -> None:
        """Add what some heads read in a batch of prompts."""
        run = batch.run
        self.logit += float(batch.logit().double().sum())
        first = run.inputs["attention_mask"][run.row].argmax(dim=1)
        query = run.columns[:, 0]
        keys = run.columns[:, 1:]
        first_right = batch.signs.argmax(dim=1, keepdim=True)
        right = keys.gather(1, first_right)[:, 0]
        for side, direction in batch.directions.items():
            answer = run.answer(direction)
            columns = run.columns[:, direction.slots]
            for head in heads[side]:
                brought = run.brought(head, run.on_output(answer, head))
                read = run.attention(head, direction.slots) * brought
                self.given[side, head].update(_by_offset(read, columns, first))
            self._count_tokens(run, side, query if side == "query" else right)

    def _count_tokens(self, run: Run, side: Side, places: Int[Tensor, " n"]) -> None:
        """Count the tokens of each prompt by their distance from a side's place in it."""
        ids = run.inputs["input_ids"][run.row]
        mask = run.inputs["attention_mask"][run.row]
        from_place = places.tolist()
        positions = mask.nonzero().tolist()
        tokens = ids[mask.bool()].tolist()
        for (row, column), token in zip(positions, tokens, strict=True):
            offset = column - from_place[row]
            self.tokens[side, offset][token] += 1

    def shares(self, side: Side, head: Head) -> dict[int | str, float]:
        """Shares of the logit by offset, the largest first; the rest as one."""
        given = self.given[side, head]
        by_size = sorted(given, key=lambda at: -abs(given[at]))
        shares: dict[int | str, float] = {at: given[at] for at in by_size[:_SOURCES]}
        rest = [value for at, value in given.items() if at not in shares]
        shares[SOURCE_REST] = sum(rest)
        return shares


def sources_of(
    batches: Iterable[HeadRows], writers: Mapping[Side, Sequence[str]]
) -> list[dict[str, Any]]:
    """Table of the tokens that a head's writers read, over many prompts.

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
    heads = dict[Side, list[Head]]()
    for side, names in writers.items():
        parsed = [Writer.parse(name).head for name in names]
        heads[side] = [head for head in parsed if head is not None]
    sources = _Sources()
    for batch in batches:
        sources.add(batch, heads)
    scope = batch.run.reader.scope
    rows = []
    for side, writer in sources.given:
        for at, value in sources.shares(side, writer).items():
            text = str(at)
            often = None
            tokens = sources.tokens.get((side, at))
            if tokens:
                ((token, count),) = tokens.most_common(1)
                (text,) = token_texts(scope, [token])
                often = count / tokens.total()
            row = {
                "head": str(batch.head),
                "side": side,
                "writer": str(writer),
                "token": text,
                "frequency": often,
                "offset": at if isinstance(at, int) else None,
                "share": value / sources.logit,
            }
            rows.append(row)
    return rows


def _by_offset(
    brought: Float[Tensor, "n p t"], columns: Tensor, first: Tensor
) -> dict[int | str, float]:
    """Sums by the distance from a slot to a token, and of the first tokens."""
    length = brought.shape[-1]
    tokens = torch.arange(length, device=brought.device)
    offsets = tokens - columns[..., None] + length
    is_first = tokens == first[:, None, None]
    offsets = torch.where(is_first, 2 * length, offsets)
    sums = torch.zeros(2 * length + 1, dtype=torch.float64, device=brought.device)
    sums.index_add_(0, offsets.flatten(), brought.double().flatten())
    *others, at_first = sums.tolist()
    by_offset: dict[int | str, float] = {FIRST: at_first}
    for i, value in enumerate(others):
        if value:
            by_offset[i - length] = value
    return by_offset
