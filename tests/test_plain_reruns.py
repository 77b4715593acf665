"""Every changed prompt that `Because` runs, against plain eager transformers.

A look is a head, a query and a key. Words of the prompt are replaced, and the attention that is left
decides what is a cause; short ways to that attention must not change it. Tiny models name short
lengths (`qkscope_papers.families`), so that the prompts are beyond all of them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import qkscope as qk
from id_prompts import eager_attention, ids
from qkscope.findings.because import Because, Look
from qkscope.heads import Head
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


def cases() -> Iterator[tuple[str, int, str]]:
    """Each family with each query; seeds in turn, or all where they are wanted."""
    for number, family in enumerate(FAMILIES):
        for place, query in enumerate(QUERIES):
            for seed in SEEDS:
                yield family, (number + place) % 3 if seed is None else seed, query


@pytest.mark.parametrize(("family", "seed", "query"), cases())
def test_changed_prompts_attend_as_plain_transformers_does(nano, family, seed, query):
    model = tiny_model(family, seed)
    scope = qk.Scope.from_model(model, nano.tokenizer, check=False)
    prompt = torch.tensor(ids(LENGTH, seed))
    at = QUERIES[query]
    again = Again.of(scope, prompt)
    looks = [strongest_look(again, layer, at) for layer in again.calls]
    because = Noted(again, looks, count=3)
    because.reruns = []
    because.reasons()
    assert because.reruns
    for run in because.reruns:
        plain = plain_rows(model, torch.stack(run.prompts), looks, run.more)
        error = float((run.rows - plain).abs().max())
        assert error <= CLOSE


def strongest_look(again: Again, layer: int, query: int) -> Look:
    """The head of a layer with the largest attention on a key other than the first."""
    heads = range(again.scope.facts.layers[layer].n_heads)
    rows = torch.stack([again.row(query, Head(layer, i)).attention()[0, 0] for i in heads])
    best = int(rows[:, 1 : query + 1].argmax())
    return Look(Head(layer, best // query), query, 1 + best % query)


def plain_rows(model, prompts, looks, more):
    """The looks' rows of attention as the model itself reports them, run eagerly without a tap."""
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
