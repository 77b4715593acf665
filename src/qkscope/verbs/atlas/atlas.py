"""The atlas: every head by what decides where it looks, found by changing words in plain text.

A passage is changed one word at a time (`qkscope.findings.because`), and each changed passage
serves every head: a look of each head, drawn among those that give .3 or more to a token that is
not the first, gets its reason. A head's *jobs* are the reasons of its looks, and the first is its
kind: *induction* (after a copy of the query's word), *duplicate token* (to a copy), *previous
token* and other fixed *positions*, *self*, the *key word*, the *query word*, or none of few words.
A name is a prediction: on documents that nothing was chosen on it says which token the head looks
at, beside the best fixed offset, the previous token, the query itself and a table of tokens, all
fitted on the same passages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope import BadInput, Head, Result, Scope
from qkscope.checking import Count, Seed, checked_class
from qkscope.findings.because import Because
from qkscope.findings.finding import Look
from qkscope.findings.head_jobs import job_of
from qkscope.findings.prompt_trace import reader_of
from qkscope.findings.task_batches import made_with
from qkscope.linear.attribution import direct_effect
from qkscope.model.capture_types import Places
from qkscope.model.encode import token_texts
from qkscope.rerun.alternatives import lexicon_of
from qkscope.rerun.rerun_tokens import Again, prompt_of, room_of
from qkscope.results.progress import doing
from qkscope.results.work import current_work, verb
from qkscope.seeds import derived_seed
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.documents import Document, package_texts, python_texts, text_hash
from qkscope.texts.holdout import Passage, split
from qkscope.verbs.atlas import head_names as guesses

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"] | None
# tokens of a passage, and alternatives of each word
LENGTH = 64
WORDS = 4
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
    """Name every head by what decides where it looks on plain text.

    Parameters
    ----------
    scope : the model.
    texts : documents, or strings that are documents of their own; if not given, the texts that come
        with Python, and names are scored on what installed packages say of themselves.
    n, test : passages whose words are changed, and others, of other documents, on which names are
        scored.
    heads : heads by name; all by default.
    length : the most tokens of a passage.
    seed : of every draw.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is
        written by default.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import tasks
    >>> texts = [unit[0].text for unit in tasks.induction().draw("fit", "answer", 200)]
    >>> names = atlas(Scope.load("nano:mixed"), texts, 8, test=8, heads="L1H1", length=32, progress=False)
    >>> names.table()[0]["kind"]
    'induction'
    """
    chosen = tuple(scope.parse(heads))
    work = current_work()
    given = [
        t if isinstance(t, Document) else Document(f"text {i}", str(t))
        for i, t in enumerate(texts or (), 1)
    ]
    documents = other = tuple(document for document in given if document.text.strip())
    if texts is None:
        documents = python_texts(docstrings=True)
        other = package_texts()
    fit = passages_of(scope, documents, n, length, seed)
    tested = passages_of(scope, other, test, length, seed, "test")
    work.begin(
        scope,
        [fit, tested],
        heads=[str(head) for head in chosen],
        length=length,
        seed=seed,
        words=WORDS,
    )
    seen = guesses.Sights.of(scope, chosen, fit)
    unseen = guesses.Sights.of(scope, chosen, tested)
    looks: dict[str, list[dict[str, Any]]] = {str(head): [] for head in chosen}
    for i in range(len(fit)):
        with doing(f"changing the words of passage {i + 1} of {len(fit)}", progress):
            changed = partial(look_rows, scope, chosen, seen, i, derived_seed(seed, "atlas", i))
            for row in work.once(f"passage {i}", changed):
                looks[row["head"]].append(row | {"passage": i})
    rows = [head_row(scope, head, h, looks[str(head)], seen) for h, head in enumerate(chosen)]
    jobs = [
        {"head": head, "job": job, "share": count / len(own), "looks": count}
        for head, own in looks.items()
        for job, count in Counter(look["job"] for look in own).most_common()
    ]
    scores = guesses.score_rows(rows, jobs, seen, unseen)
    strongest = (
        sorted(own, key=lambda row: -row["attention"])[: guesses.JOBS] for own in looks.values()
    )
    examples = [
        {name: row[name] for name in row if name != "group"} for own in strongest for row in own
    ]
    _promote(scope, seen.ids, rows, examples)
    return Atlas(
        experiment="atlas",
        answer=_answer(rows, scores, len(fit), len(tested)),
        tables={"atlas": rows, "scores": scores, "jobs": jobs, "examples": examples},
        seed=seed,
        **made_with(scope, text=text_hash(documents), n=len(fit), test=len(tested), length=length),
    )


# ---------------------------------------------------------------------- text


def passages_of(
    scope: Scope,
    documents: Sequence[Document],
    count: int,
    length: int,
    seed: int,
    side: str = "fit",
) -> list[Passage]:
    """Passages of one side of some documents, drawn at random; sides share no text."""
    if scope.tokenizer is None:
        raise BadInput(f"{scope.name} has no tokenizer: text cannot be read without one.")
    encode = lambda text: scope.tokenizer(text, verbose=False)["input_ids"]  # noqa: E731
    if scope.encoder.unknown is not None:
        _check_words(documents, encode, scope.encoder.unknown)
    whole = [
        x
        for x in split(documents, encode, length=length, seed=seed)[side]
        if len(x.ids) > guesses.BEGUN
    ]
    order = torch.Generator().manual_seed(derived_seed(seed, "passages", side))
    return [whole[i] for i in torch.randperm(len(whole), generator=order).tolist()[:count]]


def _check_words(
    documents: Sequence[Document], encode: Callable[[str], Sequence[int]], unknown: int
) -> None:
    """Refuse texts of words that have no token: all of these are one token, so that texts look alike."""
    ids = [i for document in documents for i in encode(document.text)]
    if ids.count(unknown) > len(ids) / 2:
        raise BadInput(
            "this model has a token only for the words it was trained on, and most words of these "
            f"{len(documents)} texts have none: take words of the tasks."
        )


# ---------------------------------------------------------------------- looks and their reasons


def look_rows(
    scope: Scope, heads: Sequence[Head], sights: guesses.Sights, i: int, seed: int
) -> list[dict[str, Any]]:
    """Looks of each head in one of some passages, with what decides them."""
    passage = sights.passages[i]
    draws = torch.Generator().manual_seed(seed)
    looks = []
    for h, head in enumerate(heads):
        places = sights.looks[i, h].nonzero()[:, 0].tolist()
        for at in torch.randperm(len(places), generator=draws).tolist()[:_EACH]:
            looks.append(Look(head, places[at], int(sights.keys[i, h, places[at]])))
    if not looks:
        return []
    again = Again.of(scope, torch.tensor(passage.ids, device=scope.device))
    texts = token_texts(scope, passage.ids)
    decode = partial(
        scope.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    prompts = {
        query: str(decode(passage.ids[: query + 1])) for query in {look.query for look in looks}
    }  # to type
    return [
        {"head": str(r.look.head), "job": job_of(r), "query": r.look.query, "key": r.look.key, "attention": r.before,
         "group": passage.group, "document": passage.document, "tokens": texts, "text": prompts[r.look.query],
         "causes": [row["position"] for row in r.causes]}
        for r in Because(again, looks, seed, WORDS).reasons(follow=False, near=False)
    ]  # fmt: skip


def head_row(
    scope: Scope, head: Head, h: int, looks: Sequence[Mapping[str, Any]], sights: guesses.Sights
) -> dict[str, Any]:
    """A row of the table ``atlas``: a head's kind and name by its looks, its offset, its tokens."""
    (passage, query, key), lexicon = sights.of_head(h), lexicon_of(scope)
    leaves = len(query) / max(
        sum(len(passage.ids) - guesses.BEGUN for passage in sights.passages), 1
    )
    jobs = Counter(row["job"] for row in looks).most_common()
    told = ", ".join(f"{job} {count / len(looks):.0%}" for job, count in jobs[: guesses.JOBS])
    rests = len(looks) < guesses.FEW
    kind = guesses.SINK if rests else jobs[0][0]
    low = high = torch.full((1,), torch.nan)
    if not rests:
        own = torch.tensor([[float(row["job"] == kind), row["group"]] for row in looks])
        low, high = clustered_bootstrap(own[:, :1].double(), own[:, 1].long())
    offsets = Counter((key - query).tolist())
    attracts = Counter(sights.ids[passage, key].tolist())
    group = scope.facts.layers[head.layer].n_heads // scope.facts.layers[head.layer].n_kv_heads
    return {
        "head": str(head), "layer": head.layer, "index": head.index, "kind": kind,
        "name": "rests on the first token" if rests else told, "share": None if rests else jobs[0][1] / len(looks),
        "low": float(low[0]), "high": float(high[0]), "looks": len(looks), "leaves": leaves,
        "offset": offsets.most_common(1)[0][0] if offsets else None,
        "tokens": " ".join(repr(lexicon.text(i)) for i, _ in attracts.most_common(5)),
        "promotes": "", "key_head": f"L{head.layer}K{head.kv(group)}",
    }  # fmt: skip


