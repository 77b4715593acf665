"""Whole heads taken out of the running model, and what the parts beside them put out, held where it was.

A head that is taken out puts out another vector at every token, for all that read it (`Edit.outputs`), and every later
layer follows. With MLPs held at what they put out before, their answers to the head stay, which is no state that the
model knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, cleared


@contextmanager
def noted(parts: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Any]]:
    """Note what some modules put out, whole, during a run."""
    found: dict[nn.Module, Any] = {}
    with cleared([part.register_forward_hook(lambda part, _, out: found.__setitem__(part, out)) for part in parts]):
        yield found


@contextmanager
def held(outputs: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Let modules put out what they put out before, during a run."""
    with cleared([part.register_forward_hook(lambda *_, out=out: out) for part, out in outputs.items()]):
        yield


@torch.no_grad()
def summed_outputs(
    scope: Scope, inputs: dict[str, Tensor], shown: Bool[Tensor, "b t"]
) -> dict[int, Float[Tensor, "h e"]]:
    """By layer, the sum of every head's output over the tokens shown."""
    sums: dict[int, Tensor] = {}

    def visit(call: Call) -> None:
        z = call.attend(list(range(call.q.shape[1])))
        sums[call.layer] = z[shown.to(z.device)].double().sum(0).cpu()

    scope.watch(inputs, visit)
    return sums
