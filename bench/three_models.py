"""The three models that need no hub, asked the same: bench/docs/three-models.md.

``python bench/three_models.py --device cuda --n 512 --texts 256`` runs every part on all
models, keeps the rows in bench/docs/three-models.json and writes the page. ``--only swaps --model
gemma3-270m`` runs a part again, ``--only page`` writes the page from the rows that are kept;
``--store FILE`` keeps rows elsewhere.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import because_measure
import qkscope as qk
from qkscope.findings.singular_rows import relative_rows, singular_basis
from qkscope.heads import Writer
from qkscope.model.capture_types import Places
from qkscope.sums.intervals import clustered_bootstrap, wilson
from qkscope.sums.singular import SingularBasis
from qkscope.texts.documents import python_texts, read_documents
from qkscope.texts.holdout import split
from qkscope.verbs.sparsity import answers_right
from qkscope_papers.figures import figure_files, new_figure
from qkscope_papers.lee2026.language import THRESHOLD, HeadChoice, choose_heads
from qkscope_papers.reports import BENCH_REPORTS, put
from qkscope_papers.tables import Row, column, over_key_heads, pick

PAGE = BENCH_REPORTS / "three-models.md"
STORE = BENCH_REPORTS / "three-models.json"
MODELS = {
    "smollm2-135m": "SmolLM2-135M",
    "gemma3-270m": "Gemma 3 270M",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder 1.5B",
}
TASKS = ("binding", "ioi", "induction", "filter")
# tasks whose reasons are asked for; query heads of a key head, by model
REASONED = TASKS[:3]
SHARED = (3, 4, 6)
SIZED = {"sparsity": "{texts} passages", "because": "{looks} looks", "atlas": "{passages} passages"}
SIZES = (1, 2, 4, 8, 16)  # of subspaces that are swapped
ATTENDED = 0.1  # of a row: a split of a logit that gets less than this explains nothing
LEAST = 20  # rows of a head, to speak of it
NOT_RUN = float("nan")  # rows that were kept before there was such a number
# tokens of a passage, and how many of them ask
LENGTH = 96
QUERIES = 8


# ---------------------------------------------------------------- the parts


@functools.cache
def find(scope: qk.Scope, task: str, n: int) -> HeadChoice:
    """The head that looks at the right key most, of all tokens, and a head at chance."""
    ranking = qk.find_heads(scope, qk.tasks.BUILT_IN[task](), n)
    return choose_heads(ranking, "binding", 1)


def heads(scope: qk.Scope, given: argparse.Namespace) -> list[Row]:
    """The best head of each task, how many there are, and whether the model answers right."""
    rows = []
    for task in TASKS:
        found = find(scope, task, given.n)
        ranked = found.ranking.tables["heads"]
        right = answers_right(scope, qk.tasks.BUILT_IN[task](), given.n)
        among = max(ranked, key=lambda row: row["accuracy"])
        rows.append(
            {
                "task": task,
                **found.row(found.heads[0]),
                "among_head": among["head"],
                "among": among["accuracy"],
                "reached": found.reached,
                "all": len(scope.heads()),
                "answers": float(right.mean()),
            }
        )
    return rows


def swaps(scope: qk.Scope, given: argparse.Namespace) -> dict[str, list[Row]]:
    """Order and lexical at the binding head and at a control head: ranks, and swaps beside what
    means nothing.
    """
    task = qk.tasks.binding()
    found = find(scope, "binding", given.n)
    fit = qk.decompose(scope, task, found.all, 2 * given.n, contrasts=["order", "lexical"])
    moved = qk.swap(scope, task.test(given.n), fit, found.heads, sizes=SIZES)
    ranks = []
    for row in fit.tables["ranks"]:
        ranks.append(dict(row, control=row["head"] == str(found.control)))
    curve = [dict(row) for row in moved.tables["curve"]]
    return {"ranks": ranks, "swap": moved.table(), "curve": curve}


def traces(scope: qk.Scope, given: argparse.Namespace) -> dict[str, list[Row]]:
    """Who writes for the binding head, with edges cut and kept."""
    (head,) = find(scope, "binding", given.n).heads
    found = qk.trace(scope, qk.tasks.binding(), head, given.n, whole=False)
    edges = found.tables["edges"]
    writers = found.tables["writers"]
    return {
        "key": pick(writers, side="key")[:4],
        "query": pick(writers, side="query")[:4],
        "edges": pick(edges, by="share", norms="held") + pick(edges, by="random", norms="held"),
        "check": pick(found.tables["check"]),
    }


def sparsity(scope: qk.Scope, given: argparse.Namespace) -> list[Row]:
    """Relative attention over singular vectors on natural text: a row for each head that attends to
    something.

    The key asked about is the one with most attention, the first token and the query itself left
    out.
    """
    own = [head for head in scope.heads() if head.layer > 0]
    basis = singular_basis(scope, own)
    kept: dict[str, list[torch.Tensor]] = {}
    for number, passage in enumerate(_long_passages(scope, given)):
        values = _passage_values(scope, own, basis, passage, number, given.draws)
        for name, value in values.items():
            kept.setdefault(name, []).append(value)
    tables = {name: torch.cat(parts) for name, parts in kept.items()}
    rows = []
    for i, head in enumerate(own):
        row = one_head(str(head), {name: values[:, i] for name, values in tables.items()})
        if row:
            rows.append(row)
    return rows


def _long_passages(scope: qk.Scope, given: argparse.Namespace) -> list[Any]:
    """Passages of at least half the length: one of every group of documents, then a second of
    each.
    """

    def ids(text: str) -> list[int]:
        return scope.tokenizer(text, verbose=False)["input_ids"]

    documents = read_documents(given.folder) if given.folder else python_texts()
    turn = Counter[int]()
    turned = []
    for passage in split(documents, ids, length=LENGTH)["test"]:
        if len(passage.ids) > LENGTH // 2:
            turn[passage.group] += 1
            turned.append((turn[passage.group], passage))
    turned.sort(key=lambda pair: pair[0])
    return [passage for _, passage in turned][: given.texts]


def _passage_values(
    scope: qk.Scope,
    heads: list[qk.Head],
    basis: SingularBasis,
    passage: Any,
    number: int,
    draws: int,
) -> dict[str, torch.Tensor]:
    """Relative attention of some of a passage's tokens at all heads."""
    ids = torch.tensor([passage.ids], device=scope.device)
    counted = torch.arange(ids.shape[1], device=scope.device)[None]
    seen = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": seen, "position_ids": counted}
    asked = torch.linspace(8, ids.shape[1] - 1, QUERIES).long()
    places = Places.everywhere(torch.zeros_like(asked), asked, seen.cpu()).to(scope.device)
    captured = scope.capture_inputs(inputs, places=places, heads=heads, space="query_frame")
    row = captured.attention().cpu().clone()
    row[..., 0] = -1
    row[torch.arange(len(asked)), :, asked] = -1
    found = relative_rows(captured, row.argmax(-1), basis)
    first = number * QUERIES
    values = found.values(draws, 0, list(range(first, first + QUERIES)))
    values["group"] = torch.full_like(values["sparsity"], passage.group)
    return values


