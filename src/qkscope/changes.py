"""Changes: what can be different in a run of a prompt, as values.

A finding is a statement about such changes; whoever runs them takes them from it. Places are tokens
of the unchanged prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Words:
    """Other tokens at some places of the prompt."""

    places: tuple[int, ...]
    tokens: tuple[int, ...]

    def of_ids(self, ids: Int[Tensor, " t"]) -> Int[Tensor, " t"]:
        """Put the tokens into a copy of the prompt.

        >>> Words((1,), (9,)).of_ids(torch.tensor([5, 6, 7]))
        tensor([5, 9, 7])
        """
        changed = ids.clone()
        changed[list(self.places)] = torch.tensor(self.tokens)
        return changed


@dataclass(frozen=True)
class Inserted:
    """One more token, right before a place of the prompt."""

    place: int
    token: int

    def of_ids(self, ids: Int[Tensor, " t"]) -> Int[Tensor, " t1"]:
        """Put the token into a copy of the prompt, which is one longer.

        >>> Inserted(1, 9).of_ids(torch.tensor([5, 6, 7]))
        tensor([5, 9, 6, 7])
        """
        token = torch.tensor([self.token])
        return torch.cat([ids[: self.place], token, ids[self.place :]])


Change = Words | Inserted


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
