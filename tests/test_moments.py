"""Facts about the streaming sums: ΔC is what it is defined to be, and no bookkeeping changes it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import PlantedHead
from qkscope import BadInput
from qkscope.maths.moments import Covariance, Moments
from qkscope.maths.significance import NULL_KINDS

HEADS = ["L0H0", "L0H1", "L0H2", "L0H3", "L2H0", "L2H1", "L2H2", "L2H3"]


def batch(seed, rows=6, heads=8, key_heads=4, keys=5, d=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, d, generator=g, dtype=dtype)
    k = torch.randn(rows, key_heads, keys, d, generator=g, dtype=dtype)
    labels = torch.randint(-1, 2, (rows, keys), generator=g)
    labels[:, 0], labels[:, 1] = 1, -1
    prompts = seed * 1000 + torch.arange(rows)
    return q, k, {"c": labels}, prompts


def fill(moments, seed, **kwargs):
    q, k, labels, prompts = batch(seed, **kwargs)
    moments.update(q, k, labels, prompts=prompts)
    return moments


def carrying(**kwargs):
    return Moments(HEADS, ["c"], 3, group_size=2, nulls=NULL_KINDS, replicates=7, **kwargs)


def same(a, b, tolerance=1e-12):
    for name, tensor in a.tensors().items():
        torch.testing.assert_close(tensor, b.tensors()[name], rtol=0, atol=tolerance * (1 + tensor.abs().max().item()))


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=20, deadline=None)
def test_delta_is_the_difference_of_pair_averages(seed, group_size):
    q, k, labels, _ = batch(seed, key_heads=8 // group_size if group_size < 8 else 2)
    heads = HEADS if group_size < 8 else ["L0H0", "L0H7", "L0H5", "L1H2", "L1H3", "L1H4", "L1H5", "L1H6"]
    moments = Moments(heads, ["c"], 3, group_size=group_size)
    moments.update(q, k, labels)
    delta = moments.delta("c")
    label = labels["c"]
    for h, head in enumerate(moments.heads):
        g = moments.key_heads.index((head.layer, head.index // group_size))
        average = {}
        for sign in (1, -1):
            pairs = [(b, j) for b, j in itertools.product(range(6), range(5)) if label[b, j] == sign]
            average[sign] = sum(torch.outer(q[b, h], k[b, g, j]) for b, j in pairs) / len(pairs)
        torch.testing.assert_close(delta[h], average[1] - average[-1], rtol=1e-12, atol=1e-12)


def test_delta_converges_to_the_closed_form_of_planted_features():
    head = PlantedHead.make({"colour": 2, "shape": 3}, d_head=8)
    n = 40_000
    for feature in ("colour", "shape"):
        q, k, labels = head.pairs(feature, n, seed=1)
        moments = Moments(["L0H0"], [feature], 8)
        moments.update(q[:, None], k[:, None], {feature: labels})
        delta, exact = moments.delta(feature)[0], head.delta(feature)
        assert (delta - exact).norm() < 0.02 * exact.norm()


@given(st.permutations(range(6)), st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_merge_is_associative_and_commutative_and_equals_one_pass(order, cut):
    whole = carrying()
    for seed in range(6):
        fill(whole, seed)
    parts = [fill(carrying(), seed) for seed in order]
    left = parts[0].merge(*parts[1:cut]).merge(*parts[cut:]) if cut > 1 else parts[0].merge(*parts[1:])
    same(whole, left)
    same(whole, parts[-1].merge(parts[0].merge(*parts[1:-1])))


def test_merge_of_a_thousand_shards_equals_one_pass():
    whole = Moments(HEADS, ["c"], 3, group_size=2)
    shards = []
    for seed in range(1000):
        fill(whole, seed)
        shards.append(fill(Moments(HEADS, ["c"], 3, group_size=2), seed))
    merged = shards[0].merge(*shards[1:])
    for sign in (0, 1):
        count = whole.count("c")[:, sign, None, None]
        one, many = (m.sums["c"][:, :-1, sign, :-1] / count for m in (whole, merged))
        assert ((one - many).norm(dim=(1, 2)) <= 1e-12 * one.norm(dim=(1, 2))).all()


def test_merging_leaves_the_parts_as_they_were():
    a, b = fill(carrying(), 0), fill(carrying(), 1)
    before = a.copy()
    a.merge(b)
    same(a, before, tolerance=0)


def test_state_does_not_grow_with_data():
    moments = carrying()
    size = sum(t.numel() for t in moments.tensors().values())
    for seed in range(20):
        fill(moments, seed)
    assert sum(t.numel() for t in moments.tensors().values()) == size
    assert set(vars(moments)) == set(vars(carrying()))


def test_permuting_heads_permutes_results():
    q, k, labels, _ = batch(5, key_heads=8)
    order = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    plain, permuted = Moments(HEADS, ["c"], 3), Moments([HEADS[i] for i in order], ["c"], 3)
    plain.update(q, k, labels)
    permuted.update(q[:, order], k[:, order], labels)
    torch.testing.assert_close(plain.delta("c")[order], permuted.delta("c"), rtol=1e-13, atol=1e-13)


def test_irregular_groups_of_heads_read_their_own_keys():
    """Three of four heads, two groups of unequal size: the product that shares keys does not apply."""
    q, k, labels, _ = batch(8, heads=3, key_heads=2)
    some = Moments(["L0H0", "L0H2", "L0H3"], ["c"], 3, group_size=2)
    some.update(q, k, labels)
    repeated = Moments(["L0H0", "L0H2", "L0H3"], ["c"], 3)
    repeated.update(q, k[:, [0, 1, 1]], labels)
    torch.testing.assert_close(some.delta("c"), repeated.delta("c"))


def test_float32_input_agrees_with_float64():
    q, k, labels, _ = batch(2, rows=64)
    one, other = (Moments(HEADS, ["c"], 3, group_size=2) for _ in range(2))
    one.update(q, k, labels)
    other.update(q.float(), k.float(), labels)
    torch.testing.assert_close(one.delta("c"), other.delta("c"), rtol=0, atol=1e-6)


def test_centring_removes_what_every_query_sees_alike():
    q, k, labels, _ = batch(1, rows=50)
    moments = Moments(HEADS, ["c"], 3, group_size=2)
    constant = q.mean(dim=0, keepdim=True).expand_as(q)
    moments.update(constant, k, labels)
    assert moments.delta("c").norm() > 0.1
    assert moments.delta("c", "query").norm() < 1e-12
    shifted = Moments(HEADS, ["c"], 3, group_size=2)
    plain = Moments(HEADS, ["c"], 3, group_size=2)
    shifted.update(q + 7, k - 5, labels)
    plain.update(q, k, labels)
    torch.testing.assert_close(shifted.delta("c", "both"), plain.delta("c", "both"), rtol=0, atol=1e-10)


def test_both_centring_is_the_difference_of_covariances():
    q, k, labels, _ = batch(4, rows=40)
    moments = Moments(HEADS, ["c"], 3, group_size=2)
    moments.update(q, k, labels)
    covariance = []
    for sign in (1, -1):
        w = (labels["c"] == sign).double()
        w = w / w.sum()
        mean_q, mean_k = (w.sum(1)[:, None] * q[:, 5]).sum(0), (w[..., None] * k[:, 2]).sum((0, 1))
        covariance.append(torch.einsum("bj,bd,bje->de", w, q[:, 5] - mean_q, k[:, 2] - mean_k))
    torch.testing.assert_close(moments.delta("c", "both")[5], covariance[0] - covariance[1], rtol=0, atol=1e-12)


def test_ignored_keys_may_hold_anything():
    q, k, labels, prompts = batch(6)
    labels["c"][2, 4] = 0
    broken = k.clone()
    broken[2, :, 4] = float("nan")
    clean, dirty = carrying(), carrying()
    clean.update(q, k, labels, prompts=prompts)
    dirty.update(q, broken, labels, prompts=prompts)
    same(clean, dirty)


def test_a_key_ignored_by_one_contrast_still_counts_for_another():
    q, k, labels, _ = batch(9)
    labels["c"][2, 4] = labels["c"][3, 3] = 0
    other = labels["c"].clone()
    other[3, 3] = 1
    broken = k.clone()
    broken[2, :, 4] = float("nan")
    clean, dirty = (Moments(HEADS, ["c", "d"], 3, group_size=2) for _ in range(2))
    clean.update(q, k, {"c": labels["c"], "d": other})
    dirty.update(q, broken, {"c": labels["c"], "d": other})
    same(clean, dirty)


def test_saved_and_loaded_is_the_same(tmp_path):
    moments = fill(carrying(about={"weights": "abc"}), 0)
    moments.save(tmp_path / "m.safetensors")
    again = Moments.load(tmp_path / "m.safetensors", expect={"weights": "abc"})
    same(moments, again, tolerance=0)
    assert again.manifest() == moments.manifest()
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_covariance_streams_and_merges():
    x = torch.randn(50, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, a, b = (Covariance(2, 4) for _ in range(3))
    whole.update(x)
    a.update(x[:20])
    b.update(x[20:])
    torch.testing.assert_close(a.merge(b).matrix(), whole.matrix())
    torch.testing.assert_close(whole.matrix()[1], torch.cov(x[:, 1].T, correction=0))


def bad(call):
    with pytest.raises(BadInput) as error:
        call()
    message = str(error.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_bad_input_gets_a_sentence(tmp_path):
    q, k, labels, _ = batch(0)
    moments = Moments(HEADS, ["c"], 3, group_size=2)
    assert "(6, 8, 3)" in bad(lambda: moments.update(q[..., :2], k, labels))
    assert "(6, 4, 5, 3)" in bad(lambda: moments.update(q, k[:, :3], labels))
    assert "(6, 5)" in bad(lambda: moments.update(q, k, {"c": labels["c"][:, :2]}))
    assert "'d'" in bad(lambda: moments.update(q, k, {"d": labels["c"]}))
    assert "no positive pairs for L0H0" in bad(lambda: moments.delta("c"))
    moments.update(q, k, {"c": labels["c"].clamp_min(0)})
    assert "contrast 'c' has no negative pairs for L0H0" in bad(lambda: moments.delta("c"))
    assert "prompts=" in bad(lambda: carrying().update(q, k, labels))
    assert "heads" in bad(lambda: moments.merge(Moments(HEADS[::-1], ["c"], 3, group_size=2)))
    other = fill(carrying(about={"weights": "abc"}), 0)
    assert "about" in bad(lambda: fill(carrying(about={"weights": "xyz"}), 1).merge(other))
    other.save(tmp_path / "m")
    assert "another weights" in bad(lambda: Moments.load(tmp_path / "m", expect={"weights": "xyz"}))
    (tmp_path / "junk").write_bytes(b"not a file of ours")
    assert "damaged" in bad(lambda: Moments.load(tmp_path / "junk"))
    half = (tmp_path / "m").read_bytes()
    (tmp_path / "half").write_bytes(half[: len(half) // 2])
    assert "damaged" in bad(lambda: Moments.load(tmp_path / "half"))
    assert "no file" in bad(lambda: Moments.load(tmp_path / "absent"))
    assert "twice" in bad(lambda: Moments(["L0H0", "L0H0"], ["c"], 3))
    assert "'nonsense'" in bad(lambda: Moments(HEADS, ["c"], 3, nulls=["nonsense"]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_named(value):
    q, k, labels, prompts = batch(7)
    moments = Moments(HEADS, ["c"], 3, group_size=2)
    q[3, 6, 1] = value
    message = bad(lambda: moments.update(q, k, labels, prompts=prompts))
    assert "query of L2H2 at example 7003" in message
    q[3, 6, 1] = 0
    k[4, 1, 0, 2] = value
    message = bad(lambda: moments.update(q, k, labels, prompts=prompts))
    assert "key of L0H2 at example 7004, key 0" in message
