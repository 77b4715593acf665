"""A bench row of long jobs: two processes against one.

Both sides are the same command on the same prompts, from its start to its written folder: once in
one process bound to one core, once in two processes of one thread each under torchrun.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qkscope.model.scope import Scope
from qkscope.results.folder import read_tensors
from qkscope_bench.harness import Row, Seconds, not_here, row

_PROMPTS = 1536
_HEADS = "L18H6,L17H5"
_ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def _timed(command: list[str], cores: set[int]) -> float:
    start = time.perf_counter()
    bound: Any = {"env": _ONE_THREAD, "preexec_fn": lambda: os.sched_setaffinity(0, cores)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **bound)
    return time.perf_counter() - start


@row
def data_parallel() -> Row:
    """One contrast of the embedded model over many prompts: torchrun with two processes, against
    one on one core.
    """
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        return not_here("needs two cores that a process can be bound to")
    one, two = sorted(os.sched_getaffinity(0))[:2]
    job = (
        f"qkscope decompose binding --heads {_HEADS} -n {_PROMPTS} --contrasts order --device cpu"
    ).split()
    Scope.load(
        "smollm2-135m", device="cpu"
    )  # its weights are unpacked once, on neither side's account
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder) / name for name in ("plain", "ours")}
        python = [sys.executable, "-m"]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        plain_s = _timed([*python, *job, "--out", str(places["plain"])], {one})
        ours_s = _timed([*python, *torchrun, "-m", *job, "--out", str(places["ours"])], {one, two})
        sums = [
            read_tensors(place / "order.safetensors", "sums")[0]["sums/order"]
            for place in places.values()
        ]
    error = float((sums[0] - sums[1]).abs().max() / sums[0].abs().max())
    assert error < 1e-10, f"both sides must give the same sums, but they differ by {error}"
    return Seconds(plain_s, ours_s).faster(
        f"{_PROMPTS} prompts, whole commands; same sums to {error:.0e}; one core each"
    )
