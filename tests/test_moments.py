"""Facts about the streaming sums: ΔC is what it is defined to be, and no bookkeeping changes it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope import BadInput
from qkscope.maths.moments import Moments
from qkscope.maths.significance import NULL_KINDS

HEADS = ["L0H0", "L0H1", "L0H2", "L0H3", "L2H0", "L2H1", "L2H2", "L2H3"]


def batch(seed, rows=6, heads=8, key_heads=4, keys=5, d=3):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, d, generator=g, dtype=torch.float64)
    k = torch.randn(rows, key_heads, keys, d, generator=g, dtype=torch.float64)
    labels = torch.randint(-1, 2, (rows, keys), generator=g)
    labels[:, 0], labels[:, 1] = 1, -1
    return q, k, {"c": labels}, seed * 1000 + torch.arange(rows)


def plain(*batch, heads=HEADS, group_size=2):
    moments = Moments(heads, ["c"], 3, group_size=group_size)
    if batch:
        moments.update(*batch)
    return moments


def carrying(*seeds, **kwargs):
    moments = Moments(HEADS, ["c"], 3, group_size=2, nulls=NULL_KINDS, replicates=7, **kwargs)
    for q, k, labels, prompts in map(batch, seeds):
        moments.update(q, k, labels, prompts=prompts)
    return moments


def same(a, b, tolerance=1e-12):
    for name, tensor in a.tensors().items():
        torch.testing.assert_close(tensor, b.tensors()[name], rtol=0, atol=tolerance * (1 + tensor.abs().max().item()))


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=20)
def test_delta_is_the_difference_of_pair_averages(seed, group_size):
    """At 8, three heads read one key head and five another: the product that shares keys does not apply."""
    q, k, labels, _ = batch(seed, key_heads=8 // group_size if group_size < 8 else 2)
    heads = HEADS if group_size < 8 else ["L0H0", "L0H7", "L0H5", "L1H2", "L1H3", "L1H4", "L1H5", "L1H6"]
    moments = plain(q, k, labels, heads=heads, group_size=group_size)
    for h, head in enumerate(moments.heads):
        g = moments.key_heads.index((head.layer, head.index // group_size))
        average = {}
        for sign in (1, -1):
            pairs = [(b, j) for b, j in itertools.product(range(6), range(5)) if labels["c"][b, j] == sign]
            average[sign] = sum(torch.outer(q[b, h], k[b, g, j]) for b, j in pairs) / len(pairs)
        torch.testing.assert_close(moments.delta("c")[h], average[1] - average[-1], rtol=1e-12, atol=1e-12)


@given(st.permutations(range(6)), st.integers(1, 5))
@settings(max_examples=8)
def test_sums_of_any_parts_in_any_order_add_up_to_those_of_one_pass(order, cut):
    whole, empty = carrying(*range(6)), carrying()
    one, other = carrying(*order[:cut]), carrying(*order[cut:])
    for name, tensor in one.tensors().items():
        tensor += other.tensors()[name]
    same(whole, one)
    # what is kept does not grow with the data
    assert {n: x.shape for n, x in whole.tensors().items()} == {n: x.shape for n, x in empty.tensors().items()}
    assert set(vars(whole)) == set(vars(empty))


def test_centring_removes_what_every_query_sees_alike():
    q, k, labels, _ = batch(1, rows=50)
    constant = plain(q.mean(dim=0, keepdim=True).expand_as(q), k, labels)
    assert constant.delta("c").norm() > 0.1
    assert constant.delta("c", "query").norm() < 1e-12
    both = plain(q, k, labels).delta("c", "both")
    torch.testing.assert_close(plain(q + 7, k - 5, labels).delta("c", "both"), both, rtol=0, atol=1e-10)
    covariance = []
    for sign in (1, -1):
        w = (labels["c"] == sign).double()
        w = w / w.sum()
        mean_q, mean_k = (w.sum(1)[:, None] * q[:, 5]).sum(0), (w[..., None] * k[:, 2]).sum((0, 1))
        covariance.append(torch.einsum("bj,bd,bje->de", w, q[:, 5] - mean_q, k[:, 2] - mean_k))
    torch.testing.assert_close(both[5], covariance[0] - covariance[1], rtol=0, atol=1e-12)


def test_keys_that_one_contrast_ignores_may_hold_anything_and_still_count_for_another():
    q, k, labels, prompts = batch(9)
    labels["c"][2, 4] = labels["c"][3, 3] = 0
    labels["d"] = labels["c"].clone()
    labels["d"][3, 3] = 1
    broken = k.clone()
    broken[2, :, 4] = float("nan")
    clean, dirty = (Moments(HEADS, ["c", "d"], 3, group_size=2, nulls=NULL_KINDS, replicates=7) for _ in range(2))
    clean.update(q, k, labels, prompts=prompts)
    dirty.update(q, broken, labels, prompts=prompts)
    same(clean, dirty)


def test_saved_and_loaded_is_the_same_and_half_files_are_refused(tmp_path):
    moments = carrying(0, about={"weights": "abc"})
    (tmp_path / "m.safetensors").write_bytes(moments.to_bytes())
    again = Moments.load(tmp_path / "m.safetensors")
    same(moments, again, tolerance=0)
    assert again.manifest() == moments.manifest()
    (tmp_path / "half").write_bytes(moments.to_bytes()[:1000])
    for name, says in (("half", "damaged"), ("absent", "no file")):
        with pytest.raises(BadInput, match=says):
            Moments.load(tmp_path / name)


Q, K, LABELS, PROMPTS = batch(0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_named(value):
    for side, place, says in (
        (0, (3, 6, 1), "query of L2H2 at example 7003"),
        (1, (4, 1, 0, 2), "key of L0H2 at example 7004, key 0"),
    ):
        q, k, labels, prompts = batch(7)
        (q, k)[side][place] = value
        with pytest.raises(BadInput, match=says):
            plain().update(q, k, labels, prompts=prompts)
