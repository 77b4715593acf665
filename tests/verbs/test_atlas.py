"""The atlas: heads planted to do one thing are named so, names predict, and a killed run goes on."""

import pytest

import qkscope as qk
from planted_model import KINDS, named
from qkscope.findings.finding import Finding, Look, Reason
from qkscope.findings.head_jobs import job_of
from qkscope.heads import Head
from qkscope_papers.families import tiny_model


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


def test_texts_whose_tokens_the_model_does_not_have_are_refused(nano, texts):
    scope = qk.Scope.from_model(tiny_model("llama"), nano.tokenizer, check=False)
    with pytest.raises(qk.BadInput, match=r"but this model's ids are 0 to 99"):
        qk.atlas(scope, texts, 6, test=6, length=32, progress=False)


def reason_of(kind, query, key, start=0, end=0, text="w"):
    finding = Finding(kind, text, (start, query), verdict="shown")
    word = {"position": start, "end": end, "text": text, "cause": "yes", "after": 0.0}
    return Reason(Look(Head(0, 0), query, key), 0.9, 5, 5, [word], [finding])


@pytest.mark.parametrize(
    ("reason", "job"),
    [
        (reason_of("same word", 9, 4, 3, 4), "induction"),
        (reason_of("same word", 9, 4, 4, 5), "duplicate token"),
        (reason_of("position", 9, 8), "previous token"),
        (reason_of("position", 9, 6), "position -3"),
        (reason_of("self", 9, 9), "self"),
        (reason_of("kind", 9, 4, 4, 5), "key word"),
        (reason_of("few words", 9, 4, 4, 5, text=","), "punctuation"),
        (reason_of("this word", 9, 4, 9, 10), "query word"),
        (reason_of("few words", 9, 4, 2, 3), "few words"),
    ],
)
def test_a_reason_is_a_job(reason, job):
    assert job_of(reason) == job


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_head_is_named_and_its_name_predicts(kind):
    """Documents to score on are others; all 20 of five seeds by ``python tests/helpers/planted_model.py``."""
    name, made = named(kind, seed=1)
    score = made.tables["scores"][0]
    assert made.table()[0]["kind"] == name
    assert score["name"] > 0.8
    if kind != "position":
        assert score["name"] > score["offset"] + 0.3
    if kind not in (
        "position",
        "key word",
    ):  # the table of tokens, a baseline, says as much of these
        assert score["with_name"] < score["log_loss"]
