"""From directions to features: what is planted is found on both sides, and what cannot be known is said to be so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qkscope import BadInput
from qkscope.maths.components import Feature, HeadRows, diagonal_share, paired_components
from qkscope.maths.ica import connected, contrast, dependent_pairs, fast_ica, gaussian_contrast, whiten
from qkscope.papers.franco2026.toy.superposition import Superposition, isotropic_dictionary
from qkscope.papers.lee2026.toy.retrieval import Retrieval, RetrievalHead
from qkscope.papers.lee2026.toy.stack import HeadCell
from qkscope.papers.lee2026.toy.trained import train_heads
from qkscope.papers.trainer import Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from discover_toys import correlations, directions, looked_at, pairs, take_apart


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def signs(shape, seed, m):
    return 2.0 * torch.randint(2, (*shape, m), generator=generator(seed)).double() - 1


def sphere(shape, seed, m):
    """Uniform on a sphere: every rotation of it is as good."""
    x = torch.randn(*shape, m, generator=generator(seed), dtype=torch.float64)
    return m**0.5 * x / x.norm(dim=-1, keepdim=True)


def simplex(shape, seed, m):
    """One of m corners in m − 1 dimensions."""
    frame = torch.cat([torch.ones(m, 1), torch.randn(m, m - 1, generator=generator(3))], dim=1).double()
    corners = m**0.5 * torch.linalg.qr(frame)[0][:, 1:]
    return corners[torch.randint(m, shape, generator=generator(seed))]


def planted(*latents, n=3000, d=12, keys=16, gain=3.0):
    """A head that attends to the key whose latents equal the query's."""
    z = torch.cat([make((n, keys), seed, m) for seed, (make, m) in enumerate(latents)], dim=-1)
    basis = torch.linalg.qr(torch.randn(d, z.shape[-1], generator=generator(7), dtype=torch.float64))[0]
    noise = lambda *shape: 0.05 * torch.randn(*shape, generator=generator(len(shape)), dtype=torch.float64)  # noqa: E731
    k = z @ basis.mT + noise(n, keys, d)
    own = z[torch.arange(n), torch.randint(keys, (n,), generator=generator(8))]
    q = gain * own @ basis.mT + noise(n, d)
    weights = (k @ q[..., None])[..., 0].softmax(dim=-1)
    return q, (weights[:, None] @ k)[:, 0], k.mean(dim=1), own


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[str, RetrievalHead]:
    """Trained heads of the retrieval toy, shortly but to its end."""
    folder = tmp_path_factory.mktemp("heads")
    cells = [HeadCell(Retrieval((4, 6)), 16, 0), HeadCell(Retrieval((6, 4), "continuous"), 16, 0)]
    trained = train_heads(cells, folder, lr=2e-3, recipe=Recipe(steps=2000), workers=1)
    return {one.cell.task.variant: one.head for one in trained}


def test_a_trained_head_gives_every_latent_on_both_sides_and_no_more(heads):
    found = take_apart(heads["discrete"], n=4096)
    assert found["directions"] == found["features"] == found["identifiable"] == 10
    assert found["corr_query"] >= 0.98
    assert found["corr_key"] >= 0.98
    assert found["diagonal"] > found["diagonal_null"]


def test_what_only_queries_carry_is_no_feature(heads):
    found = take_apart(heads["discrete"], n=4096, nuisance=2)
    assert found["directions"] == found["features"] == 10
    assert found["corr_query"] >= 0.98
    assert found["nuisance"] < 0.15
    rows = looked_at(heads["discrete"], 4096, 3, nuisance=2)
    more = paired_components(pairs(rows), 12, draws=39)
    kept = sum(feature.size for feature in more.features)
    assert kept - len(more.rejected) <= 12 - len(more.rejected)
    named = [
        j for feature in more.features if feature.identifiable for j in feature.index if float(more.match[j]) > 0.5
    ]
    coordinates = more.coordinates(rows["q"], "query")[:, named]
    assert float(correlations(coordinates, rows["nuisance"]).max()) < 0.3, "asked for too many, no match is a nuisance"


def test_gaussian_latents_have_a_span_and_no_directions(heads):
    found = take_apart(heads["continuous"], n=8192)
    assert found["span_query"] >= 0.999
    assert found["span_key"] >= 0.999
    assert found["directions"] == 10
    assert (found["features"], found["identifiable"]) == (1, 0)


def test_an_untrained_head_mixes_all_with_all(heads):
    twin = RetrievalHead.untrained(heads["discrete"].encoders, 16, seed=1)
    rows = looked_at(twin, 4096, 3)
    rank, _ = directions(rows, 16, replicates=99)
    found = paired_components(pairs(rows), max(rank, 2), draws=39)
    assert rank > 0, "its directions do stand above the null: rank alone is no evidence"
    assert not found.matched
    assert float(found.match.median()) < 0.5


def test_dependent_coordinates_are_one_feature():
    q, attended, mean, own = planted((sphere, 3), (signs, 2), (simplex, 4))
    found = paired_components(HeadRows(q, attended, mean, torch.arange(len(q))), 8, draws=39)
    assert sorted(feature.size for feature in found.features) == [1, 1, 3, 3]
    corr = correlations(found.coordinates(q, "query"), own)
    blocks = {"sphere": range(3), "sign": range(3, 5), "simplex": range(5, 8)}
    for feature in found.features:
        energy = {name: float(corr[list(feature.index)][:, list(own)].square().sum()) for name, own in blocks.items()}
        assert max(energy.values()) > 0.95 * sum(energy.values()), "a feature holds one latent"


