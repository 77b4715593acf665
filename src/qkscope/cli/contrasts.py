"""Contrasts: rank heads, fit features, swap them, explain a prompt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli.shell import (
    BatchSize,
    Chat,
    Count,
    Device,
    Dtype,
    Form,
    Json,
    Model,
    Out,
    Seed,
    Size,
    Space,
    TaskName,
    app,
    check_batch_size,
    load_scope,
    make_task,
    print_json,
    print_result,
    print_table,
    say,
)
from qkscope.errors import BadInput


@app.command()
def heads(
    task: TaskName, model: Model = "smollm2-135m", n: Count = 256, form: Form = "list", size: Size = None,
    seed: Seed = 0, chat: Chat = False, batch_size: BatchSize = 32, device: Device = None, dtype: Dtype = None,
    threshold: Annotated[float, typer.Option("--threshold", help="Score a head must reach to be listed.")] = 0.30,
    by: Annotated[str, typer.Option("--by", help="Score: accuracy, row_accuracy, ratio or mass.")] = "accuracy",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Score every head on a task in one pass, with intervals and the chance level."""
    made = make_task(task, form, size, seed, chat)
    made.choose(n)
    check_batch_size(batch_size)
    if not 0 <= threshold <= 1:
        raise BadInput(f"--threshold is a share from 0 to 1, but got {threshold}.")
    from qkscope.analyses.find import SCORES, find_heads

    if by not in SCORES:
        raise BadInput(f"--by is one of {', '.join(SCORES)}, but got {by!r}.")
    ranking = find_heads(load_scope(model, device, dtype), made, n, batch_size=batch_size)
    if as_json:
        print_json(ranking.to_json())
        return
    found = [row for row in ranking.top(by) if row[by] >= threshold]
    say(ranking.answer)
    if not found:
        best = ranking.top(by)[0]
        typer.echo(
            f"No head reaches {threshold:.0%}: the best is {best['head']} with {best[by]:.0%}, and chance is "
            f"{best['chance']:.0%}."
        )
    print_table("heads", found)


