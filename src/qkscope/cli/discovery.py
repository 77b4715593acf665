"""Features without labels: of some heads, and of every head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli import shell
from qkscope.errors import BadInput

PYTHON = "python"  # what Python's own texts are called: its help topics, English that needs no download


@shell.app.command()
def discover(
    sources: Annotated[list[str], typer.Argument(help="A task, a .jsonl file, texts, or python (its own texts).")],
    heads: Annotated[str, typer.Option("--heads", help="Heads like L18H6,L18H7.")],
    out: shell.Out,
    model: shell.Model = "smollm2-135m",
    n: Annotated[int, typer.Option("--n", "-n", help="Passages or prompts to fit on.")] = 192,
    test: Annotated[int, typer.Option("--test", help="Others to test on.")] = 64,
    changes: Annotated[int, typer.Option("--changes", help="Tokens to change in the text at each head.")] = 48,
    form: shell.Form = "list",
    size: shell.Size = None,
    seed: shell.Seed = 0,
    chat: shell.Chat = False,
    batch_size: shell.BatchSize = 16,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Say what some heads match on, by name, with the evidence on text that nothing was fitted on.

    A run that died goes on where it stopped.
    """
    from qkscope.analyses.discover.discover import discover as run
    from qkscope.analyses.names.sight import Options
    from qkscope.heads import parse_heads
    from qkscope.page.figures import draw_discovery

    chosen = parse_heads(heads)
    shell.check_out(out, "discover")
    options: Any = {"test": test, "batch_size": batch_size, "seed": seed}
    Options(n, **options)
    task = len(sources) == 1 and is_task(sources[0])
    source = shell.make_task(sources[0], form, size, seed, chat) if task else texts_of(sources)
    scope = shell.load_scope(model, device, dtype)
    asked: Any = {"changes": changes, **options}
    shell.run_job(lambda job: run(scope, source, chosen, n, job=job, **asked), out, as_json, everything, draw_discovery)
    shell.print_end(out, then=shell.command("view", out), as_json=as_json)


@shell.app.command()
def atlas(
    sources: Annotated[list[str] | None, typer.Argument(help="Text files or folders; Python's own texts.")] = None,
    out: shell.Out = Path("runs/atlas"),
    model: shell.Model = "smollm2-135m",
    n: Annotated[int, typer.Option("--n", "-n", help="Passages to fit on.")] = 192,
    test: Annotated[int, typer.Option("--test", help="Passages of other documents to test on.")] = 64,
    heads: Annotated[str | None, typer.Option("--heads", help="Heads like L18H6,L18H7; all by default.")] = None,
    seed: shell.Seed = 0,
    batch_size: shell.BatchSize = 16,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Name every head: a sentence for each, with its share of the logit on documents that nothing was fitted on.

    A run that died goes on where it stopped.
    """
    from qkscope.analyses.atlas import atlas as run
    from qkscope.analyses.names.sight import Options
    from qkscope.heads import parse_heads
    from qkscope.page.figures import draw_atlas

    chosen = None if heads is None else parse_heads(heads)
    shell.check_out(out, "atlas")
    options: Any = {"batch_size": batch_size, "seed": seed}
    Options(n, test, **options)
    texts = texts_of(sources or [PYTHON], "an atlas takes text files and folders, or nothing for Python's own texts")
    scope = shell.load_scope(model, device, dtype)
    asked: Any = {"test": test, "heads": chosen, **options}
    made = shell.run_job(lambda job: run(scope, texts, n, job=job, **asked), out, as_json, everything, draw_atlas)
    if not as_json:
        head, said = made.tables["atlas"][0]["head"], {"model": model, "device": device, "dtype": dtype}
        named = out.with_name(head.lower())
        shell.print_end(out, then=shell.command("discover", *(sources or [PYTHON]), heads=head, out=named, **said))


def is_task(source: str) -> bool:
    """Whether a name is that of a task or of a file of marked examples."""
    from qkscope.tasks import BUILT_IN

    return source in BUILT_IN or source.lower().endswith(".jsonl")


def texts_of(sources: list[str], only: str | None = None) -> Any:
    """Documents of files and folders, or of Python; what is neither is refused, saying what ``only`` is taken."""
    from qkscope.tasks import BUILT_IN
    from qkscope.tasks.texts import python_texts, read_documents

    if sources == [PYTHON]:
        return python_texts(docstrings=True)
    for source in sources:
        if is_task(source):
            instead = f"{only}, and {source} is a task: run qkscope discover {source} --heads … for tasks."
            raise BadInput(instead if only else f"{source} is a task: name it alone, or name text files.")
        if not Path(source).exists():
            names = ", ".join(BUILT_IN)
            known = f"there is no task and no file {source!r}: name one of {names}, {PYTHON}, a file or a folder."
            raise BadInput(f"there is no file {source!r}: {only}." if only else known)
    return read_documents(sources)
