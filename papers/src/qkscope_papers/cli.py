"""The verbs of the papers, which join `qkscope`'s own by the entry point ``qkscope.commands``.

Nothing heavy is imported until a verb runs: ``qkscope --help`` loads this file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli import All, Json, command, print_end, print_json, print_result
from qkscope.cli.views import MORE_TABLES
from qkscope.errors import BadInput
from qkscope.results.result import Result
from qkscope.results.tables import read_tables

logging.getLogger("qkscope_papers").setLevel(
    logging.INFO
)  # as the command line does for its own lines

app = typer.Typer()
PANEL = "Papers (qkscope-papers)"
toy = typer.Typer(help="Train toy models with known features.", no_args_is_help=True)
app.add_typer(toy, name="toy", rich_help_panel=PANEL)
train = typer.Typer(help="Train small language models on the tasks' texts.", no_args_is_help=True)
app.add_typer(train, name="train", rich_help_panel=PANEL)

Out = Annotated[Path, typer.Option("--out", help="Folder for the results and the page.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every draw.")]
TrainDevice = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Workers = Annotated[
    int | None, typer.Option("--workers", help="CPU threads; all cores by default.")
]
HeadWidth = Annotated[int, typer.Option("--d-head", help="Width of the head.")]


def print_rows(
    verb: str, rows: Sequence[Any], answer: str, as_json: bool, everything: bool = False
) -> None:
    """Print what a verb gives that has rows alone; as JSON ``{"rows": [...]}``."""
    if as_json:
        print_json({"rows": list(rows)})
    else:
        print_result(Result(verb, {"rows": rows}, answer=answer), False, everything)


@app.command(rich_help_panel=PANEL)
def models(everything: All = False, as_json: Json = False) -> None:
    """Check, live, which model families can be looked into."""
    from qkscope_papers.models import list_families, says_families

    rows = list_families()
    print_rows("models", rows, says_families(rows), as_json, everything)
    print_end(then=command("heads", "induction", model="FOLDER"), as_json=as_json)


@app.command(rich_help_panel=PANEL)
def bench(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run this row alone; may be repeated.")
    ] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Measure every ratio we claim, each against the plain way of doing the same work, in the same
    run.
    """
    from qkscope_bench.harness import bench as run_bench

    rows = run_bench(only)
    print_rows(
        "bench",
        rows,
        f"Of {len(rows)}, the ratio of two ways to do the same work.",
        as_json,
        everything,
    )


