"""A prompt run again with other tokens in it, or other rows of attention: what precedes the change
is computed once.

A change at one token leaves those before it as they were, and what is read at one token does not
depend on those after it. So of each prompt only the tokens from its change to its last reader run,
among keys and values of the unchanged prompt (`qkscope.model.prefix`); all changes of a batch run
together, wherever they stand, up to the last layer that is read. Tokens in between that do not run
are held: others read there what they read in the unchanged prompt. Where a changed prompt run in
this way is not the changed prompt (its mask depends on the words, it has a memory besides its keys),
whole prompts run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qkscope import BadInput, Scope
from qkscope.attention import AttentionRows, soft
from qkscope.changes import Hidden, Row, Words
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.recording import last_alone
from qkscope.linear.run import Run
from qkscope.model.capture_types import Places
from qkscope.model.prefix import ChangedPrompts, TokensAlone, WholePrompts, prompt_of, runs_alone
from qkscope.model.tap import Call, Stop
from qkscope.rerun.later_layers import LaterLayers, layers_of, noted
from qkscope.rerun.reads import LayerReads, Read, Reruns, layer_reads, with_words

_AT_ONCE = 128  # prompts that run together to their logits
# tokens that run together: on a CPU more are no faster, and less alike
_TOKENS = {"cpu": 2**8}
_MORE_TOKENS = 2**12
_BAND = 80  # prompts of one token that run together: with fewer, reading weights takes the time


class _Place(NamedTuple):
    """A row of attention in a batch."""

    prompt: int
    head: int
    query: int


@dataclass(frozen=True)
class _Line:
    """A changed prompt whose tokens run alone.

    Attributes
    ----------
    number : of the prompt.
    ids : of all its tokens.
    places : of those that run.
    changes : of its rows of attention.
    """

    number: int
    ids: Int[Tensor, " t"]
    places: list[int]
    changes: Sequence[Row | Hidden]

    @property
    def apart(self) -> int:
        """The place from which on its tokens are no other prompt's, whatever they are."""
        queries = [change.query for change in self.changes if change.query is not None]
        return min(queries, default=len(self.ids))

    @cached_property
    def tokens(self) -> list[tuple[int, int]]:
        """Place and id of the tokens that run, and may be those of other prompts, too."""
        ids = self.ids.tolist()
        apart = self.apart
        return [(place, ids[place]) for place in self.places if place < apart]


def _shared(lines: Sequence[_Line], room: int, most: int | None) -> Iterator[list[_Line]]:
    """Batches of prompts that run together, those side by side that begin with the same tokens.

    Parameters
    ----------
    lines : all prompts.
    room : tokens that run together; what several prompts share counts once.
    most : prompts that run together, if that is limited.
    """
    batch = list[_Line]()
    used = 0
    for line in sorted(lines, key=lambda line: line.tokens):
        before = batch[-1].tokens if batch else []
        own = len(line.places) - _common(line.tokens, before)
        if batch and (used + own > room or len(batch) == most):
            yield batch
            batch = []
            used = 0
            own = len(line.places)
        batch.append(line)
        used += own
    if batch:
        yield batch


