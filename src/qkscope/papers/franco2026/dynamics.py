"""Figures 3 and 13: how alignment comes about over training, and how its speed depends on p.

Figure 3 compares vectors across training: ``|cos(u_k(s), u_k(s'))|``, the same for features, and one with the other.
As numbers: the step at which the head has learned half of a pair's target logit, ``f_qᵀ Ω f_k ≥ M/2``, and the one from
which the pair stays aligned (both |cos| ≥ 0.95 to the end), each against the order of the target logits. An untrained
head gives the value at step 0, a random direction the best that chance finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.papers.fleet import one_thread
from qkscope.papers.franco2026.cells import PRESETS, toys_of
from qkscope.papers.franco2026.toy.alignment import cosines
from qkscope.papers.franco2026.toy.measure import alignment_rows
from qkscope.papers.franco2026.toy.superposition import Pair, by_logit
from qkscope.papers.franco2026.toy.trained import TrainedToy
from qkscope.papers.registry import Settings
from qkscope.papers.rows import Row, mean, pick
from qkscope.result import Claim, Result, provenance

STAYS = 0.95
_SHOWN = 60  # checkpoints of figure 3


@one_thread()
def run(settings: Settings) -> Result:
    """Alignment along training, per configuration and seed."""
    work, toys = PRESETS[settings.preset], toys_of(settings)
    rows: list[Row] = []
    onsets: list[Row] = []
    for config, found in toys.items():
        for trained in found:
            for check in checkpoints(len(trained.steps), _SHOWN if settings.figure == "fig3" else work.points):
                rows += alignment_rows(config, trained.cell.seed, trained.steps[check], trained.at(check),
                                       control=check == 0)  # fmt: skip
            onsets += onset_rows(config, trained)
    first = next(iter(toys.values()))[0]
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=_answer(settings.figure, onsets),
        tables={"alignment": rows, "onsets": onsets},
        claims=_order_claims(onsets) if settings.figure == "fig3" else _speed_claims(rows, onsets),
        arrays=across_training(first) if settings.figure == "fig3" else {},
        preset=settings.preset,
        seed=settings.seed,
        provenance=provenance(figure=settings.figure, preset=settings.preset, work=vars(work), stays=STAYS),
    )


def checkpoints(count: int, points: int) -> list[int]:
    """Some of the checkpoints, closer together early on; the first and the last among them."""
    if count <= points:
        return list(range(count))
    spread = torch.linspace(0, 1, points) ** 2 * (count - 1)
    return sorted({round(x) for x in spread.tolist()})


def onset_rows(config: str, trained: TrainedToy) -> list[Row]:
    """For every pair the step from which it stays aligned (NaN if never)."""
    pairs = by_logit(trained.cell.task.pairs)
    table = []
    both = torch.stack([_matched(trained, check) for check in range(len(trained.steps))])  # checks pairs
    for i, pair in enumerate(pairs):
        below = (both[:, i] < STAYS).nonzero()
        after = int(below[-1]) + 1 if len(below) else 0
        step = float(trained.steps[after]) if after < len(trained.steps) else math.nan
        table.append({"config": config, "seed": trained.cell.seed, "pair": f"{pair[0]}-{pair[1]}",
                      "target_logit": pair[2], "learned": _learned(trained, pair), "onset": step,
                      "final": float(both[-1, i])})  # fmt: skip
    return table


def _learned(trained: TrainedToy, pair: Pair) -> float:
    """The first step at which the pair adds half of its target to a logit."""
    W, scale = trained.weights["W"].double(), trained.cell.task.scale
    query, key = (trained.weights[name].double() @ W[:, :, feature, None] for name, feature in
                  (("W_Q", pair[0]), ("W_K", pair[1])))  # fmt: skip
    reached = (scale * (query * key).sum((1, 2)) >= pair[2] / 2).nonzero()
    return float(trained.steps[int(reached[0])]) if len(reached) else math.nan


def _matched(trained: TrainedToy, check: int) -> Float[Tensor, " pairs"]:
    """The lower matched cosine of both sides."""
    toy = trained.at(check)
    basis, pairs = toy.basis(), by_logit(toy.task.pairs)
    sides = [cosines(toy.W.double()[:, [pair[side] for pair in pairs]], vectors).diagonal()
             for side, vectors in ((0, basis.u), (1, basis.v))]  # fmt: skip
    return torch.minimum(*sides)


def across_training(trained: TrainedToy) -> dict[str, Tensor]:
    """The three comparisons of figure 3 for the query side of every pair: steps by steps."""
    picked = checkpoints(len(trained.steps), _SHOWN)
    toys = [trained.at(check) for check in picked]
    vectors = [toy.basis().u for toy in toys]
    arrays: dict[str, Tensor] = {"steps": torch.tensor([trained.steps[check] for check in picked])}
    for k, pair in enumerate(by_logit(trained.cell.task.pairs)):
        u = torch.stack([basis[:, k] for basis in vectors], dim=1)
        f = torch.stack([toy.W.double()[:, pair[0]] for toy in toys], dim=1)
        arrays[f"vector/{k}"] = cosines(u, u).float()
        arrays[f"feature/{k}"] = cosines(f, f).float()
        arrays[f"both/{k}"] = cosines(f, u).float()
    return arrays


def order_agreement(onsets: Sequence[Row], name: str) -> float:
    """Share of pairs of pairs in which the one with the larger logit comes first, of those that checkpoints tell apart.

    Two that come between the same checkpoints are no evidence either way. 0.5 by chance; NaN where all are ties.
    """
    agreed = []
    for row in onsets:
        for other in onsets:
            if (other["config"], other["seed"]) == (row["config"], row["seed"]) and (
                row["target_logit"] > other["target_logit"]
            ):
                first, second = (r[name] if math.isfinite(r[name]) else math.inf for r in (row, other))
                agreed += [] if first == second else [float(first < second)]
    return mean(agreed) if agreed else math.nan


def _order_claims(onsets: list[Row]) -> list[Claim]:
    return [
        Claim("pairs are learned in the order of their target logits (half of the target reached; share of "
              "comparisons that checkpoints tell apart; control: chance)", "in order",
              order_agreement(onsets, "learned"), 0.5, "ours >= 0.75"),
        Claim("... and settle on their singular vectors in that order (share of comparisons; control: chance)",
              "in order", order_agreement(onsets, "onset"), 0.5, "ours >= 0.75"),
        Claim(f"all pairs align by the end (share with both |cos| ≥ {STAYS}; control: at the start)", "yes",
              mean(float(r["final"] >= STAYS) for r in onsets), 0.0, "ours >= 1"),
    ]  # fmt: skip


def _speed_claims(rows: list[Row], onsets: list[Row]) -> list[Claim]:
    configs = list(dict.fromkeys(row["config"] for row in onsets))
    speed = [mean(_late(r) for r in pick(onsets, config=config)) for config in configs]
    ordered = [float(a < b) for i, a in enumerate(speed) for b in speed[i + 1 :]]
    last = max(row["step"] for row in rows)
    early = min(row["step"] for row in rows if row["step"] >= last / 5)
    ends = [mean(r["matched"] for r in pick(rows, config=config, step=early)) for config in (configs[0], configs[-1])]
    return [
        Claim("alignment comes earlier the more often features are present (share of pairs of p in that order; "
              "control: "
              "chance)", "more readily", mean(ordered), 0.5, "ours > 0.75"),
        Claim(f"... after a fifth of the training: mean matched |cos| at p = 1 (control: at p = {configs[-1][2:]})",
              "more readily", ends[0], ends[1], "ours > control"),
    ]  # fmt: skip


def _late(row: Row) -> float:
    """The onset; one that never came counts as later than any."""
    return row["onset"] if math.isfinite(row["onset"]) else 1e9


def _answer(figure: str, onsets: list[Row]) -> str:
    if figure == "fig3":
        said = {}
        for name in ("learned", "onset"):
            steps = {r["pair"]: mean(x[name] for x in pick(onsets, pair=r["pair"])) for r in onsets}
            said[name] = ", ".join(f"{pair} at {step:,.0f}" if math.isfinite(step) else f"{pair} never"
                                   for pair, step in steps.items())  # fmt: skip
        return f"Half of the target is learned: {said['learned']}. Both |cos| stay ≥ {STAYS} from: {said['onset']}."
    reached = {config: mean(float(math.isfinite(r["onset"])) for r in pick(onsets, config=config))
               for config in dict.fromkeys(r["config"] for r in onsets)}  # fmt: skip
    return "Share of pairs that align: " + ", ".join(f"{config} {share:.2f}" for config, share in reached.items()) + "."
