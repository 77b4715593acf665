"""From a name to a model in memory: its files are checked, and no code of theirs runs.

What fails is refused in one sentence.

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
from torch import Tensor
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

#: The doors below are transformers' own, so one thread at a time shuts and opens them.
_LOADING = threading.RLock()


class _Cause(NamedTuple):
    """A pattern of what a loader's errors are called or say, and the sentence for it."""

    pattern: str
    sentence: str


_CAUSES = (
    _Cause(
        r"RevisionNotFoundError|valid git identifier|GatedRepoError|RepositoryNotFoundError"
        r"|valid model identifier",
        "the hub has no model {name} with revision {revision!r} for you: check both names, or, "
        "for a gated model, accept its licence and log in with `hf auth login`.",
    ),
    _Cause(
        r"weights_only|UnpicklingError",
        "{name} is a pickle that holds more than tensors, which would run when read: "
        "take its safetensors, or have it saved so.",
    ),
    _Cause(
        r"trust_remote_code|custom code",
        "{name} brings its own code, which qkscope never runs: use a model transformers knows.",
    ),
    _Cause(
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|ProxyError|[Cc]onnect",
        "{name} is not in the local cache and the hub cannot be reached: connect once to download "
        "it, give a local folder, or use smollm2-135m.",
    ),
)

# ---------------------------------------------------------------- what a name stands for


class Place(NamedTuple):
    """Where a model is: its name and revision in results, and its folder or GGUF file.

    The path of a model on the hub is None.
    """

    name: str
    revision: str | None
    path: Path | None


def place_of_model(name: str | Path, revision: str | None = None) -> Place:
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
    is_gguf = model.lower().endswith(".gguf")
    if path.is_dir() or (is_gguf and path.is_file()):
        # a folder of no model is refused when it is opened
        return Place(model, revision, path / revision if revision else path)
    looks_local = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if is_gguf or path.exists() or looks_local:
        what = "is no model folder and no .gguf file" if path.exists() else "does not exist"
        raise BadInput(f"{name} {what}: give a folder with config.json, a .gguf file or a hub id.")
    return Place(model, revision, None)


def nano_steps(name: str) -> list[int]:
    """The training steps at which a nano model can be had, in order.

    ``nano:`` before the name is welcome.
    """
    folder = _SHIPPED / name.removeprefix(_NANO)
    if not folder.is_dir():
        names = ", ".join(sorted(path.name for path in _SHIPPED.iterdir()))
        raise BadInput(f"there is no nano model {folder.name!r}: there is {names}.")
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def revisions_of(model: str) -> list[str] | None:
    """The checkpoints that there are; none of what is one model, None where only the hub knows."""
    path = Path(model).expanduser()
    if model.startswith(_NANO):
        return [str(step) for step in nano_steps(model)]
    if path.is_dir() and not (path / "config.json").exists():
        return sorted(inner.name for inner in path.iterdir() if (inner / "config.json").is_file())
    if path.exists() or model.lower() in EMBEDDED or model.lower().endswith(".gguf"):
        return []
    return None


def check_revisions(model: str, names: Sequence[str]) -> None:
    """Refuse revisions that a model does not have."""
    known = revisions_of(model)
    if known is None:
        return
    if not known:
        raise BadInput(
            f"{model} is one model, not a folder of checkpoints: "
            f"leave out the revision {names[0]!r}."
        )
    missing = [name for name in names if name not in known]
    if missing:
        raise BadInput(f"{model} has no revision {missing[0]!r}: there is {', '.join(known[:20])}.")


# ---------------------------------------------------------------- loading


class LoadedModel(NamedTuple):
    """A model in memory, and where it came from.

    Attributes
    ----------
    model : PreTrainedModel
    tokenizer : optional
        None where it has none that can be loaded.
    name, revision : str, str or None
        As in results.
    digest : str or None
        Hash of its files; None where not all of them were found.
    """

    model: Any
    tokenizer: Any | None
    name: str
    revision: str | None
    digest: str | None


