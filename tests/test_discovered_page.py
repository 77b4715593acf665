"""The pages of discover and atlas in a real browser: texts in sight, on a phone too, and heads that can be found."""

from __future__ import annotations

import pytest

import qkscope as qk
from browser import Watched, chromium
from qkscope.page.blocks import blocks_of
from qkscope.page.report import write_report
from qkscope.runs.result import Result


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def results():
    scope, task = qk.Scope.load("nano:mixed"), qk.tasks.induction()
    texts = [unit[0].text for unit in task.test(64)]
    heads = ["L1H0", "L1H1"]
    return {
        "discover": qk.discover(scope, task, heads, n=96, directions=4, replicates=39, sizes=(1, 2), progress=False),
        "atlas": qk.atlas(scope, texts, 48, test=16, progress=False),
    }


@pytest.fixture(scope="module")
def urls(results, tmp_path_factory):
    place = tmp_path_factory.mktemp("pages")
    return {name: write_report(place / f"{name}.html", result).as_uri() for name, result in results.items()}


@pytest.mark.parametrize("name", ["discover", "atlas"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True), (390, True)])
def test_texts_are_in_sight_at_every_width(browser, urls, name, width, dark):
    watched = Watched(browser, urls[name], width=width, dark=dark)
    watched.shoot(f"{name}-{width}{'-dark' if dark else ''}")
    assert watched.fits()
    assert watched.errors == []
    boxes = [quote.bounding_box() for quote in watched.page.locator("blockquote").all() if quote.is_visible()]
    assert len(boxes) >= 3
    for box in boxes:
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    assert watched.page.locator("img").count() == 0  # maps and curves are drawn, not pasted
    watched.page.close()


def test_a_head_is_found_on_the_map_by_its_relation_and_by_a_word(browser, urls, results):
    watched = Watched(browser, urls["atlas"], width=1280)
    page, rows = watched.page, results["atlas"].table()
    row = rows[-1]
    page.locator(f'.cell[data-at="{row["layer"]},{row["index"]}"]').click()
    line = page.locator(f'tbody[data-head="{row["head"]}"]')
    assert line.locator("button").get_attribute("aria-expanded") == "true"
    assert f"--heads {row['head']}" in line.inner_text()
    line.locator("td").first.click()
    assert line.locator("button").get_attribute("aria-expanded") == "false"
    shown = lambda: page.locator("tbody[data-head]:visible").count()  # noqa: E731
    for relation in {row["relation"] for row in rows}:
        page.get_by_label("looks at").select_option(relation or "none")
        assert shown() == sum(row["relation"] == relation for row in rows)
    page.get_by_label("looks at").select_option("")
    page.get_by_label("filter").fill(row["head"])
    assert shown() == 1
    page.get_by_label("filter").fill("")
    page.locator("th button", has_text="directions").click()
    page.locator("th button", has_text="directions").click()  # the fewest first
    first = page.locator("tbody[data-head]").first.get_attribute("data-head")
    assert {row["head"]: row["directions"] for row in rows}[first] == min(row["directions"] for row in rows)
    assert watched.errors == []
    page.close()


def test_a_share_above_all_is_explained():
    """Parts may add up to more than the whole, where others pull against them."""
    row = {"head": "L0H0", "feature": 1, "size": 1, "match": 0.5, "match_null": 0.1, "stability": 0.9, "carried": 0.3,
           "logit_share": 1.11, "identifiable": True, "carried_low": 0.1, "carried_high": 0.5}  # fmt: skip
    head = {"head": "L0H0", "directions": 1, "features": 1, "mass": 0.5, "logit_share": 1.11, "diagonal": None,
            "q": 0.01, "verdict": "one direction"}  # fmt: skip
    (block,) = blocks_of(Result("discover", {"heads": [head], "features": [row]}))
    assert "all of the logit and more (111%: other directions pull against them)" in block.words
    assert "111%" in block.options["cards"][0]["facts"]
