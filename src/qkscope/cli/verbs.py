"""Commands from signatures: one function, one docstring, one command.

A verb's options, their defaults and their help are read off the source of its function, which is
parsed and not imported: ``qkscope trace --help`` does not wait for torch. What a parameter becomes
depends on its annotation: a `Scope` is ``--model``, ``--device`` and ``--dtype``; a `Task` is an
argument with ``--form``, ``--size``, ``--seed`` and ``--chat``; a `Fit` is its folder; numbers,
texts and flags are themselves. Mappings and functions are for Python.

What needs no model is checked before one is loaded: the scope that a function is given loads its
model when it is first looked at, so that the function's own refusals come first.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import qkscope
from qkscope import BadInput, Example, Result, tasks
from qkscope.cli import All, Json, app, end_lines, next_command, print_result, say
from qkscope.heads import Head, parse_heads
from qkscope.results.progress import doing

MODEL = "smollm2-135m"
PYTHON = (
    "python"  # what Python's own texts are called: its help topics, English that needs no download
)
_NEEDED: Any = inspect.Parameter.empty
_TASKS = f"{', '.join(tasks.BUILT_IN)}, or a .jsonl file"
Values = dict[str, Any]
"""What was typed, by the name of its option."""


_FIRST = (
    "why",
    "trace",
    "heads",
    "decompose",
    "swap",
    "atlas",
    "sparsity",
    "view",
    "demo",
    "fetch",
)  # in the help
_OUT = {
    "decompose": _NEEDED,
    "atlas": Path("runs/atlas"),
}  # where it would be a pity to lose what takes minutes


def _verbs() -> dict[str, str]:
    """Every command and its function, as ``module:name``: those that have the name of their
    ``@verb``, and a few.
    """
    source = Path(qkscope.__file__).parent
    homes = dict[str, str]()
    for path in (source / "verbs").rglob("*.py"):
        for name in re.findall(
            r'^@verb\("(\w+)".*\)\ndef \1\(', path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            homes[name] = (
                f"qkscope.{'.'.join(path.relative_to(source).with_suffix('').parts)}:{name}"
            )
    homes |= {
        name: f"qkscope.cli.begin:{name}" for name in ("demo", "fetch", "svd", "gallery", "schema")
    }
    homes |= {
        "heads": "qkscope.verbs.find_heads:find_heads",
        "sparsity": "qkscope.verbs.sparsity:sweep",
    }
    homes |= {"view": "qkscope.show.server:view"}
    return {name: homes[name] for name in dict.fromkeys([*_FIRST, *homes])}


VERBS = _verbs()


# ---------------------------------------------------------------------- a function, read off its
# source


class Parameter(NamedTuple):
    """One parameter of a function: the alternatives of its annotation, its default, and what its
    docstring says.
    """

    name: str
    kinds: tuple[str, ...]
    default: Any
    help: str

    def takes(self, kind: str) -> bool:
        """Whether this name stands anywhere in the annotation."""
        return re.search(rf"\b{kind}\b", " ".join(self.kinds)) is not None


@cache
def _tree(module: str) -> ast.Module:
    path = Path(qkscope.__file__).parent.joinpath(*module.split(".")[1:])
    return ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))


@cache
def signature(home: str) -> tuple[str, list[Parameter]]:
    """What a function does, by its docstring's first paragraphs, and its parameters."""
    module, _, name = home.partition(":")
    node = next(
        part
        for part in _tree(module).body
        if isinstance(part, ast.FunctionDef) and part.name == name
    )
    does, _, rest = (ast.get_docstring(node) or "").partition("\n\nParameters\n")
    entries = re.finditer(
        r"^(\*?\w+(?:, \w+)*) : (.*(?:\n +.*)*)", rest.partition("\n\n")[0], re.MULTILINE
    )
    texts = {named: _plain(entry[2]) for entry in entries for named in entry[1].split(", ")}
    plain = node.args.args
    only = node.args.kwonlyargs
    defaults = [None] * (len(plain) - len(node.args.defaults)) + [
        *node.args.defaults,
        *node.args.kw_defaults,
    ]
    parameters = [
        Parameter(
            arg.arg,
            tuple(str(kind).split(" | ")),
            _constant(default, module),
            texts.get(arg.arg, ""),
        )
        for arg, default in zip([*plain, *only], defaults, strict=True)
        for kind in [ast.unparse(arg.annotation or arg)]
    ]
    return "\n\n".join(map(_plain, does.split("\n\n"))), parameters


