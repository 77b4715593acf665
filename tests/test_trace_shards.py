"""Shards of a trace add up to what one process finds, and nothing else is added to them."""

from __future__ import annotations

import json
import math
import sys

import pytest

import qkscope as qk
from qkscope import BadInput, cli
from qkscope.analyses.trace.result import merge_traces

BASE = ["induction", "--model", "nano:mixed", "--heads", "L1H0,L2H1", "--n", "24", "--batch-size", "4"]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["qkscope", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def close(one, other):
    """Equal to rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-8)
    return one == other


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One process, and three shards of the same job."""
    place = tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, "trace", *BASE, "--out", place / "whole") == 0
        for i in range(3):
            assert run(patch, "trace", *BASE, "--out", place / f"s{i}", "--shard", f"{i}/3") == 0
    return place


def test_merged_shards_are_what_one_process_finds(folders, monkeypatch, capsys, tmp_path):
    shards = [folders / f"s{i}" for i in (2, 0, 1)]  # in any order
    assert run(monkeypatch, "merge", *shards, "--out", tmp_path / "merged", "--json") == 0
    merged, whole = (
        json.loads((place / "results.json").read_text()) for place in (tmp_path / "merged", folders / "whole")
    )
    assert json.loads(capsys.readouterr().out)["tables"] == merged["tables"]
    assert {"writers", "pairs", "edges", "check", "whole", "sources", "graph"} <= merged["tables"].keys()
    for name, rows in whole["tables"].items():
        assert close(merged["tables"][name], rows), name
    assert merged["answer"] == whole["answer"]
    assert sum(row["n"] for row in whole["tables"]["check"]) == 48
    assert (tmp_path / "merged" / "report.html").is_file()
    assert run(monkeypatch, "merge", *shards, "--out", tmp_path / "merged") == 0  # into a folder of its own, again
    assert "qkscope view" in capsys.readouterr().out


def test_shards_of_different_splits_are_not_merged(folders, monkeypatch, capsys, tmp_path):
    """Batches would be in it twice, or missing."""
    assert run(monkeypatch, "trace", *BASE, "--out", tmp_path / "half", "--shard", "0/2") == 0
    capsys.readouterr()
    assert run(monkeypatch, "merge", tmp_path / "half", folders / "s1", "--out", tmp_path / "merged") == 2
    assert "of a split into 2" in (said := capsys.readouterr().err)
    assert "of one into 3: merge the shards of one split." in said
    assert not (tmp_path / "merged").exists()


def test_a_shard_is_a_part_of_it(folders):
    rows = json.loads((folders / "s1" / "results.json").read_text())["tables"]
    assert {row["n"] for row in rows["check"]} == {8}
    assert "whole" not in rows  # the first shard's


def test_the_same_command_again_writes_the_same(folders, monkeypatch):
    before = (folders / "s2" / "results.json").read_text()
    assert run(monkeypatch, "trace", *BASE, "--out", folders / "s2", "--shard", "2/3") == 0
    first, again = json.loads(before), json.loads((folders / "s2" / "results.json").read_text())
    assert close(first["tables"], again["tables"])


def test_the_answer_to_why_is_written_again_too(monkeypatch, tmp_path):
    for _ in range(2):
        assert run(monkeypatch, "why", "hat : O jam : Z jam :", "--head", "L1H0", "--model", "nano:mixed",
                   "--out", tmp_path / "why") == 0  # fmt: skip


def test_a_missing_or_doubled_shard_is_refused(folders, monkeypatch, capsys, tmp_path):
    for shards, says in (
        ((0, 1), "shard 2/3 is missing: run it"),
        ((0, 1, 1), "are the same shard 1/3: name each once"),
        ((0, 0, 1, 2), "are the same shard 0/3: name each once"),
    ):
        assert run(monkeypatch, "merge", *(folders / f"s{i}" for i in shards), "--out", tmp_path / "merged") == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert says in said.err
        assert not (tmp_path / "merged").exists()


OTHERS = [
    ("heads", ["--heads", "L1H0"]),
    ("trace_seed", ["--seed", "1"]),
    ("n", ["--n", "25"]),
    ("batch_size", ["--batch-size", "5"]),
    ("weights", ["--model", "nano:mixed@2000"]),
    ("asked", ["--size", "6"]),
]


@pytest.mark.parametrize(("differs", "options"), OTHERS, ids=[name for name, _ in OTHERS])
def test_shards_of_other_jobs_are_refused(folders, monkeypatch, tmp_path, differs, options):
    assert run(monkeypatch, "trace", *BASE, *options, "--no-whole", "--out", tmp_path / "other", "--shard", "2/3") == 0
    with pytest.raises(BadInput, match=f"is of another job .*{differs}.* differ"):
        merge_traces([folders / "s0", folders / "s1", tmp_path / "other"])


def test_only_shards_of_traces_of_tasks_are_merged(folders, monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "trace", "--prompt", "hat : O jam : Z jam :", "--heads", "L1H0", "--model", "nano:mixed",
               "--out", tmp_path / "prompt") == 0  # fmt: skip
    with pytest.raises(BadInput, match="no shard of a trace of a task"):
        merge_traces([folders / "s0", tmp_path / "prompt"])
    with pytest.raises(BadInput, match="no shard of a trace of a task"):
        merge_traces([tmp_path / "prompt"])
    with pytest.raises(BadInput):
        merge_traces([folders / "s0", tmp_path / "nowhere"])
    with pytest.raises(BadInput):
        merge_traces([])


def test_shards_are_for_tasks_with_named_heads_and_for_enough_batches(scope):
    task = qk.tasks.binding(4)
    with pytest.raises(BadInput, match="heads that are named"):
        qk.trace(scope, task, "all", 8, shard=(0, 2))
    with pytest.raises(BadInput, match="heads that are named"):
        qk.trace(scope, "hat : A jam : B", "L1H0", shard=(0, 2))
    with pytest.raises(BadInput, match="from 0 to n - 1"):
        qk.trace(scope, task, "L1H0", 8, shard=(2, 2))
    with pytest.raises(BadInput, match="cannot be shared among 9"):
        qk.trace(scope, task, "L1H0", 8, batch_size=4, shard=(0, 9), progress=False)
