"""Where a module stands among a model's layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from qkscope.errors import BadInput


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and every module in it, once each, in a fixed order: `modules` spends ten times as long on names."""
    found, seen = [model], {id(model)}
    for module in found:  # which grows
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def place_of(model: Any, name: str) -> tuple[nn.ModuleList, int] | None:
    """The outermost list of layers a module stands in, and the number of its layer there."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        found = model.get_submodule(".".join(parts[:end]))
        if isinstance(found, nn.ModuleList):
            return found, int(parts[end])
    return None


def block_of(model: Any, name: str) -> nn.Module:
    """The transformer block a module belongs to: the innermost ancestor that stands in a list of modules."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if isinstance(model.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
            return model.get_submodule(".".join(parts[:end]))
    raise BadInput(f"{name} is not part of a list of layers.")
