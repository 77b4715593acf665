"""Families that count positions their own way: on which side they are padded, where they end, and
the check sees it.
"""

import pytest
import torch

from id_prompts import ids, marked
from qkscope import Scope
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope_papers.families import tiny_model

ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_where_columns_are_positions_padding_is_on_the_right_and_the_check_sees_which() -> None:
    model, prompts = tiny_model("bart"), marked((12, 7, 9))
    scope = Scope.from_model(model)
    assert scope.facts.sides == ("right",)
    with pytest.raises(BadInput, match="counts positions by columns, so padding on the left"):
        list(scope.capture(prompts, padding_side="left"))
    assert list(scope.capture(prompts[:1], padding_side="left"))  # nothing to pad
    with pytest.raises(BadInput, match="generate from one at a time"):
        scope.generate(scope.encode(prompts))
    scope = Scope.from_model(tiny_model("bart"), check=False)
    scope.facts = scope.facts._replace(sides=("left", "right"))
    assert scope.self_check().sides == scope.facts.sides == ("right",)
    scope.facts = scope.facts._replace(sides=("left",))
    with pytest.raises(BadInput, match="padded on the left beside a longer prompt, its post_rope"):
        scope.self_check()
    scope = Scope.from_model(tiny_model("roberta"), check=False)
    scope.encoder.own_pad_id = 0
    assert scope.self_check().sides == ("right",)


def test_the_check_sees_a_query_frame_that_holds_the_absolute_position() -> None:
    model = tiny_model("llama")
    scope = Scope.from_model(model)
    places = torch.nn.Embedding(128, 64)
    seen: list[torch.Tensor] = []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args: (args[0] + places(seen[-1]), *args[1:])
    )
    with pytest.raises(BadInput, match="every position 3 further on, its query_frame"):
        scope.self_check()


def test_a_prompt_ends_where_the_positions_or_the_rotation_of_the_model_end() -> None:
    scope = Scope.from_model(
        tiny_model("roberta"), check=False
    )  # 128 positions, the first two never given out
    next(iter(scope.capture([Example(ids=ids(126, 0))])))
    with pytest.raises(BadInput, match="127 tokens, but the model's context ends at 126"):
        scope.capture([Example(ids=ids(127, 0))])
    with pytest.raises(BadInput, match="context ends at 128"):
        Scope.from_model(tiny_model("whisper"), check=False).capture([Example(ids=ids(129, 0))])
    dynamic = Scope.from_model(
        tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=32), check=False
    )
    next(iter(dynamic.capture([Example(ids=ids(200, 0))])))
    yarn = {**ROPE, "rope_type": "yarn"}
    scope = Scope.from_model(
        tiny_model("llama", rope_parameters=yarn, max_position_embeddings=32), check=False
    )
    next(iter(scope.capture([Example(ids=ids(128, 0))])))
    with pytest.raises(BadInput, match="context ends at 128"):
        scope.capture([Example(ids=ids(129, 0))])
