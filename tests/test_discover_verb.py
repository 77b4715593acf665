"""Discover and atlas on the embedded model, their pages, and what they refuse before a model is loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import qkscope as qk
from qkscope.analyses.discover.rows import RELATIONS, main_relation, relation_rows
from qkscope.analyses.discover.study import Options, Study
from qkscope.analyses.discover.texts import cut, passages, text_examples
from qkscope.capture.families import tiny_model
from qkscope.capture.scope import Scope
from qkscope.examples import Example
from qkscope.page.blocks import blocks_of
from qkscope.page.figures import draw_atlas, draw_discovery
from qkscope.runs.result import Result, plain_value
from qkscope.tasks.texts import Document, python_texts


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


def test_the_learned_ceiling_can_be_left_out():
    nano, options = Scope.load("nano:mixed", device="cpu"), {"directions": 2, "sizes": [1], "progress": False}
    short = qk.discover(nano, qk.tasks.induction(), "L1H1", 40, contrasts=["word"], ceiling=False, **options)
    methods = [row["method"] for row in short.tables["curve"]]
    assert "ceiling" not in methods
    assert {"self_contrast", "word", "cov_qk", "omega_svd", "random"} <= set(methods)


def test_examples_mark_the_tokens_they_name(found):
    assert found.tables["examples"]
    for row in found.tables["examples"]:
        for side in ("query", "key"):
            assert row["text"][row[f"{side}_start"] : row[f"{side}_stop"]] == row[side]


def test_the_page_holds_a_card_per_feature_and_escapes_text(found):
    tables = {**found.tables, "examples": [dict(row, text="<qk>" + row["text"]) for row in found.tables["examples"]]}
    changed = replace(found, tables=tables)
    page = draw_discovery(changed)["report.html"]
    assert "<qk>" not in page
    assert page.count('<section class="block cards">') == len(found.tables["heads"])
    cards = [block for block in blocks_of(changed) if block.kind == "cards"]
    assert sum(len(block.options["cards"]) for block in cards) == len(found.tables["features"])
    assert [row for block in cards for row in block.options["examples"]] == plain_value(tables["examples"])
    assert page.index("block cards") < page.index("block curve")


def test_an_atlas_has_every_head_and_its_page_sorts(scope, tmp_path):
    heads = ["L14H3", "L17H5", "L18H6", "L5H1", "L18H8"]
    found = qk.atlas(scope, python_texts(), 40, heads=heads, test=12, progress=False)
    rows = {row["head"]: row for row in found.table()}
    assert set(rows) == set(heads)
    assert rows["L14H3"]["directions"] >= 3
    assert rows["L14H3"]["carried"] > rows["L14H3"]["carried_random"]
    assert rows["L14H3"]["logit_share"] > 0.2
    assert rows["L14H3"]["relation"] == "the same token"
    assert rows["L14H3"]["relation_rate"] > 0.3 > 3 * rows["L14H3"]["relation_chance"]
    assert rows["L17H5"]["relation"] == "what followed it"
    assert (rows["L18H8"]["verdict"], rows["L18H8"]["directions"]) == ("rests on the first token", 0)
    assert (rows["L17H5"]["key_writer"], rows["L17H5"]["query_writer"]) == ("L16H0", "M0")
    block, reads = blocks_of(found)
    assert (block.kind, reads.kind) == ("atlas", "reads")
    assert block.rows == plain_value(found.tables["atlas"])
    assert block.options["said"]["L14H3"]["relation"].startswith("an earlier copy (")
    assert set(block.options["examples"]) <= set(heads)
    page = draw_atlas(found)["report.html"]
    found.write(tmp_path / "run")
    assert draw_atlas(Result.read(tmp_path / "run"))["report.html"] == page
    assert json.loads((tmp_path / "run" / "results.json").read_text())["experiment"] == "atlas"


def test_relations_are_read_off_the_tokens():
    """Texts that begin 5 6 7 5 6: from the second 5 the first head picks the first 5, the second the 6 after it."""
    scope = Scope.from_model(tiny_model("gpt2"))
    texts = [Example(ids=(5, 6, 7, 5, 6, 8 + i), queries=((3 + i, 4 + i),)) for i in range(2)]
    study = Study(scope, tuple(scope.parse("L0H0,L0H1")), Options(space="post_rope", progress=False))
    seen = study.rows("rows", texts, 2)
    places = {"top_place": torch.tensor([[0, 1], [1, 2]]), "mass": torch.ones(2, 2)}
    places["drawn_place"] = torch.tensor([[[2, 3], [2, 3]], [[3, 4], [3, 4]]])
    places["drawn_mask"] = torch.ones(2, 2, 2, dtype=torch.bool)
    rows = {(row["head"], row["relation"]): row for row in relation_rows(scope, replace(seen, **places))}
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
    assert relation_rows(scope, replace(seen, **weightless)) == []
    assert main_relation([], "L0H0")["relation"] is None


def test_parts_of_a_text_merge_to_the_whole(scope):
    examples = text_examples(scope, cut(python_texts())[0][:8], queries=3)
    study = Study(scope, tuple(scope.parse("L2H0,L2H4")), Options(batch_size=4, progress=False))
    whole, *parts = (study.contrast() for _ in range(3))
    seen = study.rows("rows", examples, 2, whole)
    for part, own in zip(parts, (examples[:4], examples[4:]), strict=True):
        study.add("sums", own, part)
    torch.testing.assert_close(parts[0].merge(parts[1]).delta(), whole.delta(), atol=1e-4, rtol=1e-3)
    swaps, row = seen.swaps(1)
    attention = swaps.rows.attention()[:, 0]
    torch.testing.assert_close(attention[:, 0], (seen.top_logit - seen.whole).exp()[row, 1], atol=1e-4, rtol=1e-3)


def test_a_query_that_sees_only_what_is_left_out_does_not_count():
    scope = Scope.from_model(tiny_model("gpt2"))
    ids = [torch.randint(5, 90, (12,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(40)]
    examples = [Example(ids=tuple(own)) for own in ids]
    some, none = (
        Study(scope, tuple(scope.parse("L0H0")), Options(space="post_rope", skip=skip, progress=False))
        for skip in (11, 12)
    )
    mass = some.rows("rows", examples, 2).mass
    assert bool(((mass > 0) & (mass < 1)).all())
    contrast = none.contrast()
    rows = none.rows("rows", examples, 2, contrast)
    assert not bool(rows.valid.any())
    assert float(rows.mass.max()) == 0.0
    assert rows.rests(0)
    with pytest.raises(qk.BadInput, match="more than the first token"):
        contrast.delta()


def test_passages_are_bounded_and_lose_nothing():
    text = "\n\n".join(f"Line {i} of a text that goes on and on." * (1 + i % 30) for i in range(60))
    cut = passages(text)
    assert max(map(len, cut)) <= 480
    assert "".join("".join(cut).split()) == "".join(text.split())


def test_documents_are_cut_into_passages_that_know_their_document():
    texts = [Document("a", "One.\n\n" * 200), Document("b", "Two. " * 300)]
    pieces, text_of = cut(texts)
    assert [{text_of[i] for i, piece in enumerate(pieces) if word in piece} for word in ("One", "Two")] == [{0}, {1}]
    assert cut(["as it is"]) == (("as it is",), (0,))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["one short text"] * 200, "over and over"),
        (["a", "b", "c"], "too few"),
        ("one string", "list of strings"),
    ],
)
def test_too_little_text_is_refused_with_how_much_is_needed(texts, message):
    from qkscope.analyses.discover.texts import checked_texts

    with pytest.raises(qk.BadInput, match=message):
        checked_texts(texts)


def test_too_few_queries_for_the_directions_are_refused(scope):
    with pytest.raises(qk.BadInput, match="16 directions need 160 queries"):
        qk.discover(scope, qk.tasks.binding(5), "L18H6", n=20)
    with pytest.raises(qk.BadInput, match="pre_rope"):
        qk.discover(scope, python_texts(), "L18H6", space="pre_rope")


@pytest.mark.parametrize(
    "arguments",
    [
        ["discover", "nothing.txt", "--heads", "L1H1"],
        ["discover", "binding", "--heads", "nonsense"],
        ["discover", "binding", "--heads", "L1H1", "--space", "pre_rope"],
        ["discover", "python", "--heads", "L1H1", "--contrasts", "order"],
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


def _missing(rows, missing, *names):
    return [{**row, **{name: missing for name in row if name.startswith(names)}} for row in rows]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_legend_of_the_curve_fits_its_figure(found, count):
    from qkscope.page.figures import _curve

    rows = [{**row, "head": f"L{i}H0"} for i in range(count) for row in found.tables["curve"]]
    figure = _curve(replace(found, tables={"curve": rows}))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    inside, whole = legend.get_window_extent(), figure.bbox
    assert {"self contrast", "random"} <= {text.get_text() for text in legend.get_texts()}
    assert whole.x0 <= inside.x0 < inside.x1 <= whole.x1
    assert whole.y0 <= inside.y0 < inside.y1 <= whole.y1


def test_pages_say_once_what_is_marked_and_what_the_bars_are(found):
    cards = [block for block in blocks_of(found) if block.kind == "cards"]
    assert [block.options["marks"] for block in cards] == [["query", "key"], *[[]] * (len(cards) - 1)]
    bars = [card["bars"][0] for block in cards for card in block.options["cards"]]
    assert [bar[2:] for bar in bars] == [
        [row["carried"], row["carried_low"], row["carried_high"]] for row in found.tables["features"]
    ]
    head = {name: found.tables["heads"][0][name] for name in ("head", "directions", "q", "mass", "top_weight")}
    row = {**head, "layer": 18, "index": 6, "logit_share": 0.1, "carried": 0.1, "carried_key_pca": 0.1,
           "carried_random": 0.1, "relation": None, "verdict": "above the null"}  # fmt: skip
    itself = {**found.tables["examples"][0]}
    itself |= {f"key_{end}": itself[f"query_{end}"] for end in ("start", "stop")}
    atlas = replace(found, experiment="atlas", tables={"atlas": [row], "examples": [itself]})
    assert blocks_of(atlas)[0].options["marks"] == ["query", "key", "both"]


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_what_could_not_be_measured_is_a_dash(found, missing):
    tables = {
        **found.tables,
        "heads": _missing(found.tables["heads"], missing, "diagonal", "mass"),
        "features": _missing(found.tables["features"], missing, "carried", "match", "stability"),
        "curve": [*_missing(found.tables["curve"][:3], missing, "carried", "shift", "low", "high"),
                  *found.tables["curve"][3:]],
    }  # fmt: skip
    block = next(block for block in blocks_of(replace(found, tables=tables)) if block.kind == "cards")
    for card in block.options["cards"]:
        assert "Query and key agree by – (chance –)" in card["facts"]
        assert "find the same by –" in card["facts"]
        assert [value for _, _, *values in card["bars"] for value in values] == [None] * 12  # which are drawn as dashes
    assert "– of its attention is off the first token" in block.words
    assert "Like meets like" not in block.words
    assert "nan" not in str(block.options["cards"]).lower() + block.words
    known = {**found.tables, "heads": [{**row, "diagonal": 0.5, "diagonal_null": 0.4} for row in found.tables["heads"]]}
    assert "Like meets like: 50%" in blocks_of(replace(found, tables=known))[0].words


_CONTRAST = """([what, property]) => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const weights = [0.2126, 0.7152, 0.0722];
  const light = (colour) => rgb(colour).reduce((sum, v, i) => sum + weights[i] * linear(v / 255), 0.05);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll(what)].map((node) => {
    const colour = getComputedStyle(node)[property], own = light(colour);
    return [rgb(colour).join(), Math.max(own, paper) / Math.min(own, paper)];
  });
}"""  # what is drawn, as it is seen: its colour, and its contrast with the paper


@pytest.mark.parametrize("dark", [False, True])
def test_every_method_has_a_colour_of_its_own_that_is_seen(found, tmp_path, dark):
    from browser import Watched, chromium

    path = tmp_path / "report.html"
    rows = [*found.tables["curve"], *({**row, "method": f"other_{i}"} for i in range(6) for row in
            found.tables["curve"] if row["method"] == "random"),
            *({**row, "method": "order"} for row in found.tables["curve"] if row["method"] == "lexical")]  # fmt: skip
    rows[0] = {**rows[0], "shift": None, "low": None, "high": None}
    features = [{**row, "carried_random": None} for row in found.tables["features"]]
    changed = replace(found, tables={**found.tables, "curve": rows, "features": features})
    path.write_text(draw_discovery(changed)["report.html"])
    methods = list(dict.fromkeys(row["method"] for row in rows))
    with chromium() as browser:
        watched = Watched(browser, path.as_uri(), dark=dark)
        page = watched.page
        lines = page.evaluate(_CONTRAST, ["section.curve .legend line", "stroke"])
        bars = page.evaluate(_CONTRAST, [".card rect", "fill"])
        before = page.locator("section.curve polyline").count()
        texts = page.locator(".card text.soft").all_text_contents()
        shown = page.locator(".card blockquote").all_text_contents()
        marked = page.locator(".card mark").count()
        page.locator('section.curve [data-method="cov_qk_all"]').click()
        page.locator('section.curve [data-method="random"]').click()
        page.locator('section.curve [data-method="lexical_moving"]').click()
        after = page.locator("section.curve polyline").count()
        assert "NaN" not in page.locator("section.curve .chart").inner_html()
        assert watched.errors == []
    assert len({colour for colour, _ in lines}) == len(lines) == len(methods)
    assert len(bars) == 3 * len(features)  # one of the four was not measured
    assert texts.count("–") == len(features)
    assert f"{features[0]['carried']:.2f} [{features[0]['carried_low']:.2f}, " in texts[0]
    assert shown == [row["text"].replace("\n", " ↵ ") for row in found.tables["examples"]]
    assert marked == 2 * len(shown)
    assert min(contrast for _, contrast in [*lines, *bars]) >= 3
    variants = [
        name for name in methods if name.endswith(("_all", "_moving", "_uncentred")) or name == "self_contrast_svd"
    ]
    assert before == len(methods) - len(variants)
    assert after == before + 1


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_an_atlas_sorts_what_is_missing_as_smallest(found, tmp_path, missing):
    from browser import Watched, chromium

    shared = {"directions": 1, "q": 0.01, "mass": 0.5, "top_weight": missing, "logit_share": 0.1,
              "carried_key_pca": 0.1, "carried_random": missing, "relation": None,
              "verdict": "above the null"}  # fmt: skip
    rows = [{**shared, "head": f"L0H{i}", "layer": 0, "index": i, "carried": carried} for i, carried in
            enumerate((0.2, missing, -0.3, 0.4))]  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(draw_atlas(replace(found, experiment="atlas", tables={"atlas": rows}))["report.html"])
    with chromium() as browser:
        page = Watched(browser, path.as_uri()).page
        orders = []
        for _ in range(2):
            page.get_by_role("button", name="two swapped").click()
            orders.append(page.locator(".atlas tbody td button").all_inner_texts())
        assert page.locator(".atlas tbody td:nth-child(5)").all_inner_texts() == ["–", "−0.30", "0.20", "0.40"]
        assert "nan" not in page.locator(".atlas table").inner_text().lower()
    assert orders == [["L0H3", "L0H0", "L0H2", "L0H1"], ["L0H1", "L0H2", "L0H0", "L0H3"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["atlas", "binding"], "an atlas takes text files and folders, or nothing for Python's own texts, and binding "
                               "is a task: run qkscope discover binding --heads"),
        (["atlas", "prompts.jsonl"], "prompts.jsonl is a task"),
        (["atlas", "nothing.txt"], "there is no file 'nothing.txt': an atlas takes text files"),
        (["discover", "binding", "--heads", "L1H1", "--n", "40"], "16 directions need 160 queries to fit on, but the "
                                                                  "prompts of binding have 40"),
        (["discover", "python", "--heads", "L1H1", "--n", "24"], "but 24 passages have at most 128"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_said_with_what_can_before_a_model_is_loaded(
    arguments, said, tmp_path, capsys, monkeypatch
):
    from qkscope.cli import main

    monkeypatch.setattr("sys.argv", ["qkscope", *arguments, "--out", str(tmp_path / "out"), "--model", "no/such/model"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_short_file_of_prompts_is_refused_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    from qkscope.cli import main

    keys = [{"text": "cat", "labels": {"kind": 1}}, {"text": "dog", "labels": {"kind": -1}}]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}: cat or dog? The", "keys": keys}) for i in range(30)))
    monkeypatch.setattr("sys.argv", ["qkscope", "discover", str(path), "--heads", "L1H1", "--directions", "2",
                                     "--out", str(tmp_path / "out"), "--model", "no/such/model"])  # fmt: skip
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "2 directions need 20 queries" in capsys.readouterr().err
