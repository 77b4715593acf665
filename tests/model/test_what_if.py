"""What if, wherever the model runs: families whose LM head skips the body, blocks in blocks, other
threads, and calls of the model itself.
"""

import threading

import pytest
import torch

import qkscope as qk
from batches import look
from qkscope.errors import BadInput
from qkscope.model.block_tree import read_blocks
from qkscope.model.patch import Edit

PROMPT = "hat: O jam: Z cat: B jam:"
IDS = tuple(range(12, 21))
SKIP_THEIR_BODY = (
    "opt",
    "bart",
    "mbart",
    "pegasus",
    "blenderbot",
    "blenderbot-small",
    "plbart",
    "marian",
    "whisper",
    "bigbird_pegasus",
    "mvp",
    "trocr",
)


def logits(scope, inputs):
    """Logits of the model, called as its user calls it."""
    with torch.no_grad():
        return scope.model(**inputs, use_cache=False).logits


def others_mean(z):
    """The mean over one prompt's other tokens, the first left out."""
    count = z.shape[-2] - 2
    total = z[..., 1:, :].sum(-2, keepdim=True)
    first = total / (count + 1)
    return torch.cat([first, (total - z[..., 1:, :]) / count], dim=-2)


@pytest.mark.parametrize("family", ["llama", "gptj", *SKIP_THEIR_BODY])
def test_changes_hold_where_the_lm_head_never_calls_the_models_body(family):
    scope = look(family)
    batch = scope.encode([qk.Example(ids=IDS)])
    last = len(IDS) - 1
    edit = Edit.logits(
        "L1H0", torch.tensor([last]), torch.tensor([[3]]), torch.tensor([[-torch.inf]])
    )
    hidden = scope.capture_inputs(batch, logits=True, edits=[edit]).logits
    mlp = read_blocks(scope.model, scope.facts.layer_of)[0].parts[0]
    hook = mlp.register_forward_hook(lambda _m, _a, out: others_mean(out))
    ablated = logits(scope, batch.inputs)[:, -1]
    hook.remove()
    plain = logits(scope, batch.inputs)[:, -1]
    for block, wanted in (
        (scope.hide("L1H0", key=3, query=last), hidden),
        (scope.ablate("M0"), ablated),
    ):
        with block:
            captured = scope.capture_inputs(batch, logits=True).logits
            called = logits(scope, batch.inputs)[:, -1]
            assert scope.generate(batch, 2).shape[1] in (1, 2)
        assert not torch.allclose(wanted, plain, atol=1e-4)
        torch.testing.assert_close(captured, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(called, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(scope, batch.inputs)[:, -1], plain, atol=0, rtol=0)


@pytest.mark.parametrize("writer", ["L0H2", "M0"])
def test_equal_changes_are_one(nano, writer):
    with nano.ablate(writer):
        once = nano.attention(PROMPT, "L1H0")
        with nano.ablate(writer):
            twice = nano.attention(PROMPT, "L1H0")
        again = nano.attention(PROMPT, "L1H0")
    with nano.ablate(writer, "M1", writer):
        named_twice = nano.attention(PROMPT, "L1H0")
    for pattern in (twice, again, named_twice):
        torch.testing.assert_close(pattern, once, atol=0, rtol=0)
    with nano.replace("Z", "B"), nano.replace("Z", "B"):  # the word is gone when it is asked twice
        ids = nano.encode([PROMPT]).inputs["input_ids"]
    assert torch.equal(ids, nano.encode([PROMPT.replace("Z", "B")]).inputs["input_ids"])


def test_the_innermost_of_several_words_for_one_place_stands_there(nano):
    wanted = nano.encode([PROMPT.replace("cat", "pen")]).inputs["input_ids"]
    with nano.replace("cat", "pen"), nano.replace(7, "hat"), nano.replace(7, "pen"):
        assert torch.equal(nano.encode([PROMPT]).inputs["input_ids"], wanted)
    with nano.replace(7, "pen"), nano.replace(7, "hat"), nano.replace(7, "pen"):
        assert torch.equal(nano.encode([PROMPT]).inputs["input_ids"], wanted)


def test_a_block_of_one_thread_does_not_hold_in_another(nano):
    plain = nano.attention(PROMPT, "L1H0")
    inputs = nano.encode([PROMPT]).inputs
    unchanged = logits(nano, inputs)
    elsewhere = []

    def ask():
        elsewhere.append(nano.attention(PROMPT, "L1H0"))
        elsewhere.append(logits(nano, nano.encode([PROMPT]).inputs))

    with nano.ablate("L0H2", "M0"), nano.hide("L1H0", key="Z"), nano.replace(4, "pen"):
        changed = nano.attention(PROMPT, "L1H0")
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert not torch.allclose(changed, plain, atol=1e-3)
    torch.testing.assert_close(elsewhere[0], plain, atol=0, rtol=0)
    torch.testing.assert_close(elsewhere[1], unchanged, atol=0, rtol=0)


def test_a_model_that_is_watched_answers_another_thread_as_it_is(nano):
    inputs = nano.encode([PROMPT]).inputs
    unchanged = logits(nano, inputs)
    elsewhere = []
    with nano.ablate("L0H2", "M0"), nano.patched([]) as model:
        thread = threading.Thread(target=lambda: elsewhere.append(logits(nano, inputs)))
        thread.start()
        thread.join()
        with torch.no_grad():
            changed = model(**inputs, use_cache=False).logits
    assert not torch.allclose(changed, unchanged, atol=1e-3)
    torch.testing.assert_close(elsewhere[0], unchanged, atol=1e-6, rtol=0)


def hook_count(model):
    """Hooks on a model; transformers leaves some of its own once it was asked for attentions."""
    modules = list(model.modules())
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in modules)


