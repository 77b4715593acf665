"""Long runs in pieces: what was done before a run died is taken up, and gives the numbers of a run left alone."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

import qkscope as qk
from kills import survive, words_file
from qkscope.analyses.downstream import swap_downstream
from qkscope.capture.scope import Scope
from qkscope.runs import job as job_module
from qkscope.runs.job import Job
from qkscope.runs.store import write_tensors


@pytest.fixture(scope="module")
def scope() -> Scope:
    return Scope.load("nano:mixed", device="cpu")


@pytest.fixture(autouse=True)
def _save_each_batch(monkeypatch):
    monkeypatch.setattr(job_module, "_EVERY", 0)


def die_after(monkeypatch, writes: int) -> None:
    """Stop the process, so to speak, when it has written so many pieces and is about to write another."""
    left = [writes]

    def dying(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise SystemExit("killed")
        write_tensors(*arguments)

    monkeypatch.setattr(job_module, "write_tensors", dying)


def alike(one, other) -> bool:
    """Whether two results are the same, all but the seconds and what a library rounds otherwise a second time.

    Two runs left alone in one process differ in the last digits too; in processes of their own, as tests/kills.py runs
    them, results are the same to the bit.
    """
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(name == "seconds" or alike(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-8)
    return one == other


def stopped_and_whole(run, monkeypatch, folder, writes=(1, 3, 4)):
    """The result after stops, and that of a run left alone."""
    for count in writes:
        with monkeypatch.context() as patch:
            die_after(patch, count)
            with pytest.raises(SystemExit):
                run(Job(folder))
    pieces = sorted(path.stat().st_mtime_ns for path in folder.glob(".work/*/*.safetensors"))
    resumed = run(Job(folder))
    assert (
        sorted(path.stat().st_mtime_ns for path in folder.glob(".work/*/*.safetensors"))[: len(pieces) - 1]
        == (pieces[: len(pieces) - 1])
    ), "finished pieces were not made again"
    return resumed, run(None)


def test_discover_on_a_task_goes_on_where_it_died(scope, monkeypatch, tmp_path):
    def run(job):
        return qk.discover(
            scope, qk.tasks.induction(), "L1H1", n=160, test=40, sizes=(1,), draws=4, progress=False, job=job
        )

    resumed, whole = stopped_and_whole(run, monkeypatch, tmp_path)
    assert alike(resumed.to_json(), whole.to_json())
    assert resumed.arrays.keys() == whole.arrays.keys()


def test_atlas_goes_on_where_it_died(scope, monkeypatch, tmp_path):
    texts = [unit[0].text for unit in qk.tasks.induction().draw("fit", "answer", 400)]

    def run(job):
        return qk.atlas(scope, texts, 160, test=40, batch_size=8, progress=False, job=job)

    resumed, whole = stopped_and_whole(run, monkeypatch, tmp_path)
    assert alike(resumed.to_json(), whole.to_json())


def test_swaps_go_on_where_they_died_and_say_their_draws(scope, monkeypatch, tmp_path):
    task = qk.tasks.binding(5)
    fit = qk.decompose(scope, task, "L1H0", n=48, contrasts=["lexical"], progress=False)
    units = task.test(24)

    def swap(job):
        return qk.swap(scope, units, fit, batch_size=8, draws=4, progress=False, job=job)

    resumed, whole = stopped_and_whole(swap, monkeypatch, tmp_path / "swap", writes=(2,))
    assert alike(resumed.to_json(), whole.to_json())

    def downstream(job):
        return swap_downstream(scope, units, fit, batch_size=8, progress=False, job=job)

    resumed, whole = stopped_and_whole(downstream, monkeypatch, tmp_path / "answers", writes=(2,))
    assert alike(resumed.to_json(), whole.to_json())
    rows = {row["condition"]: row for row in whole.tables["downstream"]}
    assert (rows["lexical"]["draws"], rows["random_lexical"]["draws"]) == (1, 20)
    one = swap_downstream(scope, units, fit, batch_size=24, draws=1, progress=False)
    other = {row["condition"]: row for row in one.tables["downstream"]}
    assert other["lexical"]["fell"] == pytest.approx(rows["lexical"]["fell"], abs=1e-5)
    assert other["random_lexical"]["fell"] != rows["random_lexical"]["fell"]


@pytest.mark.parametrize("head", ["L1H0", "all"])
def test_traces_go_on_where_they_died(scope, monkeypatch, tmp_path, head):
    def run(job):
        return qk.trace(scope, qk.tasks.induction(8), head, 40, draws=3, batch_size=8, progress=False, job=job)

    resumed, whole = stopped_and_whole(run, monkeypatch, tmp_path, (1, 3, 4) if head == "L1H0" else (1, 2))
    assert alike(resumed.to_json(), whole.to_json())
    assert resumed.arrays.keys() == whole.arrays.keys()


def test_a_trace_of_texts_goes_on_where_it_died(scope, monkeypatch, tmp_path):
    texts = [unit[0].text for unit in qk.tasks.induction().draw("fit", "answer", 400)]

    def run(job):
        return qk.trace(scope, texts, "all", 30, progress=False, job=job)

    resumed, whole = stopped_and_whole(run, monkeypatch, tmp_path, (1, 2))
    assert alike(resumed.to_json(), whole.to_json())


def test_an_interval_of_swaps_is_by_word_and_of_one_word_there_is_none(scope):
    task = qk.tasks.binding(5)
    fit = qk.decompose(scope, task, "L1H0", n=48, contrasts=["lexical"], progress=False)
    word = lambda unit: unit[0].piece(unit[0].roles["asked"])  # noqa: E731
    units = task.test(400)
    same = [unit for unit in units if word(unit) == word(units[0])]
    assert len(same) > 1
    for found, table in ((qk.swap(scope, same, fit, draws=2, progress=False), "swap"),
                         (swap_downstream(scope, same, fit, progress=False), "downstream")):  # fmt: skip
        row = found.to_json()["tables"][table][0]
        low, high = ("shift_low", "shift_high") if table == "swap" else ("low", "high")
        assert (row[low], row[high]) == (None, None)
        assert "there are no intervals" in found.answer


def test_nothing_is_written_without_a_folder(scope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job().begin(scope, ["a"], verb="x")
    assert job.once("piece", lambda: {"value": [1.5, None]}) == {"value": [1.5, None]}
    assert job.stream("rows", [[0, 1], [2]], lambda own: own) == [[0, 1], [2]]
    assert list(tmp_path.iterdir()) == []


def test_pieces_of_another_job_are_left_alone_and_damaged_ones_made_again(scope, tmp_path, caplog):
    first = Job(tmp_path).begin(scope, ["a"], verb="x", n=1)
    made = first.once("piece", lambda: {"rows": [{"p": 0.1 + 0.2, "nan": float("nan")}], "t": torch.arange(3.0)})
    assert first.once("piece", lambda: pytest.fail("made twice"))["rows"][0]["p"] == made["rows"][0]["p"]
    other = Job(tmp_path).begin(scope, ["a"], verb="x", n=2)
    assert "unfinished work of another job" in caplog.text
    assert other.once("piece", lambda: "mine") == "mine"
    other.clear()
    assert first.folder.is_dir()
    (path,) = first.folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    assert first.once("piece", lambda: "again") == "again"
    assert "damaged" in caplog.text
    first.clear()
    assert list(tmp_path.iterdir()) == []


def test_sums_and_rows_are_kept_together_and_stopping_waits_for_the_batch(scope, tmp_path, caplog):
    import os
    import signal

    def run_with(job, stop_at=None):
        sums = {"total": torch.zeros(1, dtype=torch.float64)}

        def run(own):
            if stop_at in own:
                os.kill(os.getpid(), signal.SIGINT)
            sums["total"] += sum(0.1 * i for i in own)
            return {"own": torch.tensor(own)}

        parts = job.stream("rows", [[0, 1], [2, 3], [4], [5, 6]], run, False, sums)
        return [part["own"].tolist() for part in parts], float(sums["total"])

    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.INFO), Job(tmp_path).hold() as job:
        run_with(job.begin(scope, [], verb="x"), stop_at=3)
    assert "What is done is saved in" in caplog.text
    seen = Job(tmp_path).begin(scope, [], verb="x")
    assert run_with(seen) == run_with(Job())
    assert "Going on from what is done" in caplog.text or seen.folder is not None
    with Job(tmp_path).hold(), pytest.raises(qk.BadInput, match="another run is writing"), Job(tmp_path).hold():
        pass


def test_what_was_found_is_printed_before_it_is_written(tmp_path, capsys, monkeypatch):
    from qkscope.cli import main
    from qkscope.runs.result import Result

    def full(self, folder, files=None):
        raise qk.BadInput(f"{folder} cannot be written (No space left on device): make room.")

    arguments = ["atlas", str(words_file(tmp_path)), "--model", "nano:mixed", "--n", "160", "--test", "40",
                 "--out", str(tmp_path / "out")]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["qkscope", *arguments])
    with monkeypatch.context() as patch:
        patch.setattr(Result, "write", full)
        with pytest.raises(SystemExit) as stopped:
            main()
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert "No space left" in said.err
    assert "heads have a name" in said.out
    assert list((tmp_path / "out").glob(".work/*/looked*")), "and the work is kept"
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert (tmp_path / "out" / "results.json").exists()
    assert not (tmp_path / "out" / ".work").exists()


@pytest.mark.parametrize("verb", ["discover", "trace", "atlas"])
def test_a_killed_run_ends_with_the_results_of_one_left_alone(verb, tmp_path):
    """``python tests/kills.py 20`` kills more often."""
    assert max(survive(verb, 1, 1, tmp_path), default=0.0) < 60


def test_that_a_file_is_short_is_said_once(tmp_path, caplog):
    keys = [{"text": "cat", "labels": {"a": 1, "b": 1}}, {"text": "dog", "labels": {"a": -1, "b": -1}}]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}: cat or dog? The", "keys": keys}) for i in range(30)))
    for _ in range(2):  # as `swap` does: once to ask, once with the fit
        task = qk.tasks.from_jsonl(path)
        task.fit("a", 512)
        task.fit("b", 512)
    assert caplog.text.count("taking all") == 1
