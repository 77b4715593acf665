"""The answer to one question, as plain values, as sentences, and as a result that can be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import made_with
from qkscope.analyses.trace.one import ATTENDED, Asked, PromptTrace
from qkscope.analyses.trace.verdicts import FEW, no_sum
from qkscope.analyses.why.parts import part_rows
from qkscope.explorer.features import Features
from qkscope.explorer.looked import Looked
from qkscope.explorer.what_if import MOVES, Change, WhatIf
from qkscope.heads import Head
from qkscope.maths.attribution import attribute_logits
from qkscope.runs.result import Result

_TEXTS = 3


@dataclass
class Answer:
    """One head, one token that asks, one key.

    Parameters
    ----------
    looked, asked, prompt : the prompt and the token that asks.
    what_if : the row, ready to be changed.
    trace : the same split among writers; None where they cannot be told apart.
    bases : of the query, by feature.
    features : what is known of heads.
    """

    looked: Looked
    asked: Asked
    prompt: str
    what_if: WhatIf
    trace: PromptTrace | None
    bases: Mapping[str, Float[Tensor, "d r"]]
    features: Features

    @property
    def head(self) -> Head:
        """Whose row it is."""
        return self.what_if.head

    @property
    def key(self) -> int:
        """The token it is about."""
        return self.what_if.key

    def plain(self) -> dict[str, Any]:
        """The row and the parts of its logit, as JSON has them."""
        one, query = self.what_if, self.asked.query
        return {
            "head": str(self.head), "query": query, "key": self.key,
            "row": [round(a, 5) for a in one.attention[: query + 1].tolist()],
            "logit": self._relative(), "parts": [*self._parts(), *self._features()],
            "fitted": {name: basis.shape[1] for name, basis in self.bases.items()},
            "about": self.features.said.get(self.head, ("", ""))[1],
            "texts": self.features.texts.get(self.head, [])[:_TEXTS],
        }  # fmt: skip

    # ------------------------------------------------------------------ parts of the logit

    def _weights(self) -> Float[Tensor, " t"]:
        """The key against the mean of the others in sight, the first aside."""
        others = self.what_if.others
        weights = torch.zeros_like(self.what_if.attention)
        weights[others] = -1 / max(len(others), 1)
        weights[self.key] += 1
        return weights

    def _relative(self) -> float:
        return float(self.what_if.rows.products()[0, 0] @ self._weights())

    def _parts(self) -> list[dict[str, Any]]:
        """The one table of every split: by writers, by singular vectors, by features."""
        made = [] if self.trace is None or self._wrong else part_rows(self.trace)
        return [{name: row[name] for name in ("by", "side", "part", "value", "share")} for row in made]

    def _features(self) -> list[dict[str, Any]]:
        if not self.bases:
            return []
        rows, one = self.what_if.rows, self.what_if
        ordered = dict(sorted(self.bases.items(), key=lambda item: item[1].shape[1]))
        scale, total = float(one.captured.scale[one.column]), self._relative()
        found = attribute_logits(rows.q[0, 0], rows.k[0, 0], scale, ordered)
        parts = {name: float(part @ self._weights()) for name, part in found.parts.items()}
        return [
            {"by": "features", "side": "query", "part": name, "value": value, "share": value / total if total else None}
            for name, value in parts.items()
        ]

    # ------------------------------------------------------------------ in words

    def _token(self, place: int) -> str:
        return quoted(self.asked.tokens[place])

    def words(self, removed: Mapping[str, Any]) -> dict[str, str]:
        """The answer in sentences: where it looks, who wrote that, whether it is so, and what it does."""
        attention, query = self.what_if.attention, self.asked.query
        share, first = float(attention[self.key]), float(attention[0])
        where = f"{self.head} at {self._token(query)} gives {share:.0%} of its attention to {self._token(self.key)}"
        where += f" (token {self.key})" if self.asked.tokens.count(self.asked.tokens[self.key]) > 1 else ""
        if self.key and first >= 0.01:
            where += f"; {first:.0%} rests on the first token"
        if share < ATTENDED:
            where += ". It does not attend there, so what follows explains a logit and no attention"
        said = {"where": where + "."}
        if self.trace is not None:
            said |= self._wrote(self.trace, share)
        top = max(removed["next"], key=lambda row: row["before"])
        beside = f" (the layer's other heads: at most {max(removed['beside']):.0%})" if removed["beside"] else ""
        said["does"] = (
            f"Without this attention the next token {quoted(top['token'])} goes from {top['before']:.0%} to"
            f" {top['after']:.0%}; {removed['moved']:.0%} of the probability moves{beside}."
        )
        return said

    @cached_property
    def _wrong(self) -> str | None:
        one = self.trace
        return None if one is None else no_sum(one.head, one.error, self.looked.scope.model.dtype)

    def _wrote(self, trace: PromptTrace, share: float) -> dict[str, str]:
        if self._wrong:
            return {"wrote": self._wrong}
        marginals, total, named = trace.marginals(), trace.total, {}
        for side in ("key", "query"):
            best = trace.strongest(side, 2)
            named[side] = " and ".join(f"{trace.writers[i]} ({float(marginals[side][i]) / total:.0%})" for i in best)
        said = {"wrote": f"Its key is written by {named['key']}, its query by {named['query']}."}
        if share < ATTENDED:
            return said
        changes = [Change("cut", side="key", writer=trace.writers[i]) for i in trace.strongest("key", 2)]
        after = float(self.what_if.attend(self.what_if.changed(changes))[self.key])
        beside = [float(self.what_if.attend(row)[self.key]) for _, row in self.what_if.random(changes, 20)]
        verdict = self.what_if.judge(changes, after, beside)
        cut = " and ".join(change.writer for change in changes)
        said["test"] = (
            f"With {cut} cut from the key the attention goes from {share:.0%} to {after:.0%}; with {len(beside)} other"
            f" sets of writers like them to {sum(beside) / len(beside):.0%}: {verdict}."
        )
        said["verdict"] = verdict
        return said

    def python(self) -> str:
        """The lines that ask the same in Python."""
        return (
            "import qkscope as qk\n\n"
            f"scope = qk.Scope.load({self.looked.scope.name!r})\n"
            f'print(qk.why(scope, {self.prompt!r}, "{self.head}", query={self.asked.query}, key={self.key}))\n'
        )

    # ------------------------------------------------------------------ what changes do

    def outcome(
        self,
        changes: Sequence[Change],
        verdict: str,
        after: Sequence[float],
        random: Sequence[float],
        moved: Sequence[float],
    ) -> dict[str, Any]:
        """What changes do to the row and to the next token, beside random ones: numbers and sentences."""
        before, mine, beside = float(self.what_if.attention[self.key]), moved[0], list(moved[1:])
        hidden = any(change.kind == "remove" for change in changes)
        if hidden:
            verdict = "supported" if mine > max([MOVES, *beside]) else "not here"
        control = sum(random) / len(random) if random else None
        downstream = (
            f"{mine:.0%} of the next token's probability moves"
            + (f" (beside it {sum(beside) / len(beside):.0%}, at most {max(beside):.0%})" if beside else "")
            + "."
        )
        if hidden:
            said = f"{self.head} no longer sees {self._token(self.key)}. {downstream}"
        else:
            against = f", with random ones of the same size to {control:.0%}" if control is not None else ""
            said = f"Attention on {self._token(self.key)}: {before:.0%} to {after[self.key]:.0%}{against}. {downstream}"
        return {
            "row": [round(a, 5) for a in after], "before": before, "after": after[self.key], "random": control,
            "random_low": min(random, default=None), "random_high": max(random, default=None), "moved": mine,
            "beside": beside, "verdict": verdict, "said": f"{said} {(_HIDDEN if hidden else _MEANS)[verdict]}",
        }  # fmt: skip

    # ------------------------------------------------------------------ as a result

    def result(self, made: Mapping[str, Any], changes: Sequence[str]) -> Result:
        """What changes do, to be saved as a page."""
        names = ("before", "after", "random", "random_low", "random_high", "moved", "verdict")
        told = "; ".join(changes)
        tokens = self.asked.tokens
        asked = {
            "tokenizer": self.looked.scope.tokenizer_hash, "prompt": self.prompt, "head": str(self.head),
            "query": self.asked.query, "key": self.key, "changes": list(changes),
        }  # fmt: skip
        attention = [
            {"head": str(self.head), "position": i, "token": tokens[i], "before": float(self.what_if.attention[i]),
             "after": after}
            for i, after in enumerate(made["row"])
        ]  # fmt: skip
        return Result(
            "what if",
            {
                "changes": [{"changes": told, **{name: made[name] for name in names}}],
                "next": [dict(row) for row in made["next"]],
                "rows": attention,
            },
            answer=f"With {told}: {made['said']}",
            **made_with(self.looked.scope, **asked),
        )


def quoted(token: str) -> str:
    """A token as a sentence names it.

    >>> quoted(" Mary"), quoted(" ")
    ('“Mary”', '“␣”')
    """
    shown = token.strip() or token.replace(" ", "␣")
    return f"“{shown}”".replace("\n", "↵").replace("\t", "⇥")


_MEANS = {
    "supported": "Supported: it does more than they do.",
    "not here": "Not here: it takes less than a quarter of the attention away, or no more than random ones do.",
    "vacuous": "Vacuous: a whole key carries all that the head sees of a token, so this shows nothing about it.",
    "untested": f"Untested: there are fewer than {FEW} different random ones to compare it with.",
    "unattended": "The head hardly looks there, so there is nothing to take away.",
}
_HIDDEN = {
    "supported": "Supported: the next token depends on it more than on what the layer's other heads see there.",
    "not here": "Not here: the next token depends on it no more than on what the layer's other heads see there.",
}
