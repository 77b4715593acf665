"""How much of the answer's lead a circuit of few nodes keeps, on indirect objects: names and
templates not chosen on.

``python papers/scripts/circuit_measure.py [MODEL] [PROMPTS] [SEEDS] [FILE]`` (SmolLM2, 64,
``0,1,2``; one H200 a few minutes); ``random:MODEL`` is its shape with random weights. Shares of
each seed are kept in the file, where one is named: seeds that it has are not run again. Nodes are
chosen on the first four templates and tested on the other four, with other names; by integrated
gradients (the circuit), attribution patching, direct effect, and at random. At the end: the paired
difference to attribution patching at 20 nodes over all seeds, and how many of the first 20 nodes
two disjoint sets of names have in common.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import qkscope as qk
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.sentence_tasks import TEMPLATES
from qkscope.verbs.why.circuit import CIRCUIT, NodeOrder
from qkscope.verbs.why.many_prompts import nodes_of
from qkscope_papers.models import random_weights

SIZES = (5, 10, 20, 50, 100)
SEEN = TEMPLATES[:4]
UNSEEN = TEMPLATES[4:]


def prompts(use: str, templates: tuple[str, ...], n: int, seed: int) -> list[qk.Example]:
    """Examples of some templates, in both orders of the names."""
    every = (unit[0] for unit in qk.tasks.ioi(seed=seed).draw(use, "answer", 16 * n))
    shapes = [re.sub(r"\\\{\w+\\\}", r"[\\w ]+", re.escape(template)) for template in templates]
    return [
        example for example in every if any(re.fullmatch(shape, example.text) for shape in shapes)
    ][:n]


def measured(scope: qk.Scope, n: int, seed: int) -> dict[str, Any]:
    """Of one seed: how many of the first nodes two sets of names share, and by condition each
    prompt's share.
    """
    chosen = nodes_of(scope, prompts("choose", SEEN, n, seed))
    half = nodes_of(scope, prompts("fit", SEEN, n, seed))
    tested = nodes_of(scope, prompts("test", UNSEEN, n, seed))
    ranking = NodeOrder(chosen, chosen.other_prompts(seed), seed)
    other = NodeOrder(half, half.other_prompts(seed), seed)
    first = {*ranking.first("circuit", CIRCUIT)}
    again = {*other.first("circuit", CIRCUIT)}
    common = len(first & again) / CIRCUIT
    print(
        f"seed {seed}: lead {float(tested.lead.mean()):.2f}, {ranking.count} nodes, common {common:.0%}"
    )
    print(
        "  " + ", ".join(f"{writer} {role}" for writer, role in ranking.first("circuit", CIRCUIT)),
        flush=True,
    )
    shares = {
        ", ".join(map(str, (replaced, *key))): own.mean(0).tolist()
        for replaced, values in tested.other_prompts(seed).items()
        for key, own in ranking.shares(tested, values, SIZES).items()
    }
    return {"common": common, "shares": shares}


def main() -> None:
    """Measure seeds that are not kept, then print intervals over all prompts."""
    name, n, seeds, path = (
        *sys.argv[1:],
        *("smollm2-135m", "64", "0,1,2", "")[len(sys.argv) - 1 :],
    )
    kept = json.loads(Path(path).read_text()) if path and Path(path).exists() else {}
    scope = qk.Scope.load(name.removeprefix("random:"))
    if name.startswith("random:"):
        scope = random_weights(scope.model.config, scope.tokenizer, scope.device, 0)
    for seed in (seed for seed in seeds.split(",") if seed not in kept):
        kept[seed] = measured(scope, int(n), int(seed))
        if path:
            Path(path).write_text(json.dumps(kept))
    parts = [own["shares"] for own in kept.values()]
    found = {key: torch.tensor([x for own in parts for x in own[key]]) for key in parts[0]}
    for key, shares in found.items():
        low, high = clustered_bootstrap(shares[:, None], torch.arange(len(shares)))
        print(f"{key}: {float(shares.mean()):.3f} [{float(low):.3f}, {float(high):.3f}]")
    for replaced in ("mean", "other"):
        ours, theirs = (
            found[f"{replaced}, {by}, kept, {CIRCUIT}"]
            for by in ("circuit", "attribution patching")
        )
        low, high = clustered_bootstrap((ours - theirs)[:, None], torch.arange(len(ours)))
        print(
            f"ahead at {replaced}: {float((ours - theirs).mean()):+.3f} [{float(low):+.3f}, {float(high):+.3f}]"
        )
    print(
        "common to two sets of names:", ", ".join(f"{own['common']:.0%}" for own in kept.values())
    )


if __name__ == "__main__":
    main()
