"""The report in a real browser: it asks for nothing, answers pointer and keyboard, copies, and
stays quick.
"""

import json

import pytest

import qkscope as qk
from browser import Watched, expect
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.show.page import write_report

PROMPT = "hat: O\njam: Z\ncat: B\npen: K\njam:"


@pytest.fixture(scope="module")
def results(browser, nano):
    """The verbs on a model that we ship, on few prompts."""
    scope, task = nano, qk.tasks.binding(entities=9, form="list", seed=0)
    ranking = qk.find_heads(scope, task, 8)
    fit = qk.decompose(scope, task, "L2H0", 16, contrasts=["order", "lexical"], replicates=19)
    swaps = qk.swap(scope, task.test(16), fit, sizes=[1, 4, 12])
    parts = qk.sums.attribute(scope, PROMPT, "L2H0", fit)
    both = {row["condition"]: row["target_after"] for row in swaps.table()}
    claim = Claim("swapping both moves the attention to the target; random subspaces do not", "the majority",
                  both["both"], both["random_both"], "ours > 2 * control")  # fmt: skip
    lead = Result(
        "report", {}, [claim], answer=swaps.answer, model=scope.name, provenance=swaps.provenance
    )
    return lead, ranking, fit, swaps, parts, qk.why(scope, PROMPT)


@pytest.fixture(scope="module")
def url(results, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("page") / "report.html", *results).as_uri()


@pytest.fixture(scope="module")
def report(browser, url):
    """One page for all tests, as a reader has it: each leaves it as it found it."""
    return Watched(browser, url)


def noted(page, *texts):
    for text in texts:
        expect(page.locator("#tip")).to_contain_text(text, use_inner_text=True)


def test_it_loads_whole_asks_for_nothing_and_is_readable_on_every_screen(report, url, results):
    page = report.page
    assert report.errors == []
    assert [r for r in report.requests if not r.startswith(("data:", "blob:"))] == [url]
    assert page.locator("h1.answer").inner_text().startswith("Swapping both at L2H0")
    assert page.locator(".map svg .cell").count() == len(results[1].table())
    for kind in ("map", "spectra", "swaps", "curve", "tokens", "decide"):
        expect(page.locator(f"section.{kind} .chart > *").first).to_be_attached()
    report.check_screens("report")


def test_pointing_and_keys_read_out_a_head_and_a_swap(report, results):
    page = report.page
    page.locator('.map .cell[data-at="1,1"]').hover()
    row = next(row for row in results[1].table() if row["head"] == "L1H1")
    noted(page, "L1H1", f"{row['accuracy']:.2f} [{row['low']:.2f}, {row['high']:.2f}]")
    page.locator(".map svg").focus()
    for key, head in (("ArrowRight", "L2H1"), ("ArrowDown", "L2H0")):
        page.keyboard.press(key)
        noted(page, head)
    lexical = next(row for row in results[3].table() if row["condition"] == "lexical")
    page.locator(".swaps svg .row").nth(2).hover()
    noted(page, "lexical", f"{lexical['orig_before']:.2f} → {lexical['orig_after']:.2f}")
    page.locator(".swaps svg").focus()
    page.keyboard.press("ArrowDown")
    noted(page, "L2H0 · before")


def test_the_parts_of_a_token_are_shown_and_sum_to_its_logit(report, results):
    page = report.page
    rows = results[4].tables["tokens"]
    for i in (6, 9):
        page.locator(f'.tokens .token[data-i="{i}"]').hover()
        noted(page, f"token {i}")
        shown = page.locator(".tokens .split .value").all_inner_texts()
        parts = [float(text.replace("−", "-")) for text in shown]
        assert parts[-1] == pytest.approx(rows[i]["logit"], abs=0.006)
        assert sum(parts[:-1]) == pytest.approx(
            parts[-1], abs=0.03
        )  # each is rounded to two places
    colour = "document.querySelector('.tokens .fill[data-i=\"6\"]').style.backgroundColor"
    before = page.evaluate(colour)
    page.locator(".tokens .choices button", has_text="lexical").click()
    report.until(f"{colour} !== {before!r}")
    page.locator(".tokens .prompt").focus()
    report.press("Home", "ArrowRight")
    noted(page, "token 1")


