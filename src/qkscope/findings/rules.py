"""Rules as data: what a head does, as a program that gives its attention from the text alone.

A rule is a mixture of at most five weighted parts, ``a(i, j) = Σ_p w_p r_p(i, j)``. Each part shares
a query's attention among the tokens that it names (an offset, a copy, words of a kind, …); where it
names none, its weight goes to the first token. *Rest* is what no other part says: the head's mean
row by distance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.checking import checked_class
from qkscope.errors import BadInput
from qkscope.findings.distances import Distances, step_number
from qkscope.text import grouped

#: The most parts of a rule.
MOST = 5
#: From this share of *rest* on, a rule counts as none.
MOSTLY_REST = 0.5
_EXAMPLES = 4  # words of a kind that a sentence names
Which = Literal["last", "every"]


# ---------------------------------------------------------------------- what parts speak of


@dataclass(frozen=True)
class Kind:
    """A kind of words: a set of tokens.

    Parameters
    ----------
    tokens : their ids.
    examples : some of them as they read, for people.
    classes : numbers of the word classes that it is made of, where it is (`word_classes`).

    Examples
    --------
    >>> str(Kind(frozenset([4, 7, 9]), (" the", " a")))
    '“ the”, “ a” …'
    """

    tokens: frozenset[int]
    examples: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()

    def __str__(self) -> str:
        named = [f"“{text}”".replace("\n", "⏎") for text in self.examples[:_EXAMPLES]]
        more = " …" if len(self.tokens) > len(named) else ""
        return (", ".join(named) or f"{len(self.tokens)} tokens") + more

    @cached_property
    def _members(self) -> Int[Tensor, " n"]:
        """Its tokens, in order."""
        return torch.tensor(sorted(self.tokens), dtype=torch.int64)

    def holds(self, ids: Int[Tensor, "*b t"]) -> Bool[Tensor, "*b t"]:
        """Which tokens of a text are of this kind."""
        return torch.isin(ids, self._members.to(ids))

    def to_json(self) -> dict[str, Any]:
        """Plain values; of a kind made of word classes their numbers stand for the tokens."""
        if self.classes:
            return {"classes": list(self.classes), "examples": list(self.examples)}
        return {"tokens": sorted(self.tokens), "examples": list(self.examples)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], classes: Sequence[int] = ()) -> Kind:
        """Read what `to_json` gives.

        Parameters
        ----------
        data : the plain values.
        classes : of every token the number of its word class, where kinds are named by these.
        """
        numbers = tuple(data.get("classes", ()))
        tokens = data.get("tokens", ())
        if numbers:
            wanted = torch.isin(torch.as_tensor(classes), torch.tensor(numbers))
            tokens = wanted.nonzero()[:, 0].tolist()
        return cls(frozenset(tokens), tuple(data.get("examples", ())), numbers)


@dataclass(frozen=True)
class Text:
    """Tokens as parts of rules see them.

    Parameters
    ----------
    ids : of one text, or of several of one length.
    distances : of the head, where its rule has a table.
    """

    ids: Int[Tensor, "*b t"]
    distances: Distances | None = None

    @cached_property
    def back(self) -> Int[Tensor, "t t"]:
        """How far each key stands before each query."""
        places = torch.arange(self.ids.shape[-1], device=self.ids.device)
        return places[:, None] - places

    @cached_property
    def inside(self) -> Bool[Tensor, "t t"]:
        """Keys that a query sees, the first token left out."""
        inside = self.back >= 0
        inside[:, 0] = False
        return inside

    @cached_property
    def by_distance(self) -> Float[Tensor, "t t"]:
        """What the table of distances gives each key, not summing to anything; 1 without a table."""
        if self.distances is None:
            return self.inside.float()
        back = torch.tensor(self.distances.back, device=self.ids.device)
        return back[step_number(self.back.clamp(min=0))] * self.inside

    @cached_property
    def on_first(self) -> Float[Tensor, " t"]:
        """What the table gives the first token from each query."""
        assert self.distances is not None
        first = torch.tensor(self.distances.first, device=self.ids.device)
        return first[step_number(torch.arange(len(self.back), device=first.device))]

    def equal(self, other: Int[Tensor, "*b t"]) -> Bool[Tensor, "*b t t"]:
        """Earlier keys whose token in ``other`` is the query's."""
        alike = self.ids[..., :, None] == other[..., None, :]
        return alike & self.inside & (self.back > 0)

    @cached_property
    def before(self) -> Int[Tensor, "*b t"]:
        """The token that stands before each."""
        start = torch.full_like(self.ids[..., :1], -1)
        return torch.cat([start, self.ids[..., :-1]], -1)


