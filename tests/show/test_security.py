"""Files from strangers, and run folders that somebody edited: what they claim is checked, and
nothing of it is run.
"""

import json
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qkscope as qk
from qkscope import BadInput, tasks
from qkscope.findings.fit import load_fit, read_job, sums_file, task_of
from qkscope.model.scope import Scope
from qkscope.results.folder import read_tensors, write_tensors
from qkscope.results.result import Result, plain_value
from qkscope.show.page import script_json
from qkscope.sums.moments import Moments
from qkscope.texts.word_pools import OBJECTS
from qkscope.verbs.decompose import decompose

JOB = {"contrasts": ["order"], "batch_size": 4}


@pytest.fixture(scope="module")
def kept(scope, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("fits") / "fit"
    decompose(scope, tasks.binding(4), ["L1H3"], 16, out=out, **JOB)
    return out


@pytest.fixture
def fit(kept, tmp_path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "fit"))


def test_sums_that_claim_another_shape_or_belong_elsewhere_are_refused(
    tmp_path, scope, fit, monkeypatch
):
    moments = Moments(["L0H0"], ["order"], 4, replicates=3, about={"model": "m", "n": 1})
    claimed = {**moments.manifest(), "replicates": 10**7}
    write_tensors(tmp_path / "m.safetensors", "moments", moments.tensors(), claimed)
    with pytest.raises(BadInput, match="is missing or of another shape"):
        Moments.load(tmp_path / "m.safetensors")
    header = json.dumps(
        {"a": {"dtype": "F64", "shape": [10**12], "data_offsets": [0, 8 * 10**12]}}
    ).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(BadInput, match="damaged"):
        read_tensors(tmp_path / "x.safetensors", "sums")
    # of another fit; or of prompts that another version drew
    with monkeypatch.context() as patched:
        patched.setattr("qkscope.findings.fit.units_hash", lambda units: "0")
        with pytest.raises(BadInput, match="was fitted on other prompts of order"):
            load_fit(fit, scope)
    decompose(scope, tasks.binding(4), ["L0H1"], 16, out=fit.parent / "other", **JOB)
    shutil.copyfile(fit.parent / "other" / sums_file("order"), fit / sums_file("order"))
    with pytest.raises(BadInput, match="is not what a run wrote there"):
        load_fit(fit, scope)


def test_names_in_a_run_folder_do_not_lead_out_of_it(scope, tmp_path):
    secret = tmp_path / "secret.jsonl"
    keys = [{"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]
    secret.write_text(
        "\n".join(json.dumps({"prompt": f"A B {word}", "keys": keys}) for word in OBJECTS[:12])
    )
    fit = tmp_path / "runs" / "fit"
    decompose(scope, tasks.from_jsonl(secret), ["L0H1"], 4, out=fit, batch_size=4)
    (fit / "secret.jsonl").unlink()
    manifest = json.loads((fit / "manifest.json").read_text())
    for name in ("../../secret.jsonl", str(secret)):
        manifest["asked"]["asked"]["file"] = name
        (fit / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(BadInput, match=r"secret\.jsonl cannot be read"):
            task_of(read_job(fit), fit)
    assert Path(sums_file("../../x")).name == sums_file("../../x")


def test_a_fit_without_its_sums_is_not_fitted_again_in_silence(scope, fit, monkeypatch):
    before = load_fit(fit, scope).table()
    with monkeypatch.context() as patched:
        patched.setattr(Scope, "capture_inputs", None)  # nor does a whole one run the model
        assert load_fit(fit, scope).table() == before
    (fit / sums_file("order")).unlink()
    with pytest.raises(
        BadInput, match=r"order\.safetensors is missing, .* run decompose again to make it"
    ):
        load_fit(fit, scope)
    assert not (fit / sums_file("order")).exists()


def test_nothing_is_evaluated_unpickled_or_run_from_a_model():
    bad = re.compile(
        r"(?<![.\w])(eval|exec)\(|pickle\.|torch\.load\(|trust_remote_code=True|shell=True|os\.system"
    )
    source = Path(torch.__file__).parent  # the pattern finds what it looks for somewhere
    assert bad.search((source / "serialization.py").read_text())
    for path in (Path(__file__).parents[2] / "src").rglob("*.py"):
        assert not bad.search(path.read_text(encoding="utf-8")), path


_odd = st.sampled_from(
    [
        "</script>",
        "</SCRIPT >",
        "<!--",
        "-->",
        "<script",
        "]]>",
        "\u2028",
        "\x00",
        "\ud800",
        "👩‍🔬",
        "&lt;",
        "{{ 7 }}",
    ]
)
_tokens = st.lists(_odd | st.text(max_size=4), max_size=4).map("".join)
_numbers = st.floats() | st.integers(-(10**40), 10**40) | st.booleans() | st.none()


@settings(max_examples=100)
@given(
    st.recursive(
        _tokens | _numbers,
        lambda inner: st.lists(inner) | st.dictionaries(_tokens, inner),
        max_leaves=9,
    )
)
def test_data_in_a_script_element_reads_back_and_cannot_end_it(value):
    text = str(script_json(value))
    assert json.loads(text) == plain_value(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()


def test_a_run_folder_of_any_text_reads_back(tmp_path):
    """Half a surrogate too, which UTF-8 cannot hold and JSON can."""
    text = "a\ud800\u2028👩é\x00<"
    result = Result(
        "odd", {"table": [{"token": text}]}, answer=text, provenance={"asked": {"prompt": text}}
    )
    found = Result.read(result.write(tmp_path / "run"))
    assert (found.tables, found.answer, found.provenance["asked"]["prompt"]) == (
        result.tables,
        text,
        text,
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than",
        ),
        ("{{ messages[0].content }}{{ ''.__class__.__mro__ }}", "fails with SecurityError"),
        ("{{ messages[0].content }}{{ 'a' * 10 ** 10 }}", "is more than a template needs"),
        (
            "{{ messages[0].content }}{{ ('a' * 1000000) ~ ('a' * 1000000) }}",
            r"makes 2,000,\d+ characters of",
        ),
        ("{{ messages[0].content }}{{ range(10 ** 9) }}", "fails with OverflowError"),
        ("{{ messages[0].content }}{{ raise_exception('no') }}", "fails with TemplateError"),
        (None, "ask without chat"),
    ],
)
def test_a_hostile_chat_template_ends_in_a_sentence(monkeypatch, template, said):
    monkeypatch.setattr("qkscope.model.encode._SECONDS", 1)
    scope = qk.Scope.load("nano:mixed", check=False)
    scope.tokenizer.chat_template = template
    before = set(threading.enumerate())
    with pytest.raises(BadInput, match=said):
        scope.encode(["hat jam"], chat=True)
    begun = set(threading.enumerate()) - before
    assert not begun  # none goes on, and slows down all that follows


def test_double_precision_and_two_watchers_are_refused_in_words(nano):
    with pytest.raises(BadInput, match="write float32, bfloat16, float16 or auto"):
        qk.Scope.load("nano:mixed", dtype="float64")
    with pytest.raises(BadInput, match="a model in float64 is not looked into"):
        qk.Scope.from_model(qk.Scope.load("nano:mixed", check=False).model.double())
    encoded = nano.encode(["hat jam"])
    with nano.patched([]), pytest.raises(BadInput, match="watched already"):
        nano.watch(encoded.inputs)
