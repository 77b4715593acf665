"""Facts about attribution: parts sum to the logit; shares of singular vectors to the contrast,
planted ones found.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import orthonormal, randn
from qkscope import BadInput, tasks
from qkscope.examples import Example, Key
from qkscope.heads import Head
from qkscope.sums.feature_split import alignment, attribute_logits, carried
from qkscope.sums.singular import basis_of_weights
from qkscope.sums.subspace import Subspace
from qkscope.verbs.attribute import attribute
from qkscope.verbs.decompose import decompose

seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module")
def fit(scope):
    return decompose(scope, tasks.binding(4), ["L1H3", "L0H1"], 40, replicates=3)


def features(seed, d=16, ranks=(2, 5, 3)):
    return {f"f{i}": orthonormal(seed + i, d, r) for i, r in enumerate(ranks)}


@given(seeds, st.sampled_from(["sequential", "average", "oblique"]))
@settings(max_examples=40)
def test_shares_sum_to_the_logit_in_float32(seed, split):
    q, k = randn(seed, 3, 16, dtype=torch.float32), randn(seed + 1, 3, 40, 16, dtype=torch.float32)
    found = attribute_logits(q, k, 0.25, features(seed), split)
    exact = 0.25 * torch.einsum("nd,nkd->nk", q.double(), k.double())
    total = sum(part.double() for part in found.parts.values())
    size = 0.25 * q.double().norm(dim=-1, keepdim=True) * k.double().norm(dim=-1)
    assert ((total - exact).abs() <= 1e-5 * size).all()
    assert ((found.logits.double() - exact).abs() <= 1e-5 * size).all()


def test_what_features_share_goes_to_the_first_and_a_planted_query_to_its_own():
    bases = features(0, ranks=(3, 4))
    back = dict(reversed(bases.items()))
    q, k = randn(1, 16), randn(2, 6, 16)
    first = attribute_logits(q, k, 1.0, bases)
    assert (first.parts["f0"] - attribute_logits(q, k, 1.0, back).parts["f0"]).abs().max() > 0.1
    torch.testing.assert_close(first.parts["f0"], k @ bases["f0"] @ bases["f0"].mT @ q)
    for split in ("average", "oblique"):
        one, other = (attribute_logits(q, k, 1.0, b, split) for b in (bases, back))
        torch.testing.assert_close(one.parts["f0"], other.parts["f0"])
    cosine = torch.linalg.svdvals(bases["f0"].mT @ bases["f1"])[0].item()
    assert first.overlap["f0", "f1"] == pytest.approx(cosine)
    # a query inside one feature belongs wholly to it in the oblique split, although the features
    # overlap
    bases = features(3, ranks=(3, 4))
    q, k = bases["f1"] @ randn(4, 4), randn(5, 6, 16)
    found = attribute_logits(q, k, 1.0, bases, "oblique")
    torch.testing.assert_close(found.parts["f1"], found.logits)
    assert found.parts["f0"].abs().max() < 1e-9
    assert attribute_logits(q, k, 1.0, bases).parts["f0"].abs().max() > 0.1
    with pytest.raises(BadInput, match="independent"):
        attribute_logits(q, k, 1.0, {"a": torch.eye(16), "b": torch.eye(16)}, "oblique")


def tokens(explanation) -> str:
    return " ".join(row["token"] for row in explanation.tables["tokens"])


@pytest.mark.parametrize("split", ["sequential", "average", "oblique"])
def test_parts_sum_to_the_logit_and_attention_to_one(scope, fit, split):
    prompt = "hat: O\njam: Z\ncat: B\njam:"
    found = attribute(scope, prompt, "L1H3", fit, split=split)
    rows = found.tables["tokens"]
    assert tokens(found) == "hat : O jam : Z cat : B jam :"
    assert sum(row["attention"] for row in rows) == pytest.approx(1, abs=1e-5)
    for row in rows:
        assert row["order"] + row["lexical"] + row["residual"] == pytest.approx(
            row["logit"], abs=1e-4
        )
    whole = [Key((i, i + 1)) for i in range(len(rows))]
    ids = tuple(scope.tokenizer(prompt)["input_ids"])
    captured = scope.capture_inputs(scope.encode([Example(ids=ids, keys=whole)]), heads=["L1H3"])
    assert [row["logit"] for row in rows] == pytest.approx(
        captured.rows().logits()[0, 0].tolist(), abs=1e-4
    )
    shares = found.tables["summary"]
    assert sum(row["variance_share"] for row in shares) == pytest.approx(1, abs=1e-5)
    assert sum(row["reverse_order"] for row in shares) == pytest.approx(1, abs=1e-5)


def test_a_prompt_may_be_one_token_or_have_its_query_marked_or_a_template(scope, fit):
    alone = attribute(scope, "hat", "L1H3", fit)
    assert [row["attention"] for row in alone.tables["tokens"]] == [pytest.approx(1)]
    marked = Example("hat: A jam: B cat", queries=((10, 12),))
    early = attribute(scope, marked, "L1H3", fit)
    assert tokens(early) == "hat : A jam :", "what comes later is not seen"
    same = attribute(scope, "hat: A jam:", "L1H3", fit)
    assert early.tables["tokens"] == [pytest.approx(row) for row in same.tables["tokens"]]
    chat = attribute(scope, "hat: A", "L1H3", fit, chat=True)
    assert tokens(chat) == "Answer : hat : A Which"


HEAD = Head(0, 0)


def random_basis(d_head=12, d_model=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k = (
        torch.randn(1, d_head, d_model, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    w_q = (
        w_q * torch.linspace(0.3, 2.0, d_head)[:, None].double()
    )  # no isotropic head: images are not orthogonal
    basis = basis_of_weights([HEAD], (w_q, w_k, torch.ones(1), torch.zeros(1, d_head)), [False])
    return basis, w_q[0], w_k[0]


def planted(basis, vectors, seed=1):
    """ΔC of a feature that lives on some singular vectors: queries along W_Q u_j, keys along W_K
    v_j.
    """
    one = basis[HEAD]
    strengths = torch.linspace(1.0, 2.0, len(vectors), dtype=torch.float64)
    delta = sum(
        s * torch.outer(one.read[:, j], one.write[:, j])
        for s, j in zip(strengths, vectors, strict=True)
    )
    return Subspace.from_delta(delta, len(vectors), head=HEAD, contrast="planted")


def test_shares_add_up_and_a_planted_feature_is_carried_by_its_vectors():
    basis, w_q, w_k = random_basis()
    generator = torch.Generator().manual_seed(2)
    x, y, z = (torch.randn(500, 40, generator=generator, dtype=torch.float64) for _ in range(3))
    q, plus, minus = x @ w_q.T, (0.4 * x + y) @ w_k.T, z @ w_k.T
    delta = (q.T @ plus - q.T @ minus) / len(q)
    one = basis[HEAD]
    shares = carried(delta, one.read, one.write)
    assert float(shares.sum()) == pytest.approx(
        float((q * (plus - minus)).sum(-1).mean()), rel=1e-9
    )
    # each share is the mean of that vector's own terms: σ (uᵀ x)(vᵀ Δx)
    u, s, vh = torch.linalg.svd(w_q.T @ w_k, full_matrices=False)
    terms = s[:12] * ((x @ u[:, :12]) * ((0.4 * x + y - z) @ vh[:12].T)).mean(0)
    torch.testing.assert_close(shares, terms, rtol=1e-6, atol=1e-9)
    basis, _, _ = random_basis()
    found = alignment(basis, planted(basis, [2, 5, 9]))
    assert sorted(row["vector"] for row in found.table()[:3]) == [2, 5, 9]
    assert found.numbers["vectors"] <= 3
    assert found.numbers["query"] == pytest.approx(1.0, abs=1e-9)
    assert found.numbers["key"] == pytest.approx(1.0, abs=1e-9)
    for control in ("rotated", "random"):
        assert found.numbers[f"vectors_{control}"] > 4
        assert found.numbers[f"key_{control}"] < 0.8
        assert found.numbers[f"p_key_{control}"] == pytest.approx(1 / 101)
    # on single vectors: turned among themselves, the leading ones spread it
    assert found.numbers["sparsity"] < found.numbers["sparsity_block"]
    assert found.numbers["p_block"] < 0.05
    assert "3 of 12" in str(found) or "2 of 12" in str(found)


def test_a_feature_that_knows_nothing_of_the_weights_looks_like_its_controls():
    basis, _, _ = random_basis()
    generator = torch.Generator().manual_seed(5)
    p_values = []
    for _ in range(8):
        a, b = (torch.randn(12, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        found = alignment(basis, Subspace.from_delta(a @ b.T, 3, head=HEAD))
        p_values.append(found.numbers["p_key_random"])
    assert sum(p < 0.05 for p in p_values) <= 2
    assert max(p_values) > 0.2
