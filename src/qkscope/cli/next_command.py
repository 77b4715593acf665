"""The next command: what to type after a command, from what was typed and what it answered."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qkscope.cli.declarations import COMMANDS
from qkscope.results.result import Result

PROMPT = "hat: O\njam: Z\ncat: B\npen: K\njam:"
"""A prompt to begin with."""

_OF_MODEL = ("model", "device", "dtype")

Typed = Mapping[str, Any]
"""What was typed, by the name of its option."""


def command(verb: str, *arguments: object, **options: object) -> str:
    """Write a command to type: its arguments, and options that the verb has and are no defaults.

    Of a verb that another distribution brings, every option is written.

    >>> command("decompose", "binding", heads="L18H6", out="my runs", seed=1, key=3)
    "qkscope decompose binding --heads L18H6 --out 'my runs' --seed 1"
    """
    declared = COMMANDS.get(verb)
    known = {}
    if declared is not None:
        known = {option.name: option for option in declared.options}
    words = ["qkscope", verb, *map(str, arguments)]
    for name, value in options.items():
        if value is None or value is False:
            continue
        values = value if isinstance(value, list) else [value]
        texts = [str(each) for each in values]
        if declared is None:
            words += [f"--{name}", ",".join(texts)]
        elif name in known and value != known[name].default:
            option = known[name]
            if option.argument:
                words += texts
            elif value is True:
                words.append(option.flag)
            else:
                words += [option.flag, ",".join(texts)]
    return shlex.join(word.replace("\n", "\\n") for word in words)


def next_command(verb: str, typed: Typed, result: Result) -> str:
    """Say what to type after a verb: what `NEXT` says, its page, or the same into a folder."""
    if verb in NEXT:
        return NEXT[verb](typed, result)
    place = typed.get("out") or typed.get("fit") or typed.get("folder")
    if place:
        return command("view", place)
    return command(verb, **{**typed, "out": f"runs/{verb}"})


def _chosen(typed: Typed, *names: str) -> dict[str, Any]:
    """These of the typed values."""
    return {name: typed.get(name) for name in names}


# ---------------------------------------------------------------------- after why


def _after_why(typed: Typed, result: Result) -> str:
    """Ask about the first head, the head that carried the words, or trace this one."""
    if typed["fit"]:
        return command("view", live=True, fit=typed["fit"])
    if result.experiment == "why/prompts":
        return _after_prompts(typed, result)
    if result.experiment == "why/pairs":
        first = result.tables["pairs"][0]
        asked = {"answer": first["answer"], "versus": first["rival"]}
        return command("why", first["said"], **asked, **_chosen(typed, "chat", *_OF_MODEL))
    same = _chosen(typed, "prompt", "query", "chat", "versus", "answer", "corrupted", *_OF_MODEL)
    if "heads" in result.tables:
        return command("why", **same, head=result.tables["heads"][0]["head"])
    if result.experiment == "why/circuit":
        return command("why", **same, head=_first_head_of_paths(result))
    carrier = _carrier(result)
    if carrier:
        name, side = carrier
        if side == "key":  # it wrote at the key: ask why it looked from there
            same["query"] = result.tables["output"][0]["key"]
        return command("why", **{**same, "head": name})
    head = typed["head"] or typed["heads"][0]
    if head.layer == 0:  # the embedding alone writes there: nothing to trace
        return command("why", **same)
    for name in ("versus", "answer", "corrupted"):  # of the next token; in trace, of the key
        del same[name]
    return command("trace", **same, heads=head, key=typed["key"])


def _first_head_of_paths(result: Result) -> str | None:
    """The first head on the paths of a circuit; None where only MLPs are on them."""
    for row in result.tables.get("paths", ()):
        if "H" in row["node"]:
            return str(row["node"])
    return None


def _carrier(result: Result) -> tuple[str, str] | None:
    """The first head that was shown to carry the words, and into which side; None without one."""
    for row in result.tables.get("carriers", ()):
        if row["verdict"] == "shown":
            for name in row["writers"].split(", "):
                if "H" in name:
                    return name, row["side"]
    return None


def _after_path_patch(typed: Typed, result: Result) -> str:
    """Ask about the first head that sends; about the receiver, where none does."""
    senders = [row["sender"] for row in result.tables["paths"] if "H" in row["sender"]]
    head = senders[0] if senders else typed["receiver"]
    return command("why", typed["prompt"], head=head, **_chosen(typed, "query", "chat", *_OF_MODEL))


def _after_prompts(typed: Typed, result: Result) -> str:
    """Ask about the strongest look; where no head was named, about the heads that decide most."""
    same = _chosen(typed, "chat", *_OF_MODEL)
    if "decides" in result.tables:
        first = [row["head"] for row in result.tables["decides"][:2]]
        return command("why", typed["prompt"], heads=",".join(first), **same)
    strongest = max(result.tables["prompts"], key=lambda row: float(row["attention"]))
    prompt = result.tables["answers"][strongest["prompt"]]["said"]
    return command("why", prompt, head=strongest["head"], **same)


# ---------------------------------------------------------------------- after other verbs


def _after_heads(typed: Typed, result: Result) -> str:
    """Decompose the first heads; where none does the task, try its other form, or the atlas."""
    task = typed["task"]
    reaching = [row["head"] for row in result.table() if row["reaches"]]
    heads = reaching[:2]
    same = _chosen(typed, *_OF_MODEL, "form", "size", "seed", "chat")
    if heads:
        out = Path("runs") / Path(task).stem
        return command("decompose", task, heads=",".join(heads), out=out, **same)
    if task == "binding":
        same["form"] = "sentence" if same["form"] in (None, "list") else None
        return command("heads", "binding", **same)
    return command("atlas", **_chosen(typed, *_OF_MODEL))


def _after_decompose(typed: Typed, result: Result) -> str:
    """Test the features causally."""
    return command("swap", typed["out"], **_chosen(typed, "device", "dtype"))


def _after_atlas(typed: Typed, result: Result) -> str:
    """Ask why of the strongest look of a head, induction heads first."""
    kinds = {row["head"]: row["kind"] for row in result.tables["heads"]}
    looks = result.tables["examples"]
    if not looks:
        return command("view", typed["out"])
    induction = [row for row in looks if kinds[row["head"]] == "induction"]
    strongest = max(induction or looks, key=lambda row: float(row["attention"]))
    text = "".join(strongest["tokens"][: strongest["query"] + 1])
    return command("why", text, head=strongest["head"], **_chosen(typed, *_OF_MODEL))


def _after_demo(typed: Typed, result: Result) -> str:
    """Ask why of a prompt."""
    return command("why", PROMPT)


def _after_svd(typed: Typed, result: Result) -> str:
    """Measure how few singular vectors carry a head's attention."""
    return command("sparsity", "ioi", out="runs/ioi", **_chosen(typed, *_OF_MODEL))


NEXT: dict[str, Callable[[Typed, Result], str]] = {
    "why": _after_why,
    "path_patch": _after_path_patch,
    "heads": _after_heads,
    "decompose": _after_decompose,
    "atlas": _after_atlas,
    "demo": _after_demo,
    "svd": _after_svd,
}
