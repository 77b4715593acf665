"""Payload retrieval (section 2): find the key that shares the query's latents, and read it.

Keys and queries write the same K latent variables through different maps, and a key also carries a
payload::

    x_i = Σ_k A_k z_{k,i} + A_y e_{y_i} + ε_i        x_q = Σ_k B_k z_{k,i*} + ε_q        (answer:
    y_{i*})

``z ∈ {±1}^r`` (discrete) or ``z ~ N(0, I_r)`` (continuous). Everything about a head is then known
in closed form::

    ΔC_k = c W_Q B_k A_kᵀ W_Kᵀ        G = Bᵀ W_Qᵀ W_K A

with c = 2^r / (2^r − 1) where the other value of a discrete latent is never the same one, else c =
1.
"""

from __future__ import annotations

import hashlib
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.checking import AtLeast, Count, checked_class
from qkscope.errors import BadInput
from qkscope.results.folder import read_tensors, write_tensors
from qkscope.seeds import derived_seed

log = logging.getLogger(__name__)

Variant = Literal["discrete", "continuous"]
VARIANTS: tuple[Variant, ...] = ("discrete", "continuous")
Sampling = Literal["strict", "fresh"]
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")
AS_WRITTEN = {"noise": 1.0, "latent_scale": 1.0, "payload_scale": 1.0}
"""The paper's text taken literally: standard Gaussian maps and standard Gaussian noise."""


class Contexts(NamedTuple):
    """n contexts of T keys: embeddings, which key is asked for, payloads, and the latents of the
    keys.
    """

    x_q: Float[Tensor, "n d"]
    x_k: Float[Tensor, "n T d"]
    asked: Int[Tensor, " n"]
    payload: Int[Tensor, "n T"]
    latents: Float[Tensor, "n T R"]


@checked_class
@dataclass(frozen=True)
class Retrieval:
    """One setting of the task; the defaults are those that reproduce the paper's numbers.

    Parameters
    ----------
    ranks : dimensions of the latent variables; two or more of them.
    latent_scale : factor on A and B; ``1/√r`` of each variable by default.
    payload_scale : factor on A_y; ``1/√d`` by default.
    noise : standard deviation of ε.

    Examples
    --------
    >>> task = Retrieval((3, 5))
    >>> task.encoders(seed=0).A.shape
    torch.Size([32, 8])
    """

    ranks: tuple[int, ...] = (3, 5)
    variant: Variant = "discrete"
    d: Count = 32
    keys: Annotated[int, AtLeast(2)] = 16
    payloads: Annotated[int, AtLeast(2)] = 10
    noise: Annotated[float, AtLeast(0)] = 0.01
    latent_scale: float | None = None
    payload_scale: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(int(r) for r in self.ranks))
        if len(self.ranks) < 2 or min(self.ranks) < 1:
            raise BadInput(
                "the task needs two or more latent variables of rank 1 or more, but got "
                f"{self.ranks}."
            )
        if max(self.ranks) > 48:
            raise BadInput(
                f"a latent variable of rank {max(self.ranks)} is too large: take 48 or less."
            )

    @property
    def total_rank(self) -> int:
        """Dimensions of all latent variables together."""
        return sum(self.ranks)

    def warn_if_crowded(self, d_head: int) -> None:
        """Say so where the latents cannot fit: superposition is then expected, and no error."""
        if self.total_rank > 2 * d_head or self.total_rank > self.d:
            said = (
                "latents of %d dimensions in d_head %d and d %d: expect superposition and lost "
                "ranks."
            )
            log.warning(said, self.total_rank, d_head, self.d)

    def latent_slices(self) -> list[slice]:
        """Columns of each latent variable among all."""
        ends = torch.tensor(self.ranks).cumsum(0).tolist()
        return [slice(end - rank, end) for rank, end in zip(self.ranks, ends, strict=True)]

    def encoders(self, seed: int) -> Encoders:
        """Random maps of this task."""
        own_seed = derived_seed(seed, 1, VARIANTS.index(self.variant), *self.ranks)
        generator = torch.Generator().manual_seed(own_seed)

        def drawn(columns: int, scale: float) -> Tensor:
            return scale * torch.randn(self.d, columns, generator=generator)

        def of_latents() -> Tensor:
            parts = []
            for rank in self.ranks:
                usual = 1 / math.sqrt(rank)
                parts.append(drawn(rank, usual if self.latent_scale is None else self.latent_scale))
            return torch.cat(parts, dim=1)

        a = of_latents()
        b = of_latents()
        usual = 1 / math.sqrt(self.d)
        a_y = drawn(self.payloads, usual if self.payload_scale is None else self.payload_scale)
        return Encoders(self, a, b, a_y)

    def draw_latents(
        self, shape: tuple[int, ...], generator: torch.Generator
    ) -> Float[Tensor, "*shape R"]:
        """All latent variables, side by side."""
        if self.variant == "continuous":
            return torch.randn(*shape, self.total_rank, generator=generator)
        return 2.0 * torch.randint(2, (*shape, self.total_rank), generator=generator) - 1

    def draw_other(
        self, z: Float[Tensor, "n R"], variable: int, sampling: Sampling, generator: torch.Generator
    ) -> Float[Tensor, "n R"]:
        """``z`` with another value of one variable: ``strict`` never the same one, ``fresh`` drawn
        anew.
        """
        where = self.latent_slices()[variable]
        other = z.clone()
        # a fresh Gaussian draw differs with probability one
        if sampling == "fresh" or self.variant == "continuous":
            other[:, where] = self.draw_latents((len(z),), generator)[:, where]
        else:
            r = self.ranks[variable]
            flips = torch.randint(1, 2**r, (len(z), 1), generator=generator)
            other[:, where] *= 1 - 2 * ((flips >> torch.arange(r)) & 1)
        return other

    def contrast_scale(self, variable: int, sampling: Sampling = "strict") -> float:
        """The factor c of the closed form."""
        values = 2.0 ** self.ranks[variable]
        return values / (values - 1) if self.variant == "discrete" and sampling == "strict" else 1.0


