"""Facts about folders and disks: nobody's file is destroyed, and a disk that refuses is a sentence."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qkscope import BadInput, cli, tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.fit import load
from qkscope.analyses.fit_folder import sums_file
from qkscope.capture.scope import Scope
from qkscope.runs.folder import add_to_run, check_folder, file_name, write_file
from qkscope.runs.result import Result, provenance
from qkscope.show.page import write_report
from qkscope.tasks.words import OBJECTS

JOB = {"contrasts": ["order"], "batch_size": 4}


@pytest.fixture
def qkscope(monkeypatch, capsys):
    """The command line in this process: its exit code, what it printed and what it complained about."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["qkscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def no_model(monkeypatch) -> None:
    def load(*given, **options):
        raise AssertionError("a model was loaded before the folder was looked at")

    monkeypatch.setattr(Scope, "load", load)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fitted(scope: Scope, out: Path, **more: object):
    return decompose(scope, tasks.binding(4), ["L1H3"], 16, out=out, **{**JOB, **more})


# ---------------------------------------------------------------- a user's folder


def test_what_only_looks_like_a_left_over_is_kept(scope, tmp_path):
    fitted(scope, tmp_path / "fit")
    for name in (".tmpABC123", "new-abc/notes", "order.safetensors12345678.part"):
        (tmp_path / "fit" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "fit" / name).write_text("mine")
        before = contents(tmp_path)
        with pytest.raises(BadInput, match=f"holds other files than a run, {name}: name a new folder"):
            fitted(scope, tmp_path / "fit")
        assert contents(tmp_path) == before
        (tmp_path / "fit" / name).unlink()


def test_a_name_too_long_for_a_disk_is_a_sentence(qkscope):
    code, _, said = qkscope("view", "x" * 300, "--made")
    assert (code, said.count("\n")) == (2, 1)
    assert "longer than a disk takes" in said
    with pytest.raises(BadInput, match="longer than a disk takes"):
        Scope.load("y" * 300)


@pytest.mark.parametrize("name", ["../outside.txt", "figures/../../outside.txt", "/nowhere/outside.txt"])
def test_a_file_of_a_run_stays_inside_its_folder(tmp_path, name):
    with pytest.raises(BadInput, match="named from inside its folder"):
        Result("demo", {}, provenance=provenance()).write(tmp_path / "run", files={name: "x"})
    assert not list(tmp_path.rglob("*"))


DISCOVER = ["discover", "induction", "--model", "nano:mixed", "--heads", "L1H0", "--n", 160]
EVERY = {
    "discover": (DISCOVER, ""),
    "atlas": (["atlas", "--model", "nano:mixed"], ""),
    "demo": (["demo"], ""),
    "decompose": (["decompose", "binding", "--heads", "L1H3"], ""),
    "sparsity": (["sparsity", "ioi", "--model", "nano:mixed"], ""),
}


