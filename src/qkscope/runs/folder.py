"""A run's folder: one writer at a time, written file by file, and never over anything that is not ours.

``manifest.json`` lists the files that a run wrote. A folder is written into if it is new or empty, or if it has such a
list and holds nothing else; what was on the list and is made no more is removed, everything else is left alone. New
files are laid down in ``.qkscope-writing`` first and then renamed, ``results.json`` last: a folder without it is not
whole.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from qkscope.errors import BadInput

log = logging.getLogger(__name__)

SCHEMA = 1
RESULTS, MANIFEST, JOB, PAGE = "results.json", "manifest.json", "job.json", "report.html"
LOCK, WORK, STAGED = ".lock", ".work", ".qkscope-writing"
"""Our own besides what is listed: the lock, the pieces of a run that is not finished, files before they are whole."""
_EARLIER = r"results\.json|manifest\.json|report\.html|arrays\.safetensors|figures/[^/]+\.(png|pdf|svg)"
"""What runs wrote before they listed it."""
_PART = re.compile(r"(.+?)(?:[0-9a-f]{8})?\.part")  # what a killed run was writing
_LEFT = re.compile(r"\.tmp[0-9A-Za-z]{6}")  # what safetensors was
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
    state : names of files that such a run keeps besides those it lists, as a regular expression.
    called : what a folder that is not ours holds, for the sentence.
    """
    folder = Path(folder)
    if folder.is_file():
        raise BadInput(f"{folder} is a file: name a folder for the results.")
    check_writable(folder)
    try:
        ours = _listed(folder, kind)
        foreign = next((name for name in _inside(folder) if not _is_ours(name, ours, state)), None)
    except OSError as error:
        raise BadInput(f"{folder} cannot be read ({error.strerror}): choose another folder.") from None
    if foreign is not None:
        raise BadInput(f"{folder} holds {called}, {foreign}: name a new folder.")
    return folder


def _listed(folder: Path, kind: str | None) -> re.Pattern[str]:
    """The names that the folder's manifest, if it is one of ours, says are ours."""
    try:
        manifest = read_json(folder / MANIFEST)
        files = manifest.get("files")
        if isinstance(files, list):
            experiment, names = manifest.get("experiment"), "|".join(re.escape(str(name)) for name in files)
        else:  # of an earlier version
            experiment, names = read_json(folder / RESULTS).get("experiment"), _EARLIER
            if not isinstance(manifest.get("versions"), dict):
                experiment = None
    except BadInput:  # none, or not ours
        experiment = None
    if not isinstance(experiment, str):
        return re.compile(r"(?!)")
    if kind is not None and experiment != kind and not experiment.startswith(f"{kind}/"):
        raise BadInput(f"{folder} holds a run of {experiment}, not of {kind}: name a new folder.")
    return re.compile(names)


def _inside(folder: Path) -> Iterator[str]:
    """Every file in a folder by its relative name; a link is not followed, and stands for itself."""
    for place, folders, files in os.walk(folder):
        base = Path(place).relative_to(folder)
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        hidden = (WORK, STAGED) if base == Path() else ()
        folders[:] = sorted(name for name in folders if name not in hidden)
        for name in sorted([*files, *links]):
            if base != Path() or name != LOCK:
                yield (base / name).as_posix()


def _is_ours(name: str, listed: re.Pattern[str], state: str) -> bool:
    part = _PART.fullmatch(name)
    if _LEFT.fullmatch(name.rpartition("/")[2]):
        return True
    return any(listed.fullmatch(own) or re.fullmatch(state, own) for own in ([name, part[1]] if part else [name]))


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
    folder: Path,
    experiment: str,
    contents: Mapping[str, str | bytes],
    manifest: Mapping[str, Any],
    *,
    state: str = "",
    later: Sequence[str] = (),
) -> None:
    """Write a run's files into its folder, and take away those of its last writing that are made no more.

    Parameters
    ----------
    contents : by relative name; all of them are on the disk before the first takes its place.
    state : as in `check_folder`.
    later : further names of ours, which are written by themselves.
    """
    for name in contents:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadInput(f"a file of a run is named from inside its folder, but got {name!r}.")
    names = sorted({*contents, MANIFEST, *later})
    about = {"schema": SCHEMA, "experiment": experiment, **manifest}
    staged, held = folder / STAGED, folder.resolve() in _HELD
    if held and not (folder / LOCK).exists():
        raise removed(folder)
    with nullcontext() if held else only_writer(folder):
        listed = _listed(check_folder(folder, state=state), None)
        stale = [name for name in _inside(folder) if listed.fullmatch(name) and name not in names]
        with writing(folder):
            try:
                for name, content in {**contents, MANIFEST: as_json({**about, "files": names})}.items():
                    _write_bytes(staged / name, _encoded(content) if isinstance(content, str) else content)
                write_text(folder / MANIFEST, as_json({**about, "files": [*names, *stale]}).rstrip())
                (folder / RESULTS).unlink(missing_ok=True)  # from here to its return the folder is not whole
                for name in sorted(contents, key=lambda name: name == RESULTS):
                    if name == RESULTS:
                        _remove(folder, stale)
                        (staged / MANIFEST).replace(folder / MANIFEST)
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (staged / name).replace(folder / name)
            finally:
                shutil.rmtree(staged, ignore_errors=True)


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            for above in list((folder / name).relative_to(folder).parents)[:-1]:
                (folder / above).rmdir()


def clear_left_over(folder: Path) -> None:
    """Remove what a killed run was writing in a folder of ours."""
    for path in folder.iterdir():
        if path.suffix == ".part" or (_LEFT.fullmatch(path.name) and _is_half_tensors(path)):
            path.unlink(missing_ok=True)


def _is_half_tensors(path: Path) -> bool:
    """Whether a file begins as safetensors do, or not yet at all: somebody's own of the same name does not."""
    with path.open("rb") as file:
        start = file.read(9)
    return not start.strip(b"\0") or (len(start) == 9 and start[4:8] == bytes(4) and start[8:] == b"{")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence why something could not be written: a full disk, one that is read-only by now."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written ({error.strerror or error}): make room, or choose another place."
        ) from None


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name, then rename: a reader never sees half a file."""
    part = path.with_suffix(path.suffix + ".part")
    with writing(path):
        try:
            _write_bytes(part, _encoded(text + "\n"), new_folder=False)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _write_bytes(path: Path, content: bytes, new_folder: bool = True) -> None:
    if new_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
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
        except BlockingIOError:
            raise _another_run(folder) from None
        except OSError as error:
            raise BadInput(
                f"{folder} cannot be locked ({error.strerror}), so a second run could not be kept out: "
                "name a folder on another disk."
            ) from None
        if not _same_file(path, handle.fileno()):  # that of a run which has just ended
            raise _another_run(folder)
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


def _another_run(folder: Path) -> BadInput:
    return BadInput(f"another run is writing to {folder}: wait until it ends, or name another folder.")


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


def read_text(path: Path) -> str:
    """The text of a file that a run wrote; one too large to be that is not read into memory."""
    try:
        size = path.stat().st_size if path.is_file() else -1  # a pipe or a device would never end
        text = path.read_text(encoding="utf-8") if 0 <= size <= _LARGEST_JSON else None
    except (OSError, ValueError):
        size, text = -1, None
    if text is None and size < 0:
        raise BadInput(f"{path} is damaged or half-written: run the command that made it again.")
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


def plain_text(text: str) -> str:
    r"""Text for a terminal: characters that would steer it are written out.

    >>> plain_text("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    steers = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
    return steers.sub(lambda found: ascii(found[0])[1:-1], text)