_AVERAGED = (
    "sparsity",
    "rotated",
    "count",
    "count_null",
    "count_tol",
    "count_tol_null",
    "attention",
)


def one_head(head: str, values: dict[str, torch.Tensor]) -> Row | None:
    """Means over the rows in which the head attends, the interval by group of documents; None where
    these are few.
    """
    attends = values["attention"] >= ATTENDED
    attends &= values["relative"] > 0
    attends &= values["sparsity"].isfinite()
    if int(attends.sum()) < LEAST:
        return None
    own = {name: value[attends] for name, value in values.items()}
    gap = own["sparsity"] - own["rotated"]
    low, high = clustered_bootstrap(gap, own["group"].long())
    means = {name: float(own[name].nanmean()) for name in _AVERAGED}
    return {"head": head, **means, "low": float(low), "high": float(high), "rows": len(gap)}


def because(scope: qk.Scope, given: argparse.Namespace) -> list[Row]:
    """Which reasons are shown at the best head of each task, and how many words it takes."""
    rows = []
    for name in REASONED:
        (head,) = find(scope, name, given.n).heads
        looks = list(because_measure.task(scope, name, str(head), given.looks, 0))
        kinds = Counter[str]()
        for look in looks:
            kinds.update(set(column(pick(look["relations"], verdict="shown"), "kind")))
        few = sum(0 < look["causes"] <= 4 for look in looks)
        place = {"task": name, "head": str(head)}
        rows.append({**place, "looks": len(looks), "few": few, "kinds": dict(kinds)})
    return rows


