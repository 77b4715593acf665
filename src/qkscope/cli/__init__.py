"""The command line: a thin shell over functions. A command is made from a function's signature and docstring.

Nothing heavy is imported until a verb runs, so that ``qkscope --help`` answers at once. Bad input is one sentence on
stderr and exit code 2. In reading order: `verbs` (commands from signatures), `begin` (verbs that the command line alone
has, and the next command of each), `shell` (the app, and how results are printed), `views` (which rows and columns, and
how they are fitted into a line). Verbs of other distributions join by entry points (`shell.Verbs`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

import qkscope.cli.verbs  # noqa: F401  (commands register themselves)
from qkscope import __version__
from qkscope.cli.shell import app
from qkscope.errors import BadInput, Terminated, check_name_length
from qkscope.runs.progress import clear, plain_text

_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_INTERRUPTED, _TERMINATED = 130, 143  # as shells count: 128 and the signal


def main() -> None:
    """Entry point: run a verb; turn bad input into a sentence and exit code 2, Ctrl-C into 130 and SIGTERM into 143.

    Where nothing can be printed, a verb goes on and writes its files; then that is said, and the exit code is 1.
    """
    _listen_to_ourselves()
    before, stdout = signal.signal(signal.SIGTERM, _terminate), sys.stdout
    sys.stdout = printing = _Stdout(stdout)
    try:
        _check_arguments(sys.argv[1:])
        try:
            app()
        except OSError as error:
            check_name_length(error)
            raise
    except BadInput as error:
        typer.echo(plain_text(f"qkscope: {error}"), err=True)
        sys.exit(2)
    except (SystemExit, KeyboardInterrupt) as ended:
        if isinstance(ended, SystemExit) and ended.code != _INTERRUPTED:
            printing.flush()
            if not printing.failed or ended.code:
                raise
            written = "; what --out names is written" if "--out" in sys.argv else ""
            typer.echo(f"qkscope: not all could be printed ({printing.failed}){written}.", err=True)
            sys.exit(1)
        typer.echo("qkscope: stopped.", err=True)
        sys.exit(_TERMINATED if _was_terminated(ended) else _INTERRUPTED)
    finally:
        printing.flush()
        sys.stdout = stdout
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


class _Stdout:
    """What a verb prints to: once that cannot be written, the rest is dropped, so that files are written all the same.

    Parameters
    ----------
    stream : None where it is closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (until the end)
        self.failed = None if stream else "it is closed"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._unless_failed(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._unless_failed(self.stream.flush)

    def _unless_failed(self, do: Callable[..., object], *given: str) -> None:
        try:
            if not self.failed:
                do(*given)
        except OSError as error:
            self.failed = str(error.strerror)
            with suppress(OSError):  # Python would try again at its end; a test's stream is no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def _listen_to_ourselves() -> None:
    """Log our own lines on stderr; of other libraries nothing but errors. Whoever set a variable or -W keeps it."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR, handlers=[_Stderr()])
    logging.getLogger("qkscope").setLevel(logging.INFO)


class _Stderr(logging.StreamHandler[TextIO]):
    """Lines on stderr, each below what was there: the line that is written over goes first.

    What is logged may quote a folder or a model: nothing in it steers the terminal.
    """

    def emit(self, record: logging.LogRecord) -> None:
        clear()
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return plain_text(record.getMessage())


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _was_terminated(error: BaseException | None) -> bool:
    """Whether a scheduler asked for the end: the shell below us turns every interruption into one exit code."""
    while error is not None and not isinstance(error, Terminated):
        error = error.__cause__ or error.__context__
    return error is not None


def _check_arguments(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise BadInput(f"{argument!a} is not text in UTF-8: write it anew, or rename the file.") from None


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
