"""How often noise is called a feature: false positives at the 5% level.

Over heads that are pure noise. Run ``make calibrate``; it prints the table that
bench/docs/calibration.md quotes. Heads come in batches of fifty, each head with queries and keys of
its own, each batch with null draws of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from qkscope.sums.controls import rank_above
from qkscope.sums.intervals import lag_one
from qkscope.sums.moments import Moments
from qkscope.sums.nulls import head_p_values
from qkscope.verbs.decompose import ALIKE

AT_ONCE = 50
BOTH = ("sign flip", "interaction")
D_HEAD = 8
Data = tuple[
    Tensor, Tensor, Tensor, list[int]
]  # queries (n, heads, d), keys (n, heads, k, d), units (n), labels (k)


class Noise:
    """A source of normal numbers."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def pick(self, high: int, n: int) -> Tensor:
        """Numbers below ``high``, all equally likely."""
        return torch.randint(high, (n,), generator=self.generator)


def plain(
    noise: Noise, n: int, labels: tuple[int, ...] = (1, -1), rows: int = 1, difference: float = 0.0
) -> Data:
    """Rows of a prompt share part of their vectors, as prompts of a language model do; means are
    not zero.
    """
    keys = len(labels)
    q = 1 + noise(n, 1, AT_ONCE, D_HEAD) + noise(n, rows, AT_ONCE, D_HEAD)
    k = noise(n, 1, AT_ONCE, keys, D_HEAD) + noise(n, rows, AT_ONCE, keys, D_HEAD)
    k[:, :, :, 0] += difference
    return q.flatten(0, 1), k.flatten(0, 1), torch.arange(n).repeat_interleave(rows), list(labels)


def scaled(noise: Noise, n: int, sd: float, query: float = 1.0, difference: float = 0.0) -> Data:
    """Queries and keys of a prompt, means included, multiplied by one lognormal number."""
    q, k, units, labels = plain(noise, n, difference=difference)
    scale = (sd * noise(n, AT_ONCE)).exp()
    return (q - 1 + query) * scale[..., None], k * scale[..., None, None], units, labels


