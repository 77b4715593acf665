"""Facts about sweeps: nulls beside every number, what is stored is not redone, copies and gaps refused by name."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

from qkscope import BadInput, Scope, tasks
from qkscope.analyses.checkpoints import checkpoints
from qkscope.analyses.circuits import CIRCUITS, DUTIES, Duty, Edge, circuit_of, find_circuit, outside, parse_edges
from qkscope.analyses.relative import relative_attention
from qkscope.analyses.sparsity import group_difference, sparsity
from qkscope.analyses.sweep import plan_sweep, sweep
from qkscope.cli import main
from qkscope.heads import Head
from qkscope.maths import relative as measure
from qkscope.maths.relative import shared_sparsity, turned_terms
from qkscope.tasks.ioi import TEMPLATES
from qkscope.tasks.words import NAMES, PLACES, THINGS
from qkscope_papers.families import tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = {"n": 6, "controls": 1, "draws": 4}


@pytest.fixture(scope="module")
def words():
    """A word-level tokenizer of every word that the indirect-object prompts are made of."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = " ".join([*NAMES, *PLACES, *THINGS, *TEMPLATES, "Words:", ",", "."])
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    vocabulary = ["<pad>", "<unk>", *dict.fromkeys(piece for piece, _ in splitter.pre_tokenize_str(text))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, words):
    """Three checkpoints of one "training run", and one that is a copy under another config."""
    folder = tmp_path_factory.mktemp("run")
    for step, seed in (("step0", 0), ("step100", 1), ("step20", 2), ("copy3", 1)):
        longest = 2048 if step.startswith("step") else 4096
        model = tiny_model("llama", seed, vocab_size=len(words), max_position_embeddings=longest)
        model.save_pretrained(folder / step)
        words.save_pretrained(folder / step)
    return folder


def shaped(family, words, tmp_path, **shape):
    """A random model of a published shape's depth and heads, tiny in width, in a folder."""
    folder = tmp_path / family
    tiny_model(family, vocab_size=len(words), **shape).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- circuits


def test_published_circuits_name_heads_their_models_have():
    for circuit in CIRCUITS.values():
        assert len({(edge.head, edge.duty) for edge in circuit.edges}) == len(circuit.edges)
        assert all(edge.head.layer < 12 and edge.head.index < 12 for edge in circuit.edges)
    pythia = CIRCUITS["EleutherAI/pythia-160m"]
    assert len(pythia.edges) == 12
    assert {str(edge) for edge in pythia.edges if edge.duty.role == "name mover"} == {
        "L10H7:END>IO", "L9H4:END>IO", "L8H2:END>IO", "L8H10:END>IO",
    }  # fmt: skip
    assert circuit_of("openai-community/gpt2", "ioi") is CIRCUITS["gpt2"]
    assert circuit_of("gpt2", "induction") is None


