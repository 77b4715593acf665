"""Facts about figures that are finished: they are read and not run again, and shown when a later one is stopped."""

from __future__ import annotations

import json
import signal

import pytest

from qkscope import BadInput
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result, provenance
from qkscope_papers import registry
from qkscope_papers.registry import EMBEDDED, Entry, Experiment, Figure, Settings, reproduce

RUN: list[str] = []
STOP: list[str] = []


def run(settings: Settings) -> Result:
    """A figure that takes no time."""
    if settings.figure in STOP:
        signal.raise_signal(signal.SIGTERM)
    RUN.append(settings.figure)
    claim = Claim(f"{settings.figure} stands", "", 2.0, 1.0, "ours > control")
    return Result(f"lee2026/{settings.figure}", {}, [claim], preset=settings.preset, model=settings.model,
                  seed=settings.seed, provenance=provenance(figure=settings.figure))  # fmt: skip


def draw(result: Result) -> dict[str, str | bytes]:
    """Its page."""
    return {"report.html": result.experiment}


@pytest.fixture(autouse=True)
def paper(monkeypatch):
    experiment = Experiment(run)
    experiment.drawing(draw)
    quick = Figure("quick", experiment, {}, None, EMBEDDED)
    named = dict.fromkeys(("fig2", "fig3", "fig4"), Entry(__name__, "quick"))
    monkeypatch.setattr(registry, "figures_of", lambda paper: named)
    monkeypatch.setattr(registry, "figure_of", lambda paper, name: quick)
    RUN.clear()
    STOP.clear()


def test_finished_figures_are_not_run_again(tmp_path, caplog):
    caplog.set_level("INFO")
    first = reproduce("lee2026", ["fig2", "fig3"], preset="smoke", out=tmp_path)
    assert RUN == ["fig2", "fig3"]
    again = reproduce("lee2026", ["all"], preset="smoke", out=tmp_path)
    assert RUN == ["fig2", "fig3", "fig4"]
    assert f"Finished in {tmp_path / 'lee2026'} already, and not run again (again does): fig2, fig3." in caplog.text
    assert list(again) == ["fig2", "fig3", "fig4"]
    assert {k: r.to_json() for k, r in again.items() if k in first} == {k: r.to_json() for k, r in first.items()}
    RUN.clear()
    for other in ({"preset": "default"}, {"seed": 1}, {"model": "nano:mixed"}, {"again": True}):
        reproduce("lee2026", ["fig2"], **{"preset": "smoke", "out": tmp_path, **other})
        assert RUN.pop() == "fig2", other
        reproduce("lee2026", ["fig2"], preset="smoke", out=tmp_path)  # each took the place of the one before
        RUN.clear()


def test_another_version_or_a_half_written_folder_is_run(tmp_path):
    reproduce("lee2026", ["fig2"], preset="smoke", out=tmp_path)
    folder = tmp_path / "lee2026" / "fig2"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "versions": {**manifest["versions"], "torch": "1"}}))
    reproduce("lee2026", ["fig2"], preset="smoke", out=tmp_path)
    (folder / "results.json").unlink()
    reproduce("lee2026", ["fig2"], preset="smoke", out=tmp_path)
    assert RUN == ["fig2"] * 3
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(BadInput, match=r"holds other files than a run, thesis\.tex"):
        reproduce("lee2026", ["fig2"], preset="smoke", out=tmp_path)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_is_stopped_shows_and_keeps_what_is_done(tmp_path, qkscope, as_json):
    STOP.append("fig4")
    command = ["reproduce", "lee2026", "all", "--preset", "smoke", "--out", tmp_path, *(["--json"] if as_json else [])]
    code, out, said = qkscope(*command)
    assert (code, "stopped" in said) == (143, True)
    if as_json:
        assert [one["claims"][0]["claim"] for one in json.loads(out)["results"]] == ["fig2 stands", "fig3 stands"]
    else:
        assert "fig2 stands" in out
        assert "fig3 stands" in out
    STOP.clear()
    code, out, _ = qkscope(*command)
    assert (code, RUN, "fig2 stands" in out) == (0, ["fig2", "fig3", "fig4"], True)
