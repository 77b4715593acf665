"""A head's singular basis, and how it looks from inside the head.

``Ω = W_Qᵀ W_K = Σ σ_j u_j v_jᵀ`` lives in the residual stream; queries and keys live in the head, where only images of
the singular vectors are seen: ``m_j = W_Q u_j`` and ``p_j = W_K v_j``. They are no orthogonal bases, but each other's
duals: ``m_iᵀ p_j = u_iᵀ Ω v_j = σ_i δ_ij``. So with ``M = [m_1 m_2 …]``,

    ``q = Σ_j α_j m_j``, ``α = M⁺ q`` (which is ``u_jᵀ x̂``, times QK-norm's scalar),   ``qᵀ k = Σ_j α_j (m_jᵀ k)``:

queries of component j point along ``m_j``, keys of it along ``n_j = p_j / σ_j``, the columns of ``M⁺ᵀ``. The split
holds for any k, also one turned by RoPE into the query's frame, and needs no token but the two vectors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_class
from qkscope.maths.bases import Projector, heads_at_once, thin_svd
from qkscope.runs.folder import read_tensors, write_tensors

_NULL = 1e-7  # relative size under which a direction of W_Q is not there
_PROBES = 8


@dataclass(frozen=True)
class HeadBasis:
    """Singular vectors of one head: ``Ω = U diag(S) Vᵀ``, biases in the last row of U and V; ``read = W_Q U``."""

    U: Float[Tensor, "d m"]
    S: Float[Tensor, " m"]
    V: Float[Tensor, "d m"]
    read: Float[Tensor, "d_head m"]
    rotary: bool

    @property
    def write(self) -> Float[Tensor, "d_head m"]:
        """``n_j``: the directions of keys, dual to ``read`` (``W_K v_j / σ_j`` where σ_j is not 0)."""
        return dual(self.read)


@checked_class
@dataclass(frozen=True)
class SingularBasis:
    """Singular vectors of some heads, of weights with this hash.

    Parameters
    ----------
    heads : whose vectors they are, in this order.
    U, S, V : the thin SVD of each head's Ω, in float32, a constant 1 appended to the residual stream (biases).
    read : ``W_Q U``, float64: queries of each component, in head space before the rotation.
    scale : what the attention call multiplies ``q·k`` by.
    c_Q : QK-norm's own bias, a part of q that no token decides; zero in nearly every family.
    error : relative error of each head's reconstruction on random probes.
    rotary : whether RoPE turns queries and keys in each head.
    about : the model, and the hash of its weights.

    Examples
    --------
    >>> import qkscope as qk
    >>> basis = qk.singular_basis(qk.Scope.load("nano:mixed"), "L1H3", cache=False)
    >>> basis
    SingularBasis(L1H3: 24 vectors each)
    >>> basis["L1H3"].read.shape
    torch.Size([24, 24])
    """

    heads: tuple[Head, ...]
    U: Float[Tensor, "h d m"]
    S: Float[Tensor, "h m"]
    V: Float[Tensor, "h d m"]
    read: Float[Tensor, "h d_head m"]
    scale: Float[Tensor, " h"]
    c_Q: Float[Tensor, "h d_head"]
    error: Float[Tensor, " h"]
    rotary: tuple[bool, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        named = ", ".join(map(str, self.heads[:4])) + (f", … {len(self.heads)} heads" if len(self.heads) > 4 else "")
        return f"SingularBasis({named}: {self.S.shape[-1]} vectors each)"

    def index(self, heads: Sequence[Head]) -> list[int]:
        """Where some heads stand in this basis.

        Parameters
        ----------
        heads : some of its heads.
        """
        for head in heads:
            if head not in self.heads:
                raise BadInput(f"{head} is not in this singular basis: make it with singular_basis(scope, ['{head}']).")
        return [self.heads.index(head) for head in heads]

    def __getitem__(self, head: str | Head) -> HeadBasis:
        (i,) = self.index([Head.parse(head)])
        return HeadBasis(self.U[i], self.S[i], self.V[i], self.read[i], self.rotary[i])

    def table(self) -> list[dict[str, Any]]:
        """One row per head: its spectrum in four numbers, and how well the factors multiply out."""
        energy = self.S.double().square() / self.S.double().square().sum(-1, keepdim=True)
        effective = torch.exp(-(energy * energy.clamp_min(1e-300).log()).sum(-1))
        return [
            {
                "head": str(head), "top": float(self.S[i, 0]), "median": float(self.S[i].median()),
                "last": float(self.S[i, -1]), "effective_rank": float(effective[i]), "rotary": self.rotary[i],
                "error": float(self.error[i]),
            }
            for i, head in enumerate(self.heads)
        ]  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file.

        Parameters
        ----------
        path : the file; one that is there is replaced, whole.
        """
        names = ("U", "S", "V", "read", "scale", "c_Q", "error")
        manifest = {"heads": [str(head) for head in self.heads], "rotary": list(self.rotary), "about": dict(self.about)}
        write_tensors(path, "singular_basis", {name: getattr(self, name) for name in names}, manifest)

    @classmethod
    def load(cls, path: str | Path, *, expect: Mapping[str, Any] | None = None) -> SingularBasis:
        """Read a file that `save` wrote.

        Parameters
        ----------
        path : the file.
        expect : the parts of ``about`` that must agree, as ``{"weights": scope.weights_hash}``.
        """
        tensors, manifest = read_tensors(path, "singular_basis", expect)
        heads = tuple(Head.parse(head) for head in manifest["heads"])
        return cls(heads, rotary=tuple(manifest["rotary"]), about=manifest["about"], **tensors)


