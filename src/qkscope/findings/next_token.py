"""The next token, its rival, and what heads have to do with them.

A head's main key is hidden (its logit is −∞) and the model runs on: by how much does the answer's
logit fall against its rival's? All heads are tried, each by itself. The direct effect of what a
head read at a key on the logits is linear once norms are frozen, ``W_U · gain · σ · W_O a(p,t)
v(t)``; later layers may add to it or undo it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.findings.prompt_trace import AskedPrompt, PromptTrace
from qkscope.heads import Head
from qkscope.linear.attribution import direct_effect
from qkscope.linear.run import Run
from qkscope.model.encode import PIECE, token_texts
from qkscope.rerun.alternatives import shape_of
from qkscope.rerun.rerun_tokens import Again, prompt_of

#: Likeliest next tokens in the table ``output``.
TOKENS = 5
_PUSHED = 3  # tokens there that the head pushes most
_PIECES = 4  # tokens that a character may be cut into
# a word of the prompt that is less likely is the rival only where all other tokens are
_LIKELY = 1e-3
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


def rival_token(scope: Scope, text: str) -> int:
    """Id of the one token that a rival's text is; a text of several, or of none, is refused.

    A blank before the text is the tokenizer's business: some read a word alone as " word".
    """
    ids = _written(scope, text)
    texts = token_texts(scope, ids)
    if len(ids) > 1:
        pieces = ", ".join(map(quoted, filter(None, texts)))
        raise BadInput(
            f"{text!r} is {len(ids)} tokens of this model ({pieces}), and a rival is one: "
            "name a text of one token, as ' John'."
        )
    if ids[0] == scope.encoder.unknown:
        raise BadInput(f"this model has no token for {text!r}: name a word that it was trained on.")
    if not _same_text(text, texts[0]):
        raise BadInput(f"this model reads {text!r} as {texts[0]!r}: name its rival as it reads it.")
    return ids[0]


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


class Output:
    """The next token after one token of a prompt.

    Parameters
    ----------
    run : of the prompt, with logits.
    asked : the prompt and the query token.
    versus : the rival's text; by default the likeliest other word of the prompt, or the likeliest
        other token where no such word has 0.1%, though others have; ``why_rival`` says which.
    """

    def __init__(self, run: Run, asked: AskedPrompt, versus: str | None = None) -> None:
        assert run.logits is not None
        self.run = run
        self.asked = asked
        self.scope = run.reader.scope
        self.logits = run.logits[0].detach().float().cpu()
        self.chances = self.logits.softmax(-1)
        self.best = int(self.logits.argmax())
        self._names: dict[int, tuple[str, int]] = {}
        if versus is None:
            self.rival, self.why_rival = self._default_rival()
        else:
            self.rival = rival_token(self.scope, versus)
            self.why_rival = ""
        if self.rival == self.best:
            raise BadInput(f"{versus!r} is the next token itself: name another one as its rival.")

    def _default_rival(self) -> tuple[int, str]:
        """A word of the prompt, of the answer's shape if there is one; and why it is the rival.

        If no such word has 0.1%, the likeliest other token.
        """
        inside = set(self.asked.inputs["input_ids"][0, : self.asked.query + 1].tolist())
        likely = set((self.chances >= _LIKELY).nonzero()[:, 0].tolist())
        answer = self.token(self.best)

        def rank(i: int) -> tuple[bool, bool, bool, float]:
            text = self.token(i)
            is_word = i in inside and text.strip().isalnum()
            like_answer = is_word and shape_of(text) == shape_of(answer)
            return i in likely, is_word, like_answer, float(self.chances[i])

        same = ("", answer.strip().lower())
        others = [i for i in inside | likely if self.token(i).strip().lower() not in same]
        second = int(self.chances.topk(2).indices[1])
        rival = max(others, key=rank, default=second)
        _, is_word, _, _ = rank(rival)
        return rival, f", the likeliest other {'word of the prompt' if is_word else 'token'}"

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

    def told(self, i: int, chance: bool = False) -> str:
        """A next token as a sentence names it, with its probability if wanted."""
        text, size = self.name(i)
        more = list[str]()
        if size > 1:
            more.append(f"{size} tokens")
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
        likely = [*self.chances.topk(TOKENS).indices.tolist(), self.rival]
        pushed = [] if direct is None else direct.topk(_PUSHED).indices.tolist()
        rows = []
        for i in dict.fromkeys([*likely, *pushed]):
            rival = i == self.rival
            lead = float(logits[0, self.best] - logits[0, i])
            rows.append({
                "head": str(one.head), "key": one.key, "token": self.name(i)[0] if i in likely else self.token(i),
                "id": i, "before": float(self.chances[i]), "without_key": float(chances[0, i]),
                "without_other": float(chances[1, i]) if one.free else None,
                "direct": None if direct is None else float(direct[i]), "rival": rival,
                "difference": lead if rival else None,
            })  # fmt: skip
        return rows

    def look(self, head: Head) -> tuple[int, Float[Tensor, " t"]]:
        """The token that a head attends to most from the query, but for the first, and its row."""
        row = self.again.row(self.asked.query, head).attention()[0, 0].cpu()
        return 1 + int(row[1 : self.asked.query + 1].argmax()), row

    def head_rows(self) -> list[dict[str, Any]]:
        """The table ``heads``: every head with its main key hidden, the largest change first.

        The change is that of the difference between the answer's logit and its rival's.
        """
        heads = list(self.scope.heads())
        looks = [self.look(head) for head in heads]
        hidden = [(head, key) for head, (key, _) in zip(heads, looks, strict=True)]
        logits = self.again.hidden(self.asked.query, hidden).float()
        changes = logits[:, self.best] - logits[:, self.rival] - self.difference
        chances = logits.softmax(-1)[:, self.best]
        rows = []
        for i, (head, (key, attention)) in enumerate(zip(heads, looks, strict=True)):
            change = float(changes[i])
            rows.append({
                "head": str(head), "key": key, "token": whole(self.asked.tokens, key),
                "attention": float(attention[key]), "first": float(attention[0]),
                "probability": float(chances[i]), "difference": change,
                "at": self._stands_at(key), "direction": _direction(change),
            })  # fmt: skip
        return sorted(rows, key=lambda row: -abs(row["difference"]))

    def _stands_at(self, key: int) -> str:
        """Whether a token is the answer, the rival, or the query itself; empty otherwise."""
        text = whole(self.asked.tokens, key).strip()
        if text == self.name(self.best)[0].strip():
            return "answer"
        if text == self.name(self.rival)[0].strip():
            return "rival"
        return "itself" if key == self.asked.query else ""


def _direction(change: float) -> str:
    """What a head is, by the change of the answer's lead without it."""
    if abs(change) < _MATTERS:
        return "neither"
    return "for" if change < 0 else "against"
