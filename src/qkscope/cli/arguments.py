"""From what was typed to the arguments of a function.

What needs no model is checked before one is loaded: the scope that a function is given loads its
model when it is first used, so that the refusals of the function come first. Heavy modules are
imported when an argument is made, never for the help.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import qkscope as qk
from qkscope.cli.options import DEFAULT_MODEL, OF_TASK, PYTHON, TASKS, TypedValues
from qkscope.cli.printing import say
from qkscope.errors import BadInput
from qkscope.results.progress import doing

# ---------------------------------------------------------------------- the model


def model_name(values: TypedValues) -> str:
    """The name of the model."""
    return _model_typed(values) or DEFAULT_MODEL


def _model_typed(values: TypedValues) -> str | None:
    """The model that was named; an empty name is no model, and not the default one either."""
    name = values["model"]
    if name is not None and not name.strip():
        raise BadInput(f"--model is empty: name a model, or leave it out for {DEFAULT_MODEL}.")
    return name


def load_scope(values: TypedValues) -> Any:
    """The model, loaded when it is first used; by default the one that a fit was made with.

    It is kept in the values, for what is made after it.
    """
    from qkscope.findings.fit import read_job
    from qkscope.model.scope import Scope
    from qkscope.results.work import torchrun_device

    folder = values.get("fit") or _feature_folder(values)
    model = _model_typed(values) or (read_job(folder)["model"] if folder else DEFAULT_MODEL)
    device = values["device"]
    place = {"device_map": "auto"} if device == "auto" else {"device": torchrun_device(device)}

    class Unloaded(Scope):
        def __init__(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            with doing(f"loading {model}"):
                self.__dict__ |= vars(Scope.load(model, dtype=values["dtype"], **place))
            self.__class__ = Scope  # type: ignore[assignment]
            return getattr(self, name)

    values["scope"] = Unloaded()
    return values["scope"]


# ---------------------------------------------------------------------- what is asked of it


def chat_of_prompt(values: TypedValues) -> bool | None:
    """Whether a prompt goes into the chat template; a task decides for its own prompts."""
    if "task" in values or not values["chat"]:
        return None
    return True


def heads_typed(values: TypedValues) -> Any:
    """The heads of ``--heads``, for a function that calls them ``head``."""
    return values["heads"]


def print_lines(values: TypedValues) -> Callable[[str], None]:
    """The function that prints lines for people."""
    return say


# ---------------------------------------------------------------------- tasks and texts


def make_task(values: TypedValues) -> Any:
    """The task of this name with its options; refused where it does not take one of them."""
    name = values["task"]
    makers = dict[str, Callable[..., Any]](qk.tasks.BUILT_IN)
    if name.lower().endswith(".jsonl"):
        makers[name] = partial(qk.tasks.from_jsonl, name)
    if name not in makers:
        raise BadInput(f"there is no task {name!r}: take {TASKS} of your own.")
    takes = inspect.signature(makers[name]).parameters
    sizes = [size for size in ("entities", "categories", "length") if size in takes]
    size = sizes[0] if sizes else "size"
    typed = {size: values["size"], "form": values["form"], "center": values["center"]}
    options = {option: value for option, value in typed.items() if value is not None}
    unknown = options.keys() - takes.keys()
    if unknown:
        first = min(unknown)
        raise BadInput(f"--{first} is not for {name}: {_TASK_HELP[first]}")
    return makers[name](seed=values["seed"], chat=values["chat"], **options)


_TASK_HELP = {option.name: option.help for option in OF_TASK}


def task_or_prompt(values: TypedValues) -> Any:
    """A task, or one prompt."""
    sources = values["sources"] or []
    prompt = values["prompt"]
    if (prompt is None) == (not sources):
        raise BadInput("name a task, or one prompt with --prompt, and not both.")
    if prompt is not None:
        return prompt
    texts = [source for source in sources if _is_text(source)]
    if texts:
        atlas = shlex.join(["qkscope", "atlas", *texts])
        raise BadInput(
            f"{texts[0]} is text, and trace takes a task or a prompt: "
            f"for heads on text use {atlas}."
        )
    if len(sources) > 1:
        task = next(filter(_is_task, sources), sources[0])
        raise BadInput(f"{task} is a task: name it alone.")
    values["task"] = sources[0]
    return make_task(values)


def read_texts(values: TypedValues) -> Any:
    """The documents of files and folders; None: Python's own texts."""
    from qkscope.texts.documents import read_documents

    sources = values["sources"] or []
    for source in sources:
        if _is_task(source):
            raise BadInput(f"{source} is a task: name text files.")
    for source in sources:
        if not _is_text(source):
            raise BadInput(
                f"there is no task and no file {source!r}: name {TASKS}, text files, or {PYTHON}."
            )
    return None if sources in ([], [PYTHON]) else read_documents(sources)


