"""Addresses: an attention head (``L18H6``), and upstream components of the stream (``M9``).

A `Writer` is anything that adds to the residual stream: the embedding, a head, an MLP, one neuron
of an MLP (``M9.N120``), or all biases together.
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
Side = Literal["query", "key"]
"""Of a row of attention: who looks, and what is looked at."""
Center = Literal["none", "query"]
"""What is taken out of a contrast: nothing, or what the mean query sees."""
_LAST = 10_000  # the layer of the biases: beyond every layer of a model


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
        """Index of the key head that this query head reads under grouped-query attention.

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
    if isinstance(heads, str):
        names: Iterable[str | Head] = [part for part in heads.split(",") if part.strip()]
    elif isinstance(heads, Head):
        names = [heads]
    else:
        names = heads
    parsed = [Head.parse(name) for name in names]
    if not parsed:
        raise BadInput("no head was named: write heads like L18H6,L17H5.")
    for head, count in Counter(parsed).items():
        if count > 1:
            raise BadInput(f"{head} is named twice: name each head once.")
    return parsed


@checked_class
@dataclass(frozen=True, order=True)
class Writer:
    """Upstream component: what adds to the residual stream; sorted in the order of adding.

    The embedding comes first and biases last.

    Parameters
    ----------
    layer : in which it writes; -1 for the embedding.
    kind : of writer; ``mlp`` is any part of a block besides its heads.
    index : of a head in its layer; of an MLP where its block has several; of a neuron, after that
        of its MLP.

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
        if text == EMBEDDING:
            return cls(-1, "embedding")
        if text == BIAS:
            return cls(_LAST, "bias")
        match = _PART.fullmatch(text)
        if match is None:
            raise BadInput(
                f"{text[:40]!r} is not a writer: "
                "write a head as L17H8, an MLP as M9, a neuron as M9.N120."
            )
        layer, *indices = match.groups()
        index = tuple(int(number) for number in indices if number is not None)
        is_neuron = match[3] is not None
        return cls(int(layer), "neuron" if is_neuron else "mlp", index)

    @property
    def head(self) -> Head | None:
        """The head, if the writer is one; else None."""
        if self.kind != "head":
            return None
        return Head(self.layer, *self.index)

    @property
    def mlp(self) -> Writer:
        """The MLP whose neuron it is."""
        return Writer(self.layer, "mlp", self.index[:-1])

    @property
    def block(self) -> int | None:
        """The layer that the writer belongs to; None for the embedding and the biases."""
        if self.kind in (EMBEDDING, BIAS):
            return None
        return self.layer

    def __str__(self) -> str:
        if self.kind == "neuron":
            return f"{self.mlp}.N{self.index[-1]}"
        if self.kind == "mlp":
            return ".".join([f"M{self.layer}", *map(str, self.index)])
        if self.kind == "head":
            return str(self.head)
        return self.kind

    def __repr__(self) -> str:
        return f"Writer {self}"


def parse_writers(names: str | Iterable[str]) -> list[Writer]:
    """Read several writers, or ``"M9.N120,M8.N7"``.

    >>> [(writer.kind, writer.layer) for writer in parse_writers(["embedding", "L0H0", "M12.1"])]
    [('embedding', -1), ('head', 0), ('mlp', 12)]
    """
    if isinstance(names, str):
        names = names.split(",")
    return [Writer.parse(name.strip()) for name in names]