def test_edges_are_read_as_they_are_printed():
    edges = parse_edges("L9H9, L5H5:S2>S1+1", "ioi")
    assert edges == [Edge(Head(9, 9), Duty("answer", "query", "answer")), Edge(Head(5, 5), DUTIES["ioi"][1])]
    assert parse_edges(",".join(map(str, CIRCUITS["gpt2"].edges[:2])), "ioi") == list(CIRCUITS["gpt2"].edges[:2])
    for text, says in (
        ("L5H5:S2", "from where to where"), ("", "no head was named"), ("L1H1,L1H1", "named twice"),
        ("gpt2", "is one of task ioi"), ("5.5", "not a head"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=says):
            parse_edges(text, "induction")


def test_a_planted_previous_token_head_is_found(words):
    """A head whose keys carry the position before attends there whatever the words are."""
    model = tiny_model("gpt2", vocab_size=len(words), n_positions=64)
    with torch.no_grad():
        layer = model.transformer.h[0].attn.c_attn
        width = model.config.n_embd
        model.transformer.wpe.weight.normal_(0, 2.0, generator=torch.Generator().manual_seed(0))
        q = torch.zeros(width, width)
        # head 0 of 4: its query reads position p as the key of position p - 1
        positions = model.transformer.wpe.weight
        unit = torch.nn.functional.layer_norm(positions, (width,))
        target = torch.linalg.lstsq(unit[1:], unit[:-1]).solution
        q[:, :16] = target[:, :16] * 3
        layer.weight[:, :width] = q
        layer.weight[:, width : width + 16] = torch.eye(width)[:, :16] * 3
        layer.bias.zero_()
        model.transformer.wte.weight.mul_(0.05)
        model.transformer.h[0].ln_1.weight.fill_(1.0)
        model.transformer.h[0].ln_1.bias.zero_()
    scope = Scope.from_model(model, words)
    best = next(edge for edge in find_circuit(scope, tasks.ioi(), n=16, top=1) if edge.duty.role == "previous token")
    assert best.head == Head(0, 0)


def test_controls_are_heads_of_no_circuit_at_the_same_roles(words):
    scope = Scope.from_model(tiny_model("llama", vocab_size=len(words)), words)
    edges = find_circuit(scope, tasks.ioi(), n=4, top=1)
    control = outside(scope, edges, 2)
    assert not {edge.head for edge in edges} & {edge.head for edge in control}
    ways = [(job.query, job.key) for job in DUTIES["ioi"]]
    assert [(e.duty.query, e.duty.key) for e in control] == [way for way in ways for _ in range(2)]
    assert not any(edge.circuit for edge in control)


# ---------------------------------------------------------------- one checkpoint


def test_every_number_is_the_mean_over_prompts_of_one_prompts_number(words):
    scope = Scope.from_model(tiny_model("llama", vocab_size=len(words)), words)
    task = tasks.ioi()
    found = sparsity(scope, task, "L1H2:END>IO,L0H1:S2>S1+1", n=5, controls=1, batch_size=2)
    each = [relative_attention(scope, unit[0], "L1H2", query="END", key="IO") for unit in task.test(5)]
    alone = [dict(one.tables["relative"][0]) for one in each]
    row = found.table()[0]
    for name in ("sparsity", "relative", "attention", "cancellation"):
        assert row[name] == pytest.approx(sum(one[name] for one in alone) / 5, rel=1e-5), name
    # nulls are drawn for each prompt anew, whatever batch it is in
    again = sparsity(scope, task, "L1H2:END>IO,L0H1:S2>S1+1", n=5, controls=1, batch_size=5)
    for name in ("rotated", "rotated_shared"):
        torch.testing.assert_close(again.arrays[name], found.arrays[name], rtol=1e-4, atol=1e-6)
        assert len(found.arrays[name][0].unique()) == 5
    counted = [one["count_tol"] for one in alone if one["relative"] > 0]
    assert row["positive"] == len(counted) / 5
    if counted:
        assert row["count_tol"] == pytest.approx(sum(counted) / len(counted))
        assert 1 <= row["count_tol_null"] <= row["count_null"]  # random terms reach 99% no later than all of it
    assert row["low"] <= row["difference"] <= row["high"]
    terms = {term["vector"]: term["term"] for term in each[0].tables["terms"]}
    first = [terms[i] for i in range(len(terms))]
    torch.testing.assert_close(found.arrays["terms_first"][0], torch.tensor(first, dtype=torch.float64), rtol=1e-4,
                               atol=1e-6)  # fmt: skip
    assert [row["circuit"] for row in found.table()] == [True, True, False, False]


def test_a_head_and_a_role_the_model_and_task_do_not_have_are_refused(words):
    scope = Scope.from_model(tiny_model("llama", vocab_size=len(words)), words)
    with pytest.raises(BadInput, match="L9H9 does not exist"):
        sparsity(scope, tasks.ioi(), "L9H9:END>IO", n=2)
    with pytest.raises(BadInput, match="L2H2 does not exist"):
        sparsity(scope, tasks.ioi(), "gpt2", n=2)
    with pytest.raises(BadInput, match="a role 'S3' that ioi does not have"):
        sparsity(scope, tasks.ioi(), "L0H0:END>S3", n=2)
    with pytest.raises(BadInput, match="in no prompt does IO see END"):
        sparsity(scope, tasks.ioi(), "L0H0:IO>END", n=2)
    for counts, says in (({"draws": 0}, "should be at least 1"), ({"controls": -1}, "should be at least 0")):
        with pytest.raises(BadInput, match=says):
            sparsity(scope, tasks.ioi(), "L0H0:END>IO", n=2, **counts)


@pytest.mark.parametrize(
    ("family", "circuit", "shape"),
    [
        ("gpt2", "gpt2", {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 96}),
        ("gpt_neox", "EleutherAI/pythia-160m", {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 96}),
    ],
)
def test_the_published_circuits_run_on_models_of_their_shape(family, circuit, shape, words, tmp_path):
    folder = shaped(family, words, tmp_path, **shape)
    found = sweep(str(folder), tasks.ioi(), None, circuit, **{**SMALL, "controls": 2}, out=tmp_path / "out")
    edges = CIRCUITS[circuit].edges
    assert [row["head"] for row in found.table()[: len(edges)]] == [str(edge.head) for edge in edges]
    assert all(row["sparsity"] == row["sparsity"] and row["n"] == 6 for row in found.table())
    assert len(found.table()) == len(edges) + 2 * len({(e.duty.query, e.duty.key) for e in edges})


def test_directions_drawn_for_each_prompt_are_what_rotations_give():
    """Mean sparsity over many rotation matrices equals that over uniform directions, of both nulls."""
    generator = torch.Generator().manual_seed(0)
    alpha, beta = torch.randn(2, 1, 1, 12, generator=generator, dtype=torch.float64)
    s = torch.linspace(3.0, 0.1, 12, dtype=torch.float64)
    by_matrix = measure.sparsity(measure.rotated_terms(alpha, s, beta, 2000)).mean()
    drawn = measure.sparsity(turned_terms(alpha.expand(200, 1, 12), s[None], 20, range(200))).mean()
    assert float(drawn) == pytest.approx(float(by_matrix), abs=0.008)
    shared = measure.sparsity(measure.shared_terms(alpha, beta, 2000)).mean()
    ours = shared_sparsity(alpha.expand(200, 1, 12), beta.expand(200, 1, 12), 20, range(200)).mean()
    assert float(ours) == pytest.approx(float(shared), abs=0.008)


# ---------------------------------------------------------------- sweeps


def test_a_sweep_orders_its_checkpoints_and_goes_on_where_it_stopped(run_folder, tmp_path):
    out = tmp_path / "out"
    found = sweep(str(run_folder), tasks.ioi(), "step100,step0,step20", out=out, **SMALL)
    steps = [row["step"] for row in found.tables["training"] if row["circuit"]]
    assert steps == [0, 20, 100]
    assert {row["step"] for row in found.table()} == {0, 20, 100}
    files = sorted((out / "checkpoints").iterdir())
    assert [file.stem for file in files] == ["step0", "step100", "step20"]
    stamps = {file.name: file.stat().st_mtime_ns for file in files}
    (out / "checkpoints" / "step20.safetensors").unlink()
    again = sweep(str(run_folder), tasks.ioi(), "step0,step20,step100", out=out, **SMALL)
    assert again.to_json()["tables"] == found.to_json()["tables"]
    now = {file.name: file.stat().st_mtime_ns for file in (out / "checkpoints").iterdir()}
    assert {name for name in stamps if now[name] != stamps[name]} == {"step20.safetensors"}
    assert json.loads((out / "results.json").read_text())["tables"]["sparsity"][0]["head"] == found.table()[0]["head"]
    with pytest.raises(BadInput, match=r"another sweep \(n, examples, heads_from differ\)"):
        plan_sweep(str(run_folder), tasks.ioi(), "step0", n=7, controls=1, draws=4, out=out)


def test_a_sweep_does_not_go_on_with_another_dtype_other_heads_or_other_weights(run_folder, tmp_path):
    """Heads that are looked for are those of the last checkpoint: a later one could have others."""
    out = tmp_path / "out"
    sweep(str(run_folder), tasks.ioi(), "step0,step20", out=out, **SMALL)
    plan_sweep(str(run_folder), tasks.ioi(), "step20", out=out, **SMALL)  # the same heads at fewer checkpoints
    for asked, says in (
        ({"revisions": "step0,step20", "dtype": "bfloat16"}, r"another sweep \(dtype differ"),
        ({"revisions": "step0,step20,step100"}, r"another sweep \(heads_from differ"),
    ):
        with pytest.raises(BadInput, match=says):
            sweep(str(run_folder), tasks.ioi(), out=out, **asked, **SMALL)
    sweep(str(run_folder), tasks.ioi(), "step0", "L0H1:END>IO", out=tmp_path / "named", **SMALL)
    plan_sweep(str(run_folder), tasks.ioi(), "step0,step100", "L0H1:END>IO", out=tmp_path / "named", **SMALL)


def test_a_model_that_was_trained_on_is_not_taken_for_what_it_was(run_folder, tmp_path):
    model = shutil.copytree(run_folder / "step0", tmp_path / "model")
    sweep(str(model), tasks.ioi(), None, "L0H1:END>IO", out=tmp_path / "out", **SMALL)
    shutil.copytree(run_folder / "step20", model, dirs_exist_ok=True)
    with pytest.raises(BadInput, match="was made from other weights"):
        sweep(str(model), tasks.ioi(), None, "L0H1:END>IO", out=tmp_path / "out", **SMALL)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema": 99}', "newer qkscope"),
        ("{", "is damaged"),
        ('{"schema": 1, "experiment": "sparsity/ioi", "files": {}, "asked": {"edges": 7}}', "is damaged"),
        ('{"schema": 1, "experiment": "sparsity/ioi", "files": {}, "asked": {"edges": [{}]}}', "is damaged"),
    ],
)
def test_a_sweep_of_a_newer_version_is_told_from_a_damaged_one(run_folder, tmp_path, text, says):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match=says):
        plan_sweep(str(run_folder), tasks.ioi(), out=tmp_path)


