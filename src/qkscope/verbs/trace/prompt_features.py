"""One prompt: the largest pairs of a dictionary's features among which a head's logit is split."""

from __future__ import annotations

from collections.abc import Iterable

from qkscope import Dictionary
from qkscope.findings.head_rows import HeadRows, join_tables
from qkscope.findings.prompt_trace import PromptTrace
from qkscope.results.result import Tables
from qkscope.sums.relative_logits import Tally
from qkscope.verbs.trace.feature_pairs import FeatureSplit, FeatureTest, largest, says_pairs


def prompt_features(
    traces: Iterable[PromptTrace], dictionary: Dictionary, draws: int, seed: int
) -> tuple[str, Tables]:
    """Split each head's logit among features, beside meaningless copies: answer and tables.

    Parameters
    ----------
    traces : heads on one prompt.
    dictionary : on the model's device.
    draws, seed : of copies of each kind.
    """
    answers = list[str]()
    parts = list[Tables]()
    for one in traces:
        tables = _tables(one, dictionary, draws, seed)
        answers.append(says_pairs(one.where(), tables))
        parts.append(tables)
    return " ".join(answers), join_tables(parts)


def _tables(one: PromptTrace, dictionary: Dictionary, draws: int, seed: int) -> Tables:
    """The tables of one head, measured at the query and the keys that count alone."""
    used = one.weights[0].nonzero()[:, 0]
    run = one.run.slots([0, *(1 + used).tolist()])
    signs = one.signs[:, used]
    rows = HeadRows(run, one.head, signs, one.projector)
    chosen = largest(FeatureSplit(rows, dictionary).terms())
    test = FeatureTest(one.head, dictionary, chosen, draws, seed)
    measurement = test.measure(rows, [0])
    tables = test.tables(Tally.of_prompt(measurement))
    (check,) = tables["check"]
    check |= {"query": one.asked.query, "key": one.key}
    return {**tables, "tokens": one.token_rows()}
