"""Work in pieces: any number of processes, and any kill, give the numbers of one undisturbed run,
bit for bit.
"""

import json
import random
import shutil
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import qkscope as qk
from forked import command, forked
from qkscope import BadInput, Scope
from qkscope.findings.fit import sums_file
from qkscope.results import folder as folder_module
from qkscope.results.work import Stage, Work, parse_part, torchrun_process

TEXTS = [unit[0].text for unit in qk.tasks.induction().draw("fit", "answer", 400)]


@pytest.fixture(scope="module")
def fit(nano):
    return qk.decompose(
        nano, qk.tasks.binding(5), "L1H0", 48, contrasts=["lexical"], replicates=9, progress=False
    )


def decompose(scope: Scope, **options):
    """Two contrasts that share their prompts with no other: two passes, of 5 and 10 pieces."""
    asked = {"contrasts": ["order", "lexical"], "batch_size": 4, "replicates": 9, "progress": False}
    return qk.decompose(scope, qk.tasks.binding(4), "L1H3,L0H1", 40, **asked, **options)


def quick(verb, *given, **asked):
    return lambda scope, fit, **options: verb(scope, *given, progress=False, **asked, **options)


def held_out(verb, **asked):
    asked |= {"batch_size": 4, "progress": False}
    return lambda scope, fit, **options: verb(
        scope, qk.tasks.binding(5).test(24), fit, **asked, **options
    )


VERBS = {
    "decompose": lambda scope, fit, **options: decompose(scope, **options),
    "heads": quick(qk.find_heads, qk.tasks.induction(), 24, batch_size=4),
    "trace": quick(qk.trace, qk.tasks.induction(8), "L1H0", 16, draws=2, batch_size=4),
    "trace of all heads": quick(qk.trace, qk.tasks.induction(8), "all", 24, batch_size=4),
    "swap": held_out(qk.swap, draws=4, downstream=True),
    "atlas": quick(
        qk.atlas, TEXTS, 4, test=4, length=32, heads="L0H0,L1H0,L2H1"
    ),  # a piece a layer
}
WITH_PARTS = [name for name in VERBS if name != "atlas"]


@pytest.fixture(scope="module")
def whole(nano, fit):
    """What each verb gives undisturbed, asked once."""
    return cache(lambda verb: VERBS[verb](nano, fit))


def numbers(result) -> dict:
    """All that a result says but how long it took."""
    return {name: value for name, value in result.to_json().items() if name != "seconds"}


def stop_after(monkeypatch, pieces: int, error: BaseException) -> None:
    """Stop the process, so to speak, when it has written so many pieces and is about to write
    another.
    """
    left = [pieces]

    def dying(*given, real=folder_module.write_file):
        left[0] -= 1
        if left[0] < 0:
            raise error
        real(*given)

    monkeypatch.setattr(folder_module, "write_file", dying)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_goes_on_where_it_died_and_writes_its_folder(
    verb, nano, fit, whole, tmp_path, monkeypatch
):
    run, out = VERBS[verb], tmp_path / "run"
    for pieces in (1, 1):
        with monkeypatch.context() as patch:
            stop_after(patch, pieces, SystemExit("killed"))
            with pytest.raises(SystemExit):
                run(nano, fit, out=out)
    before = {path: path.stat().st_mtime_ns for path in out.glob(".work/*/*.safetensors")}
    assert len(before) == 2
    with monkeypatch.context() as patch:
        patch.setattr(Work, "finish", lambda self: None)  # leave the pieces to be looked at
        again = run(nano, fit, out=out)
    assert {path: path.stat().st_mtime_ns for path in before} == before, (
        "finished pieces are not made again"
    )
    assert numbers(again) == numbers(whole(verb)) == numbers(qk.sums.load_fit(out))
    assert again.arrays.keys() == whole(verb).arrays.keys()
    assert (out / "report.html").is_file()
    assert again.seconds > 0


def same_sums(folder: Path, other: Path) -> bool:
    return all(
        (folder / name).read_bytes() == (other / name).read_bytes()
        for name in map(sums_file, ("order", "lexical"))
    )


@pytest.fixture(scope="module")
def undisturbed(scope, tmp_path_factory) -> Path:
    """The folder of `decompose`."""
    out = tmp_path_factory.mktemp("whole") / "run"
    decompose(scope, out=out)
    return out


