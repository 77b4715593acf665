"""What the live page asks of a model: where heads look, why one looks there, and what if it did not.

Answers are the results of `qkscope.why` and of `WhatIf`, with the blocks that a saved page draws of them. A question
names the prompt, the token that asks, the head and the key; a change is a few words, so that the page's address is the
whole state:

- ``cut key L17H8``: this writer's part of the key (or of the ``query``) takes its mean over the prompt's other tokens;
- ``swap 14``, ``swap 14 order,lexical``: the key changes places with that of token 14, whole or in some features;
- ``hide``: the key is hidden from this head at this token.

The changed row is computed in closed form, for all changes together, and the model runs on from it. Beside it stand
random changes of the same size: writers of the same layers, subspaces of the same rank, other tokens; for a hidden key,
the layer's other heads that lose it.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.fit import Fit, load
from qkscope.analyses.prompts import check_same_model, made_with
from qkscope.analyses.swap import check_swappable, default_features
from qkscope.analyses.trace.prompt import Probe, PromptTrace, Question, reader_of
from qkscope.analyses.trace.verdicts import FEW, verdict
from qkscope.analyses.why.parts import feature_rows
from qkscope.analyses.why.why import answer_probe
from qkscope.capture.encode import token_texts
from qkscope.capture.scope import Scope
from qkscope.change.again import Again, Row
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_writers
from qkscope.kinds import checked_class
from qkscope.linear.run import Run
from qkscope.maths.bases import Projector, joint_basis, random_bases
from qkscope.maths.subspace import Subspace
from qkscope.maths.swap import swapped_keys
from qkscope.maths.writers import draw_alike
from qkscope.runs.folder import RESULTS
from qkscope.runs.result import Result
from qkscope.show.blocks import blocks_of
from qkscope.show.page import report_html

EXAMPLES = (
    "When Mary and John went to the store, John gave a drink to",
    "hat: O\njam: Z\ncat: B\npen: K\njam:",
    "The war lasted from the year 1743 to the year 17",
)
_LONGEST = 2048  # tokens
_CHANGES = 20
_TEXTS = 3  # of a head that a folder names
_SEED = 0  # of every draw
_DRAWS, _RUN = 20, 8  # random changes beside one, and how many of them run through the model
_NEXT = 8  # next tokens shown


class FeatureStore:
    """Features by head and name, and the name, sentence and texts that a folder has for a head."""

    def __init__(self, fit: Fit | None = None, folder: str = "") -> None:
        self.folder = folder
        self.of: dict[Head, dict[str, Subspace]] = {}
        self.about: dict[Head, dict[str, Any]] = {}  # its name and its sentence, with more
        self.texts: dict[Head, list[dict[str, Any]]] = {}
        if fit is not None:
            check_swappable(fit.space, downstream=True)
            names = default_features(fit.contrasts)
            self.of = {head: {name: fit[name, head] for name in names} for head in fit.heads}

    @classmethod
    def read(cls, folder: str | Path, scope: Scope) -> FeatureStore:
        """Those of a folder of decompose or atlas."""
        result, store = features_result(folder), cls(folder=str(folder))
        if result.experiment.startswith("decompose"):
            return cls(load(folder, scope), str(folder))
        check_same_model(result.provenance, scope, str(folder))
        for row in result.tables.get("atlas", []):
            store.about[Head.parse(row["head"])] = dict(row)
        for row in result.tables.get("examples", []):
            store.texts.setdefault(Head.parse(row["head"]), []).append(dict(row))
        return store


def features_result(folder: str | Path) -> Result:
    """Read what a folder knows of heads; one without features is refused."""
    if not (Path(folder) / RESULTS).is_file():
        raise BadInput(f"{folder} holds no features: name a folder that decompose or atlas wrote, or none.")
    result = Result.read(folder)
    verb = result.experiment.partition("/")[0]
    if verb not in ("decompose", "atlas"):
        raise BadInput(f"{folder} was written by {verb}: the live page takes folders of decompose or atlas.")
    return result


class LiveRun(NamedTuple):
    """A prompt run with one token asking; without a probe where the model's writers cannot be told apart."""

    asked: Question
    run: Run
    again: Again
    probe: Probe | None


class LiveAnswer(NamedTuple):
    """Why one head looks at one key, and what changes of its row need."""

    result: Result
    trace: PromptTrace
    again: Again
    features: Mapping[str, Subspace]


