"""Heads whose writers are known: what `trace` finds of them, beside two kinds of patching.

Of the 31 heads that Tracr's library programs compile to, nine read more than the embedding. A
writer counts as found where its part is a hundredth of the largest one in any look. Attribution
patching is the gradient of the head's relative logit through the whole model, times what differs in
another prompt; path patching the same along the direct edge alone (without norms that is exact).
Which tokens decide is asked by putting every other token of the vocabulary in each place, and the
program's own selector says what must come out. A selector that is true everywhere has no relative
logit: such looks are counted, and not split. `Because` is not asked: it runs a prompt up to the
query, and here a query sees what stands behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkscope.findings.prompt_trace import PromptRun
from qkscope.heads import Head
from qkscope.linear.run import named
from qkscope.model.scope import Scope
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope.verbs.trace.trace import trace
from qkscope_bench.known.compiled import FIRST, LONGEST, PAD, load_program, programs
from qkscope_papers.figures import colours_of, new_figure
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import (
    Estimate,
    Files,
    Row,
    column,
    distinct,
    files_of,
    mean,
    mean_of,
    pick,
    share_of,
)

_PROMPTS = {"smoke": 2, "default": 6, "paper": 24}
# of the largest part; a relative logit; of the attention, what a cause leaves
_LEAST = 0.01
_FLAT = 1e-3
_LEFT = 0.5
RIVALS = ("attribution patching", "path patching")
METHODS = ("trace", *RIVALS)
Tokens = Sequence[str]


def _by_number(tokens: Tokens) -> list[float]:
    return [int(token) + i / LONGEST for i, token in enumerate(tokens)]


def _by_count(tokens: Tokens) -> list[float]:
    return [i / LONGEST - tokens.count(token) for i, token in enumerate(tokens)]


def _ranked(order: Callable[[Tokens], Sequence[Any]]) -> Callable[[Tokens, int, int], bool]:
    return lambda tokens, k, q: sum(value < order(tokens)[k] for value in order(tokens)) == q


def _smaller(order: Callable[[Tokens], Sequence[Any]]) -> Callable[[Tokens, int, int], bool]:
    return lambda tokens, k, q: order(tokens)[k] < order(tokens)[q]


#: By program and head: whether a key is selected, and whether the first token always is.
SELECTORS: dict[tuple[str, str], tuple[Callable[[Tokens, int, int], bool], bool]] = {
    ("reverse", "L3H0"): (lambda tokens, k, q: k == len(tokens) - q - 1, False),
    ("shuffle_dyck", "L4H0"): (lambda tokens, k, q: k == len(tokens) - 1, False),
    ("shuffle_dyck2", "L5H0"): (lambda tokens, k, q: k == len(tokens) - 1, False),
    ("sort_unique", "L1H0"): (_ranked(list), False),
    ("sort", "L1H0"): (_smaller(_by_number), True),
    ("sort", "L2H0"): (_ranked(_by_number), False),
    ("sort_freq", "L3H0"): (_smaller(_by_count), True),
    ("sort_freq", "L4H0"): (_ranked(_by_count), False),
    ("count_less_freq", "L1H0"): (lambda tokens, k, q: tokens.count(tokens[k]) <= 2, True),
}


class Look(NamedTuple):
    """A head that looks at a token of a prompt; places count from the first token."""

    tokens: Tokens
    other: Tokens
    query: int
    key: int


def looks_of(name: str, head: str, prompts: int, seed: int) -> Iterator[Look]:
    """Random prompts, another of the same length beside each, and every place where the program
    selects a token.
    """
    selects, _ = SELECTORS[name, head]
    words = _words_of(name)
    generator = torch.Generator().manual_seed(derived_seed(seed, "known", name, head))
    for _ in range(prompts):
        length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
        drawn = torch.randint(len(words), (2, length), generator=generator)
        tokens = [words[i] for i in drawn[0]]
        other = [words[i] for i in drawn[1]]
        for query in range(length):
            chosen = [key for key in range(length) if selects(tokens, key, query)]
            if chosen:
                yield Look([FIRST, *tokens], [FIRST, *other], 1 + query, 1 + chosen[0])


def _words_of(name: str) -> list[str]:
    """The program's vocabulary without its own marks."""
    return [word for word in programs()[name]["vocabulary"] if word not in (FIRST, PAD)]


Parts = dict[tuple[str, str], float]


"""What writers give, by side and name."""


