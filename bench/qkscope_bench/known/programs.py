"""Heads whose writers are known: what `trace` finds of compiled programs, beside two kinds of
patching.

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
from qkscope_papers.tables import Files, Row, column, distinct, files_of, mean, pick, share_of

_PROMPTS = {"smoke": 2, "default": 6, "paper": 24}
# of the largest part; a relative logit; of the attention, what a cause leaves
_LEAST = 0.01
_FLAT = 1e-3
_LEFT = 0.5
RIVALS = ("attribution patching", "path patching")
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
    words = [word for word in programs()[name]["vocabulary"] if word not in (FIRST, PAD)]
    generator = torch.Generator().manual_seed(derived_seed(seed, "known", name, head))
    for _ in range(prompts):
        length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
        tokens, other = (
            [words[i] for i in row]
            for row in torch.randint(len(words), (2, length), generator=generator)
        )
        for query in range(length):
            chosen = [key for key in range(length) if SELECTORS[name, head][0](tokens, key, query)]
            if chosen:
                yield Look([FIRST, *tokens], [FIRST, *other], 1 + query, 1 + chosen[0])


@figure("known", "writers", "Writers and words of heads that are compiled from programs")
def run(settings: Settings) -> Result:
    """Writers found beside the true ones, and words found beside the program's."""
    rows: list[Row] = []
    words: list[Row] = []
    flat = looked = 0
    for name, head in SELECTORS:
        scope = load_program(name)
        parts = {how: dict[tuple[str, str], float]() for how in ("trace", *RIVALS)}
        for look in looks_of(name, head, _PROMPTS[settings.preset], settings.seed):
            text = " ".join(look.tokens)
            looked = looked + 1
            found = trace(scope, text, head, query=look.query, key=look.key, depth=0, draws=1)
            words += word_rows(scope, name, head, look)
            if abs(found.tables["check"][0]["logit"]) < _FLAT:
                flat += 1
                continue
            split = {(row["side"], row["writer"]): row["value"] for row in found.tables["writers"]}
            for how, own in {"trace": split, **patched(scope, Head.parse(head), look)}.items():
                largest = max(_FLAT, *map(abs, own.values()))
                for key, value in own.items():
                    parts[how][key] = max(parts[how].get(key, 0.0), abs(value) / largest)
        rows += [row for how, own in parts.items() for row in writer_rows(name, head, how, own)]
    heads = [
        {
            "program": name,
            "head": head,
            "how": how,
            **score(pick(rows, program=name, head=head, how=how)),
        }
        for name, head in SELECTORS
        for how in parts
    ]
    by = {
        how: {kind: mean(column(pick(heads, how=how), kind)) for kind in ("precision", "recall")}
        for how in parts
    }
    agreed = share_of(row["cause"] == row["program_says"] for row in words)
    sure = sum(column(words, "program_says"))
    ours, around, along = (by[how] for how in parts)
    return settings.result(
        f"Of the true writers of nine heads trace finds {ours['recall']:.0%}, and "
        f"{ours['precision']:.0%} of what it finds is true (attribution patching "
        f"{around['recall']:.0%} and {around['precision']:.0%}, path patching "
        f"{along['recall']:.0%} and {along['precision']:.0%}); {flat} of {looked} looks have "
        "no relative logit. What changing each token says agrees with the program in "
        f"{agreed.mean:.1%} of {len(words)} ({sure} decide).",
        {"heads": heads, "writers": rows, "words": words},
        [
            Claim(
                "trace finds every true writer of the nine heads (recall)",
                paper="",
                ours=ours["recall"],
                control=None,
                rule="ours >= 1",
            ),
            Claim(
                "what trace finds is true (precision)",
                paper="",
                ours=ours["precision"],
                control=None,
                rule="ours >= 0.95",
            ),
            Claim(
                "attribution patching names more that is no writer (precision; control: attribution "
                "patching)",
                paper="",
                ours=ours["precision"],
                control=around["precision"],
                rule="ours > control",
            ),
            Claim(
                "path patching finds no more (recall; control: path patching)",
                paper="",
                ours=ours["recall"],
                control=along["recall"],
                rule="ours >= control",
            ),
            Claim(
                "changing a token says what the program's selector says (share of tokens)",
                paper="",
                **agreed.measured,
                control=None,
                rule="ours >= 0.99",
                changed="Was taken for exact, and held.",
            ),
        ],
    )


