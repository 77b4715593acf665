"""Nano models: the shipped ones do what they claim, and training them is exact and resumable."""

import pytest
import torch
from safetensors.torch import load_file

import qkscope as qk
from qkscope.errors import BadInput
from qkscope.model.load import nano_steps, place_of_model
from qkscope.results.folder import read_tensors
from qkscope.texts.word_pools import FIRST_NAMES, pools
from qkscope_papers.nano.score import CLAIMED, Exam, claimed_task
from qkscope_papers.nano.text import Texts, nano_tokenizer, vocabulary
from qkscope_papers.nano.train import STATE, NanoRecipe, NanoTrainer

TINY = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "mlp": 32, "rows": 20, "prompts": 4}
LONG = {**TINY, "steps": 24, "check_every": 8, "solved": 0.0}
CPU = torch.device("cpu")
KIND = "nano training"


def accuracy(scope: qk.Scope, name: str, n: int = 128) -> float:
    return Exam.of(claimed_task(name), scope.tokenizer, n, CPU).score(scope.model)["accuracy"]


@pytest.fixture(scope="module")
def checkpoints() -> list[qk.Scope]:
    return [
        qk.Scope.load(f"nano:mixed@{step}", device="cpu", check=False)
        for step in nano_steps("mixed")
    ]


def test_checkpoints_are_small_and_load_by_name_and_the_indirect_object_is_learned_among_them(
    nano, checkpoints
):
    steps = nano_steps("mixed")
    assert steps == sorted(steps)
    assert (steps[0], len(steps) >= 12) == (0, True)
    folders = [place_of_model(f"nano:mixed@{step}").path for step in steps]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= 20_000_000
    assert len({scope.weights_hash for scope in checkpoints}) == len(steps)
    assert [scope.revision for scope in checkpoints] == [str(step) for step in steps]
    again = qk.Scope.load("nano:mixed", revision=str(steps[3]), device="cpu")
    assert again.weights_hash == checkpoints[3].weights_hash
    assert (nano.name, nano.revision, nano.weights_hash) == (
        "nano:mixed",
        str(steps[-1]),
        checkpoints[-1].weights_hash,
    )
    assert nano.model.dtype == torch.float32  # computed with in full, whatever they are stored in
    # some checkpoints choose at random between the two names, some are on the way, and the last
    # ones are right
    found = [accuracy(scope, "ioi") for scope in checkpoints]
    assert sum(0.4 <= accuracy <= 0.62 for accuracy in found) >= 2
    assert sum(0.62 < accuracy < 0.95 for accuracy in found) >= 2
    assert sum(accuracy >= 0.95 for accuracy in found) >= 3


@pytest.mark.parametrize("name", CLAIMED)
def test_the_last_checkpoint_does_what_it_claims_and_the_first_knows_nothing(checkpoints, name):
    """On prompts no training saw: all of ``ioi``'s have a new pair of names, and contexts of nine
    never come twice.
    """
    assert accuracy(checkpoints[-1], name) >= 0.95
    assert accuracy(checkpoints[0], name) < 0.1


def test_no_story_has_a_pair_of_test_names():
    held = set(pools(FIRST_NAMES, 0, "names", least=3)["test"])
    stories = Texts(nano_tokenizer(), CPU).ioi(4000, torch.Generator().manual_seed(0)).ids
    pairs = [
        [word for i in ids.tolist() if (word := vocabulary()[i]) in FIRST_NAMES][:2]
        for ids in stories
    ]
    assert not [pair for pair in pairs if set(pair) <= held]
    assert {name for pair in pairs for name in pair} == set(FIRST_NAMES)  # but each name is
    tested = {
        frozenset(e.piece(key.span) for key in e.keys) for (e, *_) in claimed_task("ioi").test(200)
    }
    assert all(pair <= held for pair in tested)


def test_a_run_that_dies_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    """Between two states, bit by bit to what an unbroken run gives."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def step(trainer, real=NanoTrainer._train_step):
        if trainer.step == 13:
            raise RuntimeError("killed")
        return real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(NanoTrainer, "_train_step", step)
        with pytest.raises(RuntimeError, match="killed"):
            NanoTrainer(broken, NanoRecipe(**LONG), 3, CPU).run()
    assert read_tensors(broken / STATE, KIND)[1]["step"] == 8
    for folder in (whole, broken):
        NanoTrainer(folder, NanoRecipe(**LONG), 3, CPU).run()
    one, other = (read_tensors(path / STATE, KIND) for path in (whole, broken))
    assert one[1] == other[1]  # curves too
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    for step in range(0, LONG["steps"] + 1, LONG["check_every"]):
        a, b = (load_file(path / str(step) / "model.safetensors") for path in (whole, broken))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_names_steps_and_folders_of_another_training_are_refused(tmp_path):
    with pytest.raises(BadInput, match="there is no nano model 'giga': there is mixed"):
        qk.Scope.load("nano:giga")
    with pytest.raises(BadInput, match=r"nano:mixed has no revision '7': there is 0, "):
        qk.Scope.load("nano:mixed@7")
    short = {**TINY, "steps": 2, "check_every": 1}
    NanoTrainer(tmp_path, NanoRecipe(**short), 0, CPU).run()
    for recipe, seed, says in (({}, 1, "another seed"), ({"rows": 30}, 0, "another recipe")):
        with pytest.raises(BadInput, match=says):
            NanoTrainer(tmp_path, NanoRecipe(**{**short, **recipe}), seed, CPU)
