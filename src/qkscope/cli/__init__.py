"""The command line: a thin shell over functions. A command is made from a function's signature and
docstring.

Nothing heavy is imported until a verb runs, so that ``qkscope --help`` answers at once. Bad input
is one sentence on stderr and exit code 2. Here are the app, its entry point, and how results are
printed: the answer, one small table, the next command. In reading order: `views` (which rows and
columns, and how they are fitted into a line), `verbs` (commands from signatures), `begin` (verbs
that the command line alone has). Verbs of other distributions join by entry points (`Verbs`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup
from typer.main import get_command

from qkscope import __version__
from qkscope.cli import views
from qkscope.errors import BadInput, Terminated
from qkscope.results.progress import plain_text
from qkscope.results.result import Result

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# as shells count: 128 and the signal
_INTERRUPTED = 130
_TERMINATED = 143
_OF_PAPERS = ("reproduce", "toy", "train", "bench", "models")
# columns of a line that nobody wraps, and of sentences on a wide terminal
_WHOLE = 100_000
_WIDEST = 100
PROMPT = "hat: O\njam: Z\ncat: B\npen: K\njam:"
MOST_LINES = 14
"""Of an answer of `why`, the page and the next command with it; ``--all`` prints the rest."""
_HELD = "\ue000"  # stands for the blank of a quoted token, so that no line breaks there
_VERDICTS = {
    "green": "shown|supported",
    "yellow": "not shown|not here",
    "dim": "untested|unattended|vacuous",
}


class Verbs(TyperGroup):
    """Verbs of qkscope and of other distributions (entry points ``qkscope.commands``), loaded when
    asked for.

    An entry point names a `typer.Typer`, as ``qkscope_papers.cli:app``; ours come first where names
    are the same.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all verbs."""
        for entry in entry_points(group="qkscope.commands"):
            for name, verb in get_command(entry.load()).commands.items():  # type: ignore[attr-defined]
                self.commands.setdefault(name, verb)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb of this name; None where there is none."""
        if (
            cmd_name not in self.commands
            and cmd_name not in self.list_commands(ctx)
            and cmd_name in _OF_PAPERS
        ):
            raise BadInput(f"{cmd_name} needs the papers: run `pip install qkscope-papers`.")
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=Verbs,
    name="qkscope",
    help="Why did this attention head attend to that token?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
]


@app.callback()
def _options(version: Version = False) -> None:
    """Why did this attention head attend to that token?"""


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
All = Annotated[
    bool, typer.Option("--all", help="Print every table with all its rows and columns.")
]


# ---------------------------------------------------------------------- the entry point