@app.command(rich_help_panel=PANEL)
def reproduce(
    paper: Annotated[
        str, typer.Argument(help="lee2026, franco2026, known (compiled programs), or all.")
    ] = "",
    figures: Annotated[list[str] | None, typer.Argument(help="Figure ids, or all.")] = None,
    preset: Annotated[str, typer.Option("--preset", help="smoke, default or paper.")] = "default",
    out: Out = Path("runs"),
    seed: Seed = 0,
    device: Annotated[
        str, typer.Option("--device", help="Where models run and toys train: cpu or cuda.")
    ] = "cpu",
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Hub id, folder, nano:NAME; by default smollm2-135m or a nano."
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            help="ioi, single or text (franco2026 fig7b, 8, 9, 25); as-written (lee2026 fig2, 11).",
        ),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("-n", help="Prompts of each kind (lee2026, language models); the preset's."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Run also what is finished in OUT.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say which figures there are.")] = False,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Reproduce figures of the papers, each beside its controls; one folder OUT/PAPER/FIGURE each.

    The same command again resumes: finished figures are read, not run.
    """
    from qkscope.results.claims import count_claims
    from qkscope_papers.registry import PAPERS, list_experiments
    from qkscope_papers.registry import reproduce as run_reproduce

    if listed:
        rows = list_experiments()
        named = {
            name: ", ".join(row["figure"] for row in rows if row["paper"] == name)
            for name in PAPERS
        }
        answer = "\n".join(f"{name}: {figures}." for name, figures in named.items())
        print_rows("list", rows, answer, as_json, everything)
        print_end(
            then=command("reproduce", rows[0]["paper"], rows[0]["figure"], preset="smoke"),
            as_json=as_json,
        )
        return
    wanted = (
        {name: ["all"] for name in PAPERS}
        if paper == "all" and not figures
        else {paper: figures or []}
    )
    results: list[Any] = []

    def show(result: Any) -> None:
        results.append(result)
        if not as_json:
            said = f"{result.experiment}: {result.answer} {count_claims(result.claims)}."
            print_result(replace(result, answer=said), as_json, everything)

    try:
        for name, chosen in wanted.items():
            asked: Any = {"model": model, "prompts": prompts, "n": n}
            asked |= {"again": again, "show": show}
            done = run_reproduce(
                name, chosen, preset=preset, out=out, seed=seed, device=device, **asked
            )
            folders = [out / result.experiment for result in done.values()]
            print_end(*folders, then=command("view", folders[-1]), as_json=as_json)
    finally:  # also of what is done when it is stopped
        if as_json and results:
            print_json({"results": [result.to_json() for result in results]})


@toy.command("retrieval")
def toy_retrieval(
    out: Out = Path("runs/toy"),
    grids: Annotated[
        str | None, typer.Option("--grids", help="all, or one as discrete-8; else --ranks.")
    ] = None,
    ranks: Annotated[
        str, typer.Option("--ranks", help="Ranks of the latents of one cell.")
    ] = "3,5",
    variant: Annotated[str, typer.Option("--variant", help="discrete or continuous.")] = "discrete",
    d_head: HeadWidth = 16,
    seeds: Annotated[
        int, typer.Option("--seeds", help="Heads per cell, each with encoders and data of its own.")
    ] = 1,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 1e-4,
    steps: Annotated[int, typer.Option("--steps", help="At most this many steps.")] = 50_000,
    as_written: Annotated[
        bool, typer.Option("--as-written", help="Scales and noise as the paper's text.")
    ] = False,
    device: TrainDevice = "cpu",
    workers: Workers = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Train heads on payload retrieval, many at once; the same command resumes a stopped run."""
    from qkscope_papers.lee2026.toy.train import train_retrieval

    options: Any = {"grids": grids, "variant": variant, "d_head": d_head, "as_written": as_written}
    options |= {"seeds": seeds, "lr": lr, "steps": steps, "device": device, "workers": workers}
    options |= {"show": partial(print_result, as_json=as_json, everything=everything)}
    train_retrieval(out, ranks=_numbers("--ranks", ranks, int), **options)
    print_end(out, then=command("reproduce", "lee2026", "fig2", preset="smoke"), as_json=as_json)


def _numbers(option: str, text: str, kind: type = float) -> list[Any]:
    called, example = ("whole numbers", "3,5") if kind is int else ("numbers", "0.52,0.27")
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(
            f"{option} takes {called} with commas between, as {example}, but got {text!r}."
        ) from None


@train.command("nano")
def nano(
    out: Out = Path("runs/nano"),
    preset: Annotated[
        str, typer.Option("--preset", help="default, or smoke (brief, learns little).")
    ] = "default",
    steps: Annotated[
        int | None, typer.Option("--steps", help="Training steps; the preset's by default.")
    ] = None,
    seed: Seed = 0,
    device: TrainDevice = "cpu",
    check_every: Annotated[
        int | None,
        typer.Option("--check-every", help="Steps between checkpoints; the preset's by default."),
    ] = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Learning rate; the preset's by default.")
    ] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Train a small Llama, keeping every checkpoint as OUT/STEP; the same command again resumes a
    stopped run.
    """
    from qkscope_papers.nano.train import train_nano

    options: Any = {"preset": preset, "steps": steps, "check_every": check_every, "lr": lr}
    show = partial(print_result, as_json=as_json, everything=everything)
    train_nano(out, seed=seed, device=device, show=show, **options)
    print_end(
        out,
        then=command("sparsity", "ioi", model=out, revisions="all", out="runs/ioi"),
        as_json=as_json,
    )


@toy.command("superposition")
def toy_superposition(
    out: Out = Path("runs/toy"),
    n: Annotated[int, typer.Option("--n", help="Features.")] = 20,
    d: Annotated[int, typer.Option("--d", help="Dimensions of a token.")] = 10,
    d_head: HeadWidth = 10,
    context: Annotated[int, typer.Option("--context", help="Keys per query.")] = 4,
    p: Annotated[
        str,
        typer.Option("--p", help="Probability of a feature; several with commas, side by side."),
    ] = "0.52",
    weight: Annotated[
        str, typer.Option("--weight", help="λ of the loss; several with commas, side by side.")
    ] = "4",
    pairs: Annotated[
        str, typer.Option("--pairs", help="Pairs of interest: query-key:logit.")
    ] = "0-4:24,1-5:21,2-6:18,3-7:15",
    reading: Annotated[
        str, typer.Option("--reading", help="C (λ on the head's loss) or B (on the other).")
    ] = "C",
    rope: Annotated[
        bool, typer.Option("--rope", help="Rotate queries and keys by their positions.")
    ] = False,
    seeds: Annotated[
        int, typer.Option("--seeds", help="Toys of each kind, each with its own start and data.")
    ] = 1,
    steps: Annotated[int, typer.Option("--steps", help="Steps of training.")] = 20_000,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate, decaying as a cosine.")] = 1e-3,
    every: Annotated[int, typer.Option("--every", help="Steps between kept checkpoints.")] = 200,
    device: TrainDevice = "cpu",
    workers: Workers = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Train features in superposition with a head that looks for pairs of them; say how its
    singular vectors align.
    """
    from qkscope_papers.franco2026.toy.train import parse_pairs, train_superposition

    options: Any = {"n": n, "d": d, "d_head": d_head, "context": context, "reading": reading}
    options |= {"rope": rope, "seeds": seeds, "steps": steps, "lr": lr, "every": every}
    options |= {
        "p": _numbers("--p", p),
        "weight": _numbers("--weight", weight),
        "pairs": parse_pairs(pairs),
    }
    options |= {"show": partial(print_result, as_json=as_json, everything=everything)}
    train_superposition(out, **options, device=device, workers=workers)
    print_end(out, then=command("reproduce", "franco2026", "fig2", preset="smoke"), as_json=as_json)


MORE_TABLES.update(read_tables(Path(__file__).with_name("views.toml")))
