"""From a name to a model in memory: its files are checked, no code of theirs runs, and whatever goes wrong is told in
one sentence.

transformers runs a model's own Python where it is told to trust it - or where it asks, and somebody (or a pipe) answers
"y". Not every road to that question carries ``trust_remote_code``: a tokenizer class that is itself an Auto class, a
``custom_generate`` folder and a sub-config do not. So while we load, the question is never asked, and the one door
through which such code is imported is shut.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, dynamic_module_utils
from transformers.generation import utils as generation_utils
from transformers.utils import cached_file
from transformers.utils import logging as bars

from qkscope.capture.files import check_report, file_hash, folder_hash, read_config
from qkscope.capture.names import Place, locate
from qkscope.capture.tap import SERVED
from qkscope.errors import BadInput, check_device

log = logging.getLogger(__name__)

_LOADING = threading.RLock()  # the doors are transformers' own, so one thread at a time shuts and opens them


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError("custom code is never run")


_DOORS = (
    (dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0),  # no time to answer: transformers refuses instead of asking
    (dynamic_module_utils, "get_class_in_module", _refuse),
    (generation_utils, "get_class_in_module", _refuse),
)
_CAUSES = {  # what the errors of a loader are called or say, and what that means
    r"MemoryError|allocate memory|[Oo]ut of memory": "there is not enough memory to load {name}: close other programs, "
    "take a smaller model, or load this one with dtype bfloat16 or spread over devices.",
    r"RevisionNotFoundError|valid git identifier": "{name} has no revision {revision!r}: check the branch, tag or "
    "commit.",
    r"GatedRepoError": "{name} is gated: accept its licence on the hub and log in with `hf auth login`.",
    r"RepositoryNotFoundError|valid model identifier": "the hub has no model {name}: check the name, or give a folder "
    "or .gguf file.",
    r"weights_only|UnpicklingError": "{name} is a pickle that holds more than tensors, which would run when read: "
    "take its safetensors, or have it saved so.",
    r"trust_remote_code|custom code": "{name} brings its own code, which qkscope never runs: use a model transformers "
    "knows.",
    r"LocalEntryNotFoundError|OfflineModeIsEnabled|ProxyError|[Cc]onnect": "{name} is not in the local cache and the "
    "hub cannot be reached: connect once to download it, give a local folder, or use smollm2-135m.",
}


def load(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any | None = None,
    revision: str | None = None,
    attn: str | None = None,
) -> tuple[Any, Any | None, str, str | None, str | None]:
    """A model, its tokenizer, name and revision, and the hash of its files, or None where not all of them were found.

    The arguments are those of `Scope.load`.
    """
    if device_map is not None and device is not None:
        raise BadInput("device and device_map exclude each other: give one of them.")
    target = None
    if device_map is None:
        target = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if attn is not None and attn not in SERVED:
        raise BadInput(f"attn is {' or '.join(SERVED)}, not {attn!r}.")
    options = {"dtype": _dtype(dtype), "attn_implementation": attn, "device_map": device_map}
    options = {option: value for option, value in options.items() if value is not None}
    place = locate(name, revision)
    with _guarded(str(name), revision):
        model, tokenizer, revision, digest = _opened(place, options)
        model.eval().requires_grad_(False)
        if target is not None:
            model.to(target)
    return model, tokenizer, place.name, revision, digest


def _opened(place: Place, options: dict[str, Any]) -> tuple[Any, Any | None, str | None, str | None]:
    """What is at a place, and the hash of its files: those of the hub are there when the model is."""
    before, of_file, commit = None, None, None
    if place.path is None:
        config = Path(cached_file(place.name, "config.json", revision=place.revision))
        read_config(config)  # before transformers makes a config of it
        # the rest comes from the same commit, whatever happens to the branch meanwhile
        commit = config.parent.name if config.parent.parent.name == "snapshots" else place.revision
        folder, source = config.parent, place.name
    else:
        folder = place.path
        if not folder.is_dir():
            from qkscope.capture.gguf import dequantised  # takes a while to import

            of_file = file_hash(place.path)  # the file holds the config too
            folder = dequantised(place.path, of_file)
        before, source = folder_hash(folder), str(folder)
    model, tokenizer = _model(str(place.path or source), source, commit, options), _tokenizer(source, commit)
    digest = None
    with suppress(BadInput):  # its files are not all there: what is in memory is hashed instead
        digest = folder_hash(folder)
    if before not in (None, digest):
        raise BadInput(f"{folder} changed while it was loaded: try again when it is written.")
    return model, tokenizer, commit or place.revision, of_file or digest


def _model(name: str, source: str, revision: str | None, options: dict[str, Any]) -> Any:
    """The model at a source, called by its name in what is said of it."""
    asked: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source, **asked)
    if config._attn_implementation not in (None, *SERVED):  # it may name code on the hub
        config._attn_implementation = None
    # weights of another shape are let through here, and refused by name with what else does not fit
    asked |= {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = _model_class(config, name).from_pretrained(source, **asked, **options)
    check_report(name, report)
    return model


def _model_class(config: Any, name: str) -> Any:
    """The class that saved the weights, so that none are missing and none are left over: one of transformers' models.

    An Auto class, a function or whatever else goes by the name in `architectures` is none.
    """
    named = config.architectures or []
    found = [getattr(transformers, kind, None) for kind in named if isinstance(kind, str)]
    models = [kind for kind in found if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)]
    models = [kind for kind in models if kind.__module__.startswith("transformers.")]
    if named and not models:
        raise BadInput(
            f"{name} says that it is a {named[0]!s:.80}, which is no model of transformers, and code that comes with a "
            "model is never run: use a model transformers knows."
        )
    return models[0] if models else transformers.AutoModelForCausalLM


def _tokenizer(source: str, revision: str | None) -> Any | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
            raise ValueError(f"{type(tokenizer).__name__} is no tokenizer")
    except Exception as error:  # without a tokenizer a model can still be given ids
        log.info("no tokenizer for %s: %s", source, _first_line(error))
        return None
    return tokenizer


def _dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise BadInput(f"{dtype!r} is no dtype for a model: write float32, bfloat16, float16 or auto.")
    return found


@contextmanager
def swapped(*doors: tuple[Any, str, Any]) -> Iterator[None]:
    """Within it some modules have others under some of their names."""
    before = [(module, name, getattr(module, name)) for module, name, _ in doors]
    try:
        for module, name, other in doors:
            setattr(module, name, other)
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


# ---------------------------------------------------------------- what goes wrong, in one sentence


@contextmanager
def _guarded(name: str, revision: str | None) -> Iterator[None]:
    """Within it transformers runs no code of a model, does not ask whether to, is silent, and fails in one sentence."""
    shown = bars.is_progress_bar_enabled()
    levels = {logger: logger.level for logger in map(logging.getLogger, ("transformers", "huggingface_hub"))}
    with _LOADING, swapped(*_DOORS):
        bars.disable_progress_bar()
        for logger in levels:
            logger.setLevel(logging.ERROR)
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(_sentence(error, name, revision)) from error
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)
            if shown:
                bars.enable_progress_bar()


def _sentence(error: Exception, name: str, revision: str | None) -> str:
    chain: list[BaseException] = [error]
    while len(chain) < 8 and (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = " ".join(f"{type(link).__name__} {link}" for link in chain)
    for pattern, sentence in _CAUSES.items():
        if re.search(pattern, text):
            return sentence.format(name=name, revision=revision)
    why = f"{type(error).__name__}: {_first_line(error)}"
    return f"{name} could not be loaded ({why}): it may be damaged or half downloaded, so download it again."


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
