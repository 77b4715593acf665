"""What if: writers ablated, keys hidden, tokens replaced, rows run again, against plain forwards
with hooks.
"""

import pytest
import torch
from transformers.models.llama import modeling_llama

import qkscope as qk
from batches import look, residual_parts, row_with
from qkscope.errors import BadInput
from qkscope.findings.prompt_trace import PromptRun
from qkscope.heads import Head
from qkscope.linear.row import restore
from qkscope.model.patch import Edit
from qkscope.rerun.rerun_layers import Batch
from qkscope.rerun.rerun_tokens import Again
from qkscope_papers.families import two_prompts

PROMPT = "hat: O jam: Z cat: B jam:"


def logits(scope, inputs):
    with torch.no_grad():
        return scope.model(**inputs, use_cache=False).logits


def patched(scope, inputs):
    with scope.patched([]):
        return logits(scope, inputs)


def others_mean(z, mask):
    """The mean over a prompt's other tokens, the first left out, token by token."""
    found = z.clone()
    for row in range(len(z)):
        shown = mask[row].nonzero()[1:, 0].tolist()
        for t in mask[row].nonzero()[:, 0].tolist():
            rest = [s for s in shown if s != t]
            if rest:
                found[row, t] = z[row, rest].mean(0)
    return found


@pytest.mark.parametrize("padded", [False, True])
def test_ablated_writers_put_out_their_mean_over_the_other_tokens(nano, padded):
    prompts = [PROMPT, "hat: O jam:"] if padded else [PROMPT]
    inputs = nano.encode(prompts).inputs
    mask, layers, width = inputs["attention_mask"].bool(), nano.model.model.layers, nano.d_head

    def head(_module, args):
        z = args[0].clone()
        z[..., 2 * width : 3 * width] = others_mean(z[..., 2 * width : 3 * width], mask)
        return (z,)

    hooks = [
        layers[0].self_attn.o_proj.register_forward_pre_hook(head),
        layers[1].mlp.register_forward_hook(lambda _m, _a, out: others_mean(out, mask)),
    ]
    theirs = logits(nano, inputs)
    for hook in hooks:
        hook.remove()
    with nano.ablate("L0H2", "M1"):
        ours = patched(nano, inputs)
    assert (logits(nano, inputs) - theirs)[mask].abs().max() > 0.1
    torch.testing.assert_close(ours[mask], theirs[mask], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        patched(nano, inputs), logits(nano, inputs), atol=1e-5, rtol=1e-5
    )  # all is as it was


@pytest.mark.parametrize("query", [None, 11])
def test_a_hidden_key_gets_nothing(nano, monkeypatch, query):
    inputs = nano.encode([PROMPT]).inputs
    own = modeling_llama.eager_attention_forward

    def hidden(module, q, k, v, mask, scaling, **kwargs):
        if module.layer_idx != 1:
            return own(module, q, k, v, mask, scaling=scaling, **kwargs)
        k, v = (modeling_llama.repeat_kv(x, module.num_key_value_groups) for x in (k, v))
        scores = q @ k.mT * scaling + torch.full(q.shape[2:3] * 2, -torch.inf).triu(1)
        scores[:, 0, slice(None) if query is None else query, 6] = -torch.inf
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", hidden)
        patch.setattr(nano.model.config, "_attn_implementation_internal", "eager")
        theirs = logits(nano, inputs)
    with nano.hide("L1H0", key="Z", query=query):
        ours = patched(nano, inputs)
        row = nano.attention(PROMPT, "L1H0")[11]
    assert float(row[6]) == 0
    assert float(row.sum()) == pytest.approx(1)
    later = slice(7, None) if query is None else slice(None)  # the key itself sees nothing else
    torch.testing.assert_close(ours[:, later], theirs[:, later], atol=1e-5, rtol=1e-5)


def test_a_replaced_token_is_another_prompt(nano):
    other = PROMPT.replace("jam: Z", "pen: Z")
    answer, pattern = qk.why(nano, other, "L2H3").answer, nano.attention(other, "L1H0")
    with nano.replace("jam#1", "pen"):
        changed = qk.why(nano, PROMPT, "L2H3")
        reason, before = (text.partition("). It ")[0] for text in (changed.answer, answer))
        assert reason == before  # but the answer stays that of the unchanged prompt
        assert "Before the change" in changed.answer
        torch.testing.assert_close(nano.attention(PROMPT, "L1H0"), pattern)
    with nano.replace(-1, "jam"):
        assert nano.encode([PROMPT, "hat: O"]).inputs["input_ids"][:, -1].unique().numel() == 1


