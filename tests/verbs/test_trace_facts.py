"""What must hold of every trace: parts sum, edits touch what they say, and the unedited row is the
model's own.
"""

import json

import pytest
import torch

import qkscope as qk
from qkscope.errors import BadInput
from qkscope.findings.head_rows import Pass
from qkscope.findings.prompt_trace import PromptRun
from qkscope.heads import Head, Writer
from qkscope.linear.reader import Reader
from qkscope.sums.relative_logits import METRICS, SIDES
from qkscope.sums.subspace import Subspace
from qkscope.verbs.trace.edges import CutEdge, EdgeTest, choose_writers, edge_masks

N, HEAD = 12, Head(1, 0)
PROMPT = "hat : O jam : Z jam :"
TASK = qk.tasks.induction()


def traced(scope, task, head, **options):
    return qk.trace(
        scope, task, head, N, **{"whole": False, "draws": 3, "progress": False, **options}
    )


@pytest.fixture(scope="module")
def induction(nano):
    return traced(nano, TASK, HEAD, whole=True)


def sums_to_its_logit(found):
    for check in found.tables["check"]:
        assert check["sum_error"] < 1e-5
        for side in SIDES:
            rows = [
                row
                for row in found.tables["writers"]
                if (row["head"], row["side"]) == (check["head"], side)
            ]
            sizes = [abs(row["value"]) for row in rows]
            assert sizes == sorted(sizes, reverse=True)
            assert sum(row["value"] for row in rows) == pytest.approx(
                check["logit"], abs=1e-5 * sizes[0]
            )
            assert sum(row["share"] for row in rows) == pytest.approx(
                1, abs=1e-5 * sizes[0] / abs(check["logit"])
            )
            assert all(row["low"] <= row["value"] <= row["high"] for row in rows)
    return True


def test_writers_and_pairs_sum_to_the_logit_and_with_nothing_taken_out_the_model_is_as_it_was(
    nano, scope, induction
):
    both = traced(nano, qk.tasks.filter(), ["L1H0", "L2H3"])  # many right keys
    assert [row["head"] for row in both.tables["check"]] == ["L1H0", "L2H3"]
    for found in (induction, both, traced(scope, qk.tasks.binding(4), "L1H2")):
        assert sums_to_its_logit(found)
    one = PromptRun(nano, PROMPT).head("L2H1")
    pairs, writers = one.pairs[0], {side: values[0] for side, values in one.marginals.items()}
    torch.testing.assert_close(pairs.sum(1), writers["query"], atol=1e-5, rtol=2e-5)
    torch.testing.assert_close(pairs.sum(0), writers["key"], atol=1e-5, rtol=2e-5)
    assert float(pairs.sum()) == pytest.approx(one.total, abs=2e-5)
    assert sum(token["attention"] for token in one.token_rows()) == pytest.approx(1, abs=1e-5)
    found = qk.trace(nano, TASK, "L1H0", 1, draws=2, progress=False)
    assert found.tables["writers"][0]["low"] is None
    rows = {(row["size"], row["kind"], row["mlps"]): row for row in induction.tables["whole"]}
    check, none = induction.tables["check"][0], rows[0, "chosen", "live"]
    for name in ("attention", "first", "among", "accuracy"):
        assert none[name] == pytest.approx(check[name], abs=1e-5)
    assert none["answer"] == none["answer_before"]
    assert rows[2, "chosen", "live"]["answer"] < 0.5 * none["answer"]
    assert rows[2, "chosen", "live"]["answer"] < rows[2, "random", "live"]["answer"]
    assert rows[2, "random", "live"]["draws"] == N  # a draw of its own for each prompt


def test_a_feature_and_all_that_is_not_in_it_sum_to_the_whole(nano, induction):
    basis = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(0)))[0]
    inside = Subspace(basis, torch.ones(24), basis, 5, HEAD)
    outside = Subspace(basis.flip(1), torch.ones(24), basis.flip(1), 19, HEAD)
    found = [induction, *(traced(nano, TASK, HEAD, feature=one) for one in (inside, outside))]
    prompts = [qk.trace(nano, PROMPT, HEAD, key=3, feature=one) for one in (None, inside, outside)]
    for three in (found, prompts):
        every = [one.tables["writers"] for one in three]
        whole, part, rest = (
            {(row["side"], row["writer"]): row["value"] for row in rows} for rows in every
        )
        assert all(
            part[at] + rest[at] == pytest.approx(value, abs=2e-5) for at, value in whole.items()
        )
        whole, part, rest = (one.tables["check"][0] for one in three)
        assert part["logit"] + rest["logit"] == pytest.approx(whole["logit"], abs=2e-5)
        assert part["logit"] != pytest.approx(whole["logit"], rel=1e-2)
        assert part["attention"] == pytest.approx(
            whole["attention"], abs=1e-6
        )  # the head itself is as it was