def test_kills_at_random_moments_change_no_number(nano, fit, whole, tmp_path):
    run, start = VERBS["decompose"], time.perf_counter()
    run(nano, fit, out=tmp_path / "whole")
    seconds, draw, killed = time.perf_counter() - start, random.Random(0), 0
    while killed < 3:
        out = tmp_path / f"run{killed}"
        child = forked(tmp_path, lambda out=out: run(nano, fit, out=out))
        time.sleep(draw.uniform(0, seconds))
        child.kill()
        child.join()
        if child.exitcode < 0:
            killed += 1
        else:  # one that was quicker than we does not count, and the first run took longer than others do
            seconds /= 2
        run(nano, fit, out=out)
        assert numbers(qk.sums.load_fit(out)) == numbers(whole("decompose"))
        assert {path.name for path in out.iterdir()} == {
            path.name for path in (tmp_path / "whole").iterdir()
        }
        shutil.rmtree(out)


def test_a_disk_that_refuses_in_the_end_takes_no_work_away(scope, tmp_path, monkeypatch):
    """The pieces are there: the same command reads them, and no prompt runs again."""
    real = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.parent.name.startswith("new-"):
            raise OSError(28, "No space left on device")
        return real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(
            BadInput, match=r"cannot be written \(No space left on device\): make room"
        ):
            decompose(scope, out=tmp_path / "run")
    monkeypatch.setattr(Stage, "make", lambda *given: pytest.fail("a piece was made twice"))
    assert decompose(scope, out=tmp_path / "run").subspaces
    assert not (tmp_path / "run" / ".work").exists()


def test_a_scheduler_stops_a_command_with_its_own_code(model, tmp_path):
    out = tmp_path / "fit"
    asked = [
        "decompose",
        "binding",
        "--size",
        4,
        "--heads",
        "L1H3",
        "-n",
        4000,
        "--contrasts",
        "order",
        "--out",
        out,
    ]
    running = forked(
        tmp_path, command(*asked, "--batch-size", 4, "--model", model, "--device", "cpu")
    )
    while not list(out.glob(".work/*/order-0.safetensors")) and running.is_alive():
        time.sleep(0.01)
    running.terminate()
    running.join()
    said = (tmp_path / "said").read_text()
    assert running.exitcode == 143, said
    assert f"What is done is saved in {out}: the same command goes on from there." in said
    assert "Traceback" not in said


@pytest.mark.parametrize("verb", WITH_PARTS)
def test_parts_of_one_folder_are_the_whole_in_any_order(verb, nano, fit, whole, tmp_path):
    run = VERBS[verb]
    *parts, last = (
        run(nano, fit, out=tmp_path / "run", part=(i, 3)) for i in (2, 3, 1)
    )  # counted from 1 here
    assert all(not part.tables and "pieces are there" in part.answer for part in parts)
    assert numbers(last) == numbers(whole(verb)) == numbers(qk.sums.load_fit(tmp_path / "run"))
    late = run(nano, fit, out=tmp_path / "run", part=(1, 3))
    assert not late.tables or numbers(late) == numbers(
        last
    )  # a fit is read, of others nothing is left to do
    assert not (tmp_path / "run" / ".work").exists()


def test_a_command_without_part_makes_what_parts_left(scope, undisturbed, tmp_path):
    """And where another part began to add up, but was killed, it adds up."""
    decompose(scope, out=tmp_path / "run", part=(1, 2))
    (work,) = (tmp_path / "run" / ".work").iterdir()
    (work / "adding").mkdir()
    said = decompose(scope, out=tmp_path / "run", part=(0, 2)).answer
    assert said == "Another part adds them up; if it was stopped, run the command without --part."
    decompose(scope, out=tmp_path / "run")
    assert same_sums(tmp_path / "run", undisturbed)


