"""A bridge of TransformerLens and a model of nnsight are looked into, and a subspace is a hook in
both.

The objects are the tools' own, around models that we ship; nothing of them is played by something
else.
"""

import copy
from typing import Any

import nnsight
import pytest
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

import qkscope as qk
from qkscope import BadInput, Scope
from qkscope_papers.families import tiny_model
from swapped_prompt import difference, own_feature, swapped_prompt

HEAD = {"nano:mixed": "L1H3", "smollm2-135m": "L18H6"}
TEXT = "hat: O\njam: Z\ncat: B\njam:"


@pytest.fixture(scope="module", params=["nano:mixed", "smollm2-135m"])
def plain(request: pytest.FixtureRequest) -> Scope:
    """The model as transformers has it, with the attention that both tools give weights of."""
    return Scope.load(request.param, attn="eager")


def bridged(scope: Scope) -> Any:
    model, tokenizer = copy.deepcopy(scope.model), copy.deepcopy(scope.tokenizer)
    return TransformerBridge.boot_transformers("mine", hf_model=model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def bridge(plain: Scope) -> Any:
    return bridged(plain)


@pytest.fixture(scope="module")
def lm(plain: Scope) -> Any:
    model, tokenizer = copy.deepcopy(plain.model), copy.deepcopy(plain.tokenizer)
    return nnsight.TransformersModel(model, tokenizer=tokenizer, task="text-generation")


def captured(scope: Scope, encoded: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = scope.capture_inputs(encoded, places=encoded.everywhere())
    return found.q, found.k


def largest(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_a_bridge_is_looked_into_and_runs_on_as_before(plain, bridge):
    ids, seen = bridge.to_tokens(TEXT), []
    before = bridge(ids)
    scope = Scope.from_model(bridge)
    assert (
        scope.weights_hash == Scope.from_model(copy.deepcopy(plain.model), check=False).weights_hash
    )
    assert torch.equal(
        scope.encode([TEXT]).inputs["input_ids"], ids
    )  # its tokenizer, which puts a first token
    encoded = plain.encode([TEXT])
    assert largest(captured(scope, encoded), captured(plain, encoded)) == 0
    after = bridge.run_with_hooks(
        ids, fwd_hooks=[("blocks.1.attn.hook_rot_k", lambda x, hook: seen.append(x.shape))]
    )
    assert torch.equal(after, before)
    assert seen == [(1, ids.shape[1], scope.n_kv_heads, scope.d_head)]
    assert torch.equal(scope.model(ids).logits, before)


def test_verbs_answer_the_same_of_a_wrapped_model():
    plain = Scope.load("nano:mixed", attn="eager")
    wrapped = [bridged(plain), nnsight.NNsight(copy.deepcopy(plain.model))]
    for scope in (
        Scope.from_model(one, plain.tokenizer, name=plain.name, check=False) for one in wrapped
    ):
        for ask in (
            lambda scope: qk.why(scope, TEXT, head="L1H3"),
            lambda scope: qk.trace(scope, qk.tasks.binding(4), "L1H3", 4, progress=False),
        ):
            ours, theirs = ask(scope), ask(plain)
            assert (ours.answer, ours.tables) == (theirs.answer, theirs.tables)


@pytest.mark.parametrize(
    "family",
    ["qwen3", "gemma2", "gemma3_text", "gpt_oss", "phi3", "gpt2", "gptj", "falcon", "mixtral"],
)
def test_bridges_of_other_families_give_their_queries_and_keys(family):
    model, tokenizer = tiny_model(family), Scope.load("nano:mixed").tokenizer
    model.config.architectures = [type(model).__name__]
    model.set_attn_implementation("eager")
    plain = Scope.from_model(copy.deepcopy(model), check=False)
    scope = Scope.from_model(
        TransformerBridge.boot_transformers(family, hf_model=model, tokenizer=tokenizer)
    )
    encoded = plain.encode([qk.Example(ids=list(range(5, 14)))])
    assert largest(captured(scope, encoded), captured(plain, encoded)) == 0


def test_a_bridge_with_other_weights_or_around_no_model_of_transformers_is_refused():
    plain = Scope.load("nano:mixed")
    bridge = bridged(plain)
    bridge.enable_compatibility_mode(no_processing=True)
    Scope.from_model(bridge, check=False)
    bridge.enable_compatibility_mode()
    with pytest.raises(
        BadInput,
        match=r"layer norms folded, .* boot it again, .* without enable_compatibility_mode",
    ):
        Scope.from_model(bridge)
    again = bridged(plain)
    again.process_weights(fold_ln=False, center_writing_weights=False)
    with pytest.raises(BadInput, match="weights of this TransformerBridge were processed"):
        Scope.from_model(again)
    config = TransformerBridgeConfig(
        n_layers=1, d_model=8, n_ctx=8, d_head=4, n_heads=2, d_vocab=10, act_fn="relu"
    )
    says = r"wraps no model of transformers, so it cannot be looked into: .*TransformerBridge\.boot_transformers"
    with pytest.raises(BadInput, match=says):
        Scope.from_model(TransformerBridge.boot_native(config))
    with pytest.raises(BadInput, match="this NNsight wraps no model of transformers"):
        Scope.from_model(nnsight.NNsight(torch.nn.Linear(2, 2)))


def test_a_hook_in_a_bridge_swaps_as_the_closed_form_does(plain, bridge):
    feature = own_feature(plain, HEAD[plain.name])
    prompt, head = swapped_prompt(plain, feature), feature.head
    hook, pattern = (
        feature.as_hook("swap", *prompt.tokens),
        f"blocks.{head.layer}.attn.hook_pattern",
    )
    found = {}
    for name, hooks in {"before": [], "after": [(hook.name, hook)]}.items():
        keep = (pattern, lambda x, hook, name=name: found.__setitem__(name, x[0, :, prompt.query]))
        bridge.run_with_hooks(prompt.ids, fwd_hooks=[*hooks, keep])
    assert difference(found["before"][head.index], prompt.before, prompt.tokens) < 2e-6
    assert difference(found["after"][head.index], prompt.after, prompt.tokens) < 2e-6
    moved = (found["after"] - found["before"]).abs().amax(1) > 1e-4
    group = [head.kv(plain.group_size) == i // plain.group_size for i in range(plain.n_heads)]
    assert bool(moved[head.index])
    assert not bool(
        (moved & ~torch.tensor(group)).any()
    )  # the whole group sees it, and nobody else


def test_a_model_of_nnsight_is_looked_into_and_runs_on_as_before(plain, lm):
    with lm.trace(TEXT):
        before = lm.output.logits.save()
    scope = Scope.from_model(lm)
    assert {x.data_ptr() for x in scope.model.parameters()} == {
        x.data_ptr() for x in lm._module.parameters()
    }
    encoded = scope.encode([TEXT])
    assert torch.equal(encoded.inputs["input_ids"], plain.encode([TEXT]).inputs["input_ids"])
    assert largest(captured(scope, encoded), captured(plain, encoded)) == 0
    with lm.trace(TEXT):
        keys = lm.model.layers[1].self_attn.source.apply_rotary_pos_emb_0.output[1].save()
        after = lm.output.logits.save()
    assert torch.equal(after, before)
    assert keys.shape == (1, plain.n_kv_heads, encoded.inputs["input_ids"].shape[1], plain.d_head)
    # by now the forward of that layer's attention is nnsight's own, in which the tap would not hear
    # the rotation
    one, other = (
        s.capture_inputs(encoded, places=encoded.everywhere(), space="pre_rope")
        for s in (scope, plain)
    )
    assert torch.equal(one.k, other.k)


def test_a_hook_in_a_trace_swaps_as_the_closed_form_does(plain, lm):
    feature = own_feature(plain, HEAD[plain.name])
    prompt, head = swapped_prompt(plain, feature), feature.head
    hook = feature.as_hook("swap", *prompt.tokens)
    with lm.trace(prompt.ids):
        attention = lm.model.layers[head.layer].self_attn
        rotated = attention.source.apply_rotary_pos_emb_0
        q, k = rotated.output
        rotated.output = (q, hook(k))
        weights = attention.output[1].save()
    assert difference(weights[0, head.index, prompt.query], prompt.after, prompt.tokens) < 2e-6
    assert difference(weights[0, head.index, prompt.query], prompt.before, prompt.tokens) > 0.01
