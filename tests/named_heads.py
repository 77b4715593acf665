"""Heads whose queries and keys we make up: noise, or what was planted, in a Llama that runs them like its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qkscope.analyses.names.look import Looked, fit_factors, look
from qkscope.analyses.names.readings import Readings
from qkscope.analyses.names.sight import Text
from qkscope.capture.families import tiny_model
from qkscope.capture.scope import Scope
from qkscope.maths.factors import FactorFit
from qkscope.runs.job import Job
from qkscope.tasks.sides import Passage

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
    """A Llama with one layer for each maker, whose queries and keys are what it makes; rotated as any."""
    model = tiny_model(
        "llama", seed, vocab_size=WORDS, num_hidden_layers=len(make), num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=d_head, hidden_size=heads * -(-32 // heads),
    )  # fmt: skip
    for layer, own in zip(model.model.layers, make, strict=True):
        made: dict[str, Tensor] = {}

        def note(ids: Tensor, made: dict[str, Tensor] = made, own: Made = own) -> None:
            made["q"], made["k"] = own(ids)

        model.get_input_embeddings().register_forward_pre_hook(lambda _, args, note=note: note(args[0]))
        layer.self_attn.q_proj, layer.self_attn.k_proj = _Put(made, "q"), _Put(made, "k")
    return Scope.from_model(model, check=False, name="made heads")


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
    fit = fit_factors(text, fitted, Job(), batch_size=batch_size, progress=False)
    return text, fit, look(text, fit, tested, Job(), batch_size=batch_size, progress=False)
