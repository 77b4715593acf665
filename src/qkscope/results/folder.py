"""A run's folder, written file by file and never over other files; and files of tensors.

``manifest.json`` lists the files that a run wrote, each with its sha256. A folder is written into
if it is new or empty, or if all that it holds is listed and has not changed since; a link never
counts as a file of a run. New files are first written inside ``.work``. Then the old ones are
deleted, and the new ones renamed into their places: ``manifest.json`` first, ``results.json`` last.
Whenever a run is killed, every file is listed, and a folder without results is not finished.

Tensors stand with a manifest in one safetensors file, written whole or not at all, and never read
as something else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from qkscope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

SCHEMA = 1
RESULTS = "results.json"
MANIFEST = "manifest.json"
PAGE = "report.html"
WORK = ".work"
_STAGED = "new-"
_LARGEST_JSON = 1 << 28  # bytes
_LONGEST_NAME = 180  # bytes of a file's name; disks take 255


# ---------------------------------------------------------------- may a run be written there


def check_folder(folder: str | Path, kind: str | None = None) -> Path:
    """Refuse a folder into which a run cannot be written; called before long work.

    Parameters
    ----------
    folder : where the run would be written.
    kind : of run, as its ``experiment`` begins (``demo``, ``lee2026/fig9``): a folder of another
        kind is refused.
    """
    folder = Path(folder)
    if folder.is_file():
        raise BadInput(f"{folder} is a file: name a folder for the results.")
    if folder.is_symlink() and not folder.exists():
        raise BadInput(f"{folder} is a link to a folder that is not there: name another folder.")
    _check_writable(folder)
    experiment = read_run(folder).get("experiment")
    if kind and experiment and not f"{experiment}/".startswith(f"{kind}/"):
        raise BadInput(f"{folder} holds a run of {experiment}, not of {kind}: name a new folder.")
    _listed_files(folder)
    return folder


def _check_writable(folder: Path) -> None:
    """Refuse a folder where no file can be made.

    A file is tried in the innermost folder that exists, so that a run that is refused for another
    reason leaves no empty folder behind.
    """
    path = folder.absolute()
    with writing(folder):
        while not path.exists():
            path = path.parent
        tempfile.TemporaryFile(dir=path).close()


def read_run(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run folder; an empty one where there is no run."""
    try:
        manifest = read_run_file(folder / MANIFEST)
    except BadInput:
        return {}
    return manifest if "files" in manifest else {}


def _listed_files(folder: Path) -> dict[str, str]:
    """The existing files of the folder's last run, with their hashes.

    Refused where the folder holds a link, a file that the run did not list, or one that changed.
    """
    manifest = read_run(folder)
    files: Mapping[str, str] = manifest.get("files", {})
    listed = dict[str, str]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        link = path.is_symlink()
        unlisted = name.startswith(f"{WORK}/") or (name == MANIFEST and manifest)
        if not link and (path.is_dir() or unlisted):
            continue
        if link or name not in files:
            raise BadInput(f"{folder} holds other files than a run, {name}: name a new folder.")
        check_unchanged(folder, name, manifest)
        listed[name] = files[name]
    return listed


