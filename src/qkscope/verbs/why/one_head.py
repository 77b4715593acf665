"""One head at one query: where it looks, because of which words, carried by whom, to what effect."""

from __future__ import annotations

import torch

from qkscope.changes import Row
from qkscope.findings.because import Because
from qkscope.findings.carriers import Carriers
from qkscope.findings.finding import Look, Reason
from qkscope.findings.graph import trace_graph
from qkscope.findings.next_token import Output
from qkscope.findings.prompt_trace import PromptTrace
from qkscope.findings.registry import breaks_on_average, relation_row
from qkscope.findings.verdicts import no_sum
from qkscope.results.progress import doing
from qkscope.results.result import Rows, Tables
from qkscope.verbs.why import sentences

_RUNS = 4  # alternatives of the word whose share of the answer is measured


def one_head(
    look: PromptTrace, output: Output, parts: Rows, depth: int, draws: int, seed: int
) -> tuple[str, Tables]:
    """Answer why a head looks at its key: a sentence, and the tables behind it.

    Parameters
    ----------
    look : the head, its query and its key.
    output : the next token and its rival.
    parts : the logit split in other ways.
    depth : levels of the graph of writers and what they read.
    draws : random writers beside each cut.
    seed : of these, and of words that replace others.
    """
    check = [{"head": str(look.head), "sum_error": look.tally.error, "logit": look.total}]
    effects = output.rows(look)
    wrong = no_sum(look.head, look.tally.error, output.scope.model.dtype)
    if wrong is not None:
        lines = [sentences.where_line(look), sentences.does_line(effects)]
        tables = {"attention": look.token_rows(), "output": effects, "check": check}
        return wrong, {"said": _lines(lines), **tables}
    because = None
    reason = None
    carriers = Rows()
    returns = Rows()
    has_words = output.scope.tokenizer is not None
    with doing("changing words") as say:
        if look.attends and look.key and has_words:
            because = Because(output.again, [Look(look.head, look.asked.query, look.key)], seed)
            reason = because.reasons()[0]
            say("putting writers back")
            carriers = Carriers(look.run, because, reason, seed).rows()
            returns = share_of_answer(look, output, because, reason)
        say("cutting writers")
        cuts = look.cut_rows(draws, seed, live=True)
        graph = trace_graph(look, depth)
    tables = {
        "attention": look.token_rows(),
        "because": reason.words if reason else [],
        "words": reason.replaced if reason else [],
        "relation": [relation_row(finding) for finding in reason.findings] if reason else [],
        "carriers": carriers,
        "parts": parts,
        "writers": look.tally.writer_rows(look.head, look.writers),
        "cuts": cuts,
        "output": effects,
        "returns": returns,
        **graph.tables,
        "check": check,
    }
    lines = sentences.lines_of(look, because, reason, tables)
    answer = sentences.answer_of(look, reason, output, tables)
    filled = {name: rows for name, rows in tables.items() if rows}
    return answer, {"said": _lines(lines), **filled}


def _lines(lines: list[str]) -> Rows:
    return [{"line": line} for line in lines]


@torch.no_grad()
def share_of_answer(look: PromptTrace, output: Output, because: Because, reason: Reason) -> Rows:
    """Replace the strongest word, with and without this head's attention row as it was before.

    What the row alone brings back of the answer's probability is the reason's share of the answer.
    """
    causes = [
        row
        for row in reason.words
        if breaks_on_average(row, reason.before) and row["text"].strip().isalnum()
    ]
    if not causes:
        return []
    word = next(word for word in because.words if word.start == causes[0]["position"])
    changes = because.alternatives(word)[:_RUNS]
    prompts = torch.stack([because.with_change(change) for change in changes])
    stops = torch.full((len(prompts),), look.asked.query + 1)
    runs = because.running(prompts, stops).any(0)
    row_before = Row(look.head, look.asked.query, look.rows.logits()[0, 0])
    reruns = because.again.run(
        prompts.repeat_interleave(2, dim=0),
        runs.expand(2 * len(prompts), -1),
        rows=[[], [row_before]] * len(prompts),
        logits=True,
    )
    assert reruns.logits is not None
    chances = reruns.logits.float().softmax(-1)[:, output.best]
    changed, restored = chances.view(-1, 2).mean(0).tolist()
    return [
        {
            "head": str(look.head),
            "position": word.start,
            "text": word.text,
            "token": output.name(output.best)[0],
            "before": float(output.chances[output.best]),
            "changed": changed,
            "restored": restored,
        }
    ]