def _plain(text: str) -> str:
    """A docstring as a terminal shows it: on one line, without marks."""
    text = re.sub(r"`+([^`]*)`+", r"\1", re.sub(r"\s+", " ", text).strip())
    return text[:1].upper() + text[1:]


def _constant(node: ast.expr | None, module: str) -> Any:
    """A default: what is written, or what this module (or the one that it imports from) calls by
    this name.
    """
    if node is None or isinstance(node, ast.Lambda | ast.Attribute):  # functions are for Python
        return _NEEDED if node is None else None
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    for line in _tree(module).body:
        if isinstance(line, ast.ImportFrom) and node.id in {alias.name for alias in line.names}:
            return _constant(node, str(line.module))
        if isinstance(line, ast.Assign):
            names = ast.unparse(line.targets[0]).strip("()").split(", ")
            if node.id in names:
                value = ast.literal_eval(line.value)
                return value[names.index(node.id)] if len(names) > 1 else value
    raise NameError(f"{module} has no constant {node.id}")


# ---------------------------------------------------------------------- what a parameter becomes

_READ: dict[str, Callable[[str], Any]] = {
    "prompt": lambda text: Example(text=text.replace("\\n", "\n")).text,  # an empty one is refused
    "head": Head.parse,
    "heads": lambda text: text if text == "all" else parse_heads(text),
    "token": lambda text: int(text) if re.fullmatch(r"-?\d+", text) else text,
    "part": lambda text: import_module("qkscope.results.work").parse_part(text),
    "names": lambda text: [part.strip() for part in text.split(",") if part.strip()],
}


def _option(
    name: str,
    kind: Any,
    default: Any,
    text: str,
    *flags: str,
    read: str = "",
    argument: bool = False,
    **more: Any,
) -> inspect.Parameter:
    """An option or an argument; ``read`` says what its text is read as."""
    if read:
        more["callback"] = lambda value: None if value is None else _READ[read](value)
    info: Any = (
        typer.Argument(help=text, **more) if argument else typer.Option(*flags, help=text, **more)
    )
    kind = Annotated[kind | None if default is None else kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


_argument = partial(_option, argument=True)
_MODELS = "Hub id, folder, .gguf file, a name that fetch takes (smollm2-135m), or nano:mixed."
_FORMS = (
    "list, sentence or question (binding); bullets or find (filter); ABBA, BABA or single (ioi)."
)
_OF_MODEL = [
    _option("model", str, None, _MODELS, show_default=MODEL),
    _option("device", str, None, "cpu, cuda, cuda:1, or auto: spread over all GPUs."),
    _option("dtype", str, None, "float32, bfloat16, ...; as the weights are stored."),
]
_OF_TASK = [
    _option("form", str, None, _FORMS),
    _option("size", int, None, "Entities (binding), categories (filter) or words (induction)."),
    _option("center", str, None, "Of a .jsonl file: none or query."),
    _option("seed", int, 0, "Seed of every draw."),
    _option("chat", bool, False, "Put prompts into the model's chat template.", "--chat"),
]
_SHARED = {option.name: option for option in [*_OF_MODEL, *_OF_TASK]}
_OF_ALL = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
    for name, kind in (("everything", All), ("as_json", Json))
]
_TYPES = {
    "int": int,
    "Count": int,
    "Natural": int,
    "Seed": int,
    "str": str,
    "bool": bool,
    "list[Path]": list[Path],
}


