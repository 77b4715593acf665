"""Models inside installed packages: the data of a package is read, its code is never imported.

pip installs them by version and hash (`fetch`). A model too large for one package comes in parts, joined once in the
user's cache and believed by their hash.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qkscope.capture.files import cache_dir, file_hash, making
from qkscope.errors import BadInput

if TYPE_CHECKING:
    from qkscope.capture.scope import Scope

_DATA = re.compile(r"\.gguf(\.part\d+)?$")


@dataclass(frozen=True)
class Package:
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

    def files(self) -> list[Path]:
        """The data files of its packages, one of each and in order; none where one is missing."""
        files: list[Path] = []
        for package in self.packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                listed = importlib.metadata.files(package) or []
                files += [Path(str(file.locate())) for file in listed if _DATA.search(file.name)]
        return files if len(files) == len(self.packages) and all(file.is_file() for file in files) else []


_PINS = Path(__file__).parents[1] / "data" / "packages"
EMBEDDED: Mapping[str, Package] = {
    "smollm2-135m": Package(_PINS / "smollm2-135m.txt", "SmolLM2-135M-Instruct (Apache-2.0), 93 MB"),
    "gemma3-270m": Package(
        _PINS / "gemma3-270m.txt",
        "Gemma 3 270M, 240 MB",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "the Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    ),
}
"""Names that stand for the GGUF file in installed packages."""


def packaged_file(name: str) -> Path:
    """The GGUF file that a name stands for; it is joined from its parts where it has several."""
    package, joined = EMBEDDED[name], cache_dir(f"{name}.gguf")
    if package.sha256 is not None and joined.is_file() and file_hash(joined) == package.sha256:
        return joined
    parts = package.files()
    if not parts:
        terms = f"; who uses it agrees to {package.terms}" if package.terms else ""
        raise BadInput(f"{name} is not installed: run `qkscope fetch {name}` ({package.about}){terms}.")
    if package.sha256 is None:
        return parts[0]
    with making(joined) as whole:  # it gets its name when its hash is right
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        if file_hash(whole) != package.sha256:
            raise BadInput(f"the parts of {name} do not join to the file they were cut from: install them again.")
    return joined


def is_installed(name: str) -> bool:
    """Whether the packages of a model are there.

    >>> is_installed("gpt2")
    False
    """
    return name in EMBEDDED and bool(EMBEDDED[name].files())


def fetch(name: str, say: Callable[[str], object] = print) -> Scope:
    """Install what a name stands for where it is missing, saying the command that does it, and load it once.

    Parameters
    ----------
    name : one of the models that packages hold.
    say : takes each line.

    Examples
    --------
    >>> print(fetch("smollm2-135m"))
    smollm2-135m is installed already.
    Scope('smollm2-135m', 30 layers, 270 heads, float32 on cpu)
    """
    from qkscope.capture.scope import Scope

    name = name.lower()
    if name not in EMBEDDED:
        among = " or ".join(EMBEDDED)
        raise BadInput(f"there is nothing to fetch for {name!r}: take {among}; models of the hub load by their id.")
    if is_installed(name):
        say(f"{name} is installed already.")
    else:
        _install(name, EMBEDDED[name], say)
    return Scope.load(name, device="cpu")


def _install(name: str, package: Package, say: Callable[[str], object]) -> None:
    options = ["install", "--quiet", "--no-deps", "--require-hashes", "--requirement", str(package.pins)]
    if importlib.util.find_spec("pip") is None:  # uv makes such environments
        other = shlex.join(["uv", "pip", *options, "--python", sys.executable])
        raise BadInput(f"{sys.executable} has no pip to fetch {name} with: run `{other}`.")
    say(f"{name} is {package.about}: the data of {', '.join(package.packages)}, whose code is never run.")
    if package.terms:
        say(f"It is provided under and subject to {package.terms}; who installs and uses it agrees to them.")
    command = [sys.executable, "-m", "pip", *options]
    say(f"Running: {shlex.join(command)}")
    if subprocess.run(command).returncode:
        raise BadInput(f"pip could not install {name} for the reason above: mend it, then fetch again.")
    importlib.invalidate_caches()