def _common(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> int:
    """How many tokens two prompts begin with in common."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def rerun_tokens(
    base: Again,
    changes: Sequence[Sequence[Words | Row | Hidden]],
    reads: Sequence[Read],
    end: int,
    logits: bool,
) -> Reruns:
    """Run what stands behind each tuple of changes, up to a token that is read."""
    rows = [[x for x in own if isinstance(x, Row | Hidden)] for own in changes]
    is_many = len(changes) > _BAND
    if is_many and _of_last_token(changes, end) and base.runs_alone(end):
        return _rerun_last_token(base, rows, reads, end, logits)
    ids = torch.stack([with_words(base.ids, own) for own in changes]).cpu()
    runs = base.behind(ids, torch.full((len(ids),), end))
    for number, own in enumerate(rows):
        for change in own:
            assert change.query is not None
            runs[number, change.query : end + 1] = True
    return base.run(ids, runs, reads, rows=rows, logits=logits)


def _of_last_token(changes: Sequence[Sequence[Words | Row | Hidden]], end: int) -> bool:
    """Whether all changes are of attention at the last token that is read."""
    for own in changes:
        for change in own:
            if isinstance(change, Words) or change.query != end:
                return False
    return True


def _rerun_last_token(
    base: Again,
    rows: Sequence[Sequence[Row | Hidden]],
    reads: Sequence[Read],
    end: int,
    logits: bool,
) -> Reruns:
    """Run the last token alone, each time from a layer near the first that its changes touch.

    In the layers before it is what it was, so that these run once.
    """
    token = torch.zeros(1, len(base.ids), dtype=torch.bool)
    token[0, end] = True
    ids = base.ids[None].cpu()
    with noted(layers_of(base.scope)) as left:
        plain = base.run(ids, token, logits=True).logits
    assert plain is not None
    shown = list[Reruns]()
    order = list[int]()
    for first, numbers in _bands(rows):
        later = LaterLayers(base.scope, first)
        if first:
            later.begin(left)

            def again(later: LaterLayers = later) -> Tensor:
                after = base.run(ids, token, logits=True, later=later).logits
                assert after is not None
                return after

            later.check(plain, again)
        own = [rows[number] for number in numbers]
        count = len(own)
        copies = ids.expand(count, -1)
        tokens = token.expand(count, -1)
        shown.append(base.run(copies, tokens, reads, rows=own, logits=logits, later=later))
        order += numbers
    attention = _put_back([some.attention for some in shown], order)
    if not logits:
        return Reruns(attention, None)
    after = [some.logits for some in shown if some.logits is not None]
    return Reruns(attention, _put_back(after, order))


def _put_back(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Join rows of several batches, in the order of their numbers."""
    every = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if all(before < after for before, after in pairwise(order)):  # next-token logits are large
        return every
    back = torch.tensor(order).argsort()
    return every[back.to(every.device)]


def _bands(rows: Sequence[Sequence[Row | Hidden]]) -> Iterator[tuple[int, list[int]]]:
    """Prompts that begin near one layer, and that layer: where more follow, enough to be quick."""
    firsts = [min((change.head.layer for change in own), default=0) for own in rows]
    order = sorted(range(len(rows)), key=lambda number: firsts[number])
    band = list[int]()
    for number in order:
        if len(band) >= _BAND and firsts[number] > firsts[band[-1]]:
            yield firsts[band[0]], band
            band = []
        band.append(number)
    if band:
        yield firsts[band[0]], band


class Again:
    """A prompt that was run, ready to be run again with other tokens, or other rows of attention.

    Parameters
    ----------
    scope : the model.
    inputs : the prompt, alone.
    calls : by layer, its attention calls in that run.

    Attributes
    ----------
    is_grown : whether tokens are put into the prompt, so that those behind them move.
    """

    def __init__(
        self, scope: Scope, inputs: Mapping[str, Tensor], calls: Mapping[int, Call]
    ) -> None:
        self.scope = scope
        self.inputs = dict(inputs)
        self.calls = calls
        self.ids: Int[Tensor, " t"] = self.inputs["input_ids"][0]
        self.is_grown = False
        for layer, call in calls.items():
            if call.k.shape[2] != len(self.ids):
                kind = scope.model.config.model_type
                count = call.k.shape[2]
                keys = f"layer {layer} has {count} keys for {len(self.ids)} tokens"
                raise BadInput(
                    f"{kind} attends to keys that are no tokens ({keys}), so that prompts are not run "
                    "again with changes here: take another model."
                )

    @classmethod
    @torch.no_grad()
    def of(cls, scope: Scope, ids: Int[Tensor, " t"], last: int | None = None) -> Again:
        """Run a prompt of these tokens and keep its attention calls; up to a layer, if one is
        named.
        """
        inputs = prompt_of(scope, ids[None])
        calls = dict[int, Call]()

        def keep(call: Call) -> None:
            calls[call.layer] = call if last is None else last_alone(call)
            if call.layer == last:
                raise Stop

        scope.watch(inputs, keep)
        return cls(scope, inputs, calls)

    def standing(self) -> AbstractContextManager[None]:
        """Let tokens that a ``with`` block names stay where they stand in this prompt, unless
        tokens are put into it.
        """
        return nullcontext() if self.is_grown else self.scope.rerunning(self.ids)

    # ------------------------------------------------------------------ rows of attention changed

    def row(self, query: int, head: Head) -> AttentionRows:
        """A head's row of attention at a token."""
        prompt = torch.tensor([0])
        return self.calls[head.layer].rows(head.index, prompt, torch.tensor([query]))

    def hidden(self, query: int, edges: Sequence[Read]) -> Float[Tensor, "n v"]:
        """Next-token logits where each of these heads, one at a time, may not look at a key from
        this token.
        """
        changes = [[Hidden(head, key, query)] for head, key in edges]
        logits = rerun_tokens(self, changes, [], query, logits=True).logits
        assert logits is not None
        return logits.cpu()

    # ------------------------------------------------------------------ which tokens run

    def runs_alone(self, end: int | None = None) -> bool:
        """Whether tokens up to a place may run without those before them; by default, to the last."""
        if end is None:
            end = len(self.ids) - 1
        return runs_alone(self.scope, self.ids, self.calls, end)

    def behind(self, ids: Int[Tensor, "b t"], ends: Int[Tensor, " b"]) -> Bool[Tensor, "b t"]:
        """Tokens of changed prompts from the first change to the last that is read, which runs anyway."""
        differs = ids != self.ids.cpu()
        places = torch.arange(ids.shape[1])
        is_behind = differs.cumsum(1) > 0
        last = ends[:, None]
        return (is_behind & (places <= last)) | (places == last)

    def _whole(self, ids: Int[Tensor, "b t"], ends: Int[Tensor, " b"]) -> WholePrompts:
        """Changed prompts as whole prompts."""
        places = torch.arange(len(self.ids), device=self.ids.device)
        inputs = prompt_of(self.scope, ids.to(self.ids))
        return WholePrompts(inputs, places.expand_as(ids), ends.to(self.ids))

    def _alone(
        self, ids: Int[Tensor, "b t"], at: Int[Tensor, "b s"], apart: Int[Tensor, " b"] | None
    ) -> TokensAlone:
        """Changed prompts as tokens at some places alone."""
        ids = ids.to(self.ids)
        at = at.to(self.ids)
        tokens = ids.gather(1, at.clamp_min(0))
        return TokensAlone.of(self.scope, self.calls, tokens, at, apart)

    # ------------------------------------------------------------------ runs

    def run(
        self,
        ids: Int[Tensor, "b t"],
        runs: Bool[Tensor, "b t"],
        reads: Sequence[Read] = (),
        *,
        rows: Sequence[Sequence[Row | Hidden]] = (),
        logits: bool = False,
        later: LaterLayers | None = None,
        likelihood: bool = False,
    ) -> Reruns:
        """Run some tokens of changed prompts, among keys and values of the unchanged one.

        Parameters
        ----------
        ids : of the changed prompts.
        runs : tokens that run; the last of each prompt is the one whose next token is read. Where
            none may run alone, whole prompts do.
        reads : rows of attention that are read.
        rows : of each prompt, changes of attention at tokens that run.
        logits : whether next-token logits are wanted.
        later : the layers that run, where those before them are as they were at the one token.
        likelihood : whether the log-probabilities of the tokens behind those that run are wanted,
            in place of logits.
        """
        attention = self.attention(reads).repeat(len(ids), 1, 1)
        changed = rows or [()] * len(ids)
        next_tokens = list[Tensor]()
        order = list[int]()
        likely = torch.zeros(ids.shape, device=attention.device) if likelihood else None
        for numbers, prompts in self._batches(ids, runs, changed, _AT_ONCE if logits else None):
            step = _Batch(self, prompts, reads, [changed[number] for number in numbers], later)
            at = torch.tensor(numbers, device=attention.device)
            attention[at], after = step.run(attention[at], logits, likelihood)
            order += numbers
            if likely is not None:
                assert after is not None
                likely[at] = _behind_each(after, ids[numbers], prompts).to(likely)
            elif after is not None:
                next_tokens.append(after)
        if not logits:
            return Reruns(attention, None, likely)
        return Reruns(attention, _put_back(next_tokens, order))

    def _batches(
        self,
        ids: Int[Tensor, "b t"],
        runs: Bool[Tensor, "b t"],
        changed: Sequence[Sequence[Row | Hidden]],
        most: int | None,
    ) -> Iterator[tuple[list[int], ChangedPrompts]]:
        """Batches of changed prompts, and their numbers: of whole ones, and of those whose tokens
        run alone.
        """
        places = [row.nonzero()[:, 0].tolist() for row in runs]
        ends = torch.tensor([own[-1] for own in places])
        room = room_of(self.scope)
        whole = list[int]()
        alone = list[int]()
        for number, own in enumerate(places):
            if self.runs_alone(own[-1]):
                alone.append(number)
            else:
                whole.append(number)
        count = max(room // len(self.ids), 1)
        for start in range(0, len(whole), count):
            numbers = whole[start : start + count]
            yield numbers, self._whole(ids[numbers], ends[numbers])
        lines = list[_Line]()
        for number in alone:
            lines.append(_Line(number, ids[number], places[number], changed[number]))
        for together in _shared(lines, room, most):
            numbers = [line.number for line in together]
            of_each = [torch.tensor(line.places) for line in together]
            at = pad_sequence(of_each, batch_first=True, padding_value=-1, padding_side="left")
            apart = torch.tensor([line.apart for line in together])
            yield numbers, self._alone(ids[numbers], at, apart)

    def attention(self, reads: Sequence[Read]) -> Float[Tensor, "n t"]:
        """Rows of attention of the unchanged prompt."""
        rows = torch.zeros(len(reads), len(self.ids), device=self.ids.device)
        for layer, own in layer_reads(reads).items():
            call = self.calls[layer]
            heads = torch.tensor(own.heads, device=call.q.device)
            queries = own.queries.to(call.q.device)
            found = call.rows(heads, torch.zeros_like(queries), queries).attention()
            rows[own.numbers] = found[:, 0].to(rows)
        return rows

    def record(
        self,
        reader: Reader,
        ids: Int[Tensor, " t"],
        look: tuple[int, int],
        layer: int,
        at: Int[Tensor, " s"],
    ) -> Run:
        """Run a changed prompt up to a layer, and keep what writers left at a query and a key: its
        slots 0 and 1.

        Tokens of the run are counted among those that ran, ``at``; keys of all others stand behind
        them, as attention does not depend on their order.
        """
        at = at.to(self.ids)[None]
        prompts: ChangedPrompts
        if self.runs_alone(int(at[0, -1])):
            prompts = self._alone(ids[None], at, None)
        else:
            prompts = self._whole(ids[None], at[:, -1])
        slots = torch.searchsorted(prompts.at.contiguous(), torch.tensor([look]).to(at))
        shown = torch.ones_like(slots, dtype=torch.bool)
        row = torch.zeros_like(at[:, 0])
        places = Places(row, slots[:, 0], slots.flip(1), shown)
        with self.standing():
            run = reader.record(
                prompts.inputs, places, deep=[layer], last=layer, visits=[prompts.attend]
            )
        part = prompts.part(run.calls[layer], slots[:, :1])
        run.calls[layer] = replace(part, q=run.calls[layer].q)
        return run


@dataclass(frozen=True)
class _Batch:
    """Changed prompts that run together.

    Attributes
    ----------
    base : the unchanged prompt.
    prompts : as they run.
    reads : rows of attention that are read.
    changed : by prompt, changes of attention.
    later : the layers that run; all, if None.
    """

    base: Again
    prompts: ChangedPrompts
    reads: Sequence[Read]
    changed: Sequence[Sequence[Row | Hidden]]
    later: LaterLayers | None = None

    @torch.no_grad()
    def run(
        self, attention: Float[Tensor, "b n t"], logits: bool, everywhere: bool = False
    ) -> tuple[Float[Tensor, "b n t"], Float[Tensor, "b v"] | None]:
        """Run up to the last layer that is read, or to the logits; fill in attention where it ran.

        Logits are those of the last token of each prompt, or of all tokens that ran ``everywhere``,
        slot by slot.
        """
        layers = layer_reads(self.reads)
        last = None if logits or everywhere else max(layers)

        def visit(call: Call) -> None:
            if call.layer in layers:
                self._read(call, layers[call.layer], attention)
            if call.layer == last:
                raise Stop
            self.prompts.attend(call)
            self._change(call)

        read = None if last is not None else self.prompts.read_at(everywhere)
        only = None if last is None else range(last + 1)
        first = 0 if self.later is None else self.later.first
        watch = self.base.scope.watch
        with self.base.standing(), self._from_first():
            scores = watch(self.prompts.inputs, visit, logits_at=read, first=first, only=only)
        return attention, scores

    def _from_first(self) -> AbstractContextManager[None]:
        """Let the layers before the first that runs hand on what they left."""
        if self.later is None or not self.later.first:
            return nullcontext()
        rows, columns = self.prompts.inputs["input_ids"].shape
        return self.later.handing_on_token(rows, columns)

    def _changed_rows(self, layer: int) -> dict[_Place, list[Row | Hidden]]:
        """Changes of attention in a layer, by the row that they concern."""
        rows = dict[_Place, list[Row | Hidden]]()
        for prompt, changes in enumerate(self.changed):
            for change in changes:
                if change.head.layer == layer:
                    assert change.query is not None
                    place = _Place(prompt, change.head.index, change.query)
                    rows.setdefault(place, []).append(change)
        return rows

    def _read(self, call: Call, reads: LayerReads, attention: Tensor) -> None:
        """Put the rows of a layer that are read into a table, where their queries run."""
        prompts = self.prompts
        queries = reads.queries.to(prompts.at)
        is_query = prompts.at[:, None] == queries[:, None]
        which = is_query.int().argmax(-1)
        heads = sorted(set(reads.heads))
        logits = prompts.by_prompt(prompts.part(call, which).logits(heads), which)
        number = torch.arange(len(reads.numbers), device=logits.device)
        head = torch.tensor([heads.index(index) for index in reads.heads], device=logits.device)
        logits = logits[:, head, number]
        columns = prompts.columns.to(logits.device)
        self._change_read(call.layer, reads, logits, columns)
        sinks = None
        if call.sinks is not None:
            of_heads = call.sinks.float()[reads.heads]
            sinks = of_heads.expand(logits.shape[:2])
        weights = soft(logits, sinks)
        rows = weights.new_zeros(*weights.shape[:2], attention.shape[-1])
        rows.index_add_(-1, columns, weights)
        ran = is_query.any(-1)[..., None].to(attention.device)
        before = attention[:, reads.numbers]
        attention[:, reads.numbers] = rows.to(attention).where(ran, before)

    def _change_read(
        self,
        layer: int,
        reads: LayerReads,
        logits: Float[Tensor, "b n k"],
        columns: Int[Tensor, " k"],
    ) -> None:
        """Put changes of attention into the rows of a layer that are read."""
        places = list(zip(reads.heads, reads.queries.tolist(), strict=True))
        for place, changes in self._changed_rows(layer).items():
            for read, seen in enumerate(places):
                if seen == (place.head, place.query):
                    row = logits[place.prompt, read]
                    logits[place.prompt, read] = _with_changes(row, columns, changes)

    def _change(self, call: Call) -> None:
        """Put in what heads put out where their rows of attention are changed."""
        rows = self._changed_rows(call.layer)
        while rows:  # one query of each prompt at a time
            queries = {place.prompt: place.query for place in rows}
            now = dict[_Place, list[Row | Hidden]]()
            for place in list(rows):
                if place.query == queries[place.prompt]:
                    now[place] = rows.pop(place)
            self._change_once(call, queries, now)

    def _change_once(
        self, call: Call, queries: Mapping[int, int], rows: Mapping[_Place, list[Row | Hidden]]
    ) -> None:
        """Put in what heads put out at one query of each prompt."""
        prompts = self.prompts
        at = prompts.at.cpu()
        query = torch.full((len(at), 1), -1)
        for prompt, its_query in queries.items():
            query[prompt] = its_query
        which = (at == query).int().argmax(1, keepdim=True)
        part = prompts.part(call, which)
        heads = sorted({place.head for place in rows})
        logits = prompts.by_prompt(part.logits(heads), which)[:, :, 0]
        columns = prompts.columns.to(logits.device)
        group = part.q.shape[1] // part.v.shape[1]
        for place, changes in rows.items():
            before_changes = logits[place.prompt, heads.index(place.head)]
            row = _with_changes(before_changes, columns, changes)
            sink = None if call.sinks is None else call.sinks.float()[place.head]
            weights = soft(row, sink)
            values = prompts.values(part, place.prompt)[place.head // group]
            value = weights @ values.float()
            before = call.outputs.get(place.head)
            where = prompts.cell(place.prompt, int(which[place.prompt]))
            call.outputs[place.head] = partial(_put, where, value, before)


def _with_changes(
    logits: Float[Tensor, " k"], columns: Int[Tensor, " k"], changes: Sequence[Row | Hidden]
) -> Float[Tensor, " k"]:
    """A row of logits with changes in it; keys that are hidden stay hidden."""
    for change in changes:
        if isinstance(change, Hidden):
            logits = logits.masked_fill(columns == change.key, -torch.inf)
        else:
            new = change.logits.to(logits)[columns]
            logits = new.masked_fill(logits == -torch.inf, -torch.inf)
    return logits


def _behind_each(
    logits: Float[Tensor, "n v"], ids: Int[Tensor, "b t"], prompts: ChangedPrompts
) -> Float[Tensor, "b t"]:
    """Log-probability of the token behind each place that ran; 0 at others, and at the last."""
    at = prompts.at
    ids = ids.to(at)
    behind = ids.roll(-1, 1).gather(1, at.clamp_min(0)).to(logits.device)
    slots = prompts.slots.to(logits.device)
    chances = logits[slots, behind] - logits.logsumexp(1)[slots]
    places = at.masked_fill(at < 0, ids.shape[1])  # of none: one column more
    by_place = chances.new_zeros(len(ids), ids.shape[1] + 1)
    by_place = by_place.scatter(1, places.to(chances.device), chances)
    by_place[:, -2:] = 0
    return by_place[:, :-1]


def _put(
    place: tuple[int, int], value: Tensor, before: Callable[[Tensor], Tensor] | None, out: Tensor
) -> Tensor:
    """Replace one vector in a head's output, and apply the other changes of it."""
    out[place] = value.to(out)
    return out if before is None else before(out)


def room_of(scope: Scope) -> int:
    """Number of tokens to run together."""
    return _TOKENS.get(scope.device.type, _MORE_TOKENS)
