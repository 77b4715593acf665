"""Write the tables of docs/models.md, benchmarks.md, results.md and commands.md from what the commands print and write.

``qkscope models --json | python docs/generate.py models`` and
``qkscope bench --json | python docs/generate.py bench --hardware "two CPU cores"``. The bench rows also go into
docs/benchmarks.json, one entry per hardware; the page keeps its text and takes new tables.

``python docs/generate.py results runs/paper --hardware "two CPU cores"`` takes the claims of every figure below a
folder into docs/results.json and results.md, with its picture unless it is of the preset smoke; a figure that was taken
from a larger preset keeps it. ``python docs/generate.py commands`` writes the reference of the command line.
``python docs/generate.py curve runs/binding`` puts the curve of a run of ``qkscope discover`` into docs/discover.md.
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


def models(rows: list[dict]) -> None:
    """The families, supported ones first, with their limits."""
    lines = [
        "| family | can be looked into | error of the attention | error of the trace | limits, or why not |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: not row["supported"]):
        errors = ["" if row[name] is None else f"{row[name]:.1e}" for name in ("max_error", "trace_error")]
        cells = [f"`{row['family']}`", "yes" if row["supported"] else "no", *errors, row["reason"]]
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
    lines = ["| what was said | what is answered |", "| --- | --- |"]
    for row in rows:
        lines.append(f"| `{row['command']}` | {_text(row['answer'])} |")
    _put(DOCS / "errors.md", "errors", "\n".join(lines))


def curve(folder: Path) -> None:
    """Attention moved and logit carried by every method at every size, held against the self-contrast."""
    rows = json.loads((folder / "results.json").read_text())["tables"]["curve"]
    lines = []
    for head in dict.fromkeys(row["head"] for row in rows):
        own = [row for row in rows if row["head"] == head]
        sizes = list(dict.fromkeys(row["k"] for row in own))
        start = f"{head}, start {own[0]['orig_before']:.2f}/{own[0]['target_before']:.2f}"
        lines += [f"| {start} | " + " | ".join(f"k={k}" for k in sizes) + " |", "| --- " * (len(sizes) + 1) + "|"]
        for method in dict.fromkeys(row["method"] for row in own):
            cells = [f"{_held(row, 'shift', 'gain')} / {_held(row, 'carried', 'carried_gain')}"
                     for row in own if row["method"] == method]  # fmt: skip
            lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
        lines.append("")
    _put(DOCS / "discover.md", "curve", "\n".join(lines).rstrip())


def _held(row: dict, value: str, gain: str) -> str:
    """A number, and whether the interval of its difference to the baseline is above, below or over zero."""
    shown = re.sub(r"^(-?)0\.", r"\1.", f"{row[value]:.2f}")
    if row[gain] is None:
        return shown
    return shown + ("+" if row[f"{gain}_low"] > 0 else "−" if row[f"{gain}_high"] < 0 else "=")


def results(folders: list[Path], hardware: str) -> None:
    """Every claim of every figure, from the largest preset that was run."""
    from qkscope.papers.registry import PAPERS

    store = DOCS / "results.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    for path in sorted(path for folder in folders for path in folder.rglob("results.json")):
        found, made = (json.loads((path.parent / name).read_text()) for name in ("results.json", "manifest.json"))
        name = found["experiment"]
        old = known.get(name)
        if name.split("/")[0] not in PAPERS or (old and PRESETS.index(old["preset"]) > PRESETS.index(found["preset"])):
            continue
        picture = path.parent / "figures" / f"{name.split('/')[1]}.png"
        drawn = found["preset"] != "smoke" and picture.exists()
        if drawn:
            (DOCS / "figures" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, DOCS / "figures" / f"{name}.png")
        known[name] = {key: found[key] for key in ("preset", "model", "seconds", "answer", "claims")} | {
            "command": re.sub(r" --out \S+", "", made["command"] or ""), "hardware": hardware, "picture": drawn,
            "date": datetime.date.today().isoformat(),
        }  # fmt: skip
    store.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    _put(DOCS / "results.md", "results", "\n".join(_results_page(known)).strip())
    _put(DOCS.parent / "README.md", "results", "\n".join(_results_summary(known)))


def _results_page(known: dict[str, Any]) -> list[str]:
    from qkscope.papers.registry import PAPERS, figures_of

    claims = [claim for entry in known.values() for claim in entry["claims"]]
    lines = [f"{sum(claim['holds'] for claim in claims)} of {len(claims)} claims hold, in {len(known)} figures.", ""]
    for paper in PAPERS:
        lines += [f"## {paper}", ""]
        for figure, experiment in figures_of(paper).items():
            entry = known.get(f"{paper}/{figure}")
            lines += [f"### {figure}: {_text(experiment.title)}", ""]
            if entry is None:
                lines += [f"Not run yet: `qkscope reproduce {paper} {figure}`.", ""]
                continue
            where = f"{entry['model']}, " if entry["model"] else ""
            lines += [
                _text(entry["answer"]), "",
                f"`{entry['command']}` ({where}{entry['hardware']}, {entry['date']}, {entry['seconds']:.3g} s)", "",
                "| claim | paper | ours | control | rule | holds |", "| --- | --- | ---: | ---: | --- | --- |",
                *(f"| {_text(c['claim'])} | {_text(c['paper'])} | {_number(c['ours'])} | {_number(c['control'])} | "
                  f"`{c['rule']}` | {'yes' if c['holds'] else '**no**'} |" for c in entry["claims"]), "",
            ]  # fmt: skip
            if entry["picture"]:
                lines += [f"![{paper} {figure}](figures/{paper}/{figure}.png)", ""]
    return lines


def _results_summary(known: dict[str, Any]) -> list[str]:
    """One line per paper, for the README."""
    lines = ["| paper | figures | claims | hold |", "| --- | ---: | ---: | ---: |"]
    for paper in dict.fromkeys(name.split("/")[0] for name in known):
        own = [entry for name, entry in known.items() if name.split("/")[0] == paper]
        claims = [claim for entry in own for claim in entry["claims"]]
        lines.append(f"| {paper} | {len(own)} | {len(claims)} | {sum(claim['holds'] for claim in claims)} |")
    return lines


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
    pattern = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
    page.write_text(re.sub(pattern, lambda match: match[1] + table + match[2], text, flags=re.DOTALL))


def main() -> None:
    """Read rows from standard input, or runs from folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["models", "bench", "results", "commands", "errors", "curve"])
    parser.add_argument("folders", nargs="*", type=Path, help="Of results and curve: where run folders lie.")
    parser.add_argument("--hardware", default="two CPU cores")
    given = parser.parse_args()
    if given.what == "errors":
        errors([json.loads(line) for line in sys.stdin])
    elif given.what == "commands":
        commands()
    elif given.what == "results":
        results(given.folders, given.hardware)
    elif given.what == "curve":
        curve(given.folders[0])
    else:
        rows = json.load(sys.stdin)["rows"]
        models(rows) if given.what == "models" else bench(rows, given.hardware)


if __name__ == "__main__":
    main()
