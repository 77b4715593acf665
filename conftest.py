"""What tests share: models, each loaded once in a process, one browser, a cache of their own, and
the command line.

One thread because on tensors this small, threads of parallel tests only wait for each other: with
two workers on two cores a small SVD takes fifty times as long on two threads as on one. It is said
in the environment before numpy and torch are imported, so that their libraries and the processes
that tests start hear it too. Who changes a model makes one of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import qkscope as qk

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}  # the hub's library would retry a wrong name for 23 s
with suppress(ModuleNotFoundError):  # the wheel alone is tried without it
    from hypothesis import settings

    settings.register_profile("ours", deadline=None)  # a busy machine is no fault
    settings.load_profile("ours")


_LONGEST = (
    "readme",
    "figures",
    "live",
    "families",
    "result",
    "browser",
    "work",
    "why",
    "gemma",
    "because",
)
LONGEST = [f"test_{name}.py" for name in _LONGEST]
"""Files that begin first, so that no worker ends alone with one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        )
    )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama without a tokenizer, to be damaged by this test alone."""
    from qkscope_papers.families import tiny_model

    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and its tokenizer."""
    from tiny_llama import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def scope(model: Path) -> qk.Scope:
    """The tiny Llama, looked into."""
    return qk.Scope.load(model, device="cpu")


@pytest.fixture(scope="session")
def nano() -> qk.Scope:
    """The trained small model that we ship, looked into."""
    return qk.Scope.load("nano:mixed", device="cpu")


@pytest.fixture(scope="session")
def smollm2() -> qk.Scope:
    """The embedded real model, looked into."""
    return qk.Scope.load("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real Chromium."""
    from browser import chromium

    with chromium() as opened:
        yield opened


@pytest.fixture
def qkscope(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: its exit code, what it printed and what it complained
    about.
    """
    from qkscope import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["qkscope", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run
