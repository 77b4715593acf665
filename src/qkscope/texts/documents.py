"""Natural text by document: English that every Python carries, and any file or folder.

A document was written once, so it is what text is split by (``holdout``) and what intervals
resample. Python's own texts are the default because they need no download: what ``help()`` has on
its topics, and the docstrings of its library.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import logging
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, TypeAlias

from qkscope.errors import BadInput

log = logging.getLogger(__name__)

FEW_FILES = (
    12  # files under which they are cut into sections: `holdout.split` needs as many documents
)
_SECTIONS = 32  # of all the files, then
_LEAST_SECTION = 1000  # characters
_SUFFIXES = (".txt", ".md", ".rst", ".text")  # files of a folder that are taken for text

_NOT_LIBRARY = re.compile(
    r"tests?|idlelib|lib2to3|turtledemo|ensurepip|distutils|encodings|pydoc_data|\w+-packages"
)
_LEAST_LINES = 3  # of a docstring
_LEAST_DOCUMENT = 400  # characters of a module's docstrings
_PROSE = 0.85  # of a docstring's characters: letters and blanks


@dataclass(frozen=True)
class Document:
    """A text that was written as one: a topic, a module's docstrings, a file, or a section of it.

    Parameters
    ----------
    name : what it is called.
    text : all of it.

    Examples
    --------
    >>> Document("note", "The hat is in the box.").name
    'note'
    """

    name: str
    text: str


#: Passages, or documents to cut into them.
Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"]


@cache
def python_texts(docstrings: bool = False) -> tuple[Document, ...]:
    """English that comes with Python: the topics of ``help()``, and docstrings of its library.

    They are not the same in every version of Python, so a result keeps `text_hash` beside the
    version.

    Parameters
    ----------
    docstrings : whether to read those too, a document for each module; a few seconds.

    Examples
    --------
    >>> topics = python_texts()
    >>> len(topics) > 50, topics[0].name
    (True, 'topic assert')
    """
    from pydoc_data.topics import topics

    documents = []
    for name, text in sorted(topics.items()):
        documents.append(Document(f"topic {name}", text.strip("\n")))
    if docstrings:
        documents += _docstrings()
    return tuple(documents)


@cache
def package_texts() -> tuple[Document, ...]:
    """Descriptions of installed packages: text by other authors that every machine has.

    Examples
    --------
    >>> any(document.name == "package torch" for document in package_texts())
    True
    """
    text_of: dict[str, str] = {}
    for package in distributions():
        metadata = package.read_text("METADATA") or ""
        _, _, description = metadata.partition("\n\n")  # behind the first empty line
        text_of[f"package {package.metadata['Name'].lower()}"] = description
    documents = [Document(name, text) for name, text in sorted(text_of.items())]
    return tuple(document for document in documents if len(document.text) >= _LEAST_SECTION)


def _docstrings() -> list[Document]:
    """The prose of each module of the standard library, read and never run."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = []
    collects = gc.isenabled()
    gc.disable()  # trees have no cycles, and looking for some in all that torch holds takes long
    for path in _modules(library):
        text = _prose_of(path)
        if len(text) >= _LEAST_DOCUMENT:
            name = ".".join(path.relative_to(library).with_suffix("").parts)
            documents.append(Document(f"module {name.removesuffix('.__init__')}", text))
    if collects:
        gc.enable()
    return sorted(documents, key=lambda document: document.name)


def _modules(library: Path) -> Iterator[Path]:
    """Source files of the standard library, without its tests and the like."""
    for folder, inside, files in os.walk(library):
        inside[:] = [name for name in inside if not _NOT_LIBRARY.fullmatch(name)]
        for name in files:
            if name.endswith(".py"):
                yield Path(folder, name)


