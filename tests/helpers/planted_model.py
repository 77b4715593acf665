"""A GPT-2 of random weights in which heads are planted: what they look at, who writes and who reads
is known.

The stream holds three codes, in directions of their own: the token, its place, and the token
before. The writer attends to the token before (its query asks for the place before, its key says
its own) and puts that token's code into the third part; the reader's query asks with the token's
own code, and its keys answer with the third part. So the reader attends to what followed its token
before (an induction head), by the embedding in its query and by the writer in its key. A second
writer that puts the same code with a minus sign takes part of it back. All else is random and
small.
"""

import random
from collections.abc import Mapping

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import qkscope as qk
from qkscope.heads import Head
from qkscope.model.scope import Scope
from qkscope.results.result import Result
from qkscope.texts.word_pools import OBJECTS

WIDTH, HEADS, LAYERS = 32, 3, 3
READER = Head(2, 1)
GAIN = 1.3  # of queries and keys: the writer attends to the token before with nearly all it has
KINDS = ("induction", "duplicate token", "position", "key word")
VOCABULARY = ["[UNK]", "Words", ":", *OBJECTS]


def planted(
    writers: Mapping[Head, float], seed: int, *, small: float = 0.02, reader: str = "induction"
) -> Scope:
    """A model of three layers, each of three heads of width 32, whose ``writers`` put the code with
    these factors.
    """
    torch.manual_seed(seed)
    size = WIDTH * HEADS
    config = GPT2Config(vocab_size=len(VOCABULARY), n_positions=WIDTH, n_embd=size, n_layer=LAYERS, n_head=HEADS,
                        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1 or "ln" not in name:
                weights.normal_(0, small)
        token, place, before = torch.linalg.qr(torch.randn(size, size))[0].split(WIDTH, dim=1)
        codes = torch.nn.functional.normalize(torch.randn(len(VOCABULARY), WIDTH), dim=1)
        model.planted = (
            codes @ token.T,
            codes @ before.T,
            place.T,
        )  # directions of words, of words before, of places
        model.transformer.wte.weight += codes @ token.T
        model.transformer.wpe.weight += place.T  # one direction for each place
        for head, factor in writers.items():
            _plant(model, head, "query", GAIN * place)
            _plant(model, head, "key", GAIN * place.roll(1, dims=1))  # place p says p + 1
            _plant(model, head, "value", token)
            out = model.transformer.h[head.layer].attn.c_proj.weight
            out[head.index * WIDTH : (head.index + 1) * WIDTH] += factor * before.T
        query, key, bias = (
            GAIN * token,
            GAIN * before,
            model.transformer.h[READER.layer].attn.c_attn.bias,
        )
        if reader == "position":
            query, key = GAIN * place, GAIN * place.roll(1 + seed % 3, dims=1)
        elif reader == "duplicate token":
            query, key = 1.8 * token, 1.8 * token
            query[:, 0], key[:, 0] = (
                0,
                place @ -torch.linspace(0, 0.8, WIDTH),
            )  # of equal tokens the first, not itself
            bias[READER.index * WIDTH] += 8
        elif reader == "key word":
            query, key = (
                torch.zeros(size, WIDTH),
                GAIN * (token @ codes[asked(seed)])[:, None].expand(size, WIDTH),
            )
            bias[READER.index * WIDTH : (READER.index + 1) * WIDTH] += 1
        _plant(model, READER, "query", query)
        _plant(model, READER, "key", key)
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")
    return Scope.from_model(model, fast, name=f"planted {seed}")


def _plant(model: GPT2LMHeadModel, head: Head, part: str, directions: Tensor) -> None:
    """Let a head's query, key or value read these directions of the stream."""
    start = ("query", "key", "value").index(part) * WIDTH * HEADS + head.index * WIDTH
    model.transformer.h[head.layer].attn.c_attn.weight[:, start : start + WIDTH] += directions


def asked(seed: int) -> int:
    """The token that a head planted to look at one word looks at."""
    return VOCABULARY.index(OBJECTS[seed])


def named(kind: str, seed: int) -> tuple[str, Result]:
    """What a head planted to do one thing is to be called, and the atlas of its model; each word
    stands twice.
    """
    draws, texts = random.Random(seed), []
    for _ in range(60):
        words = [OBJECTS[seed], *draws.sample(OBJECTS[len(KINDS) + 1 :], 13)]
        texts.append(" ".join(draws.sample(words, 14) + draws.sample(words, 14)))
    scope = planted({Head(0, seed % 3): 0.3} if kind == "induction" else {}, seed, reader=kind)
    position = ("previous token", "position -2", "position -3")[seed % 3]
    name = {"position": position, "key word": "kind"}.get(kind, kind)
    return name, qk.atlas(
        scope, texts, 8, test=8, heads=READER, length=30, seed=seed, progress=False
    )


if __name__ == "__main__":  # how many of 20 planted heads are named right
    results = [named(kind, seed) for kind in KINDS for seed in range(5)]
    for name, made in results:
        row = made.table()[0]
        ious = f"IoU {row['iou']:.2f}, mean row {row['mean_row_iou']:.2f}"
        print(f"planted {name}: {row['kind']}; {ious}; {row['rule']}")
    right = sum(made.table()[0]["kind"] == name for name, made in results)
    print(f"named right: {right} of {len(results)}")
