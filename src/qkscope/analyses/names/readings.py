"""What a person can read off a text at each token: the features that queries and keys are explained by.

``current`` is the token itself (its embedding, what the model makes of it alone by its second layer, and whether it is
capital, a digit, punctuation or a line's end), ``previous`` to ``4 back`` the tokens before it, ``followed`` what came
after its last earlier copy, ``start`` whether it opens a sentence or a line or was there before. ``sham`` is the token
seven back, which hardly any head reads: what it is given by chance, any factor is. A model that adds its positions
instead of rotating by them has ``position`` too; of one that rotates, distance is in the mean (`maths.factors`).

Which factors these are, and how many axes each has, was fixed on the choosing documents: each raises the share that is
named there by more than the sham does (docs/names.md).

Rules that say which key a query should attend to, and how often a head keeps them.

A rule's *coverage* is how often it applies: the share of queries that have such a key in sight. Its *precision* is how
often, then, the most attended key (except the first token) is one; *chance* is the same for a key drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.capture.scope import Scope
from qkscope.capture.tokens import token_vectors
from qkscope.maths.factors import frequent_axes

SHAM = "sham"
BACK = {"current": 0, "previous": 1, "2 back": 2, "3 back": 3, "4 back": 4, SHAM: 7}
"""Factors that are a token at a fixed distance."""
_AXES = {"current": 576, "previous": 384}
_FEWER = 128  # axes of the others
_FLAG = 3.0  # a flag's size beside features of variance 1: few flags are true, and the ridge should not hide them
_ENDS = tuple(".!?")
NONE = -1  # no token


@dataclass(frozen=True)
class Readings:
    """Features of tokens; made once from the passages, on which the axes of embeddings depend.

    Attributes
    ----------
    names, widths : the factors, and how many features each has.
    vocabulary : the tokens that occur, in order.
    table : features of each as a token, those along which frequent tokens differ most first.
    flags : of each: capital, digit, punctuation, holds a line's end, ends a sentence.
    positions : whether the model adds its positions.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    vocabulary: Int[Tensor, " v"]
    table: Float[Tensor, "v a"]
    flags: Float[Tensor, "v 5"]
    positions: bool

    @classmethod
    def of(cls, scope: Scope, fitted: Sequence[Sequence[int]], others: Sequence[Sequence[int]] = ()) -> Readings:
        """Readings whose axes are those of the fitted passages' tokens; tokens of the others are known too."""
        every = torch.tensor([token for ids in (*fitted, *others) for token in ids])
        vocabulary = every.unique()
        mine = torch.tensor([token for ids in fitted for token in ids])
        counts = torch.bincount(torch.searchsorted(vocabulary, mine), minlength=len(vocabulary))
        vectors = token_vectors(scope, vocabulary)
        most = max(_AXES.values())
        table = torch.cat([frequent_axes(v, counts, most // len(vectors)) for v in vectors], dim=1)
        spread = ((counts / counts.sum())[:, None] * table.square()).sum(0)
        table = table[:, spread.argsort(descending=True)]
        positions = all(layer.offset is None for layer in scope.facts.layers)
        names = [*(name for name in BACK if name != SHAM), "followed", "start", *(["position"] * positions), SHAM]
        flags = torch.tensor([_flags(scope, token) for token in vocabulary.tolist()])
        made = cls((), (), vocabulary, table, flags, positions)
        widths = [part.shape[-1] for part in made._parts(torch.tensor([fitted[0][:2]]), names)]
        return cls(tuple(names), tuple(widths), vocabulary, table, flags, positions)

    def to(self, device: torch.device | str) -> Readings:
        """The same on another device."""
        vocabulary, table, flags = (x.to(device) for x in (self.vocabulary, self.table, self.flags))
        return Readings(self.names, self.widths, vocabulary, table, flags, self.positions)

    def features(self, ids: Int[Tensor, "b t"]) -> Float[Tensor, "b t p"]:
        """Features of every token of a batch, the factors side by side; padding on the right gets any."""
        return torch.cat(self._parts(ids, self.names), dim=-1)

    def token_features(self, tokens: Int[Tensor, " n"], name: str) -> Float[Tensor, "n a"]:
        """Features that tokens have as one of the factors that are a token at a fixed distance."""
        if name == "current":
            return self._parts(tokens[:, None], [name])[0][:, 0]
        return self._read(torch.searchsorted(self.vocabulary, tokens), _AXES.get(name, _FEWER))

    def _parts(self, ids: Int[Tensor, "b t"], names: Sequence[str]) -> list[Float[Tensor, "b t x"]]:
        token = torch.searchsorted(self.vocabulary, ids).clamp_max(len(self.vocabulary) - 1)
        found = []
        for name in names:
            if name in BACK:
                found.append(self._read(shifted(token, BACK[name]), _AXES.get(name, _FEWER)))
                if name == "current":
                    found[-1] = torch.cat([found[-1], _FLAG * self.flags[token][..., :4]], dim=-1)
            elif name == "followed":
                found.append(self._read(followed(token), _FEWER))
            elif name == "start":
                found.append(_FLAG * self._starts(token))
            else:
                places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
                found.append(_FLAG * _hats(torch.log2(places + 1)).expand(len(ids), -1, -1))
        return found

    def _read(self, token: Int[Tensor, "b t"], axes: int) -> Float[Tensor, "b t a"]:
        return self.table[token.clamp_min(0), :axes] * (token != NONE)[..., None]

    def _starts(self, token: Int[Tensor, "b t"]) -> Float[Tensor, "b t 3"]:
        before = shifted(token, 1)
        there = (before != NONE)[..., None]
        opens = self.flags[before.clamp_min(0)][..., 3:] * there  # a line's end or a sentence's end came before
        return torch.cat([opens, copies(token).any(dim=-1)[..., None].float()], dim=-1)


def shifted(token: Int[Tensor, "b t"], back: int) -> Int[Tensor, "b t"]:
    """The token so many places back; NONE where there is none."""
    out = torch.full_like(token, NONE)
    out[:, back:] = token[:, : token.shape[1] - back]
    return out


def copies(token: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s"]:
    """Whether an earlier place holds the same token."""
    return (token[:, :, None] == token[:, None, :]).tril(-1)


def followed(token: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """What came after the last earlier copy of each token; NONE where there is no copy, or it stands right before."""
    places = torch.arange(token.shape[1], device=token.device)
    last = torch.where(copies(token), places, NONE).amax(dim=-1)  # b t
    after = token.gather(1, (last + 1).clamp_max(token.shape[1] - 1))
    return torch.where((last != NONE) & (last + 1 < places), after, NONE)


def _flags(scope: Scope, token: int) -> list[float]:
    text = "" if scope.tokenizer is None else scope.tokenizer.decode([token])
    word = text.strip()
    return [
        float(word[:1].isupper()), float(any(c.isdigit() for c in word)),
        float(bool(word) and not any(c.isalnum() for c in word)), float("\n" in text), float(word.endswith(_ENDS)),
    ]  # fmt: skip


def _hats(x: Float[Tensor, " t"], count: int = 12, last: float = math.log2(4096)) -> Float[Tensor, "t c"]:
    """Each number between two of some knots, in parts of 1."""
    knots = torch.linspace(0, last, count, device=x.device)
    return (1 - (x[:, None] - knots).abs() / (knots[1] - knots[0])).clamp_min(0)


ITSELF, BEFORE, COPY, AFTER_COPY, SAME_BEFORE = "itself", "the token before", "a copy", "after a copy", "same before"


def _distance(back: int) -> Callable[[Tensor], Tensor]:
    def at(ids: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s"]:
        places = torch.arange(ids.shape[1], device=ids.device)
        return (places[:, None] - places == back).expand(len(ids), -1, -1)

    return at


def _after_copy(ids: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s"]:
    """Keys that stand right after a token equal to the asking one."""
    return (ids[:, :, None] == shifted(ids, 1)[:, None, :]).tril()


def _same_before(ids: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s"]:
    before = shifted(ids, 1)
    return (before[:, :, None] == before[:, None, :]).tril(-1)


RULES: dict[str, Callable[[Int[Tensor, "b t"]], Bool[Tensor, "b t s"]]] = {
    ITSELF: _distance(0),
    BEFORE: _distance(1),
    "2 back": _distance(2),
    "3 back": _distance(3),
    "4 back": _distance(4),
    COPY: copies,
    AFTER_COPY: _after_copy,
    SAME_BEFORE: _same_before,
}
"""Rules by name, each as a table of queries and keys."""


def holds(ids: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s r"]:
    """Which keys each rule names to each query."""
    return torch.stack([rule(ids) for rule in RULES.values()], dim=-1)
