"""The one exception that means "the input is wrong, and here is what to do".

The command line turns it into a sentence on stderr and exit code 2; everything else that escapes is
a bug.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class BadInput(ValueError):
    """An input cannot be used; the message is one sentence that says why and what to do."""


class Terminated(KeyboardInterrupt):
    """A scheduler asked the process to stop (SIGTERM): like Ctrl-C, but for the exit code."""


def check_device(device: str | torch.device) -> torch.device:
    """Look up a device by name, and refuse one that this machine lacks before any long work.

    >>> check_device("cpu")
    device(type='cpu')
    """
    import torch

    try:
        checked = torch.device(device)
        # torch knows the names of many devices; only using one shows whether it is there
        torch.zeros(1, device=checked).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise BadInput(
            f"there is no device {str(device)!r} here: take cpu, or cuda where there is a GPU."
        ) from error
    return checked
