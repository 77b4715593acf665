"""Opening pages: a run folder's, or the live one."""

from __future__ import annotations

import logging
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.result import Result

log = logging.getLogger(__name__)
_NAMED = 6


@checked_call
def view(
    folder: str | Path | None = None,
    *,
    live: bool = False,
    model: str | None = None,
    fit: str | Path | None = None,
    port: int = 0,
    browser: bool = True,
    say: Callable[[str], object] = log.info,
) -> str:
    """Open the page of a run folder, or serve the live one until interrupted; returns its address.

    Parameters
    ----------
    folder : a run folder; its page is made where it has none yet.
    live : whether to look into a model instead.
    model : what to look into: the fit's model by default, or the embedded one.
    fit : a folder that decompose wrote, for its features; without it a head is fitted when asked.
    port : of the live page; a free one by default.
    browser : whether to open the reader's browser.
    say : told the address before a live page is served.
    """
    if live:
        if folder is not None:
            raise BadInput(f"the live page looks into a model: name features with --fit {folder} instead of a folder.")
        return _serve(model, fit, port, browser, say)
    if folder is None:
        raise BadInput("name a run folder to view, or say --live to look into a model.")
    if fit is not None or model is not None or port:
        raise BadInput("--model, --fit and --port are for the live page: say --live, or leave them out.")
    url = page_of(folder).absolute().as_uri()
    say(url)
    if browser:
        webbrowser.open(url)
    return url


def page_of(folder: str | Path) -> Path:
    """The page of a run folder, made from its results where it has none; what is not whole is refused."""
    folder = Path(folder)
    inside = sorted(path.parent for path in folder.glob("*/**/results.json")) if folder.is_dir() else []
    if inside and not (folder / "results.json").exists():
        some = ", ".join(str(path) for path in inside[:_NAMED]) + (", …" if len(inside) > _NAMED else "")
        raise BadInput(f"{folder} holds {len(inside)} runs: name one of {some}.")
    result = Result.read(folder)
    page = folder / "report.html"
    if not page.exists():
        from qkscope.page.report import write_report

        pictures = {path.stem: path.read_bytes() for path in sorted(folder.glob("figures/*.png"))}
        try:
            return write_report(page, result, pictures=pictures)
        except BadInput:
            raise
        except (AttributeError, KeyError, TypeError, ValueError):  # JSON, but not what a run writes
            raise BadInput(f"{folder} is damaged or half-written: run the command that made it again.") from None
    with page.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(file.tell() - 64, 0))
        if not file.read().rstrip().endswith(b"</html>"):
            raise BadInput(f"{page} is half-written: remove it and view the folder again.")
    return page


def _serve(
    model: str | None, fit: str | Path | None, port: int, browser: bool, say: Callable[[str], object]
) -> str:  # fmt: skip
    if not 0 <= port <= 65535:
        raise BadInput(f"a port is from 0 (any free one) to 65535, but got {port}.")
    from qkscope.analyses.fit_folder import read_job, task_of
    from qkscope.analyses.swap import check_swappable

    if fit is not None:
        job = read_job(fit)
        check_swappable(job["space"], downstream=True)
        task_of(job, fit)
        model = model or str(job["model"])
    from qkscope.capture.scope import Scope
    from qkscope.explorer.server import Explorer
    from qkscope.explorer.session import Session

    with Explorer(Session.load(Scope.load(model or "smollm2-135m"), fit), port) as server:
        say(server.url)
        if browser:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):  # how one stops it
            server.serve_forever()
    return server.url
