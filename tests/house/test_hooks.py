"""A subspace as a hook does to the running model what the closed form says, and refuses what it
does not fit.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qkscope import BadInput, Scope, tasks
from qkscope.sums.bases import Projector
from qkscope.sums.subspace import Subspace
from qkscope.sums.swap_algebra import swapped_keys
from swapped_prompt import difference, own_feature, swapped_prompt

HEAD = "L1H3"  # reads the second key head, as L1H2 does
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def nano() -> Scope:
    return Scope.load("nano:mixed", attn="eager")


@pytest.fixture(scope="module")
def feature(nano: Scope) -> Subspace:
    return own_feature(nano, HEAD)


def test_a_patched_run_swaps_as_the_closed_form_does_and_edits_queries_in_their_own_space(
    nano, feature
):
    prompt = swapped_prompt(nano, feature)
    hook = feature.as_hook("swap", *prompt.tokens)
    encoded = nano.encode([tasks.binding(4, form="sentence").test(1)[0][0]])
    plain = nano.capture_inputs(encoded, places=encoded.everywhere(), heads="L1H2,L1H3")
    after = nano.capture_inputs(
        encoded, places=encoded.everywhere(), heads="L1H2,L1H3", edits=[hook]
    )
    rows = after.attention()[0]
    assert difference(rows[1], prompt.after, prompt.tokens) < ROUNDING
    assert difference(rows[1], prompt.before, prompt.tokens) > 0.01
    assert torch.equal(
        after.attention()[:, 0], plain.attention()[:, 0]
    )  # the rest of the group keeps its keys
    with nano.patched([hook]) as model:
        edited = model(prompt.ids).logits
    assert not torch.equal(edited, nano.model(prompt.ids).logits)
    encoded = nano.encode(["hat jam hat"])
    hook = feature.as_hook("remove", side="query")
    after = nano.capture_inputs(encoded, places=encoded.everywhere(), heads=HEAD, edits=[hook])
    assert float(feature.coordinates(after.q[:, 0], "query").abs().max()) < 1e-5
    assert float(feature.coordinates(after.q[:, 0], "key").abs().max()) > 0.1
    assert hook.name == "blocks.1.attn.hook_rot_q"
    assert nano.generate(
        encoded, edits=[hook, feature.as_hook("remove", 1, side="query")], max_new_tokens=2
    ).shape


def test_a_swap_is_the_closed_forms_and_at_another_point_a_hook_is_refused(feature):
    keys = torch.randn(2, 2, 5, 24, generator=torch.Generator().manual_seed(1))
    kept = keys.clone()
    at = torch.tensor([0, 4]), torch.tensor([3, 1])  # other tokens in each sequence
    after = feature.as_hook("swap", *at)(keys)
    assert torch.equal(keys, kept)
    rows, projector = torch.arange(2), Projector.orthogonal(feature.basis("key").float())
    wanted = swapped_keys(keys[rows, 1, at[0]], keys[rows, 1, at[1]], projector)
    for token, key in zip(at, wanted, strict=True):
        torch.testing.assert_close(after[rows, 1, token], key)
    assert torch.equal(after[:, 0], keys[:, 0])
    assert torch.equal(after[0, 1, [1, 2, 4]], keys[0, 1, [1, 2, 4]])
    some, every = (feature.as_hook("remove", *tokens)(keys) for tokens in ((2,), ()))
    assert float(feature.coordinates(every[:, 1]).abs().max()) < 1e-5
    torch.testing.assert_close(some[:, 1, 2], every[:, 1, 2])
    assert torch.equal(some[:, 1, [0, 1, 3, 4]], keys[:, 1, [0, 1, 3, 4]])
    keys, point = (
        torch.randn(1, 5, 4, 24, generator=torch.Generator().manual_seed(1)),
        SimpleNamespace,
    )
    of_keys, of_queries = feature.as_hook("remove"), feature.as_hook("remove", side="query")
    before = replace(feature, about={**feature.about, "space": "pre_rope"}).as_hook("remove")
    for hook, names in {
        of_keys: "hook_rot_k hook_k k.hook_out",
        before: "hook_k",
        of_queries: "q.hook_out",
    }.items():
        for name in names.split():
            assert torch.equal(
                hook(keys, hook=point(name=f"blocks.1.attn.{name}")), hook(keys, hook=point())
            )
    for name, hook in {
        "0.attn.hook_rot_k": of_keys,
        "1.attn.hook_z": of_queries,
        "1.attn.hook_rot_k": before,
    }.items():
        with pytest.raises(
            BadInput, match=f"belongs at {hook.name}, but was called at blocks.{name}"
        ):
            hook(keys, hook=point(name=f"blocks.{name}"))
