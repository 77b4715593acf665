"""Results of verbs and experiments: tables, arrays, claims, and their provenance.

A run folder holds ``results.json`` (tables and claims), ``manifest.json`` (provenance),
``arrays.safetensors`` and ``report.html``. How it is written, and never over other files, is in
`qkscope.results.folder`. The provenance of a result is its command, what was asked, versions and
threads. No time, no host: a rerun has the same provenance.
"""

from __future__ import annotations

import math
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from qkscope.checking import checked_class
from qkscope.errors import BadInput
from qkscope.results import folder as disk
from qkscope.results.claims import Claim, count_claims
from qkscope.text import abbreviate

Record = Mapping[str, Any]
"""A row of a table, to be read."""
Records = Sequence[Record]
"""A table, to be read."""
Rows = list[dict[str, Any]]
"""A table, as it is made."""
Tables = dict[str, Rows]
"""Tables by name."""
_STORED = ("experiment", "preset", "model", "seed", "seconds", "answer", "claims", "tables")
_ARRAYS = "arrays.safetensors"
_NO_PROVENANCE = ("schema", "experiment", "files")  # entries of a manifest that describe its folder


@checked_class
@dataclass(frozen=True)
class Result:
    """A finished analysis or experiment.

    Parameters
    ----------
    experiment : what was run, as ``verb/task`` or ``paper/figure``.
    tables : rows by the name of their table; a row is a mapping from column to value.
    claims : statements fixed beforehand, with the numbers that decide them.
    arrays : tensors by name.
    preset : of a figure of a paper.
    model : the model's name.
    seed : of all draws.
    seconds : how long it took.
    answer : the finding in one sentence, for people.
    provenance : what made it: versions, weights, task, options.

    Examples
    --------
    >>> rows = [{"head": "L1H0", "accuracy": 0.5}]
    >>> Result("demo", {"heads": rows}, answer="L1H0 is right in half of them.")
    <Result demo | heads (1) | L1H0 is right in half of them.>
    """

    main = ""  # the name of the table that answers the question; the first one by default

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
        """Give every subclass this class's repr: a dataclass would print all its fields."""
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """One line: experiment, model, tables with their numbers of rows, claims, answer."""
        sizes = [f"{name} ({len(rows)})" for name, rows in self.tables.items()]
        tables = ", ".join(sizes) or "no tables"
        answer = shorten(self.answer, 100, placeholder=" …")
        parts = (self.experiment, self.model, tables, count_claims(self.claims), answer)
        shown = " | ".join(part for part in parts if part)
        return f"<{type(self).__name__} {shown}>"

    def table(self, name: str | None = None) -> list[dict[str, Any]]:
        """The rows of one table.

        Parameters
        ----------
        name : of the table; by default the one that answers the question.

        Examples
        --------
        >>> Result("demo", {"heads": [{"head": "L1H0", "accuracy": 0.5}]}).table()
        [{'head': 'L1H0', 'accuracy': 0.5}]
        """
        if name is None:
            name = self.main or next(iter(self.tables), "")
        if name not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise BadInput(f"there is no table {name!r} in this result: there is {known}.")
        return [dict(row) for row in self.tables[name]]

    def to_pandas(self, table: str | None = None) -> Any:
        """A table as a pandas DataFrame.

        Parameters
        ----------
        table : its name; by default the one that answers the question.

        Examples
        --------
        >>> result = Result("demo", {"heads": [{"head": "L1H0", "accuracy": 0.5}]})
        >>> result.to_pandas()  # doctest: +SKIP
           head  accuracy
        0  L1H0       0.5
        """
        return import_module("pandas").DataFrame(self.table(table))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values: NaN and infinities are null."""
        stored = {name: getattr(self, name) for name in _STORED}
        stored["claims"] = [claim.to_json() for claim in self.claims]
        return {"schema": disk.SCHEMA, **plain_value(stored)}

    def _repr_html_(self) -> str:
        """Draw the result in a notebook."""
        page = import_module("qkscope.show.page")  # by name: a room that imports this one
        return str(page.widget_html(self))

    @classmethod
    def read(cls, folder: str | Path) -> Result:
        """Read a run folder.

        Parameters
        ----------
        folder : that a verb or `write` wrote; one that is missing, half-written or of a newer
            qkscope is refused.

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
        if not (folder / disk.RESULTS).is_file():
            raise BadInput(
                f"{folder} holds no results.json, so no finished run: "
                "run the command that writes it again."
            )
        stored = disk.read_run_file(folder / disk.RESULTS)
        manifest = disk.read_run_file(folder / disk.MANIFEST)
        for name in _NO_PROVENANCE:
            manifest.pop(name, None)
        try:
            fields = {name: stored[name] for name in _STORED}
            fields["claims"] = [Claim.from_json(row) for row in stored["claims"]]
            return Result(**fields, provenance=manifest, arrays=_read_arrays(folder))
        except (KeyError, TypeError, ValueError) as error:
            why = ""
            if isinstance(error, BadInput):
                reason = str(error).rstrip(".")
                why = f" ({reason})"
            raise BadInput(
                f"{folder} is damaged or half-written{why}: run the command that made it again."
            ) from None

    def write(self, folder: str | Path, *, files: Mapping[str, str | bytes] | None = None) -> Path:
        """Write the run folder.

        Parameters
        ----------
        folder : a new one, or one of an earlier run of this kind; one that holds anything else is
            refused and left as it is.
        files : further files by relative name (report.html, figures/…).
        """
        return write_result(self, folder, files or {})