@pytest.fixture(scope="module")
def measured(nano):
    """An edge test of L1H0 on induction, a batch of its rows, and what it measures on each prompt."""
    how = Pass(Reader(nano, [HEAD]), progress=False)
    chosen = choose_writers(how, TASK.choose(N))[HEAD]
    _, (rows,) = how.rows(TASK.test(N), range(N))
    test = EdgeTest(HEAD, rows.writers, chosen, 0, 3)
    return test, rows, test.measure(rows, list(range(N))).values


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
            found.append(
                [
                    float(named[right].sum()),
                    float(row[0]),
                    float(named[right].sum() / named.sum()),
                    best,
                ]
            )
    finally:
        nano.model.set_attn_implementation("sdpa")
    means = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
    assert [check[name] for name in METRICS[:-1]] == pytest.approx(means, abs=1e-5)


def test_all_cut_is_none_kept_and_a_part_replaced_by_itself_changes_nothing(measured):
    test, rows, values = measured
    writers = len(test.writers) - 1
    edges = [
        CutEdge("both", kind, "share", "mean", "held", k)
        for k in (writers, 0)
        for kind in ("cut", "keep")
    ]
    masks = edge_masks(
        [(edge, 0) for edge in edges], test.chosen.scores, [Writer(0, "head", (0,))] * writers
    )
    all_cut, all_kept, none_cut, none_kept = rows.measure(
        *next(rows.replaced(test.instead(rows), masks))
    )
    assert torch.equal(all_cut, none_kept)
    assert torch.equal(none_cut, all_kept)
    torch.testing.assert_close(none_cut, values["whole"])
    accuracy = METRICS.index("accuracy")
    assert all_cut[:, accuracy].mean() < 0.5 < none_cut[:, accuracy].mean()
    found = rows.measure(*next(rows.replaced(rows.streams, masks[:, :1])))[0]
    torch.testing.assert_close(found, values["whole"], atol=1e-5, rtol=1e-5)


def test_the_first_tokens_key_stays_even_where_it_is_named(scope, tmp_path):
    def line(use, i):
        words = ["hat", "jam", "kettle", "bell"]
        words = words[i % 4 :] + words[: i % 4]
        keys = [
            {"text": word, "labels": {"answer": 1 if j == i % 3 else -1}}
            for j, word in enumerate(words[:3])
        ]
        return json.dumps(
            {
                "prompt": f"{words[0]} {words[1]} {words[2]} : {chr(65 + i)}",
                "keys": keys,
                "use": use,
            }
        )

    path = tmp_path / "first.jsonl"
    path.write_text(
        "\n".join(
            line(use, 2 * i + (use == "test")) for use in ("choose", "test") for i in range(6)
        )
    )
    task, head = qk.tasks.from_jsonl(path), Head(1, 1)
    _, (rows,) = Pass(Reader(scope, [head])).rows(task.test(6), range(6))
    columns, places = rows.run.columns[:, 1:], torch.arange(rows.rows.k.shape[2])
    first = rows.run.captured.key_mask.int().argmax(1)
    assert bool((columns == first[:, None]).any())
    keys_alone = torch.tensor([[[False]], [[True]]]).expand(2, 1, len(rows.writers))
    zeros = {side: torch.zeros_like(stream) for side, stream in rows.streams.items()}
    found = rows.measure(*next(rows.replaced(zeros, keys_alone)))[0][:, METRICS.index("first")]
    assert (found < 0.9).any()
    named = (columns[..., None] == places).any(1) & (places != first[:, None])
    wanted = (
        rows.rows.logits()[:, 0].masked_fill(named, 0).softmax(-1)[torch.arange(len(first)), first]
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert sums_to_its_logit(qk.trace(scope, task, head, 6, whole=False, draws=2, progress=False))


def test_writers_are_chosen_without_the_test_prompts(nano):
    """Other test prompts: other numbers, but the same edges are cut."""
    drawn = {}

    def with_tests(first):
        def draw(use, contrast, n):
            units = TASK.draw(use, contrast, 40 if use == "test" else n)
            drawn[use] = units[first : first + n] if use == "test" else units
            return drawn[use]

        return qk.tasks.Task(TASK.name, TASK.contrasts, draw)

    one, other = (traced(nano, with_tests(first), HEAD) for first in (0, 20))
    pairs = [
        [(row["query_writer"], row["key_writer"]) for row in found.tables["pairs"]]
        for found in (one, other)
    ]
    assert pairs[0] == pairs[1]
    assert one.tables["pairs"] != other.tables["pairs"]
    words = {
        use: " ".join(unit[0].text for unit in units).replace("Words:", "").split()
        for use, units in drawn.items()
    }
    assert words["choose"]
    assert not set(words["choose"]) & set(words["test"])


@pytest.mark.parametrize("head", ["L1H0", "all"])
def test_a_task_without_right_keys_is_refused(nano, head):
    def draw(use, contrast, n):
        return [(qk.Example.mark(PROMPT, keys={"O": {"mine": 1}, "Z": {"mine": -1}}),)] * n

    task = qk.tasks.Task("mine", {"mine": qk.tasks.Contrast("mine", "this / that")}, draw)
    with pytest.raises(BadInput, match="its keys labelled answer, and this one has none"):
        traced(nano, task, head)
