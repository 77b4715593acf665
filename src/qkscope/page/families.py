"""Families of names: what kind of thing a head goes by, one colour for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkscope.analyses.names.readings import AFTER_COPY, COPY, SAME_BEFORE
from qkscope.maths.factors import MEAN

FAMILIES = {
    "distance": "how far back a key stands",
    "certain keys": "the same keys, whatever asks",
    "same token": "keys that share a token with the asking place",
    "after a copy": "what followed an earlier copy of the asking token",
    "token pairs": "certain tokens for certain tokens",
    "not named": "nothing that can be read off the text",
}
"""What heads of each go by."""
_RULED = {COPY: "same token", SAME_BEFORE: "same token", AFTER_COPY: "after a copy"}


def family_of(row: Mapping[str, Any]) -> str:
    """The family of a head that was named.

    >>> family_of({"block": "current · previous", "rule": "after a copy"})
    'after a copy'
    >>> family_of({"block": "current · previous", "rule": None}), family_of({"block": None, "rule": None})
    ('token pairs', 'not named')
    """
    return _RULED.get(row["rule"]) or block_family(*(row["block"] or " · ").split(" · "))


def block_family(query: str, key: str) -> str:
    """The family of a block, whatever rule a head keeps.

    >>> block_family("mean", "mean"), block_family("start", "mean"), block_family("mean", "current")
    ('distance', 'distance', 'certain keys')
    """
    if not query:
        return "not named"
    if key == MEAN:
        return "distance"
    return "certain keys" if query == MEAN else "token pairs"
