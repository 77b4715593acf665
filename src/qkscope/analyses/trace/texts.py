"""What tokens read as: characters whole, though a tokenizer may cut one into several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from qkscope.capture.scope import Scope

PIECE = "(part of a character)"


def token_texts(scope: Scope, ids: Sequence[int]) -> list[str]:
    """What each token reads as; a character cut in pieces is shown at its first piece, whole."""
    if scope.tokenizer is None:
        return [str(i) for i in ids]
    texts: list[str] = []
    at = 0
    while at < len(ids):
        end = at + 1
        text = scope.tokenizer.decode(ids[at:end])
        while text.endswith("�") and end < len(ids) and end - at < 8:
            end += 1
            text = scope.tokenizer.decode(ids[at:end])
        if text.endswith("�"):  # no character after all
            end, text = at + 1, PIECE
        texts += [text, *[""] * (end - at - 1)]
        at = end
    return texts
