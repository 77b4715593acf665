"""Many runs as one site: a card for each, every head and every claim in one table, and the page of each run.

``index.html`` and ``runs/NAME.html`` are single files that ask for nothing: a page can be sent alone, and the site
works from a disk. A card shows a figure of the run, or one of its blocks, drawn small by the page's own script. The
site is a folder of ours like a run's: its ``results.json`` holds what the index shows.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.runs.claims import Claim, count_claims
from qkscope.runs.folder import RESULTS, WORK, check_folder, read_run
from qkscope.runs.result import Result, provenance
from qkscope.show import Block, counted, page
from qkscope.show.blocks import blocks_of

log = logging.getLogger(__name__)

GALLERY = "gallery"
_FEW = 12  # heads of a table that speaks of each
_SMALL = ("graph", "map", "swaps", "curve", "spectra", "parts", "tokens")  # charts whose data is small
_PIXELS, _COLOURS = (640, 300), 48  # of a figure: as sharp as a dense screen shows
_MARK, _BACK = '<span class="name">qkscope</span>', '<a class="name" href="../index.html#run-{}">← all runs</a>'


class _Run(NamedTuple):
    """A run: its page, and what the index shows of it; ``data`` is what the page's script draws on its card."""

    card: Mapping[str, Any]
    block: Block | None
    data: str
    picture: str
    page: str
    heads: Sequence[Mapping[str, Any]]
    claims: Sequence[Claim]


@checked_call
def write_gallery(out: str | Path, *folders: str | Path, title: str = "") -> Path:
    """Write one offline site of many runs; returns its index.

    Parameters
    ----------
    out : folder of the site: a new one, or one of an earlier gallery.
    folders : runs, or folders with runs in them, in the order in which they are shown; a run that is not whole is left
        out, and the site says so.
    title : what to call it.

    Examples
    --------
    >>> import tempfile
    >>> from qkscope import Result
    >>> place = tempfile.mkdtemp()
    >>> for head in ("L0H1", "L2H0"):
    ...     run = Result("mine", {"heads": [{"head": head, "score": 0.9}]}, answer=f"{head} finds it.")
    ...     folder = run.write(f"{place}/runs/{head}")
    >>> index = write_gallery(f"{place}/site", f"{place}/runs")
    >>> sorted(path.name for path in index.parent.iterdir())
    ['index.html', 'manifest.json', 'results.json', 'runs']
    >>> Result.read(index.parent).answer
    '2 runs.'
    """
    out = check_folder(out, GALLERY)
    runs, left = _read(folders, out)
    if not runs:
        raise BadInput(" ".join(left) or "name at least one folder of runs.")
    for sentence in left:
        log.warning("%s", sentence)
    cards = [run.card for run in runs]
    heads = sorted((row for run in runs for row in run.heads), key=_by_head)
    claims = [
        {"run": run.card["run"], "page": f"{run.card['page']}#claim-{i}", "model": run.card["model"],
         **claim.to_json(), "verdict": claim.verdict}
        for run in runs
        for i, claim in enumerate(run.claims, 1)
    ]  # fmt: skip
    choices = {"model": _several(card["model"] for card in cards), "what": _several(card["verb"] for card in cards)}
    models = choices["model"]
    of = f" of {', '.join(models[:-1])}{' and ' * (len(models) > 1)}{models[-1]}" if models else ""
    held = count_claims([claim for run in runs for claim in run.claims])
    answer = f"{counted(len(runs), 'run')}{of}{f'; {held}' if held else ''}."
    tables: dict[str, Sequence[Mapping[str, Any]]] = {"runs": cards, "heads": heads, "claims": claims}
    result = Result(GALLERY, tables, answer=answer, provenance=provenance(runs=[card["run"] for card in cards]))
    scripts = [*page.scripts_of([run.block for run in runs if run.block]), "gallery.js"]
    by_head = [(key, list(rows)) for key, rows in groupby(heads, itemgetter("model", "head"))]
    told = {"runs": runs, "heads": by_head, "claims": claims, "left": left, "choices": choices}
    styles = ["page.css", "gallery.css"]
    index = page.render("gallery.html", scripts, styles, title=title or "gallery", answer=answer, **told)
    pages = {run.card["page"]: run.page for run in runs}
    return result.write(out, files={"index.html": page.remembered(index), **pages}) / "index.html"


# ---------------------------------------------------------------------- finding runs


