"""Whole heads taken out of the running model, for all their readers, beside others of their layers.

A head that is taken out puts out its mean over all tokens but the first, at every token. MLPs are
live, or held at what they put out before: their answers to the head are then left standing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.findings.head_rows import Pass, answer_signs
from qkscope.findings.task_batches import asked_words, batches_of
from qkscope.heads import Head, parse_writers
from qkscope.model.inputs import answer_tokens
from qkscope.model.patch import Edit
from qkscope.rerun.later_layers import noted
from qkscope.rerun.rerun_layers import held_at, summed_outputs
from qkscope.results.result import Rows
from qkscope.results.work import stream
from qkscope.seeds import derived_seed
from qkscope.sums.relative_logits import METRICS, Measurement, Tally, draw_alike, first_by, metrics
from qkscope.texts.task import Unit
from qkscope.verbs.trace.edges import Choice

# prompts tested, prompts that means are taken over, heads taken out at once
_PROMPTS = 48
_MEANS = 32
_MOST = 3
_BATCH = 16
#: Whether MLPs run on or are held, and which heads are taken out.
_WAYS = (("live", "chosen"), ("held", "chosen"), ("live", "random"))
_ACCURACY = METRICS.index("accuracy")


class Case(NamedTuple):
    """Case: how many heads are taken out, what MLPs do, and whether heads are chosen or random."""

    size: int
    mlps: str
    kind: str


def whole_heads(
    how: Pass, head: Head, chosen: Choice, choosing: Sequence[Unit], units: Sequence[Unit]
) -> Rows:
    """Take out the first one, two and three head writers, and as many others of their layers."""
    test = WholeHeads(how, head, chosen, choosing, units)
    return test.rows() if test.first else []


@dataclass
class WholeHeads:
    """The whole heads of one head's writers, and prompts to test them on.

    Parameters
    ----------
    how : how prompts go through the model.
    head : whose attention and accuracy are measured.
    chosen : scores of its writers.
    choosing, units : prompts; of the first means are taken, and of the others some are tested.

    Attributes
    ----------
    first : numbers of the head writers taken out, among ``writers``.
    """

    how: Pass
    head: Head
    chosen: Choice
    choosing: Sequence[Unit]
    units: Sequence[Unit]

    def __post_init__(self) -> None:
        self.scope = self.how.reader.scope
        names = parse_writers(self.how.reader.writers(self.head.layer))
        self.writers = [writer for writer in names if writer.head]
        scores = self.chosen.scores
        of_query = scores["share", "query"].abs()
        of_key = scores["share", "key"].abs()
        order = [names[i] for i in first_by(of_query + of_key, len(names))]
        first = [writer for writer in order if writer.head][:_MOST]
        self.first = [self.writers.index(writer) for writer in first]
        sizes = range(1, len(self.first) + 1)
        self.cases = [Case(size, *way) for size in sizes for way in _WAYS]

    @cached_property
    def means(self) -> dict[Head, Float[Tensor, " d"]]:
        """Mean output of each head over all tokens but the first of the prompts for choosing."""
        examples = [unit[0] for unit in self.choosing[:_MEANS]]
        encoded = self.scope.encode(examples, chat=self.how.chat)
        shown = encoded.inputs["attention_mask"].bool().clone()
        first_token = shown.int().argmax(1)
        shown[torch.arange(len(shown)), first_token] = False
        sums = summed_outputs(self.scope, encoded.inputs, shown)
        count = shown.sum().cpu()
        means = {}
        for writer in self.writers:
            if writer.head:
                of_head = sums[writer.head.layer][writer.head.index]
                means[writer.head] = (of_head / count).float()
        return means

    def edits(self, indices: Sequence[int], case: Case) -> list[Edit]:
        """Edits of a batch's outputs: of which head, in which rows, and its mean."""
        chosen = self.first[: case.size]
        taken = [chosen] * len(indices)
        if case.kind == "random":  # each prompt has heads of its own
            taken = [self._random_like(chosen, i) for i in indices]
        edits = list[Edit]()
        for number, writer in enumerate(self.writers):
            rows = [number in heads for heads in taken]
            if writer.head and any(rows):
                mean = self.means[writer.head]
                edits.append(Edit.outputs(writer.head, torch.tensor(rows), mean))
        return edits

    def _random_like(self, chosen: Sequence[int], prompt: int) -> list[int]:
        """As many other heads of the same layers, drawn for one prompt."""
        address = derived_seed(self.how.seed, "whole", len(chosen), prompt)
        return draw_alike(chosen, self.writers, address)

    def measure(self, indices: list[int]) -> tuple[list[int], Measurement]:
        """Measure some prompts, by case: `METRICS` and the probability of the right answer.

        The right answer is the one named, or the right keys' own tokens. Comes back with the number
        of each row's prompt.
        """
        examples = [self.units[i][0] for i in indices]
        encoded = self.scope.encode(examples, chat=self.how.chat)
        keys = encoded.places.keys.masked_fill(~encoded.places.key_mask, 0)
        key_signs = answer_signs(encoded)
        tokens, signs = answer_tokens(self.scope.encoder, encoded, self.how.chat)
        capture = partial(
            self.scope.capture_inputs,
            encoded,
            places=encoded.everywhere(),
            heads=[self.head],
            logits=True,
        )

        def measured(**changes: Any) -> Float[Tensor, "n m"]:
            captured = capture(**changes)
            assert captured.logits is not None
            of_rows = metrics(captured.rows().of_head(0), keys, key_signs)[0].cpu()
            chances = captured.logits.softmax(-1).cpu().gather(1, tokens)
            right = chances * (signs > 0)
            return torch.cat([of_rows, right.sum(1, keepdim=True)], dim=1)

        parts = [part for block in self.how.reader.blocks for part in block.parts]
        with noted(parts) as outputs:
            values: dict[Case | None, Tensor] = {None: measured()}
        for case in self.cases:
            edits = self.edits(indices, case)
            with held_at(outputs if case.mlps == "held" else {}):
                values[case] = measured(edits=edits)
        return [indices[int(example)] for example in encoded.example], Measurement(values)

    def rows(self) -> Rows:
        """The table ``whole``: nothing taken out, then every case."""
        words = asked_words(self.units)
        tally = Tally(sorted(words[:_PROMPTS]))
        batches = batches_of(self.units[:_PROMPTS], _BATCH)
        for prompts, measured in stream(batches, self.measure, self.how.progress):
            tally.add([words[i] for i in prompts], measured)
        nothing = Case(0, "live", "chosen")
        rows = [self._row(tally, None, nothing)]
        rows += [self._row(tally, case, case) for case in self.cases]
        return rows

    def _row(self, tally: Tally, key: Case | None, case: Case) -> dict[str, Any]:
        """One row: what is left, beside the probability of the answer with nothing taken out."""
        before = float(tally.mean(None)[-1])
        values = tally.mean(key).tolist()
        low, high = tally.interval(key)
        if case.kind == "random":
            removed = f"{case.size} others of their layers"
            draws = tally.rows
        else:
            writers = [self.writers[number] for number in self.first[: case.size]]
            removed = ", ".join(map(str, writers))
            draws = 1
        measured = dict(zip(METRICS, values, strict=False))
        return {
            "head": str(self.head),
            "removed": removed or "none",
            "size": case.size,
            "mlps": case.mlps,
            "kind": case.kind,
            **measured,
            "low": float(low[_ACCURACY]),
            "high": float(high[_ACCURACY]),
            "answer_before": before,
            "answer": values[-1],
            "n": tally.rows,
            "draws": draws,
        }
