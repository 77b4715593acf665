"""What every analysis and experiment returns: tables, arrays, claims, and where they come from.

A run folder holds ``results.json`` (tables and claims), ``manifest.json`` (provenance), ``arrays.safetensors`` and
``report.html``. How it is written, and never over anybody's files, is in `qkscope.runs.folder`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any

from qkscope.errors import BadInput
from qkscope.kinds import checked_class
from qkscope.runs.claims import Claim, count_claims
from qkscope.runs.folder import MANIFEST, RESULTS, SCHEMA, as_json, check_folder, read_json, write_run

_OF_THE_FOLDER = ("schema", "experiment", "files", "before")  # what a manifest says besides what made the result


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
        claims = [count_claims(self.claims)] if self.claims else []
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
        return str(import_module("qkscope.show.page").widget_html(self))

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
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        stored, manifest = (read_json(folder / name) for name in (RESULTS, MANIFEST))
        arrays = folder / "arrays.safetensors"
        try:
            claims = [Claim.from_json(row) for row in stored["claims"]]
            result = Result(
                **{name: stored[name] for name in ("experiment", "tables", "preset", "model", "seed", "seconds")},
                claims=claims,
                answer=stored.get("answer", ""),
                provenance={name: value for name, value in manifest.items() if name not in _OF_THE_FOLDER},
                arrays=dict(load_file(arrays)) if arrays.exists() else {},
            )
        except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
            why = f" ({str(error).rstrip('.')})" if isinstance(error, BadInput) else ""
            raise BadInput(f"{folder} is damaged or half-written{why}: run the command that made it again.") from None
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
    keep: str = "(?!)",
) -> Path:
    """What `Result.write` does, in a folder that keeps more; ``keep`` as in `write_run`."""
    folder = check_folder(folder, result.experiment.partition("/")[0])
    contents: dict[str, str | bytes] = {RESULTS: as_json(result.to_json()), **(files or {})}
    if result.arrays:
        from safetensors.torch import save

        contents["arrays.safetensors"] = save({k: v.detach().cpu().contiguous() for k, v in result.arrays.items()})
    write_run(folder, result.experiment, contents, plain_value(result.provenance), keep=keep)
    return folder


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
    if hasattr(value, "tolist"):  # numbers of numpy and torch
        return plain_value(value.tolist())
    return str(value)
