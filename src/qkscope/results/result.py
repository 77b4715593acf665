"""What every analysis and experiment returns: tables, arrays, claims; and what made it
(`provenance`, `made_result`).

A run folder holds ``results.json`` (tables and claims), ``manifest.json`` (provenance),
``arrays.safetensors`` and ``report.html``. How it is written, and never over anybody's files, is in
`qkscope.results.folder`. What made a result is its command, what was asked, versions and threads. No
time, no host: a rerun says the same.
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

#: A table.
Rows = list[dict[str, Any]]
_STORED = ("experiment", "preset", "model", "seed", "seconds", "answer", "claims", "tables")
_FOLDER = ("schema", "experiment", "files")  # what a manifest says besides what made the result


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
        """Give every kind of result this class's repr: a dataclass would dump its fields."""
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """One line: what it is, of which model, its tables with their rows, and the answer."""
        tables = (
            ", ".join(f"{name} ({len(rows)})" for name, rows in self.tables.items()) or "no tables"
        )
        answer = shorten(self.answer, 100, placeholder=" …")
        parts = filter(
            None, (self.experiment, self.model, tables, count_claims(self.claims), answer)
        )
        return f"<{type(self).__name__} {' | '.join(parts)}>"

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
            raise BadInput(
                f"there is no table {chosen!r} in this result: there is {', '.join(self.tables) or 'none'}."
            )
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
        return import_module("pandas").DataFrame(self.table(table))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values: NaN and infinities are null."""
        fields = {name: getattr(self, name) for name in _STORED}
        return {
            "schema": disk.SCHEMA,
            **plain_value({**fields, "claims": [claim.to_json() for claim in self.claims]}),
        }

    def _repr_html_(self) -> str:
        """What a notebook shows. The page is a room below this one, so it is found by name."""
        return str(import_module("qkscope.show.page").widget_html(self))

    @classmethod
    def read(cls, folder: str | Path) -> Result:
        """A run folder read back; one that is missing, half-written or of a newer qkscope is
        refused.

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
        if not (folder / disk.RESULTS).is_file():
            raise BadInput(
                f"{folder} holds no results.json, so no finished run: run the command that writes it again."
            )
        stored = disk.read_json(folder / disk.RESULTS)
        manifest = disk.read_json(folder / disk.MANIFEST)
        arrays = folder / "arrays.safetensors"
        try:
            fields = {name: stored[name] for name in _STORED}
            return Result(
                **{**fields, "claims": [Claim.from_json(row) for row in stored["claims"]]},
                provenance={name: value for name, value in manifest.items() if name not in _FOLDER},
                arrays=disk.read_tensors(arrays, "arrays")[0] if arrays.exists() else {},
            )
        except (KeyError, TypeError, ValueError) as error:
            why = f" ({str(error).rstrip('.')})" if isinstance(error, BadInput) else ""
            raise BadInput(
                f"{folder} is damaged or half-written{why}: run the command that made it again."
            ) from None

    def write(self, folder: str | Path, *, files: Mapping[str, str | bytes] | None = None) -> Path:
        """Write the run folder; one that holds anything but a run of this kind is refused and left
        as it is.

        Parameters
        ----------
        folder : a new one, or one of an earlier run of this kind.
        files : further files by relative name (report.html, figures/…).
        """
        return write_result(self, folder, files or {})


def write_result(
    result: Result, folder: str | Path, files: Mapping[str, str | bytes], *, keep: str = "(?!)"
) -> Path:
    """What `Result.write` does, in a folder that keeps more: ``keep`` as in `write_run`."""
    folder = disk.check_folder(folder, result.experiment.partition("/")[0])
    arrays = (
        {"arrays.safetensors": disk.tensor_bytes("arrays", result.arrays, {})}
        if result.arrays
        else {}
    )
    disk.write_run(
        folder, result.to_json(), {**files, **arrays}, plain_value(result.provenance), keep
    )
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


# ---------------------------------------------------------------- what made a result


def provenance(**asked: Any) -> dict[str, Any]:
    """What made a result: command, what was asked, versions, threads. No time, no host: a rerun
    gives the same.
    """
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {
        package: version(package) for package in ("qkscope", "transformers", "numpy", "safetensors")
    }
    program = Path(sys.argv[0]).parts[-2:]
    typed = program[-1:] == ("qkscope",) or program == ("qkscope", "__main__.py")  # and not pytest
    command = shlex.join(["qkscope", *sys.argv[1:]]) if typed else None
    return {
        "command": command,
        "asked": asked,
        "versions": versions,
        "threads": torch.get_num_threads(),
    }


def made_result(path: str | Path) -> Result:
    """What made a run, and whether it is the same here: a row per fact; what is not compared has
    nothing ``here``.

    Parameters
    ----------
    path : a run folder, or a .safetensors file of ours.
    """
    path = Path(path)
    here = provenance()
    if path.suffix == ".safetensors":
        manifest = disk.read_tensors(path)[1]
        stored = {"asked": manifest.get("about") or manifest.get("moments", {}).get("about")}
    elif (path / disk.MANIFEST).is_file():
        stored = disk.read_json(path / disk.MANIFEST)
    else:
        raise BadInput(
            f"{path} holds no manifest.json: name a folder or a .safetensors file that qkscope wrote."
        )
    asked = stored.get("asked") or {}
    files = stored.get("files") or {}
    command = (
        re.sub(r" --part \S+", "", stored.get("command") or "") or None
    )  # a part alone makes no run
    versions = {name: stored.get("versions", {}).get(name) for name in here["versions"]}
    said = {
        "command": command,
        **asked,
        **versions,
        "threads": stored.get("threads"),
        "files": len(files) or None,
    }
    there = {what: value for what, value in said.items() if value is not None}
    unchanged = sum(disk.is_unchanged(path, name, stored) for name in files)
    now = {**here["versions"], "threads": here["threads"], "files": unchanged}
    rows = [
        {
            "what": what,
            "there": value,
            "here": now.get(what),
            "same": value == now[what] if what in now else None,
        }
        for what, value in there.items()
    ]
    differs = [f"{row['what']} {row['here']}" for row in rows if row["same"] is False]
    answer = (
        f"Here it is otherwise: {', '.join(differs)}."
        if differs
        else "What can be compared is the same here."
    )
    told = [
        {"line": f"{what}: {text if what == 'command' else abbreviate(str(text), 100)}"}
        for what, text in there.items()
    ]
    return Result("made", {"made": rows, "said": told}, answer=answer)