def sharing(scope: qk.Scope, given: argparse.Namespace) -> list[Row]:
    """At every head over the threshold, the largest writer of its keys beside all of them, signs
    aside.
    """
    rows = []
    for name in REASONED:
        task = qk.tasks.BUILT_IN[name]()
        over = []
        for row in find(scope, name, given.n).ranking.tables["heads"]:
            if row["row_accuracy"] >= THRESHOLD and row["head"][:2] != "L0":
                over.append(row["head"])
        writers = qk.trace(scope, task, over, given.looks, whole=False).tables["writers"]
        for head in over:
            values = [abs(row["value"]) for row in pick(writers, head=head, side="key")]
            rows.append({"task": name, "head": head, "share": max(values) / sum(values)})
    return rows


def atlas(scope: qk.Scope, given: argparse.Namespace) -> list[Row]:
    """How many heads have each kind of name, and how well names predict."""
    named = qk.atlas(scope, None, given.passages, test=given.passages)
    return [
        {"kind": kind, "heads": count}
        for kind, count in Counter(row["kind"] for row in named.table()).items()
    ]


PARTS: dict[str, Callable[[qk.Scope, argparse.Namespace], Any]] = {
    "heads": heads,
    "swaps": swaps,
    "traces": traces,
    "sparsity": sparsity,
    "because": because,
    "sharing": sharing,
    "atlas": atlas,
}


# ---------------------------------------------------------------- the page

SWAPPED = {
    "order": "order",
    "lexical": "lexical",
    "both": "both",
    "random_both": "random directions",
    "key_pca_both": "key PCA",
    "cov_qk_both": "Cov_q Cov_k",
    "sham_both": "both, of two boxes not asked for",
}
CUTS = {
    "two key edges cut": ("key", "cut", 2, "share"),
    "two random ones": ("key", "cut", 2, "random"),
    "two query edges cut": ("query", "cut", 2, "share"),
    "five a side kept": ("both", "keep", 5, "share"),
    "five random ones": ("both", "keep", 5, "random"),
    "five a side kept, the others at another prompt's parts": (
        "both",
        "keep",
        5,
        "share",
        "resample",
    ),
}


def per_cent(value: float) -> str:
    """A share as one reads it."""
    return f"{100 * value:.0f}%"


