"""Facts about swaps: the closed form equals doing it, in tensors and in a model."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import PlantedHead, orthonormal, randn
from qkscope import BadInput, tasks
from qkscope.attention import AttentionRows
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.model.patch import Edit
from qkscope.seeds import derived_seed, draw_bits
from qkscope.sums.bases import Projector
from qkscope.sums.moments import Covariance
from qkscope.sums.subspace import Subspace
from qkscope.sums.swap_algebra import (
    Condition,
    SwapRows,
    draw_targets,
    swap_attention,
    swap_table,
    swapped_keys,
)
from qkscope.sums.swap_methods import beside_truth, conditions, cov_qk, key_pca
from qkscope.texts.task import ANSWER, Task
from qkscope.verbs.decompose import decompose
from qkscope.verbs.swap.features import Features
from qkscope.verbs.swap.swap import swap

seeds = st.integers(0, 10**6)


def random_rows(seed):
    """7 rows of 4 heads, two of a key head, 5 keys of width 6."""
    softcap = torch.tensor([3.0, torch.inf, 5.0, torch.inf], dtype=torch.float64)
    bias = torch.zeros(7, 4, 5, dtype=torch.float64)
    bias[:, 0, 4] = -torch.inf  # a sliding window hides the last key from the first head
    q, k, rest = randn(seed, 7, 4, 6), randn(seed + 1, 7, 2, 5, 6), randn(seed + 2, 7, 4)
    groups, scale = torch.tensor([0, 0, 1, 1]), torch.tensor([0.4, 0.4, 1.0, 1.0])
    return AttentionRows(q, k, scale, kv_of_head=groups, softcap=softcap, bias=bias, rest=rest)


@given(seeds)
@settings(max_examples=10)
def test_a_flip_is_of_the_whole_row_and_a_named_one_of_the_named_keys(seed):
    """Keys that are left out of the names come back as the largest of the others."""
    keys, q = randn(seed, 40, 1, 6, 4), randn(seed + 1, 40, 1, 4)
    orig, p = torch.zeros(40, dtype=torch.long), Projector(*[torch.eye(4)[None]] * 2)
    whole = AttentionRows(q, keys, 1.0)
    others = whole.logits()[..., 3:]
    named = AttentionRows(q, keys[:, :, :3], 1.0, rest=others.logsumexp(-1), top=others.amax(-1))
    one, other = (swap_attention(rows, orig, orig + 1, p) for rows in (whole, named))
    assert torch.equal(one.flipped, other.flipped)
    assert torch.equal(one.flipped, one.flipped_named)
    assert bool((other.flipped <= other.flipped_named).all())
    torch.testing.assert_close(one.left, other.left)


@given(seeds)
@settings(max_examples=25)
def test_the_closed_form_equals_editing_the_keys(seed):
    """Masks, soft-caps, sinks (in ``rest``) and grouped keys take part; the edit is done key by key
    beside it.
    """
    rows = random_rows(seed)
    orig, target = torch.arange(7) % 4, (torch.arange(7) + 1) % 4
    left, right = randn(seed + 3, 4, 6, 2), randn(seed + 4, 4, 6, 2)
    effect = swap_attention(rows, orig, target, Projector(left, right))
    keys = rows.k[:, rows.kv_of_head].clone()
    for n in range(7):
        for h in range(4):
            pair = swapped_keys(
                keys[n, h, orig[n]], keys[n, h, target[n]], Projector(left[h], right[h])
            )
            keys[n, h, orig[n]], keys[n, h, target[n]] = pair
    logits = torch.einsum("nhd,nhkd->nhk", rows.q, keys) * rows.scale[:, None]
    for h, cap in enumerate(rows.softcap.tolist()):
        if cap < 100:
            logits[:, h] = cap * torch.tanh(logits[:, h] / cap)
    whole = torch.cat([logits + rows.bias, rows.rest[..., None]], dim=-1).softmax(dim=-1)
    for slots, got in ((orig, effect.orig_after[0]), (target, effect.target_after[0])):
        expected = whole[torch.arange(7)[:, None], torch.arange(4), slots[:, None]]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def planted_rows(head, n, seed):
    q, k, asked = head.contexts(n, 8, seed)
    target = draw_targets(asked, torch.ones(n, 8) > 0, seed, torch.arange(n))
    return AttentionRows(q[:, None], k[:, None], scale=1.0), asked, target


def test_parts_that_cancel_move_attention_and_carry_nothing():
    """Two directions whose parts of the logit cancel: swapping one blurs the choice, which is not
    what was matched.
    """
    head = PlantedHead.make({"a": 2}, d_head=8)
    rows, orig, target = planted_rows(head, 2000, seed=3)
    free = torch.linalg.qr(torch.cat([head.A["a"], randn(1, 8, 6)], dim=1))[0][
        :, 2:4
    ]  # where neither feature lives
    loud = 4 * randn(4, 2000, 1, 8, 1)
    k = rows.k + loud * free[:, 0] - loud * free[:, 1]
    q = rows.q - (rows.q @ free) @ free.mT + free.sum(dim=1)  # meets both alike
    rows = dataclasses.replace(rows, q=q, k=k)
    bases = {
        "one": free[:, :1],
        "a": torch.linalg.qr(head.A["a"])[0],
        "all": torch.eye(8, dtype=torch.float64),
    }
    effects = {
        n: swap_attention(rows, orig, target, Projector.orthogonal(b[None]))
        for n, b in bases.items()
    }
    one, a, everything = swap_table(effects, [Head(0, 0)], torch.arange(2000), against={"a": "one"})
    assert one["shift"] > 0.1
    assert one["carried_low"] < 0 < one["carried_high"]
    assert a["carried"] > 0.9
    assert a["carried_gain_low"] > 0.5
    assert 0 < a["gain_low"] <= a["gain"] <= a["gain_high"]
    assert a["gain"] == pytest.approx(a["shift"] - one["shift"])
    assert one["gain"] is None
    assert everything["carried"] == pytest.approx(1.0)
    others = torch.stack([torch.arange(8)[(torch.arange(8) != o) & (torch.arange(8) != t)][:2]
                          for o, t in zip(orig.tolist(), target.tolist(), strict=True)])  # fmt: skip
    whole = Projector.orthogonal(bases["all"][None])
    sham = swap_attention(rows, others[:, 0], others[:, 1], whole, read=(orig, target))
    assert float(sham.carried.abs().max()) == 0.0


def test_baselines_find_what_varies_and_a_row_that_attends_to_neither_key_moves_nothing():
    keys = torch.cat([5 * randn(0, 500, 1, 2), 0.1 * randn(1, 500, 1, 4)], dim=-1)
    queries = torch.cat(
        [randn(2, 500, 1, 1), 0.01 * randn(3, 500, 1, 1), 3 * randn(4, 500, 1, 4)], dim=-1
    )
    cov_k, cov_q = Covariance(1, 6), Covariance(1, 6)
    cov_k.update(keys)
    cov_q.update(queries)
    pca = key_pca(cov_k.matrix())(2).left[0]
    assert torch.linalg.svdvals(pca[:2]).min() > 0.99
    both = cov_qk(cov_q.matrix(), cov_k.matrix())(1).left[0]
    assert both[0].abs() > 0.99  # queries hardly vary along the second direction in which keys do
    rows = random_rows(0)
    hidden = rows.bias.clone()
    hidden[2, :, :2] = -torch.inf
    rows = AttentionRows(
        rows.q, rows.k, rows.scale, rows.kv_of_head, rows.softcap, hidden, rows.rest
    )
    p = Projector.orthogonal(orthonormal(0, 6, 2).expand(4, 6, 2))
    effect = swap_attention(rows, torch.zeros(7, dtype=int), torch.ones(7, dtype=int), p)
    assert effect.shift[2].abs().max() == 0
    assert effect.shift.isfinite().all()
    assert effect.shift.abs().sum() > 0


def test_targets_are_drawn_by_the_address_of_their_row_and_never_the_original():
    orig, row = torch.arange(4000) % 4, torch.arange(4000)
    allowed = torch.ones(4000, 4, dtype=torch.bool)
    allowed[:, 3] = False
    target = draw_targets(orig, allowed, 0, row)
    assert (target != orig).all()
    shares = torch.bincount(target[orig == 3], minlength=4) / 1000
    torch.testing.assert_close(shares, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]), atol=0.05, rtol=0)
    # whichever rows stand beside one, and in whatever order, it draws the same key; another seed
    # draws others
    some = torch.randperm(4000)[:50]
    assert torch.equal(draw_targets(orig[some], allowed[some], 0, row[some]), target[some])
    assert not torch.equal(draw_targets(orig, allowed, 1, row), target)


HEADS = ["L1H3", "L0H1", "L1H0"]  # two layers, out of order, two of one key head's group apart


@pytest.fixture(scope="module")
def task() -> Task:
    return tasks.binding(4)


@pytest.fixture(scope="module")
def fit(scope, task):
    return decompose(scope, task, HEADS, 40, batch_size=16, replicates=19)


@pytest.fixture(scope="module")
def swaps(scope, task, fit):
    return swap(scope, task.test(12), fit, sizes=[1, 16])


def test_the_table_has_one_row_per_head_and_condition_and_the_curve_ends_where_all_is_swapped(
    swaps, fit
):
    kinds, table = ("", "random_", "key_pca_", "cov_qk_"), swaps.table()
    wanted = {f"{kind}{name}" for kind in kinds for name in ("order", "lexical", "both")}
    wanted |= {"order_oblique", "lexical_oblique", "both_summed", "sham_both"}
    rows = {(row["head"], row["condition"]): row for row in table}
    assert set(rows) == {(head, name) for head in HEADS for name in wanted}
    for head in HEADS:
        for name in ("order", "lexical", "both"):
            assert len({rows[head, f"{kind}{name}"]["rank"] for kind in kinds}) == 1
        assert rows[head, "order"]["rank"] == fit["order", head].rank
        before = {
            (row["orig_before"], row["target_before"]) for row in table if row["head"] == head
        }
        assert len(before) == 1, "one draw of pairs serves every condition"
        curve = [row for row in swaps.tables["curve"] if (row["head"], row["k"]) == (head, 16)]
        assert {row["method"] for row in curve} == {
            "order",
            "lexical",
            "key_pca",
            "cov_qk",
            "random",
        }
        assert [row["orig_after"] for row in curve] == pytest.approx(
            [curve[0]["orig_after"]] * 5, abs=1e-6
        )


def test_every_condition_equals_a_patched_forward(scope, task, fit):
    """The closed form against keys really written into the model, head by head, in batches of
    another size.
    """
    units = task.test(10)
    table = {
        (row["head"], row["condition"]): row
        for row in swap(scope, units, fit, draws=1, batch_size=3).table()
    }
    every, _ = Features.of(scope, fit, HEADS, ["order", "lexical"]).conditions(draws=1, seed=0)
    every = {condition.name: projector for condition, projector in every.items()}
    rows = list(pairs_of(units))
    encoded = scope.encode([example for example, *_ in rows])
    orig, target = (torch.tensor([row[i] for row in rows]) for i in (1, 2))
    before = scope.capture_inputs(encoded, heads=HEADS)
    index = torch.arange(len(rows))
    at = torch.stack(
        [before.key_positions[index, orig], before.key_positions[index, target]], dim=1
    )
    for name, projector in every.items():
        for i, head in enumerate(HEADS):
            own = type(projector)(*(f[0, i] if f.ndim == 4 else f[i] for f in projector))
            keys = before.k[:, before.kv_of_head[i]]
            pair = torch.stack(swapped_keys(keys[index, orig], keys[index, target], own), dim=1)
            after = scope.capture_inputs(
                encoded, heads=[head], edits=[Edit.keys(head, at, pair)]
            ).attention()[:, 0]
            assert float(after[index, orig].mean()) == pytest.approx(
                table[head, name]["orig_after"], abs=1e-5
            )
            assert float(after[index, target].mean()) == pytest.approx(
                table[head, name]["target_after"], abs=1e-5
            )


def pairs_of(units, seed: int = 0) -> Iterator[tuple[Example, int, int]]:
    """The pairs that a swap draws, drawn again: of the keys that may be, the one of the largest
    number.
    """
    for i, unit in enumerate(units):
        for m, example in enumerate(unit):
            picks = []
            for what, sign in (("right", 1), ("wrong", -1)):
                lots = {
                    slot: int(draw_bits(derived_seed(seed, what), i, m, slot))
                    for slot, key in enumerate(example.keys)
                    if key.label(ANSWER) == sign
                }
                picks.append(max(lots, key=lots.__getitem__))
            yield example, *picks


def test_a_sham_touches_neither_of_the_two_keys(scope, swaps):
    for row in swaps.table():
        if row["condition"].startswith("sham_"):
            before, after = (
                row[f"orig_{when}"] / row[f"target_{when}"] for when in ("before", "after")
            )
            assert after == pytest.approx(before, rel=0.3)
    two = tasks.binding(3)  # the right box, the target, and one more: nothing is left to sham with
    small = decompose(scope, two, "L0H0", 20, contrasts=["order", "lexical"], replicates=3)
    assert not any(
        row["condition"].startswith("sham_") for row in swap(scope, two.test(4), small).table()
    )


def test_heads_of_different_rank_swap_as_they_would_alone(scope, task, fit):
    """Also beside one that has no oblique swap, as its features depend on each other."""
    ranks = {head: (1, 16, 7)[i] for i, head in enumerate(fit.heads)}
    subspaces = {(name, head): s.cut(ranks[head]) for (name, head), s in fit.subspaces.items()}
    mixed = dataclasses.replace(fit, subspaces=subspaces)
    units = task.test(8)
    together = {
        (row["head"], row["condition"]): row for row in swap(scope, units, mixed, draws=2).table()
    }
    assert {head for head, name in together if name.endswith("_oblique")} == {"L1H3", "L1H0"}
    for head in HEADS:
        for row in swap(scope, units, mixed, heads=head, draws=2).table():
            for name in ("rank", "orig_after", "target_after", "flip"):
                assert row[name] == pytest.approx(together[head, row["condition"]][name], abs=1e-6)


def test_without_a_fit_a_basis_is_swapped_and_the_controls_that_need_one_are_left_out(scope, task):
    basis = 3 * torch.eye(16)[:, :2] + 1  # any independent columns
    swaps = swap(scope, task.test(8), heads="L1H3", subspaces={"mine": basis}, sizes=[1, 2])
    assert [row["condition"] for row in swaps.table()] == ["mine", "random_mine", "sham_mine"]
    assert "Key PCA and Cov_q Cov_k need a fit" in swaps.answer
    assert {row["method"] for row in swaps.tables["curve"]} == {"mine", "random"}
    span = torch.linalg.qr(basis)[0]
    again = swap(
        scope, task.test(8), subspaces={"mine": {"L1H3": Subspace(span, torch.ones(2), span, 2)}}
    )
    assert again.table()[0]["shift"] == pytest.approx(swaps.table()[0]["shift"], abs=1e-6)


EYE = torch.eye(16)[:, :2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fit": None, "subspaces": {"mine": EYE}}, "no head was named"),
        ({"subspaces": {"mine": torch.ones(16, 2)}, "heads": "L0H1"}, "independent columns"),
        ({"subspaces": {"mine": torch.eye(8)[:, :2]}, "heads": "L0H1"}, "has 8 dimensions at L0H1"),
        ({"subspaces": {"order": EYE}}, "features are different contrasts"),
        ({"units": [(Example(text="hat : A"),)]}, "needs keys labelled 'answer' 1 and -1"),
    ],
)
def test_bad_swaps_are_one_sentence(scope, task, fit, options, says):
    with pytest.raises(BadInput, match=says):
        swap(scope, **{"units": task.test(2), "fit": fit, **options})


def test_spaces_without_attention_are_refused_and_what_cannot_be_exchanged_is_untested(scope, task):
    before = decompose(scope, task, "L0H0", 8, space="pre_rope", replicates=3)
    with pytest.raises(BadInput, match="pre_rope vectors do not give the model's attention"):
        swap(scope, task.test(2), before)
    frame = decompose(scope, task, "L0H0", 8, space="query_frame", replicates=3)
    assert swap(scope, task.test(2), frame).table()
    with pytest.raises(BadInput, match="a patched run writes post_rope keys"):
        swap(scope, task.test(2), frame, downstream=True)
    with pytest.raises(
        BadInput, match="a swap without a fit cannot exchange a feature in its text"
    ):
        swap(scope, tasks.binding(4).test(2), heads="L0H0", subspaces={"mine": EYE}, truth=True)
    listed = tasks.filter(["fruits", "animals"], items=2)
    fitted = decompose(scope, listed, "L0H0", 12, replicates=3)
    found = swap(scope, listed.test(6), fitted, features=["fruits", "animals"], draws=2, truth=True)
    tested = {row["feature"]: row["tested"] for row in found.table() if row["kind"] == "feature"}
    assert (tested["fruits"], tested["animals"], tested["both"] > 0) == (0, 0, True)
    assert "fruits cannot be exchanged in these texts, and is untested." in found.answer


def test_a_full_swap_downstream_is_an_exchange_of_the_two_keys(scope, task):
    full = decompose(scope, task, HEADS, 12, contrasts=["order", "lexical"], rank=16, replicates=3)
    units = task.test(9)
    row = swap(scope, units, full, batch_size=4, downstream=True).tables["downstream"][0]
    assert row["heads"] == ",".join(HEADS)
    fell = []
    for example, orig, target in pairs_of(units):
        encoded = scope.encode([example])
        plain = scope.capture_inputs(encoded, heads=HEADS, logits=True)
        at = plain.key_positions[:, [orig, target]]
        turned = plain.k[:, plain.kv_of_head][:, :, [target, orig]]
        edits = [Edit.keys(head, at, turned[:, i]) for i, head in enumerate(HEADS)]
        edited = scope.capture_inputs(encoded, heads=HEADS, logits=True, edits=edits)
        ids = encoded.inputs["input_ids"][0, plain.key_positions[0]]
        gap = [x.logits[0, ids[orig]] - x.logits[0, ids[target]] for x in (plain, edited)]
        fell.append(float(gap[0] - gap[1]))
    assert row["fell"] == pytest.approx(sum(fell) / len(fell), abs=1e-5)


def planted_truth(head, n, seed):
    """Rows, what they are where feature ``a`` of the two keys is exchanged in what made them, and
    how that is done.
    """
    rows, asked, target = planted_rows(head, n, seed)
    onto = (
        head.A["a"] @ torch.linalg.pinv(torch.cat(list(head.A.values()), 1))[: head.A["a"].shape[1]]
    )  # a, along b
    both, k = torch.arange(n), rows.k.clone()
    moved = (k[both, :, target] - k[both, :, asked]) @ onto.mT
    k[both, :, asked] += moved
    k[both, :, target] -= moved
    truth = {("a", "distance"): dataclasses.replace(rows, k=k).attention()}
    truth["a", "distance"][0] = torch.nan
    return SwapRows(rows, asked, target, torch.arange(n), [Head(0, 0)], truth=truth), onto[None]


def test_only_the_feature_itself_is_at_no_distance_from_the_truth():
    """Key PCA takes what varies most, which is the other feature; rows without another text do not
    count.
    """
    head = PlantedHead.make({"a": 2, "b": 2}, d_head=8)
    rows, onto = planted_truth(head, 400, seed=5)
    bases, eye = (
        {name: torch.linalg.qr(a)[0][None] for name, a in head.A.items()},
        torch.eye(8, dtype=torch.float64),
    )
    loud, random = (
        eye + 9 * bases["b"] @ bases["b"].mT,
        Projector.orthogonal(orthonormal(1, 8, 2)[None]),
    )
    every, _ = conditions(bases, {"a": (loud, loud)}, lambda k: random)
    every |= beside_truth(every, planted_truth(head, 400, seed=6)[0], None)
    table = {tuple(row[x] for x in ("feature", "kind")): row for row in rows.table(every | {
        Condition("a", "oracle"): Projector(onto, eye[None])})}  # fmt: skip
    far = {kind: row["distance"] for (feature, kind), row in table.items() if feature == "a"}
    assert max(far["oracle"], far["oblique"]) < 1e-9
    assert max(far["feature"], far["trained"]) < 0.5 * min(
        far["nothing"], far["key_pca"], far["whole"]
    )
    near = table["a", "feature"]
    assert (
        0 < near["nearer_low"] <= near["nearer"] == pytest.approx(far["key_pca"] - far["feature"])
    )
    assert near["tested"] == 399
    assert (table["b", "feature"]["tested"], table["b", "feature"]["distance"]) == (0, None)


def test_binding_exchanges_features_in_its_text_and_keys_keep_their_slots():
    example = Example.mark("hat: O\njam: Z\ncat: B\njam:", keys=["O", "Z", "B"])
    task = tasks.binding(2, words=["hat", "jam", "cat", *"uvwxyz"])
    for features, words, boxes, keys in (
        (["lexical"], "jam hat", "OZ", "OZ"), (["order"], "jam hat", "ZO", "OZ"), (["box"], "hat jam", "ZO", "ZO"),
        (["order", "lexical"], "hat jam", "ZO", "OZ"), (["order", "lexical", "box"], "hat jam", "OZ", "ZO"),
    ):  # fmt: skip
        other = task.exchange(example, features, 1, 0)
        lines = [f"{word}: {box}\n" for word, box in zip(words.split(), boxes, strict=True)]
        assert other.text == "".join(lines) + "cat: B\njam:"
        assert "".join(other.piece(key.span) for key in other.keys) == f"{keys}B"
    assert task.exchange(example, ["mine"], 1, 0) is None


def test_the_true_row_is_a_run_of_the_other_text_and_is_met_by_either_query(scope, task, fit):
    """Found again without it: the other text run plainly, and with the prompt's own queries patched
    in.
    """
    units = task.test(10)
    found = swap(scope, units, fit, draws=2, batch_size=4, truth=True)
    table, far = (
        {(row["head"], row["condition"]): row for row in found.table()},
        {"distance": [], "text_distance": []},
    )
    for example, orig, target in pairs_of(units):
        encoded = scope.encode([task.exchange(example, ["lexical"], orig, target)])
        plain, live = (
            scope.capture_inputs(x, heads=HEADS) for x in (scope.encode([example]), encoded)
        )
        assert torch.equal(live.key_positions, plain.key_positions)
        edits = [
            Edit.queries(head, live.query_positions, plain.q[:, i]) for i, head in enumerate(HEADS)
        ]
        for values, captured in zip(
            far.values(),
            (scope.capture_inputs(encoded, heads=HEADS, edits=edits), live),
            strict=True,
        ):
            one, other = (
                torch.cat([a := x.attention(), 1 - a.sum(-1, keepdim=True)], -1)
                for x in (plain, captured)
            )
            values.append((one - other).abs().sum(-1) / 2)
    for name, values in far.items():
        assert [table[head, "nothing_lexical"][name] for head in HEADS] == pytest.approx(
            torch.cat(values).mean(0).tolist(), abs=1e-5
        )
    assert {row["tested"] for row in table.values() if row["kind"] == "feature"} == {10}
    full = decompose(scope, task, HEADS, 8, contrasts=["lexical"], rank=16, replicates=3)
    kinds = {
        row["kind"]: row["distance"]
        for row in swap(scope, units, full, "L1H0", draws=1, truth=True).table()
    }
    for kind in (
        "feature",
        "key_pca",
        "omega_svd",
        "trained",
    ):  # whoever fills the head swaps the whole key
        assert kinds[kind] == pytest.approx(kinds["whole"], abs=1e-5)
