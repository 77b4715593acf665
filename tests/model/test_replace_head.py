"""A rule in a head's place holds wherever the model runs, and equals plain attention code."""

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import repeat_kv

import qkscope as qk
from batches import look
from qkscope.changes import Pattern
from qkscope.findings.rules import AfterCopy, First, Offset, Rule
from qkscope.heads import Head
from qkscope.rerun.reference import run_plainly

PROMPT = "hat: O jam: Z cat: B jam:"
IDS = tuple(range(12, 21))
RULE = Rule([(0.5, AfterCopy()), (0.3, Offset(1)), (0.2, First())])


def logits(scope, inputs):
    with torch.no_grad():
        return scope.model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss", "gptj", "qwen3"])
def test_the_head_attends_as_the_rule_says(family):
    """With a soft-cap, an attention sink, or attention code of the family's own as well."""
    scope = look(family)
    example = qk.Example(ids=IDS)
    plain = scope.attention(example, "L1H0")
    rule = Rule([(0.7, Offset(2)), (0.3, First())])
    with scope.replace_head("L1H0", rule):
        replaced = scope.attention(example, "L1H0")
    assert not torch.allclose(plain, replaced, atol=0.05)
    torch.testing.assert_close(replaced, rule.attention(torch.tensor(IDS)), atol=1e-5, rtol=1e-4)


def test_the_models_logits_are_those_of_plain_attention_code(nano):
    inputs = nano.encode([PROMPT]).inputs
    says = RULE.attention(inputs["input_ids"])

    def attend(module, q, k, v, mask, scaling, dropout=0.0, **_):
        k = repeat_kv(k, module.num_key_value_groups)
        v = repeat_kv(v, module.num_key_value_groups)
        hidden = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        row = (q @ k.mT * scaling).masked_fill(hidden, -1e9).softmax(-1)
        if module.layer_idx == 1:
            row[:, 2] = says
        return (row @ v).transpose(1, 2).contiguous(), row

    with nano.replace_head("L1H2", RULE):
        ours = logits(nano, inputs)
    before = nano.model.config._attn_implementation
    AttentionInterface.register("rule_in_place", attend)
    nano.model.config._attn_implementation = "rule_in_place"
    theirs = logits(nano, inputs)
    nano.model.config._attn_implementation = before
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours, logits(nano, inputs), atol=0.05)


def test_a_padded_batch_gives_what_single_prompts_give(nano):
    prompts = [PROMPT, "hat jam hat"]
    with nano.replace_head("L1H1", RULE):
        together = logits(nano, nano.encode(prompts).inputs)[:, -1]
        alone = [logits(nano, nano.encode([prompt]).inputs)[0, -1] for prompt in prompts]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=1e-4)


def test_why_and_generate_obey_and_later_blocks_come_on_top(nano):
    plain = nano.generate("hat: O jam: Z jam:", 1)
    first = Rule([(1.0, First())])
    with nano.replace_head("L1H1", first):
        table = qk.why(nano, PROMPT, head="L1H1").tables["attention"]
        share = sum(row["attention"] for row in table if row["position"] == 0)
        assert share == pytest.approx(1, abs=1e-4)
        with nano.replace_head("L1H1", Rule([(0.6, Offset(1)), (0.4, Offset(2))])):
            with nano.hide("L1H1", key=3):
                row = nano.attention(PROMPT, "L1H1", query=4)
            torch.testing.assert_close(row[2], torch.tensor(1.0))
            assert float(nano.attention(PROMPT, "L1H1", query=4)[3]) == pytest.approx(0.6)
    heads = [f"L{layer}H{head}" for layer in (1, 2) for head in range(4)]
    blocks = [nano.replace_head(head, first) for head in heads]
    for block in blocks:
        block.__enter__()
    changed = nano.generate("hat: O jam: Z jam:", 1)
    for block in reversed(blocks):
        block.__exit__(None, None, None)
    assert changed != plain
    assert nano.generate("hat: O jam: Z jam:", 1) == plain


def test_the_same_value_is_a_change_of_a_plain_run(nano):
    ids = nano.encode([PROMPT]).inputs["input_ids"][0]
    run = run_plainly(nano, ids, [Pattern(Head(1, 2), RULE)])
    torch.testing.assert_close(run.attention[1][2], RULE.attention(ids), atol=1e-5, rtol=1e-4)
    with nano.replace_head("L1H2", RULE):
        torch.testing.assert_close(
            run.logits[-1], logits(nano, nano.encode([PROMPT]).inputs)[0, -1]
        )


def test_what_gives_no_pattern_is_refused(nano):
    class Ahead:
        def attention(self, ids):
            return torch.full((len(ids), len(ids)), 1 / len(ids))

    with pytest.raises(qk.BadInput, match="rule"):
        nano.replace_head("L1H0", "induction")
    with pytest.raises(qk.BadInput, match="stands before it"), nano.replace_head("L1H0", Ahead()):
        nano.attention(PROMPT, "L1H0")