def test_why_sees_what_is_hidden_from_the_head_itself(nano):
    with nano.hide("L2H3", key=10):
        found, row = qk.why(nano, PROMPT, "L2H3"), nano.attention(PROMPT, "L2H3")[-1]
        second = max((i for i in range(1, 12) if i != 10), key=lambda i: float(row[i]))
        with nano.hide("L2H3", key=second):
            both = patched(nano, nano.encode([PROMPT]).inputs)[0, -1].softmax(-1)
    shown = {line["position"]: line["attention"] for line in found.tables["attention"]}
    assert 10 not in shown
    assert shown == pytest.approx({i: float(row[i]) for i in shown}, abs=1e-5)
    top = found.tables["output"][0]
    assert top["without_key"] == pytest.approx(
        float(both[top["id"]]), abs=1e-5
    )  # hidden beside what is hidden already


def test_changes_hold_in_why_and_generate_and_parts_still_sum(nano):
    plain = qk.why(nano, PROMPT, "L2H3")
    with nano.ablate("L0H2", "M1"), nano.hide("L1H0", key=-2):
        found = qk.why(nano, PROMPT, "L2H3")
        text = nano.generate(PROMPT, 3)
    assert found.tables["check"][0]["sum_error"] < 1e-5
    assert found.tables["check"][0]["logit"] != pytest.approx(
        plain.tables["check"][0]["logit"], rel=1e-3
    )
    assert isinstance(text, str)
    with nano.hide(
        "L1H0", key="Z"
    ):  # the same token of the prompt at every step, whatever is said after it
        assert nano.generate(PROMPT, 3)
    assert qk.why(nano, PROMPT, "L2H3").tables["writers"] == plain.tables["writers"]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_token_run_again_is_the_whole_prompt_run_again(family, alone, monkeypatch):
    scope = look(family)
    inputs = {name: value[:1] for name, value in two_prompts(scope)[0].items()}
    run = PromptRun(scope, qk.Example(ids=tuple(inputs["input_ids"][0].tolist()))).run
    query, edges = inputs["input_ids"].shape[1] - 1, [(Head(0, 1), 3), (Head(1, 0), 5)]
    again = Again(scope, run.inputs, run.calls)
    monkeypatch.setattr(Again, "runs_alone", lambda *_: alone)
    ours = again.hidden(query, edges)
    for found, (head, key) in zip(ours, edges, strict=True):
        edit = Edit.logits(
            head, torch.tensor([query]), torch.tensor([[key]]), torch.tensor([[-torch.inf]])
        )
        with scope.patched([edit]):
            theirs = logits(scope, run.inputs)[0, -1]
        torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s.hide("L1H0", key="jam"),
            "'jam' stands 2 times in the prompt: write 'jam#1' to 'jam#2'",
        ),
        (lambda s: s.hide("L1H0", key=9, query=4), "cannot see token 9 from token 4"),
        (
            lambda s: s.ablate("M7"),
            "'M7' is no head and no MLP of this model: write L17H8, or M0 to M2",
        ),
        (lambda s: s.replace(2, "zebras"), "no token for 'zebras'"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_in_words(nano, change, said):
    with pytest.raises(qk.BadInput, match=said), change(nano):
        nano.attention(PROMPT, "L1H0")
    assert not nano._changes.open


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("norms", ["live", "frozen"])
@pytest.mark.parametrize("side", ["key", "query"])
def test_parts_put_back_into_one_head_are_a_forward_with_another_stream_there(family, norms, side):
    """The stream at one token, for this head's query or key alone, with what writers left in the
    unchanged prompt.
    """
    scope, head = look(family, num_hidden_layers=3, attn_implementation="eager"), Head(2, 2)
    ids = list(range(3, 14))
    prompts = [qk.Example(ids=tuple(ids)), qk.Example(ids=(*ids[:4], 40, *ids[5:]))]
    source, run = (PromptRun(scope, prompt, 9).run for prompt in prompts)
    at, layer, names = (
        {"key": 4, "query": 9}[side],
        scope.model.model.layers[2],
        run.reader.writers(2)[:-1],
    )
    sets = [["L1H0", "M0"], ["embedding"], list(names)]
    found = restore(run, source, head, 9, 4, sets, side=side, norms=norms)
    (before, x), (instead, _) = (
        residual_parts(scope.model, one.inputs, 2) for one in (run, source)
    )
    for row, own in zip(found, sets, strict=True):
        new = x[0, at] + sum(instead[name][0, at] - before[name][0, at] for name in own)
        normed = (
            layer.input_layernorm(new)
            if norms == "live"
            else new * (layer.input_layernorm(x) / x)[0, at]
        )
        theirs = row_with(
            scope, run.inputs, head, 9, side, at, lambda _, z=normed: z, frozen=norms == "frozen"
        )
        assert (row - theirs[: len(row)]).abs().max() <= 1e-5
    with pytest.raises(qk.BadInput, match="does not write before"):
        restore(run, source, head, 9, 4, [["L2H0"]])


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "gemma3n_text", "qwen3_next"])
def test_changes_of_a_batch_run_together_from_the_first_layer_they_touch(family):
    scope = look(family, num_hidden_layers=4)
    encoded = scope.encode(
        [qk.Example(ids=tuple(range(3, 14))), qk.Example(ids=tuple(range(20, 28)))]
    )
    heads = [head for head in scope.heads() if head.layer >= 2]
    first, last, width = heads[0], heads[-1], scope.facts.layers[heads[0].layer].d_head
    draw = torch.Generator().manual_seed(0)
    changes = [
        [Edit.keys(first, torch.tensor([[9], [10]]), torch.randn(2, 1, width, generator=draw))],
        [
            Edit.outputs(
                first, torch.tensor([True, False]), torch.randn(scope.d_head, generator=draw)
            )
        ],
        [
            Edit.outputs(
                first, torch.tensor([True, True]), torch.randn(scope.d_head, generator=draw)
            )
        ],
        [],
    ]
    batch = Batch(scope, encoded, [last], first.layer)
    for own, found in zip(changes, batch.run(changes, [last]), strict=True):
        theirs = scope.capture_inputs(encoded, heads=[last], logits=True, edits=own)
        torch.testing.assert_close(found.logits, theirs.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.attention(), theirs.attention(), atol=1e-5, rtol=1e-5)
        assert (found.logits - batch.before.logits).abs().max() > 1e-4 or not own


