"""A run's folder: written file by file, and never over anything that is not ours; and files of
tensors.

``manifest.json`` lists the files that a run wrote, each with its sha256. A folder is written into
if it is new or empty, or if all that it holds is listed and has not changed since; a link is never
ours. New files are laid down inside ``.work`` first. Then the old ones go, the new manifest comes,
and the new files are renamed into their places, ``results.json`` last: whenever a run is killed,
what is there is listed, and a folder without results is not whole.

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
_LONGEST_NAME = 180  # bytes of a file's name, of the 255 that disks take


# ---------------------------------------------------------------- whose folder it is


def check_folder(folder: str | Path, kind: str | None = None) -> Path:
    """The folder, if a run may be written there: ask before long work.

    Parameters
    ----------
    kind : of run, as its ``experiment`` begins (``demo``, ``lee2026/fig9``): a folder of another
        kind is refused.
    """
    folder = Path(folder)
    if folder.is_file():
        raise BadInput(f"{folder} is a file: name a folder for the results.")
    if folder.is_symlink() and not folder.exists():
        raise BadInput(f"{folder} is a link to a folder that is not there: name another folder.")
    with writing(
        folder
    ):  # asked of what is there already: a run that is refused later leaves no empty folder behind
        above = next(
            path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
        )
        tempfile.TemporaryFile(dir=above).close()
    experiment = read_run(folder).get("experiment")
    if kind and experiment and not f"{experiment}/".startswith(f"{kind}/"):
        raise BadInput(f"{folder} holds a run of {experiment}, not of {kind}: name a new folder.")
    _listed_files(folder)
    return folder


def read_run(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; empty where there is none of ours."""
    with suppress(BadInput):
        manifest = read_json(folder / MANIFEST)
        return manifest if "files" in manifest else {}
    return {}


def _listed_files(folder: Path) -> dict[str, str]:
    """The files of the folder's last run that are there, with their hashes; refused where anything
    else is.
    """
    manifest = read_run(folder)
    listed = dict[str, str]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_symlink() and (
            path.is_dir() or name.startswith(f"{WORK}/") or (name == MANIFEST and manifest)
        ):
            continue
        if path.is_symlink() or name not in manifest.get("files", ()):
            raise BadInput(f"{folder} holds other files than a run, {name}: name a new folder.")
        check_unchanged(folder, name, manifest)
        listed[name] = manifest["files"][name]
    return listed


