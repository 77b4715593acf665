"""Facts about provenance: nothing is used with a model it was not made with, and a run says how to
make it again.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from qkscope import BadInput, decompose, swap, tasks
from qkscope.findings.fit import load_fit
from qkscope.model.scope import Scope
from qkscope.results.folder import read_tensors
from qkscope.results.result import Result, made_result, provenance
from qkscope.verbs.attribute import attribute
from tiny_llama import write_tiny_llama


def facts(rows: list[dict]) -> dict[str, dict]:
    return {row["what"]: row for row in rows}


def test_saying_the_printed_command_again_gives_the_same_bits(tmp_path, qkscope):
    """On a shipped nano model, into a folder with a blank in its name, which a shell must not
    split.
    """
    out, again = tmp_path / "a run", tmp_path / "again"
    job = ["binding", "--size", 4, "--heads", "L1H1,L2H0", "-n", 48, "--contrasts", "order,lexical"]
    qkscope("decompose", *job, "--model", "nano:mixed", "--out", out)
    said = facts(json.loads(qkscope("view", out, "--made", "--json")[1])["tables"]["made"])
    assert all(said[name]["same"] is True for name in ("torch", "transformers", "threads", "files"))
    assert said["model"]["there"] == "nano:mixed"
    program, *arguments = shlex.split(said["command"]["there"])
    assert program == "qkscope"
    qkscope(*(str(again) if part == str(out) else part for part in arguments))
    mine, theirs = (json.loads((folder / "results.json").read_text()) for folder in (out, again))
    assert mine.pop("seconds") > 0
    assert theirs.pop("seconds") > 0
    assert mine == theirs
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) == 2
    for name in files:
        (one, about), (other, same) = (
            read_tensors(folder / name, "sums") for folder in (out, again)
        )
        assert about == same
        assert {key: x.numpy().tobytes() for key, x in one.items()} == {
            k: x.numpy().tobytes() for k, x in other.items()
        }


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """The same architecture and tokenizer twice, with other weights."""
    places = tmp_path_factory.mktemp("models")
    return write_tiny_llama(places / "one", seed=0), write_tiny_llama(places / "other", seed=1)


def test_what_was_made_with_other_weights_or_another_tokenizer_is_refused(models, tmp_path):
    one, other = (Scope.load(path, device="cpu") for path in models)
    task = tasks.binding(4)
    fit = decompose(
        one, task, ["L1H3"], 16, out=tmp_path / "fit", contrasts=["order"], batch_size=4
    )
    units = task.test(4)
    assert swap(one, units, fit).table()
    for use in (
        lambda: load_fit(tmp_path / "fit", other),
        lambda: swap(other, units, fit),
        lambda: swap(other, units, fit, downstream=True),
        lambda: attribute(other, "hat: O", "L1H3", {"order": fit["order", "L1H3"]}),
        lambda: decompose(
            other, task, ["L1H3"], 16, out=tmp_path / "fit", contrasts=["order"], batch_size=4
        ),
    ):
        with pytest.raises(BadInput, match="weights"):
            use()
    asked = {**fit.provenance["asked"], "tokenizer": "another"}
    with pytest.raises(BadInput, match="other tokenizer"):
        swap(one, units, replace(fit, provenance={**fit.provenance, "asked": asked}))


def test_what_differs_here_is_said(models, tmp_path, qkscope):
    """A folder from another machine; a fit and its sums; and what Python made, which no command can
    repeat.
    """
    about = provenance(
        model=str(models[0]), weights="other", tokenizer="other", words=["long"] * 100
    )
    about = {
        **about,
        "command": "qkscope heads 'my file.jsonl'",
        "versions": {**about["versions"], "torch": "1.0"},
    }
    Result("heads", {}, provenance={**about, "threads": 99}).write(tmp_path / "run")
    found = facts(made_result(tmp_path / "run").table())
    assert [name for name, row in found.items() if row["same"] is False] == ["torch", "threads"]
    assert found["torch"]["there"] == "1.0"
    answer, *lines = qkscope("view", tmp_path / "run", "--made")[1].splitlines()
    assert answer.startswith("Here it is otherwise: torch ")
    assert lines[0] == "  command: qkscope heads 'my file.jsonl'"
    assert max(map(len, lines)) < 140

    scope = Scope.load(models[0], device="cpu")
    fit = tmp_path / "fit"
    decompose(scope, tasks.binding(4), ["L1H3"], 16, out=fit, contrasts=["order"], batch_size=4)
    for place in (fit, fit / "order.safetensors"):
        assert facts(made_result(place).table())["weights"]["there"] == scope.weights_hash
    assert "command" not in facts(made_result(fit).table())  # Python made it
