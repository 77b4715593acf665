"""The command line: a thin shell. Each verb checks its input, calls one function, prints a table or JSON.

Nothing heavy is imported until a verb needs it, so that ``qkscope --help`` answers at once. Bad input is one sentence
on stderr and exit code 2.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from qkscope import __version__
from qkscope.cli import contrasts, discovery, pages, papers, toys, weights  # noqa: F401  (their verbs register themselves)
from qkscope.cli.shell import app
from qkscope.errors import BadInput


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
