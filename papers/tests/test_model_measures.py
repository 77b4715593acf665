"""What the figures of lee2026 measure of language models: how heads are chosen, and how clouds are compared."""

from __future__ import annotations

import pytest
import torch

from qkscope.analyses.clouds import principal
from qkscope.analyses.find import Ranking
from qkscope.heads import Head
from qkscope_papers.lee2026.language import choose_heads, for_choice
from qkscope_papers.lee2026.points import align, nearest_centroid, separation
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


def test_binding_heads_are_right_among_all_tokens():
    found = choose_heads(RANKING, "binding", 9)
    assert [str(head) for head in found.heads] == ["L2H2", "L2H1"]  # by the attention that the right box gets
    assert found.reached == 2
    capped = choose_heads(RANKING, "binding", 1)
    assert ([str(head) for head in capped.heads], capped.reached) == (["L2H1"], 2)
    row = found.row(Head(2, 1))
    assert row["row_low"] < row["row_accuracy"] < row["row_high"]


def test_without_a_head_that_reaches_the_rule_the_best_stand_in():
    weak = ranking(*((f"L1H{i}", 0.9, 0.01 * i, 0.2, 0.5) for i in range(5)))
    found = choose_heads(weak, "binding", 9)
    assert {str(head) for head in found.heads} == {"L1H4", "L1H3", "L1H2"}
    assert found.reached == 0
    assert found.control not in found.heads


def test_filter_heads_are_chosen_by_their_ratio():
    found = choose_heads(RANKING, "filter", 9)
    assert {str(head) for head in found.heads} == {"L2H0", "L2H1", "L2H2"}


@pytest.mark.parametrize("kind", ["filter", "binding"])
def test_the_control_looks_at_the_keys_and_is_at_chance(kind):
    assert str(choose_heads(RANKING, kind, 9).control) == "L1H2"


def test_the_bound_of_a_chosen_head_pays_for_the_choice():
    found = choose_heads(RANKING, "filter", 9)
    # nine heads: z of 1 - 0.025 / 9 is 2.773, the standard error is 0.01
    assert found.row(Head(2, 1))["ratio_low"] == pytest.approx(0.5 - 2.773 * 0.01, abs=1e-4)
    assert for_choice(Estimate(0.5, 0.5 - 0.0196, 0.5 + 0.0196), 9).high == pytest.approx(0.5277, abs=1e-4)


def test_alignment_is_one_for_equal_sides_and_nothing_for_another_pairing():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 5, generator=generator).double()
    labels = torch.arange(6).repeat(20)
    points = centres[labels] + 0.01 * torch.randn(120, 5, generator=generator)
    same = align(points + 3, labels, points - 7, labels, seed=0)  # each side is centred: an offset changes nothing
    assert same.cosine == pytest.approx(1, abs=1e-3)
    assert same.hits == 1
    assert same.shuffled == pytest.approx(0, abs=0.1)
    turned = align(points, labels, points, (labels + 1) % 6, seed=0)
    assert turned.cosine < same.shuffled_high
    assert turned.hits == 0


def test_separation_is_the_chance_of_being_above():
    assert separation(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])) == 1
    assert separation(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])) == 1  # folded: apart is apart
    assert separation(torch.tensor([1.0, 1.0]), torch.tensor([1.0])) == 0.5  # ties count half
    assert separation(torch.tensor([2.0, 0.0]), torch.tensor([1.0])) == 0.5


def test_principal_components_keep_distances_and_pad_what_is_not_there():
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(1)).double()
    found = principal(x)
    assert found.shape == (9, 3)
    assert torch.allclose(torch.cdist(found, found), torch.cdist(x, x))
    assert not found[:, 2].any()


def test_nearest_centroid_needs_points_it_does_not_know():
    known = torch.tensor([[0.0, 0.0], [0.2, 0.0], [5.0, 5.0]])
    assert nearest_centroid(known, torch.tensor([0, 0, 1]), torch.tensor([[1.0, 0.0], [4.0, 4.0]]),
                            torch.tensor([0, 0])) == 0.5  # fmt: skip
