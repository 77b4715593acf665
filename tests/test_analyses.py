"""Facts about the verbs on a tiny random model: they equal what is computed by hand, and survive being killed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qkscope import BadInput, Head, cli, tasks
from qkscope.analyses.attribute import attribute
from qkscope.analyses.decompose import decompose
from qkscope.analyses.downstream import swap_downstream
from qkscope.analyses.find import find_heads
from qkscope.analyses.fit import load
from qkscope.analyses.fit_folder import read_job, sums_file
from qkscope.analyses.pairs import draw_pairs
from qkscope.analyses.prompts import batches_of, capture_units, units_hash, whole_rows
from qkscope.analyses.swap import Features, capture_rows, default_features, swap
from qkscope.capture.patch import Edit
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed, draw_bits
from qkscope.examples import Draft, Example, Key
from qkscope.maths.moments import Moments
from qkscope.maths.significance import wilson
from qkscope.maths.subspace import Subspace
from qkscope.maths.swap import swapped_keys
from qkscope.runs.folder import read_tensors
from qkscope.runs.result import Result
from qkscope.tasks.task import ANSWER, Task
from qkscope.tasks.words import OBJECTS
from qkscope_papers.families import tiny_model

ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}  # one thread, as conftest gives this process
HEADS = ["L1H3", "L0H1", "L1H0"]  # two layers, out of order, two of one key head's group apart


@pytest.fixture(scope="module")
def task() -> Task:
    return tasks.binding(4)


@pytest.fixture(scope="module")
def fit(scope: Scope, task: Task):
    return decompose(scope, task, HEADS, 40, batch_size=16, replicates=19)


def one(scope: Scope, example: Example, heads=HEADS):
    """Queries (h, d) and keys as each head reads them (h, k, d), of one example alone."""
    captured = scope.capture_inputs(scope.encode([example]), heads=heads)
    return captured.q[0].double(), captured.k[0, captured.kv_of_head].double()


def outer(q, k):
    return q[:, :, None] * k[:, None, :]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


# ---------------------------------------------------------------- units


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 16, 1000])
@pytest.mark.parametrize("contrast", ["order", "lexical"])
def test_batches_keep_a_unit_together_and_come_in_a_fixed_order(scope, task, batch_size, contrast):
    units = task.fit(contrast, 11)
    batches = batches_of(units, batch_size)
    assert sorted(i for batch in batches for i in batch) == list(range(11))
    assert [i for batch in batches for i in batch] == [i for batch in batches_of(units, 4) for i in batch]
    assert max(sum(len(units[i]) for i in batch) for batch in batches) <= max(batch_size, len(units[0]))
    for batch, indices in zip(capture_units(scope, units, HEADS, batch_size=batch_size), batches, strict=True):
        rows = list(zip(batch.unit.tolist(), batch.member.tolist(), strict=True))
        assert rows == [(i, m) for i in indices for m in range(len(units[i]))]


def test_a_fingerprint_sees_text_marks_and_labels(task):
    units = task.fit("lexical", 3)
    assert units_hash(units) == units_hash(tasks.binding(4).fit("lexical", 3))
    assert units_hash(units) != units_hash(tasks.binding(4, lexical="own_query").fit("lexical", 3))
    assert units_hash(units) != units_hash(units[:2])


# ---------------------------------------------------------------- contrasts by hand


def test_lexical_meets_each_query_with_its_own_key_and_the_copys(scope, task):
    total = 0
    for first, copy in task.fit("lexical", 10):
        place = [key.label("lexical") for key in first.keys].index(1)
        (q_o, k_o), (q_c, k_c) = one(scope, first), one(scope, copy)
        k_o, k_c = k_o[:, place], k_c[:, place]
        total = total + (outer(q_o, k_o - k_c) + outer(q_c, k_c - k_o)) / 2
    found = decompose(scope, task, HEADS, 10, contrasts=["lexical"], replicates=3)
    close(found.sums["lexical"].moments.delta("lexical"), total / 10)


def test_own_query_is_the_difference_of_the_prompts_own_pairs(scope):
    task, total = tasks.binding(4, lexical="own_query"), 0
    for first, copy in task.fit("lexical", 10):
        place = [key.label("lexical") for key in first.keys].index(1)
        (q_o, k_o), (q_c, k_c) = one(scope, first), one(scope, copy)
        total = total + outer(q_o, k_o[:, place]) - outer(q_c, k_c[:, place])
    found = decompose(scope, task, HEADS, 10, contrasts=["lexical"], replicates=3)
    close(found.sums["lexical"].moments.delta("lexical"), total / 10)


def test_order_averages_over_pairs_and_its_subspace_is_of_the_centred_contrast(scope, task):
    right, wrong, queries, k_right, k_wrong = 0, 0, 0, 0, 0
    for (example,) in task.fit("order", 10):
        q, k = one(scope, example)
        labels = torch.tensor([key.label("order") for key in example.keys])
        plus, minus = k[:, labels > 0].sum(1), k[:, labels < 0].sum(1)
        right, wrong = right + outer(q, plus) / 10, wrong + outer(q, minus) / 30
        queries, k_right, k_wrong = queries + q / 10, k_right + plus / 10, k_wrong + minus / 30
    found = decompose(scope, task, HEADS, 10, contrasts=["order"], replicates=3)
    close(found.sums["order"].moments.delta("order"), right - wrong)
    centred = right - wrong - outer(queries, k_right - k_wrong)
    for i, head in enumerate(HEADS):
        subspace = found["order", head]
        scale = float((right - wrong)[i].abs().max())
        torch.testing.assert_close(
            subspace.U @ torch.diag(subspace.S) @ subspace.V.mT, centred[i], atol=1e-5 * scale, rtol=0
        )
    # in the first layer the query, a colon at a fixed place, never varies: what centring leaves is rounding
    assert found["order", "L0H1"].rank == 1
    assert found["order", "L0H1"].controls.verdict != "interaction"


def test_batch_size_does_not_change_a_contrast(scope, task, fit):
    """40 units in batches of 16, of 3 and of 1: not multiples of one another, and padded differently."""
    for batch_size in (1, 3):
        other = decompose(scope, task, HEADS, 40, batch_size=batch_size, replicates=3)
        for name in fit.contrasts:
            close(other.sums[name].moments.delta(name), fit.sums[name].moments.delta(name))
            close(other.sums[name].cov_k.matrix(), fit.sums[name].cov_k.matrix())


def test_the_covariances_are_those_of_all_queries_and_named_keys(scope, task, fit):
    queries, keys = zip(*(one(scope, example) for (example,) in task.fit("order", 40)), strict=True)
    for x, found in ((torch.stack(queries), fit.sums["order"].cov_q), (torch.cat(keys, 1).mT, fit.sums["order"].cov_k)):
        x = x if x.shape[1] == 3 else x.permute(2, 0, 1)
        centred = x - x.mean(0)
        close(found.matrix(), torch.einsum("nhd,nhe->hde", centred, centred) / len(x))


# ---------------------------------------------------------------- decompose


def test_options_choose_contrasts_ranks_and_centring(scope, task, fit):
    found = decompose(
        scope, task, "L1H3", 20, contrasts=["box", "order"], rank={"box": 3}, center={"order": "none"}, replicates=19
    )
    assert found.contrasts == ["box", "order"]
    assert found["box", "L1H3"].rank == 3
    assert [row["center"] for row in found.table()] == ["none", "none"]
    plain = found.sums["order"].moments.delta("order")[0]
    close(found["order", "L1H3"].S, torch.linalg.svdvals(plain))
    assert list(found) == [("box", Head(1, 3)), ("order", Head(1, 3))]
    with pytest.raises(BadInput, match="nothing was fitted for 'lexical' at L1H3: there is box, order at L1H3"):
        _ = found["lexical", "L1H3"]


def test_a_rank_above_the_null_is_of_the_null_that_fits_the_centring(scope, task):
    """The difference for what is not centred, the interaction for what is; one direction is always kept."""
    cut = decompose(scope, task, HEADS, 60, rank="null", replicates=59)
    for name, kind in (("order", "interaction_rank"), ("box", "null_rank")):
        for head in HEADS:
            subspace = cut[name, head]
            assert subspace.rank == max(getattr(subspace.controls, kind), 1)


def test_a_contrast_that_is_nothing_at_a_head_says_so_and_leaves_the_others_alone(scope, task, fit):
    """In the first layer a box's key does not know its word: the copy's key is the same one, and lexical is zero."""
    found = fit["lexical", "L0H1"]
    assert float(found.S.max()) < 1e-6 < float(fit["lexical", "L1H3"].S.max())
    assert (found.rank, found.controls.energy_rank, found.controls.verdict) == (1, 0, "not above null")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"contrasts": ["lexicl"]}, "no contrast 'lexicl'"),
        ({"contrasts": ["box", "box"]}, "'box' is named twice"),
        ({"contrasts": []}, "no contrast was named"),
        ({"rank": 17}, "a number from 1 to 16, but got 17"),
        ({"rank": {"ordr": 1}}, "rank is given for 'ordr', which is not fitted"),
        ({"center": {"ordr": "query"}}, "center is given for 'ordr'"),
        ({"heads": "L9H0"}, "L9H0 does not exist"),
    ],
)
def test_bad_options_are_one_sentence(scope, task, options, says):
    with pytest.raises(BadInput, match=says):
        decompose(scope, task, **{"heads": HEADS, "n": 4, **options})


def test_the_null_does_not_depend_on_batches(scope, task):
    """Queries were shuffled within a batch: batches of one prompt left nothing to compare with, said as "mean only"."""
    found = [decompose(scope, task, HEADS, 40, batch_size=size, replicates=199).table() for size in (1, 32)]
    for one, other in zip(*found, strict=True):
        assert one["verdict"] == other["verdict"]
        assert one["p_interaction"] == pytest.approx(other["p_interaction"], abs=0.011)


def state_of(path: Path) -> dict[str, object]:
    """Every number of a fit folder, bit for bit, and what it says of itself."""
    states = {file.name: read_tensors(file, "sums") for file in path.glob("*.safetensors")}
    numbers = {
        (file, name): t.numpy().tobytes() for file, (tensors, _) in states.items() for name, t in tensors.items()
    }
    return {**numbers, **{file: manifest for file, (_, manifest) in states.items()}}


def test_parts_with_fewer_keys_are_filled_up_with_ignored_ones():
    def rows(b, slots, first):
        return torch.randn(b, 1, 3), torch.randn(b, 1, slots, 3), torch.ones(b, slots).long(), torch.arange(b) + first

    parts = rows(2, 4, 0), rows(3, 2, 2)
    q, k, labels, prompts = whole_rows(parts)
    assert (q.shape, k.shape, prompts.tolist()) == ((5, 1, 3), (5, 1, 4, 3), [0, 1, 2, 3, 4])
    assert labels.tolist() == [[1, 1, 1, 1]] * 2 + [[1, 1, 0, 0]] * 3
    assert torch.equal(k[2:, :, :2], parts[1][1])


def test_a_batch_that_memory_cut_into_parts_still_counts_as_one(scope, task, tmp_path, monkeypatch):
    """The number of batches is what a run goes on from; parts counted as batches would make it skip some."""
    plain = decompose(scope, task, "L1H3", 20, contrasts=["order"], batch_size=4, replicates=3, out=tmp_path / "plain")
    capture, calls = Scope.capture_inputs, []

    def small_memory(self, encoded, **kwargs):
        calls.append(len(encoded.example))
        if len(encoded.example) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return capture(self, encoded, **kwargs)

    monkeypatch.setattr(Scope, "capture_inputs", small_memory)
    options = {"contrasts": ["order"], "batch_size": 4, "replicates": 3, "out": tmp_path / "cut"}
    cut = decompose(scope, task, "L1H3", 20, **options)
    assert len(calls) == 13  # each of three pieces finds that 4 do not fit; besides, ten times 2
    mine, theirs = cut.sums["order"].tensors(), plain.sums["order"].tensors()
    assert "flips/order" in mine
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-5 * float(theirs[name].abs().max()))
    assert cut.sums["order"].cut == 5
    assert (cut.provenance["asked"]["cut"], "cut" in plain.provenance["asked"]) == ({"order": 5}, False)


def test_a_folder_of_another_job_is_refused(scope, task, tmp_path):
    out = tmp_path / "fit"
    decompose(scope, task, [Head(0, 0)], 8, out=out, contrasts=["order"])
    for other, says in (
        ({"n": 9}, "n differ"),
        ({"heads": [Head(0, 1)]}, "heads differ"),
        ({"contrasts": ["box"]}, "contrasts differ"),
        ({"batch_size": 4}, "batch_size differ"),
        ({"space": "query_frame"}, "space differ"),
        ({"task": tasks.binding(5)}, "asked differ"),
        ({"task": tasks.binding(4, seed=1)}, "task_seed differ"),
    ):
        job = {"scope": scope, "task": task, "heads": [Head(0, 0)], "n": 8, "contrasts": ["order"], **other}
        with pytest.raises(BadInput, match=f"holds another fit .*{says}"):
            decompose(**job, out=out)
    twin = Scope.from_model(tiny_model("llama", seed=1), scope.tokenizer, check=False)
    with pytest.raises(BadInput, match="other weights"):
        load(out, twin)


@pytest.mark.parametrize("options", [{}, {"rank": {"order": 2, "lexical": "null"}, "center": {"order": "none"}}])
def test_what_decompose_writes_load_reads(scope, task, tmp_path, options):
    """The fit it returned, to the bit; and `write` writes such a folder of a fit that was made without one."""
    job = {"contrasts": ["order", "lexical"], "batch_size": 4, "replicates": 9, "progress": False, **options}
    kept = decompose(scope, task, "L0H1,L1H2", 16, **job, out=tmp_path / "out")
    alone = decompose(scope, task, "L0H1,L1H2", 16, **job)
    assert alone.write(tmp_path / "written") == tmp_path / "written"
    for fit, folder in ((kept, "out"), (alone, "written")):
        read = load(tmp_path / folder, scope)
        assert list(read) == list(fit)
        assert (read.tables, read.answer, read.seconds, read.seed) == (fit.tables, fit.answer, fit.seconds, fit.seed)
        assert read.provenance == json.loads(json.dumps(fit.provenance))
        for which in fit:
            assert read[which].rank == fit[which].rank
            for part in ("U", "S", "V", "cov_k"):
                assert torch.equal(getattr(read[which], part), getattr(fit[which], part))
        for name, sums in fit.sums.items():
            assert read.sums[name].manifest() == json.loads(json.dumps(sums.manifest()))
            assert all(torch.equal(x, read.sums[name].tensors()[part]) for part, x in sums.tensors().items())
        assert load(tmp_path / folder).to_json() == fit.to_json()
    assert read_job(tmp_path / "out") == read_job(tmp_path / "written")
    again = decompose(scope, task, "L0H1,L1H2", 16, **job, out=tmp_path / "written")
    assert again.tables == kept.tables
    with pytest.raises(BadInput, match="holds no sums"):
        dataclasses.replace(kept, sums={}).write(tmp_path / "empty")
    Result("toy", {}).write(tmp_path / "toy")
    with pytest.raises(BadInput, match="is not a folder that decompose wrote"):
        load(tmp_path / "toy", scope)


def test_delta_is_the_matrix_whose_svd_the_subspace_is(task, fit):
    for which in fit:
        delta, found = fit.delta(*which), fit[which]
        torch.testing.assert_close(delta @ found.V, found.U * found.S)
        moments = fit.sums[which[0]].moments
        direct = moments.delta(which[0], task.contrasts[which[0]].center)[moments.heads.index(which[1])]
        torch.testing.assert_close(delta, direct.to(delta), rtol=1e-5, atol=1e-5 * float(direct.abs().max()))
    with pytest.raises(BadInput, match="nothing was fitted for"):
        fit.delta("nothing", "L0H0")


def test_folders_that_are_no_fit_are_left_alone(scope, task, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match="holds other files than a run"):
        decompose(scope, task, [Head(0, 0)], 4, out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    for content in ("", "[]", "{}", '{"schema": 1}', "\0"):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "manifest.json").write_text(content)
        with pytest.raises(BadInput, match="is damaged"):
            load(broken, scope)
    (broken / "manifest.json").write_text('{"schema": 99}')
    with pytest.raises(BadInput, match="newer qkscope"):
        load(broken, scope)


def test_a_contrast_may_have_any_name_and_still_stays_in_its_folder(scope, tmp_path):
    lines = [{"prompt": f"hat : A cat : B {word} :", "use": "fit", "keys": [
        {"text": "A", "labels": {"../up": 1, "a b": 1, "a_b": -1}},
        {"text": "B", "labels": {"../up": -1, "a b": -1, "a_b": 1}}]} for word in OBJECTS[:6]]  # fmt: skip
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "deep" / "fit"
    fit = decompose(scope, tasks.from_jsonl(file), [Head(0, 0)], 6, out=out)
    assert fit.contrasts == ["../up", "a b", "a_b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "mine.jsonl"]
    assert len(list(out.glob("*.safetensors"))) == 3


# ---------------------------------------------------------------- swap


def test_the_table_has_one_row_per_head_and_condition(scope, task, fit):
    table = swap(scope, task.test(12), fit).table()
    names = [
        f"{kind}{name}" for kind in ("", "random_", "key_pca_", "cov_qk_") for name in ("order", "lexical", "both")
    ]
    wanted = {*names, "order_oblique", "lexical_oblique", "both_summed", "sham_both"}
    assert {(row["head"], row["condition"]) for row in table} == {(head, name) for head in HEADS for name in wanted}
    assert len(table) == 3 * len(wanted)
    for row in table:
        assert row["n"] == 12
        assert row["draws"] == (20 if row["condition"].startswith("random_") else 1)
        assert (row["condition_number"] is not None) == row["condition"].endswith("_oblique")
    for head in HEADS:
        ranks = {row["condition"]: row["rank"] for row in table if row["head"] == head}
        for name in ("order", "lexical", "both"):
            assert len({ranks[f"{kind}{name}"] for kind in ("", "random_", "key_pca_", "cov_qk_")}) == 1
        assert ranks["order"] == fit["order", head].rank
        before = {(row["orig_before"], row["target_before"]) for row in table if row["head"] == head}
        assert len(before) == 1, "one draw of pairs serves every condition"


def test_every_condition_equals_a_patched_forward(scope, task, fit):
    """The closed form against keys really written into the model, head by head, in batches of another size."""
    units = task.test(10)
    table = {(row["head"], row["condition"]): row for row in swap(scope, units, fit, draws=1, batch_size=3).table()}
    every, _ = Features.of(scope, fit, HEADS, ["order", "lexical"]).conditions(draws=1, seed=0)
    every = {condition.name: projector for condition, projector in every.items()}
    rows = list(pairs_of(units))
    encoded = scope.encode([example for example, *_ in rows])
    orig, target = (torch.tensor([row[i] for row in rows]) for i in (1, 2))
    before = scope.capture_inputs(encoded, heads=HEADS)
    index = torch.arange(len(rows))
    at = torch.stack([before.key_positions[index, orig], before.key_positions[index, target]], dim=1)
    for name, projector in every.items():
        for i, head in enumerate(HEADS):
            own = type(projector)(*(f[0, i] if f.ndim == 4 else f[i] for f in projector))
            keys = before.k[:, before.kv_of_head[i]]
            pair = torch.stack(swapped_keys(keys[index, orig], keys[index, target], own), dim=1)
            after = scope.capture_inputs(encoded, heads=[head], edits=[Edit.keys(head, at, pair)]).attention()[:, 0]
            assert float(after[index, orig].mean()) == pytest.approx(table[head, name]["orig_after"], abs=1e-5)
            assert float(after[index, target].mean()) == pytest.approx(table[head, name]["target_after"], abs=1e-5)


def pairs_of(units, seed: int = 0) -> Iterator[tuple[Example, int, int]]:
    """The pairs that a swap draws, drawn again: of the keys that may be, the one of the largest number."""
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


def test_a_sham_touches_neither_of_the_two_keys(scope, task, fit):
    for row in swap(scope, task.test(12), fit).table():
        if row["condition"].startswith("sham_"):
            assert row["orig_after"] / row["target_after"] == pytest.approx(
                row["orig_before"] / row["target_before"], rel=0.3
            )
    two = tasks.binding(3)  # the right box, the target, and one more: nothing is left to sham with
    small = decompose(scope, two, "L0H0", 20, contrasts=["order", "lexical"], replicates=3)
    assert not any(row["condition"].startswith("sham_") for row in swap(scope, two.test(4), small).table())


def test_ranks_that_fill_the_head_are_vacuous_and_have_no_oblique_swap(scope, task):
    full = {"order": 16, "lexical": 2}
    fit = decompose(scope, task, ["L0H1", "L1H0"], 20, contrasts=["order", "lexical"], rank=full, replicates=3)
    table = swap(scope, task.test(8), fit).table()
    vacuous = {row["condition"]: row["vacuous"] for row in table}
    assert vacuous["order"]
    assert vacuous["both"]
    assert not vacuous["lexical"]
    assert not any(name.endswith("_oblique") for name in vacuous), "dependent subspaces have no oblique projectors"
    for row in table:
        if row["condition"] in ("order", "random_order", "key_pca_order"):  # the keys change places
            assert row["orig_after"] + row["target_after"] == pytest.approx(row["orig_before"] + row["target_before"])
            assert row["orig_after"] == pytest.approx(row["target_before"], abs=1e-6)


def test_one_head_without_oblique_swaps_does_not_cost_the_others_theirs(scope, task, fit):
    wide = dict(fit.subspaces)
    wide["order", Head(0, 1)] = wide["order", Head(0, 1)].cut(16)
    table = swap(scope, task.test(8), dataclasses.replace(fit, subspaces=wide)).table()
    assert {row["head"] for row in table if row["condition"].endswith("_oblique")} == {"L1H3", "L1H0"}


def test_heads_of_different_rank_swap_as_they_would_alone(scope, task, fit):
    ranks = {head: 1 + 3 * i for i, head in enumerate(fit.heads)}
    subspaces = {(name, head): s.cut(ranks[head]) for (name, head), s in fit.subspaces.items()}
    mixed = dataclasses.replace(fit, subspaces=subspaces)
    units = task.test(8)
    together = {(row["head"], row["condition"]): row for row in swap(scope, units, mixed, draws=2).table()}
    for head in HEADS:
        for row in swap(scope, units, mixed, heads=head, draws=2).table():
            if row["condition"].startswith("random_"):
                continue  # random subspaces are seeded by the head's place in the list
            for name in ("rank", "orig_after", "target_after", "flip"):
                assert row[name] == pytest.approx(together[head, row["condition"]][name], abs=1e-6)


def test_the_curve_ends_where_everything_is_swapped(scope, task, fit):
    curve = swap(scope, task.test(8), fit, sizes=[1, 16]).tables["curve"]
    assert {row["method"] for row in curve} == {"order", "lexical", "key_pca", "cov_qk", "random"}
    for head in HEADS:
        ends = [row["orig_after"] for row in curve if row["head"] == head and row["k"] == 16]
        assert ends == pytest.approx([ends[0]] * 5, abs=1e-6)


def test_a_filter_list_swaps_within_the_category_as_its_sham(scope):
    words = {name: OBJECTS[i * 20 : i * 20 + 20] for i, name in enumerate(("red", "blue", "green"))}
    task = tasks.filter(3, items=2, words=words)
    fit = decompose(scope, task, "L0H0", 12, replicates=3)
    assert default_features(fit.contrasts) == ["red", "blue", "green"]
    names = {row["condition"] for row in swap(scope, task.test(6), fit).table()}
    assert {"red", "all", "random_all", "sham_all", "green_oblique"} <= names
    assert swap_downstream(scope, task.test(6), fit).tables["downstream"][0]["n"] == 6


def numbers(rows, **named):
    """Rows of a swap table without the names of what was swapped, as text: NaN is NaN."""
    own = [row for row in rows if all(row[column] == value for column, value in named.items())]
    return [str({name: row[name] for name in row if name not in ("condition", "feature", "kind")}) for row in own]


def test_a_subspace_of_ones_own_is_swapped_as_a_feature_is_beside_the_same_controls(scope, task, fit):
    units, own = task.test(8), {head: fit["order", head] for head in HEADS}
    fitted = swap(scope, units, fit, features=["order"]).table()
    mine = swap(scope, units, fit, features=[], subspaces={"mine": own}).table()
    for kind in ("feature", "random", "sham"):
        assert numbers(mine, feature="mine", kind=kind) == numbers(fitted, feature="order", kind=kind)
    assert {row["kind"] for row in mine} == {"feature", "random", "key_pca", "cov_qk", "sham"}
    beside = swap(scope, units, fit, features=["lexical"], subspaces={"mine": own}).table()
    assert numbers(beside, kind="feature") == numbers(
        [{**row, "feature": "mine" if row["feature"] == "order" else row["feature"]}
         for row in swap(scope, units, fit, features=["lexical", "order"]).table()], kind="feature",
    )  # fmt: skip


def test_without_a_fit_a_basis_is_swapped_and_the_controls_that_need_one_are_left_out(scope, task):
    basis = 3 * torch.eye(16)[:, :2] + 1  # any independent columns
    swaps = swap(scope, task.test(8), heads="L1H3", subspaces={"mine": basis}, sizes=[1, 2])
    assert [row["condition"] for row in swaps.table()] == ["mine", "random_mine", "sham_mine"]
    assert "Key PCA and Cov_q Cov_k need a fit" in swaps.answer
    assert {row["method"] for row in swaps.tables["curve"]} == {"mine", "random"}
    span = torch.linalg.qr(basis)[0]
    again = swap(scope, task.test(8), subspaces={"mine": {"L1H3": Subspace(span, torch.ones(2), span, 2)}})
    assert again.table()[0]["shift"] == pytest.approx(swaps.table()[0]["shift"], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "there is nothing to swap"),
        ({"subspaces": {"mine": torch.eye(16)[:, :2]}}, "no head was named"),
        ({"subspaces": {"mine": torch.ones(16, 2)}, "heads": "L0H0"}, "independent columns"),
        ({"subspaces": {"mine": torch.eye(8)[:, :2]}, "heads": "L0H0"}, "has 8 dimensions at L0H0"),
        ({"subspaces": {"mine": {"L0H1": torch.eye(16)[:, :2]}}, "heads": "L0H0"}, "is not given at L0H0"),
        ({"subspaces": {"mine": torch.eye(16)[:, :2]}, "heads": "L9H0"}, "L9H0"),
        ({"subspaces": {"mine": torch.full((16, 2), torch.nan)}, "heads": "L0H0"}, "independent columns"),
        (
            {"subspaces": {"mine": torch.eye(16)[:, :2]}, "heads": "L0H0", "features": ["x"]},
            "nothing was fitted for 'x'",
        ),
    ],
)
def test_bad_subspaces_are_one_sentence(scope, task, options, says):
    with pytest.raises(BadInput, match=says):
        swap(scope, task.test(2), **options)


def test_targets_are_the_keys_one_names(scope, task, fit):
    units = task.test(8)

    def last_wrong(example: Example) -> int:
        return max(i for i, key in enumerate(example.keys) if key.label(ANSWER) < 0)

    slots = [last_wrong(example) for unit in units for example in unit]
    by_function, by_slot = (swap(scope, units, fit, targets=targets).table() for targets in (last_wrong, slots))
    assert numbers(by_function) == numbers(by_slot)
    pairs = draw_pairs(units, targets=last_wrong)
    assert pairs.target.tolist() == [last_wrong(example) for example in pairs.examples]
    assert torch.equal(pairs.orig, draw_pairs(units).orig)
    rows = capture_rows(scope, units, fit, [Head.parse(HEADS[0])], pairs).rows
    on_target = rows.attention()[torch.arange(len(rows)), 0, pairs.target]
    assert by_slot[0]["target_before"] == pytest.approx(float(on_target.mean()), abs=1e-6)
    right = [next(i for i, key in enumerate(unit[0].keys) if key.label(ANSWER) > 0) for unit in units]
    assert draw_pairs(units, targets=lambda e: torch.tensor(last_wrong(e))).target.tolist() == pairs.target.tolist()
    for targets, says in (
        (slots[1:], "each of 8 prompts"),
        ([9] * 8, "from 0 to 3"),
        (right, "not a right key"),
    ):
        with pytest.raises(BadInput, match=says):
            swap(scope, units, fit, targets=targets)


def test_no_feature_is_taken_for_all_of_them_together(scope, task, fit):
    own = {"both together": fit["box", "L1H3"].cut(1), "both": fit["order", "L1H3"].cut(2)}
    rows = {row["condition"]: row for row in swap(scope, task.test(4), fit, "L1H3", features=[], subspaces=own).table()}
    assert rows["both together"]["rank"] == 1
    assert rows["both together together"]["rank"] == 3
    with pytest.raises(BadInput, match="give it another name"):
        swap(scope, task.test(4), fit, "L1H3", features=["order"], subspaces={"order": fit["order", "L1H3"]})


def test_a_fit_is_written_with_the_file_it_was_made_from(scope, tmp_path):
    """Also where the file has changed or gone since: the folder it was read from keeps a copy."""
    file = tmp_path / "mine.jsonl"
    lines = []
    for i, word in enumerate(OBJECTS[:30]):
        keys = [{"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]
        lines.append(json.dumps({"prompt": f"{word} : A hat : B {word} :", "keys": keys, "group": i // 2}))
    file.write_text("\n".join(lines))
    own = tasks.from_jsonl(file)
    alone = decompose(scope, own, "L1H3", 16, replicates=9, progress=False)
    decompose(scope, own, "L1H3", 16, replicates=9, progress=False, out=tmp_path / "kept")
    file.write_text("\n".join(lines[:-2]))
    with pytest.raises(BadInput, match="has changed since"):
        alone.write(tmp_path / "late")
    assert not (tmp_path / "late").exists()
    read = load(tmp_path / "kept", scope)
    read.write(tmp_path / "kept")
    file.unlink()
    read.write(tmp_path / "copy")
    for folder in ("kept", "copy"):
        assert load(tmp_path / folder, scope).table() == alone.table()


def test_features_may_be_called_as_rows_of_ours_are(scope, task, fit):
    own = {name: fit["box", "L1H3"] for name in ("both", "random_order", "random")}
    for names in (["both"], ["random_order"], ["random"]):
        swaps = swap(scope, task.test(4), fit, "L1H3", features=["order"], sizes=[1],
                     subspaces={name: own[name] for name in names})  # fmt: skip
        rows, curve = swaps.table(), swaps.tables["curve"]
        assert len({(row["feature"], row["kind"]) for row in rows}) == len(rows)
        assert len({row["condition"] for row in rows}) == len(rows)
        assert len({row["method"] for row in curve}) == len(curve)
    parts = attribute(scope, "hat : A", "L1H3", {"residual": own["both"], "token": own["random"]})
    assert [row["part"] for row in parts.tables["split"][:3]] == ["'residual'", "'token'", "residual"]
    assert {row["token"] for row in parts.tables["tokens"]} & {"hat"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heads": "L0H0"}, "nothing was fitted for 'order' at L0H0"),
        ({"features": ["colour"]}, "nothing was fitted for 'colour'"),
        ({"features": []}, "features are different contrasts of order, lexical, box, but got \\[\\]"),
        ({"features": ["order", "order"]}, "features are different contrasts"),
        ({"units": []}, "there are no examples"),
        ({"units": [(Example(text="hat : A"),)]}, "needs keys labelled 'answer' 1 and -1"),
    ],
)
def test_bad_swaps_are_one_sentence(scope, task, fit, options, says):
    for verb in (swap, swap_downstream):
        with pytest.raises(BadInput, match=says):
            verb(scope, **{"units": task.test(2), "fit": fit, **options})
    with pytest.raises(BadInput, match="17 dimensions does not fit"):
        swap(scope, task.test(2), fit, sizes=[17])


def test_spaces_without_attention_cannot_be_swapped(scope, task):
    before = decompose(scope, task, "L0H0", 8, space="pre_rope", replicates=3)
    with pytest.raises(BadInput, match="pre_rope vectors do not give the model's attention"):
        swap(scope, task.test(2), before)
    frame = decompose(scope, task, "L0H0", 8, space="query_frame", replicates=3)
    assert swap(scope, task.test(2), frame).table()
    with pytest.raises(BadInput, match="a patched run writes post_rope keys"):
        swap_downstream(scope, task.test(2), frame)


# ---------------------------------------------------------------- downstream


def test_a_full_swap_downstream_is_an_exchange_of_the_two_keys(scope, task):
    full = decompose(scope, task, HEADS, 12, contrasts=["order", "lexical"], rank=16, replicates=3)
    units = task.test(9)
    row = swap_downstream(scope, units, full, batch_size=4).tables["downstream"][0]
    assert row["heads"] == ",".join(HEADS)
    fell = []
    for example, orig, target in pairs_of(units):
        encoded = scope.encode([example])
        plain = scope.capture_inputs(encoded, heads=HEADS, logits=True)
        at = plain.key_positions[:, [orig, target]]
        edits = [
            Edit.keys(head, at, plain.k[:, plain.kv_of_head[i]][:, [target, orig]]) for i, head in enumerate(HEADS)
        ]
        edited = scope.capture_inputs(encoded, heads=HEADS, logits=True, edits=edits)
        ids = encoded.inputs["input_ids"][0, plain.key_positions[0]]
        gap = [x.logits[0, ids[orig]] - x.logits[0, ids[target]] for x in (plain, edited)]
        fell.append(float(gap[0] - gap[1]))
    assert row["fell"] == pytest.approx(sum(fell) / len(fell), abs=1e-5)
    assert max(map(abs, fell)) > 1e-3


def test_an_edit_without_effect_changes_no_answer(scope, task, fit):
    """A direction in which the two keys of every prompt agree: the exchange writes back what was there."""
    units = task.test(6)
    gaps = []
    for example, orig, target in pairs_of(units):
        _, keys = one(scope, example)
        gaps.append(keys[:, target] - keys[:, orig])
    agree = torch.linalg.svd(torch.stack(gaps, dim=1), full_matrices=True).Vh.mT.flip(-1)  # 6 gaps leave 10 of 16 free
    subspaces = {
        ("order", head): Subspace(agree[i], torch.ones(16), agree[i], 4, head) for i, head in enumerate(fit.heads)
    }
    still = dataclasses.replace(fit, subspaces=subspaces)
    row = swap_downstream(scope, units, still, features=["order"]).tables["downstream"][0]
    assert row["fell"] == pytest.approx(0, abs=1e-5)
    assert row["accuracy_before"] == row["accuracy_after"]


def test_heads_one_at_a_time_have_a_row_each(scope, task, fit):
    rows = swap_downstream(scope, task.test(4), fit, together=False).tables["downstream"]
    assert [row["heads"] for row in rows if row["condition"] == "both"] == HEADS


# ---------------------------------------------------------------- attribute


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
    assert [row["logit"] for row in rows] == pytest.approx(captured.attention_logits()[0, 0].tolist(), abs=1e-4)
    shares = found.tables["summary"]
    assert sum(row["variance_share"] for row in shares) == pytest.approx(1, abs=1e-5)
    assert sum(row["reverse_order"] for row in shares) == pytest.approx(1, abs=1e-5)
    assert found.show().splitlines()[0] == found.answer


def test_a_prompt_may_be_one_token_or_have_its_query_marked_or_a_template(scope, fit):
    alone = attribute(scope, "hat", "L1H3", fit)
    assert [row["attention"] for row in alone.tables["tokens"]] == [pytest.approx(1)]
    marked = Draft().write("hat: A jam").query(": ").write("B cat").example()
    early = attribute(scope, marked, "L1H3", fit)
    assert tokens(early) == "hat : A jam :", "what comes later is not seen"
    same = attribute(scope, "hat: A jam:", "L1H3", fit)
    assert early.tables["tokens"] == [pytest.approx(row) for row in same.tables["tokens"]]
    chat = attribute(scope, "hat: A", "L1H3", fit, chat=True)
    assert tokens(chat) == "Answer : hat : A Which"


def test_features_of_another_head_or_in_two_spaces_are_refused(scope, task, fit):
    with pytest.raises(BadInput, match="'order' belongs to L0H1, not to L1H3"):
        attribute(scope, "hat", "L1H3", {"order": fit["order", "L0H1"]})
    with pytest.raises(BadInput, match="nothing was fitted for 'order' at L0H0"):
        attribute(scope, "hat", "L0H0", fit)
    with pytest.raises(BadInput, match="no feature was given"):
        attribute(scope, "hat", "L1H3", {})
    frame = decompose(scope, task, "L1H3", 8, space="query_frame", replicates=3)
    with pytest.raises(BadInput, match="different spaces"):
        attribute(scope, "hat", "L1H3", {"a": frame["order", "L1H3"], "b": fit["order", "L1H3"]})
    own = attribute(scope, "hat: A", "L1H3", {"order": frame["order", "L1H3"]})
    assert own.provenance["asked"]["space"] == "query_frame", "features know the space they were fitted in"
    two = Draft().query("hat").write(": ").query("A").example()
    with pytest.raises(BadInput, match="explained from one query, but 2 are marked"):
        attribute(scope, two, "L1H3", fit)


# ---------------------------------------------------------------- find


def test_scores_are_those_of_the_models_own_attention(scope, model):
    """Keys labelled 0 are no candidates, however much attention they get."""
    examples = []
    for (example,) in tasks.binding(4, "sentence", filler=3).choose(6):
        keys = [Key(key.span, {ANSWER: key.label(ANSWER) if i else 0}) for i, key in enumerate(example.keys)]
        keys[1] = Key(keys[1].span, {ANSWER: 1})
        examples.append(Example(text=example.text, keys=keys))
    task = Task("mine", {}, lambda use, contrast, n: [(example,) for example in examples])
    rows = {row["head"]: row for row in find_heads(scope, task, 6, batch_size=4).top()}
    eager = Scope.load(model, device="cpu", attn="eager")
    accuracy, row_accuracy, ratio, mass = 0, 0, 0, 0
    for example in examples:
        encoded = scope.encode([example])
        with torch.no_grad():
            attention = eager.model(**encoded.inputs, output_attentions=True).attentions
        named = torch.stack(attention)[:, 0, :, -1][..., encoded.places.keys[0, 1:]].flatten(0, 1)
        right = encoded.labels[ANSWER][0, 1:] > 0
        accuracy = accuracy + right[named.argmax(-1)].double() / 6
        ratio = ratio + named[:, right].sum(-1) / named.sum(-1) / 6
        mass = mass + named.sum(-1) / 6
        whole = torch.stack(attention)[:, 0, :, -1].flatten(0, 1).argmax(-1)
        row_accuracy = row_accuracy + torch.isin(whole, encoded.places.keys[0, 1:][right]).double() / 6
    for i, head in enumerate(scope.heads()):
        row = rows[str(head)]
        assert row["accuracy"] == pytest.approx(float(accuracy[i]))
        assert row["row_accuracy"] == pytest.approx(float(row_accuracy[i]))
        assert row["ratio"] == pytest.approx(float(ratio[i]), abs=1e-5)
        assert row["mass"] == pytest.approx(float(mass[i]), abs=1e-5)
        assert (row["low"], row["high"]) == wilson(round(6 * row["accuracy"]), 6)


def test_wilsons_interval_holds_the_proportions_that_the_score_test_accepts():
    for hits, n in ((0, 10), (3, 10), (10, 10), (57, 64)):
        low, high = wilson(hits, n)
        for p in (low, high):
            if 0 < p < 1:
                assert abs(hits / n - p) / (p * (1 - p) / n) ** 0.5 == pytest.approx(1.96)
        assert low <= hits / n <= high


def test_above_an_unreachable_threshold_is_an_empty_list(scope, task):
    ranking = find_heads(scope, task, 8)
    assert ranking.above(1, by="mass") == []
    with pytest.raises(BadInput, match="at most 1"):
        ranking.above(30)
    assert len(ranking.above(0)) == 8
    with pytest.raises(BadInput, match="'accuracy', 'row_accuracy', 'ratio' or 'mass', but got 'fame'"):
        ranking.top("fame")


def test_words_that_share_a_token_are_refused_with_the_tokens(scope):
    task = tasks.binding(2, boxes=["A-A", "B-A", "C-A", "D-A"])
    assert find_heads(scope, task, 2).tables["heads"], "several tokens a box are no problem: the last one counts"
    glued = Example(text="hatA", keys=[Key((0, 3), {ANSWER: 1}), Key((3, 4), {ANSWER: -1})])
    with pytest.raises(BadInput, match=r"two keys share token 0, .*the tokens are"):
        find_heads(scope, Task("mine", {}, lambda *_: [(glued,)]), 1)


# ---------------------------------------------------------------- the shell


def shell(*arguments: object, capsys, monkeypatch) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["qkscope", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def qkscope(capsys, monkeypatch):
    return lambda *arguments: shell(*arguments, capsys=capsys, monkeypatch=monkeypatch)


@pytest.fixture(scope="module")
def fitted(scope, model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("fits") / "fit"
    decompose(scope, tasks.binding(3), [Head(1, 3), Head(0, 1)], 16, out=out, contrasts=["order", "lexical"])
    return out


NOWHERE = ["--model", "/nowhere/model"]  # bad input must be said before this is


def test_a_fit_in_pre_rope_cannot_be_swapped_or_explained(qkscope, fitted, tmp_path):
    manifest = json.loads((fitted / "manifest.json").read_text())
    for space, arguments, says in (
        ("pre_rope", ["swap"], "do not give the model's attention"),
        ("pre_rope", ["why", "hat:", "--fit"], "do not give the model's attention"),
        ("query_frame", ["swap", "--downstream"], "writes post_rope keys"),
    ):
        asked = {**manifest["asked"], "space": space, "model": "/nowhere/model"}
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "asked": asked}))
        code, _, err = qkscope(*arguments, tmp_path)
        assert code == 2
        assert says in err


def test_the_verbs_run_one_after_the_other_and_print_one_json_each(qkscope, model, tmp_path):
    out = tmp_path / "fit"
    said = {}
    for name, arguments in {
        "heads": ["heads", "binding", "--size", 3, "--n", 8, "--model", model],
        "decompose": [
            "decompose",
            "binding",
            "--size",
            3,
            "--n",
            16,
            "--model",
            model,
            "--heads",
            "L1H3",
            "--out",
            out,
        ],
        "swap": ["swap", out, "--n", 8, "--downstream"],
        "why": ["why", "hat: O\\njam:", "--fit", out, "--split", "average"],
    }.items():
        code, text, err = qkscope(*arguments, "--json")
        assert code == 0, err
        said[name] = json.loads(text)
        code, text, err = qkscope(*arguments)
        assert (code, said[name]["answer"] in text) == (0, True), err
    assert set(said["swap"]["tables"]) == {"swap", "paired", "curve", "downstream", "clouds"}
    assert [row["token"] for row in said["why"]["tables"]["attention"]] == ["hat", ":", "O", "jam", ":"]
    assert {row["by"] for row in said["why"]["tables"]["parts"]} == {"writers", "singular", "features"}
    assert {row["k"] for row in said["swap"]["tables"]["curve"]} == {1, 2, 4, 8, 12}
    page = (Path(out) / "report.html").read_text()  # the folder's page tells the fit and the swap
    assert all(f'class="block {kind}"' in page for kind in ("spectra", "swaps", "cloud"))


def test_no_head_above_the_threshold_is_an_answer(qkscope, model):
    code, out, _ = qkscope("heads", "binding", "--size", 12, "--n", 24, "--threshold", "1", "--model", model)
    assert code == 0
    assert out.startswith("No head reaches 100%: L")
    assert "chance 8%" in out


@pytest.mark.parametrize(
    ("task", "more", "then"),
    [
        ("binding", [], "heads binding --form sentence"),
        ("binding", ["--form", "sentence", "--size", 12], "heads binding --size 12"),
        ("induction", [], "atlas"),
    ],
)
def test_where_no_head_does_it_the_answer_says_so_and_none_is_decomposed(qkscope, tmp_path, task, more, then):
    untrained = ["--model", "nano:mixed@0"]
    code, out, err = qkscope("heads", task, "--n", 24, *more, *untrained, "--out", tmp_path / "run")
    assert code == 0, err
    assert out.startswith("No head reaches 30%: L")
    assert out.count("No head reaches") == 1
    assert "No head reaches 30%: L" in (tmp_path / "run" / "report.html").read_text()
    said = out.partition("Next: qkscope ")[2].split()
    assert set(said) == {*then.split(), *untrained}


def test_a_file_of_your_own_goes_through_every_verb_and_a_changed_one_is_refused(
    qkscope, model, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    lines = []
    for i, word in enumerate(OBJECTS[:30]):
        keys = [{"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]
        lines.append({"prompt": f"{word} : A hat : B {word} :", "keys": keys, "group": i // 2})
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, out, err = qkscope("heads", "mine.jsonl", "--model", model, "--json")
    assert code == 0, err
    assert json.loads(out)["tables"]["heads"][0]["chance"] == 0.5
    assert "mine.jsonl holds 5 examples to choose, fewer than 256: taking all." in caplog.text
    for arguments in (
        ["decompose", "mine.jsonl", "--heads", "L1H3,L0H1", "--out", "fit", "--model", model, "--center", "query"],
        ["swap", "fit", "--downstream"],
        ["why", "hat : A cat : B hat :", "--fit", "fit"],
    ):
        code, out, err = qkscope(*arguments, "--json")
        assert code == 0, err
        assert json.loads(out)["tables"]
    code, _, err = qkscope("decompose", "mine.jsonl", "--heads", "L1H3", "--out", "fit2", "--size", "4")
    assert (code, "--size is not for mine.jsonl: Entities (binding)" in err) == (2, True)
    code, before, _ = qkscope("swap", "fit", "--json")
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, lines[:-2])))
    code, _, err = qkscope(
        "decompose", "mine.jsonl", "--heads", "L1H3,L0H1", "--out", "fit", "--center", "query", *NOWHERE
    )
    assert (code, "fit holds another fit (asked differ)" in err) == (2, True)
    os.remove("mine.jsonl")  # the folder keeps what it was made from
    code, after, err = qkscope("swap", "fit", "--json")
    assert code == 0, err
    assert json.loads(after)["tables"] == json.loads(before)["tables"]
    Path("fit/mine.jsonl").write_text("\n".join(map(json.dumps, lines[:-2])))
    for arguments in (["swap", "fit"], ["why", "hat :", "--fit", "fit"]):
        code, out, err = qkscope(*arguments)
        assert (code, out) == (2, "")
        assert "fit/mine.jsonl has changed since fit was made from it: run decompose again" in err
    os.remove("fit/mine.jsonl")
    code, _, err = qkscope("swap", "fit")
    assert (code, "fit/mine.jsonl is missing, the copy of the task" in err) == (2, True)


def test_stdout_is_json_alone_in_a_process_of_its_own(model, fitted):
    done = subprocess.run([sys.executable, "-m", "qkscope", "swap", str(fitted), "--n", "4", "--downstream", "--json"],
                          capture_output=True, text=True, env=ALONE)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["experiment"] == "swap"


def test_sums_of_another_kind_are_refused(scope, task, tmp_path):
    Moments(["L0H0"], ["order"], 16).save(tmp_path / sums_file("order"))
    with pytest.raises(BadInput, match=r"holds other files than a run, order\.safetensors"):
        decompose(scope, task, "L0H0", 4, contrasts=["order"], out=tmp_path, replicates=3)
