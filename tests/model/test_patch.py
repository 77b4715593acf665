"""A patched run equals the closed form at the edited head, and an independent edit of the model
everywhere else.
"""

from collections.abc import Callable

import pytest
import torch
import transformers

from id_prompts import marked
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.model.encode import Encoding
from qkscope.model.patch import Edit
from qkscope.model.scope import Scope
from qkscope_papers.families import tiny_model

HEAD = "L0H1"


def encode(scope: Scope) -> Encoding:
    return scope.encode(marked((10, 7), (-4, -2)))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(
    scope="module", params=["llama", "gemma2", "gpt_oss", "opt", "gptj", "bloom", "falcon"]
)
def scope(request: pytest.FixtureRequest) -> Scope:
    return Scope.from_model(tiny_model(request.param), check=False)


def test_edited_keys_queries_and_logits_give_the_closed_form(scope: Scope) -> None:
    encoded = encode(scope)
    before = scope.capture_inputs(encoded, heads=[HEAD])
    new = noise(2, 2, scope.d_head)
    after = scope.capture_inputs(
        encoded, heads=[HEAD], edits=[Edit.keys(HEAD, before.key_positions, new)]
    )
    logits = before.scale * torch.einsum("bd,bkd->bk", before.q[:, 0], new)
    if before.softcap is not None:
        logits = before.softcap * torch.tanh(logits / before.softcap)
    row = torch.softmax(torch.cat([logits + before.bias[:, 0], before.rest], dim=-1), dim=-1)[
        :, :-1
    ]
    torch.testing.assert_close(after.attention()[:, 0], row, atol=1e-5, rtol=0)
    assert (row - before.attention()[:, 0]).abs().max() > 0.01
    query = noise(2, scope.d_head)
    after = scope.capture_inputs(
        encoded, heads=[HEAD], edits=[Edit.queries(HEAD, before.query_positions, query)]
    )
    assert torch.equal(after.q[:, 0], query)
    torch.testing.assert_close(after.k, before.k)
    wanted = torch.tensor([[1.5, -2.0], [0.5, 3.0]])
    edit = Edit.logits(HEAD, before.query_positions, before.key_positions, wanted)
    after = scope.capture_inputs(encoded, heads=[HEAD], edits=[edit])
    seen = before.bias[:, 0] > -torch.inf
    wanted = wanted.masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(after.rows().logits()[:, 0], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after.rest, before.rest)
    # seen from other keys the same edit is part of the rest: the whole row still sums to one
    real = zip(encoded.inputs["input_ids"], encoded.inputs["attention_mask"].bool(), strict=True)
    fewer = scope.encode([Example(ids=row[mask].tolist()) for row, mask in real])
    rest = scope.capture_inputs(fewer, heads=[HEAD], edits=[edit]).rest
    whole = torch.logsumexp(torch.cat([after.rows().logits()[:, 0], after.rest], dim=-1), dim=-1)
    torch.testing.assert_close(rest[:, 0], whole, atol=1e-5, rtol=1e-5)


