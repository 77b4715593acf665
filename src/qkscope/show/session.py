"""What the live page asks of a model: the next token and who decides it, why a head looks
somewhere, and what if.

Answers are the results of `qkscope.why` and of `WhatIf`, with the blocks that a saved page draws of
them. A question names the prompt, the query token, the rival, the head and the key; a change is a
few words, so that the page's address is the whole state:

- ``ablate L17H8``: a head or an MLP puts out its mean over the other tokens;
- ``hide L18H6 4 13``: a head (here at token 13) may not look at a key (token 4);
- ``replace 9  Peter``: another token, or a character of as many pieces, stands there.

They are what `Scope` changes in a ``with`` block, so that the page can be copied as Python. Beside
them stand others of the same size: other heads of the layer, or the MLPs of other layers. What is
known early is told before the answer is whole, and every layer that runs asks whether somebody
still waits for it (`Session.told`).
"""

from __future__ import annotations

import base64
import operator
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkscope import BadInput, Result, Scope
from qkscope.checking import checked_class
from qkscope.findings.fit import Fit, load_fit
from qkscope.findings.fitted_features import default_features
from qkscope.findings.next_token import TOKENS, Output
from qkscope.findings.prompt_trace import AskedPrompt, PromptRun, PromptTrace, reader_of
from qkscope.findings.question import Question, Token
from qkscope.findings.swap_rows import check_swappable
from qkscope.findings.task_batches import check_same_model, made_with
from qkscope.findings.verdicts import verdict
from qkscope.heads import Head, Writer
from qkscope.linear.run import Run
from qkscope.model.tap import cleared
from qkscope.results.folder import RESULTS
from qkscope.show import counted
from qkscope.show.blocks import blocks_of
from qkscope.show.page import report_html
from qkscope.sums.subspace import Subspace
from qkscope.text import grouped
from qkscope.verbs.why.why import answer_circuit, answer_question

EXAMPLES = (
    "When Mary and John went to the store, John gave a drink to",
    "hat: O\njam: Z\ncat: B\npen: K\njam:",
    "The war lasted from the year 1743 to the year 17",
)
# tokens of a prompt, and of one whose whole patterns are shown
_LONGEST = 8192
_SQUARE = 2048
_TEXTS = 3  # of a head that a folder names
_OTHERS = 8  # heads or MLPs that take the place of one
_CHANGE = re.compile(  # more than nine digits are no place
    r"(ablate) (\S+)|(hide) (\S+) (\d{1,9}) (\d{1,9})|(replace) (\d{1,9}) (.+)", re.S
)
_GOES_ON = 5  # tokens of the continuation
_SMALL = 300  # tokens up to which a head's pattern comes with its answer
# runs, which are large, and answers that are kept
_RUNS = 2
_KEPT = 32
# seconds between two lines about what is under way, and of a run whose layers are told
_EVERY = 0.2
_LONG = 2.0

Tell = Callable[[dict[str, Any]], None]
Changes = Sequence[str]
Reply = dict[str, Any]
Call = tuple[str, tuple[Any, ...]]
"""A method of `Scope` that changes the model for a block, and its arguments."""


def read_features(folder: str | Path, scope: Scope) -> Result:
    """The fit that `decompose` wrote into a folder, or the rules of heads that `atlas` did."""
    result = features_result(folder)
    if result.experiment.startswith("decompose"):
        return cast(Fit, load_fit(folder, scope))
    check_same_model(result.provenance, scope, str(folder))
    return result


def features_result(folder: str | Path) -> Result:
    """Read what a folder knows of heads; one without features is refused."""
    if not (Path(folder) / RESULTS).is_file():
        raise BadInput(
            f"{folder} holds no features: name a folder that decompose or atlas wrote, or none."
        )
    result = Result.read(folder)
    verb = result.experiment.partition("/")[0]
    if verb not in ("decompose", "atlas"):
        raise BadInput(
            f"{folder} was written by {verb}: the live page takes folders of decompose or atlas."
        )
    return result


