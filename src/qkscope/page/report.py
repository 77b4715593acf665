"""Results as one page that needs no network: the answer in words, charts one can touch, claims, and what made them.

The page holds its data as JSON and draws it with plain scripts of ours. A content policy in the page forbids everything
else: no request, no script but these.

A page may hold scripts, so that one which somebody else made is not opened: the user's cache keeps the hash of every
page that was drawn here. One that came with a folder from elsewhere is not among them, whatever it says of itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from qkscope.capture.files import cache_dir
from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.page.block import number
from qkscope.page.blocks import SCRIPTS, blocks_of
from qkscope.page.places import name_places
from qkscope.runs.claims import count_claims
from qkscope.runs.folder import PAGE, add_to_run, read_run, write_file, writing
from qkscope.runs.result import Result, plain_value

_HERE = Path(__file__).parent
_ROWS = 200  # of a table written out; the chart's and the folder's data are whole
_HEIGHTS = {
    "map": 420, "swaps": 720, "curve": 460, "tokens": 480, "spectra": 640, "cards": 760, "atlas": 1400, "cloud": 740,
    "reads": 1000, "said": 300, "parts": 440, "tests": 380, "output": 360, "graph": 620,
}  # fmt: skip
"""Pixels of a chart in a notebook, until it says how many it takes."""
_GROWS = (
    "window.addEventListener('message',e=>{if(e.source===this.contentWindow&&e.data>0)"
    "this.style.height=Math.min(e.data,5000)+'px'})"
)
_LARGEST = 1 << 28  # bytes of a page of ours


@checked_call
def write_report(
    path: str | Path, *results: Result, title: str = "", pictures: Mapping[str, bytes] | None = None
) -> Path:
    """Write one offline page of results; returns where it is.

    Parameters
    ----------
    path : where to write it, a name that ends in .html; only a page that was drawn here is replaced.
    results : what the verbs return, in the order in which they are to be told.
    title : what to call it; the first result's experiment by default.
    pictures : PNG files by caption, shown first.

    Examples
    --------
    >>> import tempfile
    >>> import qkscope
    >>> scope = qkscope.Scope.load("nano:mixed")
    >>> ranking = qkscope.find_heads(scope, qkscope.tasks.binding(4), 4)
    >>> page = write_report(tempfile.mkdtemp() + "/report.html", ranking)
    >>> ranking.answer[:9] in page.read_text()
    True
    """
    path = Path(path)
    if not results:
        raise BadInput("there is nothing to report: give at least one result.")
    if path.is_dir():
        raise BadInput(f"{path} is a folder: name a file for the page, like {path / 'report.html'}.")
    of_a_run = path.name == PAGE and bool(read_run(path.parent))
    if path.suffix != ".html" or (not of_a_run and os.path.lexists(path) and not drawn_here(path)):
        raise BadInput(f"{path} is no page that qkscope drew here: name a new file that ends in .html.")
    text = report_html(results, pictures, title=title)
    with writing(path):
        if of_a_run:
            add_to_run(path.parent, {PAGE: text})
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text)
    return path


def report_html(
    results: Sequence[Result],
    pictures: Mapping[str, bytes] | None = None,
    *,
    title: str = "",
) -> str:
    """The page as text. Everything from a result is escaped.

    Parameters
    ----------
    pictures : PNG files by caption, inlined.
    """
    return remembered(_render(results, pictures or {}, title))


def remembered(page: str) -> str:
    """The page, noted as drawn here; where the cache cannot be written, it is drawn anew when it is viewed."""
    with suppress(OSError):
        _notes().parent.mkdir(parents=True, exist_ok=True)
        with _notes().open("a", encoding="ascii") as file:
            file.write(_hash(page.encode("utf-8", "backslashreplace")) + "\n")
    return page


def drawn_here(path: Path) -> bool:
    """Whether this file is a page that we have drawn, bit for bit."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return False
        return _hash(path.read_bytes()) in _notes().read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False


def _notes() -> Path:
    return cache_dir("pages", "drawn.txt")


def _hash(page: bytes) -> str:
    return hashlib.sha256(page).hexdigest()


