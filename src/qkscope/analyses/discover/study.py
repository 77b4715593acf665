"""What `discover` and `atlas` share: how they are asked, the pass over the examples, and what both say of a head.

Examples with the same text are one random unit, whatever they ask in it: they stay in one batch, exchange what they
attended to as one, and are resampled as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch

from qkscope.analyses.discover.rows import QueryRows, main_relation, relation_rows
from qkscope.analyses.discover.texts import LENGTH, QUERIES, text_examples
from qkscope.capture.pool import pool
from qkscope.capture.scope import Scope
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.kinds import AtLeast, Count, Natural, checked_class
from qkscope.maths.discovery import HeadTest, SelfContrast
from qkscope.runs.job import Job

RESTS = "rests on the first token"
ABOVE = "go together above the shuffled null"  # queries and attended keys do: this is what was tested, and no more
NOT_ABOVE = "not above the shuffled null"
UNTESTED = "untested"  # the replicates could not have told

AttentionSpace = Literal["query_frame", "post_rope"]  # in which vectors give the model's attention


@checked_class
@dataclass(frozen=True)
class Options:
    """How text is read, what is drawn, and how long it may take; what cannot be is refused before a model is loaded.

    Attributes
    ----------
    space : ``query_frame`` (features of content and offset, not of the place in the text) or ``post_rope``; what is
        before rotation does not give the attention that all of this rests on.
    skip : tokens from the first on that are left out: a resting place of many heads.
    queries, length : queries drawn in each passage, and its tokens at most.
    replicates : null replicates of each head, half of them of each kind; the fewest that tell 5% of chance are 39.
    draws : random subspaces beside each swap.
    batch_size : examples per batch; passages exchange what they attended to within one.
    seed : of every draw.
    progress : whether to say how far it is; if not given, where stderr is a terminal.
    """

    space: AttentionSpace = "query_frame"
    skip: Natural = 1
    queries: Count = QUERIES
    length: Count = LENGTH
    replicates: Annotated[int, AtLeast(39)] = 199
    draws: Count = 20
    batch_size: Count = 16
    seed: int = 0
    progress: bool | None = None

    @property
    def labelled_batch_size(self) -> int:
        """Prompts per batch where only named keys are looked at: they take less room than whole passages."""
        return 2 * self.batch_size

    def asked(self) -> dict[str, Any]:
        """All that decides the numbers."""
        return {name: value for name, value in vars(self).items() if name != "progress"}


@dataclass(frozen=True)
class Study:
    """Some heads of a model, asked in one way; finished pieces are kept in ``job``."""

    scope: Scope
    heads: tuple[Head, ...]
    options: Options
    chat: bool = False
    job: Job = field(default_factory=Job)

    @property
    def about(self) -> dict[str, Any]:
        """What everything here is made from."""
        return {"model": self.scope.name, "weights": self.scope.weights_hash, "space": self.options.space}

    def passages(self, texts: Sequence[str], n: int) -> list[Example]:
        """Examples of ``n`` passages drawn by lot, in the order of the draw."""
        options = self.options
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(options.seed)).tolist()[:n]
        drawn = [texts[i] for i in order]
        return text_examples(self.scope, drawn, queries=options.queries, length=options.length, seed=options.seed)

    def contrast(self, **about: Any) -> SelfContrast:
        """Empty sums of these heads."""
        places: dict[tuple[int, int], int] = {}  # of the drawn keys: key heads in order of first use
        keys = [(head.layer, head.kv(self.scope.group_size)) for head in self.heads]
        return SelfContrast(
            self.heads,
            self.scope.d_head,
            kv_of_head=[places.setdefault(key, len(places)) for key in keys],
            replicates=self.options.replicates,
            seed=self.options.seed,
            about=self.about | about,
            device=self.scope.device,
        )

    def add(self, name: str, examples: Sequence[Example], contrast: SelfContrast) -> None:
        """Add what the heads attended to in some examples to the sums; nothing else is kept."""
        self._stream(name, examples, contrast, lots=2, keep=False)

    def rows(
        self, name: str, examples: Sequence[Example], lots: int, contrast: SelfContrast | None = None
    ) -> QueryRows:
        """What the heads attended to in some examples, beside ``lots`` keys drawn for each query; also added to sums.

        Batches are sorted by length and fixed, so that a rerun gives the same numbers.
        """
        parts = self._stream(name, examples, contrast, lots, keep=True)
        ids: dict[int, list[int]] = {}
        for part in parts:
            texts = part.pop("ids").split(part.pop("lengths").tolist())
            ids |= {unit: text.tolist() for unit, text in zip(part.pop("units").tolist(), texts, strict=True)}
        return QueryRows.of(self.heads, parts, ids)

    def _stream(
        self, name: str, examples: Sequence[Example], contrast: SelfContrast | None, lots: int, keep: bool
    ) -> list[Any]:
        asked, units = self.options, unit_numbers(examples)

        def run(indices: list[int]) -> dict[str, Any] | None:
            encoded = self.scope.encode([examples[i] for i in indices], chat=self.chat)
            unit = torch.tensor([units[i] for i in indices], device=encoded.example.device)
            encoded = dataclasses.replace(encoded, example=unit[encoded.example])
            p = pool(self.scope, encoded, self.heads, space=asked.space, skip=asked.skip, draws=lots, seed=asked.seed)
            if contrast is not None:
                lot = {"drawn": p.drawn, "drawn_mask": p.drawn_mask}
                contrast.update(p.q, p.attended, p.mean, prompts=p.example, valid=p.valid, **lot)
            if not keep:
                return None
            ids, mask = encoded.inputs["input_ids"], encoded.inputs["attention_mask"].bool()
            words = {"units": unit.cpu(), "lengths": mask.sum(dim=1).cpu(), "ids": ids[mask].cpu()}
            return {**QueryRows.part(p, mask), **words}

        sums = None if contrast is None else contrast.tensors()
        return self.job.stream(name, _batches(examples, units, asked.batch_size), run, asked.progress, sums)


def unit_numbers(examples: Sequence[Example]) -> list[int]:
    """For each example the first one with the same text or ids."""
    first: dict[Any, int] = {}
    return [first.setdefault((example.text, example.ids), i) for i, example in enumerate(examples)]


def _batches(examples: Sequence[Example], units: Sequence[int], batch_size: int) -> list[list[int]]:
    """Examples by length, about ``batch_size`` in each; the examples of a unit together."""
    batches: list[list[int]] = []
    for i in sorted(range(len(examples)), key=lambda i: (len(examples[i]), units[i], i)):
        if not batches or (len(batches[-1]) >= batch_size and units[i] != units[batches[-1][-1]]):
            batches.append([])
        batches[-1].append(i)
    return batches


@dataclass(frozen=True)
class Findings:
    """Heads of one study: their sums, how surely each has a direction, and what it does on held-out examples."""

    study: Study
    contrast: SelfContrast
    tests: list[HeadTest]
    tested: QueryRows
    relations: list[dict[str, Any]]

    @classmethod
    def of(cls, study: Study, contrast: SelfContrast, tests: list[HeadTest], tested: QueryRows) -> Findings:
        """With the relations of every head, which take a while."""
        relations = study.job.once("relations", lambda: relation_rows(study.scope, tested))
        return cls(study, contrast, tests, tested, relations)

    def head_row(self, h: int, rank: int, rows: QueryRows, above: str = ABOVE) -> dict[str, Any]:
        """What is said of every head: its test, where its attention is in these rows, and a verdict."""
        head, test = self.contrast.heads[h], self.tests[h]
        verdict = RESTS if rows.rests(h) else above if rank else NOT_ABOVE if test.tested else UNTESTED
        return {
            "head": str(head), "directions": rank, "z": test.z, "p": test.p, "q": test.q,
            "mass": float(rows.mass[:, h].mean()),
            "top_weight": float(rows.top_weight[rows.valid[:, h], h].mean()),
            **main_relation(self.relations, str(head)), "verdict": verdict,
        }  # fmt: skip


def untested_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """What to do about heads that could not be tested; nothing where there are none."""
    count = sum(row["verdict"] == UNTESTED for row in rows)
    return f" {counted(count, 'head')} could not be tested: take more replicates, or larger batches." if count else ""


def share_words(share: float | None, whose: str = "the logit") -> str:
    """A share of the logit in words; more than all of it is possible, and is explained.

    >>> share_words(0.32), share_words(1.11)
    ('32% of the logit', 'all of the logit and more (111%: other directions pull against them)')
    """
    if share is None or share != share:
        return f"an unknown part of {whose}"
    if round(share, 2) > 1:
        return f"all of {whose} and more ({share:.0%}: other directions pull against them)"
    return f"{share:.0%} of {whose}"


def counted(number: int, what: str) -> str:
    """A number and its noun."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
