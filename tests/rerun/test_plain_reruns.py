"""Every changed prompt that `Because` runs, against plain eager transformers.

A look is a head, a query and a key. Words of the prompt are replaced, and the attention that is left
decides what is a cause; short ways to that attention must not change it. Tiny models name short
lengths (`qkscope_papers.families`), so that the prompts are beyond all of them.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import qkscope as qk
from id_prompts import eager_attention, ids
from qkscope.changes import Hidden, Output, Row, Words
from qkscope.findings.because import Because, Look
from qkscope.heads import Head, Writer
from qkscope.model.tap import Call, cleared
from qkscope.rerun.executor import rerun
from qkscope.rerun.reference import run_plainly
from qkscope.rerun.rerun_tokens import Again
from qkscope_papers.families import tiny_model

LENGTH = 34
QUERIES = {"last": LENGTH - 1, "before": 15}
CLOSE = 1e-5
FAMILIES = [
    "llama", "gpt2", "gemma2", "gemma3_text", "qwen3", "gpt_neox", "bloom", "gptj", "falcon", "gpt_oss",
    "mistral", "llama4_text", "phi3 (longrope)", "llama (dynamic rope)", "deepseek_v3", "deepseek_v32",
    "glm_moe_dsa", "doge", "qwen3_next", "lfm2", "xlm", "qwen4_exp_text", "hy_v4", "axk2", "cohere2",
    "minimax",
]  # fmt: skip
SEEDS = range(3) if os.environ.get("QKSCOPE_ALL_RERUNS") else (None,)


@dataclass
class Reruns:
    """Changed prompts that were run together, and the attention rows of all looks in them."""

    prompts: list[Tensor]
    rows: Tensor
    more: int  # tokens that were put in: queries stand so many further on


class Noted(Because):
    """`Because` that keeps what it runs."""

    def rows(self, prompts, ends=()):
        found = super().rows(prompts, ends)
        if len(prompts):
            self.reruns.append(Reruns(prompts, found, len(prompts[0]) - len(self.ids)))
        return found


class Plain(Because):
    """`Because` that runs its prompts by plain eager transformers."""

    def rows(self, prompts, ends=()):
        if not len(prompts):
            return super().rows(prompts, ends)
        more = len(prompts[0]) - len(self.ids)
        found = plain_rows(self.model, torch.stack(prompts), self.looks, more)
        self.reruns.append(Reruns(prompts, found, more))
        return found


def cases() -> Iterator[tuple[str, int, str]]:
    """Each family with each query; seeds in turn, or all where they are wanted."""
    for number, family in enumerate(FAMILIES):
        for place, query in enumerate(QUERIES):
            for seed in SEEDS:
                yield family, (number + place) % 3 if seed is None else seed, query


@pytest.mark.parametrize(("family", "seed", "query"), list(cases()))
def test_changed_prompts_attend_as_plain_transformers_does(nano, family, seed, query):
    # kernels round apart, and doge's choice of keys may hang on that
    model = tiny_model(family, seed, attn_implementation="eager")
    scope = qk.Scope.from_model(model, nano.tokenizer, check=False)
    prompt = torch.tensor(ids(LENGTH, seed))
    at = QUERIES[query]
    again = Again.of(scope, prompt)
    looks = [strongest_look(again, layer, at) for layer in again.calls]
    because = Noted(again, looks, count=3)
    plain = Plain(again, looks, count=3)
    plain.model = model
    because.reruns, plain.reruns = [], []
    found, wanted = because.reasons(), plain.reasons()
    assert because.reruns
    for ours, theirs in zip(because.reruns, plain.reruns, strict=True):
        assert torch.equal(torch.stack(ours.prompts), torch.stack(theirs.prompts))
        assert (ours.rows - theirs.rows).abs().max() <= CLOSE
    assert [said(reason) for reason in found] == [said(reason) for reason in wanted]


def said(reason):
    """The causes of a look, and what is found of their relation."""
    causes = {(row["position"], row["cause"]) for row in reason.words}
    return causes, {(finding.kind, finding.positions) for finding in reason.findings}


def strongest_look(again: Again, layer: int, query: int) -> Look:
    """The head of a layer with the largest attention on a key other than the first."""
    heads = range(again.scope.facts.layers[layer].n_heads)
    rows = torch.stack([again.row(query, Head(layer, i)).attention()[0, 0] for i in heads])
    best = int(rows[:, 1 : query + 1].argmax())
    return Look(Head(layer, best // query), query, 1 + best % query)


def plain_rows(model, prompts, looks, more):
    """The looks' rows of attention as the model itself reports them, run eagerly without a tap."""
    model = copy.deepcopy(model)  # dynamic RoPE keeps the longest length that it saw
    reported = eager_attention(model, {"input_ids": prompts})
    reported = [weights for weights in reported if weights is not None]
    layers = sorted({look.head.layer for look in looks})
    if len(reported) > len(layers):  # of layers without attention, too
        reported = [reported[layer] for layer in layers]
    by_layer = dict(zip(layers, reported, strict=True))
    width = prompts.shape[1]  # a sink may be reported behind the keys
    rows = [
        by_layer[look.head.layer][:, look.head.index, look.query + more, :width] for look in looks
    ]
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt_oss", "bloom", "deepseek_v32", "phi3 (longrope)"]
)
def test_changes_run_together_show_what_the_reference_shows(family):
    """Attention and logits, each against one whole prompt at a time."""
    scope = qk.Scope.from_model(tiny_model(family), check=False)
    prompt = torch.tensor(ids(LENGTH))
    again = Again.of(scope, prompt)
    for query in QUERIES.values():
        heads = [Head(0, 1), Head(1, 2)]
        keys = [strongest_look(again, head.layer, query).key for head in heads]
        places = (query - 4, query - 3, query - 2)
        rows = torch.randn(2, LENGTH, generator=torch.Generator().manual_seed(0))
        value = torch.randn(again.calls[0].v.shape[-1], generator=torch.Generator().manual_seed(1))
        words = Words(places, (13, 14, 15))
        changes = [
            [Hidden(heads[0], keys[0], query)],
            [Hidden(heads[1], keys[1], query), Hidden(heads[1], keys[1] - 1, query)],
            [Words(places, (7, 8, 9))],
            [Words(places, (10, 11, 12)), Hidden(heads[0], keys[0], query - 1)],
            [Row(heads[0], query, rows[0]), Row(heads[1], query - 1, rows[1])],
            [Hidden(heads[1], keys[1])],
            [Output(Writer.parse("L1H2"))],
            [Output(Writer.parse("M0")), Hidden(heads[1], keys[1])],
            [Output(Writer.parse("L0H1"), value), Output(Writer.parse("L0H0")), words],
        ]
        reads = [(head, at) for head in scope.heads() for at in (query - 1, query)]
        found = rerun(again, changes, reads, end=query, logits=True)
        for number, own in enumerate(changes):
            plain = run_plainly(scope, prompt, own)
            assert off(found.logits[number], plain.logits[query]) <= CLOSE
            for (head, at), row in zip(reads, found.attention[number], strict=True):
                assert (row - plain.attention[head.layer][head.index, at]).abs().max() <= CLOSE
        short = rerun(again, changes[:5], reads, end=query, logits=True)
        assert (short.attention - found.attention[:5]).abs().max() <= CLOSE
        assert off(short.logits, found.logits[:5]) <= CLOSE
        late = rerun(again, changes[5:7], reads, end=query, logits=True)
        assert (late.attention - found.attention[5:7]).abs().max() <= CLOSE
        assert off(late.logits, found.logits[5:7]) <= CLOSE
        hidden = again.hidden(query, list(zip(heads, keys, strict=True)))
        assert off(hidden[0], found.logits[0]) <= CLOSE