def table(names: list[str], rows: list[list[str]]) -> str:
    """A table of the page."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace(" nan ", " not run ")


def heads_table(kept: dict[str, Any]) -> str:
    """Tasks down, models across."""
    rows = []
    for i, task in enumerate(TASKS):
        for model, name in MODELS.items():
            row = kept[model]["heads"][i]
            low = per_cent(row["row_low"])
            high = per_cent(row["row_high"])
            cells = [
                task,
                name,
                per_cent(row["answers"]),
                row["head"],
                f"{per_cent(row['row_accuracy'])} [{low}, {high}]",
                f"{row['among_head']} {per_cent(row['among'])} ({per_cent(row['chance'])})",
                f"{row['reached']} of {row['all']}",
            ]
            rows.append(cells)
    names = [
        "task",
        "model",
        "answers right",
        "best head",
        "right key first of all tokens",
        "best among the named keys (chance)",
        f"heads over {per_cent(THRESHOLD)}",
    ]
    return table(names, rows)


def ranks_table(kept: dict[str, Any]) -> str:
    """Ranks at the head and at the control."""
    rows = []
    for model, name in MODELS.items():
        for row in kept[model]["swaps"]["ranks"]:
            cells = [
                name,
                row["head"] + (" (control)" if row["control"] else ""),
                row["contrast"],
                str(row["rank_99"]),
                str(row["rank_99_centred"]),
                str(row["detected"]),
                str(row["rank_cv"]),
                f"{row.get('mean_dominance', NOT_RUN):.2f}",
                f"{row.get('percentile', NOT_RUN):.2f}",
                row["verdict"],
            ]
            rows.append(cells)
    names = [
        "model",
        "head",
        "contrast",
        "99% rank",
        "the same, centred",
        "detected",
        "predict words left out",
        "share of the means",
        "percentile of heads at chance",
        "verdict",
    ]
    return table(names, rows)


def swap_of(kept: dict[str, Any], model: str, condition: str) -> Row:
    """One condition at the binding head."""
    return pick(kept[model]["swaps"]["swap"], condition=condition)[0]


def swaps_table(kept: dict[str, Any]) -> str:
    """Attention on the right and on the other box, before and after."""
    rows = []
    for model, name in MODELS.items():
        before = swap_of(kept, model, "both")
        rows.append([name, before["head"], "nothing", "", pair(before, "before"), "", ""])
        for condition, said in SWAPPED.items():
            row = swap_of(kept, model, condition)
            rank = str(row["rank"])
            shift = f"{row['shift']:z.2f} [{row['shift_low']:z.2f}, {row['shift_high']:z.2f}]"
            flips = per_cent(row["flip"])
            rows.append(["", "", said, rank, pair(row, "after"), shift, flips])
    names = ["model", "head", "swapped", "dimensions", "right / other box", "shift", "argmax flips"]
    return table(names, rows)


def pair(row: Row, when: str) -> str:
    """Attention on two boxes."""
    return f"{row[f'orig_{when}']:.2f} / {row[f'target_{when}']:.2f}"


def edge(
    kept: dict[str, Any], model: str, side: str, kind: str, k: int, by: str, replaced: str = "mean"
) -> Row:
    """One condition of a trace."""
    rows = pick(kept[model]["traces"]["edges"], side=side, kind=kind, k=k, by=by, replaced=replaced)
    return rows[0] if rows else {"accuracy": NOT_RUN}


def trace_table(kept: dict[str, Any]) -> str:
    """First writers, cuts and keeps."""
    rows = []
    for model, name in MODELS.items():
        own = kept[model]["traces"]
        check = own["check"][0]
        cells = [name, check["head"], _writers(own["key"]), _writers(own["query"])]
        cells.append(f"{check['accuracy']:.2f}")
        cells += [f"{edge(kept, model, *asked)['accuracy']:.2f}" for asked in CUTS.values()]
        rows.append(cells)
    names = [
        "model",
        "head",
        "first writers of its keys (share of the logit)",
        "of its query",
        "accuracy",
        *CUTS,
    ]
    return table(names, rows)


def _writers(rows: list[Row]) -> str:
    return ", ".join(f"{row['writer']} {row['share']:.2f}" for row in rows)


def sparsity_table(kept: dict[str, Any]) -> str:
    """Heads summed up."""
    rows = []
    for model, name in MODELS.items():
        own = kept[model]["sparsity"]
        cells = [
            name,
            str(len(own)),
            _median(own, "sparsity", 2),
            _median(own, "rotated", 2),
            str(sum(row["high"] < 0 for row in own)),
            str(sum(row["low"] > 0 for row in own)),
            _median(own, "count", 1),
            _median(own, "count_null", 1),
            _median(own, "count_tol", 1),
            _median(own, "count_tol_null", 1),
        ]
        rows.append(cells)
    names = [
        "model",
        "heads that attend",
        "sparsity (median)",
        "rotated",
        "heads below theirs",
        "above",
        "vectors to reach the logit",
        "of random terms",
        "to reach 99%",
        "of random terms",
    ]
    return table(names, rows)


def _median(rows: list[Row], name: str, digits: int) -> str:
    return f"{median(column(rows, name)):.{digits}f}"


def findings(kept: dict[str, Any]) -> str:
    """Which findings carry over: one rule for all models."""
    rows = []
    for each in zip(*(judged(kept, model) for model in MODELS), strict=True):
        holds = zip(MODELS.values(), each, strict=True)
        where = [name for name, finding in holds if finding.holds]
        said = "all" if len(where) == len(MODELS) else ", ".join(where) or "none"
        rows.append([each[0].said, *(finding.numbers for finding in each), said])
    return table(["finding", *MODELS.values(), "holds in"], rows)


@dataclass(frozen=True)
class Finding:
    """What was found in one model, its numbers, and whether it holds there."""

    said: str
    numbers: str
    holds: bool


def judged(kept: dict[str, Any], model: str) -> list[Finding]:
    """The findings of one model, in the page's order."""
    return [
        *_head_findings(kept, model),
        *_swap_findings(kept, model),
        *_rank_findings(kept, model),
        *_trace_findings(kept, model),
        *_sparsity_findings(kept, model),
    ]


