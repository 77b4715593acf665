"""What both verbs share: text by side, the two passes, and every head's rows in each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.names.look import Looked, fit_factors, look
from qkscope.analyses.names.readings import RULES, Readings
from qkscope.analyses.names.sentence import HeadShares, name_row, rule_rates
from qkscope.analyses.names.sight import Options, Text
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed, draw_signs
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.factors import FactorFit
from qkscope.maths.significance import false_discovery
from qkscope.runs.work import Work
from qkscope.tasks.sides import Passage, split
from qkscope.tasks.texts import Document, python_texts

_FLIPS = 1999  # sign flips of the match test: 0.0005 can be reached
_SHOWN = 8  # blocks of a head in the table, at least
_SMALL = 0.02  # share from which on a block is in it, anyway


Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"] | None


def documents_of(texts: Texts) -> tuple[Document, ...]:
    """Documents as they are, strings as documents of their own, and Python's own texts where nothing is given."""
    if texts is None:
        return python_texts(docstrings=True)
    if isinstance(texts, str) or not all(isinstance(text, str | Document) for text in texts):
        raise BadInput("texts are documents, or a list of strings, each a document of its own.")
    made = [t if isinstance(t, Document) else Document(f"text {i}", str(t)) for i, t in enumerate(texts, 1)]
    return tuple(document for document in made if document.text.strip())


def passages_of(scope: Scope, texts: Texts, options: Options) -> tuple[list[Passage], list[Passage]]:
    """Passages to fit on and to test on, drawn at random from documents that share no text."""
    if scope.tokenizer is None:
        raise BadInput(f"{scope.name} has no tokenizer: text cannot be read without one.")
    encode = lambda text: scope.tokenizer(text, verbose=False)["input_ids"]  # noqa: E731
    sides = split(documents_of(texts), encode, length=options.length, seed=options.seed)
    return (
        _drawn(sides["fit"], options.n, options.seed, "fit"),
        _drawn(sides["test"], options.test, options.seed, "test"),
    )


def _drawn(passages: Sequence[Passage], count: int, seed: int, side: str) -> list[Passage]:
    order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(derived_seed(seed, "passages", side)))
    return [passages[i] for i in order.tolist()[:count]]


@dataclass(frozen=True)
class Study:
    """Heads that were looked at: the text, the fit, and what was seen on the tested documents."""

    text: Text
    fit: FactorFit
    looked: Looked
    tested: tuple[Passage, ...]
    fitted: tuple[Passage, ...]
    options: Options

    @classmethod
    def of(
        cls,
        scope: Scope,
        heads: Sequence[Head],
        sides: tuple[Sequence[Passage], Sequence[Passage]],
        options: Options,
        job: Work,
        covariance: bool = False,
        **asked: Any,
    ) -> Study:
        """Both passes, over passages to fit on and to test on; what is done is kept in the job."""
        fitted, tested = sides
        job.begin(scope, [list(fitted), list(tested)], heads=[str(head) for head in heads], **options.asked(), **asked)
        text = Text(scope, heads, Readings.of(scope, [p.ids for p in fitted], [p.ids for p in tested]))
        fit = fit_factors(text, fitted, job, options)
        looked = look(text, fit, tested, job, options, covariance)
        return cls(text, fit, looked, tuple(tested), tuple(fitted), options)

    def counted(self) -> dict[str, int]:
        """How much text was read."""
        return {"n": len(self.fitted), "test": len(self.tested), "length": self.options.length}

    def shares(self, h: int) -> HeadShares:
        """One head's shares, with intervals by document."""
        return HeadShares.of(self.looked, self.fit.names, h, self.options.seed)

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of every head: what it is called (``heads``), its blocks, rules, distances and examples."""
        looked, heads = self.looked, self.text.heads
        own = [self.shares(h) for h in range(len(heads))]
        match = match_rows(looked, self.options.seed)
        rows = [
            {"head": str(head), "layer": head.layer, "index": head.index, **name_row(looked, own[h], h), **match[h]}
            for h, head in enumerate(heads)
        ]
        return {
            "heads": rows,
            "blocks": [row for h, head in enumerate(heads) for row in _block_rows(head, own[h], self.covariance(h))],
            "rules": [
                {"head": str(head), "rule": rule, **rule_rates(looked, h, rule)}
                for h, head in enumerate(heads)
                for rule in RULES
            ],
            "distances": [row for h, head in enumerate(heads) for row in _distance_rows(head, looked, h)],
            "examples": [
                row for h, head in enumerate(heads) for row in self._examples(head, h, rows[h]["rule"], rows[h]["name"])
            ],
        }

    def covariance(self, h: int) -> Float[Tensor, "f f"] | None:
        """Shares of the logit's variance over the keys in sight, each counted alike; None where not asked for."""
        if not self.looked.covariance.shape[-1]:
            return None
        return (self.looked.covariance[:, h].sum(0) / self.looked.spread[:, h].sum()).cpu()

    def _examples(self, head: Head, h: int, rule: str | None, name: str) -> list[dict[str, Any]]:
        """Places where a head attends most to a key that keeps its rule; to any key where it has none."""
        at = len(RULES) if rule is None else list(RULES).index(rule)
        found = []
        for attention, passage, query, key in self.looked.examples[h, at].tolist():
            if attention > 0:
                ids = self.tested[int(passage)].ids
                found.append({"head": str(head), "name": name, "rule": rule, "attention": attention,
                              "document": self.tested[int(passage)].document,
                              **snippet(self.text.scope, ids, int(query), int(key))})  # fmt: skip
        return found