def shared(given: Float[Tensor, "*b t t"]) -> Float[Tensor, "*b t t"]:
    """Scale rows to sum to 1; those that give nothing stay empty."""
    total = given.sum(-1, keepdim=True)
    return given / total.where(total > 0, 1)


def _last(named: Bool[Tensor, "*b t t"]) -> Float[Tensor, "*b t t"]:
    """All of a row on the last key that is named."""
    places = torch.arange(named.shape[-1], device=named.device)
    last = torch.where(named, places, -1).amax(-1, keepdim=True)
    return (places == last).float()


def _chosen(named: Bool[Tensor, "*b t t"], which: Which) -> Float[Tensor, "*b t t"]:
    """The last named key, or every one alike."""
    return _last(named) if which == "last" else shared(named.float())


# ---------------------------------------------------------------------- the parts


class Part(ABC):
    """One thing that a head does: a row of attention for every query, or an empty one.

    ``tag`` names it in JSON.
    """

    tag: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """The field's word for a head whose largest part this is."""

    @abstractmethod
    def rows(self, text: Text) -> Float[Tensor, "*b t t"]:
        """Attention by this part alone; a row is empty where it names no token."""


@checked_class
@dataclass(frozen=True)
class First(Part):
    """The first token."""

    tag: ClassVar[str] = "first token"
    name = "first token"

    def rows(self, text: Text) -> Float[Tensor, "*b t t"]:
        """All on the first token."""
        rows = torch.zeros(text.back.shape, device=text.ids.device)
        rows[:, 0] = 1
        return rows

    def __str__(self) -> str:
        return "the first token"


@checked_class
@dataclass(frozen=True)
class Offset(Part):
    """A token at a fixed distance.

    Parameters
    ----------
    steps : back from the query; 0 is the query itself.
    """

    tag: ClassVar[str] = "offset"
    steps: int

    @property
    def name(self) -> str:
        """*Previous token*, *self*, or the position."""
        return {0: "self", 1: "previous token"}.get(self.steps, f"position -{self.steps}")

    def rows(self, text: Text) -> Float[Tensor, "t t"]:
        """All on that token."""
        return ((text.back == self.steps) & text.inside).float()

    def __str__(self) -> str:
        names = {0: "the token itself", 1: "the previous token"}
        return names.get(self.steps, f"the token {self.steps} back")


@checked_class
@dataclass(frozen=True)
class Decay(Part):
    """Every token, each step back by a factor less.

    Parameters
    ----------
    factor : under 1.
    """

    tag: ClassVar[str] = "decay"
    factor: float
    name = "near tokens"

    def rows(self, text: Text) -> Float[Tensor, "t t"]:
        """Geometric in the distance."""
        return shared(self.factor ** text.back.clamp(min=0).float() * text.inside)

    def __str__(self) -> str:
        return f"near tokens, each step back {self.factor:g} times as much"


@checked_class
@dataclass(frozen=True)
class Near(Part):
    """Every token but the first, by the rule's table of distances."""

    tag: ClassVar[str] = "by distance"
    name = "near tokens"

    def rows(self, text: Text) -> Float[Tensor, "t t"]:
        """The table, scaled to sum to 1."""
        return shared(text.by_distance)

    def __str__(self) -> str:
        return "all tokens by their distance"


@checked_class
@dataclass(frozen=True)
class SameWord(Part):
    """Earlier copies of the query's token.

    Parameters
    ----------
    which : the last one, or every one alike.
    """

    tag: ClassVar[str] = "same word"
    which: Which = "last"
    name = "duplicate token"

    def rows(self, text: Text) -> Float[Tensor, "*b t t"]:
        """All on copies."""
        return _chosen(text.equal(text.ids), self.which)

    def __str__(self) -> str:
        return f"{_the(self.which)} earlier copy of the word"


@checked_class
@dataclass(frozen=True)
class AfterCopy(Part):
    """What follows earlier copies of the query's token.

    Parameters
    ----------
    which : of copies.
    """

    tag: ClassVar[str] = "after the last copy"
    which: Which = "last"
    name = "induction"

    def rows(self, text: Text) -> Float[Tensor, "*b t t"]:
        """All on tokens behind copies."""
        return _chosen(text.equal(text.before), self.which)

    def __str__(self) -> str:
        return f"the token after {_the(self.which)} earlier copy of the word"


