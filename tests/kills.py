"""Kill a command over and over at random moments, let it end, and hold its results against those of a run left alone.

``python tests/kills.py 20`` kills `decompose`, `discover`, `trace` and `atlas` on ``nano:mixed`` 20 times each and says
what was lost.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import qkscope as qk


def words_file(folder: Path) -> Path:
    """A text of words that nano:mixed knows."""
    folder = folder / "words"
    folder.mkdir(exist_ok=True)
    for i, unit in enumerate(qk.tasks.induction().draw("fit", "answer", 400)):
        (folder / f"{i:03}.txt").write_text(unit[0].text)
    return folder


def commands(folder: Path) -> dict[str, list[str]]:
    """What is killed, by name."""
    model = ["--model", "nano:mixed"]
    return {
        "decompose": ["decompose", "binding", *model, "--heads", "L1H0,L1H1", "--n", "64", "--batch-size", "4"],
        "discover": ["discover", "induction", *model, "--heads", "L1H0,L1H1", "--n", "160", "--test", "40",
                     "--batch-size", "4"],
        "trace": ["trace", "induction", *model, "--heads", "L1H0,L2H1", "--n", "64", "--batch-size", "4"],
        "atlas": ["atlas", str(words_file(folder)), *model, "--n", "160", "--test", "40", "--batch-size", "4"],
    }  # fmt: skip


def run(arguments: list[str], out: Path, after: float | None = None) -> float | None:
    """Run a command; killed ``after`` seconds, give the seconds since it last kept something; None if it ended."""
    start = time.time()
    command = [sys.executable, "-m", "qkscope", *arguments, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kept = [path.stat().st_mtime for path in out.glob(".work/*/*.safetensors")]
        return time.time() - max([start, *kept])
    if process.returncode:
        raise RuntimeError(said)
    return None


def results(out: Path) -> dict[str, Any]:
    """All but the seconds."""
    return {name: value for name, value in json.loads((out / "results.json").read_text()).items() if name != "seconds"}


def survive(name: str, kills: int, in_a_row: int, folder: Path, seed: int = 0) -> list[float]:
    """Kill a command so many times, a few in a row before it may end; the seconds of work that each kill lost."""
    arguments, lots = commands(folder)[name], random.Random(seed)
    start = time.time()
    run(arguments, folder / "whole")
    lasts, wanted = time.time() - start, results(folder / "whole")
    lost: list[float] = []
    while len(lost) < kills:
        out = folder / f"killed{len(lost)}"
        for _ in range(in_a_row):
            since = run(arguments, out, after=lots.uniform(0.2, 1.0) * lasts)
            if since is None:
                break
            lost.append(since)
        if (out / ".work").exists() or not (out / "results.json").exists():  # a kill may come after the last writing
            run(arguments, out)
        assert results(out) == wanted, f"{name} killed and taken up gives other results"
        assert not (out / ".work").exists()
    return lost


if __name__ == "__main__":
    for verb in sys.argv[2:] or ("decompose", "discover", "trace", "atlas"):
        place = Path(tempfile.mkdtemp())
        seconds = survive(verb, int(sys.argv[1]), 3, place)
        print(f"{verb}: {len(seconds)} kills, the same results each time; work lost: at most {max(seconds):.1f} s")
        shutil.rmtree(place)