def rewritten(
    module: torch.nn.Module, write: Callable[[torch.Tensor], None]
) -> torch.utils.hooks.RemovableHandle:
    def hook(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        write(output)
        return output

    return module.register_forward_hook(hook)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_patched_run_equals_the_same_edit_made_in_the_projection(family: str) -> None:
    scope = Scope.from_model(tiny_model(family), check=False)
    encoded = encode(scope)
    # the first real token: at position 0 rotation does nothing, so projection and key are the same
    # vector
    first = encoded.inputs["attention_mask"].argmax(-1)
    value = noise(2, scope.d_head)
    layer = (
        scope.model.model.layers[1] if family == "llama" else scope.model.model.decoder.layers[1]
    )
    width = scope.d_head

    def write(keys: torch.Tensor) -> None:
        keys[torch.arange(2), first, width : 2 * width] = value  # key head 1

    handle = rewritten(layer.self_attn.k_proj, write)
    with torch.no_grad():
        wanted = scope.model(**encoded.inputs).logits[:, -1]
    handle.remove()
    group = range(scope.group_size, 2 * scope.group_size)  # every query head that reads key head 1
    edits = [Edit.keys(f"L1H{h}", first[:, None], value[:, None]) for h in group]
    patched = scope.capture_inputs(encoded, logits=True, edits=edits).logits
    torch.testing.assert_close(patched, wanted, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert (wanted - scope.model(**encoded.inputs).logits[:, -1]).abs().max() > 1e-3


def test_generation_is_greedy_and_edits_hold_at_every_step() -> None:
    scope = Scope.from_model(tiny_model("mistral"), check=False)
    encoded = encode(scope)
    plain = scope.generate(encoded, max_new_tokens=6)
    keys = encoded.places.keys
    edits = [Edit.keys(f"L0H{h}", keys, 6 * noise(2, 2, scope.d_head)) for h in range(4)]
    patched = scope.generate(encoded, edits=edits, max_new_tokens=6)
    assert not torch.equal(plain, patched)
    for chosen, active in ((plain, []), (patched, edits)):
        ids, mask = encoded.inputs["input_ids"], encoded.inputs["attention_mask"]
        ended = torch.zeros(2, dtype=torch.bool)
        for step in range(chosen.shape[1]):
            with scope.patched(active) as model, torch.no_grad():
                positions = (mask.cumsum(-1) - 1).clamp_min(0)
                best = (
                    model(input_ids=ids, attention_mask=mask, position_ids=positions)
                    .logits[:, -1]
                    .argmax(-1)
                )
            assert torch.equal(best[~ended], chosen[:, step][~ended])
            ended |= best == 2
            ids = torch.cat([ids, chosen[:, step : step + 1]], dim=1)
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)


def test_generation_is_greedy_whatever_the_models_own_config_asks_for(nano) -> None:
    prompt = "hat: O jam: Z cat: B jam:"
    encoded = nano.encode([prompt])
    wanted = nano.generate(encoded, 6)
    own = nano.model.generation_config
    length = encoded.inputs["input_ids"].shape[1]
    ids = encoded.inputs["input_ids"]
    for step in range(6):  # each token is the argmax of plain logits
        assert int(nano.model(input_ids=ids).logits[0, -1].argmax()) == int(wanted[0, step])
        ids = torch.cat([ids, wanted[:, step : step + 1]], dim=1)
    asked = {
        "no_repeat_ngram_size": 1,
        "repetition_penalty": 3.0,
        "guidance_scale": 2.0,
        "max_time": 1e-9,
        "num_beams": 3,
        "num_return_sequences": 2,
        "do_sample": True,
        "return_dict_in_generate": True,
        "stop_strings": ["Z"],
        "prompt_lookup_num_tokens": 2,
        "suppress_tokens": wanted[0].tolist(),
        "min_new_tokens": 9,
    }
    for name, value in asked.items():
        config = transformers.GenerationConfig(eos_token_id=own.eos_token_id)
        setattr(config, name, value)
        nano.model.generation_config = config
        try:
            assert torch.equal(nano.generate(encoded, 6), wanted), name
            assert getattr(nano.model.generation_config, name) == value  # it is put back
        finally:
            nano.model.generation_config = own
    assert wanted.shape[1] == 6
    assert ids.shape[1] == length + 6


def test_generation_ends_at_the_models_end_tokens_and_pads(nano) -> None:
    batch = nano.encode(["hat: O jam: Z cat: B jam:", "hat: O jam: Z cat: B cat:"])
    plain = nano.generate(batch, 5)
    own = nano.model.generation_config
    ends = [int(plain[0, 1]), int(plain[1, 3])]
    nano.model.generation_config = transformers.GenerationConfig(eos_token_id=ends)
    try:
        ended = nano.generate(batch, 5)
    finally:
        nano.model.generation_config = own
    for row, continuation in zip(ended, plain, strict=True):
        first = next(i for i, token in enumerate(continuation.tolist()) if token in ends)
        assert torch.equal(row[: first + 1], continuation[: first + 1])
        assert set(row[first + 1 :].tolist()) <= {nano.encoder.pad_id}


def test_generation_ends_with_the_context_and_refuses_what_is_no_prompt(nano) -> None:
    context = nano.encoder.max_length
    encoded = nano.encode([" ".join(["hat"] * (context - 4))])
    length = encoded.inputs["input_ids"].shape[1]
    assert nano.generate(encoded, 1000).shape[1] == context - length + 1
    for wrong, says in (
        ({}, "give a text, or a batch with input_ids"),
        (encoded.inputs | {"num_beams": torch.tensor(2)}, "leave num_beams out"),
        (encoded.inputs | {"labels": encoded.inputs["input_ids"]}, "leave labels out"),
        (encoded.inputs | {"inputs_embeds": torch.ones(1, 4, 8)}, "leave inputs_embeds out"),
    ):
        with pytest.raises(BadInput, match=says):
            nano.generate(wrong, 2)
    with pytest.raises(BadInput, match=r"max_new_tokens of Scope\.generate should be"):
        nano.generate(encoded, 10**30)
    with pytest.raises(BadInput, match="generates nothing"):
        Scope.from_model(tiny_model("bert"), check=False).generate({"input_ids": torch.ones(1, 4)})