def _task_row(kept: dict[str, Any], model: str, task: str) -> Row:
    """The best head of a task."""
    return pick(kept[model]["heads"], task=task)[0]


def _head_findings(kept: dict[str, Any], model: str) -> list[Finding]:
    bind = _task_row(kept, model, "binding")
    induction = _task_row(kept, model, "induction")
    first = Finding(
        "A head looks at the right box first of all tokens, in half of the prompts or more",
        f"{bind['head']} {per_cent(bind['row_accuracy'])}",
        bind["row_low"] >= 0.5,
    )
    same_layer = Finding(
        "It stands in the layer of the best induction head",
        induction["head"],
        induction["head"].split("H")[0] == bind["head"].split("H")[0],
    )
    return [first, same_layer]


def _swap_findings(kept: dict[str, Any], model: str) -> list[Finding]:
    both = swap_of(kept, model, "both")
    lexical = swap_of(kept, model, "lexical")
    order = swap_of(kept, model, "order")
    pca = swap_of(kept, model, "key_pca_both")
    four = {row["method"]: row for row in pick(kept[model]["swaps"]["curve"], k=4)}
    beyond_random = Finding(
        "Swapping order and lexical moves attention more than random directions (gain)",
        f"{both['gain']:.2f} [{both['gain_low']:.2f}, {both['gain_high']:.2f}]",
        both["gain_low"] > 0,
    )
    beyond_pca = Finding(
        "And more than key PCA of the same size (shift)",
        f"{both['shift']:.2f} against {pca['shift']:.2f}",
        both["shift_low"] > pca["shift"],
    )
    four_beyond_pca = Finding(
        "Four lexical dimensions move more than four of key PCA (shift)",
        f"{four['lexical']['shift']:.2f} against {four['key_pca']['shift']:.2f}",
        four["lexical"]["low"] > four["key_pca"]["shift"],
    )
    lexical_more = Finding(
        "Lexical moves more than order (shift)",
        f"{lexical['shift']:.2f} against {order['shift']:.2f}",
        lexical["shift_low"] > order["shift"],
    )
    return [beyond_random, beyond_pca, four_beyond_pca, lexical_more]


def _rank_findings(kept: dict[str, Any], model: str) -> list[Finding]:
    table = kept[model]["swaps"]["ranks"]
    lexical = pick(table, control=False, contrast="lexical")[0]
    order = pick(table, control=False, contrast="order")[0]
    at_chance = pick(table, control=True, contrast="lexical")[0]
    known = "untested" not in (lexical["rank_cv"], order["rank_cv"])
    predict = Finding(
        "More dimensions of lexical than of order predict words left out",
        f"{lexical['rank_cv']} against {order['rank_cv']}",
        known and lexical["rank_cv"] > order["rank_cv"],
    )
    smaller = Finding(
        "The 99% rank of lexical is smaller than at a head at chance",
        f"{lexical['rank_99']} against {at_chance['rank_99']}",
        lexical["rank_99"] < at_chance["rank_99"],
    )
    return [predict, smaller]


