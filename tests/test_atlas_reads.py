"""Who reads whom: first writers in an atlas's rows, the same as a trace's, and their map on the page."""

from __future__ import annotations

import pytest
import torch

import qkscope as qk
from browser import Watched
from qkscope.analyses.trace.many import cut, first_writers, text_units, told
from qkscope.analyses.trace.rows import Pass
from qkscope.linear.reader import Reader
from qkscope.show.blocks import blocks_of
from qkscope.show.page import write_report
from qkscope.tasks.texts import Document, text_hash

SIDES = ("key", "query")


@pytest.fixture(scope="module")
def scope():
    return qk.Scope.load("nano:mixed", device="cpu")


@pytest.fixture(scope="module")
def texts():
    return [unit[0].text for unit in qk.tasks.induction().test(400)]


@pytest.fixture(scope="module")
def found(scope, texts):
    return qk.atlas(scope, texts, 192, test=64, progress=False)


@pytest.fixture(scope="module")
def url(found, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("page") / "atlas.html", found).as_uri()


def test_every_head_has_its_first_writers(found):
    rows, reads = found.table(), found.tables["reads"]
    for row in rows:
        for side in SIDES:
            own = [read for read in reads if (read["reader"], read["side"]) == (row["head"], side)]
            assert 1 <= len(own) <= 5
            assert (own[0]["writer"], own[0]["share"]) == (row[f"{side}_writer"], row[f"{side}_share"])
            assert [abs(read["share"]) for read in own] == sorted((abs(read["share"]) for read in own), reverse=True)
            assert {read["n"] for read in own} == {row["traced"]}
        if row["layer"] == 0:  # nothing else has written yet
            assert (row["key_writer"], row["query_writer"]) == ("embedding", "embedding")
            assert row["key_share"] == pytest.approx(1, abs=1e-4)
    keys = [read["writer"] for read in reads if read["side"] == "key" and read["share"] >= 0.1]
    most = max((name for name in keys if name.startswith("L")), key=keys.count)
    assert f"most others read is {most}: a tenth or more of the logit at {keys.count(most)} heads" in found.answer


def test_sums_are_those_of_one_text_after_the_other(scope, texts):
    """Batches, groups of texts and passages that do not count change nothing but rounding."""
    reader = Reader(scope, scope.parse("L1H0,L2H3"))
    units = text_units(scope, texts[:6], 6)
    together = told(reader, first_writers(Pass(reader, batch_size=4, progress=False), units))[1]["heads"]
    for row in together:
        alone = [
            one
            for unit in units
            for one in told(reader, first_writers(Pass(reader, progress=False), [unit]))[1]["heads"]
            if one["head"] == row["head"] and one["n"]
        ]
        assert row["n"] == len(alone)
        for name in ("logit", "attention"):
            assert row[name] == pytest.approx(sum(one[name] for one in alone) / len(alone), rel=1e-4)


def test_a_model_that_cannot_be_traced_has_an_atlas_without_writers(texts):
    loaded = qk.Scope.load("nano:mixed", device="cpu")
    hook = loaded.model.base_model.layers[0].register_forward_hook(lambda module, args, out: torch.tanh(out))
    try:
        squashed = qk.Scope.from_model(loaded.model, loaded.tokenizer, name="squashed")
        found = qk.atlas(squashed, texts, 192, test=64, progress=False)
    finally:
        hook.remove()
    assert found.answer.count("Who wrote keys and queries is not said") == 1
    assert "cannot be traced" in found.answer
    assert all(row[f"{side}_{what}"] is None for row in found.table() for side in SIDES for what in ("writer", "share"))
    assert [block.kind for block in blocks_of(found)] == ["atlas"]


def test_the_map_is_told_after_the_atlas_and_without_the_first_layer(found):
    blocks = blocks_of(found)
    assert [block.kind for block in blocks] == ["atlas", "reads"]
    assert not any(row["reader"].startswith("L0") for row in blocks[1].rows)
    row = next(row for row in found.table() if row["layer"])
    facts = blocks[0].options["heads"][row["head"]]["facts"]
    assert f"Its keys were written first by {row['key_writer']} ({row['key_share']:.0%})" in facts


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)])
def test_the_map_is_drawn_pointed_at_and_filtered(browser, url, found, width, dark):
    watched = Watched(browser, url, width=width, dark=dark)
    page = watched.page
    page.wait_for_selector(".reads svg .mark")
    watched.shoot(f"reads-{width}{'-dark' if dark else ''}")
    drawn = [row for row in found.tables["reads"] if not row["reader"].startswith("L0")]
    for side in SIDES:
        page.locator(".reads button", has_text=side).first.click()
        marks = page.locator(".reads .mark[data-reader]")
        assert marks.count() == sum(row["side"] == side for row in drawn)
    row = max((row for row in drawn if row["side"] == "query"), key=lambda row: abs(row["share"]))
    mark = page.locator(f'.mark[data-reader="{row["reader"]}"][data-writer="{row["writer"]}"]')
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    at = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*at)
    tip = page.locator("#tip")
    assert f"{row['reader']} reads {row['writer']}" in tip.inner_text()
    assert f"{row['share']:.2f}".replace("-", "−") in tip.inner_text()
    page.mouse.click(*at)
    assert page.get_by_label("head", exact=True).input_value() == row["reader"]
    kept = page.locator(".reads .mark[data-reader]:not(.dim)").all()
    assert {row["reader"]} <= {one.get_attribute("data-reader") for one in kept}
    assert all(row["reader"] in (one.get_attribute("data-reader"), one.get_attribute("data-writer")) for one in kept)
    page.locator(".reads svg[role=application]").focus()
    page.keyboard.press("Escape")
    assert page.locator(".reads .mark.dim").count() == 0
    page.keyboard.press("ArrowRight")
    assert "reads" in tip.inner_text()
    assert watched.fits()
    assert watched.errors == []
    page.close()


def test_documents_are_traced_as_their_passages_and_resampled_whole(scope, texts):
    """Four documents of a dozen passages each: the same writers as of the passages, and intervals over four texts."""
    documents = [Document(f"d{i}", "\n\n".join(texts[12 * i : 12 * i + 12])) for i in range(4)]
    pieces, numbers = zip(*cut(documents), strict=True)
    whole, alone = (qk.trace(scope, what, "all", 40, progress=False) for what in (documents, pieces))
    assert [row["writer"] for row in whole.tables["writers"]] == [row["writer"] for row in alone.tables["writers"]]
    assert [row["share"] for row in whole.tables["writers"]] == pytest.approx(
        [row["share"] for row in alone.tables["writers"]]
    )
    assert whole.provenance["asked"]["texts"] == text_hash(documents) != alone.provenance["asked"]["texts"]
    reader = Reader(scope, scope.parse("L1H0"))
    units = text_units(scope, documents, len(pieces))
    (tally,) = first_writers(Pass(reader, progress=False), units).values()
    assert tally.words == ["text 0", "text 1", "text 2", "text 3"]
    assert set(numbers) == {0, 1, 2, 3}


def test_passages_are_bounded_lose_nothing_and_know_their_document():
    text = "\n\n".join(f"Line {i} of a text that goes on and on." * (1 + i % 30) for i in range(60))
    pieces, text_of = zip(*cut([Document("a", text), Document("b", "Another. " * 300)]), strict=True)
    assert max(map(len, pieces)) <= 480
    assert "".join("".join(pieces[: text_of.index(1)]).split()) == "".join(text.split())
    assert {text_of[i] for i, piece in enumerate(pieces) if "Another" in piece} == {1}
    assert cut(["as it is"]) == [("as it is", 0)]