def match_rows(looked: Looked, seed: int = 0) -> list[dict[str, Any]]:
    """Whether it matters to a head whose query asks: how much less its best key stands out with another document's.

    The other query stands at the same place, and meets the same keys, so passage, place and what the mean query
    attends to are kept; what stands out is measured in each row's own spread, so a scale that queries and keys of a
    passage share is no match. Documents are flipped as wholes.
    """
    lead = looked.own - looked.foreign  # u h
    units = torch.arange(len(lead), device=lead.device)
    flips = torch.arange(_FLIPS, device=lead.device)[:, None]
    signs = draw_signs(derived_seed(seed, "match") % 2**62, flips, units).to(lead)
    null = signs @ lead
    p = ((null >= lead.sum(0)).sum(0) + 1) / (_FLIPS + 1)
    q = false_discovery(p.tolist())
    lost, met = (lead.sum(0) / looked.own.sum(0)).tolist(), (looked.own.sum(0) > 0).tolist()
    untold = dict.fromkeys(("match", "match_p", "match_q"))  # where no batch held a second document
    return [
        {"match": lost[h], "match_p": float(p[h]), "match_q": q[h]} if met[h] else dict(untold) for h in range(len(q))
    ]


def _block_rows(head: Head, own: HeadShares, covariance: Float[Tensor, "f f"] | None) -> list[dict[str, Any]]:
    pairs = sorted(((q, k) for q in own.parts for k in own.parts), key=lambda pair: -abs(own.block(*pair)[0]))
    rows = []
    for i, (query, key) in enumerate(pairs):
        share, low, high = own.block(query, key)
        if i < _SHOWN or abs(share) >= _SMALL:
            row: dict[str, Any] = {"head": str(head), "query": query, "key": key, "share": share, "low": low}
            at = own.parts.index(query), own.parts.index(key)
            beside = {} if covariance is None else {"covariance_share": float(covariance[at])}
            rows.append({**row, "high": high, **beside})
    return rows


def _distance_rows(head: Head, looked: Looked, h: int) -> list[dict[str, Any]]:
    """Logit and attention by distance; ``mean`` is the part of the logit that is of distance alone."""
    count = looked.count[h].clamp_min(1)
    every, mean, attended = ((x / count).tolist() for x in (looked.curve[0, h], looked.curve[1, h], looked.attended[h]))
    there = (looked.count[h] > 0).tolist()
    return [
        {"head": str(head), "distance": i, "logit": every[i], "mean": mean[i], "attention": attended[i]}
        for i in range(len(there))
        if there[i]
    ]


def snippet(scope: Scope, ids: Sequence[int], query: int, key: int, around: int = 8) -> dict[str, Any]:
    """Text around two tokens, with their places in it as character offsets, and as tokens of a prompt (``…_at``)."""
    decode = (lambda *some: scope.tokenizer.decode(list(some))) if scope.tokenizer else lambda *some: f" {some[-1]}"
    special = set(getattr(scope.tokenizer, "all_special_ids", ())) - {ids[query], ids[key]}
    near = [i for i in range(len(ids)) if min(abs(i - query), abs(i - key)) <= around and ids[i] not in special]
    pieces = {i: decode(ids[i]) for i in near}
    text, spans, last = "", {}, -1
    for i in near:
        if text and i != last + 1:
            text += " …" if pieces[i].startswith(" ") else " … "
        elif text and decode(ids[last], ids[i]) == f"{pieces[last]} {pieces[i]}":  # words that come without their space
            text += " "
        spans[i] = (len(text), len(text) + len(pieces[i]))
        text += pieces[i]
        last = i
    return {
        "query": pieces[query], "key": pieces[key], "text": text,
        "query_start": spans[query][0], "query_stop": spans[query][1],
        "key_start": spans[key][0], "key_stop": spans[key][1],
        "query_at": _typed(scope, text, ids[query], spans[query]), "key_at": _typed(scope, text, ids[key], spans[key]),
    }  # fmt: skip


def _typed(scope: Scope, text: str, token: int, span: tuple[int, int]) -> int | None:
    """A token's place where the text is a prompt of its own; None where that comes apart into other tokens there."""
    if not getattr(scope.tokenizer, "is_fast", False):
        return None
    ids, offsets = next(scope.encoder.ids_and_offsets([text], chat=False))
    found = [i for i, (start, stop) in enumerate(offsets) if ids[i] == token and start < span[1] and stop > span[0]]
    return found[0] if len(found) == 1 else None


def counted(number: int, what: str) -> str:
    """A number and its noun.

    >>> counted(1, "head"), counted(3, "head")
    ('1 head', '3 heads')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
