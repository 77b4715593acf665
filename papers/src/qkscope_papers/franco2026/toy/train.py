"""``qkscope toy superposition``: train toys and say how far their features align.

One for each p, λ and seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from qkscope.checking import Count, checked_call
from qkscope.errors import BadInput, check_device
from qkscope.results.folder import check_folder
from qkscope.results.result import Result, provenance
from qkscope_papers.fleet import check_trained
from qkscope_papers.franco2026.toy.measure import alignment_rows, divergence_and_error
from qkscope_papers.franco2026.toy.stack import ToyCell
from qkscope_papers.franco2026.toy.superposition import FOUR_PAIRS, Pair, Reading, Superposition
from qkscope_papers.franco2026.toy.trained import train_toys
from qkscope_papers.tables import column, pick


@checked_call
def train_superposition(
    out: str | Path,
    *,
    n: int = 20,
    d: int = 10,
    d_head: int = 10,
    context: int = 4,
    p: Sequence[float] = (0.52,),
    weight: Sequence[float] = (4.0,),
    pairs: Sequence[Pair] = FOUR_PAIRS,
    reading: Reading = "C",
    rope: bool = False,
    seeds: Count = 1,
    steps: Count = 20_000,
    lr: float = 1e-3,
    every: Count = 200,
    device: str = "cpu",
    workers: Count | None = None,
    show: Callable[[Result], object] = lambda result: None,
) -> Result:
    """Train toys into ``out/toys`` (resuming what was interrupted) and write ``out/superposition``.

    Parameters
    ----------
    p, weight : one toy for every combination, side by side.
    pairs : pairs of interest with their target logits.
    every : steps between the checkpoints that are kept with a toy.
    show : told the result before it is written.
    """
    check_device(device)
    shape: dict[str, Any] = {
        "n": n,
        "d": d,
        "d_head": d_head,
        "context": context,
        "reading": reading,
        "rope": rope,
    }
    tasks = {
        f"p={one_p:g} λ={one_weight:g}": Superposition(
            pairs=tuple(pairs), p=one_p, weight=one_weight, **shape
        )
        for one_p, one_weight in product(p, weight)
    }
    out = Path(out)
    folder = check_folder(out / "superposition", "toy/superposition")
    check_trained(out / "toys")
    start = time.perf_counter()
    named = [
        (config, ToyCell(task, seed, steps, lr, every=every))
        for config, task in tasks.items()
        for seed in range(seeds)
    ]
    trained = train_toys([cell for _, cell in named], out / "toys", device=device, workers=workers)
    seconds = time.perf_counter() - start
    rows: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    for (config, cell), found in zip(named, trained, strict=True):
        for check, control in ((-1, False), (0, True)):
            rows += alignment_rows(
                config, cell.seed, found.steps[check], found.at(check), control=control, joint=rope
            )
        kl, error = divergence_and_error(found.toy, 2048, cell.seed)
        losses.append(
            {
                "config": config,
                "seed": cell.seed,
                "steps": found.steps[-1],
                "stopped": found.reason,
                "kl": kl,
                "reconstruction": error,
            }
        )
    asked = {
        "p": list(p),
        "weight": list(weight),
        "pairs": [list(x) for x in pairs],
        "seeds": seeds,
        "steps": steps,
    }
    asked |= {"lr": lr, "device": device}
    after = column(pick(rows, control=False), "matched")
    before = column(pick(rows, control=True), "matched")
    result = Result(
        experiment="toy/superposition",
        answer=f"{len(trained)} toys, {sum(f.steps[-1] for f in trained):,} model-steps in "
        f"{seconds:.0f} s; matched |cos| {min(after, default=math.nan):.3f} or more "
        f"(untrained: {sum(before) / max(len(before), 1):.2f} on average).",
        tables={"toys": losses, "alignment": rows},
        seconds=seconds,
        provenance=provenance(**shape, **asked),
    )
    show(result)
    result.write(folder)
    return result


def parse_pairs(text: str) -> list[Pair]:
    """``0-4:24,1-5:21`` as pairs.

    >>> parse_pairs("0-4:24,1-5:21")
    [(0, 4, 24.0), (1, 5, 21.0)]
    """
    pairs: list[Pair] = []
    for part in text.split(","):
        try:
            features, logit = part.split(":")
            query, key = features.split("-")
            pairs.append((int(query), int(key), float(logit)))
        except ValueError:
            raise BadInput(
                f"pairs are query-key:logit with commas between, as 0-4:24,1-5:21, not {part!r}."
            ) from None
    return pairs