@figure("known", "writers", "Writers and words of heads that are compiled from programs")
def run(settings: Settings) -> Result:
    """Writers found beside the true ones, and words found beside the program's."""
    rows: list[Row] = []
    words: list[Row] = []
    flat = 0
    looked = 0
    for name, head in SELECTORS:
        scope = load_program(name)
        largest: dict[str, Parts] = {how: {} for how in METHODS}
        for look in looks_of(name, head, _PROMPTS[settings.preset], settings.seed):
            looked += 1
            found = _traced(scope, head, look)
            words += word_rows(scope, name, head, look)
            if found is None:
                flat += 1
                continue
            for how, parts in {"trace": found, **patched(scope, Head.parse(head), look)}.items():
                _keep_largest(largest[how], parts)
        for how, parts in largest.items():
            rows += writer_rows(name, head, how, parts)
    heads = []
    for name, head in SELECTORS:
        for how in METHODS:
            place = {"program": name, "head": head, "how": how}
            heads.append(place | score(pick(rows, **place)))
    tables = {"heads": heads, "writers": rows, "words": words}
    return settings.result(_answer(heads, words, flat, looked), tables, _claims(heads, words))


def _traced(scope: Scope, head: str, look: Look) -> Parts | None:
    """What `trace` says that every writer gives; None where there is no relative logit."""
    text = " ".join(look.tokens)
    found = trace(scope, text, head, query=look.query, key=look.key, depth=0, draws=1)
    if abs(found.tables["check"][0]["logit"]) < _FLAT:
        return None
    return {(row["side"], row["writer"]): row["value"] for row in found.tables["writers"]}


def _keep_largest(kept: Parts, parts: Parts) -> None:
    """Each writer's part, relative to the largest of its look, where it exceeds what is kept."""
    whole = max(_FLAT, *map(abs, parts.values()))
    for key, value in parts.items():
        kept[key] = max(kept.get(key, 0.0), abs(value) / whole)


def _mean_scores(heads: list[Row], how: str) -> Row:
    own = pick(heads, how=how)
    return {"precision": mean_of(own, "precision"), "recall": mean_of(own, "recall")}


def _agreement(words: list[Row]) -> Estimate:
    """How often changing a token says what the program's selector says."""
    return share_of(row["cause"] == row["program_says"] for row in words)


def _answer(heads: list[Row], words: list[Row], flat: int, looked: int) -> str:
    ours, around, along = (_mean_scores(heads, how) for how in METHODS)
    sure = sum(column(words, "program_says"))
    return (
        f"Of the true writers of nine heads trace finds {ours['recall']:.0%}, and "
        f"{ours['precision']:.0%} of what it finds is true (attribution patching "
        f"{around['recall']:.0%} and {around['precision']:.0%}, path patching "
        f"{along['recall']:.0%} and {along['precision']:.0%}); {flat} of {looked} looks have "
        "no relative logit. What changing each token says agrees with the program in "
        f"{_agreement(words).mean:.1%} of {len(words)} ({sure} decide)."
    )


def _claims(heads: list[Row], words: list[Row]) -> list[Claim]:
    ours, around, along = (_mean_scores(heads, how) for how in METHODS)
    finds_all = Claim(
        "trace finds every true writer of the nine heads (recall)",
        paper="",
        ours=ours["recall"],
        control=None,
        rule="ours >= 1",
    )
    finds_true = Claim(
        "what trace finds is true (precision)",
        paper="",
        ours=ours["precision"],
        control=None,
        rule="ours >= 0.95",
    )
    names_fewer = Claim(
        "attribution patching names more that is no writer (precision; control: attribution "
        "patching)",
        paper="",
        ours=ours["precision"],
        control=around["precision"],
        rule="ours > control",
    )
    misses_none = Claim(
        "path patching finds no more (recall; control: path patching)",
        paper="",
        ours=ours["recall"],
        control=along["recall"],
        rule="ours >= control",
    )
    agrees = Claim(
        "changing a token says what the program's selector says (share of tokens)",
        paper="",
        **_agreement(words).measured,
        control=None,
        rule="ours >= 0.99",
        changed="Was taken for exact, and held.",
    )
    return [finds_all, finds_true, names_fewer, misses_none, agrees]


def writer_rows(name: str, head: str, how: str, parts: Parts) -> list[Row]:
    """Every writer: its largest part, whether it is true and found, and of a wrong one why."""
    true = {side: set(own) for side, own in programs()[name]["truth"][head].items()}
    true["both"] = true["query"] | true["key"]
    rows = []
    for (side, writer), value in parts.items():
        is_true = writer in true[side]
        is_found = value >= _LEAST
        why = ""
        if is_true and not is_found:
            why = "the same in the other prompt"
        if is_found and not is_true:
            why = "acts through other writers"
        rows.append(
            {
                "program": name,
                "head": head,
                "how": how,
                "side": side,
                "writer": writer,
                "part": value,
                "true": is_true,
                "found": is_found,
                "why": why,
            }
        )
    return rows


