"""Features without labels: of some heads, and of every head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli.shell import (
    BatchSize,
    Chat,
    Device,
    Dtype,
    Form,
    Json,
    Model,
    Out,
    Seed,
    Size,
    app,
    check_batch_size,
    load_scope,
    make_task,
    print_json,
    print_table,
    say,
)
from qkscope.errors import BadInput

_TASKS = ("binding", "filter", "ioi", "induction", "greater_than", "pronoun")
Space = Annotated[str, typer.Option("--space", help="query_frame or post_rope.")]
Directions = Annotated[int, typer.Option("--directions", help="The most directions to look for at a head.")]
Replicates = Annotated[int, typer.Option("--replicates", help="Null replicates of each head.")]
Skip = Annotated[int, typer.Option("--skip", help="Tokens from the first on that are left out.")]


@app.command()
def discover(
    sources: Annotated[list[str], typer.Argument(help="A task, a .jsonl file, text files, or corpus (ours).")],
    heads: Annotated[str, typer.Option("--heads", help="Heads like L18H6,L18H7.")],
    out: Out,
    model: Model = "smollm2-135m",
    n: Annotated[int, typer.Option("--n", help="Passages of text, or prompts to fit and to test.")] = 256,
    directions: Directions = 16,
    space: Space = "query_frame",
    skip: Skip = 1,
    replicates: Replicates = 199,
    form: Form = "list", size: Size = None, seed: Seed = 0, chat: Chat = False,
    contrasts: Annotated[str | None, typer.Option("--contrasts", help="Labelled contrasts to compare with.")] = None,
    batch_size: BatchSize = 16, device: Device = None, dtype: Dtype = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Find the features that some heads match on, without labels, with the evidence for each on held-out text.

    A run that died goes on where it stopped.
    """
    from qkscope.heads import parse_heads
    from qkscope.runs.folder import check_folder

    chosen = parse_heads(heads)
    check_folder(out, "discover")
    check_batch_size(batch_size)
    _check_options(n, directions, space, skip, replicates)
    source: Any
    if len(sources) == 1 and _is_task(sources[0]):
        source = make_task(sources[0], form, size, seed, chat)
        source.test(1)
    else:
        source = _texts(sources)
    _check_queries(source, n, directions)
    named = None if contrasts is None else [part.strip() for part in contrasts.split(",") if part.strip()]
    if named is not None:
        if isinstance(source, tuple):
            raise BadInput("--contrasts are for a task: plain text has no labels.")
        from qkscope.analyses.decompose import checked_contrasts

        checked_contrasts(source, named)
    from qkscope.analyses.discover.discover import discover as run
    from qkscope.runs.job import keeping

    scope = load_scope(model, device, dtype)
    with keeping(out) as job:
        result = run(
            scope, source, chosen, n, directions=directions, space=space, skip=skip,  # type: ignore[arg-type]
            replicates=replicates, contrasts=named, batch_size=batch_size, seed=seed, job=job,
        )  # fmt: skip
        _show(result, as_json, {name: result.tables.get(name, []) for name in ("heads", "features", "curve")})
        from qkscope.page.figures.pictures import draw_discovery

        result.write(out, files=draw_discovery(result))
        job.clear()
    if not as_json:
        typer.echo(f"The page: {out / 'report.html'}")