@dataclass(frozen=True)
class Encoders:
    """The fixed maps of one task: saved with every head, because a head means nothing against other
    ones.
    """

    task: Retrieval
    A: Float[Tensor, "d R"]
    B: Float[Tensor, "d R"]
    A_y: Float[Tensor, "d P"]

    def fingerprint(self) -> str:
        """Hash of the maps: what a checkpoint must agree with."""
        digest = hashlib.sha256()
        for tensor in (self.A, self.B, self.A_y):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def contexts(self, n: int, seed: int) -> Contexts:
        """Fresh contexts, each with a query for one of its keys."""
        task = self.task
        generator = torch.Generator().manual_seed(derived_seed(seed, 2))
        z = task.draw_latents((n, task.keys), generator)
        payload = torch.randint(task.payloads, (n, task.keys), generator=generator)
        asked = torch.randint(task.keys, (n,), generator=generator)
        x_k = self._key(z, payload, generator)
        x_q = self._query(z[torch.arange(n), asked], generator)
        return Contexts(x_q, x_k, asked, payload, z)

    def pairs(
        self, variable: int, n: int, seed: int, sampling: Sampling = "strict"
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        """Queries, keys that agree with them in one variable, and keys that differ in it; all else
        shared.
        """
        task = self.task
        generator = torch.Generator().manual_seed(derived_seed(seed, 3, variable))
        wanted = task.draw_latents((n,), generator)
        agree = task.draw_latents((n,), generator)
        where = task.latent_slices()[variable]
        agree[:, where] = wanted[:, where]
        differ = task.draw_other(agree, variable, sampling, generator)
        of_plus, of_minus = torch.randint(task.payloads, (2, n), generator=generator)
        plus = self._key(agree, of_plus, generator)
        minus = self._key(differ, of_minus, generator)
        return self._query(wanted, generator), plus, minus

    def _key(self, z: Tensor, payload: Tensor, generator: torch.Generator) -> Tensor:
        clean = z @ self.A.mT + self.A_y.mT[payload]
        return clean + self.task.noise * torch.randn(clean.shape, generator=generator)

    def _query(self, z: Tensor, generator: torch.Generator) -> Tensor:
        clean = z @ self.B.mT
        return clean + self.task.noise * torch.randn(clean.shape, generator=generator)


@dataclass(frozen=True)
class RetrievalHead:
    """A head of the task with its encoders, and everything known about it in closed form."""

    W_Q: Float[Tensor, "h d"]
    W_K: Float[Tensor, "h d"]
    W_V: Float[Tensor, "h d"]
    W_O: Float[Tensor, "P h"]
    encoders: Encoders

    @classmethod
    def untrained(cls, encoders: Encoders, d_head: int, seed: int) -> RetrievalHead:
        """Starting weights, uniform in ±1/√(inputs) as torch's linear layers have them."""
        if d_head < 1:
            raise BadInput(f"d_head must be at least 1, but got {d_head}.")
        task = encoders.task
        own_seed = derived_seed(seed, 4, VARIANTS.index(task.variant), d_head, *task.ranks)
        generator = torch.Generator().manual_seed(own_seed)

        def drawn(outputs: int, inputs: int) -> Tensor:
            uniform = torch.rand((outputs, inputs), generator=generator)
            return (2 * uniform - 1) / math.sqrt(inputs)

        w_q = drawn(d_head, task.d)
        w_k = drawn(d_head, task.d)
        w_v = drawn(d_head, task.d)
        w_o = drawn(task.payloads, d_head)
        return cls(w_q, w_k, w_v, w_o, encoders)

    @property
    def d_head(self) -> int:
        """Width of the head."""
        return self.W_Q.shape[0]

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return 1 / math.sqrt(self.d_head)

    def queries(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n h"]:
        """Query vectors of embeddings."""
        return x @ self.W_Q.mT

    def keys(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n h"]:
        """Key vectors of embeddings."""
        return x @ self.W_K.mT

    def delta(self, variable: int, sampling: Sampling = "strict") -> Float[Tensor, "h h"]:
        """The population ΔC of one variable, in float64."""
        where = self.encoders.task.latent_slices()[variable]
        w_q = self.W_Q.double()
        w_k = self.W_K.double()
        a = self.encoders.A.double()
        b = self.encoders.B.double()
        factor = self.encoders.task.contrast_scale(variable, sampling)
        of_queries = w_q @ b[:, where]
        of_keys = w_k @ a[:, where]
        return factor * of_queries @ of_keys.mT

    def sampled_delta(
        self, variable: int, n: int, seed: int, sampling: Sampling = "strict"
    ) -> Float[Tensor, "h h"]:
        """The sample ΔC over n (query, +, −) triplets, in float64."""
        q, difference = self.contrast(variable, n, seed, sampling)
        return q.double().mT @ difference.double() / n

    def contrast(
        self, variable: int, n: int, seed: int, sampling: Sampling = "strict"
    ) -> tuple[Float[Tensor, "n h"], Float[Tensor, "n h"]]:
        """Queries, and key⁺ − key⁻ for each one."""
        x_q, plus, minus = self.encoders.pairs(variable, n, seed, sampling)
        return self.queries(x_q), self.keys(plus - minus)

    def interactions(self) -> Float[Tensor, "R R"]:
        """G: how strongly each coordinate of the query's latents meets each one of the key's."""
        w_q = self.W_Q.double()
        w_k = self.W_K.double()
        a = self.encoders.A.double()
        b = self.encoders.B.double()
        return (w_q @ b).mT @ (w_k @ a)

    def accuracy(self, n: int = 20_480, seed: int = 0) -> float:
        """Share of fresh contexts answered with the right payload."""
        right = 0
        size = 4096
        for part, start in enumerate(range(0, n, size)):
            count = min(size, n - start)
            drawn = self.encoders.contexts(count, derived_seed(seed, 5, part))
            x_q, x_k, asked, payload, _ = drawn
            products = (x_k @ (self.queries(x_q) @ self.W_K)[..., None])[..., 0]
            mixed = ((self.scale * products).softmax(dim=-1)[:, None] @ x_k)[:, 0]
            answer = (mixed @ (self.W_O @ self.W_V).mT).argmax(dim=-1)
            wanted = payload[torch.arange(len(asked)), asked]
            right += int((answer == wanted).sum())
        return right / n

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path, **about: Any) -> None:
        """Write weights and encoders to one safetensors file."""
        tensors = {name: getattr(self, name) for name in WEIGHTS}
        tensors |= {"A": self.encoders.A, "B": self.encoders.B, "A_y": self.encoders.A_y}
        manifest = {
            "task": asdict(self.encoders.task),
            "about": {"encoders": self.encoders.fingerprint(), **about},
        }
        write_tensors(path, "retrieval head", tensors, manifest)

    @classmethod
    def load(cls, path: str | Path, *, encoders: Encoders | None = None) -> RetrievalHead:
        """Read a head with its encoders; where ``encoders`` are given, a head trained with other
        ones is refused.
        """
        expect = None if encoders is None else {"encoders": encoders.fingerprint()}
        tensors, manifest = read_tensors(path, "retrieval head", expect)
        task = Retrieval(**manifest["task"])
        found = Encoders(task, tensors["A"], tensors["B"], tensors["A_y"])
        if found.fingerprint() != manifest["about"]["encoders"]:
            raise BadInput(
                f"{path} holds a head and encoders that do not belong together; make it again."
            )
        return cls(tensors["W_Q"], tensors["W_K"], tensors["W_V"], tensors["W_O"], found)


def off_diagonal(g: Float[Tensor, "R R"]) -> float:
    """Share of ‖G‖² that is off the diagonal."""
    total = float(g.square().sum())
    return 1 - float(g.diagonal().square().sum()) / total if total > 0 else math.nan


def asymmetry(g: Float[Tensor, "R R"]) -> float:
    """``‖G − Gᵀ‖ / ‖G‖``: 0 for a symmetric matrix, √2 on average for a random one."""
    norm = float(g.norm())
    return float((g - g.mT).norm()) / norm if norm > 0 else math.nan