@pytest.mark.parametrize("command", EVERY)
def test_a_thesis_survives_every_command(command, tmp_path, qkscope, no_model):
    """As it was found: a folder with a results.json, not ours, was taken for a run and replaced."""
    arguments, below = EVERY[command]
    mine = tmp_path / "p" / below
    mine.mkdir(parents=True)
    (mine / "results.json").write_text("{}\n")
    (mine / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    code, out, said = qkscope(*arguments, "--out", tmp_path / "p")
    assert (code, out) == (2, "")
    assert f"{mine} holds other" in said
    assert "results.json: name a new folder." in said
    assert contents(tmp_path) == before


def test_a_fit_is_no_place_for_another_kind_of_run(scope, tmp_path, qkscope, no_model):
    fitted(scope, tmp_path / "fit")
    Result("atlas", {}, provenance=provenance()).write(tmp_path / "atlas")
    before = contents(tmp_path)
    for arguments, kind in ((DISCOVER, "discover"), (["demo"], "demo"), (["atlas"], "atlas")):
        code, _, said = qkscope(*arguments, "--out", tmp_path / "fit")
        assert (code, f"holds a run of decompose/binding, not of {kind}: name a new folder." in said) == (2, True)
    code, _, said = qkscope("demo", "--out", tmp_path / "atlas")
    assert (code, "holds a run of atlas, not of demo" in said) == (2, True)
    with pytest.raises(BadInput, match="holds a run of atlas, not of decompose"):
        fitted(scope, tmp_path / "atlas")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("place", ["notes.txt", "figures/mine.png", "shards/data.csv", "7/thesis.tex"])
def test_a_file_that_was_laid_into_a_run_is_kept(scope, tmp_path, place):
    fitted(scope, tmp_path / "fit")
    Result("demo", {}).write(tmp_path / "demo", files={"figures/a.png": b"png"})
    for folder in (tmp_path / "fit", tmp_path / "demo"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(BadInput, match=f"holds other files than a run, {place}: name a new folder"):
        fitted(scope, tmp_path / "fit")
    with pytest.raises(BadInput, match=f"holds other files than a run, {place}: name a new folder"):
        Result("demo", {}).write(tmp_path / "demo")
    assert contents(tmp_path) == before


def test_weights_are_not_replaced_by_singular_vectors(model, tmp_path, qkscope, no_model):
    weights = shutil.copyfile(model / "model.safetensors", tmp_path / "model.safetensors")
    before = weights.read_bytes()
    code, _, said = qkscope("svd", "--model", model, "--out", weights)
    assert (code, "is there already and is no singular_basis of ours: name a new file" in said) == (2, True)
    assert weights.read_bytes() == before


def test_a_link_to_a_folder_stays_one(scope, tmp_path):
    for name in ("fits", "runs"):
        (tmp_path / name).mkdir()
        (tmp_path / f"to {name}").symlink_to(tmp_path / name)
    (tmp_path / "to nothing").symlink_to(tmp_path / "nothing")
    for seed in (0, 1):
        fitted(scope, tmp_path / "to fits")
        Result("demo", {}, seed=seed).write(tmp_path / "to runs")
        assert (tmp_path / "to fits").is_symlink()
        assert (tmp_path / "to runs").is_symlink()
        assert Result.read(tmp_path / "runs").seed == seed
    assert load(tmp_path / "fits", scope).heads
    (tmp_path / "runs" / "thesis.tex").write_text("mine")
    with pytest.raises(BadInput, match=r"holds other files than a run, thesis\.tex"):
        Result("demo", {}).write(tmp_path / "to runs")
    with pytest.raises(BadInput, match="is a link to a folder that is not there"):
        check_folder(tmp_path / "to nothing")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.png").write_text("mine")
    linked = Result("demo", {}).write(tmp_path / "linked", files={"figures/a.png": b"png"})
    shutil.rmtree(linked / "figures")
    (linked / "figures").symlink_to(tmp_path / "mine")
    with pytest.raises(BadInput, match="holds other files than a run, figures"):  # writing would go through it
        Result("demo", {}).write(linked, files={"figures/a.png": b"png"})
    assert (tmp_path / "mine" / "a.png").read_text() == "mine"


def test_a_file_is_ours_by_its_content_and_not_by_its_name(scope, tmp_path):
    """A manifest that was copied beside somebody's own page, and what somebody wrote into a page of ours."""
    theirs = Result("demo", {}).write(tmp_path / "theirs", files={"report.html": "page"})
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(theirs / "manifest.json", mine)
    fitted(scope, tmp_path / "fit")
    for folder, name in ((mine, "report.html"), (mine, "results.json"), (theirs, "report.html")):
        (folder / name).write_text("years of work")
        before = contents(tmp_path)
        with pytest.raises(BadInput, match=f"{name} is not what a run wrote there: keep it elsewhere, or name a new"):
            Result("demo", {}).write(folder)
        assert contents(tmp_path) == before
        (folder / name).unlink()
    for name in ("results.json", "order.safetensors"):
        kept = (tmp_path / "fit" / name).read_bytes()
        (tmp_path / "fit" / name).write_bytes(kept + b" ")
        with pytest.raises(BadInput, match=f"{name} is not what a run wrote there"):
            fitted(scope, tmp_path / "fit")
        (tmp_path / "fit" / name).write_bytes(kept)
    fitted(scope, tmp_path / "fit")


def test_weights_that_are_called_like_a_contrast_are_kept(scope, tmp_path):
    """Where the file is that of the first contrast, of another that shares its pass, or of one with its own."""
    words = [{"text": "A", "labels": {"mine": 1, "model": 1}}, {"text": "B", "labels": {"mine": -1, "model": -1}}]
    lines = [json.dumps({"prompt": f"{word} : A hat : B {word} :", "keys": words}) for word in OBJECTS[:30]]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    for name in ("mine", "model"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(2)}, tmp_path / name / f"{name}.safetensors")
        before = contents(tmp_path)
        with pytest.raises(BadInput, match=rf"holds other files than a run, {name}\.safetensors: name a new folder"):
            decompose(scope, tasks.from_jsonl(tmp_path / "mine.jsonl"), ["L1H3"], 8, out=tmp_path / name)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("place", [".work", ".work/abc", ".work/x/report.html", "manifest.json.part", "figures/a.png"])
def test_no_link_in_a_run_folder_is_written_through(scope, tmp_path, place):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "x").write_text("mine")
    fitted(scope, tmp_path / "fit")
    Result("demo", {}).write(tmp_path / "run")
    for folder in (tmp_path / "fit", tmp_path / "run"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(precious / "x" if "." in Path(place).name[1:] else precious)
    for write in (
        lambda: Result("demo", {}).write(tmp_path / "run", files={"figures/a.png": b"png"}),
        lambda: fitted(scope, tmp_path / "fit"),
    ):
        with pytest.raises(BadInput, match=f"holds other files than a run, {place}: name a new folder"):
            write()
    if place == ".work":
        with pytest.raises(BadInput, match="leads elsewhere by a link"):
            add_to_run(tmp_path / "fit", {"report.html": "page"})
    assert {name: text for name, text in contents(precious).items()} == {"x": b"mine"}


def test_a_page_replaces_only_a_page_that_was_drawn_here(tmp_path):
    shown = Result("demo", {})
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "mine.html").write_text("years of work")
    (tmp_path / "link.html").symlink_to(tmp_path / "mine.html")
    for name in ("thesis.tex", "mine.html", "link.html"):
        with pytest.raises(BadInput, match=f"{name} is no page that qkscope drew here"):
            write_report(tmp_path / name, shown)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"years of work"}
    for title in ("one", "two"):
        assert title in write_report(tmp_path / "page.html", shown, title=title).read_text()
    run = shown.write(tmp_path / "run")
    write_report(run / "report.html", shown)  # a run's own page is listed with the rest
    (run / "notes.txt").write_text("mine")
    write_report(run / "report.html", shown, title="again")
    assert (run / "notes.txt").read_text() == "mine"
    (run / "notes.txt").unlink()
    shown.write(run)
    assert not (run / "report.html").exists()


