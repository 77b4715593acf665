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
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput, Example, Result, Scope
from qkscope.checking import Count, Seed, checked_class
from qkscope.findings.because import Because
from qkscope.findings.finding import Look
from qkscope.findings.head_jobs import job_of
from qkscope.findings.prompt_trace import reader_of
from qkscope.findings.task_batches import made_with
from qkscope.heads import Head
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
from qkscope.verbs.atlas.head_names import BEGUN, FEW, JOBS, NO_RULE, SINK, Sights, score_rows

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"] | None
# tokens of a passage, and alternatives of each word
LENGTH = 64
WORDS = 4
_EACH = 2  # looks of a head in a passage
_TOKENS = 5  # tokens that a head looks at most
_KINDS = 8  # kinds of heads in the answer


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
    documents, others = _documents(texts)
    fit = passages_of(scope, documents, n, length, seed)
    tested = passages_of(scope, others, test, length, seed, "test")
    work = current_work()
    work.begin(
        scope,
        [fit, tested],
        heads=[str(head) for head in chosen],
        length=length,
        seed=seed,
        words=WORDS,
    )
    seen = Sights.of(scope, chosen, fit)
    unseen = Sights.of(scope, chosen, tested)
    looks: dict[str, list[dict[str, Any]]] = {str(head): [] for head in chosen}
    for i in range(len(fit)):
        with doing(f"changing the words of passage {i + 1} of {len(fit)}", progress):
            changed = partial(look_rows, scope, chosen, seen, i, derived_seed(seed, "atlas", i))
            for row in work.once(f"passage {i}", changed):
                looks[row["head"]].append(row | {"passage": i})
    rows = [head_row(scope, head, h, looks[str(head)], seen) for h, head in enumerate(chosen)]
    jobs = _job_rows(looks)
    scores = score_rows(rows, jobs, seen, unseen)
    examples = _examples(looks)
    _promote(scope, seen.ids, rows, examples)
    return Atlas(
        experiment="atlas",
        answer=_answer(rows, scores, len(fit), len(tested)),
        tables={"atlas": rows, "scores": scores, "jobs": jobs, "examples": examples},
        seed=seed,
        **made_with(scope, text=text_hash(documents), n=len(fit), test=len(tested), length=length),
    )


