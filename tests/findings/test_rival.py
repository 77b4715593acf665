"""The answer and its rival: what they are compared with, in what-ifs too, and where texts differ."""

import pytest

import qkscope as qk
from qkscope import BadInput, Example
from qkscope.findings.question import Question
from qkscope.verbs.why.next_words import asked_sentence, notes

STORE = "When Mary and John went to the store, John gave a drink to"
DOOR = "The keys to the cabinet near the old door"

# twenty prompts about two people, written for this test; the first name is what comes next
NAMES = {
    "When Alice and Robert went to the market, Robert gave a basket to": ("Alice", "Robert"),
    "When Sarah and Tom left the office, Tom handed the report to": ("Sarah", "Tom"),
    "Yesterday Anna and Peter met in the garden, and Peter showed the letter to": ("Anna", "Peter"),
    "After Emily and Jack arrived at the station, Jack passed the ticket to": ("Emily", "Jack"),
    "Then Laura and David had a long argument. Afterwards David apologized to": ("Laura", "David"),
    "On Monday Kate and Michael worked at the library, and Michael read a story to": (
        "Kate",
        "Michael",
    ),
    "While Susan and Paul were cooking dinner, Paul gave a spoon to": ("Susan", "Paul"),
    "When Daniel and Rachel walked in the park, Rachel threw a ball to": ("Daniel", "Rachel"),
    "Last week James and Maria visited Paris, and Maria sent a postcard to": ("James", "Maria"),
    "When Kevin and Julia got home, Julia offered a drink to": ("Kevin", "Julia"),
    "After the lesson Frank and Helen stayed at school. Helen lent a pencil to": (
        "Frank",
        "Helen",
    ),
    "When Lisa and Mark went to the store, Mark gave a bag of apples to": ("Lisa", "Mark"),
    "When Brian and Nancy were at the hospital, Nancy brought flowers to": ("Brian", "Nancy"),
    "When Eric and Diana finished the game, Diana handed the cards to": ("Eric", "Diana"),
    "After Jason and Karen bought a car, Karen gave the keys to": ("Jason", "Karen"),
    STORE: ("Mary", "John"),
    "When Simon and Grace went to the beach, Grace gave an ice cream to": ("Simon", "Grace"),
    "When Ben and Olivia travelled to Rome, Olivia sold her camera to": ("Ben", "Olivia"),
    "In April Harry and Ellen left Boston, and Ellen mailed a present to": ("Harry", "Ellen"),
    "When Emma and Lucas flew from London to Tokyo, Lucas gave the passport to": (
        "Emma",
        "Lucas",
    ),
}


def output_of(scope, prompt, **named):
    question = Question(scope, prompt, **named).at_difference()
    return question.output(question.run(last=0))


def test_of_two_names_the_other_one_is_the_rival(smollm2):
    assert len(NAMES) == 20
    for prompt, (answer, other) in NAMES.items():
        output = output_of(smollm2, prompt)
        assert output.name(output.likeliest)[0] == f" {answer}", prompt
        assert output.name(output.rival)[0] == f" {other}", prompt


def test_an_answer_that_is_not_in_the_prompt_has_a_rival_of_its_kind(smollm2):
    output = output_of(smollm2, DOOR)
    assert output.text_of("answer") == " are"
    assert output.text_of("rival") in (" is", " were")
    # a function word is no rival because it stands in the prompt, and no answer that is copied
    assert " to" not in {output.token(each.token) for each in output.candidates}
    mat = output_of(smollm2, "The cat sat on the mat and the dog sat on")
    assert (mat.text_of("answer"), mat.why_rival) == (
        " the",
        "the likeliest other token of its kind",
    )


def test_rivals_are_listed_with_the_head_that_would_come_first(smollm2):
    answer = qk.why(smollm2, DOOR)
    rivals = answer.tables["rivals"]
    assert rivals[0]["chosen"]
    assert rivals[0]["head"] == answer.tables["heads"][0]["head"]
    for row in rivals[1:]:
        heads = qk.why(smollm2, DOOR, versus=row["token"]).tables["heads"]
        first = heads[0]["head"] if heads[0]["direction"] == "for" else ""
        assert row["head"] == first
        if first and first != rivals[0]["head"]:
            assert f"rather than {row['token']!r} {first}" in answer.answer


def test_a_model_that_has_no_answer_is_called_undecided(smollm2):
    said = "The model is undecided: no next token has 10%."
    sang = "The zorblax Fenwick sang to the moon. Everyone danced when the zorblax"
    assert notes(output_of(smollm2, sang)) == [said]
    assert notes(output_of(smollm2, STORE)) == []


