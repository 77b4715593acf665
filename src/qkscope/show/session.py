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
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from qkscope.findings.verdicts import SAID_OF_CUTS, verdict
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


class Call(NamedTuple):
    """A method of `Scope` that changes the model for a block, and its arguments."""

    method: str
    given: tuple[Any, ...]


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
                f"{scope.name} has no tokenizer, so that no prompt can be typed: "
                "add one to its folder."
            )
        self.scope = scope
        self.heads = list(scope.heads())
        self.folder = folder
        self.features = dict[str, dict[str, Subspace]]()
        if isinstance(known, Fit):
            check_swappable(known.space, downstream=True)
            names = default_features(known.contrasts)
            for head in known.heads:
                self.features[str(head)] = {name: known[name, head] for name in names}
        tables = {} if known is None else known.tables
        # by head its rule, with more
        self.about = {row["head"]: row for row in tables.get("heads", ()) if "rule" in row}
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
            early: dict[str, Any] = {}
            if now - last > _EVERY:
                last = now
                early["doing"] = self.doing(runs)
                if now - begun > _LONG:
                    early["doing"] += f", layer {number + 1} of {self.scope.n_layers}"
            tell(early)

        self.tell = tell
        self.doing = lambda runs: f"{counted(runs, 'run')} of the model"
        base = self.scope.model.base_model
        hooks = [base.register_forward_pre_hook(step, with_kwargs=True)]
        try:
            for i, block in enumerate(self._blocks()):
                hooks.append(block.register_forward_pre_hook(partial(layer, i)))
            with cleared(hooks):
                yield
        finally:
            self.tell = lambda early: None

    def _blocks(self) -> Sequence[nn.Module]:
        """The model's list of blocks; empty where no list has one for each layer."""
        for part in self.scope.model.modules():
            if isinstance(part, nn.ModuleList) and len(part) == self.scope.n_layers:
                return cast(Sequence[nn.Module], part)
        return ()

    def describe(self) -> dict[str, Any]:
        """The model, its heads, and what is known of them already."""
        names = {head: row["kind"] for head, row in self.about.items()}
        return {
            "model": self.scope.name,
            "heads": [str(head) for head in self.heads],
            "examples": EXAMPLES,
            "fitted": list(self.features),
            "folder": self.folder,
            "names": names,
        }

    def look(
        self, prompt: str, query: int | None = None, versus: str | None = None
    ) -> dict[str, Any]:
        """Tokens, the next one and its rival, the attention of every head (a byte each), and which
        heads decide.
        """
        question = self._about_next(prompt, query=query, rival=versus)
        probe = self.ask(question)
        asked = probe.asked
        output = question.output(probe)
        attention = self.rows(output)[:, : asked.query + 1]
        seen = {"tokens": asked.tokens, "query": asked.query, "attention": _bytes(attention)}

        def following(reads: Callable[[int], str]) -> dict[str, Any]:
            best = output.chances.topk(TOKENS).indices.tolist()
            told = []
            for i in [*best, output.rival]:
                probability = float(output.chances[i])
                told.append({"token": reads(i), "id": i, "probability": probability})
            return {"next": told[:-1], "rival": told[-1], "difference": output.difference}

        self.tell({"early": {**seen, **following(output.token)}})
        heads = len(self.heads)
        self.doing = lambda runs: f"{min(runs, heads)} of {heads} heads tried"
        result = answer_question(question, probe).to_json()
        last = len(asked.tokens) - 1
        says: Tensor | str = ""
        if asked.query == last < _SMALL:
            says = self.scope.generate(prompt, _GOES_ON)
        named = following(lambda i: output.name(i)[0])
        return {**seen, **named, "result": result, "says": says}

    def rows(self, output: Output) -> Float[Tensor, "h t"]:
        """Every head's attention from the token that asks."""
        rows = []
        for head in self.heads:
            row = output.again.row(output.asked.query, head)
            rows.append(row.attention()[0].cpu())
        return torch.cat(rows)

    def why(
        self, prompt: str, query: int, head: str, key: int | None = None, versus: str | None = None
    ) -> Reply:
        """Why a head looks from one token at another: the result of `why`, and what folders know of
        the head.
        """
        trace = self._trace(prompt, query, head, key)
        result = self._kept_answer(prompt, trace.asked.query, head, trace.key, versus)
        return {**_shown(result), **_where(trace), **self._on_text(trace.head)}

    def _on_text(self, head: Head) -> Reply:
        """What an atlas knows of a head: its rule, and where it looks in a few texts."""
        known = self.about.get(str(head))
        about = "" if known is None else f"On text: {known['rule']}."
        texts = self.texts.get(str(head), [])
        return {"texts": texts[:_TEXTS], "about": about}

    def circuit(self, prompt: str, query: int, versus: str | None = None) -> Reply:
        """The circuit from a prompt's answer back to its words."""
        question = self._about_next(prompt, query=query, rival=versus)
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
        """What changes do to a head's attention and to the next token, beside other changes."""
        trace = self._trace(prompt, query, head, key)
        return WhatIf(self, prompt, trace, changes, versus).result()[0]

    def patterns(self, prompt: str, heads: Sequence[str]) -> dict[str, Any]:
        """The whole attention pattern of some heads [t, t], a byte each."""
        probe = self.ask(Question(self.scope, prompt))
        if len(probe.asked.tokens) > _SQUARE:
            raise BadInput(
                f"a whole pattern is drawn of at most {_SQUARE} tokens: ask about a shorter prompt."
            )
        patterns = {head: _pattern(probe.run, self.scope.check(head)) for head in heads}
        return {"patterns": patterns}

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
        command = shlex.join(["qkscope", "why", prompt, *options])
        results = [replace(result, provenance={**result.provenance, "command": command})]
        if changes:
            what_if = WhatIf(self, prompt, trace, changes, versus)
            results.append(what_if.result()[0])
        title = f"{trace.head} → {trace.asked.tokens[trace.key].strip()}"
        html = report_html(results, title=title)
        return {"html": html, "name": f"why-{trace.head}.html"}

    # ---------------------------------------------------------------------- runs and answers kept

    def ask(self, question: Question) -> PromptRun:
        """Run the prompt of a question, which was typed; a run of the last few is kept."""
        prompt = question.prompt
        assert isinstance(prompt, str)
        if not prompt.strip():
            raise BadInput("the prompt is empty: type a few words.")
        asked = AskedPrompt.of(self.scope, prompt, question.place(question.query), chat=False)
        config = self.scope.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or _LONGEST
        longest = min(_LONGEST, limit)
        if len(asked.tokens) > longest:
            raise BadInput(
                f"the prompt has {len(asked.tokens)} tokens: at most {longest} are looked at here."
            )
        return self._kept_probe(prompt, asked.query)

    def _about_next(self, prompt: str, head: Head | None = None, **asked: Any) -> Question:
        """A question about the next token; one behind the prompt that was typed is refused."""
        question = Question.of(self.scope, prompt, head, **asked).at_difference()
        if question.appended:
            raise BadInput(
                f"{asked['rival']!r} and the next token both begin with {question.appended!r}: type"
                " that at the end of the prompt, and then name the rival."
            )
        return question

    def _trace(self, prompt: str, query: Token | None, head: str, key: Token | None) -> PromptTrace:
        question = Question.of(self.scope, prompt, self.scope.check(head), query=query, key=key)
        return question.look(self.ask(question))

    def _answer(self, prompt: str, query: int, head: str, key: int, versus: str | None) -> Result:
        """Why one head looks at one token; where it looks is told at once."""
        question = self._about_next(
            prompt, self.scope.check(head), query=query, key=key, rival=versus
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
    pattern = None
    if len(trace.asked.tokens) <= _SMALL:
        pattern = _pattern(trace.run, trace.head)
    row = trace.attention[: query + 1].tolist()
    return {
        "head": str(trace.head),
        "query": query,
        "key": trace.key,
        "row": row,
        "pattern": pattern,
    }


def _pattern(run: Run, head: Head) -> str:
    """A head's whole attention pattern, a byte each."""
    pattern = run.calls[head.layer].attention([head.index])
    return _bytes(pattern[0, 0])


def _shown(result: Result) -> dict[str, Any]:
    """A result as JSON, and the blocks that a page draws of it."""
    return {"result": result.to_json(), "blocks": [block.to_json() for block in blocks_of(result)]}


def _bytes(attention: Float[Tensor, "h t"]) -> str:
    """A byte for each number, as the page reads them."""
    rounded = (attention * 255).round().to(torch.uint8)
    data = rounded.cpu().numpy().tobytes()
    return base64.b64encode(data).decode()


@dataclass(frozen=True)
class _Reading:
    """What a run with changes gives.

    Parameters
    ----------
    rows : every head's attention from the query token.
    logits : of the next token.
    """

    rows: Float[Tensor, "h t"]
    logits: Float[Tensor, " v"]

    def lead(self, token: int, rival: int) -> float:
        """How far one token's logit stands above another's."""
        return float(self.logits[token] - self.logits[rival])


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
        question = session._about_next(prompt, query=trace.asked.query, rival=versus)
        self.output = Output(trace.run, trace.asked, question.rival)
        self.calls: list[Call] = []
        self.words = [self._parse(text) for text in self.texts]

    def _parse(self, text: str) -> str:
        """Take up one change; returns it as a sentence names it."""
        found = _CHANGE.fullmatch(text)
        groups = () if found is None else found.groups()
        match [group for group in groups if group is not None]:
            case ["ablate", writer]:
                return self._ablate(writer)
            case ["hide", head, key, query]:
                return self._hide(head, int(key), int(query))
            case ["replace", place, other]:
                return self._replace(int(place), other)
        raise BadInput(f"a change is ablate, hide or replace, but got {text[:60]!r}.")

    def _ablate(self, writer: str) -> str:
        self.calls.append(Call("ablate", (writer,)))
        return f"{writer} ablated"

    def _hide(self, head: str, key: int, query: int) -> str:
        self.calls.append(Call("hide", (head, key, query)))
        return f"{self._text(key)!r} (token {key}) hidden from {head}"

    def _replace(self, place: int, other: str) -> str:
        """Put a word in the place of a token, or of all the pieces of one character."""
        ids = self.scope.tokenizer(other, add_special_tokens=False)["input_ids"]
        pieces = takewhile(operator.not_, self.trace.asked.tokens[place + 1 :])
        size = 1 + len(list(pieces))
        if len(ids) != size:
            raise BadInput(
                f"{other!r} is {counted(len(ids), 'token')} here, and what it replaces is {size}: "
                "take a word of as many, so that nothing moves, or change the prompt."
            )
        given = [other] if size == 1 else ids
        for i, token in enumerate(given):
            self.calls.append(Call("replace", (place + i, token)))
        return f"{self._text(place)!r} (token {place}) replaced by {other!r}"

    def _text(self, place: int) -> str:
        """The text of a token; empty beyond the end of the prompt, which the model refuses."""
        return "".join(self.trace.asked.tokens[place : place + 1])

    def result(self) -> tuple[Result, Float[Tensor, "h t"]]:
        """What changes do to the row and to the next token, beside others; and every head's row."""
        changed = self._run(self.calls)
        others = [self._run(calls) for calls in self._alike()]
        row = {**self._look_row(changed, others), **self._answer_row(changed, others)}
        tables = {"changes": [row], "next": self._next_tokens(changed)}
        told = made_with(
            self.scope,
            tokenizer=self.scope.tokenizer_hash,
            head=str(self.trace.head),
            query=self.trace.asked.query,
            key=self.trace.key,
            changes=self.texts,
        )
        return Result("what if", tables, answer=self._sentence(row), **told), changed.rows

    def _look_row(self, changed: _Reading, others: Sequence[_Reading]) -> dict[str, Any]:
        """The head's attention on the key before and after the changes, and what others leave."""
        trace = self.trace
        place = self.session.heads.index(trace.head)
        before = float(trace.attention[trace.key])
        after = float(changed.rows[place, trace.key])
        left = [float(other.rows[place, trace.key]) for other in others]
        judged = None
        if left and not self._changes_head():
            judged = verdict(before, after, torch.tensor(left))
        return {
            "head": str(trace.head),
            "changes": "; ".join(self.words),
            "before": before,
            "after": after,
            "control_low": min(left, default=None),
            "control_high": max(left, default=None),
            "sets": len(left),
            "verdict": judged,
        }

    def _changes_head(self) -> bool:
        """Whether a change is of the head itself, so that others in its place say nothing."""
        head = str(self.trace.head)
        return any(call.given[0] == head for call in self.calls)

    def _answer_row(self, changed: _Reading, others: Sequence[_Reading]) -> dict[str, Any]:
        """The next token against its rival before and after the changes, and what others leave."""
        output = self.output
        best = output.best
        rival = output.rival
        leads = [other.lead(best, rival) for other in others]
        chances = changed.logits.softmax(-1)
        return {
            "answer": output.text_of("answer"),
            "rival": output.text_of("rival"),
            "difference": output.difference,
            "difference_after": changed.lead(best, rival),
            "difference_low": min(leads, default=None),
            "difference_high": max(leads, default=None),
            "probability": float(output.chances[best]),
            "probability_after": float(chances[best]),
        }

    def _next_tokens(self, changed: _Reading) -> list[dict[str, Any]]:
        """The likely next tokens before and after the changes, and the rival."""
        before = self.output.chances
        after = changed.logits.softmax(-1)
        likely = before.topk(TOKENS).indices.tolist()
        likely += after.topk(TOKENS).indices.tolist()
        rows = []
        for i in dict.fromkeys([*likely, self.output.rival]):
            row = {"token": self.output.token(i), "before": float(before[i])}
            rows.append({**row, "after": float(after[i])})
        return rows

    def _sentence(self, row: Mapping[str, Any]) -> str:
        return f"With {row['changes']}: {self._look_words(row)}. {self._answer_words(row)}."

    def _look_words(self, row: Mapping[str, Any]) -> str:
        """What the changes do to the head's attention, beside the control where it is judged."""
        token = self.trace.token(self.trace.key)
        words = f"attention of {row['head']} on {token}"
        words += f" goes from {row['before']:.0%} to {row['after']:.0%}"
        if not row["verdict"]:
            return words
        low = row["control_low"]
        high = row["control_high"]
        judged = SAID_OF_CUTS[row["verdict"]]
        return f"{words} (control: {low:.0%} to {high:.0%}): {judged}"

    def _answer_words(self, row: Mapping[str, Any]) -> str:
        """What the changes do to the next token, beside the control where there is one."""
        before = row["difference"]
        after = row["difference_after"]
        words = f"{row['answer']!r} goes from {row['probability']:.1%}"
        words += f" to {row['probability_after']:.1%},"
        words += f" its logit over {row['rival']!r} from {before:.1f} to {after:.1f}"
        if not row["sets"]:
            return words
        low = row["difference_low"]
        high = row["difference_high"]
        return f"{words} (control: {low:.1f} to {high:.1f}, {row['sets']} others in its place)"

    def _run(self, calls: Sequence[Call]) -> _Reading:
        """Every head's row and the next token's logits, with such changes in force."""
        with ExitStack() as stack:
            for call in calls:
                change = getattr(self.scope, call.method)
                stack.enter_context(change(*call.given))
            probe = PromptRun(self.scope, self.prompt, self.trace.asked.query, last=0)
            output = Output(probe.run, probe.asked)
            return _Reading(self.session.rows(output), output.logits)

    def _alike(self) -> Iterator[list[Call]]:
        """The control: the same change at another head of the layer, or at the MLP of another
        layer; of several changes the first that is no word's.
        """
        at = next((i for i, call in enumerate(self.calls) if call.method != "replace"), None)
        if at is None:
            return
        method, (writer, *rest) = self.calls[at]
        others = self._others(Writer.parse(writer))
        for other in others[:_OTHERS]:
            instead = Call(method, (other, *rest))
            yield [*self.calls[:at], instead, *self.calls[at + 1 :]]

    def _others(self, writer: Writer) -> list[str]:
        """The other heads of a head's layer, or the MLPs of other layers, the nearest first."""
        if writer.head:
            heads = [head for head in self.session.heads if head.layer == writer.layer]
            return [str(head) for head in heads if head != writer.head]
        layers = sorted(range(self.scope.n_layers), key=lambda layer: abs(layer - writer.layer))
        return [f"M{layer}" for layer in layers[1:]]
