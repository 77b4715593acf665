"""Facts about verdicts: tails reach far enough for many heads, and noise of every kind stays noise."""

import importlib.util
from pathlib import Path

import pytest
import torch

from planted import PlantedHead, randn
from qkscope import tasks
from qkscope.findings.task_batches import UnitBatch, null_units
from qkscope.heads import Head
from qkscope.sums.controls import rank_above, run_controls
from qkscope.sums.cross_validation import cross_validated_rank, plant
from qkscope.sums.moments import Moments
from qkscope.sums.nulls import false_discovery, head_p_values

PAIR = torch.tensor([[1, -1]])


def test_pooled_tails_reach_further_and_the_nulls_of_a_large_batch_come_in_pieces(monkeypatch):
    null = randn(0, 50, 199).abs()
    heads = [
        [(30.0 if i == 0 else float(row.max()) + 1e-9, row.tolist())] for i, row in enumerate(null)
    ]
    p = head_p_values(heads)
    assert p[0] == pytest.approx(1 / (50 * 199 + 1))
    assert max(p[1:]) < 0.05
    assert false_discovery([p[0]] + [0.5] * 49)[0] < 0.05
    assert head_p_values(heads, floor=1 / 32)[0] == 1 / 32
    middle = float(null[0].median())
    assert head_p_values([[(middle, null[0].tolist())]])[0] == pytest.approx(0.5, abs=0.02), (
        "its own say how often"
    )
    assert head_p_values([[(middle, null[0].tolist()), (30.0, null[1].tolist())], []]) == [
        1 / 200,
        1.0,
    ]
    q, k = randn(0, 40, 2, 4), randn(1, 40, 2, 2, 4)
    moments = Moments(["L0H0", "L0H1"], ["c"], 4, replicates=3)
    moments.update(q, k, {"c": PAIR.expand(40, 2)}, prompts=torch.arange(40) % 10)
    torch.testing.assert_close(moments.state["folds"]["c"].sum(0), moments.state["sums"]["c"])
    assert moments.state["folds"]["c"][:, 0, -1, 0, -1].remainder(4).eq(0).all()
    from qkscope.sums import moments as module

    q, k = randn(0, 30, 1, 4), randn(1, 30, 1, 2, 4)
    found = []
    for bytes_at_once in (module._AT_ONCE, 1):
        monkeypatch.setattr(module, "_AT_ONCE", bytes_at_once)
        found.append(Moments(["L0H0"], ["c"], 4, replicates=9))
        found[-1].update(q, k, {"c": PAIR.expand(30, 2)}, prompts=torch.arange(30))
    for name, tensor in found[0].tensors().items():
        torch.testing.assert_close(tensor, found[1].tensors()[name])


