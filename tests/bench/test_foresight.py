"""Foresight: edits keep the look's tokens in place, and methods are scored as they should be."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def foresight():
    sys.path.insert(0, str(BENCH))
    spec = importlib.util.spec_from_file_location("foresight", BENCH / "foresight.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["foresight"] = module
    spec.loader.exec_module(module)
    return module


def test_a_method_that_knows_is_scored_one_and_log_loss_falls(foresight):
    broken = np.array([True, False, True, False])
    assert foresight.auc([0.1, 0.9, 0.2, 0.8], broken) == 1.0
    assert foresight.auc([0.5, 0.5, 0.5, 0.5], broken) == 0.5
    draws = np.random.default_rng(0)
    rows = [
        {"look": i // 10, "left": left, "finding": left} for i, left in enumerate(draws.random(400))
    ]
    knows = foresight.log_loss(rows, foresight.FEATURES["finding"])
    nothing = foresight.log_loss(rows, foresight.FEATURES["nothing"])
    assert knows < 0.3 < nothing == pytest.approx(np.log(2), abs=0.03)


def test_edits_keep_the_tokens_of_a_look(foresight, smollm2):
    if not foresight.WordNet.__init__.__defaults__[0].is_dir():
        pytest.skip("needs wordnet-base")
    writer = foresight.Writer(foresight.lexicon_of(smollm2), smollm2.tokenizer)
    text = foresight.DATA["sentences"][0]["text"]
    ids = torch.tensor(smollm2.tokenizer(text, add_special_tokens=False)["input_ids"])
    edits = writer.edits(ids, text, query=18, key=2)
    kinds = {edit.kind for edit in edits}
    assert {"class", "kind", "other class", "any", "two words", "clause", "paraphrase"} <= kinds
    for edit in edits:
        for before, after in ((18, edit.query), (2, edit.key)):
            if before not in edit.touched:
                assert edit.ids[after] == ids[before], edit.kind
        assert len(edit.ids) != len(ids) or (edit.ids != ids).any()
