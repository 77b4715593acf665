"""What commands print for people: the answer, one small table, the page and the next command;
`--all` for the rest.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from inspect import getsource, signature

import pytest
from rich.cells import cell_len
from rich.console import Console

import qkscope as qk
from forked import command, forked
from qkscope import cli
from qkscope.cli import views
from qkscope.cli.declarations import COMMANDS
from qkscope.cli.options import PRINTED, TASKS
from qkscope.cli.printing import MOST_LINES, end_lines
from qkscope.results.result import Result

BINDING = ["binding", "--model", "nano:mixed", "--form", "sentence", "--size", "4"]
RULE = re.compile(r"─+( ─+)*")


@pytest.fixture
def printed(qkscope, monkeypatch):
    """What a command prints, 80 columns wide and not on a terminal; nothing else is said."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> str:
        code, out, said = qkscope(*arguments)
        assert not code, said
        return out

    return run


def tables(text: str) -> list[list[str]]:
    """The tables of an output: heading, rule and what follows up to an empty line."""
    lines = [line.rstrip() for line in text.splitlines()]
    rules = [i for i, line in enumerate(lines) if RULE.fullmatch(line)]
    return [
        lines[i - 1 : next((j for j in range(i, len(lines)) if not lines[j]), len(lines))]
        for i in rules
    ]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A fit by a process of its own; what that said lies beside it."""
    out = tmp_path_factory.mktemp("term") / "fit"
    job = [*BINDING, "--heads", "L1H0,L1H1", "-n", "24", "--replicates", "19", "--out", str(out)]
    forked(out.parent, command("decompose", *job)).join()
    return out


def following(text: str) -> str:
    """The next command, which a narrow line breaks between its words as a shell does."""
    return text.partition("Next: ")[2].replace("\\\n    ", "").strip()


def check(text: str) -> list[str]:
    """The heading and the rows of one table of at most six columns and ten rows, 80 wide, between
    answer and next.
    """
    ((heading, rule, *rest),) = tables(text)
    rows = rest[: next(i for i, line in enumerate(rest) if ": " in line or "--all prints" in line)]
    assert 1 <= len(rows) <= 10
    assert len(rule.split()) <= 6
    assert max(map(len, (heading, rule, *rows))) <= 80
    assert text.splitlines()[0] not in ("", heading)
    assert re.match(r"qkscope \w+", following(text))
    return [heading, *rows]


def test_an_answer_has_one_small_table_and_a_next_command_that_runs(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sparsity = [
        "sparsity",
        "ioi",
        "--model",
        "nano:mixed",
        "-n",
        8,
        "--draws",
        4,
        "--out",
        tmp_path / "ioi",
    ]
    for arguments in (["svd", "--model", "nano:mixed"], sparsity, ["heads", *BINDING, "-n", 16]):
        text = printed(*arguments)
        check(text)
        assert len(printed(*arguments, "--all")) > len(text)
    then = shlex.split(following(text).removeprefix("qkscope "))
    assert then[0] == "decompose"
    check(printed(*then, "-n", 16, "--replicates", 19))


def test_a_fit_says_where_its_page_is_and_swap_shows_each_feature_beside_its_controls(
    printed, fitted
):
    out, said = fitted, (fitted.parent / "printed").read_text()
    assert (fitted.parent / "said").read_text() == ""  # nobody else says anything
    check(said)
    assert f"The page: {out / 'report.html'}" in said
    assert following(said) == f"qkscope swap {out}"
    text = printed("swap", out, "-n", 16)
    heading, *rows = check(text)
    assert heading.split() == ["head", "feature", "kind", "before", "after", "shift"]
    assert {row.split()[2] for row in rows} == {"feature", "random", "key_pca"}
    page = (out / "report.html").read_text()  # it tells the fit and the swap
    assert all(f'class="block {kind}"' in page for kind in ("spectra", "swaps", "curve"))
    one = printed("swap", out, "-n", 16, "--heads", "L1H0")
    assert check(one)[0].split() == ["feature", "kind", "before", "after", "shift", "rank"]
    everything = printed("swap", out, "-n", 16, "--all")
    assert len(everything.splitlines()) > 3 * len(text.splitlines())
    assert {"condition_number", "carried_gain_low"} <= set(everything.split())
    assert len(tables(everything)) >= 2


def test_why_splits_by_the_features_of_a_fit_and_a_token_is_named_by_its_place_or_its_text(
    printed, fitted
):
    prompt = "The hat is in Box O. The jam is in Box Z. The hat is in Box"
    text = printed("why", prompt, "--fit", fitted)
    assert text == printed(
        "why", prompt, "--fit", fitted, "--head", "L1H0", "--model", "nano:mixed"
    )
    assert "By features  " in text
    assert following(text) == f"qkscope view --live --fit {fitted}"
    asked = ["why", r"hat: O\njam: Z\njam:", "--head", "L1H0", "--model", "nano:mixed", "--query"]
    by_place, by_text = (
        json.loads(printed(*asked, q, "--key", k, "--json")) for q, k in ((9, 3), ("jam#2", "O"))
    )
    assert by_place["tables"] == by_text["tables"]
    assert "'O' (token 3)" in by_place["answer"]


def test_trace_of_a_prompt_says_how_to_keep_it_and_then_how_to_see_it(
    printed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    asked = [
        "trace",
        "--prompt",
        r"hat: O\njam: Z\njam:",
        "--heads",
        "L2H3",
        "--key",
        -2,
        "--model",
        "nano:mixed",
    ]
    text = printed(*asked)
    assert " different sets of random heads: " in " ".join(text.split())
    then = shlex.split(following(text))[1:]
    assert then == [*map(str, asked), "--out", "runs/trace"]
    kept = printed(*then)
    assert "The page: runs/trace/report.html" in kept
    assert kept.splitlines()[-1] == "Next: qkscope view runs/trace"
    assert " ".join(json.loads(printed(*asked, "--json"))["answer"].split()) in " ".join(
        text.split()
    )


def test_a_verb_without_a_view_shows_its_claims_or_the_first_columns_that_differ():
    rows = [{"model": "m", **{f"c{i}": i * j for i in range(9)}} for j in range(12)]
    picked, columns, count, _ = views.shown("nobody", {"mine": rows})
    assert (list(columns), len(picked), count) == (["c1", "c2", "c3", "c4", "c5", "c6"], 10, 12)
    assert views.shown("nobody", {"mine": []}) is None
    claims = [
        {"claim": "more", "ours": 0.5, "control": 0.1, "low": 0.4, "high": 0.6, "verdict": "holds"}
    ]
    picked, columns, *_ = views.shown("nobody", {"mine": rows, "claims": claims})
    (line,) = lines(picked, columns, 80)[2:]
    assert line.split() == ["more", "0.50", "[0.40,", "0.60]", "0.100", "holds"]
    for far in ((None, None), (0.1, 0.4)):  # what stands below a table explains its headings alone
        rows = [
            {"head": "L1H0", "feature": "f", "kind": ("feature", "random")[i], "distance": far[i]}
            for i in (0, 1)
        ]
        assert ("distance: " in views.shown("swap", {"swap": rows})[3]) == (far[0] is not None)


def lines(rows, columns, width: int, **options) -> list[str]:
    """A table as a terminal of this width shows it."""
    console = Console(width=width)
    with console.capture() as text:
        console.print(*views.drawn(rows, columns, width, **options), sep="\n\n")
    return [line.rstrip() for line in text.get().rstrip().splitlines()]


def test_numbers_are_never_cut_and_all_columns_stand_one_below_the_other_where_a_terminal_is_narrow():
    row = {
        "head": "L1H0",
        "text": "what followed an earlier copy of this very token",
        "value": 0.1239,
        "more": 10**12,
    }
    for width in range(30, 100):
        heading, _, cells = lines([row], {name: name for name in row}, width)
        assert max(len(heading), len(cells)) <= width
        assert "0.124" in cells or "value" not in heading
        assert str(10**12) in cells or "more" not in heading
    row = {"head": "L1H0", **{f"column{i}": 0.12345678 for i in range(12)}}
    columns = {name: name for name in row}
    narrow = lines([row], columns, 60, whole=True)
    assert max(map(len, narrow)) <= 60
    assert {word for line in narrow for word in line.split()} >= {*row, "0.1235"}
    assert len(lines([row], columns, 1000, whole=True)) == 3


OTHERS = {
    other.name: other for declared in COMMANDS.values() for other in declared.instead.values()
}


@pytest.mark.parametrize("declared", COMMANDS.values(), ids=COMMANDS)
def test_a_declaration_has_every_parameter_of_its_function_with_its_default(declared):
    module, _, name = declared.function.partition(":")
    function = getattr(import_module(module), name)
    parameters = signature(function).parameters
    options = {option.name: option for option in declared.options}
    assert {*declared.made, *declared.python} <= set(parameters)
    plain = set(parameters) - {*declared.made, *declared.python}
    assert plain <= set(options)
    for name in plain - {"out"}:  # a folder may be needed here, or have a default here
        assert options[name].default == parameters[name].default, name
    for name in parameters:
        assert re.search(rf"^ +(\w+, )*{name}(, \w+)* : ", function.__doc__, re.MULTILINE), name


@pytest.mark.parametrize("declared", OTHERS.values(), ids=OTHERS)
def test_a_command_that_runs_instead_finds_all_its_arguments_among_what_is_typed(declared):
    (typed,) = (each for each in COMMANDS.values() if declared in each.instead.values())
    module, _, name = declared.function.partition(":")
    parameters = signature(getattr(import_module(module), name)).parameters
    options = {option.name: option for option in typed.options}
    assert set(parameters) - {*declared.made} <= set(options)
    for option in declared.options:
        assert option in typed.options, option.name


def test_every_option_has_a_help_and_is_read():
    """By the function itself, by what makes one of its arguments, or by what prints its result."""
    readers = getsource(import_module("qkscope.cli.arguments"))
    for declared in COMMANDS.values():
        parameters = set[str]()
        for other in (declared, *declared.instead.values()):
            module, _, name = other.function.partition(":")
            parameters |= set(signature(getattr(import_module(module), name)).parameters)
        for option in declared.options:
            assert option.help
            made_from = f'values["{option.name}"]' in readers
            assert option.name in parameters or made_from or option in PRINTED, option.name
    assert f"{', '.join(qk.tasks.BUILT_IN)}, or a .jsonl file" == TASKS


def test_the_help_needs_nothing_heavy():
    asked = [sys.executable, "-X", "importtime", "-m", "qkscope", "--help"]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert "demo" in done.stdout
    imported = {line.split()[-1] for line in done.stderr.splitlines()}
    assert not {"torch", "transformers", "numpy", "pydantic"} & imported


def test_a_schema_names_every_column_that_a_verb_gives(printed):
    prompt = ["--model", "nano:mixed", "--json"]
    for verb, arguments in {
        "heads": [*BINDING, "-n", 8, "--json"],
        "why": [r"hat: O\njam: Z\njam:", "--head", "L2H3", *prompt],
        "trace": ["--prompt", r"hat: O\njam: Z\njam:", "--heads", "L2H3", "--neurons", *prompt],
        "svd": prompt,
    }.items():
        schema, result = json.loads(printed("schema", verb)), json.loads(printed(verb, *arguments))
        assert set(result) == set(schema["required"])
        for name, rows in result["tables"].items():
            assert set(rows[0]) <= set(
                schema["properties"]["tables"]["properties"][name]["items"]["properties"]
            )


SAID = [
    "Same word: ' John', replacing one leaves at most 39%, both by the same word 64%: not shown.",
    "Carried by: L20H0 and L19H2 restored in its query: ' John' (token 3) 33% → 60% (control 34%): shown.",
    *[
        "Effect: P(' Mary') 92.3% → 88.9% with this key hidden; direct effect in logits: '给' 李明把一瓶水 +1.5."
    ]
    * 9,
]


@pytest.fixture
def why_result():
    answer = (
        "L23H0 at ' to' (token 13) looks at ' Mary' (token 1), 69%, in part because ' John' appears twice. "
        * 2
    )
    return Result("why", {"said": [{"line": line} for line in SAID]}, answer=answer)


def test_why_takes_fourteen_lines_and_breaks_no_token(why_result, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    then = "qkscope why 'When Mary and John went to the store, John gave a drink to' --head L20H0"
    end = end_lines(None, then=then)
    cli.print_result(why_result, False, False, end)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(cell_len, lines)) <= 80
    assert not [
        line for line in lines if line.endswith("'") and line.count("'") % 2
    ]  # no line ends inside a token
    assert "--all prints the rest." in lines
    assert shlex.split(following("\n".join(lines)))[-2:] == ["--head", "L20H0"]
    cli.print_result(why_result, False, True, end)
    assert capsys.readouterr().out.count("Effect") > 9


def test_on_a_terminal_the_answer_is_bold_and_verdicts_have_colours(why_result, monkeypatch):
    for name, value in {"COLUMNS": "120", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: True)
    cli.print_result(why_result, False)
    text = screen.getvalue()
    assert text.startswith("\x1b[1mL23H0 at ' to'")
    assert "\x1b[33mnot shown\x1b[0m" in text
    assert "\x1b[32mshown\x1b[0m" in text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert 80 < max(map(len, plain.splitlines())) <= 100


def test_why_over_prompts_prints_a_table_and_a_next_command_that_runs(printed, tmp_path):
    prompts = [
        {"prompt": "hat: O\njam: Z\ncat: B\njam:"},
        {"prompt": "hat: O\njam: Z\ncat: B\nhat:"},
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    text = printed("why", tmp_path / "mine.jsonl", "--model", "nano:mixed")
    check(text)
    then = shlex.split(following(text))[1:]
    counted = printed(*then)
    check(counted)
    assert "looks at" in printed(*shlex.split(following(counted))[1:])
    assert "looks at" in printed(
        "why", prompts[0]["prompt"], "--heads", "L1H0", "--model", "nano:mixed"
    )


def broken_pipe():
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def full():
    return open("/dev/full", "w")


UNPRINTABLE = {
    "": (broken_pipe, 1),
    "qkscope: [Errno 28] No space left on device\n": (full, 2),
    " ": (lambda: None, 0),
}


@pytest.mark.parametrize("why", UNPRINTABLE)
def test_results_are_written_where_printing_fails(why, tmp_path, qkscope, monkeypatch):
    """Into a pipe that was closed, onto a full disk, and where there is nothing to print to."""
    stream, code = UNPRINTABLE[why]
    monkeypatch.setattr(sys, "stdout", stream())
    ended, _, said = qkscope("heads", *BINDING, "-n", 8, "--all", "--out", tmp_path / "run")
    assert (ended, said) == (code, why.strip(" "))
    assert {"results.json", "report.html", "manifest.json"} == {
        path.name for path in (tmp_path / "run").iterdir()
    }


def test_ctrl_c_is_no_traceback(monkeypatch, qkscope):
    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stopped)
    assert qkscope("heads") == (130, "", "qkscope: stopped.\n")
