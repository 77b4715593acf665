"""Because: changed prompts run from their first change give what whole prompts give, and planted
reasons are found.
"""

import re
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import qkscope as qk
from qkscope.errors import BadInput
from qkscope.findings.because import Because
from qkscope.findings.carriers import Carriers
from qkscope.findings.finding import Look
from qkscope.findings.prompt_trace import PromptRun
from qkscope.findings.relations import Relations, interval
from qkscope.heads import Head
from qkscope.model.tap import cleared
from qkscope.rerun.alternatives import Alternatives, Word, lexicon_of, words_of
from qkscope.rerun.rerun_tokens import Again, prompt_of
from qkscope_papers.families import tiny_model

PROMPT = "hat: O jam: Z cat: B jam:"
COPIED = qk.tasks.induction().test(1)[0][0].text


@pytest.fixture(scope="module")
def answer(smollm2):
    return qk.why(smollm2, "hat: O\njam: Z\ncat: B\njam:", "L18H6")


def ids_of(scope, prompt):
    return scope.encode([prompt]).inputs["input_ids"][0]


@pytest.mark.parametrize("length", [12, 30])  # keys around are copied for each row, or shared
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "qwen3", "gpt_neox", "bloom", "gpt_oss"]
)
def test_a_prompt_run_from_its_first_change_is_the_prompt_run_whole(family, length, monkeypatch):
    """Prefix shared, soft-caps, sinks, windows and biases as they are: every layer's attention, and
    the logits.
    """
    scope = qk.Scope.from_model(tiny_model(family), check=False)
    ids = torch.arange(3, 3 + length)
    again, changed, at = (
        Again.of(scope, ids),
        ids.repeat(3, 1),
        torch.tensor([5, 7, 0])[:, None] + torch.arange(5),
    )
    changed[0, 5], changed[1, 8], changed[2, :2] = 20, 21, torch.tensor([22, 23])
    runs = torch.zeros(changed.shape, dtype=torch.bool).scatter(1, at, True)
    reads = [(head, query) for head in scope.heads() for query in range(length)]
    monkeypatch.setattr(
        "qkscope.model.prefix._ROOM", {"cpu": 300}
    )  # attention rows of two tokens at a time
    reruns = {}
    for alone in (True, False):
        if not alone:
            monkeypatch.setattr(Again, "runs_alone", lambda *_: False)
        assert again.runs_alone() == (alone and scope.facts.takes_positions)
        reruns[alone] = again.run(changed, runs, reads, logits=True)
    ran = runs.repeat(1, len(scope.heads()))[..., None]
    alone, whole = reruns[True], reruns[False]
    assert torch.allclose(alone.attention * ran, whole.attention * ran, atol=2e-5)
    assert torch.allclose(alone.logits, whole.logits, atol=1e-4)
    with torch.no_grad():
        plain = scope.model(input_ids=changed, use_cache=False).logits[torch.arange(3), at[:, -1]]
    assert torch.allclose(alone.logits, plain.float(), atol=1e-3)


