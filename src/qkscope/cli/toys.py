"""Toys: train models with known features."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli.shell import (
    All,
    HeadWidth,
    Json,
    Out,
    Seed,
    TrainDevice,
    Workers,
    app,
    command,
    print_end,
    print_result,
)
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
    d_head: HeadWidth = 16,
    seeds: Annotated[int, typer.Option("--seeds", help="Heads per cell, each with encoders and data of its own.")] = 1,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 1e-4,
    steps: Annotated[int, typer.Option("--steps", help="At most this many steps.")] = 50_000,
    as_written: Annotated[bool, typer.Option("--as-written", help="Scales and noise as the paper's text.")] = False,
    device: TrainDevice = "cpu",
    workers: Workers = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Train heads on payload retrieval, many at once; stop it and say the same again, and it goes on."""
    from qkscope.papers.lee2026.toy.train import train_retrieval

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
        raise BadInput(f"{option} takes {called} with commas between, as {example}, but got {text!r}.") from None


@train.command("nano")
def nano(
    out: Out = Path("runs/nano"),
    preset: Annotated[str, typer.Option("--preset", help="default, or smoke (brief, learns little).")] = "default",
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps; the preset's by default.")] = None,
    seed: Seed = 0,
    device: TrainDevice = "cpu",
    check_every: Annotated[
        int | None, typer.Option("--check-every", help="Steps between checkpoints; the preset's by default.")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; the preset's by default.")] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Train a small Llama, keeping every checkpoint as OUT/STEP; stop it and say the same again, and it goes on."""
    from qkscope.nano.train import train_nano
    from qkscope.page.figures import draw_nano

    options: Any = {"preset": preset, "steps": steps, "check_every": check_every, "lr": lr}
    show = partial(print_result, as_json=as_json, everything=everything)
    train_nano(out, seed=seed, device=device, show=show, draw=draw_nano, **options)
    print_end(out, then=command("sparsity", "ioi", model=out, revisions="all", out="runs/ioi"), as_json=as_json)


@toy.command("superposition")
def toy_superposition(
    out: Out = Path("runs/toy"),
    n: Annotated[int, typer.Option("--n", help="Features.")] = 20,
    d: Annotated[int, typer.Option("--d", help="Dimensions of a token.")] = 10,
    d_head: HeadWidth = 10,
    context: Annotated[int, typer.Option("--context", help="Keys per query.")] = 4,
    p: Annotated[
        str, typer.Option("--p", help="Probability of a feature; several with commas, side by side.")
    ] = "0.52",
    weight: Annotated[str, typer.Option("--weight", help="λ of the loss; several with commas, side by side.")] = "4",
    pairs: Annotated[
        str, typer.Option("--pairs", help="Pairs of interest: query-key:logit.")
    ] = "0-4:24,1-5:21,2-6:18,3-7:15",
    target: Annotated[Path | None, typer.Option("--target", help="The whole matrix M in a JSON file instead.")] = None,
    reading: Annotated[str, typer.Option("--reading", help="C (λ on the head's loss) or B (on the other).")] = "C",
    rope: Annotated[bool, typer.Option("--rope", help="Rotate queries and keys by their positions.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", help="Toys of each kind, each with its own start and data.")] = 1,
    steps: Annotated[int, typer.Option("--steps", help="Steps of training.")] = 20_000,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate, decaying as a cosine.")] = 1e-3,
    every: Annotated[int, typer.Option("--every", help="Steps between kept checkpoints.")] = 200,
    device: TrainDevice = "cpu",
    workers: Workers = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Train features in superposition with a head that looks for pairs of them; say how its singular vectors align."""
    from qkscope.papers.franco2026.toy.train import parse_pairs, train_superposition

    options: Any = {"n": n, "d": d, "d_head": d_head, "context": context, "target": target, "reading": reading}
    options |= {"rope": rope, "seeds": seeds, "steps": steps, "lr": lr, "every": every}
    options |= {"p": _numbers("--p", p), "weight": _numbers("--weight", weight), "pairs": parse_pairs(pairs)}
    options |= {"show": partial(print_result, as_json=as_json, everything=everything)}
    train_superposition(out, **options, device=device, workers=workers)
    print_end(out, then=command("reproduce", "franco2026", "fig2", preset="smoke"), as_json=as_json)