def copies(noise: Noise, n: int, each: int = 8) -> Data:
    """Every prompt is there eight times."""
    q, k, units, labels = plain(noise, n // each)
    return q.repeat(each, 1, 1), k.repeat(each, 1, 1, 1), units.repeat(each), labels


def words(noise: Noise, n: int, count: int, size: float = 1.0, prompts: int = 256) -> Data:
    """Few words, used again and again: each has a part in the query and a part in the + key, which
    do not match.
    """
    q, k, _, labels = plain(noise, prompts)
    word = noise.pick(count, prompts)
    k[:, :, 0] += size * noise(count, AT_ONCE, D_HEAD)[word]
    return q + size * noise(count, AT_ONCE, D_HEAD)[word], k, word, labels


def word_pairs(noise: Noise, n: int, count: int, prompts: int = 256) -> Data:
    """The same across a prompt and its copy: two words, each row asks for its own."""
    first = noise.pick(count, prompts)
    other = (first + 1 + noise.pick(count - 1, prompts)) % count
    in_q = noise(count, AT_ONCE, D_HEAD)
    in_k = noise(count, AT_ONCE, D_HEAD)
    shared = noise(prompts, AT_ONCE, D_HEAD)
    pairs = [
        (
            in_q[w] + 1 + shared + noise(prompts, AT_ONCE, D_HEAD),
            in_k[w] + noise(prompts, AT_ONCE, D_HEAD),
        )
        for w in (first, other)
    ]
    (q1, k1), (q2, k2) = pairs
    k = torch.cat([torch.stack([k1, k2], dim=2), torch.stack([k2, k1], dim=2)])
    return torch.cat([q1, q2]), k, torch.cat([first, other]), [1, -1]


def heavy(noise: Noise, n: int) -> Data:
    """Student's t with three degrees of freedom."""
    q, k, units, labels = plain(noise, n)
    q = q / noise(*q.shape, 3).square().mean(dim=-1).sqrt()
    k = k / noise(*k.shape, 3).square().mean(dim=-1).sqrt()
    return q, k, units, labels


def shared(noise: Noise, n: int) -> Data:
    """A prompt adds one vector to its query and to all of its keys."""
    q, k, units, labels = plain(noise, n)
    both = 2 * noise(n, AT_ONCE, D_HEAD)
    return q + both, k + both[:, :, None], units, labels


def skewed(noise: Noise, n: int) -> Data:
    """Keys far to one side: with one + and eight − keys, a row and its opposite are not alike."""
    q, k, units, labels = plain(noise, n, (1,) + (-1,) * 8)
    return q, k.exp(), units, labels


def ordered(
    noise: Noise, n: int, rho: float, text: int, group: int = 1, heads: int = AT_ONCE
) -> Data:
    """AR(1) between the prompts of a text, which begins anew after ``text`` of them; groups of so
    many are a unit.
    """
    q = noise(n, heads, D_HEAD)
    k = noise(n, heads, 2, D_HEAD)
    for i in (i for i in range(n) if i % text):
        for x in (q, k):
            x[i] = rho * x[i - 1] + (1 - rho**2) ** 0.5 * x[i]
    return 1 + q, k, torch.arange(n) // group, [1, -1]


#: Noise by name; what it is, and the nulls that are tried on it (a mean difference is no noise to
#: a flipped sign).
NOISE: dict[str, tuple[Callable[[Noise, int], Data], tuple[str, ...]]] = {
    "one + and one − key": (plain, BOTH),
    "one + and eight − keys": (lambda r, n: plain(r, n, (1,) + (-1,) * 8), BOTH),
    "five + and twenty − keys": (lambda r, n: plain(r, n, (1,) * 5 + (-1,) * 20), BOTH),
    "one + and eight − skewed keys": (skewed, BOTH),
    "two rows a prompt": (lambda r, n: plain(r, n, rows=2), BOTH),
    "8 × 8 copies": (copies, BOTH),
    "six words": (lambda r, n: words(r, n, 6), BOTH),
    "33 words": (lambda r, n: words(r, n, 33), BOTH),
    "shared scale .7": (lambda r, n: scaled(r, n, 0.7), BOTH),
    "a mean difference present": (lambda r, n: plain(r, n, difference=1), BOTH[1:]),
    "shared scale .35": (lambda r, n: scaled(r, n, 0.35), BOTH[1:]),
    "shared scale .7, no means": (lambda r, n: scaled(r, n, 0.7, query=0), BOTH[1:]),
    "shared scale .35, difference alone": (lambda r, n: scaled(r, n, 0.35, 0, 1), BOTH[1:]),
    "shared scale .7, difference alone": (lambda r, n: scaled(r, n, 0.7, 0, 1), BOTH[1:]),
    "shared scale .35, means": (lambda r, n: scaled(r, n, 0.35, difference=1), BOTH[1:]),
    "shared scale .7, means": (lambda r, n: scaled(r, n, 0.7, difference=1), BOTH[1:]),
    "shared scale .7, large means": (lambda r, n: scaled(r, n, 0.7, 3, 2), BOTH[1:]),
    "33 words, strong": (lambda r, n: words(r, n, 33, size=3), BOTH[1:]),
    "pairs of six words": (lambda r, n: word_pairs(r, n, 6), BOTH[1:]),
    "pairs of 33 words": (lambda r, n: word_pairs(r, n, 33), BOTH[1:]),
    "heavy tails": (heavy, BOTH[1:]),
    "a shared prompt vector": (shared, BOTH[1:]),
    "AR(1) .6, one text, no groups": (lambda r, n: ordered(r, 256, 0.6, 256), BOTH),
    "AR(1) .6, texts of 8 prompts, no groups": (lambda r, n: ordered(r, 256, 0.6, 8), BOTH),
    "AR(1) .6, texts of 8 prompts, each a group": (lambda r, n: ordered(r, 256, 0.6, 8, 8), BOTH),
    "AR(1) .6, texts of 16 prompts, each a group": (
        lambda r, n: ordered(r, 256, 0.6, 16, 16),
        BOTH,
    ),
    "AR(1) .6, one text, groups of 8": (lambda r, n: ordered(r, 256, 0.6, 256, 8), BOTH),
    "AR(1) .6, one text, groups of 16": (lambda r, n: ordered(r, 256, 0.6, 256, 16), BOTH),
}
CASES = {f"{null}, {name}": (null, draw) for name, (draw, nulls) in NOISE.items() for null in nulls}


def false_positives(case: str, seed: int, prompts: int = 64) -> int:
    """How many of fifty noise heads are above the null at 5%."""
    null, draw = CASES[case]
    q, k, units, labels = draw(Noise(seed), prompts)
    heads = [f"L0H{i}" for i in range(AT_ONCE)]
    moments = Moments(heads, ["c"], D_HEAD, replicates=199, seed=seed)
    moments.update(q, k, {"c": torch.tensor([labels]).expand(len(q), -1)}, prompts=units)
    deltas = moments.delta("c", "query" if null == "interaction" else "none")
    return sum(_p_value(moments, null, deltas[i], head) <= 0.05 for i, head in enumerate(heads))


def neighbours_alike(rho: float, seed: int, prompts: int = 64, heads: int = 1) -> bool:
    """Whether `decompose` would say of noise heads that neighbouring prompts of a file are alike:
    AR(1) of ``rho``.
    """
    q, k, units, _ = ordered(Noise(seed), prompts, rho, prompts, heads=heads)
    return lag_one(q, k[:, :, 0] - k[:, :, 1], units, seed + 1_000_000)[1] <= ALIKE


def _p_value(moments: Moments, null: str, delta: Tensor, head: str) -> float:
    """As `qkscope.sums.controls` takes it."""
    if null == "interaction":
        fixed, nulls = moments.interaction_nulls("c", head)
        tests = [(delta, nulls), (delta - fixed, nulls - fixed)]
    else:
        tests = [(delta, moments.flipped_nulls("c", head))]
    return max(head_p_values([rank_above(*test, max_rank=1).statistics])[0] for test in tests)


def main() -> None:
    """Print one row per null and kind of noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--only", default="", help="part of the names of the rows to print")
    parser.add_argument(
        "--neighbours", action="store_true", help="the test of a file's order instead"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.neighbours:
        for rho in (0.0, 0.2, 0.4, 0.6):
            for heads in (1, 8):
                said = sum(
                    neighbours_alike(rho, seed, given.prompts, heads) for seed in range(given.heads)
                )
                print(f"| {rho:.1f} | {heads} | {said} | {said / given.heads:.1%} |", flush=True)
        return
    print(
        f"{given.heads} heads, {given.prompts} prompts, d_head {D_HEAD}, 199 replicates, level 5%"
    )
    for case in [c for c in CASES if given.only in c]:
        called = sum(
            false_positives(case, seed, given.prompts) for seed in range(given.heads // AT_ONCE)
        )
        rate = called / given.heads
        half = 1.96 * (rate * (1 - rate) / given.heads) ** 0.5
        print(f"| {case} | {called} | {rate:.2%} ± {half:.2%} |", flush=True)


if __name__ == "__main__":
    main()
