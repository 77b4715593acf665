"""The README's and the docs' Python runs as written, on the embedded model; what their pages call
alike is run once.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

import qkscope as qk
from qkscope.cli import app
from qkscope.texts.task import Task

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def calls():
    """Calls that were made, by what they were asked: pages share their model, ranking, trace and
    fit.
    """
    return {}


@pytest.fixture
def run(calls, capsys, tmp_path, monkeypatch):
    def once(verb):
        def call(*args, **options):
            asked = [(x.name, x.seed, x.asked) if isinstance(x, Task) else id(x) if isinstance(x, qk.Scope) else x
                     for x in args]  # fmt: skip
            key = f"{verb.__qualname__} {asked} {sorted(options.items())}"
            if key not in calls:
                calls[key] = verb(*args, **options)
            return calls[key]

        return call

    def run_blocks(page):
        names: dict = {}
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL):
            exec(compile(block, page, "exec"), names)  # the block is ours, from the file under test
        assert (tmp_path / "report.html").read_text().endswith("</html>")
        return names, capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(qk.Scope, "load", once(qk.Scope.load))
    for verb in ("find_heads", "decompose", "trace", "why"):
        monkeypatch.setattr(qk, verb, once(getattr(qk, verb)))
    return run_blocks


def test_the_ten_lines_run_as_written_and_print_what_is_shown(run):
    names, printed = run("README.md")
    shown = (
        (ROOT / "README.md")
        .read_text()
        .split("$ qkscope why")[1]
        .partition("--all prints")[0]
        .partition("\n")[2]
    )
    answer, same = (
        re.sub(r"[:\s]+", " ", text).strip() for text in (shown, printed)
    )  # a terminal lines up the names
    assert answer in same
    heads = names["heads"].tables["heads"]  # for and against, by hiding keys
    assert "' Mary' (92.3%) rather than ' John'" in names["heads"].answer
    assert {"L23H3", "L20H0"} <= {row["head"] for row in heads[:5] if row["direction"] == "for"}
    assert next(row for row in heads if row["head"] == "L24H4")["direction"] == "against"


def test_the_twenty_lines_run_as_written(run):
    names, printed = run("docs/api.md")
    assert "prefers the right key" in printed
    assert "lexical at L18H6: rank" in printed
    ranked = {row["head"]: row for row in names["ranking"].top("row_accuracy")}
    assert next(iter(ranked)) == "L18H6"
    assert (
        ranked["L18H6"]["row_accuracy"] > 0.75 > 0.65 > ranked["L18H7"]["row_accuracy"]
    )  # it looks elsewhere mostly
    assert {"L18H6", "L17H5", "L17H3"} <= {
        str(head) for head in names["ranking"].above(0.30, by="row_accuracy")
    }
    assert f"# {', '.join(map(str, names['heads']))}\n" in (ROOT / "docs" / "api.md").read_text()
    assert "L17H8" in names["circuit"].answer
    order, lexical = (names["fit"][contrast, "L18H6"] for contrast in ("order", "lexical"))
    assert order.rank < lexical.rank <= 14
    assert (order.controls.verdict, lexical.controls.verdict) == ("not specific", "interaction"), (
        "as its swaps say"
    )
    rows = {row["condition"]: row for row in names["swaps"].table()}
    assert rows["both"]["orig_before"] >= 0.7
    assert rows["both"]["orig_after"] < 0.3 < rows["random_both"]["orig_after"]
    assert rows["both"]["target_after"] >= 0.3 > 0.1 >= rows["both"]["target_before"]
    assert rows["lexical"]["shift"] > rows["order"]["shift"]
    assert rows["sham_both"]["orig_after"] == pytest.approx(
        rows["sham_both"]["orig_before"], abs=0.1
    )
    assert re.search(r"^both feature \d+ 0\.[0-2]", printed, flags=re.MULTILINE)
    assert re.search(r"^both random \d+ 0\.[4-9]", printed, flags=re.MULTILINE)
    for row in names["parts"].tables["tokens"]:
        assert row["logit"] == pytest.approx(
            row["order"] + row["lexical"] + row["residual"], abs=1e-3
        )
    boxes = [
        row for row in names["parts"].tables["tokens"] if row["token"].strip() in ("O", "Z", "B")
    ]
    assert max(boxes, key=lambda row: row["lexical"])["token"].strip() == "Z", (
        "because of the word, not of the place"
    )


def test_the_ten_minute_start_runs_as_written_and_prints_what_it_shows(run):
    def words(text):
        return " ".join(
            re.findall(r"[A-Za-z]+", text)
        )  # digits differ in the last place from machine to machine

    _, printed = run("docs/start.md")
    page = (ROOT / "docs" / "start.md").read_text()
    for shown in re.findall(r"<!-- printed -->\n```text\n(.*?)```", page, flags=re.DOTALL):
        assert words(shown) in words(printed)


def test_the_readme_names_the_two_commands_and_every_verb_with_options_that_it_takes():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    table = text.split("| verb | what it gives |")[1].split("\n\n")[0]
    root = typer.main.get_command(app)
    named: dict = {}
    papers = find_spec("qkscope_papers") is not None  # the wheel alone has none of their verbs
    rows = [
        row
        for row in table.splitlines()[2:]
        if papers or not re.search(r"with papers|\[papers\]", row)
    ]
    for row in rows:
        verbs = [command.split()[0] for command in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
        for verb in verbs:
            named.setdefault(verb, set()).update(
                re.findall(r"(?<![\w-])--[a-z]+", row) if len(set(verbs)) == 1 else ()
            )
    assert set(named) == set(root.list_commands(None))
    for verb, options in named.items():
        known = {name for option in root.get_command(None, verb).params for name in option.opts} | {
            "--json"
        }
        assert options <= known, f"{verb} takes no {options - known}"
