"""Bench rows on a GPU: models of known shapes with random bfloat16 weights, looked into and traced.

Of a model as small as SmolLM2 a GPU waits for its orders; at the shape of Llama-3.1-8B it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from random import Random
from typing import Any

import torch
from torch import Tensor

from qkscope.examples import Example, Key
from qkscope.heads import Head
from qkscope.model.encode import Encoding
from qkscope.model.scope import Scope
from qkscope.texts.task import ANSWER
from qkscope.verbs.atlas.atlas import atlas
from qkscope.verbs.why.why import why
from qkscope_bench.harness import Row, compare, not_here, row
from qkscope_bench.models import against_body, sums_of, trace_seconds

_SHAPES: dict[str, Any] = {
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
    },
    "tiny": {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
    },
}
# attention that a look has, and tokens of a prompt that is asked about once
_PEAK = 0.5
_LONG = 10_000


@cache
def shape_scope(shape: str, words: bool = False) -> Scope:
    """Random bfloat16 weights of a shape, on a GPU where there is one; with words, those of a
    nano's tokenizer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SHAPES[shape])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    tokenizer = Scope.load("nano:mixed", device="cpu").tokenizer if words else None
    return Scope.from_model(model, tokenizer, name=f"llama-{shape}-shape")


def _prompts(scope: Scope, count: int, length: int) -> Encoding:
    """Random ids; the last token is the query, every ninth is a key and the first of them the right
    one.
    """
    ids = torch.randint(1000, (count, length), generator=torch.Generator().manual_seed(0))
    keys = []
    for i in range(5, length - 1, 9):
        keys.append(Key((i, i + 1), {ANSWER: 1 if i == 5 else -1}))
    return scope.encode([Example(ids=tuple(line), keys=tuple(keys)) for line in ids.tolist()])


def _on_a_gpu(function: Callable[[], Row]) -> Callable[[], Row]:
    """Register a row that is measured where there is a GPU."""

    @wraps(function)
    def measured() -> Row:
        return function() if torch.cuda.is_available() else not_here("needs a GPU")

    return row(measured)


def _looking(shape: str, count: int, length: int) -> Row:
    scope = shape_scope(shape)
    batch = _prompts(scope, count, length)
    heads = f"{len(scope.heads()):,} heads"
    torch.cuda.reset_peak_memory_stats()
    seconds = against_body(scope, [batch], sums_of(scope, ANSWER), repeats=9)
    peak = torch.cuda.max_memory_allocated() / 2**30
    each = f"{heads}, {count}×{length} tokens, ΔC in float64: {count / seconds.ours:.0f} prompts/s"
    return seconds.overhead(f"{each}, {peak:.1f} GiB; one GPU")


def _tracing(shape: str, chosen: list[Head] | None, count: int, length: int) -> Row:
    scope = shape_scope(shape)
    heads = chosen or [head for head in scope.heads() if head.layer > 0]
    seconds = trace_seconds(scope, heads, [_prompts(scope, count, length)], repeats=7)
    return seconds.overhead(f"{len(heads)} of its heads, {count}×{length} tokens; one GPU")


def asking(shape: str, length: int) -> Row:
    """`why` of the head that looks at one token most, its words changed, against the forward."""
    scope = shape_scope(shape, words=True)
    gpu = torch.cuda.is_available()
    prompt = _text(scope, length - 1)
    answers: list[str] = []
    head = _sharpened(scope, prompt)
    batch = scope.encode([prompt])

    @torch.no_grad()
    def plain() -> None:
        scope.model(**batch.inputs, logits_to_keep=1, use_cache=False)

    def ours() -> None:
        answers.append(str(why(scope, prompt, head)))

    one = compare(plain, lambda: _tops(scope, batch, [head]), 3)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = compare(plain, ours, warm=length < _LONG)
    lines = [line.strip() for line in answers[-1].splitlines() if "Words:" in line]
    told = lines[0] if lines else "no word was changed"
    peak = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; one GPU" if gpu else ""
    return seconds.overhead(
        f"{length:,} tokens, its row alone {one.ours / one.plain:.2f}{peak}; {told:.90}"
    )


def _text(scope: Scope, length: int, seed: int = 0) -> str:
    """Random words: half of the vocabulary; the other half can take their place."""
    words = sorted(word for word in scope.tokenizer.get_vocab() if word.isalpha())[::2]
    return " ".join(Random(seed).choices(words, k=length))


def _sharpened(scope: Scope, prompt: str) -> Head:
    """Make queries and keys longer until a head at two thirds of the layers gives half of its
    attention to a token.
    """
    batch = scope.encode([prompt])
    layer = [head for head in scope.heads() if head.layer == 2 * scope.n_layers // 3]
    top = _tops(scope, batch, layer)
    while top.max() < _PEAK:
        for name, weight in scope.model.named_parameters():
            weight.data *= 1.5 if "q_proj" in name or "k_proj" in name else 1
        top = _tops(scope, batch, layer)
    return layer[int(top.argmax())]


def naming(shape: str, passages: int, length: int) -> Row:
    """`atlas` of all heads on random words, against the forward of its passages."""
    scope = shape_scope(shape, words=True)
    found: list[Any] = []
    texts = [_text(scope, length - 1, seed) for seed in range(8 * passages)]
    _sharpened(scope, texts[0])
    batch = scope.encode(texts[: 2 * passages])

    @torch.no_grad()
    def plain() -> None:
        scope.model(**batch.inputs, use_cache=False)

    def ours() -> None:
        made = atlas(scope, texts, passages, test=passages, length=length, progress=False)
        found.append(made)

    seconds = compare(plain, ours, warm=False)
    queries = sum(row["n"] for row in found[0].tables["heads"])
    heads = f"{len(scope.heads()):,} heads"
    return seconds.overhead(f"{heads}, {passages}×{length} tokens, {queries:,} queries")


def _tops(scope: Scope, batch: Encoding, heads: list[Head]) -> Tensor:
    """The largest attention of some heads to a token that is not the first, at the last one."""
    captured = scope.capture_inputs(batch, places=batch.everywhere(), heads=heads)
    return captured.attention()[0, :, 1:].amax(1)


@_on_a_gpu
def why_8b() -> Row:
    """Why one head of the 8B shape looks at a token of 100, its words changed, against the bare
    forward.
    """
    return asking("8b", 100)


@_on_a_gpu
def why_long() -> Row:
    """Why one head looks at a token of 32,000, at the shape of Qwen2.5-1.5B, against the bare
    forward.
    """
    return asking("1.5b", 32_000)


@_on_a_gpu
def atlas_8b() -> Row:
    """Every head of the 8B shape by what decides where it looks, against the bare forwards."""
    return naming("8b", 16, 96)


@_on_a_gpu
def capture_overhead_8b() -> Row:
    """Looking at all 1,024 heads of the shape of Llama-3.1-8B, against the bare body."""
    return _looking("8b", 64, 96)


@_on_a_gpu
def capture_overhead_135m() -> Row:
    """Looking at all 270 heads of the shape of SmolLM2-135M, against the bare body."""
    return _looking("135m", 256, 75)


@_on_a_gpu
def trace_one_135m() -> Row:
    """One head's writers at the last token and every key, against the forward to its layer."""
    return _tracing("135m", [Head(18, 6)], 64, 75)


@_on_a_gpu
def trace_all_135m() -> Row:
    """Writers of all heads but the first layer's, at every key, against the forward to the last
    layer.
    """
    return _tracing("135m", None, 64, 75)
