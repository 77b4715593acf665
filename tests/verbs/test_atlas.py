"""The atlas: heads planted to do one thing get its rule, which predicts other text and can run."""

import json

import pytest
import torch

import qkscope as qk
from planted_model import KINDS, named
from qkscope.findings.rules import AfterCopy, First, Offset, Rule
from qkscope.findings.shipped_atlas import Atlas, departure, write_shipped
from qkscope.heads import Head
from qkscope.texts.holdout import Passage
from qkscope.verbs.atlas.costs import NextTokens
from qkscope.verbs.atlas.head_patterns import Patterns, row_overlap
from qkscope.verbs.atlas.rule_fit import RuleFit, mixture_weights
from qkscope.verbs.atlas.word_classes import WordClasses
from qkscope_papers.families import tiny_model


@pytest.fixture(scope="module")
def texts():
    return [unit[0].text for unit in qk.tasks.induction().draw("fit", "answer", 200)]


@pytest.fixture(scope="module")
def made(nano, texts):
    return qk.atlas(nano, texts, 6, test=6, length=32, progress=False)


def test_induction_heads_of_a_model_trained_on_copies_have_its_rule(nano, made):
    rows = {row["head"]: row for row in made.table()}
    assert set(rows) == {str(head) for head in nano.heads()}
    assert rows["L1H1"]["kind"] == "induction"
    assert rows["L1H1"]["iou"] > rows["L1H1"]["mean_row_iou"] + 0.1
    beside = next(row for row in made.tables["baselines"] if row["head"] == "L1H1")
    assert beside["low"] > 0.1
    assert rows["L1H1"]["iou"] > beside["best_offset"]
    assert beside["log_loss"] < beside["mean_row_log_loss"]


def test_rules_are_read_back_and_run(nano, made, tmp_path):
    back = qk.load_atlas(made.write(tmp_path / "atlas"))
    assert isinstance(back, Atlas)
    for head in ("L0H3", "L1H1"):
        assert back[head].rule == made[head].rule
        assert str(made[head].rule) == next(r["rule"] for r in made.table() if r["head"] == head)
    prompt = "hat: O jam: Z cat: B jam:"
    with nano.replace_head("L1H1", back["L1H1"].rule):
        row = nano.attention(prompt, "L1H1", query=-1)
    ids = nano.encode([prompt]).inputs["input_ids"][0]
    torch.testing.assert_close(row, back["L1H1"].rule.attention(ids)[-1], atol=1e-5, rtol=1e-4)
    with pytest.raises(qk.BadInput, match="L9H9 is not in this atlas of 12 heads"):
        back["L9H9"]


def test_a_file_that_ships_gives_the_same_rules(made, tmp_path, monkeypatch):
    write_shipped(made, tmp_path / "atlas-toy.json", made.provenance | {"answer": made.answer})
    monkeypatch.setattr("qkscope.findings.shipped_atlas._FOLDER", tmp_path)
    toy = qk.load_atlas("toy")
    assert toy["L1H1"].rule == made["L1H1"].rule
    assert toy["L1H1"].iou == pytest.approx(made["L1H1"].iou, abs=1e-4)
    with pytest.raises(qk.BadInput, match="no atlas of 'other' ships with qkscope: take toy"):
        qk.load_atlas("other")


def test_the_atlas_that_ships_names_the_heads_that_are_known(smollm2):
    atlas = qk.load_atlas("smollm2-135m")
    kinds = {name: atlas[name].kind for name in ("L17H5", "L14H3", "L16H0")}
    assert kinds == {"L17H5": "induction", "L14H3": "duplicate token", "L16H0": "previous token"}
    assert len(atlas.rules()) == len(smollm2.heads())
    says = atlas["L16H0"].rule.attention(smollm2.encode(["a b c d e f"]).inputs["input_ids"][0])
    assert int(says[-1].argmax()) == len(says) - 2


def test_weights_of_a_known_mixture_are_found():
    draws = torch.Generator().manual_seed(0)
    rows = torch.rand(3, 400, generator=draws)
    rows = rows / rows.view(3, 40, 10).sum(-1).repeat_interleave(10, 1)
    given = torch.tensor([0.6, 0.3, 0.1]) @ rows
    weights = torch.ones(3) / 3
    for _ in range(20):
        weights = mixture_weights(rows, given, torch.ones(3), weights)
    torch.testing.assert_close(weights, torch.tensor([0.6, 0.3, 0.1]), atol=0.01, rtol=0)


def test_a_head_that_follows_a_rule_gets_this_rule(nano):
    """Its pattern is the rule's own; the rule that is fitted gives it on other text."""
    draws = torch.Generator().manual_seed(0)
    rule = Rule([(0.6, AfterCopy()), (0.3, Offset(1)), (0.1, First())])
    ids = torch.randint(5, 25, (24, 40), generator=draws)
    passages = [Passage(str(i), i, tuple(row)) for i, row in enumerate(ids.tolist())]
    patterns = Patterns(passages, ids, rule.attention(ids)[:, None])
    fit = patterns.some(0, 2)
    found = RuleFit(fit, WordClasses.of(nano, fit.ids.flatten())).rule(0)
    test = patterns.some(1, 2)
    same = row_overlap(test.rows(found.attention(test.ids)), test.of_head(0))
    assert found.name == "induction"
    assert float(same.mean()) > 0.97


def test_costs_of_one_head_are_those_of_whole_runs(nano, texts):
    passages = [
        Passage(str(i), i, tuple(nano.tokenizer(text)["input_ids"]))
        for i, text in enumerate(texts[:3])
    ]
    tokens = NextTokens(nano, passages)
    rules = {Head(1, 1): Rule([(1.0, First())]), Head(2, 0): Rule([(1.0, Offset(1))])}
    costs = tokens.costs(rules)
    for head, rule in rules.items():
        rise = torch.tensor(tokens.log_loss({head: rule}) - tokens.log_loss()).expm1()
        assert costs[head] == pytest.approx(float(rise), abs=1e-4)


def test_a_look_beside_its_rule_is_said_where_they_differ():
    rule = Rule([(0.9, AfterCopy()), (0.1, First())])
    ids = torch.tensor([9, 5, 6, 7, 5])
    there = torch.tensor([0.1, 0.0, 0.9, 0.0, 0.0])
    assert departure(rule, ids, there, 2) == ""
    elsewhere = torch.tensor([0.1, 0.0, 0.1, 0.8, 0.0])
    assert departure(rule, ids, elsewhere, 3) == (
        "Atlas: on plain text its rule (induction) gives this key 0%, less than the 80% here."
    )


def test_texts_whose_tokens_the_model_does_not_have_are_refused(nano, texts):
    scope = qk.Scope.from_model(tiny_model("llama"), nano.tokenizer, check=False)
    with pytest.raises(qk.BadInput, match=r"but this model's ids are 0 to 99"):
        qk.atlas(scope, texts, 6, test=6, length=32, progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_head_is_named_and_its_rule_predicts(kind):
    """Documents to test on are others; all 20 of five seeds by ``python tests/helpers/planted_model.py``."""
    name, made = named(kind, seed=1)
    row = made.table()[0]
    assert row["kind"] == name
    if kind == "position":
        assert row["iou"] > 0.95
    else:
        assert row["iou"] > row["mean_row_iou"] + 0.15
    assert json.loads(json.dumps(made[row["head"]].rule.to_json()))["parts"]
