"""What a token is before any context: what it reads as, its embedding, and what the model makes of it alone by its
second layer.

A token is shown twice, ``x x``, and read at its second place: whatever a head attends to there, it finds the same
value, so that what comes out depends on the token alone; and the first place, which many heads treat in a way of its
own, is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.capture.inputs import pad_rows
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop

_AT_ONCE = 1024
PIECE = "(part of a character)"


@torch.no_grad()
def token_vectors(scope: Scope, ids: Int[Tensor, " n"]) -> list[Float[Tensor, "n d"]]:
    """Embeddings of some tokens and, where there is a second layer of attention, what it is given of each alone.

    Parameters
    ----------
    scope : the model.
    ids : tokens, each once.

    Examples
    --------
    >>> [tuple(vectors.shape) for vectors in token_vectors(Scope.load("nano:mixed"), torch.arange(5))]
    [(5, 96), (5, 96)]
    """
    embedding = scope.model.get_input_embeddings()
    embedded = [embedding(ids.to(embedding.weight.device)).float().cpu()]
    layers = sorted(scope.facts.layer_of.items(), key=lambda item: item[1])
    if len(layers) < 2:
        return embedded
    number, second = layers[1]
    module = next(part for part in scope.model.modules() if id(part) == number)
    given: list[Tensor] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((args[0] if args else kwargs["hidden_states"])[:, 1].float().cpu())

    def visit(call: Call) -> None:
        if call.layer == second:
            raise Stop

    with module.register_forward_pre_hook(note, with_kwargs=True):
        for some in ids.split(_AT_ONCE):
            twice = pad_rows(list(some[:, None].expand(-1, 2)), 0, "right", scope.facts.takes_positions)
            scope.watch({name: value.to(scope.device) for name, value in twice.items()}, visit)
    return [*embedded, torch.cat(given)]


def token_texts(scope: Scope, ids: Sequence[int]) -> list[str]:
    """What each token reads as; a character cut in pieces is shown at its first piece, whole."""
    if scope.tokenizer is None:
        return [str(i) for i in ids]
    texts: list[str] = []
    while len(texts) < len(ids):
        some = ids[len(texts) : len(texts) + 8]
        reads = ((n, _decoded(scope.tokenizer, some[:n])) for n in range(1, len(some) + 1))
        count, text = next(((n, text) for n, text in reads if not text.endswith("�")), (1, PIECE))
        texts += [text, *[""] * (count - 1)]
    return texts


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of some tokens, with the blank before a word, which SentencePiece leaves out where a text begins."""
    text, first = tokenizer.decode(ids), tokenizer.convert_ids_to_tokens(ids[0])
    return f" {text}" if str(first).startswith("▁") and not text.startswith(" ") else text
