"""The tap sees what the model's attention sees, changes nothing, and leaves nothing behind."""

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from id_prompts import eager_attention, ids, marked
from qkscope.errors import BadInput
from qkscope.examples import Example, Key
from qkscope.model.scope import Scope
from qkscope.model.tap import tap
from qkscope.results.work import stream
from qkscope_papers.families import tiny_model

DECODERS = [
    "llama",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3",
    "gpt_neox",
    "opt",
    "gpt_oss",
    "gptj",
    "mpt",
    "falcon",
]


def examples() -> list[Example]:
    """Padded key slots, and a window of 4 hides some."""
    return [*marked((12, 9), (1, -3, 4)), *marked((7,), (1, -3))]


@pytest.fixture(scope="module", params=DECODERS)
def scope(request: pytest.FixtureRequest) -> Scope:
    return Scope.from_model(tiny_model(request.param))


@pytest.fixture(scope="module")
def llama() -> Scope:
    return Scope.from_model(tiny_model("llama", num_hidden_layers=5))


def test_softmax_of_captured_logits_and_rest_is_the_models_attention(scope: Scope) -> None:
    encoded = scope.encode(examples())
    captured = scope.capture_inputs(encoded)
    reference = eager_attention(scope.model, encoded.inputs)
    ours = captured.attention()
    for slot, head in enumerate(captured.heads):
        row = reference[head.layer][torch.arange(3), head.index, captured.query_positions]
        theirs = row.gather(-1, captured.key_positions) * captured.key_mask
        torch.testing.assert_close(ours[:, slot], theirs, atol=1e-5, rtol=0)
        named = torch.zeros_like(row).scatter_add(
            -1, captured.key_positions, captured.key_mask.to(row)
        )
        largest = torch.where(
            row.masked_fill(named > 0, -1).amax(-1) > theirs.amax(-1), -1, theirs.argmax(-1)
        )
        assert torch.equal(captured.rows().largest()[:, slot], largest)
        # what is left over goes to the keys nobody named and to the sink; without a sink the row
        # sums to 1
        unnamed = torch.softmax(
            torch.cat([captured.rows().logits(), captured.rest[..., None]], -1), -1
        )[:, slot, -1]
        if scope.model.config.model_type != "gpt_oss":
            torch.testing.assert_close(unnamed, row.sum(-1) - theirs.sum(-1), atol=1e-5, rtol=0)


def by_example(batches: list) -> dict[int, tuple[torch.Tensor, ...]]:
    parts = {}
    for batch in batches:
        for row, example in enumerate(batch.example.tolist()):
            own = batch.key_mask[row]
            parts[example] = (
                batch.q[row],
                batch.k[row][:, own],
                batch.bias[row][:, own],
                batch.rest[row],
            )
    return parts


