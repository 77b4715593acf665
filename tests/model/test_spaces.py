"""Three spaces: rotation adds position to content; the query's frame keeps the logits and forgets
where it stands.
"""

import pytest
import torch
from transformers.models.llama import modeling_llama

from id_prompts import marked
from qkscope.errors import BadInput
from qkscope.model.capture_types import Capture
from qkscope.model.scope import Scope
from qkscope_papers.families import tiny_model

ROTATED = ["llama", "qwen3", "phi3", "gpt_neox", "gpt_oss", "stablelm", "cohere", "gptj", "falcon"]


def capture(scope: Scope, space: str, shift: int = 0) -> Capture:
    encoded = scope.encode(marked((12, 8), (0, 3, -2)))
    encoded.inputs["position_ids"] = encoded.inputs["position_ids"] + shift
    return scope.capture_inputs(encoded, space=space)


@pytest.fixture(scope="module", params=ROTATED)
def scope(request: pytest.FixtureRequest) -> Scope:
    far = (
        {"max_position_embeddings": 2048} if request.param in ("gptj", "codegen") else {}
    )  # their angles are a table
    return Scope.from_model(tiny_model(request.param, **far), check=False)


def test_the_query_frame_forgets_the_absolute_position_and_pre_rope_holds_none(
    scope: Scope,
) -> None:
    post, frame = capture(scope, "post_rope"), capture(scope, "query_frame")
    torch.testing.assert_close(frame.rows().logits(), post.rows().logits(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(frame.attention(), post.attention(), atol=1e-5, rtol=0)
    far_post, far_frame = capture(scope, "post_rope", 1000), capture(scope, "query_frame", 1000)
    unit = frame.k.norm(dim=-1).max()
    assert (far_frame.q - frame.q).abs().max() / unit < 1e-4
    assert (far_frame.k - frame.k).abs().max() / unit < 1e-4
    assert (far_post.k - post.k).abs().max() / unit > 0.1  # the test would see it
    near, far = capture(scope, "pre_rope"), capture(scope, "pre_rope", 1000)
    first = [
        slot for slot, head in enumerate(near.heads) if head.layer == 0
    ]  # later layers read rotated attention
    assert torch.equal(near.q[:, first], far.q[:, first])
    post = capture(scope, "post_rope")
    if scope.model.config.model_type == "gpt_oss":
        return  # its rotation at position 0 still scales
    groups = sorted({int(near.kv_of_head[slot]) for slot in first})
    torch.testing.assert_close(
        near.k[:, groups, 0], post.k[:, groups, 0]
    )  # position 0: no rotation
    assert (near.k[:, groups, 1] - post.k[:, groups, 1]).abs().max() > 0.01


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_without_rotation_all_spaces_are_one(family: str) -> None:
    scope = Scope.from_model(tiny_model(family), check=False)
    post = capture(scope, "post_rope")
    for space in ("pre_rope", "query_frame"):
        other = capture(scope, space)
        assert torch.equal(other.q, post.q)
        assert torch.equal(other.k, post.k)


def test_what_a_space_cannot_give_is_refused_and_the_rotary_function_is_put_back() -> None:
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    for model, reason in (
        (tiny_model("llama", **dynamic), "depends on the length"),
        (tiny_model("nanochat"), "after they are rotated"),
        (tiny_model("deepseek_v3"), "more than a rotation"),
    ):
        with pytest.raises(BadInput, match=reason):
            capture(Scope.from_model(model, check=False), "query_frame")
    before = modeling_llama.apply_rotary_pos_emb
    scope = Scope.from_model(tiny_model("llama"), check=False)
    batch = capture(scope, "pre_rope")
    assert modeling_llama.apply_rotary_pos_emb is before
    with pytest.raises(BadInput, match="do not give the model's logits"):
        batch.attention()
