"""Figures of franco2026's toy and theory: their measures on toys made by hand, and one of each kind end to end."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qkscope.maths.relative import key_difference
from qkscope_papers.franco2026.anisotropy import START, anisotropy_row
from qkscope_papers.franco2026.cells import WORK, ToyWork
from qkscope_papers.franco2026.decomposition import strengths
from qkscope_papers.franco2026.dictionary import split, true_among
from qkscope_papers.franco2026.dynamics import checkpoints, onset_rows, order_agreement
from qkscope_papers.franco2026.emergence import sparsity_row
from qkscope_papers.franco2026.geometry import geometry_row
from qkscope_papers.franco2026.rope import band_rows
from qkscope_papers.franco2026.token_pairs import coordinates, draw_token_pairs
from qkscope_papers.franco2026.toy.alignment import whiten
from qkscope_papers.franco2026.toy.measure import alignment_rows, divergence_and_error
from qkscope_papers.franco2026.toy.stack import ToyCell
from qkscope_papers.franco2026.toy.superposition import Positional, Superposition, Toy, distort, isotropic_dictionary
from qkscope_papers.franco2026.toy.trained import ToyRun, stacks
from qkscope_papers.registry import Settings, figure_of, reproduce

ALIGNMENT = {
    "config", "seed", "step", "pair", "side", "matched", "best", "best_random", "singular_value", "target_logit",
    "feature_norm", "control",
}  # fmt: skip
SPARSITY = {
    "step", "present", "sparsity", "low", "high", "rotated", "rotated_low", "rotated_high", "difference_low",
    "difference_high", "count", "count_low", "count_high", "count_tol",
}  # fmt: skip
FIGURES = [
    "fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7a", "fig13", "fig17", "fig18", "fig22", "fig23",
    "feature_pairs", "thm3",
]  # fmt: skip
TINY = ToyWork(60, 60, 20, 60, 20, 5e-3, 20, 60, 5, 2, 2, 2, 24, 3, 3)


def aligned_toy(**options):
    """Features of interest on axes of their own, the others in a plane, and Ω = Σ M f_q f_kᵀ."""
    W = isotropic_dictionary().float()
    task = Superposition(**options)
    omega = sum(logit * torch.outer(W[:, q], W[:, k]) for q, k, logit in task.pairs)
    u, s, vh = torch.linalg.svd(omega)
    return Toy(W, torch.zeros(20), (u * s.sqrt()).mT, s.sqrt()[:, None] * vh, task)


def test_an_aligned_toy_reads_as_aligned():
    rows = alignment_rows("by hand", 0, 0, aligned_toy())
    assert len(rows) == 8
    assert set(rows[0]) >= ALIGNMENT
    for row in rows:
        assert row["matched"] == pytest.approx(1.0, abs=1e-6)
        assert row["singular_value"] == pytest.approx(row["target_logit"], rel=1e-5)
        assert row["feature_norm"] == pytest.approx(1.0)
    kl, _ = divergence_and_error(aligned_toy(), 64, 0)
    assert kl == pytest.approx(0.0, abs=1e-6), "its logits are the targets"
    untrained = alignment_rows("by hand", 0, 0, Toy.untrained(Superposition(), 0), control=True)
    assert max(row["matched"] for row in untrained) < 0.95
    assert all(row["control"] for row in untrained)


def test_pairs_to_be_avoided_take_their_singular_vector_by_size():
    rows = alignment_rows("by hand", 0, 0, aligned_toy(pairs=((0, 4, 15.0), (1, 5, -24.0), (2, 6, 18.0))))
    assert [row["pair"] for row in rows[::2]] == ["1-5", "2-6", "0-4"]
    for row in rows:
        assert row["matched"] == pytest.approx(1.0, abs=1e-6)
        assert row["singular_value"] == pytest.approx(abs(row["target_logit"]), rel=1e-5)


def test_token_pairs_hold_what_they_say():
    task = Superposition()
    for present, count in (("one", 1), ("two", 2), ("none", 0)):
        pairs = draw_token_pairs(task, present, 200, seed=1)
        assert bool((pairs.chosen.sum(1) == count).all())
        for i, (query, key, _) in enumerate(task.pairs):
            there = pairs.chosen[:, i] > 0
            assert bool(((pairs.x_q[:, query] > 0) == there).all())
            assert bool(((pairs.x_k[:, 0, key] > 0) == there).all())
        assert bool((pairs.x_q[:, 4:8] == 0).all()), "key features of interest are taken out of the query too"
        assert bool((pairs.x_k[:, 1:, 4:8] > 0).any()), "other keys stay as they come"
    only = draw_token_pairs(task, "one", 50, seed=1, only=2)
    assert bool((only.chosen[:, 2] == 1).all())


def test_terms_of_an_aligned_toy_are_the_pairs_and_sum_to_the_relative_logit():
    toy, pairs = aligned_toy(), draw_token_pairs(Superposition(), "two", 100, seed=2)
    terms = coordinates(toy, pairs).terms
    logits = toy.logits(pairs.x_q, pairs.x_k)
    relative = key_difference(logits[..., None], torch.zeros(100, dtype=torch.int64))[:, 0]
    torch.testing.assert_close(terms.sum(1), relative)
    for i, (query, key, logit) in enumerate(toy.task.pairs):
        difference = pairs.x_k[:, 0, key] - pairs.x_k[:, 1:, key].mean(1)
        torch.testing.assert_close(terms[:, i], logit * pairs.x_q[:, query] * difference, rtol=1e-5, atol=1e-5)


def test_sparsity_of_an_aligned_toy_counts_its_pairs_and_a_rotation_loses_them():
    toy = aligned_toy()
    rows = {name: sparsity_row(toy, draw_token_pairs(toy.task, name, 200, seed=3), TINY, 0) for name in ("one", "two")}
    assert set(rows["one"]) >= SPARSITY - {"step", "present"}
    assert rows["one"]["sparsity"] == pytest.approx(0.1, abs=1e-3)
    assert rows["one"]["count_tol"] == 1
    assert rows["one"]["sparsity"] < rows["two"]["sparsity"] < rows["two"]["rotated_low"]
    assert rows["one"]["difference_high"] < 0
    assert rows["two"]["low"] <= rows["two"]["sparsity"] <= rows["two"]["high"]


def test_geometry_counts_antipodal_pairs_and_overlap():
    eye = torch.eye(10)
    plain = Toy(torch.cat([eye, -eye], dim=1), torch.zeros(20), eye, eye, Superposition(weight=0.0))
    row = geometry_row("by hand", 0, 0, plain, False)
    assert (row["antipodal"], row["isotropy_error"]) == (10, pytest.approx(0.0, abs=1e-12))
    row = geometry_row("by hand", 0, 0, aligned_toy(), False)
    assert row["interest_overlap"] == pytest.approx(0.0, abs=1e-6)
    assert row["antipodal"] == 6
    assert row["rest_isotropy_error"] == pytest.approx(0.0, abs=1e-5)


def test_anti_whitening_recovers_features_from_a_whitened_head():
    """Theorem 1's head: its singular vectors are G⁻¹f, so G u is f, however strong the anisotropy."""
    W = distort(isotropic_dictionary(), 10.0, seed=0)
    task = Superposition.frozen(W, pairs=((0, 4, 8.0),), scaled=True)
    left, right = whiten(W @ W.mT, W[:, [0, 4]]).float().unbind(1)
    head = [torch.zeros(10, 10) for _ in range(2)]
    head[0][0], head[1][0] = left, right
    row = anisotropy_row(10.0, 0, 0, Toy(W.float(), torch.zeros(20), *head, task), False)
    assert row["anti_whitened_top"] == pytest.approx(1.0, abs=1e-5)
    assert row["whitened"] == pytest.approx(1.0, abs=1e-5)
    assert row["raw_top"] < 0.99
    assert row["error_undistorted"] == pytest.approx(10.0, abs=1e-4)
    assert row["raw_top"] >= row["sharp"] - 1e-6


