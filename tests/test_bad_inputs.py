"""Bad input is one sentence that says what to do, exit code 2, nothing on stdout, and nothing left behind."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qkscope as qk
from bad_calls import MORE_CALLS
from bad_inputs import CALLS, COMMANDS, write_files
from qkscope import BadInput, Head, cli, tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.fit import merge
from qkscope.capture.families import tiny_model
from qkscope.capture.scope import Scope
from qkscope.examples import Answers, Key
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
        decompose(scope, tasks.binding(3), heads, 8, out=out, contrasts=["order"], batch_size=4, shard=shard)
        found[name] = json.dumps({**json.loads((out / "job.json").read_text()), "model": "/nowhere/model"})
    return found


@pytest.fixture
def place(fits, model, tmp_path, monkeypatch) -> Path:
    write_files(tmp_path)
    for name, job in fits.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(job)
        manifest = {"schema": 1, "experiment": "decompose/binding", "files": {}, "before": {}, "asked": json.loads(job)}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "MODEL").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "says"), COMMANDS, ids=[" ".join(arguments) for arguments, _ in COMMANDS])
def test_a_bad_command_gets_a_sentence(place, monkeypatch, capsys, arguments, says):
    before = sorted(place.rglob("*"))
    takes_model = arguments[0] in ("heads", "decompose", "discover", "atlas", "sparsity", "svd", "trace")
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
        answer = answer.replace(str(place), "").replace(f"{place.parent}/", "")
        file.write(json.dumps({"command": said, "answer": answer}) + "\n")


@pytest.fixture(scope="module")
def names(model, tmp_path_factory) -> dict[str, object]:
    """What the calls of the table may name."""
    scope, task = Scope.load(model, device="cpu"), tasks.binding(3)
    scope.name = "MODEL"
    other = Scope.load(write_tiny_llama(tmp_path_factory.mktemp("other") / "model", seed=1), device="cpu")
    texts = [f"The hat is in Box {a} . The jam is in Box {b} . The hat" for a in "ABCDEF" for b in "ABCDEF"]
    options = {"contrasts": ["order"], "batch_size": 8}
    pre = qk.decompose(scope, task, "L1H3", 8, space="pre_rope", **options)["order", "L1H3"]
    vocabulary = scope.model.config.vocab_size
    jetmoe = Scope.from_model(tiny_model("jetmoe", vocab_size=vocabulary), scope.tokenizer, check=False)
    fit = qk.decompose(scope, task, ["L1H3", "L0H1"], 8, contrasts=["order", "lexical"], batch_size=8)
    return {
        "qk": qk, "torch": torch, "tasks": tasks, "scope": scope, "task": task, "fit": fit, "units": task.test(4),
        "basis": qk.singular_basis(scope, ["L0H1"], cache=False), "lex": fit["lexical", "L1H3"], "merge": merge,
        "moments": fit.sums["order"].moments, "Superposition": Superposition, "Retrieval": Retrieval,
        "np": np, "other": other, "Key": Key, "Answers": Answers, "ranking": qk.find_heads(scope, task, 4),
        "own": qk.singular_basis(scope, ["L1H3"], cache=False), "texts": texts, "small": qk.Moments("L0H0", ["a"], 4),
        "q": torch.ones(2, 1, 4), "k": torch.ones(2, 1, 2, 4), "labels": {"a": torch.tensor([[1, -1], [1, -1]])},
        "pre": pre, "narrow": qk.Subspace.from_delta(torch.eye(3)), "jetmoe": jetmoe,
        "train_retrieval": train_retrieval, "train_superposition": train_superposition, "train_nano": train_nano,
    }  # fmt: skip


@pytest.mark.parametrize(("call", "says"), [*CALLS, *MORE_CALLS], ids=[call for call, _ in [*CALLS, *MORE_CALLS]])
def test_a_bad_call_gets_the_same_kind_of_sentence(place, names, call, says):
    if ".safetensors" in call:
        names["lex"].save("lex.safetensors")
        names["moments"].save("moments.safetensors")
    before = sorted(place.rglob("*"))
    with pytest.raises(BadInput) as refused:
        eval(call, dict(names))  # our own table
    said = str(refused.value)
    assert says in said
    assert said.endswith(".")
    assert "\n" not in said
    assert sorted(place.rglob("*")) == before, "something was left behind"
    if os.environ.get("QKSCOPE_ERRORS") and (call, says) in CALLS:  # the others are of a few kinds
        _note(call, said, place)


def public_calls() -> list[tuple[str, object]]:
    """Every public function, and every public method and constructor of a public class."""
    found = []
    for name, thing in [*((name, getattr(qk, name)) for name in qk.__all__), *vars(tasks).items()]:
        if isinstance(thing, type) and thing is not BadInput:
            own = {part for cls in thing.__mro__ if cls.__module__.startswith("qkscope") for part in vars(cls)}
            methods = [part for part in own if not part.startswith("_") and callable(getattr(thing, part))]
            found += [(f"{name}.{part}", getattr(thing, part)) for part in sorted(methods)]
            found.append((name, thing.__init__))
        elif inspect.isfunction(thing) and not name.startswith("_"):
            found.append((name, thing))
    return found


@pytest.mark.parametrize("thing", [thing for _, thing in public_calls()], ids=[name for name, _ in public_calls()])
def test_every_public_call_says_what_it_takes(thing):
    """Nothing of a call's body runs for a name it does not know, nor for a value of a kind that nothing takes."""
    assert hasattr(thing, "__wrapped__"), "it is not checked"
    bound = inspect.ismethod(thing)  # a classmethod: its class is there already
    inside = [None] if not bound and next(iter(inspect.signature(thing).parameters), "") == "self" else []
    with pytest.raises(BadInput, match="takes no 'nonsense'"):
        thing(*inside, nonsense=1)


def test_whole_numbers_of_numpy_are_whole_numbers(names):
    task = names["task"]
    assert task.test(np.int64(3)) == task.test(3) == task.test(torch.tensor(3))
    assert tasks.binding(np.int32(3)).asked["entities"] == 3
    assert type(Head(np.int64(1), 2).layer) is int
    assert names["ranking"].above(np.float32(0.0)) == names["ranking"].above(0.0)
    assert qk.Example(text="A B", queries=[[0, 1]]).queries == ((0, 1),)


@pytest.mark.parametrize("seed", [-1, 2**40, -(2**62), 2**62])
def test_any_seed_of_62_bits_serves_every_verb(names, seed):
    scope, fit = names["scope"], names["fit"]
    task = tasks.binding(3, seed=seed)
    own = qk.decompose(scope, task, "L1H3", 8, contrasts=["order"], seed=seed, replicates=19)
    assert own.seed == seed
    qk.swap(scope, names["units"], fit, "L1H3", seed=seed, draws=2)
    qk.swap_downstream(scope, names["units"], fit, "L1H3", seed=seed)
    qk.alignment(names["own"], names["lex"], draws=2, seed=seed)
    qk.relative_attention(scope, "hat: A", "L1H3", draws=2, seed=seed)
    qk.discover(scope, task, "L1H3", 160, test=40, draws=2, sizes=(), changes=4, seed=seed)
    qk.sparsity(scope, task, "L0H0", 4, draws=2, seed=seed)


def test_there_are_enough_of_them():
    assert len(COMMANDS) >= 60
    assert len(CALLS) + len(MORE_CALLS) >= 700
    public = {name for name in qk.__all__ if callable(getattr(qk, name))} - {"BadInput"}
    assert not [name for name in public if not any(f"qk.{name}" in call for call, _ in CALLS)]