def test_a_key_named_by_its_text_stays_hidden_where_why_replaces_it():
    scope, prompt = qk.Scope.load("nano:mixed"), "hat: O jam: Z cat: B jam:"
    with scope.hide("L2H3", key="Z"):
        named = qk.why(scope, prompt, "L2H3")
        with pytest.raises(BadInput, match="is no token of the prompt"):
            scope.attention("cat: O hat: B cat: D hat:", "L2H3")
    with scope.hide("L2H3", key=6):
        placed = qk.why(scope, prompt, "L2H3")
    assert named.answer == placed.answer


@pytest.mark.parametrize(("name", "place"), [("jam#1", 4), ("cat", 7)])
def test_a_hidden_key_stays_the_one_that_was_named_whatever_replaces_it(nano, name, place):
    """Replacing jam#1 makes the second jam the first one; another prompt has cat elsewhere."""
    other = "hat: O cat: Z jam: B jam:"

    def words(key):
        with nano.hide("L0H1", key=key):
            rows = qk.why(nano, PROMPT, "L1H2", key=4).tables["because"]
            pair = qk.why(nano, PROMPT, "L2H3", corrupted=other).tables["pair"]
        return [row["after"] for row in rows] + [row["lead"] for row in pair]

    assert words(name) == pytest.approx(words(place), abs=1e-5)


@pytest.mark.parametrize("side", ["key", "query"])
def test_a_prompt_recorded_from_its_first_change_on_restores_what_the_whole_one_does(
    nano, monkeypatch, side
):
    monkeypatch.setattr(
        "qkscope.model.prefix._ROOM", {"cpu": 100}
    )  # attention rows of two tokens at a time
    source, changed = (
        PromptRun(nano, text) for text in (PROMPT, PROMPT.replace("jam: Z", "cat: Z"))
    )
    ids, (query, key), sets = (
        changed.asked.inputs["input_ids"][0],
        (11, 6),
        [["L0H1", "M0"], ["L1H0"], ["embedding"]],
    )
    again = Again.of(nano, source.asked.inputs["input_ids"][0])
    start = int((ids != again.ids).nonzero()[0])
    run = again.record(source.reader, ids, (query, key), 2, torch.arange(start, query + 1))
    assert run.columns[0].tolist() == [query - start, key - start, query - start]
    assert start > 0
    whole = restore(changed.run, source.run, "L2H3", query, key, sets, side=side)
    at = key if side == "key" else query
    part = restore(run, source.run, "L2H3", query - start, key - start, sets, side=side, at=at)
    order = [*range(start, query + 1), *range(start)]
    torch.testing.assert_close(part, whole[:, order], rtol=0, atol=1e-5)
