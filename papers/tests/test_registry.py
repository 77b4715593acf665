"""Facts about figures by name: which there are, and that finished ones are read and shown, not run
again.
"""

import json
import signal

import pytest

from qkscope.results.claims import Claim
from qkscope.results.result import Result, provenance
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


@pytest.fixture
def quick(monkeypatch):
    experiment = Experiment(run)
    experiment.drawing(lambda result: {"report.html": result.experiment})
    figure = Figure("quick", experiment, {}, None, EMBEDDED)
    named = dict.fromkeys(("fig2", "fig3", "fig4"), Entry(__name__, "quick"))
    monkeypatch.setattr(registry, "figures_of", lambda paper: named)
    monkeypatch.setattr(registry, "figure_of", lambda paper, name: figure)
    RUN.clear()
    STOP.clear()


def test_finished_figures_are_not_run_again(quick, tmp_path, caplog):
    caplog.set_level("INFO")
    first = reproduce("lee2026", ["fig2", "fig3"], preset="smoke", out=tmp_path)
    again = reproduce("lee2026", ["all"], preset="smoke", out=tmp_path)
    assert RUN == ["fig2", "fig3", "fig4"]
    assert (
        f"Finished in {tmp_path / 'lee2026'} already, and not run again (again does): fig2, fig3."
        in caplog.text
    )
    assert list(again) == ["fig2", "fig3", "fig4"]
    assert {name: again[name].to_json() for name in first} == {
        name: first[name].to_json() for name in first
    }
    for other in ({"preset": "default"}, {"seed": 1}, {"model": "nano:mixed"}, {"again": True}):
        RUN.clear()
        reproduce("lee2026", ["fig2"], **{"preset": "smoke", "out": tmp_path, **other})
        assert RUN == ["fig2"], other
        reproduce(
            "lee2026", ["fig2"], preset="smoke", out=tmp_path
        )  # each took the place of the one before


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_is_stopped_shows_and_keeps_what_is_done(quick, tmp_path, qkscope, as_json):
    STOP.append("fig4")
    command = [
        "reproduce",
        "lee2026",
        "all",
        "--preset",
        "smoke",
        "--out",
        tmp_path,
        *(["--json"] if as_json else []),
    ]
    code, out, said = qkscope(*command)
    assert (code, "stopped" in said) == (143, True)
    shown = (
        [result["claims"][0]["claim"] for result in json.loads(out)["results"]] if as_json else out
    )
    assert "fig2 stands" in shown
    assert "fig3 stands" in shown
    STOP.clear()
    code, out, _ = qkscope(*command)
    assert (code, RUN, "fig2 stands" in out) == (0, ["fig2", "fig3", "fig4"], True)


def test_what_smoke_is_too_short_for_needs_the_default(tmp_path):
    short = Claim("it is learned", "", 0.2, None, "ours > 0.5", low=0.1, high=0.3)
    claims = {
        preset: Settings(preset, tmp_path, paper="lee2026", figure="fig1")
        .result("", {}, [short])
        .claims
        for preset in ("smoke", "default")
    }
    assert [claims[preset][0].verdict for preset in claims] == ["needs default", "fails"]
