"""Facts about attribution: parts sum to the logit, order matters only where features overlap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import orthonormal, randn
from qkscope import BadInput, tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.split import attribute
from qkscope.examples import Example, Key
from qkscope.maths.attribution import attribute_logits

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


def test_what_features_share_goes_to_the_first_and_the_order_free_splits_do_not_care():
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


def test_a_planted_query_is_given_to_its_own_feature():
    """A query inside one feature belongs wholly to it in the oblique split, although the features overlap."""
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
        assert row["order"] + row["lexical"] + row["residual"] == pytest.approx(row["logit"], abs=1e-4)
    whole = [Key((i, i + 1)) for i in range(len(rows))]
    ids = tuple(scope.tokenizer(prompt)["input_ids"])
    captured = scope.capture_inputs(scope.encode([Example(ids=ids, keys=whole)]), heads=["L1H3"])
    assert [row["logit"] for row in rows] == pytest.approx(captured.rows().logits()[0, 0].tolist(), abs=1e-4)
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
