"""Facts about swaps: the closed form equals doing it, twice is never, and everything is everything."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import PlantedHead
from qkscope import BadInput, Head
from qkscope.attention import AttentionRows
from qkscope.maths.bases import Projector, joint_basis, oblique_projectors, random_bases
from qkscope.maths.methods import cov_qk, key_pca, summed
from qkscope.maths.moments import Covariance
from qkscope.maths.swap import draw_targets, swap_attention, swap_table, swapped_keys

seeds = st.integers(0, 10**6)


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(seed, d, r):
    return torch.linalg.qr(randn(seed, d, r))[0]


def random_rows(seed, n=7, h=4, g=2, keys=5, d=6, capped=True):
    softcap = torch.tensor([3.0, torch.inf, 5.0, torch.inf], dtype=torch.float64) if capped else None
    bias = torch.zeros(n, h, keys, dtype=torch.float64)
    bias[:, 0, 4] = -torch.inf  # a sliding window hides the last key from the first head
    return AttentionRows(
        q=randn(seed, n, h, d),
        k=randn(seed + 1, n, g, keys, d),
        scale=torch.tensor([0.4, 0.4, 1.0, 1.0]),
        kv_of_head=torch.tensor([0, 0, 1, 1]),
        softcap=softcap,
        bias=bias,
        rest=randn(seed + 2, n, h),
    )


@given(seeds)
@settings(max_examples=10, deadline=None)
def test_a_flip_is_of_the_whole_row_and_a_named_one_of_the_named_keys(seed):
    """Keys that are left out of the names come back as the largest of the others."""
    keys, q = randn(seed, 40, 1, 6, 4), randn(seed + 1, 40, 1, 4)
    orig, target, p = (
        torch.zeros(40, dtype=torch.long),
        torch.ones(40, dtype=torch.long),
        Projector(*[torch.eye(4)[None]] * 2),
    )
    whole = AttentionRows(q, keys, 1.0)
    others = whole.logits()[..., 3:]
    named = AttentionRows(q, keys[:, :, :3], 1.0, rest=others.logsumexp(-1), top=others.amax(-1))
    one, other = (swap_attention(rows, orig, target, p) for rows in (whole, named))
    assert torch.equal(one.flipped, other.flipped)
    assert torch.equal(one.flipped, one.flipped_named)
    assert bool((other.flipped <= other.flipped_named).all())
    torch.testing.assert_close(one.left, other.left)


def test_summed_projectors_count_twice_what_two_features_share():
    a, b = torch.eye(4, dtype=torch.float64)[None, :, :2], torch.eye(4, dtype=torch.float64)[None, :, 1:3]
    torch.testing.assert_close(summed([a, b]).matrix()[0].diagonal(), torch.tensor([1.0, 2.0, 1.0, 0.0]).double())


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_the_closed_form_equals_editing_the_keys(seed):
    """Masks, soft-caps, sinks (in ``rest``) and grouped keys take part; the edit is done key by key beside it."""
    rows = random_rows(seed)
    orig, target = torch.arange(7) % 4, (torch.arange(7) + 1) % 4
    left, right = randn(seed + 3, 4, 6, 2), randn(seed + 4, 4, 6, 2)
    effect = swap_attention(rows, orig, target, Projector(left, right))
    keys = rows.k[:, rows.kv_of_head].clone()
    for n in range(7):
        for h in range(4):
            pair = swapped_keys(keys[n, h, orig[n]], keys[n, h, target[n]], Projector(left[h], right[h]))
            keys[n, h, orig[n]], keys[n, h, target[n]] = pair
    logits = torch.einsum("nhd,nhkd->nhk", rows.q, keys) * rows.scale[:, None]
    for h, cap in enumerate(rows.softcap.tolist()):
        if cap < 100:
            logits[:, h] = cap * torch.tanh(logits[:, h] / cap)
    whole = torch.cat([logits + rows.bias, rows.rest[..., None]], dim=-1).softmax(dim=-1)
    for slots, got in ((orig, effect.orig_after[0]), (target, effect.target_after[0])):
        expected = whole[torch.arange(7)[:, None], torch.arange(4), slots[:, None]]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@given(seeds, st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_swapping_twice_is_the_identity(seed, r):
    a, b = randn(seed, 5, 6), randn(seed + 1, 5, 6)
    for p in (Projector.orthogonal(orthonormal(seed, 6, r)), oblique_projectors([orthonormal(seed, 6, r)])[0][0]):
        a2, b2 = swapped_keys(*swapped_keys(a, b, p), p)
        torch.testing.assert_close(a2, a)
        torch.testing.assert_close(b2, b)


def test_an_oblique_swap_twice_is_the_identity_too():
    first, _ = oblique_projectors([orthonormal(1, 6, 2), orthonormal(2, 6, 3)])
    a, b = randn(3, 5, 6), randn(4, 5, 6)
    torch.testing.assert_close(swapped_keys(*swapped_keys(a, b, first[0]), first[0])[0], a)


@given(seeds)
@settings(max_examples=15, deadline=None)
def test_a_joint_swap_of_complementary_subspaces_exchanges_the_keys(seed):
    bases = [orthonormal(seed, 6, 4), orthonormal(seed + 1, 6, 2)]  # independent, not orthogonal; together everything
    a, b = randn(seed + 2, 5, 6), randn(seed + 3, 5, 6)
    a2, b2 = swapped_keys(a, b, Projector.orthogonal(joint_basis(bases)))
    torch.testing.assert_close(a2, b)
    torch.testing.assert_close(b2, a)
    rows = random_rows(seed)
    full = Projector.orthogonal(torch.eye(6, dtype=torch.float64).expand(4, 6, 6))
    effect = swap_attention(rows, torch.zeros(7, dtype=int), torch.ones(7, dtype=int), full)
    torch.testing.assert_close(effect.orig_after[0], effect.target_before)
    assert effect.vacuous.all()


def planted_rows(head, n, seed):
    q, k, asked = head.contexts(n, 8, seed)
    target = draw_targets(asked, torch.ones(n, 8) > 0, seed, torch.arange(n))
    return AttentionRows(q[:, None], k[:, None], scale=1.0), asked, target


def test_the_oblique_swap_equals_the_oracle_and_the_orthogonal_one_leaks():
    """Swapping the true latent of one of two overlapping features is what the oblique projector does."""
    head = PlantedHead.make({"colour": 3, "shape": 5}, d_head=16, noise=0.0, seed=1)
    rows, orig, target = planted_rows(head, 400, seed=2)
    bases = {name: torch.linalg.qr(a)[0] for name, a in head.A.items()}
    (oblique, _), _ = oblique_projectors(list(bases.values()))
    latents = rows.k[:, 0] @ torch.linalg.pinv(torch.cat(list(head.A.values()), dim=1)).mT
    z_orig, z_target = (latents[torch.arange(400), slot] for slot in (orig, target))
    moved = (z_target - z_orig)[:, :3] @ head.A["colour"].mT
    keys = rows.k.clone()
    keys[torch.arange(400), 0, orig] += moved
    keys[torch.arange(400), 0, target] -= moved
    truth = AttentionRows(rows.q, keys, scale=1.0)
    oracle = truth.attention(truth.products())[torch.arange(400), 0, orig]
    found = swap_attention(rows, orig, target, Projector(oblique.left[None], oblique.right[None]))
    leaky = swap_attention(rows, orig, target, Projector.orthogonal(bases["colour"][None]))
    torch.testing.assert_close(found.orig_after[0, :, 0], oracle, rtol=0, atol=1e-9)
    assert (leaky.orig_after[0, :, 0] - oracle).abs().mean() > 0.01


def test_swapping_all_features_moves_the_attention_and_random_ones_do_not():
    head = PlantedHead.make({"colour": 3, "shape": 5}, d_head=32, noise=0.1, seed=3)
    rows, orig, target = planted_rows(head, 500, seed=4)
    joint = joint_basis([torch.linalg.qr(a)[0] for a in head.A.values()])
    effects = {
        "both": swap_attention(rows, orig, target, Projector.orthogonal(joint[None])),
        "random_both": swap_attention(rows, orig, target, Projector.orthogonal(random_bases(32, 8, 20, 0)[:, None])),
    }
    table = swap_table(effects, [Head(0, 0)], torch.arange(500), against={"both": "random_both"})
    both, random = table
    assert both["orig_before"] > 0.9
    assert both["orig_after"] < 0.02
    assert both["target_after"] > 0.9
    assert random["orig_after"] > 0.6
    assert random["draws"] == 20
    assert 0 < both["gain_low"] <= both["gain"] <= both["gain_high"]
    assert both["gain"] == pytest.approx(both["shift"] - random["shift"])
    assert random["gain"] is None
    assert not both["vacuous"]
    assert both["flip"] > 0.95


def test_parts_that_cancel_move_attention_and_carry_nothing():
    """Two directions whose parts of the logit cancel: swapping one blurs the choice, which is not what was matched."""
    head = PlantedHead.make({"a": 2}, d_head=8)
    rows, orig, target = planted_rows(head, 2000, seed=3)
    free = torch.linalg.qr(torch.cat([head.A["a"], randn(1, 8, 6)], dim=1))[0][:, 2:4]  # where neither feature lives
    loud = 4 * randn(4, 2000, 1, 8, 1)
    k = rows.k + loud * free[:, 0] - loud * free[:, 1]
    q = rows.q - (rows.q @ free) @ free.mT + free.sum(dim=1)  # meets both alike
    rows = replace(rows, q=q, k=k)
    bases = {"one": free[:, :1], "a": torch.linalg.qr(head.A["a"])[0], "all": torch.eye(8, dtype=torch.float64)}
    effects = {n: swap_attention(rows, orig, target, Projector.orthogonal(b[None])) for n, b in bases.items()}
    one, a, everything = swap_table(effects, [Head(0, 0)], torch.arange(2000), against={"a": "one"})
    assert one["shift"] > 0.1
    assert one["carried_low"] < 0 < one["carried_high"]
    assert a["carried"] > 0.9
    assert a["carried_gain_low"] > 0.5
    assert everything["carried"] == pytest.approx(1.0)
    others = torch.stack([torch.arange(8)[(torch.arange(8) != o) & (torch.arange(8) != t)][:2]
                          for o, t in zip(orig.tolist(), target.tolist(), strict=True)])  # fmt: skip
    whole = Projector.orthogonal(bases["all"][None])
    sham = swap_attention(rows, others[:, 0], others[:, 1], whole, read=(orig, target))
    assert float(sham.carried.abs().max()) == 0.0


def test_intervals_are_wider_when_prompts_repeat():
    rows, orig, target = planted_rows(PlantedHead.make({"a": 2}, d_head=8, noise=1.0), 100, seed=5)
    effect = {"x": swap_attention(rows, orig, target, Projector.orthogonal(orthonormal(0, 8, 2)[None]))}
    repeated = {"x": type(effect["x"])(**{
        name: value.repeat_interleave(4, dim=-2) if name not in ("rank", "d_head") else value
        for name, value in vars(effect["x"]).items()
    })}  # fmt: skip
    alone = swap_table(effect, [Head(0, 0)], torch.arange(100))[0]
    clustered = swap_table(repeated, [Head(0, 0)], torch.arange(100).repeat_interleave(4))[0]
    naive = swap_table(repeated, [Head(0, 0)], torch.arange(400))[0]

    def width(row):
        return row["shift_high"] - row["shift_low"]

    assert width(clustered) == pytest.approx(width(alone), rel=0.2)
    assert width(naive) < 0.6 * width(clustered)


def test_a_content_swap_keeps_each_keys_own_rotation():
    """With the query as each key sees it, swapping un-rotated keys equals editing R_n P R_nᵀ of the rotated ones."""
    n, d, keys = 6, 4, 3
    rotations = torch.linalg.qr(randn(0, keys, d, d))[0]
    q, k = randn(1, n, d), randn(2, n, keys, d)  # rotated query; un-rotated keys
    seen = torch.einsum("kde,nd->nke", rotations, q)  # R_kᵀ q
    rows = AttentionRows(seen[:, None], k[:, None], scale=0.5)
    orig, target = torch.zeros(n, dtype=int), torch.full((n,), 2)
    p = Projector.orthogonal(orthonormal(3, d, 2))
    effect = swap_attention(rows, orig, target, Projector(p.left[None], p.right[None]))
    k0, k2 = swapped_keys(k[:, 0], k[:, 2], p)
    edited = torch.stack([k0, k[:, 1], k2], dim=1)
    logits = 0.5 * torch.einsum("nd,kde,nke->nk", q, rotations, edited)
    torch.testing.assert_close(effect.orig_after[0, :, 0], logits.softmax(-1)[:, 0])


def test_baselines_find_what_varies():
    keys = torch.cat([5 * randn(0, 500, 1, 2), 0.1 * randn(1, 500, 1, 4)], dim=-1)
    queries = torch.cat([randn(2, 500, 1, 1), 0.01 * randn(3, 500, 1, 1), 3 * randn(4, 500, 1, 4)], dim=-1)
    cov_k, cov_q = Covariance(1, 6), Covariance(1, 6)
    cov_k.update(keys)
    cov_q.update(queries)
    pca = key_pca(cov_k.matrix())(2).left[0]
    assert torch.linalg.svdvals(pca[:2]).min() > 0.99
    both = cov_qk(cov_q.matrix(), cov_k.matrix())(1).left[0]
    assert both[0].abs() > 0.99  # queries hardly vary along the second direction in which keys do


def test_targets_are_drawn_by_the_address_of_their_row_and_never_the_original():
    orig, row = torch.arange(4000) % 4, torch.arange(4000)
    allowed = torch.ones(4000, 4, dtype=torch.bool)
    allowed[:, 3] = False
    target = draw_targets(orig, allowed, 0, row)
    assert (target != orig).all()
    shares = torch.bincount(target[orig == 3], minlength=4) / 1000
    torch.testing.assert_close(shares, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]), atol=0.05, rtol=0)
    # whichever rows stand beside one, and in whatever order, it draws the same key; another seed draws others
    some = torch.randperm(4000)[:50]
    assert torch.equal(draw_targets(orig[some], allowed[some], 0, row[some]), target[some])
    assert not torch.equal(draw_targets(orig, allowed, 1, row), target)


def test_bad_input_gets_a_sentence():
    zeros = torch.zeros(7, dtype=int)
    for call, says in (
        (lambda: draw_targets(zeros, torch.zeros(7, 5) > 0, 0), "row 0 has no other key"),
        (lambda: key_pca(torch.eye(4))(9), "rank 9"),
        (lambda: Covariance(2, 3).matrix(), "at least two"),
    ):
        with pytest.raises(BadInput) as error:
            call()
        assert says in str(error.value)


def test_a_row_that_attends_to_neither_key_moves_nothing():
    rows = random_rows(0)
    hidden = rows.bias.clone()
    hidden[2, :, :2] = -torch.inf
    rows = AttentionRows(rows.q, rows.k, rows.scale, rows.kv_of_head, rows.softcap, hidden, rows.rest)
    p = Projector.orthogonal(orthonormal(0, 6, 2).expand(4, 6, 2))
    effect = swap_attention(rows, torch.zeros(7, dtype=int), torch.ones(7, dtype=int), p)
    assert effect.shift[2].abs().max() == 0
    assert effect.shift.isfinite().all()
    assert effect.shift.abs().sum() > 0
