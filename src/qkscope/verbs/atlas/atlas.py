"""The atlas: every head by a rule that can take its place.

How each head attends is read in passages of plain text, and a rule of at most five parts is fitted
to it (`qkscope.verbs.atlas.rule_fit`): the first token, offsets, decays, copies, what follows
copies, words of a kind, and *rest*, the head's mean row by distance. On passages of other documents
the rule's rows are set beside the head's own (IoU), with the mean row, the best offset and another
head's rule as baselines; and the rule takes the head's place, for what that does to the next token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Example, Scope
from qkscope.checking import Count, Seed
from qkscope.findings.rules import MOSTLY_REST, First, Rest, Rule
from qkscope.findings.shipped_atlas import Atlas, rule_row
from qkscope.findings.task_batches import made_with
from qkscope.heads import Head
from qkscope.model.encode import token_texts
from qkscope.results.progress import doing
from qkscope.results.work import current_work, verb
from qkscope.seeds import derived_seed
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.documents import Document, package_texts, python_texts, text_hash
from qkscope.texts.holdout import Passage, split
from qkscope.verbs.atlas.costs import NextTokens
from qkscope.verbs.atlas.head_patterns import Patterns, log_loss, row_overlap
from qkscope.verbs.atlas.rule_fit import RuleFit
from qkscope.verbs.atlas.word_classes import WordClasses

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"] | None
#: The most tokens of a passage.
LENGTH = 64
_LEAST = 16  # tokens of a passage
_COSTED = 4  # passages in which rules take heads' places
_EXAMPLES = 3  # of each head
_ATTENDED = 0.1  # attention from which on a token is an example
_KEYS = 4  # of an example, by the head and by its rule
_FEW = 3  # heads that the answer names one by one
_KINDS = 8  # kinds of heads in the answer


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
    """Give every head a rule that can take its place, fitted on plain text and tested on other.

    Parameters
    ----------
    scope : the model.
    texts : documents, or strings that are documents of their own; if not given, the texts that come
        with Python, and rules are tested on what installed packages say of themselves.
    n, test : passages that rules are fitted on, and others, of other documents, that they are
        tested on.
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
    >>> scope = Scope.load("nano:mixed")
    >>> made = atlas(scope, texts, 8, test=8, heads="L1H1", length=32, progress=False)
    >>> made["L1H1"].rule.name
    'induction'
    """
    chosen = tuple(scope.parse(heads))
    documents, others = _documents(texts)
    fitted = tuple(passages_of(scope, documents, n, length, seed))
    tested = tuple(passages_of(scope, others, test, length, seed, "test"))
    work = current_work()
    work.begin(
        scope, [fitted, tested], heads=[str(head) for head in chosen], length=length, seed=seed
    )
    classes = WordClasses.of(scope, torch.tensor([i for passage in fitted for i in passage.ids]))
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("heads", "rules", "baselines", "examples")
    }
    layers = sorted({head.layer for head in chosen})
    read = cache(partial(Patterns.of, scope, chosen))
    for layer in layers:
        numbers = [h for h, head in enumerate(chosen) if head.layer == layer]

        def make(numbers: list[int] = numbers) -> dict[str, list[dict[str, Any]]]:
            fit = RuleFit(read(fitted).of_heads(numbers), classes)
            heads = [chosen[h] for h in numbers]
            return _layer_rows(scope, heads, fit, read(tested).of_heads(numbers))

        with doing(f"fitting the rules of layer {layer} ({len(layers)} layers)", progress):
            for name, made in work.once(f"layer {layer}", make).items():
                rows[name] += made
    return Atlas(
        experiment="atlas",
        answer=sentence(rows["heads"], rows["baselines"], len(fitted), len(tested)),
        tables=rows,
        arrays={"classes": classes.of_token},
        seed=seed,
        **made_with(
            scope, text=text_hash(documents), n=len(fitted), test=len(tested), length=length
        ),
    )


# ---------------------------------------------------------------------- text


def _documents(texts: Texts) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Documents that rules are fitted on, and those that they are tested on; without blank ones."""
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
    long = [passage for passage in passages if len(passage.ids) > _LEAST]
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


# ---------------------------------------------------------------------- rules, fitted and tested


