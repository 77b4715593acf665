"""Random prompts of ids with marked keys, and the attention that a model reports of them, the tap
aside.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkscope.examples import Example, Key


def ids(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(
        torch.randint(5, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def marked(lengths: Sequence[int], places: Sequence[int] | None = None) -> list[Example]:
    """Prompts of these lengths with keys at some places, from the end where negative; at every
    place if None.
    """
    return [
        Example(
            ids=ids(n, n),
            keys=[Key((p % n, p % n + 1)) for p in (range(n) if places is None else places)],
        )
        for n in lengths
    ]


@torch.no_grad()
def eager_attention(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The model's own report, from a run the tap has no part in."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    model.config._attn_implementation_internal = "eager"  # Falcon ignores the line above
    attentions = model.base_model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation(before)
    model.config._attn_implementation_internal = before
    return attentions
