"""Many runs as one site: a card for each, every head and every claim in one table, and the page of each run.

``index.html`` and ``runs/NAME.html`` are single files that ask for nothing: a page can be sent alone, and the site
works from a disk. The site is a folder of ours like a run's: its ``results.json`` holds what the index shows, and the
rules of `qkscope.runs.folder` say what may be written over.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from qkscope.analyses.names.study import counted
from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.page.places import heads_in
from qkscope.page.report import remembered, render
from qkscope.page.stored import drawn_from, pictures_of, stored_page
from qkscope.page.thumbnail import thumbnail
from qkscope.runs.claims import Claim, count_claims
from qkscope.runs.folder import LOCK, RESULTS, WORK, check_folder, read_run
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result

log = logging.getLogger(__name__)

GALLERY = "gallery"
_FEW = 12  # heads of a table that speaks of each
_MARK, _BACK = '<span class="name">qkscope</span>', '<a class="name" href="../index.html#run-{}">← all runs</a>'


@dataclass(frozen=True)
class _Run:
    """A run: its page, and what the index shows of it."""

    card: Mapping[str, Any]
    thumbnail: Markup
    page: str
    heads: Sequence[Mapping[str, Any]]
    claims: Sequence[Claim]

    @property
    def spoken(self) -> list[Mapping[str, Any]]:
        """Rows of the heads that it speaks of in particular."""
        return [row for row in self.heads if row["spoken"]]


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
        raise BadInput(" ".join(sentence for sentence, _ in left) or "name at least one folder of runs.")
    for sentence, _ in left:
        log.warning("%s", sentence)
    cards = [run.card for run in runs]
    tables: dict[str, Sequence[Mapping[str, Any]]]
    tables = {"runs": cards, "heads": _heads(runs), "claims": [row for run in runs for row in _claim_rows(run)]}
    result = Result(GALLERY, tables, answer=_answer(runs), provenance=provenance(runs=[card["run"] for card in cards]))
    index = render(
        "gallery.html",
        ["base.js", "report.js", "gallery.js"],
        ["page.css", "gallery.css"],
        title=title or "gallery",
        answer=result.answer,
        runs=runs,
        heads=[(key, list(rows)) for key, rows in groupby(tables["heads"], itemgetter("model", "head"))],
        claims=tables["claims"],
        left=[shown for _, shown in left],
        choices={"model": _several(card["model"] for card in cards), "what": _several(card["verb"] for card in cards)},
    )
    pages = {run.card["page"]: run.page for run in runs}
    return result.write(out, files={"index.html": remembered(index), **pages}) / "index.html"


# ---------------------------------------------------------------------- finding runs


def _read(folders: Sequence[str | Path], out: Path) -> tuple[list[_Run], list[tuple[str, str]]]:
    """The runs, and two sentences for each folder that is left out: for the shell, and for a page that is sent."""
    runs: dict[str, _Run] = {}
    left: list[tuple[str, str]] = []
    seen = {out.resolve()}
    for given in map(Path, folders):
        if not given.is_dir():
            raise BadInput(f"there is no folder {given}: name one that holds runs of qkscope.")
        found = list(_below(given))
        if not found:
            none = "it holds no run; name a folder that a qkscope command wrote."
            left.append(_left_out(given, (given.resolve().name,), none))
        for folder in found:
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            parts = folder.relative_to(given).parts or (given.resolve().name,)
            name = _free_name(parts, runs)
            try:
                run = _run(folder, name)
            except BadInput as error:
                left.append(_left_out(folder, parts, str(error)))
                continue
            if run is not None:
                runs[name.casefold()] = run
    return [*runs.values()], left


def _left_out(folder: Path, parts: Sequence[str], why: str) -> tuple[str, str]:
    """The sentence with the folder's path, and with nothing above what was given."""
    name, why = "/".join(parts), re.sub(f"^{re.escape(str(folder))}(?= )", "it", why)
    shown = re.sub(r"(--out[ =])(?:(')/(?:[^/']+/)*|/(?:[^/'\s]+/)*)", r"\1\2", why.replace(str(folder), name))
    return f"{folder} is left out: {why}", f"{name} is left out: {shown}"


def _below(folder: Path) -> Iterator[Path]:
    """Every folder there that holds a run or the beginning of one; none inside another, and no link is followed."""
    for place, below, files in os.walk(folder):
        if {RESULTS, LOCK} & set(files) or WORK in below or read_run(Path(place)):
            below.clear()
            yield Path(place)
        below[:] = sorted(name for name in below if not name.startswith("."))