def off(found: Tensor, plain: Tensor) -> float:
    """The largest difference of logits, as a share of the largest."""
    return float((found - plain).abs().max() / plain.abs().max())


def test_what_changed_prompts_share_runs_once_and_heads_are_hidden_from_their_layer_on(nano):
    """Against the reference, with tokens counted by layer."""
    prompt = nano.encode(["hat: O jam: Z cat: B jam:"]).inputs["input_ids"][0]
    again = Again.of(nano, prompt)
    pairs = [[Words((4, 10), (word, other))] for word in (7, 9) for other in (7, 9, 12)]
    reads = [(Head(2, 3), 11)]
    with counting(nano) as tokens:
        found = rerun(again, pairs, reads)
    assert tokens[:2] == [2 * 6 + 6 * 2] * 2  # 4 to 9 once for each word, 10 and 11 for each pair
    rows = [run_plainly(nano, prompt, own).attention[2][3, 11] for own in pairs]
    assert (found.attention[:, 0] - torch.stack(rows)).abs().max() <= CLOSE
    edges = [(Head(layer, index % 4), index % 11) for layer in range(3) for index in range(88)]
    again.hidden(11, edges)  # the way is tried once
    with counting(nano) as tokens:
        logits = again.hidden(11, edges)
    assert tokens == [89, 177, 265]
    for (head, key), row in list(zip(edges, logits, strict=True))[::11]:
        plain = run_plainly(nano, prompt, [Hidden(head, key, 11)]).logits[11]
        assert off(row, plain) <= CLOSE