def _job_rows(looks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The table ``jobs``: how often each head does what, the commonest job first."""
    rows = []
    for head, of_head in looks.items():
        for job, count in Counter(look["job"] for look in of_head).most_common():
            share = count / len(of_head)
            rows.append({"head": head, "job": job, "share": share, "looks": count})
    return rows


def _examples(looks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The table ``examples``: each head's strongest looks."""
    rows = []
    for of_head in looks.values():
        for look in sorted(of_head, key=lambda row: -row["attention"])[:JOBS]:
            rows.append({name: value for name, value in look.items() if name != "group"})
    return rows


# ---------------------------------------------------------------------- text


def _documents(texts: Texts) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Documents that names are made on, and those that they are scored on; blank ones are left out."""
    if texts is None:
        return python_texts(docstrings=True), package_texts()
    documents = list[Document]()
    for i, text in enumerate(texts, 1):
        document = text if isinstance(text, Document) else Document(f"text {i}", str(text))
        if document.text.strip():
            documents.append(document)
    return tuple(documents), tuple(documents)


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
    passages = split(documents, encode, length=length, seed=seed)[side]
    long = [passage for passage in passages if len(passage.ids) > BEGUN]
    generator = torch.Generator().manual_seed(derived_seed(seed, "passages", side))
    order = torch.randperm(len(long), generator=generator).tolist()
    chosen = [long[i] for i in order[:count]]
    for passage in chosen:  # refused here if its ids are not the model's
        scope.encode([Example(ids=passage.ids)])
    return chosen


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
    scope: Scope, heads: Sequence[Head], sights: Sights, i: int, seed: int
) -> list[dict[str, Any]]:
    """Looks of each head in one of some passages, with what decides them."""
    passage = sights.passages[i]
    looks = _drawn_looks(heads, sights, i, seed)
    if not looks:
        return []
    again = Again.of(scope, torch.tensor(passage.ids, device=scope.device))
    tokens = token_texts(scope, passage.ids)
    decode = partial(
        scope.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    prompts = dict[int, str]()  # up to each query: what to type to ask again
    for look in looks:
        prompts[look.query] = str(decode(passage.ids[: look.query + 1]))
    rows = []
    because = Because(again, looks, seed, WORDS)
    for reason in because.reasons(follow=False, near=False, levels="none"):
        look = reason.look
        rows.append({
            "head": str(look.head), "job": job_of(reason), "query": look.query, "key": look.key,
            "attention": reason.before, "group": passage.group, "document": passage.document, "tokens": tokens,
            "text": prompts[look.query], "causes": [row["position"] for row in reason.causes],
        })  # fmt: skip
    return rows


def _drawn_looks(heads: Sequence[Head], sights: Sights, i: int, seed: int) -> list[Look]:
    """At most `_EACH` looks of every head in one passage."""
    draws = torch.Generator().manual_seed(seed)
    looks = list[Look]()
    for h, head in enumerate(heads):
        queries = sights.looks[i, h].nonzero()[:, 0].tolist()
        order = torch.randperm(len(queries), generator=draws).tolist()
        for query in [queries[place] for place in order[:_EACH]]:
            looks.append(Look(head, query, int(sights.keys[i, h, query])))
    return looks


def head_row(
    scope: Scope, head: Head, h: int, looks: Sequence[Mapping[str, Any]], sights: Sights
) -> dict[str, Any]:
    """A row of the table ``atlas``: a head's kind and name by its looks, its offset, its tokens."""
    lexicon = lexicon_of(scope)
    layer = scope.facts.layers[head.layer]
    passage, query, key = sights.of_head(h)
    queries = sum(len(passage.ids) - BEGUN for passage in sights.passages)
    offsets = Counter((key - query).tolist()).most_common(1)
    attracts = Counter(sights.ids[passage, key].tolist()).most_common(_TOKENS)
    kind = SINK
    name = "rests on the first token"
    share = None
    low = high = float("nan")
    if len(looks) >= FEW:
        jobs = Counter(row["job"] for row in looks).most_common()
        kind, count = jobs[0]
        share = count / len(looks)
        name = ", ".join(f"{job} {count / len(looks):.0%}" for job, count in jobs[:JOBS])
        low, high = _interval(looks, kind)
    return {
        "head": str(head), "layer": head.layer, "index": head.index, "kind": kind, "name": name, "share": share,
        "low": low, "high": high, "looks": len(looks), "leaves": len(query) / max(queries, 1),
        "offset": offsets[0][0] if offsets else None,
        "tokens": " ".join(repr(lexicon.text(i)) for i, _ in attracts),
        "promotes": "", "key_head": f"L{head.layer}K{head.kv(layer.n_heads // layer.n_kv_heads)}",
    }  # fmt: skip


def _interval(looks: Sequence[Mapping[str, Any]], kind: str) -> tuple[float, float]:
    """Bootstrap interval of a job's share of looks, by document."""
    does = torch.tensor([[float(row["job"] == kind)] for row in looks]).double()
    low, high = clustered_bootstrap(does, torch.tensor([row["group"] for row in looks]))
    return float(low[0]), float(high[0])


def _promote(
    scope: Scope,
    ids: Int[Tensor, "p t"],
    rows: Sequence[dict[str, Any]],
    examples: Sequence[Mapping[str, Any]],
) -> None:
    """Add the tokens that each head promotes: those whose logits its strongest look raises most."""
    by_head = {row["head"]: row for row in rows}
    lexicon = lexicon_of(scope)
    strongest = {row["head"]: row for row in reversed(examples)}.values()
    for passages in torch.arange(len(ids)).split(max(room_of(scope) // ids.shape[1], 1)):
        first = int(passages[0])
        looks = [row for row in strongest if first <= row["passage"] <= passages[-1]]
        if not looks:
            continue
        raised = _raised(scope, ids[passages], looks, first)
        if raised is None:
            continue
        best = (raised - raised.mean(1, keepdim=True)).topk(JOBS).indices.tolist()
        for look, tokens in zip(looks, best, strict=True):
            by_head[look["head"]]["promotes"] = " ".join(repr(lexicon.text(i)) for i in tokens)


def _raised(
    scope: Scope, ids: Int[Tensor, "p t"], looks: Sequence[Mapping[str, Any]], first: int
) -> Float[Tensor, "l v"] | None:
    """Direct effect on the logits of what each look read at its key; None where there is none.

    Parameters
    ----------
    ids : passages.
    looks : in them, a row of the table ``examples`` each.
    first : the number of the first passage.
    """
    reader = reader_of(scope)
    weights = cache(reader.output_weights)
    places = [[row["passage"] - first, row["query"], row["key"]] for row in looks]
    at = torch.tensor(places)
    on_device = at.to(scope.device)
    no_keys = on_device[:, :0]
    queries = Places(on_device[:, 0], on_device[:, 1], no_keys, no_keys.bool())
    run = reader.record(prompt_of(scope, ids), queries, deep=True, logits=True)
    heads = [Head.parse(row["head"]) for row in looks]
    written = []
    for head, (i, query, key) in zip(heads, places, strict=True):
        call = run.calls[head.layer]
        rows = call.rows(head.index, torch.tensor([i]), torch.tensor([query]))
        v = call.v[i, run.index(head, "v"), key].float() * rows.attention()[0, 0, key]
        W_O = weights(head.layer)[0][head.index].to(v)
        written.append((W_O @ v).to(run.row.device))
    return direct_effect(run, [head.layer for head in heads], torch.stack(written))


# ---------------------------------------------------------------------- in words


def _answer(
    rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]], fit: int, tested: int
) -> str:
    """What decides where heads look, and how many names predict better than an offset."""
    if len(rows) <= JOBS:
        return " ".join(f"{row['head']}: {row['name']} ({row['looks']} looks)." for row in rows)
    kinds = Counter[str]()
    for row in rows:
        kinds["position" if row["kind"].startswith("position") else row["kind"]] += 1
    told = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(_KINDS))
    no_offset = [row for row in scores if not row["kind"].startswith(NO_RULE)]
    ahead = sum(row["low"] > 0 for row in no_offset)
    return (
        f"{len(rows)} heads by what decides where they look, on {fit} passages: {told}. On {tested} passages of other"
        f" documents, of {len(no_offset)} heads whose name is no offset, {ahead} are predicted better by it than by"
        " their best offset (95% interval by document)."
    )