@app.command()
def atlas(
    sources: Annotated[list[str] | None, typer.Argument(help="Text files; our own corpus by default.")] = None,
    out: Out = Path("runs/atlas"),
    model: Model = "smollm2-135m",
    n: Annotated[int, typer.Option("--n", help="Passages to sum over.")] = 384,
    test: Annotated[int, typer.Option("--test", help="Other passages for the evidence.")] = 64,
    space: Space = "query_frame",
    skip: Skip = 1,
    replicates: Replicates = 41,
    seed: Seed = 0, batch_size: BatchSize = 32, device: Device = None, dtype: Dtype = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Look at every head in one pass: directions above the null, the logit they carry, examples.

    A run that died goes on where it stopped.
    """
    from qkscope.runs.folder import check_folder

    check_folder(out, "atlas")
    check_batch_size(batch_size)
    _check_options(n, 1, space, skip, replicates)
    if test < 1:
        raise BadInput(f"--test is at least 1, but got {test}.")
    for name in sources or ():
        if _is_task(name):
            raise BadInput(f"an atlas takes text files, or nothing for our corpus, and {name} is a task: run qkscope "
                           f"discover {name} --heads … for tasks.")  # fmt: skip
        if name != "corpus" and not Path(name).is_file():
            raise BadInput(f"there is no file {name!r}: an atlas takes text files, or nothing for our corpus.")
    texts = _texts(sources or ["corpus"])
    from qkscope.analyses.atlas import atlas as run
    from qkscope.runs.job import keeping

    scope = load_scope(model, device, dtype)
    with keeping(out) as job:
        result = run(
            scope, texts, n, test=test, space=space, skip=skip, replicates=replicates,  # type: ignore[arg-type]
            batch_size=batch_size, seed=seed, job=job,
        )  # fmt: skip
        _show(result, as_json, {"atlas (the first 20)": result.tables["atlas"][:20]})
        from qkscope.page.figures.pictures import draw_atlas

        result.write(out, files=draw_atlas(result))
        job.clear()
    if not as_json:
        typer.echo(f"The page: {out / 'report.html'}")


def _show(result: Any, as_json: bool, tables: dict[str, Any]) -> None:
    """Say what was found before it is written: a disk that refuses then takes nothing away."""
    from qkscope.runs.result import plain_value

    if as_json:
        print_json(result.to_json())
        return
    say(result.answer)
    for name, rows in tables.items():
        print_table(name, plain_value(rows))


def _is_task(source: str) -> bool:
    return source in _TASKS or source.lower().endswith(".jsonl")


def _texts(sources: list[str]) -> Any:
    """Passages of text files, or of our corpus; a word that is neither file nor task is refused."""
    from qkscope.analyses.discover.texts import corpus, read_texts

    if sources == ["corpus"]:
        return corpus()
    for source in sources:
        if _is_task(source):
            raise BadInput(f"{source} is a task: name it alone, or name text files.")
        if not Path(source).is_file():
            raise BadInput(
                f"there is no task and no file {source!r}: name one of {', '.join(_TASKS)}, corpus, or a file."
            )
    return read_texts(sources)


def _check_options(n: int, directions: int, space: str, skip: int, replicates: int) -> None:
    from qkscope.analyses.discover.discover import LEAST_REPLICATES

    if space not in ("query_frame", "post_rope"):
        raise BadInput(f"--space is query_frame or post_rope, where attention can be had, but got {space!r}.")
    for name, value, least in (("--n", n, 1), ("--directions", directions, 1), ("--skip", skip, 0),
                               ("--replicates", replicates, LEAST_REPLICATES)):  # fmt: skip
        if value < least:
            raise BadInput(f"{name} is at least {least}, but got {value}.")


def _check_queries(source: Any, n: int, directions: int) -> None:
    """Refuse too few queries before a model is loaded: a prompt asks one, and a passage a few at most."""
    from qkscope.analyses.discover.discover import _PER_DIRECTION
    from qkscope.analyses.discover.texts import QUERIES
    from qkscope.tasks.task import ANSWER

    if isinstance(source, tuple):
        passages = min(n, len(source))
        most, said = QUERIES * max(2 * passages // 3, 1), f"{passages} passages have at most"
    else:
        try:
            most = len(source.draw("fit", ANSWER, n))
        except BadInput:  # a file that labels its right keys for other uses only
            most = len(source.fit(next(iter(source.contrasts)), n))
        said = f"the prompts of {source.name} have"
    if most < _PER_DIRECTION * directions:
        raise BadInput(f"{directions} directions need {_PER_DIRECTION * directions} queries to fit on, but {said} "
                       f"{most}: give more with --n, or ask for fewer --directions.")  # fmt: skip
