"""The whole job, the papers, the families and the ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli.shell import Json, Out, Seed, app, print_json, print_result, print_rows, print_table, say


@app.command()
def demo(
    out: Out = Path("runs/demo"),
    n: Annotated[int, typer.Option("--n", help="Prompts for finding, fitting and testing, each.")] = 96,
    as_json: Json = False,
) -> None:
    """Run the main job on the embedded model: find heads, take them apart, test it causally, explain a prompt.

    It takes half a minute, so that nothing is kept of one that is stopped.
    """
    from qkscope.runs.folder import check_folder

    check_folder(out, "demo")
    from qkscope.cli.demo import demo as run_demo

    result, files = run_demo(n=n)
    print_result(result, as_json)
    if not as_json:
        print_table("claims", [claim.to_json() for claim in result.claims])
    result.write(out, files=files)
    if not as_json:
        typer.echo(f"The page: {out / 'report.html'}")


@app.command()
def models(as_json: Json = False) -> None:
    """Check, live, which model families can be looked into."""
    from qkscope.capture.families import list_families

    print_rows("families", list_families(), as_json)


@app.command()
def bench(
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this row alone; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Measure every ratio we claim, each against the plain way of doing the same work, in the same run."""
    from qkscope.bench.harness import bench as run_bench

    print_rows("bench", run_bench(only), as_json)


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="lee2026, franco2026, or all.")] = "",
    figures: Annotated[list[str] | None, typer.Argument(help="Figure ids, or all.")] = None,
    preset: Annotated[str, typer.Option("--preset", help="smoke, default or paper.")] = "default",
    out: Out = Path("runs"),
    seed: Seed = 0,
    device: Annotated[str, typer.Option("--device", help="Where models run and toys train: cpu or cuda.")] = "cpu",
    model: Annotated[
        str | None, typer.Option("--model", help="Hub id, folder, nano:NAME; by default smollm2-135m or a nano.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run also what is finished in OUT.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say which figures there are.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce figures of the papers, each beside its controls; one folder OUT/PAPER/FIGURE each.

    Stop it and say the same again: figures that are finished are read, not run.
    """
    from qkscope.papers.registry import PAPERS, list_experiments
    from qkscope.papers.registry import reproduce as run_reproduce

    if listed:
        print_rows("experiments", list_experiments(), as_json)
        return
    wanted = {name: ["all"] for name in PAPERS} if paper == "all" and not figures else {paper: figures or []}
    results: list[Any] = []

    def show(result: Any) -> None:
        results.append(result)
        if not as_json:
            say(f"{result.experiment}: {result.answer}")
            print_table("claims", [claim.to_json() for claim in result.claims])

    try:
        for name, chosen in wanted.items():
            done = run_reproduce(
                name, chosen, preset=preset, out=out, seed=seed, device=device, model=model, again=again, show=show
            )
            for result in [] if as_json else done.values():
                say(f"The page: {out / result.experiment / 'report.html'}")
    finally:  # also of what is done when it is stopped
        if as_json and results:
            print_json({"results": [result.to_json() for result in results]})
