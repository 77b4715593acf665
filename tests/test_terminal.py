"""What commands print for people: the answer, one small table, the page and the next command; `--all` for the rest."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from qkscope import cli
from qkscope.cli import verbs, views
from qkscope.errors import Terminated

BINDING = ["binding", "--model", "nano:mixed", "--form", "sentence", "--size", "4"]
RULE = re.compile(r"─+(  ─+)*")


@pytest.fixture
def qkscope(monkeypatch, capsys):
    """The command line in this process, 80 columns wide and not a terminal: what it prints."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["qkscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said.out

    return run


def tables(printed: str) -> list[list[str]]:
    """The tables of an output: heading, rule and rows, up to the first line that is none."""
    lines, found = printed.splitlines(), []
    for i, line in enumerate(lines):
        if RULE.fullmatch(line):
            width = len(line)
            rows = []
            for row in lines[i + 1 :]:
                if not row or len(row) > width or any(row[at : at + 2].strip() for at in gaps(line)):
                    break
                rows.append(row)
            found.append([lines[i - 1], line, *rows])
    return found


def gaps(rule: str) -> list[int]:
    return [match.start() for match in re.finditer("  ", rule)]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A fit, and what a process of its own said while it was made."""
    out = tmp_path_factory.mktemp("term") / "fit"
    job = [*BINDING, "--heads", "L1H0,L1H1", "-n", "24", "--replicates", "19", "--out", str(out)]
    env = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "qkscope", "decompose", *job], env=env, capture_output=True, text=True)
    return out, done


def check(printed: str) -> list[str]:
    """One table of at most six columns and ten rows, 80 wide, whose cells stand below their headings."""
    found = tables(printed)
    assert len(found) == 1
    heading, rule, *rows = found[0]
    assert 1 <= len(rows) <= 10
    assert len(gaps(rule)) + 1 <= 6
    assert max(map(len, found[0])) <= 80
    answer = printed.splitlines()[0]
    assert answer
    assert answer != heading
    assert re.match(r"Next: qkscope \w+", printed.splitlines()[-1])
    return found[0]


def test_heads_prints_its_answer_a_small_table_and_a_next_command_that_runs(qkscope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = qkscope("heads", *BINDING, "-n", 16)
    check(printed)
    then = shlex.split(printed.splitlines()[-1].removeprefix("Next: qkscope "))
    assert then[0] == "decompose"
    check(qkscope(*then, "-n", 16, "--replicates", 19))


def test_a_fit_says_where_its_page_is_and_nobody_else_says_anything(fitted):
    out, done = fitted
    assert done.returncode == 0, done.stderr
    check(done.stdout)
    assert f"The page: {out / 'report.html'}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"Next: qkscope swap {out}"
    assert done.stderr == ""


def test_swap_shows_each_feature_beside_its_controls(qkscope, fitted):
    out, _ = fitted
    printed = qkscope("swap", out, "-n", 16)
    heading, _, *rows = check(printed)
    assert heading.split() == ["head", "feature", "kind", "before", "after", "shift"]
    assert {row.split()[2] for row in rows} == {"feature", "random", "key_pca"}
    assert f"The page: {out / 'report.html'}" in printed
    one = qkscope("swap", out, "-n", 16, "--heads", "L1H0")
    assert check(one)[0].split() == ["feature", "kind", "before", "after", "shift", "rank"]
    everything = qkscope("swap", out, "-n", 16, "--all")
    assert len(everything.splitlines()) > 3 * len(printed.splitlines())
    assert {"condition_number", "carried_gain_low"} <= set(everything.split())
    assert len(tables(everything)) >= 2


def test_why_splits_by_the_features_of_a_fit_at_its_first_head(qkscope, fitted):
    prompt = "The hat is in Box O. The jam is in Box Z. The hat is in Box"
    printed = qkscope("why", prompt, "--fit", fitted[0])
    assert printed == qkscope("why", prompt, "--fit", fitted[0], "--head", "L1H0", "--model", "nano:mixed")
    assert "by features: " in printed
    assert len(printed.splitlines()) <= 14
    assert printed.splitlines()[-1] == f"Next: qkscope view --live --fit {fitted[0]}"


def test_why_of_a_fit_with_another_model_is_refused(fitted, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["qkscope", "why", "hat:", "--fit", str(fitted[0]), "--model", "nano:mixed@0"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, "was made with other weights" in capsys.readouterr().err) == (2, True)


def test_a_token_is_named_by_its_place_or_its_text(qkscope):
    asked = ["why", r"hat: O\njam: Z\njam:", "--head", "L1H0", "--model", "nano:mixed", "--query"]
    by_place, by_text = (
        json.loads(qkscope(*asked, *named, "--json")) for named in (["9", "--key", 3], ["jam#2", "--key", "O"])
    )
    assert by_place["tables"] == by_text["tables"]
    assert "attends to 'O' (token 3)" in by_place["answer"] or "'O' (token 3)" in by_place["answer"]


def test_trace_of_a_prompt_says_how_to_keep_it_and_then_how_to_see_it(qkscope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["trace", "--prompt", r"hat: O\njam: Z\njam:", "--heads", "L2H3", "--key", -2, "--model", "nano:mixed"]
    printed = qkscope(*asked)
    assert " different sets of random heads: " in " ".join(printed.split())
    then = printed.splitlines()[-1].removeprefix("Next: ")
    assert (
        then
        == r"qkscope trace --prompt 'hat: O\njam: Z\njam:' --heads L2H3 --key -2 --model nano:mixed --out runs/trace"
    )
    kept = qkscope(*shlex.split(then)[1:])
    assert "The page: runs/trace/report.html" in kept
    assert kept.splitlines()[-1] == "Next: qkscope view runs/trace"
    assert json.loads(qkscope(*asked, "--json"))["answer"] in printed


def test_sparsity_and_svd_print_one_small_table(qkscope, tmp_path):
    for arguments in (
        ["svd", "--model", "nano:mixed"],
        ["sparsity", "ioi", "--model", "nano:mixed", "-n", 8, "--draws", 4, "--out", tmp_path / "ioi"],
    ):
        printed = qkscope(*arguments)
        check(printed)
        assert len(qkscope(*arguments, "--all")) > len(printed)


def test_a_verb_without_a_view_shows_its_claims_or_the_first_columns_that_differ():
    rows = [{"model": "m", **{f"c{i}": i * j for i in range(9)}} for j in range(12)]
    table, count, _ = views.shown("nobody", {"mine": rows})
    assert table.headings == ["c1", "c2", "c3", "c4", "c5", "c6"]
    assert (len(table.cells), count) == (10, 12)
    assert views.shown("nobody", {"mine": []}) is None
    claims = [
        {"claim": "more", "source": "ours", "ours": 0.5, "control": 0.1, "low": 0.4, "high": 0.6, "verdict": "holds"}
    ]
    table, *_ = views.shown("nobody", {"mine": rows, "claims": claims})
    assert table.cells == [["more", "ours", "0.50 [0.40, 0.60]", "0.100", "holds", ""]]


def test_numbers_are_never_cut_and_texts_are_cut_between_words():
    cells = [["L1H0", "what followed an earlier copy of this very token", "0.1234567", "1234567890123"]] * 2
    table = views.Table(["head", "text", "value", "more"], cells, [False, False, True, True])
    for width in range(30, 100):
        lines = table.fitted(width)
        assert max(map(len, lines)) <= width
        assert "0.1234567" in lines[2] or "value" not in lines[0]
        text = lines[2][6:].split("…")[0]
        assert set(text.split()) <= set(" ".join(cells[0]).split())


def test_all_columns_stand_one_below_the_other_where_a_terminal_is_narrow():
    headings, cells = ["head", *(f"column{i}" for i in range(12))], [["L1H0", *("0.123456" for _ in range(12))]]
    table = views.Table(headings, cells, [False] + [True] * 12)
    lines = table.entire(60)
    assert max(map(len, lines)) <= 60
    assert {word for line in lines for word in line.split()} >= set(headings)
    assert len(table.entire(None)) == 3


# ---------------------------------------------------------------- commands from signatures


def test_every_option_has_its_help_from_one_docstring_and_no_parameter_is_lost_by_mistake():
    """What is for Python alone cannot be typed: mappings, functions, lists of numbers, objects."""
    for name in verbs.VERBS:
        for parameter in verbs.signature(verbs.VERBS[name].home)[1]:
            options = verbs.typed(parameter)
            assert all(one.annotation.__metadata__[0].help for one in options), (name, parameter.name)
            if not options:
                python = ("Mapping", "Callable", "Sequence", "Probe", "Targets")
                assert parameter.name == "progress" or any(map(parameter.takes, python)), (name, parameter.name)


def test_defaults_are_those_of_the_function():
    from importlib import import_module
    from inspect import signature

    for name, verb in verbs.VERBS.items():
        module, _, function = verb.home.partition(":")
        own = signature(getattr(import_module(module), function)).parameters
        parameters = {one.name: one for one in verbs.signature(verb.home)[1]}
        assert list(parameters) == list(own), name
        assert all(own[one].default == parameter.default for one, parameter in parameters.items()), name


def test_the_help_answers_at_once_and_names_a_dozen_verbs_first():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "qkscope", "--help"], capture_output=True, text=True
    )
    assert not {"torch", "transformers", "numpy", "pydantic"} & {line.split()[-1] for line in done.stderr.splitlines()}
    assert len([verb for verb in verbs.VERBS.values() if verb.panel == "Commands"]) <= 12


def test_a_schema_names_every_column_that_a_verb_gives(qkscope):
    prompt = ["--model", "nano:mixed", "--json"]
    for verb, arguments in {
        "heads": [*BINDING, "-n", 8, "--json"],
        "why": [r"hat: O\njam: Z\njam:", "--head", "L2H3", *prompt],
        "trace": ["--prompt", r"hat: O\njam: Z\njam:", "--heads", "L2H3", "--neurons", *prompt],
        "svd": prompt,
    }.items():
        schema, result = json.loads(qkscope("schema", verb)), json.loads(qkscope(verb, *arguments))
        assert set(result) == set(schema["required"])
        for name, rows in result["tables"].items():
            assert set(rows[0]) <= set(schema["properties"]["tables"]["properties"][name]["items"]["properties"])


# ---------------------------------------------------------------- where nothing can be printed


@pytest.mark.parametrize(
    ("to", "why"),
    [("| head -1", "Broken pipe"), ("> /dev/full", "No space left on device"), (">&-", "it is closed")],
)
@pytest.mark.parametrize("verb", ["heads", "decompose"])
def test_results_are_written_where_printing_fails(verb, to, why, tmp_path):
    command = [sys.executable, "-m", "qkscope", verb, *BINDING, "-n", "8", "--all", "--out", str(tmp_path / "run")]
    command += ["--heads", "L1H0,L1H1"] if verb == "decompose" else []
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{shlex.join(command)} {to}"], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"qkscope: not all could be printed ({why}); what --out names is written.\n"
    assert {"results.json", "report.html", "manifest.json"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert not (tmp_path / "run" / ".work").exists()


def test_what_is_wrong_is_said_where_nothing_can_be_printed():
    for arguments, code in ((["heads", "nothing"], 2), (["--help"], 1)):
        command = shlex.join([sys.executable, "-m", "qkscope", *arguments])
        done = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1)
        assert "--out" not in done.stderr


def test_ctrl_c_while_the_commands_are_built_is_no_traceback(monkeypatch, capsys):
    for error, code in ((KeyboardInterrupt, 130), (Terminated, 143)):

        def stopped(error=error):
            raise error

        monkeypatch.setattr(cli, "app", stopped)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code, capsys.readouterr().err) == (code, "qkscope: stopped.\n")
