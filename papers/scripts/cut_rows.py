"""Which rows of figures 9 and 18 move when subspaces are cut by what predicts prompts left out.

``python papers/scripts/cut_rows.py --model smollm2-135m -n 128`` fits once and swaps twice: cut by
99% of the energy, as the papers do, and at each subspace's rank by cross-validation (its 99% rank
where that is untested, one direction where none predicts). It prints the ranks of both cuts at
every head, and every claim whose verdict or number moves.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from qkscope.findings.fit import Fit
from qkscope.results.claims import Claim
from qkscope.sums.subspace import Subspace
from qkscope_papers.lee2026 import binding_swaps
from qkscope_papers.lee2026.language import ESTIMATORS, Estimator, FigureSession
from qkscope_papers.reports import number_cell

_SHARED = ("found", "fit", "paper's fit")


class LeftOutSession(FigureSession):
    """The same session with subspaces cut by what predicts prompts left out."""

    def __init__(self, other: FigureSession) -> None:
        super().__init__(other.model, other.preset, other.seed, other.device)
        self.work = other.work
        self.scope = other.scope
        self._made = {key: made for key, made in other._made.items() if key[0] in _SHARED}

    def binding_fit(self, estimator: Estimator, second: bool = False) -> Fit:
        """The fit as the figures have it, cut again."""
        fit = super().binding_fit(estimator, second)
        cut = {key: each.cut(left_out_rank(each)) for key, each in fit.subspaces.items()}
        return replace(fit, subspaces=cut)


def left_out_rank(subspace: Subspace) -> int:
    """The rank that predicts prompts left out."""
    assert subspace.controls is not None
    found = subspace.controls.rank_cv
    return subspace.rank if isinstance(found, str) else max(found, 1)


def claims_of(session: FigureSession) -> list[Claim]:
    """The claims of figures 9 and 18."""
    found = session.found("binding")
    tables: dict[str, Any] = binding_swaps._swapped(session, False)
    others = [str(head) for head in found.heads[1:] or found.heads]
    return [
        *binding_swaps._claims(session, found, tables, False),
        *binding_swaps._other_claims(session, tables, others),
    ]


def moved_rows(model: str, n: int) -> list[str]:
    """Ranks of both cuts, then the claims that move."""
    session = FigureSession(model, "default", 0, "cpu", n)
    before = claims_of(session)
    lines = ["| estimator, feature | rank by 99%, head by head | by prompts left out |",
             "| --- | --- | --- |"]  # fmt: skip
    for estimator in ESTIMATORS:
        fit = session.binding_fit(estimator)
        for feature in ("order", "lexical"):
            own = [fit[feature, head] for head in session.found("binding").heads]
            kept = ", ".join(str(each.rank) for each in own)
            cut = ", ".join(str(left_out_rank(each)) for each in own)
            lines.append(f"| {estimator}, {feature} | {kept} | {cut} |")
    lines += ["", "| claim | 99% | prompts left out |", "| --- | --- | --- |"]
    for old, new in zip(before, claims_of(LeftOutSession(session)), strict=True):
        if (old.ours, old.verdict) != (new.ours, new.verdict):
            lines.append(f"| {old.claim} | {_shown(old)} | {_shown(new)} |")
    return lines


def _shown(claim: Claim) -> str:
    return f"{number_cell(claim.ours)}, {claim.verdict}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("-n", type=int, default=128)
    given = parser.parse_args()
    print("\n".join(moved_rows(given.model, given.n)))