def load(
    name: str | Path,
    device: Any,
    dtype: Any,
    device_map: Any,
    revision: str | None,
    attn: str | None,
) -> LoadedModel:
    """Load a model and its tokenizer; the arguments are those of `Scope.load`."""
    if device_map is not None and device is not None:
        raise BadInput("device and device_map exclude each other: give one of them.")
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"dtype": _dtype(dtype)}
    if attn is not None:
        options["attn_implementation"] = attn
    if device_map is not None:
        options["device_map"] = device_map
    place = place_of_model(name, revision)
    on_hub = place.path is None
    with _guarded(str(name), place.revision, offline=on_hub and not _hub_answers()):
        if device_map is None:
            check_device(target)
        files = _files_of(place)
        # messages call a model by where it is
        model = _model(str(place.path or name), files.source, files.commit, options)
        tokenizer = _tokenizer(files.source, files.commit)
        digest = files.digest
        if files.snapshot is not None:
            # its files may not all be there: then what is in memory is hashed instead
            with suppress(BadInput):
                digest = folder_hash(files.snapshot)
        model.eval().requires_grad_(False)
        if device_map is None:
            model.to(target)
    return LoadedModel(model, tokenizer, place.name, files.commit or place.revision, digest)


def _dtype(dtype: Any) -> Any:
    """What `Scope.load` was given as a dtype, as transformers takes it."""
    kind = dtype or "auto"
    if isinstance(dtype, str) and dtype != "auto":
        kind = getattr(torch, dtype, None)
    if kind not in ("auto", torch.float32, torch.bfloat16, torch.float16):
        raise BadInput(
            f"{dtype!r} is no dtype for a model: write float32, bfloat16, float16 or auto."
        )
    return kind


class _Files(NamedTuple):
    """What transformers loads: a folder or a hub id, and for the hub a commit.

    `digest` is the hash of local files. `snapshot` is the folder in the cache that files of the hub
    are downloaded to.
    """

    source: str
    commit: str | None = None
    digest: str | None = None
    snapshot: Path | None = None


def _files_of(place: Place) -> _Files:
    """The files at a place; a GGUF file is turned into a folder first."""
    if place.path is None:
        config = Path(cached_file(place.name, "config.json", revision=place.revision))
        snapshot = config.parent
        # the rest comes from the same commit, whatever happens to the branch meanwhile
        is_commit = snapshot.parent.name == "snapshots"
        commit = snapshot.name if is_commit else place.revision
        return _Files(place.name, commit=commit, snapshot=snapshot)
    if place.path.is_dir():
        return _Files(str(place.path), digest=folder_hash(place.path))
    from qkscope.model.gguf import dequantised  # takes a while to import

    digest = file_hash(place.path)  # of the config, too, which the file holds
    return _Files(str(dequantised(place.path, digest)), digest=digest)


def _model(name: str, source: str, revision: str | None, options: dict[str, Any]) -> Any:
    """The model at a source, called by its name in messages.

    Its class is the one that saved the weights, so that none are missing and none are left over:
    one of transformers' models. An Auto class, a function or whatever else goes by the name in
    `architectures` is none.
    """
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source, **where)
    if config._attn_implementation not in (None, *SERVED):  # it may name code on the hub
        config._attn_implementation = None
    model_class = _class_of(name, config) or transformers.AutoModelForCausalLM
    model, report = model_class.from_pretrained(
        source,
        config=config,
        output_loading_info=True,
        # weights of another shape are refused below, by name and with what else does not fit
        ignore_mismatched_sizes=True,
        **where,
        **options,
    )
    check_report(name, report)
    return model


def _class_of(name: str, config: Any) -> Any | None:
    """The class of transformers' models that a config names; None where it names nothing."""
    names = config.architectures or []
    for class_name in names:
        kind = getattr(transformers, str(class_name), None)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return kind
    if names:
        unknown = f"{name} says that it is a {names[0]!s:.80}, which is no model of transformers"
        raise BadInput(
            f"{unknown}, and code that comes with a model is never run: "
            "use a model transformers knows."
        )
    return None


def _tokenizer(source: str, revision: str | None) -> Any | None:
    """The tokenizer at a source; None where there is none that transformers makes."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # without a tokenizer a model can still be given ids
        log.info("no tokenizer for %s: %s", source, error)
        return None
    return tokenizer if isinstance(tokenizer, transformers.PreTrainedTokenizerBase) else None


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Stand in for the function that would import a model's code."""
    raise ValueError("custom code is never run")


