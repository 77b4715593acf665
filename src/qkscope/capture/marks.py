"""Marks that mean what they say: a labelled key is one the query can look at, and an answer is one token ahead.

What a query sees is read off the model's own mask, head by head, so it holds for models that look back only, for those
that look both ways, and for sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head

if TYPE_CHECKING:
    from qkscope.capture.encode import Encoder, Encoding
    from qkscope.capture.scope import Scope

FIRST_TOKEN = "A labelled key is the first token of its prompt, which draws attention whatever it says."


def place_of(example: Example, key: int) -> str:
    """A key in a message: its line and number, or its prompt."""
    piece = example.piece(example.keys[key].span)
    return f"{example.where or 'in ' + example.show(80)}, key {key + 1} ({piece!r})"


def check_own_query(example: Example, queries: Sequence[int], keys: Sequence[int]) -> None:
    """Refuse a labelled key that is the query itself: what a token gives itself is no choice among keys."""
    for i, (key, at) in enumerate(zip(example.keys, keys, strict=True)):
        if at in queries and any(key.labels.values()):
            raise BadInput(
                f"{place_of(example, i)} is the token that asks: a contrast is of other tokens, so take the label off,"
                " or let another token ask."
            )


def has_first_token(example: Example, keys: Sequence[int]) -> bool:
    """Whether a labelled key is the first token of the sequence."""
    return any(at == 0 and any(key.labels.values()) for key, at in zip(example.keys, keys, strict=True))


def notes_of(scope: Scope, task: Any) -> list[str]:
    """What a reader of a task's results with this model must know: the task's own notes, and of first tokens."""
    first = task.starts_with_key and not scope.encoder.adds_first
    return [*task.notes, *([FIRST_TOKEN] if first else [])]


def check_visible(
    encoded: Encoding, heads: Sequence[Head], bias: Float[Tensor, "b h k"], by_some: bool = False
) -> None:
    """Refuse a labelled key that a head cannot see from the query (with ``by_some``: that no head can).

    Parameters
    ----------
    bias : the model's mask at the marked keys, -inf where the query cannot look.
    """
    if not encoded.labels or not encoded.examples:
        return
    labelled = torch.stack([label != 0 for label in encoded.labels.values()]).any(dim=0) & encoded.places.key_mask
    blind = (bias == -torch.inf) & labelled[:, None].to(bias.device)
    if by_some:
        blind = blind.all(dim=1, keepdim=True)
    if not bool(blind.any()):
        return
    row, head, key = blind.nonzero()[0].tolist()
    place = place_of(encoded.examples[int(encoded.example[row])], key)
    if int(encoded.places.keys[row, key]) > int(encoded.places.query[row]):
        how = "mark a key before the query, or another query"
        raise BadInput(f"{place} stands after the query, and this model looks back only: {how}.")
    how = "shorten the prompt, or leave this head out"
    raise BadInput(f"{place} is out of sight of {heads[head]}, which looks only so far back: {how}.")


def answer_ids(
    scope: Scope, examples: Sequence[Example], chat: bool = False
) -> list[tuple[list[int], list[int]] | None]:
    """First tokens of each example's right and wrong answers, as they would follow its query; None where it names none.

    The answer is tokenised where it would stand. One that melts into the prompt's last token cannot be read there.
    """
    encoder = scope.encoder
    return [None if example.answers is None else _first_tokens(encoder, example, chat) for example in examples]


def _first_tokens(encoder: Encoder, example: Example, chat: bool) -> tuple[list[int], list[int]]:
    assert example.answers is not None
    if example.text is None:
        raise BadInput("answers are text, but an example has ids: give its text.")
    if len(example.queries) > 1:
        raise BadInput(f"an answer follows one query, but there are {len(example.queries)} in {example.show(80)}.")
    (tokens,) = encoder.tokenise([example], chat)
    rendered = encoder.render(example.text, chat)[0]
    query = tokens.queries[0]
    ((_, offsets),) = encoder.ids_and_offsets([rendered], chat)
    before = rendered[: offsets[query][1]]
    sides = []
    for answers in (example.answers.right, example.answers.wrong):
        found: list[int] = []
        continued = encoder.ids_and_offsets([before + answer for answer in answers], chat)
        for answer, (ids, _) in zip(answers, continued, strict=True):
            kept, first = ids[: query + 1] == tokens.ids[: query + 1], ids[query + 1 : query + 2]
            if not kept or not first or first[0] == encoder.unknown:
                after = f"after {example.show(80)}: begin it with a blank, or name another"
                raise BadInput(f"the answer {answer!r} has no token of its own {after}.")
            found += first
        sides.append(list(dict.fromkeys(found)))
    right, wrong = sides
    if set(right) & set(wrong):
        raise BadInput(f"a right and a wrong answer begin with the same token after {example.show(80)}: name others.")
    return right, wrong
