"""What every analysis and experiment returns: tables, arrays, claims, and where they come from.

A claim is decided by a rule as text, ``ours > 2 * control``: parsed, not executed, arithmetic and comparisons only.

A run folder holds ``results.json`` (tables and claims), ``manifest.json`` (provenance), ``arrays.safetensors`` and
``report.html``. How it is written, and never over anybody's files, is in `qkscope.runs.folder`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any

from qkscope.errors import BadInput
from qkscope.kinds import checked_class
from qkscope.runs.folder import MANIFEST, RESULTS, SCHEMA, as_json, check_folder, read_json, write_run


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


_OF_THE_FOLDER = ("schema", "experiment", "files")  # what a manifest says besides what made the result


@checked_class
@dataclass(frozen=True)
class Result:
    """A finished analysis or experiment.

    Parameters
    ----------
    experiment : what was run, as ``verb/task`` or ``paper/figure``.
    tables : rows by the name of their table; a row is a mapping from column to value.
    claims : what was claimed beforehand, with the numbers that decide it.
    arrays : tensors by name.
    preset : of a figure of a paper.
    model : what was looked into, by name.
    seed : of all draws.
    seconds : how long it took.
    answer : the finding in one sentence, for people.
    provenance : what made it: versions, weights, task, options.

    Examples
    --------
    >>> Result("demo", {"heads": [{"head": "L1H0", "accuracy": 0.5}]}, answer="L1H0 is right in half of them.")
    <Result demo | heads (1) | L1H0 is right in half of them.>
    """

    comes_from = "as the verbs return"
    main = ""  # the name of the table that answers; the first one where none is named

    experiment: str
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    claims: Sequence[Claim] = ()
    arrays: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    model: str | None = None
    seed: int = 0
    seconds: float = 0.0
    answer: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __init_subclass__(cls) -> None:
        """Every kind of result is shown as results are: a dataclass would dump its fields."""
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """One line: what it is, of which model, its tables with their rows, and the answer."""
        tables = ", ".join(f"{name} ({len(rows)})" for name, rows in self.tables.items()) or "no tables"
        said = [self.experiment, *([self.model] if self.model else []), tables]
        held = sum(claim.holds for claim in self.claims)
        claims = [f"{held} of {len(self.claims)} claims hold"] if self.claims else []
        answer = [shorten(self.answer, 100, placeholder=" …")] if self.answer else []
        return f"<{type(self).__name__} {' | '.join([*said, *claims, *answer])}>"

    def table(self, name: str | None = None) -> list[dict[str, Any]]:
        """The rows of one table.

        Parameters
        ----------
        name : of the table; by default the one that answers what was asked.

        Examples
        --------
        >>> Result("demo", {"heads": [{"head": "L1H0", "accuracy": 0.5}]}).table()
        [{'head': 'L1H0', 'accuracy': 0.5}]
        """
        chosen = (self.main or next(iter(self.tables), "")) if name is None else name
        if chosen not in self.tables:
            there = ", ".join(self.tables) or "none"
            raise BadInput(f"there is no table {chosen!r} in this result: there is {there}.")
        return [dict(row) for row in self.tables[chosen]]

    def to_pandas(self, table: str | None = None) -> Any:
        """A table as a pandas DataFrame.

        Parameters
        ----------
        table : its name; by default the one that answers what was asked.

        Examples
        --------
        >>> Result("demo", {"heads": [{"head": "L1H0", "accuracy": 0.5}]}).to_pandas()  # doctest: +SKIP
           head  accuracy
        0  L1H0       0.5
        """
        rows = self.table(table)
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise BadInput("pandas is not installed: install it, or read the rows from result.tables.") from None
        return pandas.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """The contract's JSON: NaN and infinities are null."""
        found = {
            "schema": SCHEMA, "experiment": self.experiment, "preset": self.preset, "model": self.model,
            "seed": self.seed, "seconds": self.seconds, "answer": self.answer,
            "claims": [claim.to_json() for claim in self.claims], "tables": self.tables,
        }  # fmt: skip
        return {name: plain_value(value) for name, value in found.items()}

    def _repr_html_(self) -> str:
        """What a notebook shows. The page is a room below this one, so it is found by name."""
        return str(import_module("qkscope.page.report").widget_html(self))

    @classmethod
    def read(cls, folder: str | Path) -> Result:
        """A run folder read back; one that is missing, half-written or of a newer qkscope is refused.

        Parameters
        ----------
        folder : that a verb or `write` wrote.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as above:
        ...     folder = Result("demo", {"heads": [{"head": "L1H0"}]}).write(f"{above}/run")
        ...     Result.read(folder).tables
        {'heads': [{'head': 'L1H0'}]}
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise BadInput(f"there is no folder {folder}: name one that a qkscope command wrote.")
        if not (folder / RESULTS).is_file():
            raise BadInput(f"{folder} holds no results.json, so no finished run: run the command that writes it again.")
        stored, manifest = (read_json(folder / name) for name in (RESULTS, MANIFEST))
        try:
            claims = [
                Claim(*(c[part] for part in ("claim", "paper", "ours", "control", "rule"))) for c in stored["claims"]
            ]
            result = Result(
                **{name: stored[name] for name in ("experiment", "tables", "preset", "model", "seed", "seconds")},
                claims=claims,
                answer=stored.get("answer", ""),
                provenance={name: value for name, value in manifest.items() if name not in _OF_THE_FOLDER},
                arrays=_read_arrays(folder / "arrays.safetensors"),
            )
        except (KeyError, TypeError, ValueError, OSError):
            raise BadInput(f"{folder} is damaged or half-written: run the command that made it again.") from None
        return result

    def write(self, folder: str | Path, *, files: Mapping[str, str | bytes] | None = None) -> Path:
        """Write the run folder; one that holds anything but a run of this kind is refused and left as it is.

        Parameters
        ----------
        folder : a new one, or one of an earlier run of this kind.
        files : further files by relative name (report.html, figures/…).
        """
        return write_result(self, folder, files)


def write_result(
    result: Result,
    folder: str | Path,
    files: Mapping[str, str | bytes] | None = None,
    *,
    state: str = "",
    later: Sequence[str] = (),
) -> Path:
    """What `Result.write` does, in a folder that keeps more; ``state`` and ``later`` as in `write_run`."""
    folder = check_folder(folder, result.experiment.partition("/")[0], state=state)
    contents: dict[str, str | bytes] = {RESULTS: as_json(result.to_json()), **(files or {})}
    if result.arrays:
        from safetensors.torch import save

        contents["arrays.safetensors"] = save({k: v.detach().cpu().contiguous() for k, v in result.arrays.items()})
    write_run(folder, result.experiment, contents, plain_value(result.provenance), state=state, later=later)
    return folder


def _read_arrays(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def plain_value(value: Any) -> Any:
    """Mappings, sequences and scalars as JSON has them: NaN and infinities are null."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, Sequence):
        return [plain_value(item) for item in value]
    return str(value)
