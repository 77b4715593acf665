"""Facts about prompts by the million: the same ones as in a list, in batches of a fixed list, without being held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qkscope import tasks
from qkscope.analyses.prompts import batches_of, units_hash
from qkscope.tasks.task import LazyUnits
from tiny_llama import write_tiny_llama

TASKS = [tasks.binding(3), tasks.filter(5), tasks.ioi(), tasks.induction(4), tasks.greater_than(), tasks.pronoun()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_units_held_in_part_are_those_of_a_list(task, monkeypatch):
    contrast = next(iter(task.contrasts))
    whole = list(task.fit(contrast, 50))
    monkeypatch.setattr("qkscope.tasks.task.WINDOW", 8)
    units = task.fit(contrast, 50)
    assert isinstance(units, LazyUnits)
    assert list(units) == whole
    assert [units[i] for i in range(50)] == whole
    assert [units[i] for i in (49, 3, 8, 7, -1)] == [whole[i] for i in (49, 3, 8, 7, -1)]  # back again, too
    assert units[40:44] == whole[40:44]
    assert units_hash(units) == units_hash(whole)
    with pytest.raises(IndexError):
        units[50]


def test_batches_stay_within_a_window_and_short_jobs_have_those_they_always_had(monkeypatch):
    units = tasks.ioi().fit("subject", 60)
    one = batches_of(units, 8)
    order = [i for batch in one for i in batch]
    assert order == sorted(range(60), key=lambda i: (max(map(len, units[i])), i))
    monkeypatch.setattr("qkscope.analyses.prompts.WINDOW", 20)
    batches = batches_of(units, 8)  # four prompts and their copies each
    assert [batch[0] // 20 for batch in batches] == [batch[-1] // 20 for batch in batches] == sorted([0, 1, 2] * 5)
    assert sorted(i for batch in batches for i in batch) == list(range(60))


PASS = r"""
import re, sys
from pathlib import Path
from qkscope import tasks
from qkscope.analyses import prompts
from qkscope.analyses.decompose import decompose
from qkscope.capture.scope import Scope
from qkscope.tasks import task
task.WINDOW = prompts.WINDOW = int(sys.argv[2])
scope, peaks = Scope.load(sys.argv[1], device="cpu"), []
for n in (500, 4500):
    decompose(scope, tasks.binding(9), "L0H0", n, contrasts=["order"], batch_size=100, replicates=3, progress=False)
    # not getrusage, whose peak may be that of the process that started this one
    peaks.append(int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
print(peaks[1] - peaks[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say a process's peak")
def test_memory_does_not_grow_with_the_prompts(tmp_path):
    """Prompts of nine pairs take 4 kB each: 4,000 more of them in a list would be seen, as the other run shows."""
    model = write_tiny_llama(tmp_path / "model")

    def grown(window: int) -> float:
        command = [sys.executable, "-c", PASS, str(model), str(window)]
        done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return float(done.stdout)

    assert grown(250) < 6  # MB
    assert grown(100_000) > 10
