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
from dataclasses import dataclass, field
from functools import cache
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
# where words explain what a name like it means ("L18H6 is a head"), they speak of no head
_HEAD = re.compile(r"\bL\d+H\d+\b(?! is a head)")
_PROMPTS = ("tokens", "graph")  # blocks that show a prompt
_SOUGHT = ("decide", "map", "atlas")  # blocks whose script finds a head


@dataclass
class _Shown:
    """A block on a page.

    Parameters
    ----------
    block : what is drawn.
    data : of the block, as JSON that its script reads.
    mentioned : the heads that its rows name.
    heads : those whose place it is: a link to one of them leads here.
    id : by which a link names the block, if it can.
    """

    block: Block
    data: Markup
    mentioned: list[str]
    heads: list[str] = field(default_factory=list)
    id: str = ""


@dataclass
class _PageTable:
    """A table written out.

    Parameters
    ----------
    rows : the first of its rows.
    total : how many there are.
    columns : whether each holds numbers, by name.
    words : what each says, by name, of a table that its verb defines.
    places : heads whose place is a row, by the number of the row.
    """

    rows: Records
    total: int
    columns: dict[str, bool]
    words: Mapping[str, str]
    places: dict[int, str] = field(default_factory=dict)


@dataclass
class _Section:
    """A result on a page: its blocks, its tables by name, and its claims."""

    result: Result
    blocks: list[_Shown]
    tables: dict[str, _PageTable]
    claims: list[dict[str, Any]]


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
    in_the_way = not of_a_run and os.path.lexists(path)
    if path.suffix != ".html" or (in_the_way and not drawn_here(path)):
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
        drawn = hashlib.sha256(page.encode("utf-8", "backslashreplace"))
        with notes.open("a", encoding="ascii") as file:
            file.write(drawn.hexdigest() + "\n")
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
    # double quotes are half of a table: the attribute stands in single ones
    kept = inside.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;")
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
    blocks = [shown.block for section in sections for shown in section.blocks]
    held = count_claims([claim for result in results for claim in result.claims])
    drawn = {block.table for block in blocks}
    encoded = {}
    for name, data in pictures.items():
        if name not in drawn:  # a picture that is called after a table shows the same
            encoded[name] = base64.b64encode(data).decode()
    return render(
        "page.html",
        scripts_of(blocks),
        ["page.css"],
        title=title or results[0].experiment,
        lead=results[0],
        charts=bool(blocks or encoded),
        bare=bare,
        sections=sections,
        held=held,
        pictures=encoded,
        about=_about(results),
    )


def scripts_of(blocks: Sequence[Block]) -> list[str]:
    """The scripts that draw these blocks, in the order in which they are to run."""
    scripts = ["base.js", "colours.js"]
    for block in blocks:
        scripts += SCRIPTS.get(block.kind, [f"{block.kind}.js"])
    return [*dict.fromkeys(scripts), "page.js"]


