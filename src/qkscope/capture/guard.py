"""No code that comes with a model runs, whatever its files say and whatever stands on standard input.

transformers runs a model's own Python where it is told to trust it - or where it asks, and somebody (or a pipe) answers
"y". Not every road to that question carries ``trust_remote_code``: a tokenizer class that is itself an Auto class, a
``custom_generate`` folder and a sub-config do not. So while we load, the question is never asked, and the one door
through which such code is imported is shut.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from qkscope.errors import BadInput

_LOADING = threading.RLock()  # the doors are transformers' own, so one thread at a time shuts and opens them


@contextmanager
def nobodys_code() -> Iterator[None]:
    """Within it transformers neither runs a model's own code nor asks whether to."""
    from transformers import dynamic_module_utils as dynamic
    from transformers.generation import utils as generation

    doors: list[tuple[Any, str, Any]] = [
        (dynamic, "TIME_OUT_REMOTE_CODE", 0),  # no time to answer: transformers refuses instead of asking
        (dynamic, "get_class_in_module", _refuse),
        (generation, "get_class_in_module", _refuse),
    ]
    with _LOADING:
        before = [(module, name, getattr(module, name)) for module, name, _ in doors]
        for module, name, shut in doors:
            setattr(module, name, shut)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError("custom code is never run")


def model_class(config: Any, name: str) -> Any:
    """The class that saved the weights, so that none are missing and none are left over: one of transformers' models.

    An Auto class, a function or whatever else goes by the name in `architectures` is none.
    """
    import transformers

    named = config.architectures or []
    found = [getattr(transformers, kind, None) for kind in named if isinstance(kind, str)]
    kinds = [kind for kind in found if _is_model(kind)]
    if named and not kinds:
        raise BadInput(
            f"{name} says that it is a {named[0]!s:.80}, which is no model of transformers, and code that comes with a "
            "model is never run: use a model transformers knows."
        )
    return kinds[0] if kinds else transformers.AutoModelForCausalLM


def _is_model(kind: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__.startswith("transformers.")


def plain_attention(config: Any, served: tuple[str, ...]) -> None:
    """Forget an attention that a config asks for and we do not serve: it may name code on the hub."""
    if config._attn_implementation not in (None, *served):
        config._attn_implementation = None
