"""The command line: a thin shell over functions, one declaration a command.

Nothing heavy is imported until a command runs, so that ``qkscope --help`` answers at once. Bad
input is one sentence on stderr and exit code 2. Here are the app, its entry point, and how a
declared command runs.

In reading order: `options` (what a command is declared as), `declarations` (every command),
`arguments` (from what was typed to a function's arguments), `views` (which rows and columns of a
table are printed), `printing` (the answer, one small table, the end), `next_command` (what to type
next), `begin` (commands that have no verb in Python), `tools` and `mcp_server` (verbs for agents).
Other distributions bring commands of their own by entry points (`Verbs`); they build on the names
in ``__all__``.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from qkscope import __version__
from qkscope.cli.declarations import COMMANDS
from qkscope.cli.next_command import command, next_command
from qkscope.cli.options import AS_JSON, EVERYTHING, Command, Option, TypedValues
from qkscope.cli.printing import end_lines, print_end, print_json, print_result
from qkscope.errors import BadInput, Terminated
from qkscope.results.progress import doing, plain_text
from qkscope.results.result import Result

__all__ = ["All", "Json", "app", "command", "main", "print_end", "print_json", "print_result"]

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# exit codes as shells count them: 128 and the signal
_INTERRUPTED = 130
_TERMINATED = 143
_OF_PAPERS = ("reproduce", "toy", "train", "bench", "models")

All = Annotated[bool, typer.Option(*EVERYTHING.flags, help=EVERYTHING.help)]
Json = Annotated[bool, typer.Option(*AS_JSON.flags, help=AS_JSON.help)]


# ---------------------------------------------------------------------- the app


class Verbs(TyperGroup):
    """Commands of qkscope and of other distributions (entry points ``qkscope.commands``).

    An entry point names a `typer.Typer`, as ``qkscope_papers.cli:app``, which is loaded when it is
    needed; of two commands with one name, qkscope's own is taken.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        for entry in entry_points(group="qkscope.commands"):
            group: Any = get_command(entry.load())
            for name, verb in group.commands.items():
                self.commands.setdefault(name, verb)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None where there is none."""
        known = cmd_name in self.commands or cmd_name in self.list_commands(ctx)
        if not known and cmd_name in _OF_PAPERS:
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


def _print_version(asked: bool) -> None:
    """Print the version and exit, where it was asked for."""
    if asked:
        typer.echo(__version__)
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback()
def _options(version: Version = False) -> None:
    """Why did this attention head attend to that token?"""


# ---------------------------------------------------------------------- a declared command


def _add(declared: Command) -> None:
    """Add a declared command to the app: typer reads its options off a signature."""

    # positional, because an option may have any name
    def typed(declared: Command = declared, /, **values: Any) -> None:
        _run(declared, values)

    parameters = [_parameter(option) for option in declared.options]
    vars(typed)["__signature__"] = inspect.Signature(parameters)
    app.command(declared.name, help=declared.help, rich_help_panel=declared.panel)(typed)


def _parameter(option: Option) -> inspect.Parameter:
    """An option as typer reads it: a parameter with an annotated type."""
    about: dict[str, Any] = {"help": option.help}
    if option.metavar:
        about["metavar"] = option.metavar
    if option.shown_default:
        about["show_default"] = option.shown_default
    if option.read:
        about["callback"] = _reader(option.read)
    if option.argument:
        info: Any = typer.Argument(**about)
    else:
        info = typer.Option(*_flags(option), **about)
    kind = option.kind | None if option.default is None else option.kind
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[kind, info],
    )


def _flags(option: Option) -> tuple[str, ...]:
    """How an option is typed; none where typer derives it from the name."""
    if option.flags or option.kind is not bool:
        return option.flags
    return (f"{option.flag}/--no-{option.name}" if option.default else option.flag,)


def _reader(read: Callable[[str], Any]) -> Callable[[str | None], Any]:
    """A callback that reads the text of an option, where one was typed."""

    def callback(text: str | None) -> Any:
        return None if text is None else read(text)

    return callback


def _run(declared: Command, values: TypedValues) -> None:
    """Run a command with what was typed, and print its result, where it has one."""
    everything = values.pop(EVERYTHING.name, False)
    as_json = values.pop(AS_JSON.name, False)
    given = {name: make(values) for name, make in declared.made.items()}
    module, _, name = declared.function.partition(":")
    with doing(declared.name, None if "scope" in given else False):
        function = getattr(import_module(module), name)
        for parameter in inspect.signature(function).parameters:
            if parameter in values and parameter not in (*declared.made, *declared.python):
                given[parameter] = values[parameter]
        named = {name: value for name, value in given.items() if value is not None}
        result = function(**named)
    # an empty answer: another process of torchrun prints it
    if not isinstance(result, Result) or not result.answer:
        return
    end: list[str] = []
    if result.tables and not as_json:  # a part of a run has no table, and no next command
        then = next_command(declared.name, values, result)
        end = end_lines(given.get("out"), then=then)
    print_result(result, as_json, everything, end)


for _command in COMMANDS.values():
    _add(_command)


# ---------------------------------------------------------------------- the entry point


def main() -> None:
    """Run a command; bad input is a sentence and exit code 2, Ctrl-C 130 and SIGTERM 143.

    A command has written its folder before anything is printed: a closed pipe or a full disk costs
    no result.
    """
    for name, value in _QUIET.items():  # a variable or a -W that was set is kept
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR, handlers=[_Stderr()])  # other libraries: errors alone
    logging.getLogger("qkscope").setLevel(logging.INFO)
    before = signal.getsignal(signal.SIGTERM)
    terminated = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        app()
    except (BadInput, UnicodeEncodeError, OSError) as error:
        # half a surrogate is no text; a name may be too long
        typer.echo(plain_text(f"qkscope: {error}"), err=True)
        _discard_output()
        sys.exit(2)
    except (SystemExit, KeyboardInterrupt) as ended:
        if isinstance(ended, SystemExit) and ended.code != _INTERRUPTED:
            raise
        typer.echo("qkscope: stopped.", err=True)
        sys.exit(_TERMINATED if terminated else _INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


def _discard_output() -> None:
    """Discard what stdout still holds: Python would try to print it again at its end."""
    with suppress(OSError):  # a test's stream is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Stderr(logging.Handler):
    """Log handler: lines on stderr above the progress line, with control characters written out."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        print(plain_text(record.getMessage()), file=sys.stderr)  # noqa: T201
