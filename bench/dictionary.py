"""A small dictionary of the embedded model: trained in minutes, read back, and asked.

It is written as SAELens writes one. ``python bench/dictionary.py OUT`` trains 2,048 features (32
active) of what enters layer 18 of SmolLM2-135M on Python's own help texts, writes them to OUT, and
splits L18H6 by them on binding and on induction. The page: dictionaries.md.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

import qkscope as qk
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.model.capture_types import Places
from qkscope.texts.documents import python_texts

LAYER = 18
FEATURES = 2048
ACTIVE = 32
LENGTH = 128
PASSAGES = 480
HELD_OUT = 48
STEPS = 300
BATCH = 1024
RATE = 1e-3


def stream(scope: qk.Scope) -> torch.Tensor:
    """What enters the layer at every token but the first, passage after passage."""
    ids = [one for text in python_texts() for one in scope.tokenizer(text.text)["input_ids"]]
    starts = (
        torch.randperm(len(ids) // LENGTH, generator=torch.Generator().manual_seed(0))[:PASSAGES]
        * LENGTH
    )
    reader = Reader(scope, [Head(LAYER, 0)])
    found = []
    for batch in starts.split(16):
        tokens = torch.tensor([ids[start : start + LENGTH] for start in batch.tolist()])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs["position_ids"] = torch.arange(LENGTH).expand_as(tokens)
        row = torch.arange(len(tokens))
        places = Places.everywhere(row, torch.full_like(row, LENGTH - 1), inputs["attention_mask"])
        found.append(
            reader.record(inputs, places).entered[LAYER][:, 2:]
        )  # the query, then the first token
    return torch.cat(found)


def train(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A top-k dictionary by Adam, its rows of length 1."""
    generator = torch.Generator().manual_seed(1)
    bias = x.mean(0)
    decoder = normalize(torch.randn(FEATURES, x.shape[1], generator=generator), dim=1)
    weights = {
        "W_dec": decoder,
        "W_enc": decoder.T.clone(),
        "b_enc": torch.zeros(FEATURES),
        "b_dec": bias,
    }
    trained = [one.requires_grad_() for name, one in weights.items()]
    adam = torch.optim.Adam(trained, lr=RATE)
    for _ in range(STEPS):
        batch = x[torch.randint(len(x), (BATCH,), generator=generator)]
        top = ((batch - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]).topk(ACTIVE)
        codes = torch.zeros(BATCH, FEATURES).scatter(1, top.indices, top.values.relu())
        loss = (codes @ weights["W_dec"] + weights["b_dec"] - batch).square().sum(1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            weights["W_dec"].copy_(normalize(weights["W_dec"], dim=1))
    return {name: one.detach().contiguous() for name, one in weights.items()}


def main() -> None:
    """Train, write, read, ask."""
    out = Path(sys.argv[1])
    start = time.perf_counter()
    scope = qk.Scope.load("smollm2-135m")
    x = stream(scope)
    fit = x[:-HELD_OUT].flatten(0, 1)
    held_out = x[-HELD_OUT:].flatten(0, 1)
    print(
        f"{len(fit):,} tokens to fit, {len(held_out):,} held out "
        f"({time.perf_counter() - start:.0f} s)"
    )
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "cfg.json").exists():
        save_file(train(fit), out / "sae_weights.safetensors")
        about = {"hook_name": f"blocks.{LAYER}.hook_resid_pre", "model_name": "smollm2-135m"}
        settings = {
            "architecture": "topk",
            "k": ACTIVE,
            "d_in": x.shape[-1],
            "d_sae": FEATURES,
            "metadata": about,
        }
        (out / "cfg.json").write_text(json.dumps(settings))
    dictionary = qk.Dictionary.load(out)
    coded = dictionary.code(held_out)
    lost = (held_out - coded.bias - coded.parts().sum(-2)).square().sum() / (
        held_out - coded.bias
    ).square().sum()
    used = len(dictionary.code(fit[:8192]).ids.unique())
    print(f"{dictionary}: misses {lost:.1%} of held-out text, {used:,} features in use")
    print(f"({time.perf_counter() - start:.0f} s)")
    for task in (qk.tasks.binding(), qk.tasks.induction()):
        found = qk.trace(scope, task, "L18H6", 64, dictionary=dictionary, progress=False)
        print(f"\n{task.name}: {found.answer}")
        for row in found.tables["copies"]:
            ends = [
                f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"
                for name in ("explained", "first", "ten")
            ]
            print(f"| {row['kind']} | {' | '.join(ends)} |")
        print(found.tables["check"][0], f"({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
