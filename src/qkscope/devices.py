"""Whether a device can be had: asked before long work, and answered with a sentence."""

from __future__ import annotations

import torch

from qkscope.errors import BadInput


def check_device(device: str | torch.device) -> torch.device:
    """The device of this name, if this machine has it.

    >>> check_device("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()  # torch knows many names; only use shows which are there
    except (RuntimeError, AssertionError, ImportError) as error:
        raise BadInput(f"there is no device {str(device)!r} here: take cpu, or cuda where there is a GPU.") from error
    return found