def test_the_model_itself_obeys_a_block_and_so_does_its_body(nano):
    inputs = nano.encode([PROMPT, "hat: O jam:"]).inputs
    before = hook_count(nano.model)
    block = nano.ablate("L0H2", "M1")
    with nano.patched([]) as model, block, torch.no_grad():
        inside = model(**inputs, use_cache=False).logits
    plain = logits(nano, inputs)
    with nano.ablate("L0H2", "M1"), nano.ablate("M1"):
        obeyed = logits(nano, inputs)
        with torch.no_grad():
            body = nano.model.model(**inputs, use_cache=False).last_hidden_state
        with nano.patched([]):
            patched = logits(nano, inputs)
    torch.testing.assert_close(obeyed, patched, atol=0, rtol=0)
    torch.testing.assert_close(obeyed, inside, atol=0, rtol=0)
    torch.testing.assert_close(nano.model.lm_head(body), obeyed, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(obeyed, plain, atol=1e-2)
    torch.testing.assert_close(logits(nano, inputs), plain, atol=0, rtol=0)
    assert hook_count(nano.model) == before


def test_the_models_own_generation_obeys_without_a_cache_and_is_refused_with_one(nano):
    inputs = nano.encode([PROMPT]).inputs
    length = inputs["input_ids"].shape[1]
    with nano.hide("L2H3", key="Z"), nano.ablate("M1"):
        wanted = nano.generate(nano.encode([PROMPT]), 4)[0]
        found = nano.model.generate(**inputs, max_new_tokens=4, do_sample=False, use_cache=False)
        with pytest.raises(qk.BadInput, match="without a key-value cache"):
            nano.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        with pytest.raises(qk.BadInput, match="give the model input_ids"):
            nano.model(inputs_embeds=torch.zeros(1, 4, nano.model.config.hidden_size))
    assert found[0, length:].tolist() == wanted.tolist()
    assert nano.model.generate(**inputs, max_new_tokens=4).shape[1] > length  # with its cache again


def test_a_forward_that_fails_or_is_interrupted_in_a_block_leaves_nothing_behind(nano):
    inputs = nano.encode([PROMPT]).inputs
    plain = logits(nano, inputs)
    for kind in (RuntimeError, KeyboardInterrupt):

        def fail(*_args, kind=kind):
            raise kind

        block = nano.ablate("L0H2", "M1")
        hook = nano.model.model.layers[1].register_forward_pre_hook(fail)
        try:
            with block, pytest.raises(kind):
                logits(nano, inputs)
        finally:
            hook.remove()
        assert not nano.is_changed
        torch.testing.assert_close(logits(nano, inputs), plain, atol=0, rtol=0)


def test_a_second_scope_of_the_same_model_is_unchanged(nano):
    other = qk.Scope(nano.model, nano.tokenizer)
    plain = other.attention(PROMPT, "L1H0")
    with nano.ablate("L0H2", "M0"):
        torch.testing.assert_close(other.attention(PROMPT, "L1H0"), plain, atol=0, rtol=0)


def test_logits_and_their_difference_are_the_models_own_inside_a_block_too(nano):
    prompt = "hat: O jam: Z jam:"
    inputs = nano.encode([prompt]).inputs
    ids = nano.tokenizer.convert_tokens_to_ids(["Z", "O"])

    def own():
        with torch.no_grad():
            return nano.model(**inputs).logits[0, -1].float()

    assert torch.allclose(nano.logits(prompt), own(), atol=1e-5)
    plain = nano.logit_difference(prompt, "Z", "O")
    assert plain == pytest.approx(float(own()[ids[0]] - own()[ids[1]]), abs=1e-4)
    assert nano.logit_difference(prompt, *ids) == plain
    with nano.hide("L2H3", key="Z", query=-1):
        hidden = nano.logit_difference(prompt, "Z", "O")
        assert hidden == pytest.approx(float(own()[ids[0]] - own()[ids[1]]), abs=1e-4)
    # the verb hides a key from the query alone, as this block does
    (row,) = (
        row
        for row in qk.why(nano, prompt, "L2H3", key="Z", versus="O").tables["output"]
        if row["rival"]
    )
    assert hidden == pytest.approx(row["difference"], abs=1e-4)
    assert nano.tokens(prompt) == ["<s>", "hat", ":", "O", "jam", ":", "Z", "jam", ":"]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda scope: scope.logit_difference("hat: O", "Z jam", "O"), "'Z jam' is 2 tokens"),
        (lambda scope: scope.logit_difference("hat: O", "Z", 10**6), "no token 1000000"),
        (
            lambda scope: scope.attention("hat: O", ["L1H0", "L1H1"]),
            "Scope.attention takes one head, like 'L18H6', but got 2: call it for each in turn",
        ),
        (lambda scope: scope.hide(["L1H0"], key=1), "Scope.hide takes one head"),
    ],
)
def test_what_names_no_token_or_no_head_is_refused_in_words(nano, ask, says):
    with pytest.raises(BadInput, match=says):
        ask(nano)


def test_a_second_scope_of_a_changed_model_is_refused_in_the_same_thread(nano):
    other = qk.Scope.from_model(nano.model, nano.tokenizer, check=False)
    with nano.ablate("L1H2"):
        with pytest.raises(BadInput, match="open both blocks with one scope"), other.ablate("M1"):
            pass
        with nano.ablate("M1"):
            pass
    with other.ablate("M1"):
        pass
