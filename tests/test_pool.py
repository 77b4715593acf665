"""Pooled keys are what the model's own attention says, on every kind of attention, in every space."""

from __future__ import annotations

import pytest
import torch

from qkscope.capture.families import tiny_model
from qkscope.capture.pool import pool
from qkscope.capture.scope import Scope
from qkscope.examples import Example

KINDS = ["llama", "qwen3", "gemma2", "mistral", "gpt2", "gpt_oss", "opt", "gpt_neox"]


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(5, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def texts() -> list[Example]:
    """Different lengths and numbers of queries; one query is the first token, which sees nothing that is kept."""
    return [
        Example(ids=ids(12, 0), queries=((3, 4), (11, 12), (7, 8))),
        Example(ids=ids(7, 1), queries=((6, 7), (0, 1))),
        Example(ids=ids(9, 2), queries=((8, 9),)),
    ]


@pytest.fixture(scope="module", params=KINDS)
def scope(request: pytest.FixtureRequest) -> Scope:
    return Scope.from_model(tiny_model(request.param))


def own_attention(scope: Scope, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    before = scope.model.config._attn_implementation
    scope.model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = scope.model.base_model(**inputs, output_attentions=True).attentions
    scope.model.set_attn_implementation(before)
    return attentions


def every_key(scope: Scope, encoded, space: str):
    """Keys of all tokens as each row sees them, from the capture that other tests hold to the model."""
    return scope.capture_inputs(encoded, places=encoded.everywhere(), space=space)


@pytest.mark.parametrize("space", ["post_rope", "pre_rope", "query_frame"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pooled_keys_are_the_models_attention_over_its_keys(scope: Scope, space: str, side: str) -> None:
    if any(space in scope.facts.layers[layer].refusals for layer in range(scope.n_layers)):
        pytest.skip("this family has no such space")
    encoded = scope.encode(texts(), padding_side=side)
    pooled = pool(scope, encoded, space=space)
    captured, attention = every_key(scope, encoded, space), own_attention(scope, encoded.inputs)
    first = encoded.inputs["attention_mask"].argmax(dim=1)[encoded.places.row]
    columns = torch.arange(captured.k.shape[2])
    visible = (captured.bias > -torch.inf) & (columns > first[:, None])[:, None]  # rows, heads, tokens
    rows, queries = encoded.places.row, encoded.places.query
    torch.testing.assert_close(pooled.q, captured.q, atol=1e-5, rtol=1e-4)
    for slot, head in enumerate(pooled.heads):
        weights = attention[head.layer][rows, head.index, queries] * visible[:, slot]
        mass = weights.sum(-1)
        keys = captured.k[:, captured.kv_of_head[slot]]
        torch.testing.assert_close(pooled.mass[:, slot], mass, atol=1e-5, rtol=1e-4)
        assert torch.equal(pooled.valid[:, slot], visible[:, slot].any(-1))
        share = weights / mass.clamp_min(1e-30)[:, None]
        torch.testing.assert_close(pooled.attended[:, slot], (share[..., None] * keys).sum(1), atol=2e-5, rtol=1e-3)
        count = visible[:, slot].sum(-1, keepdim=True).clamp_min(1)
        mean = (visible[:, slot, :, None] * keys).sum(1) / count
        torch.testing.assert_close(pooled.mean[:, slot], mean, atol=2e-5, rtol=1e-3)
        kept = pooled.valid[:, slot]
        torch.testing.assert_close(pooled.top_weight[kept, slot], share.max(-1).values[kept], atol=1e-5, rtol=1e-4)
        place = pooled.top_column[kept, slot]
        best = keys[kept][torch.arange(len(place)), place]
        torch.testing.assert_close(pooled.top[kept, slot], best, atol=2e-5, rtol=1e-3)
        on_top = (pooled.top_logit - pooled.whole).exp()[kept, slot]
        torch.testing.assert_close(on_top, weights.max(-1).values[kept], atol=1e-5, rtol=1e-4)


def test_a_lot_falls_on_visible_keys_and_gives_their_vectors_and_logits(scope: Scope) -> None:
    encoded = scope.encode(texts())
    pooled, captured = pool(scope, encoded, draws=3), every_key(scope, encoded, "post_rope")
    logits = captured.attention_logits()
    first = encoded.inputs["attention_mask"].argmax(dim=1)[encoded.places.row]
    for slot in range(len(pooled.heads)):
        group = int(pooled.kv_of_head[slot])
        mask, columns = pooled.drawn_mask[:, group], pooled.drawn_columns[:, group]
        seen = (captured.bias[:, slot] > -torch.inf) & (torch.arange(logits.shape[-1]) > first[:, None])
        assert torch.equal(mask.sum(-1), seen.sum(-1).clamp_max(3))
        assert bool(seen.gather(1, columns)[mask].all())
        assert all(len(set(c[m].tolist())) == int(m.sum()) for c, m in zip(columns, mask, strict=True))
        own = captured.k[:, captured.kv_of_head[slot]]
        theirs = own.gather(1, columns[..., None].expand(-1, -1, own.shape[-1]))
        torch.testing.assert_close(pooled.drawn[:, group][mask], theirs[mask], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            pooled.drawn_logits[:, slot][mask], logits[:, slot].gather(1, columns)[mask], atol=1e-4, rtol=1e-4
        )


def test_some_heads_in_another_order_and_other_padding_give_the_same_rows(scope: Scope) -> None:
    every = pool(scope, scope.encode(texts()))
    names = [every.heads[i] for i in (len(every.heads) - 1, 0)]
    some = pool(scope, scope.encode(texts(), padding_side="right"), names)
    index = [len(every.heads) - 1, 0]
    for name in ("q", "attended", "mean", "mass", "top"):
        torch.testing.assert_close(getattr(some, name), getattr(every, name)[:, index], atol=2e-5, rtol=1e-3)
    kv = every.kv_of_head[index]
    mask = every.drawn_mask[:, kv]
    torch.testing.assert_close(some.drawn[:, some.kv_of_head][mask], every.drawn[:, kv][mask], atol=2e-5, rtol=1e-3)