def _read_arrays(folder: Path) -> dict[str, Any]:
    """Read the tensors of a run folder; none where the run wrote none."""
    path = folder / _ARRAYS
    return disk.read_tensors(path, "arrays")[0] if path.exists() else {}


def write_result(
    result: Result, folder: str | Path, files: Mapping[str, str | bytes], *, keep: str = "(?!)"
) -> Path:
    """Write a result's folder as `Result.write` does, with ``keep`` as in `write_run`."""
    folder = disk.check_folder(folder, result.experiment.partition("/")[0])
    contents = dict(files)
    if result.arrays:
        contents[_ARRAYS] = disk.tensor_bytes("arrays", result.arrays, {})
    disk.write_run(folder, result.to_json(), contents, plain_value(result.provenance), keep)
    return folder


def plain_value(value: Any) -> Any:
    """Convert mappings, sequences and scalars to JSON's: NaN and infinities become null."""
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


# ---------------------------------------------------------------- provenance


def provenance(**asked: Any) -> dict[str, Any]:
    """The command, what was asked, versions and threads; the same in a rerun."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("qkscope", "transformers", "numpy", "safetensors"):
        versions[package] = version(package)
    return {
        "command": _command(),
        "asked": asked,
        "versions": versions,
        "threads": torch.get_num_threads(),
    }


def _command() -> str | None:
    """The command line of this process; None where it is not qkscope's (Python, pytest)."""
    program = Path(sys.argv[0]).parts[-2:]
    if program[-1:] == ("qkscope",) or program == ("qkscope", "__main__.py"):
        return shlex.join(["qkscope", *sys.argv[1:]])
    return None


def made_result(path: str | Path) -> Result:
    """Say what made a run, and whether versions, threads and files are the same now: a row a fact.

    A fact that cannot be compared has no ``here``.

    Parameters
    ----------
    path : a run folder, or a .safetensors file of ours.
    """
    path = Path(path)
    stored = _stored_provenance(path)
    there = _facts(stored)
    here = _facts_here(path, stored)
    rows = []
    differences = []
    for name, value in there.items():
        row = {"what": name, "there": value, "here": here.get(name), "same": None}
        if name in here:
            row["same"] = value == here[name]
        if row["same"] is False:
            differences.append(f"{name} {here[name]}")
        rows.append(row)
    answer = "What can be compared is the same here."
    if differences:
        answer = f"Here it is otherwise: {', '.join(differences)}."
    lines = []
    for name, value in there.items():
        text = value if name == "command" else abbreviate(str(value), 100)
        lines.append({"line": f"{name}: {text}"})
    return Result("made", {"made": rows, "said": lines}, answer=answer)


def _stored_provenance(path: Path) -> dict[str, Any]:
    """Read the manifest of a run folder, or what a file of tensors was made from."""
    if path.suffix == ".safetensors":
        manifest = disk.read_tensors(path)[1]
        about = manifest.get("about") or manifest.get("moments", {}).get("about")
        return {"asked": about}
    if not (path / disk.MANIFEST).is_file():
        raise BadInput(
            f"{path} holds no manifest.json: "
            "name a folder or a .safetensors file that qkscope wrote."
        )
    return disk.read_run_file(path / disk.MANIFEST)


def _facts(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a manifest, by name: command, what was asked, versions, threads, files."""
    # a part of a run was made by a command of its own: without --part it makes the whole run
    command = re.sub(r" --part \S+", "", stored.get("command") or "")
    facts: dict[str, Any] = {"command": command or None}
    facts |= stored.get("asked") or {}
    versions = stored.get("versions", {})
    for name in provenance()["versions"]:
        facts[name] = versions.get(name)
    files = stored.get("files") or {}
    facts["threads"] = stored.get("threads")
    facts["files"] = len(files) or None
    return {name: value for name, value in facts.items() if value is not None}


def _facts_here(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts now: versions, threads, and how many files are as the run wrote them."""
    here = provenance()
    files = stored.get("files") or {}
    unchanged = sum(disk.is_unchanged(path, name, stored) for name in files)
    return {**here["versions"], "threads": here["threads"], "files": unchanged}
