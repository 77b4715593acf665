"""Sides of a text that share no text: to choose on, to fit on, to test on.

Text that was written once must not stand on two sides. So documents that share much text (a tenth
or more of the runs of eight tokens of the smaller one) are one group, each group is assigned to a
side at random, and a passage that still shares a run with another side is left out. Grouping by any
shared run would not do: "Changed in version 3." and the like tie three quarters of Python's topics
together, and a greeting ties a folder of addresses. In the end no eight tokens in a row stand on
two sides.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope.checking import Count, Seed, checked_call
from qkscope.errors import BadInput
from qkscope.seeds import derived_seed, draw_bits
from qkscope.texts.documents import Document
from qkscope.texts.task import connected, seeded

log = logging.getLogger(__name__)

SHARES = {"choose": 0.25, "fit": 0.5, "test": 0.25}  # each side's share of the tokens
RUN = 8  # tokens in a row that may not stand on two sides
PASSAGE_LENGTH = 256  # tokens of a passage
_MUCH = 0.1  # of the smaller document's runs: documents that share as much are one group
_LINKS = 64  # documents that a run links each of its holders to: a heading may stand in thousands
_EACH = 3  # groups that a side needs: intervals are by group
_LARGE = 0.5  # of a side: a larger group goes to another, so that a side is never one group alone


class Passage(NamedTuple):
    """A piece of a document as the model reads it.

    Parameters
    ----------
    document : the name of its document.
    group : the number of its group: documents that share much text have the same. Intervals
        resample groups.
    ids : its tokens, with what the tokenizer puts in front of a text.

    Examples
    --------
    >>> len(Passage("note", 0, (5, 6, 7)).ids)
    3
    """

    document: str
    group: int
    ids: tuple[int, ...]


@checked_call
def split(
    documents: Sequence[Document],
    encode: Callable[[str], Sequence[int]],
    sides: Mapping[str, float] = SHARES,
    length: Count = PASSAGE_LENGTH,
    seed: Seed = 0,
) -> dict[str, tuple[Passage, ...]]:
    """Passages by side, with no eight tokens in a row on two of them.

    A document is tokenised whole, and its ids are cut into as few parts of about the same length as
    can be. What the tokenizer puts in front of any text (a `<bos>`) comes in front of every passage
    and counts towards its length; what it puts behind is left out.

    Parameters
    ----------
    documents : at least three for every side's share, and no two of them alike.
    encode : the tokenizer, from text to ids.
    sides : name and share of each.
    length : the most tokens of a passage.
    seed : of the draw of each group's side.

    Examples
    --------
    >>> words = [Document(str(i), " ".join(str(40 * i + j) for j in range(40))) for i in range(20)]
    >>> passages = split(words, lambda text: [int(word) for word in text.split()], length=16)
    >>> {side: len(of_side) for side, of_side in passages.items()}
    {'choose': 15, 'fit': 30, 'test': 15}
    """
    shares = sides.values()
    needed = math.ceil(_EACH * sum(shares) / min(shares))
    if len(documents) < needed:
        raise BadInput(
            f"a split needs {needed} documents or more, but got {len(documents)}: give more."
        )
    encoded = [list(encode(document.text)) for document in documents]
    around = list(encode(""))
    ids = [_inner(tokens, around)[1] for tokens in encoded]
    least = len(_inner(encoded[0], around)[0]) + RUN
    if length < least:
        raise BadInput(f"length is at least {least}, but got {length}.")
    groups = _groups(ids)
    count = max(groups) + 1
    if count < needed:
        alike = f"these {len(documents)} repeat each other so much that they count as {count}"
        raise BadInput(
            f"a split needs {needed} documents or more, and {alike}: give more that share no text."
        )
    sizes = Counter[int]()
    for tokens, group in zip(ids, groups, strict=True):
        sizes[group] += len(tokens)
    side_of = _draw_sides(sizes, sides, seed)
    passages: dict[str, list[Passage]] = {side: [] for side in sides}
    for document, whole, group in zip(documents, encoded, groups, strict=True):
        for piece in cut_evenly(whole, around, length):
            passages[side_of[group]].append(Passage(document.name, group, piece))
    return _apart(passages, sides)


def cut_evenly(ids: list[int], around: list[int], length: int) -> list[tuple[int, ...]]:
    """Cut a tokenised text into as few parts of about the same length as can be.

    ``around`` is what the tokenizer makes of no text at all: what it puts in front of any text
    comes in front of every part and counts towards its length; what it puts behind is left out.

    >>> cut_evenly([1, 5, 6, 7, 8, 9], [1], 4)
    [(1, 5, 6, 7), (1, 8, 9)]
    """
    start, tokens = _inner(ids, around)
    count = math.ceil(len(tokens) / (length - len(start)))
    if not count:
        return []
    return [(*start, *piece.tolist()) for piece in tokens.tensor_split(count)]


def _inner(ids: list[int], around: list[int]) -> tuple[list[int], Int[Tensor, " t"]]:
    """What the tokenizer puts in front of a text, and the text's own tokens."""
    start = []
    for token, same in zip(around, ids, strict=False):
        if token != same:
            break
        start.append(token)
    behind = len(around) - len(start)
    return start, _tensor(ids[len(start) : len(ids) - behind])


