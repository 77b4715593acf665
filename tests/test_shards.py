"""Facts about long runs: any number of processes, and any kill, give the numbers of one undisturbed process."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from qkscope import BadInput, Head, tasks
from qkscope.analyses import decompose as passes
from qkscope.analyses.decompose import decompose
from qkscope.analyses.fit import load, merge
from qkscope.analyses.fit_folder import sums_file
from qkscope.capture.scope import Scope
from qkscope.runs import job as job_module
from qkscope.runs.folder import only_writer
from qkscope.runs.shards import parse_shard, torchrun_shard
from qkscope.runs.store import read_tensors, write_tensors

ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}
HEADS = [Head(1, 3), Head(0, 1)]
CONTRASTS = ["order", "lexical"]


def fit_into(scope: Scope, out: Path, shard=None, n=40):
    return decompose(scope, tasks.binding(4), HEADS, n, out=out, contrasts=CONTRASTS, batch_size=4, shard=shard)


@pytest.fixture(scope="module")
def whole(scope: Scope, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fits") / "whole"
    fit_into(scope, out)
    return out


def sums_of(folder: Path) -> dict[str, torch.Tensor]:
    read = {contrast: read_tensors(sums_file(folder, contrast), "sums")[0] for contrast in CONTRASTS}
    return {f"{contrast}/{name}": tensor for contrast, own in read.items() for name, tensor in own.items()}


def assert_close(folder: Path, other: Path, tolerance: float) -> None:
    """Every sum agrees, null replicates included, and every number in the results."""
    mine, theirs = sums_of(folder), sums_of(other)
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert float((tensor - theirs[name]).abs().max()) <= tolerance * float(tensor.abs().max()), name
    rows = [json.loads((place / "results.json").read_text())["tables"]["ranks"] for place in (folder, other)]
    for a, b in zip(*rows, strict=True):
        assert a == {k: pytest.approx(v, abs=1e-9) if isinstance(v, float) else v for k, v in b.items()}


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("count", [2, 3, 5])
def test_merged_shards_are_the_whole_and_serve_the_later_verbs(scope, whole, tmp_path, count):
    parts = [tmp_path / str(index) for index in range(count)]
    for index, part in enumerate(parts):
        assert not fit_into(scope, part, (index, count)).subspaces
    random.Random(count).shuffle(parts)
    fit = merge(parts, tmp_path / "merged")
    assert_close(tmp_path / "merged", whole, 1e-10)
    again = load(tmp_path / "merged", scope)
    for which in fit:
        torch.testing.assert_close(again[which].V, fit[which].V, rtol=0, atol=0)
    before = load(whole, scope)
    for which in fit:
        torch.testing.assert_close(fit[which].S, before[which].S, rtol=1e-10, atol=1e-12)


def test_shards_count_from_0_or_from_1():
    assert sorted(parse_shard(f"{i}/3") for i in (0, 1, 2)) == sorted(parse_shard(f"{i}/3") for i in (1, 2, 3))
    for text in ("", "3", "4/3", "-1/3", "1/0", "a/b", "1/2/3"):
        with pytest.raises(BadInput, match="a shard is i/n"):
            parse_shard(text)


def test_what_does_not_belong_together_is_not_merged(scope, whole, tmp_path):
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    fit_into(scope, first, (0, 2))
    fit_into(scope, second, (1, 2))
    fit_into(scope, other, (1, 2), n=32)
    fit_into(scope, tmp_path / "third", (1, 3))
    for folders, says in (
        ([first, tmp_path / "third"], "is of a split into 2, .* of one into 3: merge the shards of one split"),
        ([first], "shard 1/2 is missing"),
        ([first, first], "are the same shard 0/2"),
        ([first, other], "are not shards of one job \\(n differ\\)"),
        ([first, whole], "is no shard but a whole fit"),
        ([first, tmp_path / "nowhere"], "is not a folder that decompose wrote"),
        ([], "no shard was named"),
    ):
        with pytest.raises(BadInput, match=says):
            merge(folders, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(BadInput, match="is one shard of 2: run qkscope merge"):
        load(first, scope)
    with pytest.raises(BadInput, match="holds another job \\(shard differ\\)"):
        fit_into(scope, first, (1, 2))
    with pytest.raises(BadInput, match="cannot be shared among 50"):
        fit_into(scope, tmp_path / "many", (0, 50))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "qkscope", *map(str, arguments)]


def job(model: Path, out: Path, *more: object, n: int = 40) -> list[object]:
    return [
        "decompose", "binding", "--size", 4, "--heads", "L1H3,L0H1", "-n", n, "--contrasts", "order,lexical",
        "--batch-size", 4, "--model", model, "--device", "cpu", "--out", out, *more,
    ]  # fmt: skip


def test_torchrun_gives_the_numbers_of_one_process(model, whole, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "qkscope"]
    done = subprocess.run(
        [*torchrun, *map(str, job(model, tmp_path / "out"))], env=ALONE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Of 4 contrasts at heads") == 1  # one process speaks
    assert_close(tmp_path / "out", whole, 1e-10)
    assert not (tmp_path / "out" / ".work").exists()


def test_under_torchrun_the_folder_of_the_whole_is_asked_for_first(tmp_path, model, whole):
    """By every process, before it waits for the others and before a model is loaded: here the others never come."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "locked").mkdir(0o500)
    places = [(tmp_path / "mine", "holds other things than a fit"), (whole, r"holds another job \(n differ")]
    if os.geteuid() != 0:  # nothing is locked to root
        places.append((tmp_path / "locked", "cannot be written"))
    started = {**ALONE, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    started["TORCHELASTIC_RUN_ID"] = "none"
    for out, says in places:
        asked = command(*job(model, out, n=36))
        done = subprocess.run(asked, env=started, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2
        assert re.search(says, done.stderr)


def test_only_torchrun_is_torchrun(monkeypatch):
    """Other launchers number their processes too, and shells keep what an earlier one said."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value, shard in (
        ("RANK", "1", None),
        ("WORLD_SIZE", "4", None),
        ("MASTER_ADDR", "127.0.0.1", None),
        ("MASTER_PORT", "29500", None),  # left over in a shell: nobody would come
        ("TORCHELASTIC_RUN_ID", "none", (1, 4)),
        ("WORLD_SIZE", "1", None),
        ("WORLD_SIZE", "four", None),
    ):
        monkeypatch.setenv(name, value)
        assert torchrun_shard() == shard


def test_the_command_line_shards_and_merges(model, whole, tmp_path):
    """On a model that is spread over what there is, as one larger than a device would be."""
    for i in (1, 2):
        share = job(model, tmp_path / str(i), "--shard", f"{i}/2", "--device", "auto")
        done = subprocess.run(command(*share), env=ALONE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "qkscope merge" in done.stdout
    done = subprocess.run(command("merge", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "out", "--json"),
                          env=ALONE, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["experiment"] == "decompose/binding"
    assert_close(tmp_path / "out", whole, 1e-10)


# ---------------------------------------------------------------- killed, interrupted, refused


def in_a_process(work) -> int:
    """Fork: a real process that can be killed, without starting Python and torch again each time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BadInput as error:
            print(error, file=sys.stderr)
            code = 2
        finally:
            os._exit(code)
    return child


def test_twenty_kills_at_random_moments_change_no_bit(scope, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "_EVERY", 0)  # a state every batch: there is something to go on from, and to tear
    start = time.perf_counter()
    fit_into(scope, tmp_path / "timed")
    seconds = time.perf_counter() - start
    draw = random.Random(0)
    killed = 0
    while killed < 20:
        out = tmp_path / f"run{killed}"
        child = in_a_process(lambda out=out: fit_into(scope, out))
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)  # one that was quicker than we does not count
        fit_into(scope, out)
        mine, theirs = sums_of(out), sums_of(whole)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
        assert (
            json.loads((out / "results.json").read_text())["tables"]
            == json.loads((whole / "results.json").read_text())["tables"]
        )
        assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
        shutil.rmtree(out)


def test_what_is_done_is_saved_every_half_minute(scope, tmp_path, monkeypatch):
    """By our clock a batch takes 8 s."""
    now, saved = [0.0], []

    def saving(self, batches):
        saved.append(batches)

    def rows(*given, real=passes.prompts.contrast_rows):
        now[0] += 8.0
        return real(*given)

    monkeypatch.setattr(job_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(passes.prompts, "contrast_rows", rows)
    monkeypatch.setattr(job_module._Pieces, "save", saving)
    run = {"contrasts": ["order"], "batch_size": 4, "replicates": 3, "out": tmp_path}
    decompose(scope, tasks.binding(4), HEADS, 40, **run)
    assert saved == [4, 8, 10]


def test_ctrl_c_saves_after_the_batch_and_the_rest_goes_on_from_there(scope, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "_EVERY", 0)
    out = tmp_path / "run"
    child = in_a_process(lambda: fit_into(scope, out, n=4000))
    while not list(out.glob(".work/*/order.safetensors")):
        time.sleep(0.01)
    os.kill(child, signal.SIGINT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    (piece,) = out.glob(".work/*/order.safetensors")
    assert 0 < read_tensors(piece, "piece")[1]["value"]["batches"] < 1000


def test_a_run_goes_on_from_what_another_saved(scope, whole, tmp_path, monkeypatch):
    """Bit for bit: half of the sums are those of the run that was stopped."""
    monkeypatch.setattr(job_module, "_EVERY", 0)
    left = [13]  # of 10 batches of order and 40 of a prompt with its copies

    def rows(*given, real=passes.prompts.contrast_rows):
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("the power is gone")
        return real(*given)

    with monkeypatch.context() as patched:
        patched.setattr(passes.prompts, "contrast_rows", rows)
        with pytest.raises(RuntimeError):
            fit_into(scope, tmp_path / "run")
    with pytest.raises(BadInput, match="is not finished: run the same decompose command again"):
        load(tmp_path / "run", scope)
    fit_into(scope, tmp_path / "run")
    assert all(torch.equal(tensor, sums_of(whole)[name]) for name, tensor in sums_of(tmp_path / "run").items())
    assert not (tmp_path / "run" / ".work").exists()


def edited(path: Path, change) -> None:
    """A file of sums whose manifest somebody changed, with a checksum that is right again."""
    tensors, manifest = read_tensors(path, "sums")
    change(tensors, manifest)
    write_tensors(path, "sums", tensors, manifest)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, said: said.update(cut=-1),
        lambda tensors, said: said.update(cut=[7]),
        lambda tensors, said: said.update(cut="a"),
        lambda tensors, said: said.update(moments=[]),
        lambda tensors, said: said["moments"].update(about=None),
        lambda tensors, said: said["moments"]["about"].pop("n"),
        lambda tensors, said: said["moments"].update(replicates="many"),
        lambda tensors, said: said.update(shard=[7, 2]),
        lambda tensors, said: said.update(shard="0/1"),
        lambda tensors, said: tensors.update({"sums/order": tensors["sums/order"].float()}),
        lambda tensors, said: tensors["sums/order"].fill_(float("nan")),
        lambda tensors, said: tensors.pop("cov_q"),
    ],
)
def test_sums_that_no_run_writes_are_refused(scope, whole, tmp_path, change):
    for index in (0, 1):
        fit_into(scope, tmp_path / str(index), (index, 2))
    shutil.copytree(whole, tmp_path / "whole")
    for folder in (tmp_path / "whole", tmp_path / "1"):
        edited(sums_file(folder, "order"), change)
    for use in (
        lambda: fit_into(scope, tmp_path / "whole"),
        lambda: load(tmp_path / "whole", scope),
        lambda: merge([tmp_path / "0", tmp_path / "1"], tmp_path / "merged"),
    ):
        with pytest.raises(BadInput, match=r"order\.safetensors (is damaged|is not what a run wrote there)"):
            use()


def test_a_flipped_bit_and_another_shards_sums_are_refused(scope, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "whole")
    path = sums_file(tmp_path / "whole", "order")
    content = bytearray(path.read_bytes())
    content[-1001] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match="its checksum is not that of what it holds"):
        load(tmp_path / "whole", scope)
    for index in (0, 1):
        fit_into(scope, tmp_path / str(index), (index, 2))
    shutil.copyfile(sums_file(tmp_path / "0", "order"), sums_file(tmp_path / "1", "order"))
    for use, says in (
        (lambda: merge([tmp_path / "0", tmp_path / "1"], tmp_path / "merged"), "of shard 0/2 .* those of 1/2 belong"),
        (lambda: fit_into(scope, tmp_path / "1", (1, 2)), "is not what a run wrote there"),
    ):
        with pytest.raises(BadInput, match=says):
            use()


def test_sums_may_be_read_by_whom_the_umask_lets(scope, tmp_path):
    before = os.umask(0o022)
    try:
        fit_into(scope, tmp_path / "run")
    finally:
        os.umask(before)
    assert sums_file(tmp_path / "run", "order").stat().st_mode & 0o777 == 0o644


def test_two_runs_do_not_write_to_one_folder(scope, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with only_writer(out):
        child = in_a_process(lambda: fit_into(scope, out))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert not (out / "job.json").exists()
    assert fit_into(scope, out) is not None


def test_a_full_disk_is_a_sentence_and_keeps_what_was_saved(scope, whole, tmp_path, capfd):
    """The system refuses files over a size, as a full disk would."""

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        fit_into(scope, tmp_path / "run")

    child = in_a_process(small_files)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert "cannot be written (File too large): make room" in capfd.readouterr().err
    fit_into(scope, tmp_path / "run")
    assert all(torch.equal(tensor, sums_of(whole)[name]) for name, tensor in sums_of(tmp_path / "run").items())