def _prose_of(path: Path) -> str:
    """The docstrings of a module that are prose; nothing if it cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # somebody else's file in a folder of Python's
        return ""
    different = dict.fromkeys(_docstrings_in(tree))
    return "\n\n".join(filter(_is_prose, different))


def _docstrings_in(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[str]:
    """The docstrings in a piece of source, in its order."""
    yield ast.get_docstring(node) or ""
    for part in node.body:
        if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_in(part)


def _is_prose(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    letters_and_blanks = re.findall(r"[^\W\d_]+|\s+", text)
    characters = sum(len(piece) for piece in letters_and_blanks)
    return len(lines) >= _LEAST_LINES and characters >= _PROSE * len(text)


def read_documents(paths: Sequence[str | Path]) -> tuple[Document, ...]:
    """Text files, and those in folders: one document for each file.

    Fewer files than a split needs are cut into sections of about the same length at blank lines,
    each a document: a warning says so, as sections of one text are more alike than texts of their
    own.

    Parameters
    ----------
    paths : files of text in UTF-8, or folders, of which every .txt, .md, .rst and .text is read.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for i in range(20):
    ...     _ = (folder / f"{i}.txt").write_text(f"Text number {i}.")
    >>> len(read_documents([folder]))
    20
    """
    documents = []
    for path in map(Path, paths):
        for file in _files_in(path) if path.is_dir() else [path]:
            text = read_text(file, "a text file or a folder of them").strip("\n")
            if text:
                documents.append(Document(str(file), text))
    if len(documents) < FEW_FILES:
        documents = _cut(documents)
    return tuple(documents)


def _files_in(folder: Path) -> list[Path]:
    """Text files in a folder, at any depth, in order; what is hidden is left out."""
    files = []
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not hidden and file.suffix.lower() in _SUFFIXES and file.is_file():
            files.append(file)
    if not files:
        raise BadInput(
            f"there is no text in {folder}: name a folder with {', '.join(_SUFFIXES)} files."
        )
    return sorted(files)


def _cut(documents: Sequence[Document]) -> list[Document]:
    """Cut a few documents into sections, each a document, and warn."""
    characters = sum(len(document.text) for document in documents)
    size = max(characters // _SECTIONS, _LEAST_SECTION)
    sections = []
    for document in documents:
        for number, text in enumerate(_sections(document.text, size), 1):
            sections.append(Document(f"{document.name}, section {number}", text))
    if len(sections) > len(documents):
        files = "1 file is" if len(documents) == 1 else f"{len(documents)} files are"
        says = (
            "%s too few to split by document: "
            "cut into %d sections, each taken for a text of its own."
        )
        log.warning(says, files, len(sections))
    return sections


def read_text(path: Path, wanted: str) -> str:
    """The text of a plain file in UTF-8, with line ends as Python has them.

    Others are refused: a pipe or a device may never end.
    """
    if not path.is_file():
        raise BadInput(f"{path} cannot be read, as it is no plain file: name {wanted}.")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not text in UTF-8: convert it, or name another file.") from None


def _sections(text: str, size: int) -> list[str]:
    """Cut a text after ``size`` characters: at the next blank line, else line end, else blank."""
    sections = []
    while len(text) > 2 * size:
        end = _first_end(text, size)
        sections.append(text[:end])
        text = text[end:].lstrip("\n")
    return [*sections, text]


def _first_end(text: str, size: int) -> int:
    """Where a section of at least ``size`` characters, and at most twice as many, ends."""
    for mark in ("\n\n", "\n", " "):
        end = text.find(mark, size, 2 * size)
        if end >= 0:
            return end
    return size


def text_hash(texts: Texts) -> str:
    """Fingerprint of a collection: a hash of all names and texts.

    Parameters
    ----------
    texts : in their order; strings have no name.

    Examples
    --------
    >>> text_hash([Document("a", "b")]) == text_hash([Document("a", "c")])
    False
    """
    state = hashlib.sha256()
    for text in texts:
        parts = ("", text) if isinstance(text, str) else (text.name, text.text)
        for part in parts:
            raw = part.encode("utf-8", "backslashreplace")
            state.update(len(raw).to_bytes(8, "big") + raw)
    return state.hexdigest()[:16]
