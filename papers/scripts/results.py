"""The ledger of claims, and the pages made of it: results.md, results-PAPER.md and a place in the
README.

``python papers/scripts/results.py runs/paper --hardware "two CPU cores"`` takes the claims of every
figure below a folder into papers/results.json, with its picture. Runs of the preset smoke are left
out. Of a figure that was taken from a larger preset, claims stay as they are; those that are new,
or had no interval and have one now, are added, and say where they come from. Of a figure that was
run with other seeds too (``--seed 1``: other words and prompts), claims without an interval are
given one over seeds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from qkscope.results.claims import NEEDS_DEFAULT, REASONS, Claim
from qkscope_papers.lee2026.language import EMBEDDED, SECOND
from qkscope_papers.registry import PAPERS, PRESETS, figure_of, figures_of, marked
from qkscope_papers.reports import BENCH_REPORTS, LEDGER, REPORTS, ROOT, number_cell, put, text_cell
from qkscope_papers.tables import over_runs

CHANGED = REPORTS / "changed-rules.txt"
SOURCES = ("stated", "implied", "ours")
# how a claim is counted: what stands after "open" is not decided, or says little
SORTS = {
    "holds": "hold",
    "tie": "tie",
    "fails": "fail",
    **{x: x for x in ("open", "lenient", "no such head")},
}
WORST_FIRST = ("fails", "tie", "open", "no such head", "lenient", "holds")


def results(folders: list[Path], hardware: str) -> None:
    """Every claim of every figure and model, from the largest preset that was run."""
    known = json.loads(LEDGER.read_text()) if LEDGER.exists() else {}
    there = {f"{paper}/{figure}" for paper in PAPERS for figure in figures_of(paper)}
    known = {name: entry for name, entry in known.items() if name.partition("@")[0] in there}
    more: dict[str, list[list[dict[str, Any]]]] = {}  # claims of other seeds
    for path in sorted(path for folder in folders for path in folder.rglob("results.json")):
        found = json.loads((path.parent / "results.json").read_text())
        made = json.loads((path.parent / "manifest.json").read_text())
        paper, _, figure = found["experiment"].partition("/")
        if found["experiment"] not in there or found["preset"] == "smoke":
            continue
        asked = made["figure"]
        usual = figure_of(paper, figure)
        first = (
            EMBEDDED if usual.model == SECOND else usual.model
        )  # which model is second depends on what is installed
        unusual = [] if asked["model"] == first else [Path(asked["model"].split()[0]).name]
        unusual += [asked["prompts"]] if asked.get("prompts") in usual.prompts[1:] else []
        other = "@" + ", ".join(unusual) if unusual else ""
        name = found["experiment"] + other
        if asked["seed"]:
            more.setdefault(name, []).append(found["claims"])
            continue
        old = known.get(name)
        made_by = {"command": re.sub(r" --out \S+", "", made["command"] or ""), "hardware": hardware,
                   "date": datetime.date.today().isoformat(), "preset": found["preset"]}  # fmt: skip
        if old and PRESETS.index(old["preset"]) > PRESETS.index(found["preset"]):
            _add(old["claims"], found["claims"], made_by)
            continue
        picture = path.parent / "figures" / f"{figure}.png"
        drawn = picture.exists() and not other
        if drawn:
            place = _page(paper).parent / "figures" / f"{name}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, place)
        kept = ("model", "seconds", "answer", "claims")
        known[name] = {key: found[key] for key in kept} | made_by | {"picture": drawn}
    for name, runs in more.items():
        known[name]["claims"] = [_over_seeds(row, runs) for row in known[name]["claims"]]
    for name, entry in known.items():
        entry["claims"] = [
            row | marked(name.partition("@")[0], Claim.from_json(row)).to_json()
            for row in entry["claims"]
        ]
    LEDGER.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    for page, name, text in results_pages(known):
        put(page, name, text)
    CHANGED.write_text(changed_rules(known))


def _over_seeds(row: dict[str, Any], runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A claim without an interval as the mean over seeds, with Student's interval."""
    claim = Claim.from_json(row)
    own = [row, *(other for claims in runs for other in claims if other["claim"] == row["claim"])]
    if claim.decided or len(own) < 3 or any(each["ours"] is None for each in own):
        return row
    ours = over_runs(float("nan" if r["ours"] is None else r["ours"]) for r in own)
    control = over_runs(float("nan" if r["control"] is None else r["control"]) for r in own)
    beside = None if math.isnan(control.mean) else control.mean
    return (
        row
        | replace(claim, ours=ours.mean, control=beside, **ours.ends).to_json()
        | {"over": f"{len(own)} seeds"}
    )


