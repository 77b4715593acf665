"""Facts about disks that are full, read-only or odd: a sentence, and what was computed is shown all the same."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import sys

import pytest

from qkscope import BadInput, cli, tasks
from qkscope.analyses import decompose as passes
from qkscope.analyses.decompose import decompose
from qkscope.page.report import write_report
from qkscope.runs.folder import only_writer, write_file
from qkscope.runs.result import Result

JOB = {"contrasts": ["order"], "batch_size": 4}


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a.json").symlink_to(tmp_path / "precious")
    write_file(tmp_path / "a.json", "text")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "a.json").is_symlink()


def test_a_place_that_takes_no_files_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (
        lambda: write_report(tmp_path / "file" / "page.html", Result("toy", {})),
        lambda: Result("toy", {}).write(tmp_path / "file" / "run"),
    ):
        with pytest.raises(BadInput, match=r"cannot be written \((Not a directory|File exists)\)"):
            write()


def test_a_page_or_a_folder_that_does_not_fit_is_a_sentence(tmp_path):
    """The system refuses files over a size, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for write in (
            lambda: write_report(tmp_path / "page.html", Result("toy", {})),
            lambda: Result("toy", {"long": [{"a": "b" * 2000}]}).write(tmp_path / "run"),
        ):
            with pytest.raises(BadInput, match=r"cannot be written \(File too large\)"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_only_a_lock_that_is_held_means_another_run(tmp_path, monkeypatch):
    with only_writer(tmp_path), pytest.raises(BadInput, match="another run is writing"), only_writer(tmp_path):
        pass

    def no_locks(*given):  # as a network disk without a lock daemon answers
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        with pytest.raises(BadInput, match=r"cannot be locked \(No locks available\)"), only_writer(tmp_path):
            pass
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    with pytest.raises(BadInput, match=r"cannot be written \(Is a directory\)"), only_writer(tmp_path):
        pass


def test_a_result_is_shown_before_its_page_is_written(scope, tmp_path, monkeypatch, capsys):
    """The page's place is taken by a folder: the numbers are on the screen when that is said."""
    fit = tmp_path / "fit"
    decompose(scope, tasks.binding(4), ["L1H3"], 16, out=fit, **JOB)
    (fit / "report.html").mkdir()
    asked = ["decompose", "binding", "--size", 4, "--heads", "L1H3", "-n", 16, "--contrasts", "order"]
    asked += ["--batch-size", 4, "--model", scope.name, "--device", "cpu", "--out", fit]
    for arguments, experiment in ((asked, "decompose/binding"), (["swap", fit, "-n", 4, "--device", "cpu"], "swap")):
        monkeypatch.setattr(sys, "argv", ["qkscope", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert (ended.value.code, "is a folder" in said.err) == (2, True)
        assert json.loads(said.out)["experiment"] == experiment


@pytest.mark.parametrize("saved", [False, True])
def test_what_is_done_is_called_saved_only_if_it_is(scope, tmp_path, caplog, monkeypatch, saved):
    """Ctrl-C twice stops at once: in the first batch nothing is saved yet."""
    caplog.set_level("INFO")
    pressed: list[bool] = []

    def rows(*given, real=passes.prompts.contrast_rows):
        if not pressed:
            pressed.append(True)
            for _ in range(1 if saved else 2):
                signal.raise_signal(signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(passes.prompts, "contrast_rows", rows)
    with pytest.raises(KeyboardInterrupt):
        decompose(scope, tasks.binding(4), ["L1H3"], 16, out=tmp_path / "run", **JOB)
    assert bool(list((tmp_path / "run").glob(".work/*/order.safetensors"))) is saved
    assert ("What is done is saved in" in caplog.text) is saved
