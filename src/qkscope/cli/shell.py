"""What every verb shares: the app, its options, and how results are printed."""

from __future__ import annotations

import inspect
import json
import logging
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope import tasks
from qkscope.cli import layout, views
from qkscope.errors import BadInput
from qkscope.kinds import LARGEST_SEED
from qkscope.runs.folder import check_folder
from qkscope.runs.progress import clear, plain_text

log = logging.getLogger(__name__)

_MOST, _MANY = 10**7, 10**5  # prompts; each takes a tenth of a millisecond or more before the first is looked at

app = typer.Typer(
    name="qkscope",
    help="Why did this attention head attend to that token?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _count(value: int | None) -> int | None:
    if value is not None and value > _MOST:
        raise BadInput(f"{value:,} prompts are more than can be drawn: take at most {_MOST:,}.")
    if value is not None and value > _MANY:
        log.info("Drawing %s prompts takes a while, minutes for a million ...", f"{value:,}")
    return value


def _seed(value: int) -> int:
    if not 0 <= value <= LARGEST_SEED:
        raise BadInput(f"--seed is a whole number from 0 to {LARGEST_SEED}, but got {value}.")
    return value


def _batch_size(value: int) -> int:
    if value < 1:
        raise BadInput(f"--batch-size is at least 1, but got {value}.")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
All = Annotated[bool, typer.Option("--all", help="Print every table with all its rows and columns.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Model = Annotated[
    str, typer.Option("--model", help="Hub id, folder, .gguf file, smollm2-135m, gemma3-270m, or nano:mixed.")
]
TaskName = Annotated[str, typer.Argument(help=f"{', '.join(tasks.BUILT_IN)}, or a .jsonl file.")]
Fitted = Annotated[Path, typer.Argument(help="A folder that decompose wrote.")]
Heads = Annotated[str, typer.Option("--heads", help="Heads like L18H6,L18H7.")]
Count = Annotated[int, typer.Option("--n", "-n", help="Number of prompts (for each contrast).", callback=_count)]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every draw.", callback=_seed)]
Form = Annotated[
    str,
    typer.Option(
        "--form", help="list, sentence or question (binding); bullets or find (filter); ABBA, BABA or single (ioi)."
    ),
]
Size = Annotated[
    int | None, typer.Option("--size", help="Entities (binding), categories (filter) or words (induction).")
]
Space = Annotated[str, typer.Option("--space", help="post_rope (the papers'), pre_rope or query_frame.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Prompts per batch.", callback=_batch_size)]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, or auto: spread over all GPUs.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, ...; as the weights are stored.")]
TrainDevice = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Workers = Annotated[int | None, typer.Option("--workers", help="CPU threads; all cores by default.")]
HeadWidth = Annotated[int, typer.Option("--d-head", help="Width of the head.")]


def make_task(name: str, form: str, size: int | None, seed: int, chat: bool, center: str | None = None) -> Any:
    """The task by name; checked before a model is loaded, as is that its maker takes what was asked."""
    makers: dict[str, Callable[..., Any]] = {**tasks.BUILT_IN}
    if name.lower().endswith(".jsonl"):
        makers[name] = partial(tasks.from_jsonl, name)
    if name not in makers:
        raise BadInput(f"there is no task {name!r}: take {', '.join(makers)}, or a .jsonl file of your own.")
    options: dict[str, Any] = {}
    sizes, shown = ("entities", "categories", "length"), None if form == "list" else form
    for flag, value, names in (("size", size, sizes), ("form", shown, ("form",)), ("center", center, ("center",))):
        takers = {own: took for own, maker in makers.items() if (took := _takes(maker, names))}
        if value is not None and name not in takers:
            among = ", ".join(takers) or "a file of your own"
            raise BadInput(f"--{flag} is for {among}: the prompts of {name} have one {flag}.")
        if value is not None:
            options[takers[name]] = value
    return makers[name](seed=seed, chat=chat, **options)


def _takes(maker: Callable[..., Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in inspect.signature(maker).parameters), None)


def split_names(text: str | None) -> list[str] | None:
    """Names with commas between; None stays None."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def load_scope(model: str, device: str | None, dtype: str | None) -> Any:
    """The model, ready to be looked into."""
    from qkscope.capture.scope import Scope

    if device == "auto":  # larger than one device
        return Scope.load(model, device_map="auto", dtype=dtype)
    return Scope.load(model, device=device, dtype=dtype)


def print_result(result: Any, as_json: bool, everything: bool = False) -> None:
    """The answer and the one table that supports it, or every table; or all of it as JSON."""
    if as_json:
        print_json(result.to_json())
        return
    claims = [{**claim.to_json(), "verdict": claim.verdict} for claim in result.claims]
    say(result.answer)
    print_tables(result.experiment, {**result.tables, "claims": claims}, everything, result.main)


def run_job(run: Callable[[Any], Any], out: Path | None, as_json: bool, everything: bool, draw: Any = None) -> Any:
    """Run as a job, print what comes of it, then write it: a disk that refuses takes nothing away, and work is kept."""
    from qkscope.runs.job import Job

    with Job(out).hold() as job:
        result = run(job)
        print_result(result, as_json, everything)
        write(result, out, draw)
        job.clear()
    return result


def write(result: Any, out: Path | None, draw: Any = None) -> None:
    """Write a result into its folder, if there is one, with what is drawn of it: its page, if nothing else is said."""
    if out is not None:
        from qkscope.page.report import report_html

        result.write(out, files={"report.html": report_html([result])} if draw is None else draw(result))


def check_out(out: Path | None, kind: str) -> None:
    """Refuse a folder that no run of this kind may be written into, before long work."""
    if out is not None:
        check_folder(out, kind)


def print_rows(
    verb: str, rows: Sequence[Mapping[str, Any]], answer: str, as_json: bool, everything: bool = False
) -> None:
    """As `print_result`, of a verb that gives rows; as JSON ``{"rows": [...]}``."""
    if as_json:
        print_json({"rows": list(rows)})
        return
    say(answer)
    print_tables(verb, {"rows": rows}, everything)


def print_tables(verb: str, tables: Mapping[str, Any], everything: bool = False, main: str = "") -> None:
    """What a verb shows of its tables (`qkscope.cli.views`), or all of them in full."""
    if everything:
        for name, rows in tables.items():
            if rows:
                say(f"\n{name}")
                table = views.whole(rows)
                _print_table(table, layout.entire(*table[:3], _width() if sys.stdout.isatty() else None))
        return
    shown = views.shown(verb, tables, main)
    if shown is not None:
        typer.echo()
        _print_table(shown, layout.fitted(*shown[:3], _width()))
        if shown.note:
            say(shown.note, wrapped=True)
        left = f"{len(shown.cells)} of {shown.rows} rows" if len(shown.cells) < shown.rows else ""
        say(f"{left}{'; ' * bool(left)}--all prints everything.")


def _print_table(table: views.Shown, lines: Sequence[str]) -> None:
    for i, line in enumerate(lines):
        typer.echo(typer.style(line, bold=True) if i == 0 else line)


def _width() -> int:
    return max(40, shutil.get_terminal_size().columns)


def print_json(value: Any) -> None:
    """JSON on stdout, and nothing else there; JSON writes out most of what would steer a terminal, but not all."""
    clear()
    text = json.dumps(value, indent=1, ensure_ascii=False)
    typer.echo(re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text))


def say(text: str, wrapped: bool | None = None) -> None:
    """Lines for people; what they quote from a folder does not steer the terminal.

    Parameters
    ----------
    text : the lines.
    wrapped : whether long ones are broken between words; on a terminal, if not given: a pipe takes whole lines.
    """
    clear()
    for line in plain_text(text).split("\n"):
        whole = not (sys.stdout.isatty() if wrapped is None else wrapped) or len(line) <= _width()
        typer.echo(line if whole else textwrap.fill(line, _width(), break_long_words=False, break_on_hyphens=False))


def print_end(*written: Path | None, then: str, also: str = "", as_json: bool = False) -> None:
    """Where the pages are (or what was written), and the next command to type.

    Parameters
    ----------
    written : folders or files; None where nothing was written.
    then : the next command.
    also : what happened to the page besides.
    as_json : then nothing but JSON is printed.
    """
    if as_json:
        return
    typer.echo()
    for out in written:
        if out is not None:
            page = out / "report.html"
            say(f"The page: {page}{also}" if page.is_file() else f"Written to {out}.")
    typer.echo(f"Next: {plain_text(then)}")


def command(verb: str, *arguments: object, **options: object) -> str:
    """A command to type: its arguments, and its options where they are not what the verb takes anyway.

    >>> from qkscope import cli
    >>> command("decompose", "binding", heads="L18H6", out="my runs", model="smollm2-135m", seed=1)
    "qkscope decompose binding --heads L18H6 --out 'my runs' --seed 1"
    """
    from typer.main import get_command

    known = {parameter.name: parameter for parameter in get_command(app).commands[verb].params}  # type: ignore[attr-defined]
    words = ["qkscope", verb, *map(str, arguments)]
    for name, value in options.items():
        if value is not None and value != known[name].default:
            words += [known[name].opts[0], *([] if value is True else [str(value)])]
    return shlex.join(words)
