"""The command line: a thin shell. Each verb checks its input, calls one function, prints a table or JSON.

Nothing heavy is imported until a verb needs it, so that ``qkscope --help`` answers at once. Bad input is one sentence
on stderr and exit code 2.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope import __version__
from qkscope.errors import BadInput

app = typer.Typer(
    name="qkscope",
    help="Why did this attention head attend to that token?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]


def main() -> None:
    """Entry point: run a verb; turn bad input into a sentence and exit code 2, and Ctrl-C into 130."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        app()
    except BadInput as error:
        typer.echo(f"qkscope: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("qkscope: stopped.", err=True)
        sys.exit(130)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Why did this attention head attend to that token?"""


@app.command()
def demo(
    out: Out = Path("runs/demo"),
    n: Annotated[int, typer.Option("--n", help="Prompts for finding, fitting and testing, each.")] = 96,
    as_json: Json = False,
) -> None:
    """Run the main job on the embedded model: find heads, take them apart, test it causally, explain a prompt."""
    from qkscope.result import check_folder

    check_folder(out)
    from qkscope.demo import demo as run_demo

    result, files = run_demo(n=n)
    result.write(out, files=files)
    _print_result(result, as_json)
    if not as_json:
        _print_table("claims", [claim.to_json() for claim in result.claims])
        typer.echo(f"The page: {out / 'report.html'}")


@app.command()
def models(as_json: Json = False) -> None:
    """Check, live, which model families can be looked into."""
    from qkscope.capture.live_check import list_families

    _print_rows("families", list_families(), as_json)


@app.command()
def bench(
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this row alone; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Measure every ratio we claim, each against the plain way of doing the same work, in the same run."""
    from qkscope.bench import bench as run_bench

    _print_rows("bench", run_bench(only), as_json)


Model = Annotated[str, typer.Option("--model", help="Hub id, folder, .gguf file, or smollm2-135m.")]
TaskName = Annotated[str, typer.Argument(help="binding, filter, or a .jsonl file of your own.")]
Count = Annotated[int, typer.Option("--n", help="Number of prompts (for each contrast).")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every draw.")]
Form = Annotated[str, typer.Option("--form", help="Form of the prompts: list, sentence or question; bullets (filter).")]
Size = Annotated[int | None, typer.Option("--size", help="Entities in a prompt (binding) or categories (filter).")]
Space = Annotated[str, typer.Option("--space", help="post_rope (the papers'), pre_rope or query_frame.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Prompts per batch.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1; the first GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, ...; as the weights are stored.")]


def _task(name: str, form: str, size: int | None, seed: int, chat: bool, center: str | None = None) -> Any:
    """The task by name; checked before a model is loaded."""
    from qkscope import tasks

    if name.endswith(".jsonl"):
        if size is not None:
            raise BadInput(f"--size is for binding and filter: the prompts of {name} are as they are.")
        return tasks.from_jsonl(name, seed=seed, chat=chat, center=center or "none")  # type: ignore[arg-type]
    if center is not None:
        raise BadInput(f"--center is for a file of your own: the contrasts of {name} know theirs.")
    if name == "binding":
        return tasks.binding(9 if size is None else size, form, seed, chat=chat)  # type: ignore[arg-type]
    if name == "filter":
        return tasks.filter(5 if size is None else size, form, seed, chat=chat)  # type: ignore[arg-type]
    raise BadInput(f"there is no task {name!r}: take binding, filter, or a .jsonl file of your own.")


def _load(model: str, device: str | None, dtype: str | None) -> Any:
    from qkscope.capture.scope import Scope

    return Scope.load(model, device=device, dtype=dtype)


@app.command()
def heads(
    task: TaskName, model: Model = "smollm2-135m", n: Count = 256, form: Form = "list", size: Size = None,
    seed: Seed = 0, chat: Chat = False, batch_size: BatchSize = 32, device: Device = None, dtype: Dtype = None,
    threshold: Annotated[float, typer.Option("--threshold", help="Score a head must reach to be listed.")] = 0.30,
    by: Annotated[str, typer.Option("--by", help="Score: accuracy, row_accuracy, ratio or mass.")] = "accuracy",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Score every head on a task in one pass, with intervals and the chance level."""
    made = _task(task, form, size, seed, chat)
    made.choose(n)
    _check_batch_size(batch_size)
    if not 0 <= threshold <= 1:
        raise BadInput(f"--threshold is a share from 0 to 1, but got {threshold}.")
    from qkscope.analyses.find import SCORES, find_heads

    if by not in SCORES:
        raise BadInput(f"--by is one of {', '.join(SCORES)}, but got {by!r}.")
    ranking = find_heads(_load(model, device, dtype), made, n, batch_size=batch_size)
    if as_json:
        _print_json(ranking.to_json())
        return
    found = [row for row in ranking.top(by) if row[by] >= threshold]
    typer.echo(ranking.answer)
    if not found:
        best = ranking.top(by)[0]
        typer.echo(
            f"No head reaches {threshold:.0%}: the best is {best['head']} with {best[by]:.0%}, and chance is "
            f"{best['chance']:.0%}."
        )
    _print_table("heads", found)


@app.command()
def decompose(
    task: TaskName, out: Out, heads: Annotated[str, typer.Option("--heads", help="Heads like L18H6,L18H7.")],
    model: Model = "smollm2-135m", n: Count = 1024, form: Form = "list", size: Size = None, seed: Seed = 0,
    chat: Chat = False, space: Space = "post_rope", batch_size: BatchSize = 32, device: Device = None,
    dtype: Dtype = None,
    contrasts: Annotated[str | None, typer.Option("--contrasts", help="Contrasts like order,lexical; all.")] = None,
    center: Annotated[str | None, typer.Option("--center", help="Of a .jsonl file: none, query or both.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Fit the contrasts of a task at some heads, with nulls and controls; a run that died goes on where it stopped."""
    from qkscope.heads import parse_heads

    chosen = parse_heads(heads)
    made = _task(task, form, size, seed, chat, center)
    from qkscope.analyses.fit_folder import plan_decompose, run_decompose

    names = None if contrasts is None else [part.strip() for part in contrasts.split(",") if part.strip()]
    options: Any = {"contrasts": names, "space": space, "batch_size": batch_size, "seed": seed}
    plan_decompose(made, chosen, n, out, **options)
    fit = run_decompose(_load(model, device, dtype), made, chosen, n, out, **options)
    _print_result(fit, as_json, out)


@app.command()
def swap(
    folder: Annotated[Path, typer.Argument(help="A folder that decompose wrote.")],
    n: Count = 512, batch_size: BatchSize = 32, device: Device = None, dtype: Dtype = None, seed: Seed = 0,
    heads: Annotated[str | None, typer.Option("--heads", help="Heads like L18H6; all that were fitted.")] = None,
    downstream: Annotated[bool, typer.Option("--downstream", help="Also patch the model and read its answer.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Swap the fitted features between the right key and another on held-out prompts, beside the baselines."""
    from qkscope.analyses.fit_folder import load_fit, read_job, task_of
    from qkscope.analyses.swap import SIZES, check_swappable
    from qkscope.analyses.swap import swap as run_swap

    asked = read_job(folder)
    _check_fitted(heads, asked, folder)
    check_swappable(asked["space"], downstream)
    _check_batch_size(batch_size)
    units = task_of(asked, folder).test(n)
    scope = _load(asked["model"], device, dtype)
    fit, _ = load_fit(folder, scope)
    sizes = [k for k in SIZES if k <= scope.d_head]
    result = run_swap(scope, units, fit, heads, sizes=sizes, batch_size=batch_size, seed=seed)
    if downstream:
        from dataclasses import replace

        from qkscope.analyses.downstream import swap_downstream

        more = swap_downstream(scope, units, fit, heads, batch_size=batch_size, seed=seed)
        result = replace(
            result, tables={**result.tables, **more.tables}, answer=f"{result.answer} {more.answer}",
            seconds=result.seconds + more.seconds,
        )  # fmt: skip
    _print_result(result, as_json)


def _check_fitted(heads: str | None, asked: Mapping[str, Any], folder: Path) -> None:
    """Heads to look at are among those of a fit folder."""
    from qkscope.heads import parse_heads

    for head in [] if heads is None else parse_heads(heads):
        if str(head) not in asked["heads"]:
            raise BadInput(f"{folder} was not fitted at {head}: there is {', '.join(asked['heads'])}.")


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise BadInput(f"--batch-size is at least 1, but got {batch_size}.")


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
    from qkscope.analyses.fit_folder import load_fit, read_job, task_of
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
    scope = _load(asked["model"], device, dtype)
    fit, made = load_fit(folder, scope)
    text = prompt.replace("\\n", "\n")
    parts = attribute(scope, text, head or fit.heads[0], fit, split=split, chat=made.chat)  # type: ignore[arg-type]
    if as_json:
        _print_json(parts.to_json())
        return
    typer.echo(parts.show())
    for name in ("summary", "overlap"):
        _print_table(name, parts.tables[name])


def _print_result(result: Any, as_json: bool, folder: Path | None = None) -> None:
    if as_json:
        _print_json(result.to_json())
        return
    typer.echo(result.answer)
    for name, rows in result.tables.items():
        _print_table(name, rows)
    if folder is not None:
        typer.echo(f"Written to {folder}.")


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="lee2026, or all.")] = "",
    figures: Annotated[list[str] | None, typer.Argument(help="Figure ids, or all.")] = None,
    preset: Annotated[str, typer.Option("--preset", help="smoke, default or paper.")] = "default",
    out: Out = Path("runs"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of every draw.")] = 0,
    device: Annotated[str, typer.Option("--device", help="Where models run and toys train: cpu or cuda.")] = "cpu",
    model: Model = "smollm2-135m",
    listed: Annotated[bool, typer.Option("--list", help="Say which figures there are.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce figures of the papers, each beside its controls; one folder OUT/PAPER/FIGURE each."""
    from qkscope.papers.registry import PAPERS, list_experiments
    from qkscope.papers.registry import reproduce as run_reproduce

    if listed:
        _print_rows("experiments", list_experiments(), as_json)
        return
    wanted = {name: ["all"] for name in PAPERS} if paper == "all" and not figures else {paper: figures or []}
    results = [
        result
        for name, chosen in wanted.items()
        for result in run_reproduce(
            name, chosen, preset=preset, out=out, seed=seed, device=device, model=model
        ).values()
    ]
    if as_json:
        _print_json({"results": [result.to_json() for result in results]})
        return
    for result in results:
        typer.echo(f"{result.experiment}: {result.answer}")
        _print_table("claims", [claim.to_json() for claim in result.claims])
        typer.echo(f"The page: {out / result.experiment / 'report.html'}\n")


toy = typer.Typer(help="Train toy models with known features.", no_args_is_help=True)
app.add_typer(toy, name="toy")


@toy.command("retrieval")
def toy_retrieval(
    out: Out = Path("runs/toy"),
    grids: Annotated[str | None, typer.Option("--grids", help="all, or one as discrete-8; else --ranks.")] = None,
    ranks: Annotated[str, typer.Option("--ranks", help="Ranks of the latents of one cell.")] = "3,5",
    variant: Annotated[str, typer.Option("--variant", help="discrete or continuous.")] = "discrete",
    d_head: Annotated[int, typer.Option("--d-head", help="Width of the head.")] = 16,
    seeds: Annotated[int, typer.Option("--seeds", help="Heads per cell, each with encoders and data of its own.")] = 1,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 1e-4,
    steps: Annotated[int, typer.Option("--steps", help="At most this many steps.")] = 50_000,
    as_written: Annotated[bool, typer.Option("--as-written", help="Scales and noise as the paper's text.")] = False,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    workers: Annotated[int | None, typer.Option("--workers", help="CPU threads; all cores by default.")] = None,
    as_json: Json = False,
) -> None:
    """Train heads on payload retrieval, many at once; stop it and say the same again, and it goes on."""
    from qkscope.toys.retrieval_run import train_retrieval

    parts = ranks.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise BadInput(f"ranks are whole numbers with commas between, as 3,5, but got {ranks!r}.")
    result = train_retrieval(
        out, grids=grids, ranks=[int(part) for part in parts], variant=variant, d_head=d_head, seeds=seeds, lr=lr,  # type: ignore[arg-type]
        steps=steps, as_written=as_written, device=device, workers=workers,
    )  # fmt: skip
    if as_json:
        _print_json(result.to_json())
        return
    _print_table("heads", result.tables["heads"])
    typer.echo(result.answer)


def _print_rows(name: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json({"rows": list(rows)})
    else:
        _print_table(name, rows)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def _print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in rows[0]:
        numeric = any(isinstance(row[column], int | float) and not isinstance(row[column], bool) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[column])) for column in rows[0]))
    # A pipe has no width: print whole rows there instead of folding them at 80 columns.
    Console(width=None if sys.stdout.isatty() else 400).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
