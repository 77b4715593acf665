"""A GPT-2 of random weights in which one composition is planted: who writes and who reads is known.

The stream holds three codes, in directions of their own: the token, its place, and the token before. The writer attends
to the token before (its query asks for the place before, its key says its own) and puts that token's code into the
third part; the reader's query asks with the token's own code, and its keys answer with the third part. So the reader
attends to what followed its token before (an induction head), by the embedding in its query and by the writer in its
key. A second writer that puts the same code with a minus sign takes part of it back. All else is random and small.
"""

from collections.abc import Mapping

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from qkscope.capture.scope import Scope
from qkscope.heads import Head
from qkscope.tasks.words import OBJECTS

WIDTH, HEADS, LAYERS = 32, 3, 3
READER = Head(2, 1)
GAIN = 1.3  # of queries and keys: the writer attends to the token before with nearly all it has


def planted(writers: Mapping[Head, float], seed: int, *, small: float = 0.02) -> Scope:
    """A model of three layers, each of three heads of width 32, whose ``writers`` put the code with these factors."""
    torch.manual_seed(seed)
    words = ["[UNK]", "Words", ":", *OBJECTS]
    size = WIDTH * HEADS
    config = GPT2Config(vocab_size=len(words), n_positions=WIDTH, n_embd=size, n_layer=LAYERS, n_head=HEADS,
                        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1 or "ln" not in name:
                weights.normal_(0, small)
        token, place, before = torch.linalg.qr(torch.randn(size, size))[0].split(WIDTH, dim=1)
        codes = torch.nn.functional.normalize(torch.randn(len(words), WIDTH), dim=1)
        model.planted = (codes @ token.T, codes @ before.T, place.T)  # directions of words, of words before, of places
        model.transformer.wte.weight += codes @ token.T
        model.transformer.wpe.weight += place.T  # one direction for each place
        for head, factor in writers.items():
            _plant(model, head, "query", GAIN * place)
            _plant(model, head, "key", GAIN * place.roll(1, dims=1))  # place p says p + 1
            _plant(model, head, "value", token)
            out = model.transformer.h[head.layer].attn.c_proj.weight
            out[head.index * WIDTH : (head.index + 1) * WIDTH] += factor * before.T
        _plant(model, READER, "query", GAIN * token)
        _plant(model, READER, "key", GAIN * before)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")
    return Scope.from_model(model, fast, name=f"planted {seed}")


def _plant(model: GPT2LMHeadModel, head: Head, part: str, directions: Tensor) -> None:
    """Let a head's query, key or value read these directions of the stream."""
    start = ("query", "key", "value").index(part) * WIDTH * HEADS + head.index * WIDTH
    model.transformer.h[head.layer].attn.c_attn.weight[:, start : start + WIDTH] += directions