def basis_of_weights(
    heads: Sequence[Head],
    w_q: Float[Tensor, "h d_head d"],
    w_k: Float[Tensor, "g d_head d"],
    scale: Float[Tensor, " h"],
    c_q: Float[Tensor, "h d_head"],
    rotary: Sequence[bool],
    kv_of_head: Int[Tensor, " h"] | None = None,
    about: Mapping[str, Any] | None = None,
) -> SingularBasis:
    """Thin SVD of each head, multiplied out on random probes before it is believed; as many at once as fit."""
    kv = torch.arange(len(heads), device=w_q.device) if kv_of_head is None else kv_of_head
    draw = torch.randn(w_k.shape[-1], _PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = []
    for some in torch.arange(len(heads), device=w_q.device).split(heads_at_once(w_q)):
        used, own = kv[some].unique(return_inverse=True)
        u, s, v = thin_svd(w_q[some], w_k[used], own)
        q, probes = w_q[some].to(u), draw.to(u)
        true = q.mT @ (w_k[used].to(u) @ probes)[own]
        error = (u @ (s[..., None] * (v.mT @ probes)) - true).flatten(1).norm(dim=-1)
        error = error / true.flatten(1).norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        parts.append([x.cpu() for x in (u.float(), s, v.float(), q @ u, error)])
    U, S, V, read, error = (torch.cat(part) for part in zip(*parts, strict=True))
    if bool((error > 1e-6).any()):
        raise BadInput(
            f"the singular vectors of {heads[int(error.argmax())]} do not multiply out to its weights (error "
            f"{float(error.max()):.1e}): look for numbers that are not finite among them."
        )
    return SingularBasis(tuple(heads), U, S, V, read, scale.cpu(), c_q.cpu(), error, tuple(rotary), about or {})


def dual(read: Float[Tensor, "*h d m"]) -> Float[Tensor, "*h d m"]:
    """``M⁺ᵀ``: its columns give the coordinates, ``α_j = n_jᵀ q``."""
    return torch.linalg.pinv(read.to(torch.float64), rtol=_NULL).mT


def singular_coordinates(
    read: Float[Tensor, "*h d m"], q: Float[Tensor, "*b d"], difference: Float[Tensor, "*b d"]
) -> tuple[Float[Tensor, "*b m"], Float[Tensor, "*b m"]]:
    """``α = M⁺ q`` and ``γ = Mᵀ Δk``, whose products are the terms; q without QK-norm's own bias."""
    alpha = (q.double()[..., None, :] @ dual(read)).squeeze(-2)
    gamma = (difference.double()[..., None, :] @ read.double()).squeeze(-2)
    return alpha, gamma


def components(read: Float[Tensor, "d m"], chosen: Sequence[int] | Tensor) -> Projector:
    """The oblique projector on keys that keeps some components of every logit: ``P = Σ_{j chosen} n_j m_jᵀ``."""
    index = torch.as_tensor(chosen)
    return Projector(dual(read)[:, index], read.double()[:, index])
