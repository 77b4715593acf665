"""Where a subspace is cut: 99% of the energy, or what predicts prompts left out.

Two features of rank 3 are planted at one head, with noise on queries and keys, and one of them is
contrasted. The 99% rule keeps every direction that noise adds to ΔC; the other rule keeps as many
as predict the prompts that a fit has not seen. Of each cut: its rank, the largest angle between
what was planted and what was kept, how much of the planted logit a swap of it carries on other prompts, and
how much of a random change of a key, which it should leave alone. Noise 1 is as long as what is
planted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.heads import Head
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.sums.controls import run_controls
from qkscope.sums.moments import Moments
from qkscope.sums.subspace import Subspace
from qkscope_papers.figures import INK, colours_of, new_figure
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import Files, Row, column, files_of, mean, over_runs, pick

RANK = 3
NOISES = (0.0, 0.5, 1.0, 2.0)
_WIDTH = 64
_PAIRS = 256
_GAIN = 3.0
_SEEDS = {"smoke": 2, "default": 10, "paper": 20}
_RULES = {"energy": "99% of the energy", "left out": "predicts prompts left out"}


class Pairs(NamedTuple):
    """Queries, keys that agree with them in the feature, and keys that do not."""

    q: Float[Tensor, "n d"]
    plus: Float[Tensor, "n d"]
    minus: Float[Tensor, "n d"]


class PlantedFeatures:
    """Key directions of two features, and the query directions that read them."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        drawn = self._normal(_WIDTH, 2 * RANK)
        self.keys = drawn / drawn.norm(dim=0)
        self.queries = _GAIN * torch.linalg.pinv(self.keys).mT

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def _signs(self, n: int) -> Tensor:
        return 2.0 * torch.randint(2, (n, 2 * RANK), generator=self.generator).double() - 1

    def pairs(self, n: int, noise: float) -> Pairs:
        """The first feature of a query is that of its plus key; the second is anything."""
        asked = self._signs(n)
        plus = self._signs(n)
        plus[:, :RANK] = asked[:, :RANK]
        minus = plus.clone()
        minus[:, :RANK] = self._signs(n)[:, :RANK]
        made = [asked @ self.queries.mT, plus @ self.keys.mT, minus @ self.keys.mT]
        return Pairs(*[clean + noise * self._as_long_as(clean) for clean in made])

    def _as_long_as(self, clean: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Random vectors whose mean square is that of these: noise 1 is as long as what is planted."""
        return clean.square().mean().sqrt() * self._normal(*clean.shape)


@figure("lee2026", "cut", "Where a subspace is cut, on planted features")
def run(settings: Settings) -> Result:
    """Every noise and seed, by both rules."""
    seeds = range(settings.seed, settings.seed + _SEEDS[settings.preset])
    rows = [row for noise in NOISES for seed in seeds for row in cut_rows(noise, seed)]
    about = {"width": _WIDTH, "pairs": _PAIRS, "rank": RANK, "seeds": len(seeds)}
    return settings.result(_answer(rows), {"cuts": rows}, _claims(rows), about=about)


def cut_rows(noise: float, seed: int) -> list[Row]:
    """One planted head by both rules."""
    planted = PlantedFeatures(seed)
    fitted = planted.pairs(_PAIRS, noise)
    head = Head(0, 0)
    moments = Moments([head], ["feature"], _WIDTH, replicates=99, seed=seed)
    keys = torch.stack([fitted.plus, fitted.minus], dim=1)[:, None]
    labels = torch.tensor([[1, -1]]).expand(_PAIRS, -1)
    moments.update(fitted.q[:, None], keys, {"feature": labels}, prompts=torch.arange(_PAIRS))
    controls = run_controls(moments, "feature")[head]
    found = Subspace.from_delta(moments.delta("feature")[0])
    ranks = {"energy": found.rank, "left out": int(controls.rank_cv)}
    return [
        {"noise": noise, "seed": seed, "rule": rule, "rank": rank}
        | _worth(found.cut(max(rank, 1)).basis("key"), planted)
        for rule, rank in ranks.items()
    ]


def _worth(basis: Float[Tensor, "d r"], planted: PlantedFeatures) -> Row:
    """Angle to what was planted; shares of the planted logit and of a random change that it takes."""
    truth = torch.linalg.qr(planted.keys[:, :RANK])[0]
    cosines = torch.linalg.svdvals(truth.mT @ basis)
    least = float(cosines[-1]) if basis.shape[1] >= RANK else 0.0
    unseen = planted.pairs(4 * _PAIRS, 0.0)
    change = unseen.plus - unseen.minus
    carried = (unseen.q * (change @ basis @ basis.mT)).sum() / (unseen.q * change).sum()
    return {
        "angle": math.degrees(math.acos(min(least, 1.0))),
        "carried": float(carried),
        "taken_along": basis.shape[1] / basis.shape[0],
    }


def _of(rows: list[Row], rule: str, noise: float, name: str) -> list[float]:
    return column(pick(rows, rule=rule, noise=noise), name)


def _answer(rows: list[Row]) -> str:
    parts = []
    for rule, words in _RULES.items():
        ranks = ", ".join(f"{mean(_of(rows, rule, noise, 'rank')):.1f}" for noise in NOISES)
        carried = ", ".join(f"{mean(_of(rows, rule, noise, 'carried')):.2f}" for noise in NOISES)
        parts.append(f"{words}: rank {ranks}, share of the planted logit {carried}")
    noises = ", ".join(f"{noise:g}" for noise in NOISES)
    return f"Planted rank {RANK}, noise {noises}; {'; '.join(parts)}."


def _claims(rows: list[Row]) -> list[Claim]:
    claims = []
    for rule, words in _RULES.items():
        ranks = _of(rows, rule, 1.0, "rank")
        off = over_runs(abs(rank - RANK) for rank in ranks)
        claims.append(Claim(f"cut by {words}, the planted rank is kept at noise 1 (distance from {RANK}, mean over "
                            "seeds)", "", off.mean, None, "ours <= 1", **off.ends))  # fmt: skip
    pairs = zip(*(_of(rows, rule, 1.0, "carried") for rule in _RULES), strict=True)
    more = over_runs(energy - left_out for energy, left_out in pairs)
    claims.append(Claim("what the 99% rule adds carries little of the planted logit at noise 1 (difference of shares, "
                        "mean over seeds)", "", more.mean, None, "ours <= 0.05", **more.ends))  # fmt: skip
    return claims


@run.drawing
def draw(result: Result) -> Files:
    """Rank and share carried by noise, a line for each rule."""
    rows = [dict(row) for row in result.tables["cuts"]]
    drawing = new_figure(7.6, 3.2)
    axes = drawing.subplots(1, 2)
    for rule, colour in zip(_RULES, colours_of(list(_RULES)).values(), strict=True):
        for axis, name in zip(axes, ("rank", "carried"), strict=True):
            found = [over_runs(_of(rows, rule, noise, name)) for noise in NOISES]
            errors = [x.high - x.mean for x in found]
            axis.errorbar(NOISES, [x.mean for x in found], errors, fmt="o-", ms=4, capsize=2,
                          color=colour, label=_RULES[rule])  # fmt: skip
    axes[0].axhline(RANK, color=INK, lw=0.8, ls="--")
    axes[0].set(xlabel="noise", ylabel="rank", title=f"kept; broken: the planted {RANK}")
    axes[1].set(
        xlabel="noise",
        ylabel="share",
        ylim=(-0.03, 1.05),
        title="planted logit that a swap carries",
    )
    axes[1].legend(frameon=False, fontsize=8)
    return files_of(result, drawing)
