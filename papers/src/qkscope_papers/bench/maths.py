"""Bench rows of plain tensors: sums of many heads at once, and thin SVDs against dense ones."""

from __future__ import annotations

import torch

from qkscope.heads import Head
from qkscope.maths.bases import heads_at_once, thin_svd
from qkscope.maths.moments import Moments
from qkscope_papers.bench.harness import Row, compare, row
from qkscope_papers.fleet import one_thread


@row
def moments_update() -> Row:
    """270 heads in 90 key groups, 16 queries, 10 keys, d_head 64, both signs, float64 sums, one core."""
    layers, heads, groups, rows, keys, d = 30, 9, 3, 16, 10, 64
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, layers * heads, d, generator=generator)
    k = torch.randn(rows, layers * groups, keys, d, generator=generator)
    labels = -torch.ones(rows, keys, dtype=torch.int64)
    labels[torch.arange(rows), torch.randint(keys, (rows,), generator=generator)] = 1
    names = [Head(layer, head) for layer in range(layers) for head in range(heads)]
    moments = Moments(names, ["c"], d, group_size=heads // groups)
    sums = torch.zeros(len(names), 2, d, d, dtype=torch.float64)
    right = labels > 0

    def plain() -> None:
        for index, head in enumerate(names):
            queries = q[:, index].double()
            own = k[:, head.layer * groups + head.index // (heads // groups)].double()
            sums[index, 0] += torch.einsum("nd,ne->de", queries, own[right])
            sums[index, 1] += torch.einsum("nd,nke->de", queries, own[~right].view(rows, keys - 1, d))

    with one_thread():
        seconds = compare(plain, lambda: moments.update(q, k, {"c": labels}), repeats=20)
    ours_c = moments.delta("c") * moments.count("c")[0, 0]
    plain_c = sums[:, 0] - sums[:, 1] / (keys - 1)
    assert torch.allclose(ours_c, plain_c, rtol=1e-9, atol=1e-9), "both sides must compute the same ΔC"
    return seconds.faster("Moments.update, 270 heads, 16 queries, 10 keys; against a loop over heads; one core")


def _thin_against_dense(heads: int, d_model: int, d_head: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    shape = (heads, d_head, d_model)
    w_q, w_k = (torch.randn(shape, generator=generator, dtype=torch.float64) / d_model**0.5 for _ in range(2))
    found: dict[str, torch.Tensor] = {}

    def plain() -> None:
        dense = [torch.linalg.svd(a.T @ b, full_matrices=False) for a, b in zip(w_q, w_k, strict=True)]
        found["plain"] = torch.stack([s[:d_head] for _, s, _ in dense])

    def ours() -> None:
        found["ours"] = thin_svd(w_q, w_k)[1]

    with one_thread():
        seconds = compare(plain, ours, warm=False)
    error = float((found["plain"] - found["ours"]).abs().max() / found["ours"].max())
    assert error < 1e-10, "both sides must find the same singular values"
    named = f"{heads} head{'s' if heads > 1 else ''}, d_model {d_model}, d_head {d_head}"
    return seconds.faster(f"{named}; same values to {error:.0e}; one core")


@row
def thin_svd_576_64() -> Row:
    """All 270 heads of SmolLM2's shape: thin SVD, checked, against a dense SVD of Ω per head; both float64."""
    return _thin_against_dense(270, 576, 64)


@row
def thin_svd_4096_128() -> Row:
    """One head of Llama-3.1-8B's shape."""
    return _thin_against_dense(1, 4096, 128)


@row
def thin_svd_8b() -> Row:
    """All 1,024 heads of Llama-3.1-8B's shape, as many at once as fit; against one head, dense."""
    layers, heads, key_heads, d_model, d_head = 32, 32, 8, 4096, 128
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    w_q, w_k = (
        torch.randn(layers * n, d_head, d_model, generator=generator, device=device) / d_model**0.5
        for n in (heads, key_heads)
    )
    size, step = heads // key_heads, heads_at_once(w_q)

    def ours() -> None:
        for start in range(0, len(w_q), step):
            own = torch.arange(start, min(start + step, len(w_q)), device=device) // size
            thin_svd(w_q[start : start + step], w_k[own[0] : own[-1] + 1], own - own[0])

    thin_svd(w_q[:2], w_k[:2])
    seconds = compare(lambda: torch.linalg.svdvals(w_q[0].double().T @ w_k[0].double()), ours, warm=False)
    return seconds.faster(
        f"ours: all 1,024 heads, d_model 4096, d_head 128; plain: the singular values of ONE head; {device.type}"
    )
