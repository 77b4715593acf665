"""From a name to a model in memory: its files are checked, no code of theirs runs, and errors are
one sentence.

A name is a hub id, a folder, a ``.gguf`` file, ``smollm2-135m`` and others inside packages
(`files.EMBEDDED`), or ``nano:NAME@STEP`` (shipped; without the step, the last one). A revision is a
branch, tag or commit of a hub model, a step of a nano model, or a subfolder of a folder that holds
one model folder per checkpoint.

transformers runs a model's own Python where it is told to trust it - or where it asks, and somebody
(or a pipe) answers "y". Not every road to that question carries ``trust_remote_code``: a tokenizer
class that is itself an Auto class, a ``custom_generate`` folder and a sub-config do not. So while
we load, the question is never asked, and the one door through which such code is imported is shut.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.utils import get_session
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, dynamic_module_utils
from transformers.generation import utils as generation_utils
from transformers.utils import cached_file
from transformers.utils import logging as bars

from qkscope.errors import BadInput, check_device
from qkscope.model.files import EMBEDDED, check_report, file_hash, folder_hash, packaged_file
from qkscope.model.spaces import swapped
from qkscope.model.tap import SERVED

log = logging.getLogger(__name__)

_NANO = "nano:"
_SHIPPED = Path(__file__).parents[1] / "data" / "nano"
_LOADING = (
    threading.RLock()
)  # the doors are transformers' own, so one thread at a time shuts and opens them
_CAUSES = {  # what the errors of a loader are called or say, and what that means
    r"RevisionNotFoundError|valid git identifier|GatedRepoError|RepositoryNotFoundError|valid model identifier": "the "
    "hub has no model {name} with revision {revision!r} for you: check both names, or, for a gated model, accept its "
    "licence and log in with `hf auth login`.",
    r"weights_only|UnpicklingError": "{name} is a pickle that holds more than tensors, which would run when read: "
    "take its safetensors, or have it saved so.",
    r"trust_remote_code|custom code": "{name} brings its own code, which qkscope never runs: use a model transformers "
    "knows.",
    r"LocalEntryNotFoundError|OfflineModeIsEnabled|ProxyError|[Cc]onnect": "{name} is not in the local cache and the "
    "hub cannot be reached: connect once to download it, give a local folder, or use smollm2-135m.",
}

# ---------------------------------------------------------------- what a name stands for


class Place(NamedTuple):
    """Where a model is: its name and revision in results, and its folder or GGUF file; None for one
    on the hub.
    """

    name: str
    revision: str | None
    path: Path | None


def locate(name: str | Path, revision: str | None = None) -> Place:
    """The place of a model's files; a name that leads nowhere is refused."""
    model = str(name)
    path = Path(name).expanduser()
    if model.startswith(_NANO):
        model, at, step = model.partition("@")
        revision = step if at else revision or str(nano_steps(model)[-1])
        path = _SHIPPED / model.removeprefix(_NANO)
    if revision is not None:
        check_revisions(model, [revision])
    if model.lower() in EMBEDDED:
        return Place(model, revision, packaged_file(model.lower()))
    gguf = model.lower().endswith(".gguf")
    if path.is_dir() or (
        gguf and path.is_file()
    ):  # a folder of no model is refused when it is opened
        return Place(model, revision, path / revision if revision else path)
    if gguf or path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        what = "is no model folder and no .gguf file" if path.exists() else "does not exist"
        raise BadInput(f"{name} {what}: give a folder with config.json, a .gguf file or a hub id.")
    return Place(model, revision, None)


def nano_steps(name: str) -> list[int]:
    """The training steps at which a nano model can be had, in order; ``nano:`` before the name is
    welcome.
    """
    folder = _SHIPPED / name.removeprefix(_NANO)
    if not folder.is_dir():
        names = ", ".join(sorted(path.name for path in _SHIPPED.iterdir()))
        raise BadInput(f"there is no nano model {folder.name!r}: there is {names}.")
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def revisions_of(model: str) -> list[str] | None:
    """The checkpoints that there are, none of what is one model; None where only the hub knows."""
    path = Path(model).expanduser()
    if model.startswith(_NANO):
        return list(map(str, nano_steps(model)))
    if path.is_dir() and not (path / "config.json").exists():
        return sorted(inner.name for inner in path.iterdir() if (inner / "config.json").is_file())
    return (
        []
        if path.exists() or model.lower() in EMBEDDED or model.lower().endswith(".gguf")
        else None
    )


