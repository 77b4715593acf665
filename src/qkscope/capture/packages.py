"""Models inside installed packages: the data of a package is read, its code is never imported.

A model too large for one package comes in parts, joined once in the user's cache and believed by their hash.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qkscope.capture.files import cache_dir, file_hash, making
from qkscope.errors import BadInput

_DATA = re.compile(r"\.gguf(\.part\d+)?$")


@dataclass(frozen=True)
class Packaged:
    """A GGUF file in one package, or cut into one part for each of several.

    `pins` is a file of requirements, one line a package in the order of its parts; `terms` are what its user agrees to.
    """

    pins: Path
    about: str
    sha256: str | None = None
    terms: str | None = None

    @property
    def packages(self) -> list[str]:
        """The names of its packages, in order."""
        return [line.split("==")[0] for line in self.pins.read_text().splitlines() if "==" in line]


_PINS = Path(__file__).parents[1] / "data" / "packages"
EMBEDDED: Mapping[str, Packaged] = {
    "smollm2-135m": Packaged(_PINS / "smollm2-135m.txt", "SmolLM2-135M-Instruct (Apache-2.0), 93 MB"),
    "gemma3-270m": Packaged(
        _PINS / "gemma3-270m.txt",
        "Gemma 3 270M, 240 MB",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "the Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    ),
}
"""Names that stand for the GGUF file in installed packages."""


def packaged_file(name: str) -> Path:
    """The GGUF file that a name stands for; it is joined from its parts where it has several."""
    asked = EMBEDDED[name]
    joined = cache_dir(f"{name}.gguf")
    if asked.sha256 is not None and joined.is_file() and file_hash(joined) == asked.sha256:
        return joined
    parts = _parts(name)
    if not parts:
        agreed = f"; who uses it agrees to {asked.terms}" if asked.terms else ""
        raise BadInput(f"{name} is not installed: run `qkscope fetch {name}` ({asked.about}){agreed}.")
    return parts[0] if asked.sha256 is None else _join(name, parts, joined, asked.sha256)


def is_installed(name: str) -> bool:
    """Whether the packages of a model are there.

    >>> is_installed("gpt2")
    False
    """
    return name in EMBEDDED and bool(_parts(name))


def _parts(name: str) -> list[Path]:
    """The data files of a model's packages, one of each and in order; none where one is missing."""
    found: list[Path] = []
    for package in EMBEDDED[name].packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.files(package) or []
            found += [Path(str(file.locate())) for file in files if _DATA.search(file.name)]
    whole = len(found) == len(EMBEDDED[name].packages) and all(part.is_file() for part in found)
    return found if whole else []


def _join(name: str, parts: list[Path], joined: Path, sha256: str) -> Path:
    """Write the parts behind each other; the file gets its name when its hash is right."""
    with making(joined) as whole:
        with whole.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        if file_hash(whole) != sha256:
            raise BadInput(f"the parts of {name} do not join to the file they were cut from: install them again.")
    return joined