def test_the_data_of_every_chart_can_be_copied(report, results):
    page = report.page
    page.evaluate(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }"
    )
    places = page.locator(".block .copy")
    assert places.count() == 7  # six charts and the claims
    assert page.locator(".held").inner_text() in ("1 of 1 claims hold", "0 of 1 claims hold")
    for i in range(places.count()):
        assert places.nth(i).locator("button").all_inner_texts() == ["CSV", "JSON"]
    page.locator(".swaps .copy button", has_text="JSON").click()
    report.until("window.copied")
    assert json.loads(page.evaluate("window.copied")) == results[3].to_json()["tables"]["swap"]
    page.locator(".tokens .copy button", has_text="CSV").click()
    report.until(
        "window.copied.startsWith('position,token,attention,logit,order,lexical,residual\\r\\n')"
    )
    lines = page.evaluate("window.copied")
    assert '"\n"' in lines  # a line break inside a token stays one cell


def test_every_control_is_reached_by_tab_and_the_theme_can_be_turned(report):
    page = report.page
    wanted = page.evaluate(
        "[...document.querySelectorAll(\"main button, main [tabindex='0'], main summary\")]"
        ".filter((each) => each.checkVisibility()).length"
    )
    reached = set()
    for _ in range(wanted + 12):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)")
        )
    assert len(reached) >= wanted
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    for same in ("!==", "==="):
        page.locator("#theme").click()
        report.until(f"{background} {same} {light!r}")


def test_the_widget_of_a_notebook_draws_itself(browser, results, tmp_path):
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{results[4]._repr_html_()}</body>")
    watched = Watched(browser, path.as_uri())
    inside = watched.page.frame_locator("iframe")
    expect(inside.locator(".token")).to_have_count(len(results[4].tables["tokens"]))
    inside.locator('.token[data-i="6"]').hover()
    noted(inside, "token 6")
    inner = inside.locator("body").evaluate("(body) => body.getBoundingClientRect().height")
    watched.until(
        f"Math.abs(document.querySelector('iframe').offsetHeight - {inner}) <= 2"
    )  # nothing is cut off
    assert watched.errors == []
    watched.page.close()


def test_a_label_is_text_in_the_legend_and_a_chart_that_fails_is_alone(browser, tmp_path):
    evil = '<b>bold</b><a href="https://example.org">x</a>'
    broken = [{"position": 0, "token": None, "attention": 1.0, "logit": 1.0}]
    curve = [
        {"head": "L0H0", "method": method, "k": k, "shift": 0.5, "low": 0.4, "high": 0.6}
        for method in (evil, "plain")
        for k in (1, 2)
    ]
    result = Result("test/one", {"tokens": broken, "curve": curve})
    watched = Watched(browser, write_report(tmp_path / "page.html", result).as_uri())
    page = watched.page
    page.locator(".curve svg[role=img]").scroll_into_view_if_needed()
    expect(page.locator(".curve .legend button").first).to_have_text(evil)
    assert page.locator(".curve .legend a").count() == 0
    expect(page.locator("section.tokens .chart")).to_contain_text("cannot be drawn")
    page.close()


def test_a_link_leads_to_a_head_a_claim_or_a_prompt(browser, results, tmp_path):
    """To a head's cell on a map, to a row of a folded table, to a claim, and to the prompt."""
    claims = [Claim("L1H1 is right", "", 0.1, 0.2, "ours > control")]
    rows = {"swap": [{"head": "L1H1", "score": 0.5}]}
    named = write_report(tmp_path / "named.html", Result("lee2026/fig9", rows, claims)).as_uri()
    told = write_report(tmp_path / "told.html", results[1], results[4]).as_uri()
    watched = Watched(browser, f"{named}#claim-1")
    page = watched.page
    expect(page.locator("#claim-1:target")).to_contain_text("fails")
    expect(page.locator("#claim-1")).to_be_in_viewport()
    page.goto(f"{named}#L1H1")
    expect(page.locator("tr#L1H1")).to_be_visible()
    page.goto(f"{told}#L2H0")
    expect(page.locator(".map .chosen")).to_have_attribute("visibility", "visible")
    cell = page.locator('.map .cell[data-at="2,0"]').get_attribute("x")
    expect(page.locator(".map .chosen")).to_have_attribute("x", cell)
    page.goto(f"{told}#prompt-1")
    expect(page.locator("#prompt-1")).to_be_in_viewport()
    assert watched.errors == []
    page.close()


@pytest.fixture(scope="module")
def why(nano):
    return qk.why(nano, PROMPT, "L2H3", draws=4)


@pytest.fixture(scope="module")
def answer(browser, why, tmp_path_factory):
    return Watched(
        browser, write_report(tmp_path_factory.mktemp("page") / "why.html", why).as_uri()
    )


def test_an_answer_is_drawn_whole_at_any_width(answer, why):
    page = answer.page
    answer.check_screens("why")
    assert page.locator("section.said dd").count() == len(why.tables["said"])
    assert page.locator("section.output .track").count() == len(why.tables["output"])
    assert page.locator("section.tokens .token.picked").count() == 1
    solid = {row["source"] for row in why.tables["graph"] if row["of"] is None} - {None}
    assert page.locator(".graph .place:not(.ghost) rect").count() == len(solid) + 1  # and the root