def test_bands_are_where_the_head_puts_a_feature():
    toy = aligned_toy(rope=True, positional=(Positional(8, 9, 1.0, 1),))
    weight = torch.zeros(10, 10)
    weight[2, 0], weight[3, 8], weight[9, 8] = 2.0, 3.0, 4.0
    rows = band_rows(replace(toy, W_Q=weight, W=torch.eye(10, 20)), 0, 0, False)
    first = next(row for row in rows if row["pair"] == "0-4" and row["side"] == "query")
    assert (first["band_1"], first["slow"]) == (1.0, 0.0)
    last = next(row for row in rows if row["positional"] and row["side"] == "query")
    assert (last["band_1"], last["band_4"]) == (pytest.approx(0.6), pytest.approx(0.8))


def test_onsets_are_the_last_time_a_pair_falls_short():
    good, bad = aligned_toy(), Toy.untrained(Superposition(), 0)
    path = [bad, good, bad, good]
    weights = {name: torch.stack([getattr(toy, name) for toy in path]) for name in ("W", "b", "W_Q", "W_K")}
    trained = ToyRun(ToyCell(Superposition()), [0, 10, 20, 30], weights, "out of steps", 0.0)
    rows = onset_rows("by hand", trained)
    assert [row["onset"] for row in rows] == [30.0] * 4
    assert [row["settled"] for row in rows] == [30.0] * 4
    assert [row["learned"] for row in rows] == [10.0] * 4
    assert math.isnan(order_agreement(rows, "onset")), "ties alone say nothing"
    ordered = [{**row, "onset": float(i)} for i, row in enumerate(rows)]
    assert order_agreement(ordered, "onset") == 1.0
    assert checkpoints(101, 6)[0] == 0
    assert checkpoints(101, 6)[-1] == 100


