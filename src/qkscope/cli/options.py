"""What a command is declared as, and the options that several commands share.

A `Command` names a function, its help, and its `Option` objects in the order of the help. An option
of the same name as a parameter of the function fills that parameter. Every other parameter is made
from what was typed by a function of `qkscope.cli.arguments` (``made``), or is for Python alone
(``python``). Nothing here waits for torch, and a test holds every declaration against the function.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from qkscope.examples import Example
from qkscope.heads import Head, parse_heads

DEFAULT_MODEL = "smollm2-135m"
PYTHON = "python"  # the name of Python's own texts: its help topics, English without a download
TASKS = "binding, filter, ioi, induction, greater_than, pronoun, or a .jsonl file"
NEEDED: Any = inspect.Parameter.empty
"""The default of an option that has to be typed."""

TypedValues = dict[str, Any]
"""What was typed, by the name of its option."""


@dataclass(frozen=True)
class Option:
    """An option or an argument of a command.

    Parameters
    ----------
    name : as Python has it: ``batch_size`` is typed ``--batch-size``.
    kind : the type of its value.
    help : one sentence or two.
    default : where nothing is typed.
    flags : how it is typed, where ``--name`` is not all.
    read : turns the typed text into the value.
    argument : whether it is typed without a name.
    metavar : stands for the value in the help, in the place of its type.
    shown_default : stands for the default in the help.
    """

    name: str
    kind: Any
    help: str
    default: Any = None
    flags: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    argument: bool = False
    metavar: str | None = None
    shown_default: str | None = None

    @property
    def flag(self) -> str:
        """How it is typed: ``--batch-size``."""
        if self.flags:
            return self.flags[0]
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True)
class Command:
    """A command: the function it runs, its help, and what can be typed.

    Parameters
    ----------
    name : of the command.
    function : that is run, as ``module:name``; it is imported when the command runs.
    help : what the command does: a sentence, and further paragraphs.
    options : in the order of the help.
    made : by the name of a parameter, the function that makes its value from what was typed; they
        are called in this order.
    python : parameters that have no option.
    panel : of the help of ``qkscope``.
    """

    name: str
    function: str
    help: str
    options: tuple[Option, ...]
    made: Mapping[str, Callable[[TypedValues], Any]] = field(default_factory=dict)
    python: tuple[str, ...] = ()
    panel: str = "Commands"


# ---------------------------------------------------------------------- what a text is read as


def read_prompt(text: str) -> str:
    r"""A prompt in which ``\n`` breaks a line; an empty one is refused."""
    prompt = text.replace("\\n", "\n")
    Example(text=prompt)  # refuses an empty one
    return prompt


def read_heads(text: str) -> str | list[Head]:
    """Heads like ``L18H6,L17H5``, or ``all``."""
    return text if text == "all" else parse_heads(text)


def read_token(text: str) -> str | int:
    """A token by its place or by its text."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def read_names(text: str) -> list[str]:
    """Names between commas."""
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part]


def read_part(text: str) -> tuple[int, int]:
    """A part ``i/n`` of the work; the module that reads it waits for torch."""
    part: tuple[int, int] = import_module("qkscope.results.work").parse_part(text)
    return part


# ---------------------------------------------------------------------- options of many commands

argument = partial(Option, argument=True, default=NEEDED)

MODEL = Option(
    "model",
    str,
    "Hub id, folder, .gguf file, a name that fetch takes (smollm2-135m), or nano:mixed.",
    shown_default=DEFAULT_MODEL,
)
DEVICE = Option("device", str, "cpu, cuda, cuda:1, or auto: spread over all GPUs.")
DTYPE = Option("dtype", str, "float32, bfloat16, ...; as the weights are stored.")
OF_MODEL = (MODEL, DEVICE, DTYPE)

TASK = argument("task", str, f"{TASKS}.")
FORM = Option(
    "form",
    str,
    "list, sentence or question (binding); bullets or find (filter); ABBA, BABA or single (ioi).",
)
SIZE = Option("size", int, "Entities (binding), categories (filter) or words (induction).")
CENTER = Option("center", str, "Of a .jsonl file: none or query.")
SEED = Option("seed", int, "Seed of every draw.", default=0)
CHAT = Option(
    "chat", bool, "Put prompts into the model's chat template.", default=False, flags=("--chat",)
)
OF_TASK = (FORM, SIZE, CENTER, SEED, CHAT)

SOME = partial(Option, "n", int, flags=("--n", "-n"))
OUT = Option(
    "out",
    Path,
    "Folder for the result and its page, where a run that was stopped goes on; nothing is written "
    "by default.",
)
PART = Option(
    "part",
    str,
    "Make every N-th piece of the work, from the I-th on; all parts share --out, and the last adds "
    "them up.",
    read=read_part,
    metavar="I/N",
)
BATCH_SIZE = Option("batch_size", int, "Prompts run together.", default=32)
EVERYTHING = Option(
    "everything",
    bool,
    "Print every table with all its rows and columns.",
    default=False,
    flags=("--all",),
)
AS_JSON = Option(
    "as_json",
    bool,
    "Print the result as JSON instead of tables.",
    default=False,
    flags=("--json",),
)
PRINTED = (EVERYTHING, AS_JSON)