@app.command()
def decompose(
    task: TaskName, out: Out, heads: Annotated[str, typer.Option("--heads", help="Heads like L18H6,L18H7.")],
    model: Model = "smollm2-135m", n: Count = 1024, form: Form = "list", size: Size = None, seed: Seed = 0,
    chat: Chat = False, space: Space = "post_rope", batch_size: BatchSize = 32, device: Device = None,
    dtype: Dtype = None,
    contrasts: Annotated[str | None, typer.Option("--contrasts", help="Contrasts like order,lexical; all.")] = None,
    center: Annotated[str | None, typer.Option("--center", help="Of a .jsonl file: none, query or both.")] = None,
    replicates: Annotated[int, typer.Option("--replicates", help="Of each null; pooled over heads.")] = 199,
    shard: Annotated[str | None, typer.Option("--shard", help="i/n: this share of the prompts; then merge.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Fit the contrasts of a task at some heads, with nulls and controls; a run that died goes on where it stopped.

    Under torchrun the processes share the prompts.
    """
    from qkscope.heads import parse_heads

    chosen = parse_heads(heads)  # before a file is read
    made = make_task(task, form, size, seed, chat, center)
    from qkscope.analyses.decompose import decompose as run
    from qkscope.runs.shards import parse_shard, torchrun_device

    names = None if contrasts is None else [part.strip() for part in contrasts.split(",") if part.strip()]
    share: Any = "torchrun" if shard is None else parse_shard(shard)
    fit = run(
        lambda: load_scope(model, torchrun_device(device), dtype), made, chosen, n, contrasts=names, out=out,
        space=space, batch_size=batch_size, seed=seed, shard=share, replicates=replicates,  # type: ignore[arg-type]
        show=lambda fit: print_result(fit, as_json),
    )  # fmt: skip
    if fit.subspaces:
        _write_page(fit, as_json, out)
    elif shard is not None:
        typer.echo(f"Shard {share[0]}/{share[1]} is in {out}; when all are done: qkscope merge SHARDS... --out DIR")


def _write_page(fit: Any, as_json: bool, out: Path) -> None:
    from qkscope.page.report import write_report

    if not (out / "results.json").is_file():
        raise BadInput(f"{out} was removed, and what it held is lost: say the same again.")
    write_report(out / "report.html", fit)
    if not as_json:
        typer.echo(f"Written to {out}.")


@app.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders that decompose --shard wrote.")],
    out: Out,
    as_json: Json = False,
) -> None:
    """Add up the shards of one job: exactly what one process would have made, to rounding."""
    from qkscope.analyses.merge import merge as run_merge

    _write_page(run_merge(folders, out, show=lambda fit: print_result(fit, as_json)), as_json, out)


@app.command()
def swap(
    folder: Annotated[Path, typer.Argument(help="A folder that decompose wrote.")],
    n: Count = 512, batch_size: BatchSize = 32, device: Device = None, dtype: Dtype = None, seed: Seed = 0,
    heads: Annotated[str | None, typer.Option("--heads", help="Heads like L18H6; all that were fitted.")] = None,
    downstream: Annotated[bool, typer.Option("--downstream", help="Also patch the model and read its answer.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Swap the fitted features between the right key and another on held-out prompts, beside the baselines."""
    from qkscope.analyses.fit import load
    from qkscope.analyses.fit_folder import read_job, task_of
    from qkscope.analyses.swap import SIZES, check_swappable
    from qkscope.analyses.swap import swap as run_swap
    from qkscope.runs.job import Job

    asked = read_job(folder)
    _check_fitted(heads, asked, folder)
    check_swappable(asked["space"], downstream)
    check_batch_size(batch_size)
    units = task_of(asked, folder).test(n)
    scope = load_scope(asked["model"], device, dtype)
    fit = load(folder, scope)
    sizes = [k for k in SIZES if k <= scope.d_head]
    place = folder if os.access(folder, os.W_OK) else None
    job = [Job(place), Job(place)]
    result = run_swap(
        scope, units, fit, heads, sizes=sizes, clouds=place is not None, batch_size=batch_size, seed=seed, job=job[0]
    )
    if downstream:
        from dataclasses import replace

        from qkscope.analyses.downstream import swap_downstream

        more = swap_downstream(scope, units, fit, heads, batch_size=batch_size, seed=seed, job=job[1])
        result = replace(
            result, tables={**result.tables, **more.tables}, answer=f"{result.answer} {more.answer}",
            seconds=result.seconds + more.seconds,
        )  # fmt: skip
    print_result(result, as_json)
    if place is not None:  # the folder's page now tells this too
        from qkscope.page.report import write_report

        write_report(folder / "report.html", result, fit)
    for one in job:
        one.clear()


def _check_fitted(heads: str | None, asked: Mapping[str, Any], folder: Path) -> None:
    """Heads to look at are among those of a fit folder."""
    from qkscope.heads import parse_heads

    for head in [] if heads is None else parse_heads(heads):
        if str(head) not in asked["heads"]:
            raise BadInput(f"{folder} was not fitted at {head}: there is {', '.join(asked['heads'])}.")


@app.command()
def explain(
    folder: Annotated[Path, typer.Argument(help="A folder that decompose wrote.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; its last token asks. \\n is a line break.")],
    head: Annotated[str | None, typer.Option("--head", help="One of the fitted heads; the first.")] = None,
    split: Annotated[str, typer.Option("--split", help="sequential (the paper's), average or oblique.")] = "sequential",
    device: Device = None, dtype: Dtype = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Split the attention logits of one prompt, token by token, among the fitted features."""
    from typing import get_args

    from qkscope.analyses.attribute import attribute
    from qkscope.analyses.fit import load
    from qkscope.analyses.fit_folder import read_job, task_of
    from qkscope.analyses.swap import check_swappable
    from qkscope.heads import Head
    from qkscope.maths.attribution import Split

    asked = read_job(folder)
    _check_fitted(None if head is None else str(Head.parse(head)), asked, folder)
    check_swappable(asked["space"])
    if split not in get_args(Split):
        raise BadInput(f"--split is one of {', '.join(get_args(Split))}, but got {split!r}.")
    if not prompt:
        raise BadInput("the prompt is empty: give at least one character.")
    task_of(asked, folder)
    scope = load_scope(asked["model"], device, dtype)
    fit = load(folder, scope)
    text = prompt.replace("\\n", "\n")
    parts = attribute(scope, text, head or fit.heads[0], fit, split=split, chat=fit.chat)  # type: ignore[arg-type]
    if as_json:
        print_json(parts.to_json())
        return
    say(parts.show())
    for name in ("summary", "overlap"):
        print_table(name, parts.tables[name])
