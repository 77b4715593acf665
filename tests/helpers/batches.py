"""Tiny models run by hand: padded on either side, taken apart by hooks, and changed in one head."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from qkscope.heads import Head
from qkscope.linear.attribution import values_of
from qkscope.linear.run import Run
from qkscope.model.capture_types import Places
from qkscope.model.inputs import model_pad_id, pad_rows, short_ids
from qkscope.model.scope import Scope
from qkscope_papers.families import tiny_model, two_prompts


def look(family: str, dtype: torch.dtype = torch.float32, **overrides: object) -> Scope:
    """A tiny model of a family, unchecked."""
    return Scope.from_model(tiny_model(family, **overrides).to(dtype), check=False)


def padded(scope: Scope, side: str | None) -> tuple[dict[str, Tensor], Places]:
    """Two prompts of 9 and 7 tokens, each asking from its last one; images, where there is no side
    to pad.
    """
    if side is None:
        return two_prompts(scope)
    rows = short_ids(scope.model, (9, 7))
    inputs = pad_rows(rows, model_pad_id(scope.model) or 0, side, scope.facts.takes_positions)
    mask = inputs["attention_mask"]
    last = mask.shape[1] - 1 - mask.flip(-1).argmax(-1)
    return inputs, Places.everywhere(torch.arange(len(mask)), last, mask)


def each_head(run: Run, weights: Tensor) -> Iterator[tuple[Head, Tensor, Tensor]]:
    """What `values_of` says, head by head."""
    for heads, query, key in values_of(run, weights):
        yield from ((head, query[:, i], key[:, i]) for i, head in enumerate(heads))


def sides_of(scope: Scope) -> tuple[str | None, ...]:
    """Where a batch of this model can be padded."""
    return (
        (None,) if scope.model.main_input_name == "pixel_values" else scope.facts.sides or (None,)
    )


def residual_parts(
    model: nn.Module, inputs: dict[str, Tensor], last: int
) -> tuple[dict[str, Tensor], Tensor]:
    """By writer, what it left in the stream that enters a layer of a Llama at every token, by
    hooks; and the stream.
    """
    parts: dict[str, Tensor] = {}
    entered: list[Tensor] = []
    inner, hooks = model.model, []
    for i, layer in enumerate(inner.layers[:last]):

        def heads(module: nn.Module, args: tuple[Tensor], i: int = i) -> None:
            for h, z in enumerate(args[0].split(inner.layers[i].self_attn.head_dim, -1)):
                parts[f"L{i}H{h}"] = z @ module.weight[:, h * z.shape[-1] : (h + 1) * z.shape[-1]].T

        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(heads))
        hooks.append(
            layer.mlp.register_forward_hook(lambda _m, _a, out, i=i: parts.update({f"M{i}": out}))
        )
    hooks.append(
        inner.embed_tokens.register_forward_hook(lambda _m, _a, out: parts.update(embedding=out))
    )
    hooks.append(
        inner.layers[last].register_forward_pre_hook(lambda _m, args: entered.append(args[0]))
    )
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return parts, entered[0]


def row_with(
    scope: Scope, inputs: dict[str, Tensor], head: Head, query: int, side: str, at: int,
    change: Callable[[Tensor], Tensor], frozen: bool,
) -> Tensor:  # fmt: skip
    """A head's attention row in a plain forward of a Llama whose projection of queries or keys
    reads something else at one token; norms of queries and keys multiply by what they multiplied by
    before, where they are frozen.
    """
    layer, kept = scope.model.model.layers[head.layer], {}

    def enter(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        z = args[0].clone()
        z[0, at] = change(z[0, at])
        return (z,)

    def held(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        return args[0] * kept.setdefault(module, out / args[0])

    norms = [
        own
        for name, own in layer.self_attn.named_children()
        if frozen and name in ("q_norm", "k_norm")
    ]
    hooks = [norm.register_forward_hook(held) for norm in norms]
    with torch.no_grad():
        scope.model(**inputs)
        made = layer.self_attn.k_proj if side == "key" else layer.self_attn.q_proj
        hooks.append(made.register_forward_pre_hook(enter))
        row = scope.model(**inputs, output_attentions=True).attentions[head.layer][
            0, head.index, query
        ]
    for hook in hooks:
        hook.remove()
    return row
