"""A long run and its folder: one writer at a time, and an interruption that waits for the end of a batch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from qkscope.errors import Terminated
from qkscope.runs.folder import only_writer as only_writer


@contextmanager
def patient_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether to stop, asked between batches: sums are never half added. Asked twice, it stops now.

    Ctrl-C asks for it, and so does a scheduler (SIGTERM), which ends in `Terminated`.
    """
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    except KeyboardInterrupt:
        if signal.SIGTERM in asked:
            raise Terminated from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