def claim_key(row: dict[str, Any]) -> str:
    """A claim without what presets and models change: numbers, and names of heads."""
    without = re.sub(r"L\d+H\d+", "#", row["claim"])
    return re.sub(r"[\d.,]+|(mean over|median of)( the| key)? heads", "#", without)


def _add(rows: list[dict[str, Any]], new: list[dict[str, Any]], made_by: dict[str, str]) -> None:
    """Rows of a smaller preset among those of a larger one: what is new, and intervals that were
    missing.
    """
    places = {claim_key(row): i for i, row in enumerate(rows)}
    for row in new:
        place = places.get(claim_key(row))
        if place is None:
            rows.append(row | {"made": made_by})
        elif Claim.from_json(row).decided and (
            "made" in rows[place] or not Claim.from_json(rows[place]).decided
        ):
            old = rows[place]
            was = f"At a larger preset it was {number_cell(old['ours'])}, without an interval, and {_word(old)}."
            before = old["changed"] if "made" in old else f"{row['changed']} {was}".strip()
            rows[place] = row | {"made": made_by, "changed": before}


def results_pages(known: dict[str, Any]) -> list[tuple[Path, str, str]]:
    """What the ledger writes: page, place in it, text."""
    pages = {paper: _claims_page(paper, known) for paper in PAPERS}
    counts = "\n".join(_counts(known))
    failed = "\n".join(_reasons(known))
    return [
        (ROOT / "README.md", "results", f"{counts.partition(';')[0]}."),
        (REPORTS / "results.md", "results", f"{counts}\n\n{_again(known)}\n\n{failed}"),
        *((_page(paper), "claims", "\n".join(lines).strip()) for paper, lines in pages.items()),
    ]


def _page(paper: str) -> Path:
    """Where a paper's claims stand; compiled programs measure the instrument."""
    if paper == "known":
        return BENCH_REPORTS / "known.md"
    return REPORTS / f"results-{paper}.md"


