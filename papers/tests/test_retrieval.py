"""Facts about payload retrieval: ΔC and G equal their closed forms, ceilings are what counting
gives.
"""

import math

import pytest
import torch

from qkscope.seeds import draw_signs
from qkscope_papers.lee2026.interactions import off_asymmetry, rotate
from qkscope_papers.lee2026.planted_cut import RANK, cut_rows
from qkscope_papers.lee2026.ranks import head_ranks
from qkscope_papers.lee2026.swaps import projectors_of, swap_rows
from qkscope_papers.lee2026.toy.ceilings import bayes_ceiling, dot_product_ceiling
from qkscope_papers.lee2026.toy.retrieval import (
    AS_WRITTEN,
    Retrieval,
    RetrievalHead,
    asymmetry,
    off_diagonal,
)
from qkscope_papers.lee2026.toy.stack import HeadCell
from qkscope_papers.lee2026.toy.trained import HeadRun
from qkscope_papers.lee2026.truth import toy_rows


def untrained(ranks=(2, 3), variant="discrete", d_head=8, seed=0, **task):
    return RetrievalHead.untrained(Retrieval(ranks, variant, **task).encoders(seed), d_head, seed)


def perfect_head(ranks=(3, 5), d_head=16, gain=6.0, seed=0):
    """A head that matches both latents although their key subspaces overlap: queries are the dual
    basis of keys.
    """
    encoders = Retrieval(ranks).encoders(seed)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(d_head, sum(ranks), generator=generator)
    read = torch.linalg.pinv(torch.cat([encoders.A, encoders.A_y], dim=1))[
        : sum(ranks)
    ]  # blind to the payload
    w_q = gain * torch.linalg.pinv(keys).mT @ torch.linalg.pinv(encoders.B)
    w_v = torch.randn(d_head, 32, generator=generator)
    return RetrievalHead(
        w_q, keys @ read, w_v, torch.randn(10, d_head, generator=generator), encoders
    )


@pytest.mark.parametrize("variant", ["discrete", "continuous"])
@pytest.mark.parametrize("sampling", ["strict", "fresh"])
def test_sample_delta_converges_to_its_closed_form(variant, sampling):
    head = untrained(variant=variant)
    for variable in range(2):
        exact = head.delta(variable, sampling)
        error = [
            float((head.sampled_delta(variable, n, 1, sampling) - exact).norm() / exact.norm())
            for n in (1000, 64_000)
        ]
        assert error[1] < 0.03
        assert error[1] < 0.4 * error[0], "the error falls as 1/√n"


def test_an_untrained_head_already_has_the_right_ranks():
    """Why rank alone is no evidence: ΔC has rank r for any generic weights."""
    head = untrained((2, 3), d_head=8)
    signs = draw_signs(0, torch.arange(99)[:, None], torch.arange(20_000)).float()
    assert [pair[1] for pair in head_ranks(head, signs, seed=0)] == [2, 3]
    assert [int(torch.linalg.matrix_rank(head.delta(k))) for k in range(2)] == [2, 3]


