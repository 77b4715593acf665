"""The nano models that ship with the package: ``nano:NAME`` is the last checkpoint, ``nano:NAME@STEP`` any other.

Each checkpoint is a model folder under ``data/nano/NAME/STEP``, as ``qkscope train nano`` writes them.
"""

from __future__ import annotations

from pathlib import Path

from qkscope.errors import BadInput

PREFIX = "nano:"
_SHIPPED = Path(__file__).parents[1] / "data" / "nano"


def nano_names() -> list[str]:
    """The nano models there are.

    >>> nano_names()
    ['mixed']
    """
    return sorted(path.name for path in _SHIPPED.iterdir() if path.is_dir())


def nano_steps(name: str) -> list[int]:
    """The training steps at which a nano model can be had, in order; ``nano:`` before the name is welcome."""
    name = name.removeprefix(PREFIX)
    if name not in nano_names():
        raise BadInput(f"there is no nano model {name!r}: there is {', '.join(nano_names())}.")
    return sorted(int(path.name) for path in (_SHIPPED / name).iterdir() if path.name.isdecimal())


def nano_folder(address: str, revision: str | None = None) -> tuple[str, str, Path]:
    """The name, the step and the folder of ``nano:NAME@STEP``, or of ``nano:NAME`` and a step as the revision."""
    name, at, step = address.removeprefix(PREFIX).partition("@")
    if at and revision is not None and revision != step:
        raise BadInput(f"{address} names step {step!r}, but the revision is {revision!r}: give one of them.")
    steps = nano_steps(name)
    asked = step if at else revision
    if asked is None:
        asked = str(steps[-1])
    if asked not in {str(number) for number in steps}:
        raise BadInput(f"{PREFIX}{name} has no step {asked!r}: it has {', '.join(map(str, steps))}.")
    return PREFIX + name, asked, _SHIPPED / name / asked
