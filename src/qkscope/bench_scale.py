"""Bench rows of long jobs: two processes against one, and what saving costs.

Both sides of `data_parallel` are the same command on the same prompts, from its start to its written folder: once in
one process bound to one core, once in two processes of one thread each under torchrun.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qkscope import tasks
from qkscope.analyses.decompose import Fit, decompose
from qkscope.bench import Row, compare, faster, overhead, row
from qkscope.capture.scope import Scope
from qkscope.maths.store import read_tensors

_PROMPTS = 1536
_HEADS = "L18H6,L17H5"


def _timed(command: list[str], cores: set[int]) -> float:
    start = time.perf_counter()
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    return time.perf_counter() - start


@row
def data_parallel() -> Row:
    """One contrast of the embedded model over many prompts: torchrun with two processes, against one on one core."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        return {
            "plain_s": None,
            "ours_s": None,
            "ratio": None,
            "note": "needs two cores that a process can be bound to",
        }
    one, two = sorted(os.sched_getaffinity(0))[:2]
    job = ["qkscope", "decompose", "binding", "--heads", _HEADS, "-n", str(_PROMPTS), "--contrasts", "order",
           "--device", "cpu"]  # fmt: skip
    Scope.load("smollm2-135m", device="cpu")  # its weights are unpacked once, on neither side's account
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder) / name for name in ("plain", "ours")}
        python, torchrun = [sys.executable, "-m"], ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        plain_s = _timed([*python, *job, "--out", str(places["plain"])], {one})
        ours_s = _timed([*python, *torchrun, "-m", *job, "--out", str(places["ours"])], {one, two})
        sums = [read_tensors(place / "order.safetensors", "sums")[0]["sums/order"] for place in places.values()]
    error = float((sums[0] - sums[1]).abs().max() / sums[0].abs().max())
    assert error < 1e-10, f"both sides must give the same sums, but they differ by {error}"
    return faster(plain_s, ours_s, f"{_PROMPTS} prompts, whole commands; same sums to {error:.0e}; one core each")


@row
def resume_overhead() -> Row:
    """Three heads and both nulls: with a folder that a killed run would go on from, against none.

    All saves count, also the last one, which is the result's own and not only for going on.
    """
    scope, task = Scope.load("smollm2-135m"), tasks.binding(9)
    found: dict[bool, Fit] = {}

    def fit(out: str | None) -> None:
        found[out is not None] = decompose(
            scope, task, "L18H6,L18H7,L17H5", 768, contrasts=["order"], batch_size=8, out=out, progress=False
        )

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            fit(folder)

    plain_s, ours_s = compare(lambda: fit(None), ours, repeats=3, warm=False)
    assert found[True].table() == found[False].table(), "both sides must find the same"
    sums = found[True].sums["order"]
    with tempfile.TemporaryDirectory() as folder:
        save_s = sums.save(Path(folder) / "one.safetensors", 1, 1)
    size = sum(tensor.nbytes for tensor in sums.tensors().values()) / 1e6
    what = "768 prompts in 96 batches, 3 heads with 199 replicates of two nulls, all saves counted"
    return overhead(plain_s, ours_s, f"{what}; one of {size:.0f} MB takes {save_s:.2f} s")
