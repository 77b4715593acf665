"""A model is checked on prompts beyond every length that its config names.

What begins at a length (a window, a chunk, sparse attention, another rotation) is not seen in short prompts. Where the
length is short the model itself is given longer prompts, else a small copy of its class is, in which every such length
is short (`small`). A model whose files are known is checked once.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import transformers

from qkscope.capture.files import cache_dir, read_json, write_json
from qkscope.capture.inputs import context_limit
from qkscope.capture.refused import refusal
from qkscope.capture.selfcheck import Check, check_at
from qkscope.capture.small import loud_model, named_lengths, small_config
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput

if TYPE_CHECKING:
    from qkscope.capture.scope import Scope

log = logging.getLogger(__name__)

_VERSION = 3
_SHORT, _BEYOND = 9, 33  # tokens of a prompt, and so many beyond a length
_LONGEST = 64  # a longer length is made short in a small copy


def check_once(scope: Scope) -> None:
    """Check a model whose files are known only where they never passed with these versions and settings."""
    if scope.files_hash is None:
        check_model(scope)
        return
    config = scope.model.config
    setting = [_VERSION, transformers.__version__, torch.__version__, scope.device.type, scope.model.dtype]
    key = " ".join(map(str, [*setting, config._attn_implementation]))
    place = cache_dir("checks", f"{scope.files_hash}.json")
    known = read_json(place)
    passed = known if isinstance(known, dict) else {}
    if key in passed:
        _trust(scope, Check(**passed[key]))
    else:
        write_json(place, {**passed, key: asdict(check_model(scope))})


def check_model(scope: Scope) -> Check:
    """Check the tap on a model, also beyond the lengths that its config names, or refuse it with the fact that failed.

    A padding side that is wrong beyond a length is taken from `Scope.facts`, and so is the query's frame.
    """
    check = check_at(scope, _SHORT)
    if scope.model.main_input_name != "input_ids":
        return check
    if (length := _beyond(scope)) > _SHORT:
        check = _both(check, check_at(scope, length, strict=False))
    far = sorted(name for name, length in named_lengths(scope.model.config).items() if length > _LONGEST)
    if far and (small := _small_check(scope, ", ".join(far))) is not None:
        check = _both(check, small)
    _trust(scope, check)
    return check


def _beyond(scope: Scope) -> int:
    """So many tokens that they are beyond every short length, as far as a prompt may go."""
    limit = context_limit(scope.model, scope.facts.first_position) or _LONGEST + _BEYOND
    named = named_lengths(scope.model.config).values()
    return min(max([0, *(length + _BEYOND for length in named if length <= _LONGEST)]), limit)


def _both(check: Check, longer: Check) -> Check:
    """What holds in two checks: the larger errors, the sides that are right in both."""
    errors = {
        name: max(getattr(check, name), getattr(longer, name))
        for name in ("output_error", "attention_error", "padding_error", "length")
    }
    sides = tuple(side for side in check.sides if side in longer.sides)
    return replace(check, **errors, sides=sides, frame=check.frame or longer.frame)


def _trust(scope: Scope, check: Check) -> None:
    """Keep of a model's padding sides and spaces those that passed."""
    layers = scope.facts.layers
    if check.frame:
        reason = f"beyond a length that its config names, {check.frame}"
        why: dict[Space, str] = {"pre_rope": reason, "query_frame": reason}  # so a trace reads its own code instead
        layers = tuple(replace(one, refusals=why | one.refusals) if one.offset is not None else one for one in layers)
    scope.facts = replace(scope.facts, sides=tuple(check.sides), layers=layers)


_CHECKED: dict[tuple[type, str], Check | BadInput] = {}  # by class and small config


def _small_check(scope: Scope, names: str) -> Check | None:
    """The check of a small copy in which the lengths that a config names are short; None where none can be made."""
    model, verbosity = scope.model, transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # ratios in small configs are of no concern to anybody
    try:
        config = small_config(model.config)
        key = type(model), config.to_json_string(use_diff=False)
        if key not in _CHECKED:
            build = partial(type(model)._from_config, attn_implementation=model.config._attn_implementation)
            try:
                copy = type(scope)(loud_model(build, config))
                _CHECKED[key] = check_at(copy, _beyond(copy), strict=False)
            except BadInput as failure:
                _CHECKED[key] = failure
    except Exception as failure:  # whatever an unusual config makes of itself when it is small
        why = f"no small copy of it could be made ({failure})"
        log.warning("%s was not checked beyond its %s: %s.", scope.name, names, why)
        return None
    finally:
        transformers.logging.set_verbosity(verbosity)
    found = _CHECKED[key]
    if isinstance(found, BadInput):
        why = str(found).partition("cannot be looked into: ")[2] or str(found)
        raise refusal(model, f"beyond its {names} (seen in a small copy of it) {why.rstrip('.')}")
    return found
