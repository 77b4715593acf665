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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import Scope
from qkscope.attention import AttentionRows, soft
from qkscope.changes import Hidden, Row, Words
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.recording import last_alone
from qkscope.linear.run import Run
from qkscope.model.capture_types import Places
from qkscope.model.prefix import ChangedPrompts, TokensAlone, WholePrompts, prompt_of, runs_alone
from qkscope.model.tap import Call, Stop
from qkscope.rerun.reads import LayerReads, Read, Reruns, layer_reads, with_words

_AT_ONCE = 128  # prompts that run together to their logits
# tokens that run together: on a CPU more are no faster, and less alike
_TOKENS = {"cpu": 2**8}
_MORE_TOKENS = 2**12


class _Place(NamedTuple):
    """A row of attention in a batch."""

    prompt: int
    head: int
    query: int


def rerun_tokens(
    base: Again,
    changes: Sequence[Sequence[Words | Row | Hidden]],
    reads: Sequence[Read],
    end: int,
    logits: bool,
) -> Reruns:
    """Run what stands behind each tuple of changes, up to a token that is read."""
    ids = torch.stack([with_words(base.ids, own) for own in changes]).cpu()
    rows = [[x for x in own if isinstance(x, Row | Hidden)] for own in changes]
    runs = base.behind(ids, torch.full((len(ids),), end))
    for number, own in enumerate(rows):
        for change in own:
            assert change.query is not None
            runs[number, change.query :] |= torch.arange(change.query, len(base.ids)) <= end
    return base.run(ids, runs, reads, rows=rows, logits=logits)