@checked_class
@dataclass(frozen=True)
class OfKind(Part):
    """Words of a kind, near ones more where the rule has a table of distances.

    Parameters
    ----------
    kind : of the words.
    which : the last one, or every one.
    """

    tag: ClassVar[str] = "word of a kind"
    kind: Kind
    which: Which = "every"
    name = "kind"

    def rows(self, text: Text) -> Float[Tensor, "*b t t"]:
        """All on words of the kind, the query among them."""
        named = self.kind.holds(text.ids)[..., None, :] & text.inside
        if self.which == "last":
            return _last(named)
        return shared(named * text.by_distance)

    def __str__(self) -> str:
        return f"{_the(self.which)} word of the kind {self.kind}"


@checked_class
@dataclass(frozen=True)
class Rest(Part):
    """What no other part says: the head's mean row by distance, from the rule's table."""

    tag: ClassVar[str] = "rest"
    name = "no rule"

    def rows(self, text: Text) -> Float[Tensor, "t t"]:
        """The first token's mean by position, what is left by distance."""
        if text.distances is None:
            raise BadInput(
                "rest is a mean row by distance: give the rule its table, Rule(…, distances=…)."
            )
        rows = shared(text.by_distance) * (1 - text.on_first[:, None])
        rows[:, 0] = text.on_first
        rows[0, 0] = 1
        return rows

    def __str__(self) -> str:
        return "rest: its mean row by distance"


@checked_class
@dataclass(frozen=True)
class At(Part):
    """One thing from queries of a kind, another from all others: *at a verb, the last noun*.

    Parameters
    ----------
    kind : of the query.
    then : what the head does there.
    otherwise : what it does from other queries.
    """

    tag: ClassVar[str] = "at a kind"
    kind: Kind
    then: Part
    otherwise: Part = field(default_factory=First)

    @property
    def name(self) -> str:
        """That of what it does at its kind."""
        return self.then.name

    def rows(self, text: Text) -> Float[Tensor, "*b t t"]:
        """Row by row the one or the other."""
        here = self.kind.holds(text.ids)[..., :, None]
        return torch.where(here, self.then.rows(text), self.otherwise.rows(text))

    def __str__(self) -> str:
        return f"at a word of the kind {self.kind}: {self.then}, else {self.otherwise}"


@checked_class
@dataclass(frozen=True)
class Else(Part):
    """What one part names, and where it names nothing another part: *a copy, else near tokens*.

    Parameters
    ----------
    then : what the head does where it can.
    otherwise : what it does where that names no token.
    """

    tag: ClassVar[str] = "else"
    then: Part
    otherwise: Part = field(default_factory=First)

    @property
    def name(self) -> str:
        """That of what it does where it can."""
        return self.then.name

    def rows(self, text: Text) -> Float[Tensor, "*b t t"]:
        """Row by row the one, or the other where that is empty."""
        rows = self.then.rows(text)
        return torch.where(rows.sum(-1, keepdim=True) > 0, rows, self.otherwise.rows(text))

    def __str__(self) -> str:
        return f"{self.then}, else {self.otherwise}"


def _the(which: Which) -> str:
    return "the last" if which == "last" else "every"


PARTS: tuple[type[Part], ...] = (
    First,
    Offset,
    Decay,
    Near,
    SameWord,
    AfterCopy,
    OfKind,
    At,
    Else,
    Rest,
)
_BY_TAG = {part.tag: part for part in PARTS}


# ---------------------------------------------------------------------- the rule


