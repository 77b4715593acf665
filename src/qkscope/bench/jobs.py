"""Bench rows of long jobs: two processes against one, and what saving costs.

Both sides of `data_parallel` are the same command on the same prompts, from its start to its written folder: once in
one process bound to one core, once in two processes of one thread each under torchrun.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qkscope.bench.harness import Row, Seconds, not_here, row
from qkscope.capture.scope import Scope
from qkscope.runs.store import read_tensors

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
    """One contrast of the embedded model over many prompts: torchrun with two processes, against one on one core."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        return not_here("needs two cores that a process can be bound to")
    one, two = sorted(os.sched_getaffinity(0))[:2]
    job = f"qkscope decompose binding --heads {_HEADS} -n {_PROMPTS} --contrasts order --device cpu".split()
    Scope.load("smollm2-135m", device="cpu")  # its weights are unpacked once, on neither side's account
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder) / name for name in ("plain", "ours")}
        python, torchrun = [sys.executable, "-m"], ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        plain_s = _timed([*python, *job, "--out", str(places["plain"])], {one})
        ours_s = _timed([*python, *torchrun, "-m", *job, "--out", str(places["ours"])], {one, two})
        sums = [read_tensors(place / "order.safetensors", "sums")[0]["sums/order"] for place in places.values()]
    error = float((sums[0] - sums[1]).abs().max() / sums[0].abs().max())
    assert error < 1e-10, f"both sides must give the same sums, but they differ by {error}"
    return Seconds(plain_s, ours_s).faster(
        f"{_PROMPTS} prompts, whole commands; same sums to {error:.0e}; one core each"
    )


_PASS = """
import logging, sys
from qkscope import Scope, decompose, tasks
logging.basicConfig(format="%(message)s")
logging.getLogger("qkscope.runs.job").setLevel(logging.DEBUG)
scope = Scope.load("smollm2-135m", device="cpu")
print("ready", flush=True)
sys.stdin.readline()
heads, options = "L18H6,L18H7,L17H5", {"contrasts": ["order"], "batch_size": 8, "progress": False}
decompose(scope, tasks.binding(9), heads, int(sys.argv[1]), **options, out=sys.argv[2] or None)
"""


def _in_turns(commands: list[list[str]], turn: float = 5.0) -> tuple[list[float], list[str]]:
    """Seconds that each process ran when they take turns, from when all are ready, and what each said on stderr.

    A machine that is busy now and quiet then slows all of them alike, which whole runs one after the other are not. A
    turn is long beside a save: one that is stopped half-way looks slow to its process, which then saves more rarely.
    """
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    started = [subprocess.Popen(command, text=True, env=_ONE_THREAD, **pipes) for command in commands]
    for process in started:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        process.stdin.write("\n")
        process.stdin.flush()
    seconds = [0.0 for _ in started]
    while any(process.returncode is None for process in started):
        for i, process in enumerate(started):
            if process.returncode is not None:
                continue
            start = time.perf_counter()
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(turn)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGSTOP)
            seconds[i] += time.perf_counter() - start
    return seconds, [process.communicate()[1] for process in started]


@row
def resume_overhead() -> Row:
    """Three heads and both nulls: with a folder that a killed run would go on from, against none.

    All saves count, also the last one, which is the result's own and not only for going on.
    """
    prompts = 768
    Scope.load("smollm2-135m", device="cpu")  # its weights are unpacked once, on neither side's account
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _PASS, str(prompts)]
        seconds, said = _in_turns([[*command, ""], [*command, folder]])
        size = (Path(folder) / "order.safetensors").stat().st_size / 1e6
    saves = len(re.findall(r"^saved \d+ of \d+ batches", said[1], re.MULTILINE))
    note = f"{prompts} prompts, 3 heads with 199 replicates of two nulls; {saves} saves of {size:.0f} MB"
    return Seconds(*seconds).overhead(f"{note}; taking turns, one core")