def _read(folders: Sequence[str | Path], out: Path) -> tuple[list[_Run], list[str]]:
    """The runs, and a sentence for each folder that is left out."""
    runs: dict[str, _Run] = {}
    left: list[str] = []
    seen = {out.resolve()}
    for given in map(Path, folders):
        if not given.is_dir():
            raise BadInput(f"there is no folder {given}: name one that holds runs of qkscope.")
        inside = list(_below(given))
        if not inside:
            none = "it holds no run; name a folder that a qkscope command wrote."
            left.append(f"{given.resolve().name} is left out: {none}")
        for folder in (folder for folder in inside if folder.resolve() not in seen):
            seen.add(folder.resolve())
            parts = folder.relative_to(given).parts or (given.resolve().name,)
            name = _free_name(parts, runs)
            try:
                run = _run(folder, name)
            except BadInput as error:  # the page is sent: it names nothing above what was given
                why = re.sub(f"^{re.escape(str(folder))}(?= )", "it", str(error))
                left.append(f"{'/'.join(parts)} is left out: {why.replace(str(folder), '/'.join(parts))}")
                continue
            if run is not None:
                runs[name.casefold()] = run
    return [*runs.values()], left


def _below(folder: Path) -> Iterator[Path]:
    """Every folder there that holds a run or the beginning of one; none inside another, and no link is followed."""
    for place, below, files in os.walk(folder):
        if RESULTS in files or WORK in below or read_run(Path(place)):
            below.clear()
            yield Path(place)
        below[:] = sorted(name for name in below if not name.startswith("."))


def _run(folder: Path, name: str) -> _Run | None:
    if not (folder / RESULTS).is_file():
        begun = read_run(folder)
        command = f" ({begun['command']})" if begun.get("command") else ""
        raise BadInput(f"it is not finished; run its command again{command} to finish it.")
    result = Result.read(folder)
    if result.experiment == GALLERY:
        return None
    text = page.page_of(folder).read_text(encoding="utf-8").replace(_MARK, _BACK.format(name), 1)
    date = datetime.fromtimestamp((folder / RESULTS).stat().st_mtime, UTC).date().isoformat()
    with page.drawn_from(folder):
        card = _card(name, result, date)
        picture = next(filter(None, map(_shrunk, page.pictures_of(folder).values())), "")
        blocks = [block for kind in _SMALL for block in blocks_of(result) if block.kind == kind and not picture]
        block, data = (blocks[0], page.script_json(blocks[0].to_json())) if blocks else (None, "")
        return _Run(card, block, data, picture, text, _head_rows(card, result), result.claims)


def _shrunk(content: bytes) -> str:
    """A figure in few colours and no larger than a card, as base64; nothing where it cannot be read."""
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            flat = Image.new("RGB", image.size, "white")
            flat.paste(image.convert("RGBA"), mask=image.convert("RGBA").getchannel("A"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    flat.thumbnail(_PIXELS, Image.Resampling.LANCZOS)
    kept = io.BytesIO()
    flat.quantize(_COLOURS).save(kept, "PNG", optimize=True)
    return base64.b64encode(kept.getvalue()).decode()


def _free_name(parts: Sequence[str], taken: Container[str]) -> str:
    """A name for a page: one that needs no quoting in an address, and another also where capitals are not told."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[-3:])).strip(".-")[:80] or "run"
    names = (name if i == 1 else f"{name}-{i}" for i in count(1))
    return next(each for each in names if each.casefold() not in taken)


# ---------------------------------------------------------------------- what the index shows


def _by_head(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"] or "", *map(int, re.findall(r"\d+", row["head"]))


def _several(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


def _card(name: str, result: Result, date: str) -> dict[str, Any]:
    """What is said of a run."""
    asked = result.provenance.get("asked") or {}
    return {
        "run": name, "page": f"runs/{name}.html", "verb": result.experiment.partition("/")[0],
        "experiment": result.experiment, "preset": result.preset, "model": result.model, "date": date,
        "answer": result.answer, "prompt": asked.get("prompt"), "claims": count_claims(result.claims),
    }  # fmt: skip


def _head_rows(card: Mapping[str, Any], result: Result) -> list[dict[str, Any]]:
    """The heads that a run speaks of, in its answer, its claims or a table of a few, and what it calls each."""
    claims = [{"line": claim.claim} for claim in result.claims]
    answer, rows = {"line": result.answer}, [row for rows in result.tables.values() for row in rows]
    small = [row for rows in result.tables.values() if len(page.heads_in(rows)) <= _FEW for row in rows]
    heads, elsewhere = page.heads_in([answer, *claims, *small]), page.heads_in([answer, *rows])
    names = {row["head"]: row["name"] for row in rows if "head" in row and isinstance(row.get("name"), str)}
    place = {head: f"claim-{i}" for i, claim in enumerate(claims, 1) for head in page.heads_in([claim])}
    verb = "" if card["verb"] in card["run"] else card["verb"]
    return [
        {"model": card["model"], "head": head, "run": card["run"], "says": names.get(head) or verb,
         "page": f"{card['page']}#{head if head in elsewhere else place[head]}"}
        for head in heads
    ]  # fmt: skip