def _tensor(ids: Sequence[int]) -> Int[Tensor, " t"]:
    return torch.tensor(ids, dtype=torch.int64)


def _runs(texts: Sequence[Tensor]) -> tuple[Int[Tensor, " r"], Int[Tensor, " r"]]:
    """Hash every eight tokens in a row, none across two texts.

    Returns
    -------
    the hashes, and the number of the text of each
    """
    empty = torch.zeros(0, dtype=torch.int64)
    flat = torch.cat([empty, *texts])
    lengths = _tensor([len(text) for text in texts])
    owner = torch.repeat_interleave(lengths)
    count = len(flat) - RUN + 1
    if count < 1:
        return empty, empty
    within = owner[:count] == owner[RUN - 1 :]
    hashes = draw_bits(*(flat[i : i + count] for i in range(RUN)))
    return hashes[within], owner[:count][within]


def _groups(texts: Sequence[Tensor]) -> list[int]:
    """The group of each text, in the order of their first texts: those that share much are one."""
    n = len(texts)
    runs, owner = _runs(texts)
    _, number = runs.unique(return_inverse=True)
    held = (number * n + owner).unique()  # each text's runs once, by run and text
    run = held // n
    text = held % n
    sizes = torch.bincount(text, minlength=n)
    pairs = [torch.zeros(0, dtype=torch.int64)]
    for step in range(1, _LINKS + 1):
        same = run[step:] == run[:-step]
        if not bool(same.any()):
            break
        linked = text[:-step] * n + text[step:]
        pairs.append(linked[same])
    pair, shared = torch.cat(pairs).unique(return_counts=True)
    ends = torch.stack([pair // n, pair % n], dim=1)
    much = shared >= _MUCH * sizes[ends].amin(dim=1)
    return connected(n, [(a, b) for a, b in ends[much].tolist()])


def _draw_sides(sizes: Mapping[int, int], sides: Mapping[str, float], seed: int) -> dict[int, str]:
    """Draw the side of each group, large ones first, in proportion to the room that sides have."""
    unit = sum(sizes.values()) / sum(sides.values())
    whole = {side: share * unit for side, share in sides.items()}
    room = dict(whole)
    side_of: dict[int, str] = {}
    for group in sorted(sizes, key=lambda group: (-sizes[group], group)):
        size = sizes[group]
        fits = [side for side in sides if size <= min(room[side], _LARGE * whole[side])]
        if not fits:
            fits = [max(sides, key=lambda side: room[side])]
        rng = seeded(derived_seed(seed, "side", group))
        weights = [max(room[side], 1e-9) for side in fits]
        (side,) = rng.choices(fits, weights)
        side_of[group] = side
        room[side] -= size
    return side_of


def _apart(
    passages: Mapping[str, Sequence[Passage]], sides: Mapping[str, float]
) -> dict[str, tuple[Passage, ...]]:
    """Keep the passages that share no run with another side.

    The larger side gives way, and of two the earlier.
    """
    kept: dict[str, tuple[Passage, ...]] = {}
    taken = torch.zeros(0, dtype=torch.int64)
    dropped = 0
    for side in sorted(reversed(list(passages)), key=lambda name: sides[name]):
        of_side = passages[side]
        runs, owner = _runs([_tensor(passage.ids) for passage in of_side])
        shares = set(owner[torch.isin(runs, taken)].tolist())
        apart = [passage for i, passage in enumerate(of_side) if i not in shares]
        kept[side] = tuple(apart)
        if not apart:
            raise BadInput(
                f"nothing is left for {side} that stands on no other side: give more text."
            )
        left, _ = _runs([_tensor(passage.ids) for passage in apart])
        taken = torch.cat([taken, left.unique()])
        dropped += len(shares)
    if dropped:
        says = "%d of %d passages share %d tokens in a row with another side and are left out."
        total = sum(len(of_side) for of_side in passages.values())
        log.info(says, dropped, total, RUN)
    return {side: kept[side] for side in passages}
