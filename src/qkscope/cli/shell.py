"""What every command shares: the app, and how results are printed: the answer, one small table, the next command."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from qkscope.cli import views
from qkscope.errors import BadInput
from qkscope.runs.progress import clear, plain_text

_OF_PAPERS = ("reproduce", "toy", "train", "bench", "models")


class Verbs(TyperGroup):
    """Our verbs, and those of other distributions (entry points ``qkscope.commands``), loaded when they are asked for.

    An entry point names a `typer.Typer`, as ``qkscope_papers.cli:app``; ours come first where names are the same.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all verbs."""
        self._join()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb of this name; None where there is none."""
        if cmd_name not in self.commands:
            self._join()
        if cmd_name not in self.commands and cmd_name in _OF_PAPERS:
            raise BadInput(f"{cmd_name} needs the papers: run `pip install qkscope-papers`.")
        return super().get_command(ctx, cmd_name)

    def _join(self) -> None:
        for entry in entry_points(group="qkscope.commands"):
            for name, verb in get_command(entry.load()).commands.items():  # type: ignore[attr-defined]
                self.commands.setdefault(name, verb)


app = typer.Typer(
    cls=Verbs,
    name="qkscope",
    help="Why did this attention head attend to that token?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
All = Annotated[bool, typer.Option("--all", help="Print every table with all its rows and columns.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results and the page.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every draw.")]


def print_result(result: Any, as_json: bool, everything: bool = False) -> None:
    """The answer and the one table that supports it, or every table; or all of it as JSON.

    Of several processes under torchrun the first alone has a result to print.
    """
    if not result.tables and not result.answer:
        return
    if as_json:
        print_json(result.to_json())
        return
    claims = [{**claim.to_json(), "verdict": claim.verdict} for claim in result.claims]
    say("\n".join([result.answer, *(f"  {row['line']}" for row in result.tables.get("said", ()))]))
    print_tables(result.experiment, {**result.tables, "claims": claims}, everything, result.main)


def print_rows(
    verb: str, rows: Sequence[Mapping[str, Any]], answer: str, as_json: bool, everything: bool = False
) -> None:
    """As `print_result`, of a verb that gives rows; as JSON ``{"rows": [...]}``."""
    if as_json:
        print_json({"rows": list(rows)})
        return
    say(answer)
    print_tables(verb, {"rows": rows}, everything)


def print_tables(verb: str, tables: Mapping[str, Any], everything: bool = False, main: str = "") -> None:
    """What a verb shows of its tables (`qkscope.cli.views`), or all of them in full."""
    if everything:
        for name, rows in tables.items():
            if rows:
                say(f"\n{name}")
                whole = views.Table.of(rows, {column: column for column in rows[0]}, digits=4)
                _print_lines(whole.entire(_width() if sys.stdout.isatty() else None))
        return
    shown = views.shown(verb, tables, main)
    if shown is not None:
        table, rows, note = shown
        typer.echo()
        _print_lines(table.fitted(_width()))
        if note:
            say(note, wrapped=True)
        left = f"{len(table.cells)} of {rows} rows; " if len(table.cells) < rows else ""
        say(f"{left}--all prints everything.")


def _print_lines(lines: Sequence[str]) -> None:
    for i, line in enumerate(lines):
        typer.echo(typer.style(line, bold=True) if i == 0 else line)


def _width() -> int:
    return max(40, shutil.get_terminal_size().columns)


def print_json(value: Any) -> None:
    """JSON on stdout, and nothing else there; JSON writes out most of what would steer a terminal, but not all."""
    clear()
    text = json.dumps(value, indent=1, ensure_ascii=False)
    typer.echo(re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text))


def say(text: str, wrapped: bool | None = None) -> None:
    """Lines for people; what they quote from a folder does not steer the terminal.

    Parameters
    ----------
    text : the lines.
    wrapped : whether long ones are broken between words; on a terminal, if not given: a pipe takes whole lines.
    """
    clear()
    for line in plain_text(text).split("\n"):
        whole = not (sys.stdout.isatty() if wrapped is None else wrapped) or len(line) <= _width()
        typer.echo(line if whole else textwrap.fill(line, _width(), break_long_words=False, break_on_hyphens=False))


def print_end(*written: str | Path | None, then: str, as_json: bool = False) -> None:
    """Where the pages are (or what was written), and the next command to type.

    Parameters
    ----------
    written : folders or files; None where nothing was written.
    then : the next command.
    as_json : then nothing but JSON is printed.
    """
    if as_json:
        return
    typer.echo()
    for out in written:
        if out is not None:
            pages = [page for page in (Path(out) / "report.html", Path(out) / "index.html") if page.is_file()]
            say(f"The page: {pages[0]}" if pages else f"Written to {out}.")
    typer.echo(f"Next: {plain_text(then)}")


def command(verb: str, *arguments: object, **options: object) -> str:
    """A command to type: its arguments, and its options where the verb has them and would not take them anyway.

    >>> from qkscope import cli
    >>> command("decompose", "binding", heads="L18H6", out="my runs", seed=1, key=3)
    "qkscope decompose binding --heads L18H6 --out 'my runs' --seed 1"
    """
    known = {parameter.name: parameter for parameter in get_command(app).get_command(None, verb).params}  # type: ignore[attr-defined]
    words = ["qkscope", verb, *map(str, arguments)]
    for name, value in options.items():
        if name not in known or value is None or value is False or value == known[name].default:
            continue
        texts = list(map(str, value)) if isinstance(value, list) else [str(value)]
        if known[name].param_type_name == "argument":
            words += texts
        else:
            words += [known[name].opts[0], *([] if value is True else [",".join(texts)])]
    return shlex.join(word.replace("\n", "\\n") for word in words)
