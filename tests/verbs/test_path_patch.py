"""Path patching: one edge into a head, exchanged between two prompts, equals plain hooks."""

import pytest
import torch

import qkscope as qk
from qkscope import BadInput
from qkscope.heads import Head

CLEAN = "hat: O jam: Z cat: B jam:"
CORRUPTED = "hat: O jam: Z cat: B cat:"
STORE = "When Mary and John went to the store, John gave a drink to"


def written_by(scope, prompt, head):
    """What a head adds to the stream of a Llama model, at every token."""
    attention = scope.model.model.layers[head.layer].self_attn
    kept = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    inputs = scope.encode([prompt]).inputs
    with torch.no_grad():
        scope.model(**inputs)
    hook.remove()
    own = slice(head.index * scope.d_head, (head.index + 1) * scope.d_head)
    return kept[0][0, :, own] @ attention.o_proj.weight[:, own].T


def patched_plainly(scope, prompt, other, sender, receiver, side):
    """Attention of the receiver at the last token, and next-token logits, by hooks alone."""
    sender = Head.parse(sender)
    receiver = Head.parse(receiver)
    delta = written_by(scope, other, sender) - written_by(scope, prompt, sender)
    layer = scope.model.model.layers[receiver.layer]
    wide = scope.d_head
    index = receiver.index if side == "query" else receiver.index // scope.group_size
    part = slice(index * wide, (index + 1) * wide)
    stream = []

    def keep(_module, args, kwargs):
        stream.append(args[0] if args else kwargs["hidden_states"])

    def put(module, _args, out):
        changed = module(layer.input_layernorm(stream[0] + delta))
        out = out.clone()
        tokens = slice(-1, None) if side == "query" else slice(None)
        out[:, tokens, part] = changed[:, tokens, part]
        return out

    project = layer.self_attn.q_proj if side == "query" else layer.self_attn.k_proj
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True)]
    guard = []

    def once(module, args, out):
        if guard:  # the projection of the other stream
            return out
        guard.append(True)
        return put(module, args, out)

    hooks.append(project.register_forward_hook(once))
    rows = []
    inputs = scope.encode([prompt]).inputs
    attention = layer.self_attn.register_forward_hook(lambda _, __, out: rows.append(out[1]))
    scope.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = scope.model(**inputs, output_attentions=True).logits[0, -1]
    finally:
        scope.model.set_attn_implementation("sdpa")
        for hook in [*hooks, attention]:
            hook.remove()
    return rows[0][0, receiver.index, -1], logits


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize(("sender", "receiver"), [("L0H1", "L2H3"), ("L1H0", "L2H1")])
def test_a_patched_path_equals_plain_hooks(side, sender, receiver):
    scope = qk.Scope.load("nano:mixed")
    found = qk.path_patch(scope, CLEAN, CORRUPTED, sender=sender, receiver=receiver, side=side)
    (asked,) = qk.why(scope, CLEAN).tables["asked"]
    ids = [
        scope.tokenizer.encode(asked[role], add_special_tokens=False)[-1]
        for role in ("answer", "rival")
    ]
    for row in found.tables["paths"]:
        pair = (CLEAN, CORRUPTED) if row["way"] == "noising" else (CORRUPTED, CLEAN)
        attention, logits = patched_plainly(scope, *pair, sender, receiver, side)
        assert row["attention"] == pytest.approx(float(attention[row["key"]]), abs=1e-5)
        lead = float(logits[ids[0]] - logits[ids[1]])
        # hooks on k_proj change keys that the other heads of a group read, too
        if side == "query" or scope.group_size == 1:
            assert row["lead"] == pytest.approx(lead, abs=1e-4)


def test_all_senders_into_a_receiver_hold_the_one_that_is_asked_alone(nano):
    every = qk.path_patch(nano, CLEAN, CORRUPTED, receiver="L2H3").tables["paths"]
    (alone, _) = qk.path_patch(nano, CLEAN, CORRUPTED, sender="M0", receiver="L2H3").tables["paths"]
    (same,) = (row for row in every if row["sender"] == "M0" and row["way"] == "noising")
    assert same["attention"] == pytest.approx(alone["attention"], abs=1e-6)
    moves = [abs(row["attention"] - row["attention_before"]) for row in every]
    assert moves == sorted(moves, reverse=True)
    heads = [row for row in every if row["sender"] == "L0H1"]
    assert {row["sets"] for row in heads} == {3}


def test_the_name_that_repeats_is_sent_by_a_head_that_was_known(smollm2):
    other = "When Mary and John went to the store, Mary gave a drink to"
    found = qk.path_patch(smollm2, STORE, other, sender="L20H0", receiver="L23H0")
    noised, denoised = found.tables["paths"]
    assert noised["verdict"] == denoised["verdict"] == "shown"
    assert noised["attention"] < noised["attention_low"]
    assert denoised["attention"] > denoised["attention_high"]
    assert "L20H0 in its query it is" in found.answer


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sender": "L2H3", "receiver": "L2H3"}, "L2H3 does not write before L2H3"),
        ({"corrupted": "hat: O jam:", "receiver": "L2H3"}, "write them with as many"),
        ({"corrupted": CLEAN, "receiver": "L2H3"}, "the two prompts of a pair are the same"),
    ],
)
def test_a_path_that_cannot_be_patched_is_refused_in_words(nano, given, says):
    given = {"corrupted": CORRUPTED, **given}
    with pytest.raises(BadInput, match=says):
        qk.path_patch(nano, CLEAN, **given)


def test_trace_patches_a_path_where_a_receiver_is_typed(qkscope):
    pair = ["--prompt", CLEAN, "--corrupted", CORRUPTED, "--model", "nano:mixed"]
    code, out, said = qkscope("trace", *pair, "--sender", "L0H1", "--receiver", "L2H3")
    assert not code, said
    assert "Noising: with the corrupted part of L0H1 in its query" in " ".join(out.split())
    code, _, said = qkscope("trace", *pair)
    assert code == 2
    assert "name it with --receiver" in said
