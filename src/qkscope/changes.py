"""What can be changed in a prompt's run: values that an executor, or a ``with`` block, applies.

A statement about a head is a prediction about such changes. `Words` act on the ids, `Row`,
`Pattern` and `Hidden` on the attention of one head, `Output` on what a writer adds to the residual
stream.

Three means stand in a writer's place, and they are not the same number. *Over other tokens*: at
each token the mean over the prompt's other tokens, the first left out (`Output` without a value,
`Scope.ablate`). *Over the prompt*: one mean for all tokens (the cuts of a trace). *Over other
prompts*: at each token the mean over tokens of the same label elsewhere (the nodes of a circuit).
The last two are numbers of other runs, so that they are given as values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.heads import Head, Writer


@dataclass(frozen=True)
class Words:
    """Other tokens stand at some places.

    Parameters
    ----------
    places : of the prompt.
    tokens : ids that stand there instead, as many.

    Examples
    --------
    >>> Words((1, 2), (8, 9)).applied(torch.tensor([5, 6, 7]))
    tensor([5, 8, 9])
    """

    places: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.places) != len(self.tokens):
            counts = f"{len(self.tokens)} tokens for {len(self.places)} places"
            raise BadInput(f"{counts}: a token is replaced by one token.")

    def applied(self, ids: Int[Tensor, " t"]) -> Int[Tensor, " t"]:
        """Put the tokens into a copy of the prompt."""
        changed = ids.clone()
        changed[list(self.places)] = torch.tensor(self.tokens).to(ids)
        return changed


@dataclass(frozen=True)
class Inserted:
    """One more token stands right before a place; the prompt is one longer then.

    Parameters
    ----------
    place : of the unchanged prompt.
    token : its id.

    Examples
    --------
    >>> Inserted(1, 9).applied(torch.tensor([5, 6, 7]))
    tensor([5, 9, 6, 7])
    """

    place: int
    token: int

    def applied(self, ids: Int[Tensor, " t"]) -> Int[Tensor, " t1"]:
        """The prompt with this token in it."""
        token = torch.tensor([self.token]).to(ids)
        return torch.cat([ids[: self.place], token, ids[self.place :]])


@dataclass(frozen=True, eq=False)
class Row:
    """A head's row of attention has other logits; keys that its mask hides stay hidden.

    Parameters
    ----------
    head : whose row.
    query : the token that it belongs to.
    logits : what the softmax is given, over all tokens of the prompt; −∞ hides a key.
    """

    head: Head
    query: int
    logits: Float[Tensor, " t"]


@runtime_checkable
class SaysAttention(Protocol):
    """Anything that gives a pattern of attention from the tokens alone, such as a head's rule."""

    def attention(self, ids: Int[Tensor, " t"]) -> Float[Tensor, "t t"]:
        """The pattern, from each token (row) to each token (column); rows sum to 1."""
        ...


@dataclass(frozen=True, eq=False)
class Pattern:
    """A head attends as a rule says, from every token of the prompt.

    Parameters
    ----------
    head : whose pattern.
    rule : that gives it.
    """

    head: Head
    rule: SaysAttention


@dataclass(frozen=True)
class Hidden:
    """A head may not look at a key (attention knockout).

    Parameters
    ----------
    head : that may not look.
    key : the token that it does not see.
    query : from which it may not look; any, if None.
    """

    head: Head
    key: int
    query: int | None = None


@dataclass(frozen=True, eq=False)
class Output:
    """A head or an MLP puts out something else.

    Parameters
    ----------
    writer : whose output.
    value : by token, what it puts out: of a head what ``W_O`` reads, of an MLP what it adds to the
        stream; without it, its mean over the prompt's other tokens.
    """

    writer: Writer
    value: Float[Tensor, "t e"] | None = None


Change = Words | Inserted | Row | Pattern | Hidden | Output


def together(*changes: Words) -> Words:
    """Join replacements at different places into one.

    >>> together(Words((1,), (9,)), Words((3, 4), (7, 8)))
    Words(places=(1, 3, 4), tokens=(9, 7, 8))
    """
    places = tuple(place for change in changes for place in change.places)
    tokens = tuple(token for change in changes for token in change.tokens)
    return Words(places, tokens)


def word_replaced(start: int, tokens: Sequence[int]) -> Words:
    """Replace the word that starts at a token by another one of as many tokens.

    >>> word_replaced(3, (7, 8))
    Words(places=(3, 4), tokens=(7, 8))
    """
    return Words(tuple(range(start, start + len(tokens))), tuple(tokens))
