"""How far a long run is: one line on a terminal, a line a minute in a log, and nothing of other
libraries.
"""

import io
import logging
import os
import subprocess
import sys
import time

import pytest

from qkscope import cli
from qkscope.results import progress
from qkscope.results.work import stream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch, caplog):
    """A clock that moves when it is told to, and no line logged yet."""
    now = [1000.0]
    monkeypatch.setattr(progress, "_LOGGED", [])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    caplog.set_level("INFO")
    return now


def run_in(clock: list[float], seconds: float, batches: int = 32, **options: object) -> None:
    def run(batch: list[int]) -> None:
        clock[0] += seconds

    for _ in stream([[i] for i in range(batches)], run, **options):
        pass


def test_a_log_gets_a_line_a_minute_over_all_passes(clock, caplog):
    run_in(clock, 1.0)  # half a minute: nothing to say
    assert caplog.messages == []
    for _ in range(10):  # ten more passes, five minutes and twenty seconds
        run_in(clock, 1.0)
    assert len(caplog.messages) == 5
    caplog.clear()
    with progress.doing("fitting L1H0"):
        run_in(clock, 30.0)
    assert len(caplog.messages) == 16
    assert caplog.messages[-2] == "fitting L1H0: 29 of 32 examples, 0:01:30 left"


def test_a_terminal_shows_one_line_below_what_is_logged_and_it_is_gone_at_the_end(
    monkeypatch, caplog
):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    with progress.doing("a step"), progress.counting(2) as advance:
        advance(2)
        time.sleep(0.5)  # it is drawn anew four times a second
        cli._Stderr().emit(logging.LogRecord("qkscope", logging.INFO, "", 0, "said", None, None))
    written = screen.getvalue()
    assert "\x1b[2Ksaid\n" in written
    assert "a step: 2 of 2 examples, all done" in written
    assert written.endswith("\x1b[2K")
    assert caplog.messages == []


def test_other_libraries_are_not_heard_from_the_command_line():
    code = (
        "import sys, warnings, logging; sys.argv = ['qkscope', '--version']\nfrom qkscope.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "from transformers.utils import logging as theirs\n"
        "theirs.get_logger('transformers.any').warning('of transformers')\n"
        "logging.getLogger('gguf').warning('of gguf')\n"
        "warnings.warn('of torch')\n"
        "logging.getLogger('qkscope.any').info('ours')\n"
        "logging.getLogger('gguf').error('an error')\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr == "ours\nan error\n"
