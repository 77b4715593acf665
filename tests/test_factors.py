"""Queries and keys as sums of parts: the parts are all there is, sums merge, and shares have intervals that hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkscope.errors import BadInput
from qkscope.maths.factors import MEAN, REST, FactorSums, block_sums, frequent_axes, shares


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seen(n: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of n tokens (3 of one factor, 2 of another), and vectors of two columns that they explain in part."""
    x = normal(n, 5, seed=1) + 0.5
    y = (x @ normal(5, 8, seed=2) + 0.3 * normal(n, 8, seed=3) + 2).unflatten(1, (2, 4))
    return x, y


def summed(x: torch.Tensor, y: torch.Tensor) -> FactorSums:
    sums = FactorSums(["token", "before"], [3, 2], columns=2, d_head=4, about={"text": "a"})
    sums.see(x)
    sums.add([0, 1], x, y)
    return sums


@pytest.mark.parametrize("ridge", [0.0, 0.002, 0.5])
def test_the_fit_is_ordinary_ridge(ridge: float) -> None:
    x, y = seen()
    fit = summed(x, y).fit(ridge)
    centred, target = (value.double().numpy() for value in (x, y.flatten(1)))
    centred, target = centred - centred.mean(0), target - target.mean(0)
    wanted = np.linalg.solve(centred.T @ centred + ridge * len(x) * np.eye(5), centred.T @ target)
    np.testing.assert_allclose(fit.coefficients.flatten(1).numpy(), wanted, atol=1e-5)


def test_parts_sum_to_what_is_explained_and_a_part_is_its_own_factor_alone() -> None:
    x, y = seen()
    fit = summed(x, y).fit()
    parts = list(fit.factor_parts(x))
    assert fit.names == (MEAN, "token", "before", REST)
    explained = torch.einsum("np,pcd->ncd", x - fit.x_mean, fit.coefficients)
    torch.testing.assert_close(sum(parts), explained, atol=1e-5, rtol=1e-5)
    assert float((y - fit.y_mean - explained).square().mean()) < 0.2  # the noise has variance 0.09
    moved = x.clone()
    moved[:, fit.where("before")] += 1
    changed = [float((a - b).abs().max()) > 1e-3 for a, b in zip(parts, fit.factor_parts(moved), strict=True)]
    assert changed == [False, True]
    _, one = fit.of([1]).factor_parts(x)
    torch.testing.assert_close(one[:, 0], parts[1][:, 1])  # a column on its own


def test_sums_merge_into_one_pass_and_columns_may_come_apart() -> None:
    x, y = seen()
    whole, merged = summed(x, y), summed(x[:150], y[:150])
    merged = merged.merge(summed(x[150:], y[150:]))
    torch.testing.assert_close(merged.fit().coefficients, whole.fit().coefficients)
    apart = FactorSums(["token", "before"], [3, 2], columns=2, d_head=4)
    apart.see(x)
    apart.add([1, 0], x, y.flip(1))  # not side by side
    torch.testing.assert_close(apart.fit().coefficients, whole.fit().coefficients)
    with pytest.raises(BadInput, match="different jobs"):
        whole.merge(FactorSums(["token", "before"], [3, 2], columns=2, d_head=4, about={"text": "b"}))


def test_a_feature_that_never_changes_has_no_coefficient_and_breaks_nothing() -> None:
    x, y = seen()
    x[:, 1] = 3.0
    fit = summed(x, y).fit()
    assert bool(fit.coefficients.isfinite().all())
    assert float(fit.coefficients[1].abs().max()) < 0.01  # rounding; others are about 1
    assert all(bool(part.isfinite().all()) for part in fit.factor_parts(x))


def test_too_few_tokens_are_refused() -> None:
    x, y = seen(6)
    with pytest.raises(BadInput, match="6 tokens are too few to fit 5 readings"):
        summed(x, y).fit()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_blocks_are_the_double_loop_and_sum_to_the_logit(groups: int) -> None:
    b, h, t, d, f = 2, 4, 5, 3, 3
    q, k = ([normal(b, heads, t, d, seed=10 * s + i) for i in range(f)] for s, heads in ((1, h), (2, groups)))
    weights = normal(b, h, t, t, seed=3)
    naive = torch.zeros(b, h, f, f)
    for row in range(b):
        for head in range(h):
            for i in range(f):
                for j in range(f):
                    logits = q[i][row, head] @ k[j][row, head * groups // h].T
                    naive[row, head, i, j] = (weights[row, head] * logits).sum()
    found = block_sums(torch.stack(q, dim=2), torch.stack(k, dim=2), weights)
    torch.testing.assert_close(found, naive, atol=1e-4, rtol=1e-4)
    whole = sum(q) @ sum(k).repeat_interleave(h // groups, dim=1).mT
    torch.testing.assert_close(found.sum((2, 3)), (weights * whole).sum((2, 3)), atol=1e-4, rtol=1e-4)
    stacked = torch.stack(q, dim=2), torch.stack(k, dim=2), weights.tril()
    torch.testing.assert_close(block_sums(*stacked, causal=True), block_sums(*stacked), atol=1e-4, rtol=1e-4)


def test_intervals_of_shares_cover_as_often_as_they_say() -> None:
    """Documents differ in length and in their own share; the share to cover is that of all documents there could be."""
    covered = 0
    for world in range(200):
        length = normal(30, seed=world).mul(0.5).exp()
        own = 0.3 + 0.2 * normal(30, seed=1000 + world)
        share, low, high = shares((length * own)[:, None], length, draws=400, seed=world)
        assert low <= share <= high
        covered += bool(low[0] <= 0.3 <= high[0])
    assert 0.88 <= covered / 200 <= 0.98  # 30 documents, percentiles: a little under 95%


def test_shares_sum_to_one_and_one_document_has_no_interval() -> None:
    blocks = normal(6, 3, seed=0)
    share, _, _ = shares(blocks, blocks.sum(1))
    assert float(share.sum()) == pytest.approx(1)
    _, low, high = shares(blocks[:1], blocks[:1].sum(1))
    assert bool(low.isnan().all())
    assert bool(high.isnan().all())


def test_axes_are_those_of_frequent_tokens_and_do_not_go_by_length() -> None:
    """Two directions: one in which frequent tokens differ, one in which rare ones do, a hundred times as long."""
    signs = torch.tensor([1.0, -1.0]).repeat(20)[:, None]
    frequent = signs * torch.tensor([[1.0, 0.0]]) + 0.01 * normal(40, 2, seed=0)
    rare = 100 * signs * torch.tensor([[0.0, 1.0]]) + 0.01 * normal(40, 2, seed=1)
    counts = torch.tensor([50] * 40 + [1] * 40)
    axes = frequent_axes(torch.cat([frequent, rare]), counts, 1)
    assert float(axes[:40].abs().mean()) > 10 * float(axes[40:].abs().mean())
    weight = (counts / counts.sum())[:, None]
    assert float((weight * axes.square()).sum()) == pytest.approx(1, abs=1e-3)
