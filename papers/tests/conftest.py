"""What the papers' tests share besides the instrument's fixtures."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from qkscope import cli


@pytest.fixture
def qkscope(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: its exit code, what it printed and what it complained about."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["qkscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run