def render(template: str, scripts: Sequence[str], styles: Sequence[str], **given: Any) -> str:
    """A page of ours: these scripts and styles are the only markup that is not escaped, and all
    that it may run.
    """
    texts = [asset(name) for name in scripts]
    allowed = " ".join(_policy_hash(text) for text in texts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    style = Markup("".join(asset(name) for name in styles))
    code = [Markup(text) for text in texts]
    page = _templates().get_template(template)
    return page.render(style=style, scripts=code, policy=policy, **given)


def _policy_hash(script: str) -> str:
    """A script as a content policy names it."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _section(result: Result) -> _Section:
    """A result's blocks, each with its data as JSON, and its tables."""
    verb = result.experiment.partition("/")[0]
    defined = every_table().get(verb, {})
    tables = {}
    for name, rows in plain_value(result.tables).items():
        if rows:
            words = defined[name].words if name in defined else {}
            tables[name] = _PageTable(rows[:_ROWS], len(rows), _columns(rows), words)
    shown = []
    for block in blocks_of(result):
        data = script_json(block.to_json())
        shown.append(_Shown(block, data, heads_in(block.rows)))
    claims = [claim.to_json() for claim in result.claims]
    return _Section(result, shown, tables, claims)


def _columns(rows: Records) -> dict[str, bool]:
    """Every column of some rows, in their order, and whether its first value is a number."""
    numbers: dict[str, bool] = {}
    for row in rows:
        for column, value in row.items():
            numbers.setdefault(column, isinstance(value, int | float))
    return numbers


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: no character of it can end the element."""
    text = json.dumps(plain_value(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "&<>":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _about(results: Sequence[Result]) -> dict[str, Any]:
    """What made the page: the command, the facts that all results share, and each manifest."""
    first = results[0]
    made = first.provenance
    versions = made.get("versions", {})
    seconds = sum(result.seconds for result in results)
    facts = {
        "command": made.get("command"),
        "model": first.model,
        "preset": first.preset,
        "seed": first.seed,
        "seconds": round(seconds, 1),
        "threads": made.get("threads"),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    manifests = {}
    for result in results:
        if result.provenance:
            manifests[result.experiment] = _indented(result.provenance)
    return {"facts": known, "manifests": manifests}


def _indented(manifest: Mapping[str, Any]) -> str:
    """A manifest as JSON that people read."""
    return json.dumps(plain_value(manifest), indent=1, ensure_ascii=False)


# ---------------------------------------------------------------------- what a link can name


def heads_in(rows: Records) -> list[str]:
    """The heads that rows are of, and those that their lines name.

    >>> said = {"line": "L1H1 looks at Mary, for what L0H3 wrote."}
    >>> heads_in([{"head": "L2H0"}, said, {"head": None}])
    ['L2H0', 'L1H1', 'L0H3']
    """
    heads: dict[str, None] = {}
    for row in rows:
        for column in ("head", "line"):
            named = _HEAD.findall(str(row.get(column, "")))
            heads |= dict.fromkeys(named)
    return list(heads)


def _name_places(sections: Sequence[_Section]) -> None:
    """Let links name a head (``#L18H6``), a claim (``#claim-3``) and a prompt (``#prompt-1``)."""
    blocks = [shown for section in sections for shown in section.blocks]
    prompts = [shown for shown in blocks if shown.block.kind in _PROMPTS]
    for i, shown in enumerate(prompts, 1):
        shown.id = f"prompt-{i}"
    claims = [claim for section in sections for claim in section.claims]
    for i, claim in enumerate(claims, 1):
        claim["id"] = f"claim-{i}"
    named = _place_heads(blocks)
    tables = [table for section in sections for table in section.tables.values()]
    _name_rows(tables, named)


def _place_heads(blocks: Sequence[_Shown]) -> set[str]:
    """Give each head its place: the block that names fewest heads; returns all that have one.

    Charts of all heads have too many to write out: their scripts find the one that a link names.
    """
    place: dict[str, _Shown] = {}
    for shown in sorted(blocks, key=lambda shown: len(shown.mentioned)):
        for head in shown.mentioned:
            place.setdefault(head, shown)
    for shown in blocks:
        if shown.block.kind not in _SOUGHT:
            shown.heads = [head for head in shown.mentioned if place[head] is shown]
    return set(place)


def _name_rows(tables: Sequence[_PageTable], named: set[str]) -> None:
    """Give each head that has no place yet the first row that is of it; adds them to the named."""
    for table in tables:
        for i, row in enumerate(table.rows):
            head = str(row.get("head", ""))
            if _HEAD.fullmatch(head) and head not in named:
                named.add(head)
                table.places[i] = head


# ---------------------------------------------------------------------- the page of a folder


def page_of(folder: str | Path) -> Path:
    """The page of a run folder, if we have drawn it; else one drawn from its data, in the user's
    cache.

    A page that came with a folder could hold anybody's scripts. What is not whole is refused.
    """
    folder = Path(folder)
    if not (folder / RESULTS).exists():
        _refuse_several(folder)
    result = Result.read(folder)
    page = folder / PAGE
    if drawn_here(page):
        return page
    if page.exists():
        log.info(
            "%s was not drawn here, or has changed since: "
            "the page is drawn anew from the folder's data.",
            page,
        )
    place = str(folder.resolve()).encode("utf-8", "surrogateescape")
    name = hashlib.sha256(place).hexdigest()[:16]
    with drawn_from(folder):
        anew = cache_dir("pages", f"{name}.html")
        return write_report(anew, result, pictures=pictures_of(folder))


def _refuse_several(folder: Path) -> None:
    """Refuse a folder that is no run itself, but holds some."""
    runs = sorted(path.parent for path in folder.glob("*/**/results.json"))
    if not runs:
        return
    some = ", ".join(str(run) for run in runs[:_NAMED])
    if len(runs) > _NAMED:
        some += ", …"
    raise BadInput(f"{folder} holds {len(runs)} runs: name one of {some}.")


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
    pictures = {}
    for path in sorted(folder.glob("figures/*.png")):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if data.startswith(b"\x89PNG"):
            pictures[path.stem] = data
    return pictures


# ---------------------------------------------------------------------- scripts, styles, templates


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
