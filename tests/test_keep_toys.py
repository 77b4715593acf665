"""Facts about toys whose training is stopped: what is done is kept, and the same again goes on to the same numbers."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from qkscope.errors import Terminated
from qkscope.papers import fleet
from qkscope.papers.lee2026.toy.retrieval import Retrieval
from qkscope.papers.lee2026.toy.stack import HeadCell
from qkscope.papers.lee2026.toy.trained import train_heads
from qkscope.papers.trainer import Recipe
from qkscope.runs.store import read_tensors

CELLS = [HeadCell(Retrieval((2, 2), "discrete"), 8, seed) for seed in (0, 1)]
RECIPE = Recipe(steps=200, validate_every=5, patience=100)


def test_a_scheduler_stops_toys_and_they_go_on_bit_for_bit(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    whole = train_heads(CELLS, tmp_path / "whole", recipe=RECIPE)

    def terminate(number, frame):
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    real = fleet.train_all

    def stopped(trainers, workers):
        def later() -> None:
            while not any(trainer.step for trainer in trainers):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler sends it: to the process

        threading.Thread(target=later).start()
        return real(trainers, workers)

    try:
        monkeypatch.setattr(fleet, "train_all", stopped)
        with pytest.raises(Terminated):
            train_heads(CELLS, tmp_path / "stopped", recipe=RECIPE)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGTERM, before)
    assert "say the same again, and it goes on from there" in caplog.text
    kept = [read_tensors(path, "training")[1]["step"] for path in (tmp_path / "stopped").glob("training-*")]
    assert len(kept) == 2
    assert 0 < max(kept) < RECIPE.steps, "well before the half minute between states"
    again = train_heads(CELLS, tmp_path / "stopped", recipe=RECIPE)
    for one, other in zip(whole, again, strict=True):
        torch.testing.assert_close(one.head.W_Q, other.head.W_Q, rtol=0, atol=0)
        assert one.loss == other.loss