class Again:
    """A prompt that was run, ready to be run again with other tokens, or other rows of attention.

    Parameters
    ----------
    scope : the model.
    inputs : the prompt, alone.
    calls : by layer, its attention calls in that run.
    """

    def __init__(
        self, scope: Scope, inputs: Mapping[str, Tensor], calls: Mapping[int, Call]
    ) -> None:
        self.scope = scope
        self.inputs = dict(inputs)
        self.calls = calls
        self.ids: Int[Tensor, " t"] = self.inputs["input_ids"][0]

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

    # ------------------------------------------------------------------ rows of attention changed

    def row(self, query: int, head: Head) -> AttentionRows:
        """A head's row of attention at a token."""
        return self.calls[head.layer].rows(head.index, torch.tensor([0]), torch.tensor([query]))

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
        last = len(self.ids) - 1
        return runs_alone(self.scope, self.ids, self.calls, last if end is None else end)

    def behind(self, ids: Int[Tensor, "b t"], ends: Int[Tensor, " b"]) -> Bool[Tensor, "b t"]:
        """Tokens of changed prompts from the first change to the last that is read, which runs anyway."""
        differs = ids != self.ids.cpu()
        places = torch.arange(ids.shape[1])
        runs = (differs.cumsum(1) > 0) & (places <= ends[:, None])
        return runs | (places == ends[:, None])

    def _at_once(self, tokens: int, end: int) -> int:
        """How many prompts run together with so many tokens each, the last of them at a place."""
        alone = self.runs_alone(end)
        return max(room_of(self.scope) // (tokens if alone else len(self.ids)), 1)

    def _prompts(
        self, ids: Int[Tensor, "b t"], at: Int[Tensor, "b s"], ends: Int[Tensor, " b"]
    ) -> ChangedPrompts:
        """Changed prompts as they run: tokens at some places alone, or whole prompts."""
        ids = ids.to(self.ids)
        at = at.to(self.ids)
        ends = ends.to(self.ids)
        last_places = sorted(set(at[:, -1].tolist()), reverse=True)
        if all(self.runs_alone(place) for place in last_places):
            alone = TokensAlone.of(self.scope, self.calls, ids.gather(1, at), at)
            return replace(alone, ends=(at == ends[:, None]).int().argmax(1))
        every = torch.arange(len(self.ids), device=at.device).expand_as(ids)
        return WholePrompts(prompt_of(self.scope, ids), every, ends)

    # ------------------------------------------------------------------ runs

    def run(
        self,
        ids: Int[Tensor, "b t"],
        runs: Bool[Tensor, "b t"],
        reads: Sequence[Read] = (),
        *,
        rows: Sequence[Sequence[Row | Hidden]] = (),
        logits: bool = False,
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
        likelihood : whether the log-probabilities of the tokens behind those that run are wanted,
            in place of logits.
        """
        attention = self.attention(reads).repeat(len(ids), 1, 1)
        next_tokens: dict[int, Tensor] = {}
        likely = torch.zeros(ids.shape, device=attention.device) if likelihood else None
        widths = runs.sum(1)
        ends = runs.shape[1] - 1 - runs.flip(1).int().argmax(1)
        order = widths.argsort(descending=True, stable=True)
        while len(order):
            width = int(widths[order[0]])
            count = self._at_once(width, int(ends.max()))
            batch = order[: min(count, _AT_ONCE) if logits else count]
            order = order[len(batch) :]
            at = first_places(runs[batch], width)
            prompts = self._prompts(ids[batch], at, ends[batch])
            changed = [rows[number] for number in batch.tolist()] if rows else [()] * len(batch)
            step = _Batch(self, prompts, reads, changed)
            found, after = step.run(attention[batch.to(attention.device)], logits, likelihood)
            attention[batch.to(attention.device)] = found
            if likely is not None:
                assert after is not None
                likely[batch.to(likely.device)] = _behind_each(after, ids[batch], prompts.at)
            elif after is not None:
                next_tokens |= dict(zip(batch.tolist(), after, strict=True))
        every = [next_tokens[number] for number in range(len(next_tokens))]
        return Reruns(attention, torch.stack(every) if every else None, likely)

    def attention(self, reads: Sequence[Read]) -> Float[Tensor, "n t"]:
        """Rows of attention of the unchanged prompt."""
        rows = torch.zeros(len(reads), len(self.ids), device=self.ids.device)
        for layer, own in layer_reads(reads).items():
            call = self.calls[layer]
            heads = torch.tensor(own.heads, device=call.q.device)
            queries = own.queries.to(call.q.device)
            found = call.rows(heads, torch.zeros_like(queries), queries).attention()[:, 0]
            rows[own.numbers] = found.to(rows)
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
        prompts = self._prompts(ids[None], at, at[:, -1])
        slots = torch.searchsorted(prompts.at.contiguous(), torch.tensor([look]).to(at))
        shown = torch.ones_like(slots, dtype=torch.bool)
        places = Places(at[:, 0] * 0, slots[:, 0], slots.flip(1), shown)
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
    """

    base: Again
    prompts: ChangedPrompts
    reads: Sequence[Read]
    changed: Sequence[Sequence[Row | Hidden]]

    @torch.no_grad()
    def run(
        self, attention: Float[Tensor, "b n t"], logits: bool, everywhere: bool = False
    ) -> tuple[Float[Tensor, "b n t"], Float[Tensor, "b v"] | None]:
        """Run up to the last layer that is read, or to the logits; fill in attention where it ran.

        Logits are those of the last token of each prompt, or of all tokens that ran ``everywhere``,
        prompt by prompt.
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

        row = torch.arange(len(attention), device=self.prompts.at.device)
        nothing = self.prompts.at[:, :0]
        read = Places(row, self.prompts.ends, nothing, nothing.bool())
        if everywhere:
            slots = torch.arange(self.prompts.at.shape[1], device=row.device)
            rows, slots = torch.cartesian_prod(row, slots).unbind(1)
            read = Places(rows, slots, nothing, nothing.bool())
        scores = self.base.scope.watch(
            self.prompts.inputs,
            visit,
            logits_at=None if last is not None else read,
            only=None if last is None else range(last + 1),
        )
        return attention, scores

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
        is_query = prompts.at[:, None] == reads.queries[:, None].to(prompts.at)
        which = is_query.int().argmax(-1)
        heads = sorted(set(reads.heads))
        logits = prompts.by_prompt(prompts.part(call, which).logits(heads), which)
        number = torch.arange(len(reads.numbers), device=logits.device)
        head = torch.tensor([heads.index(index) for index in reads.heads], device=logits.device)
        logits = logits[:, head, number]
        columns = prompts.columns.to(logits.device)
        for place, changes in self._changed_rows(call.layer).items():
            for read, (index, query) in enumerate(
                zip(reads.heads, reads.queries.tolist(), strict=True)
            ):
                if (index, query) == (place.head, place.query):
                    row = logits[place.prompt, read]
                    logits[place.prompt, read] = _with_changes(row, columns, changes)
        sinks = None if call.sinks is None else call.sinks.float()[reads.heads]
        weights = soft(logits, None if sinks is None else sinks.expand(logits.shape[:2]))
        rows = weights.new_zeros(*weights.shape[:2], attention.shape[-1])
        rows.index_add_(-1, columns, weights)
        ran = is_query.any(-1)[..., None].to(attention.device)
        attention[:, reads.numbers] = rows.to(attention).where(ran, attention[:, reads.numbers])

    def _change(self, call: Call) -> None:
        """Put in what heads put out where their rows of attention are changed."""
        rows = self._changed_rows(call.layer)
        while rows:  # one query of each prompt at a time
            queries = {place.prompt: place.query for place in rows}
            now = {
                place: own for place, own in rows.items() if place.query == queries[place.prompt]
            }
            rows = {place: own for place, own in rows.items() if place not in now}
            self._change_once(call, queries, now)

    def _change_once(
        self, call: Call, queries: Mapping[int, int], rows: Mapping[_Place, list[Row | Hidden]]
    ) -> None:
        """Put in what heads put out at one query of each prompt."""
        prompts = self.prompts
        at = prompts.at.cpu()
        steps = [(at[i] == queries.get(i, -1)).int().argmax() for i in range(len(at))]
        which = torch.stack(steps)[:, None]
        part = prompts.part(call, which)
        heads = sorted({place.head for place in rows})
        logits = prompts.by_prompt(part.logits(heads), which)[:, :, 0]
        columns = prompts.columns.to(logits.device)
        group = part.q.shape[1] // part.v.shape[1]
        for place, changes in rows.items():
            row = _with_changes(logits[place.prompt, heads.index(place.head)], columns, changes)
            weights = soft(row, None if call.sinks is None else call.sinks.float()[place.head])
            value = weights @ prompts.values(part, place.prompt)[place.head // group].float()
            before = call.outputs.get(place.head)
            where = (place.prompt, int(which[place.prompt]))
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
    logits: Float[Tensor, "bs v"], ids: Int[Tensor, "b t"], at: Int[Tensor, "b s"]
) -> Float[Tensor, "b t"]:
    """Log-probability of the token behind each place that ran; 0 at others, and at the last."""
    ids = ids.to(at)
    behind = ids.roll(-1, 1).gather(1, at).flatten()
    chances = logits.gather(1, behind[:, None].to(logits.device))[:, 0] - logits.logsumexp(1)
    by_place = chances.new_zeros(ids.shape).scatter(1, at, chances.view(at.shape).to(at.device))
    by_place[:, -1] = 0
    return by_place


def first_places(runs: Bool[Tensor, "b t"], width: int) -> Int[Tensor, "b s"]:
    """Places of the tokens that run, in order; others fill up where a prompt has fewer than these."""
    chosen = runs.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    return chosen.sort(dim=1).values


def _put(
    place: tuple[int, int], value: Tensor, before: Callable[[Tensor], Tensor] | None, out: Tensor
) -> Tensor:
    """Replace one vector in a head's output, and apply the other changes of it."""
    out[place] = value.to(out)
    return out if before is None else before(out)


def room_of(scope: Scope) -> int:
    """Number of tokens to run together."""
    return _TOKENS.get(scope.device.type, _MORE_TOKENS)
