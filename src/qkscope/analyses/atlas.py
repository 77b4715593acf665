"""The atlas: every head by what decides where it looks, found by changing words in plain text.

A passage is changed one word at a time (`qkscope.analyses.because`), and each changed passage serves every head: a look
of each head, drawn among those that give .3 or more to a token that is not the first, gets its reason. A head's *jobs*
are the reasons of its looks, and the first is its kind: *induction* (after a copy of the query's word), *duplicate
token* (to a copy), *previous token* and other fixed *positions*, *self*, the *key word*, the *query word*, or none of
few words. A name is a prediction: on documents that nothing was chosen on it says which token the head looks at, beside
the best fixed offset, the previous token, the query itself and a table of tokens, all fitted on the same passages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch

from qkscope.analyses.because import Because, Look, Reason
from qkscope.analyses.guesses import (
    BEGUN,
    DUPLICATE,
    FEW,
    INDUCTION,
    JOBS,
    NO_RULE,
    PREVIOUS,
    PUNCTUATION,
    SINK,
    Sight,
    score_rows,
)  # fmt: skip
from qkscope.analyses.prompts import made_with
from qkscope.analyses.trace.prompt import reader_of
from qkscope.capture.encode import token_texts
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.change.again import Again, prompt_of
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import Count, Seed, checked_class
from qkscope.linear.split import direct_effect
from qkscope.maths.significance import clustered_bootstrap
from qkscope.runs.progress import doing
from qkscope.runs.result import Result
from qkscope.runs.work import current_work, verb
from qkscope.tasks.sides import Passage, split
from qkscope.tasks.texts import Document, package_texts, python_texts, text_hash

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"] | None
LENGTH, WORDS = 64, 4  # tokens of a passage, and alternatives of each word
_EACH = 2  # looks of a head in a passage


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
    texts : documents, or strings that are documents of their own; if not given, the texts that come with Python, and
        names are scored on what installed packages say of themselves.
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
    other = package_texts() if texts is None else documents
    fit, tested = passages_of(scope, documents, n, length, seed), passages_of(scope, other, test, length, seed, "test")
    work.begin(scope, [fit, tested], heads=[str(head) for head in chosen], length=length, seed=seed, words=WORDS)
    looks: list[dict[str, Any]] = []
    for i, passage in enumerate(fit):
        with doing(f"changing the words of passage {i + 1} of {len(fit)}", progress):
            changed = partial(look_rows, scope, chosen, passage, derived_seed(seed, "atlas", i))
            looks += [row | {"passage": i} for row in work.once(f"passage {i}", changed)]
    seen = {
        side: [Sight.of(scope, chosen, passage) for passage in own] for side, own in (("fit", fit), ("test", tested))
    }
    rows = [
        head_row(scope, head, h, [row for row in looks if row["head"] == str(head)], seen["fit"])
        for h, head in enumerate(chosen)
    ]
    jobs = job_rows(rows, looks)
    scores = score_rows(rows, jobs, seen["fit"], seen["test"])
    examples = [row for head in chosen for row in _examples(looks, str(head))]
    _promote(scope, fit, rows, examples)
    return Atlas(
        experiment="atlas",
        answer=_answer(rows, scores, len(fit), len(tested)),
        tables={"atlas": rows, "scores": scores, "jobs": jobs, "examples": examples},
        seed=seed,
        **made_with(scope, text=text_hash(documents), n=len(fit), test=len(tested), length=length),
    )


@cache
def known_jobs(weights: str) -> dict[str, dict[str, float]]:
    """What each head of a shipped atlas does, with shares of its looks; nothing for a model that has none."""
    for path in sorted(Path(__file__).parent.glob("atlas-*.json")):
        shipped = json.loads(path.read_text("utf-8"))
        if shipped["made"]["asked"]["weights"] == weights:
            return {row["head"]: row["jobs"] for row in shipped["heads"]}
    return {}


# ---------------------------------------------------------------------- text


def documents_of(texts: Texts) -> tuple[Document, ...]:
    """Documents as they are, strings as documents of their own, and Python's own texts where nothing is given."""
    if texts is None:
        return python_texts(docstrings=True)
    made = [t if isinstance(t, Document) else Document(f"text {i}", str(t)) for i, t in enumerate(texts, 1)]
    return tuple(document for document in made if document.text.strip())


def passages_of(
    scope: Scope, documents: Sequence[Document], count: int, length: int, seed: int, side: str = "fit"
) -> list[Passage]:
    """Passages of one side of some documents, drawn at random; sides share no text."""
    if scope.tokenizer is None:
        raise BadInput(f"{scope.name} has no tokenizer: text cannot be read without one.")
    encode = lambda text: scope.tokenizer(text, verbose=False)["input_ids"]  # noqa: E731
    whole = [x for x in split(documents, encode, length=length, seed=seed)[side] if len(x.ids) > BEGUN]
    order = torch.Generator().manual_seed(derived_seed(seed, "passages", side))
    return [whole[i] for i in torch.randperm(len(whole), generator=order).tolist()[:count]]


