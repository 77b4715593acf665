"""The address of an attention head: layer and query-head index, printed ``L18H6``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from qkscope.errors import BadInput
from qkscope.kinds import Count, checked_call, checked_class

_PATTERN = re.compile(r"L(\d{1,4})H(\d{1,4})", re.IGNORECASE | re.ASCII)


@checked_class
@dataclass(frozen=True, order=True)
class Head:
    """One attention head, zero-based.

    Parameters
    ----------
    layer : of the model.
    index : of the query head in its layer.

    Examples
    --------
    >>> Head.parse("L18H6")
    Head L18H6
    >>> Head(18, 6).kv(group_size=3)
    2
    """

    comes_from = "like L18H6"
    layer: int
    index: int

    def __post_init__(self) -> None:
        if self.layer < 0 or self.index < 0:
            raise BadInput(f"layer and head count from 0, but got layer {self.layer} and head {self.index}.")

    @classmethod
    def parse(cls, text: str | Head) -> Head:
        """Read ``L18H6``; a `Head` passes through.

        Parameters
        ----------
        text : the head as it is printed.
        """
        if isinstance(text, Head):
            return text
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise BadInput(f"{text!r} is not a head: write layer and head like L18H6.")
        return cls(int(match[1]), int(match[2]))

    def kv(self, group_size: Count) -> int:
        """Index of the key head this query head reads: ``index // group_size`` under grouped-query attention.

        Parameters
        ----------
        group_size : query heads that share a key head.
        """
        return self.index // group_size

    def __str__(self) -> str:
        return f"L{self.layer}H{self.index}"

    def __repr__(self) -> str:
        return f"Head {self}"


@checked_call
def parse_heads(heads: str | Head | Iterable[str | Head]) -> list[Head]:
    """Read one head, a list of them, or ``"L18H6,L17H5"``; a head named twice is refused.

    >>> parse_heads("L18H6, L17H5")
    [Head L18H6, Head L17H5]
    """
    parts: Iterable[str | Head]
    if isinstance(heads, Head):
        parts = [heads]
    elif isinstance(heads, str):
        parts = [part for part in heads.split(",") if part.strip()]
    else:
        parts = heads
    parsed = [Head.parse(part) for part in parts]
    if not parsed:
        raise BadInput("no head was named: write heads like L18H6,L17H5.")
    twice = sorted({head for head in parsed if parsed.count(head) > 1}) if len(set(parsed)) < len(parsed) else []
    if twice:
        raise BadInput(f"{twice[0]} is named twice: name each head once.")
    return parsed