def _is_task(source: str) -> bool:
    """Whether this is what a task is called: a built-in one, or a .jsonl file."""
    return source in qk.tasks.BUILT_IN or source.lower().endswith(".jsonl")


def _is_text(source: str) -> bool:
    """Whether this names text: files and folders that are there, or Python's own."""
    return source == PYTHON or (Path(source).exists() and not _is_task(source))


# ---------------------------------------------------------------------- fits and features


def fit_typed(values: TypedValues) -> Any:
    """The fit of ``--fit``; None where none was named."""
    folder = values["fit"]
    if folder is None:
        return None
    heads = _heads_asked(values)
    _check_fit(folder, heads, values)
    return _load(folder, values)


def load_feature(values: TypedValues) -> Any:
    """The subspace of ``--feature DIR:CONTRAST``, of the one head that is asked about."""
    text = values["feature"]
    if not text:
        return text
    folder = _feature_folder(values)
    if not folder:
        raise BadInput(f"--feature is DIR:CONTRAST, as runs/binding:lexical, but got {text!r}.")
    contrast = text.rpartition(":")[2]
    heads = _heads_asked(values)
    _check_fit(Path(folder), heads, values, contrast)
    return _load(Path(folder), values)[contrast, heads[0]]


def _feature_folder(values: TypedValues) -> str:
    """The folder of ``--feature``; empty where there is none."""
    return (values.get("feature") or "").rpartition(":")[0]


def _heads_asked(values: TypedValues) -> list[Any]:
    """The heads that were typed, one or several; none where all are asked about."""
    heads = values.get("heads") or values.get("head")
    if isinstance(heads, list):
        return heads
    return [] if heads in (None, "all") else [heads]


def _check_fit(folder: Path, heads: list[Any], values: TypedValues, contrast: str = "") -> None:
    """Refuse heads and contrasts that a fit does not have, before a model is loaded."""
    from qkscope.findings.fit import read_job
    from qkscope.findings.swap_rows import check_swappable

    job = read_job(folder)
    fitted = ", ".join(job["heads"])
    if contrast and len(heads) != 1:
        raise BadInput(
            f"a feature is of one head, and {folder} has {fitted}: name one with --heads."
        )
    missing = [str(head) for head in heads if str(head) not in job["heads"]]
    if missing:
        raise BadInput(f"{folder} was not fitted at {missing[0]}: there is {fitted}.")
    if contrast and contrast not in job["contrasts"]:
        known = ", ".join(job["contrasts"])
        raise BadInput(f"{folder} has no contrast {contrast!r}: it has {known}.")
    check_swappable(job["space"], values.get("downstream", False))


def _load(folder: Path, values: TypedValues) -> Any:
    """Read a fit of the model that is asked about."""
    from qkscope.findings.fit import load_fit

    return load_fit(folder, values["scope"])


def held_out_units(values: TypedValues) -> Any:
    """The prompts on which a fit is tested.

    They have words that nothing was fitted on. Without ``--out`` the result goes into the fit's own
    folder where that can be written, so that one page shows both, and it has points to draw.
    """
    from qkscope.findings.fit import read_job, task_of

    folder = values["fit"]
    if values["out"] is None and os.access(folder, os.W_OK):
        values["out"] = folder
    if values["out"] is not None:
        values["curve"] = True  # the page draws it
    return task_of(read_job(folder), folder).test(values["n"])


def load_dictionary(values: TypedValues) -> Any:
    """The dictionary of ``--dictionary`` at the layer of ``--dictionary-layer``."""
    from qkscope.model.dictionary import Dictionary

    path = values["dictionary"]
    layer = values["dictionary_layer"]
    if path is None and layer is not None:
        raise BadInput(
            "--dictionary-layer says where a dictionary stands: name it with --dictionary."
        )
    return None if path is None else Dictionary.load(path, layer=layer)
