"""Nano models: the shipped ones do what they claim, and training them is exact, resumable and on the tasks' texts."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file

import qkscope as qk
from qkscope.capture.load import locate, nano_steps
from qkscope.errors import BadInput
from qkscope.runs.store import read_manifest, read_tensors
from qkscope.tasks.task import pools
from qkscope.tasks.words import BOXES, CATEGORIES, FIVE, NAMES, OBJECTS, PLACES, THINGS
from qkscope_papers.nano.score import CLAIMED, Exam, claimed_task
from qkscope_papers.nano.text import PAD, TextRows, Texts, nano_tokenizer, vocabulary, word_ids
from qkscope_papers.nano.train import STATE, NanoRecipe, NanoTrainer

TINY = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "mlp": 32, "rows": 20, "prompts": 4}
LONG = {**TINY, "steps": 40, "check_every": 8, "solved": 0.0}
CPU = torch.device("cpu")
KIND = "nano training"


@pytest.fixture(scope="module")
def last() -> qk.Scope:
    return qk.Scope.load("nano:mixed", device="cpu")


def rows_of(name: str, n: int = 200, seed: int = 0) -> TextRows:
    draw = torch.Generator().manual_seed(seed)
    texts, (kind, _, form) = Texts(nano_tokenizer(), CPU), name.partition("/")
    if kind == "binding":
        return texts.binding(n, form, 9, draw)
    if kind == "filter":
        return texts.filter(n, form, draw)
    return texts.ioi(n, draw) if kind == "ioi" else texts.repeats(n, 8, True, draw)


def tokens(ids: torch.Tensor) -> list[str]:
    return [vocabulary()[i] for i in ids.tolist() if i != word_ids()[PAD]]


# ---------------------------------------------------------------------- the shipped models


def accuracy(scope: qk.Scope, name: str, n: int = 128) -> float:
    return Exam.of(claimed_task(name), scope.tokenizer, n, CPU).score(scope.model)["accuracy"]


@pytest.fixture(scope="module")
def checkpoints() -> list[qk.Scope]:
    return [qk.Scope.load(f"nano:mixed@{step}", device="cpu", check=False) for step in nano_steps("mixed")]


def test_shipped_checkpoints_are_small_different_and_load_by_name(last, checkpoints):
    steps = nano_steps("mixed")
    assert steps == sorted(steps)
    assert (steps[0], len(steps) >= 12) == (0, True)
    folders = [locate(f"nano:mixed@{step}").path for step in steps]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= 20_000_000
    assert len({scope.weights_hash for scope in checkpoints}) == len(steps)
    assert [scope.revision for scope in checkpoints] == [str(step) for step in steps]
    again = qk.Scope.load("nano:mixed", revision=str(steps[3]), device="cpu")
    assert again.weights_hash == checkpoints[3].weights_hash
    assert (last.name, last.revision, last.weights_hash) == ("nano:mixed", str(steps[-1]), checkpoints[-1].weights_hash)
    assert last.model.dtype == torch.float32  # computed with in full, whatever they are stored in


@pytest.mark.parametrize("name", CLAIMED)
def test_the_last_checkpoint_does_what_it_claims_and_the_first_knows_nothing(checkpoints, name):
    """On prompts no training saw: all of ``ioi``'s have a new pair of names, and contexts of nine never come twice."""
    assert accuracy(checkpoints[-1], name) >= 0.95
    assert accuracy(checkpoints[0], name) < 0.1


def test_the_indirect_object_is_learned_within_the_shipped_steps(checkpoints):
    """Some checkpoints choose at random between the two names, some are on the way, and the last ones are right."""
    found = [accuracy(scope, "ioi") for scope in checkpoints]
    assert sum(0.4 <= accuracy <= 0.62 for accuracy in found) >= 2
    assert sum(0.62 < accuracy < 0.95 for accuracy in found) >= 2
    assert sum(accuracy >= 0.95 for accuracy in found) >= 3


