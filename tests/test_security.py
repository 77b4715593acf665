"""Facts about files from strangers: what they claim is checked before memory, a path or a name is taken from them."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path

import pytest
import torch

from qkscope import BadInput, Moments, Scope, tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.fit import load
from qkscope.analyses.fit_folder import ContrastSums, read_job, sums_file, task_of
from qkscope.runs.folder import read_tensors, write_tensors
from qkscope.runs.result import Result, made
from qkscope.tasks.words import OBJECTS
from tiny_llama import write_tiny_llama


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("claim", [{"replicates": 10**7}, {"d_head": 10**5}])
def test_a_manifest_that_claims_much_takes_no_memory(tmp_path, claim):
    about = {"model": "m", "space": "post_rope", "n": 1}
    moments = Moments(["L0H0"], ["order"], 4, nulls=["sign_flip"], replicates=3, about=about)
    write_tensors(tmp_path / "m.safetensors", "moments", moments.tensors(), {**moments.manifest(), **claim})
    sums = ContrastSums(moments)
    manifest = {"moments": {**moments.manifest(), **claim}, "cut": 0}
    write_tensors(tmp_path / "s.safetensors", "sums", sums.tensors(), manifest)
    before = peak()
    for read in (
        lambda: Moments.load(tmp_path / "m.safetensors"),
        lambda: ContrastSums.load(tmp_path / "s.safetensors"),
    ):
        with pytest.raises(BadInput, match="is missing or of another shape"):
            read()
    assert peak() - before < 50  # MB


def test_a_header_that_claims_more_than_the_file_holds_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F64", "shape": [10**12], "data_offsets": [0, 8 * 10**12]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(BadInput, match="damaged"):
        read_tensors(tmp_path / "x.safetensors", "sums")


def test_a_json_file_too_large_for_a_run_is_not_read(tmp_path):
    """A sparse file of 10 GB, which costs nothing unless somebody reads it."""
    Result("x", {}).write(tmp_path / "run")
    for name in ("results.json", "manifest.json"):
        with open(tmp_path / "run" / name, "wb") as file:
            os.truncate(file.fileno(), 10 * 2**30)
    before = peak()
    for read in (Result.read, read_job, made):
        with pytest.raises(BadInput, match="is damaged or half-written"):
            read(tmp_path / "run")
    assert peak() - before < 50  # MB


def test_names_in_a_run_folder_do_not_lead_out_of_it(scope, tmp_path):
    secret = tmp_path / "secret.jsonl"
    keys = [{"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]
    secret.write_text("\n".join(json.dumps({"prompt": f"A B {word}", "keys": keys}) for word in OBJECTS[:12]))
    fit = tmp_path / "runs" / "fit"
    decompose(scope, tasks.from_jsonl(secret), ["L0H1"], 4, out=fit, batch_size=4)
    (fit / "secret.jsonl").unlink()
    manifest = json.loads((fit / "manifest.json").read_text())
    for name in ("../../secret.jsonl", str(secret), "..", ""):
        manifest["asked"]["asked"]["file"] = name
        (fit / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(BadInput, match="is missing, the copy of the task"):
            task_of(read_job(fit), fit)
    assert Path(sums_file("../../x")).name == sums_file("../../x")
    manifest["asked"] |= {"task": "binding", "asked": {"entities": 4}, "contrasts": ["../../x"]}
    (fit / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match="has no contrast"):
        load(fit, scope)


def test_an_index_of_weights_does_not_lead_out_of_its_folder(tmp_path):
    folder = write_tiny_llama(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(BadInput, match="is no file of weights in it"):
        Scope.load(folder, device="cpu")


def test_nothing_is_evaluated_unpickled_or_run_from_a_model():
    bad = re.compile(r"(?<![.\w])(eval|exec)\(|pickle\.|torch\.load\(|trust_remote_code=True|shell=True|os\.system")
    source = Path(torch.__file__).parent  # the pattern finds what it looks for somewhere
    assert bad.search((source / "serialization.py").read_text())
    for path in (Path(__file__).parents[1] / "src").rglob("*.py"):
        assert not bad.search(path.read_text(encoding="utf-8")), path