@checked_class
class Session:
    """A model that is looked into; its server asks one question at a time."""

    def __init__(self, scope: Scope, features: FeatureStore | None = None) -> None:
        if scope.tokenizer is None:
            raise BadInput(f"{scope.name} has no tokenizer, so that no prompt can be typed: add one to its folder.")
        self.scope = scope
        self.features = features or FeatureStore()
        self._run: tuple[object, LiveRun] | None = None  # the last prompt, and the last answer
        self._answer: tuple[object, LiveAnswer] | None = None
        try:
            self._no_writers = ""
            reader_of(scope)
        except BadInput as error:  # the rest can be shown all the same
            self._no_writers = str(error)

    def describe(self) -> dict[str, Any]:
        """The model, its heads, and what is known of them already."""
        store = self.features
        return {
            "model": self.scope.name, "heads": [str(head) for head in self.scope.heads()],
            "fitted": [str(head) for head in store.of], "examples": EXAMPLES, "folder": store.folder,
            "names": {str(head): row["kind"] for head, row in store.about.items()},
        }  # fmt: skip

    def look(self, prompt: str, query: int | None = None) -> dict[str, Any]:
        """Tokens, the attention of every head from one of them (a byte each), and which heads matter there."""
        start, live = time.perf_counter(), self._ask(prompt, query)
        at, heads = live.asked.query, list(self.scope.heads())
        attention = torch.cat([live.again.row(at, head).attention()[0].cpu() for head in heads])[:, : at + 1]
        try:
            if live.probe is None:
                raise BadInput(self._no_writers)
            result: Result = answer_probe(live.probe)
            first = result.tables["heads"][0]
        except BadInput as error:  # of some families it cannot be said which heads matter
            result = Result("why", {"heads": []}, answer=str(error))
            elsewhere = attention[:, 1:].max(dim=1)  # many heads rest on the first token
            best = int(elsewhere.values.argmax())
            first = {"head": str(heads[best]), "key": 1 + int(elsewhere.indices[best])}
        return {
            "tokens": live.asked.tokens, "query": at, "attention": _bytes(attention), "result": result.to_json(),
            "first": {name: first[name] for name in ("head", "key")}, "seconds": time.perf_counter() - start,
        }  # fmt: skip

    def why(self, prompt: str, query: int, head: str, key: int | None = None) -> dict[str, Any]:
        """Why a head looks from one token at another: the result of `why`, and what folders know of the head."""
        result, trace, _, features = self._why(prompt, query, head, key)
        at, store = trace.head, self.features
        python = (
            "import qkscope as qk\n\n"
            f"scope = qk.Scope.load({self.scope.name!r})\n"
            f'print(qk.why(scope, {prompt!r}, "{at}", query={trace.asked.query}, key={trace.key}))\n'
        )
        return {
            **_shown(result), "head": str(at), "key": trace.key, "python": python, "fitted": list(features),
            "row": trace.attention[: trace.asked.query + 1].tolist(), "texts": store.texts.get(at, [])[:_TEXTS],
            "about": f"On text: {about['name']}." if (about := store.about.get(at)) else "",
        }  # fmt: skip

    def change(self, prompt: str, query: int, head: str, key: int, changes: Sequence[str]) -> dict[str, Any]:
        """The head's row with some changes made, all heads after it and the next token, beside random changes."""
        if not 0 < len(changes) <= _CHANGES:
            raise BadInput(f"from 1 to {_CHANGES} changes are made at once, but got {len(changes)}.")
        what_if = WhatIf(self._why(prompt, query, head, key), changes)
        result, attention = what_if.result()
        row = attention[list(self.scope.heads()).index(what_if.trace.head)].tolist()
        return {**_shown(result), "row": row, "attention": _bytes(attention), "words": what_if.words}

    def save(self, prompt: str, query: int, head: str, key: int, changes: Sequence[str] = ()) -> dict[str, Any]:
        """One offline page of the answer, and of the changes."""
        answer = self._why(prompt, query, head, key)
        changed = [WhatIf(answer, changes).result()[0]] if changes else []
        name = f"why {answer.trace.head}"
        return {"html": report_html([answer.result, *changed], title=name), "name": f"{name.replace(' ', '-')}.html"}

    def _ask(self, prompt: str, query: int | None) -> LiveRun:
        """Run a prompt with one token asking; the last one is kept."""
        if not prompt.strip():
            raise BadInput("the prompt is empty: type a few words.")
        asked = Question.of(self.scope, prompt, query, chat=False)
        limit = getattr(self.scope.model.config.get_text_config(), "max_position_embeddings", None) or _LONGEST
        longest, name = min(_LONGEST, limit), (prompt, asked.query)
        if len(asked.tokens) > longest:
            raise BadInput(f"the prompt has {len(asked.tokens)} tokens: at most {longest} are looked at here.")
        if self._run is None or self._run[0] != name:
            probe = None if self._no_writers else Probe(self.scope, prompt, asked.query)
            if probe is None:
                columns = torch.cat([asked.places.query[:, None], asked.places.keys], dim=1)
                run = Run(None, asked.places.row, columns, asked.inputs)  # type: ignore[arg-type]
                self.scope.watch(asked.inputs, lambda call: run.calls.__setitem__(call.layer, call))
            else:
                asked, run = probe.asked, probe.run
            self._run = name, LiveRun(asked, run, Again(self.scope, asked.inputs, run.calls), probe)
        return self._run[1]

    def _why(self, prompt: str, query: int, head: str, key: int | None) -> LiveAnswer:
        """Answer for one head at one token; the last answer is kept."""
        live, at = self._ask(prompt, query), self.scope.check(head)
        name = (prompt, live.asked.query, at, key)
        if self._answer is None or self._answer[0] != name:
            trace = PromptTrace(live.run, live.asked, at, key)
            features = self.features.of.get(at, {})
            if live.probe is None:
                lines, parts = [{"line": self._no_writers}], feature_rows(trace, features)
                tables = {"said": lines, "attention": trace.token_rows(), "parts": parts}
                told = made_with(self.scope, tokenizer=self.scope.tokenizer_hash, **live.asked.told(prompt))
                result = Result("why", tables, answer=trace.where(), **told)
            else:
                result = answer_probe(live.probe, at, trace.key, features or None)
            self._answer = (*name[:3], trace.key), LiveAnswer(result, trace, live.again, features)
        return self._answer[1]