def test_torchrun_gives_the_bits_of_one_process(model, undisturbed, tmp_path, monkeypatch):
    asked = [
        "decompose",
        "binding",
        "--size",
        4,
        "--heads",
        "L1H3,L0H1",
        "-n",
        40,
        "--contrasts",
        "order,lexical",
    ]
    asked += ["--replicates", 9, "--batch-size", 4, "--model", model, "--device", "cpu", "--json"]
    # what torchrun calls, but that it starts a function in forked processes
    standalone = {
        "run_id": "test",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "start_method": "fork",
    }
    launcher = elastic_launch(
        LaunchConfig(1, 1, 2, **standalone), command(*asked, "--out", tmp_path / "run")
    )
    done = forked(tmp_path, launcher)
    done.join()
    assert done.exitcode == 0, (tmp_path / "said").read_text()
    assert (
        json.loads((tmp_path / "printed").read_text())["experiment"] == "decompose/binding"
    )  # one process speaks
    assert same_sums(tmp_path / "run", undisturbed)
    assert not (tmp_path / "run" / ".work").exists()
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
    ):  # other launchers number their processes too
        monkeypatch.setenv(name, value)
    assert torchrun_process() is None


def test_without_a_folder_nothing_is_written_and_parts_make_no_sense(
    nano, tmp_path, monkeypatch, scope
):
    monkeypatch.chdir(tmp_path)
    work = Work().begin(nano, ["a"], verb="x")
    assert work.once("piece", lambda: {"value": [1.5, None]}) == {"value": [1.5, None]}
    assert work.run(Stage("rows", [[0, 1], [2]], lambda own: own)) == [[0, 1], [2]]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadInput, match="name it with out"):
        decompose(scope, part=(0, 2))
    assert (
        "0 of 15 pieces are there" in decompose(scope, out=tmp_path / "run", part=(49, 50)).answer
    )  # none is its own
    assert sorted(parse_part(f"{i}/3") for i in (0, 1, 2)) == sorted(
        parse_part(f"{i}/3") for i in (1, 2, 3)
    )
    with pytest.raises(BadInput, match="a part is i/n"):
        parse_part("4/3")


def test_sums_are_added_in_order_whoever_made_them(nano, tmp_path):
    """Of numbers whose sum depends on the order, by more than rounding would hide."""
    values = [1e16, 1.0, -1e16, 1.0, 3.0] * 20

    def total(work: Work) -> tuple[float, list[int]]:
        sums = {"total": torch.zeros(1, dtype=torch.float64)}

        def run(own: list[int]) -> int:
            for i in own:
                sums["total"] += values[i]
            return own[0]

        firsts = work.run(Stage("sum", [[i] for i in range(100)], run, sums), False)
        return float(sums["total"]), firsts

    parts = [Work(tmp_path, (i, 3)).begin(nano, [], verb="x") for i in (1, 0, 2)]
    assert len({str(total(work)) for work in [Work(), *parts]}) == 1
    assert (
        len(list(tmp_path.glob(".work/*/sum-*.safetensors")))
        == len(Stage("sum", [[0]] * 100, len).groups)
        == 15
    )


def test_pieces_of_other_work_are_left_alone_and_damaged_ones_made_again(nano, tmp_path, caplog):
    first = Work(tmp_path).begin(nano, ["a"], verb="x", n=1)
    made = first.once(
        "piece",
        lambda: {"rows": [{"p": 0.1 + 0.2, "nan": float("nan")}], "t": torch.arange(6.0)[::2]},
    )
    read = first.once("piece", lambda: pytest.fail("made twice"))
    assert (read["rows"][0]["p"], read["t"].tolist()) == (made["rows"][0]["p"], [0.0, 2.0, 4.0])
    other = Work(tmp_path).begin(nano, ["a"], verb="x", n=2)
    assert other.once("piece", lambda: "mine") == "mine"
    other.finish()
    (path,) = first.folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    assert first.once("piece", lambda: "again") == "again"
    assert "This piece is made again" in caplog.text
    first.finish()
    assert list(tmp_path.iterdir()) == []


def test_an_interval_of_swaps_is_by_word_and_of_one_word_there_is_none(nano, fit):
    word = lambda unit: unit[0].piece(unit[0].roles["asked"])  # noqa: E731
    units = qk.tasks.binding(5).test(400)
    same = [unit for unit in units if word(unit) == word(units[0])]
    assert len(same) > 1
    found = qk.swap(nano, same, fit, draws=2, downstream=True, progress=False)
    for table in ("swap", "downstream"):
        row = found.to_json()["tables"][table][0]
        low, high = ("shift_low", "shift_high") if table == "swap" else ("low", "high")
        assert (row[low], row[high]) == (None, None)
        assert "there are no intervals" in found.answer
