"""The question itself: why did this head attend to that token of this prompt?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli import shell
from qkscope.errors import BadInput

Prompt = Annotated[str, typer.Argument(help="The prompt; \\n is a line break.")]


@shell.app.command()
def why(
    prompt: Prompt,
    head: Annotated[str | None, typer.Option("--head", help="Like L18H6; without it, the heads that matter.")] = None,
    query: Annotated[int | None, typer.Option("--query", help="The token that asks, by place; the last one.")] = None,
    key: Annotated[int | None, typer.Option("--key", help="The token attended to; the most attended.")] = None,
    model: shell.Model = "smollm2-135m",
    fit: Annotated[Path | None, typer.Option("--fit", help="Also split by the features of this folder.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the results and the page.")] = None,
    seed: shell.Seed = 0,
    chat: shell.Chat = False,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Say why a head attended to a token: where it looks, what matched, who wrote it, is it so, what it does."""
    text = prompt.replace("\\n", "\n")
    if not text:
        raise BadInput("the prompt is empty: give at least one character.")
    from qkscope.analyses.why.why import why as run
    from qkscope.heads import Head
    from qkscope.runs.folder import check_folder

    if head is not None:
        Head.parse(head)
    if out is not None:
        check_folder(out, "why")
    scope = shell.load_scope(model, device, dtype)
    options: Any = {"chat": chat, "seed": seed}
    if fit is not None:
        from qkscope.analyses.fit import load

        options["features"] = load(fit, scope)
    found = run(scope, text, head, query, key, **options)
    if as_json:
        shell.print_json(found.to_json())
    else:
        shell.say(str(found))
        if everything:
            shell.print_tables("why", found.tables, everything)
    if out is not None:
        from qkscope.page.report import report_html

        found.write(out, files={"report.html": report_html([found])})
    if not as_json:
        asked = {"model": model, "device": device, "dtype": dtype}
        if head is None:
            then = shell.command("why", prompt, head=found.tables["heads"][0]["head"], query=query, **asked)
        else:
            then = shell.command("trace", prompt=prompt, heads=head, query=query, key=key, **asked)
        shell.print_end(out, then=then)
