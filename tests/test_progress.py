"""How far a long run is: one line on a terminal, a line a minute in a log, and nothing of other libraries."""

import io
import logging
import os
import subprocess
import sys
import warnings

import pytest

from qkscope.runs import progress
from qkscope.runs.work import stream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """A line of this test alone, and a clock that moves when it is told to."""
    now = [1000.0]
    monkeypatch.setattr(progress, "_LINE", progress._Line())
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def run_in(clock: list[float], seconds: float, batches: int = 32, **options: object) -> None:
    def run(batch: list[int]) -> None:
        clock[0] += seconds

    for _ in stream([[i] for i in range(batches)], run, **options):
        pass


def test_a_log_gets_a_line_a_minute_over_all_passes(clock, caplog):
    caplog.set_level("INFO")
    run_in(clock, 1.0)  # half a minute: nothing to say
    assert caplog.messages == []
    for _ in range(10):  # ten more passes, five minutes and twenty seconds
        run_in(clock, 1.0)
    assert len(caplog.messages) == 5
    caplog.clear()
    with progress.doing("fitting L1H0"):
        run_in(clock, 30.0)
    assert len(caplog.messages) == 16
    assert caplog.messages[-2] == "fitting L1H0: 29 of 32 examples, 1 min 30 s left"


def test_silence_is_kept(clock, caplog, capsys):
    caplog.set_level("INFO")
    run_in(clock, 100.0, progress=False)
    assert caplog.messages == []
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_one_line_that_is_gone_at_the_end(clock, monkeypatch, caplog):
    caplog.set_level("INFO")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    with progress.doing("a step with a long name that does not fit"):
        run_in(clock, 1.0, 4)
    run_in(clock, 61.0, 4)
    written = screen.getvalue()
    assert "\n" not in written
    assert max(map(len, written.split("\r"))) < 40
    assert "1 of 4 examples, 3 min 3 s left" in written
    assert written.endswith("\r")
    assert written.split("\r")[-2].strip() == ""
    assert caplog.messages == []


def test_a_logged_line_stands_below_what_was_there(clock, monkeypatch):
    from qkscope import cli

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    handler = cli._Stderr()
    progress.tell("half")
    handler.emit(logging.LogRecord("qkscope", logging.INFO, "", 0, "said", None, None))
    assert screen.getvalue() == "\rhalf\r    \rsaid\n"


def test_other_libraries_are_not_heard_from_the_command_line():
    code = (
        "import sys, warnings, logging; sys.argv = ['qkscope', '--version']\n"
        "from qkscope.cli import main\n"
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


def test_whoever_asks_for_warnings_hears_them(monkeypatch):
    from qkscope import cli

    monkeypatch.setattr(sys, "warnoptions", ["default"])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        cli._listen_to_ourselves()
        warnings.warn("of torch", stacklevel=1)
    assert len(heard) == 1
