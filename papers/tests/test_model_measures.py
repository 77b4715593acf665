"""What figures measure of language models: how heads are chosen, clouds compared, prompts drawn."""

import math

import pytest
import torch

from qkscope import BadInput
from qkscope.heads import Head
from qkscope.verbs.find_heads import Ranking
from qkscope_papers.franco2026 import model_sparsity
from qkscope_papers.franco2026.model_sparsity import relabelled
from qkscope_papers.franco2026.prompts import clusters_of, prompts_of, text_task
from qkscope_papers.lee2026.language import choose_heads
from qkscope_papers.lee2026.points import align, view
from qkscope_papers.registry import NANO
from qkscope_papers.tables import Estimate


def ranking(*rows: tuple[str, float, float, float, float]) -> Ranking:
    """Rows of head, accuracy, row accuracy, ratio and mass; chance is 0.2."""
    names = ("head", "accuracy", "row_accuracy", "ratio", "mass")
    more = {"chance": 0.2, "n": 100}
    return Ranking("heads", {"heads": [
        {**dict(zip(names, row, strict=True)), **more, "ratio_low": row[3] - 0.0196, "ratio_high": row[3] + 0.0196}
        for row in rows
    ]})  # fmt: skip


RANKING = ranking(
    ("L0H0", 0.99, 0.99, 0.9, 0.9),  # the first layer cannot know what is asked
    ("L2H0", 0.95, 0.05, 0.8, 0.1),  # right among the boxes, but looks elsewhere
    ("L2H1", 0.60, 0.50, 0.5, 0.6),
    ("L2H2", 0.40, 0.31, 0.4, 0.9),
    ("L2H3", 0.35, 0.29, 0.3, 0.5),
    ("L1H0", 0.00, 0.00, 0.0, 0.5),  # turns away from the right key
    ("L1H1", 0.20, 0.02, 0.2, 0.0),  # at chance, because it looks at no key
    ("L1H2", 0.20, 0.10, 0.21, 0.6),  # at chance, looking
    ("L3H0", 0.20, 0.10, 0.2, 0.6),  # at chance too, but deeper than what was found
)


def test_heads_are_chosen_by_what_their_task_asks_and_the_best_stand_in():
    found = choose_heads(RANKING, "binding", 9)
    assert [str(head) for head in found.heads] == [
        "L2H2",
        "L2H1",
    ]  # by the attention that the right box gets
    assert found.reached == 2
    capped = choose_heads(RANKING, "binding", 1)
    assert ([str(head) for head in capped.heads], capped.reached) == (["L2H1"], 2)
    row = found.row(Head(2, 1))
    assert row["row_low"] < row["row_accuracy"] < row["row_high"]
    passing = found.share_that_pass()
    assert passing.mean == 3 / 9  # with the first layer's, which is not looked into
    assert passing.low == 2 / 9 < passing.mean < passing.high, "two of them are certain"
    by_ratio = choose_heads(RANKING, "filter", 9)
    assert {str(head) for head in by_ratio.heads} == {"L2H0", "L2H1", "L2H2"}
    assert (
        str(found.control) == str(by_ratio.control) == "L1H2"
    )  # it looks at the keys, and is at chance
    # nine heads: z of 1 - 0.025 / 9 is 2.773, the standard error is 0.01
    assert by_ratio.row(Head(2, 1))["ratio_low"] == pytest.approx(0.5 - 2.773 * 0.01, abs=1e-4)
    assert Estimate(0.5, 0.5 - 0.0196, 0.5 + 0.0196).among(9).high == pytest.approx(
        0.5277, abs=1e-4
    )
    weak = ranking(*((f"L1H{i}", 0.9, 0.01 * i, 0.2, 0.5) for i in range(5)))
    found = choose_heads(weak, "binding", 9)
    assert {str(head) for head in found.heads} == {"L1H4", "L1H3", "L1H2"}
    assert found.reached == 0
    assert found.control not in found.heads


def test_alignment_is_one_for_equal_sides_and_nothing_for_another_pairing():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 5, generator=generator).double()
    labels = torch.arange(6).repeat(20)
    points = centres[labels] + 0.01 * torch.randn(120, 5, generator=generator)
    same = align(
        points + 3, labels, points - 7, labels, seed=0
    )  # each side is centred: an offset changes nothing
    assert same["cosine"] == pytest.approx(1, abs=1e-3)
    assert same["query_finds_keys"] == 1
    turned = align(points, labels, points, (labels + 1) % 6, seed=0)
    assert turned["cosine"] < same["cosine_shuffled_high"]
    assert turned["query_finds_keys"] == 0


def test_an_interval_of_a_picture_holds_the_number_of_many_prompts():
    generator, rows = torch.Generator().manual_seed(0), []
    means = torch.randn(2, 5, 8, generator=generator).double()
    for n in (20_000, *[200] * 40):
        asked = torch.randint(5, (n,), generator=generator)
        q, k = (own[asked] + 2 * torch.randn(n, 8, generator=generator) for own in means)
        rows.append(view(q, asked, k, asked, 0).row)
    many, *few = rows
    assert sum(abs(row["cosine"] - many["cosine"]) <= row["cosine_half"] for row in few) >= 34
    assert many["cosine_half"] < 0.2 * sum(row["cosine_half"] for row in few) / 40, (
        "it falls as 1/√n"
    )


def test_natural_text_is_asked_where_a_token_stands_again():
    words: dict[str, int] = {}
    task = text_task(lambda text: [words.setdefault(word, len(words)) for word in text.split()], 0)
    units = task.test(40)
    for (example,) in units:
        ids, at = example.ids, {name: start for name, (start, _) in example.roles.items()}
        assert at["END"] == len(ids) - 1
        assert ids[at["MATCH"]] == ids[-1]
        assert ids[-1] not in ids[at["NEXT"] : -1], "the last earlier place"
        assert (at["PREV"], at["NEXT"]) == (at["END"] - 1, at["MATCH"] + 1)
    assert len(set(clusters_of(task, 40).tolist())) > 5
    runs = [{ids[i : i + 8] for (x,) in drawn for ids in [x.ids] for i in range(len(ids) - 7)}
            for drawn in (units, task.choose(40))]  # fmt: skip
    assert not runs[0] & runs[1], "heads are chosen on other text"
    with pytest.raises(BadInput, match="knows the words of its own tasks alone"):
        prompts_of("text", NANO, None, 0)


def test_relabelling_counts_the_ways_to_deal_the_labels(monkeypatch):
    assert relabelled([-3.0, -2.0, math.nan], [0.0, 1.0]) == pytest.approx(1 / 6)
    assert relabelled([0.0, 1.0], [-3.0, -2.0]) == 1.0, (
        "the highest mean of all: every relabelling is as low"
    )
    assert relabelled([1.0, 1.0], [1.0, 1.0]) == 1.0, "ties count against"
    assert math.isnan(relabelled([], [1.0]))
    # units of one kind: p is uniform, so few are small
    found = [
        relabelled(x[:6].tolist(), x[6:].tolist())
        for x in torch.randn(
            200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
    ]
    assert 0.0 < sum(p < 0.05 for p in found) / 200 < 0.1
    # drawn relabellings come close to all of them, and never give 0
    exact = relabelled([-1.0, -0.5, 0.2], [0.1, 0.6, 0.9])
    monkeypatch.setattr(model_sparsity, "MOST", 19)
    assert 1 / 19 <= relabelled([-1.0, -0.5, 0.2], [0.1, 0.6, 0.9]) < exact + 0.3
