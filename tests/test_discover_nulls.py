"""What `discover` and `atlas` call above the null: noise of every kind is not, and a planted head is, however many
heads are asked beside it; what could not be tested says so.
"""

from __future__ import annotations

import logging

import pytest
import torch

import qkscope as qk
from planted import PlantedHead
from qkscope.analyses.discover.study import UNTESTED, Options, Study, unit_numbers, untested_words
from qkscope.analyses.discover.texts import different
from qkscope.capture.families import tiny_model
from qkscope.capture.scope import Scope
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.maths.components import _correlations, _match_bound
from qkscope.maths.discovery import SelfContrast, above_rounding, directions_in_order, head_tests
from qkscope.maths.significance import clustered_bootstrap

HEADS, DIM, PROMPTS = 500, 8, 48


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noise(kind: str, mean: float, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and δ of 500 heads that match nothing, and the prompt of each row."""
    n = PROMPTS * rows
    prompts = torch.arange(PROMPTS).repeat_interleave(rows)
    q, delta = normal(n, HEADS, DIM, seed=1), normal(n, HEADS, DIM, seed=2)
    if kind == "heavy tails":
        q, delta = (x * normal(n, HEADS, 1, seed=5 + i).abs().clamp_min(0.2) ** -1.0 for i, x in enumerate((q, delta)))
    if kind == "shared vector":
        q, delta = (x + normal(PROMPTS, HEADS, DIM, seed=3 + i)[prompts] for i, x in enumerate((q, delta)))
    if kind == "unequal rows":  # a third of the prompts have fewer; those of one share a vector
        q, delta = (x + normal(PROMPTS, HEADS, DIM, seed=3 + i)[prompts] for i, x in enumerate((q, delta)))
        keep = (prompts % 3 > 0) | (torch.arange(n) % rows < rows // 2)
        q, delta, prompts = q[keep], delta[keep], prompts[keep]
    q, delta = q + mean, delta + mean
    if kind.startswith("scale"):
        scale = (float(kind.split()[1]) * normal(PROMPTS, HEADS, 1, seed=6)).exp()[prompts]
        q, delta = q * scale, delta * scale
    if kind == "copies":
        q, delta, prompts = q[:8].repeat(8, 1, 1), delta[:8].repeat(8, 1, 1), torch.arange(8).repeat(8)
    return q, delta, prompts


def judged(q: torch.Tensor, delta: torch.Tensor, prompts: torch.Tensor, replicates: int = 99):
    contrast = SelfContrast([Head(0, h) for h in range(q.shape[1])], q.shape[2], replicates=replicates, seed=3)
    contrast.update(q.float(), delta.float(), torch.zeros_like(delta).float(), prompts=prompts)
    return head_tests(contrast)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("iid", 1),
        ("heavy tails", 1),
        ("shared vector", 4),
        ("scale .35", 1),
        ("scale .7", 1),
        ("copies", 1),
        ("unequal rows", 8),
    ],
)
def test_noise_is_called_at_most_as_often_as_the_level_says(kind, rows, mean):
    tests = judged(*noise(kind, mean, rows))
    assert sum(test.p <= 0.05 for test in tests) <= 0.06 * HEADS
    assert sum(test.rank > 0 for test in tests) <= 2, "with false-discovery control over all of them"
    assert all(test.tested for test in tests)


def test_a_partner_is_not_found_in_a_shared_scale():
    """Components of noise whose prompts share a scale correlate more than shuffled ones; the bound knows."""
    above = 0
    for seed in range(60):
        scale = (0.9 * normal(60, 1, seed=3 * seed)).exp()
        s, t = (scale * normal(60, 3, seed=3 * seed + i) for i in (1, 2))
        above += float(_correlations(s, t).abs().max()) > _match_bound(s, t, torch.arange(60), seed, 19)
    assert above <= 6, "3 are expected at 5%"


@pytest.mark.parametrize(("asked", "replicates"), [(1, 39), (1, 99), (16, 41), (16, 99), (270, 99)])
def test_a_planted_head_is_above_the_null_however_many_are_asked_beside_it(asked, replicates):
    head = PlantedHead.make({"colour": 2, "shape": 1}, d_head=DIM)
    q, keys, _ = head.contexts(160, 8, seed=0)
    weights = (keys @ q[..., None])[..., 0].softmax(-1)
    delta = (weights[:, None] @ keys)[:, 0] - keys.mean(1)
    others = normal(2, 160, asked - 1, DIM, seed=4)
    both = (torch.cat([own[:, None], noise], 1) for own, noise in zip((q, delta), others, strict=True))
    tests = judged(*both, torch.arange(160), replicates)
    assert tests[0].rank >= 2
    assert tests[0].q <= 0.05
    assert sum(test.rank > 0 for test in tests[1:]) <= 1


def test_what_its_replicates_cannot_tell_is_untested():
    q, delta, prompts = (x[:, :3] if x.ndim == 3 else x for x in noise("iid", 0.0, 4))
    alone = SelfContrast(["L0H0", "L0H1", "L0H2"], DIM, replicates=39)
    for prompt in prompts.unique():  # batches of one prompt: nothing to exchange
        own = prompts == prompt
        alone.update(q[own].float(), delta[own].float(), 0 * delta[own].float(), prompts=prompts[own])
    assert [test.tested for test in head_tests(alone)] == [False] * 3
    few = judged(torch.cat([q[:, :1], q], 1), torch.cat([q[:, :1], delta], 1), prompts, replicates=8)
    assert (few[0].tested, few[0].rank) == (False, 0), "a copy of itself, but 4 replicates of a kind cannot tell"
    assert all(test.tested for test in few[1:])
    assert "1 head could not be tested" in untested_words([{"verdict": UNTESTED}, {"verdict": "one direction"}])


def test_rounding_is_no_direction():
    q = normal(200, 1, 4, seed=0)
    q[..., 2:] *= 1e-4  # 1e-8 of the largest in ΔC: what float32 leaves of directions that are not there
    contrast = SelfContrast(["L0H0"], 4, replicates=99)
    contrast.update(q.float(), q.float(), torch.zeros_like(q).float(), prompts=torch.arange(200))
    assert int(above_rounding(contrast)[0]) == 2
    assert head_tests(contrast)[0].rank == 2
    assert directions_in_order(contrast, 0, 4)[0] == 2


def test_copies_are_asked_once_and_the_same_text_is_one_unit(caplog):
    texts = [Example(ids=(5, 6, 7, 8 + i % 2), queries=((2, 3),)) for i in range(8)]
    with caplog.at_level(logging.WARNING):
        assert different(texts) == texts[:2]
    assert "6 of 8 examples are copies" in caplog.text
    asked_twice = [Example(ids=(5, 6, 7, 8), queries=((2, 3),)), Example(ids=(5, 6, 7, 9)),
                   Example(ids=(5, 6, 7, 8), queries=((3, 4),))]  # fmt: skip
    assert unit_numbers(asked_twice) == [0, 1, 0]
    scope = Scope.from_model(tiny_model("gpt2"))
    study = Study(scope, tuple(scope.parse("L0H0")), Options(space="post_rope", batch_size=1, progress=False))
    rows = study.rows("rows", asked_twice, 2)
    assert rows.example.tolist() == [0, 0, 1], "the two of one text stand in one batch"
    assert set(rows.ids) == {0, 1}


def test_one_prompt_has_no_interval():
    low, high = clustered_bootstrap(torch.rand(5, 2), torch.zeros(5, dtype=torch.long))
    assert bool(low.isnan().all() & high.isnan().all())


@pytest.mark.parametrize("replicates", [0, 19, 38])
def test_too_few_replicates_are_refused(replicates):
    scope = Scope.from_model(tiny_model("gpt2"))
    with pytest.raises(qk.BadInput, match="replicates is at least 39"):
        qk.discover(scope, ["text"] * 40, "L0H0", replicates=replicates)
