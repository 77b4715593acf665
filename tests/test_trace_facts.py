"""What must hold of every trace: parts sum, edits touch what they say, and the unedited row is the model's own."""

from __future__ import annotations

import json

import pytest
import torch

import qkscope as qk
from qkscope.analyses.trace.edges import EdgeTest, choose_writers
from qkscope.analyses.trace.prompt import Probe
from qkscope.analyses.trace.rows import Pass
from qkscope.errors import BadInput
from qkscope.heads import Head, Writer
from qkscope.linear.reader import Reader
from qkscope.maths.subspace import Subspace
from qkscope.maths.writers import METRICS, Edge, edge_masks

COLUMNS = [
    "head", "side", "kind", "by", "replaced", "norms", "k", "attention", "first", "among", "accuracy", "logit_kept",
    "overshoots", "low", "high", "n", "draws",
]  # fmt: skip
N = 12


@pytest.fixture(scope="module")
def nano():
    return qk.Scope.load("nano:mixed")


def traced(scope, task, head, **options):
    return qk.trace(scope, task, head, N, **{"whole": False, "draws": 3, "progress": False, **options})


def sums_to_its_logit(found):
    for check in found.tables["check"]:
        assert check["sum_error"] < 1e-5
        for side in ("query", "key"):
            rows = [row for row in found.tables["writers"] if (row["head"], row["side"]) == (check["head"], side)]
            largest = max(abs(row["value"]) for row in rows)
            assert sum(row["value"] for row in rows) == pytest.approx(check["logit"], abs=1e-5 * largest)
            assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-5 * largest / abs(check["logit"]))
            assert [abs(row["value"]) for row in rows] == sorted((abs(row["value"]) for row in rows), reverse=True)
            assert all(row["low"] <= row["value"] <= row["high"] for row in rows)
    return True


# many right keys in filter
@pytest.mark.parametrize("task", [qk.tasks.induction(), qk.tasks.filter(), qk.tasks.ioi(), qk.tasks.binding(4)])
def test_writers_of_each_side_sum_to_the_logit(nano, task):
    found = traced(nano, task, ["L1H0", "L2H3"])
    assert [row["head"] for row in found.tables["check"]] == ["L1H0", "L2H3"]
    assert sums_to_its_logit(found)


def test_they_do_in_a_model_of_other_weights(scope):
    assert sums_to_its_logit(traced(scope, qk.tasks.binding(4), "L1H2"))


@pytest.mark.parametrize("prompt", ["hat : O jam : Z jam :", "hat : O jam"])
def test_pairs_of_a_prompt_sum_to_its_writers(nano, prompt):
    one = Probe(nano, prompt).head("L2H1")
    pairs, writers = one.pairs[0], {side: values[0] for side, values in one.marginals.items()}
    torch.testing.assert_close(pairs.sum(1), writers["query"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pairs.sum(0), writers["key"], atol=1e-5, rtol=1e-4)
    assert float(pairs.sum()) == pytest.approx(one.total, abs=1e-4)
    row = one.token_rows()
    assert sum(token["attention"] for token in row) == pytest.approx(1, abs=1e-5)


def test_a_feature_and_all_that_is_not_in_it_sum_to_the_whole(nano):
    head, task = Head(1, 0), qk.tasks.induction()
    basis = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(0)))[0]
    inside = Subspace(basis, torch.ones(24), basis, 5, head)
    outside = Subspace(basis.flip(1), torch.ones(24), basis.flip(1), 19, head)
    found = [traced(nano, task, head, feature=one) for one in (None, inside, outside)]
    for side in ("query", "key"):
        whole, part, rest = (
            {row["writer"]: row["value"] for row in one.tables["writers"] if row["side"] == side} for one in found
        )
        for writer, value in whole.items():
            assert part[writer] + rest[writer] == pytest.approx(value, abs=1e-4)
    whole, part, rest = (one.tables["check"][0] for one in found)
    assert part["logit"] + rest["logit"] == pytest.approx(whole["logit"], abs=1e-4)
    assert part["attention"] == pytest.approx(whole["attention"], abs=1e-6)  # the head itself is as it was
    prompt = "hat : O jam : Z jam :"
    whole, part, rest = (
        qk.trace(nano, prompt, head, key=3, feature=one).tables["check"][0] for one in (None, inside, outside)
    )
    assert part["logit"] + rest["logit"] == pytest.approx(whole["logit"], abs=1e-4)


# ------------------------------------------------------------------ edges


@pytest.fixture(scope="module")
def measured(nano):
    """An edge test of L1H0 on induction, a batch of its rows, and what it measures on each prompt."""
    task, head = qk.tasks.induction(), Head(1, 0)
    how = Pass(Reader(nano, [head]), progress=False)
    chosen = choose_writers(how, task.choose(N))[head]
    _, (rows,) = how.rows(task.test(N), range(N))
    test = EdgeTest(head, rows.writers, chosen, 0, 3)
    return test, rows, test.measure(rows, torch.arange(N))[0]