@checked_class
class Session:
    """A model that is looked into; its server asks one question at a time.

    Parameters
    ----------
    scope : the model.
    known : a fit, whose features split logits too, or an atlas, which has their rules.
    folder : that it was read from.
    """

    def __init__(self, scope: Scope, known: Result | None = None, folder: str = "") -> None:
        if scope.tokenizer is None:
            raise BadInput(
                f"{scope.name} has no tokenizer, so that no prompt can be typed: add one to its folder."
            )
        self.scope = scope
        self.heads = list(scope.heads())
        self.folder = folder
        self.features = dict[str, dict[str, Subspace]]()
        if isinstance(known, Fit):
            check_swappable(known.space, downstream=True)
            names = default_features(known.contrasts)
            self.features = {
                str(head): {name: known[name, head] for name in names} for head in known.heads
            }
        tables = {} if known is None else known.tables
        self.about = {
            row["head"]: row for row in tables.get("heads", ()) if "rule" in row
        }  # by head its rule, with more
        self.texts = grouped(tables.get("examples", ()), lambda row: row["head"])
        self.tell: Tell = lambda early: None
        self.doing: Callable[[int], str] = str
        self._kept_probe = lru_cache(_RUNS)(partial(PromptRun, scope))
        self._kept_answer = lru_cache(_KEPT)(self._answer)
        reader_of(scope)  # a model whose writers cannot be told apart is refused

    @contextmanager
    def told(self, tell: Tell) -> Iterator[None]:
        """Tell what is known early, and how far the work is; every layer that runs asks, so that
        raising ends it.
        """
        runs = 0
        last = 0.0
        begun = 0.0

        def step(_module: Any, _args: Any, given: dict[str, Any]) -> None:
            nonlocal runs, begun
            ids = given.get("input_ids")
            begun = time.monotonic()
            runs += 1 if ids is None else len(ids)
            layer(0)

        def layer(number: int, *_: Any) -> None:
            nonlocal last
            now = time.monotonic()
            far = f", layer {number + 1} of {self.scope.n_layers}" if now - begun > _LONG else ""
            early, last = (
                ({"doing": self.doing(runs) + far}, now) if now - last > _EVERY else ({}, last)
            )
            tell(early)

        self.tell = tell
        self.doing = lambda runs: f"{counted(runs, 'run')} of the model"
        lists = [part for part in self.scope.model.modules() if isinstance(part, nn.ModuleList)]
        blocks = next((part for part in lists if len(part) == self.scope.n_layers), ())
        hooks = [self.scope.model.base_model.register_forward_pre_hook(step, with_kwargs=True)]
        try:
            hooks += [
                block.register_forward_pre_hook(partial(layer, i)) for i, block in enumerate(blocks)
            ]
            with cleared(hooks):
                yield
        finally:
            self.tell = lambda early: None

    def describe(self) -> dict[str, Any]:
        """The model, its heads, and what is known of them already."""
        return {
            "model": self.scope.name, "heads": [str(head) for head in self.heads], "examples": EXAMPLES,
            "fitted": list(self.features), "folder": self.folder,
            "names": {head: row["kind"] for head, row in self.about.items()},
        }  # fmt: skip

    def look(
        self, prompt: str, query: int | None = None, versus: str | None = None
    ) -> dict[str, Any]:
        """Tokens, the next one and its rival, the attention of every head (a byte each), and which
        heads decide.
        """
        question = Question(self.scope, prompt, query=query, rival=versus)
        probe = self.ask(question)
        asked = probe.asked
        output = question.output(probe)
        seen = {
            "tokens": asked.tokens,
            "query": asked.query,
            "attention": _bytes(self.rows(output)[:, : asked.query + 1]),
        }

        def following(reads: Callable[[int], str]) -> dict[str, Any]:
            best = [*output.chances.topk(TOKENS).indices.tolist(), output.rival]
            told = [
                {"token": reads(i), "id": i, "probability": float(output.chances[i])} for i in best
            ]
            return {"next": told[:-1], "rival": told[-1], "difference": output.difference}

        self.tell({"early": {**seen, **following(output.token)}})
        self.doing = lambda runs: f"{min(runs, len(self.heads))} of {len(self.heads)} heads tried"
        result = answer_question(question, probe).to_json()
        last = len(asked.tokens) - 1
        says = self.scope.generate(prompt, _GOES_ON) if asked.query == last < _SMALL else ""
        return {**seen, **following(lambda i: output.name(i)[0]), "result": result, "says": says}

    def rows(self, output: Output) -> Float[Tensor, "h t"]:
        """Every head's attention from the token that asks."""
        return torch.cat(
            [output.again.row(output.asked.query, head).attention()[0].cpu() for head in self.heads]
        )

    def why(
        self, prompt: str, query: int, head: str, key: int | None = None, versus: str | None = None
    ) -> Reply:
        """Why a head looks from one token at another: the result of `why`, and what folders know of
        the head.
        """
        trace = self._trace(prompt, query, head, key)
        result = self._kept_answer(prompt, trace.asked.query, head, trace.key, versus)
        about = self.about.get(str(trace.head))
        texts = self.texts.get(str(trace.head), [])
        on_text = {"texts": texts[:_TEXTS], "about": f"On text: {about['rule']}." if about else ""}
        return {**_shown(result), **_where(trace), **on_text}

    def circuit(self, prompt: str, query: int, versus: str | None = None) -> Reply:
        """The circuit from a prompt's answer back to its words."""
        question = Question(self.scope, prompt, query=query, rival=versus)
        return _shown(answer_circuit(question, self.ask(question)))

    def change(
        self,
        prompt: str,
        query: int,
        head: str,
        key: int,
        changes: Changes,
        versus: str | None = None,
    ) -> Reply:
        """The head's row with some changes made, all heads after it and the next token, beside
        other changes.
        """
        what_if = WhatIf(self, prompt, self._trace(prompt, query, head, key), changes, versus)
        self.doing = lambda runs: f"changed: {counted(runs, 'run')}"
        result, rows = what_if.result()
        row = rows[self.heads.index(what_if.trace.head)].tolist()
        told = {
            "words": what_if.words,
            "calls": what_if.calls,
            "row": row,
            "attention": _bytes(rows),
        }
        return {**_shown(result), **told}

    def what_if(
        self,
        prompt: str,
        query: Token | None,
        head: str,
        key: Token | None,
        changes: Changes,
        versus: str | None = None,
    ) -> Result:
        """What some changes do to a head's attention and to the next token, beside other changes."""
        trace = self._trace(prompt, query, head, key)
        return WhatIf(self, prompt, trace, changes, versus).result()[0]

    def patterns(self, prompt: str, heads: Sequence[str]) -> dict[str, Any]:
        """The whole attention pattern of some heads [t, t], a byte each."""
        probe = self.ask(Question(self.scope, prompt))
        if len(probe.asked.tokens) > _SQUARE:
            raise BadInput(
                f"a whole pattern is drawn of at most {_SQUARE} tokens: ask about a shorter prompt."
            )
        return {"patterns": {head: _pattern(probe.run, self.scope.check(head)) for head in heads}}

    def save(
        self,
        prompt: str,
        query: int,
        head: str,
        key: int,
        changes: Changes = (),
        versus: str | None = None,
    ) -> Reply:
        """One offline page of the answer, and of the changes."""
        trace = self._trace(prompt, query, head, key)
        result = self._kept_answer(prompt, query, head, key, versus)
        asked = {
            "head": head,
            "query": query,
            "key": key,
            "versus": versus,
            "model": self.scope.name,
        }
        options = [f"--{name}={value}" for name, value in asked.items() if value is not None]
        told = {**result.provenance, "command": shlex.join(["qkscope", "why", prompt, *options])}
        changed = [WhatIf(self, prompt, trace, changes, versus).result()[0]] if changes else []
        title = f"{trace.head} → {trace.asked.tokens[trace.key].strip()}"
        html = report_html([replace(result, provenance=told), *changed], title=title)
        return {"html": html, "name": f"why-{trace.head}.html"}

    # ------------------------------------------------------------------ runs and answers, the last
    # few kept

    def ask(self, question: Question) -> PromptRun:
        """Run the prompt of a question, which was typed; a run of the last few is kept."""
        prompt = question.prompt
        assert isinstance(prompt, str)
        if not prompt.strip():
            raise BadInput("the prompt is empty: type a few words.")
        asked = AskedPrompt.of(self.scope, prompt, question.place(question.query), chat=False)
        limit = (
            getattr(self.scope.model.config.get_text_config(), "max_position_embeddings", None)
            or _LONGEST
        )
        if len(asked.tokens) > (longest := min(_LONGEST, limit)):
            raise BadInput(
                f"the prompt has {len(asked.tokens)} tokens: at most {longest} are looked at here."
            )
        return self._kept_probe(prompt, asked.query)

    def _trace(self, prompt: str, query: Token | None, head: str, key: Token | None) -> PromptTrace:
        question = Question.of(self.scope, prompt, self.scope.check(head), query=query, key=key)
        return question.look(self.ask(question))

    def _answer(self, prompt: str, query: int, head: str, key: int, versus: str | None) -> Result:
        """Why one head looks at one token; where it looks is told at once."""
        question = Question.of(
            self.scope, prompt, self.scope.check(head), query=query, key=key, rival=versus
        )
        probe = self.ask(question)
        trace = question.look(probe)
        features = self.features.get(str(trace.head), {})
        self.tell({"early": {**_where(trace), "answer": trace.where()}})
        self.doing = lambda runs: f"changing words, {counted(runs, 'run')} of the model"
        return answer_question(question, probe, features or None)


