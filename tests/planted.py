"""A head whose features are known because we planted them: the smallest place where the method can be right or wrong.

Each feature f is a sign vector ``z_f ∈ {±1}^{r_f}``. Keys write it as ``k = Σ_f A_f z_f + ε``, queries as
``q = Σ_f B_f z_f + ε``, and the query's features are those of one key of its context. With ``B`` the dual basis of
``A`` (a *matching* head) the logit is ``gain · Σ_f z_f·z'_f``: the head attends where the features agree, although the
subspaces ``A_f`` overlap. With a random ``B`` (a *random* head) nothing is matched, yet every ΔC still has the "right"
rank - which is why rank alone is no evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput


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
        matching: bool = True,
        gain: float = 3.0,
        noise: float = 0.1,
        seed: int = 0,
    ) -> PlantedHead:
        """Draw random, overlapping key subspaces, and queries that match them or do not."""
        total = sum(ranks.values())
        if total > d_head or min(ranks.values()) < 1:
            raise BadInput(f"features of ranks {dict(ranks)} do not fit into d_head {d_head} with one dimension each.")
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(d_head, total, generator=generator, dtype=torch.float64)
        keys = keys / keys.norm(dim=0)
        other = torch.randn(d_head, total, generator=generator, dtype=torch.float64)
        queries = gain * torch.linalg.pinv(keys).mT if matching else gain * other / other.norm(dim=0)
        widths = list(ranks.values())
        split = [dict(zip(ranks, x.split(widths, dim=1), strict=True)) for x in (keys, queries)]
        return cls(split[0], split[1], noise)

    @property
    def d_head(self) -> int:
        """Width of the head."""
        return next(iter(self.A.values())).shape[0]

    def delta(self, feature: str) -> Float[Tensor, "d d"]:
        """The population ΔC of a feature: ``c B_f A_fᵀ`` with c = 2^r/(2^r − 1), as the other value is never equal."""
        values = 2 ** self.A[feature].shape[1]
        return values / (values - 1) * self.B[feature] @ self.A[feature].mT

    def pairs(
        self, feature: str, n: int, seed: int
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n 2 d"], Int[Tensor, "n 2"]]:
        """Queries, and for each one a key that agrees in the feature and one that does not, all else equal."""
        generator = torch.Generator().manual_seed(seed)
        wanted = {name: self._signs(name, n, generator) for name in self.A}
        other = {name: self._signs(name, n, generator) for name in self.A}
        agree, differ = dict(other), dict(other)
        agree[feature] = wanted[feature]
        differ[feature] = self._another(wanted[feature], generator)
        q = self._encode(self.B, wanted, generator)
        k = torch.stack([self._encode(self.A, z, generator) for z in (agree, differ)], dim=1)
        return q, k, torch.tensor([1, -1]).expand(n, 2)

    def contexts(
        self, n: int, keys: int, seed: int
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n k d"], Int[Tensor, " n"]]:
        """Queries, contexts of keys with features of their own, and the slot of the key that the query asks for."""
        generator = torch.Generator().manual_seed(seed)
        z = {name: self._signs(name, n * keys, generator) for name in self.A}
        asked = torch.randint(keys, (n,), generator=generator)
        k = self._encode(self.A, z, generator).unflatten(0, (n, keys))
        picked = {name: value.unflatten(0, (n, keys))[torch.arange(n), asked] for name, value in z.items()}
        return self._encode(self.B, picked, generator), k, asked

    def _signs(self, feature: str, n: int, generator: torch.Generator) -> Tensor:
        return 2.0 * torch.randint(2, (n, self.A[feature].shape[1]), generator=generator).double() - 1

    def _another(self, z: Float[Tensor, "n r"], generator: torch.Generator) -> Float[Tensor, "n r"]:
        """A uniformly random sign vector that is not z: flip a random non-empty set of its coordinates."""
        r = z.shape[1]
        flips = torch.randint(1, 2**r, (len(z), 1), generator=generator)
        return z * (1 - 2 * ((flips >> torch.arange(r)) & 1))

    def _encode(
        self, maps: dict[str, Float[Tensor, "d r"]], z: dict[str, Float[Tensor, "n r"]], generator: torch.Generator
    ) -> Float[Tensor, "n d"]:
        clean = sum((z[name] @ maps[name].mT for name in maps), start=torch.zeros(1, dtype=torch.float64))
        return clean + self.noise * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
