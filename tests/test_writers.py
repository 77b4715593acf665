"""A head's queries and keys are the sum of what writers put into the stream, in every family that is served."""

from __future__ import annotations

import pytest
import torch

from qkscope.capture.families import FAMILIES, _batch, sum_error, tiny_model, trace_error
from qkscope.capture.inputs import short_inputs
from qkscope.capture.marginals import marginals
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.stream import Part, Sum, read_blocks
from qkscope.capture.writers import BIAS, EMBEDDING, Reader
from qkscope.errors import BadInput
from qkscope.heads import Head

NOT_SERVED = [
    "diffllama", "mamba", "mllama", "t5", "deberta-v2",
]  # fmt: skip
NOT_TRACED = {
    "jetmoe": "no one matrix adds up its heads' outputs",
    "qwen3_next": "no one matrix adds up its heads' outputs",  # gated before it
    "gemma3n_text": "it has 4 residual streams",
}
TRACED = [family for family in FAMILIES if family not in [*NOT_SERVED, *NOT_TRACED]]
HELD = ["nanochat", "hunyuan_v1_dense", "llama4_text", "deepseek_v3"]
DEEPER = [
    ("llama", {"num_hidden_layers": 4}),
    ("gemma2", {"num_hidden_layers": 4}),
    ("olmo2", {"num_hidden_layers": 3}),
    ("bert", {"num_hidden_layers": 3}),
    ("granite", {"num_hidden_layers": 3}),
    ("cohere", {"num_hidden_layers": 3}),
    ("mixtral", {"num_hidden_layers": 3}),
    ("dinov2", {"num_hidden_layers": 3}),
    ("gpt2", {"num_hidden_layers": 3, "scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", {"num_hidden_layers": 3, "use_parallel_residual": False}),
    ("stablelm", {"use_parallel_residual": True}),
    ("opt", {"do_layer_norm_before": False}),
    ("falcon", {"num_hidden_layers": 3, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"num_hidden_layers": 3, "parallel_attn": False, "bias": True}),
    ("bloom", {"num_hidden_layers": 3, "apply_residual_connection_post_layernorm": True}),
    ("gpt_neo", {"num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]]}),
    ("deepseek_v3", {"num_hidden_layers": 3, "q_lora_rank": None}),
    # scaled by the number of the column where nothing rotates: a part has to stand in its own column
    ("llama4_text", {"no_rope_layers": [1, 0], "floor_scale": 2}),
]


def look(family, dtype=torch.float32, **overrides):
    return Scope.from_model(tiny_model(family, **overrides).to(dtype), check=False)


def recorded(scope, layer):
    inputs, places = _batch(scope)
    reader = Reader(scope, [head for head in scope.heads() if head.layer == layer])
    return reader, reader.record(inputs, places), places


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize("family", TRACED)
def test_parts_sum_to_queries_keys_and_logits(family):
    scope = look(family)
    reader, found, places = recorded(scope, scope.n_layers - 1)
    named = [writer for piece in reader.stream(found, scope.n_layers - 1) for writer in piece.writers]
    assert [writer for writer in named if writer != BIAS] == reader.writers(scope.n_layers - 1)[:-1]
    for head in reader.heads:
        for side, mask in (("query", torch.ones(2, 1)), ("key", places.key_mask)):
            parts = reader.turn(found, head.layer, reader.read(found, head, side), side)
            true = reader.true(found, head, side)
            assert parts.shape[1] == len(reader.writers(head.layer))
            apart = ((parts.sum(1) - true) * mask[..., None]).abs().max()
            assert apart < 1e-5 * parts.abs().max()
        assert sum_error(reader, found, head, places.key_mask) < 1e-5


@pytest.mark.parametrize(("family", "overrides"), DEEPER)
def test_they_do_in_deeper_models_and_other_settings(family, overrides):
    assert trace_error(look(family, **overrides)) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "nanochat", "vit", "gemma2"])
def test_before_layer_0_only_the_embedding_writes(family):
    reader, found, places = recorded(look(family), 0)
    assert reader.writers(0) == [EMBEDDING, BIAS]
    for head in reader.heads:
        assert reader.read(found, head, "key").shape[1] == 2
        assert sum_error(reader, found, head, places.key_mask) < 1e-5


@pytest.mark.parametrize(("family", "reason"), NOT_TRACED.items())
def test_a_family_whose_blocks_cannot_be_separated_is_refused_with_the_reason(family, reason):
    scope = look(family)
    with pytest.raises(BadInput, match=f"cannot be traced: .*{reason}"):
        Reader(scope, scope.heads()[-1:])


def test_a_layer_that_is_not_linear_with_its_norms_held_is_refused():
    scope = look("olmo", clip_qkv=0.5)
    with pytest.raises(BadInput, match="even with its norms held, its queries are no linear function"):
        Reader(scope, scope.heads()[-1:])


def test_one_layer_has_nobody_before_it():
    with pytest.raises(BadInput, match="only the embedding writes"):
        trace_error(look("llama", num_hidden_layers=1))


@pytest.mark.parametrize("family", HELD)
def test_layers_without_weights_to_read_have_none_to_fold(family):
    reader, _, _ = recorded(look(family), 1)
    assert reader.held == {1}
    with pytest.raises(BadInput, match="no single weight matrix"):
        reader.matrix(reader.heads[0], "key")


@pytest.mark.parametrize("family", [*HELD, "llama", "gemma2", "bert"])
def test_marginals_of_many_heads_sum_to_their_relative_logits(family):
    scope = look(family, **({"num_hidden_layers": 3} if family != "llama4_text" else {}))
    inputs, places = _batch(scope)
    reader = Reader(scope, scope.heads())
    found = reader.record(inputs, places)
    weights = torch.randn(2, len(reader.heads), places.keys.shape[1], generator=torch.Generator().manual_seed(0))
    weights = weights * places.key_mask[:, None]
    told = list(marginals(reader, found, weights))
    assert [head for head, _, _ in told] == reader.heads
    for i, (head, query, key) in enumerate(told):
        q, k = (reader.true(found, head, side) for side in ("query", "key"))
        whole = torch.einsum("nd,nkd,nk->n", q[:, 0], k, weights[:, i]) * found.captured.scale[i]
        for parts in (query, key):
            assert parts.shape == (2, len(reader.writers(head.layer)))
            assert (parts.sum(1) - whole).abs().max() < 1e-5 * parts.abs().max()


@pytest.mark.parametrize("family", [*HELD, "llama", "qwen3", "falcon_h1"])
def test_the_true_stream_gives_the_true_vectors_with_norms_live(family):
    reader, found, places = recorded(look(family), 1)
    for side, mask in (("query", torch.ones(2, 1)), ("key", places.key_mask)):
        x = found.entered[1][:, found.at(side)]
        for head in reader.heads:
            made = reader.vectors(head, side, torch.stack([x, 2 * x]), found)
            true = reader.true(found, head, side)
            for one in made:  # a norm takes the length away
                apart = (reader.turn(found, 1, one[:, None], side)[:, 0] - true) * mask[..., None]
                assert apart.abs().max() < 1e-3 * true.abs().max()


def test_rows_are_those_of_the_batch_in_any_order_and_number():
    scope = look("deepseek_v3")
    inputs, places = _batch(scope)
    reader = Reader(scope, [Head(1, 3)])
    order = torch.tensor([1, 0, 1])
    some = Places(places.row[order], places.query[order] - 1, places.keys[order], places.key_mask[order])
    found = reader.record(inputs, some)
    assert sum_error(reader, found, Head(1, 3), some.key_mask) < 1e-5
    last = found.rows(slice(1, 3))
    whole, part = (reader.read(record, Head(1, 3), "key") for record in (found, last))
    torch.testing.assert_close(whole[1:] * some.key_mask[1:, None, :, None], part * some.key_mask[1:, None, :, None])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "bert", "olmo2", "cohere", "stablelm", "falcon_h1"])
