"""A run's folder: written file by file, and never over anything that is not ours.

``manifest.json`` lists the files that a run wrote, each with its sha256. A folder is written into if it is new or
empty, or if all that it holds is listed and has not changed since; a link is never ours. New files are laid down
inside ``.work`` first. Then the old ones go, the new manifest comes, and the new files are renamed into their places,
``results.json`` last: whenever a run is killed, what is there is listed, and a folder without results is not whole.
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
from typing import Any
from urllib.parse import quote

from qkscope.errors import BadInput

log = logging.getLogger(__name__)

SCHEMA = 1
RESULTS, MANIFEST, PAGE, WORK = "results.json", "manifest.json", "report.html", ".work"
_PART = r"[0-9a-f]{8}\.part"  # how the name ends of what a killed run was writing
_STAGED = "new-"
_LARGEST_JSON = 1 << 28  # bytes
_LONGEST_NAME = 180  # bytes of a file's name, of the 255 that disks take


# ---------------------------------------------------------------- whose folder it is


def check_folder(folder: str | Path, kind: str | None = None, *, state: str = "(?!)") -> Path:
    """The folder, if a run may be written there: ask before long work.

    Parameters
    ----------
    kind : of run, as its ``experiment`` begins (``demo``, ``lee2026/fig9``): a folder of another kind is refused.
    state : names of files that belong there unlisted, as a regular expression.
    """
    folder = Path(folder)
    if folder.is_file():
        raise BadInput(f"{folder} is a file: name a folder for the results.")
    check_writable(folder)
    experiment = read_run(folder).get("experiment")
    if kind is not None and experiment is not None and experiment != kind and not experiment.startswith(f"{kind}/"):
        raise BadInput(f"{folder} holds a run of {experiment}, not of {kind}: name a new folder.")
    _own_files(folder, state)
    return folder


def check_writable(folder: Path) -> None:
    """Ask before long work, of what is there already: a run that is refused later leaves no empty folder behind."""
    place = folder.absolute()
    try:
        there = next(path for path in (place, *place.parents) if path.exists())
        tempfile.TemporaryFile(dir=there).close()
        if there != place and place.is_symlink():
            raise BadInput(f"{folder} is a link to a folder that is not there: name another folder.")
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror}): choose another folder.") from None


def read_run(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; empty where there is none of ours."""
    try:
        manifest = read_json(folder / MANIFEST)
    except BadInput:
        return {}
    named = isinstance(manifest.get("experiment"), str) and isinstance(manifest.get("files"), dict)
    return manifest if named else {}


def _own_files(folder: Path, state: str = "(?!)") -> dict[str, str]:
    """The files of the folder's last run that are there, with their hashes; refused where anything else is."""
    manifest = read_run(folder)
    names = [name for name in _inside(folder) if not (name == MANIFEST and manifest)]
    for name in names:
        if (folder / name).is_symlink() or not re.fullmatch(f"({state})({_PART})?", name):
            if name not in manifest.get("files", ()) or (folder / name).is_symlink():
                raise BadInput(f"{folder} holds other files than a run, {name}: name a new folder.")
            check_unchanged(folder, name, manifest)
    return {name: manifest["files"][name] for name in names if name in manifest.get("files", ())}