def _run(folder: Path, name: str) -> _Run | None:
    if not (folder / RESULTS).is_file():
        begun = read_run(folder)
        if begun.get("asked", {}).get("shard") not in (None, [0, 1]):
            raise BadInput("it is one shard of a job; when all are done, add them up with qkscope merge.")
        command = f" ({begun['command']})" if begun.get("command") else ""
        raise BadInput(f"it is not finished; say its command again{command} to finish it.")
    result = Result.read(folder)
    if result.experiment == GALLERY:
        return None
    page = stored_page(folder, result).replace(_MARK, _BACK.format(name), 1)
    date = datetime.fromtimestamp((folder / RESULTS).stat().st_mtime, UTC).date().isoformat()
    with drawn_from(folder):
        card = _card(name, result, date)
        return _Run(card, thumbnail(result, pictures_of(folder)), page, _head_rows(card, result), result.claims)


def _free_name(parts: Sequence[str], taken: Container[str]) -> str:
    """A name for a page: one that needs no quoting in an address, and another also where capitals are not told."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[-3:])).strip(".-")[:80] or "run"
    names = (name if i == 1 else f"{name}-{i}" for i in count(1))
    return next(each for each in names if each.casefold() not in taken)


# ---------------------------------------------------------------------- what the index shows


def _answer(runs: Sequence[_Run]) -> str:
    models = _several(run.card["model"] for run in runs)
    of = f" of {', '.join(models[:-1])}{' and ' * (len(models) > 1)}{models[-1]}" if models else ""
    held = count_claims([claim for run in runs for claim in run.claims])
    return f"{counted(len(runs), 'run')}{of}{f'; {held}' if held else ''}."


def _several(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


def _card(name: str, result: Result, date: str) -> dict[str, Any]:
    """What is said of a run; where its answer announces lines, also the first of them."""
    lines, asked = result.tables.get("said") or (), result.provenance.get("asked") or {}
    first = f" {lines[0]['line']}" if result.answer.endswith(":") and lines else ""
    return {
        "run": name, "page": f"runs/{name}.html", "verb": result.experiment.partition("/")[0],
        "experiment": result.experiment, "preset": result.preset, "model": result.model, "date": date,
        "answer": result.answer + first, "prompt": asked.get("prompt"), "claims": count_claims(result.claims),
    }  # fmt: skip


def _head_rows(card: Mapping[str, Any], result: Result) -> list[dict[str, Any]]:
    """Every head of a run, what it calls it (or the verb, where the run's name lacks it), and whether it speaks of it.

    It does in its answer, in its claims, and in a table of a few heads; in a table of all heads each has its line.
    """
    texts = {"answer": [{"line": result.answer}], "claims": [{"line": claim.claim} for claim in result.claims]}
    names: dict[str, str] = {}
    places: dict[str, list[str]] = {}
    spoken: set[str] = set()
    for place, rows in {**texts, **result.tables}.items():
        heads = heads_in(rows)
        spoken |= {head for head in heads if len(heads) <= _FEW}
        for head in heads:
            places.setdefault(head, []).append(place)
        names |= {row["head"]: row["name"] for row in rows if "head" in row and isinstance(row.get("name"), str)}
    alone = {
        head: f"claim-{i}"
        for i, row in enumerate(texts["claims"], 1)
        for head in heads_in([row])
        if places[head] == ["claims"]
    }
    return [
        {"model": card["model"], "head": head, "run": card["run"], "page": f"{card['page']}#{alone.get(head, head)}",
         "says": names.get(head) or ("" if card["verb"] in card["run"] else card["verb"]), "spoken": head in spoken}
        for head in places
    ]  # fmt: skip


def _heads(runs: Sequence[_Run]) -> list[Mapping[str, Any]]:
    """Every head that some run speaks of, in each run that has it."""
    spoken = {(row["model"], row["head"]) for run in runs for row in run.spoken}
    rows = [row for run in runs for row in run.heads if (row["model"], row["head"]) in spoken]
    return sorted(rows, key=lambda row: (row["model"] or "", *map(int, re.findall(r"\d+", row["head"]))))


def _claim_rows(run: _Run) -> Iterator[dict[str, Any]]:
    for i, claim in enumerate(run.claims, 1):
        place = {"run": run.card["run"], "page": f"{run.card['page']}#claim-{i}", "model": run.card["model"]}
        yield {**place, **claim.to_json(), "verdict": claim.verdict}
