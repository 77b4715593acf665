"""A feature's low-rank subspaces in query and key space: ``ΔC = U diag(S) Vᵀ``, cut at a rank.

``U[:, :rank]`` is the feature's basis in query space, ``V[:, :rank]`` in key space. What a rank by
itself does not show is in `qkscope.sums.controls`; what sets of subspaces do together is in
`qkscope.sums.bases`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput
from qkscope.checking import Count, checked_class
from qkscope.heads import Head, Side
from qkscope.hooks import Does, Hook
from qkscope.sums.bases import checked_svd, energy_rank
from qkscope.sums.controls import Controls

Rank = int | Literal["energy", "null"]
_ORTHONORMAL = 1e-3  # rounding in single precision stays far below


@checked_class
@dataclass(frozen=True)
class Subspace:
    """One contrast's feature at one head.

    Parameters
    ----------
    U, V : all singular vectors, as columns; the feature's basis in query and in key space are the
        first ``rank``.
    S : all singular values.
    rank : how many directions are the feature.
    head, contrast : whose feature it is.
    controls : what the rank is worth.
    about : what it was made from (model, weights hash, space, …).
    cov_k : covariance of the keys it was fitted on, whose principal axes are a control that knows
        the prompts and no labels.

    Examples
    --------
    >>> import torch
    >>> delta = torch.diag(torch.tensor([3.0, 2.0, 0.0]))
    >>> feature = Subspace.from_delta(delta, head="L3H1", contrast="order")
    >>> feature
    Subspace(order at L3H1, rank 2 of 3)
    >>> feature.project(torch.ones(3))
    tensor([1., 1., 0.])
    """

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
        self._check_orthonormal("U", self.U, where)
        self._check_orthonormal("V", self.V, where)
        s = self.S
        is_finite = bool(((s >= 0) & s.isfinite()).all())
        tolerance = _ORTHONORMAL * s[:1]
        is_rising = bool((s.diff() > tolerance).any())
        if not is_finite or is_rising:
            raise BadInput(
                f"singular values{where} are finite, at least 0 and in falling order: give S so."
            )
        if not 1 <= self.rank <= len(s):
            raise BadInput(
                f"rank {self.rank} is not between 1 and the {len(s)} dimensions of the head{where}."
            )

    @staticmethod
    def _check_orthonormal(name: str, columns: Float[Tensor, "d m"], where: str) -> None:
        """Refuse columns that are not orthonormal."""
        eye = torch.eye(columns.shape[1]).to(columns)
        off = float((columns.mT @ columns - eye).abs().max())
        if not off <= _ORTHONORMAL:
            problem = f"the columns of {name} are not orthonormal{where} (off by {off:.2g})"
            raise BadInput(
                f"{problem}: make them so with torch.linalg.qr, or fit with Subspace.from_delta."
            )

    def __repr__(self) -> str:
        rank = f"rank {self.rank} of {self.d_head}"
        if self.controls is not None:
            rank += f", {self.controls.verdict}"
        return f"Subspace({self._title}, {rank})"

    @property
    def _title(self) -> str:
        """Contrast and head, as far as they are known."""
        head = str(self.head or "")
        known = [name for name in (self.contrast, head) if name]
        return " at ".join(known) or "a feature"

    @classmethod
    def from_delta(
        cls,
        delta: Float[Tensor, "d d"],
        rank: Rank = "energy",
        *,
        head: Head | str | None = None,
        **kept: Any,
    ) -> Subspace:
        """The SVD of one ΔC, cut at a rank.

        Parameters
        ----------
        delta : rows in query space, columns in key space.
        rank : ``"energy"`` (the paper's rule), what is detected (``"null"``), or a number.
        head : whose it is.
        kept : ``contrast``, ``controls``, ``about`` and ``cov_k``, as of a `Subspace`.
        """
        u, s, v = checked_svd(delta)
        number = rank_of(s, rank, kept.get("controls"))
        if head is not None:
            head = Head.parse(head)
        return cls(u, s, v, number, head, **kept)

    @property
    def d_head(self) -> int:
        """Width of the head."""
        return self.U.shape[0]

    def basis(self, side: Side = "key") -> Float[Tensor, "d r"]:
        """Orthonormal basis of the feature.

        Parameters
        ----------
        side : in ``"query"`` or in ``"key"`` space.
        """
        vectors = self.U if side == "query" else self.V
        return vectors[:, : self.rank]

    def coordinates(self, x: Float[Tensor, "*n d"], side: Side = "key") -> Float[Tensor, "*n r"]:
        """Coordinates of vectors in the feature's basis.

        Parameters
        ----------
        x : queries or keys of the head.
        side : which of the two they are.
        """
        return x @ self.basis(side).to(x)

    def project(self, x: Float[Tensor, "*n d"], side: Side = "key") -> Float[Tensor, "*n d"]:
        """The part of vectors that lies in the feature.

        Parameters
        ----------
        x : queries or keys of the head.
        side : which of the two they are.
        """
        basis = self.basis(side).to(x)
        return self.coordinates(x, side) @ basis.mT

    def cut(self, rank: int) -> Subspace:
        """Cut the same singular vectors at another rank.

        Parameters
        ----------
        rank : how many directions are the feature.
        """
        return replace(self, rank=rank)

    def as_hook(
        self,
        does: Does,
        *tokens: int | Int[Tensor, " b"],
        side: Side = "key",
        group_size: Count | None = None,
    ) -> Hook:
        """The subspace as an edit of the running model.

        It serves TransformerLens, nnsight, `Scope.patched`, and plain torch.

        Parameters
        ----------
        does : ``"swap"`` exchanges the part in the subspace between two tokens, ``"remove"`` takes
            it away.
        tokens : columns of the batch that runs, from 0 on: one number for all sequences, or one for
            each. A swap needs two; where none is given, the part is removed at all tokens.
        side : whether keys or queries are edited.
        group_size : query heads that share a key head (``scope.group_size``); known where a fit
            gave the subspace.

        Examples
        --------
        >>> import torch
        >>> delta = torch.diag(torch.tensor([3.0, 2.0, 0.0]))
        >>> feature = Subspace.from_delta(delta, head="L3H1", contrast="order")
        >>> hook = feature.as_hook("swap", 0, 1, group_size=1)
        >>> hook.name
        'blocks.3.attn.hook_rot_k'
        >>> hook(torch.arange(12.0).view(1, 2, 2, 3))[0, 1]
        tensor([[ 9., 10.,  8.],
                [ 6.,  7., 11.]])
        """
        assert self.head is not None, (
            "this subspace does not say whose it is: make it with head='L18H6'"
        )
        space = str(self.about.get("space", "post_rope"))
        known = self.about.get("group_size")
        kind: Literal["keys", "queries"] = "keys" if side == "key" else "queries"
        return Hook(does, self.head, kind, space, self.basis(side), tokens, group_size or known)

    def summary(self) -> str:
        """A table a person can read: the rank, the spectrum, and what the controls say of it."""
        lines = self._summary_head()
        energy = self.S.square()
        share = energy / energy.sum()
        wanted = max(self.rank + 2, 5)
        shown = min(wanted, len(self.S))
        for i in range(shown):
            cumulative = share[: i + 1].sum()
            line = f"  {i + 1:2d}  {self.S[i]:14.5g}"
            line += f"  {share[i]:12.4f}  {cumulative:10.4f}"
            line += self._null_cell(i)
            if i < self.rank:
                line += "  |"
            lines.append(line)
        return "\n".join(lines)

    def _null_cell(self, component: int) -> str:
        """Cell of the summary's last column: 95% of the null's components are smaller."""
        if self.controls is None:
            return ""
        null = self.controls.null_high
        if component < len(null):
            return f"  {null[component]:9.5g}"
        return "          -"

    def _summary_head(self) -> list[str]:
        """Lines above the spectrum: the rank, the controls, and the columns' names."""
        title = f"{self._title}: rank {self.rank} of {self.d_head}"
        columns = "   #  singular value  energy share  cumulative"
        if self.controls is None:
            return [title, columns]
        lines = [f"{title} - {self.controls.verdict}"]
        for line in self.controls.lines():
            lines.append(f"  {line}")
        return [*lines, f"{columns}  null, 95%"]


def rank_of(
    s: Float[Tensor, " m"], rule: Rank, controls: Controls | None = None, size: float = 0.0
) -> int:
    """Rank of singular values: by a share of their energy, what the controls detected, or a number.

    ``size`` is that of the numbers that ΔC is a difference of: what is below their rounding is no
    direction.
    """
    if rule == "energy":
        return int(energy_rank(s, size=size))
    if rule == "null":
        assert controls is not None, "a rank above the null needs controls"
        return controls.detected
    return rule
