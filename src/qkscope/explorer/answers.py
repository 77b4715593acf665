"""The answer to one question, as plain values, as `why` says it, and as a result that can be saved."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import made_with
from qkscope.analyses.trace.verdicts import FEW, named_cut, no_sum
from qkscope.analyses.why.parts import feature_rows, part_rows
from qkscope.analyses.why.why import answer_of, lines_of
from qkscope.capture.scope import Scope
from qkscope.capture.tokens import token_texts
from qkscope.explorer.features import Features
from qkscope.explorer.what_if import MOVES, Change, WhatIf
from qkscope.runs.result import Result

_TEXTS = 3
_DRAWS, _RUN = 20, 8  # random changes beside one, and how many of them run through the model


@dataclass
class Answer:
    """One head, one token that asks, one key.

    Parameters
    ----------
    scope, prompt : what is looked into.
    what_if : the row, ready to be changed.
    known : of heads.
    """

    scope: Scope
    prompt: str
    what_if: WhatIf
    known: Features

    def __post_init__(self) -> None:
        self.one, self.head, self.key = self.what_if.one, self.what_if.one.head, self.what_if.one.key
        self.query, self.tokens = self.one.asked.query, self.one.asked.tokens

    def plain(self) -> dict[str, Any]:
        """The row, the parts of its logit, what `why` says of it, and what hiding the key does, as JSON has them."""
        one, features, cuts = self.one, self.what_if.features, list[dict[str, Any]]()
        wrong = no_sum(self.head, one.error, self.scope.model.dtype) if one.told_apart else None
        if not one.told_apart or wrong:
            parts, said = feature_rows(one, features), [wrong or one.where()]
        else:
            parts, cuts = part_rows(one, features), one.cut_rows(_DRAWS, 0)
            said = [answer_of(one, cuts), *lines_of(one, parts, cuts)]
        removed, cut = self.changed([Change("remove")]), named_cut(cuts) if one.attends else None
        return {
            "head": str(self.head), "query": self.query, "key": self.key,
            "row": [round(a, 5) for a in one.attention[: self.query + 1].tolist()], "logit": one.total,
            "parts": [{name: row[name] for name in ("by", "side", "part", "value", "share")} for row in parts],
            "fitted": {name: feature.rank for name, feature in features.items()},
            "about": self.known.said.get(self.head, ("", ""))[1],
            "texts": self.known.texts.get(self.head, [])[:_TEXTS],
            "said": [*said, removed["said"]], "verdict": "" if cut is None else cut["verdict"], "removed": removed,
        }  # fmt: skip

    def python(self) -> str:
        """The lines that ask the same in Python."""
        return (
            "import qkscope as qk\n\n"
            f"scope = qk.Scope.load({self.scope.name!r})\n"
            f'print(qk.why(scope, {self.prompt!r}, "{self.head}", query={self.query}, key={self.key}))\n'
        )

    # ------------------------------------------------------------------ what changes do

    def changed(self, changes: Sequence[Change]) -> dict[str, Any]:
        """What changes do to the row and to the next token, beside random ones: numbers and sentences."""
        what_if, one = self.what_if, self.one
        row, drawn = what_if.changed(changes), what_if.random(changes, _DRAWS)
        run = what_if.again.run(self.query, [None, (self.head, row), *drawn[:_RUN]])
        after = one.attend(row)[: self.query + 1].tolist()
        random = [float(one.attend(logits)[self.key]) for head, logits in drawn if head == self.head]
        mine, *beside = moved_by(run.logits)
        downstream = (
            f"{mine:.0%} of the next token's probability moves"
            + (f" (beside it {sum(beside) / len(beside):.0%}, at most {max(beside):.0%})" if beside else "")
            + "."
        )
        before, control = float(one.attention[self.key]), sum(random) / len(random) if random else None
        hidden = any(change.kind == "remove" for change in changes)
        if hidden:
            verdict = "supported" if mine > max([MOVES, *beside]) else "not here"
            said = f"{self.head} no longer sees {one.token(self.key)}. {downstream}"
        else:
            verdict = what_if.judge(changes, after[self.key], random)
            against = f", with random ones of the same size to {control:.0%}" if control is not None else ""
            said = f"Attention on {one.token(self.key)}: {before:.0%} to {after[self.key]:.0%}{against}. {downstream}"
        return {
            "row": [round(a, 5) for a in after], "before": before, "after": after[self.key], "random": control,
            "random_low": min(random, default=None), "random_high": max(random, default=None), "moved": mine,
            "beside": beside, "verdict": verdict, "said": f"{said} {(_HIDDEN if hidden else _MEANS)[verdict]}",
            "all": in_bytes(run.attention[1]), "next": next_tokens(self.scope, run.logits[:2]),
        }  # fmt: skip

    def result(self, changes: Sequence[str]) -> Result:
        """What changes do, to be saved as a page."""
        made = self.changed([Change.parse(text) for text in changes])
        names = ("before", "after", "random", "random_low", "random_high", "moved", "verdict")
        told = "; ".join(changes)
        asked = {
            "tokenizer": self.scope.tokenizer_hash, "prompt": self.prompt, "head": str(self.head),
            "query": self.query, "key": self.key, "changes": list(changes),
        }  # fmt: skip
        attention = [
            {"head": str(self.head), "position": i, "token": self.tokens[i], "before": float(self.one.attention[i]),
             "after": after}
            for i, after in enumerate(made["row"])
        ]  # fmt: skip
        return Result(
            "what if",
            {
                "changes": [{"changes": told, **{name: made[name] for name in names}}],
                "next": made["next"],
                "rows": attention,
            },
            answer=f"With {told}: {made['said']}",
            **made_with(self.scope, **asked),
        )


def next_tokens(scope: Scope, logits: Float[Tensor, "r v"], shown: int = 8) -> list[dict[str, Any]]:
    """The likeliest next tokens, before and after."""
    runs = logits.softmax(-1)
    best: list[int] = list(dict.fromkeys(runs.topk(min(shown, runs.shape[1])).indices.flatten().tolist()))
    best.sort(key=lambda i: -float(runs[:, i].max()))
    return [
        {
            "token": token_texts(scope, [i])[0],
            "before": float(runs[0, i]),
            "after": float(runs[1, i]) if len(runs) > 1 else None,
        }
        for i in best[:shown]
    ]


def moved_by(logits: Float[Tensor, "b v"]) -> list[float]:
    """How much of the first row's probability each other row has elsewhere (total variation)."""
    chances = logits.softmax(-1)
    return ((chances[1:] - chances[:1]).abs().sum(-1) / 2).tolist()


def in_bytes(attention: Float[Tensor, "h t"]) -> str:
    """A byte for each number, as the page reads them."""
    return base64.b64encode((attention * 255).round().to(torch.uint8).numpy().tobytes()).decode()


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
