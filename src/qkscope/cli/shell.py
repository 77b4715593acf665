"""What every verb shares: the app, its options, and how results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

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
Model = Annotated[str, typer.Option("--model", help="Hub id, folder, .gguf file, smollm2-135m, or nano:mixed.")]
TaskName = Annotated[
    str, typer.Argument(help="binding, filter, ioi, induction, greater_than, pronoun, or a .jsonl file.")
]
Count = Annotated[int, typer.Option("--n", "-n", help="Number of prompts (for each contrast).")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every draw.")]
Form = Annotated[
    str, typer.Option("--form", help="list, sentence or question (binding); bullets (filter); ABBA or BABA (ioi).")
]
Size = Annotated[
    int | None, typer.Option("--size", help="Entities (binding), categories (filter) or words (induction).")
]
Space = Annotated[str, typer.Option("--space", help="post_rope (the papers'), pre_rope or query_frame.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Prompts per batch.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, or auto: spread over all GPUs.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, ...; as the weights are stored.")]


def make_task(name: str, form: str, size: int | None, seed: int, chat: bool, center: str | None = None) -> Any:
    """The task by name; checked before a model is loaded."""
    from qkscope import tasks

    if name.lower().endswith(".jsonl"):
        if size is not None:
            raise BadInput(f"--size is for binding and filter: the prompts of {name} are as they are.")
        return tasks.from_jsonl(name, seed=seed, chat=chat, center=center or "none")  # type: ignore[arg-type]
    if center is not None:
        raise BadInput(f"--center is for a file of your own: the contrasts of {name} know theirs.")
    if name == "binding":
        return tasks.binding(9 if size is None else size, form, seed, chat=chat)  # type: ignore[arg-type]
    if name == "filter":
        return tasks.filter(5 if size is None else size, form, seed, chat=chat)  # type: ignore[arg-type]
    if name in ("ioi", "greater_than", "pronoun") and size is not None:
        raise BadInput(f"--size is for binding, filter and induction: the prompts of {name} have one size.")
    if name in ("induction", "greater_than", "pronoun") and form != "list":
        raise BadInput(f"--form is for binding, filter and ioi: the prompts of {name} have one form.")
    if name == "ioi":
        return tasks.ioi("both" if form == "list" else form, seed, chat=chat)  # type: ignore[arg-type]
    if name == "induction":
        return tasks.induction(8 if size is None else size, seed, chat=chat)
    if name in ("greater_than", "pronoun"):
        return getattr(tasks, name)(seed, chat=chat)
    raise BadInput(
        f"there is no task {name!r}: take binding, filter, ioi, induction, greater_than, pronoun, or a .jsonl file"
        " of your own."
    )


def load_scope(model: str, device: str | None, dtype: str | None) -> Any:
    """The model, ready to be looked into."""
    from qkscope.capture.scope import Scope

    if device == "auto":  # larger than one device
        return Scope.load(model, device_map="auto", dtype=dtype)
    return Scope.load(model, device=device, dtype=dtype)


def check_batch_size(batch_size: int) -> None:
    """Refuse it before a model is loaded."""
    if batch_size < 1:
        raise BadInput(f"--batch-size is at least 1, but got {batch_size}.")


def print_result(result: Any, as_json: bool, folder: Path | None = None) -> None:
    """The answer, then every table; or all of it as JSON."""
    if as_json:
        print_json(result.to_json())
        return
    typer.echo(result.answer)
    for name, rows in result.tables.items():
        print_table(name, rows)
    if folder is not None:
        typer.echo(f"Written to {folder}.")


def print_rows(name: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """One table, or ``{"rows": [...]}``."""
    if as_json:
        print_json({"rows": list(rows)})
    else:
        print_table(name, rows)


def print_json(value: Any) -> None:
    """JSON on stdout, and nothing else there."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for people."""
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
