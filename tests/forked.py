"""Processes for tests, forked: they start neither Python nor torch again, which takes five seconds."""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from qkscope import cli


class Forked:
    """A function in a process of its own, in whose `place` lies what it printed and complained about."""

    def __init__(self, place: Path, function: Callable[[], object]) -> None:
        self.files = [place / name for name in ("printed", "said")]
        sys.stdout.flush()
        self.number = os.fork()
        if self.number:
            return
        code = 1
        try:
            for into, path in enumerate(self.files, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), into)
            logging.root.handlers.clear()  # pytest's; a new process has none
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            function()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: its exit code (below 0 where a signal ended it), what it printed and complained about."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])
        return code, *(path.read_text() for path in self.files)


def command(*arguments: object) -> Callable[[], None]:
    """The command line with some arguments."""

    def run() -> None:
        sys.argv = ["qkscope", *map(str, arguments)]
        cli.main()

    return run
