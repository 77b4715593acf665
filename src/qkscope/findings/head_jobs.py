"""What a head does in one look, in the field's words, and what heads of known models do on text.

A *job* is the reason of a look (`qkscope.findings.because`) under the name that the field gives it:
*induction*, *duplicate token*, *previous token*, another fixed *position*, *self*, *key word*, and
so on. Atlases of some models ship beside this file (``atlas-*.json``): each head's jobs, with
shares of its looks on plain text.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from qkscope.findings.finding import Look, Reason
from qkscope.findings.relations import few_or_none

INDUCTION = "induction"
DUPLICATE = "duplicate token"
PREVIOUS = "previous token"
PUNCTUATION = "punctuation"


def job_of(reason: Reason) -> str:
    """The job of a head in one look."""
    look = reason.look
    if reason.kind == "same word":
        return _copy_job(reason)
    if reason.kind == "position":
        return _position_job(look)
    if reason.kind in ("self", "no single word"):
        return reason.kind
    at_key = [row for row in reason.causes if row["position"] <= look.key < row["end"]]
    at_query = [row for row in reason.causes if row["position"] <= look.query < row["end"]]
    if at_key and at_query:
        return "key and query words"
    if at_key:
        return "key word" if any(map(str.isalnum, at_key[0]["text"])) else PUNCTUATION
    if at_query:
        return "query word"
    return few_or_none(reason.causes).kind


def _copy_job(reason: Reason) -> str:
    """Where the key stands beside the earlier of two equal words: on it, or just behind it."""
    key = reason.look.key
    start = reason.shown[0].positions[0]
    end = reason.end_of(start)
    if start <= key < end:
        return DUPLICATE
    if end <= key <= end + 1:
        return INDUCTION
    return reason.kind


def _position_job(look: Look) -> str:
    """A fixed distance from the query, as an offset below 0."""
    offset = look.key - look.query
    return PREVIOUS if offset == -1 else f"position {offset}"


@cache
def known_jobs(weights: str) -> dict[str, dict[str, float]]:
    """By head of a shipped atlas, the share of its looks that each job has; empty without an atlas.

    Parameters
    ----------
    weights : hash of the model's weights.
    """
    for path in sorted(Path(__file__).parent.glob("atlas-*.json")):
        shipped = json.loads(path.read_text("utf-8"))
        if shipped["made"]["asked"]["weights"] == weights:
            return {row["head"]: row["jobs"] for row in shipped["heads"]}
    return {}
