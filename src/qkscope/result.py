"""What every analysis and experiment returns: tables, arrays, claims, and where they come from.

A run folder holds ``results.json`` (tables and claims), ``manifest.json`` (provenance), ``arrays.safetensors`` and
``report.html``. It is written under a temporary name and renamed, so a folder that exists is whole.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qkscope.errors import BadInput
from qkscope.rules import rule_holds

SCHEMA = 1
_LARGEST_JSON = 1 << 28  # bytes
Kinds = tuple[type, ...]
_SAID: dict[str, Kinds] = {
    "command": (str, type(None)), "versions": (dict,), "threads": (int, type(None)), "asked": (dict,),
}  # fmt: skip
"""What a file of a run says of how it was made, where it says it."""


@dataclass(frozen=True)
class Claim:
    """A statement, what the paper says, what we measured, the same number for a control, and the rule that decides."""

    claim: str
    paper: str
    ours: float | None
    control: float | None
    rule: str

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


@dataclass(frozen=True)
class Result:
    """A finished analysis or experiment."""

    experiment: str
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    claims: Sequence[Claim] = ()
    arrays: Mapping[str, Any] = field(default_factory=dict)  # name -> tensor
    preset: str | None = None
    model: str | None = None
    seed: int = 0
    seconds: float = 0.0
    answer: str = ""  # the finding in one sentence, for people
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The contract's JSON: NaN and infinities are null."""
        return plain_value({
            "schema": SCHEMA, "experiment": self.experiment, "preset": self.preset, "model": self.model,
            "seed": self.seed, "seconds": self.seconds, "answer": self.answer,
            "claims": [claim.to_json() for claim in self.claims], "tables": self.tables,
        })  # fmt: skip

    def _repr_html_(self) -> str:
        """What a notebook shows. The page is a room below this one, so it is found by name."""
        return str(import_module("qkscope.page.report").widget_html(self))

    @classmethod
    def read(cls, folder: str | Path) -> Result:
        """A run folder read back; one that is missing, half-written or of a newer qkscope is refused."""
        folder = Path(folder)
        if not folder.is_dir():
            raise BadInput(f"there is no folder {folder}: name one that a qkscope command wrote.")
        if not (folder / "results.json").is_file():
            raise BadInput(f"{folder} holds no results.json, so no finished run: run the command that writes it again.")
        stored, manifest = (read_json(folder / name) for name in ("results.json", "manifest.json"))
        try:
            claims = [Claim(*(c[part] for part in ("claim", "paper", "ours", "control", "rule")))
                      for c in stored["claims"]]  # fmt: skip
            result = Result(
                experiment=stored["experiment"], tables=stored["tables"], claims=claims, preset=stored["preset"],
                model=stored["model"], seed=stored["seed"], seconds=stored["seconds"], answer=stored.get("answer", ""),
                provenance={name: value for name, value in manifest.items() if name != "schema"},
                arrays=_read_arrays(folder / "arrays.safetensors"),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OSError):
            raise BadInput(f"{folder} is damaged or half-written: run the command that made it again.") from None
        return result

    def write(self, folder: str | Path, *, files: Mapping[str, str | bytes] | None = None) -> Path:
        """Write the run folder; ``files`` are further files by relative name (report.html, figures/…)."""
        folder = check_folder(folder)
        contents: dict[str, str | bytes] = {
            "results.json": json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
            "manifest.json": json.dumps(
                plain_value({"schema": SCHEMA, **self.provenance}), indent=1, ensure_ascii=False
            )
            + "\n",
            **(files or {}),
        }
        if self.arrays:
            from safetensors.torch import save

            contents["arrays.safetensors"] = save({k: v.detach().cpu().contiguous() for k, v in self.arrays.items()})
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
            try:
                for name, content in contents.items():
                    path = fresh / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(_encoded(content) if isinstance(content, str) else content)
                fresh.chmod(0o755)
                _replace_folder(fresh, folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        return folder


def read_text(path: Path) -> str:
    """The text of a file that a run wrote; one too large to be that is not read into memory."""
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= _LARGEST_JSON else None
    except (OSError, ValueError):
        raise BadInput(f"{path} is damaged or half-written: run the command that made it again.") from None
    if text is None:
        raise BadInput(f"{path} has {size:,} bytes, more than any run writes: run the command that made it again.")
    return text


def read_json(path: Path, fields: Mapping[str, Kinds] | None = None) -> dict[str, Any]:
    """A JSON file of a run folder; refused if it is damaged or of a newer qkscope, or a field is of another kind."""
    text = read_text(path)
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError):  # cut off, or nested without end
        stored = None
    schema = stored.get("schema") if isinstance(stored, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise BadInput(
            f"{path.parent} was written by a newer qkscope (schema {schema}; this one reads {SCHEMA}): update it."
        )
    whole = isinstance(stored, dict) and type(schema) is int
    wanted = {**{name: kinds for name, kinds in _SAID.items() if whole and name in stored}, **(fields or {})}
    # type, not isinstance: True is no number of prompts
    if not whole or any(type(stored.get(name)) not in kinds for name, kinds in wanted.items()):
        raise BadInput(f"{path} is damaged or half-written: run the command that made it again.")
    return dict(stored)


def _read_arrays(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def check_folder(folder: str | Path) -> Path:
    """The folder, if results can be written there: ask before long work. Only a run of ours is ever replaced."""
    folder = Path(folder)
    if folder.is_file():
        raise BadInput(f"{folder} is a file: name a folder for the results.")
    check_writable(folder, folder.absolute().parent)  # it is replaced as a whole, from beside it
    ours = (".work", ".lock")  # of a run that is not finished
    foreign = folder.is_dir() and any(path.name not in ours for path in folder.iterdir())
    if foreign and not (folder / "results.json").exists():
        raise BadInput(f"{folder} holds other files than a run: name an empty or a new folder.")
    return folder


def check_writable(folder: Path, place: Path | None = None) -> None:
    """Ask before long work, of what is there already: a run that is refused later leaves no empty folder behind."""
    place = (place or folder).absolute()
    try:
        there = next(path for path in (place, *place.parents) if path.exists())
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror}): choose another folder.") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence why something could not be written: a full disk, one that is read-only by now."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written ({error.strerror or error}): make room, or choose another place."
        ) from None


def _encoded(text: str) -> bytes:
    """UTF-8; half a surrogate, which it has no place for, as JSON writes it."""
    return text.encode("utf-8", "backslashreplace")


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name, then rename: a reader never sees half a file."""
    part = path.with_suffix(path.suffix + ".part")
    with writing(path):
        try:
            with part.open("wb") as file:
                file.write(_encoded(text + "\n"))
                file.flush()
                os.fsync(file.fileno())  # else a power failure could leave the new name on an empty file
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _replace_folder(fresh: Path, folder: Path) -> None:
    """Put ``fresh`` in the place of ``folder``, which may exist."""
    if not folder.exists():
        os.rename(fresh, folder)
        return
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
    os.rename(folder, old / folder.name)
    os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def provenance(**asked: Any) -> dict[str, Any]:
    """What made a result: command, what was asked, versions, threads. No time, no host: a rerun gives the same."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("qkscope", "transformers", "numpy", "safetensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"command": command_line(), "asked": asked, "versions": versions, "threads": torch.get_num_threads()}


def command_line() -> str | None:
    """The command that runs, as a shell takes it; none where Python called us."""
    program = Path(sys.argv[0]).parts[-2:]
    ours = program[-1:] == ("qkscope",) or program == ("qkscope", "__main__.py")  # and not pytest
    return shlex.join(["qkscope", *sys.argv[1:]]) if ours else None


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
