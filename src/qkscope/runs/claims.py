"""A claim and the rule that decides it, as text: ``ours > 2 * control``. Parsed, not executed: arithmetic and
comparisons only.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qkscope.errors import BadInput


@dataclass(frozen=True)
class Claim:
    """A statement, what the paper says, what we measured, the same number for a control, and the rule that decides."""

    claim: str
    paper: str
    ours: float | None
    control: float | None
    rule: str

    def __repr__(self) -> str:
        """One line: the claim, its numbers, and whether its rule holds."""
        return f"<Claim {self.claim} | ours {self.ours}, control {self.control} | {self.rule}: {self.holds}>"

    @property
    def holds(self) -> bool:
        """Computed from the rule, never typed in."""
        return rule_holds(self.rule, {"ours": self.ours, "control": self.control})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "claim": self.claim, "paper": self.paper, "ours": self.ours, "control": self.control,
            "rule": self.rule, "holds": self.holds,
        }  # fmt: skip


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max}


def rule_holds(rule: str, values: Mapping[str, float | None]) -> bool:
    """Whether a rule holds for these values; a missing value (None or NaN) never satisfies one.

    >>> rule_holds("ours > 2 * control", {"ours": 0.42, "control": 0.13})
    True
    """
    try:
        tree = ast.parse(rule, mode="eval").body
    except SyntaxError:
        raise BadInput(f"the rule {rule!r} cannot be read: write a comparison of ours and control.") from None
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in _CALLS]
    if any(name in values and (values[name] is None or values[name] != values[name]) for name in used):
        return False
    held = _evaluate(tree, values, rule)
    if not isinstance(held, bool):
        raise BadInput(f"the rule {rule!r} compares nothing: it should be true or false.")
    return held


def _evaluate(node: ast.expr, values: Mapping[str, float | None], rule: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, values, rule)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_evaluate(node.left, values, rule), _evaluate(node.right, values, rule))
    if isinstance(node, ast.BoolOp):
        parts = [_evaluate(part, values, rule) for part in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.Compare) and all(type(op) in _BINARY for op in node.ops):
        terms = [_evaluate(term, values, rule) for term in (node.left, *node.comparators)]
        return all(_BINARY[type(op)](a, b) for op, a, b in zip(node.ops, terms, terms[1:], strict=False))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS and not node.keywords:
        return _CALLS[node.func.id](*(_evaluate(argument, values, rule) for argument in node.args))
    raise BadInput(
        f"the rule {rule!r} uses {ast.unparse(node)!r}: only ours, control, numbers and comparisons may stand there."
    )
