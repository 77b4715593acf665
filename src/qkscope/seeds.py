"""Random numbers addressed by what they are for, not by when they were drawn.

A null replicate must give prompt 17 the same sign whether one process sees it or ten do, in
whatever batch, on CPU or GPU. So a draw is a hash of (seed, replicate, prompt, …): splitmix64's
finaliser, chained over the parts of the address::

    z ← z + (part + 1) · golden,   z ← (z ⊕ z≫30) · mix₁,   z ← (z ⊕ z≫27) · mix₂,   z ← z ⊕ z≫31

What comes as a stream gets a seed by its address (`derived_seed`): nobody adds to a seed.
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Int
from torch import Tensor

# splitmix64's constants as signed 64-bit numbers: torch's int64 wraps around, as the hash wants
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_SEED_BITS = 62  # of a derived seed, so that it fits wherever a seed is wanted


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically: torch copies the sign bit into signed numbers, so mask the copies away."""
    mask = (1 << (64 - bits)) - 1
    return (x >> bits) & mask


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
    device = devices[0] if devices else None
    bits = torch.zeros((), dtype=torch.int64, device=device)
    for part in address:
        part = torch.as_tensor(part, dtype=torch.int64, device=bits.device)
        bits = bits + part * _GOLDEN + _GOLDEN
        bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
        bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
        bits = bits ^ _shift_right(bits, 31)
    return bits


def draw_signs(*address: Tensor | int) -> Int[Tensor, "*shape"]:
    """One fair sign, +1 or −1, for every element of the broadcast address."""
    highest_bit = _shift_right(draw_bits(*address), 63)
    return 1 - 2 * highest_bit


def derived_seed(*address: int | str) -> int:
    """Seed of a stream of draws by its address: no two addresses share one.

    >>> derived_seed(0, "random", 18, 6) != derived_seed(0, "random", 18, 7)
    True
    """
    numbers = [_number(part) if isinstance(part, str) else part for part in address]
    bits = int(draw_bits(*numbers))
    return bits & (2**_SEED_BITS - 1)


def _number(word: str) -> int:
    """Number of 56 bits that stands for a word in an address."""
    digest = hashlib.blake2b(word.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
