"""A GPT-2 whose one head looks for a reason that we planted: this very word, a word of its class,
a query of the key's class, either or both of two words elsewhere, or nothing at all.

A token's embedding is the sum of its class's direction and of one of its own, as long as each
other; all classes have as many words. With c and o what the norm makes of them, the head's logit is
``GAIN`` for a key that has the class, or the word, that is asked for, and about 0 for others.

*Either*, *both*: heads of a layer before look for two words, one head for either or one for each,
and add a flag to the query; the head looks at one word as far as flags outweigh the first token.
"""

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from qkscope.findings.finding import Look
from qkscope.heads import Head
from qkscope.model.scope import Scope

SIZE, HEADS = 96, 2
CLASSES, OF_CLASS = 6, 28
LENGTH = 12
GAIN = 8.0
PLANTED = ("this word", "kind", "same word", "same kind", "either", "both", "nothing")
KEY, QUERY = 4, LENGTH - 1
FLAGS = (6, 8)
"""Where the two words stand that a flag is set for."""
FLAG = 0.3
SINK = 7.5
"""Logit of the first token."""


@dataclass(frozen=True)
class Planted:
    """A model, a prompt, and the look whose reason is known."""

    scope: Scope
    ids: torch.Tensor
    look: Look


def planted_kind(what: str, seed: int) -> Planted:
    """Plant a head that looks from the last token at token `KEY`, for one of the reasons."""
    draws = random.Random(seed)
    words = _words(draws)
    torch.manual_seed(seed)
    layers = 2 if what in ("either", "both") else 1
    config = GPT2Config(
        vocab_size=len(words), n_positions=2 * LENGTH, n_embd=SIZE, n_layer=layers, n_head=HEADS,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    classes = torch.arange(len(words)) % CLASSES
    ids = _prompt(what, classes, draws)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1 or "ln" not in name:
                weights.normal_(0, 0.01)
        basis = torch.linalg.qr(torch.randn(SIZE, SIZE))[0].T
        basis = basis - basis.mean(1, keepdim=True)  # the norm centres
        of_class = basis[:CLASSES][classes]
        free = basis[CLASSES:-2]
        own = torch.randn(len(words), len(free)) / len(free) ** 0.5
        of_word = own @ free
        model.transformer.wte.weight += of_class + of_word
        if layers == 2:
            _plant_flags(model, what, of_word, basis, ids)
        else:
            _plant(model, what, of_class, of_word, basis, ids)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0])
    scope = Scope.from_model(model, fast, name=f"planted {what} {seed}")
    return Planted(scope, ids, Look(Head(layers - 1, 0), QUERY, KEY))


def _words(draws: random.Random) -> list[str]:
    """Made-up words, no two of which begin alike; a class is every sixth of them."""
    beginnings = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "bdgklmnprst"]
    chosen = draws.sample(beginnings, CLASSES * OF_CLASS)
    return [beginning + draws.choice("aeiou") + draws.choice("nrs") for beginning in chosen]


def _prompt(what: str, classes: torch.Tensor, draws: random.Random) -> torch.Tensor:
    """Different words of one class, and the key of another; where the head compares, key and query
    are equal, or of one class.
    """
    tokens = list(range(1, len(classes)))
    draws.shuffle(tokens)
    of_key = int(classes[tokens[KEY]])
    others = [token for token in tokens if int(classes[token]) == (of_key + 1) % CLASSES]
    alike = [token for token in tokens if int(classes[token]) == of_key]
    ids = others[:LENGTH]
    ids[KEY] = alike[0]
    if what == "same kind":
        ids[QUERY] = alike[1]
    elif what == "same word":
        ids[QUERY] = alike[0]
    return torch.tensor(ids)


def _plant(
    model: GPT2LMHeadModel,
    what: str,
    of_class: torch.Tensor,
    of_word: torch.Tensor,
    basis: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Let queries and keys of the first head read classes or words."""
    attention = model.transformer.h[0].attn.c_attn
    width = SIZE // HEADS
    query = attention.weight[:, :width]
    key = attention.weight[:, SIZE : SIZE + width]
    scale = GAIN * width**0.5 / (SIZE / 2)  # of two parts, each has half of the squared norm
    if what in ("this word", "kind"):
        part = of_word if what == "this word" else of_class
        asked = torch.nn.functional.normalize(part[ids[KEY]], dim=0)
        key[:, 0] += asked
        attention.bias[0] += scale * (SIZE / 2) ** 0.5
    elif what == "same kind":
        query[:, :CLASSES] += scale * basis[:CLASSES].T
        key[:, :CLASSES] += basis[:CLASSES].T
    elif what == "same word":
        kept = basis[CLASSES : CLASSES + width].T
        query += 2 * scale * kept  # about half of a word's own direction is read
        key += kept


def _plant_flags(
    model: GPT2LMHeadModel, what: str, of_word: torch.Tensor, basis: torch.Tensor, ids: torch.Tensor
) -> None:
    """Let heads of the first layer set flags for two words, and one of the second heed them."""
    flag, first = basis[-2], basis[-1]
    model.transformer.wpe.weight[0] += first
    width = SIZE // HEADS
    unit = torch.nn.functional.normalize(of_word[ids[[*FLAGS]]], dim=1)
    size = (SIZE / 2) ** 0.5  # of a word's own part, behind the norm
    sets = [unit.sum(0)] if what == "either" else list(unit)
    before = model.transformer.h[0].attn
    for head, asked in enumerate(sets):
        at = head * width
        before.c_attn.bias[at] += GAIN * width**0.5 / size
        before.c_attn.weight[:, SIZE + at] += asked
        before.c_attn.weight[:, 2 * SIZE + at] += asked
        before.c_proj.weight[at] += (FLAG if what == "both" else 2 * FLAG) / size * flag
    attention = model.transformer.h[1].attn
    both = 2 * FLAG / (2 + 4 * FLAG**2) ** 0.5 * SIZE**0.5  # of two flags, behind the norm
    key = torch.nn.functional.normalize(of_word[ids[KEY]], dim=0)
    attention.c_attn.weight[:, 0] += 10.0 * width**0.5 / (both * size) * flag
    attention.c_attn.weight[:, SIZE] += key
    attention.c_attn.bias[1] += SINK * width**0.5 / (SIZE / 3) ** 0.5
    attention.c_attn.weight[:, SIZE + 1] += first