def check_revisions(model: str, names: Sequence[str]) -> None:
    """Refuse revisions that a model does not have."""
    there = revisions_of(model)
    if there == []:
        raise BadInput(
            f"{model} is one model, not a folder of checkpoints: leave out the revision {names[0]!r}."
        )
    if there and (missing := [name for name in names if name not in there]):
        raise BadInput(f"{model} has no revision {missing[0]!r}: there is {', '.join(there[:20])}.")


# ---------------------------------------------------------------- loading


def load(
    name: str | Path,
    device: Any,
    dtype: Any,
    device_map: Any,
    revision: str | None,
    attn: str | None,
) -> tuple[Any, Any | None, str, str | None, str | None]:
    """A model, its tokenizer, name and revision, and the hash of its files, or None where not all
    of them were found.

    The arguments are those of `Scope.load`.
    """
    if device_map is not None and device is not None:
        raise BadInput("device and device_map exclude each other: give one of them.")
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = (
        getattr(torch, dtype, None)
        if isinstance(dtype, str) and dtype != "auto"
        else dtype or "auto"
    )
    if kind not in ("auto", torch.float32, torch.bfloat16, torch.float16):
        raise BadInput(
            f"{dtype!r} is no dtype for a model: write float32, bfloat16, float16 or auto."
        )
    options = {"dtype": kind, "attn_implementation": attn, "device_map": device_map}
    options, (model_name, revision, path) = (
        {k: v for k, v in options.items() if v is not None},
        locate(name, revision),
    )
    with _guarded(str(name), revision, offline=path is None and not _hub_answers()):
        if device_map is None:
            check_device(target)
        source = model_name
        commit = None
        digest = None
        if path is None:
            config = Path(cached_file(model_name, "config.json", revision=revision))
            # the rest comes from the same commit, whatever happens to the branch meanwhile
            commit = revision = (
                config.parent.name if config.parent.parent.name == "snapshots" else revision
            )
        elif path.is_dir():
            digest = folder_hash(path)
            source = str(path)
        else:
            from qkscope.model.gguf import dequantised  # takes a while to import

            digest = file_hash(path)  # it holds the config too
            source = str(dequantised(path, digest))
        model = _model(str(path or name), source, commit, options)
        tokenizer = _tokenizer(source, commit)
        if path is None:
            with suppress(
                BadInput
            ):  # its files are not all there: what is in memory is hashed instead
                digest = folder_hash(config.parent)
        model.eval().requires_grad_(False)
        if device_map is None:
            model.to(target)
    return model, tokenizer, model_name, revision, digest


