"""The atlas: heads planted to do one thing are named so, names predict, and a killed run goes on."""

import pytest
import torch

import qkscope as qk
from qkscope.analyses.atlas import job_of
from qkscope.analyses.because import Look, Reason, relation
from qkscope.analyses.guesses import Guesses, Sight
from qkscope.heads import Head
from qkscope.tasks.sides import Passage


@pytest.fixture(scope="module")
def texts():
    return [unit[0].text for unit in qk.tasks.induction().draw("fit", "answer", 200)]


@pytest.fixture(scope="module")
def names(nano, texts):
    return qk.atlas(nano, texts, 6, test=6, length=32, progress=False)


def test_induction_heads_of_a_model_trained_on_copies_are_named(nano, names):
    kinds = {row["head"]: row["kind"] for row in names.table()}
    assert kinds["L1H1"] == "induction"
    assert {row["head"] for row in names.table()} == {str(head) for head in nano.heads()}
    for row in names.table():
        own = [job for job in names.tables["jobs"] if job["head"] == row["head"]]
        assert sum(job["looks"] for job in own) == row["looks"]
    score = next(row for row in names.tables["scores"] if row["head"] == "L1H1")
    assert score["name"] >= max(score["offset"], score["previous"])


def reason_of(kind, query, key, start=0, end=0, text="w"):
    row = relation(kind, text, [start, query], verdict="shown")
    word = {"position": start, "end": end, "cause": "yes", "after": 0.0}
    return Reason(Look(Head(0, 0), query, key), 0.9, 5, 5, [word], [row])


@pytest.mark.parametrize(
    ("reason", "job"),
    [
        (reason_of("same word", 9, 4, 3, 4), "induction"),
        (reason_of("same word", 9, 4, 4, 5), "duplicate token"),
        (reason_of("position", 9, 8), "previous token"),
        (reason_of("position", 9, 6), "position -3"),
        (reason_of("self", 9, 9), "self"),
        (reason_of("key word", 9, 4), "key word"),
        (reason_of("key word", 9, 4, text=","), "punctuation"),
    ],
)
def test_a_reason_is_a_job(reason, job):
    assert job_of(reason) == job


def planted(rule, passages=12, length=40):
    """Sights of one head that looks where a rule says."""
    made = []
    for i in range(passages):
        ids = torch.randint(5, 15, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        keys = torch.tensor([[rule(ids, q) for q in range(length)]])
        made.append(Sight(Passage(f"{i}", i, tuple(ids)), keys, torch.full((1, length), 0.9)))
    return made


RULES = {
    "induction": lambda ids, q: max([i + 1 for i in range(1, q) if ids[i] == ids[q]], default=q),
    "duplicate token": lambda ids, q: max([i for i in range(1, q) if ids[i] == ids[q]], default=q),
    "previous token": lambda ids, q: max(q - 1, 0),
    "key word": lambda ids, q: max([i for i in range(1, q + 1) if ids[i] == 7], default=q),
}


@pytest.mark.parametrize("kind", RULES)
def test_a_name_says_where_a_head_looks_that_keeps_its_rule(kind):
    sights = planted(RULES[kind])
    guesses = Guesses(0, {kind: 1.0}, sights[:6])
    hits = torch.cat([guesses.hits(sight) for sight in sights[6:]]).mean(0)
    assert float(hits[0]) > 0.9
    if kind != "previous token":
        assert float(hits[0]) > float(hits[1]) + 0.3, "better than the best offset"
        without, with_name = guesses.losses(sights[:6], sights[6:])
        assert float(with_name.mean()) < float(without.mean())
