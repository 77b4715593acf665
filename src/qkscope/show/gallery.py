"""Many runs as one site: a card for each, every head and every claim in one table, and the page of
each run.

``index.html`` and ``runs/NAME.html`` are single files that ask for nothing: a page can be sent
alone, and the site works from a disk. A card shows a figure of the run, or one of its blocks, drawn
small by the page's own script. The site is a folder of ours like a run's: its ``results.json``
holds what the index shows.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from qkscope.checking import checked_call
from qkscope.errors import BadInput
from qkscope.results.claims import count_claims
from qkscope.results.folder import RESULTS, WORK, check_folder, read_run
from qkscope.results.result import Result, provenance
from qkscope.show import counted, page
from qkscope.show.blocks import blocks_of

log = logging.getLogger(__name__)

GALLERY = "gallery"
_FEW = 12  # heads of a table that speaks of each
_SMALL = (
    "graph",
    "decide",
    "map",
    "swaps",
    "curve",
    "spectra",
    "parts",
    "tokens",
)  # charts whose data is small
_CARD = (
    "run",
    "page",
    "verb",
    "experiment",
    "preset",
    "model",
    "date",
    "answer",
    "prompt",
    "claims",
)  # of each run
_CHOICES = {"model": "model", "what": "verb"}
_MARK = '<span class="name">qkscope</span>'
_BACK = '<a class="name" href="../index.html#run-{}">← all runs</a>'


Run = dict[str, Any]
"""What the index shows of a run: what is said of it, its heads and claims, its page, and a figure
or block of it.
"""


@checked_call
def write_gallery(out: str | Path, *folders: str | Path, title: str = "") -> Path:
    """Write one offline site of many runs; returns its index.

    Parameters
    ----------
    out : folder of the site: a new one, or one of an earlier gallery.
    folders : runs, or folders with runs in them, in the order in which they are shown; a run that
        is not whole is left out, and the site says so.
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
    cards = [{name: run[name] for name in _CARD} for run in runs]
    heads = sorted((row for run in runs for row in run["heads"]), key=_by_head)
    claims = [claim for run in runs for claim in run["of_claims"]]
    choices = {
        what: [*dict.fromkeys(filter(None, map(itemgetter(of), cards)))]
        for what, of in _CHOICES.items()
    }
    held = count_claims([claim for run in runs for claim in run["result"].claims])
    answer = f"{counted(len(runs), 'run')}{f'; {held}' if held else ''}."
    tables: dict[str, Sequence[Mapping[str, Any]]] = {
        "runs": cards,
        "heads": heads,
        "claims": claims,
    }
    result = Result(
        GALLERY, tables, answer=answer, provenance=provenance(runs=[card["run"] for card in cards])
    )
    scripts = [*page.scripts_of([run["block"] for run in runs if run["block"]]), "gallery.js"]
    by_head = [(key, list(rows)) for key, rows in groupby(heads, itemgetter("model", "head"))]
    told = {"runs": runs, "heads": by_head, "claims": claims, "left": left, "choices": choices}
    styles = ["page.css", "gallery.css"]
    index = page.render(
        "gallery.html", scripts, styles, title=title or "gallery", answer=answer, **told
    )
    pages = {run["page"]: run["text"] for run in runs}
    return result.write(out, files={"index.html": page.remembered(index), **pages}) / "index.html"


# ---------------------------------------------------------------------- finding runs


def _read(folders: Sequence[str | Path], out: Path) -> tuple[list[Run], list[str]]:
    """Read the runs, and collect a sentence for each folder that is left out."""
    runs: dict[str, Run] = {}
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
            # one that needs no quoting in an address, and another also where capitals are not told
            stem = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[-3:])).strip(".-")[:80] or "run"
            names = (stem if i == 1 else f"{stem}-{i}" for i in count(1))
            name = next(each for each in names if each.casefold() not in runs)
            try:
                run = _run(folder, name)
            except BadInput as error:  # the page is sent: it names nothing above what was given
                why = re.sub(f"^{re.escape(str(folder))}(?= )", "it", str(error))
                left.append(
                    f"{'/'.join(parts)} is left out: {why.replace(str(folder), '/'.join(parts))}"
                )
                continue
            if run is not None:
                runs[name.casefold()] = run
    return [*runs.values()], left


def _below(folder: Path) -> Iterator[Path]:
    """Every folder there that holds a run or the beginning of one; none inside another, and no link
    is followed.
    """
    for place, below, files in os.walk(folder):
        if RESULTS in files or WORK in below or read_run(Path(place)):
            below.clear()
            yield Path(place)
        below[:] = sorted(name for name in below if not name.startswith("."))


def _run(folder: Path, name: str) -> Run | None:
    """Collect what the index shows of a run; None for a folder that is itself a gallery."""
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
        asked = result.provenance.get("asked") or {}
        at = f"runs/{name}.html"
        pictures = page.pictures_of(folder)
        blocks = [
            block
            for kind in _SMALL
            for block in blocks_of(result)
            if block.kind == kind and not pictures
        ]
        run = {
            "run": name, "page": at, "verb": result.experiment.partition("/")[0], "experiment": result.experiment,
            "preset": result.preset, "model": result.model, "date": date, "answer": result.answer,
            "prompt": asked.get("prompt"), "claims": count_claims(result.claims), "result": result, "text": text,
            "picture": next((base64.b64encode(data).decode() for data in pictures.values()), ""),
            "block": blocks[0] if blocks else None,
            "data": page.script_json(blocks[0].to_json()) if blocks else "",
        }  # fmt: skip
        claims = [
            {
                "run": name,
                "page": f"{at}#claim-{i}",
                "model": result.model,
                **claim.to_json(),
                "verdict": claim.verdict,
            }
            for i, claim in enumerate(result.claims, 1)
        ]
        return {**run, "heads": _head_rows(run), "of_claims": claims}


# ---------------------------------------------------------------------- what the index shows


def _by_head(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"] or "", *map(int, re.findall(r"\d+", row["head"]))


def _head_rows(run: Run) -> list[dict[str, Any]]:
    """The heads that a run names in its answer, its claims or a small table, and what it calls
    each.
    """
    claims = [{"line": claim.claim} for claim in run["result"].claims]
    tables = run["result"].tables.values()
    answer = {"line": run["answer"]}
    rows = [row for rows in tables for row in rows]
    small = [row for rows in tables if len(page.heads_in(rows)) <= _FEW for row in rows]
    heads = page.heads_in([answer, *claims, *small])
    elsewhere = page.heads_in([answer, *rows])
    names = {
        row["head"]: row["name"]
        for row in rows
        if "head" in row and isinstance(row.get("name"), str)
    }
    place = {
        head: f"claim-{i}" for i, claim in enumerate(claims, 1) for head in page.heads_in([claim])
    }
    verb = "" if run["verb"] in run["run"] else run["verb"]
    return [
        {"model": run["model"], "head": head, "run": run["run"], "says": names.get(head) or verb,
         "page": f"{run['page']}#{head if head in elsewhere else place[head]}"}
        for head in heads
    ]  # fmt: skip