def widget_html(result: Result) -> str:
    """A result for a notebook: the page without its frame, in a frame of its own, so that neither touches the other.

    The frame is as tall as its charts usually are, and as they are where the notebook lets it listen to them.
    """
    inside = _render([result], {}, "", bare=True)
    kept = inside.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;")  # quotes are half of a table
    height = 160 + sum(_HEIGHTS.get(block.kind, 500) for block in blocks_of(result))
    frame = Markup('<iframe sandbox="allow-scripts" title="{}" onload="{}" srcdoc=\'{}\' style="{}"></iframe>')
    style = f"width:100%;height:{height}px;border:0;resize:vertical;overflow:auto"
    return str(frame.format(result.experiment, _GROWS, Markup(kept), style))


def _render(results: Sequence[Result], pictures: Mapping[str, bytes], title: str, bare: bool = False) -> str:
    sections = [_section(result) for result in results]
    name_places(sections)
    shown = _not_drawn(pictures, sections)
    kinds = dict.fromkeys(block.kind for section in sections for block, _ in section["blocks"])
    needed = dict.fromkeys(["base.js", "colours.js", *(name for kind in kinds for name in SCRIPTS[kind]), "report.js"])
    return render(
        "report.html",
        [*needed],
        ["page.css"],
        title=title or results[0].experiment,
        lead=results[0],
        sections=sections,
        held=count_claims([claim for result in results for claim in result.claims]),
        pictures={name: base64.b64encode(data).decode() for name, data in shown.items()},
        charts=bool(kinds or shown),
        about=_about(results),
        bare=bare,
    )


def render(template: str, scripts: Sequence[str], styles: Sequence[str], **given: Any) -> str:
    """A page of ours: these scripts and styles are the only markup that is not escaped, and all that it may run."""
    texts = [asset(name) for name in scripts]
    return (
        _templates()
        .get_template(template)
        .render(
            style=Markup("".join(asset(name) for name in styles)),
            scripts=[Markup(text) for text in texts],
            policy=_policy(texts),
            **given,
        )
    )


def _not_drawn(pictures: Mapping[str, bytes], sections: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Pictures of what no chart shows: one that is called after a table is left out where the table is drawn."""
    drawn = {block.table for section in sections for block, _ in section["blocks"]}
    return {name: data for name, data in pictures.items() if name not in drawn}


def _section(result: Result) -> dict[str, Any]:
    """A result's blocks, each with its data as JSON, and its tables."""
    blocks = blocks_of(result)
    tables = {
        name: {"rows": rows[:_ROWS], "total": len(rows), "columns": _columns(rows), "places": {}}
        for name, rows in plain_value(result.tables).items()
        if rows
    }
    shown = [
        {"data": script_json({"kind": b.kind, "title": b.title, "rows": b.rows, "options": b.options})} for b in blocks
    ]
    claims = [claim.to_json() for claim in result.claims]
    return {"result": result, "blocks": list(zip(blocks, shown, strict=True)), "tables": tables, "claims": claims}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Every column that some row has, and whether its first value is a number."""
    first: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            first.setdefault(name, value)
    return {name: isinstance(value, int | float) for name, value in first.items()}


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: no character of it can end the element."""
    text = json.dumps(plain_value(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _about(results: Sequence[Result]) -> dict[str, Any]:
    """What made the page: the command, then the facts that all results share, then each manifest."""
    first = results[0]
    made = {**first.provenance}
    facts = {
        "command": made.get("command"), "model": first.model, "preset": first.preset, "seed": first.seed,
        "seconds": round(sum(result.seconds for result in results), 1), "threads": made.get("threads"),
        "versions": ", ".join(f"{name} {number}" for name, number in made.get("versions", {}).items()),
    }  # fmt: skip
    manifests = {
        result.experiment: json.dumps(plain_value(result.provenance), indent=1, ensure_ascii=False)
        for result in results
        if result.provenance
    }
    return {"facts": {name: value for name, value in facts.items() if value not in (None, "")}, "manifests": manifests}


def _policy(scripts: Sequence[str]) -> str:
    """What the page may do: run exactly these scripts, style itself, show its own pictures."""
    sums = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {sums}; style-src 'unsafe-inline'; img-src data: blob:"


@cache
def asset(name: str) -> str:
    """A style sheet or script of ours, as text."""
    return (_HERE / "static" / name).read_text(encoding="utf-8")


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment
