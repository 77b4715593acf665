"""Figures of language models in the second paper: nano by default, a model by name, a dictionary from a file."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file

from qkscope import BadInput, tasks
from qkscope.analyses.sparsity import Sparsity
from qkscope.tasks.ioi import TEMPLATES
from qkscope_papers.families import tiny_model
from qkscope_papers.franco2026 import model_sparsity, model_sweep
from qkscope_papers.franco2026.isotropy import isotropy, read_dictionary
from qkscope_papers.franco2026.model_sparsity import relabelled
from qkscope_papers.franco2026.model_sweep import PYTHIA, Sweep, SweepWork, revisions_of
from qkscope_papers.franco2026.prompts import clusters_of, prompts_of, text_task
from qkscope_papers.registry import EMBEDDED, NANO, figure_of, reproduce

SWEPT = ["fig7b", "fig8", "fig9b", "fig25"]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(model_sweep.WORK, "smoke", SweepWork(6, 1, 3, 100))
    model_sweep._swept.cache_clear()


def written(out, figure):
    folder = out / "franco2026" / figure
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert (folder / "figures" / f"{figure}.png").stat().st_size > 5000
    return json.loads((folder / "results.json").read_text())


def test_figures_of_training_run_on_a_nano_by_default(tmp_path):
    results = reproduce("franco2026", SWEPT, preset="smoke", out=tmp_path)
    assert {result.model for result in results.values()} == {NANO}
    training = written(tmp_path, "fig7b")["tables"]["training"]
    assert [row["step"] for row in training][::2] == [0, max(row["step"] for row in training)]
    assert all(row["low"] <= row["difference"] <= row["high"] for row in training)
    claims = {claim.claim: claim for claim in results["fig7b"].claims}
    assert claims["Sparsity falls over training (change of its mean over the circuit; control: at heads outside)"]
    assert {claim.reason for claim in claims.values()} == {"not run here"}, "smoke decides nothing"
    units = results["fig7b"].tables["heads"]
    for when in ("over training", "at the end"):
        inside, outside = ([u["value"] for u in units if (u["when"], u["circuit"]) == (when, c)] for c in (True, False))
        assert len({u["head"] for u in units}) == len(inside) + len(outside), "a head is one unit, whatever its edges"
        (claim,) = (claim for name, claim in claims.items() if name.startswith(f"More so than at other heads, {when}"))
        assert claim.ours == pytest.approx(relabelled(inside, outside))
        assert claim.holds == (claim.ours < 0.05)
    assert len(written(tmp_path, "fig8")["tables"]["heads"]) == 4
    circuit = [row for row in written(tmp_path, "fig9b")["tables"]["sparsity"] if row["circuit"]]
    assert len(written(tmp_path, "fig25")["tables"]["heads"]) == len(circuit)
    counts = {row["what"] for row in results["fig9b"].tables["counts"]}
    assert counts == {"count", "count_tol", "count_null", "count_tol_null"}
    # one sweep serves them all, and is found again
    (folder,) = (tmp_path / "franco2026" / "sweeps").iterdir()
    stamps = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    model_sweep._swept.cache_clear()
    reproduce("franco2026", ["fig9b"], preset="smoke", out=tmp_path)
    assert stamps == {file: file.stat().st_mtime_ns for file in folder.iterdir()}


def test_every_prompt_has_one_template():
    found = clusters_of(tasks.ioi(seed=3), 128)
    assert set(found.tolist()) == set(range(len(TEMPLATES)))
    for i, unit in zip(found.tolist(), tasks.ioi(seed=3).test(len(found)), strict=True):
        parts = re.split(r"\{\w+\}", TEMPLATES[i])
        assert all(part in unit[0].text for part in parts)
        others = [t for t in TEMPLATES if all(part in unit[0].text for part in re.split(r"\{\w+\}", t))]
        assert others == [TEMPLATES[i]]


def test_a_model_with_one_checkpoint_has_no_training_to_show(tmp_path, nano_tokenizer):
    folder = tmp_path / "model"
    tiny_model("gpt_neox", vocab_size=len(nano_tokenizer)).save_pretrained(folder)
    nano_tokenizer.save_pretrained(folder)
    results = reproduce("franco2026", SWEPT, preset="smoke", out=tmp_path / "out", model=str(folder))
    assert "training" not in results["fig7b"].tables
    assert not any("over training" in claim.claim for claim in results["fig7b"].claims)
    for figure in SWEPT:
        assert written(tmp_path / "out", figure)["model"] == str(folder)


def test_a_mean_is_as_sure_as_its_templates_are_many():
    generator = torch.Generator().manual_seed(0)
    clusters = torch.arange(128) % 8
    values = torch.randn(8, generator=generator, dtype=torch.float64)[clusters].expand(3, -1)
    by_template, by_prompt = (
        Sweep(None, [], {}, own, "ioi").mean(values, [0, 2]) for own in (clusters, torch.arange(128))
    )
    assert by_template.mean == by_prompt.mean == pytest.approx(float(values.mean()))
    widths = [found.high - found.low for found in (by_template, by_prompt)]
    assert widths[0] > 2.5 * widths[1], "16 prompts of a template say the same"
    one = Sweep(None, [], {}, torch.zeros(128), "ioi").mean(values, [0])
    assert math.isnan(one.low), "of one template there is nothing to draw anew"


def test_a_failure_is_laid_to_the_model_where_it_is_not_the_papers():
    def reason(model, prompts="ioi"):
        return Sweep(Sparsity("sparsity/ioi", {}, model=model), [], {}, torch.zeros(1), prompts).unlike(PYTHIA)[0]

    assert [reason(model) for model in (PYTHIA, NANO, EMBEDDED)] == ["refuted", "small model", "other setting"]
    assert reason(PYTHIA, "text") == "other setting"
    assert reason(PYTHIA, "single") == "refuted", "the paper's own prompt"


def test_the_papers_one_prompt_can_be_asked_for(tmp_path):
    results = reproduce("franco2026", ["fig8", "fig9b"], preset="smoke", out=tmp_path, prompts="single")
    assert {row["n"] for row in results["fig9b"].tables["sparsity"]} == {1}
    assert {row["n"] for row in results["fig9b"].tables["counts"]} == {1}
    assert json.loads((tmp_path / "franco2026" / "fig8" / "manifest.json").read_text())["figure"]["prompts"] == "single"
    for figures, prompts in ((["fig20"], "single"), (["fig8"], "stories")):
        with pytest.raises(BadInput, match=f"no prompts '{prompts}'"):
            reproduce("franco2026", figures, preset="smoke", out=tmp_path, prompts=prompts)


def test_natural_text_is_asked_where_a_token_stands_again():
    words: dict[str, int] = {}
    task = text_task(lambda text: [words.setdefault(word, len(words)) for word in text.split()], 0)
    units = task.test(40)
    for (example,) in units:
        ids, at = example.ids, {name: start for name, (start, _) in example.roles.items()}
        assert at["END"] == len(ids) - 1
        assert ids[at["MATCH"]] == ids[-1]
        assert ids[-1] not in ids[at["NEXT"] : -1], "the last earlier place"
        assert (at["PREV"], at["NEXT"]) == (at["END"] - 1, at["MATCH"] + 1)
    assert len(set(clusters_of(task, 40).tolist())) > 5
    runs = [{ids[i : i + 8] for (x,) in drawn for ids in [x.ids] for i in range(len(ids) - 7)}
            for drawn in (units, task.choose(40))]  # fmt: skip
    assert not runs[0] & runs[1], "heads are chosen on other text"
    with pytest.raises(BadInput, match="knows the words of its own tasks alone"):
        prompts_of("text", NANO, None, 0)


@pytest.fixture(scope="module")
def nano_tokenizer():
    from qkscope import Scope

    return Scope.load(NANO, check=False).tokenizer


def test_each_model_has_its_checkpoints(tmp_path):
    assert revisions_of("gpt2", "paper") is None
    assert revisions_of(EMBEDDED, "default") is None
    assert revisions_of("nano:mixed@0", "default") is None
    assert revisions_of(PYTHIA, "smoke") == "step0,step1000,step143000"
    assert len((revisions_of(PYTHIA, "paper") or "").split(",")) == 144
    (tmp_path / "run").mkdir()
    assert revisions_of(str(tmp_path / "run"), "default") == "all"
    assert figure_of("franco2026", "bridge").model == EMBEDDED


# ---------------------------------------------------------------- figure 20


def test_orthonormal_rows_are_isotropic_and_a_cone_is_not():
    generator = torch.Generator().manual_seed(0)
    tight = torch.cat([torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0]] * 3)
    row, spectrum = isotropy(tight)
    assert row["e_trace"] == pytest.approx(0.0, abs=1e-12)
    assert row["e_one"] == pytest.approx(2.0)  # three copies: G = 3 I
    assert row["effective_dimension"] == pytest.approx(8)
    torch.testing.assert_close(spectrum, torch.ones(8, dtype=torch.float64))
    line = torch.ones(20, 8, dtype=torch.float64)
    line[:, 0] += 1e-6 * torch.randn(20, generator=generator, dtype=torch.float64)
    assert isotropy(line)[0]["e_trace"] == pytest.approx(7.0, abs=1e-3)  # d − 1, the most there is
    with pytest.raises(BadInput, match="two rows"):
        isotropy(torch.zeros(5, 3, dtype=torch.float64))


def test_a_distortion_along_one_direction_reads_its_own_size():
    """W Wᵀ = I, stretched by √(1+ε) along v: E = ε v vᵀ at c = 1 (the toy of the paper's C.3), rows not rescaled."""
    generator = torch.Generator().manual_seed(1)
    v = torch.nn.functional.normalize(torch.randn(6, generator=generator, dtype=torch.float64), dim=0)
    w = torch.linalg.qr(torch.randn(40, 6, generator=generator, dtype=torch.float64))[0]
    stretched = w + (w @ v)[:, None] * ((1 + 3.0) ** 0.5 - 1) * v
    gram = stretched.T @ stretched
    assert float(torch.linalg.matrix_norm(gram - torch.eye(6), 2)) == pytest.approx(3.0)


def test_a_decoder_is_read_from_a_file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    decoder = torch.randn(32, 8, generator=generator)
    file = tmp_path / "sae.safetensors"
    save_file({"W_dec": decoder, "W_enc": decoder.T.contiguous(), "b_dec": torch.zeros(8)}, file)
    ((name, read),) = read_dictionary(file).items()
    assert name == "sae.safetensors:W_dec"
    assert torch.equal(read, decoder)
    result = reproduce("franco2026", ["fig20"], preset="smoke", out=tmp_path / "out", model=str(file))["fig20"]
    (row,) = result.tables["isotropy"]
    assert (row["n"], row["d"]) == (32, 8)
    (claim,) = written(tmp_path / "out", "fig20")["claims"]
    assert (claim["source"], claim["control"]) == ("stated", pytest.approx(row["random"]))
    save_file({"a": decoder, "b": decoder.clone()}, tmp_path / "two.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    for name, says in (("two", "one decoder matrix"), ("bad", "damaged"), ("none", "there is no file")):
        with pytest.raises(BadInput, match=says):
            read_dictionary(tmp_path / f"{name}.safetensors")


def test_relabelling_counts_the_ways_to_deal_the_labels(monkeypatch):
    assert relabelled([-3.0, -2.0, math.nan], [0.0, 1.0]) == pytest.approx(1 / 6)
    assert relabelled([0.0, 1.0], [-3.0, -2.0]) == 1.0, "the highest mean of all: every relabelling is as low"
    assert relabelled([1.0, 1.0], [1.0, 1.0]) == 1.0, "ties count against"
    assert math.isnan(relabelled([], [1.0]))
    # units of one kind: p is uniform, so few are small
    found = [
        relabelled(x[:6].tolist(), x[6:].tolist())
        for x in torch.randn(200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ]
    assert 0.0 < sum(p < 0.05 for p in found) / 200 < 0.1
    # drawn relabellings come close to all of them, and never give 0
    exact = relabelled([-1.0, -0.5, 0.2], [0.1, 0.6, 0.9])
    monkeypatch.setattr(model_sparsity, "MOST", 19)
    assert 1 / 19 <= relabelled([-1.0, -0.5, 0.2], [0.1, 0.6, 0.9]) < exact + 0.3
