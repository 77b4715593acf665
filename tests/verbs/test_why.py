"""Why: its parts sum, its row and its runs are the model's own, and what cannot be answered is said
in one sentence.
"""

import json

import pytest
import torch
from typer.testing import CliRunner

import qkscope as qk
from qkscope import cli
from qkscope.cli import app
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.findings.next_token import Output, one_token
from qkscope.findings.prompt_trace import AskedPrompt, PromptRun
from qkscope.heads import Head
from qkscope.linear.attribution import direct_effect
from qkscope.model.encode import token_texts
from qkscope.model.scope import Scope
from qkscope.sums.intervals import wilson
from qkscope.verbs.why.many_prompts import Prompts, _differs
from qkscope.verbs.why.splits import part_rows, singular_terms
from qkscope_papers.families import tiny_model

PROMPT = "hat: O\njam: Z\ncat: B\njam:"
IDS = Example(ids=(5, 9, 3, 7, 11, 4, 9))
FAMILIES = ["llama", "gemma2", "gpt_neox"]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request):
    return Scope.from_model(tiny_model(request.param), check=False)


def last_head(scope):
    return Head(scope.n_layers - 1, 1)


def sums(rows):
    found = {}
    for row in rows:
        found[row["by"], row["side"]] = found.get((row["by"], row["side"]), 0) + row["value"]
    return found


def test_parts_of_each_way_sum_to_the_logit(nano):
    one = PromptRun(nano, PROMPT).head("L2H3")
    feature = qk.sums.Subspace.from_delta(torch.eye(nano.d_head), rank=2)
    rows = part_rows(one, {"mine": feature})
    found = sums(rows)
    assert set(found) == {
        ("writers", "key"),
        ("writers", "query"),
        ("singular", "both"),
        ("features", "query"),
    }
    assert all(value == pytest.approx(one.total, abs=1e-4) for value in found.values())
    assert all(row["share"] == pytest.approx(row["value"] / one.total, abs=1e-6) for row in rows)
    assert [row["part"] for row in rows if row["by"] == "features"] == ["mine", "rest"]
    by_token = qk.sums.attribute(nano, PROMPT, "L2H3", {"mine": feature}).tables["split"]
    mine = sum(
        float(one.weights[0, row["key"]]) * row["value"]
        for row in by_token
        if row["part"] == "mine"
    )
    assert next(row["value"] for row in rows if row["part"] == "mine") == pytest.approx(
        mine, abs=1e-4
    )


def test_singular_terms_sum_to_the_logit_by_themselves(tiny):
    one = PromptRun(tiny, IDS).head(last_head(tiny))
    terms = singular_terms(one)
    if terms is None:
        assert tiny.facts.family in ("gpt_neox", "gemma2")
        return
    assert sum(terms) == pytest.approx(one.total, abs=2e-4 * max(1, *map(abs, terms)))


def test_writers_are_those_of_trace(nano):
    found = qk.why(nano, PROMPT, "L2H3", draws=2)
    traced = qk.trace(nano, PROMPT, "L2H3", draws=2)
    assert found.tables["writers"] == traced.tables["writers"]
    by_name = {(row["side"], row["writer"]): row["value"] for row in traced.tables["writers"]}
    for row in found.tables["parts"]:
        if row["by"] == "writers" and row["part"] != "rest":
            assert row["value"] == pytest.approx(by_name[row["side"], row["part"]], abs=1e-5)