def check_unchanged(folder: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a file that is not the one that a run wrote and listed in its manifest under this
    name.
    """
    if not is_unchanged(folder, name, manifest):
        raise BadInput(
            f"{folder / name} is not what a run wrote there: keep it elsewhere, or name a new folder."
        )


def is_unchanged(folder: Path, name: str, manifest: Mapping[str, Any]) -> bool:
    """Whether a file is the one that a run wrote and listed in its manifest under this name."""
    path = folder / name
    listed = path.is_file() and not path.is_symlink() and name in manifest.get("files", ())
    return listed and sha256(path.read_bytes()) == manifest["files"][name]


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
    """Write a run's files into its folder, and take away those of its last writing that are made no
    more.

    Parameters
    ----------
    results : as JSON has them.
    files : others by relative name; all of them are on the disk before the first takes its place.
    about : what else the manifest says.
    keep : names of the last writing that stay as they are, as a regular expression.
    """
    listed = _listed_files(folder)
    contents = {RESULTS: _as_json(results), **files}
    kept = {
        name: digest
        for name, digest in listed.items()
        if re.fullmatch(keep, name) and name not in contents
    }
    manifest = {"schema": SCHEMA, "experiment": results["experiment"], **about, "files": kept}
    _lay_down(folder, contents, manifest, [name for name in listed if name not in kept])


def add_to_run(
    folder: Path, contents: Mapping[str, str | bytes], experiment: str | None = None
) -> None:
    """Write further files into a run's folder, or some of its own anew; all others stay, whoever's
    they are.

    Parameters
    ----------
    contents : by relative name.
    experiment : of the run, where it has written nothing yet.
    """
    manifest = {"schema": SCHEMA, "experiment": experiment, "files": {}, **read_run(folder)}
    old = [name for name in contents if os.path.lexists(folder / name)]
    for name in old:
        check_unchanged(folder, name, manifest)
    _lay_down(folder, contents, manifest, old)


def _lay_down(
    folder: Path, contents: Mapping[str, str | bytes], manifest: dict[str, Any], old: list[str]
) -> None:
    """Replace old files by new ones; whenever it stops, what is there is listed."""
    for path in (folder / name for name in (*contents, WORK)):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadInput(f"{path} leads out of its folder: name a new folder.")
    data = {name: _encoded(content) for name, content in contents.items()}
    files = manifest["files"] | {name: sha256(content) for name, content in data.items()}
    data[MANIFEST] = _encoded(_as_json({**manifest, "files": dict(sorted(files.items()))}))
    places = sorted(data, key=lambda name: (name != MANIFEST, name == RESULTS))
    try:
        with writing(folder):
            (folder / WORK).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_STAGED, dir=folder / WORK) as staged:
                for number, name in enumerate(places):
                    Path(staged, str(number)).write_bytes(data[name])
                for name in sorted(old, key=lambda name: name != RESULTS):
                    (folder / name).unlink(missing_ok=True)
                for number, name in enumerate(places):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    Path(staged, str(number)).replace(folder / name)
    finally:
        for left in (folder / WORK).glob(f"{_STAGED}*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        for empty in sorted(
            {folder / WORK, *((folder / name).parent for name in old)} - {folder}, reverse=True
        ):
            with suppress(
                OSError
            ):  # not empty: other files, or the pieces of a run that is not finished
                empty.rmdir()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence why something could not be written: a full disk, one that is read-only by
    now.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise BadInput(
            f"{path} cannot be written ({why}): make room, or choose another place."
        ) from None


def write_file(path: Path, content: str | bytes) -> None:
    """Write to a fresh name, then rename: a reader never sees half a file, and no link is followed."""
    part = path.with_name(f"{path.name}{uuid.uuid4().hex[:8]}.part")
    try:
        part.write_bytes(_encoded(content))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _encoded(content: str | bytes) -> bytes:
    """Encode as UTF-8, a lone surrogate as JSON escapes it."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def file_name(name: str) -> str:
    """A name that may hold anything as one that a disk takes: quoted, and a hash for the end of a
    long one.

    >>> file_name("a/b"), len(file_name("一" * 30))
    ('a%2Fb', 137)
    """
    quoted = quote(name, safe="")
    return quoted if len(quoted) <= _LONGEST_NAME else f"{quoted[:120]}-{sha256(quoted)[:16]}"


@contextmanager
def kept_if_stopped(folder: Path, kept: Callable[[], bool]) -> Iterator[None]:
    """On interruption, say that the same command resumes the run, if pieces are kept."""
    try:
        yield
    except KeyboardInterrupt:
        if kept():
            log.info("What is done is saved in %s: the same command goes on from there.", folder)
        raise


# ---------------------------------------------------------------- reading


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder; refused if it is damaged or of a newer qkscope."""
    stored: Any = None
    with suppress(OSError, ValueError, RecursionError):  # cut off, or nested without end
        if path.is_file() and path.stat().st_size <= _LARGEST_JSON:  # a pipe would never end
            stored = json.loads(path.read_text(encoding="utf-8"))
    whole = isinstance(stored, dict) and type(stored.get("schema")) is int
    if not whole or not all(
        isinstance(stored.get(name, {}), dict) for name in ("asked", "versions", "files")
    ):
        raise BadInput(f"{path} is damaged or half-written: run the command that made it again.")
    _check_schema(path.parent, stored["schema"])
    if stored.get("command") is not None and not is_command(stored["command"]):
        log.warning("%s gives a command that qkscope would not have written: it is left out.", path)
        stored["command"] = None
    return stored


def _check_schema(path: Path, schema: int) -> None:
    if schema > SCHEMA:
        raise BadInput(
            f"{path} was written by a newer qkscope (schema {schema}; this one reads {SCHEMA}): update it."
        )


def is_command(text: Any) -> bool:
    """Whether this is one call of ours as a shell takes it, and nothing else: what a folder says
    may be pasted.

    >>> is_command("qkscope heads 'my file.jsonl'"), is_command("qkscope heads ioi; rm -r ~")
    (True, False)
    """
    with suppress(ValueError, AttributeError):  # a quotation without end, or no text
        parts = shlex.split(text)
        return parts[:1] == ["qkscope"] and text == shlex.join(parts) and text.isprintable()
    return False


# ---------------------------------------------------------------- files of tensors


def write_tensors(
    path: str | Path, kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]
) -> None:
    """Write to a temporary name beside ``path``, then rename: a reader never sees half a file."""
    with writing(Path(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_file(Path(path), tensor_bytes(kind, tensors, manifest))


def tensor_bytes(kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> bytes:
    """The content of such a file; of the same tensors, the same bytes: safetensors shuffles entries
    of a header.
    """
    from safetensors.torch import save

    header = json.dumps({"schema": SCHEMA, "kind": kind, "manifest": manifest}, sort_keys=True)
    return save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        {"qkscope": header},
    )


def read_tensors(
    path: str | Path, kind: str | None = None, expect: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of this kind; refuse another kind, a newer schema, or one made from something
    else than expected.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["qkscope"])
            schema = int(header["schema"])
            what = str(header["kind"])
            manifest = dict(header["manifest"])
            about = dict(manifest.get("about") or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(
            f"{path} is damaged or not a qkscope file: make it again, or name another."
        ) from None
    _check_schema(path, schema)
    if kind not in (None, what):
        raise BadInput(f"{path} holds {what}, not {kind}.")
    for field, want in (expect or {}).items():
        if about.get(field) != want:
            raise BadInput(
                f"{path} was made with another {field}: {about.get(field)} there, {want} here."
            )
    return tensors, manifest
