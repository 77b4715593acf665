"""Trace on models whose writers are known, because we planted them: it names them, and nobody else."""

import pytest

import qkscope as qk
from planted_model import READER, planted
from qkscope.findings.verdicts import CANCELS
from qkscope.heads import Head

SEEDS = range(3)


def traced(scope, seed):
    task = qk.tasks.induction(6, seed=seed)
    return qk.trace(scope, task, READER, 24, whole=False, draws=5, seed=seed, progress=False)


def shares(found, side):
    return {row["writer"]: row["share"] for row in found.tables["writers"] if row["side"] == side}


def edge(found, **wanted):
    wanted = {"replaced": "mean", "norms": "held", "by": "share", **wanted}
    (row,) = [
        row
        for row in found.tables["edges"]
        if all(row[name] == value for name, value in wanted.items())
    ]
    return row


@pytest.mark.parametrize("seed", SEEDS)
def test_a_planted_composition_is_traced_to_its_writer_alone(seed):
    writer = Head(seed % 2, seed % 3)
    scope = planted({writer: 0.3}, seed)
    found = traced(scope, seed)
    key, query = shares(found, "key"), shares(found, "query")
    assert next(iter(key)) == str(writer)
    assert 0.9 < key.pop(str(writer)) < 1.1
    assert max(map(abs, key.values())) < 0.1
    assert next(iter(query)) == "embedding"
    assert query["embedding"] > 0.75
    before = found.tables["check"][0]
    assert before["sum_error"] < 1e-5
    assert before["accuracy"] > 0.9
    assert before["cancels"] < CANCELS
    assert "cancel" not in found.answer
    for replaced, norms in (("mean", "held"), ("resample", "held"), ("mean", "live")):
        cut = edge(found, side="key", kind="cut", k=1, replaced=replaced, norms=norms)
        kept = edge(found, side="both", kind="keep", k=1, replaced=replaced, norms=norms)
        assert cut["accuracy"] < 0.5 < 0.85 < kept["accuracy"]  # one of six is chance
        assert abs(cut["logit_kept"]) < 0.2
    beside = edge(found, side="key", kind="cut", k=1, by="random")
    assert abs(beside["accuracy"] - before["accuracy"]) < 0.05
    for by in (
        "share",
        "signed",
        "variance",
        "patching",
    ):  # every way to choose finds the only writer
        assert edge(found, side="key", kind="cut", k=1, by=by)["accuracy"] < 0.5, by


@pytest.mark.parametrize("seed", SEEDS)
def test_two_writers_that_cancel_are_said_to(seed):
    gives, takes = Head(0, seed % 3), Head(0, (seed + 1) % 3)
    found = traced(planted({gives: 1.0, takes: -0.7}, seed), seed)
    key = shares(found, "key")
    assert list(key)[:2] == [str(gives), str(takes)]
    assert key[str(gives)] > 2
    assert key[str(takes)] < -1
    assert found.tables["check"][0]["cancels"] > CANCELS
    assert "shares of its key cancel" in found.answer
    assert "Shares of its query cancel" not in found.answer
    one, other = (edge(found, side="key", kind="cut", k=1, by=by) for by in ("share", "signed"))
    assert one == other | {"by": "share"}  # the one that gives is first by size and by sign
    assert one["logit_kept"] < -1
    assert one["accuracy"] < 0.2
    both = edge(found, side="key", kind="cut", k=2)
    assert abs(both["logit_kept"]) < 0.2
    alone = edge(found, side="key", kind="keep", k=1)
    assert alone["logit_kept"] > 2
    assert alone["overshoots"]


def test_the_writer_is_the_first_of_all_heads_and_its_graph_leads_to_the_token_before():
    writer = Head(0, 1)
    scope = planted({writer: 0.3}, 0)
    heads = qk.trace(scope, qk.tasks.induction(6), "all", 24, progress=False).tables["heads"]
    assert {row["head"]: row["key_writer"] for row in heads}[str(READER)] == str(writer)
    found = traced(scope, 0)
    assert all(weight.grad is None for weight in scope.model.parameters())
    read = [
        row
        for row in found.tables["sources"]
        if row["side"] == "key" and row["writer"] == str(writer)
    ]
    assert read[0]["offset"] == -1
    assert read[0]["share"] > 0.8
