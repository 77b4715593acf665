"""A task: pairs of a dictionary's features, chosen on some words and tested on others."""

from __future__ import annotations

from dataclasses import replace

from qkscope import Dictionary
from qkscope.findings.head_rows import Pass, join_tables
from qkscope.findings.verdicts import says_right
from qkscope.results.result import Tables
from qkscope.texts.task import Units
from qkscope.verbs.trace.feature_pairs import FeatureTest, choose_features, says_pairs


def task_features(
    how: Pass, choosing: Units, units: Units, dictionary: Dictionary, draws: int
) -> tuple[str, Tables]:
    """Split each head's logit among features, beside meaningless copies: answer and tables.

    Parameters
    ----------
    how : the heads, and how prompts go through the model.
    choosing, units : prompts on which pairs are chosen, and on which they are tested.
    dictionary : on the model's device.
    draws : copies of each kind.
    """
    how = replace(how, layers=[dictionary.layer])
    chosen = choose_features(how, choosing, dictionary)
    tests = {}
    for head, features in chosen.items():
        tests[head] = FeatureTest(head, dictionary, features, draws, how.seed)
    measures = {head: test.measure for head, test in tests.items()}
    tallies, _ = how.add_up("features", units, measures, last=True)
    parts = []
    answers = []
    for head, test in tests.items():
        tables = test.tables(tallies[head])
        (check,) = tables["check"]
        answers.append(says_pairs(says_right(check), tables))
        parts.append(tables)
    return " ".join(answers), join_tables(parts)
