"""A pair of prompts: what differs between a clean and a corrupted one, a span at a time.

Each span of tokens that differs is put into the clean prompt alone, and all of them together (which
is the corrupted prompt). What a head's attention, and the answer's lead over its rival, become then
says which difference matters: a counterfactual that somebody wrote, beside the words that are drawn.
"""

from __future__ import annotations

from qkscope.changes import Words, together
from qkscope.findings.next_token import Output
from qkscope.findings.prompt_trace import PromptTrace
from qkscope.findings.question import Question, same_places
from qkscope.model.encode import token_texts
from qkscope.rerun.executor import rerun
from qkscope.results.result import Rows

ALL = "all"
"""The span of a pair that is every difference together."""


def pair_rows(question: Question, output: Output, look: PromptTrace | None = None) -> Rows:
    """The table ``pair``: the clean prompt with each span of the corrupted one, then with all.

    Parameters
    ----------
    question : with both prompts.
    output : of the clean prompt.
    look : one head in it, whose attention is read as well.
    """
    assert question.corrupted is not None
    scope = question.scope
    spans = same_places(scope, question.prompt, question.corrupted, question.chat)
    encoded = scope.encode([question.corrupted], chat=question.chat)
    other = [int(token) for token in encoded.inputs["input_ids"][0]]
    spans = [(start, stop) for start, stop in spans if start <= output.asked.query]
    each = [Words(tuple(range(a, b)), tuple(other[a:b])) for a, b in spans]
    changes = [*each, together(*each)] if len(each) > 1 else each
    reads = [] if look is None else [(look.head, look.asked.query)]
    runs = rerun(
        output.again, [[change] for change in changes], reads, end=output.asked.query, logits=True
    )
    assert runs.logits is not None
    logits = runs.logits.float().cpu()
    leads = logits[:, output.best] - logits[:, output.rival]
    chances = logits.softmax(-1)[:, output.best]
    rows = Rows()
    for number, change in enumerate(changes):
        here = [output.asked.tokens[place] for place in change.places]
        is_all = number >= len(each)
        row = {
            "positions": ", ".join(map(str, change.places)),
            "text": ALL if is_all else "".join(here),
            "corrupted": "" if is_all else "".join(token_texts(scope, list(change.tokens))),
            "lead_before": output.difference,
            "lead": float(leads[number]),
            "before": float(output.chances[output.best]),
            "probability": float(chances[number]),
        }
        if look is not None:
            row["head"] = str(look.head)
            row["attention_before"] = float(look.attention[look.key])
            row["attention"] = float(runs.attention[number, 0, look.key])
        rows.append(row)
    return rows
