"""Facts about run folders that somebody edited or lost a part of: a sentence, and nothing is made anew in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qkscope import BadInput, tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.fit import load
from qkscope.analyses.fit_folder import read_job, sums_file, task_of
from qkscope.capture.scope import Scope
from qkscope.runs.folder import read_tensors, write_tensors
from qkscope.runs.result import Result, made

DEEP = "[" * 100_000 + "]" * 100_000
JOB = {"contrasts": ["order"], "batch_size": 4}


@pytest.fixture(scope="module")
def kept(scope, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("fits") / "fit"
    decompose(scope, tasks.binding(4), ["L1H3"], 16, out=out, **JOB)
    return out


@pytest.fixture
def fit(kept, tmp_path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "fit"))


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_asked(fit: Path, **fields: object) -> None:
    edit(fit / "manifest.json", asked={**json.loads((fit / "manifest.json").read_text())["asked"], **fields})


def test_a_fit_without_its_sums_is_not_fitted_again_in_silence(scope, fit, monkeypatch):
    edit(fit / "manifest.json", command="qkscope decompose binding --out fit")
    before = load(fit, scope).table()
    with monkeypatch.context() as patched:
        patched.setattr(Scope, "capture_inputs", None)  # nor does a whole one run the model
        assert load(fit, scope).table() == before
    (fit / sums_file("order")).unlink()
    says = r"order\.safetensors is missing, .* run `qkscope decompose binding --out fit` again to make it"
    with pytest.raises(BadInput, match=says):
        load(fit, scope)
    assert not (fit / sums_file("order")).exists()
    edit(fit / "manifest.json", command=None)
    with pytest.raises(BadInput, match="run the same decompose command again"):
        load(fit, scope)


def test_sums_that_no_longer_belong_to_the_folder_are_refused(scope, fit, monkeypatch):
    """Of another fit; or of prompts that another version drew."""
    with monkeypatch.context() as patched:
        patched.setattr("qkscope.analyses.fit_folder.units_hash", lambda units: "0")
        with pytest.raises(BadInput, match="was fitted on other prompts of order"):
            load(fit, scope)
    decompose(scope, tasks.binding(4), ["L0H1"], 16, out=fit.parent / "other", **JOB)
    shutil.copyfile(fit.parent / "other" / sums_file("order"), fit / sums_file("order"))
    with pytest.raises(BadInput, match="is not what a run wrote there"):
        load(fit, scope)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": True}, {"n": "16"}, {"batch_size": 4.0}, {"asked": []}, {"asked": None}, {"asked": {"words": 7}},
        {"asked": {"entities": 4, "words": [1] * 60}}, {"asked": {"entities": [4]}}, {"heads": []}, {"heads": [1]},
        {"contrasts": [None]}, {"weights": None}, {"tokenizer": 1},
    ],
)  # fmt: skip
def test_a_fit_that_was_asked_for_by_nobody_is_refused(scope, fit, fields):
    edit_asked(fit, **fields)
    for use in (
        lambda: task_of(read_job(fit), fit),
        lambda: load(fit, scope),
        lambda: decompose(scope, tasks.binding(4), ["L1H3"], 16, out=fit, **JOB),
    ):
        with pytest.raises(BadInput):
            use()


@pytest.mark.parametrize("text", [DEEP, '{"schema": ' + DEEP + "}", '{"schema": 1e999}', '{"schema": 1', "7", "null"])
def test_json_without_end_or_sense_is_refused(fit, text):
    for name in ("manifest.json", "results.json"):
        (fit / name).write_text(text)
    for use in (lambda: read_job(fit), lambda: made(fit), lambda: Result.read(fit)):
        with pytest.raises(BadInput, match="is damaged or half-written"):
            use()
    path = fit / sums_file("order")
    tensors, _ = read_tensors(path, "sums")
    write_tensors(path, "sums", tensors, {"about": 7})
    for use in (lambda: read_tensors(path, "sums"), lambda: made(path)):
        with pytest.raises(BadInput, match="is damaged or not a qkscope file"):
            use()


@pytest.mark.parametrize("fields", [{"versions": []}, {"asked": [1]}, {"schema": "1"}, {"schema": True}])
def test_a_manifest_that_no_run_writes_is_refused(fit, fields):
    edit(fit / "manifest.json", **fields)
    with pytest.raises(BadInput, match=r"manifest\.json is damaged or half-written"):
        made(fit)


def test_a_task_of_a_file_says_whether_it_is_a_chat(scope, tmp_path):
    keys = [{"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]
    lines = [json.dumps({"prompt": f"A B {word}", "keys": keys}) for word in ("hat", "cup", "red", "blue") * 3]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    fit = tmp_path / "fit"
    decompose(scope, tasks.from_jsonl(tmp_path / "mine.jsonl"), ["L0H1"], 4, out=fit, batch_size=4)
    asked = read_job(fit)["asked"]
    for odd in ({name: value for name, value in asked.items() if name != "chat"}, {**asked, "chat": "no"}):
        edit_asked(fit, asked=odd)
        with pytest.raises(BadInput, match="names no task that can be made"):
            load(fit, scope)