def test_the_row_is_the_models_and_cutting_nothing_changes_nothing(tiny):
    probe, head = PromptRun(tiny, IDS), last_head(tiny)
    one = probe.head(head)
    tiny.model.set_attn_implementation("eager")
    with torch.no_grad():
        true = tiny.model(**one.asked.inputs, output_attentions=True)
    row = true.attentions[head.layer][0, head.index, one.asked.query]
    assert torch.allclose(one.attention, row, atol=1e-5)
    assert torch.allclose(one.cut([{}])[0], row, atol=1e-5)
    output = Output(one.run, one.asked)
    assert torch.allclose(output.logits, true.logits[0, one.asked.query], atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_direct_effects_of_a_heads_keys_sum_to_the_heads_own(family):
    """Which all writers' sum to the logits with: test_linear.py."""
    scope = Scope.from_model(tiny_model(family), check=False)
    probe, head = PromptRun(scope, IDS), last_head(scope)
    run, keys = probe.run, [probe.head(head, key=key) for key in range(len(IDS.ids))]
    W = run.reader.output_weights(head.layer)[0][head.index]
    z = run.heads[head.layer][0, 0].unflatten(0, (-1, W.shape[1]))[head.index]
    whole = direct_effect(run, [head.layer], (W @ z)[None])[0].detach()
    found = torch.stack([Output(run, one.asked).from_key(one) for one in keys])
    torch.testing.assert_close(found.sum(0), whole - whole.mean(), atol=1e-4, rtol=1e-4)
    assert len(found[:, 5].unique()) == len(keys)  # each its own


def test_every_family_is_answered_with_a_head_and_without_where_every_head_is_tried(tiny):
    found = qk.why(tiny, IDS, last_head(tiny), draws=2)
    assert {"attention", "parts", "writers", "cuts", "output"} <= set(found.tables)
    assert sums(found.tables["parts"])["writers", "key"] == pytest.approx(
        found.tables["check"][0]["logit"], abs=1e-3
    )
    assert found.tables["check"][0]["sum_error"] < 1e-4
    assert found.tables["cuts"][0].keys() >= {
        "side",
        "writers",
        "before",
        "after",
        "control_low",
        "control_high",
    }

    found = qk.why(tiny, IDS)
    asked = AskedPrompt.of(tiny, IDS, None, False)
    with torch.no_grad():
        true = tiny.model(**asked.inputs).logits[0, asked.query]
    assert repr(str(int(true.argmax()))) in found.answer
    rows = found.tables["heads"]
    assert len(rows) == len(tiny.heads())
    assert ("no single head matters" in found.answer) == all(
        row["direction"] == "neither" for row in rows
    )


def test_a_question_is_answered_in_fourteen_lines(smollm2, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prompt, head = "def area(width, height): return width *", "L23H0"
    found = qk.why(smollm2, prompt, head, draws=2)
    assert "L20H0, L19H2 and L20H8 carried 'width' (tokens 3 and 8) into its query" in found.answer
    cli.print_result(
        found, False, end=cli.end_lines(None, then=f"qkscope why '{prompt}' --head {head}")
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 14
    assert max(map(len, lines)) <= 80


def test_a_head_of_the_first_layer_and_the_shortest_prompt_are_answered(nano):
    found = qk.why(nano, PROMPT, "L0H1", draws=2)
    assert {row["part"] for row in found.tables["parts"] if row["by"] == "writers"} == {
        "embedding",
        "bias",
        "rest",
    }
    arguments = ["why", "hat: O jam: Z jam:", "--model", "nano:mixed"]
    printed = CliRunner().invoke(app, [*arguments, "--head", "L0H0"]).stdout
    assert printed.splitlines()[-1] == "Next: qkscope why 'hat: O jam: Z jam:' --model nano:mixed"
    found = qk.why(nano, "hat", "L1H0", draws=2)  # the query is the only key besides the first
    assert "graph" not in found.tables


@pytest.mark.parametrize(
    ("prompt", "asked", "said"),
    [
        ([], {"heads": "L1H0"}, "no prompts"),
        (["hat: O hat:"] * 2, {"heads": "L1H0", "key": 3}, "asked about in one prompt"),
        (["hat: O hat:"] * 2, {"head": "L1H0", "heads": "L1H0"}, "named once"),
    ],
)
def test_what_cannot_be_asked_is_refused(nano, prompt, asked, said):
    with pytest.raises(BadInput, match=said):
        qk.why(nano, prompt, **asked)


def test_pieces_of_a_character_are_read_whole_or_named(smollm2):
    assert smollm2.place("王芳和李明去了商店。李明把一瓶水给了", "给") == 32
    ids = smollm2.tokenizer.encode("a 🧿 b", add_special_tokens=False)
    texts = token_texts(smollm2, ids)
    assert "".join(texts) == "a 🧿 b"
    at = next(i for i, text in enumerate(texts) if "🧿" in text)
    assert texts[at + 1] == ""
    found = qk.why(smollm2, Example(ids=tuple(ids[: at + 1])), "L3H1", draws=2)  # ends inside it
    assert "a part of a character" in found.answer
    found = qk.why(
        smollm2, "a 🧿 b", "L3H1", query=at + 2 if at + 2 < len(ids) else -1, key=at + 1, draws=2
    )
    assert f"' 🧿' (token {at + 1})" in found.answer
    assert "\ufffd" not in json.dumps([found.answer, found.to_json()["tables"]], ensure_ascii=False)


BOXES = [
    "hat: O\njam: Z\ncat: B\njam:",
    "hat: O\njam: Z\ncat: B\nhat:",
    "pen: K\ncat: B\njam: Z\ncat:",
]
HEADS = ["L1H0", "L2H3"]


@pytest.fixture(scope="module")
def over(nano):
    return qk.why(nano, BOXES, heads=HEADS)


def test_reasons_over_prompts_are_those_of_each_and_intervals_of_those_where_a_head_looks(
    nano, over
):
    rows = over.tables["prompts"]
    assert [(row["prompt"], row["head"]) for row in rows] == [
        (i, head) for i in range(3) for head in HEADS
    ]
    for row in rows:
        alone = qk.why(nano, BOXES[row["prompt"]], row["head"], draws=2)
        attended = max(
            (r for r in alone.tables["attention"] if r["position"]), key=lambda r: r["attention"]
        )
        assert (row["key"], row["attention"]) == (
            attended["position"],
            pytest.approx(attended["attention"], abs=1e-6),
        )
        shown = [r["kind"] for r in alone.tables.get("relation", ()) if r["verdict"] == "shown"]
        assert row["kind"] == ("no look" if row["attention"] < 0.3 else shown[0])
    for row in over.tables["reasons"]:
        own = [r for r in over.tables["prompts"] if r["head"] == row["head"]]
        assert row["count"] == sum(r["kind"] == row["kind"] for r in own)
        assert row["prompts"] == sum(r["kind"] != "no look" for r in own)
        assert (row["low"], row["high"]) == wilson(row["count"], row["prompts"])
        assert f"{row['head']} looks at a token in {row['prompts']}" in over.answer
    assert over.table() == over.tables["reasons"]


def test_a_run_over_prompts_that_was_stopped_goes_on_and_parts_are_added_up(
    nano, over, tmp_path, monkeypatch
):
    made = []

    def stops(self, i, rows=Prompts._tables):
        made.append(i)
        if len(made) == 3:
            raise KeyboardInterrupt
        return rows(self, i)

    monkeypatch.setattr(Prompts, "_tables", stops)
    with pytest.raises(KeyboardInterrupt):
        qk.why(nano, BOXES, heads=HEADS, out=tmp_path / "stopped")
    again = qk.why(nano, BOXES, heads=HEADS, out=tmp_path / "stopped")
    assert made == [0, 1, 2, 2]  # two prompts are a piece
    assert (again.tables, again.answer) == (over.tables, over.answer)
    assert qk.why(nano, BOXES, heads=HEADS, out=tmp_path / "parts", part=(1, 2)).tables == {}
    whole = qk.why(nano, BOXES, heads=HEADS, out=tmp_path / "parts", part=(0, 2))
    assert whole.tables == over.tables
    assert (tmp_path / "parts" / "report.html").is_file()


def test_heads_that_decide_most_often_are_counted_over_prompts(nano):
    found = qk.why(nano, BOXES[:2])
    alone = [qk.why(nano, prompt).tables["heads"] for prompt in BOXES[:2]]
    for row in found.tables["decides"]:
        own = [r for rows in alone for r in rows if r["head"] == row["head"]]
        assert [row["for"], row["against"]] == [
            sum(r["direction"] == way for r in own) for way in ("for", "against")
        ]
        assert row["difference"] == pytest.approx(sum(r["difference"] for r in own) / 2, abs=1e-5)


def test_right_and_wrong_answers_are_told_apart_and_reasons_that_go_with_them_differ(
    nano, tmp_path
):
    lines = [
        {"prompt": prompt, "answer": answer} for prompt, answer in zip(BOXES, "ZOK", strict=True)
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = qk.why(nano, str(path), heads="L1H0")
    said = [qk.why(nano, prompt).answer for prompt in BOXES]
    right = [f"is '{line['answer']}'" in answer for line, answer in zip(lines, said, strict=True)]
    assert [row["right"] for row in found.tables["answers"]] == right
    assert {row["verdict"] for row in found.tables["differs"]} == {"too few"}
    assert "too few to compare (5 of each are needed)" in found.answer

    def rows(kind, right, count):
        return [{"head": "L1H0", "kind": kind, "right": right}] * count

    own = [*rows("same word", True, 18), *rows("position", True, 2), *rows("same word", False, 3)]
    found = {row["kind"]: row for row in _differs([*own, *rows("position", False, 17)])}
    same = found["same word"]
    assert (same["right"], same["wrong"], same["verdict"]) == (0.9, 0.15, "differs")
    assert 0.4 < same["low"] < same["difference"] < same["high"] < 0.9
    assert found["position"]["low"] == pytest.approx(-same["high"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no examples"),
        ('{"prompt": "hat"}', "line 1: besides the first token a head sees itself alone"),
        ('{"prompt": "hat: O hat:", "answer": " "}', "no text of this model"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_asked_is_refused_in_words(nano, tmp_path, text, said):
    (tmp_path / "mine.jsonl").write_text(text)
    with pytest.raises(BadInput, match=said):
        qk.why(nano, str(tmp_path / "mine.jsonl"), heads="L1H0")


def test_a_rival_is_what_is_typed_or_it_is_refused(nano, smollm2):
    for model, text in ((smollm2, " John"), (smollm2, "John"), (smollm2, "…"), (nano, " John")):
        (token,) = model.tokenizer.encode(text, add_special_tokens=False)
        assert one_token(model, text) == token
    for text in ("咖啡", "喝", " Zxqvv", "  John", " John ", "\ud800", " "):
        for model in (smollm2, nano):
            with pytest.raises(BadInput):
                one_token(model, text)
    with pytest.raises(BadInput, match=r"' Zxqvv' is 4 tokens of this model \(' Z', 'x', 'q'"):
        one_token(smollm2, " Zxqvv")
    with pytest.raises(BadInput, match="this model has no token for '咖啡'"):
        qk.why(nano, "hat: O jam: Z jam:", versus="咖啡")
