"""Claims: a statement, its measured number, the control's number, and the rule that decides.

A rule is text, ``ours > 2 * control``: parsed, not executed, arithmetic and comparisons only. Where
the number has an interval, the rule is evaluated all along it: if its answers differ, the data do
not tell, and the claim is a tie.

Every claim has a source. ``stated``: the paper says it, and ``paper`` begins with the place where
it does. ``implied``: the paper needs it, but does not say it (``paper`` begins with that word).
``ours``: we ask it (``paper`` is empty). A claim that fails has a reason: ``counter-finding``,
unless something better is argued beside it in one sentence (``why``). A claim without an interval
is open, unless it is ``exact``; one that holds says little if its rule is ``lenient``.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from qkscope.errors import BadInput

Number = float | None
_STEPS = 64  # of an interval, at whose ends a rule is evaluated
REASONS = (
    "counter-finding",
    "not run as described",
    "small model",
    "other setting",
    "not run here",
    "needs default",
)
NEEDS_DEFAULT = "needs default"
_VERDICTS = {True: "holds", None: "tie", False: "fails"}


@dataclass(frozen=True)
class Claim:
    """A statement with the numbers that decide it.

    Parameters
    ----------
    claim : the statement, and what ``ours`` and ``control`` are.
    paper : what the paper says, after the place where it does, as ``Fig. 9: negligible``;
        ``implied`` (and by what) where it is only implied; empty where the claim is ours.
    ours, control : what we measured, and the same number for a control.
    rule : the comparison of ``ours`` and ``control`` that decides.
    low, high : the 95% interval of ``ours``; where it is paired with the control, that of their
        difference, moved to where ours stands.
    reason : why it would fail, one of `REASONS`.
    why : the argument for that reason, in one sentence.
    changed : what the rule was before, and why it is another now.
    exact : no estimate, so that it needs no interval: an identity, or a permutation test, whose
        level is its control.
    lenient : why the rule says little where it holds, as of a rule that no head could fail.

    Examples
    --------
    >>> shift = {"ours": 0.02, "control": None, "low": -0.01, "high": 0.05}
    >>> Claim("both move more than either", "Fig. 9: larger", rule="ours > 0", **shift)
    <Claim both move more than either | ours 0.02, control None | ours > 0: tie>
    """

    claim: str
    paper: str
    ours: float | None
    control: float | None
    rule: str
    low: float | None = None
    high: float | None = None
    reason: str = "counter-finding"
    why: str = ""
    changed: str = ""
    exact: bool = False
    lenient: str = ""

    def __repr__(self) -> str:
        """One line: the claim, its numbers, and whether its rule holds."""
        numbers = f"ours {self.ours}, control {self.control}"
        return f"<Claim {self.claim} | {numbers} | {self.rule}: {self.verdict}>"

    @property
    def source(self) -> str:
        """Where the statement comes from: ``stated``, ``implied`` or ``ours``."""
        if self.paper in ("", "not in the paper"):
            return "ours"
        if self.paper.startswith("implied"):
            return "implied"
        return "stated"

    @property
    def holds(self) -> bool | None:
        """Whether the rule holds; None is a tie: it does not at every place of the interval."""
        return rule_verdict(self.rule, self.ours, self.control, self.low, self.high)

    @property
    def verdict(self) -> str:
        """``holds``, ``tie`` or ``fails``; ``needs default`` of a run too short to fail."""
        if self.holds is False and self.reason == NEEDS_DEFAULT:
            return NEEDS_DEFAULT
        return _VERDICTS[self.holds]

    @property
    def decided(self) -> bool:
        """Whether the rule can be evaluated along an interval, or needs none."""
        return self.exact or not (_missing(self.low) or _missing(self.high))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values; ``reason`` and ``why`` are empty unless the claim fails."""
        row = asdict(self)
        row["source"] = self.source
        row["holds"] = self.holds
        if self.holds is not False:
            row["reason"] = ""
            row["why"] = ""
        elif _missing(self.ours):
            row["reason"] = "not run here"
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Claim:
        """Read a claim of a run folder; refused where its rule contradicts the stored verdict."""
        stored = {field.name: row[field.name] for field in fields(cls) if field.name in row}
        stored["reason"] = row["reason"] or REASONS[0]
        claim = cls(**stored)
        if claim.holds is not row["holds"]:
            stored_as = row["holds"]
            raise BadInput(
                f"the claim {claim.claim!r} is stored as {stored_as}, "
                f"and its rule says {claim.holds}."
            )
        return claim