# ---------------------------------------------------------------------- tokenizer and texts


@pytest.mark.parametrize("name", CLAIMED)
def test_prompts_survive_the_tokenizer(last, name):
    for example, *_ in claimed_task(name).test(50):
        ids = last.tokenizer(example.text)["input_ids"]
        assert last.tokenizer.unk_token_id not in ids
        assert last.tokenizer.decode(ids, skip_special_tokens=True) == example.text
        assert ids == nano_tokenizer()(example.text)["input_ids"]


@pytest.mark.parametrize("name", CLAIMED)
def test_training_texts_are_the_tasks_prompts(name):
    """The same words and marks in the same places, when words of a list are shown as the list."""

    def shape(found: list[str]) -> tuple[str, ...]:
        lists = {"object": OBJECTS, "box": BOXES, "name": NAMES, "place": PLACES, "category": FIVE}
        if name == "induction":
            return tuple("word" if i > 2 else token for i, token in enumerate(found))
        if name == "ioi":
            lists = {"thing": THINGS, **lists}
        if name.startswith("filter"):
            lists = {"category": FIVE, "item": [word for own in FIVE for word in CATEGORIES[own]]}
        return tuple(next((kind for kind, words in lists.items() if token in words), token) for token in found)

    prompts = {shape(tokens(torch.tensor(nano_tokenizer()(unit[0].text)["input_ids"]))) for unit in
               claimed_task(name).test(200)}  # fmt: skip
    seen = set()
    rows = rows_of(name)
    for ids, asked in zip(rows.ids, rows.asked, strict=True):
        text = tokens(ids)
        again = nano_tokenizer()(nano_tokenizer().decode(ids[ids != word_ids()[PAD]], skip_special_tokens=True))
        assert again["input_ids"] == ids[: len(text)].tolist()
        first = int(asked.nonzero()[0])
        if name == "induction":
            assert text[3:11] == text[11:19]
            assert asked.nonzero()[:, 0].tolist() == list(range(12, 19))
            seen |= {shape(text[:stop]) for stop in range(12, 19)}
        else:
            seen.add(shape(text[:first]))
    assert prompts <= seen


def test_answers_are_right():
    for name in ("binding/list", "binding/sentence", "binding/question"):
        for ids, asked in zip(*rows_of(name), strict=True):
            text = tokens(ids)
            boxes = [token for token in text[: int(asked.nonzero()[0])] if token in BOXES]
            words = [token for token in text if token in OBJECTS]
            home = dict(zip(words[:9], boxes, strict=True))
            said = [word for i, word in enumerate(words[9:]) if name != "binding/question" or i % 2]
            assert [text[i] for i in asked.nonzero()[:, 0]] == [home[word] for word in said]
            assert len(set(said)) == len(said)
            if name == "binding/question":  # which names the word in the question, and again in the answer
                assert words[9::2] == words[10::2]
    for ids, asked in zip(*rows_of("ioi", 2000), strict=True):
        names = [token for token in tokens(ids) if token in NAMES]
        assert names[3] == next(name for name in names[:2] if name != names[2])
        assert names[0] != names[1]
        assert asked.sum() == 1
    for ids, _ in zip(*rows_of("filter/list"), strict=True):
        text = tokens(ids)
        wanted = next(token for token in reversed(text) if token in FIVE)
        assert text[-1] in text[:-1]
        assert text[-1] in CATEGORIES[wanted]


def test_no_story_has_a_pair_of_test_names():
    held = set(pools(NAMES, 0, "names", least=3)["test"])
    pairs = [[token for token in tokens(ids) if token in NAMES][:2] for ids in rows_of("ioi", 4000).ids]
    assert not [pair for pair in pairs if set(pair) <= held]
    assert {name for pair in pairs for name in pair} == set(NAMES)  # but each name is
    tested = {frozenset(e.piece(key.span) for key in e.keys) for (e, *_) in claimed_task("ioi").test(200)}
    assert all(pair <= held for pair in tested)


