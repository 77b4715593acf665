"""A head whose features are known because we planted them: the smallest place where the method can
be right or wrong.

Each feature f is a sign vector ``z_f ∈ {±1}^{r_f}``. Keys write it as ``k = Σ_f A_f z_f + ε``,
queries as ``q = Σ_f B_f z_f + ε``, and the query's features are those of one key of its context.
With ``B`` the dual basis of ``A`` the logit is ``gain · Σ_f z_f·z'_f``: the head attends where the
features agree, although the subspaces overlap.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers of a seed."""
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=dtype)


def orthonormal(seed: int, d: int, r: int) -> Float[Tensor, "d r"]:
    """A random basis of r directions."""
    return torch.linalg.qr(randn(seed, d, r))[0]


@dataclass(frozen=True)
class PlantedHead:
    """Encoders of each feature into key space (``A``) and query space (``B``)."""

    A: dict[str, Float[Tensor, "d r"]]
    B: dict[str, Float[Tensor, "d r"]]
    noise: float

    @classmethod
    def make(
        cls,
        ranks: Mapping[str, int],
        d_head: int = 16,
        *,
        gain: float = 3.0,
        noise: float = 0.1,
        seed: int = 0,
    ) -> "PlantedHead":
        """Draw random, overlapping key subspaces, and queries that match them."""
        drawn = randn(seed, d_head, sum(ranks.values()))
        keys = drawn / drawn.norm(dim=0)
        widths = list(ranks.values())
        sides = (keys, gain * torch.linalg.pinv(keys).mT)
        return cls(*(dict(zip(ranks, x.split(widths, dim=1), strict=True)) for x in sides), noise)

    def pairs(
        self, feature: str, n: int, seed: int
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n 2 d"], Int[Tensor, "n 2"]]:
        """Queries, and for each one a key that agrees in the feature and one that does not, all
        else equal.
        """
        generator = Generator().manual_seed(seed)
        wanted = {name: self._signs(name, n, generator) for name in self.A}
        other = {name: self._signs(name, n, generator) for name in self.A}
        differ = self._another(wanted[feature], generator)
        q = self._encode(self.B, wanted, generator)
        keys = [
            self._encode(self.A, other | {feature: z}, generator) for z in (wanted[feature], differ)
        ]
        return q, torch.stack(keys, dim=1), torch.tensor([1, -1]).expand(n, 2)

    def contexts(
        self, n: int, keys: int, seed: int
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n k d"], Int[Tensor, " n"]]:
        """Queries, contexts of keys with features of their own, and the slot of the key that the
        query asks for.
        """
        generator = Generator().manual_seed(seed)
        z = {name: self._signs(name, n * keys, generator) for name in self.A}
        asked = torch.randint(keys, (n,), generator=generator)
        k = self._encode(self.A, z, generator).unflatten(0, (n, keys))
        picked = {
            name: value.unflatten(0, (n, keys))[torch.arange(n), asked] for name, value in z.items()
        }
        return self._encode(self.B, picked, generator), k, asked

    def _signs(self, feature: str, n: int, generator: Generator) -> Tensor:
        return (
            2.0 * torch.randint(2, (n, self.A[feature].shape[1]), generator=generator).double() - 1
        )

    def _another(self, z: Float[Tensor, "n r"], generator: Generator) -> Float[Tensor, "n r"]:
        """A uniformly random sign vector that is not z: flip a random non-empty set of its
        coordinates.
        """
        flips = torch.randint(1, 2 ** z.shape[1], (len(z), 1), generator=generator)
        return z * (1 - 2 * ((flips >> torch.arange(z.shape[1])) & 1))

    def _encode(
        self, maps: dict[str, Tensor], z: dict[str, Tensor], generator: Generator
    ) -> Float[Tensor, "n d"]:
        clean = sum(
            (z[name] @ maps[name].mT for name in maps), start=torch.zeros(1, dtype=torch.float64)
        )
        return clean + self.noise * torch.randn(
            clean.shape, generator=generator, dtype=torch.float64
        )
