"""What runs left: a page, opened, or many as one site; and what made them. Or look into a model live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli.shell import Json, app, command, print_end, print_json, say


@app.command()
def view(
    folder: Annotated[Path | None, typer.Argument(help="A run folder, as demo, decompose or reproduce write.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Look into a model: ask why of any token, cut, swap, hide.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", help="With --live: hub id, folder, .gguf file, smollm2-135m or gemma3-270m."),
    ] = None,
    fit: Annotated[
        Path | None, typer.Option("--fit", help="With --live: what decompose, discover or atlas wrote.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="With --live: a fixed port; any free one by default.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
) -> None:
    """Open the page of a run folder, or the live page (stop it with Ctrl-C)."""
    from qkscope.explorer.opening import view as open_view

    open_view(folder, live=live, model=model, fit=fit, port=port, browser=not no_browser, say=typer.echo)


@app.command()
def gallery(
    folders: Annotated[list[Path], typer.Argument(help="Runs, or folders with runs in them.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the site.")],
    title: Annotated[str, typer.Option("--title", help="What to call it.")] = "",
    as_json: Json = False,
) -> None:
    """Make one offline site of many runs: an index of answers, heads and claims, and every run's page.

    A run that is not finished is left out, and said so.
    """
    from qkscope.page.gallery import write_gallery
    from qkscope.runs.result import Result

    index = write_gallery(out, *folders, title=title)
    result = Result.read(out)
    if as_json:
        print_json(result.to_json())
        return
    size = sum(path.stat().st_size for path in (index, *out.glob("runs/*.html")))
    say(f"{result.answer} {size / 1e6:.1f} MB.")
    print_end(index, then=command("view", out))


@app.command()
def made(
    path: Annotated[Path, typer.Argument(help="A run folder, or a .safetensors file of ours.")],
    check: Annotated[bool, typer.Option("--check", help="Also load the model and compare its weights.")] = False,
    as_json: Json = False,
) -> None:
    """Say what made a run: the command to say again, model, seed and versions, and whether they are the same here."""
    from qkscope.runs.provenance import made as say_made

    def load(model: str, revision: str | None) -> Any:
        from qkscope.capture.scope import Scope

        return Scope.load(model, revision=revision)

    rows = say_made(path, load=load if check else None)
    if as_json:
        print_json({"rows": rows})
        return
    for row in rows:
        if row["what"] != "command":
            say(f"{row['what']}: {_short(row['there'])}")
        elif _takes(row["there"]):
            say(f"command: {row['there']}")
        else:
            say("command: none that qkscope takes, so that it is not shown")
    differs = [f"{row['what']} {_short(row['here'])}" for row in rows if row["same"] is False]
    say(f"Here it is otherwise: {', '.join(differs)}." if differs else "What can be compared is the same here.")


def _takes(command: str) -> bool:
    """Whether our command line knows the verb of this and every option; what a folder says may be pasted."""
    import re
    import shlex

    from typer.main import get_command

    words, verb = shlex.split(command)[1:], get_command(app)
    while words and words[0] in getattr(verb, "commands", {}):
        verb = verb.commands[words.pop(0)]  # type: ignore[attr-defined]
    known = {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.partition("=")[0] for word in words if re.match(r"-\D", word)]
    return not hasattr(verb, "commands") and known.issuperset(options)


def _short(value: object, limit: int = 100) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"