def test_logits_are_the_interactions_of_the_latents_and_their_shares_count_what_they_say():
    """q·k = z_qᵀ G z_k (Eq. 12) where payload and noise are not seen."""
    head = perfect_head()
    task = head.encoders.task
    generator = torch.Generator().manual_seed(1)
    z_q, z_k = (task.draw_latents((50,), generator) for _ in range(2))
    q, k = head.queries(z_q @ head.encoders.B.mT), head.keys(z_k @ head.encoders.A.mT)
    torch.testing.assert_close(
        (q * k).sum(-1).double(), torch.einsum("na,ab,nb->n", z_q.double(), head.interactions(), z_k.double()),
        rtol=1e-4, atol=1e-3,
    )  # fmt: skip
    assert off_diagonal(head.interactions()) < 1e-4
    assert asymmetry(head.interactions()) < 0.01
    task = Retrieval((1, 2))
    g = torch.tensor([[3.0, 0.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert off_diagonal(g) == pytest.approx(16 / 25)
    assert asymmetry(g) == pytest.approx(math.sqrt(32) / 5)
    assert off_asymmetry(g) == pytest.approx(1.0)
    assert off_diagonal(torch.eye(3)) == 0.0
    torch.testing.assert_close(rotate(torch.eye(3).double(), task, 0), torch.eye(3).double())


def test_ceilings_are_what_counting_and_dot_products_allow():
    """With payloads that never coincide the ceiling is E[1/(1+m)], m ~ Binomial(T−1, 2^−R), in
    closed form.
    """
    task = Retrieval((2, 2), payloads=1000, d=1)
    exact = 1 - (1 - 1 / 16) ** 16
    assert bayes_ceiling(task.encoders(0), 20_000) == pytest.approx(exact, abs=0.01)
    # gaussian codes never coincide, yet a head that scores z·z' takes long vectors for the right
    # ones
    task = Retrieval((2, 2), "continuous")
    assert bayes_ceiling(task.encoders(0), 4000) > 0.999
    assert dot_product_ceiling(task, 4000) < 0.7
    assert dot_product_ceiling(Retrieval((12, 12), "continuous"), 4000) > 0.995
    assert (
        0.8 < bayes_ceiling(Retrieval((2, 2), "continuous", **AS_WRITTEN).encoders(0), 4000) < 0.999
    )
    head = perfect_head((4, 4))
    encoders = head.encoders
    read = torch.linalg.pinv(torch.cat([encoders.A_y, encoders.A], dim=1))[:10]
    exact = RetrievalHead(
        head.W_Q * 3, head.W_K, torch.cat([read, torch.zeros(6, 32)]), torch.eye(10, 16), encoders
    )
    assert exact.accuracy(8000) == pytest.approx(bayes_ceiling(encoders, 8000), abs=0.01)


def test_oblique_swaps_match_the_oracle_where_orthogonal_ones_leak():
    head = perfect_head()
    rows, overlap = swap_rows(
        HeadRun(HeadCell(head.encoders.task, 16), head, 0, "made", 0.0), 20_000, 4000, seed=0
    )
    found = {row["condition"]: row for row in rows}
    assert overlap["top_cosine"] > 0.3, "the subspaces overlap, or there is nothing to leak"
    for z in ("z1", "z2"):
        oracle = found[f"{z}_oracle"]["target_after"]
        oblique, orthogonal = (
            abs(found[name]["target_after"] - oracle) for name in (f"{z}_oblique", z)
        )
        assert oblique < 0.01
        assert orthogonal > 3 * oblique
    assert found["both"]["orig_after"] <= 0.01
    assert found["both"]["target_after"] == pytest.approx(found["both"]["orig_before"], abs=0.01)
    assert found["both"]["exchanged"] == pytest.approx(1.0, abs=0.01)
    assert found["both_oracle"]["exchanged"] == pytest.approx(1.0, abs=0.01)
    assert found["random_both"]["shift"] < found["both"]["shift"] - 0.2
    assert all(row["n"] == 4000 and row["vacuous"] is False for row in rows)
    assert found["both"]["low"] <= found["both"]["target_after"] <= found["both"]["high"]
    table = toy_rows(head, 2000, seed=1).table(projectors_of(head, 20_000, 0)[0])
    far = {
        (row["feature"], row["kind"]): row["distance"] for row in table
    }  # from the latent exchanged in the input
    for z in ("z1", "z2"):
        assert far[z, "oblique"] < 0.01 < far[z, "feature"] < 0.65 * far[z, "key_pca"]
    assert far["both", "feature"] < 0.01


def test_without_noise_both_cuts_keep_what_was_planted_and_with_noise_one_does():
    clean, noisy = ({row["rule"]: row for row in cut_rows(noise, seed=0)} for noise in (0.0, 1.0))
    for row in clean.values():
        assert (row["rank"], round(row["angle"], 3)) == (RANK, 0)
        assert row["carried"] == pytest.approx(1)
    assert noisy["left out"]["rank"] == RANK
    assert noisy["energy"]["rank"] > 5 * RANK