def check_unchanged(folder: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a file that is not the one that a run wrote and listed in its manifest under this name."""
    path = folder / name
    try:
        # a pipe would never end
        whole = path.is_file() and not path.is_symlink() and _sha256(path) == manifest.get("files", {}).get(name)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): choose another folder.") from None
    if not whole:
        raise BadInput(f"{path} is not what a run wrote there: keep it elsewhere, or name a new folder.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _inside(folder: Path) -> Iterator[str]:
    """Every file in a folder by its relative name, of our work the links alone; none is followed."""
    for place, folders, files in os.walk(folder):
        base = Path(place).relative_to(folder)
        links = [name for name in (*folders, *files) if os.path.islink(os.path.join(place, name))]
        folders.sort()
        for name in sorted(links if WORK in base.parts[:1] else {*files, *links}):
            yield (base / name).as_posix()


# ---------------------------------------------------------------- writing into it


def write_run(
    folder: Path, experiment: str, contents: Mapping[str, str | bytes], about: Mapping[str, Any], *, keep: str = "(?!)"
) -> None:
    """Write a run's files into its folder, and take away those of its last writing that are made no more.

    Parameters
    ----------
    contents : by relative name; all of them are on the disk before the first takes its place.
    about : what else the manifest says.
    keep : names of the last writing that stay as they are, as a regular expression.
    """
    own = _own_files(folder)
    kept = {name: digest for name, digest in own.items() if re.fullmatch(keep, name) and name not in contents}
    manifest = {"schema": SCHEMA, "experiment": experiment, **about, "files": kept}
    _lay_down(folder, contents, manifest, [name for name in own if name not in kept])


def add_to_run(folder: Path, contents: Mapping[str, str | bytes], experiment: str | None = None) -> None:
    """Write further files into a run's folder, or some of its own anew; all others stay, whoever's they are.

    Parameters
    ----------
    contents : by relative name.
    experiment : of the run, where it has written nothing yet.
    """
    manifest = {"schema": SCHEMA, "experiment": experiment, "files": {}, **read_run(folder)}
    there = [name for name in contents if os.path.lexists(folder / name)]
    for name in there:
        check_unchanged(folder, name, manifest)
    _lay_down(folder, contents, manifest, there)


def _lay_down(folder: Path, contents: Mapping[str, str | bytes], manifest: dict[str, Any], old: list[str]) -> None:
    """Replace old files by new ones; whenever it stops, what is there is listed."""
    for name in (*contents, WORK):
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts:
            raise BadInput(f"a file of a run is named from inside its folder, but got {name!r}.")
        if any(folder.joinpath(*parts[:i]).is_symlink() for i in range(1, len(parts) + 1)):
            raise BadInput(f"{folder / name} leads elsewhere by a link: name a new folder.")
    data = {name: _encoded(content) for name, content in contents.items()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    data[MANIFEST] = _encoded(as_json({**manifest, "files": dict(sorted({**manifest["files"], **hashes}.items()))}))
    work, fresh = folder / WORK, not folder.exists()
    with writing(folder):
        work.mkdir(parents=True, exist_ok=True)
        for left in work.glob(f"{_STAGED}*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=work))
        try:
            for number, content in enumerate(data.values()):
                (staged / str(number)).write_bytes(content)
            for name in sorted(old, key=lambda name: name != RESULTS):
                (folder / name).unlink(missing_ok=True)
            places = [(name, staged / str(number)) for number, name in enumerate(data)]
            for name, file in sorted(places, key=lambda place: (place[0] != MANIFEST, place[0] == RESULTS)):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                file.replace(folder / name)
            for above in {parent for name in old for parent in list(Path(name).parents)[:-1]}:
                with suppress(OSError):  # not empty
                    (folder / above).rmdir()
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            with suppress(OSError):  # the pieces of a run that is not finished
                work.rmdir()
                if fresh:
                    folder.rmdir()  # where nothing could be written


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence why something could not be written: a full disk, one that is read-only by now."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written ({error.strerror or error}): make room, or choose another place."
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
    """UTF-8; half a surrogate, which it has no place for, as JSON writes it."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")


def as_json(value: Any) -> str:
    """A file of a run as text."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def file_name(name: str) -> str:
    """A name that may hold anything as one that a disk takes: quoted, and a hash for the end of a long one.

    >>> file_name("a/b"), len(file_name("一" * 30))
    ('a%2Fb', 137)
    """
    quoted = quote(name, safe="")
    if len(quoted) <= _LONGEST_NAME:
        return quoted
    return f"{quoted[:120]}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


@contextmanager
def kept_if_stopped(folder: Path, kept: Callable[[], bool]) -> Iterator[None]:
    """Tell who stops a run that the same command goes on with it, if something is kept."""
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
    size = path.stat().st_size if path.is_file() else 0  # a pipe or a device would never end
    with suppress(OSError, ValueError, RecursionError):  # cut off, or nested without end
        stored = json.loads(path.read_text(encoding="utf-8")) if 0 < size <= _LARGEST_JSON else None
    schema = stored.get("schema") if isinstance(stored, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise BadInput(
            f"{path.parent} was written by a newer qkscope (schema {schema}; this one reads {SCHEMA}): update it."
        )
    whole = isinstance(stored, dict) and type(schema) is int
    if not whole or any(not isinstance(stored.get(name, {}), dict) for name in ("asked", "versions")):
        raise BadInput(f"{path} is damaged or half-written: run the command that made it again.")
    if stored.get("command") is not None and not is_command(stored["command"]):
        log.warning("%s gives a command that qkscope would not have written: it is left out.", path)
        stored["command"] = None
    return stored


def is_command(text: Any) -> bool:
    """Whether this is one call of ours as a shell takes it, and nothing else: what a folder says may be pasted.

    >>> is_command("qkscope heads 'my file.jsonl'"), is_command("qkscope heads ioi; rm -r ~")
    (True, False)
    """
    try:
        parts = shlex.split(text)
    except (ValueError, AttributeError, TypeError):  # a quotation without end, or no text
        return False
    return parts[:1] == ["qkscope"] and text == shlex.join(parts) and text.isprintable()
