"""A cost model of `decompose`, fitted to two rows of papers/docs/benchmarks.json; writes the tables of scaling.md.

``seconds = prompts · tokens · 2 · parameters · (share of layers) / rate``, one rate per hardware; what is accumulated
costs a few percent of that. ``bytes = weights + sums``, with ``heads · contrasts · (d_head + 1)² · 16 · (1 + 2 R)`` for
the sums (two signs, float64, R replicates of two nulls).

``python papers/scripts/scaling.py memory`` measures what the sums over 10,000, 50,000 and 100,000 prompts take, a
process each.
"""

from __future__ import annotations

import datetime
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from pages import REPORTS, put


@dataclass(frozen=True)
class Model:
    """A decoder: parameters of its layers and of all of it, in billions."""

    name: str
    body: float
    whole: float
    d_head: int
    gpus: int  # H200s (139 GiB each) that hold its bfloat16 weights


SMOL = Model("SmolLM2-135M", 0.1062, 0.1345, 64, 1)
MODELS = (
    Model("8B (Llama-3.1)", 6.98, 8.03, 128, 1),
    Model("70B (Llama-3.1)", 68.5, 70.6, 128, 2),
    Model("405B (Llama-3.1)", 401.6, 405.9, 128, 8),
)
TOKENS = {"one H200": 96, "two CPU cores": 43}  # of a prompt in the measured rows


def rates() -> dict[str, float]:
    """FLOP/s while looking, from the measured rows: 64 prompts each."""
    rows = json.loads((REPORTS / "benchmarks.json").read_text())
    gpu = next(rows[name]["capture_overhead_8b"] for name in rows if "H200" in name)
    cpu = rows["two CPU cores"]["capture_overhead"]
    return {
        "one H200": 64 * TOKENS["one H200"] * 2 * MODELS[0].body * 1e9 / gpu["ours_s"],
        "two CPU cores": 64 * TOKENS["two CPU cores"] * 2 * SMOL.body * 1e9 / cpu["ours_s"],
    }


def seconds(model: Model, prompts: float, tokens: int, rate: float, layers: float = 1.0) -> float:
    """Time of one process."""
    return prompts * tokens * 2 * model.body * 1e9 * layers / rate


def sums_gb(model: Model, heads: int, contrasts: int, replicates: int = 199) -> float:
    """Memory of the sums."""
    return heads * contrasts * (model.d_head + 1) ** 2 * 16 * (1 + 2 * replicates) / 1e9


def spoken(value: float) -> str:
    """Seconds for people."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} s"


def tables() -> str:
    """Both tables."""
    rate = rates()
    lines = [f"Rates while looking: {rate['one H200'] / 1e12:.0f} TFLOP/s on one H200 (bfloat16), "
             f"{rate['two CPU cores'] / 1e9:.0f} GFLOP/s on two CPU cores (float32).", ""]  # fmt: skip
    lines += ["| model | H200s per process | weights | sums, 9 heads, 2 contrasts | 10,000 prompts | 1 million | "
              "1 million, 8 processes | the same, heads in the first half |", "|" + " --- |" * 8]  # fmt: skip
    for model in MODELS:
        times = [seconds(model, n, 96, rate["one H200"]) for n in (1e4, 1e6)]
        lines.append(
            f"| {model.name} | {model.gpus} | {2 * model.whole:.0f} GB | {sums_gb(model, 9, 2):.1f} GB | "
            f"{spoken(times[0])} | {spoken(times[1])} | {spoken(times[1] / 8)} | {spoken(times[1] / 16)} |"
        )
    cpu = seconds(SMOL, 1, 43, rate["two CPU cores"])
    lines += ["", f"SmolLM2 on two CPU cores, prompts of 43 tokens: {1000 * cpu:.0f} ms each with all layers, "
              f"{1000 * cpu * 19 / 30:.0f} ms up to layer 18; 10,000 prompts take {spoken(1e4 * cpu)}."]  # fmt: skip
    return "\n".join(lines)


def pass_over(n: int) -> tuple[float, float, float]:
    """Peak resident MB before and after one pass over n prompts of an untrained nano model, and its seconds."""
    from qkscope import Scope, decompose, tasks

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of this process: its parent is smaller

    scope = Scope.load("nano:mixed@0", device="cpu")
    before, start = peak(), time.perf_counter()
    decompose(scope, tasks.binding(9), "L0H0", n, contrasts=["order"], batch_size=128, progress=False)
    return before, peak(), time.perf_counter() - start


def memory() -> str:
    """What a pass takes in memory, by how many prompts it sees."""
    lines = ["| prompts | peak before the pass | peak after it | time |", "| --- | --- | --- | --- |"]
    for n in (10_000, 50_000, 100_000):
        done = subprocess.run([sys.executable, __file__, "pass", str(n)], check=True, capture_output=True, text=True)
        before, after, took = json.loads(done.stdout)
        lines.append(f"| {n:,} | {before:.0f} MB | {after:.0f} MB | {took:.0f} s |")
    return "\n".join([*lines, "", f"Two CPU cores shared with other work, {datetime.date.today()}."])


if __name__ == "__main__":
    if sys.argv[1:2] == ["pass"]:
        print(json.dumps(pass_over(int(sys.argv[2]))))
    elif sys.argv[1:] == ["memory"]:
        put(REPORTS / "scaling.md", "memory", memory())
    else:
        put(REPORTS / "scaling.md", "costs", tables())
