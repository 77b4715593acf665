"""What made a result: its command, what was asked, versions and threads. No time, no host: a rerun says the same."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def provenance(**asked: Any) -> dict[str, Any]:
    """What made a result: command, what was asked, versions, threads. No time, no host: a rerun gives the same."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("qkscope", "transformers", "numpy", "safetensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"command": command_line(), "asked": asked, "versions": versions, "threads": torch.get_num_threads()}


def command_line() -> str | None:
    """The command that runs, as a shell takes it; none where Python called us."""
    program = Path(sys.argv[0]).parts[-2:]
    ours = program[-1:] == ("qkscope",) or program == ("qkscope", "__main__.py")  # and not pytest
    return shlex.join(["qkscope", *sys.argv[1:]]) if ours else None
