"""The self-contrast: sums that stream and merge, a null that holds, and the subspace that moves the most."""

from __future__ import annotations

import pytest
import torch

from qkscope import BadInput
from qkscope.attention import AttentionRows
from qkscope.draws import shuffled_rows
from qkscope.heads import Head
from qkscope.maths.bases import Projector, random_bases
from qkscope.maths.controls import rank_above
from qkscope.maths.discovery import SelfContrast, head_tests
from qkscope.maths.methods import learned_basis, moving
from qkscope.maths.swap import SwapRows


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matching(n: int, d: int = 8, r: int = 3, keys: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """A head that attends where r signs agree: queries, attended and mean keys, and the keys themselves."""
    generator = torch.Generator().manual_seed(seed)
    z = 2.0 * torch.randint(2, (n, keys, r), generator=generator).double() - 1
    basis = torch.linalg.qr(torch.randn(d, r, generator=torch.Generator().manual_seed(99), dtype=torch.float64))[0]
    k = z @ basis.mT + 0.1 * torch.randn(n, keys, d, generator=generator, dtype=torch.float64)
    asked = torch.randint(keys, (n,), generator=generator)
    q = 3 * z[torch.arange(n), asked] @ basis.mT + 0.1 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    weights = (k @ q[..., None])[..., 0].softmax(-1)
    return {"q": q, "attended": (weights[:, None] @ k)[:, 0], "mean": k.mean(1), "k": k, "asked": asked, "basis": basis}


def contrast_of(rows: dict[str, torch.Tensor], replicates: int = 0, seed: int = 0) -> SelfContrast:
    contrast = SelfContrast(["L0H0"], rows["q"].shape[1], replicates=replicates, seed=seed)
    contrast.update(
        *(rows[name][:, None].float() for name in ("q", "attended", "mean")), prompts=torch.arange(len(rows["q"]))
    )
    return contrast


def test_the_self_contrast_is_the_covariance_of_query_and_attended_minus_mean_key():
    q, attended, mean = drawn(3, 40, 2, 4)
    valid = torch.ones(40, 2, dtype=torch.bool)
    valid[5:9, 1] = False
    contrast = SelfContrast(["L0H0", "L3H1"], 4)
    contrast.update(q, attended, mean, prompts=torch.arange(40), valid=valid)
    for h in range(2):
        keep = valid[:, h]
        a, b = q[keep, h], (attended - mean)[keep, h]
        torch.testing.assert_close(
            contrast.delta()[h], (a - a.mean(0)).mT @ (b - b.mean(0)) / keep.sum(), atol=1e-6, rtol=1e-5
        )
    assert contrast.count.tolist() == [40, 36]


def test_parts_merge_to_the_whole_and_files_bring_it_back(tmp_path):
    q, attended, mean = drawn(3, 64, 1, 4).float()
    about = {"kv_of_head": [0], "replicates": 9, "about": {"model": "m"}}
    whole, *parts = (SelfContrast(["L0H0"], 4, **about) for _ in range(3))
    for part, rows in zip(parts, (slice(0, 32), slice(32, 64)), strict=True):
        for target in (whole, part):
            target.update(
                q[rows], attended[rows], mean[rows], prompts=torch.arange(64)[rows], drawn=attended[rows, :, None]
            )
    merged = parts[0].merge(parts[1])
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(merged.tensors()[name], tensor, msg=name)
    merged.save(tmp_path / "s.safetensors")
    back = SelfContrast.load(tmp_path / "s.safetensors", expect={"model": "m"})
    torch.testing.assert_close(back.null_deltas("L0H0"), merged.null_deltas("L0H0"))
    with pytest.raises(BadInput, match="different jobs"):
        whole.merge(SelfContrast(["L0H0"], 4, seed=1))


def test_replicates_are_the_contrast_of_shuffled_prompts_whole_and_in_direction_alone():
    q, attended, mean = drawn(3, 30, 1, 4).float()
    prompts = torch.arange(10).repeat_interleave(3)
    contrast = SelfContrast(["L0H0"], 4, replicates=5, seed=3)
    contrast.update(q, attended, mean, prompts=prompts)
    for r in range(5):
        order = shuffled_rows(prompts, 3, r)
        delta = attended - mean
        given = delta[order]
        if r % 2:  # each row keeps its own length
            given = given * delta.norm(dim=-1, keepdim=True) / given.norm(dim=-1, keepdim=True)
        other = SelfContrast(["L0H0"], 4)
        other.update(q, given, torch.zeros_like(given), prompts=prompts)
        torch.testing.assert_close(contrast.null_deltas("L0H0")[r], other.delta()[0], atol=1e-5, rtol=1e-4)


def test_shuffling_moves_whole_prompts_row_by_row():
    prompts = torch.tensor([7, 7, 7, 2, 2, 2, 5, 5, 5])
    order = shuffled_rows(prompts, 0, 1)
    assert sorted(order.tolist()) == list(range(9))
    for start in (0, 3, 6):
        assert order[start : start + 3].tolist() == list(range(int(order[start]), int(order[start]) + 3))
    ragged = shuffled_rows(torch.tensor([0, 0, 1, 2, 2, 2]), 4)
    assert sorted(ragged.tolist()) == list(range(6))
    uneven = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4])
    for draw in range(20):
        rows = uneven[shuffled_rows(uneven, 4, draw)]
        assert all(len(rows[uneven == prompt].unique()) == 1 for prompt in range(5)), "a prompt's rows stay together"


