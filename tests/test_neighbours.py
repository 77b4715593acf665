"""Prompts of a file whose neighbours are alike are noticed, and said."""

import json
import random

import pytest
import torch

import qkscope as qk
from qkscope.maths.significance import lag_one

WORDS = ["soap", "suit", "sword", "trophy", "tent", "guitar", "seed", "bottle", "gift", "button", "blanket", "towel"]


def write(path, ordered: bool, group: bool = False):
    """Prompts about a few topics; a topic's prompts stand together, or anywhere."""
    draw, lines = random.Random(0), []
    for topic in range(16):
        first, second = draw.sample(WORDS, 2)
        for _ in range(6):
            extra = draw.choice([word for word in WORDS if word not in (first, second)])
            keys = [{"text": first, "labels": {"mine": 1}}, {"text": second, "labels": {"mine": -1}}]
            line = {"prompt": f"{extra} {first} {second} {extra}", "keys": keys, "use": "fit"}
            lines.append(line | ({"group": topic} if group else {}))
    if not ordered:
        draw.shuffle(lines)
    path.write_text("\n".join(map(json.dumps, lines)))
    return qk.tasks.from_jsonl(path)


@pytest.mark.parametrize(("ordered", "group"), [(True, False), (False, False), (True, True)])
def test_a_file_in_order_is_noticed_and_group_is_the_way_out(nano, tmp_path, ordered, group):
    task = write(tmp_path / "mine.jsonl", ordered, group)
    fit = qk.decompose(nano, task, "L1H0,L1H1", 96, replicates=19, out=tmp_path / "fit", progress=False)
    said = "are alike in mine" in fit.answer
    assert said == (ordered and not group)
    if said:
        assert "p = 0.001" in fit.answer
        assert '"group" (`cluster`' in fit.answer
    assert qk.load(tmp_path / "fit", nano).answer == fit.answer
    again = qk.decompose(nano, task, "L1H0,L1H1", 96, replicates=19, out=tmp_path / "fit", progress=False)
    assert again.answer == fit.answer, "which no prompt was run for"


def autoregressive(rho: float, seed: int) -> float:
    noise = torch.randn(64, 3, 1, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for i in range(1, 64):
        noise[i] = rho * noise[i - 1] + (1 - rho**2) ** 0.5 * noise[i]
    return lag_one(1 + noise[:, 0], noise[:, 1] - noise[:, 2], torch.arange(64), seed + 1000)[1]


def test_dependence_is_found_and_rows_of_a_unit_count_together():
    assert all(autoregressive(0.4, seed) <= 0.01 for seed in range(10))
    alarms = sum(autoregressive(0.0, seed) <= 0.05 for seed in range(100))
    assert alarms <= 12  # 5 expected, at the 5% level
    draw = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(40, 2, 4, generator=draw) for _ in range(2))
    unit = torch.arange(20).repeat_interleave(2)
    outer = torch.einsum("bhd,bhe->bhde", q, keys).unflatten(0, (20, 2)).sum(1)
    outer = outer - outer.mean(0)
    norms = outer.flatten(2).square().sum((0, 2))
    by_head = (outer[:-1] * outer[1:]).flatten(2).sum((0, 2)) / norms
    assert lag_one(q, keys, unit)[0] == pytest.approx(float(by_head.mean()), abs=1e-6)