def count_claims(claims: Sequence[Claim]) -> str:
    """How many hold and how many are ties, in words; nothing where there are no claims."""
    if not claims:
        return ""
    verdicts = [claim.verdict for claim in claims]
    ties = verdicts.count("tie")
    hold = f"{verdicts.count('holds')} of {len(claims)} claims hold"
    if ties == 0:
        return hold
    if ties == 1:
        return f"{hold}, 1 is a tie"
    return f"{hold}, {ties} are ties"


def rule_verdict(
    rule: str, ours: Number, control: Number, low: Number = None, high: Number = None
) -> bool | None:
    """Whether a rule holds of a number; None where it does at one place of its interval only.

    >>> rule_verdict("ours > control", 0.5, 0.4, low=0.45, high=0.55)
    True
    >>> rule_verdict("ours > 0", 0.1, None, -0.1, 0.3) is None
    True
    """
    places = [ours]
    if low is not None and high is not None and not _missing(low + high):
        width = high - low
        places += [low + width * i / _STEPS for i in range(_STEPS + 1)]
    verdicts = {rule_holds(rule, {"ours": value, "control": control}) for value in places}
    return verdicts.pop() if len(verdicts) == 1 else None


def _missing(value: float | None) -> bool:
    return value is None or not math.isfinite(value)  # JSON has no place for an infinite one


Operator = Callable[[Any, Any], Any]
_ARITHMETIC: dict[type, Operator] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type, Operator] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CALLS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max}
# a syntax error, x / 0, or an expression nested without end
_UNDECIDABLE = (SyntaxError, ArithmeticError, MemoryError, RecursionError)


def rule_holds(rule: str, values: Mapping[str, float | None]) -> bool:
    """Whether a rule holds for these values.

    A missing value (None, NaN or infinite) never satisfies a rule.

    >>> rule_holds("ours > 2 * control", {"ours": 0.42, "control": 0.13})
    True
    """
    try:
        tree = ast.parse(rule, mode="eval").body
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if any(_missing(values[name]) for name in names & values.keys()):
            return False
        holds = _evaluate(tree, values)
    except _UNDECIDABLE as error:
        why = f"cannot be decided ({error})"
    else:
        if isinstance(holds, bool):
            return holds
        why = "is neither true nor false"
    raise BadInput(f"the rule {rule[:80]!r} {why}: write a comparison of ours and control.")


def _evaluate(node: ast.expr, values: Mapping[str, float | None]) -> Any:
    """Evaluate an expression of numbers, names, arithmetic, comparisons, and, or, abs, min, max."""
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name() if node.id in values:
            return values[node.id]
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate(node.operand, values)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left = _evaluate(node.left, values)
            right = _evaluate(node.right, values)
            return _ARITHMETIC[type(node.op)](left, right)
        case ast.BoolOp():
            parts = [_evaluate(part, values) for part in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.Compare() if all(type(op) in _COMPARISONS for op in node.ops):
            return _compare(node, values)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _CALLS:
            arguments = [_evaluate(argument, values) for argument in node.args]
            return _CALLS[name](*arguments)
    raise SyntaxError(f"{ast.unparse(node)} is none of ours, control, numbers and comparisons")


def _compare(node: ast.Compare, values: Mapping[str, float | None]) -> bool:
    """Evaluate a chain of comparisons, ``0 < ours < 1``: every neighbouring pair compares so."""
    terms = [_evaluate(term, values) for term in (node.left, *node.comparators)]
    for operation, left, right in zip(node.ops, terms, terms[1:], strict=False):
        if not _COMPARISONS[type(operation)](left, right):
            return False
    return True