def _shown(result: Result) -> dict[str, Any]:
    """A result as JSON, and the blocks that a page draws of it."""
    return {"result": result.to_json(), "blocks": [block.to_json() for block in blocks_of(result)]}


def _bytes(attention: Float[Tensor, "h t"]) -> str:
    """A byte for each number, as the page reads them."""
    return base64.b64encode((attention * 255).round().to(torch.uint8).cpu().numpy().tobytes()).decode()


class WhatIf:
    """One head's row of attention at one token with some changes, and the same with random ones.

    Parameters
    ----------
    answer : the row, and the head's features by name, as the dot product sees them.
    changes : the words of each.
    """

    def __init__(self, answer: LiveAnswer, changes: Sequence[str]) -> None:
        _, self.trace, self.again, self.features = answer
        self.texts, self.hidden = list(changes), False
        self.cut: dict[str, list[int]] = {"query": [], "key": []}  # places of writers, by side
        self.swaps: list[tuple[int, Projector, bool]] = []  # with which token, in what, whether in features
        self.words = list(map(self._parse, changes))

    def _parse(self, text: str) -> str:
        """Take up one change; returns it as a sentence names it."""
        trace, key = self.trace, self.trace.token(self.trace.key)
        match text.split(" ", 2):
            case ["hide"]:
                self.hidden = True
                return f"{key} hidden from {trace.head}"
            case ["cut", "query" | "key" as side, writer]:
                if not trace.told_apart:
                    raise BadInput("this model's writers cannot be told apart, so that none can be cut.")
                if writer not in trace.writers[:-1]:
                    nothing = f"{writer[:40]!r} writes nothing that {trace.head} reads"
                    raise BadInput(f"{nothing}: choose a writer from the list.")
                self.cut[side] = list(dict.fromkeys([*self.cut[side], trace.writers.index(writer)]))
                return f"{writer} cut from the {side}"
            case ["swap", place, *rest] if place.isdecimal():
                other, names = int(place), [name for each in rest for name in each.split(",")]
                if other == trace.key:
                    raise BadInput("a token cannot be swapped with itself: choose another.")
                if other not in (0, *trace.against):
                    raise BadInput(f"token {place} is not in sight of the token that asks: choose an earlier one.")
                if unknown := [name for name in names if name not in self.features]:
                    there = ", ".join(self.features) or "nothing"
                    raise BadInput(f"nothing was fitted for {unknown[0]!r} at {trace.head}: there is {there}.")
                bases = [self.features[name].basis("key") for name in names]
                basis = joint_basis(bases) if bases else torch.eye(trace.rows.d_head)
                self.swaps.append((other, Projector.orthogonal(basis), bool(names)))
                return f"{key} swapped with {trace.token(other)} in {', '.join(names) or 'its whole key'}"
        raise BadInput(f"a change is cut, swap or hide, but got {text[:60]!r}.")

    def result(self) -> tuple[Result, Float[Tensor, "h t"]]:
        """What changes do to the row and to the next token, beside random changes; and every head's attention after."""
        trace, scope, key = self.trace, self.again.scope, self.trace.key
        row, controls = self._logits(self.cut, [swap[:2] for swap in self.swaps]), self._controls()
        run = self.again.run_rows(trace.asked.query, [None, (trace.head, row), *controls[:_RUN]])
        before, after = float(trace.attention[key]), float(trace.attend(row)[key])
        random = [float(trace.attend(logits)[key]) for head, logits in controls if head == trace.head]
        chances = run.logits.softmax(-1)
        moved, *beside = ((chances[1:] - chances[:1]).abs().sum(-1) / 2).tolist()  # total variation
        whole = any(projector.rank >= trace.rows.d_head for _, projector, _ in self.swaps)  # all that the head sees
        judged = "vacuous" if whole else verdict(before, after, torch.tensor(random))
        changed = {
            "head": str(trace.head), "changes": "; ".join(self.words), "before": before, "after": after,
            "control": sum(random) / len(random) if random else None, "control_low": min(random, default=None),
            "control_high": max(random, default=None), "sets": len(random), "moved": moved,
            "moved_random": max(beside, default=None), "verdict": None if self.hidden else judged,
        }  # fmt: skip
        best = sorted(chances[:2].topk(_NEXT).indices.flatten().unique().tolist(), key=lambda i: -chances[:2, i].max())
        next_tokens = [
            {"token": name, "before": float(chances[0, i]), "after": float(chances[1, i])}
            for name, i in zip(token_texts(scope, best[:_NEXT]), best, strict=False)
        ]
        asked: dict[str, Any] = {
            "head": str(trace.head), "query": trace.asked.query, "key": key, "changes": self.texts,
        }  # fmt: skip
        answer, told = self._sentence(changed), made_with(scope, tokenizer=scope.tokenizer_hash, **asked)
        return Result("what if", {"changes": [changed], "next": next_tokens}, answer=answer, **told), run.attention[1]

    def _sentence(self, row: Mapping[str, Any]) -> str:
        control, judged = "", f": {row['verdict']}" if row["verdict"] else ""
        if row["sets"]:
            control = (
                f" (control: {row['control_low']:.0%} to {row['control_high']:.0%} in {row['sets']} random changes)"
            )
        beside = f" (control: at most {row['moved_random']:.0%})" if row["moved_random"] is not None else ""
        return (
            f"With {row['changes']}: attention on {self.trace.token(self.trace.key)} goes from {row['before']:.0%} to "
            f"{row['after']:.0%}{control}{judged}. {row['moved']:.0%} of the next token's probability moves{beside}."
        )

    def _logits(self, cut: Mapping[str, Sequence[int]], swaps: Sequence[tuple[int, Projector]]) -> Float[Tensor, " t"]:
        """The row's logits with writers cut and keys exchanged, as the softmax sees them."""
        key, keys, q = self.trace.key, self.trace.rows.k[0, 0].cpu().clone(), self.trace.rows.q[0, 0].cpu()
        if any(cut.values()):
            away = self.trace.away(cut)
            keys[key] -= away["key"].to(keys)
            q = q - away["query"].to(q)
        for other, projector in swaps:
            pair = swapped_keys(keys[key], keys[other], projector)
            keys[key], keys[other] = pair[0].clone(), pair[1].clone()
        logits = self.trace.row_of(keys, q)
        if self.hidden:
            logits[key] = -torch.inf
        return logits

    def _controls(self) -> list[Row]:
        """Different rows changed in the same way and size, at random; of a key hidden alone, other heads without it."""
        trace, query, key = self.trace, self.trace.asked.query, self.trace.key
        if not self.swaps and not any(self.cut.values()):
            others = [
                head for head in self.again.scope.heads() if head.layer == trace.head.layer and head != trace.head
            ]
            others.sort(key=lambda head: -float(self.again.row(query, head).attention()[0, 0, key]))
            return [self.again.without(query, head, key) for head in others[:_DRAWS]]
        layers = parse_writers(trace.writers[:-1]) if trace.told_apart else []
        rows: dict[object, Row] = {}  # by what was drawn: of few writers alike, many draws are one
        for draw in range(_DRAWS):
            cut = {  # the draws that `why` puts beside a cut
                side: draw_alike(chosen, layers, derived_seed(_SEED, "cut", side, len(chosen), draw), FEW)
                for side, chosen in self.cut.items()
            }
            swaps = [swap for given in self.swaps if (swap := self._random_swap(*given, draw)) is not None]
            drawn = str(([sorted(places) for places in cut.values()], [other for other, _ in swaps]))
            name = draw if any(in_features for *_, in_features in self.swaps) else drawn
            rows.setdefault(name, (trace.head, self._logits(cut, swaps)))
        return list(rows.values())

    def _random_swap(
        self, other: int, projector: Projector, in_features: bool, draw: int
    ) -> tuple[int, Projector] | None:
        """Another subspace of its rank; of whole keys, another token."""
        seed = derived_seed(_SEED, "what if", "swap", draw)
        if in_features:
            basis = random_bases(self.trace.rows.d_head, int(projector.rank), 1, seed)[0]
            return other, Projector.orthogonal(basis)
        free = [i for i in self.trace.against if i != other]
        generator = torch.Generator().manual_seed(seed)
        return (free[int(torch.randint(len(free), (1,), generator=generator))], projector) if free else None
