"""A model in memory is measured as it is: in eval mode, with the modules and weights it has now, or
not at all.
"""

from contextlib import contextmanager

import pytest
import torch
import transformers

import qkscope as qk
from qkscope.errors import BadInput


def gpt2(dropout: float = 0.5) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=3, n_head=2, **dropouts)
    )


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


CHANGES = {"heads": "replaced", "why": "removed", "trace": "added", "generate": "mlp"}


@pytest.mark.parametrize(("asked", "change"), CHANGES.items())
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
    }
    with pytest.raises(
        BadInput, match=r"the Scope was made: make a new one|layer 3 cannot be traced"
    ):
        verbs[asked]()


@pytest.mark.parametrize("silent", [(1,), (0, 1, 2)])
def test_a_layer_that_is_asked_for_and_never_called_is_an_error(nano, silent):
    for i in silent:
        nano.model.model.layers[i].self_attn.forward = lambda hidden_states, **_: (
            hidden_states,
            None,
        )
    with pytest.raises(
        BadInput, match=r"call(ed)? its attention, as (it|they) did when the Scope was made"
    ):
        list(nano.capture([PROMPT], "L0H0,L2H0"))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_refused_in_words(in_place):
    model = gpt2()
    if in_place:
        model.compile()
    with pytest.raises(BadInput, match=r"give the model as it was before torch\.compile"):
        qk.Scope.from_model(model if in_place else torch.compile(model))


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype  # it is put back
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_torchs_modes_around_a_call_change_no_number(nano, mode):
    pattern = nano.attention(PROMPT, "L1H0")
    why = qk.why(nano, PROMPT, "L2H3")
    circuit = qk.why(nano, PROMPT, circuit=True).tables["kept"]
    with MODES[mode]():
        assert torch.equal(nano.attention(PROMPT, "L1H0"), pattern)
        assert qk.why(nano, PROMPT, "L2H3").tables == why.tables
        assert qk.why(nano, PROMPT, circuit=True).tables["kept"] == circuit
        loaded = qk.Scope.load("nano:mixed", check=False)
        batches = [batch.q for batch in nano.capture([PROMPT, PROMPT], "L1H0", batch_size=1)]
    assert qk.why(loaded, PROMPT, "L2H3").tables == why.tables
    assert {batch.dtype for batch in batches} == {torch.float32}


def test_weights_that_take_no_gradient_are_refused_in_words(nano):
    with torch.inference_mode():
        model = transformers.LlamaForCausalLM(nano.model.config)
    scope = qk.Scope.from_model(model, nano.tokenizer, check=False)
    assert scope.attention(PROMPT, "L1H0").shape == (5, 5)
    with pytest.raises(BadInput, match=r"made under torch\.inference_mode, where no gradient"):
        qk.why(scope, PROMPT, "L2H3")