@contextmanager
def counting(scope):
    """Tokens that run through the MLP of each layer in a ``with`` block."""
    layers = scope.model.model.layers
    tokens = [0] * len(layers)

    def count(number, args):
        tokens[number] += args[0].shape[0] * args[0].shape[1]

    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _m, args, n=n: count(n, args))
        for n, layer in enumerate(layers)
    ]
    with cleared(hooks):
        yield tokens


def test_changes_of_a_late_layer_run_the_layers_before_it_once(nano):
    again = Again.of(nano, nano.encode(["hat: O jam: Z cat: B jam:"]).inputs["input_ids"][0])
    changes = [[Output(Writer.parse(f"L2H{index}"))] for index in range(4)]
    reads = [(Head(2, 3), 11)]
    rerun(again, changes, reads, logits=True)  # the way is tried once
    with counting(nano) as tokens:
        found = rerun(again, changes, reads, logits=True)
    assert tokens == [12, 12, 60]
    plain = [run_plainly(nano, again.ids, own) for own in changes]
    theirs = torch.stack([run.logits[11] for run in plain])
    torch.testing.assert_close(found.logits, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_and_padded_batches_attend_as_plain_transformers_does(family):
    scope = qk.Scope.from_model(tiny_model(family))
    prompts = [torch.tensor(ids(LENGTH, 0)), torch.tensor(ids(LENGTH, 1))[: LENGTH - 5]]
    words, query = Words((3, 20), (50, 60)), 24
    looks = [Look(head, query, 0) for head in scope.heads() if head.index == 1]
    changed = [words.applied(prompt) for prompt in prompts]
    plain = [plain_rows(scope.model, prompt[None], looks, 0)[0] for prompt in changed]
    for prompt, rows in zip(prompts, plain, strict=True):
        run = run_plainly(scope, prompt, [words])
        found = torch.stack([run.attention[look.head.layer][1, query] for look in looks])
        assert (found - rows).abs().max() <= CLOSE
    examples = [qk.Example(ids=tuple(prompt.tolist())) for prompt in changed]
    for side in scope.facts.sides:
        inputs = scope.encode(examples, padding_side=side).inputs
        calls = list[Call]()
        scope.watch(inputs, calls.append)
        for number, rows in enumerate(plain):
            shown = inputs["attention_mask"][number].nonzero()[:, 0]
            for call, row in zip(calls, rows, strict=True):
                found = call.rows(1, torch.tensor([number]), shown[[query]])
                assert (found.attention()[0, 0, shown] - row).abs().max() <= CLOSE


def test_outputs_set_and_ablated_by_the_reference_are_those_of_hooks_and_blocks(nano):
    prompt = nano.encode(["hat: O jam: Z cat: B jam:"]).inputs["input_ids"][0]
    plain = run_plainly(nano, prompt)
    with nano.ablate("L0H2", "M1"), nano.patched([]):
        theirs = nano.model(prompt[None]).logits[0]
    writers = [Writer.parse("L0H2"), Writer.parse("M1")]
    ours = run_plainly(nano, prompt, [Output(writer) for writer in writers]).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert (ours - plain.logits).abs().max() > 0.1
    row = plain.attention[1][0, 11].log()
    moved = run_plainly(nano, prompt, [Row(Head(1, 0), 11, row.flip(0))])
    torch.testing.assert_close(moved.attention[1][0, 11], row.flip(0).softmax(-1))
    kept = []
    parts = [nano.model.model.layers[1].mlp, nano.model.model.layers[0].self_attn.o_proj]
    hooks = [parts[0].register_forward_hook(lambda _m, _a, out: kept.append(out[0]))]
    hooks.append(parts[1].register_forward_pre_hook(lambda _m, args: kept.insert(0, args[0][0])))
    with torch.no_grad(), cleared(hooks):
        nano.model(prompt[None])
    width = nano.d_head
    values = kept[0][:, 2 * width : 3 * width], kept[1]
    same = [Output(writer, value) for writer, value in zip(writers, values, strict=True)]
    torch.testing.assert_close(
        run_plainly(nano, prompt, same).logits, plain.logits, rtol=0, atol=1e-5
    )
    zero = [Output(writer, 0 * value) for writer, value in zip(writers, values, strict=True)]
    hooks = [parts[0].register_forward_hook(lambda _m, _a, out: 0 * out)]
    hooks.append(
        parts[1].register_forward_pre_hook(
            lambda _m, args: args[0].index_fill(-1, torch.arange(2 * width, 3 * width), 0)
        )
    )
    with torch.no_grad(), cleared(hooks):
        without = nano.model(prompt[None]).logits[0]
    torch.testing.assert_close(run_plainly(nano, prompt, zero).logits, without, rtol=0, atol=1e-5)


def counted(scope, monkeypatch):
    """Lengths of the batches that a model runs from here on."""
    lengths, watch = [], scope.watch

    def counting(inputs, *visits, **kwargs):
        lengths.append(inputs["input_ids"].shape[1])
        return watch(inputs, *visits, **kwargs)

    monkeypatch.setattr(scope, "watch", counting)
    return lengths


@pytest.mark.parametrize("check", [True, False])
def test_the_short_way_is_compared_once_and_again_beyond_each_length_and_doubling(
    monkeypatch, check
):
    scope = qk.Scope.from_model(tiny_model("deepseek_v32"), check=check)
    lengths = counted(scope, monkeypatch)
    compared = []
    for length in (12, 13, 16, 20, 30, 40):
        again = Again.of(scope, torch.tensor(ids(length)))
        before = len(lengths)
        alone = again.runs_alone()
        again.runs_alone()
        compared.append((alone, len(lengths) - before))
    first = 0 if check else 2  # the check has seen 9 tokens, and 49
    assert compared == [(True, first), (True, 0), (True, 0), (False, 2), (False, 0), (False, first)]


def test_a_short_way_beyond_a_length_is_compared_for_every_length_of_prompts(monkeypatch):
    """Blocks of keys times their number is a length that no config names."""
    scope = qk.Scope.from_model(tiny_model("gemma2"))
    lengths = counted(scope, monkeypatch)
    compared = []
    for length in (20, 20, 21, 28):
        again = Again.of(scope, torch.tensor(ids(length)))
        before = len(lengths)
        assert again.runs_alone()
        assert again.runs_alone()
        compared.append(len(lengths) - before)
    assert compared == [2, 0, 2, 2]


def test_keys_that_are_no_tokens_are_refused_in_words():
    scope = qk.Scope.from_model(tiny_model("deepseek_v4"))
    with pytest.raises(
        qk.BadInput, match=r"keys that are no tokens \(layer \d has \d+ keys for 34"
    ):
        Again.of(scope, torch.tensor(ids(34)))


def test_a_model_that_was_checked_keeps_its_ways(tmp_path, own_cache, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    scopes = [qk.Scope.load(tmp_path / "model") for _ in range(2)]
    lengths = counted(scopes[1], monkeypatch)
    again = Again.of(scopes[1], torch.tensor(ids(20)))
    assert again.runs_alone()
    assert again.runs_alone(12)
    assert lengths == [20], "nothing but the prompt itself"


def test_a_prompt_whose_other_tokens_look_ahead_runs_whole():
    scope = qk.Scope.from_model(tiny_model("bert"), check=False)
    again = Again.of(scope, torch.tensor(ids(20)))
    assert not again.runs_alone()
    assert not again.runs_alone(10)


@pytest.mark.parametrize("family", ["llama", "deepseek_v32", "qwen3_next"])
def test_log_probabilities_behind_a_change_are_those_of_the_reference(family):
    scope = qk.Scope.from_model(tiny_model(family), check=False)
    prompt = torch.tensor(ids(LENGTH))
    changes = [Words((4,), (7,)), Words((4, 20), (7, 9)), Words((28,), (5,))]
    changed = torch.stack([change.applied(prompt) for change in changes])
    runs = torch.stack([torch.arange(LENGTH) >= change.places[0] for change in changes])
    found = Again.of(scope, prompt).run(changed, runs, likelihood=True).likelihood
    for number, change in enumerate(changes):
        chances = run_plainly(scope, prompt, [change]).logits.log_softmax(-1)
        behind = chances[:-1].gather(1, changed[number, 1:, None])[:, 0]
        shown = runs[number, :-1]
        assert (found[number, :-1] - behind)[shown].abs().max() <= 1e-4
