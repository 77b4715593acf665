"""Addresses: an attention head (``L18H6``), and whoever writes into the residual stream (``M9``,
``M9.N120``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qkscope.checking import Count, Natural, checked_call, checked_class
from qkscope.errors import BadInput

_PATTERN = re.compile(r"L(\d{1,4})H(\d{1,4})", re.IGNORECASE | re.ASCII)
_PART = re.compile(r"M(\d{1,4})(?:\.(\d{1,4}))?(?:\.N(\d{1,7}))?", re.IGNORECASE | re.ASCII)
EMBEDDING = "embedding"
BIAS = "bias"
_LAST = 10_000  # beyond every layer


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

    layer: Natural
    index: Natural

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
        """Index of the key head this query head reads: ``index // group_size`` under grouped-query
        attention.

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
    named = [part for part in heads.split(",") if part.strip()] if isinstance(heads, str) else heads
    parsed = [Head.parse(head) for head in ([named] if isinstance(named, Head) else named)]
    if not parsed:
        raise BadInput("no head was named: write heads like L18H6,L17H5.")
    for head, count in Counter(parsed).items():
        if count > 1:
            raise BadInput(f"{head} is named twice: name each head once.")
    return parsed


@checked_class
@dataclass(frozen=True, order=True)
class Writer:
    """A component that writes into the residual stream; sorted in its order, the embedding first
    and biases last.

    Parameters
    ----------
    layer : that it writes in; -1 of the embedding.
    kind : of writer; ``mlp`` is any part of a block besides its heads.
    index : of a head in its layer; of a part where its block has several; of a neuron, behind its
        part's.

    Examples
    --------
    >>> sorted(map(Writer.parse, ["bias", "M9.N120", "M9", "L9H3", "embedding", "M8.1"]))
    [Writer embedding, Writer M8.1, Writer L9H3, Writer M9, Writer M9.N120, Writer bias]
    >>> Writer.parse("M8.1.N7").mlp
    Writer M8.1
    """

    layer: int
    kind: Literal["embedding", "head", "mlp", "neuron", "bias"]
    index: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str | Head | Writer) -> Writer:
        """Read a writer as it is printed; a `Writer` passes through, and a `Head` is one.

        Parameters
        ----------
        text : ``embedding``, ``bias``, ``L17H8``, ``M9`` (``M9.1`` where a block has several
            parts), ``M9.N120``.
        """
        if isinstance(text, Writer):
            return text
        if isinstance(text, Head) or _PATTERN.fullmatch(text):
            head = Head.parse(text)
            return cls(head.layer, "head", (head.index,))
        if text in (EMBEDDING, BIAS):
            return cls(-1, "embedding") if text == EMBEDDING else cls(_LAST, "bias")
        part = _PART.fullmatch(text)
        if part is None:
            raise BadInput(
                f"{text[:40]!r} is not a writer: write a head as L17H8, an MLP as M9, a neuron as M9.N120."
            )
        index = tuple(int(number) for number in part.groups()[1:] if number is not None)
        return cls(int(part[1]), "mlp" if part[3] is None else "neuron", index)

    @property
    def head(self) -> Head | None:
        """The head, if the writer is one; else None."""
        return Head(self.layer, *self.index) if self.kind == "head" else None

    @property
    def mlp(self) -> Writer:
        """The MLP whose neuron it is."""
        return Writer(self.layer, "mlp", self.index[:-1])

    @property
    def block(self) -> int | None:
        """The layer that the writer belongs to; None for the embedding and the biases."""
        return None if self.kind in (EMBEDDING, BIAS) else self.layer

    def __str__(self) -> str:
        if self.kind == "neuron":
            return f"{self.mlp}.N{self.index[-1]}"
        if self.kind == "mlp":
            return ".".join(map(str, (f"M{self.layer}", *self.index)))
        return self.kind if self.head is None else str(self.head)

    def __repr__(self) -> str:
        return f"Writer {self}"


def parse_writers(names: str | Iterable[str]) -> list[Writer]:
    """Read several writers, or ``"M9.N120,M8.N7"``.

    >>> [(writer.kind, writer.layer) for writer in parse_writers(["embedding", "L0H0", "M12.1"])]
    [('embedding', -1), ('head', 0), ('mlp', 12)]
    """
    return [
        Writer.parse(name.strip())
        for name in (names.split(",") if isinstance(names, str) else names)
    ]
