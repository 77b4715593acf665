"""Natural text by document: English that every Python carries, and any file or folder.

A document came to be once, so it is what text is split by (`sides`) and what intervals resample.
Python's own texts are the default because they need no download: what ``help()`` has on its topics,
and the docstrings of its library.
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

FEW = 12  # files under which they are cut into sections: `sides.split` needs as many documents
_SECTIONS = 32  # of all the files, then
_LEAST_SECTION = 1000  # characters
_KINDS = (".txt", ".md", ".rst", ".text")  # files of a folder that are taken for text

_NOT_LIBRARY = re.compile(
    r"tests?|idlelib|lib2to3|turtledemo|ensurepip|distutils|encodings|pydoc_data|\w+-packages"
)
# lines of a docstring, characters of a module's docstrings
_LEAST_LINES = 3
_LEAST_DOCUMENT = 400
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
    """English that comes with Python: what ``help()`` has on its topics, and the docstrings of its
    library.

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

    documents = [
        Document(f"topic {name}", text.strip("\n")) for name, text in sorted(topics.items())
    ]
    return (*documents, *(_docstrings() if docstrings else ()))


@cache
def package_texts() -> tuple[Document, ...]:
    """Descriptions of installed packages: a third kind of text, by other authors, that every
    machine has.

    Examples
    --------
    >>> any(document.name == "package torch" for document in package_texts())
    True
    """
    said = {  # behind the first empty line of its metadata
        f"package {package.metadata['Name'].lower()}": (
            package.read_text("METADATA") or ""
        ).partition("\n\n")[2]
        for package in distributions()
    }
    return tuple(
        Document(name, text) for name, text in sorted(said.items()) if len(text) >= _LEAST_SECTION
    )


def _docstrings() -> list[Document]:
    """The prose of each module of the standard library, read and never run."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = list[Document]()
    collects = gc.isenabled()
    gc.disable()  # trees have no cycles, and to look for some in all that torch holds is two thirds of the time
    for folder, inside, files in os.walk(library):
        inside[:] = [name for name in inside if not _NOT_LIBRARY.fullmatch(name)]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            try:
                tree = ast.parse(path.read_bytes())
            except (
                OSError,
                SyntaxError,
                ValueError,
            ):  # a file of somebody else's, in a folder that is Python's
                continue
            text = "\n\n".join(filter(_is_prose, dict.fromkeys(_said(tree))))
            if len(text) >= _LEAST_DOCUMENT:
                parts = path.relative_to(library).with_suffix("").parts
                documents.append(
                    Document(f"module {'.'.join(parts).removesuffix('.__init__')}", text)
                )
    if collects:
        gc.enable()
    return sorted(documents, key=lambda document: document.name)


def _said(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[str]:
    """The docstrings in a piece of source, in its order."""
    yield ast.get_docstring(node) or ""
    for part in node.body:
        if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _said(part)


def _is_prose(text: str) -> bool:
    lines = sum(bool(line.strip()) for line in text.splitlines())
    return lines >= _LEAST_LINES and sum(
        map(len, re.findall(r"[^\W\d_]+|\s+", text))
    ) >= _PROSE * len(text)


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
        inside = (
            f
            for f in path.rglob("*")
            if not any(part.startswith(".") for part in f.relative_to(path).parts)
        )
        files = sorted(file for file in inside if file.suffix.lower() in _KINDS and file.is_file())
        if path.is_dir() and not files:
            raise BadInput(
                f"there is no text in {path}: name a folder with {', '.join(_KINDS)} files."
            )
        for file in files if path.is_dir() else [path]:
            text = read_text(file, "a text file or a folder of them").strip("\n")
            documents += [Document(str(file), text)] if text else []
    if len(documents) >= FEW:
        return tuple(documents)
    size = max(sum(len(document.text) for document in documents) // _SECTIONS, _LEAST_SECTION)
    cut = [
        Document(f"{document.name}, section {i}", section)
        for document in documents
        for i, section in enumerate(_sections(document.text, size), 1)
    ]
    if len(cut) > len(documents):
        says = "%s too few to split by document: cut into %d sections, each taken for a text of its own."
        log.warning(
            says, "1 file is" if len(documents) == 1 else f"{len(documents)} files are", len(cut)
        )
    return tuple(cut)


def read_text(path: Path, wanted: str) -> str:
    """The text of a plain file in UTF-8, with line ends as Python has them; a pipe or a device may
    never end.
    """
    if not path.is_file():
        raise BadInput(f"{path} cannot be read, as it is no plain file: name {wanted}.")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not text in UTF-8: convert it, or name another file.") from None


def _sections(text: str, size: int) -> list[str]:
    """A text cut after ``size`` characters at the next blank line, or line end, or blank, whichever
    there is.
    """
    sections = []
    while len(text) > 2 * size:
        ends = (text.find(mark, size, 2 * size) for mark in ("\n\n", "\n", " "))
        cut = next((end for end in ends if end >= 0), size)
        sections.append(text[:cut])
        text = text[cut:].lstrip("\n")
    return [*sections, text]


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
        for part in ("", text) if isinstance(text, str) else (text.name, text.text):
            raw = part.encode("utf-8", "backslashreplace")
            state.update(len(raw).to_bytes(8, "big") + raw)
    return state.hexdigest()[:16]