def test_every_condition_has_its_row(nano):
    found = traced(nano, qk.tasks.induction(), "L1H0", draws=4)
    rows = found.tables["edges"]
    assert [list(row) for row in rows] == [COLUMNS] * len(rows)
    cells = {(side, kind, k) for side in ("key", "query", "both") for kind in ("cut", "keep") for k in (1, 2, 3, 5)}
    ways = [(by, "mean", "held") for by in ("share", "signed", "norm", "variance", "patching", "path", "random")]
    ways += [("share", "resample", "held"), ("share", "mean", "live")]
    for by, replaced, norms in ways:
        own = [row for row in rows if (row["by"], row["replaced"], row["norms"]) == (by, replaced, norms)]
        assert len(own) == len(cells)
        assert {(row["side"], row["kind"], row["k"]) for row in own} == cells
        assert {row["draws"] for row in own} == {4 if by == "random" else 1}
    assert len(rows) == len(ways) * len(cells)
    for row in rows:
        assert row["overshoots"] == (row["logit_kept"] > 1.1)
        assert row["low"] <= row["accuracy"] <= row["high"]
        assert row["n"] == N


def test_ten_writers_are_cut_where_there_are_more(nano):
    found = traced(nano, qk.tasks.induction(), "L2H0")
    assert {row["k"] for row in found.tables["edges"]} == {1, 2, 3, 5, 10}


def test_the_unedited_row_is_the_models_own_attention(nano):
    task, head = qk.tasks.ioi(), Head(2, 1)
    check = traced(nano, task, head).tables["check"][0]
    nano.model.set_attn_implementation("eager")
    found = []
    try:
        for (example,) in task.test(N):
            encoded = nano.encode([example])
            with torch.no_grad():
                run = nano.model(**encoded.inputs, output_attentions=True)
            row = run.attentions[head.layer][0, head.index, int(encoded.places.query[0])]
            named, right = row[encoded.places.keys[0]], encoded.labels["answer"][0] > 0
            best = bool(right[named.argmax()])
            found.append([float(named[right].sum()), float(row[0]), float(named[right].sum() / named.sum()), best])
    finally:
        nano.model.set_attn_implementation("sdpa")
    means = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
    for name, value in zip(METRICS, means, strict=False):
        assert check[name] == pytest.approx(value, abs=1e-5), name


def rest_of(values):
    """The first token's share of what is left to tokens that are not named: it stays as long as their logits do."""
    attention, first, among = (values[..., METRICS.index(name)] for name in ("attention", "first", "among"))
    return first / (1 - attention / among)


def test_edits_of_keys_leave_the_first_token_and_those_not_named_as_they_were(measured):
    test, _, values = measured
    before, after = rest_of(values["whole"].double()), rest_of(values["edges"].double())
    moved = {side: [] for side in ("key", "query", "both")}
    for i, cell in enumerate(test.cells):
        if cell.by != "random":  # a mean over draws
            moved[cell.side].append(float((after[:, i] - before).abs().max() / before.max()))
    assert max(moved["key"]) < 1e-2  # of a small difference from 1
    assert max(moved["query"]) > 0.2


def test_all_cut_is_none_kept_and_all_kept_is_none_cut(measured):
    test, rows, values = measured
    edges = rows.edges(test.instead(rows, None))
    writers = len(test.writers) - 1
    conditions = [Edge("both", "cut", "share", writers), Edge("both", "keep", "share", 0),
                  Edge("both", "cut", "share", 0), Edge("both", "keep", "share", writers)]  # fmt: skip
    masks = edge_masks(conditions, test.chosen.scores, [Writer(0, "head", (0,))] * writers)
    all_cut, none_kept, none_cut, all_kept = edges.replaced(*masks)
    assert torch.equal(all_cut, none_kept)
    assert torch.equal(none_cut, all_kept)
    torch.testing.assert_close(none_cut, values["whole"])
    accuracy = METRICS.index("accuracy")
    assert all_cut[:, accuracy].mean() < 0.5 < none_cut[:, accuracy].mean()


def test_a_part_replaced_by_itself_changes_nothing(measured):
    test, rows, values = measured
    edges = rows.edges({side: rows.stream(side) for side in ("query", "key")})
    found = edges.replaced(*(mask[:8] | True for mask in test.masks))
    torch.testing.assert_close(found, values["whole"].expand_as(found), atol=1e-4, rtol=1e-4)