#: Where transformers would run a model's code, or ask whether to, and what stands there meanwhile.
_DOORS = (
    # no time to answer: transformers refuses instead of asking
    (dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0),
    (dynamic_module_utils, "get_class_in_module", _refuse),
    (generation_utils, "get_class_in_module", _refuse),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings and bars of transformers for the duration of a ``with`` block."""
    level = bars.get_verbosity()
    had_bars = bars.is_progress_bar_enabled()
    try:
        bars.set_verbosity_error()
        bars.disable_progress_bar()
        yield
    finally:
        bars.set_verbosity(level)
        if had_bars:
            bars.enable_progress_bar()


def _hub_answers() -> bool:
    """Whether the hub can be reached, in 2 s: its own client tries for 23 s for each file."""
    with suppress(Exception):  # no name, no route, no proxy, or told to stay offline
        get_session().head(constants.ENDPOINT, timeout=2)
        return True
    return False


@contextmanager
def _guarded(name: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Keep transformers in a ``with`` block from running a model's code, or asking whether to.

    It is silent meanwhile, and fails in one sentence.
    """
    doors = (*_DOORS, (constants, "HF_HUB_OFFLINE", offline or constants.HF_HUB_OFFLINE))
    try:
        with _LOADING, swapped(*doors), quiet():
            yield
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(_sentence_for(error, name, revision)) from error


def _sentence_for(error: Exception, name: str, revision: str | None) -> str:
    """Say what a loader's error means, by what it and its causes are called and say."""
    chain: list[BaseException] = [error]
    while len(chain) < 8:
        cause = chain[-1].__cause__ or chain[-1].__context__
        if cause is None:
            break
        chain.append(cause)
    text = " ".join(f"{type(link).__name__} {link}" for link in chain)
    for pattern, sentence in _CAUSES:
        if re.search(pattern, text):
            return sentence.format(name=name, revision=revision)
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return (
        f"{name} could not be loaded ({why}): "
        "it may be damaged or half downloaded, so download it again."
    )


# ---------------------------------------------------------------- models that other tools hold


def unwrapped(model: Any, tokenizer: Any | None = None) -> tuple[Any, Any | None]:
    """The transformers model that an object holds, and its tokenizer where none was given.

    A TransformerBridge of TransformerLens replaces parts of the model that it holds by components
    with hooks, nnsight its modules' forwards. So a fresh instance of the same class is given their
    tensors: one set of weights, and the other tool's object is left as it is. Neither package is
    imported: an object is known by its class's package.
    """
    packages = {kind.__module__.split(".")[0] for kind in type(model).__mro__}
    if "transformer_lens" in packages:
        inside = _inside_bridge(model)
    elif "nnsight" in packages:
        if not getattr(model, "dispatched", True):
            model.dispatch()  # as its first trace would: until then its weights are not loaded
        inside = model._module
    else:
        return model, tokenizer
    if not isinstance(inside, PreTrainedModel):
        how = (
            "load one with transformers, or wrap one "
            "(TransformerBridge.boot_transformers, nnsight.TransformersModel)"
        )
        raise BadInput(
            f"this {type(model).__name__} wraps no model of transformers, "
            f"so it cannot be looked into: {how}."
        )
    if tokenizer is None:
        tokenizer = getattr(model, "tokenizer", None)
    return _plain_copy(inside).eval(), tokenizer


def _inside_bridge(bridge: Any) -> Any:
    """The model that a TransformerBridge holds; one with processed weights is refused."""
    if getattr(bridge, "_weights_processed", False):
        kind = type(bridge).__name__
        processed = "were processed (layer norms folded, matrices centred)"
        why = f"{processed}, so they are not the model's: boot it again"
        how = "use it without enable_compatibility_mode(), or with no_processing=True"
        raise BadInput(f"the weights of this {kind} {why}, and {how}.")
    return getattr(bridge, "original_model", None)


def _plain_copy(inside: PreTrainedModel) -> PreTrainedModel:
    """A fresh instance of a model's class that shares its tensors, without the parts replaced."""
    tensors: dict[str, Tensor] = {}
    for named_tensors in (inside.named_parameters, inside.named_buffers):
        for name, tensor in named_tensors(remove_duplicate=False):
            # in a bridge, a part that was replaced stands inside its replacement
            tensors[name.replace("_original_component.", "")] = tensor
    with torch.device("meta"):
        plain = type(inside)(copy.deepcopy(inside.config))
    for path, module in plain.named_modules():
        for slots in (module._parameters, module._buffers):
            for name, slot in slots.items():
                if slot is not None:
                    slots[name] = tensors[f"{path}.{name}".lstrip(".")]
    return plain