# ---------------------------------------------------------------------- looks and their reasons


def look_rows(scope: Scope, heads: Sequence[Head], passage: Passage, seed: int) -> list[dict[str, Any]]:
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
    shown = {row["kind"]: row["text"] for row in reason.relations if row["verdict"] == "shown"}
    if {"key word", "query word"} <= shown.keys():
        return "key and query words"
    return PUNCTUATION if kind == "key word" and not any(map(str.isalnum, shown[kind])) else kind


def head_row(
    scope: Scope, head: Head, h: int, looks: Sequence[Mapping[str, Any]], sights: Sequence[Sight]
) -> dict[str, Any]:
    """A row of the table ``atlas``: a head's kind and name by its looks, its offset, its tokens."""
    asked = sum(int(sight.looks[h].sum()) for sight in sights)
    leaves = asked / max(sum(sight.keys.shape[1] - BEGUN for sight in sights), 1)
    jobs = Counter(row["job"] for row in looks).most_common()
    told = ", ".join(f"{job} {count / len(looks):.0%}" for job, count in jobs[:JOBS])
    rests = len(looks) < FEW
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
        "promotes": "", "key_head": f"L{head.layer}K{head.kv(group)}",
    }  # fmt: skip


def token_texts_of(scope: Scope, ids: Sequence[int]) -> list[str]:
    """What tokens read as, each by itself."""
    return [token_texts(scope, [i])[0] for i in ids]


def job_rows(rows: Sequence[Mapping[str, Any]], looks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The table ``jobs``: how often each reason decides where a head looks."""
    made = []
    for row in rows:
        own = [look for look in looks if look["head"] == row["head"]]
        for job, count in Counter(look["job"] for look in own).most_common():
            made.append({"head": row["head"], "job": job, "share": count / len(own), "looks": count})
    return made


def _examples(looks: Sequence[Mapping[str, Any]], head: str) -> list[dict[str, Any]]:
    """The strongest looks of a head, as text."""
    own = sorted((row for row in looks if row["head"] == head), key=lambda row: -row["attention"])[:JOBS]
    return [{name: value for name, value in row.items() if name != "group"} for row in own]


def _promote(
    scope: Scope, passages: Sequence[Passage], rows: Sequence[dict[str, Any]], examples: Sequence[Mapping[str, Any]]
) -> None:
    """Add the tokens that each head promotes: those whose logits its strongest look raises most, by direct effect."""
    by_head, reader = {row["head"]: row for row in rows}, reader_of(scope)
    strongest = {row["head"]: row for row in reversed(examples)}.values()
    for i in sorted({row["passage"] for row in strongest}):
        looks = [(Head.parse(row["head"]), row["query"], row["key"]) for row in strongest if row["passage"] == i]
        inputs, zeros = prompt_of(scope, torch.tensor(passages[i].ids)[None]), torch.zeros(len(looks), dtype=torch.long)
        nothing, queries = zeros[:, None][:, :0], torch.tensor([query for _, query, _ in looks])
        places = Places(*(x.to(scope.device) for x in (zeros, queries, nothing, nothing.bool())))
        run, written = reader.record(inputs, places, deep=True, logits=True), []
        for head, query, key in looks:
            call = run.calls[head.layer]
            rows_of = call.rows(head.index, zeros[:1].to(call.q.device), torch.tensor([query], device=call.q.device))
            v = call.v[0, run.kv(head, "v"), key].float() * rows_of.attention()[0, 0, key]
            written.append((reader.output_weights(head.layer)[0][head.index].to(v) @ v).to(run.row.device))
        raised = direct_effect(run, [head.layer for head, *_ in looks], torch.stack(written))
        for (head, *_), logits in zip(looks, () if raised is None else raised, strict=raised is not None):
            best = (logits - logits.mean()).topk(JOBS).indices.tolist()
            by_head[str(head)]["promotes"] = " ".join(map(repr, token_texts_of(scope, best)))


# ---------------------------------------------------------------------- in words


def _answer(rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]], fit: int, tested: int) -> str:
    if len(rows) <= JOBS:
        return " ".join(f"{row['head']}: {row['name']} ({row['looks']} looks)." for row in rows)
    kinds = Counter("position" if row["kind"].startswith("position") else row["kind"] for row in rows)
    told = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(8))
    other = [row for row in scores if not row["kind"].startswith(NO_RULE)]
    ahead = sum(row["low"] > 0 for row in other)
    return (
        f"{len(rows)} heads by what decides where they look, on {fit} passages: {told}. On {tested} passages of other"
        f" documents, of {len(other)} heads whose name is no offset, {ahead} are predicted better by it than by their"
        " best offset (95% interval by document)."
    )
