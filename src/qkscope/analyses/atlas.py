"""The atlas: every head by what decides where it looks, found by changing words in plain text.

A passage is changed one word at a time (`qkscope.analyses.because`), and each changed passage serves every head: a look
of each head, drawn among those that give .3 or more to a token that is not the first, gets its reason. A head's *jobs*
are the reasons of its looks, and the first is its kind: *induction* (after a copy of the query's word), *duplicate
token* (to a copy), *previous token* and other fixed *positions*, *self*, the *key word*, the *query word*, or none of
few words. A name is a prediction: on documents that nothing was chosen on it says which token the head looks at, beside
the best fixed offset, the previous token, the query itself and a table of tokens, all fitted on the same passages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.analyses.because import Because, Look, Reason
from qkscope.analyses.prompts import made_with
from qkscope.capture.encode import token_texts
from qkscope.capture.scope import Scope
from qkscope.change.again import Again
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import Count, Seed, checked_class
from qkscope.maths.significance import clustered_bootstrap
from qkscope.runs.progress import doing
from qkscope.runs.result import Result
from qkscope.runs.work import current_work, verb
from qkscope.tasks.sides import Passage, split
from qkscope.tasks.texts import Document, python_texts, text_hash

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"] | None
INDUCTION, DUPLICATE, PREVIOUS, SINK = "induction", "duplicate token", "previous token", "sink"
LENGTH, WORDS = 64, 4  # tokens of a passage, and alternatives of each word
_BEGUN = 16  # the first token that asks: the ones before it see little
_ATTENDED = 0.3
_EACH = 2  # looks of a head in a passage
_FEW = 4  # looks under which a head rests on the first token
_SHOWN = 3  # jobs of a name, examples of a head
BASELINES = ("offset", "previous", "itself", "tokens")
"""Ways to say which token a head looks at, besides its name; all are fitted on the same passages."""


@checked_class
@dataclass(frozen=True)
class Atlas(Result):
    """All heads in their order; ``tables["scores"]`` has the names beside the baselines."""

    main = "atlas"


@verb("atlas")
def atlas(
    scope: Scope,
    texts: Texts = None,
    n: Count = 16,
    *,
    heads: str | Head | Sequence[str | Head] | None = None,
    test: Count = 16,
    length: Annotated[int, "at least 24"] = LENGTH,
    seed: Seed = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Atlas:
    """Name every head by what decides where it looks.

    Parameters
    ----------
    scope : the model.
    texts : documents, or strings that are documents of their own; if not given, the texts that come with Python.
    n, test : passages whose words are changed, and others, of other documents, on which names are scored.
    heads : heads by name; all by default.
    length : the most tokens of a passage.
    seed : of every draw.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is written by default.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import tasks
    >>> texts = [unit[0].text for unit in tasks.induction().draw("fit", "answer", 200)]
    >>> names = atlas(Scope.load("nano:mixed"), texts, 8, test=8, heads="L1H1", length=32, progress=False)
    >>> names.table()[0]["kind"]
    'induction'
    """
    chosen, documents, work = tuple(scope.parse(heads)), documents_of(texts), current_work()
    fit, tested = passages_of(scope, documents, (n, test), length, seed)
    work.begin(scope, [fit, tested], heads=[str(head) for head in chosen], length=length, seed=seed, words=WORDS)
    looks: list[dict[str, Any]] = []
    for i, passage in enumerate(fit):
        with doing(f"changing the words of passage {i + 1} of {len(fit)}", progress):
            looks += work.once(
                f"passage {i}", partial(_look_rows, scope, chosen, passage, derived_seed(seed, "atlas", i))
            )
    seen = {
        side: [Sight.of(scope, chosen, passage) for passage in own] for side, own in (("fit", fit), ("test", tested))
    }
    rows = [
        _head_row(scope, head, h, [row for row in looks if row["head"] == str(head)], seen["fit"])
        for h, head in enumerate(chosen)
    ]
    scores = score_rows(scope, rows, seen["fit"], seen["test"], seed)
    examples = [row for head in chosen for row in _examples(looks, str(head))]
    return Atlas(
        experiment="atlas",
        answer=_answer(rows, scores, len(fit), len(tested)),
        tables={"atlas": rows, "scores": scores, "jobs": _job_rows(rows, looks), "examples": examples},
        seed=seed,
        **made_with(scope, text=text_hash(documents), n=len(fit), test=len(tested), length=length),
    )


# ---------------------------------------------------------------------- text


def documents_of(texts: Texts) -> tuple[Document, ...]:
    """Documents as they are, strings as documents of their own, and Python's own texts where nothing is given."""
    if texts is None:
        return python_texts(docstrings=True)
    made = [t if isinstance(t, Document) else Document(f"text {i}", str(t)) for i, t in enumerate(texts, 1)]
    return tuple(document for document in made if document.text.strip())


