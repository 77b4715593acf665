"""How often noise is called a feature: false positives at the 5% level over 2,000 seeds of pure noise.

Run ``make calibrate``; it prints the table that docs/calibration.md quotes. Each seed is a head of its own, with its
own queries, keys and null draws, so that the 2,000 calls are independent.
"""

from __future__ import annotations

import argparse
import time

import torch

from qkscope.maths.controls import rank_above
from qkscope.maths.moments import Moments
from qkscope.maths.replicates import NullKind

CASES: dict[str, tuple[NullKind, list[int], int]] = {
    # name: the null, the labels of a prompt's keys, rows per prompt
    "sign flip, one + and one − key": ("sign_flip", [1, -1], 1),
    "sign flip, two rows a prompt": ("sign_flip", [1, -1], 2),
    "label permutation, one + and eight − keys": ("label_permutation", [1] + [-1] * 8, 1),
    "label permutation, five + and twenty − keys": ("label_permutation", [1] * 5 + [-1] * 20, 1),
    "query shuffle, query-centred": ("query_shuffle", [1, -1], 1),
    "query shuffle, a mean difference present": ("query_shuffle", [1, -1], 1),
}


def false_positive(case: str, seed: int, prompts: int, d_head: int, replicates: int) -> bool:
    """Whether noise drawn with this seed has a first component above the null at 5%."""
    null, labels, rows = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    # Rows of a prompt share part of their vectors, as prompts of a language model do; means are not zero.
    shared_q = torch.randn(prompts, 1, d_head, generator=generator, dtype=torch.float64)
    shared_k = torch.randn(prompts, 1, len(labels), d_head, generator=generator, dtype=torch.float64)
    q = 1 + (shared_q + torch.randn(prompts, rows, d_head, generator=generator, dtype=torch.float64)).flatten(0, 1)
    k = shared_k + torch.randn(prompts, rows, len(labels), d_head, generator=generator, dtype=torch.float64)
    k = k.flatten(0, 1)
    if case.endswith("present"):
        k[:, 0] += 1.0
    moments = Moments(["L0H0"], ["c"], d_head, nulls=[null], replicates=replicates, seed=seed)
    ids = torch.arange(prompts).repeat_interleave(rows)
    for chunk in torch.arange(len(q)).split(16 * rows):
        label = torch.tensor([labels]).expand(len(chunk), -1)
        moments.update(q[chunk, None], k[chunk, None], {"c": label}, prompts=ids[chunk])
    center = "query" if null == "query_shuffle" else "none"
    nulls = moments.null_deltas(null, "c", "L0H0", center)
    return rank_above(moments.delta("c", center)[0], nulls, alpha=0.05, max_rank=1).rank > 0


def main() -> None:
    """Print one row per null."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--d-head", type=int, default=8)
    parser.add_argument("--replicates", type=int, default=199)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{given.seeds} seeds, {given.prompts} prompts, d_head {given.d_head}, {given.replicates} replicates, level 5%"
    )
    for case in CASES:
        start = time.perf_counter()
        called = sum(
            false_positive(case, seed, given.prompts, given.d_head, given.replicates) for seed in range(given.seeds)
        )
        rate = called / given.seeds
        half = 1.96 * (rate * (1 - rate) / given.seeds) ** 0.5
        print(f"| {case} | {called} | {rate:.2%} ± {half:.2%} | {time.perf_counter() - start:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