def _layer_rows(
    scope: Scope, heads: Sequence[Head], fit: RuleFit, test: Patterns
) -> dict[str, list[dict[str, Any]]]:
    """Rows of all tables for the heads of one layer."""
    rules = {head: fit.rule(h) for h, head in enumerate(heads)}
    costs = NextTokens(scope, test.passages[:_COSTED]).costs(rules)
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("heads", "rules", "baselines", "examples")
    }
    for h, (head, rule) in enumerate(rules.items()):
        neighbour = rules[heads[(h + 1) % len(heads)]]
        scores = score_head(fit, test, h, rule, neighbour)
        rows["heads"].append({
            "head": str(head), "kind": rule.name, "rule": str(rule), "rest": rule.rest,
            "iou": scores["iou"], "mean_row_iou": scores["mean_row"], "cost": costs[head],
            "n": scores["n"],
        })  # fmt: skip
        rows["rules"].append(rule_row(head, rule))
        kept = {name: x for name, x in scores.items() if name not in ("iou", "mean_row", "n")}
        rows["baselines"].append({"head": str(head), **kept})
        rows["examples"] += _examples(scope, head, test, h, rule)
    return rows


def score_head(fit: RuleFit, test: Patterns, h: int, rule: Rule, neighbour: Rule) -> dict[str, Any]:
    """How well a rule gives a head's rows in passages that it was not fitted on, with baselines.

    Parameters
    ----------
    fit : what the rule was fitted on.
    test : other passages.
    h : the head's number.
    rule : its rule.
    neighbour : another head's.
    """
    own = test.of_head(h)
    rules = {
        "iou": rule,
        "mean_row": fit.mean_row(h),
        "first_token": Rule([(1.0, First())]),
        "best_offset": fit.best_offset(h),
        "other_rule": neighbour,
    }
    says = {name: test.rows(other.attention(test.ids)) for name, other in rules.items()}
    ious = {name: row_overlap(rows, own) for name, rows in says.items()}
    gain = (ious["iou"] - ious["mean_row"]).double()
    low, high = clustered_bootstrap(gain[:, None], test.groups)
    return {
        "n": len(own),
        **{name: float(values.mean()) for name, values in ious.items()},
        "gain": float(gain.mean()),
        "low": float(low[0]),
        "high": float(high[0]),
        "log_loss": float(log_loss(says["iou"], own).mean()),
        "mean_row_log_loss": float(log_loss(says["mean_row"], own).mean()),
    }


def _examples(scope: Scope, head: Head, test: Patterns, h: int, rule: Rule) -> list[dict[str, Any]]:
    """The table ``examples``: looks where a head gives most to a token besides the first, one a
    passage, and what its rule says there.
    """
    says = rule.attention(test.ids)
    own = test.attention[:, h].clone() * test.counted[:, :, None]
    own[..., 0] = 0
    largest = own.flatten(1).max(1)
    rows = []
    for i in largest.values.argsort(descending=True)[:_EXAMPLES].tolist():
        query, key = divmod(int(largest.indices[i]), own.shape[2])
        if float(largest.values[i]) < _ATTENDED:
            continue
        passage = test.passages[i]
        row = test.attention[i, h, query, : query + 1]
        rows.append({
            "head": str(head), "query": query, "key": key, "attention": float(row[key]),
            "says": float(says[i, query, key]), "document": passage.document,
            "text": _text(scope, passage.ids[: query + 1]),
            "tokens": token_texts(scope, passage.ids), "keys": _keys(row, says[i, query, : query + 1]),
            "causes": [],
        })  # fmt: skip
    return rows


def _text(scope: Scope, ids: Sequence[int]) -> str:
    """What to type to ask again."""
    text = scope.tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return str(text)


def _keys(row: Float[Tensor, " t"], says: Float[Tensor, " t"]) -> list[dict[str, float]]:
    """The keys that a head, or its rule, gives most, with what each gives."""
    count = min(_KEYS, len(row))
    named = sorted({*row.topk(count).indices.tolist(), *says.topk(count).indices.tolist()})
    return [
        {"key": key, "head": round(float(row[key]), 3), "rule": round(float(says[key]), 3)}
        for key in named
    ]


# ---------------------------------------------------------------------- in words


def sentence(
    rows: Sequence[Mapping[str, Any]],
    baselines: Sequence[Mapping[str, Any]],
    fitted: int,
    tested: int,
) -> str:
    """What heads do, and how well rules give it beside the mean row."""
    if len(rows) <= _FEW:
        return " ".join(f"{row['head']} ({row['kind']}): {row['rule']}." for row in rows)
    kinds = Counter(row["kind"] for row in rows)
    told = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(_KINDS))
    mean = sum(row["iou"] for row in rows) / len(rows)
    mean_row = sum(row["mean_row_iou"] for row in rows) / len(rows)
    ahead = sum(row["low"] > 0 for row in baselines)
    return (
        f"{len(rows)} heads by rules, fitted on {fitted} passages: {told}. On {tested} passages of "
        f"other documents rules give heads' rows with IoU {mean:.2f}, their mean rows by distance "
        f"{mean_row:.2f}; {ahead} rules are better than that (95% interval by document), and "
        f"{kinds[Rest.name]} heads have {Rest.name}: rest is over {MOSTLY_REST:.0%}."
    )
