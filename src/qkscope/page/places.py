"""Places that a link to a page can name: a head (``#L18H6``), a claim (``#claim-3``), a prompt (``#prompt-1``).

A head's place is the block that speaks of fewest heads; one that no block speaks of has a row of a table. A map of all
heads and an atlas have too many to write out: their scripts find the one that a link names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from typing import Any

from qkscope.page.block import Row

HEAD = re.compile(r"\bL\d+H\d+\b(?! is a head)")  # where words explain what a name like it means, they speak of none
_PROMPTS = ("tokens", "graph")  # blocks that show one
_SOUGHT = ("map", "atlas")  # blocks whose script finds a head


def heads_in(rows: Sequence[Row]) -> list[str]:
    """The heads that rows are of, and those that their lines name.

    >>> heads_in([{"head": "L2H0"}, {"line": "L1H1 looks at Mary, for what L0H3 wrote."}, {"head": None}])
    ['L2H0', 'L1H1', 'L0H3']
    """
    said = (str(row.get(column, "")) for row in rows for column in ("head", "line"))
    return list(dict.fromkeys(head for text in said for head in HEAD.findall(text)))


def name_places(sections: Sequence[dict[str, Any]]) -> None:
    """Give blocks the heads and the prompt that a link finds there, claims their number, and rows of tables a head."""
    blocks = [pair for section in sections for pair in section["blocks"]]
    of = {id(block): heads_in(block.rows) for block, _ in blocks}
    place: dict[str, int] = {}
    for block, _ in sorted(blocks, key=lambda pair: len(of[id(pair[0])])):
        for head in of[id(block)]:
            place.setdefault(head, id(block))
    prompts = count(1)
    for block, shown in blocks:
        shown["heads"] = [head for head in of[id(block)] if place[head] == id(block) and block.kind not in _SOUGHT]
        shown["id"] = f"prompt-{next(prompts)}" if block.kind in _PROMPTS else ""
    for number, claim in enumerate((claim for section in sections for claim in section["claims"]), 1):
        claim["id"] = f"claim-{number}"
    for table in (table for section in sections for table in section["tables"].values()):
        for i, row in enumerate(table["rows"]):
            head = str(row.get("head", ""))
            if HEAD.fullmatch(head) and head not in place:
                place[head] = i
                table["places"][i] = head