def _own(known: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Entries by paper; those on another model, or on other prompts, apart."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in sorted(known.items(), key=lambda pair: "@" in pair[0]):
        experiment, _, other = name.partition("@")
        asked = "other prompts" if other.endswith(("text", "single")) else other
        found.setdefault(", ".join(filter(None, (experiment.split("/")[0], asked))), {})[name] = (
            entry
        )
    return found


def _counts(known: dict[str, Any]) -> list[str]:
    """A sentence, then a line per paper: how many claims hold, by who makes them."""
    # a claim that was tried on a second model, or on other prompts, is one claim still
    own = {name: entry for name, entry in known.items() if "@" not in name}
    said = {source: _distinct(own, source) for source in SOURCES}
    trials = sum(_source(claim) == "stated" for entry in own.values() for claim in entry["claims"])
    lines = [
        f"Of {len(said['stated'])} claims that the papers state ({trials} trials), "
        f"{_tally(said['stated'])}; of {len(said['implied'])} that they imply, "
        f"{_tally(said['implied'])}; of {len(said['ours'])} of our own, {_tally(said['ours'])}. A claim tried in "
        "several figures counts once, by its worst trial. A tie: the interval leaves it open. Not counted as "
        "holding: lenient, a rule that says little; no such head, tried on a head that does not do what the "
        "paper's does; open, no interval.",
        "",
        "| paper | figures | stated | implied | ours |",
        "| --- | ---: | --- | --- | --- |",
    ]
    for whose, entries in _own(known).items():
        cells = [_tally(_distinct(entries, source)) for source in SOURCES]
        lines.append(f"| {whose} | {len(entries)} | {' | '.join(cells)} |")
    return lines


def _distinct(entries: dict[str, Any], source: str) -> list[str]:
    """How each claim of a source is counted; one that several figures try counts once."""
    trials = dict[tuple[str, str], list[str]]()
    for name, entry in entries.items():
        for i, claim in enumerate(entry["claims"]):
            if _source(claim) == source:
                quote = claim["paper"].partition(": ")[2] or f"{name} {i}"
                trials.setdefault((name.partition("/")[0], quote), []).append(_sort(claim))
    return [min(sorts, key=WORST_FIRST.index) for sorts in trials.values()]


def _again(known: dict[str, Any]) -> str:
    """How those that are stated fare on the second model."""
    second = {name: entry for name, entry in known.items() if "@gemma" in name}
    sorts = _distinct(second, "stated")
    return f"Of {len(sorts)} that are stated and were tried on Gemma 3 270M too, {_tally(sorts)}."


def _tally(sorts: Sequence[str]) -> str:
    """Claims by how they are counted, those that are none left out."""
    counts = [f"{sorts.count(sort)} {word}" for sort, word in SORTS.items() if sort in sorts]
    return ", ".join(counts) or "none"


def _sort(row: dict[str, Any]) -> str:
    """One of `SORTS`."""
    if row["lenient"].startswith("no such head"):
        return "no such head"
    if not row["exact"] and None in (row["low"], row["high"]):
        return "open"
    return "lenient" if row["lenient"] and row["holds"] else _word(row)


def _reasons(known: dict[str, Any]) -> list[str]:
    """Why claims that papers state or imply fail."""
    shown = [reason for reason in REASONS if reason != NEEDS_DEFAULT]  # of smoke alone
    lines = [
        f"| {' | '.join(['stated or implied, and failing', *shown])} |",
        "| --- |" + " ---: |" * len(shown),
    ]
    for whose, own in _own(known).items():
        rows = [
            claim for entry in own.values() for claim in entry["claims"] if _source(claim) != "ours"
        ]
        reasons = [claim["reason"] for claim in rows if _sort(claim) == "fails"]
        lines.append(f"| {whose} | {' | '.join(str(reasons.count(reason)) for reason in shown)} |")
    return lines


def _source(claim: dict[str, Any]) -> str:
    return str(claim["source"])


def _claims_page(paper: str, known: dict[str, Any]) -> list[str]:
    """Every figure with its claims, a line each; then the runs."""
    own = {name: entry for name, entry in known.items() if name.startswith(f"{paper}/")}
    runs = {run: f"R{i}" for i, run in enumerate(_runs_of(own), start=1)}
    lines = list[str]()
    for figure, experiment in figures_of(paper).items():
        entries = {
            name: entry
            for name, entry in own.items()
            if name.partition("@")[0] == f"{paper}/{figure}"
        }
        lines += [f"## {figure}: {text_cell(experiment.title)}", ""]
        if not entries:
            lines += [f"Not run yet: `qkscope reproduce {paper} {figure}`.", ""]
        else:
            lines += _figure_lines(entries, runs)
    lines += ["## Runs", ""]
    lines += [
        f"- {name}: `{run.command}` ({run.hardware}, {run.date})" for run, name in runs.items()
    ]
    return lines


class Run(NamedTuple):
    """Where numbers come from."""

    command: str
    hardware: str
    date: str


def _run_of(made: dict[str, Any]) -> Run:
    return Run(made["command"], made["hardware"], made["date"])


def _runs_of(entries: dict[str, Any]) -> list[Run]:
    """Every run once: of figures, and of claims that were added to them."""
    found = [_run_of(entry) for entry in entries.values()]
    found += [
        _run_of(claim["made"])
        for entry in entries.values()
        for claim in entry["claims"]
        if "made" in claim
    ]
    return list(dict.fromkeys(found))


def changed_rules(known: dict[str, Any]) -> str:
    """Rules that were changed after a run, each once with the figures that have it."""
    figures = dict[str, set[str]]()
    for name, entry in known.items():
        for claim in entry["claims"]:
            if claim.get("changed"):
                figures.setdefault(claim["changed"], set()).add(name.partition("@")[0])
    lines = [f"{', '.join(sorted(own))}: {text}" for text, own in figures.items()]
    return "\n".join(["Rules that were changed after a run had been seen.", "", *sorted(lines), ""])


def _figure_lines(entries: dict[str, Any], runs: dict[Run, str]) -> list[str]:
    """A figure: where it was run, its claims, each with its trials on other models, its picture."""
    first = next(iter(entries))
    lines = ["; ".join(_made(name, entry, runs) for name, entry in entries.items()) + ".", ""]
    trials = dict[str, dict[str, dict[str, Any]]]()
    for name, entry in entries.items():
        for claim in entry["claims"]:
            key = f"{claim_key(claim)} {claim['rule']}"  # a trial by an older rule is another row
            trials.setdefault(key, {})[name] = claim
    if trials:
        lines += ["| claim | ours | rule | verdict |", "| --- | --- | --- | --- |"]
        said = set[str]()
        lines += [_claim_line(own, runs, said) for own in trials.values()]
        lines.append("")
    if entries[first]["picture"]:
        lines += [f"![{first}](figures/{first}.png)", ""]
    return lines


def _made(name: str, entry: dict[str, Any], runs: dict[Run, str]) -> str:
    """Which run a figure is of, on which model."""
    where = entry["model"] or "toys"
    other = name.partition("@")[2]
    beside = f" ({other})" if other and other != entry["model"] else ""
    return f"{where}{beside}: {runs[_run_of(entry)]}, {entry['seconds']:.3g} s"


def _claim_line(trials: dict[str, dict[str, Any]], runs: dict[Run, str], said: set[str]) -> str:
    """A row: the claim and where the paper makes it, the numbers, the rule and its verdict.

    A claim that was tried on other models is one row. ``said``: causes that stand in the table.
    """
    name, claim = next(iter(trials.items()))
    measured = [f"{_on(other)}{_measured(again, runs)}" for other, again in trials.items()]
    verdicts = [f"{_on(name)}{_verdict(claim, said)}"]
    said |= {claim["why"], claim["lenient"]}
    for other, again in list(trials.items())[1:]:
        verdicts.append(f"{_on(other)}{_verdict(again, {again['why'], again['lenient']})}")
    cells = [
        f"{text_cell(claim['claim'])} ({text_cell(_place(claim['paper']))})",
        "; ".join(measured),
        f"`{claim['rule']}`",
        "; ".join(verdicts) + _settled(trials),
    ]
    return f"| {' | '.join(cells)} |"


def _on(name: str) -> str:
    """Which other model or prompts a trial is of.

    >>> _on("lee2026/fig6@gemma3-270m"), _on("lee2026/fig6")
    ('gemma3-270m: ', '')
    """
    other = name.partition("@")[2]
    return f"{other}: " if other else ""


def _settled(trials: dict[str, dict[str, Any]]) -> str:
    """What would settle a claim of the paper's that fails, or has no head to be tried on."""
    failing = [
        (name.partition("@")[0], claim["claim"])
        for name, claim in trials.items()
        if _sort(claim) in ("fails", "no such head") and _source(claim) != "ours"
    ]
    for figure, text in failing:
        for each in settlers():
            if figure in each["figures"] and each["claim"] in text:
                return f" Settles it: {each['settles']}"
    return ""


@cache
def settlers() -> list[dict[str, Any]]:
    """What would settle claims that fail, by figure and part of the claim."""
    with Path(__file__).with_name("settles.toml").open("rb") as file:
        return list(tomllib.load(file)["settle"])


def _place(paper: str) -> str:
    """Where the paper makes a claim, without its words.

    >>> _place("§4, Fig. 4: moves all the attention"), _place("")
    ('§4, Fig. 4', 'ours')
    """
    return paper.partition(": ")[0] if paper else "ours"


def _verdict(claim: dict[str, Any], said: set[str]) -> str:
    """A word, and why, unless a row before said so."""
    sort = _sort(claim)
    word = _word(claim)
    if sort == "open":
        return (
            f"open: no interval, not rerun ({word})"
            if claim["ours"] is not None
            else "open: not run here"
        )
    if sort in ("lenient", "no such head"):
        why = claim["lenient"].removeprefix("no such head: ")
        return f"*{sort}*" if claim["lenient"] in said else f"*{sort}*: {text_cell(why)}"
    if sort != "fails":
        return word
    why = "" if claim["why"] in said else claim["why"]
    cause = ": ".join(filter(None, (claim["reason"], why)))
    return f"**fails**, {text_cell(cause)}"


def _word(claim: dict[str, Any]) -> str:
    return {True: "holds", None: "tie", False: "fails"}[claim["holds"]]


def _measured(claim: dict[str, Any], runs: dict[Run, str]) -> str:
    """The number, its interval and its control, and its own run where it has one.

    An interval that says nothing is named: one without width, as of runs that are all alike.
    """
    low, high = claim.get("low"), claim.get("high")
    number = short_number(claim["ours"]) or "none"
    if claim.get("exact"):
        number += ", exact"
    elif low is not None and high is not None:
        number += " (all alike)" if low == high else f" [{short_number(low)}…{short_number(high)}]"
    if claim["control"] is not None:
        number += f" against {short_number(claim['control'])}"
    return number + (f" ({runs[_run_of(claim['made'])]})" if "made" in claim else "")


def short_number(value: float | None) -> str:
    """Three digits.

    >>> short_number(0.94444), short_number(-1.5e-05)
    ('0.944', '−1.5e−05')
    """
    return "" if value is None else f"{value:.3g}".replace("-", "−")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="Where run folders lie.")
    parser.add_argument("--hardware", default="two CPU cores")
    given = parser.parse_args()
    results(given.folders, given.hardware)
