"""Who wrote what a head matched on: of a task, of texts, or of one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli import shell
from qkscope.errors import BadInput

Query = Annotated[int | None, typer.Option("--query", help="The token that asks, by place; the last one by default.")]
Key = Annotated[int | None, typer.Option("--key", help="The token attended to; the most attended but the first.")]


@shell.app.command()
def trace(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="A task, a .jsonl file, texts, or python (its help)."),
    ] = None,
    heads: Annotated[str, typer.Option("--heads", help="Heads like L18H6,L18H7, or all.")] = "all",
    prompt: Annotated[str | None, typer.Option("--prompt", help="One prompt instead; \\n is a line break.")] = None,
    query: Query = None,
    key: Key = None,
    versus: Annotated[int | None, typer.Option("--versus", help="The token to compare with; all others.")] = None,
    depth: Annotated[int, typer.Option("--depth", help="Levels of the graph of a prompt.")] = 2,
    feature: Annotated[str | None, typer.Option("--feature", help="DIR:CONTRAST: look inside this feature.")] = None,
    dictionary: Annotated[
        Path | None, typer.Option("--dictionary", help="Features instead of writers: a SAELens folder or .safetensors.")
    ] = None,
    dictionary_layer: Annotated[
        int | None, typer.Option("--dictionary-layer", help="The layer it enters, where its file does not say.")
    ] = None,
    neurons: Annotated[bool, typer.Option("--neurons", help="Of a prompt, also the first ten neurons a side.")] = False,
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts for choosing, and for testing; or texts.")] = 128,
    whole: Annotated[bool, typer.Option("--whole/--no-whole", help="Also take whole heads out of the model.")] = True,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the results and the page.")] = None,
    model: shell.Model = "smollm2-135m",
    form: shell.Form = "list",
    size: shell.Size = None,
    seed: shell.Seed = 0,
    chat: shell.Chat = False,
    batch_size: shell.BatchSize = 32,
    shard: Annotated[str | None, typer.Option("--shard", help="i/n: this share of the test; then merge.")] = None,
    device: shell.Device = None,
    dtype: shell.Dtype = None,
    everything: shell.All = False,
    as_json: shell.Json = False,
) -> None:
    """Split what a head matched on among those who wrote its query and its key; cut and keep them.

    A run that died goes on where it stopped.
    """
    if (prompt is None) == (not sources):
        raise BadInput("name a task or text files, or one prompt with --prompt, and not both.")
    one = {"query": query, "key": key, "versus": versus}
    if prompt is None and any(value is not None for value in one.values()):
        raise BadInput("--query, --key and --versus are for one prompt: name it with --prompt.")
    if neurons and (prompt is None or dictionary is not None):
        raise BadInput("--neurons is for one prompt without a dictionary: name it with --prompt.")
    if n < 1 or depth < 0:
        raise BadInput(f"--n is at least 1, but got {n}." if n < 1 else f"--depth is at least 0, but got {depth}.")
    if prompt is not None and heads == "all":
        raise BadInput(
            "a prompt is traced at heads that are named: say --heads L18H6, or ask which matter: qkscope why."
        )
    _check_heads(heads, feature)
    what = _what(sources or [], prompt, form, size, seed, chat)
    features = _dictionary(dictionary, dictionary_layer, heads)
    from qkscope.analyses.trace.trace import trace as run
    from qkscope.runs.shards import parse_shard
    from qkscope.tasks.task import Task

    share = (0, 1) if shard is None else parse_shard(shard)
    if shard is not None and (out is None or heads == "all" or not isinstance(what, Task)):
        raise BadInput("--shard is for a task and heads that are named, and leaves its part in a folder: name it all.")
    shell.check_out(out, "trace")
    scope = shell.load_scope(model, device, dtype)
    asked: Any = {"depth": depth, "whole": whole, "batch_size": batch_size, "seed": seed, "shard": share}
    if prompt is not None:
        asked |= {**one, "chat": chat, "neurons": neurons}
    if feature is not None:
        asked["feature"] = _feature(feature, heads, scope)
    if features is not None:
        asked["dictionary"] = features
    shell.run_job(lambda job: run(scope, what, heads, n, job=job, **asked), out, as_json, everything)
    if out is not None and not as_json:
        shell.print_end(out, then="qkscope merge SHARDS... --out DIR" if shard else shell.command("view", out))
    elif prompt is not None and not as_json:
        same: Any = {**one, "depth": depth, "feature": feature, "dictionary": dictionary, "model": model}
        same |= {"dictionary_layer": dictionary_layer, "neurons": neurons, "seed": seed, "chat": chat}
        same |= {"device": device, "dtype": dtype}
        shell.print_end(then=shell.command("trace", prompt=prompt, heads=heads, **same, out="runs/trace"))


def _check_heads(heads: str, feature: str | None) -> None:
    """What can be known of heads and a feature before a model is loaded."""
    from qkscope.analyses.fit_folder import read_job
    from qkscope.analyses.trace.trace import check_layers
    from qkscope.heads import parse_heads

    parsed = [] if heads == "all" else parse_heads(heads)
    check_layers(parsed)
    if feature is None:
        return
    folder, _, contrast = feature.rpartition(":")
    if not folder:
        raise BadInput(f"--feature is DIR:CONTRAST, as runs/binding:lexical, but got {feature!r}.")
    job = read_job(folder)
    if len(parsed) != 1 or str(parsed[0]) not in job["heads"]:
        raise BadInput(f"a feature is of one head, and {folder} has {', '.join(job['heads'])}: name one with --heads.")
    if contrast not in job["contrasts"]:
        raise BadInput(f"{folder} has no contrast {contrast!r}: it has {', '.join(job['contrasts'])}.")


def _dictionary(path: Path | None, layer: int | None, heads: str) -> Any:
    """Read before a model is loaded: a file that is none is said at once."""
    if path is None:
        if layer is not None:
            raise BadInput("--dictionary-layer says where a dictionary stands: name it with --dictionary.")
        return None
    if heads == "all":
        raise BadInput("a dictionary is for heads that are named: say --heads L18H6.")
    if layer is not None and layer < 0:
        raise BadInput(f"--dictionary-layer is at least 0, but got {layer}.")
    from qkscope.maths.dictionaries import Dictionary

    return Dictionary.load(path, layer=layer)


def _what(sources: list[str], prompt: str | None, form: str, size: int | None, seed: int, chat: bool) -> Any:
    from qkscope.cli.discovery import is_task, texts_of

    if prompt is not None:
        if not prompt:
            raise BadInput("the prompt is empty: give at least one character.")
        return prompt.replace("\\n", "\n")
    if len(sources) == 1 and is_task(sources[0]):
        return shell.make_task(sources[0], form, size, seed, chat)
    return texts_of(sources)


def _feature(named: str, heads: str, scope: Any) -> Any:
    from qkscope.analyses.fit import load

    folder, _, contrast = named.rpartition(":")
    return load(folder, scope)[contrast, heads]
