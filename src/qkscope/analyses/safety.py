"""A long run and its folder: one writer at a time, and an interruption that waits for the end of a batch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from qkscope.errors import BadInput
from qkscope.result import writing


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it also when the process is killed."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with writing(folder):
        handle = open(folder / ".lock", "w")  # noqa: SIM115 (closed below; what is done under the lock may raise)
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another run is writing to {folder}: wait until it ends, or name another folder.") from None
        except OSError as error:
            raise BadInput(f"{folder} cannot be locked ({error.strerror}), so a second run could not be kept out: "
                           "name a folder on another disk.") from None  # fmt: skip
        yield


@contextmanager
def patient_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, asked between batches: sums are never half added. Pressed twice, it stops now."""
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
