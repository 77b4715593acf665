"""The linear engine against references written apart: parts, any rows, cuts, and direct effects."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import qkscope as qk
from batches import each_head, look, padded, residual_parts, row_with
from qkscope.findings.prompt_trace import PromptRun
from qkscope.heads import Head
from qkscope.linear.attribution import direct_effect, direct_effects
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run
from qkscope.model.capture_types import Places
from qkscope.model.scope import Scope
from qkscope_papers.families import sum_error

IDS = qk.Example(ids=tuple(range(3, 14)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_writers_part_is_what_the_weights_of_a_llama_say(side):
    scope = look("llama", num_hidden_layers=3)
    model, layer = scope.model, scope.model.model.layers[2]
    inputs, places = padded(scope, side)
    parts, x = residual_parts(model, inputs, 2)
    norm, width = layer.input_layernorm, scope.d_head
    cos, sin = model.model.rotary_emb(x, inputs["position_ids"])
    scale = norm.weight * x.square().mean(-1, keepdim=True).add(norm.variance_epsilon).rsqrt()

    def turned(writer: str, weight: Tensor) -> Tensor:
        vectors = ((parts[writer] * scale) @ weight.T).unflatten(-1, (-1, width)).transpose(1, 2)
        return apply_rotary_pos_emb(vectors, vectors, cos, sin)[0].transpose(1, 2).detach()

    run = Reader(scope, [Head(2, i) for i in range(4)]).record(inputs, places)
    names, rows = run.reader.writers(2)[:-1], torch.arange(2)[:, None]
    assert set(names) == set(parts)
    for head in run.reader.heads:
        for own, weight in (
            ("query", layer.self_attn.q_proj.weight),
            ("key", layer.self_attn.k_proj.weight),
        ):
            index = head.index if own == "query" else head.index // scope.group_size
            ours, at = run.read(head, own, run.stream(2)), run.columns[:, run.at(own)]
            true = torch.stack([turned(name, weight)[rows, at, index] for name in names], dim=1)
            shown = places.key_mask[:, None, :, None] if own == "key" else torch.ones(1)
            assert ((ours[:, :-1] - true) * shown).abs().max() <= 1e-5 * (true * shown).abs().max()
            assert not ours[:, -1].any()  # no biases


@pytest.mark.parametrize(
    "family", ["llama", "bloom", "deepseek_v3", "falcon"]
)  # tokens run alone, and whole prompts
@pytest.mark.parametrize("together", [4, 64])  # 64 on a GPU
def test_rows_and_slots_come_in_any_order_and_number(family, together):
    """Several queries of one example, an example twice, a token named twice, padded slots: as each
    alone.
    """
    scope = look(family, num_hidden_layers=3)
    inputs, places = padded(scope, "left")
    reader, draw = Reader(scope, [Head(2, 1), Head(2, 3)]), torch.Generator().manual_seed(0)
    reader.together = together
    whole = reader.record(inputs, places)
    some = Places(
        torch.tensor([1, 0, 1, 1]),
        torch.tensor([8, 6, 5, 8]),
        torch.tensor([[4, 4, 3, 8], [2, 6, 2, -1], [5, 3, 5, 5], [8, 7, -1, -1]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
    )
    run = reader.record(inputs, some)
    weights = torch.randn(4, 2, 4, generator=draw) * some.key_mask[:, None]
    for part, rows in ((run, slice(0, 4)), (run.slots(slice(None), slice(1, 3)), slice(1, 3))):
        told = {head: (query, key) for head, query, key in each_head(part, weights[rows])}
        for i, head in enumerate(reader.heads):
            assert sum_error(part, head, some.key_mask[rows]) <= 2e-5
            true = whole.read(head, "key", whole.stream(2))  # by token
            ours = part.read(head, "key", part.stream(2))
            wanted = true[some.row, :, some.keys.clamp(min=0).T].permute(1, 2, 0, 3)[rows]
            shown = some.key_mask[rows, None, :, None]
            assert ((ours - wanted) * shown).abs().max() <= 1e-5 * wanted.abs().max()
            w, keys = weights[rows, i], torch.arange(1, 5)
            _, asked = part.ask(head, 0, keys, w)
            q = part.true(head, "query")[:, 0] * part.calls[2].scale
            by_key = torch.einsum("nckd,nd,nk->nc", wanted, q, w)
            answer = part.answer(asked["key"]).values
            for values in (
                told[head][1],
                torch.stack([answer[name].sum(1) for name in reader.writers(2)], dim=1),
            ):
                assert (values - by_key).abs().max() <= 2e-5 * by_key.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # and norms of queries and keys
@pytest.mark.parametrize("side", ["key", "query"])
def test_a_cut_is_a_forward_with_the_part_at_its_mean_and_norms_frozen(family, side):
    scope = look(family, num_hidden_layers=3, attn_implementation="eager")
    head, layer = Head(2, 2), scope.model.model.layers[2]
    one = PromptRun(scope, IDS, query=9).head(head, key=4)
    at, rest = {"key": 4, "query": 9}[side], [1, 2, 3, 5, 6, 7, 8]
    written, x = residual_parts(scope.model, one.asked.inputs, 2)
    sigma = (layer.input_layernorm(x) / x)[0, at].detach()

    def attention(cut: list[str]) -> Tensor:
        moved = sum(written[name][0, rest].mean(0) - written[name][0, at] for name in cut)
        return row_with(
            scope, one.asked.inputs, head, 9, side, at, lambda z: z + sigma * moved, frozen=True
        )

    assert (attention([]) - one.attention).abs().max() <= 1e-5
    for chosen in ([0], [3], [5, 1], list(range(len(one.writers) - 1))):
        found = one.cut([{side: chosen}])[0]
        assert (found - attention([one.writers[i] for i in chosen])).abs().max() <= 1e-5
        assert (found - one.attention).abs().max() > 1e-4


def asked_of(scope: Scope) -> Run:
    return PromptRun(scope, IDS).run


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gpt2", {}),
        ("opt", {"word_embed_proj_dim": 32}),
        ("granite", {}),
        ("olmo2", {}),
    ],
)
def test_pushes_of_all_writers_and_biases_sum_to_a_tokens_logit_over_the_mean(family, overrides):
    scope = look(family, **overrides)
    run, model, uncapped = asked_of(scope), scope.model, []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _m, _a, out: uncapped.append(out[0, -1])
    )
    with torch.no_grad():
        model(**run.inputs)
    hook.remove()
    logits = uncapped[0] if family == "gemma2" else run.logits[0].detach()  # before the cap
    for token in (int(logits.argmax()), 17):
        along = torch.full_like(run.logits, -1 / run.logits.shape[1]).detach()
        along[:, token] += 1
        pushed = {name: value.detach() for name, value in direct_effects(run, along).values.items()}
        assert set(pushed) == set(run.reader.writers(scope.n_layers))
        largest = max(float(value.abs()) for value in pushed.values())
        total = sum(float(value) for value in pushed.values())
        assert total == pytest.approx(float(logits[token] - logits.mean()), abs=1e-5 * largest)
        if family not in ("gpt2", "opt"):
            assert abs(float(pushed["bias"])) <= 1e-5 * largest
        for head in scope.heads():
            W = run.reader.output_weights(head.layer)[0][head.index]
            z = run.heads[head.layer][0, 0].unflatten(0, (-1, W.shape[1]))[head.index]
            direct = direct_effect(run, [head.layer], (W @ z)[None])[0]
            assert float(direct[token] - direct.mean()) == pytest.approx(
                float(pushed[str(head)]), abs=1e-5 * largest
            )


def test_where_logits_are_no_linear_function_of_the_stream_nothing_is_pushed():
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    config = transformers.AutoConfig.for_model("bert", vocab_size=120, is_decoder=True, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    run = asked_of(Scope.from_model(model, check=False))
    assert direct_effects(run, torch.eye(120)[17:18]) is None
    assert direct_effect(run, [1], torch.ones(1, 64)) is None


def test_heads_in_any_order_keep_their_layers_closed_forms():
    scope = look("llama", num_hidden_layers=3)
    inputs, places = padded(scope, "left")
    heads = [Head(2, 3), Head(1, 0), Head(2, 0), Head(1, 2)]
    reader = Reader(scope, heads)
    run = reader.record(inputs, places, deep=True)
    slots = run.at("query")
    along = torch.randn(2, 4, 1, scope.d_head, generator=torch.Generator().manual_seed(0))
    directions, constants = run.pull(heads, "q", slots, along)
    assert all(reader.form(layer) is not None for layer in (1, 2))
    for i, head in enumerate(heads):
        alone, said = run.pull([head], "q", slots, along[:, i : i + 1])
        torch.testing.assert_close(directions[:, i : i + 1], alone)
        torch.testing.assert_close(constants[:, i : i + 1], said)
