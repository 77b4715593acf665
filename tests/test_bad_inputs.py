"""Bad input is one sentence that says what to do, exit code 2, nothing on stdout, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import qkscope as qk
from bad_inputs import CALLS, COMMANDS, write_files
from qkscope import BadInput, Head, cli, tasks
from qkscope.analyses.fit_folder import run_decompose
from qkscope.analyses.shards import merge
from qkscope.capture.scope import Scope
from qkscope.nano.train import train_nano
from qkscope.papers.franco2026.toy.superposition import Superposition
from qkscope.papers.franco2026.toy.train import train_superposition
from qkscope.papers.lee2026.toy.retrieval import Retrieval
from qkscope.papers.lee2026.toy.train import train_retrieval
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
        _note(" ".join(["qkscope", *arguments]), re.sub(r"^Usage: .*? for help\. Error ", "", answer), place)


def _note(said: str, answer: str, place: Path) -> None:
    with open(os.environ["QKSCOPE_ERRORS"], "a") as file:
        file.write(json.dumps({"command": said, "answer": answer.replace(str(place), "")}) + "\n")


@pytest.fixture(scope="module")
def names(model) -> dict[str, object]:
    """What the calls of the table may name."""
    scope, task = Scope.load(model, device="cpu"), tasks.binding(3)
    scope.name = "MODEL"
    fit = qk.decompose(scope, task, ["L1H3", "L0H1"], 8, contrasts=["order", "lexical"], batch_size=8)
    return {
        "qk": qk, "torch": torch, "tasks": tasks, "scope": scope, "task": task, "fit": fit, "units": task.test(4),
        "basis": qk.singular_basis(scope, ["L0H1"], cache=False), "lex": fit["lexical", "L1H3"], "merge": merge,
        "moments": fit.sums["order"].moments, "Superposition": Superposition, "Retrieval": Retrieval,
        "train_retrieval": train_retrieval, "train_superposition": train_superposition, "train_nano": train_nano,
    }  # fmt: skip


@pytest.mark.parametrize(("call", "says"), CALLS, ids=[call for call, _ in CALLS])
def test_a_bad_call_gets_the_same_kind_of_sentence(place, names, call, says):
    before = sorted(place.rglob("*"))
    with pytest.raises(BadInput) as refused:
        eval(call, dict(names))  # our own table
    said = str(refused.value)
    assert says in said
    assert said.endswith(".")
    assert "\n" not in said
    assert sorted(place.rglob("*")) == before, "something was left behind"
    if os.environ.get("QKSCOPE_ERRORS"):
        _note(call, said, place)


def test_there_are_enough_of_them():
    assert len(COMMANDS) >= 60
    public = {name for name in qk.__all__ if callable(getattr(qk, name))} - {"BadInput"}
    assert not [name for name in public if not any(f"qk.{name}" in call for call, _ in CALLS)]
