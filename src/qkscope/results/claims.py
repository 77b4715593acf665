"""A claim: what the paper says, what we measured, the same number for a control, and the rule that
decides.

A rule is text, ``ours > 2 * control``: parsed, not executed, arithmetic and comparisons only. Where
the number has an interval, the rule is asked all along it: if its answers differ, the data do not
tell, and the claim is a tie.

Every claim has a source. ``stated``: the paper says it, and ``paper`` begins with the place where
it does. ``implied``: the paper needs it, but does not say it (``paper`` begins with that word).
``ours``: we ask it (``paper`` is empty). A claim that fails has a reason: ``refuted``, unless
something better is argued beside it in one sentence (``why``). A claim without an interval is open,
unless it is ``exact``; one that holds says little if its rule is ``lenient``.
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
_STEPS = 64  # places of an interval at which a rule is asked
REASONS = ("refuted", "not run as described", "small model", "other setting", "not run here")


@dataclass(frozen=True)
class Claim:
    """A statement with the numbers that decide it.

    Parameters
    ----------
    claim : what is said, and what ``ours`` and ``control`` are.
    paper : what the paper says, after the place where it does, as ``Fig. 9: negligible``;
        ``implied`` (and by what) where it is only implied; empty where the claim is ours.
    ours, control : what we measured, and the same number for a control.
    rule : decides, from ``ours`` and ``control``.
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
    >>> Claim("both move more than either", "Fig. 9: larger", 0.02, None, "ours > 0", low=-0.01, high=0.05)
    <Claim both move more than either | ours 0.02, control None | ours > 0: tie>
    """

    claim: str
    paper: str
    ours: float | None
    control: float | None
    rule: str
    low: float | None = None
    high: float | None = None
    reason: str = "refuted"
    why: str = ""
    changed: str = ""
    exact: bool = False
    lenient: str = ""

    def __repr__(self) -> str:
        """One line: the claim, its numbers, and whether its rule holds."""
        return f"<Claim {self.claim} | ours {self.ours}, control {self.control} | {self.rule}: {self.verdict}>"

    @property
    def source(self) -> str:
        """Who says so: ``stated``, ``implied`` or ``ours``."""
        if self.paper in ("", "not in the paper"):
            return "ours"
        return "implied" if self.paper.startswith("implied") else "stated"

    @property
    def holds(self) -> bool | None:
        """Computed from the rule, never typed in; None is a tie, which the interval of ours leaves
        open.
        """
        return rule_verdict(self.rule, self.ours, self.control, self.low, self.high)

    @property
    def verdict(self) -> str:
        """``holds``, ``tie`` or ``fails``."""
        return {True: "holds", None: "tie", False: "fails"}[self.holds]

    @property
    def decided(self) -> bool:
        """Whether there is an interval for the rule to be asked along, or no need of one."""
        return self.exact or not (_missing(self.low) or _missing(self.high))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values; ``reason`` and ``why`` are empty unless the claim fails."""
        reason = "not run here" if _missing(self.ours) else self.reason
        failure = (
            {"reason": reason, "why": self.why}
            if self.holds is False
            else {"reason": "", "why": ""}
        )
        return {**asdict(self), "source": self.source, "holds": self.holds, **failure}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Claim:
        """A claim as a run folder holds it; refused where its rule does not say of it what the
        folder does.
        """
        stored = {field.name: row[field.name] for field in fields(cls) if field.name in row}
        claim = cls(**stored | {"reason": row["reason"] or REASONS[0]})
        if claim.holds is not row["holds"]:
            raise BadInput(
                f"the claim {claim.claim!r} is stored as {row['holds']}, and its rule says {claim.holds}."
            )
        return claim


def count_claims(claims: Sequence[Claim]) -> str:
    """How many hold and how many are ties, in words; nothing where there are none."""
    verdicts = [claim.verdict for claim in claims]
    ties = {0: "", 1: ", 1 is a tie"}.get(
        verdicts.count("tie"), f", {verdicts.count('tie')} are ties"
    )
    return f"{verdicts.count('holds')} of {len(claims)} claims hold{ties}" if claims else ""


def rule_verdict(
    rule: str, ours: Number, control: Number, low: Number = None, high: Number = None
) -> bool | None:
    """What a rule says of a number; None where it says one thing at one place of its interval and
    another elsewhere.

    >>> rule_verdict("ours > control", 0.5, 0.4, low=0.45, high=0.55), rule_verdict("ours > 0", 0.1, None, -0.1, 0.3)
    (True, None)
    """
    places = [ours]
    if low is not None and high is not None and not _missing(low + high):
        places += [low + (high - low) * i / _STEPS for i in range(_STEPS + 1)]
    verdicts = {rule_holds(rule, {"ours": value, "control": control}) for value in places}
    return verdicts.pop() if len(verdicts) == 1 else None


def _missing(value: float | None) -> bool:
    return value is None or not math.isfinite(value)  # JSON has no place for an infinite one


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max}


def rule_holds(rule: str, values: Mapping[str, float | None]) -> bool:
    """Whether a rule holds for these values; a missing value (None, NaN or infinite) never
    satisfies one.

    >>> rule_holds("ours > 2 * control", {"ours": 0.42, "control": 0.13})
    True
    """
    try:
        tree = ast.parse(rule, mode="eval").body
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if any(_missing(values[name]) for name in used & values.keys()):
            return False
        if isinstance(holds := _evaluate(tree, values), bool):
            return holds
        why = "is neither true nor false"
    except (
        SyntaxError,
        ArithmeticError,
        MemoryError,
        RecursionError,
    ) as error:  # nested without end, or x / 0
        why = f"cannot be decided ({error})"
    raise BadInput(f"the rule {rule[:80]!r} {why}: write a comparison of ours and control.")


def _evaluate(node: ast.expr, values: Mapping[str, float | None]) -> Any:
    """The value of an expression of numbers, these names, arithmetic, comparisons, and, or, abs,
    min and max.
    """
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name() if node.id in values:
            return values[node.id]
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate(node.operand, values)
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](
                _evaluate(node.left, values), _evaluate(node.right, values)
            )
        case ast.BoolOp():
            return (all if isinstance(node.op, ast.And) else any)(
                [_evaluate(part, values) for part in node.values]
            )
        case ast.Compare() if all(type(op) in _BINARY for op in node.ops):
            terms = [_evaluate(term, values) for term in (node.left, *node.comparators)]
            return all(
                _BINARY[type(op)](a, b)
                for op, a, b in zip(node.ops, terms, terms[1:], strict=False)
            )
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _CALLS:
            return _CALLS[name](*(_evaluate(argument, values) for argument in node.args))
    raise SyntaxError(f"{ast.unparse(node)} is none of ours, control, numbers and comparisons")