def typed(parameter: Parameter) -> list[inspect.Parameter]:
    """The options and arguments that stand for a parameter; none, where it is for Python alone."""
    name, kinds, default, text = parameter
    if parameter.takes("Scope"):
        return _OF_MODEL
    if parameter.takes("Texts"):
        texts = "Text files and folders, or python (its own texts)."
        return [_argument("sources", list[str], None, texts)]
    if parameter.takes("Task") and parameter.takes("Example"):
        task = _argument("sources", list[str], None, f"{_TASKS}.", metavar="TASK")
        single = _option(
            "prompt", str, None, "One prompt instead; \\n is a line break.", read="prompt"
        )
        return [task, single, *_OF_TASK]
    if parameter.takes("Task"):
        return [_argument("task", str, _NEEDED, f"{_TASKS}."), *_OF_TASK]
    if parameter.takes("Example"):
        return [
            _argument(
                "prompt",
                str,
                _NEEDED,
                "The prompt (\\n breaks a line); or a .jsonl file.",
                read="prompt",
            )
        ]
    if parameter.takes("Head") and not kinds[0].startswith("Mapping"):
        named = "heads" if parameter.takes("Sequence") else "head"
        return [_option(named, str, default, text, read=named)]
    if parameter.takes("Fit") and name == "fit":
        return [_argument("fit", Path, _NEEDED, "A folder that decompose wrote.")]
    if parameter.takes("Fit"):
        return [
            _option(
                "fit",
                Path,
                None,
                "A folder that decompose wrote: its features split the logit too.",
            )
        ]
    if parameter.takes("UnitsToTest"):
        return [_option("n", int, 256, "Prompts to test on.", "--n", "-n")]
    if parameter.takes("Dictionary"):
        layer = "The layer that the dictionary enters, where its file does not say."
        return [_option(name, Path, None, text), _option("dictionary_layer", int, None, layer)]
    if kinds[0] == "Subspace":
        return [_option(name, str, None, f"DIR:CONTRAST. {text}")]
    if name == "part":
        part = "Make every N-th piece of the work, from the I-th on; all parts share --out, and the last adds them up."
        return [_option(name, str, None, part, metavar="I/N", read="part")]
    if parameter.takes("Mapping") or name in ("progress", "say"):
        return []
    if name in _SHARED and (name != "model" or default is _NEEDED):
        return [_SHARED[name]]
    read = (
        "token"
        if {"int", "str", "None"} == set(kinds)
        else "names"
        if kinds[0] == "Sequence[str]"
        else ""
    )
    kind: Any = Path if "Path" in kinds else str if read else _TYPES.get(kinds[0])
    if isinstance(default, bool | int | float | str) and kind is not Path:
        kind = type(default)
    if kind is bool:
        return [
            _option(
                name, bool, bool(default), text, f"--{name}/--no-{name}" if default else f"--{name}"
            )
        ]
    if name == "folder" or (default is _NEEDED and name != "out"):
        return [_argument(name, kind, default, text)]
    return (
        [_option(name, kind, default, text, *(["--n", "-n"] if name == "n" else []), read=read)]
        if kind
        else []
    )


# ---------------------------------------------------------------------- from what was typed to
# arguments


