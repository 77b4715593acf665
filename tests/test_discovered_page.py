"""Heads by name on the pages of atlas and discover, in a real browser: found, sorted, opened, and followed to why."""

from __future__ import annotations

import shlex
from dataclasses import replace
from urllib.parse import parse_qs

import pytest

import qkscope as qk
from browser import Watched, served
from qkscope.show.blocks import blocks_of
from qkscope.show.discovered import FAMILIES, family_of
from qkscope.show.figures import colours_of
from qkscope.show.page import report_html, write_report
from qkscope.show.session import FeatureStore, Session

# which key, of a list of tokens: said again here, so that the page is not tested by what made it
KEEPS = {
    "itself": lambda ids, query, key: query == key,
    "the token before": lambda ids, query, key: key == query - 1,
    "a copy": lambda ids, query, key: key < query and ids[key] == ids[query],
    "after a copy": lambda ids, query, key: key <= query and ids[key - 1] == ids[query],
}


_MARKED = """(quote) => {
  const places = {};
  let before = 0;
  for (const node of quote.childNodes) {
    const after = before + node.textContent.length;
    const sides = { both: ["query", "key"] }[node.className] ?? [node.className];
    if (node.nodeName === "MARK") for (const side of sides) places[side] = [before, after];
    before = after;
  }
  return [quote.textContent, places];
}"""  # a text as it is read, and where its marks are


@pytest.fixture(scope="module")
def scope():
    return qk.Scope.load("nano:mixed", device="cpu")


@pytest.fixture(scope="module")
def results(scope):
    task = qk.tasks.induction()
    texts = [unit[0].text for unit in task.test(400)]
    return {
        "atlas": qk.atlas(scope, texts, 240, test=80, progress=False),
        "discover": qk.discover(scope, task, ["L1H0", "L1H1"], 240, test=60, sizes=(1, 2), progress=False),
    }


@pytest.fixture(scope="module")
def urls(results, tmp_path_factory):
    place = tmp_path_factory.mktemp("pages")
    return {name: write_report(place / f"{name}.html", result).as_uri() for name, result in results.items()}


