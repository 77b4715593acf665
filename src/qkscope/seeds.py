"""Random numbers addressed by what they are for, not by when they were drawn.

A null replicate must give prompt 17 the same sign whether one process sees it or ten do, in
whatever batch, on CPU or GPU. So a draw is a hash of (seed, replicate, prompt, …): splitmix64's
finaliser, chained over the parts of the address. What comes as a stream gets a seed by its address
(`derived_seed`): nobody adds to a seed.
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Int
from torch import Tensor

_GOLDEN = (
    0x9E3779B97F4A7C15 - 2**64
)  # as signed 64-bit numbers: torch's int64 wraps around, as the hash wants
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts signed numbers arithmetically, so the copies of the sign bit are
    masked away.
    """
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw_bits(*address: Tensor | int) -> Int[Tensor, "*shape"]:
    """64 random bits for every element of the broadcast address.

    Parameters
    ----------
    *address : integer tensors or ints
        Broadcast against each other; a different address gives an independent draw.

    Examples
    --------
    >>> draw_bits(0, torch.arange(3)[:, None], torch.arange(4)).shape
    torch.Size([3, 4])
    """
    devices = [part.device for part in address if isinstance(part, Tensor)]
    bits = torch.zeros((), dtype=torch.int64, device=devices[0] if devices else None)
    for part in address:
        bits = (
            bits + torch.as_tensor(part, dtype=torch.int64, device=bits.device) * _GOLDEN + _GOLDEN
        )
        bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
        bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
        bits = bits ^ _shift_right(bits, 31)
    return bits


def draw_signs(*address: Tensor | int) -> Int[Tensor, "*shape"]:
    """One fair sign, +1 or −1, for every element of the broadcast address."""
    return 1 - 2 * _shift_right(draw_bits(*address), 63)


def derived_seed(*address: int | str) -> int:
    """A seed of its own for every address, for draws that come as a stream: no two of them share
    one.

    >>> derived_seed(0, "random", 18, 6) != derived_seed(0, "random", 18, 7)
    True
    """
    return int(
        draw_bits(*(_number(part) if isinstance(part, str) else part for part in address))
    ) & (2**62 - 1)


def _number(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest(), "big")
