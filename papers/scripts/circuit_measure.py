"""How much of the answer's lead a circuit of few nodes keeps, on indirect objects: names and templates not chosen on.

``python papers/scripts/circuit_measure.py [MODEL] [PROMPTS] [SEEDS]`` (SmolLM2, 64, 3; one H200 a few minutes, a CPU
with 8 prompts and one seed about as long). Nodes are chosen on the first four templates and tested on the other four,
with other names; by integrated gradients (the circuit), attribution patching, direct effect, and at random. At the end:
the paired difference to attribution patching at 20 nodes over all seeds, and how many of the first 20 nodes two
disjoint sets of names have in common.
"""

from __future__ import annotations

import re
import sys

import torch

import qkscope as qk
from qkscope.analyses.circuit import CIRCUIT, NodeOrder
from qkscope.analyses.why.over import nodes_of
from qkscope.maths.significance import clustered_bootstrap
from qkscope.tasks.sentences import TEMPLATES

SIZES = (5, 10, 20, 50, 100)
SEEN, UNSEEN = TEMPLATES[:4], TEMPLATES[4:]


def prompts(use: str, templates: tuple[str, ...], n: int, seed: int) -> list[qk.Example]:
    """Examples of some templates, in both orders of the names."""
    every = (unit[0] for unit in qk.tasks.ioi(seed=seed).draw(use, "answer", 16 * n))
    shapes = [re.sub(r"\\\{\w+\\\}", r"[\\w ]+", re.escape(template)) for template in templates]
    return [example for example in every if any(re.fullmatch(shape, example.text) for shape in shapes)][:n]


def main() -> None:
    """Print shares by seed, then intervals over all prompts."""
    name, n, seeds = (*sys.argv[1:], *("smollm2-135m", "64", "3")[len(sys.argv) - 1 :])
    scope, found, common = qk.Scope.load(name), {}, []
    for seed in range(int(seeds)):
        chosen, half = (nodes_of(scope, prompts(use, SEEN, int(n), seed)) for use in ("choose", "fit"))
        tested = nodes_of(scope, prompts("test", UNSEEN, int(n), seed))
        ranking, other = (NodeOrder(own, own.other_prompts(seed), seed) for own in (chosen, half))
        first, again = ({*own.first("circuit", CIRCUIT)} for own in (ranking, other))
        common.append(len(first & again) / CIRCUIT)
        print(f"seed {seed}: lead {float(tested.lead.mean()):.2f}, {ranking.count} nodes, common {common[-1]:.0%}")
        print("  " + ", ".join(f"{writer} {role}" for writer, role in ranking.first("circuit", CIRCUIT)), flush=True)
        for replaced, values in tested.other_prompts(seed).items():
            for key, shares in ranking.shares(tested, values, SIZES, SIZES).items():
                found.setdefault((replaced, *key), []).append(shares.mean(0))
                print(f"  {replaced}, {key[0]}, {key[1]} {key[2]}: {float(shares.mean()):.3f}", flush=True)
    for key, parts in found.items():
        shares = torch.cat(parts)
        low, high = clustered_bootstrap(shares[:, None], torch.arange(len(shares)))
        print(f"{', '.join(map(str, key))}: {float(shares.mean()):.3f} [{float(low):.3f}, {float(high):.3f}]")
    for replaced in ("mean", "other"):
        ours, theirs = (torch.cat(found[replaced, by, "kept", CIRCUIT]) for by in ("circuit", "attribution patching"))
        low, high = clustered_bootstrap((ours - theirs)[:, None], torch.arange(len(ours)))
        print(f"ahead at {replaced}: {float((ours - theirs).mean()):+.3f} [{float(low):+.3f}, {float(high):+.3f}]")
    print("common to two sets of names:", ", ".join(f"{share:.0%}" for share in common))


if __name__ == "__main__":
    main()