def test_alternatives_have_as_many_tokens_also_of_the_first_word_and_of_scripts_without_blanks(
    smollm2,
):
    again = Again.of(
        smollm2, ids_of(smollm2, "When Mary and John went to the store, Gwendolyn gave")
    )
    others, lexicon = Alternatives(again), lexicon_of(smollm2)
    words = {word.text: word for word in others.words}
    assert " Gwendolyn" in words, "pieces of one word stand together"
    assert len(words[" Gwendolyn"]) > 1
    for word in others.words[1:]:
        alternatives = others.of(word)
        assert len(set(alternatives)) == len(alternatives) == 8
        for ids in alternatives:
            assert len(ids) == len(word)
            assert lexicon.texts[ids[0]].strip().lower() not in {
                other.core for other in others.words
            }
            assert lexicon.texts[ids[0]].startswith(" ") == word.text.startswith(" ")
    assert all(lexicon.texts[ids[0]][1].isupper() for ids in others.of(words[" Mary"]))
    assert lexicon.variant((lexicon.by_text[" John"],), "Mary") == (lexicon.by_text["John"],)
    prompt = ids_of(smollm2, "王芳和李明")
    words = words_of(smollm2, prompt.tolist())
    assert [word.text for word in words] == ["王", "芳", "和", "李", "明"]
    cut = next(word for word in words if len(word) > 1)
    for ids in Alternatives(Again.of(smollm2, prompt)).of(cut):
        assert len(smollm2.tokenizer.decode(ids)) == 1, "another whole character"
    ids = ids_of(smollm2, "crown: Z\nhat: O\nunhappiness: B\nfork: K\ncrown:")
    because = Because(Again.of(smollm2, ids), [Look(Head(18, 6), len(ids) - 1, 3)])
    assert because.words[0].text == "crown"
    pairs = [finding for finding in because.reasons()[0].findings if finding.kind == "same word"]
    verdicts = {finding.text.strip(): finding.verdict for finding in pairs}
    assert verdicts["crown"] == "shown"
    long = next(word for word in because.words if len(word) > 1)
    token = Word(long.start, long.start + 1, because.texts[long.start])
    assert {len(ids) for ids in because.others.of(long)} == {len(long)}
    assert {len(ids) for ids in because.others.of(token)} == {1}


def test_the_same_word_is_the_reason_of_an_induction_head(answer):
    kinds = {row["kind"]: row for row in reversed(answer.tables["relation"])}
    same = kinds["same word"]
    assert (same["text"], same["positions"], same["verdict"]) == ("jam", "4, 12", "shown")
    assert same["alone"] < 0.5 < same["together"]
    assert same["together"] - max(same["alone"], same["different"]) >= 0.25
    assert kinds["follows"]["verdict"] == "shown"
    assert "because 'jam' appears twice (tokens 4 and 12)" in answer.answer
    carriers = answer.tables["carriers"][0]
    assert (carriers["side"], carriers["writers"], carriers["verdict"]) == (
        "key",
        "L17H8, L16H0",
        "shown",
    )
    assert "L17H8 and L16H0 carried 'jam' (token 4) into its key" in answer.answer
    assert "jam" in {row["text"] for row in answer.tables["because"] if row["cause"] == "yes"}
    assert all(row["low"] <= row["after"] <= row["high"] for row in answer.tables["because"])


@torch.no_grad()
@pytest.mark.parametrize(("whole", "near"), [(256, 64), (3, 1)])
def test_effects_of_a_word_are_those_of_plain_forwards_with_far_tokens_held(
    nano, monkeypatch, whole, near
):
    """By hand: each alternative in the prompt, and blocks given what they were given before at
    tokens that are held.
    """
    monkeypatch.setattr("qkscope.findings.because.WHOLE", whole)
    monkeypatch.setattr("qkscope.findings.because.NEAR", near)
    again, head = Again.of(nano, ids_of(nano, COPIED)), Head(1, 1)
    query = len(again.ids) - 1
    key = 1 + int(nano.attention(COPIED, head)[query][1:].argmax())
    because = Because(again, [Look(head, query, key)])
    word = next(word for word in because.words if key - 1 in word)
    prompts = [because.with_change(change) for change in because.alternatives(word)]
    before = nano.model(again.ids[None], output_hidden_states=True).hidden_states
    held = [at for at in range(word.start, query) if at not in {key, word.start} and whole < 256]
    assert bool(held) == (whole < 256) == bool(because.held)
    for prompt, found in zip(prompts, because.rows(prompts), strict=True):
        kept = []

        def hold(layer, _block, args):
            args[0][:, held] = before[layer][:, held]

        hooks = [
            block.register_forward_pre_hook(partial(hold, i))
            for i, block in enumerate(nano.model.model.layers)
        ]
        with cleared(hooks):
            nano.watch(prompt_of(nano, prompt[None]), kept.append)
        torch.testing.assert_close(found[0], kept[1].attention([1])[0, 0, query], rtol=0, atol=1e-5)


