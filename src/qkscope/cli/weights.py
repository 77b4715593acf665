"""Features from the weights alone: singular vectors of heads, and how few of them carry the attention."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli import shell
from qkscope.errors import BadInput


@shell.app.command()
def svd(
    model: shell.Model = "smollm2-135m",
    heads: Annotated[str | None, typer.Option("--heads", help="Heads like L18H6,L18H7; all.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="A .safetensors file for the singular vectors.")] = None,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Singular vectors of every head's QK matrix, from thin factors of the weights; multiplied out before believed."""
    from qkscope.heads import parse_heads

    chosen = None if heads is None else parse_heads(heads)
    if out is not None and (out.is_dir() or out.suffix != ".safetensors"):
        raise BadInput(f"{out} should be a file that ends in .safetensors.")
    if out is not None:
        from qkscope.runs.folder import check_writable
        from qkscope.runs.store import check_replaceable

        check_replaceable(out, "singular_basis")
        check_writable(out.absolute().parent)
    from qkscope.analyses.relative import singular_basis

    basis = singular_basis(shell.load_scope(model, device, dtype), chosen)
    rows = basis.table()
    ranks = [row["effective_rank"] for row in rows]
    answer = (
        f"The QK matrices of {len(rows)} heads have {min(ranks):.1f} to {max(ranks):.1f} effective dimensions."
        if len(rows) > 1
        else f"The QK matrix of {rows[0]['head']} has {ranks[0]:.1f} effective dimensions."
    )
    shell.print_rows("svd", rows, answer, as_json, everything)
    if out is not None:
        basis.save(out)
    if not as_json:
        then = shell.command("sparsity", "ioi", out="runs/ioi", model=model, device=device, dtype=dtype)
        shell.print_end(out, then=then)


@shell.app.command()
def sparsity(
    task: shell.TaskName,
    out: shell.Out,
    model: shell.Model = "smollm2-135m",
    revisions: Annotated[
        str | None, typer.Option("--revisions", help="Checkpoints like step1000,step2000; all, of a nano or a folder.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option("--heads", help="Like L9H9:END>IO,L5H5:S2>S1+1, or gpt2; published, or found.")
    ] = None,
    n: shell.Count = 128,
    form: shell.Form = "list",
    size: shell.Size = None,
    seed: shell.Seed = 0,
    chat: shell.Chat = False,
    controls: Annotated[int, typer.Option("--controls", help="Heads outside the circuit for each way to look.")] = 12,
    draws: Annotated[int, typer.Option("--draws", help="Rotations of each null.")] = 20,
    batch_size: shell.BatchSize = 32,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """How few singular vectors carry the attention of a circuit's heads, at one checkpoint or over training."""
    from qkscope.analyses.sweep import sweep

    made = shell.make_task(task, form, size, seed, chat)
    options: Any = {"controls": controls, "draws": draws, "seed": seed, "batch_size": batch_size, "device": device}
    show = partial(shell.print_result, as_json=as_json, everything=everything)
    sweep(model, made, revisions, heads, n, out=out, dtype=dtype, show=show, **options)
    shell.print_end(out, then=shell.command("view", out), as_json=as_json)
