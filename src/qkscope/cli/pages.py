"""Pages: open a run's, or look into a model live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.shell import app


@app.command()
def view(
    folder: Annotated[Path | None, typer.Argument(help="A run folder, as demo, decompose or reproduce write.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Look into a model: type prompts, split, swap.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="With --live: hub id, folder, .gguf file, or smollm2-135m.")
    ] = None,
    fit: Annotated[Path | None, typer.Option("--fit", help="With --live: features of a folder of decompose.")] = None,
    port: Annotated[int, typer.Option("--port", help="With --live: a fixed port; any free one by default.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
) -> None:
    """Open the page of a run folder, or the live page (stop it with Ctrl-C)."""
    from qkscope.explorer.opening import view as open_view

    open_view(folder, live=live, model=model, fit=fit, port=port, browser=not no_browser, say=typer.echo)