def test_only_what_is_listed_is_removed(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    folder = Result("demo", {}).write(tmp_path / "run", files={"figures/a.png": b"a", "figures/b.png": b"b"})
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["figures/a.png", "figures/b.png", "results.json"]
    hostile = {**manifest["files"], "../mine.txt": "", str(tmp_path / "mine.txt"): ""}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": hostile}))
    (folder / ".work").mkdir()
    (folder / ".work" / "piece").write_text("of a run that is not finished")
    Result("demo", {}).write(folder, files={"figures/a.png": b"new"})
    assert set(contents(folder)) == {"figures/a.png", "manifest.json", "results.json", ".work/piece"}
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_death_at_any_moment_of_writing_leaves_a_folder_that_is_whole_or_can_be_written_again(tmp_path, monkeypatch):
    real, moments = {name: getattr(Path, name) for name in ("replace", "unlink")}, []

    def run(seed: int) -> Path:
        files = {"report.html": f"{seed}", f"figures/{seed}.png": b"png"}
        return Result("demo", {}, seed=seed).write(tmp_path / "run", files=files)

    for last in range(9):
        left = [last]
        monkeypatch.undo()
        run(0)

        def dies(name: str, left=left):
            def step(path: Path, *given, **options):
                if not left[0]:
                    raise OSError(5, "the power is gone")
                left[0] -= 1
                return real[name](path, *given, **options)

            return step

        for name in real:
            monkeypatch.setattr(Path, name, dies(name))
        try:
            run(1)
        except BadInput as error:
            assert "the power is gone" in str(error)  # noqa: PT017 (it may also have been whole by then)
        monkeypatch.undo()
        try:
            read = Result.read(tmp_path / "run")
        except BadInput as error:
            assert "holds no results.json, so no finished run" in str(error)  # noqa: PT017
            moments.append("half")
        else:
            page = (tmp_path / "run" / "report.html").read_text()
            moments.append("old" if (read.seed, page) == (0, "0") else "new")
            assert (read.seed, page) in ((0, "0"), (1, "1"))
    assert list(dict.fromkeys(moments)) == ["old", "half", "new"]


def test_nothing_is_left_where_nothing_could_be_written(tmp_path, monkeypatch):
    """Everything is on the disk before the first file takes its place: an earlier run survives a full disk."""
    folder = Result("demo", {}).write(tmp_path / "run", files={"report.html": "old"})
    before = contents(folder)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for place in (folder, tmp_path / "new"):
        with pytest.raises(BadInput, match="No space left on device"):
            Result("demo", {}).write(place, files={"report.html": "new"})
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a.json").symlink_to(tmp_path / "precious")
    write_file(tmp_path / "a.json", "text")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "a.json").is_symlink()


