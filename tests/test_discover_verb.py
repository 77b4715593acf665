"""Discover and atlas on the embedded model, their pages, and what they refuse before a model is loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import qkscope as qk
from qkscope.analyses.gather import gather
from qkscope.analyses.relations import RELATIONS, main_relation, relation_rows
from qkscope.analyses.texts import corpus, passages, text_examples
from qkscope.capture.families import tiny_model
from qkscope.capture.scope import Scope
from qkscope.examples import Example
from qkscope.maths.discovery import SelfContrast
from qkscope.page.cards import add_section
from qkscope.page.figures.discovery import draw_atlas, draw_discovery


@pytest.fixture(scope="module")
def scope() -> Scope:
    return Scope.load("smollm2-135m", device="cpu")


@pytest.fixture(scope="module")
def found(scope):
    task = qk.tasks.binding(5, seed=0)
    return qk.discover(
        scope, task, "L18H6", n=128, directions=3, replicates=199, contrasts=["lexical"], sizes=(1, 4), progress=False
    )


def test_a_task_gives_features_with_evidence_and_a_curve_beside_the_labelled_contrast(found):
    (head,) = found.tables["heads"]
    assert head["directions"] >= 1
    assert head["q"] <= 0.01
    assert sum(row["size"] for row in found.tables["features"]) + head["rejected"] == head["directions"]
    for row in found.tables["features"]:
        assert 0 <= row["match"] <= 1
        assert row["carried_low"] <= row["carried"] <= row["carried_high"]
        assert row["nearest_contrast"] == "lexical"
    curve = {(row["method"], row["k"]): row for row in found.tables["curve"]}
    methods = {"self_contrast", "lexical", "cov_qk", "key_pca", "omega_svd", "ceiling", "random"}
    assert {(name, k) for name in methods for k in (1, 4)} <= set(curve)
    for row in curve.values():
        assert {"orig_before", "target_before", "orig_after", "target_after", "low", "high"} <= set(row)
    assert curve["self_contrast", 4]["shift"] > curve["random", 4]["shift"] + 0.05
    assert curve["self_contrast", 4]["low"] > curve["random", 4]["high"]


def test_examples_mark_the_tokens_they_name(found):
    assert found.tables["examples"]
    for row in found.tables["examples"]:
        for side in ("query", "key"):
            assert row["text"][row[f"{side}_start"] : row[f"{side}_stop"]] == row[side]


def test_the_page_holds_a_card_per_feature_and_escapes_text(found):
    tables = {**found.tables, "examples": [dict(row, text="<qk>" + row["text"]) for row in found.tables["examples"]]}
    page = draw_discovery(replace(found, tables=tables))["report.html"]
    assert page.count('<article class="card') == len(found.tables["features"])
    assert "<qk>" not in page
    assert "mark class=" in page
    with pytest.raises(ValueError, match="answer"):
        add_section("<html></html>", "x")


def test_an_atlas_has_every_head_and_its_page_sorts(scope, tmp_path):
    heads = ["L14H3", "L17H5", "L18H6", "L5H1", "L18H8"]
    found = qk.atlas(scope, corpus(), 40, heads=heads, test=12, progress=False)
    rows = {row["head"]: row for row in found.table()}
    assert set(rows) == set(heads)
    assert rows["L14H3"]["directions"] >= 3
    assert rows["L14H3"]["carried"] > rows["L14H3"]["carried_random"]
    assert rows["L14H3"]["logit_share"] > 0.2
    assert rows["L14H3"]["relation"] == "the same token"
    assert rows["L14H3"]["relation_rate"] > 0.3 > 3 * rows["L14H3"]["relation_chance"]
    assert rows["L17H5"]["relation"] == "what followed it"
    assert (rows["L18H8"]["verdict"], rows["L18H8"]["directions"]) == ("rests on the first token", 0)
    page = draw_atlas(found)["report.html"]
    assert page.count("<tr data-verdict") == len(heads)
    assert page.count(">the same token (") == 1
    assert "script-src 'sha256-" in page
    found.write(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "results.json").read_text())["experiment"] == "atlas"


def test_relations_are_read_off_the_tokens():
    """One text, 5 6 7 5 6 9: from the second 5 the first head picks the first 5, the second head the 6 after it."""
    scope = Scope.from_model(tiny_model("gpt2"))
    looked = gather(scope, [Example(ids=(5, 6, 7, 5, 6, 9), queries=((3, 4), (4, 5)))], scope.parse("L0H0,L0H1"),
                    space="post_rope", skip=1, draws=2, progress=False)  # fmt: skip
    places = {"top_place": torch.tensor([[0, 1], [1, 2]]), "mass": torch.ones(2, 2)}
    places["drawn_place"] = torch.tensor([[[2, 3], [2, 3]], [[3, 4], [3, 4]]])
    places["drawn_mask"] = torch.ones(2, 2, 2, dtype=torch.bool)
    rows = {(row["head"], row["relation"]): row for row in relation_rows(scope, replace(looked, **places))}
    assert {name: rows["L0H0", name]["rate"] for name in RELATIONS} == {
        "itself": 0.0, "the token before": 0.0, "two to five back": 1.0, "the same token": 1.0, "what followed it": 0.0,
        "punctuation": 0.0, "a blank": 0.0,
    }  # fmt: skip
    assert {name: rows["L0H1", name]["rate"] for name in ("two to five back", "what followed it")} == {
        "two to five back": 1.0, "what followed it": 1.0,
    }  # fmt: skip
    chance = {name: rows["L0H0", name]["chance"] for name in ("itself", "the token before", "two to five back")}
    assert chance == {"itself": 0.5, "the token before": 0.5, "two to five back": 0.0}
    assert main_relation(list(rows.values()), "L0H0")["relation"] in ("the same token", "two to five back")
    weightless = {**places, "mass": torch.zeros(2, 2)}
    assert relation_rows(scope, replace(looked, **weightless)) == []
    assert main_relation([], "L0H0")["relation"] is None


def test_parts_of_a_text_merge_to_the_whole(scope):
    examples = text_examples(scope, corpus()[:8], queries=3)
    heads = scope.parse("L2H0,L2H4")
    options = {"space": "query_frame", "batch_size": 4, "progress": False}
    whole, *parts = (SelfContrast(heads, scope.d_head, kv_of_head=[0, 1]) for _ in range(3))
    looked = gather(scope, examples, heads, contrast=whole, **options)
    for part, own in zip(parts, (examples[:4], examples[4:]), strict=True):
        gather(scope, own, heads, contrast=part, keep=False, **options)
    torch.testing.assert_close(parts[0].merge(parts[1]).delta(), whole.delta(), atol=1e-4, rtol=1e-3)
    rows, keep = looked.own_swaps(1)
    attention = rows.attention(rows.products())[:, 0]
    torch.testing.assert_close(attention[:, 0], (looked.top_logit - looked.whole).exp()[keep, 1], atol=1e-4, rtol=1e-3)


def test_a_query_that_sees_only_what_is_left_out_does_not_count():
    scope = Scope.from_model(tiny_model("gpt2"))
    ids = [torch.randint(5, 90, (12,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(40)]
    examples = [Example(ids=tuple(own)) for own in ids]
    heads = scope.parse("L0H0")
    some = gather(scope, examples, heads, space="post_rope", skip=11, progress=False)
    assert bool(((some.mass > 0) & (some.mass < 1)).all())
    none = gather(scope, examples, heads, space="post_rope", skip=12, progress=False)
    assert not bool(none.valid.any())
    assert float(none.mass.max()) == 0.0
    contrast = SelfContrast(heads, scope.d_head)
    gather(scope, examples, heads, contrast=contrast, keep=False, space="post_rope", skip=12, progress=False)
    with pytest.raises(qk.BadInput, match="more than the first token"):
        contrast.delta()


def test_passages_are_bounded_and_lose_nothing():
    text = "\n\n".join(f"Line {i} of a text that goes on and on." * (1 + i % 30) for i in range(60))
    cut = passages(text)
    assert max(map(len, cut)) <= 480
    assert "".join("".join(cut).split()) == "".join(text.split())


def test_the_corpus_is_large_varied_and_written_by_its_script():
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
    from corpus import write

    shipped = Path(qk.__file__).parent / "data" / "corpus.txt"
    assert shipped.read_text(encoding="utf-8") == write()
    assert shipped.stat().st_size > 300_000
    assert len(set(corpus())) > 1000


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["one short text"] * 200, "over and over"),
        (["a", "b", "c"], "too few"),
        ("one string", "list of strings"),
    ],
)
def test_too_little_text_is_refused_with_how_much_is_needed(texts, message):
    from qkscope.analyses.texts import checked_texts

    with pytest.raises(qk.BadInput, match=message):
        checked_texts(texts)


def test_too_few_queries_for_the_directions_are_refused(scope):
    with pytest.raises(qk.BadInput, match="16 directions need 160 queries"):
        qk.discover(scope, qk.tasks.binding(5), "L18H6", n=20)
    with pytest.raises(qk.BadInput, match="pre_rope"):
        qk.discover(scope, corpus(), "L18H6", space="pre_rope")


@pytest.mark.parametrize(
    "arguments",
    [
        ["discover", "nothing.txt", "--heads", "L1H1"],
        ["discover", "binding", "--heads", "nonsense"],
        ["discover", "binding", "--heads", "L1H1", "--space", "pre_rope"],
        ["discover", "corpus", "--heads", "L1H1", "--contrasts", "order"],
        ["discover", "binding", "--heads", "L1H1", "--contrasts", "colour"],
        ["discover", "binding", "--heads", "L1H1", "--directions", "0"],
        ["atlas", "nothing.txt"],
        ["atlas", "--n", "0"],
        ["atlas", "binding"],
    ],
)
def test_bad_commands_are_one_sentence_before_a_model_is_loaded(arguments, tmp_path, capsys, monkeypatch):
    from qkscope.cli import main

    monkeypatch.setattr("sys.argv", ["qkscope", *arguments, "--out", str(tmp_path / "out"), "--model", "no/such/model"])
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "Traceback" not in error
    assert "no/such/model" not in error
    assert not (tmp_path / "out").exists()


def test_a_file_of_one_repeated_line_is_refused(tmp_path, capsys, monkeypatch):
    from qkscope.cli import main

    path = tmp_path / "same.txt"
    path.write_text("The same line again.\n\n" * 500)
    monkeypatch.setattr("sys.argv", ["qkscope", "atlas", str(path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "different passages" in capsys.readouterr().err