def _trace_findings(kept: dict[str, Any], model: str) -> list[Finding]:
    chance = _task_row(kept, model, "binding")["chance"]
    whole = kept[model]["traces"]["check"][0]["accuracy"]
    writer = kept[model]["traces"]["key"][0]
    cut = edge(kept, model, "key", "cut", 2, "share")["accuracy"]
    five = edge(kept, model, "both", "keep", 5, "share", "mean")["accuracy"]
    other = edge(kept, model, "both", "keep", 5, "share", "resample")["accuracy"]
    half = 0.5 * (whole - chance)
    two_cut = Finding(
        "Two key edges cut in this head alone, norms held, bring accuracy to chance (within .1)",
        f"{whole:.2f} to {cut:.2f}, chance {chance:.2f}",
        cut <= chance + 0.1,
    )
    five_kept = Finding(
        "Five writers a side kept there keep half of the accuracy above chance, the others "
        "at their mean and at another prompt's parts",
        f"{whole:.2f} to {five:.2f} and {other:.2f}",
        five - chance >= half and other - chance >= half,
    )
    by_head = Finding(
        "The first writer of its keys is an attention head",
        f"{writer['writer']} {writer['share']:.2f}",
        Writer.parse(writer["writer"]).head is not None,
    )
    return [two_cut, five_kept, by_head]


def _sparsity_findings(kept: dict[str, Any], model: str) -> list[Finding]:
    rows = kept[model]["sparsity"]
    below = sum(row["high"] < 0 for row in rows) / len(rows)
    needed = median(column(rows, "count_tol"))
    random = median(column(rows, "count_tol_null"))
    sparser = Finding(
        "On natural text the terms of most heads are sparser than over rotated vectors",
        per_cent(below),
        below > 0.5,
    )
    fewer = Finding(
        "99% of a relative logit takes fewer vectors than random terms do (median head)",
        f"{needed:.1f} against {random:.1f}",
        needed < random,
    )
    return [sparser, fewer]


def draw(kept: dict[str, Any]) -> None:
    """Every head's sparsity beside that of its rotated vectors."""
    figure = new_figure(4.5 * len(MODELS), 4.2)
    panels = figure.subplots(1, len(MODELS), sharex=True, sharey=True)
    for panel, (model, name) in zip(panels, MODELS.items(), strict=True):
        rows = kept[model]["sparsity"]
        colours = [_colour(row) for row in rows]
        panel.scatter(column(rows, "rotated"), column(rows, "sparsity"), c=colours, s=14)
        panel.plot([0, 0.5], [0, 0.5], color="#444444", linewidth=0.7)
        least = min(rows, key=lambda row: row["sparsity"] - row["rotated"])
        panel.annotate(f" {least['head']}", (least["rotated"], least["sparsity"]), fontsize=8)
        panel.set_title(f"{name}: {len(rows)} heads")
        panel.set_xlabel("sparsity over rotated singular vectors")
    panels[0].set_ylabel("sparsity over its own (1: all terms equal)")
    picture = figure_files({"sparsity": figure})["figures/sparsity.png"]
    (BENCH_REPORTS / "figures" / "three-models" / "sparsity.png").write_bytes(picture)


def _colour(row: Row) -> str:
    """Red where a head is sparser than over rotated vectors, blue where less so."""
    if row["high"] < 0:
        return "#CC3311"
    return "#0072B2" if row["low"] > 0 else "#999999"


def because_table(kept: dict[str, Any]) -> str:
    """Reasons shown, with Wilson's interval."""
    rows = []
    for i, task in enumerate(REASONED):
        for model, name in MODELS.items():
            row = kept[model]["because"][i]
            looks = row["looks"]
            same_word = row["kinds"].get("same word", 0)
            others = [
                f"{kind} {n}" for kind, n in sorted(row["kinds"].items()) if kind != "same word"
            ]
            few = _rate(row["few"], looks)
            place = [task, name, row["head"], str(looks)]
            rows.append([*place, _rate(same_word, looks), few, ", ".join(others)])
    names = [
        "task",
        "model",
        "head",
        "looks",
        "*same word* shown",
        "one to four words decide",
        "other relations shown",
    ]
    return table(names, rows)


