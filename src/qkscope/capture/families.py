"""Which architectures can be looked into: answered by looking into a tiny random model of each, never from a list.

A family is transformers' ``model_type``. It is supported when `Scope` takes its tiny model and the self-check holds;
the error shown is ``max |softmax([cap(scale · q·k) + mask, rest]) − eager attention|`` over all heads: of a padded
batch against itself, and against each prompt alone. The second error is that of the split of its logits among writers
(`trace_error`).

Each tiny model is small enough to build in milliseconds and *loud* enough to catch mistakes: matrices are drawn from
N(0, 0.2²), so that attention is far from uniform, and everything else (norm gains, biases, sinks) is moved from its
initial value to ``p₀ + 0.4 ε``, so that a forgotten gain or bias shows. Windows are shorter than the test batch and,
where a family allows it, ``d_head · heads ≠ d_model``.

A family is traced (`trace_error`) if parts sum to the logit: for a query, a key and a head, with the true vectors q and
k and their parts, ``error = max |Σ_c q_c·k − q·k|, |Σ_c q·k_c − q·k|`` over ``max |q_c·k|, |q·k_c|``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, TypedDict

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

from qkscope.capture.inputs import input_device, model_pad_id, pad_rows, short_ids, short_inputs
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop
from qkscope.errors import BadInput
from qkscope.kinds import checked_call

_TABLE = tomllib.loads(files("qkscope.capture").joinpath("families.toml").read_text("utf-8"))
_HEADS: dict[str, Any] = {
    "masked": transformers.AutoModelForMaskedLM, "image": transformers.AutoModelForImageClassification,
    "image_text": transformers.AutoModelForImageTextToText, "sequence": transformers.AutoModelForSeq2SeqLM,
}  # fmt: skip


def _settings(row: dict[str, Any]) -> dict[str, Any]:
    """What a row of the table comes to: sizes, the parts that it takes over, and its own."""
    taken = [{} if row.get("alone") else _TABLE["sizes"], *(_TABLE["parts"][name] for name in row.get("is", ()))]
    own = {name: value for name, value in row.items() if name not in ("alone", "is", "kind", "beside")}
    return {name: value for part in (*taken, own) for name, value in part.items()}


FAMILIES: dict[str, dict[str, Any]] = {family: _settings(row) for family, row in _TABLE["families"].items()}
"""Every family we try, in the order of the table, and what its tiny config sets."""


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """The config of a family's tiny model; ``overrides`` replace the family's own settings."""
    if family not in FAMILIES:
        raise BadInput(f"no tiny model for the family {family!r}: choose one of {', '.join(FAMILIES)}.")
    row, settings = _TABLE["families"][family], FAMILIES[family] | overrides
    if row.get("kind") in ("masked", "image"):  # encoders know no KV heads and no cache
        settings = {name: value for name, value in settings.items() if name not in ("num_key_value_heads", "use_cache")}
    if "beside" in row:
        settings = {"text_config": settings, **row["beside"]}
    return transformers.AutoConfig.for_model(family, **settings)


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """Build a tiny random model of one architecture, the same one for the same seed, without touching the global RNG.

    Parameters
    ----------
    family : str
        A key of `FAMILIES`: transformers' ``model_type``.
    seed : int
        Seed of the weights.
    **overrides
        Config values that replace the family's own, for example ``use_qk_norm=False``.

    Returns
    -------
    PreTrainedModel
        In float32 and eval mode, with the head that gives ``logits`` (next token, masked token or image class).
    """
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = _HEADS.get(_TABLE["families"][family].get("kind"), transformers.AutoModelForCausalLM)
        model = head.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            # Cohere's gains are [head, d_head]: a matrix is what does not begin as one number
            is_matrix = weight.ndim > 1 and bool((weight != weight.flatten()[0]).any())
            weight.copy_(0.2 * noise if is_matrix else weight + 0.4 * noise)
    return model


class FamilyRow(TypedDict):
    """One row of the table: `reason` says why a family is refused, or what a supported one cannot do."""

    family: str
    supported: bool
    reason: str
    max_error: float | None
    trace_error: float | None


@checked_call
def list_families(families: Iterable[str] | None = None) -> list[FamilyRow]:
    """Check live which architectures can be looked into.

    Parameters
    ----------
    families : iterable of str, optional
        Names of families (transformers' ``model_type``), all that are known by default.

    Returns
    -------
    list of FamilyRow
        In the order asked for: ``family``, ``supported``, ``reason``, ``max_error`` of the attention and
        ``trace_error`` of its split among writers (None where there is none; the reason says why).

    Examples
    --------
    >>> import qkscope as qk
    >>> [(row["family"], row["supported"]) for row in qk.list_families(["bloom", "mamba"])]
    [('bloom', True), ('mamba', False)]
    """
    with _quietly():
        return [check_family(family) for family in (FAMILIES if families is None else families)]


def check_family(family: str) -> FamilyRow:
    """Build one tiny model, look into it, and say what came out."""
    try:
        scope = Scope.from_model(tiny_model(family), check=False)
        check = scope.self_check()
        error = max(check.attention_error, check.padding_error)
    except Exception as failure:  # one family that breaks (or that this transformers lacks) must not hide the others
        if family not in FAMILIES:
            raise
        return FamilyRow(family=family, supported=False, reason=_why(failure), max_error=None, trace_error=None)
    limits, split = list(_limits(scope)), None
    try:
        from qkscope.linear.check import trace_error

        split = trace_error(scope, *_batch(scope))
    except Exception as failure:
        limits.append(f"no trace: {_why(failure)}")
    return FamilyRow(family=family, supported=True, reason="; ".join(limits), max_error=error, trace_error=split)


def _why(failure: Exception) -> str:
    if isinstance(failure, BadInput):
        return str(failure)
    return f"its tiny model failed with {type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"


def _limits(scope: Scope) -> Iterator[str]:
    refused = {(space, why) for layer in scope.facts.layers for space, why in layer.refusals.items()}
    for kind in dict.fromkeys(layer.instead for layer in scope.facts.layers if layer.instead):
        layers = ", ".join(str(i) for i, layer in enumerate(scope.facts.layers) if layer.instead == kind)
        yield f"no heads in layers {layers}: these have a {kind} instead of attention"
    for space, why in sorted(refused):
        yield f"no {space}: {why}"
    try:
        from qkscope.linear.weights import head_weights

        head_weights(scope)
    except BadInput as refusal:
        yield f"no weights: {refusal}"


@contextmanager
def _quietly() -> Iterator[None]:
    """No warnings (tiny configs make transformers warn about ratios and kernels that do not matter) and one thread.

    On matrices this small a second thread does nothing but wait, and on a busy machine it waits long.
    """
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)


_LENGTHS = (9, 7)


def _batch(scope: Scope) -> tuple[dict[str, Tensor], Places]:
    """Two prompts, padded where they can be, or two images; each asks from its last token."""
    model, sides = scope.model, scope.facts.sides
    if model.main_input_name == "pixel_values":
        inputs, tokens = short_inputs(model, _LENGTHS), []

        def count(call: Call) -> None:
            tokens.append(call.k.shape[2])
            raise Stop

        scope.watch(inputs, count)
        mask = torch.ones(len(_LENGTHS), tokens[0], device=input_device(model))
    else:
        rows = short_ids(model, _LENGTHS if sides else (_LENGTHS[0],) * len(_LENGTHS))
        inputs = pad_rows(rows, model_pad_id(model) or 0, sides[0] if sides else "left", scope.facts.takes_positions)
        inputs = {name: value.to(input_device(model)) for name, value in inputs.items()}
        mask = inputs["attention_mask"]
    row = torch.arange(len(mask), device=mask.device)
    last = mask.shape[1] - 1 - mask.flip(-1).long().argmax(-1)
    return inputs, Places.everywhere(row, last, mask)
