"""A feature's low-rank subspaces in query and key space: ``ΔC = U diag(S) Vᵀ``, cut at a rank.

``U[:, :rank]`` is the feature's basis in query space, ``V[:, :rank]`` in key space. What a rank by itself does not show
is in `qkscope.maths.controls`; what sets of subspaces do together is in `qkscope.maths.bases`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_class
from qkscope.maths.bases import joint_basis, principal_angles
from qkscope.maths.controls import Controls
from qkscope.maths.svd import checked_svd, energy_rank
from qkscope.runs.store import read_tensors, write_tensors

Side = Literal["query", "key"]


@checked_class
@dataclass(frozen=True)
class Subspace:
    """One contrast's feature at one head.

    ``U`` and ``V`` hold all singular vectors as columns, ``S`` all singular values; ``rank`` says how many are the
    feature. ``controls`` says what the rank is worth; ``cov_k`` is the covariance of the keys it was fitted on, whose
    principal axes are a control that knows the prompts and no labels.

    Examples
    --------
    >>> import torch
    >>> feature = Subspace.from_delta(torch.diag(torch.tensor([3.0, 2.0, 0.0])))
    >>> feature.rank
    2
    """

    comes_from = "as fit['lexical', 'L18H6'] gives"
    U: Float[Tensor, "d m"]
    S: Float[Tensor, " m"]
    V: Float[Tensor, "d m"]
    rank: int
    head: Head | None = None
    contrast: str = ""
    controls: Controls | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    cov_k: Float[Tensor, "d d"] | None = None

    def __post_init__(self) -> None:
        where = f" for {self.head}" if self.head else ""
        if self.U.shape != self.V.shape or self.U.shape[1] != self.S.shape[0]:
            raise BadInput(f"U, S and V have shapes {tuple(self.U.shape)}, {tuple(self.S.shape)}, {tuple(self.V.shape)}"
                           f"{where}: U and V are (d, m), and S is (m).")  # fmt: skip
        if self.rank < 1:
            raise BadInput(f"rank must be at least 1, but is {self.rank}{where}: there is no subspace to speak of.")
        if self.rank > self.S.shape[0]:
            raise BadInput(f"rank {self.rank} is more than the {self.S.shape[0]} dimensions of the head{where}.")

    @classmethod
    def from_delta(
        cls,
        delta: Float[Tensor, "d d"],
        rank: int | Literal["energy", "null"] = "energy",
        *,
        energy: float = 0.99,
        head: Head | str | None = None,
        contrast: str = "",
        controls: Controls | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Subspace:
        """The SVD of one ΔC, cut by ``energy`` (the paper's rule), at what is detected (``null``), or where told."""
        u, s, v = checked_svd(delta)
        return cls._cut(u, s, v, rank, energy, head, contrast, controls, about)

    @classmethod
    def from_deltas(
        cls,
        deltas: Float[Tensor, "h d d"],
        heads: list[Head],
        rank: int | Literal["energy", "null"] = "energy",
        *,
        energy: float = 0.99,
        contrast: str = "",
        controls: Mapping[Head, Controls] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> dict[Head, Subspace]:
        """The same for many heads in one batched SVD."""
        if len(deltas) != len(heads):
            raise BadInput(f"{len(heads)} heads were named for {len(deltas)} matrices.")
        u, s, v = checked_svd(deltas)
        return {
            head: cls._cut(u[i], s[i], v[i], rank, energy, head, contrast, (controls or {}).get(head), about)
            for i, head in enumerate(heads)
        }

    @classmethod
    def _cut(
        cls, u: Tensor, s: Tensor, v: Tensor, rank: int | str, energy: float, head: Head | str | None,
        contrast: str, controls: Controls | None, about: Mapping[str, Any] | None,
    ) -> Subspace:  # fmt: skip
        if rank == "energy":
            cut = int(energy_rank(s, energy))
        elif rank == "null":
            if controls is None:
                raise BadInput("a rank above the null needs controls: run them first, or cut by energy.")
            cut = controls.detected
        elif isinstance(rank, int):
            cut = rank
        else:
            raise BadInput(f"rank is a number, 'energy' or 'null', but got {rank!r}.")
        parsed = None if head is None else Head.parse(head)
        return cls(u, s, v, cut, parsed, contrast, controls, dict(about or {}))

    # ------------------------------------------------------------------ geometry

    @property
    def d_head(self) -> int:
        """Width of the head."""
        return self.U.shape[0]

    def basis(self, side: Side = "key") -> Float[Tensor, "d r"]:
        """Orthonormal basis of the feature in query or key space."""
        if side not in ("query", "key"):
            raise BadInput(f"side is 'query' or 'key', but got {side!r}.")
        return (self.U if side == "query" else self.V)[:, : self.rank]

    def projector(self, side: Side = "key") -> Float[Tensor, "d d"]:
        """Orthogonal projector onto the feature."""
        basis = self.basis(side)
        return basis @ basis.mT

    def coordinates(self, x: Float[Tensor, "*n d"], side: Side = "key") -> Float[Tensor, "*n r"]:
        """Coordinates of vectors in the feature's basis."""
        return self._fitting(x) @ self.basis(side).to(x)

    def project(self, x: Float[Tensor, "*n d"], side: Side = "key") -> Float[Tensor, "*n d"]:
        """The part of vectors that lies in the feature."""
        basis = self.basis(side).to(x)
        return (self._fitting(x) @ basis) @ basis.mT

    def _fitting(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        if x.shape[-1:] != (self.d_head,):
            raise BadInput(
                f"vectors of this feature have {self.d_head} entries, but these have shape {tuple(x.shape)}."
            )
        return x

    def angles(self, other: Subspace, side: Side = "key") -> Float[Tensor, " m"]:
        """Principal angles to another subspace, in radians, smallest first."""
        return principal_angles(self.basis(side), other.basis(side))

    def join(self, *others: Subspace, side: Side = "key") -> Float[Tensor, "d r_joint"]:
        """Orthonormal basis of this subspace and others together; shared directions count once."""
        return joint_basis([self.basis(side), *(other.basis(side) for other in others)])

    def cut(self, rank: int) -> Subspace:
        """The same singular vectors, cut at another rank."""
        return replace(self, rank=rank)

    # ------------------------------------------------------------------ words and files

    def summary(self) -> str:
        """A table a person can read: the rank, the spectrum, and what the controls say of it."""
        title = " ".join(part for part in (self.contrast, "at", str(self.head)) if part) if self.head else self.contrast
        share = self.S.square() / self.S.square().sum()
        shown = min(max(self.rank + 2, 5), self.S.shape[0])
        null = None if self.controls is None else self.controls.null_high
        lines = [f"{title or 'subspace'}: rank {self.rank} of {self.d_head}"]
        if self.controls is not None:
            lines[0] += f" - {self.controls.verdict}"
            lines += ["  " + line for line in self.controls.lines()]
        lines.append("   #  singular value  energy share  cumulative" + ("  null, 95%" if null is not None else ""))
        for i in range(shown):
            row = f"  {i + 1:2d}  {self.S[i]:14.5g}  {share[i]:12.4f}  {share[: i + 1].sum():10.4f}"
            if null is not None:
                row += f"  {null[i]:9.5g}" if i < len(null) else "          -"
            lines.append(row + ("  |" if i < self.rank else ""))
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file."""
        manifest = {
            "rank": self.rank,
            "head": None if self.head is None else str(self.head),
            "contrast": self.contrast,
            "controls": None if self.controls is None else self.controls.to_json(),
            "about": dict(self.about),
        }
        tensors = {"U": self.U, "S": self.S, "V": self.V} | ({} if self.cov_k is None else {"cov_k": self.cov_k})
        write_tensors(path, "subspace", tensors, manifest)

    @classmethod
    def load(cls, path: str | Path, *, expect: Mapping[str, Any] | None = None) -> Subspace:
        """Read a file that `save` wrote; ``expect`` holds the parts of ``about`` that must agree."""
        tensors, manifest = read_tensors(path, "subspace", expect)
        controls = manifest["controls"]
        return cls(
            tensors["U"], tensors["S"], tensors["V"], manifest["rank"],
            None if manifest["head"] is None else Head.parse(manifest["head"]),
            manifest["contrast"], None if controls is None else Controls.from_json(controls), manifest["about"],
            tensors.get("cov_k"),
        )  # fmt: skip