def test_the_first_tokens_key_stays_even_where_it_is_named(scope, tmp_path):
    def line(use, i):
        words = ["hat", "jam", "kettle", "bell"]
        words = words[i % 4 :] + words[: i % 4]
        keys = [{"text": word, "labels": {"answer": 1 if j == i % 3 else -1}} for j, word in enumerate(words[:3])]
        return json.dumps({"prompt": f"{words[0]} {words[1]} {words[2]} : {chr(65 + i)}", "keys": keys, "use": use})

    path = tmp_path / "first.jsonl"
    path.write_text("\n".join(line(use, 2 * i + (use == "test")) for use in ("choose", "test") for i in range(6)))
    task, head = qk.tasks.from_jsonl(path), Head(1, 1)
    _, (rows,) = Pass(Reader(scope, [head])).rows(task.test(6), range(6))
    edges = rows.edges({side: torch.zeros_like(rows.stream(side)) for side in ("query", "key")})
    assert torch.equal(edges.first, rows.run.captured.key_mask.int().argmax(1))
    assert bool((edges.named == edges.first[:, None]).any())
    everything = torch.ones(1, len(rows.writers), dtype=torch.bool)
    found = edges.replaced(~everything, everything)[0]
    assert (found[:, METRICS.index("first")] < 0.9).any()
    products = torch.einsum("nd,ntd->nt", edges.rows.q[:, 0], edges.rows.k[:, 0]) * rows.scale
    logits = edges.rows.logits(products[:, None])[:, 0]
    named = (edges.named[..., None] == torch.arange(logits.shape[1])).any(1)
    named &= torch.arange(logits.shape[1]) != edges.first[:, None]
    wanted = logits.masked_fill(named, 0).softmax(-1)[torch.arange(len(logits)), edges.first]
    torch.testing.assert_close(found[:, METRICS.index("first")], wanted, atol=1e-5, rtol=1e-4)
    assert sums_to_its_logit(qk.trace(scope, task, head, 6, whole=False, draws=2, progress=False))


# ------------------------------------------------------------------ words and prompts


def test_nothing_is_chosen_on_words_that_are_tested_on(nano):
    task, drawn = qk.tasks.induction(), {}

    def draw(use, contrast, n):
        drawn[use] = task.draw(use, contrast, n)
        return drawn[use]

    spied = qk.tasks.Task(task.name, task.contrasts, draw, asked=task.asked)
    assert traced(nano, spied, "L1H0").tables["check"] == traced(nano, task, "L1H0").tables["check"]
    assert set(drawn) == {"choose", "test"}
    chosen, tested = (
        {key for unit in drawn[use] for key in unit[0].text.removeprefix("Words:").split()}
        for use in ("choose", "test")
    )
    assert chosen
    assert not chosen & tested


def test_writers_are_chosen_without_the_test_prompts(nano):
    """Other test prompts: other numbers, but the same edges are cut."""
    task = qk.tasks.induction()

    def with_tests(first):
        def draw(use, contrast, n):
            return task.draw(use, contrast, 40)[first : first + n]

        return qk.tasks.Task(
            task.name, task.contrasts, lambda u, c, n: draw(u, c, n) if u == "test" else task.draw(u, c, n)
        )

    one, other = (traced(nano, with_tests(first), "L1H0") for first in (0, 20))
    pairs = [[(row["query_writer"], row["key_writer"]) for row in found.tables["pairs"]] for found in (one, other)]
    assert pairs[0] == pairs[1]
    assert one.tables["pairs"] != other.tables["pairs"]


def test_each_query_of_a_prompt_counts(nano):
    task = qk.tasks.induction()

    def draw(use, contrast, n):
        found = []
        for (example,) in task.draw(use, contrast, n):
            ends = [len(example.text) - len(example.text.split()[-1]), len(example.text)]
            found.append((qk.Example(example.text, keys=example.keys, queries=[tuple(ends), tuple(ends)]),))
        return found

    twice = qk.tasks.Task("twice", task.contrasts, draw)
    found, plain = traced(nano, twice, "L1H0"), traced(nano, task, "L1H0")
    assert found.tables["check"][0]["n"] == 2 * N
    assert found.tables["check"][0]["logit"] == pytest.approx(plain.tables["check"][0]["logit"], rel=1e-5)


@pytest.mark.parametrize("head", ["L1H0", "all"])
def test_a_task_without_right_keys_is_refused(nano, head):
    def draw(use, contrast, n):
        return [(qk.Example.mark("hat : O jam : Z jam :", keys={"O": {"mine": 1}, "Z": {"mine": -1}}),)] * n

    task = qk.tasks.Task("mine", {"mine": qk.tasks.Contrast("mine", "this / that")}, draw)
    with pytest.raises(BadInput, match="its keys labelled answer, and this one has none"):
        traced(nano, task, head)


def test_one_prompt_is_enough_and_has_no_interval(nano):
    found = qk.trace(nano, qk.tasks.induction(), "L1H0", 1, draws=2, progress=False)
    assert found.tables["writers"][0]["low"] is None


def test_with_nothing_taken_out_the_running_model_is_as_it_was(nano):
    found = traced(nano, qk.tasks.induction(), "L1H0", whole=True)
    rows = {(row["size"], row["kind"], row["mlps"]): row for row in found.tables["whole"]}
    check, none = found.tables["check"][0], rows[0, "chosen", "live"]
    for name in ("attention", "first", "among", "accuracy"):
        assert none[name] == pytest.approx(check[name], abs=1e-5)
    assert none["answer"] == none["answer_before"]
    assert rows[2, "chosen", "live"]["answer"] < 0.5 * none["answer"]
    assert rows[2, "chosen", "live"]["answer"] < rows[2, "random", "live"]["answer"]
    assert rows[2, "random", "live"]["draws"] == N  # a draw of its own for each prompt