def cells_of(figure, settings):
    """The toys a figure was registered with, by configuration; theorems have none."""
    asked = figure_of("franco2026", figure).asked
    return asked["cells"](settings) if "cells" in asked else {}


@pytest.mark.parametrize("preset", ["smoke", "default", "paper"])
def test_each_sweep_is_one_call_of_few_stacks(preset, tmp_path):
    settings = Settings(preset, tmp_path)
    for figure in ("fig12", "fig14", "fig15", "fig16", "fig17", "fig18"):
        cells = [cell for found in cells_of(figure, settings).values() for cell in found]
        seeds = WORK[preset].seeds
        shapes = {"fig15": 5, "fig17": 6}.get(figure, 1)
        assert len(stacks(cells)) <= seeds * shapes, "p, λ, d_head and readings stand side by side"
    names = set(cells_of("fig16", settings))
    assert names == {"d_head=10", "d_head=8", "d_head=6", "d_head=4"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A figure of each kind end to end on a few steps of training: what is computed, not what is found."""
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORK, "smoke", TINY)
        return out, reproduce("franco2026", FIGURES, preset="smoke", out=out)


def test_the_true_dictionary_of_an_aligned_toy_has_the_true_pairs_alone():
    toy = aligned_toy()
    generator = torch.Generator().manual_seed(0)
    x = toy.task.strengths(torch.rand(32, 5, 20, generator=generator, dtype=torch.float64))
    true, turned = (split(toy, x, kind, 0, attended=None) for kind in ("true", "rotated"))
    assert true_among(true.size, toy) == 4
    pairs = [pair[:2] for pair in toy.task.pairs]
    others = true.size.clone()
    for query, key in pairs:
        others[query, key] = 0
    assert others.max() < 1e-5, "features of interest are read back as they are, and no other pair is answered to"
    assert true_among(turned.size, toy) < 4
    torch.testing.assert_close(true.numbers[:, 0], turned.numbers[:, 0])  # the logit is the same, however it is split


def test_every_figure_has_its_folder_numbers_and_picture(tiny):
    out, results = tiny
    for figure in results:
        folder = out / "franco2026" / figure
        found = json.loads((folder / "results.json").read_text())
        assert found["claims"]
        for claim in found["claims"]:
            assert claim["control"] is not None or claim["ours"] is None, claim["claim"]
        assert (folder / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")


def test_tables_of_alignment_have_controls_and_chance(tiny):
    _, results = tiny
    for figure in ("fig2", "fig3", "fig4", "fig13", "fig17", "fig18", "fig22", "fig23"):
        rows = results[figure].tables["alignment"]
        assert set(rows[0]) >= ALIGNMENT
        assert {row["control"] for row in rows} == {True, False}
        assert all(row["step"] == 0 for row in rows if row["control"])
        assert all(0 < row["best_random"] < 1 for row in rows)
    rows = results["fig7a"].tables["sparsity"]
    assert set(rows[0]) >= SPARSITY
    assert {row["present"] for row in rows} == {"one", "two", "none"}


def test_the_run_of_figure_3_keeps_more_checkpoints_than_the_sweeps(tiny):
    _, results = tiny
    steps = {figure: {row["step"] for row in results[figure].tables["alignment"]} for figure in ("fig3", "fig13")}
    assert steps == {"fig3": set(range(0, 61, 5)), "fig13": {0, 20, 60}}
    assert results["fig3"].arrays["steps"].tolist() == list(range(0, 61, 5))
    assert {row["learned"] for row in results["fig3"].tables["onsets"]} - {0.0, 20.0, 40.0, 60.0}, (
        "a step between the sweeps' checkpoints"
    )


def test_controls_of_figure_23_are_the_same_features_untrained(tiny):
    rows, (on_last, fitting, _) = tiny[1]["fig23"].tables["alignment"], tiny[1]["fig23"].claims
    untrained = [row for row in rows if row["control"]]
    on_own = [row["on_own"] for row in untrained if not row["surplus"]]
    assert fitting.control == pytest.approx(sum(on_own) / len(on_own))
    last = [row["on_last"] for row in untrained if row["surplus"]]
    assert on_last.control == pytest.approx(sum(last) / len(last))


def test_a_term_of_figure_6_goes_with_the_pair_of_its_rank(tmp_path):
    task = Superposition(pairs=((0, 4, 15.0), (1, 5, 24.0), (2, 6, 18.0)))
    path = [Toy.untrained(task, 0), aligned_toy(pairs=task.pairs)]
    weights = {name: torch.stack([getattr(toy, name) for toy in path]) for name in ("W", "b", "W_Q", "W_K")}
    found = strengths([ToyRun(ToyCell(task), [0, 10], weights, "out of steps", 0.0)], Settings("smoke", tmp_path))
    late = [row for row in found.tables["strength"] if not row["control"]]
    assert [row["pair"] for row in late] == ["1-5", "2-6", "0-4"]
    for row in late:
        assert row["correlation"] == pytest.approx(1.0, abs=1e-6)
        assert row["slope"] == pytest.approx(row["target_logit"], rel=1e-4)
    assert "strength of its own pair is 1.000, " in found.answer


def test_theorem_3_holds_of_queries_and_of_keys(tiny):
    found = tiny[1]["thm3"]
    assert [claim.holds for claim in found.claims] == [True] * 4
    assert max(row["query_overlap"] for row in found.tables["orthogonalisation"] if row["mu"] > 0) < 1e-6


def test_no_claim_of_a_figure_stands_with_another_one(tiny):
    said = [claim.claim for result in tiny[1].values() for claim in result.claims if not claim.claim.startswith("...")]
    assert len(set(said)) == len(said)
    assert {claim.source for result in tiny[1].values() for claim in result.claims} == {"stated", "implied", "ours"}
    for result in tiny[1].values():
        for claim in result.claims:
            assert claim.source != "stated" or re.match(r"Sec\.|App\.|[A-G]\.\d|Theorem|Corollary", claim.paper), claim


def test_every_column_is_defined_in_the_docs(tiny):
    page = (Path(__file__).parents[1] / "docs" / "results-franco2026.md").read_text().partition("## Columns")[2]
    named = set(re.findall(r"`([a-z_0-9]+)`", page)) | {f"band_{i}" for i in range(5)}
    ends = re.compile(r"_(sd|untrained|low|high)$")
    for result in tiny[1].values():
        for table, rows in result.tables.items():
            missing = {ends.sub("", column) for row in rows for column in row} - named
            assert table in named, table
            assert not missing, f"{result.experiment}, {table}: {missing}"


def test_figure_3_trains_both_readings_of_the_loss_as_long_as_the_paper(tiny, tmp_path):
    cells = cells_of("fig3", Settings("paper", tmp_path))
    assert {cell.steps for own in cells.values() for cell in own} == {10_000}
    assert {cell.task.reading for own in cells.values() for cell in own} == {"B", "C"}
    (order, aligned, learned) = tiny[1]["fig3"].claims
    for claim in (order, aligned, learned):
        better, other = re.search(r"reading (\w) of the loss; control: reading (\w)", claim.claim).groups()
        assert {better, other} == {"B", "C"}
    assert aligned.ours >= aligned.control, "a statement is decided on the reading that it fits better"


def test_figure_4_shows_other_starts_of_the_head(tiny):
    found = tiny[1]["fig4"]
    starts = {row["start"]: row for row in found.tables["starts"]}
    assert {START, 0.18} <= set(starts)
    chosen = next(claim for claim in found.claims if "chosen to reproduce" in claim.claim)
    assert (chosen.ours, chosen.low, chosen.high) == tuple(starts[START][name] for name in ("raw", "low", "high"))


def test_figures_share_their_toys(tiny, monkeypatch):
    out, results = tiny
    monkeypatch.setitem(WORK, "smoke", TINY)
    files = list((out / "superposition").iterdir())
    settings = Settings("smoke", out)
    used = {cell for figure in results for cells in cells_of(figure, settings).values() for cell in cells}
    assert len(files) == len(used)