def test_a_change_is_measured_on_the_same_prompts():
    generator = torch.Generator().manual_seed(0)
    level = torch.rand(1, 40, generator=generator, dtype=torch.float64)  # prompts differ far more than checkpoints
    before = {"sparsity": level.expand(3, -1), "rotated": torch.zeros(3, 40, dtype=torch.float64)}
    after = {**before, "sparsity": before["sparsity"] - 0.05}
    mean, low, high = group_difference(after, [0, 2], before)
    assert (mean, low, high) == pytest.approx((-0.05, -0.05, -0.05))
    _, low, high = group_difference(after, [0, 2])
    assert high - low > 0.1


def test_revisions_that_do_not_exist_or_are_copies_are_refused_by_name(run_folder, tmp_path):
    assert [c.label for c in checkpoints(str(run_folder), "step20,step0")] == ["step0", "step20"]
    both = checkpoints("EleutherAI/pythia-160m", "seed2-step20,seed1-step20,step3")  # the same step is no copy
    assert [c.label for c in both] == ["step3", "seed2-step20", "seed1-step20"]
    for revisions, says in (
        ("step0,step7", "has no revision 'step7': there is copy3, step0"),
        ("step0,step0", "name each revision once"),
        (" , ", "name each revision once"),
        ("step100,copy3", "'step100' and 'copy3' of .* hold the same weights"),
        ("all", "hold the same weights"),
    ):
        with pytest.raises(BadInput, match=says):
            sweep(str(run_folder), tasks.ioi(), revisions, out=tmp_path / "out", **SMALL)
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match="is one model, not a folder of checkpoints"):
        checkpoints(str(run_folder / "step0"), "step0")
    with pytest.raises(BadInput, match="is one model, not a folder of checkpoints"):
        checkpoints("smollm2-135m", "main")
    with pytest.raises(BadInput, match="are not known here"):
        checkpoints("EleutherAI/pythia-160m", "all")
    assert checkpoints("EleutherAI/pythia-160m", "step1000,step143000")[1].revision == "step143000"


