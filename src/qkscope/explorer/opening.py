"""Opening pages: a run folder's, or the live one."""

from __future__ import annotations

import hashlib
import logging
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from qkscope.capture.files import cache_dir
from qkscope.errors import BadInput
from qkscope.kinds import Interval, checked_call
from qkscope.runs.result import Result

log = logging.getLogger(__name__)
_NAMED = 6


@checked_call
def view(
    folder: str | Path | None = None,
    *,
    live: bool = False,
    model: str | None = None,
    fit: str | Path | None = None,
    port: Annotated[int, Interval(ge=0, le=65535)] = 0,
    browser: bool = True,
    say: Callable[[str], object] = log.info,
) -> str:
    """Open the page of a run folder, or serve the live one until interrupted; returns its address.

    Parameters
    ----------
    folder : a run folder; its page is drawn anew from its data where it has none that was drawn here.
    live : whether to look into a model instead.
    model : what to look into: the fit's model by default, or the embedded one.
    fit : a folder that decompose, discover or atlas wrote, for what it knows of heads; none is needed.
    port : of the live page, up to 65535; 0 is any that is free.
    browser : whether to open the reader's browser.
    say : told the address before it is opened or served.

    Examples
    --------
    >>> import tempfile
    >>> from qkscope import Result
    >>> run = Result("mine", {"heads": [{"head": "L0H1", "score": 0.9}]}, answer="L0H1 finds it.")
    >>> address = view(run.write(tempfile.mkdtemp() + "/run"), browser=False)
    >>> address.startswith("file://")
    True
    """
    if live:
        if folder is not None:
            raise BadInput(f"the live page looks into a model: give {folder} as its fit, not as the folder to view.")
        return _serve(model, fit, port, browser, say)
    if folder is None:
        raise BadInput("name a run folder to view, or ask for the live page to look into a model.")
    if fit is not None or model is not None or port:
        raise BadInput("model, fit and port are for the live page: ask for it, or leave them out.")
    url = page_of(folder).absolute().as_uri()
    say(url)
    if browser:
        webbrowser.open(url)
    return url


def page_of(folder: str | Path) -> Path:
    """The page of a run folder, if we have drawn it; else one drawn from its data, in the user's cache.

    A page that came with a folder could hold anybody's scripts. What is not whole is refused.
    """
    folder = Path(folder)
    inside = sorted(path.parent for path in folder.glob("*/**/results.json")) if folder.is_dir() else []
    if inside and not (folder / "results.json").exists():
        some = ", ".join(str(path) for path in inside[:_NAMED]) + (", …" if len(inside) > _NAMED else "")
        raise BadInput(f"{folder} holds {len(inside)} runs: name one of {some}.")
    result = Result.read(folder)
    page = folder / ("index.html" if result.experiment == "gallery" else "report.html")
    from qkscope.page.report import drawn_here, write_report
    from qkscope.page.stored import drawn_from, pictures_of

    if drawn_here(page):
        return page
    if page.exists():
        log.info("%s was not drawn here, or has changed since: the page is drawn anew from the folder's data.", page)
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    with drawn_from(folder):
        return write_report(cache_dir("pages", f"{name}.html"), result, pictures=pictures_of(folder))


def _serve(model: str | None, fit: str | Path | None, port: int, browser: bool, say: Callable[[str], object]) -> str:
    if fit is not None:
        from qkscope.explorer.features import model_of

        there = model_of(fit)
        model = model or there
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
