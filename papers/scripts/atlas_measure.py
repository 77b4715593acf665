"""An atlas on documents, timed, and what its induction heads are worth: ablated together, beside random sets.

python papers/scripts/atlas_measure.py [TEXTS] --out atlas.json [--model MODEL] [--device cuda] [--n 40]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch

import qkscope as qk
from qkscope.analyses.atlas import atlas
from qkscope.change.again import prompt_of
from qkscope.tasks.texts import read_documents


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device")
    parser.add_argument("--n", type=int, default=40)
    asked = parser.parse_args()
    scope, start = qk.Scope.load(asked.model, device=asked.device), time.time()
    names = atlas(scope, read_documents(asked.texts) if asked.texts else None, asked.n, test=asked.n)
    seconds = time.time() - start
    rows, scores = names.table(), names.tables["scores"]
    kept = [row["head"] for row in rows if row["kind"] == "induction"]
    made = {
        "answer": names.answer, "seconds": seconds, "kinds": Counter(row["kind"] for row in rows),
        "induction": kept, "labels": labels(scope, rows), "ablated": ablated(scope, kept), "atlas": rows,
        "scores": scores,
    }  # fmt: skip
    asked.out.write_text(json.dumps(made, indent=0, default=str))
    print(json.dumps({k: v for k, v in made.items() if k not in ("atlas", "scores")}, default=str))
    other = [s for s in scores if not s["kind"].startswith(("position", "no ", "previous", "self", "sink"))]
    for name, own in (("no offset", other), ("all", scores)):
        better = sum(s["low"] > 0 for s in own) / max(len(own), 1)
        less = sum(s["loss_high"] < 0 for s in own) / max(len(own), 1)
        mean = {
            k: round(sum(s[k] for s in own) / max(len(own), 1), 3)
            for k in ("name", "offset", "previous", "itself", "tokens", "log_loss", "with_name")
        }
        print(name, len(own), f"better than the offset {better:.2f}, lower log-loss {less:.2f}", mean)


def repeated(scope: qk.Scope, count: int = 16, length: int = 32) -> torch.Tensor:
    ids = torch.randint(1000, 40000, (count, length), generator=torch.Generator().manual_seed(0))
    return torch.cat([ids, ids], dim=1).to(scope.device)


def accuracy(scope: qk.Scope, ids: torch.Tensor, heads: list[str]) -> float:
    half = ids.shape[1] // 2
    with torch.no_grad(), ExitStack() as stack:
        if heads:
            stack.enter_context(scope.ablate(*heads))
        model = stack.enter_context(scope.patched([]))
        logits = model(**prompt_of(scope, ids), use_cache=False).logits
    return float((logits[:, half:-1].argmax(-1) == ids[:, half + 1 :]).float().mean())


def ablated(scope: qk.Scope, heads: list[str]) -> dict[str, object]:
    ids, draws = repeated(scope), random.Random(0)
    before = accuracy(scope, ids, [])
    sets = []
    for _ in range(20 if heads else 0):
        sets.append(
            accuracy(scope, ids, [f"{head.partition('H')[0]}H{draws.randrange(scope.n_heads)}" for head in heads])
        )
    return {
        "before": before,
        "induction": accuracy(scope, ids, heads),
        "random": sorted(sets),
        "L16H0": accuracy(scope, ids, ["L16H0"]),
    }


def labels(scope: qk.Scope, rows: list[dict]) -> dict[str, float]:
    """Area under the curve of each job's share against labels from repeated random tokens (attention above .3)."""
    ids = repeated(scope)
    half, scored = ids.shape[1] // 2, {}
    at = torch.arange(half + 1, 2 * half - 1, device=ids.device)

    def visit(call: object) -> None:
        weights = call.attention(list(range(call.q.shape[1])))[:, :, at]
        index = torch.arange(len(at), device=at.device)
        scored[call.layer] = {
            "previous token": weights[:, :, index, at - 1].mean((0, 2)),
            "duplicate token": weights[:, :, index, at - half].mean((0, 2)),
            "induction": weights[:, :, index, at - half + 1].mean((0, 2)),
        }  # fmt: skip

    scope.watch(prompt_of(scope, ids), visit)
    out = {}
    for name in ("previous token", "duplicate token", "induction"):
        truth = [float(scored[row["layer"]][name][row["index"]]) > 0.3 for row in rows]
        share = [
            next(
                (float(part.split()[-1].rstrip("%")) for part in row["name"].split(", ") if part.startswith(name)), 0.0
            )
            for row in rows
        ]
        pairs = [
            (a > b) + 0.5 * (a == b)
            for a, t in zip(share, truth, strict=True)
            if t
            for b, u in zip(share, truth, strict=True)
            if not u
        ]
        out[name] = round(sum(pairs) / max(len(pairs), 1), 3)
        out[f"{name} heads"] = sum(truth)
    return out


if __name__ == "__main__":
    main()
