"""Facts about folders and disks: nobody's file is destroyed, and a disk that refuses is a sentence."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from qkscope import BadInput, tasks
from qkscope.findings.fit import load_fit
from qkscope.model.scope import Scope
from qkscope.results.folder import add_to_run, check_folder, write_file
from qkscope.results.result import Result, provenance
from qkscope.show.page import write_report
from qkscope.verbs.decompose import decompose


@pytest.fixture
def no_model(monkeypatch) -> None:
    def load(*given, **options):
        raise AssertionError("a model was loaded before the folder was looked at")

    monkeypatch.setattr(Scope, "load", load)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fitted(scope: Scope, out: Path):
    return decompose(
        scope, tasks.binding(4), ["L1H3"], 16, out=out, contrasts=["order"], batch_size=4
    )


@pytest.mark.parametrize("name", ["../outside.txt", "/nowhere/outside.txt"])
def test_a_file_of_a_run_stays_inside_its_folder(tmp_path, name):
    with pytest.raises(BadInput, match="leads out of its folder"):
        Result("demo", {}, provenance=provenance()).write(tmp_path / "run", files={name: "x"})
    assert not list(tmp_path.rglob("*"))


EVERY = {
    "atlas": ["atlas", "--model", "nano:mixed"],
    "demo": ["demo"],
    "decompose": ["decompose", "binding", "--heads", "L1H3"],
    "sparsity": ["sparsity", "ioi", "--model", "nano:mixed"],
}


@pytest.mark.parametrize("command", EVERY)
def test_a_thesis_survives_every_command(command, tmp_path, qkscope, no_model):
    """As it was found: a folder with a results.json, not ours, was taken for a run and replaced."""
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "results.json").write_text("{}\n")
    (tmp_path / "p" / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    code, out, said = qkscope(*EVERY[command], "--out", tmp_path / "p")
    assert (code, out) == (2, "")
    assert "p holds other files than a run, results.json: name a new folder." in said
    assert contents(tmp_path) == before


def test_weights_are_not_replaced_and_a_link_to_a_folder_stays_one(
    model, tmp_path, qkscope, no_model, scope
):
    weights = shutil.copyfile(model / "model.safetensors", tmp_path / "model.safetensors")
    before = contents(tmp_path)
    code, _, said = qkscope("svd", "--model", model, "--out", weights)
    assert (code, "is a file: name a folder for the results" in said) == (2, True)
    assert contents(tmp_path) == before
    for name in ("fits", "runs"):
        (tmp_path / name).mkdir()
        (tmp_path / f"to {name}").symlink_to(tmp_path / name)
    for seed in (0, 1):
        fitted(scope, tmp_path / "to fits")
        Result("demo", {}, seed=seed).write(tmp_path / "to runs")
        assert Result.read(tmp_path / "runs").seed == seed
    assert load_fit(tmp_path / "fits", scope).heads
    assert all((tmp_path / f"to {name}").is_symlink() for name in ("fits", "runs"))
    (tmp_path / "to nothing").symlink_to(tmp_path / "nothing")
    with pytest.raises(BadInput, match="is a link to a folder that is not there"):
        check_folder(tmp_path / "to nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file: name a folder"):
        check_folder(tmp_path / "file")


def test_a_file_is_ours_by_its_content_and_not_by_its_name(scope, tmp_path):
    """A manifest that was copied beside somebody's own page, and what somebody wrote into files of
    ours.
    """
    theirs = Result("demo", {}).write(tmp_path / "theirs", files={"report.html": "page"})
    (tmp_path / "mine").mkdir()
    shutil.copy(theirs / "manifest.json", tmp_path / "mine")
    fitted(scope, tmp_path / "fit")
    for folder, name in (
        ("mine", "report.html"),
        ("theirs", "report.html"),
        ("fit", "order.safetensors"),
    ):
        (tmp_path / folder / name).write_text("years of work")
        before = contents(tmp_path)
        with pytest.raises(
            BadInput,
            match=f"{name} is not what a run wrote there: keep it elsewhere, or name a new",
        ):
            fitted(scope, tmp_path / "fit") if folder == "fit" else Result("demo", {}).write(
                tmp_path / folder
            )
        assert contents(tmp_path) == before


@pytest.mark.parametrize("place", [".work", ".work/abc", "manifest.json.part", "figures/a.png"])
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
        with pytest.raises(
            BadInput, match=f"holds other files than a run, {place}: name a new folder"
        ):
            write()
    if place == ".work":
        with pytest.raises(BadInput, match="leads out of its folder"):
            add_to_run(tmp_path / "fit", {"report.html": "page"})
    (tmp_path / "a.json").symlink_to(precious / "x")
    write_file(tmp_path / "a.json", "text")
    assert contents(precious) == {"x": b"mine"}


def test_a_page_replaces_only_a_page_that_was_drawn_here(tmp_path):
    shown, names = Result("demo", {}), ("thesis.tex", "mine.html", "link.html")
    (tmp_path / "link.html").symlink_to(tmp_path / "mine.html")
    for name in names:
        (tmp_path / name).write_text("years of work")
        with pytest.raises(BadInput, match=f"{name} is no page that qkscope drew here"):
            write_report(tmp_path / name, shown)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"years of work"}
    run = shown.write(tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    for title in ("one", "two"):  # a run's own page is listed with the rest
        assert title in write_report(tmp_path / "page.html", shown, title=title).read_text()
        assert title in write_report(run / "report.html", shown, title=title).read_text()
    assert (run / "notes.txt").read_text() == "mine"


def test_only_what_is_listed_is_removed_and_an_earlier_run_survives_a_full_disk(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.txt").write_text("mine")
    folder = Result("demo", {}).write(
        tmp_path / "run", files={"figures/a.png": b"a", "figures/b.png": b"b"}
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["figures/a.png", "figures/b.png", "results.json"]
    hostile = {**manifest["files"], "../mine.txt": "", str(tmp_path / "mine.txt"): ""}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": hostile}))
    (folder / ".work").mkdir()
    (folder / ".work" / "piece").write_text("of a run that is not finished")
    Result("demo", {}).write(folder, files={"figures/a.png": b"new"})
    assert set(contents(folder)) == {
        "figures/a.png",
        "manifest.json",
        "results.json",
        ".work/piece",
    }
    assert (tmp_path / "mine.txt").read_text() == "mine"
    # everything is on the disk before the first file takes its place
    folder = Result("demo", {}).write(tmp_path / "run", files={"report.html": "old"})
    before = contents(tmp_path)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for place in (folder, tmp_path / "new"):
        with pytest.raises(BadInput, match="No space left on device"):
            Result("demo", {}).write(place, files={"report.html": "new"})
    assert contents(tmp_path) == before


def test_a_death_at_any_moment_of_writing_leaves_a_folder_that_is_whole_or_can_be_written_again(
    tmp_path, monkeypatch
):
    real, moments = {name: getattr(Path, name) for name in ("replace", "unlink")}, []

    def run(seed: int) -> Path:
        files = {"report.html": f"{seed}", f"figures/{seed}.png": b"png"}
        return Result("demo", {}, seed=seed).write(tmp_path / "run", files=files)

    for last in range(9):
        left = [last]
        run(0)

        def dies(name: str, left=left):
            def step(path: Path, *given, **options):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(5, "the power is gone")
                return real[name](path, *given, **options)

            return step

        with monkeypatch.context() as patch, suppress(BadInput):
            for name in real:
                patch.setattr(Path, name, dies(name))
            run(1)
        if (tmp_path / "run" / "results.json").exists():
            page = (tmp_path / "run" / "report.html").read_text()
            assert page == str(Result.read(tmp_path / "run").seed)
            moments.append(page)
        else:
            moments.append("half")
    assert list(dict.fromkeys(moments)) == ["0", "half", "1"]


OURS = "qkscope decompose 'my file.jsonl' --heads L1H0 --out 'a run' -n 5"


@pytest.mark.parametrize(
    "command",
    [OURS, "qkscope heads ioi; rm -rf ~", "rm -rf ~", "qkscope heads $(reboot)", "qkscope heads 'a\nb'",
     "qkscope 'heads", "qkscope heads \x1b[2J"],
)  # fmt: skip
def test_a_command_is_offered_if_it_is_ours_alone(command, tmp_path, qkscope):
    about = {**provenance(model="\x1b[2J\x9b31mred", n=3), "command": command}
    Result("demo", {}, provenance=about).write(tmp_path / "run")
    code, out, _ = qkscope("view", tmp_path / "run", "--made")
    assert (code, f"command: {command}" in out) == (0, command == OURS)
    assert r"model: \x1b[2J\x9b31mred" in out
    as_json = qkscope("view", tmp_path / "run", "--made", "--json")[1]
    assert not {"\x1b", "\x9b"} & set(out + as_json)
    assert json.loads(as_json)["tables"]["made"]
