"""The page of an answer to why: the words first, then each chart with the numbers of its table."""

import pytest

import qkscope as qk
from browser import Watched, chromium
from qkscope.page.blocks import blocks_of
from qkscope.page.report import widget_html, write_report
from qkscope.runs.result import Result

PROMPT = "hat: O\njam: Z\ncat: B\npen: K\njam:"


@pytest.fixture(scope="module")
def result():
    return qk.why(qk.Scope.load("nano:mixed"), PROMPT, "L2H3", draws=4)


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def url(result, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("page") / "why.html", result).as_uri()


def test_the_words_lead_and_the_pictures_follow_the_argument(result, tmp_path):
    kinds = [block.kind for block in blocks_of(result)]
    assert kinds == ["said", "tokens", "parts", "tests", "output", "graph"]
    result.write(tmp_path / "kept")
    assert [block.kind for block in blocks_of(Result.read(tmp_path / "kept"))] == kinds
    assert [block.kind for block in blocks_of(result) if block.leads] == ["said"]
    assert len(widget_html(result)) < 200_000


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1100, False), ("dark", 1100, True), ("phone", 390, False)]
)
def test_it_is_drawn_whole_at_any_width(browser, url, result, name, width, dark):
    watched = Watched(browser, url, width=width, dark=dark)
    watched.page.wait_for_selector(".graph svg")
    watched.shoot(f"why-{name}")
    assert watched.errors == []
    assert watched.fits()
    assert watched.page.locator("section.said dd").count() == len(result.tables["said"])
    assert watched.page.locator("section.output .track").count() == len(result.tables["output"])
    assert watched.page.locator("section.tokens .token.picked").count() == 1
    assert watched.page.locator("details[open]").count() == 0


def test_parts_are_split_as_asked_and_end_at_the_logit(browser, url, result):
    page = Watched(browser, url).page
    logit = f"{result.tables['check'][0]['logit']:+.1f}".replace("-", "−")
    for words, by, side in (
        ("writers of the key", "writers", "key"),
        ("writers of the query", "writers", "query"),
        ("singular vectors", "singular", "both"),
    ):
        page.locator("section.parts button", has_text=words).click()
        own = [row["part"] for row in result.tables["parts"] if (row["by"], row["side"]) == (by, side)]
        assert page.locator("section.parts .name").all_text_contents() == [*own, "logit"]
        assert page.locator("section.parts .value.sum").inner_text() == logit


def test_each_cut_stands_beside_random_ones_with_its_verdict(browser, url, result):
    page = Watched(browser, url).page
    for size in (1, 3):
        page.locator("section.tests .choices button", has_text=str(size)).click()
        own = [row["verdict"] for row in result.tables["cuts"] if row["k"] == size]
        own += [row["verdict"] for row in result.tables["swaps"]]
        assert page.locator("section.tests .value b").all_text_contents() == own
        assert page.locator("section.tests .band:not(.swatch)").count() == len(own)
