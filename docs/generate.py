"""Write the tables of docs/models.md, benchmarks.md, results.md and commands.md from what the commands print and write.

``qkscope models --json | python docs/generate.py models`` and
``qkscope bench --json | python docs/generate.py bench --hardware "two CPU cores"``. The bench rows also go into
docs/benchmarks.json, one entry per hardware; the page keeps its text and takes new tables.

``python docs/generate.py results runs/paper --hardware "two CPU cores"`` takes the claims of every figure below a
folder into docs/results.json, results.md, results-PAPER.md and the README, with its picture. Runs of the preset smoke
are left out; a figure that was taken from a larger preset keeps it. ``python docs/generate.py commands`` writes the
reference of the command line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PRESETS = ("smoke", "default", "paper")
SOURCES = ("stated", "implied", "ours")  # as in qkscope.runs.claims, which is not imported to be asked for help
REASONS = ("refuted", "small model", "other setting", "not run here")


def models(rows: list[dict]) -> None:
    """The families, supported ones first, with their limits."""
    lines = [
        "| family | outcome | error of the attention | error of the trace | tokens | limits, or why not |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: ("wrong", "right", "refused", "not built").index(row["verdict"])):
        errors = ["" if row[name] is None else f"{row[name]:.1e}" for name in ("max_error", "trace_error")]
        cells = [f"`{row['family']}`", row["verdict"], *errors, str(row["length"] or ""), row["reason"]]
        lines.append(f"| {' | '.join(cells)} |")
    _put(DOCS / "models.md", "families", "\n".join(lines))


def bench(rows: list[dict], hardware: str) -> None:
    """The ratios on one machine, beside those of the others."""
    store = DOCS / "benchmarks.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    entry = known.setdefault(hardware, {})
    for row in rows:
        if row["ratio"] is not None:
            entry[row["name"]] = {**row, "date": datetime.date.today().isoformat()}
    store.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    lines = []
    for where, found in known.items():
        lines += [
            f"## {where}",
            "",
            "| row | plain | ours | ratio | what | date |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, row in found.items():
            times = f"{row['plain_s']:.3g} s | {row['ours_s']:.3g} s"
            lines.append(f"| `{name}` | {times} | {row['ratio']:.3g}× | {row['note']} | {row['date']} |")
        lines.append("")
    _put(DOCS / "benchmarks.md", "bench", "\n".join(lines).rstrip())


def errors(rows: list[dict]) -> None:
    """Bad commands and the sentences they get, as tests/test_bad_inputs.py wrote them down."""
    if not rows:
        raise SystemExit("No errors came in: the page says how they are written down.")
    lines = ["| what was said | what is answered |", "| --- | --- |"]
    for row in rows:
        lines.append(f"| `{row['command']}` | {_text(row['answer'])} |")
    _put(DOCS / "errors.md", "errors", "\n".join(lines))


def results(folders: list[Path], hardware: str) -> None:
    """Every claim of every figure and model, from the largest preset that was run."""
    from qkscope.papers.lee2026.language import EMBEDDED, SECOND
    from qkscope.papers.registry import PAPERS, figure_of, figures_of

    store = DOCS / "results.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    there = {f"{paper}/{figure}" for paper in PAPERS for figure in figures_of(paper)}
    known = {name: entry for name, entry in known.items() if name.partition("@")[0] in there}
    for path in sorted(path for folder in folders for path in folder.rglob("results.json")):
        found, made = (json.loads((path.parent / name).read_text()) for name in ("results.json", "manifest.json"))
        paper, _, figure = found["experiment"].partition("/")
        if found["experiment"] not in there or found["preset"] == "smoke":
            continue
        asked, usual = made["figure"], figure_of(paper, figure)
        first = EMBEDDED if usual.model == SECOND else usual.model  # which model is second depends on what is installed
        unusual = [] if asked["model"] == first else [Path(asked["model"].split()[0]).name]
        unusual += [asked["prompts"]] if asked.get("prompts") in usual.prompts[1:] else []
        other = "@" + ", ".join(unusual) if unusual else ""
        name = found["experiment"] + other
        old = known.get(name)
        if old and PRESETS.index(old["preset"]) > PRESETS.index(found["preset"]):
            continue
        picture = path.parent / "figures" / f"{figure}.png"
        drawn = picture.exists() and not other
        if drawn:
            (DOCS / "figures" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, DOCS / "figures" / f"{name}.png")
        known[name] = {key: found[key] for key in ("preset", "model", "seconds", "answer", "claims")} | {
            "command": re.sub(r" --out \S+", "", made["command"] or ""), "hardware": hardware, "picture": drawn,
            "date": datetime.date.today().isoformat(),
        }  # fmt: skip
    store.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    for page, name, text in results_pages(known):
        _put(page, name, text)


def results_pages(known: dict[str, Any]) -> list[tuple[Path, str, str]]:
    """What the ledger writes: page, place in it, text."""
    papers = list(dict.fromkeys(name.split("/")[0] for name in known))
    counts, failed = "\n".join(_counts(known)), "\n".join(_reasons(known))
    own = [(DOCS / f"results-{paper}.md", "claims", "\n".join(_claims_page(paper, known)).strip()) for paper in papers]
    return [
        (DOCS.parent / "README.md", "results", f"{counts.partition(chr(10))[0]} {_again(known)}"),
        (DOCS / "results.md", "results", f"{counts}\n\n{failed}"),
        *own,
    ]


def _own(known: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Entries by paper; those on another model, or on other prompts, apart."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in sorted(known.items(), key=lambda pair: "@" in pair[0]):
        experiment, _, other = name.partition("@")
        asked = "other prompts" if other.endswith(("text", "single")) else other
        found.setdefault(", ".join(filter(None, (experiment.split("/")[0], asked))), {})[name] = entry
    return found


def _counts(known: dict[str, Any]) -> list[str]:
    """A sentence, then a line per paper: how many claims hold, by who makes them."""
    # a claim that was tried on a second model, or on other prompts, is one claim still
    everything = [claim for name, entry in known.items() if "@" not in name for claim in entry["claims"]]
    said = {source: _counted([c for c in everything if _source(c) == source]) for source in SOURCES}
    lines = [
        f"Of the claims that the papers state, {said['stated']}; of those that they imply, {said['implied']}; of our "
        f"own, {said['ours']}. A tie: the interval leaves it open.", "",
        "| paper | figures | stated | implied | ours |", "| --- | ---: | --- | --- | --- |",
    ]  # fmt: skip
    for whose, own in _own(known).items():
        claims = [claim for entry in own.values() for claim in entry["claims"]]
        cells = [_counted([c for c in claims if _source(c) == source]) for source in SOURCES]
        lines.append(f"| {whose} | {len(own)} | {' | '.join(cells)} |")
    return lines


def _again(known: dict[str, Any]) -> str:
    """How those that are stated fare on the second model."""
    own = [c for name, entry in known.items() if "@gemma" in name for c in entry["claims"] if _source(c) == "stated"]
    return f"Of those that are stated and were tried on Gemma 3 270M too, {_counted(own)}."


def _counted(claims: list[dict]) -> str:
    tied = sum(claim["holds"] is None for claim in claims)
    hold = f"{sum(claim['holds'] is True for claim in claims)} of {len(claims)} hold"
    return hold + (f", {tied} {'tie' if tied == 1 else 'ties'}" if tied else "")


def _reasons(known: dict[str, Any]) -> list[str]:
    """Why claims that papers state or imply fail."""
    lines = [f"| {' | '.join(['stated or implied, and failing', *REASONS])} |", "| --- |" + " ---: |" * len(REASONS)]
    for whose, own in _own(known).items():
        reasons = [_reason(claim) for entry in own.values() for claim in entry["claims"] if _source(claim) != "ours"]
        lines.append(f"| {whose} | {' | '.join(str(reasons.count(reason)) for reason in REASONS)} |")
    return lines


def _source(claim: dict[str, Any]) -> str:
    from qkscope.runs.claims import Claim

    return Claim.from_json(claim).source


def _reason(claim: dict[str, Any]) -> str:
    return str(claim.get("reason", ""))


def _claims_page(paper: str, known: dict[str, Any]) -> list[str]:
    """What fails and why, then every figure with its claims, then the rules that were changed."""
    from qkscope.papers.registry import figures_of

    own = {
        name: entry
        for figure in figures_of(paper)
        for name, entry in known.items()
        if name.partition("@")[0] == f"{paper}/{figure}"
    }
    rows = [(name.split("/")[1], claim) for name, entry in own.items() for claim in entry["claims"]]
    lines = ["## What the paper says and we did not find", "",
             "| figure | the paper | ours | control | why not |", "| --- | --- | ---: | ---: | --- |"]  # fmt: skip
    for figure, c in rows:
        if c["holds"] is False and _source(c) != "ours":
            said, why = (
                f"{_text(c['paper'])} - {_text(c['claim'])}",
                ": ".join(filter(None, (_reason(c), c.get("why")))),
            )
            lines.append(f"| {figure} | {said} | {_measured(c)} | {_number(c['control'])} | {_text(why)} |")
    for figure, experiment in figures_of(paper).items():
        lines += ["", f"## {figure}: {_text(experiment.title)}", ""]
        entries = {name: entry for name, entry in own.items() if name.partition("@")[0] == f"{paper}/{figure}"}
        if not entries:
            lines += [f"Not run yet: `qkscope reproduce {paper} {figure}`."]
        for name, entry in entries.items():
            lines += _figure_lines(name, entry)
    changed = [(figure, claim) for figure, claim in rows if claim.get("changed")]
    if changed:
        lines += ["", "## Rules that were changed", "", "| figure | claim | rule | before, and why it changed |",
                  "| --- | --- | --- | --- |"]  # fmt: skip
        lines += [
            f"| {figure} | {_text(c['claim'])} | `{c['rule']}` | {_text(c['changed'])} |" for figure, c in changed
        ]
    return lines


def _figure_lines(name: str, entry: dict[str, Any]) -> list[str]:
    where = f"{entry['model']}, " if entry["model"] else ""
    lines = [
        *([f"### On {name.partition('@')[2]}", ""] if "@" in name else []),
        _text(entry["answer"]), "",
        f"`{entry['command']}` ({where}{entry['hardware']}, {entry['date']}, {entry['seconds']:.3g} s)", "",
        "| claim | source | ours | control | rule | verdict |", "| --- | --- | ---: | ---: | --- | --- |",
        *(f"| {_text(c['claim'])} | {_text(_said(c))} | {_measured(c)} | {_number(c['control'])} | "
          f"`{c['rule']}` | {_verdict(c)} |" for c in entry["claims"]), "",
    ]  # fmt: skip
    return [*lines, f"![{name}](figures/{name}.png)", ""] if entry["picture"] else lines


def _said(claim: dict[str, Any]) -> str:
    return {"stated": claim["paper"], "implied": claim["paper"], "ours": "ours"}[_source(claim)]


def _verdict(claim: dict[str, Any]) -> str:
    if claim["holds"] is None:
        return "tie"
    reason = f": {_reason(claim)}" if _reason(claim) else ""
    return "holds" if claim["holds"] else f"**fails**{reason}"


def _measured(claim: dict[str, Any]) -> str:
    """The number, and its interval where there is one."""
    ends = [_number(claim.get(end)) for end in ("low", "high")]
    return _number(claim["ours"]) + (f" [{ends[0]}, {ends[1]}]" if all(ends) else "")


def commands() -> None:
    """Every verb with its arguments and options, as the shell itself knows them."""
    _put(DOCS / "commands.md", "commands", commands_page())


def commands_page() -> str:
    """The reference as text."""
    import typer

    from qkscope.cli import app

    root: Any = typer.main.get_command(app)
    return "\n".join(_command_lines("qkscope", root.commands)).strip()


def _command_lines(above: str, verbs: dict[str, Any]) -> list[str]:
    lines = []
    for name, verb in verbs.items():
        if hasattr(verb, "commands"):  # verbs of verbs, as in train nano
            lines += _command_lines(f"{above} {name}", verb.commands)
            continue
        arguments = [p for p in verb.params if p.param_type_name == "argument"]
        options = [p for p in verb.params if p.param_type_name == "option" and p.name != "help"]
        usage = " ".join([f"{above} {name}", *(_usage(p) for p in arguments), *(["[OPTIONS]"] if options else [])])
        lines += [f"## {above.removeprefix('qkscope').strip()} {name}".replace("  ", " "), "",
                  f"`{usage}`", "", _text((verb.help or "").strip().replace("\n", " ")), ""]  # fmt: skip
        rows = [(f"`{_usage(p)}`", p) for p in arguments] + [(f"`{'`, `'.join(p.opts)}`", p) for p in options]
        if rows:
            lines += ["| option | default | what |", "| --- | --- | --- |"]
            lines += [f"| {shown} | {_default(p)} | {_text(getattr(p, 'help', None) or '')} |" for shown, p in rows]
            lines.append("")
    return lines


def _usage(argument: Any) -> str:
    shown = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return shown if argument.required else f"[{shown}]"


def _default(option: Any) -> str:
    if option.required:
        return "needed"
    value = option.default
    return "" if value is None or value is False or value == "" or callable(value) else f"`{value}`"


def _text(value: str) -> str:
    """Text as a cell of a table has it: marks that Markdown would read are escaped."""
    return re.sub(r"([|*_<>\[\]])", r"\\\1", value.replace("\n", " "))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}".replace("-", "−")


def _put(page: Path, name: str, table: str) -> None:
    text = page.read_text()
    pattern = rf"(<!-- {name} -->\n).*?\n?(<!-- /{name} -->)"
    page.write_text(re.sub(pattern, lambda match: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL))


def main() -> None:
    """Read rows from standard input, or runs from folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["models", "bench", "results", "commands", "errors"])
    parser.add_argument("folders", nargs="*", type=Path, help="Of results: where run folders lie.")
    parser.add_argument("--hardware", default="two CPU cores")
    given = parser.parse_args()
    if given.what == "errors":
        errors([json.loads(line) for line in sys.stdin])
    elif given.what == "commands":
        commands()
    elif given.what == "results":
        results(given.folders, given.hardware)
    else:
        rows = json.load(sys.stdin)["rows"]
        models(rows) if given.what == "models" else bench(rows, given.hardware)


if __name__ == "__main__":
    main()