def calibration():
    path = Path(__file__).parents[2] / "bench" / "calibration.py"
    spec = importlib.util.spec_from_file_location("calibration", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", ["shared scale .7, large means", "8 × 8 copies", "six words"])
def test_noise_whose_rows_are_not_independent_is_not_called_an_interaction(case):
    """bench/docs/calibration.md has a thousand heads a row. Of 100 at 5%, more than 14 happen once
    in ten thousand.
    """
    assert (
        sum(calibration().false_positives(f"interaction, {case}", seed) for seed in (100, 101))
        <= 14
    )


def test_six_words_are_never_sure_and_cannot_be_told_apart_at_sixteen_heads():
    word = torch.randint(6, (256,), generator=torch.Generator().manual_seed(0))
    q, k = randn(1, 256, 16, 4), randn(2, 256, 16, 2, 4)
    q[:, 0] += 9 * randn(3, 6, 4)[word]
    k[:, 0, 0] += 9 * randn(3, 6, 4)[word]
    moments = Moments([f"L0H{i}" for i in range(16)], ["c"], 4, replicates=199)
    moments.update(q, k, {"c": PAIR.expand(256, 2)}, prompts=word)
    one = Moments(["L0H0"], ["c"], 4, replicates=199)
    one.update(q[:, :1], k[:, :1], {"c": PAIR.expand(256, 2)}, prompts=word)
    alone = run_controls(one, "c")[Head(0, 0)]
    assert alone.units == 6
    assert alone.p_interaction >= 1 / 32
    assert "6 units, which are few" in "\n".join(alone.lines())
    together = run_controls(moments, "c")
    assert {c.verdict for c in together.values()} == {"untested"}
    assert (
        "6 independent units (different words, or prompts) are too few for 16 heads"
        in together[Head(0, 0)].reason
    )


def numbers(task, contrast, n):
    units = task.fit(contrast, n)
    made = task.contrasts[contrast]
    where = torch.tensor([(i, m) for i, unit in enumerate(units) for m in range(len(unit))])
    found = null_units(units, made)(UnitBatch(None, where[:, 0], where[:, 1])).tolist()
    return units, dict(zip(map(tuple, where.tolist()), found, strict=True))


def test_the_unit_is_the_word_asked_for_the_label_or_the_arrangement():
    task = tasks.binding(4)
    units, lexical = numbers(task, "lexical", 60)
    words = {
        place: units[place[0]][place[1]].piece(units[place[0]][place[1]].roles["asked"])
        for place in lexical
    }
    assert len(set(lexical.values())) == len(set(words.values())) < 60
    assert len(set(zip(lexical.values(), words.values(), strict=True))) == len(set(words.values()))
    _, box = numbers(task, "box", 60)
    assert len(set(box.values())) <= 26
    assert box[0, 0] != box[0, 1], "a prompt and its copy have labels of their own"
    units, order = numbers(task, "order", 60)
    assert len(set(order.values())) == len({unit[0].text for unit in units}), (
        "copies apart, every prompt"
    )


def controls_of(center):
    head = PlantedHead.make({"colour": 2}, d_head=8)
    q, k, labels = head.pairs("colour", 200, seed=0)
    q, k = q + 5, k.clone()
    k[:, 0] += 1
    moments = Moments(["L0H0"], ["c"], 8, replicates=199)
    moments.update(q[:, None], k[:, None], {"c": labels}, prompts=torch.arange(200))
    return moments, run_controls(moments, "c", center=center)[Head(0, 0)]


@pytest.mark.parametrize(("center", "rank"), [("none", 3), ("query", 2)])
def test_spectrum_null_rank_and_verdict_are_of_one_matrix(center, rank):
    moments, found = controls_of(center)
    delta = moments.delta("c", center)[0]
    torch.testing.assert_close(
        torch.tensor(found.spectrum, dtype=torch.float64), torch.linalg.svdvals(delta)
    )
    nulls = {
        "none": moments.flipped_nulls("c", "L0H0"),
        "query": moments.interaction_nulls("c", "L0H0")[1],
    }
    test = rank_above(delta, nulls[center])
    assert (found.null_high, found.detected) == (test.null_high, test.rank)
    assert found.verdict == "no reference"
    assert rank - 1 <= found.detected <= rank


@pytest.mark.parametrize("rank", [0, 1, 3, 8])
def test_the_cross_validated_rank_is_the_planted_one_and_does_not_grow_with_prompts(rank):
    """33 words, each with a planted part, a part of its own in the query and another in the key."""
    found = []
    for prompts in (320, 3000):
        word = torch.randint(33, (prompts,), generator=torch.Generator().manual_seed(prompts))
        a, b = (
            torch.linalg.qr(randn(seed, 5, 32, max(rank, 1)))[0] * (rank > 0) for seed in (1, 2)
        )
        z = randn(3, 33, max(rank, 1))[word]
        q, k = randn(4, prompts, 5, 32) / 6, randn(5, prompts, 5, 2, 32) / 6
        q += torch.einsum("hdr,nr->nhd", b, z) + (randn(6, 33, 5, 32) / 12)[word]
        k[:, :, 0] += torch.einsum("hdr,nr->nhd", a, z) + (randn(7, 33, 5, 32) / 12)[word]
        moments = Moments([f"L0H{i}" for i in range(5)], ["c"], 32, replicates=1)
        moments.update(q, k, {"c": PAIR.expand(prompts, 2)}, prompts=word)
        folds, sizes = moments.state["folds"]["c"], moments.sizes("c")
        found.append(cross_validated_rank(folds, "query", sizes))
        told = [
            cross_validated_rank(plant(folds[:, 0], "query", size), "query", sizes[:1])
            for size in (1e-3, 1e3)
        ]
        assert rank or set(told[0]) == {0}, "far below the noise"
        assert 0 not in told[1]
    assert found == [[rank] * 5] * 2
