"""Contrasts: rank heads, fit features, swap them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli import shell
from qkscope.errors import BadInput

_LONGEST_PROMPT = 300  # characters, in a command to type


@shell.app.command()
def heads(
    task: shell.TaskName,
    model: shell.Model = "smollm2-135m",
    n: shell.Count = 256,
    form: shell.Form = "list",
    size: shell.Size = None,
    seed: shell.Seed = 0,
    chat: shell.Chat = False,
    batch_size: shell.BatchSize = 32,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    threshold: Annotated[float, typer.Option("--threshold", help="Score a head must reach to be listed.")] = 0.30,
    by: Annotated[str, typer.Option("--by", help="Score: accuracy, row_accuracy, ratio or mass.")] = "accuracy",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the results and the page.")] = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Score every head on a task in one pass, with intervals and the chance level."""
    made = shell.make_task(task, form, size, seed, chat)
    made.choose(n)
    if not 0 <= threshold <= 1:
        raise BadInput(f"--threshold is a share from 0 to 1, but got {threshold}.")
    from qkscope.analyses.find import SCORES, THRESHOLD, above_chance, find_heads, no_head

    if by not in SCORES:
        raise BadInput(f"--by is one of {', '.join(SCORES)}, but got {by!r}.")
    shell.check_out(out, "heads")
    ranking = find_heads(shell.load_scope(model, device, dtype), made, n, batch_size=batch_size)
    if as_json:
        shell.print_json(ranking.to_json())
    else:
        shell.say(ranking.answer)
    shell.write(ranking, out)
    if as_json:
        return
    best = ranking.top(by)
    found = [row for row in best if row[by] >= threshold and above_chance(row)]
    if not found and (threshold, by) != (THRESHOLD, "accuracy"):  # else the answer says so
        none, score = no_head(threshold, best[0], by)
        shell.say(f"{none}the best is {best[0]['head']} with {score}, and chance is {best[0]['chance']:.0%}.")
    shell.print_tables("heads", {"heads": best if everything else found}, everything)
    named = ",".join(row["head"] for row in (found or best)[:2])
    where: Any = {"model": model, "device": device, "dtype": dtype}
    asked: Any = {"form": form, "size": size, "seed": seed, "chat": chat}
    then = shell.command("decompose", task, heads=named, out=Path("runs") / Path(task).stem, **where, **asked)
    some = ranking.above(min(threshold, THRESHOLD))
    shell.print_end(out, then=then if some else _instead(task, asked, where))


def _instead(task: str, asked: dict[str, Any], where: dict[str, Any]) -> str:
    """What to say next where no head does the task: another form of it, or what heads do without one."""
    other = {**asked, "form": "sentence" if asked["form"] == "list" else "list"}
    try:
        shell.make_task(task, **other)
    except BadInput:
        return shell.command("atlas", out="runs/atlas", **where)
    return shell.command("heads", task, **where, **other)


