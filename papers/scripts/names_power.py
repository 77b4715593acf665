"""How strong a match has to be, and on how much text, to be named: planted heads, named right, named otherwise, or not.

``python papers/scripts/names_power.py`` prints the table of docs/names.md. The heads are those of tests/named_heads.py:
the query carries three directions of its token, which meet those of the key's token (half of the heads) or of the token
before it. Queries and keys have noise of variance 1 in each of 16 dimensions, so that logits of noise alone have a
standard deviation of 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from named_heads import Planted, looked_at, made_heads, passages
from qkscope.analyses.names.sentence import UNNAMED, HeadShares, name_row

LOGITS = (0.0, 1.0, 1.25, 1.5, 2.0, 4.0)  # of a pair that matches, where the directions are strongest
TEXTS = (24, 48, 96, 192)  # passages to fit on; a third as many to test on
LENGTH = 64


def judged(heads: list[Planted], fitted: int, seed: int) -> list[tuple[str, float]]:
    """Of each head: right, other or none, and the share of the planted block."""
    scope = made_heads(heads, 1, seed=seed)
    sides = passages(fitted, LENGTH, 2 * seed + 1), passages(fitted // 3, LENGTH, 2 * seed + 2, each=1)
    _, fit, looked = looked_at(scope, *sides)
    found = []
    for h, head in enumerate(heads):
        own = HeadShares.of(looked, fit.names, h)
        block = ("current", "previous" if head.back else "current")
        row = name_row(looked, own, h)
        right = "none" if row["name"] == UNNAMED else "right" if row["block"] == " · ".join(block) else "other"
        found.append((right, own.block(*block)[0]))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=20, help="heads in each cell")
    count = parser.parse_args().heads
    torch.set_num_threads(1)
    cells = {}
    for seed, fitted in enumerate(TEXTS):
        heads = [
            Planted(3, i % 2, strength=2 * logit**0.5, noise=1.0, seed=1000 * seed + 100 * s + i)
            for s, logit in enumerate(LOGITS)
            for i in range(count)
        ]
        found = judged(heads, fitted, seed)
        for s, logit in enumerate(LOGITS):
            cells[logit, fitted] = found[s * count : (s + 1) * count]
    print("| logit of a match | " + " | ".join(f"{n * LENGTH:,} + {n // 3 * LENGTH:,} tokens" for n in TEXTS) + " |")
    print("| --- |" + " --- |" * len(TEXTS))
    for logit in LOGITS:
        said = []
        for fitted in TEXTS:
            cell = cells[logit, fitted]
            right, other = (sum(name == kind for name, _ in cell) for kind in ("right", "other"))
            share = round(sum(share for _, share in cell) / len(cell), 2) + 0.0  # no minus before nothing
            said.append(f"{right} of {count} ({share:.2f})" + (f", {other} otherwise" if other else ""))
        print(f"| {logit:g} | " + " | ".join(said) + " |")


if __name__ == "__main__":
    main()
