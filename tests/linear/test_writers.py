"""A head's queries and keys are the sum of what writers put into the stream, in every family that
is served.
"""

import pytest
import torch
from torch import nn

from batches import each_head, look, padded, sides_of
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import BIAS, EMBEDDING
from qkscope.model.block_tree import Sum, read_blocks, walk
from qkscope.model.scope import Scope
from qkscope_papers.families import sum_error, tiny_model, trace_error, two_prompts

NOT_TRACED = {
    "jetmoe": "no one matrix adds up its heads' outputs",
    "qwen3_next": "no one matrix adds up its heads' outputs",  # gated before it
    "gemma3n_text": "it has 4 residual streams",
}
TRACED = [  # of those that differ in attention, blocks or positions; all others: `qkscope models`
    "qwen3", "phi3", "gemma3_text", "opt", "gpt_oss", "phi", "qwen2_moe", "glm4", "gpt_bigcode", "ctrl", "nanochat",
    "hunyuan_v1_dense", "falcon_h1", "modernbert", "gptj", "mpt", "mpnet", "lfm2", "jamba", "bart", "xglm",
]  # fmt: skip
THREE = {"num_hidden_layers": 3}
DEEPER = [
    ("llama", {"num_hidden_layers": 4}), ("gemma2", {"num_hidden_layers": 4}), ("olmo2", THREE), ("bert", THREE),
    ("granite", THREE), ("cohere", THREE), ("mixtral", THREE),
    ("gpt2", THREE | {"scale_attn_by_inverse_layer_idx": True}), ("gpt_neox", THREE | {"use_parallel_residual": False}),
    ("stablelm", {"use_parallel_residual": True}), ("opt", {"do_layer_norm_before": False}),
    ("falcon", THREE | {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", THREE | {"parallel_attn": False, "bias": True}), ("deepseek_v3", THREE | {"q_lora_rank": None}),
    ("bloom", THREE | {"apply_residual_connection_post_layernorm": True}),
    ("gpt_neo", {"num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]]}),
    # scaled by the number of the column where nothing rotates: a part has to stand in its own
    # column
    ("llama4_text", {"no_rope_layers": [1, 0], "floor_scale": 2}),
]  # fmt: skip


def recorded(scope, layer):
    inputs, places = two_prompts(scope)
    reader = Reader(scope, [head for head in scope.heads() if head.layer == layer])
    return reader, reader.record(inputs, places), places


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize(("family", "overrides"), [*((family, {}) for family in TRACED), *DEEPER])
def test_parts_sum_to_queries_keys_and_logits_at_every_layer_and_three_ways_agree(
    family, overrides
):
    """Writers pushed up through every layer, directions of one head pulled down, and those of all
    heads at once.
    """
    scope = look(family, **overrides)
    reader = Reader(scope, scope.heads())
    assert reader.writers(0) == [EMBEDDING, BIAS]
    for side in sides_of(scope):
        inputs, places = padded(scope, side)
        run = reader.record(inputs, places)
        keys, draw = torch.arange(1, run.columns.shape[1]), torch.Generator().manual_seed(0)
        weights = (
            torch.randn(2, len(reader.heads), len(keys), generator=draw) * places.key_mask[:, None]
        )
        told = each_head(run, weights)
        for layer, pieces in run.streams(max(reader.layers)):
            names = [writer for piece in pieces for writer in piece.writers if writer != BIAS]
            assert [*names, BIAS] == reader.writers(layer)
            for head in (head for head in reader.heads if head.layer == layer):
                true = {own: run.true(head, own) for own in ("query", "key")}
                parts = {own: run.read(head, own, pieces) for own in true}
                for own, mask in (("query", torch.ones(2, 1)), ("key", places.key_mask)):
                    shown = mask[:, None, :, None]
                    apart = ((parts[own].sum(1) - true[own]) * shown[:, 0]).abs().max()
                    assert apart <= 2e-5 * (parts[own] * shown).abs().max()
                assert sum_error(run, head, places.key_mask) <= 2e-5
                w = weights[:, reader.heads.index(head)]
                total, asked = run.ask(head, 0, keys, w)
                met = torch.einsum("nk,nkd->nd", w, true["key"]) * run.calls[layer].scale
                q = true["query"][:, 0]
                read = {
                    "query": torch.einsum("ncd,nd->nc", parts["query"][:, :, 0], met),
                    "key": torch.einsum("nckd,nd,nk->nc", parts["key"], q, w)
                    * run.calls[layer].scale,
                }
                at, by_query, by_key = next(told)
                assert at == head
                for own, many in (("query", by_query), ("key", by_key)):
                    answer = run.answer(asked[own]).values
                    one = torch.stack(
                        [answer[name].sum(1) for name in reader.writers(layer)], dim=1
                    )
                    for values in (read[own], one, many):
                        assert (values - read[own]).abs().max() <= 2e-5 * values.abs().max()
                        assert (values.sum(1) - total).abs().max() <= 2e-5 * values.abs().max()


@pytest.mark.parametrize(("family", "reason"), NOT_TRACED.items())
def test_a_family_whose_blocks_cannot_be_separated_is_refused_with_the_reason(family, reason):
    scope = look(family)
    with pytest.raises(BadInput, match=f"cannot be traced: .*{reason}"):
        Reader(scope, scope.heads()[-1:])


def test_nonlinear_layers_show_and_quantised_weights_are_refused():
    scope = look("olmo", clip_qkv=0.5)
    reader, run, places = recorded(scope, 1)
    assert max(sum_error(run, head, places.key_mask) for head in reader.heads) > 1e-3
    assert trace_error(look("olmo")) < 1e-5
    scope = look("llama")
    weight = scope.model.model.layers[1].self_attn.q_proj
    weight.weight = nn.Parameter((weight.weight * 64).to(torch.int8), requires_grad=False)
    with pytest.raises(
        BadInput,
        match=r"1\.self_attn\.q_proj\.weight is stored in torch\.int8.* without quantisation",
    ):
        Reader(scope, [Head(1, 0)])


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bert", "gemma2"])
def test_a_block_that_writes_nothing_is_taken_apart_all_the_same(family):
    model = tiny_model(family)
    scope = Scope.from_model(model, check=False)
    whole = Reader(scope, [Head(1, 0)]).writers(1)
    block = read_blocks(model, scope.facts.layer_of)[0]
    with torch.no_grad():
        for parameter in block.output.parameters():
            parameter.zero_()
    assert trace_error(scope) < 1e-5
    assert sorted(Reader(scope, [Head(1, 0)]).writers(1)) == sorted(whole)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "granite", "gpt_neox", "bert", "mixtral", "falcon_h1"]
)
def test_half_precision_is_taken_apart_as_full_precision_is(family):
    full, half = look(family), look(family, torch.bfloat16)
    for ours, theirs in zip(
        *(read_blocks(scope.model, scope.facts.layer_of) for scope in (full, half)), strict=True
    ):
        assert [type(node) for node in walk(ours.tree)] == [
            type(node) for node in walk(theirs.tree)
        ]
        assert [type(module) for module in ours.parts] == [type(module) for module in theirs.parts]
        numbers = [
            torch.tensor(
                [
                    number
                    for node in walk(block.tree)
                    if isinstance(node, Sum)
                    for number, _ in node.terms
                ]
            )
            for block in (ours, theirs)
        ]
        torch.testing.assert_close(*numbers, atol=0.01, rtol=0)
    assert trace_error(half) < 2e-2


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_no_hook_stays_behind_also_when_the_forward_fails(family):
    scope = look(family)
    implementation, before = scope.model.config._attn_implementation, hooks_of(scope.model)
    reader, run, places = recorded(scope, 1)
    run.read(Head(1, 0), "query", run.stream(1))
    assert hooks_of(scope.model) == before
    (part,) = reader.blocks[0].parts

    def fail(*_args):
        raise RuntimeError("out of memory")

    hook = part.register_forward_hook(fail)
    for asked in (
        lambda: reader.record(run.inputs, places),
        lambda: read_blocks(scope.model, scope.facts.layer_of),
    ):
        with pytest.raises(RuntimeError, match="out of memory"):
            asked()
    hook.remove()
    assert hooks_of(scope.model) == before
    assert scope.model.config._attn_implementation == implementation
