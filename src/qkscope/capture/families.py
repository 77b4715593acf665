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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from qkscope.capture.inputs import input_device, model_pad_id, pad_rows, short_ids, short_inputs
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.small import TABLE, loud_model, small_config
from qkscope.capture.tap import Call, Stop
from qkscope.capture.weights import head_weights
from qkscope.capture.writers import Reader, Recorded
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_call

_HEADS: dict[str, Any] = {
    "masked": transformers.AutoModelForMaskedLM, "image": transformers.AutoModelForImageClassification,
    "image_text": transformers.AutoModelForImageTextToText, "sequence": transformers.AutoModelForSeq2SeqLM,
}  # fmt: skip


def _rows() -> dict[str, dict[str, Any]]:
    """Rows of the table, then every other type of causal model; one that stands there with another head comes again."""
    rows = dict(TABLE["families"])
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        again = rows.get(family, {}).get("kind") == "masked"
        rows.setdefault(f"{family} (decoder)" if again else family, {"type": family})
    return rows


FAMILIES: dict[str, dict[str, Any]] = _rows()
"""Every family we try, in the order of the table, and what its tiny model sets besides small sizes."""


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """The config of a family's tiny model; ``overrides`` replace the family's own settings."""
    if family not in FAMILIES:
        raise BadInput(f"no tiny model for the family {family!r}: choose one of {', '.join(FAMILIES)}.")
    row = FAMILIES[family]
    parts = [TABLE["parts"][name] for name in row.get("is", ())]
    own = {name: value for name, value in row.items() if name not in ("type", "is", "kind")}
    settings = {name: value for part in (*parts, own, overrides) for name, value in part.items()}
    config = transformers.AutoConfig.for_model(row.get("type", family))
    if "kind" not in row and hasattr(config, "is_decoder"):  # BERT and its relatives look both ways unless told
        settings = {"is_decoder": True, **settings}
    if "text_config" in config.sub_configs:
        settings = {"text_config": small_config(config.text_config, **settings).to_dict()}
    return small_config(config, **settings)


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
    head = _HEADS.get(FAMILIES[family].get("kind", ""), transformers.AutoModelForCausalLM)
    return loud_model(head.from_config, config, seed)


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
        split = trace_error(scope)
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


@torch.no_grad()
def sum_error(reader: Reader, found: Recorded, head: Head, key_mask: Tensor) -> float:
    """The largest difference between a head's logits and the sum of their parts, over the largest part.

    Parameters
    ----------
    reader : of this head.
    found : what one batch left.
    head : whose logits.
    key_mask : which of the places are keys.
    """
    vectors = []
    for side in ("query", "key"):
        parts = reader.turn(found, head.layer, reader.read(found, head, side), side)
        vectors += [reader.true(found, head, side), parts]
    q, q_parts, k, k_parts = vectors
    logits = torch.einsum("nd,nkd->nk", q[:, 0], k)
    split = (torch.einsum("ncd,nkd->nck", q_parts[:, :, 0], k), torch.einsum("nd,nckd->nck", q[:, 0], k_parts))
    errors = [((parts.sum(1) - logits) * key_mask).abs().max() for parts in split]
    largest = [(parts * key_mask[:, None]).abs().max() for parts in split]
    return float(max(errors) / max(largest))


def trace_error(scope: Scope) -> float:
    """The largest `sum_error` of all heads but those of layer 0, on a short batch of prompts of two lengths.

    Raises
    ------
    BadInput
        If the model cannot be traced; the sentence says why.
    """
    if scope.n_layers < 2:
        raise BadInput(f"{scope.name} cannot be traced: it has one layer, so only the embedding writes before it.")
    inputs, places = _batch(scope)
    heads = [head for head in scope.heads() if head.layer > 0]
    widths = {scope.facts.layers[head.layer].d_head for head in heads}
    errors = []
    for width in sorted(widths):
        some = [head for head in heads if scope.facts.layers[head.layer].d_head == width]
        reader = Reader(scope, some)
        found = reader.record(inputs, places)
        errors += [sum_error(reader, found, head, places.key_mask) for head in some]
    return max(errors)


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
