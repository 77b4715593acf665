"""Facts about the page: whole without a network, everything escaped, drawn from the numbers; and folders read back."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qkscope as qk
from qkscope import BadInput
from qkscope.analyses.clouds import clouds_of
from qkscope.explorer.opening import page_of
from qkscope.page.blocks import blocks_of
from qkscope.page.figures import draw_atlas, draw_discovery
from qkscope.page.report import report_html, script_json, write_report
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result
from tiny_llama import write_tiny_llama

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def verbs(tmp_path_factory):
    """The four results of the twenty lines, on a tiny random model."""
    scope = qk.Scope.load(write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model"), device="cpu")
    task = qk.tasks.binding(4)
    ranking = qk.find_heads(scope, task, 12)
    fit = qk.decompose(scope, task, ["L1H3", "L0H1"], 24, contrasts=["order", "lexical"], replicates=19)
    swaps = qk.swap(scope, task.test(12), fit, sizes=[1, 2], clouds=True)
    return scope, (ranking, fit, swaps, qk.attribute(scope, "hat : O jam : Z jam :", "L1H3", fit))


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
    return [
        json.loads(text) for text in re.findall(r'<script type="application/json" class="data">(.*?)</script>', page)
    ]


# ---------------------------------------------------------------- one page, offline


def test_the_four_verbs_make_one_page_that_needs_nothing_else(verbs, tmp_path):
    path = write_report(tmp_path / "new" / "report.html", *verbs[1])
    page = path.read_text()
    assert path.stat().st_size < 3e5
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert not re.search(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?!data:)', page)
    kinds = re.findall(r'<section class="block (\w+)"', page)
    assert kinds == ["map", "spectra", "swaps", "curve", "cloud", "tokens", "made"]
    assert page.index(html.escape(verbs[1][0].answer)[:40]) < page.index("<section")  # the answer in words first


def test_the_scripts_of_the_page_are_the_only_ones_it_may_run(verbs):
    page = report_html([verbs[1][2]])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src &#39;none&#39;" in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 6  # what draws swaps, their curve and points that turn, on two for all, and no more
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert html.escape(f"'sha256-{digest}'").replace("&#x27;", "&#39;") in policy
    assert "unsafe-inline&#39;" not in policy.split("style-src")[0]
    assert "unsafe-eval" not in policy


def test_a_script_comes_only_with_what_it_draws(verbs):
    for result, turned in zip(verbs[1], (False, False, True, False), strict=True):
        assert ("qk.charts.cloud = " in report_html([result])) is turned


def test_points_are_stored_once_and_finer_than_a_screen_shows(verbs):
    """Labels are those of the prompts, whatever head or feature: four clouds here share them."""
    cloud = next(block for block in data_of(report_html(verbs[1])) if block["kind"] == "cloud")
    panels, labels = cloud["options"]["panels"], cloud["options"]["labels"]
    assert (len(panels), len(labels)) == (4, 1)
    for panel, made in zip(panels, clouds_of(verbs[1][2]), strict=True):
        for side, points in (("keys", made.keys), ("queries", made.queries)):
            drawn = torch.tensor(panel[side]).reshape(-1, 3) * panel["unit"]
            assert float((drawn - points).abs().max()) <= 0.51 * panel["unit"]
        assert panel["unit"] < 0.0011 * float(torch.cat([made.keys, made.queries]).abs().max())


def test_the_page_escapes_everything():
    page = report_html([evil_result(), evil_result()], {EVIL: b"png"}, title=EVIL)
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert data_of(page)[0]["rows"][0]["token"] == EVIL  # and it is still the same text
    assert json.loads(script_json({EVIL: "\u2028&"})) == {EVIL: "\u2028&"}


# ---------------------------------------------------------------- charts are the numbers


def test_charts_hold_the_numbers_of_the_tables(verbs):
    ranking, fit, swaps, parts = verbs[1]
    data = {block["kind"]: block for block in data_of(report_html(verbs[1]))}
    assert data["map"]["rows"] == ranking.to_json()["tables"]["heads"]
    assert data["swaps"]["rows"] == swaps.to_json()["tables"]["swap"]
    assert data["tokens"]["rows"] == parts.to_json()["tables"]["tokens"]
    assert data["tokens"]["options"]["parts"][-1] == "residual"
    for row in data["tokens"]["rows"]:
        assert row["logit"] == pytest.approx(sum(row[name] for name in data["tokens"]["options"]["parts"]), abs=1e-4)
    lexical = [row for row in data["spectra"]["rows"] if (row["contrast"], row["head"]) == ("lexical", "L1H3")]
    controls = fit["lexical", "L1H3"].controls
    assert [row["value"] for row in lexical] == list(controls.spectrum[: len(lexical)])
    assert [row["null_high"] for row in lexical if row["null_high"] is not None] == list(
        controls.null_high[: len(lexical)]
    )
    assert sum(row["kept"] for row in lexical) == fit["lexical", "L1H3"].rank


def test_points_lie_in_the_features_subspace_and_know_their_labels(verbs):
    clouds = clouds_of(verbs[1][2])
    assert [cloud.title for cloud in clouds] == [
        "order at L1H3", "lexical at L1H3", "order at L0H1", "lexical at L0H1",
    ]  # fmt: skip
    for cloud in clouds:
        assert cloud.keys.shape == (12 * 4, 3)
        assert cloud.queries.shape == (12, 3)
        for colouring in cloud.colourings.values():
            assert len(colouring.keys) == 48
            assert len(colouring.queries) == 12
        # queries count as often as keys, so that both together are centred
        torch.testing.assert_close(cloud.keys.sum(0) + 4 * cloud.queries.sum(0), torch.zeros(3), atol=1e-4, rtol=0)
    place = clouds[0].colourings["place in the prompt"]
    assert place.keys[:4] == (0, 1, 2, 3)
    asked = clouds[0].colourings["right or not"]
    assert [asked.keys[4 * row + place.queries[row]] for row in range(12)] == [0] * 12
    assert sum(label == 0 for label in asked.keys) == 12


def test_a_run_that_is_read_back_gives_the_same_page(tmp_path):
    rows = [{"head": f"L{i}H0", "accuracy": score, "row_accuracy": 0.1, "chance": 0.2} for i, score in
            enumerate((0.5, float("nan")))]  # fmt: skip
    arrays = {"order/keys": torch.randn(5, 3), "order/key_labels": torch.arange(5), "order/queries": torch.randn(2, 3),
              "order/query_labels": torch.arange(2), "x": torch.arange(3)}  # fmt: skip
    made = Result("test/one", {"heads": rows}, [Claim("c", "p", 2.0, 1.0, "ours > control")], arrays,
                  answer="It is so.", preset="smoke", provenance={"command": "qkscope x"})  # fmt: skip
    read = Result.read(made.write(tmp_path / "run"))
    assert read.to_json() == made.to_json()
    assert read.provenance == made.provenance
    torch.testing.assert_close(dict(read.arrays), arrays)
    assert [block.kind for block in blocks_of(read)] == ["map", "cloud"]
    assert report_html([read]) == report_html([made])


@pytest.fixture(scope="module")
def nano():
    """What the verbs return on a model that we ship."""
    scope, task = qk.Scope.load("nano:mixed"), qk.tasks.binding(4)
    texts = [unit[0].text for unit in qk.tasks.induction().test(300)]
    fit = qk.decompose(scope, task, ["L2H0", "L1H1"], 16, contrasts=["order", "lexical"], replicates=9)
    return {
        "heads": qk.find_heads(scope, task, 4),
        "decompose": fit,
        "swap": qk.swap(scope, task.test(8), fit, sizes=[1, 2], clouds=True),
        "explain": qk.attribute(scope, "hat: O\njam: Z\njam:", "L2H0", fit),
        "sparsity": qk.sparsity(scope, task, n=4),
        "discover": qk.discover(scope, qk.tasks.induction(), "L1H1", 200, test=40, sizes=(1, 2), progress=False),
        "atlas": qk.atlas(scope, texts, 200, test=60, progress=False),
    }


KINDS = {
    "heads": ["map"], "decompose": ["spectra"], "swap": ["swaps", "curve", "cloud"], "explain": ["tokens"],
    "sparsity": [], "discover": ["cards", "curve"], "atlas": ["atlas", "reads"],
}  # fmt: skip


@pytest.mark.parametrize("verb", KINDS)
def test_the_page_of_a_verb_read_back_is_the_page_it_made(nano, tmp_path, verb):
    read = Result.read(nano[verb].write(tmp_path / "run"))
    assert [block.kind for block in blocks_of(read)] == KINDS[verb]
    assert report_html([read]) == report_html([nano[verb]])


def test_a_page_as_large_as_the_demos_is_small():
    """Its 270 heads, four fitted and three of them swapped on 96 prompts of nine boxes, with their points."""
    scope, task = qk.Scope.load("nano:mixed"), qk.tasks.binding(9)
    heads = [{"head": f"L{i}H{j}", "accuracy": i / 31, "low": j / 17, "high": 0.987654321, "chance": 1 / 9,
              "ratio": j / 13, "row_accuracy": i / 37, "mass": j / 19, "n": 96} for i in range(30)
             for j in range(9)]  # fmt: skip
    names = ["L2H0", "L1H1", "L2H1"]
    fit = qk.decompose(scope, task, [*names, "L0H0"], 16, contrasts=["order", "lexical"], replicates=9)
    swaps = qk.swap(scope, task.test(96), fit, names, sizes=[1, 2, 4, 8], clouds=True)
    parts = qk.attribute(scope, "hat: O\njam: Z\ncat: B\njam:", "L2H0", fit)
    page = report_html([Result("lead", {}), Result("heads", {"heads": heads}), fit, swaps, parts])
    assert len(page.encode()) < 1e6
    assert sum(len(cloud.keys) for cloud in clouds_of(swaps)) == 6 * 96 * 9  # nothing was left out for it
    assert len(swaps._repr_html_()) < 5e5  # a notebook keeps one in every cell


def test_a_page_is_told_in_order(verbs):
    """The answer, how many claims hold, pictures, the claims of what has pictures with them, and tables folded away."""
    ranking, _, swaps, parts = verbs[1]
    claim = Claim("c", "p", 2.0, 1.0, "ours > control")
    lead = Result("lead", {"few": [{"x": 1}]}, [claim], answer="It is so.")
    own = Result("own", parts.tables, [claim, Claim("d", "p", 0.0, 1.0, "ours > control")], answer="That, too.")
    page = report_html([lead, ranking, own, swaps])
    kinds = re.findall(r'<section class="block (\w+)"', page)
    assert kinds == ["map", "tokens", "claims", "swaps", "curve", "cloud", "claims", "made"]
    assert page.index("It is so.") < page.index("2 of 3 claims hold") < page.index("<section")
    assert page.count('id="claims"') == 1
    assert "<details open" not in page
    assert "<details open" in report_html([lead])  # what has no picture shows its table


def test_a_picture_of_what_is_drawn_already_is_left_out(nano, tmp_path):
    pictures = {"curve": b"\x89PNG 1", "other": b"\x89PNG 2"}
    page = report_html([nano["discover"]], pictures)
    assert re.findall(r'<img alt="(\w+)"', page) == ["other"]
    for verb, draw in (("discover", draw_discovery), ("atlas", draw_atlas)):
        files = draw(nano[verb])
        folder = nano[verb].write(tmp_path / verb, files=files)
        assert any(name.endswith(".png") for name in files)  # for papers
        (folder / "report.html").unlink()
        assert "<img" not in page_of(folder).read_text()
        assert page_of(folder).read_text() == files["report.html"]  # the folder's page is drawn again as it was


def test_a_few_heads_of_many_are_no_map(verbs):
    ranking = verbs[1][0]
    few = Result("few", {"heads": [row for row in ranking.top() if row["head"] in ("L1H3", "L0H0")]})
    assert [block.kind for block in blocks_of(ranking)] == ["map"]
    assert blocks_of(few) == []
    assert 'class="block map"' not in report_html([few])


def test_a_notebook_gets_the_widget_in_a_frame_of_its_own(verbs):
    shown = verbs[1][3]._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts"')
    assert "<script" not in shown
    inside = html.unescape(re.search(r"srcdoc='(.*?)'", shown, flags=re.DOTALL)[1])
    assert data_of(inside)[0]["rows"] == verbs[1][3].to_json()["tables"]["tokens"]
    evil = evil_result()._repr_html_()
    assert "<script" not in evil
    assert "<script>alert" not in html.unescape(re.search(r"srcdoc='(.*?)'", evil, flags=re.DOTALL)[1])


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "says"), [((), "nothing to report"), (({"a": 1},), "results of write_report should be a Result")]
)
def test_a_report_is_made_of_results(tmp_path, given, says):
    with pytest.raises(BadInput, match=says):
        write_report(tmp_path / "report.html", *given)
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_written_to_a_file_that_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place, says in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.html", "cannot be written")):
        with pytest.raises(BadInput, match=says):
            write_report(place, evil_result())


def test_features_of_two_heads_are_refused(verbs):
    scope, (_, fit, _, _) = verbs
    mixed = {"order": fit["order", "L1H3"], "lexical": fit["lexical", "L0H1"]}
    with pytest.raises(BadInput, match="feature 'lexical' belongs to L0H1, not to L1H3: name features of one head"):
        qk.attribute(scope, "hat : O jam :", "L1H3", mixed)


SHAPES = {
    "a list of tables": {"tables": []},
    "no tables": {"tables": None},
    "rows of text": {"tables": {"a": "hello"}},
    "rows of numbers": {"tables": {"a": [1, 2]}},
    "no seconds": {"seconds": None},
}


def damage(folder: Path, how: str) -> Path:
    some = Result("test/one", {}, arrays={"x": torch.arange(3)}).write(
        folder / "run", files={"report.html": "<html></html>"}
    )
    stored = json.loads((some / "results.json").read_text())
    if how == "missing":
        return folder / "nothing"
    if how == "empty":
        (some / "results.json").unlink()
    elif how == "half-written":
        text = (some / "results.json").read_text()
        (some / "results.json").write_text(text[: len(text) // 2])
    elif how == "no manifest":
        (some / "manifest.json").unlink()
    elif how == "lacks parts":
        (some / "results.json").write_text(json.dumps({"schema": 1}))
    elif how == "half-written arrays":
        (some / "arrays.safetensors").write_bytes((some / "arrays.safetensors").read_bytes()[:20])
    elif how == "newer":
        (some / "results.json").write_text(json.dumps({**stored, "schema": 99}))
    elif how in SHAPES:
        (some / "results.json").write_text(json.dumps({**stored, **SHAPES[how]}))
        (some / "report.html").unlink()
    elif how == "several":
        return folder
    return some


BAD = [
    ("missing", "there is no folder"),
    ("empty", "holds no results.json"),
    ("half-written", "results.json is damaged or half-written"),
    ("no manifest", "manifest.json is damaged or half-written"),
    ("lacks parts", "is damaged or half-written"),
    ("half-written arrays", "is damaged or half-written"),
    *((how, "is damaged or half-written") for how in SHAPES),
    ("newer", "was written by a newer qkscope (schema 99; this one reads 1): update it"),
    ("several", "holds 1 runs: name one of"),
]


@pytest.mark.parametrize(("how", "says"), BAD)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, how, says):
    with pytest.raises(BadInput, match=re.escape(says)):
        page_of(damage(tmp_path, how))


def test_rows_need_not_have_the_same_columns():
    page = report_html([Result("test/one", {"mixed": [{"x": 1}, {"x": 2, "y": 0.5}, {"y": 7}]})])
    table = page[page.index('aria-label="mixed"') : page.index("</table>")]
    assert re.findall(r"<th [^>]*>(.*?)</th>", table) == ["x", "y"]
    assert re.findall(r"<td(?: [^>]*)?>(.*?)</td>", table) == ["1", "", "2", "0.5", "", "7"]


def test_a_folder_without_a_page_gets_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Result("test/one", {}, answer="It is so.").write(tmp_path / "run", files={"figures/a.png": b"\x89PNG"})
    assert "It is so." in page_of(folder).read_text()
    (folder / "figures" / "b.png").symlink_to("/etc/hostname")  # what a link points to is not the folder's
    (folder / "figures" / "c.png").write_bytes(b"<svg onload=alert(1)>")
    assert page_of(folder).read_text().count("data:image/png;base64,") == 1


def view(*arguments):
    command = [sys.executable, "-m", "qkscope", "view", "--no-browser", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_view_opens_our_own_page_and_draws_a_strangers_anew(tmp_path, monkeypatch, caplog):
    """One that came with a folder could hold anybody's scripts, whatever else is right in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = Result("test/one", {}, answer="It is so.")
    folder = result.write(tmp_path / "my run", files={"report.html": report_html([result])})
    done = view(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == (folder / "report.html").as_uri()
    caplog.set_level("INFO")
    evil = report_html([result]).replace("</body>", "<script>alert(document.cookie)</script></body>")
    for theirs in (evil, "<html></html>", evil[:-20]):
        (folder / "report.html").write_text(theirs)
        caplog.clear()
        opened = page_of(folder)
        assert "was not drawn here" in caplog.text
        assert opened.is_relative_to(tmp_path / "cache")
        assert "It is so." in opened.read_text()
        assert "document.cookie" not in opened.read_text()
        assert (folder / "report.html").read_text() == theirs  # not ours to change


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/nowhere/at/all"], "there is no folder"),
        ([], "name a run folder"),
        (["--live", "runs"], "the live page looks into a model"),
        (["--model", "x", "runs"], "are for the live page"),
        (["--live", "--port", "70000"], "port is at most 65535"),
        (["--live", "--fit", "/nowhere"], "holds no features"),
    ],
)
def test_view_refuses_in_a_sentence(arguments, says):
    done = view(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
