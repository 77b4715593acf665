"""Facts about the page: whole without a network, everything escaped, drawn from the numbers; and
folders read back.
"""

import base64
import hashlib
import html
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qkscope as qk
from qkscope import BadInput
from qkscope.cli import app
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.results.tables import every_table, unknown_columns
from qkscope.show.blocks import blocks_of
from qkscope.show.page import page_of, report_html, script_json

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
PROMPT = "hat: O\njam: Z\ncat: B\njam:"


@pytest.fixture(scope="module")
def results(nano):
    """What the verbs return on a model that we ship."""
    scope, task = nano, qk.tasks.binding(4)
    texts = [unit[0].text for unit in qk.tasks.induction().test(300)]
    fit = qk.decompose(
        scope, task, ["L2H0", "L1H1"], 16, contrasts=["order", "lexical"], replicates=9
    )
    return {
        "heads": qk.find_heads(scope, task, 4),
        "decompose": fit,
        "swap": qk.swap(scope, task.test(12), fit, sizes=[1, 2]),
        "attribute": qk.sums.attribute(scope, PROMPT, "L2H0", fit),
        "sparsity": qk.sparsity(scope, task, n=4),
        "atlas": qk.atlas(scope, texts, 8, test=8, length=32, progress=False),
        "why": qk.why(scope, PROMPT, "L2H3", draws=4),
        "trace": qk.trace(scope, PROMPT, "L2H3"),
    }


KINDS = {
    "heads": ["map"], "decompose": ["spectra"], "swap": ["swaps", "curve"], "attribute": ["tokens"],
    "sparsity": [], "atlas": ["atlas"],
    "why": ["said", "tokens", "tests", "tests", "parts", "tests", "output", "graph"],
    "trace": ["tests", "graph", "tokens"],
}  # fmt: skip


def test_every_table_has_the_columns_and_types_of_its_definition(results):
    defined = [verb for verb in results if verb in every_table()]
    assert len(defined) == 7
    for verb in defined:
        assert unknown_columns(verb, results[verb].tables) == [], verb


def test_the_page_says_what_a_column_means(results):
    reaches = every_table()["heads"]["heads"].columns["row_accuracy"]
    assert reaches.words == "most of all tokens"
    assert f'title="{reaches.words}">row accuracy</th>' in report_html([results["heads"]])


def evil_result(**kwargs):
    return Result(
        experiment=EVIL,
        answer=EVIL,
        tables={EVIL: [{EVIL: EVIL, "value": float("nan")}],
                "tokens": [{"position": 0, "token": EVIL, "attention": 1.0, "logit": 1.0, "part": 0.5}]},
        claims=[Claim(EVIL, EVIL, 2.0, 1.0, "ours > control")],
        provenance={"command": EVIL, "asked": {EVIL: EVIL}},
        **kwargs,
    )  # fmt: skip


def data_of(page):
    texts = re.findall(r'<script type="application/json" class="data">(.*?)</script>', page)
    return [json.loads(text) for text in texts]


def test_the_scripts_of_the_page_are_the_only_ones_it_may_run(results):
    page = report_html([results["swap"]])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src &#39;none&#39;" in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 5  # what draws swaps and their curve, on three for all, and no more
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert html.escape(f"'sha256-{digest}'").replace("&#x27;", "&#39;") in policy
    assert "unsafe-inline&#39;" not in policy.split("style-src")[0]
    assert "unsafe-eval" not in policy


def test_the_page_and_the_widget_escape_everything():
    page = report_html([evil_result(), evil_result()], {EVIL: b"png"}, title=EVIL)
    widget = evil_result()._repr_html_()
    assert widget.startswith('<iframe sandbox="allow-scripts"')
    assert "<script" not in widget
    for text in (page, html.unescape(re.search(r"srcdoc='(.*?)'", widget, flags=re.DOTALL)[1])):
        assert "alert(1)" in text
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert data_of(text)[0]["rows"][0]["token"] == EVIL  # and it is still the same text
    assert json.loads(script_json({EVIL: "\u2028&"})) == {EVIL: "\u2028&"}


@pytest.mark.parametrize("verb", KINDS)
def test_the_page_of_a_verb_read_back_is_the_page_it_made(results, tmp_path, verb):
    read = Result.read(results[verb].write(tmp_path / "run"))
    assert [block.kind for block in blocks_of(read)] == KINDS[verb]
    assert report_html([read]) == report_html([results[verb]])


def test_charts_hold_the_numbers_of_the_tables(results):
    told = [results[name] for name in ("heads", "decompose", "swap", "attribute", "why")]
    data = {block["kind"]: block for block in reversed(data_of(report_html(told)))}
    for kind, verb, table in (("map", "heads", "heads"), ("swaps", "swap", "swap"), ("tokens", "attribute", "tokens"),
                              ("parts", "why", "parts"), ("output", "why", "output")):  # fmt: skip
        assert data[kind]["rows"] == results[verb].to_json()["tables"][table]
    parts = data["tokens"]["options"]["parts"]
    for row in data["tokens"]["rows"]:
        assert row["logit"] == pytest.approx(sum(row[name] for name in parts), abs=1e-4)
    lexical = [
        row
        for row in data["spectra"]["rows"]
        if (row["contrast"], row["head"]) == ("lexical", "L2H0")
    ]
    controls = results["decompose"]["lexical", "L2H0"].controls
    assert [row["value"] for row in lexical] == list(controls.spectrum[: len(lexical)])
    assert sum(row["kept"] for row in lexical) == results["decompose"]["lexical", "L2H0"].rank
    drawn = {
        block.table: block.rows for block in blocks_of(results["why"]) if block.kind == "tests"
    }
    for table, after in (("because", "after"), ("carriers", "restored"), ("cuts", "after")):
        assert [row["after"] for row in drawn[table]] == [
            row[after] for row in results["why"].tables[table]
        ]


