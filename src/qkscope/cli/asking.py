"""The question itself: why did this head attend to that token of this prompt?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from qkscope.cli import shell
from qkscope.errors import BadInput

Prompt = Annotated[str, typer.Argument(help="The prompt; \\n is a line break.")]
Query = Annotated[int | None, typer.Option("--query", help="The token that asks, by place; the last one.")]
Key = Annotated[int | None, typer.Option("--key", help="The token attended to; the most attended.")]
Place = Annotated[Path | None, typer.Option("--out", help="Folder for the results and the page.")]
_MODEL = "smollm2-135m"


@shell.app.command()
def why(
    prompt: Prompt,
    head: Annotated[str | None, typer.Option("--head", help="Like L18H6; without it, the heads that matter.")] = None,
    query: Query = None,
    key: Key = None,
    model: shell.Model = _MODEL,
    fit: Annotated[Path | None, typer.Option("--fit", help="Also split by the features of this folder.")] = None,
    out: Place = None,
    seed: shell.Seed = 0,
    chat: shell.Chat = False,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Say why a head attended to a token: where it looks, what matched, who wrote it, is it so, what it does."""
    asked: Any = {"head": head, "query": query, "key": key, "chat": chat, "seed": seed}
    _ask(prompt, asked, model, fit, out, device=device, dtype=dtype, everything=everything, as_json=as_json)


@shell.app.command()
def explain(
    folder: shell.Fitted,
    prompt: Prompt,
    head: Annotated[str | None, typer.Option("--head", help="One of the fitted heads; the first.")] = None,
    query: Query = None,
    key: Key = None,
    split: Annotated[str, typer.Option("--split", help="sequential (the paper's), average or oblique.")] = "sequential",
    out: Place = None,
    seed: shell.Seed = 0,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Say why, as `why --fit FOLDER` does: the logit is also split among the folder's features."""
    from qkscope.maths.attribution import Split

    if split not in get_args(Split):
        raise BadInput(f"--split is one of {', '.join(get_args(Split))}, but got {split!r}.")
    asked: Any = {"head": head, "query": query, "key": key, "seed": seed, "split": split}
    _ask(prompt, asked, _MODEL, folder, out, device=device, dtype=dtype, everything=everything, as_json=as_json)


def _ask(
    prompt: str,
    asked: dict[str, Any],
    model: str,
    fit: Path | None,
    out: Path | None,
    *,
    device: str | None,
    dtype: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    from qkscope.heads import Head

    if asked["head"] is not None:
        asked["head"] = str(Head.parse(asked["head"]))
    if fit is not None:
        model = _checked_fit(fit, asked, model)
    if not prompt:
        raise BadInput("the prompt is empty: give at least one character.")
    shell.check_out(out, "why")
    from qkscope.analyses.why.why import why as run

    scope = shell.load_scope(model, device, dtype)
    if fit is not None:
        from qkscope.analyses.fit import load

        asked["features"] = load(fit, scope)
        asked["chat"] = asked.get("chat", False) or asked["features"].chat
    found = run(scope, prompt.replace("\\n", "\n"), **asked)
    if as_json:
        shell.print_json(found.to_json())
    else:
        shell.say(str(found))
        if everything:
            shell.print_tables("why", found.tables, everything)
    shell.write(found, out)
    if not as_json:
        options: Any = {"query": asked["query"], "chat": asked.get("chat"), "model": model}
        options |= {"device": device, "dtype": dtype}
        if fit is not None:
            then = shell.command("view", live=True, fit=fit)
        elif asked["head"] is None:
            rows = found.tables["heads"]
            speaks_for = next((row for row in rows if row["without_key"] < row["before"]), rows[0])
            then = shell.command("why", prompt, head=speaks_for["head"], **options)
        elif Head.parse(asked["head"]).layer == 0:  # the embedding alone writes there: nothing to trace
            then = shell.command("why", prompt, **options)
        else:
            then = shell.command("trace", prompt=prompt, heads=asked["head"], key=asked["key"], **options)
        shell.print_end(out, then=then)


def _checked_fit(folder: Path, asked: dict[str, Any], model: str) -> str:
    """The model of a fit folder, before it is loaded; where no head is named, the first that was fitted is asked."""
    from qkscope.analyses.fit_folder import read_job, task_of
    from qkscope.analyses.swap import check_swappable
    from qkscope.analyses.why.why import check_space

    job = read_job(folder)
    if asked["head"] is None:
        asked["head"] = str(job["heads"][0])
    elif asked["head"] not in job["heads"]:
        raise BadInput(f"{folder} was not fitted at {asked['head']}: there is {', '.join(job['heads'])}.")
    check_swappable(job["space"])
    check_space(job["space"])
    task_of(job, folder)
    return str(job["model"]) if model == _MODEL else model
