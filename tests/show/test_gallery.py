"""A gallery: one site of many runs, from disk without a request; what is half-written is left out
and said to be.
"""

import re
import shutil
from urllib.parse import unquote

import pytest

import qkscope as qk
from browser import Watched, expect
from qkscope import BadInput, Result
from qkscope.results.claims import Claim
from qkscope.show.gallery import write_gallery
from qkscope.show.page import heads_in, page_of, report_html

EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(1)>"
PROMPT = "hat: O\njam: Z\ncat: B\npen: K\njam:"
CLAIMS = [
    Claim(f"{head} is right", "", ours, 0.2, "ours > control")
    for head, ours in (("L2H0", 0.9), ("L1H1", 0.1))
]


@pytest.fixture(scope="module")
def runs(nano, tmp_path_factory):
    """Runs of a model that we ship, with and without a page of their own, and one as papers write
    them.
    """
    scope, task = nano, qk.tasks.binding(4)
    place = tmp_path_factory.mktemp("gallery") / "runs"
    made = {"why": qk.why(scope, PROMPT, "L2H3", draws=4), "heads": qk.find_heads(scope, task, 4)}
    for name, result in made.items():
        result.write(place / name, files={"report.html": report_html([result])})
    qk.decompose(
        scope, task, ["L2H0", "L1H1"], 16, contrasts=["order"], replicates=9, out=place / "fit"
    )
    Result("lee2026/fig9", {"swap": [{"head": "L1H1", "score": 0.5}]}, CLAIMS, model="other", preset="smoke",
           answer="L1H1 moves.").write(place / "lee2026" / "fig9")  # fmt: skip
    return place


@pytest.fixture(scope="module")
def index(runs, tmp_path_factory):
    site = tmp_path_factory.mktemp("site") / "site"
    return write_gallery(site, runs / "why", runs)  # named twice, it stands there once


def test_every_run_has_a_card_with_its_answer_and_a_page(index):
    site, stored, text = index.parent, Result.read(index.parent), index.read_text()
    assert page_of(site) == index
    assert [row["run"] for row in stored.table("runs")] == ["why", "fit", "heads", "lee2026-fig9"]
    assert stored.answer == "4 runs; 1 of 2 claims hold."
    for row in stored.table("runs"):
        assert f'href="{row["page"]}"' in text
        assert f'href="../index.html#run-{row["run"]}"' in (site / row["page"]).read_text()
        assert f'id="run-{row["run"]}"' in text
    assert (
        text.count('class="data"') == 3
    )  # what the page's script draws small; the fourth has no chart
    links = re.findall(r'href="(runs/[^"#]+)#([^"]+)"', text)
    assert {"claim-1", "claim-2", "prompt-1", "L2H3", "L1H1", "claims"} <= {
        place for _, place in links
    }
    for page, place in links:
        text = (site / page).read_text()
        told = re.search(
            rf"<h1[^>]*>[^<]*{place}", text
        )  # a head of the answer alone is at the top
        assert f'id="{unquote(place)}"' in text or told or 'class="block map"' in text, (
            page,
            place,
        )


def test_a_site_is_written_over_its_own_and_over_nothing_else(runs, tmp_path, qkscope):
    site, mine = tmp_path / "site", tmp_path / "mine"
    write_gallery(site, runs)
    _, printed, said = qkscope("gallery", runs / "why", runs / "heads", "--out", site)
    assert f"The page: {site}/index.html" in printed, said
    assert sorted(path.name for path in (site / "runs").iterdir()) == ["heads.html", "why.html"]
    shutil.copytree(site, runs.parent / "copy")
    write_gallery(site, runs / "why", runs.parent / "copy")  # a gallery is no run
    assert len(Result.read(site).table("runs")) == 1
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(
        BadInput, match=r"holds other files than a run, notes\.txt: name a new folder"
    ):
        write_gallery(mine, runs)
    with pytest.raises(BadInput, match="holds a run of heads/binding, not of gallery"):
        write_gallery(runs / "heads", runs / "why")
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("how", ["work", "removed"])
def test_a_run_that_was_stopped_is_left_out_and_said_so(runs, tmp_path, caplog, how):
    shutil.copytree(runs, tmp_path / "runs")
    folder = tmp_path / "runs" / "fit"  # what a kill leaves of a run
    (folder / "results.json").unlink()
    if how == "work":
        (folder / "manifest.json").unlink()
        (folder / ".work" / "abc").mkdir(parents=True)
    index = write_gallery(tmp_path / "site", tmp_path / "runs")
    said = "is left out: it is not finished; run its command again"
    assert f"fit {said}" in caplog.text
    assert f"<li>fit {said}" in index.read_text()
    assert str(tmp_path) not in index.read_text()  # a page that is sent
    assert len(Result.read(tmp_path / "site").table("runs")) == 3
    assert folder.is_dir()  # and nothing is taken from it


