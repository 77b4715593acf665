"""Whatever a loader raises, told in one sentence that says what to do; and loading without noise."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qkscope.errors import BadInput

_OFFLINE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ProxyError"}


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and warnings from transformers for the moment (what matters of them we tell), and no word on
    every retry from the hub.
    """
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(before)
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def told(what: str, name: str, revision: str | None) -> Iterator[None]:
    """Turn whatever a loader raises into one sentence with what to do."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(_sentence(error, what, name, revision)) from error


def _sentence(error: Exception, what: str, name: str, revision: str | None) -> str:
    chain: list[BaseException] = [error]
    while len(chain) < 8 and (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    kinds = {type(link).__name__ for link in chain}
    text = " ".join(str(link) for link in chain)
    if any(map(_out_of_memory, chain)):
        return (
            f"there is not enough memory to load {name}: close other programs, take a smaller model, or load this one "
            "with dtype bfloat16 or spread over devices."
        )
    if "RevisionNotFoundError" in kinds or "valid git identifier" in text:
        return f"{name} has no revision {revision!r}: check the branch, tag or commit."
    if "GatedRepoError" in kinds:
        return f"{name} is gated: accept its licence on the hub and log in with `hf auth login`."
    if "RepositoryNotFoundError" in kinds or "valid model identifier" in text:
        return f"the hub has no model {name}: check the name, or give a folder or .gguf file."
    if "trust_remote_code" in text or "custom code" in text:
        return f"{name} brings its own code, which qkscope never runs: use a model transformers knows."
    if kinds & _OFFLINE or "connect" in text.lower():
        return (
            f"{name} is not in the local cache and the hub cannot be reached: connect once to download it, give a"
            " local folder, or use smollm2-135m."
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{what} ({type(error).__name__}: {first[:200]}): the files may be damaged or half downloaded."


def _out_of_memory(error: BaseException) -> bool:
    kinds = (MemoryError, torch.OutOfMemoryError)
    told_so = "allocate memory" in str(error) or "out of memory" in str(error).lower()
    return isinstance(error, kinds) or told_so or getattr(error, "errno", None) == errno.ENOMEM