def test_a_head_that_goes_by_position_is_moved_by_a_word_put_in(smollm2):
    again = Again.of(smollm2, ids_of(smollm2, "The cat sat on the mat and the dog"))
    reason = Because(again, [Look(Head(16, 0), 8, 7)]).reasons()[0]
    assert (reason.kind, reason.causes) == ("position", [])
    finding = reason.findings[0]
    assert finding.measured >= 0.5 > finding.alone
    assert len(finding.changes) == 8, "it carries what tested it"


def test_few_words_are_no_reason_on_random_weights(nano):
    """Peaked attention of random weights: the key's own word may matter, but equal words and
    positions do not.
    """
    torch.manual_seed(0)
    model = type(nano.model)(nano.model.config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight *= 40
    scope = qk.Scope.from_model(model, nano.tokenizer, name="random", check=False)
    kinds = []
    for unit in qk.tasks.binding(6).test(6):
        again = Again.of(scope, ids_of(nano, unit[0].text))
        looks = []
        for head in scope.heads():
            weights = again.calls[head.layer].attention([head.index])[0, 0, -1].clone()
            weights[0] = 0
            if float(weights.max()) > 0.3:
                looks.append(Look(head, len(again.ids) - 1, int(weights.argmax())))
        kinds += (
            [reason.kind for reason in Because(again, looks).reasons(follow=False)] if looks else []
        )
    assert len(kinds) > 20
    assert sum(kind in ("same word", "position") for kind in kinds) <= 0.1 * len(kinds)


def test_carriers_put_back_what_the_whole_side_puts_back(nano):
    """All writers together are the whole side; the unchanged run's own parts change nothing."""
    probe = PromptRun(nano, COPIED)
    one = probe.head("L1H1")
    because = Because(
        Again(nano, one.asked.inputs, one.run.calls), [Look(one.head, one.asked.query, one.key)]
    )
    reason = because.reasons()[0]
    carriers = Carriers(probe.run, because, reason)
    word = next(word for word in because.words if word.start == reason.words[0]["position"])
    changed = carriers._changed(because.alternatives(word)[0])
    for side in ("key", "query"):
        every = carriers._put_back(changed, probe.run, side, [carriers.names])
        assert float(every[0]) == pytest.approx(carriers._whole(changed, side), abs=1e-4)
        none = carriers._put_back(changed, changed, side, [carriers.names[:2]])
        assert float(none[0]) == pytest.approx(carriers._attention(changed), abs=1e-5)
    for row in carriers.rows():
        assert row["verdict"] in ("shown", "not shown")
        assert row["restored"] >= row["changed"] - 0.05


def test_heads_stand_by_what_they_change_and_answers_are_compared_and_drawn(nano):
    answer = qk.why(nano, PROMPT)
    rows = answer.tables["heads"]
    order = {"for": 0, "against": 1, "neither": 2}
    places = [(order[row["direction"]], -abs(row["difference"])) for row in rows]
    assert places == sorted(places)
    for row in rows:
        change = row["difference"]
        matters = abs(change) >= 0.1 and abs(change) > abs(row["second"] or 0)
        way = ("for" if change < 0 else "against") if matters else "neither"
        assert row["direction"] == way
        assert row["lead"] == pytest.approx(row["lead_before"] + change, abs=1e-5)
    assert re.search(r"rather than 'B' \(\S+%\), ahead", qk.why(nano, PROMPT, versus="B").answer)
    # nothing else has 0.1%
    assert "'O' (0.0%), the word of the prompt most like it there, ahead" in answer.answer
    assert "'hat' (0.0%), the word of the prompt most" in qk.why(nano, "hat: O jam:").answer
    with pytest.raises(BadInput, match="is the next token itself"):
        qk.why(nano, PROMPT, versus="Z")
    first, other = (qk.why(nano, unit[0].text, "L1H1") for unit in qk.tasks.induction().test(2))
    rows = first.diff(other).table()
    assert {"attention", "because", "writers"} <= {row["table"] for row in rows}
    assert abs(rows[0]["change"]) == max(abs(row["change"]) for row in rows)
    graph, edges = (
        first.to_networkx(),
        [row for row in first.tables["graph"] if row["source"] is not None],
    )
    assert (len(graph), graph.number_of_edges()) == (len(first.tables["nodes"]), len(edges))
    mean, low, high = interval(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert (float(mean), float(high - mean)) == (1.5, pytest.approx(2.3534 * 1.29099 / 2, abs=1e-3))
    assert float(low) == pytest.approx(3.0 - float(high), abs=1e-5)


def test_a_pair_without_other_words_takes_nothing_from_the_next(nano, monkeypatch):
    because = Because(Again.of(nano, ids_of(nano, PROMPT)), [Look(Head(2, 3), 11, 6)])
    words = {word.start: word for word in because.words}
    pairs = [tuple(words[i] for i in places) for places in ((5, 11), (4, 10))]
    relations = Relations(because, {}, near=True)
    alone, none = relations.test_pairs({pairs[1]: 12})[pairs[1]], because.others.of
    monkeypatch.setattr(
        because.others, "of", lambda word, n: [] if word in pairs[0] else none(word, n)
    )
    both = relations.test_pairs(dict.fromkeys(pairs, 12))
    assert both[pairs[0]] is None
    assert both[pairs[1]].same == alone.same
    for name in ("mean", "low", "high", "control"):
        torch.testing.assert_close(getattr(both[pairs[1]], name), getattr(alone, name))


def test_of_a_long_prompt_copies_and_near_words_are_tried(nano, monkeypatch):
    monkeypatch.setattr("qkscope.findings.because._AFFORDABLE", 70)
    because = Because(Again.of(nano, ids_of(nano, PROMPT)), [Look(Head(2, 3), 11, 6)])
    reason = because.reasons()[0]
    assert 0 < reason.tried < reason.seen
    assert {4, 10} <= {word.start for word in because.words}, (
        "both places of the word that is asked about"
    )


class _Squares(TorchDispatchMode):
    """Notes every tensor of tokens by tokens that is made."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.sizes, self.made = {tokens - 1, tokens, tokens + 1}, set[tuple[int, ...]]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if (
                isinstance(value, torch.Tensor)
                and sum(size in self.sizes for size in value.shape) > 1
            ):
                self.made.add((str(function), *value.shape))
        return out


@pytest.mark.parametrize("alone", [True, False])
def test_why_makes_nothing_of_tokens_by_tokens(nano, monkeypatch, alone):
    """Words changed, writers put back, cut and followed, whether tokens run alone or whole prompts
    do.
    """
    for name, value in (
        ("model.prefix._ROOM", {"cpu": 2**14}),
        ("findings.graph._SLOTS", 64),
    ):
        monkeypatch.setattr(f"qkscope.{name}", value)
    monkeypatch.setattr("qkscope.findings.because._AFFORDABLE", 1024)
    if not alone:
        monkeypatch.setattr(Again, "runs_alone", lambda *_: False)
    words = [word for word in sorted(nano.tokenizer.get_vocab()) if word.isalpha()][:40]
    prompt = " ".join([*(words * 5)[:192], "hat", ":", "O", "jam", ":", "Z", "jam", ":"])
    with _Squares(len(nano.encode([prompt]).inputs["input_ids"][0])) as squares:
        answer = qk.why(nano, prompt, "L2H3", depth=2)
    assert answer.tables["because"]
    assert answer.tables["carriers"] or not alone
    assert not squares.made


def test_tokens_of_a_model_in_half_precision_run_alone():
    scope = qk.Scope.from_model(tiny_model("llama").bfloat16(), check=False)
    assert Again.of(scope, torch.arange(3, 60)).runs_alone(), (
        "otherwise every changed prompt runs as a whole"
    )