@shell.app.command()
def decompose(
    task: shell.TaskName,
    out: shell.Out,
    heads: shell.Heads,
    model: shell.Model = "smollm2-135m",
    n: shell.Count = 256,
    form: shell.Form = "list",
    size: shell.Size = None,
    seed: shell.Seed = 0,
    chat: shell.Chat = False,
    space: shell.Space = "post_rope",
    batch_size: shell.BatchSize = 32,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    contrasts: Annotated[str | None, typer.Option("--contrasts", help="Contrasts like order,lexical; all.")] = None,
    center: Annotated[str | None, typer.Option("--center", help="Of a .jsonl file: none, query or both.")] = None,
    replicates: Annotated[int, typer.Option("--replicates", help="Of each null; pooled over heads.")] = 199,
    shard: Annotated[str | None, typer.Option("--shard", help="i/n: this share of the prompts; then merge.")] = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Fit the contrasts of a task at some heads, with nulls and controls; a run that died goes on where it stopped.

    Under torchrun the processes share the prompts.
    """
    from qkscope.heads import parse_heads

    chosen = parse_heads(heads)  # before a file is read
    made = shell.make_task(task, form, size, seed, chat, center)
    from qkscope.analyses.decompose import decompose as run
    from qkscope.runs.shards import parse_shard, torchrun_device

    share: Any = "torchrun" if shard is None else parse_shard(shard)
    options: Any = {"contrasts": shell.split_names(contrasts), "space": space, "batch_size": batch_size}
    options |= {"seed": seed, "shard": share, "replicates": replicates, "out": out}
    show = partial(shell.print_result, as_json=as_json, everything=everything)
    fit = run(lambda: shell.load_scope(model, torchrun_device(device), dtype), made, chosen, n, show=show, **options)
    if fit.subspaces:
        _write_page(fit, as_json, out, device=device, dtype=dtype)
    elif shard is not None:
        typer.echo(f"Shard {share[0]}/{share[1]} is in {out}; when all are done: qkscope merge SHARDS... --out DIR")


def _write_page(fit: Any, as_json: bool, out: Path, **options: str | None) -> None:
    from qkscope.page.report import write_report

    if not (out / "results.json").is_file():
        raise BadInput(f"{out} was removed, and what it held is lost: say the same again.")
    write_report(out / "report.html", fit)
    shell.print_end(out, then=shell.command("swap", out, **options), as_json=as_json)


@shell.app.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders that decompose or trace --shard wrote.")],
    out: shell.Out,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Add up the shards of one job: exactly what one process would have made, to rounding."""
    from qkscope.analyses.fit import merge as run_merge
    from qkscope.runs.folder import RESULTS, read_json

    first = folders[0] / RESULTS  # a shard of a fit has no results yet
    if first.is_file() and str(read_json(first).get("experiment", "")).startswith("trace/"):
        from qkscope.analyses.trace.result import merge_traces

        shell.check_out(out, "trace")
        shell.run_job(lambda job: merge_traces(folders), out, as_json, everything)
        shell.print_end(out, then=shell.command("view", out), as_json=as_json)
        return
    show = partial(shell.print_result, as_json=as_json, everything=everything)
    _write_page(run_merge(folders, out, show=show), as_json, out)


@shell.app.command()
def swap(
    folder: shell.Fitted,
    n: shell.Count = 256,
    batch_size: shell.BatchSize = 32,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    seed: shell.Seed = 0,
    heads: Annotated[str | None, typer.Option("--heads", help="Heads like L18H6; all that were fitted.")] = None,
    downstream: Annotated[bool, typer.Option("--downstream", help="Also patch the model and read its answer.")] = False,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Swap the fitted features between the right key and another on held-out prompts, beside the baselines."""
    from qkscope.analyses.downstream import swap_downstream
    from qkscope.analyses.fit import load
    from qkscope.analyses.fit_folder import read_job, task_of
    from qkscope.analyses.swap import SIZES, check_swappable
    from qkscope.analyses.swap import swap as run_swap
    from qkscope.page.report import write_report
    from qkscope.runs.job import Job

    asked = read_job(folder)
    _check_fitted(heads, asked, folder)
    check_swappable(asked["space"], downstream)
    units = task_of(asked, folder).test(n)
    scope = shell.load_scope(asked["model"], device, dtype)
    fit = load(folder, scope)
    sizes = [k for k in SIZES if k <= scope.d_head]
    place = folder if os.access(folder, os.W_OK) else None
    jobs = [Job(place), Job(place)]
    options: Any = {"batch_size": batch_size, "seed": seed}
    with jobs[0].hold():
        result = run_swap(scope, units, fit, heads, sizes=sizes, clouds=place is not None, job=jobs[0], **options)
        if downstream:
            more = swap_downstream(scope, units, fit, heads, job=jobs[1], **options)
            tables, answer = {**result.tables, **more.tables}, f"{result.answer} {more.answer}"
            result = replace(result, tables=tables, answer=answer, seconds=result.seconds + more.seconds)
        shell.print_result(result, as_json, everything)
        if place is not None:  # the folder's page now tells this too
            write_report(folder / "report.html", result, fit)
        for job in jobs:
            job.clear()
    if not as_json:
        then = _explaining(folder, units[0][0], device=device, dtype=dtype)
        shell.print_end(place, then=then, also=" (written anew: it now shows the swaps too)")


def _explaining(folder: Path, example: Any, **options: str | None) -> str:
    """The command that explains a prompt of the test, or opens the page where none fits into a line."""
    text = None if example.text is None else example.text[: max((stop for _, stop in example.queries), default=None)]
    if text is None or len(text) > _LONGEST_PROMPT:
        return shell.command("view", folder)
    return shell.command("explain", folder, text.replace("\n", "\\n"), **options)


def _check_fitted(heads: str | None, asked: Mapping[str, Any], folder: Path) -> None:
    """Heads to look at are among those of a fit folder."""
    from qkscope.heads import parse_heads

    for head in [] if heads is None else parse_heads(heads):
        if str(head) not in asked["heads"]:
            raise BadInput(f"{folder} was not fitted at {head}: there is {', '.join(asked['heads'])}.")