def test_text_of_a_run_is_text_in_the_index(tmp_path):
    """Words that explain what a name like L16H0 means speak of no head."""
    lines = [{"line": "L2H1 looks at Mary."}, {"line": "L16H0 is a head, M9 the MLP of layer 9."}]
    assert heads_in(lines) == ["L2H1"]
    claim = Claim(EVIL, EVIL, 2.0, 1.0, "ours > control")
    tables = {EVIL: [{"head": "L0H0", "name": EVIL}], "said": [{"line": EVIL}]}
    result = Result(
        EVIL, tables, [claim], model=EVIL, answer=EVIL, provenance={"asked": {"prompt": EVIL}}
    )
    result.write(tmp_path / "<script>")
    index = write_gallery(tmp_path / "site", tmp_path / "<script>", title=EVIL)
    for page in (index, tmp_path / "site" / "runs" / "script.html"):
        assert "alert(1)" in page.read_text()
        assert "<script>alert" not in page.read_text()
        assert "<img src=x" not in page.read_text()


@pytest.fixture(scope="module")
def site(index):
    return index.as_uri()


def test_the_site_opens_from_disk_and_words_and_choices_hide_what_was_not_asked_for(browser, site):
    watched = Watched(browser, site)
    page = watched.page
    watched.check_screens("gallery")
    assert [r for r in watched.requests if not r.startswith("data:")] == [site]
    for run, drawn in (("why", ".graph svg"), ("heads", ".cell"), ("fit", "circle")):
        expect(page.locator(f"#run-{run} .thumbnail {drawn}").first).to_be_attached()

    def alone(run):
        shown = "[...document.querySelectorAll('.card')].filter((each) => each.checkVisibility())"
        cards = f"{shown}.map((each) => each.id)"
        watched.until(f"{cards}.join() === 'run-{run}'")

    page.locator("#words").fill("l2h3")
    alone("why")
    expect(page.locator(".heads tr.found:visible").first).to_contain_text("L2H3")
    expect(page.locator("#claims")).to_be_hidden()
    page.locator("#words").fill("")
    page.locator("select[data-filter=model]").select_option("other")
    alone("lee2026-fig9")
    expect(page.locator("#claims tr.found:visible")).to_have_count(2)
    page.locator("select[data-filter=model]").select_option("")
    page.locator("select[data-filter=what]").select_option("heads")
    alone("heads")
    expect(page.locator("output")).to_have_text("1 of 4 runs")
    assert watched.errors == []
    page.close()


def test_a_link_leads_to_a_head_to_a_claim_and_back(browser, site):
    watched = Watched(browser, site)
    page = watched.page
    page.locator("#run-why p.of a", has_text="L2H3").first.click()
    expect(page).to_have_url(site.replace("index.html", "runs/why.html#L2H3"))
    expect(page.locator("#L2H3:target")).to_be_in_viewport()
    page.locator("header a").click()
    expect(page).to_have_url(f"{site}#run-why")
    page.locator("#claims a", has_text="L1H1 is right").click()
    expect(page.locator("#claim-2:target")).to_contain_text("fails")
    expect(page.locator("#claim-2")).to_be_in_viewport()
    page.go_back()
    page.locator("#run-why .asked a").click()
    page.locator("#prompt-1 .token").nth(
        10
    ).wait_for()  # a script writes the tokens once the page is there
    page.goto(site.replace("index.html", "runs/heads.html#L2H0"))  # on a map: its script finds it
    expect(page.locator(".map .chosen")).to_have_attribute("visibility", "visible")
    cell = page.locator('.map .cell[data-at="2,0"]').get_attribute("x")
    expect(page.locator(".map .chosen")).to_have_attribute("x", cell)
    page.goto(
        site.replace("index.html", "runs/lee2026-fig9.html#L1H1")
    )  # in a folded table: it opens
    expect(page.locator("tr#L1H1")).to_be_visible()
    assert [r for r in watched.requests if not r.startswith(("file:", "data:"))] == []
    assert watched.errors == []
    page.close()
