"""Facts about the papers' verbs: bad input is a sentence, nobody's file is destroyed, one run at a
time writes.
"""

import json
from pathlib import Path

import pytest

from qkscope.model.scope import Scope

SMOKE = ["reproduce", "lee2026", "fig2", "--preset", "smoke"]
BAD = [
    (["reproduce", "lee2025", "fig2"], "there is no paper 'lee2025' here: there is lee2026"),
    (["reproduce", "lee2026"], "no figure was named"),
    ([*SMOKE, "--out", "/proc/nowhere"], "cannot be written"),
    (
        ["reproduce", "lee2026", "fig9", "--preset", "smoke", "--model", "no/such-model"],
        "no/such-model",
    ),
    (["toy", "retrieval", "--grids", "discrete-9"], "discrete-8"),
    (["toy", "retrieval", "--ranks", "3;5"], "--ranks takes whole numbers with commas between"),
    (["toy", "superposition", "--pairs", "0-4"], "pairs are query-key:logit"),
    (["bench", "--only", "nonsense"], "there is no bench row 'nonsense'"),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("arguments", "says"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD]
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    arguments, says, tmp_path, monkeypatch, qkscope
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    if "--out" not in arguments and arguments[0] != "bench":
        arguments = [*arguments, "--out", "deep/runs"]
    code, out, said = qkscope(*arguments)
    assert (code, out) == (2, "")
    assert says in said
    assert said.startswith("qkscope: ")
    assert said.endswith(".\n")
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


OUTPUTS = {
    "nano": (["train", "nano", "--preset", "smoke"], ""),
    "reproduce": (SMOKE, "lee2026/fig2"),
    "retrieval": (["toy", "retrieval", "--steps", 2], "retrieval"),
    "heads of retrieval": (["toy", "retrieval", "--steps", 2], "heads"),
    "superposition": (["toy", "superposition", "--steps", 2], "superposition"),
    "toys of superposition": (["toy", "superposition", "--steps", 2], "toys"),
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_a_thesis_survives_every_command(command, tmp_path, qkscope, monkeypatch):
    monkeypatch.setattr(Scope, "load", None)  # no model before the folder was looked at
    arguments, below = OUTPUTS[command]
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


def test_toys_train_and_say_how_they_came_out(tmp_path, qkscope):
    code, out, _ = qkscope("toy", "retrieval", "--ranks", "2,2", "--d-head", 8, "--steps", 40, "--lr", "1e-3",
                           "--out", tmp_path, "--json")  # fmt: skip
    (row,) = json.loads(out)["tables"]["heads"]
    assert (code, row["steps"], row["stopped"]) == (0, 40, "out of steps")
    drawn = (tmp_path / "retrieval" / "figures" / "retrieval.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    code, out, _ = qkscope("toy", "superposition", "--p", "0.5,0.2", "--steps", 60, "--every", 20, "--out", tmp_path,
                           "--json")  # fmt: skip
    rows = json.loads(out)["tables"]["alignment"]
    assert (code, len(rows)) == (0, 2 * 2 * 4 * 2), "two p, before and after, four pairs, two sides"
    assert {row["step"] for row in rows if row["control"]} == {0}
    assert {path.parent.name for path in tmp_path.glob("*/results.json")} == {
        "retrieval",
        "superposition",
    }


def test_a_nano_is_trained_with_its_checkpoints_and_its_page(tmp_path, qkscope, monkeypatch):
    from qkscope_papers.nano import train

    small = train.NanoRecipe(layers=1, width=32, heads=2, kv_heads=1, mlp=32, rows=20, prompts=4)
    monkeypatch.setitem(train.PRESETS, "smoke", small)
    code, out, said = qkscope(
        "train", "nano", "--preset", "smoke", "--steps", 4, "--check-every", 2, "--out", tmp_path
    )
    assert code == 0, said
    assert "4 steps" in out
    files = (
        "results.json",
        "report.html",
        "figures/accuracy.png",
        "0/config.json",
        "4/tokenizer.json",
    )
    assert [name for name in files if not (tmp_path / name).exists()] == []
