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

from qkscope import BadInput, Head, Scope
from qkscope.findings.prompt_trace import PromptTrace, Question
from qkscope.linear.attribution import direct_effect
from qkscope.linear.run import Run
from qkscope.model.encode import PIECE, token_texts
from qkscope.rerun.alternatives import shape_of
from qkscope.rerun.rerun_tokens import Again, prompt_of

TOKENS = 5
_PIECES = 4  # tokens that a character may be cut into
_LIKELY = (
    1e-3  # a word of the prompt that is less likely is the rival only where all other tokens are
)
_MATTERS = 0.1  # in logits: a head that changes the difference to the rival by less is neither for nor against


def quoted(text: str) -> str:
    r"""A word or token as a sentence shows it, blanks and line breaks written out.

    >>> print(quoted(" Mary"), quoted("\n"))
    ' Mary' '\n'
    """
    return "a part of a character" if text == PIECE else repr(text)


def whole(tokens: Sequence[str], i: int) -> str:
    """What a token reads as; a later piece of a character, as the whole of it."""
    return next((tokens[j] for j in range(i, -1, -1) if tokens[j]), tokens[i])


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

    def __init__(self, run: Run, asked: Question, versus: str | None = None) -> None:
        assert run.logits is not None
        self.run = run
        self.asked = asked
        self.scope = run.reader.scope
        self.logits = run.logits[0].detach().float().cpu()
        self.chances = self.logits.softmax(-1)
        self.best = int(self.logits.argmax())
        self._names: dict[int, tuple[str, int]] = {}
        self.rival, self.why_rival = (
            self._default_rival() if versus is None else (rival_token(self.scope, versus), "")
        )
        if self.rival == self.best:
            raise BadInput(f"{versus!r} is the next token itself: name another one as its rival.")

    def _default_rival(self) -> tuple[int, str]:
        """A word of the prompt, of the answer's shape if there is one; if none has 0.1%, the
        likeliest other token.
        """
        ids = set(self.asked.inputs["input_ids"][0, : self.asked.query + 1].tolist())
        likely = set((self.chances >= _LIKELY).nonzero()[:, 0].tolist())
        best = self.token(self.best)

        def rank(i: int) -> tuple[bool, bool, bool, float]:
            word = i in ids and self.token(i).strip().isalnum()
            return (
                i in likely,
                word,
                word and shape_of(self.token(i)) == shape_of(best),
                float(self.chances[i]),
            )

        others = (
            i
            for i in ids | likely
            if self.token(i).strip().lower() not in ("", best.strip().lower())
        )
        rival = max(others, key=rank, default=int(self.chances.topk(2).indices[1]))
        return rival, f", the likeliest other {'word of the prompt' if rank(rival)[1] else 'token'}"

    @property
    def difference(self) -> float:
        """The answer's logit less its rival's."""
        return float(self.logits[self.best] - self.logits[self.rival])

    def token(self, i: int) -> str:
        """What a token of the vocabulary reads as."""
        return token_texts(self.scope, [i])[0]

    def name(self, i: int) -> tuple[str, int]:
        """What a next token reads as, and of how many tokens; a part of a character is completed by
        going on.
        """
        if i not in self._names:
            pieces = [self.token(i)]
            size = 1
            if pieces[0] == PIECE:
                ids = self.asked.inputs["input_ids"][0, : self.asked.query + 1]
                ids = torch.cat([ids, torch.tensor([i]).to(ids)])
                more = self.scope.generate(prompt_of(self.scope, ids[None]), _PIECES - 1)[
                    0
                ].tolist()  # type: ignore[union-attr]
                pieces = token_texts(self.scope, [i, *more])
                size = next((n for n, piece in enumerate(pieces[1:], 1) if piece), len(pieces))
            self._names[i] = pieces[0], size
        return self._names[i]

    def told(self, i: int, chance: bool = False) -> str:
        """A next token as a sentence names it, with its probability if wanted."""
        text, size = self.name(i)
        more = [f"{size} tokens"] * (size > 1) + [f"{float(self.chances[i]):.1%}"] * chance
        return quoted(text) + (f" ({', '.join(more)})" if more else "")

    @cached_property
    def again(self) -> Again:
        """The prompt, ready to run again from the query token."""
        return Again(self.scope, self.asked.inputs, self.run.calls)

    def from_key(self, one: PromptTrace) -> Float[Tensor, " v"] | None:
        """Direct effect on the logits of what a head read at the key, less its mean over the
        vocabulary.
        """
        layer = one.head.layer
        v = (
            self.run.calls[layer].v[0, self.run.index(one.head, "v"), one.key].float()
            * one.attention[one.key]
        )
        W = self.run.reader.output_weights(layer)[0][one.head.index].to(v)
        pushed = direct_effect(self.run, [layer], (W @ v)[None].to(self.run.row.device))
        return (
            None if pushed is None else (pushed[0] - pushed[0].mean()).cpu()
        )  # a constant changes no probability

    def rows(self, one: PromptTrace) -> list[dict[str, Any]]:
        """The table ``output``: the likeliest next tokens, the rival, and those that the head
        pushes most.
        """
        control = [one.most_attended(one.free)] if one.free else []
        logits = self.again.hidden(
            self.asked.query, [(one.head, key) for key in (one.key, *control)]
        ).float()
        after = logits.softmax(-1)
        pushed = self.from_key(one)
        likely = [*self.chances.topk(TOKENS).indices.tolist(), self.rival]
        more = [] if pushed is None else pushed.topk(3).indices.tolist()
        return [
            {"head": str(one.head), "key": one.key, "token": self.name(i)[0] if i in likely else self.token(i), "id": i,
             "before": float(self.chances[i]),
             "without_key": float(after[0, i]), "without_other": float(after[1, i]) if control else None,
             "direct": None if pushed is None else float(pushed[i]), "rival": i == self.rival,
             "difference": float(logits[0, self.best] - logits[0, i]) if i == self.rival else None}
            for i in dict.fromkeys([*likely, *more])
        ]  # fmt: skip

    def look(self, head: Head) -> tuple[int, Float[Tensor, " t"]]:
        """The token that a head attends to most from the query, the first token left out, and its
        row of attention.
        """
        row = self.again.row(self.asked.query, head).attention()[0, 0].cpu()
        return 1 + int(row[1 : self.asked.query + 1].argmax()), row

    def head_rows(self) -> list[dict[str, Any]]:
        """The table ``heads``: every head with its main key hidden, the largest change of the
        difference first.
        """
        heads = list(self.scope.heads())
        query = self.asked.query
        keys, looks = zip(*map(self.look, heads), strict=True)
        logits = self.again.hidden(query, list(zip(heads, keys, strict=True))).float()
        change = logits[:, self.best] - logits[:, self.rival] - self.difference
        chances = logits.softmax(-1)[:, self.best]
        at = {self.name(self.rival)[0].strip(): "rival", self.name(self.best)[0].strip(): "answer"}
        rows = [
            {"head": str(head), "key": key, "token": whole(self.asked.tokens, key), "attention": float(row[key]),
             "first": float(row[0]), "probability": float(chance), "difference": float(moved),
             "at": at.get(whole(self.asked.tokens, key).strip(), "itself" if key == query else ""),
             "direction": "neither" if abs(float(moved)) < _MATTERS else "for" if moved < 0 else "against"}
            for head, key, row, chance, moved in zip(heads, keys, looks, chances, change, strict=True)
        ]  # fmt: skip
        return sorted(rows, key=lambda row: -abs(row["difference"]))
