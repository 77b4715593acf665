"""Compiled programs: the models are Tracr's, and trace finds in them what their weights say."""

import pytest
import torch

import qkscope as qk
from qkscope.heads import Head
from qkscope_bench.known.compiled import FIRST, load_program, programs
from qkscope_bench.known.programs import looks_of, patched, score, word_rows, writer_rows


def test_every_program_attends_as_tracr_said_and_a_selector_true_everywhere_splits_nothing():
    for name, said in programs().items():
        scope = load_program(name)
        for layer, rows in enumerate(said["logits"]):
            for head, row in enumerate(rows):
                ours = scope.attention(" ".join([FIRST, *said["test"]]), f"L{layer}H{head}")
                torch.testing.assert_close(ours, torch.tensor(row).softmax(-1), rtol=0, atol=1e-5)
    found = qk.trace(
        load_program("count_less_freq"), f"{FIRST} a b c", "L1H0", query=1, key=2, depth=0, draws=1
    )
    assert "there is no relative logit to split" in found.answer


@pytest.mark.parametrize(("name", "head"), [("reverse", "L3H0"), ("sort_freq", "L3H0")])
def test_trace_finds_the_true_writers_and_changes_the_true_words(name, head):
    scope, look = load_program(name), next(looks_of(name, head, 1, 0))
    found = qk.trace(
        scope, " ".join(look.tokens), head, query=look.query, key=look.key, depth=0, draws=1
    )
    parts = {(row["side"], row["writer"]): abs(row["share"]) for row in found.tables["writers"]}
    assert {
        side: {w for (s, w), value in parts.items() if s == side and value > 0.01}
        for side in ("query", "key")
    } == {side: set(writers) for side, writers in programs()[name]["truth"][head].items()}
    assert score(writer_rows(name, head, "trace", parts))["recall"] == 1
    words = word_rows(scope, name, head, look)
    assert [row["cause"] for row in words] == [row["program_says"] for row in words]
    around, along = patched(scope, Head.parse(head), look).values()
    assert (
        around.keys()
        == along.keys()
        == {("both", writer) for side, writer in parts if side == "key"} - {("both", "bias")}
    )
