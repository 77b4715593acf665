"""Processes for tests, forked: they start neither Python nor torch again, which takes five seconds."""

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

from qkscope import cli


def forked(place: Path, function: Callable[[], object]) -> multiprocessing.Process:
    """Start a function in a process of its own; what it prints and complains about goes to two
    files in `place`.
    """

    def run() -> None:
        logging.root.handlers.clear()  # pytest's; a new process has none
        for into, name in ((1, "printed"), (2, "said")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), into)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        function()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def command(*arguments: object) -> Callable[[], None]:
    """The command line with some arguments."""

    def run() -> None:
        sys.argv = ["qkscope", *map(str, arguments)]
        cli.main()

    return run
