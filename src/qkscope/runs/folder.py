"""A run's folder: one writer at a time, written file by file, and never over anything that is not ours.

``manifest.json`` lists the files that a run wrote, each with its sha256. A folder is written into if it is new or
empty, or if all that it holds is listed and has not changed since; a link is never ours. What was listed and is made no
more is removed. New files are laid down in a fresh folder inside ``.work`` first and then renamed, ``results.json``
last: a folder without it is not whole.
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
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from qkscope.errors import BadInput

log = logging.getLogger(__name__)

SCHEMA = 1
RESULTS, MANIFEST, JOB, PAGE = "results.json", "manifest.json", "job.json", "report.html"
LOCK, WORK, STAGED = ".lock", ".work", "qkscope-writing-"
"""Our own besides what is listed: the lock, the work of a run under way, and how files before they are whole begin."""
_PART = r"[0-9a-f]{8}\.part"  # how the name ends of what a killed run was writing
_LARGEST_JSON = 1 << 28  # bytes
_LONGEST_NAME = 180  # bytes of a file's name, of the 255 that disks take
_HELD: set[Path] = set()  # folders whose lock this process holds
Kinds = tuple[type, ...]
_SAID: dict[str, Kinds] = {
    "command": (str, type(None)), "versions": (dict,), "threads": (int, type(None)), "asked": (dict,),
}  # fmt: skip
"""What a file of a run says of how it was made, where it says it."""


# ---------------------------------------------------------------- whose folder it is


def check_folder(
    folder: str | Path, kind: str | None = None, *, state: str = "", called: str = "other files than a run"
) -> Path:
    """The folder, if a run may be written there: ask before long work.

    Parameters
    ----------
    kind : of run, as its ``experiment`` begins (``demo``, ``lee2026/fig9``): a folder of another kind is refused.
    state : names of files that belong there unlisted, as a regular expression.
    called : what a folder that is not ours holds, for the sentence.
    """
    folder = Path(folder)
    if folder.is_file():
        raise BadInput(f"{folder} is a file: name a folder for the results.")
    check_writable(folder)
    _own_files(folder, kind, state, called)
    return folder


def _own_files(
    folder: Path, kind: str | None = None, state: str = "", called: str = "other files than a run"
) -> dict[str, str]:
    """The files of the folder's last run that are there, with their hashes; refused where anything else is."""
    manifest, found = read_run(folder), {}
    experiment = manifest.get("experiment", "")
    if kind is not None and manifest and experiment != kind and not experiment.startswith(f"{kind}/"):
        raise BadInput(f"{folder} holds a run of {experiment}, not of {kind}: name a new folder.")
    try:
        for name in _inside(folder):
            if name == MANIFEST and manifest:
                continue
            link = (folder / name).is_symlink()
            if not link and state and re.fullmatch(f"({state})({_PART})?", name):
                continue
            if link or not _listed(name, manifest):
                raise BadInput(f"{folder} holds {called}, {name}: name a new folder.")
            found[name] = _own_hash(folder / name, name, manifest)
    except OSError as error:
        raise BadInput(f"{folder} cannot be read ({error.strerror}): choose another folder.") from None
    return found