@pytest.mark.parametrize("name", ["atlas", "discover"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_an_opened_head_is_in_sight_at_every_width(browser, urls, name, width, dark):
    watched = Watched(browser, urls[name], width=width, dark=dark)
    page = watched.page
    if name == "atlas":
        page.locator("tbody[data-head] button").first.press("Enter")  # by keyboard
    watched.shoot(f"{name}-{width}{'-dark' if dark else ''}")
    assert watched.fits()
    assert watched.errors == []
    for what in ("blockquote", ".stack", ".named svg", ".sentence"):
        boxes = [one.bounding_box() for one in page.locator(what).all() if one.is_visible()]
        assert boxes, what
        for box in boxes:
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
    assert page.locator("img").count() == 0  # maps and curves are drawn, not pasted
    page.close()


def test_heads_are_filtered_by_name_searched_and_sorted(browser, urls, results):
    watched = Watched(browser, urls["atlas"], width=1280)
    page, rows = watched.page, results["atlas"].table()
    shown = lambda: [one.get_attribute("data-head") for one in page.locator("tbody[data-head]:visible").all()]  # noqa: E731
    names = {row["name"] for row in rows}
    assert len(names) >= 3
    for name in names:
        chip = page.locator(f'button[data-name="{name}"]')
        own = {row["head"] for row in rows if row["name"] == name}
        assert chip.inner_text() == f"{name} {len(own)}"
        chip.click()
        assert chip.get_attribute("aria-pressed") == "true"
        assert set(shown()) == own
        assert page.locator(".atlas output").inner_text() == f"{len(own)} of {len(rows)} heads"
        chip.click()
    page.get_by_label("search").fill(rows[-1]["head"])
    assert shown() == [rows[-1]["head"]]
    page.get_by_label("search").fill("")
    assert shown() == [row["head"] for row in rows]  # by share, as the table comes
    for column, key in (("share", "share"), ("rest", "rest"), ("precision", "precision")):
        page.get_by_role("button", name=column, exact=True).last.click()
        down = shown()
        values = {row["head"]: row[key] for row in rows}
        falls = page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
        assert [values[head] for head in down] == sorted(values.values(), reverse=falls)
    page.get_by_role("button", name="head", exact=True).click()
    assert shown() == sorted(shown())
    assert watched.errors == []
    page.close()


def test_each_text_of_an_opened_head_keeps_the_rule_it_is_labelled_with(browser, urls, results, scope):
    """Read off what is on the page: the words, and the places of their marks."""
    watched = Watched(browser, urls["atlas"], width=1280)
    page, seen = watched.page, set()
    for row in results["atlas"].table():
        line = page.locator(f'tbody[data-head="{row["head"]}"]')
        line.locator("td").first.click()
        assert line.locator("button").first.get_attribute("aria-expanded") == "true"
        assert row["sentence"] == line.locator(".sentence").inner_text()
        assert f"keeps its rule ({row['rule']})" in line.locator("figcaption").last.inner_text()
        quotes = line.locator("blockquote").all()
        assert len(quotes) == 3
        for quote in quotes:
            words, places = quote.evaluate(_MARKED)
            ids, offsets = next(scope.encoder.ids_and_offsets([words], chat=False))
            query, key = (offsets.index(tuple(places[side])) for side in ("query", "key"))
            assert KEEPS[row["rule"]](ids, query, key), (row["head"], words)
        seen.add(row["rule"])
    assert len(seen) >= 3
    assert watched.errors == []
    page.close()


def test_a_head_is_found_on_the_map_which_is_coloured_by_name_or_by_share(browser, urls, results):
    watched = Watched(browser, urls["atlas"], width=1280)
    page, rows = watched.page, results["atlas"].table()
    fills = lambda: {  # noqa: E731
        row["head"]: page.locator(f'.cell[data-at="{row["layer"]},{row["index"]}"]').get_attribute("fill")
        for row in rows
    }
    by_name = fills()
    families = {row["head"]: family_of(row) for row in rows}
    assert len({(families[head], fill) for head, fill in by_name.items()}) == len(set(families.values()))
    assert len(set(by_name.values())) == len(set(families.values()))
    page.locator(".atlas .choices button", has_text="share").first.click()
    assert len(set(fills().values())) > len(set(families.values()))
    row = rows[-1]
    page.locator(f'.cell[data-at="{row["layer"]},{row["index"]}"]').click()
    line = page.locator(f'tbody[data-head="{row["head"]}"]')
    assert line.locator("button").first.get_attribute("aria-expanded") == "true"
    assert page.evaluate("document.activeElement.textContent") == row["head"]
    assert watched.errors == []
    page.close()


def test_a_text_leads_to_why_and_into_the_live_page(browser, urls, results, scope):
    """The command is one that the shell takes apart again, and the address one that the live page opens."""
    watched = Watched(browser, urls["atlas"], width=1280)
    page, row = watched.page, results["atlas"].table()[0]
    example = next(each for each in results["atlas"].tables["examples"] if each["head"] == row["head"])
    page.locator(f'tbody[data-head="{row["head"]}"] td').first.click()
    program, verb, text, *options = shlex.split(page.locator(".command").first.inner_text())
    asked = dict(zip(options[::2], options[1::2], strict=True))
    assert (program, verb, text.replace("\\n", "\n")) == ("qkscope", "why", example["text"])
    assert (asked["--head"], asked["--model"]) == (row["head"], "nano:mixed")
    ids, _ = next(scope.encoder.ids_and_offsets([example["text"]], chat=False))
    for side in ("query", "key"):
        assert scope.tokenizer.decode([ids[int(asked[f"--{side}"])]]) == example[side]
    with served(Session(scope)) as server:
        link = page.locator("a[data-state]").first
        assert not link.is_visible()
        page.get_by_placeholder("http://127.0.0.1:").fill("javascript:alert(1)")
        assert not link.is_visible()
        page.get_by_placeholder("http://127.0.0.1:").fill(server.url)
        address = link.get_attribute("href")
        assert parse_qs(address.partition("#")[2])["p"] == [example["text"]]
        live = Watched(browser, address)
        live.until("document.getElementById('head').textContent !== ''")
        assert live.page.locator("#head").inner_text() == row["head"]
        assert live.page.locator("#asks-from").inner_text() == f"token {asked['--query']}"
        assert live.page.locator("#key").inner_text().strip() == example["key"]
        assert live.errors == []
        live.page.close()
    assert watched.errors == []
    page.close()


def test_the_live_page_calls_heads_by_their_names(browser, results, scope, tmp_path):
    session = Session(scope, FeatureStore.read(results["atlas"].write(tmp_path / "atlas"), scope))
    names = {row["head"]: row["name"] for row in results["atlas"].table()}
    assert session.describe()["names"] == names
    row = results["atlas"].table()[0]
    found = session.why("hat : O jam : Z cat : B jam :", 10, row["head"])
    assert found["about"] == row["sentence"]
    assert [each["text"] for each in found["texts"]]
    with served(session) as server:
        live = Watched(browser, server.url)
        live.until("document.querySelectorAll('#best button').length > 0")
        for said in live.page.locator("#best button").all_inner_texts():
            head = said.split()[0]
            assert said.startswith(f"{head} ({names[head]}) ")
        live.shoot("explorer-names")
        assert live.errors == []
        live.page.close()


@pytest.mark.parametrize("name", ["atlas", "discover"])
def test_the_parts_of_a_bar_are_the_whole_logit(results, name):
    result = results[name]
    rows = {row["head"]: row for row in result.table()}
    bars = {}
    for block in blocks_of(result):
        if block.kind == "atlas":
            bars |= {head: seen["bar"] for head, seen in block.options["heads"].items()}
        if block.kind == "cards":
            bars[block.options["head"]] = block.options["bar"]
    assert set(bars) == set(rows)
    for head, bar in bars.items():
        assert sum(share for _, _, share, _, _ in bar) == pytest.approx(1, abs=0.01)
        parts = {family: share for _, family, share, _, _ in bar}
        assert parts["rest"] + parts["sham"] == pytest.approx(rows[head]["rest"], abs=0.002)
        assert parts[family_of(rows[head])] <= rows[head]["share"] + 0.001
        assert bar[0][2:] == [pytest.approx(rows[head][column], abs=5e-4) for column in ("share", "low", "high")]


def test_discover_shows_pairs_directions_changes_and_the_curve(browser, results, tmp_path):
    """With words that would be markup, and a change that was measured."""
    found = results["discover"]
    change = {"head": "L1H0", "factor": "previous", "kind": "key", "slope": 1.02, "low": 0.95, "high": 1.1,
              "correlation": 0.9, "sham_slope": -0.001, "n": 48}  # fmt: skip
    examples = [dict(row, text="<qk>" + row["text"]) for row in found.tables["examples"]]
    changed = replace(found, tables={**found.tables, "changes": [change], "examples": examples})
    page = report_html([changed])
    assert "<qk>" not in page
    assert page.count('<section class="block cards">') == len(found.tables["heads"])
    assert page.index("block cards") < page.index("block curve")
    path = tmp_path / "discover.html"
    path.write_text(page)
    watched = Watched(browser, path.as_uri())
    card = watched.page.locator("section.cards").first
    text = card.inner_text()
    assert found.tables["heads"][0]["sentence"] in text
    assert "slope 1.02 [0.95, 1.10], sham 0.00" in text
    own = [row for name in ("pairs", "directions") for row in found.tables[name] if row["head"] == "L1H0"]
    assert own
    assert card.locator("tbody tr").count() == len(own)
    assert card.locator("tr.soft").count() == sum(not row.get("kept", True) for row in own)
    assert watched.page.locator("section.curve polyline").count() > 0
    assert watched.errors == []
    watched.page.close()


def test_what_is_missing_is_a_dash_and_sorts_as_smallest(browser, results, tmp_path):
    rows = [dict(row) for row in results["atlas"].table()]
    columns = ("share", "low", "high", "coverage", "precision", "chance", "key_writer", "key_share")
    rows[2] |= {
        **dict.fromkeys(columns, float("nan")),
        "key_writer": None,
        "name": "not named",
        "block": None,
        "rule": None,
    }
    changed = replace(results["atlas"], tables={**results["atlas"].tables, "atlas": rows})
    watched = Watched(browser, write_report(tmp_path / "report.html", changed).as_uri())
    page = watched.page
    page.get_by_role("button", name="precision", exact=True).last.click()
    last = page.locator("tbody[data-head]").last
    assert last.get_attribute("data-head") == rows[2]["head"]
    assert last.locator("td").all_inner_texts()[2:5] == ["–", "–", "–"]
    assert "NaN" not in page.locator(".atlas").inner_html()
    last.locator("td").first.click()
    assert last.locator(".stack").is_visible()
    assert watched.errors == []
    page.close()


def test_every_family_has_a_colour_of_its_own():
    assert len(set(colours_of(list(FAMILIES)).values())) == len(FAMILIES)