def passages_of(
    scope: Scope, documents: Sequence[Document], counts: tuple[int, int], length: int, seed: int
) -> tuple[list[Passage], list[Passage]]:
    """Passages to fit on and to test on, drawn at random from documents that share no text."""
    if scope.tokenizer is None:
        raise BadInput(f"{scope.name} has no tokenizer: text cannot be read without one.")
    encode = lambda text: scope.tokenizer(text, verbose=False)["input_ids"]  # noqa: E731
    sides, drawn = split(documents, encode, length=length, seed=seed), []
    for side, count in zip(("fit", "test"), counts, strict=True):
        whole = [passage for passage in sides[side] if len(passage.ids) > _BEGUN]
        order = torch.Generator().manual_seed(derived_seed(seed, "passages", side))
        drawn.append([whole[i] for i in torch.randperm(len(whole), generator=order).tolist()[:count]])
    return drawn[0], drawn[1]


# ---------------------------------------------------------------------- looks and their reasons


@dataclass(frozen=True)
class Sight:
    """One passage as heads see it: to which token each looks most from every token, the first token left out."""

    passage: Passage
    keys: Int[Tensor, "h t"]
    attention: Float[Tensor, "h t"]

    @classmethod
    def of(cls, scope: Scope, heads: Sequence[Head], passage: Passage, again: Again | None = None) -> Sight:
        """Run a passage, unless it was."""
        again = again or Again.of(scope, torch.tensor(passage.ids, device=scope.device))
        top = []
        for head in heads:
            weights = again.calls[head.layer].attention([head.index])[0, 0].float().cpu()
            weights[:, 0] = 0
            top.append(weights.max(-1))
        return cls(passage, torch.stack([one.indices for one in top]), torch.stack([one.values for one in top]))

    @property
    def looks(self) -> Bool[Tensor, "h t"]:
        """From where each head looks at a token besides the first."""
        return (self.attention >= _ATTENDED) & (torch.arange(self.keys.shape[1]) >= _BEGUN)


def _look_rows(scope: Scope, heads: Sequence[Head], passage: Passage, seed: int) -> list[dict[str, Any]]:
    """A look of each head in a passage, with what decides it."""
    again = Again.of(scope, torch.tensor(passage.ids, device=scope.device))
    sight, draws = Sight.of(scope, heads, passage, again), torch.Generator().manual_seed(seed)
    looks = []
    for h, head in enumerate(heads):
        places = sight.looks[h].nonzero()[:, 0].tolist()
        for i in torch.randperm(len(places), generator=draws).tolist()[:_EACH]:
            looks.append(Look(head, places[i], int(sight.keys[h, places[i]])))
    if not looks:
        return []
    texts = token_texts(scope, passage.ids)
    reasons = Because(again, looks, seed, WORDS, WORDS).reasons(follow=False, near=False)
    return [
        {"head": str(r.look.head), "job": job_of(r), "query": r.look.query, "key": r.look.key, "attention": r.before,
         "group": passage.group, "document": passage.document, "tokens": texts,
         "text": _prompt_of(scope, passage.ids[: r.look.query + 1]),
         "causes": [row["position"] for row in r.causes]}
        for r in reasons
    ]  # fmt: skip