def main() -> None:
    """Entry point: run a verb; turn bad input into a sentence and exit code 2, Ctrl-C into 130 and
    SIGTERM into 143.

    A verb has written its folder before anything is printed: a pipe that was closed or a full disk
    costs no result.
    """
    for name, value in _QUIET.items():  # whoever set a variable or -W keeps it
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.basicConfig(
        level=logging.ERROR, handlers=[_Stderr()]
    )  # of other libraries nothing but errors
    logging.getLogger("qkscope").setLevel(logging.INFO)
    before = signal.getsignal(signal.SIGTERM)
    terminated = []

    def terminate(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        app()
    except (
        BadInput,
        UnicodeEncodeError,
        OSError,
    ) as error:  # half a surrogate is no text; a name may be too long
        typer.echo(plain_text(f"qkscope: {error}"), err=True)
        # what cannot be printed Python would print again at its end; a test's stream is no file
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
    except (SystemExit, KeyboardInterrupt) as ended:
        if isinstance(ended, SystemExit) and ended.code != _INTERRUPTED:
            raise
        typer.echo("qkscope: stopped.", err=True)
        sys.exit(_TERMINATED if terminated else _INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


class _Stderr(logging.Handler):
    """Log handler: lines on stderr above the progress line, with control characters written out."""

    def emit(self, record: logging.LogRecord) -> None:
        print(plain_text(record.getMessage()), file=sys.stderr)  # noqa: T201


# ---------------------------------------------------------------------- how results are printed


def print_result(
    result: Result, as_json: bool, everything: bool = False, end: Sequence[str] = ()
) -> None:
    """Print the answer with its lines or one table, with every table, or all of it as JSON.

    Of `why` so many lines that there are `MOST_LINES` with those at the end. Of several processes
    under torchrun the first alone has a result to print.
    """
    if as_json and (result.tables or result.answer):
        print_json(result.to_json())
    if as_json or not (result.tables or result.answer):
        return
    claims = [{**claim.to_json(), "verdict": claim.verdict} for claim in result.claims]
    tables: Mapping[str, Any] = {**result.tables, "claims": claims}
    first = laid(_text(result.answer, "bold"))
    said = [row["line"] for row in tables.get("said", ())]
    lines = _lines(said)
    table = list[str]()
    if (
        not everything
        and (chosen := views.shown(result.experiment, tables, result.main)) is not None
    ):
        some, columns, count, note = chosen
        more = (
            f"{len(some)} of {count} rows; " if len(some) < count else ""
        ) + "--all prints everything."
        table = laid(*views.drawn(some, columns, _console().width), *filter(None, [note, more]))
    room = MOST_LINES if result.experiment in ("why", "why/circuit") and not everything else 10**6
    while said and len(first) + len(lines) + len(table) + len(end) >= room:
        said = said[:-1]
        lines = [*_lines(said), "--all prints the rest."]
    spare = room - len(first) - len(lines) - len(table) - len(end)  # for empty lines between
    typer.echo("\n".join([*first, *lines, *[""] * bool(table and spare > 0), *table]))
    console = Console()
    console.width = console.width if console.is_terminal else _WHOLE
    for name, rows in tables.items() if everything else ():
        if rows:
            say(f"\n{name}")
            columns = {column: column for column in rows[0]}
            console.print(*views.drawn(rows, columns, console.width, whole=True), sep="\n\n")
    if end:
        typer.echo("\n".join([*[""] * (spare > bool(table)), *end]))


def _console() -> Console:
    """A console as wide as the terminal, at most `_WIDEST`; 80 columns if there is no terminal."""
    return Console(width=min(Console().width, _WIDEST), highlight=False, markup=False, emoji=False)


def laid(*parts: Any) -> list[str]:
    """Lay out texts and tables as lines, with bold and colours if a terminal shows them."""
    console = _console()
    with console.capture() as text:
        console.print(*parts, sep="\n")
    return [line.rstrip() for line in text.get().replace(_HELD, " ").splitlines()]


def _text(text: str, style: str = "") -> Text:
    """A sentence that is broken between words, but not inside the quotes of a token; verdicts have
    their colours.
    """
    held = re.sub(
        r"(?<!\w)'( +)(?=[^']+')", lambda match: match[0].replace(" ", _HELD), plain_text(text)
    )
    made = Text(held, style=style)
    for colour, words in _VERDICTS.items():
        made.highlight_regex(rf"(?<=: )({words})\b", colour)
    return made


def _lines(said: Sequence[str]) -> list[str]:
    """Lines ``Name: text`` as rows, their texts below each other; others as they are."""
    named = [re.fullmatch(r"([A-Z][\w' ]*): (.*)", line, re.DOTALL) for line in said]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    for match in filter(None, named):
        grid.add_row(Text(match[1], style="bold dim"), _text(match[2]))
    return laid(grid) if said and all(named) else [f"  {plain_text(line)}" for line in said]


def print_json(value: Any) -> None:
    """Print JSON on stdout, with every control character escaped."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    typer.echo(re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text))


def say(text: str) -> None:
    """Print lines for people, wrapped on a terminal, with control characters written out."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(plain_text(text), soft_wrap=not console.is_terminal)


def print_end(*written: str | Path | None, then: str, as_json: bool = False) -> None:
    """Print `end_lines`, unless nothing but JSON is printed."""
    if not as_json:
        typer.echo("\n".join(["", *end_lines(*written, then=then)]))


def end_lines(*written: str | Path | None, then: str) -> list[str]:
    """Where the pages are (or what was written), and the next command, folded between its words so
    that it can be run.

    Parameters
    ----------
    written : folders or files; None where nothing was written.
    then : the next command.
    """
    lines = []
    width = _console().width
    for out in (place for place in written if place is not None):
        pages = [
            page for page in (Path(out) / "report.html", Path(out) / "index.html") if page.is_file()
        ]
        lines.append(plain_text(f"The page: {pages[0]}" if pages else f"Written to {out}."))
    lines.append("Next:")
    for word in map(shlex.quote, shlex.split(plain_text(then))):
        if cell_len(f"{lines[-1]} {word} \\") > width:
            lines[-1:] = [f"{lines[-1]} \\", "   "]
        lines[-1] += f" {word}"
    return lines


def command(verb: str, *arguments: object, **options: object) -> str:
    """Write a command to type: its arguments, and the options that the verb has and that are not
    defaults.

    >>> command("decompose", "binding", heads="L18H6", out="my runs", seed=1, key=3)
    "qkscope decompose binding --heads L18H6 --out 'my runs' --seed 1"
    """
    known = {
        parameter.name: parameter for parameter in get_command(app).get_command(None, verb).params
    }  # type: ignore[attr-defined]
    words = ["qkscope", verb, *map(str, arguments)]
    for name, value in options.items():
        if name not in known or value is None or value is False or value == known[name].default:
            continue
        texts = list(map(str, value)) if isinstance(value, list) else [str(value)]
        option = [known[name].opts[0], *([] if value is True else [",".join(texts)])]
        words += texts if known[name].param_type_name == "argument" else option
    return shlex.join(word.replace("\n", "\\n") for word in words)


# ---------------------------------------------------------------------- the next command

_SCOPE = ("model", "device", "dtype")


def _some(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values.get(name) for name in names}


def _after_why(values: Mapping[str, Any], result: Result) -> str:
    if values["fit"]:
        return command("view", live=True, fit=values["fit"])
    if result.experiment == "why/prompts":
        return _after_prompts(values, result)
    same = _some(values, "prompt", "query", "chat", "versus", *_SCOPE)
    if (
        "heads" in result.tables
    ):  # one that helps and looks at the answer or at its rival, rather than at itself
        places = ["answer", "rival", "", "itself"]
        rows = result.tables["heads"]
        helps = [row for row in rows if row["direction"] == "for"][:10] or rows[:1]
        return command(
            "why", **same, head=min(helps, key=lambda row: places.index(row["at"]))["head"]
        )
    if result.experiment == "why/circuit":  # the first head of the circuit, asked by itself
        first = (row["node"] for row in result.tables.get("paths", ()) if "H" in row["node"])
        return command("why", **same, head=next(first, None))
    head = values["head"] or values["heads"][0]
    carried = [row for row in result.tables.get("carriers", ()) if row["verdict"] == "shown"]
    carriers = [
        (name, row["side"]) for row in carried for name in row["writers"].split(", ") if "H" in name
    ]
    if carriers:  # and why did that one look there?
        name, side = carriers[0]
        at = {"query": result.tables["output"][0]["key"]} if side == "key" else {}
        return command("why", **{**same, **at, "head": name})
    if head.layer == 0:  # the embedding alone writes there: nothing to trace
        return command("why", **same)
    return command(
        "trace", **{**same, "versus": None}, heads=head, key=values["key"]
    )  # trace's is another: a key


def _after_prompts(values: Mapping[str, Any], result: Result) -> str:
    """Why of a prompt in which a head looks at something; where none was named, reasons of the
    first heads.
    """
    same = _some(values, "chat", *_SCOPE)
    if "decides" in result.tables:
        first = ",".join(row["head"] for row in result.tables["decides"][:2])
        return command("why", values["prompt"], heads=first, **same)
    row = max(result.tables["prompts"], key=lambda row: float(row["attention"]))
    return command("why", result.tables["answers"][row["prompt"]]["said"], head=row["head"], **same)


def _after_heads(values: Mapping[str, Any], result: Result) -> str:
    """Decompose the first heads; where no head does the task another form of it, or what heads do
    without one.
    """
    named = ",".join([row["head"] for row in result.table() if row["reaches"]][:2])
    same = _some(values, *_SCOPE, "form", "size", "seed", "chat")
    if named:
        return command(
            "decompose",
            values["task"],
            heads=named,
            out=Path("runs") / Path(values["task"]).stem,
            **same,
        )
    if values["task"] == "binding":
        return command(
            "heads",
            "binding",
            **same | {"form": "sentence" if same["form"] in (None, "list") else None},
        )
    return command("atlas", **_some(values, *_SCOPE))


def _after_atlas(values: Mapping[str, Any], result: Result) -> str:
    """Ask why of the strongest look of a head that has a reason."""
    looks = sorted(
        result.tables["examples"], key=lambda row: (row["job"] != "induction", -row["attention"])
    )
    if not looks:
        return command("view", values["out"])
    text = "".join(looks[0]["tokens"][: looks[0]["query"] + 1])
    return command("why", text, head=looks[0]["head"], **_some(values, *_SCOPE))


def next_command(verb: str, values: Mapping[str, Any], result: Result) -> str:
    """What to type after a verb: what `NEXT` says, its page, or the same into a folder."""
    if verb in NEXT:
        return NEXT[verb](values, result)
    place = values.get("out") or values.get("fit") or values.get("folder")
    return command("view", place) if place else command(verb, **{**values, "out": f"runs/{verb}"})


NEXT: dict[str, Callable[[Mapping[str, Any], Result], str]] = {
    "why": _after_why,
    "heads": _after_heads,
    "decompose": lambda values, result: command(
        "swap", values["out"], **_some(values, "device", "dtype")
    ),
    "atlas": _after_atlas,
    "demo": lambda values, result: command("why", PROMPT),
    "svd": lambda values, result: command(
        "sparsity", "ioi", out="runs/ioi", **_some(values, *_SCOPE)
    ),
}

from qkscope.cli import verbs as verbs  # noqa: E402  (commands register themselves, on the app above)
