"""Files from strangers, and run folders that somebody edited: what they claim is checked, and nothing of it is run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from qkscope import BadInput, Moments, tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.fit import load, read_job, sums_file, task_of
from qkscope.capture.scope import Scope
from qkscope.runs.folder import read_tensors, write_tensors
from qkscope.tasks.words import OBJECTS

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


def test_sums_that_claim_another_shape_are_refused(tmp_path):
    moments = Moments(["L0H0"], ["order"], 4, nulls=["sign_flip"], replicates=3, about={"model": "m", "n": 1})
    claimed = {**moments.manifest(), "replicates": 10**7}
    write_tensors(tmp_path / "m.safetensors", "moments", moments.tensors(), claimed)
    with pytest.raises(BadInput, match="is missing or of another shape"):
        Moments.load(tmp_path / "m.safetensors")
    header = json.dumps({"a": {"dtype": "F64", "shape": [10**12], "data_offsets": [0, 8 * 10**12]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(BadInput, match="damaged"):
        read_tensors(tmp_path / "x.safetensors", "sums")


def test_names_in_a_run_folder_do_not_lead_out_of_it(scope, tmp_path):
    secret = tmp_path / "secret.jsonl"
    keys = [{"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]
    secret.write_text("\n".join(json.dumps({"prompt": f"A B {word}", "keys": keys}) for word in OBJECTS[:12]))
    fit = tmp_path / "runs" / "fit"
    decompose(scope, tasks.from_jsonl(secret), ["L0H1"], 4, out=fit, batch_size=4)
    (fit / "secret.jsonl").unlink()
    manifest = json.loads((fit / "manifest.json").read_text())
    for name in ("../../secret.jsonl", str(secret)):
        manifest["asked"]["asked"]["file"] = name
        (fit / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(BadInput, match="is missing, the copy of the task"):
            task_of(read_job(fit), fit)
    assert Path(sums_file("../../x")).name == sums_file("../../x")


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


def test_sums_that_no_longer_belong_to_the_folder_are_refused(scope, fit, monkeypatch):
    """Of another fit; or of prompts that another version drew."""
    with monkeypatch.context() as patched:
        patched.setattr("qkscope.analyses.fit.units_hash", lambda units: "0")
        with pytest.raises(BadInput, match="was fitted on other prompts of order"):
            load(fit, scope)
    decompose(scope, tasks.binding(4), ["L0H1"], 16, out=fit.parent / "other", **JOB)
    shutil.copyfile(fit.parent / "other" / sums_file("order"), fit / sums_file("order"))
    with pytest.raises(BadInput, match="is not what a run wrote there"):
        load(fit, scope)


def test_nothing_is_evaluated_unpickled_or_run_from_a_model():
    bad = re.compile(r"(?<![.\w])(eval|exec)\(|pickle\.|torch\.load\(|trust_remote_code=True|shell=True|os\.system")
    source = Path(torch.__file__).parent  # the pattern finds what it looks for somewhere
    assert bad.search((source / "serialization.py").read_text())
    for path in (Path(__file__).parents[1] / "src").rglob("*.py"):
        assert not bad.search(path.read_text(encoding="utf-8")), path