def writer_rows(name: str, head: str, how: str, parts: dict[tuple[str, str], float]) -> list[Row]:
    """Every writer: its largest part, whether it is true and found, and of a wrong one why."""
    true = {side: set(own) for side, own in programs()[name]["truth"][head].items()}
    true["both"] = true["query"] | true["key"]
    rows = []
    for (side, writer), value in parts.items():
        is_true = writer in true[side]
        is_found = value >= _LEAST
        why = (
            ""
            if is_true == is_found
            else "the same in the other prompt"
            if is_true
            else "acts through other writers"
        )
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
    right, found, true = (
        sum(map(test, rows))
        for test in (
            lambda row: row["true"] and row["found"],
            lambda row: row["found"],
            lambda row: row["true"],
        )
    )
    return {
        "true": true,
        "found": found,
        "precision": right / found if found else math.nan,
        "recall": right / true if true else math.nan,
    }


def patched(scope: Scope, head: Head, look: Look) -> dict[str, dict[tuple[str, str], float]]:
    """Attribution patching and path patching of every writer before the head, another prompt's
    outputs put in.
    """
    layers = scope.model.layers[: head.layer]
    attention = scope.model.layers[head.layer].self_attn
    runs = [
        PromptRun(scope, " ".join(tokens), last=head.layer, logits=False).run
        for tokens in (look.tokens, look.other)
    ]
    split = [run.slots(list(range(1, 1 + len(look.tokens)))).stream(head.layer) for run in runs]
    writers = [name for piece in split[0] for name in piece.writers]
    parts = [named(pieces)[0] for pieces in split]
    with torch.enable_grad():
        x = runs[0].entered[0][:, 1:].clone().requires_grad_()
        points = {"embedding": x}  # where a writer's output joins the stream
        for i, layer in enumerate(layers):
            points[f"L{i}"] = layer.self_attn(x, None)[0]
            points[f"M{i}"] = layer.mlp(x + points[f"L{i}"])
            x = x + points[f"L{i}"] + points[f"M{i}"]
        q, k = (
            project(x)[0].unflatten(-1, (-1, attention.head_dim))[:, head.index]
            for project in (attention.q_proj, attention.k_proj)
        )
        logits = k @ q[look.query] * attention.head_dim**-0.5
        others = [i for i in range(1, len(logits)) if i != look.key]
        relative = logits[look.key] - (logits[others].mean() if others else 0)
        through = torch.autograd.grad(relative, [x, *points.values()], allow_unused=True)
    direct = through[0]
    through_of = dict(zip(points, through[1:], strict=True))
    given = zip(writers, parts[1] - parts[0], strict=True)
    away = {writer: (through_of[writer.partition("H")[0]], part) for writer, part in given}
    return {
        "attribution patching": {
            ("both", name): float((g[0] * part).sum()) for name, (g, part) in away.items()
        },
        "path patching": {
            ("both", name): float((direct[0] * part).sum()) for name, (_, part) in away.items()
        },
    }


def word_rows(scope: Scope, name: str, head: str, look: Look) -> list[Row]:
    """Each token in every other's place: what is left of the attention, in the model and by the
    program's selector.
    """
    selects, first = SELECTORS[name, head]
    words = [word for word in programs()[name]["vocabulary"] if word not in (FIRST, PAD)]
    ids = look.tokens

    def share(tokens: Tokens) -> float:
        """What the selector gives the key: all selected tokens get as much."""
        chosen = [key for key in range(len(tokens) - 1) if selects(tokens[1:], key, look.query - 1)]
        return (look.key - 1 in chosen) / max(len(chosen) + first, 1)

    def attended(tokens: Tokens) -> float:
        return float(scope.attention(" ".join(tokens), head)[look.query, look.key])

    rows = []
    for place in range(1, len(ids)):
        changed = [[*ids[:place], word, *ids[place + 1 :]] for word in words if word != ids[place]]
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
    methods = distinct(result.tables["heads"], "how")
    heads = distinct(rows, "program", "head")
    drawn = new_figure(9, 3.4)
    hues = colours_of(methods)
    for axis, kind in zip(drawn.subplots(1, 2, sharey=True), ("recall", "precision"), strict=True):
        for i, how in enumerate(methods):
            places = [place + 0.27 * (1 - i) for place in range(len(heads))]
            values = [value or 0 for value in column(pick(rows, how=how), kind)]
            axis.barh(places, values, height=0.25, label=how, color=hues[how])
        axis.set(
            xlabel=kind,
            xlim=(0, 1.02),
            yticks=range(len(heads)),
            yticklabels=[" ".join(head) for head in heads],
        )
    drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return files_of(result, drawn)
