"""Heads whose queries and keys we make up: noise, or what was planted, in a Llama that runs them like its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from qkscope.analyses.names.look import Looked, fit_factors, look
from qkscope.analyses.names.readings import Readings
from qkscope.analyses.names.sight import Options, Text
from qkscope.maths.factors import FactorFit
from torch import Tensor, nn

from qkscope.capture.scope import Scope
from qkscope.runs.work import Work
from qkscope.tasks.sides import Passage
from qkscope_papers.families import tiny_model

WORDS = 96  # of the vocabulary; the first few are left to special tokens
FIRST_WORD = 4

Made = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From tokens [b, t] to queries and keys before rotation, [b, t, h, d]."""


class _Put(nn.Module):
    """Gives what was made up in the place of a projection."""

    def __init__(self, made: dict[str, Tensor], side: str) -> None:
        super().__init__()
        self.made, self.side = made, side

    def forward(self, hidden: Tensor) -> Tensor:
        return self.made[self.side].flatten(2).to(hidden)


def made_heads(make: Sequence[Made], heads: int, d_head: int = 16, seed: int = 0) -> Scope:
    """A Llama with one layer for each maker, whose queries and keys are what it makes; rotated as any.

    Its embeddings are as wide as there are words, so that any function of a token can be read off it.
    """
    model = tiny_model(
        "llama", seed, vocab_size=WORDS, num_hidden_layers=len(make), num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=d_head, hidden_size=heads * -(-WORDS // heads),
    )  # fmt: skip
    for layer, own in zip(model.model.layers, make, strict=True):
        made: dict[str, Tensor] = {}

        def note(ids: Tensor, made: dict[str, Tensor] = made, own: Made = own) -> None:
            if ids.ndim == 2:  # a batch; else embeddings are read
                made["q"], made["k"] = own(ids)

        model.get_input_embeddings().register_forward_pre_hook(lambda _, args, note=note: note(args[0]))
        layer.self_attn.q_proj, layer.self_attn.k_proj = _Put(made, "q"), _Put(made, "k")
    return Scope.from_model(model, check=False, name="made heads")


class Planted:
    """A head whose query carries r directions of its token that meet those of the key's token, or of the one before.

    Each direction has three tokens of its own, and directions differ in strength. They stand in the dimensions that
    rotate least, so that distance is no part of it.
    """

    def __init__(self, rank: int, back: int, *, strength: float = 6.0, noise: float = 0.3, seed: int = 0) -> None:
        self.rank, self.back, self.strength, self.noise, self.d_head = rank, back, strength, noise, 16
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = [set(range(FIRST_WORD + 3 * i, FIRST_WORD + 3 * i + 3)) for i in range(rank)]
        codes = torch.zeros(WORDS, rank)
        for i, own in enumerate(self.tokens):
            codes[list(own), i] = 0.85**i
        slow = torch.eye(self.d_head)[[4, 5, 6, 7, 12, 13, 14, 15]]
        turn = torch.linalg.qr(torch.randn(8, 8, generator=self.generator))[0]
        self.span = turn[:rank] @ slow  # r d
        self.codes = codes

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (self.noise * torch.randn(*ids.shape, 1, self.d_head, generator=self.generator) for _ in "qk")
        carried = (self.codes[ids] @ self.span)[:, :, None]
        q = q + self.strength * carried
        k[:, self.back :] += self.strength * carried[:, : ids.shape[1] - self.back]
        return q, k


def passages(count: int, length: int | Sequence[int], seed: int, each: int = 2) -> list[Passage]:
    """Random tokens, frequent ones more often; ``each`` passages are a document."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [length] if isinstance(length, int) else list(length)
    odds = 1 / torch.arange(4.0, 4 + WORDS - FIRST_WORD)
    return [
        Passage(f"text {i // each}", i // each,
                tuple((FIRST_WORD + odds.multinomial(lengths[i % len(lengths)], True, generator=generator)).tolist()))
        for i in range(count)
    ]  # fmt: skip


def looked_at(
    scope: Scope, fitted: Sequence[Passage], tested: Sequence[Passage], batch_size: int = 16
) -> tuple[Text, FactorFit, Looked]:
    """Both passes."""
    readings = Readings.of(scope, [p.ids for p in fitted], [p.ids for p in tested])
    text = Text(scope, scope.heads(), readings)
    options = Options(batch_size=batch_size, progress=False)
    fit = fit_factors(text, fitted, Work(), options)
    return text, fit, look(text, fit, tested, Work(), options)
