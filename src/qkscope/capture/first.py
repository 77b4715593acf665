"""The first token: what a model was trained to see before every prompt, and how many tokens it knows.

Attention parks on the first token, so a model that expects one and gets none computes something else without an error.
A tokenizer that adds one says so by doing it. Where it adds none (or where ids are given bare and there is no
tokenizer), only families of which every release was trained with one are taken to expect it: a ``bos_token_id`` in the
config alone says nothing (SmolLM2 and GPT-2 name one, and never saw it first).
"""

from __future__ import annotations

from typing import Any

from qkscope.capture.probe import text_config

_ALWAYS = ("gemma", "opt")  # how the model types of such families start


def first_token(model: Any, tokenizer: Any | None) -> int | None:
    """The id that stands first in every prompt a model was trained on; None where that is not known."""
    added = _added(tokenizer)
    if added is not None:
        return added
    config = text_config(model)
    loaded = bool(getattr(model.config, "name_or_path", ""))  # made in memory, it was trained on nothing
    named = getattr(config, "bos_token_id", None)
    return named if loaded and isinstance(named, int) and config.model_type.startswith(_ALWAYS) else None


def _added(tokenizer: Any | None) -> int | None:
    """The id that a tokenizer puts before every text."""
    if tokenizer is None:
        return None
    try:
        first = tokenizer("a")["input_ids"][0]
    except Exception:  # one that has no such word adds nothing that we know of
        return None
    return first if first in (tokenizer.bos_token_id, getattr(tokenizer, "cls_token_id", None)) else None


def vocabulary_size(model: Any) -> int | None:
    """How many ids a model knows; None where it does not say."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # models of sounds and pictures may have none
        return None
    size = getattr(embedding, "num_embeddings", None)
    return size if isinstance(size, int) else None
