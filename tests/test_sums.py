"""Parts that do not sum to their logit are not shown as an answer."""

import pytest
import torch
from torch import nn

import qkscope as qk

LENGTH = 12
PROMPT = "hat jam cat pen cup hat jam cat pen cup hat jam cat pen cup hat"


class Rescaled(nn.Linear):
    """Queries rescaled by a number that depends on themselves, from some length on: no norm explains it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = super().forward(x)
        return q if x.shape[1] < LENGTH else q * (0.5 + q.abs().mean(-1, keepdim=True))


@pytest.fixture(scope="module")
def broken(nano) -> qk.Scope:
    model = qk.Scope.load("nano:mixed", check=False).model
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = Rescaled
    return qk.Scope.from_model(model, nano.tokenizer, name="rescaled")  # passes every check, on its short prompts


def test_why_gives_no_shares_of_parts_that_do_not_sum(broken):
    found = qk.why(broken, PROMPT, "L1H0", draws=2)
    assert found.tables["check"][0]["sum_error"] > 1e-3
    assert found.answer.startswith("The parts of L1H0 do not sum to its logit")
    assert set(found.tables) == {"said", "attention", "output", "check"}
    assert "written" not in str(found)
    assert "%" in found.tables["said"][0]["line"]  # where it looks was measured
    short = qk.why(broken, "hat jam cat hat", "L1H0", draws=2)  # below that length all is as ever
    assert {"writers", "cuts"} <= set(short.tables)


@pytest.mark.parametrize(("what", "heads"), [("prompt", "L1H0,L2H3"), ("task", "L1H0"), ("texts", "all")])
def test_trace_gives_no_shares_of_parts_that_do_not_sum(broken, what, heads):
    asked = {"prompt": PROMPT, "task": qk.tasks.induction(seed=0), "texts": [PROMPT] * 4}[what]
    found = qk.trace(broken, asked, heads, 4, draws=2, whole=False, progress=False)
    wrong = [row["head"] for row in found.tables["check"] if row["sum_error"] > 1e-3]
    assert "L1H0" in wrong
    assert "do not sum" in found.answer
    for name in ("writers", "pairs", "cuts", "edges", "graph", "sources", "heads"):
        assert not [row for row in found.tables.get(name, ()) if row["head"] in wrong]
