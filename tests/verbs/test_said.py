"""What answers say: controls counted, no head below chance, tokens with their blanks, and no parts
that do not sum.
"""

import re

import pytest
import torch
from torch import nn

import qkscope as qk
from qkscope.findings.head_rows import ATTENDED
from qkscope.findings.verdicts import FEWEST_SETS, controls_of
from qkscope.heads import parse_writers
from qkscope.model.encode import token_texts
from qkscope.sums.relative_logits import different, draw_alike

WORDS = "hat jam cat pen hat jam"


def test_controls_are_counted_once_each_and_few_heads_are_joined_by_the_next_layers(nano):
    found = qk.why(nano, WORDS, "L1H0", draws=20)
    one, two = (row for row in found.tables["cuts"] if row["side"] == "key" and row["k"] <= 2)
    assert (one["draws"], one["sets"], one["verdict"]) == (
        20,
        3,
        "untested",
    )  # layer 0 has three other heads
    assert (two["sets"], two["verdict"]) == (1, "untested")
    assert "(the one other set of heads: " in qk.trace(nano, WORDS, "L1H0").answer
    deeper = qk.why(nano, WORDS, "L2H3", draws=20)
    for row in deeper.tables["cuts"]:
        assert row["sets"] <= row["draws"]
        too_little = row["sets"] < FEWEST_SETS or row["before"] < ATTENDED
        assert (row["verdict"] == "untested") == too_little
    addresses = parse_writers([f"L{layer}H{i}" for layer in (0, 1) for i in range(4)])
    near = {draw_alike([0], addresses, seed)[0] for seed in range(60)}
    wide = {draw_alike([0], addresses, seed, least=FEWEST_SETS)[0] for seed in range(60)}
    assert (near, wide) == ({1, 2, 3}, set(range(1, 8)))
    assert len(different({"key": draw_alike([0, 1], addresses, seed)} for seed in range(20))) == 1


def test_heads_below_chance_are_not_listed(nano, qkscope):
    rows = qk.find_heads(nano, qk.tasks.ioi(seed=0), n=16, progress=False).tables["heads"]
    below = [row["head"] for row in rows if 0.1 <= row["accuracy"] <= row["chance"]]
    said = qkscope("heads", "ioi", "--model", "nano:mixed", "-n", 16, "--threshold", 0.1)[1]
    assert below
    assert not [head for head in below if re.search(rf"^{head} ", said, re.MULTILINE)]


def test_tokens_of_sentencepiece_keep_their_blank(nano):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "▁Mary": 1, "▁gave": 2, "n": 3, "▁": 4}
    made = Tokenizer(
        models.Unigram([(token, -float(i)) for token, i in vocabulary.items()], 0, False)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    scope = qk.Scope(nano.model, PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"))
    assert scope.tokenizer.decode([1]) == "Mary"
    assert token_texts(scope, [1, 2, 3]) == [" Mary", " gave", "n"]


LENGTH = 12
PROMPT = "hat jam cat pen cup hat jam cat pen cup hat jam cat pen cup hat"


class Rescaled(nn.Linear):
    """Queries rescaled by a number that depends on themselves, from some length on: no norm
    explains it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = super().forward(x)
        return q if x.shape[1] < LENGTH else q * (0.5 + q.abs().mean(-1, keepdim=True))


@pytest.fixture(scope="module")
def broken(nano) -> qk.Scope:
    model = qk.Scope.load("nano:mixed", check=False).model
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = Rescaled
    return qk.Scope.from_model(
        model, nano.tokenizer, name="rescaled"
    )  # passes every check, on its short prompts


def test_why_gives_no_shares_of_parts_that_do_not_sum(broken):
    found = qk.why(broken, PROMPT, "L1H0", draws=2)
    assert found.tables["check"][0]["sum_error"] > 1e-3
    assert found.answer.startswith("The parts of L1H0 do not sum to its logit")
    assert set(found.tables) == {"said", "attention", "output", "check"}
    assert "written" not in str(found)
    assert "%" in found.tables["said"][0]["line"]  # where it looks was measured
    short = qk.why(broken, "hat jam cat hat", "L1H0", draws=2)  # below that length all is as ever
    assert {"writers", "cuts"} <= set(short.tables)


@pytest.mark.parametrize(
    ("what", "heads"), [("prompt", "L1H0,L2H3"), ("task", "L1H0"), ("task", "all")]
)
def test_trace_gives_no_shares_of_parts_that_do_not_sum(broken, what, heads):
    asked = {"prompt": PROMPT, "task": qk.tasks.induction(seed=0)}[what]
    found = qk.trace(broken, asked, heads, 4, draws=2, whole=False, progress=False)
    wrong = [row["head"] for row in found.tables["check"] if row["sum_error"] > 1e-3]
    assert "L1H0" in wrong
    assert "do not sum" in found.answer
    for name in ("writers", "pairs", "cuts", "edges", "graph", "sources", "heads"):
        assert not [row for row in found.tables.get(name, ()) if row["head"] in wrong]


@pytest.mark.parametrize(
    ("writers", "kinds"),
    [
        ("L1H0, L2H3", "heads"),
        ("M3", "MLPs"),
        ("embedding", "writers"),
        ("L1H0, M3", "writers"),
    ],
)
def test_controls_are_called_what_they_are(writers, kinds):
    assert controls_of({"writers": writers, "sets": 17}) == f"17 different sets of random {kinds}"