def test_a_place_that_takes_no_files_or_not_so_large_ones_is_a_sentence(tmp_path):
    """The system refuses files over a size, as a full disk would."""
    (tmp_path / "file").write_text("")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for place, limit, says in ((tmp_path / "file", before[0], "(Not a directory|File exists)"),
                               (tmp_path, 1000, "File too large")):  # fmt: skip
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            for write in (
                lambda place=place: write_report(place / "page.html", Result("toy", {})),
                lambda place=place: Result("toy", {"long": [{"a": "b" * 2000}]}).write(place / "run"),
            ):
                with pytest.raises(BadInput, match=rf"cannot be written \({says}\)"):
                    write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------- odd names, numbers and files


def test_a_contrast_may_have_a_long_name_in_any_script(scope, tmp_path):
    """A character is nine bytes of a quoted name, and a disk takes 255."""
    name = "对比" * 15
    lines = [
        {"prompt": f"{word} : A hat : B {word} :", "keys": [{"text": "A", "labels": {name: 1}},
                                                         {"text": "B", "labels": {name: -1}}]}
        for word in OBJECTS[:30]
    ]  # fmt: skip
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = tasks.from_jsonl(tmp_path / "mine.jsonl")
    for _ in range(2):  # and the folder is known again
        decompose(scope, task, ["L1H3"], 8, out=tmp_path / "fit", batch_size=4)
    assert load(tmp_path / "fit", scope)[name, "L1H3"].rank
    assert file_name(name) != file_name(name + "x")
    assert file_name("order") == "order"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["heads", "binding", "--seed", 2**64], "should be at most 4611686018427387904"),
        (["heads", "binding", "-n", 10**9], "should be at most 1000000"),
        (["why", "caf\udce9:"], r"'caf\udce9:' is not text in UTF-8"),
        (["heads", "\udcff.jsonl"], r"'\udcff.jsonl' is not text in UTF-8"),
        (["view", "PIPES", "--made"], "holds no manifest.json"),
        (["view", "PIPES", "--no-browser"], "is damaged or half-written"),
    ],
)
def test_odd_arguments_get_a_sentence_at_once(arguments, says, tmp_path, qkscope, no_model):
    (tmp_path / "PIPES").mkdir()
    for pipe in ("PIPE", "PIPES/manifest.json"):
        os.mkfifo(tmp_path / pipe)
    (tmp_path / "PIPES" / "results.json").write_text('{"schema": 1}')
    given = [tmp_path / part if str(part).startswith("PIPE") else part for part in arguments]
    code, out, said = qkscope(*given)
    assert (code, out) == (2, "")
    assert says in said


def test_sums_with_another_bit_are_refused(scope, tmp_path):
    fitted(scope, tmp_path / "fit")
    path = tmp_path / "fit" / sums_file("order")
    content = bytearray(path.read_bytes())
    content[-1001] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"order\.safetensors is not what a run wrote there"):
        load(tmp_path / "fit", scope)


@pytest.mark.parametrize(
    "command",
    ["qkscope heads ioi; rm -rf ~", "rm -rf ~", "qkscope heads $(reboot)", "qkscope heads 'a\nb'", "qkscope 'heads",
     "qkscope heads \x1b[2J"],
)  # fmt: skip
def test_a_command_that_is_not_ours_alone_is_not_offered(command, tmp_path, qkscope):
    about = {**provenance(model="\x1b[2J\x9b31mred", n=3), "command": command}
    Result("demo", {}, provenance=about).write(tmp_path / "run")
    code, out, _ = qkscope("view", tmp_path / "run", "--made")
    assert code == 0
    assert command not in out
    assert not {"\x1b", "\x9b"} & set(out)
    assert r"model: \x1b[2J\x9b31mred" in out
    code, out, _ = qkscope("view", tmp_path / "run", "--made", "--json")
    assert not {"\x1b", "\x9b"} & set(out)
    assert json.loads(out)["tables"]["made"]


def test_a_commands_own_words_are_offered(tmp_path, qkscope):
    said = "qkscope decompose 'my file.jsonl' --heads L1H0 --out 'a run' -n 5"
    Result("demo", {}, provenance={**provenance(), "command": said}).write(tmp_path / "run")
    assert f"  command: {said}\n" in qkscope("view", tmp_path / "run", "--made")[1]
