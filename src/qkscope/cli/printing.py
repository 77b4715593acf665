"""How results are printed: the answer, its lines or one small table, the page and the next command.

Of a result of `why` so much is printed that a terminal of `MOST_LINES` lines holds it; with
``--all`` every table follows in full. Colours and bold are for terminals alone.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qkscope.cli import views
from qkscope.results.progress import plain_text
from qkscope.results.result import Result

MOST_LINES = 14
"""Of an answer of `why`, the page and the next command with it; ``--all`` prints the rest."""
_UNLIMITED = 10**6  # lines
_UNWRAPPED = 100_000  # columns of a line that is not wrapped
_WIDEST = 100  # columns of sentences on a wide terminal
_HELD = "\ue000"  # stands for the blank of a quoted token, so that no line breaks there
_QUOTED_BLANK = re.compile(r"(?<!\w)'( +)(?=[^']+')")
_NAMED_LINE = re.compile(r"([A-Z][\w' ]*): (.*)", re.DOTALL)
_UNSAFE_JSON = re.compile(r"[\x7f-\x9f\ud800-\udfff]")
_VERDICTS = {
    "green": "shown|it depends on them",
    "yellow": "not shown|it does not depend on them",
    "dim": "untested",
}


# ---------------------------------------------------------------------- a result


def print_result(
    result: Result, as_json: bool, everything: bool = False, end: Sequence[str] = ()
) -> None:
    """Print the answer with its lines or one table, with every table, or all of it as JSON.

    Of several processes under torchrun the first alone has a result to print.

    Parameters
    ----------
    result : to print.
    as_json : whether it is printed as JSON.
    everything : whether every table is printed.
    end : lines that follow, as `end_lines` makes them.
    """
    if not (result.tables or result.answer):
        return
    if as_json:
        print_json(result.to_json())
        return
    tables = _printed_tables(result)
    table = [] if everything else _view_lines(result, tables)
    limited = result.experiment in ("why", "why/circuit") and not everything
    room = (MOST_LINES if limited else _UNLIMITED) - len(table) - len(end)
    answer = laid(_sentence(result.answer, "bold"))
    sentences = [row["line"] for row in tables.get("said", ())]
    lines = _fitting_lines(sentences, room - len(answer))
    empty_lines = room - len(answer) - len(lines)  # what is left to set parts apart
    body = [*answer, *lines]
    if table and empty_lines > 0:
        body.append("")
    typer.echo("\n".join([*body, *table]))
    if everything:
        _print_tables(tables)
    if end:
        apart = [""] if empty_lines > (1 if table else 0) else []
        typer.echo("\n".join([*apart, *end]))


def _printed_tables(result: Result) -> Mapping[str, Any]:
    """The tables of a result, its claims with their verdicts as the last one."""
    claims = [{**claim.to_json(), "verdict": claim.verdict} for claim in result.claims]
    return {**result.tables, "claims": claims}


def _view_lines(result: Result, tables: Mapping[str, Any]) -> list[str]:
    """The one table that answers, with a note on what it leaves out; none where lines say it."""
    view = views.shown(result.experiment, tables, result.main)
    if view is None:
        return []
    more = "--all prints everything."
    if len(view.rows) < view.total:
        more = f"{len(view.rows)} of {view.total} rows; {more}"
    notes = [note for note in (view.note, more) if note]
    drawn = views.drawn(view.rows, view.columns, _console().width)
    return laid(*drawn, *notes)


def _fitting_lines(sentences: Sequence[str], room: int) -> list[str]:
    """As many of the sentences as fit into less than so many lines, and what prints the others."""
    lines = _lines(sentences)
    kept = list(sentences)
    while kept and len(lines) >= room:
        kept.pop()
        lines = [*_lines(kept), "--all prints the rest."]
    return lines


def _print_tables(tables: Mapping[str, Any]) -> None:
    """Print every table with all its rows and columns."""
    console = Console()
    console.width = console.width if console.is_terminal else _UNWRAPPED
    for name, rows in tables.items():
        if rows:
            say(f"\n{name}")
            columns = {column: column for column in rows[0]}
            console.print(*views.drawn(rows, columns, console.width, whole=True), sep="\n\n")


def print_json(value: Any) -> None:
    """Print JSON on stdout, with every control character escaped."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    escaped = _UNSAFE_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    typer.echo(escaped)


# ---------------------------------------------------------------------- lines


def say(text: str) -> None:
    """Print lines for people, wrapped on a terminal, with control characters written out."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(plain_text(text), soft_wrap=not console.is_terminal)


def laid(*parts: Any) -> list[str]:
    """Lay out texts and tables as lines, with bold and colours if a terminal shows them."""
    console = _console()
    with console.capture() as text:
        console.print(*parts, sep="\n")
    lines = text.get().replace(_HELD, " ").splitlines()
    return [line.rstrip() for line in lines]


def _console() -> Console:
    """A console as wide as the terminal, at most `_WIDEST`; 80 columns if there is no terminal."""
    return Console(width=min(Console().width, _WIDEST), highlight=False, markup=False, emoji=False)


def _sentence(text: str, style: str = "") -> Text:
    """A sentence with coloured verdicts; it is broken between words, but in no quoted token."""
    plain = plain_text(text)
    held = _QUOTED_BLANK.sub(lambda match: match[0].replace(" ", _HELD), plain)
    sentence = Text(held, style=style)
    for colour, words in _VERDICTS.items():
        sentence.highlight_regex(rf"(?<=: )({words})\b", colour)
    return sentence


def _lines(sentences: Sequence[str]) -> list[str]:
    """Lay out sentences ``Name: text`` as a grid of names and texts; others as they are."""
    named = [match for match in map(_NAMED_LINE.fullmatch, sentences) if match]
    if len(named) < len(sentences):
        return [f"  {plain_text(sentence)}" for sentence in sentences]
    if not named:
        return []
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    for match in named:
        grid.add_row(Text(match[1], style="bold dim"), _sentence(match[2]))
    return laid(grid)


# ---------------------------------------------------------------------- the end of an output


def print_end(*written: str | Path | None, then: str, as_json: bool = False) -> None:
    """Print `end_lines`, unless nothing but JSON is printed."""
    if not as_json:
        typer.echo("\n".join(["", *end_lines(*written, then=then)]))


def end_lines(*written: str | Path | None, then: str) -> list[str]:
    """Say where the pages are (or what was written), and the next command.

    A long command is folded between its words, so that it can be pasted and run.

    Parameters
    ----------
    written : folders or files; None where nothing was written.
    then : the next command.
    """
    lines = [_written_line(Path(place)) for place in written if place is not None]
    return [*lines, *_folded(then, _console().width)]


def _written_line(place: Path) -> str:
    """The page of a folder; the folder itself where it has none."""
    for page in (place / "report.html", place / "index.html"):
        if page.is_file():
            return plain_text(f"The page: {page}")
    return plain_text(f"Written to {place}.")


def _folded(command: str, width: int) -> list[str]:
    """Fold a command between its words, with a backslash at the end of a line."""
    lines = []
    line = "Next:"
    for word in shlex.split(plain_text(command)):
        quoted = shlex.quote(word)
        if cell_len(f"{line} {quoted} \\") > width:
            lines.append(f"{line} \\")
            line = "   "
        line += f" {quoted}"
    return [*lines, line]
