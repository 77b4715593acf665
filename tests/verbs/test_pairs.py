"""Pairs of prompts: what differs, a span at a time; and mean logit differences over a file of them."""

import json

import pytest
import torch

import qkscope as qk
from qkscope import BadInput
from qkscope.texts.pairs import read_pairs

CLEAN = "hat: O jam: Z cat: B jam:"
CORRUPTED = "hat: O cat: Z jam: B jam:"


def test_each_difference_of_a_pair_is_put_into_the_clean_prompt(nano):
    answer = qk.why(nano, CLEAN, "L2H3", corrupted=CORRUPTED)
    (asked,) = answer.tables["asked"]
    rows = answer.tables["pair"]
    assert [(row["text"], row["corrupted"]) for row in rows] == [
        ("jam", "cat"), ("cat", "jam"), ("all", ""),
    ]  # fmt: skip
    given = (asked["answer"], asked["rival"])
    prompts = ["hat: O cat: Z cat: B jam:", "hat: O jam: Z jam: B jam:", CORRUPTED]
    key = answer.tables["output"][0]["key"]
    for row, prompt in zip(rows, prompts, strict=True):
        assert row["lead"] == pytest.approx(nano.logit_difference(prompt, *given), abs=1e-4)
        attention = nano.attention(prompt, "L2H3", query=-1)[key]
        assert row["attention"] == pytest.approx(float(attention), abs=1e-5)
    assert "In the corrupted prompt: with 'cat' for 'jam' L2H3's attention goes" in answer.answer
    assert "attention" not in qk.why(nano, CLEAN, corrupted=CORRUPTED).tables["pair"][0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"corrupted": "hat: O jam:"}, "the clean prompt has 12 tokens and the corrupted one 6"),
        ({"corrupted": CLEAN}, "the two prompts of a pair are the same"),
        ({"corrupted": CORRUPTED, "circuit": True}, "leave the corrupted one out"),
    ],
)
def test_a_pair_that_cannot_be_asked_is_refused_in_words(nano, given, says):
    with pytest.raises(BadInput, match=says):
        qk.why(nano, CLEAN, **given)
    with pytest.raises(BadInput, match="each line names its own answer"):
        qk.why(nano, [CLEAN, CLEAN], corrupted=CORRUPTED)


def test_a_file_of_pairs_gives_mean_logit_differences_with_a_rival_a_line(nano, tmp_path, qkscope):
    lines = [
        {"clean": CLEAN, "corrupted": CORRUPTED, "answer": "Z", "rival": "O"},
        {"clean_prompt": CLEAN, "corrupted_prompt": CORRUPTED, "correct": "Z", "incorrect": "B"},
        {"prompt": "hat: O jam: Z hat:", "answer": "O", "rival": "Z"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    answer = qk.why(nano, str(path))
    rows = answer.tables["pairs"]
    assert [(row["answer"], row["rival"]) for row in rows] == [("Z", "O"), ("Z", "B"), ("O", "Z")]
    leads = [
        nano.logit_difference(pair.clean, pair.answer, pair.rival) for pair in read_pairs(path)
    ]
    assert [row["lead"] for row in rows] == pytest.approx(leads, abs=1e-4)
    mean = {row["of"]: row for row in answer.tables["mean"]}
    assert mean["clean"]["lead"] == pytest.approx(float(torch.tensor(leads).mean()), abs=1e-4)
    assert mean["clean"]["low"] <= mean["clean"]["lead"] <= mean["clean"]["high"]
    assert (mean["clean"]["n"], mean["corrupted"]["n"]) == (3, 2)
    code, out, said = qkscope("why", path, "--model", "nano:mixed")
    assert not code, said
    assert "Over 3 prompts the answer leads its rival by" in " ".join(out.split())
    with pytest.raises(BadInput, match="names pairs"):
        qk.why(nano, str(path), heads="L1H0")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"corrupted": "hat"}', "line 1: there is no prompt"),
        ('{"clean": 3, "rival": " Z"}', "line 1, clean: should be a text"),
        ('{"clean": "hat: O", "corrupted": "hat: O"}', "line 1: the two prompts of a pair"),
        ('{"rival": "Z", "prompt": "hat: O"}\nno', "line 2: a line is one JSON object"),
    ],
)
def test_a_line_that_is_no_pair_is_named(nano, tmp_path, line, says):
    path = tmp_path / "pairs.jsonl"
    path.write_text(line)
    with pytest.raises(BadInput, match=says):
        qk.why(nano, str(path))
