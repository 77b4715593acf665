"""Rules: each part gives the rows that its name says, exactly; a rule is read back as written."""

import json

import pytest
import torch

from qkscope.errors import BadInput
from qkscope.findings.distances import STEPS, Distances, step_number
from qkscope.findings.rules import (
    AfterCopy,
    At,
    Decay,
    Else,
    First,
    Kind,
    Near,
    Offset,
    OfKind,
    Rest,
    Rule,
    SameWord,
)

#        0  1  2  3  4  5  6  7
IDS = torch.tensor([9, 5, 6, 7, 5, 8, 6, 5])
FIVES = Kind(frozenset([5]), (" the",))


def last_row(part, distances=None):
    return Rule([(1.0, part)], distances).attention(IDS)[-1]


def on(*places):
    """A row that is shared alike among some places."""
    row = torch.zeros(len(IDS))
    row[list(places)] = 1 / len(places)
    return row


@pytest.mark.parametrize(
    ("part", "places"),
    [
        (First(), [0]),
        (Offset(0), [7]),
        (Offset(1), [6]),
        (Offset(3), [4]),
        (SameWord(), [4]),
        (SameWord("every"), [1, 4]),
        (AfterCopy(), [5]),
        (AfterCopy("every"), [2, 5]),
        (OfKind(Kind(frozenset([6])), "last"), [6]),
        (OfKind(Kind(frozenset([6, 7]))), [2, 3, 6]),
        (OfKind(Kind(frozenset([4]))), [0]),  # no such word: the first token
        (At(FIVES, Offset(2)), [5]),
        (At(Kind(frozenset([8])), Offset(2), Offset(1)), [6]),
        (Else(AfterCopy(), Offset(1)), [5]),
        (Else(OfKind(Kind(frozenset([4]))), Offset(1)), [6]),  # no such word: the other part
    ],
)
def test_a_part_gives_the_row_that_its_name_says(part, places):
    assert torch.equal(last_row(part), on(*places))


def test_decay_is_geometric_and_leaves_the_first_token_out():
    row = last_row(Decay(0.5))
    assert row[0] == 0
    torch.testing.assert_close(row[1:-1] / row[2:], torch.full((6,), 0.5))


def test_the_table_of_distances_is_the_mean_row_and_words_of_a_kind_fade_by_it():
    length = 40
    places = torch.arange(length)
    back = places[:, None] - places
    pattern = torch.where(back >= 0, 0.8 ** back.clamp(min=0).float(), 0.0)
    pattern[:, 0] = 0
    pattern = 0.6 * pattern / pattern.sum(1, keepdim=True).clamp(min=1e-9)
    pattern[:, 0] = 1 - pattern.sum(1)
    table = Distances.of(pattern)
    rest = Rule([(1.0, Rest())], table).attention(torch.arange(length))
    assert float((rest - pattern)[1:].abs().sum(1).max()) < 0.06  # farther distances share an entry
    assert float(rest[30, 0]) == pytest.approx(0.4, abs=0.001)
    near = Rule([(1.0, Near())], table).attention(torch.arange(length))
    without_first = pattern[30, 1:] / pattern[30, 1:].sum()
    assert float((near[30, 1:] - without_first).abs().sum()) < 0.1
    fading = last_row(OfKind(FIVES), table)
    weights = torch.tensor([table.back[6], table.back[3], table.back[0]])
    torch.testing.assert_close(fading[[1, 4, 7]], weights / weights.sum())


def test_every_row_sums_to_1_and_looks_back_only():
    parts = [AfterCopy(), SameWord(), OfKind(FIVES), Offset(1), Decay(0.7)]
    pattern = Rule([(0.2, part) for part in parts]).attention(torch.stack([IDS, IDS.flip(0)]))
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, len(IDS)))
    assert float(pattern.triu(1).abs().max()) == 0


def test_several_texts_at_once_are_what_each_gives_alone():
    rule = Rule([(0.5, AfterCopy()), (0.5, At(FIVES, OfKind(FIVES), Offset(1)))])
    texts = torch.stack([IDS, IDS.flip(0)])
    alone = torch.stack([rule.attention(ids) for ids in texts])
    assert torch.equal(rule.attention(texts), alone)


def test_a_rule_is_read_back_and_says_what_it_does():
    zeros = (0.0,) * len(STEPS)
    rule = Rule(
        [
            (0.1, Rest()),
            (0.4, At(FIVES, AfterCopy())),
            (0.3, OfKind(FIVES, "last")),
            (0.1, Offset(2)),
            (0.1, First()),
        ],
        Distances((0.5, *zeros[1:]), zeros),
    )
    back = Rule.from_json(json.loads(json.dumps(rule.to_json())))
    assert back == rule
    assert str(back) == (
        "40% at a word of the kind “ the”: the token after the last earlier copy of the word, "
        "else the first token; 30% the last word of the kind “ the”; "
        "10% rest: its mean row by distance; 10% the token 2 back; 10% the first token"
    )
    assert back.name == "induction"
    assert back.rest == pytest.approx(0.1)


def test_kinds_of_word_classes_are_stored_by_their_numbers():
    classes = [0, 1, 1, 2, 0]
    kind = Kind.from_json({"classes": [1, 2], "examples": [" a"]}, classes)
    assert kind.tokens == {1, 2, 3}
    assert kind.to_json() == {"classes": [1, 2], "examples": [" a"]}


def test_names_are_those_of_the_largest_part_that_speaks():
    assert Rule([(0.6, First()), (0.4, Offset(1))]).name == "previous token"
    assert Rule([(1.0, First())]).name == "first token"
    assert Rule([(0.4, SameWord()), (0.6, OfKind(FIVES))]).name == "kind"
    assert Rule([(0.35, SameWord()), (0.25, SameWord("every")), (0.4, Offset(0))]).name == (
        "duplicate token"
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rule([]), "one to 5 parts"),
        (lambda: Rule([(0.5, First())]), "sum to 1"),
        (lambda: Rule([(1.0, "first")]), "parts"),
        (lambda: Rule([(1.0, Rest())]).attention(IDS), "give the rule its table"),
        (lambda: Rule.from_json({"parts": [{"part": "verbs", "weight": 1}]}), "a part is one of"),
        (
            lambda: Rule.from_json({"parts": [{"part": "offset", "back": 1, "weight": 1}]}),
            "missing required argument 'steps'",
        ),
    ],
)
def test_a_mistake_is_said(make, says):
    with pytest.raises(BadInput, match=says):
        make()


def test_distances_share_entries_far_back():
    assert step_number(torch.tensor([0, 8, 10, 127, 10_000])).tolist() == [0, 8, 9, 17, 18]