# ---------------------------------------------------------------------- training


def test_training_lowers_the_loss_and_its_folders_are_models(tmp_path):
    recipe = NanoRecipe(**TINY, steps=60, check_every=30, lr=1e-2, warmup=5)
    curve = NanoTrainer(tmp_path, recipe, 0, CPU).run()
    losses = [row["loss"] for row in curve if row["task"] == "ioi"]
    assert losses[0] is None
    assert losses[2] < losses[1] < math.log(len(vocabulary()))
    assert losses[2] < math.log(len(vocabulary())) - 1
    scope = qk.Scope.load(tmp_path / "60", device="cpu")
    assert scope.weights_hash == qk.Scope.load(tmp_path, revision="60", device="cpu").weights_hash
    assert scope.weights_hash != qk.Scope.load(tmp_path / "30", device="cpu").weights_hash
    exam = Exam.of(claimed_task("ioi"), scope.tokenizer, 4, CPU)
    reported = [row for row in curve if row["task"] == "ioi"][-1]
    assert {**reported, **exam.score(scope.model)} == reported  # accuracies are those of the stored weights


KILLED = textwrap.dedent(
    f"""
    import sys, torch
    from pathlib import Path
    torch.set_num_threads(1)
    from qkscope_papers.nano.train import NanoRecipe, NanoTrainer
    NanoTrainer(Path(sys.argv[1]), NanoRecipe(**{LONG}), 3, torch.device("cpu")).run()
    """
)


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path):
    """Kill -9 in the middle of training, start again, and get bit by bit what an unbroken run gives."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(broken)])
    deadline = time.monotonic() + 300
    while not (broken / STATE).exists() or read_manifest(broken / STATE)["step"] < 8:  # tensors may be replaced
        assert process.poll() is None, "the run ended before it could be killed: make it longer"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 8 <= read_tensors(broken / STATE, KIND)[1]["step"] < LONG["steps"]
    for folder in (whole, broken):
        NanoTrainer(folder, NanoRecipe(**LONG), 3, CPU).run()
    one, other = (read_tensors(path / STATE, KIND) for path in (whole, broken))
    assert one[1] == other[1]  # curves too
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    for step in range(0, LONG["steps"] + 1, LONG["check_every"]):
        a, b = (load_file(path / str(step) / "model.safetensors") for path in (whole, broken))
        assert all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nano:giga", {}, "there is no nano model 'giga': there is mixed"),
        ("nano:mixed@7", {}, r"nano:mixed has no revision '7': there is 0, "),
        ("nano:mixed@0", {"revision": "100"}, "give one of them"),
    ],
)
def test_names_and_steps_that_are_not_there(name, options, says):
    with pytest.raises(BadInput, match=says):
        qk.Scope.load(name, **options)


def test_a_word_without_a_token_is_named(last):
    with pytest.raises(BadInput, match="none for 'zebras'"):
        last.encode([qk.Example(text="hat: A\nzebras: B\nhat:")])


@pytest.mark.parametrize(
    ("recipe", "seed", "says"),
    [({}, 1, "another seed"), ({"rows": 30}, 0, "another recipe"), ({"steps": 1}, 0, "more than the 1 asked for")],
)
def test_a_folder_of_another_training_is_refused(tmp_path, recipe, seed, says):
    short = {**TINY, "steps": 2, "check_every": 1}
    NanoTrainer(tmp_path, NanoRecipe(**short), 0, CPU).run()
    with pytest.raises(BadInput, match=says):
        NanoTrainer(tmp_path, NanoRecipe(**{**short, **recipe}), seed, CPU)


def test_a_missing_first_token_is_said_of_prompts_and_not_of_the_self_check(own_cache, caplog):
    scope = qk.Scope.load("nano:mixed")
    assert "first token" not in caplog.text
    scope.encode([qk.Example(ids=[5, 6, 7])])
    assert "expects ['<s>'] as the first token" in caplog.text
