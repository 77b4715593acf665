"""What every verb shares: the app, its options, and how results are printed."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope import tasks
from qkscope.errors import BadInput
from qkscope.kinds import LARGEST_SEED
from qkscope.runs.folder import plain_text

log = logging.getLogger(__name__)

_MOST, _MANY = 10**7, 10**5  # prompts; each takes a tenth of a millisecond or more before the first is looked at

app = typer.Typer(
    name="qkscope",
    help="Why did this attention head attend to that token?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _count(value: int | None) -> int | None:
    if value is not None and value > _MOST:
        raise BadInput(f"{value:,} prompts are more than can be drawn: take at most {_MOST:,}.")
    if value is not None and value > _MANY:
        log.info("Drawing %s prompts takes a while, minutes for a million ...", f"{value:,}")
    return value


def _seed(value: int) -> int:
    if not 0 <= value <= LARGEST_SEED:
        raise BadInput(f"--seed is a whole number from 0 to {LARGEST_SEED}, but got {value}.")
    return value


def _batch_size(value: int) -> int:
    if value < 1:
        raise BadInput(f"--batch-size is at least 1, but got {value}.")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Model = Annotated[str, typer.Option("--model", help="Hub id, folder, .gguf file, smollm2-135m, or nano:mixed.")]
TaskName = Annotated[str, typer.Argument(help=f"{', '.join(tasks.BUILT_IN)}, or a .jsonl file.")]
Fitted = Annotated[Path, typer.Argument(help="A folder that decompose wrote.")]
Heads = Annotated[str, typer.Option("--heads", help="Heads like L18H6,L18H7.")]
Count = Annotated[int, typer.Option("--n", "-n", help="Number of prompts (for each contrast).", callback=_count)]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every draw.", callback=_seed)]
Form = Annotated[
    str, typer.Option("--form", help="list, sentence or question (binding); bullets (filter); ABBA or BABA (ioi).")
]
Size = Annotated[
    int | None, typer.Option("--size", help="Entities (binding), categories (filter) or words (induction).")
]
Space = Annotated[str, typer.Option("--space", help="post_rope (the papers'), pre_rope or query_frame.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Prompts per batch.", callback=_batch_size)]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, or auto: spread over all GPUs.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, ...; as the weights are stored.")]
TrainDevice = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Workers = Annotated[int | None, typer.Option("--workers", help="CPU threads; all cores by default.")]
HeadWidth = Annotated[int, typer.Option("--d-head", help="Width of the head.")]


def make_task(name: str, form: str, size: int | None, seed: int, chat: bool, center: str | None = None) -> Any:
    """The task by name; checked before a model is loaded, as is that its maker takes what was asked."""
    makers: dict[str, Callable[..., Any]] = {**tasks.BUILT_IN}
    if name.lower().endswith(".jsonl"):
        makers[name] = partial(tasks.from_jsonl, name)
    if name not in makers:
        raise BadInput(f"there is no task {name!r}: take {', '.join(makers)}, or a .jsonl file of your own.")
    options: dict[str, Any] = {}
    sizes, shown = ("entities", "categories", "length"), None if form == "list" else form
    for flag, value, names in (("size", size, sizes), ("form", shown, ("form",)), ("center", center, ("center",))):
        takers = {own: took for own, maker in makers.items() if (took := _takes(maker, names))}
        if value is not None and name not in takers:
            among = ", ".join(takers) or "a file of your own"
            raise BadInput(f"--{flag} is for {among}: the prompts of {name} have one {flag}.")
        if value is not None:
            options[takers[name]] = value
    return makers[name](seed=seed, chat=chat, **options)


def _takes(maker: Callable[..., Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in inspect.signature(maker).parameters), None)


def split_names(text: str | None) -> list[str] | None:
    """Names with commas between; None stays None."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def load_scope(model: str, device: str | None, dtype: str | None) -> Any:
    """The model, ready to be looked into."""
    from qkscope.capture.scope import Scope

    if device == "auto":  # larger than one device
        return Scope.load(model, device_map="auto", dtype=dtype)
    return Scope.load(model, device=device, dtype=dtype)


def print_result(result: Any, as_json: bool, tables: Mapping[str, Any] | None = None) -> None:
    """The answer, then these tables (or every one but those that are looked at, not read); or all of it as JSON."""
    if as_json:
        print_json(result.to_json())
        return
    say(result.answer)
    for name, rows in (result.tables if tables is None else tables).items():
        if name not in ("spectrum", "clouds"):
            print_table(name, rows)


def print_rows(name: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """One table, or ``{"rows": [...]}``."""
    if as_json:
        print_json({"rows": list(rows)})
    else:
        print_table(name, rows)


def print_json(value: Any) -> None:
    """JSON on stdout, and nothing else there; JSON writes out most of what would steer a terminal, but not all."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    typer.echo(re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text))


def say(text: str) -> None:
    """A line for people; what it quotes from a folder does not steer the terminal."""
    typer.echo(plain_text(text))


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(title=plain_text(title), box=box.SIMPLE_HEAD, title_justify="left")
    for column in rows[0]:
        numeric = any(isinstance(row[column], int | float) and not isinstance(row[column], bool) for row in rows)
        table.add_column(plain_text(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[column])) for column in rows[0]))
    # A pipe has no width: print whole rows there instead of folding them at 80 columns.
    Console(width=None if sys.stdout.isatty() else 400).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else plain_text(str(value))
