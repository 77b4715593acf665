"""The same work in qkscope, TransformerLens and nnsight: do they agree, and at what cost?

All of it in one process. ``python bench/peers.py --hardware "two CPU cores"`` in an environment
made as ``.ci/peers`` makes it writes the table of bench/docs/benchmarks.md. The work: from prompts
of one length, the last token's query and every token's key, rotated, of all heads of SmolLM2-135M.
All run the same weights with the same attention; turns alternate, and the least of each counts.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import qkscope as qk
from qkscope_papers.reports import BENCH_REPORTS, put

PROMPTS = 32
BATCH = 16
TURNS = 3
Taken = list[
    torch.Tensor
]  # queries [b, layer, head, d_head] and keys [b, layer, kv head, token, d_head]
Take = Callable[[torch.Tensor], Taken]


def prompts(scope: qk.Scope) -> list[torch.Tensor]:
    """Batches of the binding task's prompts of the commonest length, so that nobody has to pad."""
    texts = [
        unit[0].text for unit in qk.tasks.binding(entities=9, form="list", seed=0).test(4 * PROMPTS)
    ]
    rows = [scope.tokenizer(text)["input_ids"] for text in texts]
    ((length, _),) = Counter(map(len, rows)).most_common(1)
    return list(torch.tensor([row for row in rows if len(row) == length][:PROMPTS]).split(BATCH))


def qkscope(scope: qk.Scope) -> Take:
    """The tap: it stops after the last layer, and the head that makes logits does not run."""
    layers = scope.n_layers
    heads = scope.n_heads
    kv = scope.n_kv_heads

    def take(ids: torch.Tensor) -> Taken:
        encoded = scope.encode([qk.Example(ids=row) for row in ids.tolist()])
        found = scope.capture_inputs(encoded, places=encoded.everywhere())
        return [found.q.unflatten(1, (layers, heads)), found.k.unflatten(1, (layers, kv))]

    return take


def transformer_lens(scope: qk.Scope) -> Take:
    """A bridge around a copy of the model, with a cache of these hooks alone."""
    from transformer_lens.model_bridge import TransformerBridge

    model = copy.deepcopy(scope.model)
    tokenizer = copy.deepcopy(scope.tokenizer)
    bridge: Any = TransformerBridge.boot_transformers("mine", hf_model=model, tokenizer=tokenizer)
    names = {
        side: [f"blocks.{i}.attn.hook_rot_{side}" for i in range(scope.n_layers)] for side in "qk"
    }
    wanted = {name for side in names.values() for name in side}

    def take(ids: torch.Tensor) -> Taken:
        _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name in wanted)
        q, k = (torch.stack([cache[name] for name in names[side]], dim=1) for side in "qk")
        return [q[:, :, -1], k.transpose(2, 3)]

    return take


def nnsight(scope: qk.Scope) -> Take:
    """A trace that saves what the rotation gives, and stops at the last layer."""
    import nnsight as peer

    model = copy.deepcopy(scope.model)
    tokenizer = copy.deepcopy(scope.tokenizer)
    lm: Any = peer.TransformersModel(model, tokenizer=tokenizer, task="text-generation")

    def take(ids: torch.Tensor) -> Taken:
        with lm.trace(ids) as tracer:
            found = peer.save(
                [layer.self_attn.source.apply_rotary_pos_emb_0.output for layer in lm.model.layers]
            )
            tracer.stop()
        q = torch.stack([pair[0] for pair in found], dim=1)
        k = torch.stack([pair[1] for pair in found], dim=1)
        return [q[:, :, :, -1], k]

    return take


@torch.no_grad()
def main() -> None:
    """Compare, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", required=True)
    asked = parser.parse_args()
    scope = qk.Scope.load("smollm2-135m", device="cpu", attn="eager")
    ids = prompts(scope)
    takes = {make.__name__: make(scope) for make in (qkscope, transformer_lens, nnsight)}
    first = {name: take(ids[0]) for name, take in takes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in takes}
    for _ in range(TURNS):
        for name, take in takes.items():
            start = time.perf_counter()
            for batch in ids:
                take(batch)
            seconds[name].append(time.perf_counter() - start)
    plain = min(seconds["qkscope"])
    lines = [
        "| | version | largest difference in q, k | time ÷ ours |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, found in first.items():
        off = max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(found, first["qkscope"], strict=True)
        )
        version = (
            qk.__version__
            if name == "qkscope"
            else importlib.metadata.version(name.replace("_", "-"))
        )
        lines.append(f"| {name} | {version} | {off:.1e} | {min(seconds[name]) / plain:.2f} |")
    lines.append(
        f"\n{sum(map(len, ids))} prompts of {ids[0].shape[1]} tokens, {asked.hardware}, "
        f"{datetime.date.today()}."
    )
    put(BENCH_REPORTS / "benchmarks.md", "peers", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