def test_parts_end_at_the_logit_and_each_cut_has_its_verdict(answer, why):
    page = answer.page
    logit = f"{why.tables['check'][0]['logit']:+.1f}".replace("-", "−")
    for words, by, side in (
        ("writers of the key", "writers", "key"),
        ("singular vectors", "singular", "both"),
    ):
        page.locator("section.parts button", has_text=words).click()
        own = [row["part"] for row in why.tables["parts"] if (row["by"], row["side"]) == (by, side)]
        expect(page.locator("section.parts .name")).to_have_text([*own, "logit"])
        expect(page.locator("section.parts .value.sum")).to_have_text(logit)
    titles = ("Because", "Carried by", "Writers cut")
    words, carried, cuts = (page.locator("section.tests", has_text=title) for title in titles)
    causes = {"yes": "shown", "open": "open", "no": "no"}
    assert words.locator(".value b").all_text_contents() == [
        causes[row["cause"]] for row in why.tables["because"]
    ]
    assert carried.locator(".value b").all_text_contents() == [
        row["verdict"] for row in why.tables["carriers"]
    ]
    for size in (1, 3):
        cuts.locator(".choices button", has_text=str(size)).click()
        own = [row["verdict"] for row in why.tables["cuts"] if row["k"] == size]
        expect(cuts.locator(".value b")).to_have_text(own)
        expect(cuts.locator(".band:not(.swatch)")).to_have_count(len(own))


def test_a_writer_in_the_graph_is_read_out_and_followed_by_pointer_and_by_keys(answer, why):
    page = answer.page
    edge = next(row for row in why.tables["graph"] if row["kind"] == "key" and row["target"] == 0)
    writer = why.tables["nodes"][edge["source"]]
    place = page.locator(f'.graph .place[data-at="key {writer["writer"]} {writer["position"]}"]')
    place.hover()
    noted(page, f"{writer['value']:+.2f}".replace("-", "−"))
    place.click()
    expect(place).to_have_attribute("aria-pressed", "true")
    expect(page.locator('.graph .place.dim[data-at^="query"]').first).to_be_attached()
    assert page.locator('.graph .place[data-at="root"].dim').count() == 0
    page.keyboard.press("Escape")
    expect(page.locator(".graph .dim")).to_have_count(0)
    page.locator('.graph .place[data-at="root"]').focus()
    seen, active = ["root"], "document.activeElement.dataset.at"
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        answer.until(f"{active} !== {seen[-1]!r}")
        seen.append(page.evaluate(active))
    assert len(set(seen)) == 3
    assert seen[3] == seen[1]
    noted(page, "share")
    counts = []
    for name in ("none", "main", "all"):
        choice = page.locator("section.graph .choices button", has_text=name)
        choice.click()
        expect(choice).to_have_attribute("aria-pressed", "true")
        counts.append(page.locator(".graph .line.why").count())
    assert 0 == counts[0] < counts[1] <= counts[2]


def test_an_atlas_is_searched_filtered_sorted_and_opened(browser, nano, tmp_path):
    texts = [unit[0].text for unit in qk.tasks.induction().test(300)]
    found = qk.atlas(nano, texts, 8, test=8, length=32, progress=False)
    watched = Watched(browser, write_report(tmp_path / "atlas.html", found).as_uri())
    page, rows = watched.page, found.table()
    lines = page.locator(".atlas tbody:visible")
    expect(lines).to_have_count(len(rows))
    expect(page.locator(".atlas .cell")).to_have_count(len(rows))
    chip = page.locator('.atlas [data-name="induction"]')
    chip.click()
    expect(lines).to_have_count(sum(row["kind"] == "induction" for row in rows))
    chip.click()
    page.locator(".atlas th button", has_text="IoU").click()
    expect(lines.first).to_have_attribute(
        "data-head", max(rows, key=lambda row: row["iou"])["head"]
    )
    page.locator(".atlas input").fill("l1h1")
    look = next(row for row in found.tables["examples"] if row["head"] == "L1H1")
    expect(lines).to_have_count(1)
    lines.locator("button").click()
    asking = lines.locator("blockquote").first.locator("mark.query, mark.both")
    assert asking.inner_text() == look["tokens"][look["query"]]
    cells = lines.locator(".example .keys").first.locator("tbody tr")
    expect(cells).to_have_count(len(look["keys"]))
    expect(lines.locator(".marks")).to_contain_text("key is looked at")
    watched.check_screens("atlas")
    page.close()
