"""Whole attention patterns of some heads, to look at: in a notebook, or on a page."""

from __future__ import annotations

from collections.abc import Sequence

from qkscope import BadInput, Example, Result, Scope
from qkscope.checking import checked_call
from qkscope.heads import Head, parse_heads

_MOST = 256  # tokens of a pattern whose rows are kept one by one


@checked_call
def show_pattern(
    scope: Scope, prompt: str | Example, heads: str | Head | Sequence[str | Head]
) -> Result:
    """Draw the attention patterns of some heads: a notebook shows them, `write_report` writes a page.

    Parameters
    ----------
    scope : the model; the changes of blocks around are in force.
    prompt : a text, or an example.
    heads : one or several, like ``"L18H6,L23H0"``.

    Examples
    --------
    >>> import qkscope as qk
    >>> shown = qk.show_pattern(Scope.load("nano:mixed"), "hat: O jam:", "L1H0,L2H3")
    >>> len(shown.tables["pattern"])  # 2 heads, 6 tokens with as many as they see
    42
    """
    tokens = scope.tokens(prompt)
    if len(tokens) > _MOST:
        raise BadInput(
            f"the prompt has {len(tokens)} tokens: a whole pattern is drawn of at most {_MOST}."
        )
    chosen = [scope.check(head) for head in parse_heads(heads)]
    rows = []
    for head in chosen:
        pattern = scope.attention(prompt, head).tolist()
        for query, row in enumerate(pattern):
            for key in range(query + 1):
                rows.append({
                    "head": str(head), "query": query, "key": key, "token": tokens[key],
                    "attention": row[key],
                })  # fmt: skip
    names = ", ".join(map(str, chosen))
    answer = f"Attention of {names} on {len(tokens)} tokens, from each (row) to those before it."
    return Result("pattern", {"pattern": rows}, model=scope.name, answer=answer)
