"""The next token, its rival, and what heads have to do with them.

A head's main key is hidden (its logit is −∞) and the model runs on: by how much does the answer's
logit fall against its rival's? All heads are tried, each by itself. The direct effect of what a
head read at a key on the logits is linear once norms are frozen, ``W_U · gain · σ · W_O a(p,t)
v(t)``; later layers may add to it or undo it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.findings.prompt_trace import AskedPrompt, PromptTrace
from qkscope.findings.rivals import Candidate, candidates
from qkscope.heads import Head
from qkscope.linear.attribution import direct_effect
from qkscope.linear.run import Run
from qkscope.model.encode import PIECE, token_texts
from qkscope.rerun.rerun_tokens import Again, prompt_of

#: Likeliest next tokens in the table ``output``.
TOKENS = 5
_PUSHED = 3  # tokens there that the head pushes most
_PIECES = 4  # tokens that a character may be cut into
# in logits: a head that changes the difference to the rival by less is neither for nor against
_MATTERS = 0.1


def quoted(text: str) -> str:
    r"""A word or token as a sentence shows it, blanks and line breaks written out.

    >>> print(quoted(" Mary"), quoted("\n"))
    ' Mary' '\n'
    """
    return "a part of a character" if text == PIECE else repr(text)


def whole(tokens: Sequence[str], i: int) -> str:
    """What a token reads as; a later piece of a character, as the whole of it."""
    for j in range(i, -1, -1):
        if tokens[j]:
            return tokens[j]
    return tokens[i]


def first_token(scope: Scope, text: str) -> int:
    """Id of the first token of a text that is not blank."""
    return _written(scope, text)[0]


def one_token(scope: Scope, text: str, role: str = "rival") -> int:
    """Id of the one token that a text is; a text of several, or of none, is refused.

    A blank before the text is the tokenizer's business: some read a word alone as " word".

    Parameters
    ----------
    scope : the model.
    text : of an answer or of a rival.
    role : which of them it is.
    """
    ids = text_ids(scope, text)
    texts = token_texts(scope, ids)
    if len(ids) > 1:
        pieces = ", ".join(map(quoted, filter(None, texts)))
        raise BadInput(
            f"{text!r} is {len(ids)} tokens of this model ({pieces}), and a {role} is one here: "
            "name a text of one token, as ' John'."
        )
    return ids[0]


def text_ids(scope: Scope, text: str) -> list[int]:
    """Ids of an answer's or a rival's text; one that the model cannot read is refused."""
    ids = _written(scope, text)
    texts = token_texts(scope, ids)
    if scope.encoder.unknown in ids:
        raise BadInput(f"this model has no token for {text!r}: name a word that it was trained on.")
    if not _same_text(text, "".join(texts)):
        raise BadInput(
            f"this model reads {text!r} as {''.join(texts)!r}: name it as the model reads it."
        )
    return ids


def _written(scope: Scope, text: str) -> list[int]:
    """Ids of a text from its first token on that is not blank."""
    ids = scope.encoder.bare_ids(text)
    blank = sum(1 for _ in takewhile(lambda i: not token_texts(scope, [i])[0].strip(), ids))
    if blank == len(ids):
        raise BadInput(f"{text!r} is no text of this model's tokens: name a word, as ' John'.")
    return ids[blank:]


def _same_text(text: str, token: str) -> bool:
    """Whether a token reads as a text, but for one blank before it and what tokenizers fold."""
    if text.startswith("  ") or text != text.rstrip():
        return text == token
    typed = unicodedata.normalize("NFKC", text)
    read = unicodedata.normalize("NFKC", token)
    return typed.strip() == read.strip()


@dataclass(frozen=True)
class NamedToken:
    """An answer or a rival: its token, and the text that was typed where that is more than it.

    Parameters
    ----------
    token : its id.
    text : as typed, where the token is one of several; empty otherwise.
    size : how many tokens the text is.
    place : which of them the token is, from 0.
    """

    token: int
    text: str = ""
    size: int = 1
    place: int = 0


class Output:
    """The next token after one token of a prompt: an answer, and the rival it is compared with.

    Parameters
    ----------
    run : of the prompt, with logits.
    asked : the prompt and the query token.
    rival : a text of one token, or an `NamedToken`; by default the first of `candidates`.
    answer : the same of the answer; the likeliest next token by default.
    before : inside a ``with`` block that changes the model or the prompt: the output of the
        unchanged prompt, whose answer and rival these are.

    Attributes
    ----------
    best, rival : ids of the answer and of its rival.
    likeliest : id of the likeliest next token.
    is_named : whether the answer, and the rival, were named.
    typed : what they stand for, where that is more than their tokens.
    """

    def __init__(
        self,
        run: Run,
        asked: AskedPrompt,
        rival: str | NamedToken | None = None,
        answer: str | NamedToken | None = None,
        before: Output | None = None,
    ) -> None:
        assert run.logits is not None
        self.run = run
        self.asked = asked
        self.before = before
        self.scope = run.reader.scope
        self.logits = run.logits[0].detach().float().cpu()
        self.chances = self.logits.softmax(-1)
        self.likeliest = int(self.logits.argmax())
        self._names: dict[int, tuple[str, int]] = {}
        named_answer = self._asked(answer, "answer")
        named_rival = self._asked(rival, "rival")
        self.is_named = {"answer": answer is not None, "rival": rival is not None}
        self.typed = {"answer": named_answer, "rival": named_rival}
        self.best = self.likeliest if named_answer is None else named_answer.token
        if named_rival is None:
            chosen = self.candidates[0]
            self.rival = chosen.token
            self.typed["rival"] = NamedToken(chosen.token, chosen.word, chosen.size)
        else:
            self.rival = named_rival.token
        if self.rival == self.best:
            raise BadInput(self._same_token(named_answer is not None))

    def _asked(self, named: str | NamedToken | None, role: str) -> NamedToken | None:
        """The token that is asked about, where one is named."""
        return NamedToken(one_token(self.scope, named, role)) if isinstance(named, str) else named

    def _same_token(self, answer_is_named: bool) -> str:
        """Why this rival is refused."""
        text = quoted(self.name(self.best)[0])
        if answer_is_named:
            return f"{text} is the answer itself: name another one as its rival."
        return (
            f"{text} is the next token itself: name another one as its rival, or name the answer"
            " that you mean."
        )

    @cached_property
    def candidates(self) -> list[Candidate]:
        """The tokens that the answer may be compared with, the one that the rule chooses first."""
        ids = self.asked.inputs["input_ids"][0, : self.asked.query + 1].tolist()
        return candidates(self.scope, ids, self.run.calls, self.logits, self.best)

    @property
    def why_rival(self) -> str:
        """Why this rival was chosen; empty where it was named."""
        return "" if self.is_named["rival"] else self.candidates[0].why

    def asked_rows(self) -> list[dict[str, Any]]:
        """The table ``asked``: the answer, its rival and its lead, in a what-if before it, too."""
        row = {
            "answer": self.text_of("answer"),
            "rival": self.text_of("rival"),
            "lead": self.difference,
            "probability": float(self.chances[self.best]),
            "rival_probability": float(self.chances[self.rival]),
            "next": self.name(self.likeliest)[0],
            "why": self.why_rival,
        }
        if self.before is not None:
            row["lead_before"] = self.before.difference
            row["probability_before"] = float(self.before.chances[self.best])
            row["rival_probability_before"] = float(self.before.chances[self.rival])
        return [row]

    @property
    def difference(self) -> float:
        """The answer's logit less its rival's."""
        return float(self.logits[self.best] - self.logits[self.rival])

    def token(self, i: int) -> str:
        """What a token of the vocabulary reads as."""
        return token_texts(self.scope, [i])[0]

    def name(self, i: int) -> tuple[str, int]:
        """What a next token reads as, and of how many tokens.

        A part of a character is completed by going on.
        """
        if i not in self._names:
            text = self.token(i)
            for typed in self.typed.values():
                if text == PIECE and typed is not None and typed.token == i and typed.size > 1:
                    return typed.text, 1
            self._names[i] = self._whole_character(i) if text == PIECE else (text, 1)
        return self._names[i]

    def _whole_character(self, i: int) -> tuple[str, int]:
        """The character that a token begins, and of how many tokens, as the model goes on."""
        ids = self.asked.inputs["input_ids"][0, : self.asked.query + 1]
        ids = torch.cat([ids, torch.tensor([i]).to(ids)])
        prompt = prompt_of(self.scope, ids[None])
        more = self.scope.generate(prompt, _PIECES - 1)[0].tolist()  # type: ignore[union-attr]
        pieces = token_texts(self.scope, [i, *more])
        size = next((n for n, piece in enumerate(pieces[1:], 1) if piece), len(pieces))
        return pieces[0], size

    def text_of(self, role: str) -> str:
        """The text of the answer or of its rival: as typed, where that is several tokens."""
        typed = self.typed[role]
        if typed is not None and typed.size > 1:
            return typed.text
        return self.name(self.best if role == "answer" else self.rival)[0]

    def told(self, i: int, chance: bool = False) -> str:
        """A next token as a sentence names it, with its probability if wanted."""
        text, size = self.name(i)
        more = list[str]()
        if size > 1:
            more.append(f"{size} tokens")
        for typed in self.typed.values():
            if typed is not None and typed.token == i and typed.size > 1:
                text = self.token(i)
                more = [f"token {typed.place + 1} of the {typed.size} of {quoted(typed.text)}"]
        if chance:
            more.append(f"{float(self.chances[i]):.1%}")
        return f"{quoted(text)} ({', '.join(more)})" if more else quoted(text)

    @cached_property
    def again(self) -> Again:
        """The prompt, ready to run again from the query token."""
        return Again(self.scope, self.asked.inputs, self.run.calls)

    def from_key(self, one: PromptTrace) -> Float[Tensor, " v"] | None:
        """Direct effect on the logits of what a head read at the key, less its vocabulary mean."""
        layer = one.head.layer
        v = self.run.calls[layer].v[0, self.run.index(one.head, "v"), one.key].float()
        read = v * one.attention[one.key]
        W_O = self.run.reader.output_weights(layer)[0][one.head.index].to(read)
        written = (W_O @ read)[None].to(self.run.row.device)
        effect = direct_effect(self.run, [layer], written)
        if effect is None:
            return None
        return (effect[0] - effect[0].mean()).cpu()  # a constant changes no probability

    def rows(self, one: PromptTrace) -> list[dict[str, Any]]:
        """The table ``output``: likely next tokens, the rival, and those that the head pushes most."""
        hidden = [(one.head, one.key)]
        if one.free:  # the control: the head's second key
            hidden.append((one.head, one.most_attended(one.free)))
        logits = self.again.hidden(self.asked.query, hidden).float()
        chances = logits.softmax(-1)
        direct = self.from_key(one)
        likely = [self.best, *self.chances.topk(TOKENS).indices.tolist(), self.rival]
        pushed = [] if direct is None else direct.topk(_PUSHED).indices.tolist()
        rows = []
        for i in dict.fromkeys([*likely, *pushed]):
            rival = i == self.rival
            leads = (logits[:, self.best] - logits[:, i]).tolist()
            rows.append({
                "head": str(one.head), "key": one.key, "token": self.name(i)[0] if i in likely else self.token(i),
                "id": i, "before": float(self.chances[i]), "without_key": float(chances[0, i]),
                "without_other": float(chances[1, i]) if one.free else None,
                "direct": None if direct is None else float(direct[i]), "rival": rival,
                "difference": leads[0] if rival else None,
                "difference_other": leads[1] if rival and one.free else None,
            })  # fmt: skip
        return rows

    def look(self, head: Head) -> tuple[int, Float[Tensor, " t"]]:
        """The token that a head attends to most from the query, but for the first, and its row."""
        row = self.again.row(self.asked.query, head).attention()[0, 0].cpu()
        return 1 + int(row[1 : self.asked.query + 1].argmax()), row

    @cached_property
    def looks(self) -> list[HeadLook]:
        """Where each head looks from the query, and what hiding that from it does to the next
        token.
        """
        heads = list(self.scope.heads())
        looks = [self.look(head) for head in heads]
        hidden = [(head, key) for head, (key, _) in zip(heads, looks, strict=True)]
        logits = self.again.hidden(self.asked.query, hidden).float()
        return [
            HeadLook(head, key, row, after)
            for head, (key, row), after in zip(heads, looks, logits, strict=True)
        ]

    @cached_property
    def _with_second_hidden(self) -> dict[Head, Float[Tensor, " v"]]:
        """The control of heads that matter for any candidate: the next token with their second key
        hidden.
        """
        rivals = {self.rival, *(candidate.token for candidate in self.candidates)} - {self.best}
        edges = []
        for look in self.looks:
            second = look.second_key(self.asked.query)
            changes = [abs(self._change(look.logits, rival)) for rival in rivals]
            if second is not None and max(changes) >= _MATTERS:
                edges.append((look.head, second))
        if not edges:
            return {}
        logits = self.again.hidden(self.asked.query, edges).float()
        return {head: after for (head, _), after in zip(edges, logits, strict=True)}

    def _change(self, logits: Float[Tensor, " v"], rival: int) -> float:
        """By how much the answer's lead over a rival differs where these are the logits."""
        after = logits[self.best] - logits[rival]
        return float(after - (self.logits[self.best] - self.logits[rival]))

    def effects(self, rival: int) -> list[HeadEffect]:
        """What hiding each head's main key changes of the answer's lead over a rival; heads for the
        answer first, then those against it, each by the size of the change.
        """
        effects = []
        for look in self.looks:
            second = self._with_second_hidden.get(look.head)
            control = None if second is None else self._change(second, rival)
            effects.append(HeadEffect(look, self._change(look.logits, rival), control))
        return sorted(effects, key=lambda effect: (_ORDER[effect.direction], -abs(effect.change)))

    def head_rows(self) -> list[dict[str, Any]]:
        """The table ``heads``: every head with its main key hidden, as `effects` sorts them."""
        rows = []
        for effect in self.effects(self.rival):
            look = effect.look
            rows.append({
                "head": str(look.head), "key": look.key, "token": whole(self.asked.tokens, look.key),
                "attention": float(look.row[look.key]), "first": float(look.row[0]),
                "before": float(self.chances[self.best]),
                "probability": float(look.logits.softmax(-1)[self.best]),
                "lead_before": self.difference, "lead": self.difference + effect.change,
                "difference": effect.change, "second": effect.second,
                "at": self._stands_at(look.key), "direction": effect.direction,
            })  # fmt: skip
        return rows

    def rival_rows(self) -> list[dict[str, Any]]:
        """The table ``rivals``: what else the answer could be compared with, and which head would
        come first then; the rival itself first.
        """
        found = {self.rival: Candidate(self.rival, self.why_rival)}
        for candidate in self.candidates:
            if candidate.token != self.best:
                found.setdefault(candidate.token, candidate)
        rows = []
        for token, candidate in found.items():
            first = self.effects(token)[0]
            rows.append({
                "token": self.name(token)[0], "id": token, "why": candidate.why,
                "probability": float(self.chances[token]),
                "lead": float(self.logits[self.best] - self.logits[token]),
                "head": str(first.look.head) if first.direction == "for" else "",
                "chosen": token == self.rival,
            })  # fmt: skip
        return rows

    def _stands_at(self, key: int) -> str:
        """Whether a token is the answer, the rival, or the query itself; empty otherwise."""
        text = whole(self.asked.tokens, key).strip()
        if text == self.name(self.best)[0].strip():
            return "answer"
        if text == self.name(self.rival)[0].strip():
            return "rival"
        return "itself" if key == self.asked.query else ""


