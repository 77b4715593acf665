"""The frame of every verb: time, folder, pieces and page, by one decorator.

A verb is a public function that returns a `Result`. With ``out`` it writes its folder itself, page included; the folder
is checked before anything runs. A verb that takes ``part`` shares its pieces among processes (`qkscope.runs.work`).
"""

from __future__ import annotations

import functools
import inspect
import time
import typing
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import ParamSpec, TypeVar

from qkscope.kinds import checked_call
from qkscope.runs.folder import PAGE, add_to_run, check_folder, kept_if_stopped
from qkscope.runs.result import Result
from qkscope.runs.work import PartDone, Work

P = ParamSpec("P")
R = TypeVar("R", bound=Result)

_WORK: ContextVar[Work] = ContextVar("work")


def current_work() -> Work:
    """The pieces of the verb that runs; of none, where nothing is kept."""
    return _WORK.get(Work())


def verb(kind: str, *, beside: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a public verb; its arguments are checked against their annotations.

    Parameters
    ----------
    kind : of its folders, as their ``experiment`` begins; also the attribute ``kind`` of the verb.
    beside : the name of an argument whose own folder (``kept_in``) may be ``out``: then its page is drawn anew and
        tells both results.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            start, given = time.perf_counter(), signature.bind(*args, **kwargs).arguments
            out, other = given.get("out"), given.get(beside)
            home = other is not None and out is not None and other.kept_in == Path(out)
            if out is not None:
                check_folder(out, None if home else kind)
            work = Work(out, given.get("part"))
            token = _WORK.set(work)
            try:
                with kept_if_stopped(Path(out or ""), lambda: work.folder is not None and work.folder.is_dir()):
                    if work.part[0] > 0 and "part" not in signature.parameters:
                        raise PartDone  # of torchrun, and there is nothing to share
                    result = replace(function(*args, **kwargs), seconds=time.perf_counter() - start)
            except PartDone as done:
                made: Callable[..., R] = typing.get_type_hints(function)["return"]
                return made(experiment=kind, tables={}, answer=str(done))
            finally:
                _WORK.reset(token)
            if out is not None and not (work.together and work.part[0]):
                page = import_module("qkscope.show.page")  # a room below this one, so it is found by name
                if home:
                    add_to_run(Path(out), {PAGE: page.report_html([result, other])})
                else:
                    result = replace(result, provenance={**result.provenance, **work.asked})
                    result.write(out, files={PAGE: page.report_html([result])})
                work.finish()
            return result

        framed = checked_call(run)
        vars(framed)["kind"] = kind
        return framed

    return decorate


def is_part(result: Result) -> bool:
    """Whether a verb's result is that of one part: its answer says what is done, under torchrun nothing."""
    return not result.tables