def check_unchanged(folder: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a file that is not the one that the manifest lists under this name."""
    if not is_unchanged(folder, name, manifest):
        path = folder / name
        raise BadInput(
            f"{path} is not what a run wrote there: keep it elsewhere, or name a new folder."
        )


def is_unchanged(folder: Path, name: str, manifest: Mapping[str, Any]) -> bool:
    """Whether a file is the one that the manifest lists under this name."""
    path = folder / name
    files = manifest.get("files", {})
    if path.is_symlink() or not path.is_file() or name not in files:
        return False
    return sha256(path.read_bytes()) == files[name]


def sha256(content: str | bytes) -> str:
    """The SHA-256 of some bytes, or of a text in UTF-8."""
    return hashlib.sha256(_encoded(content)).hexdigest()


# ---------------------------------------------------------------- writing into it


def write_run(
    folder: Path,
    results: Mapping[str, Any],
    files: Mapping[str, str | bytes],
    about: Mapping[str, Any],
    keep: str,
) -> None:
    """Write a run's files into its folder, and delete those of its last writing.

    Parameters
    ----------
    folder : of the run.
    results : the content of ``results.json``.
    files : others by relative name; all of them are on the disk before the first takes its place.
    about : further entries of the manifest.
    keep : names of the last writing that stay as they are, as a regular expression.
    """
    contents = {RESULTS: _as_json(results), **files}
    kept = dict[str, str]()
    old = list[str]()
    for name, digest in _listed_files(folder).items():
        if re.fullmatch(keep, name) and name not in contents:
            kept[name] = digest
        else:
            old.append(name)
    manifest = {"schema": SCHEMA, "experiment": results["experiment"], **about, "files": kept}
    _exchange_files(folder, contents, manifest, old)


def add_to_run(
    folder: Path, contents: Mapping[str, str | bytes], experiment: str | None = None
) -> None:
    """Add files to a run's folder, or write some of its files anew; all others stay.

    Parameters
    ----------
    folder : of the run.
    contents : of the files, by relative name.
    experiment : of the run, where it has written nothing yet.
    """
    manifest = {"schema": SCHEMA, "experiment": experiment, "files": {}, **read_run(folder)}
    old = [name for name in contents if os.path.lexists(folder / name)]
    for name in old:
        check_unchanged(folder, name, manifest)
    _exchange_files(folder, contents, manifest, old)


def _exchange_files(
    folder: Path, contents: Mapping[str, str | bytes], manifest: dict[str, Any], old: list[str]
) -> None:
    """Replace old files by new ones; wherever it stops, the files that are there are listed."""
    for name in (*contents, WORK):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadInput(f"{path} leads out of its folder: name a new folder.")
    data = {name: _encoded(content) for name, content in contents.items()}
    files = dict(manifest["files"])
    for name, content in data.items():
        files[name] = sha256(content)
    sorted_files = dict(sorted(files.items()))
    data[MANIFEST] = _encoded(_as_json({**manifest, "files": sorted_files}))
    try:
        with writing(folder):
            _stage_and_rename(folder, data, old)
    finally:
        _clear_up(folder, old)


def _stage_and_rename(folder: Path, data: Mapping[str, bytes], old: list[str]) -> None:
    """Write all files into ``.work``, delete the old ones, rename the new: the results last."""
    manifest_first = sorted(data, key=lambda name: (name != MANIFEST, name == RESULTS))
    results_first = sorted(old, key=lambda name: name != RESULTS)
    work = folder / WORK
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_STAGED, dir=work) as staged:
        for number, name in enumerate(manifest_first):
            Path(staged, str(number)).write_bytes(data[name])
        for name in results_first:
            (folder / name).unlink(missing_ok=True)
        for number, name in enumerate(manifest_first):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Path(staged, str(number)).replace(path)


def _clear_up(folder: Path, old: list[str]) -> None:
    """Delete what a killed run staged, and the folders of old files that are empty now."""
    for staged in (folder / WORK).glob(f"{_STAGED}*"):
        shutil.rmtree(staged, ignore_errors=True)
    folders = {folder / WORK}
    folders.update((folder / name).parent for name in old)
    folders.discard(folder)
    for inner in sorted(folders, reverse=True):
        # not empty: other files, or the pieces of a run that is not finished
        with suppress(OSError):
            inner.rmdir()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk (full, read-only) into a sentence about this path."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise BadInput(
            f"{path} cannot be written ({why}): make room, or choose another place."
        ) from None


def write_file(path: Path, content: str | bytes) -> None:
    """Write to a fresh name, then rename: no reader sees half a file, and no link is followed."""
    fresh = uuid.uuid4().hex[:8]
    part = path.with_name(f"{path.name}{fresh}.part")
    try:
        part.write_bytes(_encoded(content))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _encoded(content: str | bytes) -> bytes:
    """Encode as UTF-8; a lone surrogate is escaped as in JSON."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def file_name(name: str) -> str:
    """Quote any name so that a disk takes it; a hash stands for the end of a long one.

    >>> file_name("a/b"), len(file_name("一" * 30))
    ('a%2Fb', 137)
    """
    quoted = quote(name, safe="")
    if len(quoted) <= _LONGEST_NAME:
        return quoted
    end = sha256(quoted)[:16]
    return f"{quoted[:120]}-{end}"


@contextmanager
def kept_if_stopped(folder: Path, kept: Callable[[], bool]) -> Iterator[None]:
    """On Ctrl-C, log that the same command resumes the run, if pieces are kept."""
    try:
        yield
    except KeyboardInterrupt:
        if kept():
            log.info("What is done is saved in %s: the same command goes on from there.", folder)
        raise


# ---------------------------------------------------------------- reading


def read_run_file(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run folder; refused if it is damaged or of a newer qkscope."""
    stored: Any = None
    with suppress(OSError, ValueError, RecursionError):  # cut off, or nested without end
        if path.is_file() and path.stat().st_size <= _LARGEST_JSON:  # a pipe would never end
            stored = json.loads(path.read_text(encoding="utf-8"))
    if not _is_whole(stored):
        raise BadInput(f"{path} is damaged or half-written: run the command that made it again.")
    _check_schema(path.parent, stored["schema"])
    command = stored.get("command")
    if command is not None and not is_command(command):
        log.warning("%s gives a command that qkscope would not have written: it is left out.", path)
        stored["command"] = None
    return stored


def _is_whole(stored: Any) -> bool:
    """Whether the content of a JSON file of ours has a schema, and mappings where they belong."""
    if not isinstance(stored, dict) or type(stored.get("schema")) is not int:
        return False
    mappings = [stored.get(name, {}) for name in ("asked", "versions", "files")]
    return all(isinstance(mapping, dict) for mapping in mappings)


def _check_schema(path: Path, schema: int) -> None:
    """Refuse a newer schema than this version reads."""
    if schema > SCHEMA:
        schemas = f"schema {schema}; this one reads {SCHEMA}"
        raise BadInput(f"{path} was written by a newer qkscope ({schemas}): update it.")


def is_command(text: Any) -> bool:
    """Whether a text is exactly one qkscope command: users paste what a folder prints.

    >>> is_command("qkscope heads 'my file.jsonl'"), is_command("qkscope heads ioi; rm -r ~")
    (True, False)
    """
    if not isinstance(text, str):
        return False
    try:
        parts = shlex.split(text)
    except ValueError:  # a quotation without end
        return False
    is_ours = parts[:1] == ["qkscope"]
    return is_ours and text == shlex.join(parts) and text.isprintable()


# ---------------------------------------------------------------- files of tensors


def write_tensors(
    path: str | Path, kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]
) -> None:
    """Write tensors with a manifest into one file: whole, or not at all."""
    with writing(Path(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_file(Path(path), tensor_bytes(kind, tensors, manifest))


def tensor_bytes(kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> bytes:
    """The bytes of a file of tensors: equal for equal tensors.

    The header has one entry alone, because safetensors shuffles the entries of a header.
    """
    from safetensors.torch import save

    header = json.dumps({"schema": SCHEMA, "kind": kind, "manifest": manifest}, sort_keys=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(plain, {"qkscope": header})


def read_tensors(
    path: str | Path, kind: str | None = None, expect: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the manifest of a file.

    Parameters
    ----------
    path : of the file; a damaged one, or one of a newer schema, is refused.
    kind : that the file must be of.
    expect : facts about what it was made from; a file made from anything else is refused.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["qkscope"])
            schema = int(header["schema"])
            stored_kind = str(header["kind"])
            manifest = dict(header["manifest"])
            about = dict(manifest.get("about") or {})
            names = file.keys()  # of no dict: it cannot be iterated over
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(
            f"{path} is damaged or not a qkscope file: make it again, or name another."
        ) from None
    _check_schema(path, schema)
    if kind not in (None, stored_kind):
        raise BadInput(f"{path} holds {stored_kind}, not {kind}.")
    for field, here in (expect or {}).items():
        there = about.get(field)
        if there != here:
            raise BadInput(f"{path} was made with another {field}: {there} there, {here} here.")
    return tensors, manifest