def test_features_of_interest_in_superposition_are_found():
    """Twenty features in ten dimensions, a head made for four pairs of them: Ω = Σ a f_i f_jᵀ."""
    dictionary = isotropic_dictionary().double()
    task = Superposition.frozen(dictionary)
    omega = sum(logit * torch.outer(dictionary[:, i], dictionary[:, j]) for i, j, logit in task.pairs)
    u, s, vh = torch.linalg.svd(omega)
    w_q, w_k = (s.sqrt() * u).mT, s.sqrt()[:, None] * vh
    n, keys = 12_000, 16
    x_q, x_k = (task.strengths(torch.rand(*shape, task.n, generator=generator(i))).double()
                for i, shape in enumerate(((n,), (n, keys))))  # fmt: skip
    q, k = x_q @ dictionary.mT @ w_q.mT, x_k @ dictionary.mT @ w_k.mT
    weights = (k @ q[..., None])[..., 0].softmax(dim=-1)
    seen = {"q": q, "attended": (weights[:, None] @ k)[:, 0], "mean": k.mean(dim=1)}
    rank, _ = directions(seen, 10, replicates=99)
    assert rank == 4
    found = paired_components(pairs(seen), rank, draws=39)
    for read, names in ((w_q.mT @ found.query, range(4)), (w_k.mT @ found.key, range(4, 8))):
        columns = dictionary[:, list(names)]
        cosines = (read / read.norm(dim=0)).mT @ (columns / columns.norm(dim=0))
        assert float(cosines.abs().amax(dim=0).min()) >= 0.95


def test_ica_unmixes_and_knows_gaussians():
    z = torch.cat([signs((4000,), 0, 3), torch.rand(4000, 2, generator=generator(1), dtype=torch.float64)], dim=1)
    x, _ = whiten(z @ torch.randn(5, 5, generator=generator(2), dtype=torch.float64))
    w = fast_ica(x)
    torch.testing.assert_close(w @ w.mT, torch.eye(5, dtype=torch.float64), atol=1e-8, rtol=0)
    assert float(correlations(x @ w.mT, z).amax(dim=0).min()) > 0.99
    bound = gaussian_contrast(4000, 5)
    assert float(contrast(x @ w.mT).min()) > bound
    noise, _ = whiten(torch.randn(4000, 5, generator=generator(5), dtype=torch.float64))
    assert float(contrast(noise @ fast_ica(noise).mT).max()) < 3 * bound


def test_dependence_is_seen_in_pairs_and_in_threes():
    n = 3000
    a = signs((n,), 0, 2)
    tetrahedron = torch.cat([a, a.prod(dim=1, keepdim=True)], dim=1)  # any two are independent, all three are not
    free = torch.randn(n, 2, generator=generator(1), dtype=torch.float64)
    s = torch.cat([tetrahedron, free, (free[:, :1].square() - 1) / 2**0.5], dim=1)
    found, bound = dependent_pairs(s, torch.arange(n), draws=39)
    assert connected(found > bound) == [[0, 1, 2], [3, 5], [4]]


def test_the_diagonal_of_a_random_matrix_is_within_its_null():
    inside = 0
    for seed in range(20):
        g = torch.randn(8, 8, generator=generator(seed), dtype=torch.float64)
        share, bound = diagonal_share(g, draws=99, seed=seed)
        inside += share <= bound
    assert inside == 20, "the null pairs entries as well as can be, so an unchosen diagonal stays below it"
    assert diagonal_share(torch.eye(8, dtype=torch.float64))[0] == 1.0


def test_too_few_queries_are_refused():
    rows = HeadRows(*torch.randn(3, 30, 6, dtype=torch.float64), torch.arange(30))
    with pytest.raises(BadInput, match="need 40 queries"):
        paired_components(rows, 4)
    with pytest.raises(BadInput, match="no direction"):
        paired_components(rows, 0)


def test_noise_has_no_partner_outside_the_rows_it_was_fitted_on():
    """Filters of 64 dimensions fitted to 768 rows of noise correlate by .3 and more in these rows: chance must know."""
    q, attended, mean, q_held, attended_held = noise(5, 768, 64, seed=5)
    prompts = torch.arange(768)
    rows, held = (HeadRows(x, y, mean, prompts) for x, y in ((q, attended), (q_held, attended_held)))
    found = paired_components(rows, 4, held=held, draws=39)
    assert found.features == ()
    assert len(found.rejected) == 4
    split = paired_components(rows, 4, draws=39)
    assert split.features == ()


def test_a_swap_of_a_feature_leaves_the_mean_query_out():
    q, attended, mean = noise(3, 600, 5, seed=6)
    q = q + 10  # what all queries share
    attended = attended + q * torch.tensor([1.0, 0.5, 0.0, 0.0, 0.0])
    found = paired_components(HeadRows(q, attended, mean, torch.arange(600)), 2, draws=19)
    feature = Feature((0, 1), 1.0, 1.0, None, False)
    swap, k = found.swap(feature), noise(600, 5, seed=7)
    ones, zeros = torch.ones(600, 1, dtype=torch.float64), torch.zeros(600, 1, dtype=torch.float64)
    part = ((torch.cat([q, ones], 1) @ swap.left) * (torch.cat([k, zeros], 1) @ swap.right)).sum(1)
    wanted = (found.coordinates(q, "query")[:, [0, 1]] * (k @ found.query_pattern[:, [0, 1]])).sum(1)
    torch.testing.assert_close(part, wanted)