def test_the_verbs_answer_bad_input_with_a_sentence_and_print_json(run_folder, tmp_path, monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["qkscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr()

    asked = ["sparsity", "ioi", "--model", run_folder, "--out", tmp_path / "out", "--n", "2", "--controls", "1"]
    for more, says in (
        (["--revisions", "step9"], "has no revision 'step9'"),
        (["--revisions", "step0", "--heads", "L0H0:END>S9"], "a role 'S9'"),
        (["--revisions", "step0", "--heads", "L8H0:END>IO"], "L8H0 does not exist"),
        (["--revisions", "step0", "--draws", "0"], "should be at least 1"),
        (["--revisions", "step100,copy3"], "hold the same weights"),
        (["--form", "question"], "form of ioi should be 'both', 'ABBA', 'BABA'"),
    ):
        code, said = command(*asked, *more)
        assert (code, said.out) == (2, "")
        assert says in said.err
        assert "Traceback" not in said.err
    assert not (tmp_path / "out").exists()
    code, said = command(*asked, "--revisions", "step0", "--heads", "L0H0:END>IO", "--draws", "2", "--json")
    assert code in (0, None), said.err
    row = json.loads(said.out)["tables"]["sparsity"][0]
    assert {"model", "head", "step", "sparsity", "rotated", "rotated_shared", "low", "high", "count", "count_tol",
            "count_null", "role", "from", "to"} <= set(row)  # fmt: skip
    assert row["step"] == 0
    file = tmp_path / "vectors.safetensors"
    code, said = command("svd", "--model", run_folder / "step0", "--heads", "L0H0,L1H3", "--json", "--out", file)
    assert [row["head"] for row in json.loads(said.out)["tables"]["heads"]] == ["L0H0", "L1H3"]
    assert file.is_file()
    assert command("svd", "--out", tmp_path)[0] == 2