def _promote(
    scope: Scope,
    ids: Int[Tensor, "p t"],
    rows: Sequence[dict[str, Any]],
    examples: Sequence[Mapping[str, Any]],
) -> None:
    """Add the tokens that each head promotes: those whose logits its strongest look raises most, by
    direct effect.
    """
    by_head = {row["head"]: row for row in rows}
    reader = reader_of(scope)
    lexicon = lexicon_of(scope)
    strongest = {row["head"]: row for row in reversed(examples)}.values()
    weights = cache(reader.output_weights)
    for some in torch.arange(len(ids)).split(max(room_of(scope) // ids.shape[1], 1)):
        looks = [row for row in strongest if some[0] <= row["passage"] <= some[-1]]
        if not looks:
            continue
        heads = [Head.parse(row["head"]) for row in looks]
        at = torch.tensor(
            [[row["passage"] - int(some[0]), row["query"], row["key"]] for row in looks]
        )
        passage, query, nothing = *at[:, :2].to(scope.device).T, at[:, :0].to(scope.device)
        places = Places(passage, query, nothing, nothing.bool())
        written = []
        run = reader.record(prompt_of(scope, ids[some]), places, deep=True, logits=True)
        for head, (i, q, key) in zip(heads, at.tolist(), strict=True):
            call = run.calls[head.layer]
            attention = call.rows(head.index, torch.tensor([i]), torch.tensor([q])).attention()[
                0, 0, key
            ]
            v = call.v[i, run.index(head, "v"), key].float() * attention
            written.append((weights(head.layer)[0][head.index].to(v) @ v).to(run.row.device))
        raised = direct_effect(run, [head.layer for head in heads], torch.stack(written))
        if raised is not None:
            best = (raised - raised.mean(1, keepdim=True)).topk(guesses.JOBS).indices.tolist()
            for head, tokens in zip(heads, best, strict=True):
                by_head[str(head)]["promotes"] = " ".join(repr(lexicon.text(i)) for i in tokens)


# ---------------------------------------------------------------------- in words


def _answer(
    rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]], fit: int, tested: int
) -> str:
    if len(rows) <= guesses.JOBS:
        return " ".join(f"{row['head']}: {row['name']} ({row['looks']} looks)." for row in rows)
    kinds = Counter(
        "position" if row["kind"].startswith("position") else row["kind"] for row in rows
    )
    told = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(8))
    other = [row for row in scores if not row["kind"].startswith(guesses.NO_RULE)]
    ahead = sum(row["low"] > 0 for row in other)
    return (
        f"{len(rows)} heads by what decides where they look, on {fit} passages: {told}. On {tested} passages of other"
        f" documents, of {len(other)} heads whose name is no offset, {ahead} are predicted better by it than by their"
        " best offset (95% interval by document)."
    )
