"""A question is parsed once: what needs no model is refused before one is loaded."""

import pytest

from qkscope import BadInput, Example
from qkscope.findings.question import Question

PROMPT = "hat: O jam: Z jam:"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"key": 1}, "a key is asked about with a head"),
        ({"rival": " "}, "the rival ' ' is blank"),
        ({"answer": "\n"}, "is blank"),
        ({"answer": " Z", "rival": " Z"}, "' Z' is the answer itself"),
        ({"corrupted": PROMPT}, "the two prompts of a pair are the same"),
        ({"corrupted": Example(PROMPT)}, "the two prompts of a pair are the same"),
    ],
)
def test_what_needs_no_model_is_refused_without_one(given, says):
    with pytest.raises(BadInput, match=says):
        Question.of(None, PROMPT, **given)


def test_a_question_runs_its_prompt_and_looks_from_its_query_at_its_key(nano):
    question = Question.of(nano, PROMPT, "L2H3", query="jam#2", key="Z")
    look = question.look(question.run())
    assert (look.asked.query, look.key) == (7, 6)
