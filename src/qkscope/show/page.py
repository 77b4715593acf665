"""Results as one page that needs no network: the answer in words, charts one can touch, claims, and
what made them.

The page holds its data as JSON and draws it with plain scripts of ours. A content policy in the
page forbids everything else: no request, no script but these.

A page may hold scripts, so that one which somebody else made is not opened: the user's cache keeps
the hash of every page that was drawn here. One that came with a folder from elsewhere is not among
them, whatever it says of itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from qkscope.checking import checked_call
from qkscope.errors import BadInput
from qkscope.model.files import cache_dir
from qkscope.results.claims import count_claims
from qkscope.results.folder import PAGE, RESULTS, add_to_run, read_run, write_file, writing
from qkscope.results.result import Records, Result, plain_value
from qkscope.results.tables import every_table
from qkscope.show import Block, number
from qkscope.show.blocks import SCRIPTS, blocks_of

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
_ROWS = 200  # of a table written out; the chart's and the folder's data are whole
_GROWS = (
    "window.addEventListener('message',e=>{if(e.source===this.contentWindow&&e.data>0)"
    "this.style.height=Math.min(e.data,5000)+'px'})"
)
_NAMED = 6  # runs that a refusal names
_HEAD = re.compile(
    r"\bL\d+H\d+\b(?! is a head)"
)  # where words explain what a name like it means, they speak of none
_PROMPTS = ("tokens", "graph")  # blocks that show a prompt
_SOUGHT = ("decide", "map", "atlas")  # blocks whose script finds a head


@checked_call
def write_report(
    path: str | Path, *results: Result, title: str = "", pictures: Mapping[str, bytes] | None = None
) -> Path:
    """Write one offline page of results; returns where it is.

    Parameters
    ----------
    path : where to write it, a name that ends in .html; only a page that was drawn here is
        replaced.
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
    of_a_run = path.name == PAGE and bool(read_run(path.parent))
    if path.suffix != ".html" or (not of_a_run and os.path.lexists(path) and not drawn_here(path)):
        raise BadInput(
            f"{path} is no page that qkscope drew here: name a new file that ends in .html."
        )
    text = report_html(results, pictures, title=title)
    with writing(path):
        if of_a_run:
            add_to_run(path.parent, {PAGE: text})
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text)
    return path


def report_html(
    results: Sequence[Result], pictures: Mapping[str, bytes] | None = None, *, title: str = ""
) -> str:
    """The page as text, with PNG files by caption. Everything from a result is escaped."""
    return remembered(_render(results, pictures or {}, title))


def remembered(page: str) -> str:
    """Note in the cache that this page was drawn here; without a cache it is drawn anew when
    viewed.
    """
    with suppress(OSError):
        notes = cache_dir("pages", "drawn.txt")
        notes.parent.mkdir(parents=True, exist_ok=True)
        with notes.open("a", encoding="ascii") as file:
            file.write(hashlib.sha256(page.encode("utf-8", "backslashreplace")).hexdigest() + "\n")
    return page


def drawn_here(path: Path) -> bool:
    """Whether this file is a page that we have drawn, bit for bit."""
    with suppress(OSError, ValueError):
        notes = cache_dir("pages", "drawn.txt").read_text(encoding="ascii")
        return hashlib.sha256(path.read_bytes()).hexdigest() in notes.split()
    return False


def widget_html(result: Result) -> str:
    """A result for a notebook: the page without its frame, in a frame of its own, so that neither
    touches the other.

    The frame is as tall as charts usually are, and as they are where the notebook lets it listen to
    them.
    """
    inside = _render([result], {}, "", bare=True)
    kept = (
        inside.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;")
    )  # quotes are half of a table
    height = 160 + 520 * len(blocks_of(result))
    frame = Markup(
        '<iframe sandbox="allow-scripts" title="{}" onload="{}" srcdoc=\'{}\' style="{}"></iframe>'
    )
    style = f"width:100%;height:{height}px;border:0;resize:vertical;overflow:auto"
    return str(frame.format(result.experiment, _GROWS, Markup(kept), style))


def _render(
    results: Sequence[Result], pictures: Mapping[str, bytes], title: str, bare: bool = False
) -> str:
    sections = [_section(result) for result in results]
    _name_places(sections)
    blocks = [block for section in sections for block, _ in section["blocks"]]
    drawn = {
        block.table for block in blocks
    }  # a picture that is called after one of these tables shows the same
    shown = {
        name: base64.b64encode(data).decode()
        for name, data in pictures.items()
        if name not in drawn
    }
    held = count_claims([claim for result in results for claim in result.claims])
    given = {
        "title": title or results[0].experiment,
        "lead": results[0],
        "charts": bool(blocks or shown),
        "bare": bare,
    }
    told = {"sections": sections, "held": held, "pictures": shown, "about": _about(results)}
    return render("page.html", scripts_of(blocks), ["page.css"], **given, **told)


def scripts_of(blocks: Sequence[Block]) -> list[str]:
    """The scripts that draw these blocks, in the order in which they are to run."""
    own = (name for block in blocks for name in SCRIPTS.get(block.kind, [f"{block.kind}.js"]))
    return [*dict.fromkeys(["base.js", "colours.js", *own, "page.js"])]


