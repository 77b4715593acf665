"""Write the tables of docs/families.md, commands.md and bench/docs/benchmarks.md from what the
commands print.

``qkscope models --json | python docs/generate.py models`` and
``qkscope bench --json | python docs/generate.py bench --hardware "two CPU cores"``. The bench rows
also go into bench/docs/benchmarks.json, one entry per hardware; the page keeps its text and takes
new tables.

``python docs/generate.py commands`` writes the reference of the command line. ``cat *.json | python
docs/generate.py tables`` prints the columns of what commands printed with ``--json`` that
qkscope/results/tables.toml does not define.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkscope.results.tables import every_table, unknown_columns

DOCS = Path(__file__).parent
REPORTS = DOCS.parent / "bench" / "docs"


def models(rows: list[dict]) -> None:
    """The families, supported ones first, with their limits."""
    lines = [
        "| family | outcome | error of the attention | error of the trace | tokens | limits, or why not |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(
        rows, key=lambda row: ("wrong", "right", "refused", "not built").index(row["verdict"])
    ):
        errors = [
            "" if row[name] is None else f"{row[name]:.1e}" for name in ("max_error", "trace_error")
        ]
        cells = [
            f"`{row['family']}`",
            row["verdict"],
            *errors,
            str(row["length"] or ""),
            row["reason"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    _put(DOCS / "families.md", "families", "\n".join(lines))


def bench(rows: list[dict], hardware: str) -> None:
    """The ratios on one machine, beside those of the others."""
    store = REPORTS / "benchmarks.json"
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
            lines.append(
                f"| `{name}` | {times} | {row['ratio']:.3g}× | {row['note']} | {row['date']} |"
            )
        lines.append("")
    _put(REPORTS / "benchmarks.md", "bench", "\n".join(lines).rstrip())


def tables(results: list[dict]) -> None:
    """Print what results have and no definition does: add it to qkscope/results/tables.toml."""
    for result in results:
        verb = result["experiment"].partition("/")[0]
        for unknown in unknown_columns(verb, result["tables"]):
            print(f"{verb}.{unknown}")


def commands() -> None:
    """Every verb with its arguments and options, as the shell itself knows them."""
    _put(DOCS / "commands.md", "commands", commands_page())


def commands_page() -> str:
    """The reference as text."""
    import typer

    from qkscope.cli import app

    root: Any = typer.main.get_command(app)
    verbs = {name: root.get_command(None, name) for name in root.list_commands(None)}
    return "\n".join(_command_lines("qkscope", verbs)).strip()


def _command_lines(above: str, verbs: dict[str, Any]) -> list[str]:
    lines = []
    for name, verb in verbs.items():
        if hasattr(verb, "commands"):  # verbs of verbs, as in train nano
            lines += _command_lines(f"{above} {name}", verb.commands)
            continue
        arguments = [p for p in verb.params if p.param_type_name == "argument"]
        options = [p for p in verb.params if p.param_type_name == "option" and p.name != "help"]
        usage = " ".join(
            [
                f"{above} {name}",
                *(_usage(p) for p in arguments),
                *(["[OPTIONS]"] if options else []),
            ]
        )
        lines += [f"## {above.removeprefix('qkscope').strip()} {name}".replace("  ", " "), "",
                  f"`{usage}`", "", _text((verb.help or "").strip().replace("\n", " ")), ""]  # fmt: skip
        if above == "qkscope" and name in every_table():
            tables = ", ".join(f"`{table}`" for table in every_table()[name])
            lines += [f"Tables: {tables} (`qkscope schema {name}`).", ""]
        rows = [(f"`{_usage(p)}`", p) for p in arguments] + [
            (f"`{'`, `'.join(p.opts)}`", p) for p in options
        ]
        if rows:
            lines += ["| option | default | what |", "| --- | --- | --- |"]
            lines += [
                f"| {shown} | {_default(p)} | {_text(getattr(p, 'help', None) or '')} |"
                for shown, p in rows
            ]
            lines.append("")
    return lines


def _usage(argument: Any) -> str:
    shown = (argument.metavar or argument.name.upper()) + ("..." if argument.nargs == -1 else "")
    return shown if argument.required else f"[{shown}]"


def _default(option: Any) -> str:
    if option.required:
        return "needed"
    shown = getattr(option, "show_default", None)
    value = shown if isinstance(shown, str) else option.default
    return "" if value is None or value is False or value == "" or callable(value) else f"`{value}`"


def _text(value: str) -> str:
    """Text as a cell of a table has it: marks that Markdown would read are escaped."""
    return re.sub(r"([|*_<>\[\]])", r"\\\1", value.replace("\n", " "))


def _put(page: Path, name: str, table: str) -> None:
    text = page.read_text()
    pattern = rf"(<!-- {name} -->\n).*?\n?(<!-- /{name} -->)"
    page.write_text(
        re.sub(pattern, lambda match: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL)
    )


def _documents(text: str) -> Iterator[Any]:
    """JSON values that stand one after the other."""
    while text := text.lstrip():
        value, end = json.JSONDecoder().raw_decode(text)
        yield value
        text = text[end:]


def main() -> None:
    """Read rows from standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["models", "bench", "commands", "tables"])
    parser.add_argument("--hardware", default="two CPU cores")
    given = parser.parse_args()
    if given.what == "tables":
        tables(list(_documents(sys.stdin.read())))
    elif given.what == "commands":
        commands()
    else:
        rows = json.load(sys.stdin)["rows"]
        models(rows) if given.what == "models" else bench(rows, given.hardware)


if __name__ == "__main__":
    main()