def argument(parameter: Parameter, values: Values) -> Any:
    """What a function is given for a parameter; None where nothing was typed."""
    name = parameter.name
    value = values.get(parameter.name)
    if parameter.takes("Scope"):
        values["scope"] = value = _scope(values)
    elif parameter.takes("Texts") or parameter.takes("Task"):
        value = _source(parameter, values)
    elif parameter.takes("Head") and parameter.takes("Sequence"):
        value = values.get("heads")
    elif parameter.takes("Fit"):
        value = _fit(values["fit"], values)
    elif parameter.takes("UnitsToTest"):
        from qkscope.findings.fit import read_job, task_of

        if values["out"] is None and os.access(values["fit"], os.W_OK):
            values["out"] = values["fit"]  # its page then shows the swaps too
        if values["out"] is not None:
            values["curve"] = True  # the page draws it
        value = task_of(read_job(values["fit"]), values["fit"]).test(values["n"])
    elif parameter.takes("Dictionary"):
        from qkscope.model.dictionary import Dictionary

        if value is None and values["dictionary_layer"] is not None:
            raise BadInput(
                "--dictionary-layer says where a dictionary stands: name it with --dictionary."
            )
        value = value and Dictionary.load(value, layer=values["dictionary_layer"])
    elif name == "feature" and value:
        folder, _, contrast = value.rpartition(":")
        if not folder:
            raise BadInput(
                f"--feature is DIR:CONTRAST, as runs/binding:lexical, but got {value!r}."
            )
        value = _fit(Path(folder), values, contrast)
    elif name == "model" and parameter.default is _NEEDED:
        value = _model_name(value) or MODEL
    elif name == "chat" and (
        "task" in values or not value
    ):  # a task says itself whether its prompts are chat
        value = None
    elif name == "say":
        value = say
    return value


def _model_name(name: str | None) -> str | None:
    """The model that was named; an empty name is no model, and not the default one either."""
    if name is not None and not name.strip():
        raise BadInput(f"--model is empty: name a model, or leave it out for {MODEL}.")
    return name


