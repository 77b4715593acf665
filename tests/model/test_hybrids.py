"""Hybrids: layers with attention are looked into, layers without keep their numbers, write, and are
named.
"""

import pytest
import torch

from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.head_weights import head_weights
from qkscope.linear.reader import Reader
from qkscope.linear.run import BIAS, EMBEDDING
from qkscope.model.scope import Scope
from qkscope_papers.families import tiny_model

INSTEAD = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "jamba": "JambaMambaMixer",
}


@pytest.fixture(scope="module", params=INSTEAD)
def scope(request: pytest.FixtureRequest) -> Scope:
    return Scope.from_model(tiny_model(request.param))


def test_heads_bear_the_number_of_their_layer_and_one_without_attention_is_one_sentence(
    scope: Scope,
) -> None:
    assert (scope.n_layers, scope.n_heads, scope.n_kv_heads) == (4, 4, 2)
    assert scope.heads() == [Head(layer, i) for layer in (1, 3) for i in range(4)]
    weights = head_weights(scope, "L3H2")
    assert torch.equal(weights.W_Q[0], head_weights(scope)["L3H2"][0])
    instead = INSTEAD[scope.model.config.model_type]
    with pytest.raises(
        BadInput,
        match=rf"layer 2 of .* has a {instead} instead of attention; heads are in L1, L3\.",
    ):
        scope.check("L2H0")
    with pytest.raises(BadInput, match="instead of attention; heads are in L1, L3"):
        head_weights(scope.model, "L2H0")


def test_what_stands_instead_of_attention_is_a_writer() -> None:
    scope = Scope.from_model(tiny_model("jamba"), check=False)
    writers = Reader(scope, [Head(3, 0)]).writers(3)
    heads = [f"L1H{i}" for i in range(4)]
    assert writers == [EMBEDDING, "M0.0", "M0.1", *heads, "M1", "M2.0", "M2.1", BIAS]