def read_run(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; empty where there is none of ours."""
    try:
        return read_json(folder / MANIFEST, {"experiment": (str,), "files": (dict,), "before": (dict,)})
    except BadInput:
        return {}


def _listed(name: str, manifest: Mapping[str, Any]) -> list[str]:
    """The hashes that a file of ours may have: what was written last, and what stood there before."""
    return [manifest[part][name] for part in ("files", "before") if name in manifest.get(part, ())]


def _own_hash(path: Path, name: str, manifest: Mapping[str, Any]) -> str:
    """The hash of a listed file, if it is still what was written."""
    if path.is_file() and not path.is_symlink():  # a pipe would never end
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found in _listed(name, manifest):
            return found
    raise BadInput(f"{path} is not what a run wrote there: keep it elsewhere, or name a new folder.")


def _inside(folder: Path) -> Iterator[str]:
    """Every file in a folder by its relative name, of our work the links alone; none is followed."""
    for place, folders, files in os.walk(folder):
        base = Path(place).relative_to(folder)
        links = [name for name in (*folders, *files) if os.path.islink(os.path.join(place, name))]
        folders.sort()
        for name in sorted(links if WORK in base.parts[:1] else {*files, *links}):
            if base != Path() or name != LOCK:
                yield (base / name).as_posix()


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
    with _alone(folder):
        own = _own_files(folder)
        kept = {name: digest for name, digest in own.items() if re.fullmatch(keep, name) and name not in contents}
        before = {name: digest for name, digest in own.items() if name not in kept}
        if JOB in before and JOB not in contents:  # what stands there is more than a result
            raise BadInput(f"{folder} holds other files than a run, {JOB}: name a new folder.")
        said = {"schema": SCHEMA, "experiment": experiment, **about, "files": kept, "before": before}
        _lay_down(folder, contents, said, [name for name in before if name not in contents])


def add_to_run(folder: Path, contents: Mapping[str, str | bytes], experiment: str | None = None) -> None:
    """Write further files into a run's folder, or some of its own anew; all others stay, whoever's they are.

    Parameters
    ----------
    contents : by relative name.
    experiment : of the run, where it has written nothing yet.
    """
    with _alone(folder):
        manifest = {"schema": SCHEMA, "experiment": experiment, "files": {}, "before": {}, **read_run(folder)}
        there = [name for name in contents if (folder / name).exists() or (folder / name).is_symlink()]
        own = {name: _own_hash(folder / name, name, manifest) for name in there}
        _lay_down(folder, contents, {**manifest, "before": {**manifest["before"], **own}}, [])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    held = folder.resolve() in _HELD
    if held and not (folder / LOCK).exists():
        raise removed(folder)
    with nullcontext() if held else only_writer(folder):
        yield


def _lay_down(folder: Path, contents: Mapping[str, str | bytes], manifest: dict[str, Any], stale: list[str]) -> None:
    """Put files in their places, and take stale ones away; whenever it stops, what is there is listed."""
    for name in (*contents, WORK):
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts:
            raise BadInput(f"a file of a run is named from inside its folder, but got {name!r}.")
        if any(folder.joinpath(*parts[:i]).is_symlink() for i in range(1, len(parts) + 1)):
            raise BadInput(f"{folder / name} leads elsewhere by a link: name a new folder.")
    data = {name: _encoded(content) if isinstance(content, str) else content for name, content in contents.items()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    said = as_json({**manifest, "files": dict(sorted({**manifest["files"], **hashes}.items()))})
    work = folder / WORK
    with writing(folder):
        work.mkdir(exist_ok=True)
        for left in work.glob(f"{STAGED}????????"):  # by a run that was killed: nobody else writes here now
            shutil.rmtree(left, ignore_errors=True)
        staged = Path(tempfile.mkdtemp(prefix=STAGED, dir=work))
        try:
            for number, content in enumerate([_encoded(said), *data.values()]):
                _create(staged / str(number), content)
            if RESULTS in data:
                (folder / RESULTS).unlink(missing_ok=True)  # from here to its return the folder is not whole
            (staged / "0").replace(folder / MANIFEST)
            _remove(folder, stale)
            places = [(name, staged / str(number)) for number, name in enumerate(data, 1)]
            for name, file in sorted(places, key=lambda place: place[0] == RESULTS):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                file.replace(folder / name)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            with suppress(OSError):  # the pieces of a run that is not finished
                work.rmdir()


def _remove(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            for above in list((folder / name).relative_to(folder).parents)[:-1]:
                (folder / above).rmdir()


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
        _create(part, _encoded(content) if isinstance(content, str) else content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _create(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # else a power failure could leave the new name on an empty file


def _encoded(text: str) -> bytes:
    """UTF-8; half a surrogate, which it has no place for, as JSON writes it."""
    return text.encode("utf-8", "backslashreplace")


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


# ---------------------------------------------------------------- one writer, and what a stopped one leaves


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it also when the process is killed.

    The folder is made where there is none. One that is gone at the end, or another, is an error: what was written into
    it is lost.
    """
    fresh, path = [place for place in (folder, *folder.parents) if not place.exists()], folder / LOCK
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with writing(folder):
        # a link is not followed and nothing is cut short: a file of that name may be somebody's
        handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
        if os.fstat(handle.fileno()).st_size:
            handle.close()
            raise BadInput(f"{path} is not a lock of ours, it holds something: name a new folder.")
    held = folder.resolve()
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = _same_file(path, handle.fileno())  # else that of a run which has just ended
        except BlockingIOError:
            free = False
        except OSError as error:
            raise BadInput(
                f"{folder} cannot be locked ({error.strerror}), so a second run could not be kept out: "
                "name a folder on another disk."
            ) from None
        if not free:
            raise BadInput(f"another run is writing to {folder}: wait until it ends, or name another folder.")
        _HELD.add(held)
        try:
            yield
            if not _same_file(path, handle.fileno()):
                raise removed(folder)
        finally:
            _HELD.discard(held)
            with suppress(OSError):
                if _same_file(path, handle.fileno()):
                    path.unlink()
                    for place in fresh:
                        place.rmdir()  # if nothing came of it


def removed(folder: Path) -> BadInput:
    """What is raised where a folder is gone that a run writes into."""
    return BadInput(
        f"{folder} was removed while a run was writing to it, and what it held is lost: say the same again."
    )


def _same_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


@contextmanager
def kept_if_stopped(folder: Path, kept: Callable[[], bool]) -> Iterator[None]:
    """Tell who stops a run that saying the same again goes on with it, if something is kept."""
    try:
        yield
    except KeyboardInterrupt:
        if kept():
            log.info("What is done is saved in %s: say the same again, and it goes on from there.", folder)
        raise


# ---------------------------------------------------------------- reading


def read_json(path: Path, fields: Mapping[str, Kinds] | None = None) -> dict[str, Any]:
    """A JSON file of a run folder; refused if it is damaged or of a newer qkscope, or a field is of another kind."""
    stored: Any = None
    size = path.stat().st_size if path.is_file() else 0  # a pipe or a device would never end
    if size > _LARGEST_JSON:
        raise BadInput(f"{path} has {size:,} bytes, more than any run writes: run the command that made it again.")
    with suppress(OSError, ValueError, RecursionError):  # cut off, or nested without end
        stored = json.loads(path.read_text(encoding="utf-8")) if size else None
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
    if stored.get("command") is not None and not is_command(stored["command"]):
        log.warning("%s gives a command that qkscope would not have written: it is left out.", path)
        stored["command"] = None
    return dict(stored)


def is_command(text: str) -> bool:
    """Whether this is one call of ours as a shell takes it, and nothing else: what a folder says may be pasted.

    >>> is_command("qkscope heads 'my file.jsonl'"), is_command("qkscope heads ioi; rm -r ~")
    (True, False)
    """
    try:
        parts = shlex.split(text)
    except ValueError:  # a quotation without end
        return False
    return parts[:1] == ["qkscope"] and text == shlex.join(parts) and text.isprintable()
