"""The numbers of ``docs/discover.md`` on toys: what discovery finds where the features are known.

``python docs/discover_toys.py --out runs/discover-toys`` trains the ten cells of each d_head 16 grid that fit, and
takes them, an untrained twin and a superposition toy apart. ``--only retrieval|shuffled|superposition`` runs a part.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkscope.maths.bases import checked_svd, principal_cosines
from qkscope.maths.components import HeadRows, paired_components
from qkscope.maths.controls import rank_above
from qkscope.maths.discovery import SelfContrast
from qkscope.papers.franco2026.toy.stack import ToyCell
from qkscope.papers.franco2026.toy.superposition import Superposition
from qkscope.papers.franco2026.toy.trained import train_toys
from qkscope.papers.lee2026.toy.retrieval import RetrievalHead
from qkscope.papers.lee2026.toy.trained import grid, train_heads
from qkscope.papers.trainer import Recipe


def looked_at(head: RetrievalHead, n: int, seed: int, nuisance: int = 0) -> dict[str, Tensor]:
    """Queries, attended keys, mean keys and latents of fresh contexts; a nuisance is a sign that only queries carry."""
    seen = head.encoders.contexts(n, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    extra = 2.0 * torch.randint(2, (n, nuisance), generator=generator) - 1
    wide = seen.x_q.shape[1]  # what the nuisance writes is the same in all rows
    writes = torch.randn(wide, nuisance, generator=torch.Generator().manual_seed(99)) / wide**0.5
    q, k = head.queries(seen.x_q + extra @ writes.mT), head.keys(seen.x_k)
    weights = (head.scale * (k @ q[..., None])[..., 0]).softmax(dim=-1)
    return {
        "q": q, "attended": (weights[:, None] @ k)[:, 0], "mean": k.mean(dim=1), "nuisance": extra,
        "latents": seen.latents[torch.arange(n), seen.asked],
    }  # fmt: skip


def correlations(a: Tensor, b: Tensor) -> Tensor:
    """|corr| of every column of one with every column of the other."""
    a, b = ((x.double() - x.double().mean(0)) / x.double().std(0, correction=0) for x in (a, b))
    return (a.mT @ b / len(a)).abs()


def pairs(rows: dict[str, Tensor]) -> HeadRows:
    """Rows of the head, each its own prompt."""
    return HeadRows(rows["q"], rows["attended"], rows["mean"], torch.arange(len(rows["q"])))


def directions(rows: dict[str, Tensor], d_head: int, seed: int = 0, replicates: int = 199) -> tuple[int, SelfContrast]:
    """Number of directions above shuffled queries."""
    contrast = SelfContrast(["L0H0"], d_head, replicates=replicates, seed=seed)
    n = len(rows["q"])
    contrast.update(*(rows[x][:, None] for x in ("q", "attended", "mean")), prompts=torch.arange(n))
    return rank_above(contrast.delta()[0], contrast.null_deltas("L0H0"), alpha=0.01).rank, contrast


def take_apart(head: RetrievalHead, n: int = 8192, nuisance: int = 0, seed: int = 7) -> dict[str, Any]:
    """What discovery says of one head, beside what is true of it."""
    rows = looked_at(head, n, seed, nuisance)
    rank, contrast = directions(rows, head.d_head)
    held = pairs(looked_at(head, 2048, seed + 101, nuisance))
    found = paired_components(pairs(rows), max(rank, 1), held=held, starts=4, draws=39)
    u, _, v = checked_svd(contrast.delta()[0])
    true = head.encoders.task.total_rank
    spans = [
        principal_cosines(basis[:, :true], torch.linalg.qr(w.double() @ maps.double())[0]).min()
        for basis, w, maps in ((u, head.W_Q, head.encoders.B), (v, head.W_K, head.encoders.A))
    ]
    sides = [found.coordinates(rows[x], side) for x, side in (("q", "query"), ("attended", "key"))]
    corr = [float(correlations(side, rows["latents"]).amax(dim=0).min()) for side in sides]
    return {
        "variant": head.encoders.task.variant, "ranks": list(head.encoders.task.ranks), "true": true,
        "directions": rank, "features": len(found.features), "rejected": len(found.rejected),
        "identifiable": sum(f.identifiable for f in found.features), "corr_query": corr[0], "corr_key": corr[1],
        "span_query": float(spans[0]), "span_key": float(spans[1]), "match": float(found.match.min()),
        "diagonal": found.diagonal, "diagonal_null": found.diagonal_bound,
        "nuisance": float(correlations(sides[0], rows["nuisance"]).max()) if nuisance else None,
    }  # fmt: skip


def retrieval(out: Path, device: str) -> list[dict[str, Any]]:
    """Trained heads of both grids, with and without a nuisance, and an untrained twin of each."""
    rows = []
    for variant in ("discrete", "continuous"):
        cells = [cell for cell in grid(variant, 16) if cell.task.total_rank < 16]
        for trained in train_heads(cells, out / "heads", lr=1e-3, recipe=Recipe(steps=20_000), device=device):
            head = trained.head
            twin = RetrievalHead.untrained(head.encoders, 16, seed=1)
            kinds = {"trained": (head, 0), "untrained": (twin, 0)}
            if variant == "discrete" and head.encoders.task.total_rank < 14:
                kinds["nuisance"] = (head, 2)
            for kind, (one, nuisance) in kinds.items():
                n = 4096 if variant == "discrete" else 16_384
                rows.append({"kind": kind, **take_apart(one, n, nuisance=nuisance)})
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows


def shuffled(out: Path, device: str, runs: int = 100) -> list[dict[str, Any]]:
    """Directions found in a trained head when each query is given the keys of another context."""
    cells = [cell for cell in grid("discrete", 16) if cell.task.ranks == (4, 6)]
    head = train_heads(cells, out / "heads", lr=1e-3, recipe=Recipe(steps=20_000), device=device)[0].head
    found = []
    for run in range(runs):
        rows = looked_at(head, 1024, 1000 + run)
        order = torch.randperm(1024, generator=torch.Generator().manual_seed(run))
        rows["q"] = rows["q"][order]
        found.append(directions(rows, 16, seed=run)[0])
    row = {"kind": "shuffled", "runs": runs, "without a feature": sum(rank == 0 for rank in found)}
    print(row, flush=True)
    return [row]


def superposition(out: Path, device: str) -> list[dict[str, Any]]:
    """The paper's default toy: reading directions of the found components against the true columns of W."""
    rows = []
    for trained in train_toys([ToyCell(Superposition(), seed) for seed in range(2)], out / "toys", device=device):
        toy, task = trained.toy, trained.cell.task
        n = 16_384
        generator = torch.Generator().manual_seed(5)
        x_q = task.strengths(torch.rand(n, task.n, generator=generator))
        x_k = task.strengths(torch.rand(n, 8 * task.context, task.n, generator=generator))
        q, k = toy.tokens(x_q) @ toy.W_Q.mT, toy.tokens(x_k) @ toy.W_K.mT
        weights = (task.scale * (k @ q[..., None])[..., 0]).softmax(dim=-1)
        seen = {"q": q, "attended": (weights[:, None] @ k)[:, 0], "mean": k.mean(dim=1)}
        rank, _ = directions(seen, task.d_head)
        found = paired_components(pairs(seen), rank)
        reads = {"query": toy.W_Q.double().mT @ found.query, "key": toy.W_K.double().mT @ found.key}
        for side, names in (("query", [p[0] for p in task.pairs]), ("key", [p[1] for p in task.pairs])):
            columns = toy.W[:, names].double()
            read = reads[side] / reads[side].norm(dim=0)
            cos = (read.mT @ (columns / columns.norm(dim=0))).abs().amax(dim=0)
            rows.append({"kind": "superposition", "seed": trained.cell.seed, "side": side, "directions": rank,
                         "features": len(found.features), "cos": cos.tolist()})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run the parts and write ``toys.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/discover-toys"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=["retrieval", "shuffled", "superposition"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = {"retrieval": retrieval, "shuffled": shuffled, "superposition": superposition}
    for name, part in parts.items():
        if options.only in (None, name):
            (options.out / f"{name}.json").write_text(json.dumps(part(options.out, options.device), indent=1))


if __name__ == "__main__":
    main()