def render(template: str, scripts: Sequence[str], styles: Sequence[str], **given: Any) -> str:
    """A page of ours: these scripts and styles are the only markup that is not escaped, and all
    that it may run.
    """
    texts = [asset(name) for name in scripts]
    sums = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in texts
    )
    policy = (
        f"default-src 'none'; script-src {sums}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    style = Markup("".join(asset(name) for name in styles))
    code = [Markup(text) for text in texts]
    return (
        _templates()
        .get_template(template)
        .render(style=style, scripts=code, policy=policy, **given)
    )


def _section(result: Result) -> dict[str, Any]:
    """A result's blocks, each with its data as JSON, and its tables."""
    tables = {}
    defined = every_table().get(result.experiment.partition("/")[0], {})
    for name, rows in plain_value(result.tables).items():
        columns = {
            column: isinstance(value, int | float)
            for row in reversed(rows)
            for column, value in row.items()
        }
        ordered = {column: columns[column] for row in rows for column in row}
        if rows:
            tables[name] = {
                "rows": rows[:_ROWS],
                "total": len(rows),
                "columns": ordered,
                "words": defined[name].words if name in defined else {},
                "places": {},
            }
    shown = [(block, {"data": script_json(block.to_json())}) for block in blocks_of(result)]
    return {
        "result": result,
        "blocks": shown,
        "tables": tables,
        "claims": [claim.to_json() for claim in result.claims],
    }


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: no character of it can end the element."""
    text = json.dumps(plain_value(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _about(results: Sequence[Result]) -> dict[str, Any]:
    """What made the page: the command, then the facts that all results share, then each manifest."""
    first = results[0]
    made = results[0].provenance
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
    return {
        "facts": {name: value for name, value in facts.items() if value not in (None, "")},
        "manifests": manifests,
    }


# ---------------------------------------------------------------------- what a link can name


def heads_in(rows: Records) -> list[str]:
    """The heads that rows are of, and those that their lines name.

    >>> heads_in([{"head": "L2H0"}, {"line": "L1H1 looks at Mary, for what L0H3 wrote."}, {"head": None}])
    ['L2H0', 'L1H1', 'L0H3']
    """
    texts = (str(row.get(column, "")) for row in rows for column in ("head", "line"))
    return list(dict.fromkeys(head for text in texts for head in _HEAD.findall(text)))


def _name_places(sections: Sequence[dict[str, Any]]) -> None:
    """Let links name a head (``#L18H6``), a claim (``#claim-3``) and a prompt (``#prompt-1``).

    A head's place is the block that names fewest heads; one that no block names has a row of a
    table. Charts of all heads have too many to write out: their scripts find the one that a link
    names.
    """
    blocks = [
        (block, shown, heads_in(block.rows))
        for section in sections
        for block, shown in section["blocks"]
    ]
    place: dict[str, int] = {}
    for block, _, heads in sorted(blocks, key=lambda each: len(each[2])):
        place |= {head: id(block) for head in heads if head not in place}
    prompts = count(1)
    claims = count(1)
    for block, shown, heads in blocks:
        shown["heads"] = [
            head for head in heads if place[head] == id(block) and block.kind not in _SOUGHT
        ]
        shown["id"] = f"prompt-{next(prompts)}" if block.kind in _PROMPTS else ""
    for section in sections:
        for claim in section["claims"]:
            claim["id"] = f"claim-{next(claims)}"
        for table in section["tables"].values():
            for i, row in enumerate(table["rows"]):
                head = str(row.get("head", ""))
                if _HEAD.fullmatch(head) and head not in place:
                    place[head], table["places"][i] = i, head


# ---------------------------------------------------------------------- the page of a folder


def page_of(folder: str | Path) -> Path:
    """The page of a run folder, if we have drawn it; else one drawn from its data, in the user's
    cache.

    A page that came with a folder could hold anybody's scripts. What is not whole is refused.
    """
    folder = Path(folder)
    inside = (
        sorted(path.parent for path in folder.glob("*/**/results.json")) if folder.is_dir() else []
    )
    if inside and not (folder / RESULTS).exists():
        some = ", ".join(str(path) for path in inside[:_NAMED]) + (
            ", …" if len(inside) > _NAMED else ""
        )
        raise BadInput(f"{folder} holds {len(inside)} runs: name one of {some}.")
    result = Result.read(folder)
    page = folder / PAGE
    if drawn_here(page):
        return page
    if page.exists():
        log.info(
            "%s was not drawn here, or has changed since: the page is drawn anew from the folder's data.",
            page,
        )
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    with drawn_from(folder):
        return write_report(
            cache_dir("pages", f"{name}.html"), result, pictures=pictures_of(folder)
        )


@contextmanager
def drawn_from(folder: Path) -> Iterator[None]:
    """Say in a sentence that a folder holds JSON, but not what a run writes."""
    try:
        yield
    except BadInput:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise BadInput(
            f"{folder} is damaged or half-written: run the command that made it again."
        ) from None


def pictures_of(folder: Path) -> dict[str, bytes]:
    """The folder's own figures, and nothing that a link there points to."""
    files = [
        path
        for path in sorted(folder.glob("figures/*.png"))
        if path.is_file() and not path.is_symlink()
    ]
    return {
        path.stem: path.read_bytes() for path in files if path.read_bytes().startswith(b"\x89PNG")
    }


# ---------------------------------------------------------------------- scripts, styles and
# templates


@cache
def asset(name: str) -> str:
    """A style sheet or script of ours, as text."""
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(STATIC), autoescape=True, undefined=StrictUndefined
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters["number"] = number
    return environment