def test_parts_pushed_through_a_layer_are_those_of_its_weights(family, monkeypatch):
    scope = look(family)
    by_weights, found, _ = recorded(scope, 1)
    assert not by_weights.held
    sides = ("query", "key")
    read = {
        (head, side): by_weights.turn(found, 1, by_weights.read(found, head, side), side)
        for head in by_weights.heads
        for side in sides
    }
    monkeypatch.setattr(Reader, "holds", lambda self, layer: True)
    pushed, again, places = recorded(scope, 1)
    assert pushed.held == {1}
    for (head, side), ours in read.items():
        theirs = pushed.turn(again, 1, pushed.read(again, head, side), side)
        mask = places.key_mask if side == "key" else torch.ones(2, 1)
        assert ((ours - theirs) * mask[:, None, :, None]).abs().max() < 1e-5 * ours.abs().max()


@pytest.mark.parametrize(
    ("family", "output", "mlp"),
    [("llama", "self_attn.o_proj", "mlp.down_proj"), ("gpt2", "attn.c_proj", "mlp.c_proj")],
)
def test_a_writer_that_writes_nothing_has_no_part(family, output, mlp):
    model = tiny_model(family)
    block = model.base_model.layers[0] if family == "llama" else model.base_model.h[0]
    width = 16
    with torch.no_grad():
        weight = block.get_submodule(output).weight
        (weight.T if family == "llama" else weight)[2 * width : 3 * width] = 0  # of head 2
        for parameter in block.get_submodule(mlp).parameters():
            parameter.zero_()
    reader, found, _ = recorded(Scope.from_model(model, check=False), 1)
    parts = reader.read(found, Head(1, 0), "key").abs().amax(dim=(0, 2, 3))
    silent = [writer for writer, size in zip(reader.writers(1), parts.tolist(), strict=True) if size == 0]
    assert silent[:2] == ["L0H2", "M0"]
    assert set(silent) <= {"L0H2", "M0", BIAS}


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "olmo2", "granite", "gpt_neox", "bert", "gpt2", "dinov2", "mixtral", "falcon_h1"]
)
def test_half_precision_is_taken_apart_as_full_precision_is(family, dtype):
    full, half = look(family), look(family, dtype)
    for ours, theirs in zip(*(read_blocks(scope.model, scope.facts.layer_of) for scope in (full, half)), strict=True):
        assert [type(node) for node in ours.walk()] == [type(node) for node in theirs.walk()]
        kinds = [[type(module) for module in block.parts] for block in (ours, theirs)]
        assert kinds[0] == kinds[1]
        numbers = [
            torch.tensor([number for node in block.walk() if isinstance(node, Sum) for number, _ in node.terms])
            for block in (ours, theirs)
        ]
        torch.testing.assert_close(*numbers, atol=0.01, rtol=0)
    assert trace_error(half) < 0.1


def test_a_token_with_a_far_longer_stream_hides_no_part():
    model = tiny_model("llama")
    first = int(short_inputs(model, (7,))["input_ids"][0, 0])
    with torch.no_grad():
        model.get_input_embeddings().weight[first] *= 1e8
    scope = Scope.from_model(model, check=False)
    blocks = read_blocks(model, scope.facts.layer_of)
    assert [len(block.parts) for block in blocks] == [1, 1]


def test_multipliers_of_the_residual_stream_are_found():
    scope = look("granite")
    (block, _) = read_blocks(scope.model, scope.facts.layer_of)
    assert isinstance(block.tree, Sum)
    numbers = {type(node).__name__: number for number, node in block.tree.terms}
    assert numbers == pytest.approx({"Entered": 1.0, "Heads": 0.7, "Part": 0.7}, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "bert"])
def test_no_hook_stays_behind(family):
    scope = look(family)
    before = hooks_of(scope.model)
    reader, found, _ = recorded(scope, 1)
    reader.read(found, Head(1, 0), "query")
    assert hooks_of(scope.model) == before


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "bert"])
def test_no_hook_stays_behind_when_the_forward_fails(family):
    scope = look(family)
    implementation = scope.model.config._attn_implementation
    inputs, places = _batch(scope)
    reader = Reader(scope, [Head(1, 0)])
    (part,) = [node.module for node in reader.blocks[0].walk() if isinstance(node, Part)]

    def fail(*_args):
        raise RuntimeError("out of memory")

    hook = part.register_forward_hook(fail)
    before = hooks_of(scope.model)
    with pytest.raises(RuntimeError, match="out of memory"):
        reader.record(inputs, places)
    assert hooks_of(scope.model) == before
    with pytest.raises(RuntimeError, match="out of memory"):
        read_blocks(scope.model, scope.facts.layer_of)
    assert hooks_of(scope.model) == before
    assert scope.model.config._attn_implementation == implementation
    hook.remove()