@checked_class
@dataclass(frozen=True)
class Rule:
    """What a head does, as a program: weighted parts that give its attention from the text alone.

    Parameters
    ----------
    parts : weights and parts, five at most; the weights sum to 1.
    distances : the head's mean row by distance, for `Rest` and for how words of a kind fade.

    Examples
    --------
    >>> rule = Rule([(0.75, AfterCopy()), (0.25, Offset(1))])
    >>> print(rule)
    75% the token after the last earlier copy of the word; 25% the previous token
    >>> rule.attention(torch.tensor([5, 6, 7, 8, 6]))[-1]
    tensor([0.0000, 0.0000, 0.7500, 0.2500, 0.0000])
    >>> rule.name
    'induction'
    """

    parts: Sequence[tuple[float, Part]]
    distances: Distances | None = None

    def __post_init__(self) -> None:
        """Sort the parts, the largest first."""
        if not 0 < len(self.parts) <= MOST:
            raise BadInput(f"a rule has one to {MOST} parts, but got {len(self.parts)}.")
        weights = [weight for weight, _ in self.parts]
        if min(weights) < 0 or not math.isclose(sum(weights), 1, abs_tol=0.005):
            raise BadInput(f"weights of a rule sum to 1, but these sum to {sum(weights):g}.")
        total = math.fsum(weights)
        scaled = [(weight / total, part) for weight, part in self.parts]
        ordered = sorted(scaled, key=lambda weighted: -weighted[0])
        object.__setattr__(self, "parts", tuple(ordered))

    def __str__(self) -> str:
        return "; ".join(f"{weight:.0%} {part}" for weight, part in self.parts)

    def attention(self, ids: Int[Tensor, "*b t"]) -> Float[Tensor, "*b t t"]:
        """The pattern that the rule says: from each token (row) to each token (column).

        Parameters
        ----------
        ids : tokens of a text, or of several of one length.
        """
        text = Text(ids, self.distances)
        pattern = torch.zeros(*ids.shape, ids.shape[-1], device=ids.device)
        for weight, part in self.parts:
            pattern = pattern + weight * part.rows(text)
        return else_first(pattern)

    @property
    def rest(self) -> float:
        """The weight of *rest*."""
        return sum(weight for weight, part in self.parts if isinstance(part, Rest))

    @property
    def name(self) -> str:
        """The field's word for what most of the rule does, the first token and rest aside.

        *No rule* where rest has more than half; *first token* where nothing else is left.
        """
        if self.rest > MOSTLY_REST:
            return Rest.name
        spoken = [item for item in self.parts if not isinstance(item[1], First | Rest)]
        by_name = grouped(spoken, lambda item: item[1].name)
        weights = {name: sum(weight for weight, _ in items) for name, items in by_name.items()}
        return max(weights, key=lambda name: weights[name], default=First.name)

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` reads.

        Examples
        --------
        >>> Rule([(1.0, Offset(1))]).to_json()
        {'parts': [{'part': 'offset', 'steps': 1, 'weight': 1.0}]}
        """
        parts = [{**_part_json(part), "weight": round(w, 3)} for w, part in self.parts]
        if self.distances is None:
            return {"parts": parts}
        return {"parts": parts, "distances": self.distances.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], classes: Sequence[int] = ()) -> Rule:
        """Read a rule, from what `to_json` gives or as written by hand.

        Parameters
        ----------
        data : ``parts``, each with its ``weight``, and ``distances`` where rest is one of them.
        classes : of every token the number of its word class, where kinds are named by these.

        Examples
        --------
        >>> comma = {"part": "word of a kind", "kind": {"tokens": [28]}, "weight": 0.8}
        >>> print(Rule.from_json({"parts": [comma, {"part": "first token", "weight": 0.2}]}))
        80% every word of the kind 1 tokens …; 20% the first token
        """
        table = data.get("distances")
        distances = None
        if table is not None:
            distances = Distances(tuple(table["back"]), tuple(table["first"]))
        weighted = []
        for part in data["parts"]:
            weighted.append((float(part["weight"]), _part_from(part, classes)))
        return cls(weighted, distances)

    def weighted(self, weights: Sequence[float]) -> Rule:
        """The same parts with other weights, in the order of `parts`."""
        pairs = zip(weights, self.parts, strict=True)
        return replace(self, parts=[(float(weight), part) for weight, (_, part) in pairs])


def else_first(rows: Float[Tensor, "*b t t"]) -> Float[Tensor, "*b t t"]:
    """Give what rows lack of 1 to the first token."""
    rows = rows.clone()
    rows[..., 0] += 1 - rows.sum(-1)
    return rows


def _part_json(part: Part) -> dict[str, Any]:
    """A part's tag and fields."""
    data: dict[str, Any] = {"part": part.tag}
    for each in fields(part):  # type: ignore[arg-type]
        value = getattr(part, each.name)
        if isinstance(value, Kind):
            value = value.to_json()
        elif isinstance(value, Part):
            value = _part_json(value)
        data[each.name] = value
    return data


def _part_from(data: Mapping[str, Any], classes: Sequence[int]) -> Part:
    """Read a part."""
    tag = data.get("part")
    if tag not in _BY_TAG:
        raise BadInput(f"{tag!r} is no part of a rule: a part is one of {', '.join(_BY_TAG)}.")
    read: dict[str, Callable[..., Any]] = {
        "kind": Kind.from_json,
        "then": _part_from,
        "otherwise": _part_from,
    }
    values = dict[str, Any]()
    for name, value in data.items():
        if name not in ("part", "weight"):
            values[name] = read[name](value, classes) if name in read else value
    return _BY_TAG[tag](**values)
