"""The command line end to end: figures, their folders and their numbers; unknown names get a sentence."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qkscope_papers
from qkscope_papers.registry import _FIGURES, figure_of, figures_of, list_experiments

RANK_COLUMNS = {
    "variant", "d_head", "r1", "r2", "rank1", "rank2", "null1", "null2", "untrained1", "untrained2",
    "accuracy", "ceiling",
}  # fmt: skip
SWAP_COLUMNS = {
    "condition", "orig_before", "target_before", "orig_after", "target_after", "low", "high", "n", "vacuous",
}  # fmt: skip


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "qkscope", "reproduce", "lee2026", "fig2", "fig3", "fig4", "--preset", "smoke"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out, done


def results(smoke, figure):
    return json.loads((smoke[0] / "lee2026" / figure / "results.json").read_text())


def test_each_figure_has_its_folder(smoke):
    out, done = smoke
    for figure in ("fig2", "fig3", "fig4"):
        folder = out / "lee2026" / figure
        assert {"results.json", "manifest.json", "report.html"} <= {path.name for path in folder.iterdir()}
        assert (folder / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / "figures" / f"{figure}.pdf").read_bytes().startswith(b"%PDF")
        assert 'src="http' not in (folder / "report.html").read_text(), "the page works offline"
    assert "glyph" not in done.stderr


def test_each_figure_makes_claims_under_its_own_name(smoke):
    for figure in ("fig2", "fig3", "fig4"):
        found = results(smoke, figure)
        assert (found["schema"], found["experiment"], found["preset"]) == (1, f"lee2026/{figure}", "smoke")
        assert found["claims"]


def test_smoke_already_shows_exact_ranks_and_their_controls(smoke):
    rows = results(smoke, "fig2")["tables"]["ranks"]
    assert set(rows[0]) >= RANK_COLUMNS
    below = [row for row in rows if row["r1"] + row["r2"] < row["d_head"]]
    assert len(below) >= 3
    for row in below:
        assert (row["rank1"], row["rank2"]) == (row["r1"], row["r2"])
        assert row["accuracy"] > 0.8
        assert row["accuracy"] < row["ceiling"] + 0.02


def test_the_joint_swap_moves_the_attention_and_random_ones_do_not(smoke):
    rows = results(smoke, "fig4")["tables"]["swap"]
    assert set(rows[0]) >= SWAP_COLUMNS
    found = {row["condition"]: row for row in rows}
    assert found["both"]["orig_after"] <= 0.01
    assert found["random_both"]["orig_after"] > 0.1
    assert {"z1_oracle", "z1_oblique", "key_pca_both", "cov_qk_both", "untrained_both"} <= set(found)


def test_the_cube_can_be_turned(smoke):
    page = (smoke[0] / "lee2026" / "fig3" / "report.html").read_text()
    assert 'class="block cloud"' in page
    assert "qk.charts.cloud = " in page, "the script is inside"
    rows = {row["head"]: row for row in results(smoke, "fig3")["tables"]["geometry"]}
    assert rows["trained"]["vertices"] == 8
    assert rows["trained"]["cosine"] > rows["untrained"]["cosine"] + 0.2


def test_figures_share_their_heads(smoke):
    heads = list((smoke[0] / "heads").iterdir())
    assert len(heads) == 5, "four cells of fig2, and one head for both fig3 and fig4"


def test_every_figure_has_its_run_and_its_drawing_in_one_file():
    for row in list_experiments():
        experiment = figure_of(row["paper"], row["figure"]).experiment
        assert experiment.draw.__module__ == experiment.run.__module__, row
    for paper, registered in _FIGURES.items():
        assert {name: entry.title for name, entry in figures_of(paper).items()} == {
            name: found.title for name, found in registered.items()
        }


def test_no_figure_is_asked_for_its_name_outside_its_own_file():
    """A figure's name in quotes stands where the figure is registered, and nowhere else in the reproduction."""
    homes = {}
    for row in list_experiments():
        home = figures_of(row["paper"])[row["figure"]].module
        homes.setdefault(f'"{row["figure"]}"', set()).add(home)
    for path in Path(qkscope_papers.__file__).parent.glob("*2026/**/*.py"):
        module = ".".join(
            ("qkscope_papers", *path.relative_to(Path(qkscope_papers.__file__).parent).with_suffix("").parts)
        )
        text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text())  # what docstrings show is no behaviour
        for name, own in homes.items():
            assert name not in text or module in own, f"{module} knows {name}"


def test_a_name_is_told_or_refused_without_loading_a_model_library():
    code = """
import sys
from qkscope import BadInput
from qkscope_papers.registry import list_experiments, reproduce
assert len(list_experiments()) >= 48
for wrong in (dict(figures=["fig99"]), dict(figures=["fig9"], device="nope")):
    try:
        reproduce("lee2026", **wrong)
    except BadInput:
        continue
    raise AssertionError(wrong)
assert "transformers" not in sys.modules and "matplotlib" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_figures_are_listed_in_their_order():
    assert {row["figure"] for row in list_experiments()} >= {"fig2", "fig15"}
    assert list(figures_of("franco2026"))[5:9] == ["fig6", "fig7a", "fig7b", "fig8"]
    assert list(figures_of("franco2026"))[-5:] == ["bridge", "feature_pairs", "thm1", "thm2", "thm3"]
