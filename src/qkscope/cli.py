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
def demo(out: Out = Path("runs/demo"), as_json: Json = False) -> None:
    """Run the main job and write a page: find features, test them causally, explain one prompt."""
    from qkscope.result import check_folder

    check_folder(out)
    from qkscope.demo import demo as run_demo

    result, page = run_demo()
    result.write(out, files={"report.html": page})
    if as_json:
        _print_json(result.to_json())
        return
    typer.echo(result.answer)
    for name, rows in result.tables.items():
        _print_table(name, rows)
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
