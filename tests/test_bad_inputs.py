"""Bad input is one sentence that says what to do, exit code 2, nothing on stdout, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from bad_inputs import COMMANDS, write_files
from qkscope import Head, cli, tasks
from qkscope.analyses.fit_folder import run_decompose
from qkscope.capture.scope import Scope
from tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def fits(model, tmp_path_factory) -> dict[str, str]:
    """The job files of a finished fit and of a shard, their model said to be gone: nothing may be loaded to answer."""
    scope, found = Scope.load(model, device="cpu"), {}
    for name, shard in (("FIT", None), ("SHARD", (0, 2))):
        out = tmp_path_factory.mktemp("fits") / name
        heads = [Head(1, 3), Head(0, 1)]
        run_decompose(scope, tasks.binding(3), heads, 8, out, contrasts=["order"], batch_size=4, shard=shard)
        found[name] = json.dumps({**json.loads((out / "job.json").read_text()), "model": "/nowhere/model"})
    return found


@pytest.fixture
def place(fits, model, tmp_path, monkeypatch) -> Path:
    write_files(tmp_path)
    for name, job in fits.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(job)
    (tmp_path / "MODEL").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "says"), COMMANDS, ids=[" ".join(arguments) for arguments, _ in COMMANDS])
def test_a_bad_command_gets_a_sentence(place, monkeypatch, capsys, arguments, says):
    before = sorted(place.rglob("*"))
    takes_model = arguments[0] in ("heads", "decompose", "discover", "atlas", "sparsity", "svd")
    nowhere = ["--model", "/nowhere/model"] if takes_model and "--model" not in arguments else []
    monkeypatch.setattr(
        sys, "argv", ["qkscope", *arguments, *nowhere]
    )  # what is wrong is said before a model is loaded
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.out == ""
    assert says in said.err
    assert "Traceback" not in said.err
    if said.err.startswith("qkscope: "):  # ours; the others are the option parser's
        assert len(said.err.strip().splitlines()) == 1
        assert said.err.strip().endswith(".")
    assert sorted(place.rglob("*")) == before, "something was left behind"
    if os.environ.get("QKSCOPE_ERRORS"):  # docs/errors.md is made of these
        answer = re.sub(r"\s+", " ", re.sub("[│╭╮╰╯─]", " ", said.err.removeprefix("qkscope: "))).strip()
        answer = re.sub(r"^Usage: .*? for help\. Error ", "", answer).replace(str(place), "")
        with open(os.environ["QKSCOPE_ERRORS"], "a") as file:
            file.write(json.dumps({"command": " ".join(["qkscope", *arguments]), "answer": answer}) + "\n")


def test_there_are_enough_of_them():
    assert len(COMMANDS) >= 60
