"""Toys: train models with known features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.shell import Json, Out, Seed, app, print_json, print_table
from qkscope.errors import BadInput

toy = typer.Typer(help="Train toy models with known features.", no_args_is_help=True)
app.add_typer(toy, name="toy")
train = typer.Typer(help="Train small language models on the tasks' texts.", no_args_is_help=True)
app.add_typer(train, name="train")


@toy.command("retrieval")
def toy_retrieval(
    out: Out = Path("runs/toy"),
    grids: Annotated[str | None, typer.Option("--grids", help="all, or one as discrete-8; else --ranks.")] = None,
    ranks: Annotated[str, typer.Option("--ranks", help="Ranks of the latents of one cell.")] = "3,5",
    variant: Annotated[str, typer.Option("--variant", help="discrete or continuous.")] = "discrete",
    d_head: Annotated[int, typer.Option("--d-head", help="Width of the head.")] = 16,
    seeds: Annotated[int, typer.Option("--seeds", help="Heads per cell, each with encoders and data of its own.")] = 1,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 1e-4,
    steps: Annotated[int, typer.Option("--steps", help="At most this many steps.")] = 50_000,
    as_written: Annotated[bool, typer.Option("--as-written", help="Scales and noise as the paper's text.")] = False,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    workers: Annotated[int | None, typer.Option("--workers", help="CPU threads; all cores by default.")] = None,
    as_json: Json = False,
) -> None:
    """Train heads on payload retrieval, many at once; stop it and say the same again, and it goes on."""
    from qkscope.toys.retrieval_run import train_retrieval

    parts = ranks.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise BadInput(f"ranks are whole numbers with commas between, as 3,5, but got {ranks!r}.")
    result = train_retrieval(
        out, grids=grids, ranks=[int(part) for part in parts], variant=variant, d_head=d_head, seeds=seeds, lr=lr,  # type: ignore[arg-type]
        steps=steps, as_written=as_written, device=device, workers=workers,
    )  # fmt: skip
    if as_json:
        print_json(result.to_json())
        return
    print_table("heads", result.tables["heads"])
    typer.echo(result.answer)


@train.command("nano")
def nano(
    out: Out = Path("runs/nano"),
    preset: Annotated[str, typer.Option("--preset", help="default, or smoke (brief, learns little).")] = "default",
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps; the preset's by default.")] = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    check_every: Annotated[
        int | None, typer.Option("--check-every", help="Steps between checkpoints; the preset's by default.")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; the preset's by default.")] = None,
    as_json: Json = False,
) -> None:
    """Train a small Llama, keeping every checkpoint as OUT/STEP; stop it and say the same again, and it goes on."""
    from qkscope.page.figures.nano import draw
    from qkscope.toys.nano_run import last_rows, train_nano, write_beside

    result = train_nano(out, preset=preset, steps=steps, seed=seed, device=device, check_every=check_every, lr=lr)
    write_beside(result, out, draw(result))
    if as_json:
        print_json(result.to_json())
        return
    print_table("accuracy", last_rows(result))
    typer.echo(result.answer)