def score(rows: Sequence[Row]) -> Row:
    """Precision and recall of what was found."""
    true = sum(column(rows, "true"))
    found = sum(column(rows, "found"))
    right = sum(row["true"] and row["found"] for row in rows)
    return {
        "true": true,
        "found": found,
        "precision": right / found if found else math.nan,
        "recall": right / true if true else math.nan,
    }


def patched(scope: Scope, head: Head, look: Look) -> dict[str, Parts]:
    """Attribution patching and path patching of every writer before the head, another prompt's
    outputs put in.
    """
    run = _run_of(scope, head, look.tokens)
    other = _run_of(scope, head, look.other)
    places = list(range(1, 1 + len(look.tokens)))
    own_split = run.slots(places).stream(head.layer)
    other_split = other.slots(places).stream(head.layer)
    writers = [name for piece in own_split for name in piece.writers]
    changes = named(other_split)[0] - named(own_split)[0]
    direct, through = _gradients(scope, head, look, run.entered[0][:, 1:])
    around: Parts = {}
    along: Parts = {}
    for writer, change in zip(writers, changes, strict=True):
        gradient = through[writer.partition("H")[0]]
        around["both", writer] = float((gradient[0] * change).sum())
        along["both", writer] = float((direct[0] * change).sum())
    return {"attribution patching": around, "path patching": along}


def _run_of(scope: Scope, head: Head, tokens: Tokens) -> Any:
    """A prompt, run up to the head's layer."""
    return PromptRun(scope, " ".join(tokens), last=head.layer, logits=False).run


def _gradients(
    scope: Scope, head: Head, look: Look, embedded: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the relative logit: by what enters the head's layer, and by each layer's outputs, through
    all that follows.
    """
    attention = scope.model.layers[head.layer].self_attn
    with torch.enable_grad():
        x = embedded.clone().requires_grad_()
        points = {"embedding": x}  # where a writer's output joins the stream
        for i, layer in enumerate(scope.model.layers[: head.layer]):
            points[f"L{i}"] = layer.self_attn(x, None)[0]
            points[f"M{i}"] = layer.mlp(x + points[f"L{i}"])
            x = x + points[f"L{i}"] + points[f"M{i}"]
        heads = (-1, attention.head_dim)
        q = attention.q_proj(x)[0].unflatten(-1, heads)[:, head.index]
        k = attention.k_proj(x)[0].unflatten(-1, heads)[:, head.index]
        logits = k @ q[look.query] * attention.head_dim**-0.5
        others = [i for i in range(1, len(logits)) if i != look.key]
        relative = logits[look.key] - (logits[others].mean() if others else 0)
        direct, *through = torch.autograd.grad(relative, [x, *points.values()], allow_unused=True)
    return direct, dict(zip(points, through, strict=True))


def word_rows(scope: Scope, name: str, head: str, look: Look) -> list[Row]:
    """Each token in every other's place: what is left of the attention, in the model and by the
    program's selector.
    """
    selects, first = SELECTORS[name, head]
    words = _words_of(name)
    ids = look.tokens

    def share(tokens: Tokens) -> float:
        """What the selector gives the key: all selected tokens get as much."""
        chosen = [key for key in range(len(tokens) - 1) if selects(tokens[1:], key, look.query - 1)]
        return (look.key - 1 in chosen) / max(len(chosen) + first, 1)

    def attended(tokens: Tokens) -> float:
        return float(scope.attention(" ".join(tokens), head)[look.query, look.key])

    rows = []
    for place in range(1, len(ids)):
        others = [word for word in words if word != ids[place]]
        changed = [[*ids[:place], word, *ids[place + 1 :]] for word in others]
        left = mean(map(attended, changed)) / attended(ids)
        said = mean(map(share, changed)) / share(ids)
        rows.append(
            {
                "program": name,
                "head": head,
                "prompt": " ".join(ids),
                "query": look.query,
                "key": look.key,
                "position": place,
                "left": left,
                "cause": left < _LEFT,
                "program_says": said < _LEFT,
            }
        )
    return rows


@run.drawing
def draw(result: Result) -> Files:
    """Precision and recall of every head, by method."""
    rows = result.tables["heads"]
    methods = distinct(rows, "how")
    heads = [" ".join(head) for head in distinct(rows, "program", "head")]
    drawn = new_figure(9, 3.4)
    hues = colours_of(methods)
    for axis, kind in zip(drawn.subplots(1, 2, sharey=True), ("recall", "precision"), strict=True):
        for i, how in enumerate(methods):
            places = [place + 0.27 * (1 - i) for place in range(len(heads))]
            values = [value or 0 for value in column(pick(rows, how=how), kind)]
            axis.barh(places, values, height=0.25, label=how, color=hues[how])
        axis.set(xlabel=kind, xlim=(0, 1.02), yticks=range(len(heads)), yticklabels=heads)
    drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return files_of(result, drawn)