def test_the_number_of_matched_signs_is_found_and_shuffled_queries_have_none():
    rows = matching(1024)
    contrast = contrast_of(rows, replicates=199)
    assert rank_above(contrast.delta()[0], contrast.null_deltas("L0H0"), alpha=0.01).rank == 3
    empty = 0
    for run in range(20):
        rows = matching(200, seed=run + 1)
        rows["q"] = rows["q"][torch.randperm(200, generator=torch.Generator().manual_seed(run))]
        contrast = contrast_of(rows, replicates=199, seed=run)
        empty += rank_above(contrast.delta()[0], contrast.null_deltas("L0H0"), alpha=0.01).rank == 0
    assert empty >= 19, f"{empty} of 20 runs on shuffled queries find nothing"


def test_few_replicates_of_many_heads_keep_false_discoveries_down():
    """80 heads that match nothing and 10 that do, 19 replicates each: the ten are found, with their rank."""
    n, d = 300, 6
    rows = [matching(n, d, 2, seed=h) for h in range(90)]
    for h in range(80):
        rows[h]["q"] = rows[h]["q"][torch.randperm(n, generator=torch.Generator().manual_seed(h))]
    contrast = SelfContrast([Head(0, h) for h in range(90)], d, replicates=19)
    stacked = [torch.stack([row[name] for row in rows], dim=1).float() for name in ("q", "attended", "mean")]
    contrast.update(*stacked, prompts=torch.arange(n))
    tests = head_tests(contrast)
    assert [test.rank for test in tests[80:]] == [2] * 10
    assert sum(test.rank > 0 for test in tests[:80]) <= 3
    null = torch.tensor([test.p for test in tests[:80]])
    assert 0.3 < float(null.median()) < 0.7, "p-values of heads that match nothing are spread over 0 to 1"


def test_the_moving_basis_moves_more_logit_than_any_other_subspace():
    delta = drawn(8, 8)
    moved = lambda v: float((v.mT @ delta @ v).diagonal(dim1=-2, dim2=-1).sum(-1).max())  # noqa: E731
    best = moving(delta)(3).left
    torch.testing.assert_close(best.mT @ best, torch.eye(3, dtype=torch.float64))
    assert moved(best) > moved(random_bases(8, 3, 500, 0))
    assert moved(best) > moved(torch.linalg.svd(delta)[2].mT[:, :3])


def test_a_learned_basis_finds_the_matched_directions_and_beats_its_start():
    rows = matching(400)
    n = len(rows["q"])
    attention = AttentionRows(q=rows["q"][:, None].float(), k=rows["k"][:, None].float(), scale=1.0)
    target = (rows["asked"] + 1) % rows["k"].shape[1]
    start = random_bases(8, 3, 1, 0)
    pairs = SwapRows(attention, rows["asked"], target, torch.arange(n), [Head(0, 0)])
    learned = learned_basis(pairs, start, steps=100, lr=0.05)
    shift = [
        float(pairs.swap(Projector.orthogonal(b)).shift.mean())
        for b in (start, learned, moving(contrast_of(rows).delta())(3).left, rows["basis"][None])
    ]
    assert shift[1] > shift[0] + 0.1
    assert shift[2] > 0.97 * shift[3], "without labels, the subspace of the truth is moved"
    assert shift[1] <= shift[3] + 0.02
    torch.testing.assert_close(learned[0].mT @ learned[0], torch.eye(3, dtype=torch.float64), atol=1e-5, rtol=0)
    assert n == 400


def test_bad_input_is_one_sentence():
    with pytest.raises(BadInput, match="replicates"):
        SelfContrast(["L0H0"], 4).null_deltas("L0H0")
    with pytest.raises(BadInput, match="first token"):
        SelfContrast(["L0H0"], 4).delta()
    with pytest.raises(BadInput, match="shape"):
        SelfContrast(["L0H0"], 4).update(*drawn(3, 5, 1, 3), prompts=torch.arange(5))
    with pytest.raises(BadInput, match="NaN"):
        SelfContrast(["L0H0"], 3).update(*(drawn(3, 5, 1, 3) / 0), prompts=torch.arange(5))
    with pytest.raises(BadInput, match="rank 9"):
        moving(torch.eye(4))(9)
