"""The golden net sees a changed verdict, an exchanged pair of rows, one altered word; and not a
rounding.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / ".ci" / "golden"
RECORD = {
    "answer": [{"answer": "L1H0 at ':' looks at 'Z', because of the word there."}],
    "claims": [{"claim": "it moves", "ours": 0.5, "low": None, "holds": True}],
    "heads": [
        {"head": "L1H0", "accuracy": 0.75, "n": 32, "tokens": ["hat", ":"]},
        {"head": "L0H1", "accuracy": 0.25, "n": 32, "tokens": ["hat", "O"]},
    ],
}


def change_verdict(record: Any) -> None:
    """Another verdict of a claim."""
    record["claims"][0]["holds"] = None


def swap_rows(record: Any) -> None:
    """The same rows in another order."""
    record["heads"].reverse()


def alter_word(record: Any) -> None:
    """One word of the answer."""
    record["answer"][0]["answer"] = record["answer"][0]["answer"].replace("because", "Because")


def alter_float(record: Any) -> None:
    """A number, by more than the tolerance."""
    record["heads"][1]["accuracy"] += 2e-5


def alter_integer(record: Any) -> None:
    """A count."""
    record["heads"][1]["n"] = 33


def alter_list(record: Any) -> None:
    """A text inside a cell."""
    record["heads"][0]["tokens"][1] = ";"


def leave_out_row(record: Any) -> None:
    """The last row."""
    del record["heads"][1]


def rename_column(record: Any) -> None:
    """A column of one row."""
    record["heads"][0]["precision"] = record["heads"][0].pop("accuracy")


def leave_out_table(record: Any) -> None:
    """A whole table."""
    del record["heads"]


SEEN = {
    change_verdict: "claims, row 0, holds: true before, null now",
    swap_rows: 'heads, row 0, head: "L1H0" before, "L0H1" now',
    alter_word: "answer, row 0, answer:",
    alter_float: "heads, row 1, accuracy: 0.25 before, 0.25002 now",
    alter_integer: "heads, row 1, n: 32 before, 33 now",
    alter_list: 'heads, row 0, tokens: ":" before, ";" now',
    leave_out_row: 'heads: "2 rows" before, "1 rows" now',
    rename_column: "heads, row 0, accuracy: 0.75 before,",
    leave_out_table: 'heads: "2 rows" before, null now',
}


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool with one run, whose record is `RECORD`."""
    loader = SourceFileLoader("golden_net", str(FILE))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    monkeypatch.setitem(sys.modules, loader.name, module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(module, "RUNS", {"run": module.Run()})
    answer_with(module, monkeypatch, RECORD)
    return module


def answer_with(golden: ModuleType, monkeypatch: pytest.MonkeyPatch, record: Any) -> None:
    """Let the only run answer this record."""
    monkeypatch.setitem(golden.KINDS, "json", lambda runner, name, run: copy.deepcopy(record))


def test_what_was_kept_is_equal_and_the_kept_bytes_are_too(golden):
    assert golden.main(["keep"]) == 0
    kept = golden.kept_file("run").read_bytes()
    assert golden.main(["compare"]) == 0
    assert golden.main(["keep"]) == 0
    assert golden.kept_file("run").read_bytes() == kept


@pytest.mark.parametrize("change", SEEN)
def test_a_difference_is_printed_and_ends_with_exit_code_1(
    golden, monkeypatch, capsys, change: Callable[[Any], None]
):
    golden.main(["keep"])
    capsys.readouterr()
    changed = copy.deepcopy(RECORD)
    change(changed)
    answer_with(golden, monkeypatch, changed)
    assert golden.main(["compare"]) == 1
    assert SEEN[change] in capsys.readouterr().out


def test_times_and_roundings_are_no_differences(golden, monkeypatch):
    golden.main(["keep"])
    changed = copy.deepcopy(RECORD)
    changed["heads"][0]["accuracy"] *= 1 + 5e-6
    changed["heads"][0]["seconds"] = 3.5
    answer_with(golden, monkeypatch, changed)
    assert golden.main(["compare"]) == 0


def test_a_number_is_measured_by_its_column_not_by_itself(golden):
    before = [{"x": 100.0}, {"x": 0.0}]
    near = [{"x": 100.0}, {"x": 5e-4}]
    far = [{"x": 100.0}, {"x": 2e-3}]
    assert list(golden.table_differences("t", before, near)) == []
    assert [str(each) for each in golden.table_differences("t", before, far)] == [
        "  t, row 1, x: 0.0 before, 0.002 now"
    ]
