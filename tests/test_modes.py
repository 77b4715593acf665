"""A model in memory is measured as it is: in eval mode, with the modules and weights it has now, or not at all."""

from __future__ import annotations

import pytest
import torch
import transformers

import qkscope as qk
from qkscope.errors import BadInput


def gpt2(dropout: float = 0.5) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=3, n_head=2, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture
def nano() -> qk.Scope:
    return qk.Scope.load("nano:mixed", check=False)


TASK = qk.tasks.induction(seed=0)
PROMPT = "hat jam cat hat"


def test_a_model_in_train_mode_is_measured_in_eval_mode_and_put_back():
    model = gpt2().train()
    model.transformer.h[1].eval()  # each module keeps the mode it had
    modes = [part.training for part in model.modules()]
    scope = qk.Scope.from_model(model)  # probe and self-check
    encoded = scope.encode([qk.Example(ids=(5, 9, 7, 5, 9, 3))])
    captured = [scope.capture_inputs(encoded, logits=True).logits for _ in range(2)]
    generated = scope.generate(encoded, max_new_tokens=4)
    with scope.patched([]) as patched, torch.no_grad():
        inside = patched(**encoded.inputs).logits[:, -1]
    assert [part.training for part in model.modules()] == modes
    model.eval()
    with torch.no_grad():
        right = model(**encoded.inputs).logits[:, -1]
    for found in (*captured, inside):
        assert torch.allclose(found, right, atol=1e-5)
    assert torch.equal(generated, scope.generate(encoded, max_new_tokens=4))


def test_heads_and_why_are_the_same_in_a_training_loop(nano):
    def asked() -> tuple[list, list]:
        ranking = qk.find_heads(nano, TASK, n=8)
        return ranking.tables["heads"], qk.why(nano, PROMPT, "L1H0", draws=2).tables["writers"]

    right = asked()
    for part in nano.model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.5
    nano.model.train()
    assert asked() == right
    assert nano.model.training


@pytest.mark.parametrize("asked", ["heads", "why", "trace", "generate", "last"])
@pytest.mark.parametrize("change", ["replaced", "removed", "added", "mlp"])
def test_modules_that_changed_after_the_scope_was_made_are_an_error(nano, change, asked):
    other = qk.Scope.load("nano:mixed", check=False).model
    layers = nano.model.model.layers
    if change == "replaced":
        layers[1].self_attn = other.model.layers[1].self_attn
    elif change == "removed":
        del layers[2]
    elif change == "added":
        layers.append(other.model.layers[0])
    else:
        layers[0].mlp = other.model.layers[0].mlp
    verbs = {
        "heads": lambda: qk.find_heads(nano, TASK, n=4),
        "why": lambda: qk.why(nano, PROMPT, "L1H0"),
        "trace": lambda: qk.trace(nano, TASK, "L1H0", n=4),
        "generate": lambda: nano.generate(nano.encode([PROMPT])),
        "last": lambda: list(nano.capture([PROMPT], "L0H0")),
    }
    with pytest.raises(BadInput, match=r"the Scope was made: make a new one|layer 3 cannot be traced"):
        verbs[asked]()


@pytest.mark.parametrize("silent", [(1,), (2,), (0, 1, 2)])
def test_a_layer_that_is_asked_for_and_never_called_is_an_error(nano, silent):
    for i in silent:
        nano.model.model.layers[i].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(BadInput, match=r"call(ed)? its attention, as (it|they) did when the Scope was made"):
        list(nano.capture([PROMPT], "L0H0,L2H0"))


def test_a_block_that_runs_nothing_is_no_error(nano):
    with nano.patched([]):
        pass


def test_results_carry_the_weights_that_were_measured(nano):
    stored = qk.find_heads(nano, TASK, n=4).provenance["asked"]["weights"]
    weight = nano.model.model.layers[1].mlp.up_proj.weight
    version, before = weight._version, weight.data[1, 1:90].clone()
    weight.data[1, 1:90] += 1  # around the counter of versions, and between any few numbers that one might look at
    assert weight._version == version
    changed = qk.find_heads(nano, TASK, n=4).provenance["asked"]["weights"]
    assert changed != stored
    weight.data[1, 1:90] = before
    assert nano.weights_hash == stored
    rows = weight.data[:2].clone()
    weight.data[:2] = rows.flip(0)  # the same numbers elsewhere
    assert nano.weights_hash not in (stored, changed)
    weight.data[:2] = rows.flip(1)
    assert nano.weights_hash not in (stored, changed)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool, torch.int8])
def test_every_bit_of_a_tensor_counts(kind):
    from qkscope.capture.files import tensors_hash

    base = torch.zeros(1031, dtype=kind)
    for start in (0, 1):  # also where it begins within 8 bytes
        seen = {tensors_hash([("x", base[start:])])}
        for place in (start, 7, 511, 512, 1030):
            changed = base.clone()
            changed[place] = 1
            seen.add(tensors_hash([("x", changed[start:])]))
        assert len(seen) == 6


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_refused_in_words(in_place):
    model = gpt2()
    if in_place:
        model.compile()
    with pytest.raises(BadInput, match=r"give the model as it was before torch\.compile"):
        qk.Scope.from_model(model if in_place else torch.compile(model))