def _rate(count: int, of: int) -> str:
    if not of:
        return "no look"
    low, high = wilson(count, of)
    return f"{per_cent(count / of)} [{per_cent(low)}, {per_cent(high)}]"


def sharing_table(kept: dict[str, Any]) -> str:
    """The largest writers' parts by how many query heads share a key head."""
    rows = []
    for (model, name), group in zip(MODELS.items(), SHARED, strict=True):
        own = kept[model]["sharing"]
        cells = []
        for task in REASONED:
            shares = {row["head"]: row["share"] for row in pick(own, task=task)}
            part = over_key_heads(shares, group)
            cells.append(f"{part.mean:.2f} [{part.low:.2f}, {part.high:.2f}] ({len(shares)})")
        rows.append([str(group), name, *cells])
    return table(["query heads a key head", "model", *REASONED], rows)


def atlas_table(kept: dict[str, Any]) -> str:
    """Kinds of names down, models across."""
    parts = []
    total = Counter[str]()
    for model in MODELS:
        counts = {row["kind"]: row["heads"] for row in kept[model]["atlas"]}
        shares = {kind: count / sum(counts.values()) for kind, count in counts.items()}
        parts.append(shares)
        for kind, share in shares.items():
            total[kind] += share
    rows = []
    for kind in sorted(total, key=lambda kind: -total[kind]):
        rows.append([kind, *(per_cent(own.get(kind, 0)) for own in parts)])
    return table(["name", *MODELS.values()], rows)


TABLES = {
    "findings": findings,
    "heads": heads_table,
    "ranks": ranks_table,
    "swaps": swaps_table,
    "traces": trace_table,
    "sparsity": sparsity_table,
    "because": because_table,
    "sharing": sharing_table,
    "atlas": atlas_table,
}


def write(kept: dict[str, Any]) -> None:
    """Fill the page from the rows."""
    ways: dict[str, list[str]] = {}
    for model, name in MODELS.items():
        for part, said in kept[model]["made"].items():
            ways.setdefault(said, []).append(f"{part} of {name}")
    made = "; ".join(f"{said}: {', '.join(parts)}" for said, parts in ways.items())
    for name, make in TABLES.items():
        put(PAGE, name, make(kept))
    put(PAGE, "made", f"*{made}.*")
    draw(kept)


def rounded(rows: Any) -> Any:
    """Rows as they are kept: four digits are more than the page shows."""
    if isinstance(rows, dict):
        return {name: rounded(value) for name, value in rows.items()}
    if isinstance(rows, list):
        return [rounded(value) for value in rows]
    return float(f"{rows:.4g}") if isinstance(rows, float) else rows


def main() -> None:
    """Run what was asked for, keep it, and write the page when all of it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--only", choices=[*PARTS, "page"], action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--n", type=int, default=128, help="Prompts of each task; contrasts take twice as many."
    )
    parser.add_argument("--texts", type=int, default=48, help="Passages of natural text.")
    parser.add_argument(
        "--looks", type=int, default=32, help="Looks of a head whose reason is asked for."
    )
    parser.add_argument("--passages", type=int, default=16, help="Passages of an atlas.")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--draws", type=int, default=5, help="Rotated bases of each passage.")
    parser.add_argument(
        "--folder", type=Path, action="append", help="Text files instead of what Python carries."
    )
    given = parser.parse_args()
    kept = json.loads(given.store.read_text()) if given.store.exists() else {}
    for model in given.model or MODELS:
        parts = [part for part in given.only or PARTS if part != "page"]
        scope = qk.Scope.load(model, device=given.device) if parts else None
        for part in parts:
            own = kept.setdefault(model, {"made": {}})
            own[part] = PARTS[part](scope, given)
            size = SIZED.get(part, "n = {n}").format(**vars(given))
            own["made"][part] = f"{size} on {given.device}, {datetime.date.today()}"
            given.store.write_text(json.dumps(rounded(kept), separators=(",", ":")) + "\n")
            print(model, part, "done")
    if all(part in kept.get(model, {}) for model in MODELS for part in PARTS):
        write(kept)


if __name__ == "__main__":
    main()