@dataclass(frozen=True)
class HeadLook:
    """Where a head looks from the query, and the next token with that hidden from it.

    Parameters
    ----------
    head : the head.
    key : the token that it attends to most, but for the first.
    row : its attention.
    logits : of the next token, with the key hidden.
    """

    head: Head
    key: int
    row: Float[Tensor, " t"]
    logits: Float[Tensor, " v"]

    def second_key(self, query: int) -> int | None:
        """The token with most attention besides the first, the main one and the query."""
        others = [i for i in range(1, query) if i != self.key]
        return max(others, key=lambda i: float(self.row[i]), default=None)


_ORDER = {"for": 0, "against": 1, "neither": 2}


@dataclass(frozen=True)
class HeadEffect:
    """What hiding a head's main key changes of the answer's lead over a rival, in logits.

    Parameters
    ----------
    look : where the head looks.
    change : of the lead, with its main key hidden.
    second : the control: the change with its second key hidden; None where that was not tried.
    """

    look: HeadLook
    change: float
    second: float | None

    @property
    def direction(self) -> str:
        """What the head is to the answer: for, against, or neither, where its second key changes
        the lead as much.
        """
        second = 0.0 if self.second is None else abs(self.second)
        if abs(self.change) < _MATTERS or second >= abs(self.change):
            return "neither"
        return "for" if self.change < 0 else "against"