def _where(trace: PromptTrace) -> dict[str, Any]:
    """A head's row of attention, and the token it is asked about."""
    query = trace.asked.query
    pattern = _pattern(trace.run, trace.head) if len(trace.asked.tokens) <= _SMALL else None
    row = trace.attention[: query + 1].tolist()
    return {
        "head": str(trace.head),
        "query": query,
        "key": trace.key,
        "row": row,
        "pattern": pattern,
    }


def _pattern(run: Run, head: Head) -> str:
    return _bytes(run.calls[head.layer].attention([head.index])[0, 0])


def _shown(result: Result) -> dict[str, Any]:
    """A result as JSON, and the blocks that a page draws of it."""
    return {"result": result.to_json(), "blocks": [block.to_json() for block in blocks_of(result)]}


def _bytes(attention: Float[Tensor, "h t"]) -> str:
    """A byte for each number, as the page reads them."""
    return base64.b64encode(
        (attention * 255).round().to(torch.uint8).cpu().numpy().tobytes()
    ).decode()


class WhatIf:
    """A prompt with some changes made, beside changes of the same size.

    Parameters
    ----------
    session : whose model.
    prompt : the prompt.
    trace : one head's row.
    changes : the words of each.
    versus : the rival of the next token.
    """

    def __init__(
        self,
        session: Session,
        prompt: str,
        trace: PromptTrace,
        changes: Sequence[str],
        versus: str | None = None,
    ) -> None:
        self.session = session
        self.scope = session.scope
        self.prompt = prompt
        self.texts = list(dict.fromkeys(changes))  # equal changes are one
        self.trace = trace
        self.output = Output(trace.run, trace.asked, versus)
        self.calls: list[Call] = []
        self.words = [self._parse(text) for text in self.texts]

    def _parse(self, text: str) -> str:
        """Take up one change; returns it as a sentence names it."""
        found = _CHANGE.fullmatch(text)
        tokens = self.trace.asked.tokens
        match [] if found is None else [group for group in found.groups() if group is not None]:
            case ["ablate", writer]:
                self.calls.append(("ablate", (writer,)))
                return f"{writer} ablated"
            case ["hide", head, key, query]:
                self.calls.append(("hide", (head, int(key), int(query))))
                return (
                    f"{''.join(tokens[int(key) : int(key) + 1])!r} (token {key}) hidden from {head}"
                )
            case ["replace", place, other]:
                at = int(place)
                ids = self.scope.tokenizer(other, add_special_tokens=False)["input_ids"]
                size = 1 + sum(
                    1 for _ in takewhile(operator.not_, tokens[at + 1 :])
                )  # pieces of one character
                if len(ids) != size:
                    sizes = f"{other!r} is {counted(len(ids), 'token')} here, and what it replaces is {size}"
                    raise BadInput(
                        f"{sizes}: take a word of as many, so that nothing moves, or change the prompt."
                    )
                self.calls += [
                    ("replace", (at + i, other if size == 1 else ids[i])) for i in range(size)
                ]
                return f"{''.join(tokens[at : at + 1])!r} (token {at}) replaced by {other!r}"
        raise BadInput(f"a change is ablate, hide or replace, but got {text[:60]!r}.")

    def result(self) -> tuple[Result, Float[Tensor, "h t"]]:
        """What changes do to the row and to the next token, beside others; and every head's row."""
        trace = self.trace
        key = self.trace.key
        output = self.output
        place = self.session.heads.index(trace.head)
        best = output.best
        rival = output.rival
        (rows, logits), *others = [self._run(calls) for calls in (self.calls, *self._alike())]
        left = [float(each[place, key]) for each, _ in others]
        apart = [
            float(each[best] - each[rival]) for each in (logits, *(other for _, other in others))
        ]
        before = float(trace.attention[key])
        after = float(rows[place, key])
        old = output.chances
        new = logits.softmax(-1)
        own = any(
            given[0] == str(trace.head) for _, given in self.calls
        )  # says nothing of where it looks by itself
        made = {
            "head": str(trace.head), "changes": "; ".join(self.words), "before": before, "after": after,
            "control_low": min(left, default=None), "control_high": max(left, default=None), "sets": len(left),
            "verdict": verdict(before, after, torch.tensor(left)) if left and not own else None,
            "answer": output.name(best)[0], "rival": output.name(rival)[0],
            "difference": output.difference, "difference_after": apart[0],
            "difference_low": min(apart[1:], default=None), "difference_high": max(apart[1:], default=None),
            "probability": float(old[best]), "probability_after": float(new[best]),
        }  # fmt: skip
        shown = dict.fromkeys(
            [*(i for each in (old, new) for i in each.topk(TOKENS).indices.tolist()), rival]
        )
        said = [
            {"token": output.token(i), "before": float(old[i]), "after": float(new[i])}
            for i in shown
        ]
        asked = {
            "head": str(trace.head),
            "query": trace.asked.query,
            "key": key,
            "changes": self.texts,
        }
        told = made_with(self.scope, tokenizer=self.scope.tokenizer_hash, **asked)
        return Result(
            "what if", {"changes": [made], "next": said}, answer=self._sentence(made), **told
        ), rows

    def _sentence(self, row: Mapping[str, Any]) -> str:
        low = row["control_low"]
        high = row["control_high"]
        seen = f" (control: {low:.0%} to {high:.0%}): {row['verdict']}" if row["verdict"] else ""
        low = row["difference_low"]
        high = row["difference_high"]
        beside = (
            f" (control: {low:.1f} to {high:.1f}, {row['sets']} others in its place)"
            if row["sets"]
            else ""
        )
        return (
            f"With {row['changes']}: attention of {row['head']} on {self.trace.token(self.trace.key)} goes from "
            f"{row['before']:.0%} to {row['after']:.0%}{seen}. {row['answer']!r} goes from {row['probability']:.1%} to "
            f"{row['probability_after']:.1%}, its logit over {row['rival']!r} from {row['difference']:.1f} to "
            f"{row['difference_after']:.1f}{beside}."
        )

    def _run(self, calls: Sequence[Call]) -> tuple[Float[Tensor, "h t"], Float[Tensor, " v"]]:
        """Every head's row and the next token's logits, with such changes in force."""
        with ExitStack() as stack:
            for name, given in calls:
                stack.enter_context(getattr(self.scope, name)(*given))
            probe = PromptRun(self.scope, self.prompt, self.trace.asked.query, last=0)
            output = Output(probe.run, probe.asked)
            return self.session.rows(output), output.logits

    def _alike(self) -> Iterator[list[Call]]:
        """The control: the same change at another head of the layer, or at the MLP of another
        layer.
        """
        for at, (name, (writer, *rest)) in [
            each for each in enumerate(self.calls) if each[1][0] != "replace"
        ][:1]:
            mine = Writer.parse(writer)
            near = sorted(range(self.scope.n_layers), key=lambda layer: abs(layer - mine.layer))[1:]
            others = [
                str(head)
                for head in self.session.heads
                if head.layer == mine.layer and head != mine.head
            ]
            for other in (others if mine.head else [f"M{layer}" for layer in near])[:_OTHERS]:
                yield [*self.calls[:at], (name, (other, *rest)), *self.calls[at + 1 :]]