def _model(name: str, source: str, revision: str | None, options: dict[str, Any]) -> Any:
    """The model at a source, called by its name in messages.

    Its class is the one that saved the weights, so that none are missing and none are left over:
    one of transformers' models. An Auto class, a function or whatever else goes by the name in
    `architectures` is none.
    """
    asked: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source, **asked)
    if config._attn_implementation not in (None, *SERVED):  # it may name code on the hub
        config._attn_implementation = None
    named = config.architectures or []
    kinds = [getattr(transformers, str(kind), None) for kind in named]
    classes = [
        kind for kind in kinds if isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    ]
    if named and not classes:
        unknown = f"{name} says that it is a {named[0]!s:.80}, which is no model of transformers"
        raise BadInput(
            f"{unknown}, and code that comes with a model is never run: use a model transformers knows."
        )
    # weights of another shape are let through here, and refused by name with what else does not fit
    asked |= {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = (*classes, transformers.AutoModelForCausalLM)[0].from_pretrained(
        source, **asked, **options
    )
    check_report(name, report)
    return model


def _tokenizer(source: str, revision: str | None) -> Any | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # without a tokenizer a model can still be given ids
        log.info("no tokenizer for %s: %s", source, error)
        return None
    return tokenizer if isinstance(tokenizer, transformers.PreTrainedTokenizerBase) else None


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError("custom code is never run")


_DOORS = (
    (
        dynamic_module_utils,
        "TIME_OUT_REMOTE_CODE",
        0,
    ),  # no time to answer: transformers refuses instead of asking
    (dynamic_module_utils, "get_class_in_module", _refuse),
    (generation_utils, "get_class_in_module", _refuse),
)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no bars of transformers, for the duration of a ``with`` block."""
    level = bars.get_verbosity()
    shown = bars.is_progress_bar_enabled()
    try:
        bars.set_verbosity_error()
        bars.disable_progress_bar()
        yield
    finally:
        bars.set_verbosity(level)
        if shown:
            bars.enable_progress_bar()


def _hub_answers() -> bool:
    """Whether the hub can be reached: asked once, as its client tries for 23 s before it gives up
    on one file.
    """
    with suppress(Exception):  # no name, no route, no proxy, or told to stay offline
        get_session().head(constants.ENDPOINT, timeout=2)
        return True
    return False


@contextmanager
def _guarded(name: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Within it transformers runs no code of a model, does not ask whether to, is silent, and fails
    in one sentence.
    """
    doors = (*_DOORS, (constants, "HF_HUB_OFFLINE", offline or constants.HF_HUB_OFFLINE))
    try:
        with _LOADING, swapped(*doors), quiet():
            yield
    except BadInput:
        raise
    except Exception as error:
        chain: list[BaseException] = [error]
        while (
            len(chain) < 8 and (cause := chain[-1].__cause__ or chain[-1].__context__) is not None
        ):
            chain.append(cause)
        text = " ".join(f"{type(link).__name__} {link}" for link in chain)
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        damaged = f"{name} could not be loaded ({why}): it may be damaged or half downloaded, so download it again."
        known = (
            say.format(name=name, revision=revision)
            for cause, say in _CAUSES.items()
            if re.search(cause, text)
        )
        raise BadInput(next(known, damaged)) from error


# ---------------------------------------------------------------- models that other tools hold


def unwrapped(model: Any, tokenizer: Any | None = None) -> tuple[Any, Any | None]:
    """The transformers model that an object holds, and its tokenizer where none was given.

    A TransformerBridge of TransformerLens replaces parts of the model that it holds by components
    with hooks, nnsight its modules' forwards. So a fresh instance of the same class is given their
    tensors: one set of weights, and the other tool's object is left as it is. Neither package is
    imported: an object is known by its class's package.
    """
    packages = {kind.__module__.split(".")[0] for kind in type(model).__mro__}
    kind = type(model).__name__
    if "transformer_lens" in packages:
        if getattr(model, "_weights_processed", False):
            why = "were processed (layer norms folded, matrices centred), so they are not the model's: boot it again"
            how = "use it without enable_compatibility_mode(), or with no_processing=True"
            raise BadInput(f"the weights of this {kind} {why}, and {how}.")
        inside = getattr(model, "original_model", None)
    elif "nnsight" in packages:
        if not getattr(model, "dispatched", True):
            model.dispatch()  # as its first trace would: until then its weights are not loaded
        inside = model._module
    else:
        return model, tokenizer
    if not isinstance(inside, PreTrainedModel):
        how = "load one with transformers, or wrap one (TransformerBridge.boot_transformers, nnsight.TransformersModel)"
        raise BadInput(
            f"this {kind} wraps no model of transformers, so it cannot be looked into: {how}."
        )
    tensors = {  # in a bridge, a part that was replaced stands inside its replacement
        name.replace("_original_component.", ""): tensor
        for named in (inside.named_parameters, inside.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    with torch.device("meta"):
        plain = type(inside)(copy.deepcopy(inside.config))
    for path, module in plain.named_modules():
        for slots in (module._parameters, module._buffers):
            slots.update(
                {
                    name: tensors[f"{path}.{name}".lstrip(".")]
                    for name in slots
                    if slots[name] is not None
                }
            )
    return plain.eval(), getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