def test_a_page_is_told_in_order(results):
    """The answer, how many claims hold, pictures, the claims of what has pictures with them, and
    tables folded away.
    """
    claim = Claim("c", "p", 2.0, 1.0, "ours > control")
    lead = Result("lead", {"few": [{"x": 1}]}, [claim], answer="It is so.")
    claims = [claim, Claim("d", "p", 0.0, 1.0, "ours > control")]
    own = Result("own", results["attribute"].tables, claims, answer="That, too.")
    page = report_html([lead, results["heads"], own, results["swap"]])
    kinds = re.findall(r'<section class="block (\w+)"', page)
    assert kinds == ["map", "tokens", "claims", "swaps", "curve", "claims", "made"]
    assert page.index("It is so.") < page.index("2 of 3 claims hold") < page.index("<section")
    assert page.count('id="claims"') == 1
    assert "<details open" not in page
    assert "<details open" in report_html([lead])  # what has no picture shows its table
    page = report_html([results["swap"]], {"curve": b"\x89PNG 1", "other": b"\x89PNG 2"})
    assert re.findall(r'<img alt="(\w+)"', page) == [
        "other"
    ]  # a picture of what is drawn already is left out


def damage(folder: Path, file: str, change) -> None:
    text = (folder / file).read_bytes()
    changed = (
        change(text) if callable(change) else json.dumps({**json.loads(text), **change}).encode()
    )
    (folder / file).write_bytes(changed)


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        (
            "results.json",
            lambda text: text[: len(text) // 2],
            "results.json is damaged or half-written",
        ),
        (
            "manifest.json",
            lambda text: text[: len(text) // 2],
            "manifest.json is damaged or half-written",
        ),
        ("arrays.safetensors", lambda data: data[:20], "is damaged or half-written"),
        ("results.json", {"tables": {"a": [1, 2]}}, "is damaged or half-written"),
        (
            "results.json",
            {"schema": 99},
            "was written by a newer qkscope (schema 99; this one reads 1): update it",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, file, change, says):
    folder = Result("test/one", {}, arrays={"x": torch.arange(3)}).write(tmp_path / "run")
    with pytest.raises(BadInput, match="holds 1 runs: name one of"):
        page_of(tmp_path)
    damage(folder, file, change)
    with pytest.raises(BadInput, match=re.escape(says)):
        page_of(folder)
    (folder / "results.json").unlink()
    with pytest.raises(BadInput, match=r"holds no results\.json"):
        page_of(folder)


def test_view_opens_our_own_page_and_draws_a_strangers_anew(tmp_path, monkeypatch, caplog):
    """One that came with a folder could hold anybody's scripts, whatever else is right in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = Result("test/one", {}, answer="It is so.")
    files = {"report.html": report_html([result]), "figures/a.png": b"\x89PNG"}
    folder = result.write(tmp_path / "my run", files=files)
    done = CliRunner().invoke(app, ["view", "--no-browser", str(folder)])
    assert done.output.strip() == (folder / "report.html").as_uri()
    caplog.set_level("INFO")
    (folder / "figures" / "b.png").symlink_to(
        "/etc/hostname"
    )  # what a link points to is not the folder's
    (folder / "figures" / "c.png").write_bytes(b"<svg onload=alert(1)>")
    evil = report_html([result]).replace(
        "</body>", "<script>alert(document.cookie)</script></body>"
    )
    for theirs in (evil, "<html></html>", evil[:-20]):
        (folder / "report.html").write_text(theirs)
        caplog.clear()
        opened = page_of(folder)
        assert "was not drawn here" in caplog.text
        assert opened.is_relative_to(tmp_path / "cache")
        assert "It is so." in opened.read_text()
        assert "document.cookie" not in opened.read_text()
        assert opened.read_text().count("data:image/png;base64,") == 1
        assert (folder / "report.html").read_text() == theirs  # not ours to change


class Unread(qk.Scope):
    """A model whose prompt is long."""

    def __init__(self):
        pass

    def tokens(self, prompt, *, chat=False):
        return ["a"] * 257


def test_patterns_of_heads_are_drawn_as_a_table_of_what_each_token_attends_to(nano):
    prompt = "hat: O jam: Z jam:"
    shown = qk.show_pattern(nano, prompt, "L1H0,L2H3")
    blocks = [block for block in blocks_of(shown) if block.kind == "pattern"]
    assert [block.title for block in blocks] == [
        "Attention pattern of L1H0",
        "Attention pattern of L2H3",
    ]
    pattern = nano.attention(prompt, "L2H3")
    for row in blocks[1].rows:
        assert row["attention"] == pytest.approx(float(pattern[row["query"], row["key"]]))
    assert "qk.charts.pattern" in shown._repr_html_()
    with pytest.raises(BadInput, match="a whole pattern is drawn of at most 256"):
        qk.show_pattern(Unread(), "hat: O", "L1H0")
