"""Bench rows of plain tensors: thin SVDs against dense ones."""

from __future__ import annotations

import torch

from qkscope.sums.bases import heads_at_once, thin_svd
from qkscope_bench.harness import Row, compare, row
from qkscope_papers.fleet import one_thread


@row
def thin_svd_576_64() -> Row:
    """All 270 heads of SmolLM2's shape: thin SVD, checked, against a dense SVD of Ω per head; both
    float64.
    """
    heads = 270
    d_head = 64
    d_model = 576
    generator = torch.Generator().manual_seed(0)
    shape = (heads, d_head, d_model)
    w_q = torch.randn(shape, generator=generator, dtype=torch.float64) / d_model**0.5
    w_k = torch.randn(shape, generator=generator, dtype=torch.float64) / d_model**0.5
    found: dict[str, torch.Tensor] = {}

    def plain() -> None:
        values = []
        for a, b in zip(w_q, w_k, strict=True):
            _, s, _ = torch.linalg.svd(a.T @ b, full_matrices=False)
            values.append(s[:d_head])
        found["plain"] = torch.stack(values)

    def ours() -> None:
        found["ours"] = thin_svd(w_q, w_k)[1]

    with one_thread():
        seconds = compare(plain, ours, warm=False)
    error = float((found["plain"] - found["ours"]).abs().max() / found["ours"].max())
    assert error < 1e-10, "both sides must find the same singular values"
    return seconds.faster(
        f"{heads} heads, d_model {d_model}, d_head {d_head}; same values to {error:.0e}; one core"
    )


@row
def thin_svd_8b() -> Row:
    """All 1,024 heads of Llama-3.1-8B's shape, as many at once as fit; against one head, dense."""
    layers = 32
    heads = 32
    key_heads = 8
    d_model = 4096
    d_head = 128
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        shape = (count, d_head, d_model)
        return torch.randn(shape, generator=generator, device=device) / d_model**0.5

    w_q = drawn(layers * heads)
    w_k = drawn(layers * key_heads)
    size = heads // key_heads
    step = heads_at_once(w_q)

    def ours() -> None:
        for start in range(0, len(w_q), step):
            own = torch.arange(start, min(start + step, len(w_q)), device=device) // size
            thin_svd(w_q[start : start + step], w_k[own[0] : own[-1] + 1], own - own[0])

    def plain() -> None:
        torch.linalg.svdvals(w_q[0].double().T @ w_k[0].double())

    thin_svd(w_q[:2], w_k[:2])
    seconds = compare(plain, ours, warm=False)
    return seconds.faster(
        "ours: all 1,024 heads, d_model 4096, d_head 128; plain: the singular values of ONE "
        f"head; {device.type}"
    )