@pytest.mark.parametrize("space", ["post_rope", "pre_rope", "query_frame"])
def test_batched_equals_single_and_left_equals_right(scope: Scope, space: str) -> None:
    single = by_example(list(scope.capture(examples(), space=space, batch_size=1)))
    for side in ("left", "right"):
        batched = by_example(
            list(scope.capture(examples(), space=space, batch_size=3, padding_side=side))
        )
        assert batched.keys() == single.keys() == {0, 1, 2}
        for example, parts in single.items():
            for ours, theirs in zip(batched[example], parts, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_logits_are_the_models_and_nothing_is_left_behind(scope: Scope) -> None:
    names = (
        set(ALL_ATTENTION_FUNCTIONS.valid_keys()),
        set(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
    )
    before = scope.model.config._attn_implementation
    encoded = scope.encode(examples())
    with torch.no_grad():
        plain = scope.model(**encoded.inputs).logits[:, -1]
    captured = scope.capture_inputs(encoded, logits=True)
    torch.testing.assert_close(captured.logits, plain, atol=1e-5, rtol=1e-5)
    with pytest.raises(ZeroDivisionError), tap(scope.model, lambda call: 1 / 0):
        scope.model(torch.tensor([[5, 6]]))
    assert (
        set(ALL_ATTENTION_FUNCTIONS.valid_keys()),
        set(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
    ) == names
    assert scope.model.config._attn_implementation == before
    assert all("forward" not in vars(part) for part in scope.model.modules())


def test_shapes_order_and_labels(llama: Scope) -> None:

    heads = ["L1H3", "L0H0", "L1H0", "L1H2"]
    (batch,) = llama.capture(examples(), heads=heads)
    everything = next(iter(llama.capture(examples())))
    assert [str(head) for head in batch.heads] == heads
    assert batch.kv_of_head.tolist() == [0, 1, 2, 0]  # L1H2 and L1H3 share a key head, found first
    for slot, head in enumerate(batch.heads):
        full = everything.heads.index(head)
        assert torch.equal(batch.q[:, slot], everything.q[:, full])
    assert batch.example.tolist() == [2, 1, 0]  # shortest first
    assert batch.key_mask.sum(-1).tolist() == [2, 3, 3]
    signs = [Key((1, 2), {"odd": 1}), Key((4, 5), {"odd": -1})]
    labelled = [Example(ids=ids(7), keys=signs), Example(ids=ids(9), keys=signs[:1])]
    assert next(iter(llama.capture(labelled))).labels["odd"].tolist() == [[1, -1], [1, 0]]


def test_several_queries_give_one_row_each_and_the_pass_ends_early(llama: Scope) -> None:
    scope = Scope.from_model(tiny_model("gemma3"))
    tokens, key = ids(11, 3), Key((2, 3))
    many = Example(ids=tokens, queries=[(3, 4), (6, 8), (10, 11)], keys=[key])
    (batch,) = scope.capture([many, Example(ids=ids(5, 4), keys=[key])], batch_size=2)
    assert batch.example.tolist() == [1, 0, 0, 0]
    alone = [
        next(iter(scope.capture([Example(ids=tokens, queries=[(q, q + 1)], keys=[key])])))
        for q in (3, 7, 10)
    ]
    torch.testing.assert_close(
        batch.attention()[1:], torch.cat([x.attention() for x in alone]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        batch.rest[1:], torch.cat([x.rest for x in alone]), atol=1e-5, rtol=0
    )
    ran: list[int] = []
    layers = enumerate(llama.model.model.layers)
    hooks = [layer.mlp.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in layers]
    llama.capture_inputs(llama.encode(examples()), heads=["L2H1", "L1H0"])
    assert ran == [0, 1]  # layer 2 ends inside its attention
    for hook in hooks:
        hook.remove()


def test_a_batch_that_does_not_fit_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    def run(batch: list[int]) -> list[int]:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("too large")
        return batch

    assert list(stream([[0, 1, 2, 3, 4], [5, 6, 7]], run)) == [[0, 1], [2, 3], [4], [5, 6], [7]]
    assert "batches of 2" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        list(stream([[0]], lambda batch: run([0, 0, 0])))
    with pytest.raises(RuntimeError, match="other"):  # not every failure is about memory
        list(stream([[0, 1]], lambda batch: (_ for _ in ()).throw(RuntimeError("other"))))


def test_models_that_would_mislead_are_refused() -> None:
    for family, what in (("gemma2", "soft-cap"), ("gpt_oss", "sink")):
        model = tiny_model(family)
        model.config._attn_implementation_internal = "sdpa"
        with pytest.raises(BadInput, match=f"drops this model's .*{what}.*eager"):
            Scope.from_model(model)
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(BadInput, match="NaN"):
        Scope.from_model(model)
    scope = Scope.from_model(model, check=False)
    with pytest.raises(BadInput, match="logits are NaN"):
        list(scope.capture(examples(), logits=True))
    with pytest.raises(BadInput, match="do not say where to look"):
        scope.capture_inputs({"input_ids": torch.tensor([[5, 6]])})