def _prompt_of(scope: Scope, ids: Sequence[int]) -> str:
    """What to type for these tokens: without those that the tokenizer puts in front of a text."""
    return str(scope.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def job_of(reason: Reason) -> str:
    """What a head does in one look, in the field's words."""
    look, kind = reason.look, reason.kind
    if kind == "same word":
        row = next(row for row in reason.relations if row["kind"] == kind and row["verdict"] == "shown")
        start = int(row["positions"].split(", ")[0])
        end = next(word["end"] for word in reason.words if word["position"] == start)
        return DUPLICATE if start <= look.key < end else INDUCTION if end <= look.key <= end + 1 else "same word"
    if kind == "position":
        return PREVIOUS if look.query - look.key == 1 else f"position {look.key - look.query}"
    shown = {row["kind"] for row in reason.relations if row["verdict"] == "shown"}
    return "key and query words" if {"key word", "query word"} <= shown else kind


def _head_row(
    scope: Scope, head: Head, h: int, looks: Sequence[Mapping[str, Any]], sights: Sequence[Sight]
) -> dict[str, Any]:
    asked = sum(int(sight.looks[h].sum()) for sight in sights)
    leaves = asked / max(sum(sight.keys.shape[1] - _BEGUN for sight in sights), 1)
    jobs = Counter(row["job"] for row in looks).most_common()
    told = ", ".join(f"{job} {count / len(looks):.0%}" for job, count in jobs[:_SHOWN])
    rests = len(looks) < _FEW
    kind = SINK if rests else jobs[0][0]
    own = torch.tensor([[float(row["job"] == kind), row["group"]] for row in looks]) if not rests else torch.zeros(0, 2)
    low, high = (
        clustered_bootstrap(own[:, :1].double(), own[:, 1].long())
        if len(own) > 1
        else (torch.full((1,), torch.nan),) * 2
    )
    offsets = Counter(int(sight.keys[h, q]) - q for sight in sights for q in sight.looks[h].nonzero()[:, 0].tolist())
    attracts = Counter(
        sight.passage.ids[int(sight.keys[h, q])] for sight in sights for q in sight.looks[h].nonzero()[:, 0].tolist()
    )
    group = scope.facts.layers[head.layer].n_heads // scope.facts.layers[head.layer].n_kv_heads
    return {
        "head": str(head), "layer": head.layer, "index": head.index, "kind": kind,
        "name": "rests on the first token" if rests else told, "share": None if rests else jobs[0][1] / len(looks),
        "low": float(low[0]), "high": float(high[0]), "looks": len(looks), "leaves": leaves,
        "offset": offsets.most_common(1)[0][0] if offsets else None,
        "tokens": " ".join(repr(text) for text in token_texts_of(scope, [i for i, _ in attracts.most_common(5)])),
        "key_head": f"L{head.layer}K{head.kv(group)}",
    }  # fmt: skip


def token_texts_of(scope: Scope, ids: Sequence[int]) -> list[str]:
    """What tokens read as, each by itself."""
    return [token_texts(scope, [i])[0] for i in ids]


def _job_rows(rows: Sequence[Mapping[str, Any]], looks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for row in rows:
        own = [look for look in looks if look["head"] == row["head"]]
        for job, count in Counter(look["job"] for look in own).most_common():
            made.append({"head": row["head"], "job": job, "share": count / len(own), "looks": count})
    return made


def _examples(looks: Sequence[Mapping[str, Any]], head: str) -> list[dict[str, Any]]:
    """The strongest looks of a head, as text."""
    own = sorted((row for row in looks if row["head"] == head), key=lambda row: -row["attention"])[:_SHOWN]
    return [{name: value for name, value in row.items() if name != "group"} for row in own]


# ---------------------------------------------------------------------- names as predictions


def score_rows(
    scope: Scope, rows: Sequence[Mapping[str, Any]], fit: Sequence[Sight], test: Sequence[Sight], seed: int
) -> list[dict[str, Any]]:
    """How often each head's name, and each baseline, says to which token it looks, on looks of unseen documents."""
    made = []
    for h, row in enumerate(rows):
        guess = Guesses(row, h, fit)
        told = [guess.hits(sight) for sight in test]
        every = torch.cat([hits for hits in told])
        if len(every) < _FEW:
            continue
        groups = torch.repeat_interleave(
            torch.tensor([s.passage.group for s in test]), torch.tensor([len(hits) for hits in told])
        )
        gain = (every[:, 0] - every[:, 1]).double()
        low, high = clustered_bootstrap(gain[:, None], groups)
        loss = guess.losses(fit, test)
        less, *ends = loss[1] - loss[0], *clustered_bootstrap((loss[1] - loss[0])[:, None].double(), groups)
        made.append({
            "head": row["head"], "kind": row["kind"], "looks": len(every), "name": float(every[:, 0].mean()),
            **{name: float(every[:, 1 + i].mean()) for i, name in enumerate(BASELINES)}, "gain": float(gain.mean()),
            "low": float(low[0]), "high": float(high[0]), "log_loss": float(loss[0].mean()),
            "with_name": float(loss[1].mean()),
            "loss_change": float(less.mean()), "loss_low": float(ends[0][0]), "loss_high": float(ends[1][0]),
        })  # fmt: skip
    return made


class Guesses:
    """Ways to say where one head looks, fitted on some passages.

    Parameters
    ----------
    row : of the head, with its kind.
    h : its number.
    fit : passages to fit on.
    """

    def __init__(self, row: Mapping[str, Any], h: int, fit: Sequence[Sight]) -> None:
        self.kind, self.h, self.offset = row["kind"], h, -1 if row["offset"] is None else int(row["offset"])
        self.offsets: Counter[int] = Counter()
        self.drawn: Counter[int] = Counter()
        self.there: Counter[int] = Counter()
        for sight in fit:
            for q in sight.looks[h].nonzero()[:, 0].tolist():
                key = int(sight.keys[h, q])
                self.offsets[key - q] += 1
                self.drawn[sight.passage.ids[key]] += 1
                self.there.update(sight.passage.ids[1 : q + 1])

    def rate(self, token: int) -> float:
        """How often a token in sight is the one that is looked at."""
        return (self.drawn[token] + 0.1) / (self.there[token] + 10)

    def named(self, ids: Sequence[int], q: int) -> int:
        """The token that the name says."""
        copies = [i for i in range(1, q) if ids[i] == ids[q]]
        match self.kind:
            case "induction" if copies:
                return copies[-1] + 1
            case "duplicate token" | "same word" if copies:
                return copies[-1]
            case "previous token":
                return q - 1
            case "self":
                return q
            case "key word" | "key and query words":
                return max(range(1, q + 1), key=lambda i: (self.rate(ids[i]), i))
        return q + self.offset if q + self.offset > 0 else q

    def all(self, ids: Sequence[int], q: int) -> list[int]:
        """What the name and every baseline say."""
        by_token = max(range(1, q + 1), key=lambda i: (self.rate(ids[i]), i))
        return [self.named(ids, q), q + self.offset if q + self.offset > 0 else q, q - 1, q, by_token]

    def hits(self, sight: Sight) -> Float[Tensor, "l m"]:
        """Which of them are right, at every look of a passage."""
        places = sight.looks[self.h].nonzero()[:, 0].tolist()
        rows = [
            [float(guess == int(sight.keys[self.h, q])) for guess in self.all(sight.passage.ids, q)] for q in places
        ]
        return torch.tensor(rows).reshape(len(places), 1 + len(BASELINES))

    def losses(self, fit: Sequence[Sight], test: Sequence[Sight]) -> tuple[Tensor, Tensor]:
        """Log-loss of a mixture of the baselines at every tested look, without and with the name among them."""
        chances = [torch.cat([self._chances(sight) for sight in side]) for side in (fit, test)]
        losses = []
        for columns in (slice(0, -1), slice(0, None)):
            own, tested = chances[0][:, columns], chances[1][:, columns]
            weights = torch.full((own.shape[1],), 1 / own.shape[1])
            for _ in range(50):  # expectation maximisation of the mixture's weights
                parts = own * weights
                weights = (parts / parts.sum(1, keepdim=True)).mean(0) if len(own) else weights
            losses.append(-(tested @ weights).log())
        return losses[0], losses[1]

    def _chances(self, sight: Sight) -> Float[Tensor, "l m"]:
        """What each way says of the token that is looked at: all alike, offsets, previous, itself, tokens; the name."""
        rows, ids, total = [], sight.passage.ids, sum(self.offsets.values())
        for q in sight.looks[self.h].nonzero()[:, 0].tolist():
            key = int(sight.keys[self.h, q])
            rates = sum(self.rate(ids[i]) for i in range(1, q + 1))
            rows.append([
                1 / q, self.offsets[key - q] / max(total, 1), float(key == q - 1), float(key == q),
                self.rate(ids[key]) / rates, float(key == self.named(ids, q)),
            ])  # fmt: skip
        return torch.tensor(rows).reshape(len(rows), 6)


# ---------------------------------------------------------------------- in words


def _answer(rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]], fit: int, tested: int) -> str:
    if len(rows) <= _SHOWN:
        return " ".join(f"{row['head']}: {row['name']} ({row['looks']} looks)." for row in rows)
    kinds = Counter("position" if row["kind"].startswith("position") else row["kind"] for row in rows)
    told = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(8))
    fixed = (PREVIOUS, "self")
    other = [row for row in scores if row["kind"] not in fixed and not row["kind"].startswith(("position", "no "))]
    ahead = sum(row["low"] > 0 for row in other)
    return (
        f"{len(rows)} heads by what decides where they look, on {fit} passages: {told}. On {tested} passages of other"
        f" documents, of {len(other)} heads whose name is no offset, {ahead} are predicted better by it than by their"
        " best offset (95% interval by document)."
    )
