"""Facts about sweeps: nulls beside every number, what is done is not redone, copies and gaps
refused by name.
"""

import json

import pytest
import torch

from qkscope import BadInput, Scope, tasks
from qkscope.findings.published import (
    CIRCUITS,
    DUTIES,
    Duty,
    Edge,
    columns_of_roles,
    find_circuit,
    parse_edges,
    rows_from,
)
from qkscope.findings.singular_rows import relative_rows, singular_basis
from qkscope.heads import Head
from qkscope.texts.sentence_tasks import TEMPLATES
from qkscope.texts.word_pools import FIRST_NAMES, PLACES, THINGS
from qkscope.verbs import sparsity as module
from qkscope.verbs.sparsity import checkpoints, group_difference, sparsity, sweep
from qkscope_papers.families import tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = {"n": 6, "controls": 1, "draws": 4}


@pytest.fixture(scope="module")
def words():
    """A word-level tokenizer of every word that the indirect-object prompts are made of."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = " ".join([*FIRST_NAMES, *PLACES, *THINGS, *TEMPLATES, "Words:", ",", "."])
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    vocabulary = [
        "<pad>",
        "<unk>",
        *dict.fromkeys(piece for piece, _ in splitter.pre_tokenize_str(text)),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
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


def test_edges_and_checkpoints_are_read_as_they_are_printed(run_folder):
    task, published = tasks.ioi(), CIRCUITS["gpt2", "ioi"]
    edges = parse_edges("L9H9, L5H5:S2>S1+1", task)
    assert edges == [
        Edge(Head(9, 9), Duty("answer", "query", "answer")),
        Edge(Head(5, 5), DUTIES["ioi"][1]),
    ]
    assert parse_edges(",".join(map(str, published[:2])), task) == published[:2]
    assert parse_edges("gpt2,L9H9:END>IO", task) == published
    assert [c.label for c in checkpoints(str(run_folder), "step20,step0")] == ["step0", "step20"]
    both = checkpoints(
        "EleutherAI/pythia-160m", "seed2-step20,seed1-step20,step3"
    )  # the same step is no copy
    assert [c.revision for c in both] == ["step3", "seed2-step20", "seed1-step20"]


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        ("gpt2", "or the circuit of another task"),
        ("L0H0:END>S3", "a role 'S3' that induction does not have"),
        ("L0H0:PREV>END", "in no prompt does PREV see END"),
    ],
)
def test_heads_and_roles_that_are_not_there_are_refused(nano, heads, says):
    with pytest.raises(BadInput, match=says):
        sparsity(nano, tasks.induction(), heads, n=2)


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
    best = next(
        edge
        for edge in find_circuit(scope, tasks.ioi(), n=16, top=1)
        if edge.duty.role == "previous token"
    )
    assert best.head == Head(0, 0)


def test_every_number_is_the_mean_over_prompts_of_one_prompts_number(words):
    scope = Scope.from_model(tiny_model("llama", vocab_size=len(words)), words)
    task = tasks.ioi()
    found = sparsity(scope, task, "L1H2:END>IO,L0H1:S2>S1+1", n=5, controls=1, batch_size=2)
    basis, each = singular_basis(scope, "L1H2"), []
    for unit in task.test(5):
        inputs, columns = columns_of_roles(scope, unit[:1], ["END", "IO"])
        places = rows_from(inputs, columns[:, :1])
        captured = scope.capture_inputs(inputs, places=places, heads=["L1H2"], space="query_frame")
        each.append(relative_rows(captured, columns[:, 1:], basis))
    alone = [{name: float(value) for name, value in one.values(20, 0, [0]).items()} for one in each]
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
        assert (
            1 <= row["count_tol_null"] <= row["count_null"]
        )  # random terms reach 99% no later than all of it
    assert row["low"] <= row["difference"] <= row["high"]
    torch.testing.assert_close(
        found.arrays["terms_first"][0], each[0].terms[0, 0], rtol=1e-4, atol=1e-6
    )
    assert [row["circuit"] for row in found.table()] == [True, True, False, False]


def test_a_sweep_orders_its_checkpoints_and_goes_on_where_it_stopped(
    run_folder, tmp_path, monkeypatch
):
    """Heads are looked for in the last checkpoint alone; one that fails leaves those before it
    done.
    """
    looked, load = [], Scope.load

    def stopping(name, **options):
        looked.append(name.rpartition("/")[2])
        if looked == ["step100", "step20", "step0"]:
            raise KeyboardInterrupt
        return load(name, **options)

    monkeypatch.setattr(module.Scope, "load", stopping)
    asked = (str(run_folder), tasks.ioi(), "step100,step0,step20")
    with pytest.raises(KeyboardInterrupt):
        sweep(*asked, out=tmp_path / "out", **SMALL)
    found = sweep(*asked, out=tmp_path / "out", **SMALL)
    assert looked == ["step100", "step20", "step0", "step0"]
    whole = sweep(*asked, out=tmp_path / "whole", **SMALL)
    assert found.to_json()["tables"] == whole.to_json()["tables"]
    assert [row["step"] for row in found.tables["training"] if row["circuit"]] == [0, 20, 100]
    assert {row["step"] for row in found.table()} == {0, 20, 100}
    at_end = sparsity(load(str(run_folder / "step100")), tasks.ioi(), **SMALL)
    assert at_end.edges == found.edges
    for name in ("sparsity", "rotated", "terms_mean"):
        torch.testing.assert_close(found.arrays[name], at_end.arrays[name])
        assert found.arrays[f"step20/{name}"].shape == found.arrays[name].shape
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["tables"]["sparsity"][0]["head"] == found.table()[0]["head"]


def test_a_change_is_measured_on_the_same_prompts():
    generator = torch.Generator().manual_seed(0)
    level = torch.rand(
        1, 40, generator=generator, dtype=torch.float64
    )  # prompts differ far more than checkpoints
    before = {"sparsity": level.expand(3, -1), "rotated": torch.zeros(3, 40, dtype=torch.float64)}
    after = {**before, "sparsity": before["sparsity"] - 0.05}
    mean, low, high = group_difference(after, [0, 2], before)
    assert (mean, low, high) == pytest.approx((-0.05, -0.05, -0.05))
    _, low, high = group_difference(after, [0, 2])
    assert high - low > 0.1


@pytest.mark.parametrize(
    ("model", "revisions", "says"),
    [
        ("{run}", "step0,step7", "has no revision 'step7': there is copy3, step0"),
        ("{run}", "step100,copy3", "'step100' and 'copy3' of .* hold the same weights"),
        ("{run}/step0", "step0", "is one model, not a folder of checkpoints"),
        ("EleutherAI/pythia-160m", "all", "are not known here"),
    ],
)
def test_revisions_that_do_not_exist_or_are_copies_are_refused_by_name(
    run_folder, tmp_path, model, revisions, says
):
    with pytest.raises(BadInput, match=says):
        sweep(model.format(run=run_folder), tasks.ioi(), revisions, out=tmp_path / "out", **SMALL)
    assert not (tmp_path / "out").exists()
