"""The graph of a trace on the page: numbers as in the table, lines one can follow by pointer and by keys."""

import pytest

import qkscope as qk
from browser import Watched, chromium
from qkscope.analyses.trace.graph import trace_graph
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.page.blocks import blocks_of
from qkscope.page.report import write_report
from qkscope.runs.result import Result

HEAD = Head.parse("L2H3")
PROMPT = "hat: O\njam: Z\ncat: B\npen: K\ncup: D\nmap: F\njam:"


@pytest.fixture(scope="module")
def result():
    scope = qk.Scope.load("nano:mixed")
    encoded = scope.encode([PROMPT])
    query = int(encoded.places.query[0])
    found = trace_graph(
        Reader(scope, [HEAD]).record_prompt(encoded), HEAD, query, query - 1
    )  # all its attention is there
    return Result("trace", {"graph": found.rows, "prompt": found.prompt}, answer="One head.", model=scope.name)


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def url(result, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("page") / "graph.html", result).as_uri()


def test_a_logit_that_was_followed_is_one_picture(result):
    (block,) = blocks_of(result)
    assert block.kind == "graph"
    assert block.words.startswith("L2H3 gives 'jam' 100% of its attention")
    assert "hardly any attention" not in block.words
    root = result.tables["graph"][0] | {"attention": 0.02}
    unseen = Result("trace", {"graph": [root], "prompt": []}, answer="")
    assert "hardly any attention" in blocks_of(unseen)[0].words


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1100, False), ("dark", 1100, True), ("phone", 390, False)]
)
def test_it_is_drawn_whole_at_any_width(browser, url, result, name, width, dark):
    watched = Watched(browser, url, width=width, dark=dark)
    watched.page.wait_for_selector(".graph svg")
    watched.shoot(f"graph-{name}")
    assert watched.errors == []
    assert watched.fits()
    solid = {
        (row["side"], row["writer"], row["position"])
        for row in result.tables["graph"]
        if row["kind"] == "content" and row["writer"] not in (None, "rest", "other keys")
    }
    assert watched.page.locator(".graph .place:not(.ghost) rect").count() == len(solid) + 1  # and the root
    spelled = watched.page.locator(".graph text.token").all_text_contents()
    assert {"jam", ":"} <= set(spelled)
    assert len(spelled) < len(result.tables["prompt"])


def test_a_place_is_read_out_and_followed(browser, url, result):
    page = Watched(browser, url).page
    rows = result.tables["graph"]
    writer = next(row for row in rows if row["side"] == "key" and row["parent"] == 0)
    place = page.locator(f'.graph .place[data-at="key {writer["writer"]} {writer["position"]}"]')
    place.hover()
    note = page.locator("#tip").inner_text()
    assert f"{writer['value']:+.2f}".replace("-", "−") in note
    assert page.locator(".graph .dim").count() == 0
    place.click()
    assert place.get_attribute("aria-pressed") == "true"
    assert page.locator('.graph .place[data-at="root"].dim').count() == 0
    assert page.locator('.graph .place.dim[data-at^="query"]').count() > 0
    page.keyboard.press("Escape")
    assert page.locator(".graph .dim").count() == 0


def test_keys_walk_along_the_lines(browser, url):
    page = Watched(browser, url).page
    page.locator('.graph .place[data-at="root"]').focus()
    at = "document.activeElement.dataset.at"
    seen = ["root"]
    for _ in range(2):
        page.keyboard.press("ArrowDown")
        seen.append(page.evaluate(at))
    assert len(set(seen)) == 3
    assert "share" in page.locator("#tip").inner_text()
    page.keyboard.press("ArrowUp")
    assert page.evaluate(at) == seen[1]
    page.keyboard.press("Enter")
    assert page.locator('.graph .place[aria-pressed="true"]').count() == 1


def test_why_a_head_looked_is_shown_as_asked(browser, url):
    page = Watched(browser, url).page
    counts = {}
    for name in ("none", "main", "all"):
        page.locator("section.graph .choices button", has_text=name).click()
        counts[name] = page.locator(".graph .line.why").count()
    assert counts["none"] == 0
    assert 0 < counts["main"] <= counts["all"]