def test_any_token_can_be_the_answer(smollm2):
    output = output_of(smollm2, STORE, answer=" Peter", rival=" the")
    (asked,) = output.asked_rows()
    assert (asked["answer"], asked["rival"], asked["next"]) == (" Peter", " the", " Mary")
    difference = smollm2.logit_difference(STORE, " Peter", " the")
    assert asked["lead"] == pytest.approx(difference, abs=1e-4)
    assert "Asked about is ' Peter'" in asked_sentence(output)


def test_texts_that_begin_alike_are_asked_about_where_they_differ(smollm2):
    named = {"answer": " Mary Ann", "rival": " Mary Poppins"}
    (asked,) = output_of(smollm2, STORE, **named).asked_rows()
    assert (asked["answer"], asked["rival"]) == (" Mary Ann", " Mary Poppins")
    logits = smollm2.logits(f"{STORE} Mary")
    first = [smollm2.tokenizer.encode(text)[0] for text in (" Ann", " Poppins")]
    assert asked["lead"] == pytest.approx(float(logits[first[0]] - logits[first[1]]), abs=1e-4)
    said = qk.why(smollm2, STORE, versus=" Mary Poppins").answer
    assert "Asked after ' Mary', with which answer and rival both begin." in said
    # a rival that begins as the next token does: the model's own words are the answer
    alone = Question(smollm2, STORE, rival=" Mary Poppins").at_difference()
    assert alone.appended == " Mary"
    assert str(alone.prompt) == f"{STORE} Mary"
    # one that begins otherwise is asked about at its first token, and the sentence says so
    other = output_of(smollm2, STORE, rival=" Zxqvv")
    assert "' Z' (token 1 of the 4 of ' Zxqvv', 0.0%)" in asked_sentence(other)


def test_characters_in_pieces_are_appended_as_tokens(smollm2):
    question = Question(smollm2, "小明去商店买", answer="咖啡", rival="喝水").at_difference()
    assert isinstance(question.prompt, Example)
    ids = list(question.prompt.ids)
    assert ids[:-1] == smollm2.encode(["小明去商店买"]).inputs["input_ids"][0].tolist()
    assert question.answer.place == question.rival.place == 1
    assert question.answer.token != question.rival.token


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"answer": " Mary", "rival": " Mary Ann"}, "' Mary Ann' begins with ' Mary'"),
        ({"rival": " Mary, and"}, "is what comes next itself"),
        ({"rival": " Mary"}, "' Mary' is the next token itself: name another one as its rival, or"),
        (
            {"answer": " Mary Ann", "rival": " Mary Jo", "query": 5},
            "asked about behind the last token alone",
        ),
    ],
)
def test_an_answer_and_a_rival_that_are_the_same_are_refused(smollm2, named, says):
    with pytest.raises(BadInput, match=says):
        output_of(smollm2, STORE, **named)


def test_a_change_that_flips_the_answer_keeps_answer_and_rival(smollm2):
    before = output_of(smollm2, STORE, rival=" John")
    with smollm2.replace(9, " Mary"):
        answer = qk.why(smollm2, STORE, versus=" John")
        unnamed = output_of(smollm2, STORE)
    for asked in (answer.tables["asked"][0], unnamed.asked_rows()[0]):
        assert (asked["answer"], asked["rival"], asked["next"]) == (" Mary", " John", " John")
        assert asked["lead"] < 0
        assert asked["lead_before"] == pytest.approx(before.difference, abs=1e-5)
    assert "Before the change ' Mary' had 92.3% and ' John' 0.2%, ahead by 6.1." in answer.answer
    assert "The next token after ' to' is ' John'" in answer.answer


def test_blocks_can_be_left_for_a_while(nano):
    prompt = "hat: O jam: Z jam:"
    plain = nano.logits(prompt)
    with nano.ablate("L0H2"), nano.replace(4, "cat"):
        assert nano.has_changes
        with nano.unchanged():
            assert not nano.has_changes
            assert nano.logits(prompt).equal(plain)
        assert not nano.logits(prompt).equal(plain)
    assert not nano.has_changes


def test_a_head_whose_second_key_moves_the_lead_as_much_is_neither_for_nor_against(smollm2):
    rows = qk.why(smollm2, DOOR, versus=" to").tables["heads"]
    outdone = [row for row in rows if abs(row["second"] or 0) >= abs(row["difference"])]
    assert any(abs(row["difference"]) >= 0.1 for row in outdone)
    assert {row["direction"] for row in outdone} == {"neither"}