def _scope(values: Values) -> Any:
    """The model, loaded when it is first looked at; by default the one that a fit was made with."""
    from qkscope.findings.fit import read_job
    from qkscope.model.scope import Scope
    from qkscope.results.work import torchrun_device

    folder = values.get("fit") or (values.get("feature") or "").rpartition(":")[0]
    device = values["device"]
    model = _model_name(values["model"]) or (read_job(folder)["model"] if folder else MODEL)
    place = {"device_map": "auto"} if device == "auto" else {"device": torchrun_device(device)}

    class Unloaded(Scope):
        def __init__(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            with doing(f"loading {model}"):
                self.__dict__ |= vars(Scope.load(model, dtype=values["dtype"], **place))
            self.__class__ = Scope  # type: ignore[assignment]
            return getattr(self, name)

    return Unloaded()


def _fit(folder: Path | None, values: Values, contrast: str = "") -> Any:
    """A fit, or one of its features; that it has these heads and this contrast is asked before a
    model is loaded.
    """
    if folder is None:
        return None
    from qkscope.findings.fit import load, read_job
    from qkscope.findings.swap_rows import check_swappable

    job = read_job(folder)
    named = values.get("heads") or values.get("head")
    heads = named if isinstance(named, list) else [] if named in (None, "all") else [named]
    if contrast and len(heads) != 1:
        raise BadInput(
            f"a feature is of one head, and {folder} has {', '.join(job['heads'])}: name one with --heads."
        )
    if missing := [str(head) for head in heads if str(head) not in job["heads"]]:
        raise BadInput(
            f"{folder} was not fitted at {missing[0]}: there is {', '.join(job['heads'])}."
        )
    if contrast and contrast not in job["contrasts"]:
        raise BadInput(
            f"{folder} has no contrast {contrast!r}: it has {', '.join(job['contrasts'])}."
        )
    check_swappable(job["space"], values.get("downstream", False))
    fit: Any = load(folder, values["scope"])
    return fit[contrast, heads[0]] if contrast else fit


def _source(parameter: Parameter, values: Values) -> Any:
    """A task, documents of files and folders (or of Python), or a task or one prompt."""
    if "sources" not in values:
        return make_task(values)
    sources = values["sources"] or []
    if parameter.takes("Texts"):
        return _documents(sources)
    prompt = values["prompt"]
    if (prompt is None) == (not sources):
        raise BadInput("name a task, or one prompt with --prompt, and not both.")
    if prompt is not None:
        return prompt
    texts = [source for source in sources if _is_text(source)]
    if texts:
        atlas = shlex.join(["qkscope", "atlas", *texts])
        raise BadInput(
            f"{texts[0]} is text, and trace takes a task or a prompt: for heads on text use {atlas}."
        )
    if len(sources) > 1:
        named = next(filter(_is_task, sources), sources[0])
        raise BadInput(f"{named} is a task: name it alone.")
    values["task"] = sources[0]
    return make_task(values)


def _is_task(source: str) -> bool:
    """Whether this is what a task is called: a built-in one, or a .jsonl file."""
    return source in tasks.BUILT_IN or source.lower().endswith(".jsonl")


def _is_text(source: str) -> bool:
    """Whether this names text: files and folders that are there, or Python's own."""
    return source == PYTHON or (Path(source).exists() and not _is_task(source))


def _documents(sources: list[str]) -> Any:
    """Documents of files and folders; none for Python's own, which a verb reads itself."""
    from qkscope.texts.documents import read_documents

    for source in sources:
        if _is_task(source):
            raise BadInput(f"{source} is a task: name text files.")
    for source in sources:
        if not _is_text(source):
            raise BadInput(
                f"there is no task and no file {source!r}: name {_TASKS}, text files, or {PYTHON}."
            )
    return None if sources in ([], [PYTHON]) else read_documents(sources)


def make_task(values: Mapping[str, Any]) -> Any:
    """The task of this name, made with what was typed; refused where its maker does not take that."""
    name = values["task"]
    makers = dict[str, Callable[..., Any]](tasks.BUILT_IN)
    if name.lower().endswith(".jsonl"):
        makers[name] = partial(tasks.from_jsonl, name)
    if name not in makers:
        raise BadInput(f"there is no task {name!r}: take {_TASKS} of your own.")
    takes = inspect.signature(makers[name]).parameters
    size = next((size for size in ("entities", "categories", "length") if size in takes), "size")
    given = {
        name: values[flag]
        for flag, name in (("size", size), ("form", "form"), ("center", "center"))
    }
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := given.keys() - takes.keys():
        raise BadInput(
            f"--{min(unknown)} is not for {name}: {_SHARED[min(unknown)].annotation.__metadata__[0].help}"
        )
    return makers[name](seed=values["seed"], chat=values["chat"], **given)


# ---------------------------------------------------------------------- commands


def _parameters(name: str) -> list[Parameter]:
    """Parameters of a verb, with the default of its ``--out``."""
    return [
        p._replace(default=_OUT.get(name, p.default)) if p.name == "out" else p
        for p in signature(VERBS[name])[1]
    ]


def run(name: str, values: Values) -> None:
    """Run a verb with what was typed, and print what it gives."""
    everything = values.pop("everything", False)
    as_json = values.pop("as_json", False)
    wanted = [
        parameter for parameter in _parameters(name) if typed(parameter) or parameter.name == "say"
    ]
    given = {parameter.name: argument(parameter, values) for parameter in wanted}
    module, _, function = VERBS[name].partition(":")
    with doing(name, None if "scope" in given else False):  # a line that says how far it is
        verb = getattr(import_module(module), function)
        result = verb(**{name: value for name, value in given.items() if value is not None})
    if (
        isinstance(result, Result) and result.answer
    ):  # otherwise nothing is left to print, or another process prints it
        ends = result.tables and not as_json  # of a part there are none
        end = end_lines(given.get("out"), then=next_command(name, values, result)) if ends else []
        print_result(result, as_json, everything, end)


def _add_commands() -> None:
    last = {*_SHARED, "out", "part", *(option.name for option in _OF_ALL)}
    for name, home in VERBS.items():
        options = [option for parameter in _parameters(name) for option in typed(parameter)]
        options += [] if name in ("fetch", "schema") else _OF_ALL
        unique = {option.name: option for option in options}.values()

        def command(
            verb: str = name, /, **values: Any
        ) -> None:  # an option may be called as we are
            run(verb, values)

        vars(command)["__signature__"] = inspect.Signature(
            sorted(unique, key=lambda option: option.name in last)
        )
        app.command(
            name, help=signature(home)[0], rich_help_panel="Commands" if name in _FIRST else "More"
        )(command)


_add_commands()
