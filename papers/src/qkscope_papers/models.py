"""Which architectures can be looked into.

Answered by looking into a tiny random model of each, never from a list. Every type of causal model
that transformers has is tried, with the lengths that its config names made short, so that 37 tokens
are beyond them. A family is refused where `Scope` refuses its tiny model. The first error is that
of the attention, ``max |softmax([cap(scale · q·k) + mask, rest]) − eager attention|`` over all
heads and queries, of prompts padded on each side that is offered, against plain transformers, which
is given one prompt at a time. The second is that of the split of its logits among writers
(`trace_error`). Then `why` is asked about a head, and about all.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from qkscope.checking import checked_call
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.linear.head_weights import head_weights
from qkscope.model.capture_types import Places
from qkscope.model.inputs import forward, short_ids
from qkscope.model.scope import Scope
from qkscope.verbs.why.why import why
from qkscope_papers.families import FAMILIES, LENGTHS, tiny_model, trace_error

CLOSE = 2e-5
Verdict = Literal["right", "refused", "wrong", "not built"]


class FamilyRow(TypedDict):
    """One row of the table: `reason` says why a family is refused, or what a supported one cannot
    do.

    `length` is the tokens of the longest prompt checked. The `verdict` is wrong where an error is
    above 2e-5, or where something fails without a sentence that says why; ``not built`` where
    transformers makes no tiny model of it.
    """

    family: str
    supported: bool
    reason: str
    max_error: float | None
    trace_error: float | None
    length: int | None
    verdict: Verdict


def random_weights(config: Any, tokenizer: Any, device: Any, seed: int = 0) -> Scope:
    """A model of this shape that was not trained: what any measurement says of it, it says of
    nothing learned.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(device, torch.float32).eval()
    return Scope.from_model(model, tokenizer, name="random", check=False)


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
        In the order asked for: ``family``, ``supported``, ``reason``, ``max_error`` of the
        attention and ``trace_error`` of its split among writers (None where there is none; the
        reason says why), ``length`` and ``verdict``.

    Examples
    --------
    >>> [(row["family"], row["verdict"]) for row in list_families(["bloom", "mamba"])]
    [('bloom', 'right'), ('mamba', 'refused')]
    """
    with _quietly():
        return [check_family(family) for family in (FAMILIES if families is None else families)]


def says_families(rows: Sequence[FamilyRow]) -> str:
    """How many families came out how, in one sentence."""
    count = Counter(row["verdict"] for row in rows)
    built = f", {count['not built']} cannot be built here" if count["not built"] else ""
    right = f"{count['right']} of {len(rows)} families can be looked into and are right"
    return f"{right}, {count['refused']} are refused, {count['wrong']} are wrong{built}."


def check_family(family: str) -> FamilyRow:
    """Build one tiny model, look into it, and say what came out."""
    row = FamilyRow(
        family=family,
        supported=False,
        reason="",
        max_error=None,
        trace_error=None,
        length=None,
        verdict="not built",
    )
    try:
        model = tiny_model(family)
        forward(
            copy.deepcopy(model),
            {"input_ids": torch.tensor([[5, 6]])} if _reads_text(model) else {},
        )
    # one family that breaks (or that this transformers lacks) must not hide the others
    except Exception as failure:
        if family not in FAMILIES:
            raise
        if "model" not in locals() or _reads_text(model):
            return row | {"reason": _why(failure)}
    try:
        scope = Scope.from_model(model, check=False)
        check = scope.self_check()
    except Exception as failure:
        return row | {"reason": _why(failure), "verdict": _refused(failure)}
    return _looked_into(
        row | {"supported": True, "length": check.length}, scope, check.attention_error
    )


def _reads_text(model: Any) -> bool:
    return model.main_input_name == "input_ids" and not getattr(
        model.config, "is_encoder_decoder", False
    )


def _looked_into(row: FamilyRow, scope: Scope, error: float) -> FamilyRow:
    """Fill in the errors of a family that is served, and what it cannot do."""
    limits = list(_limits(scope))
    failed = False

    def tried(what: str, run: Callable[[], Any]) -> Any:
        nonlocal failed
        try:
            return run()
        except Exception as failure:
            failed |= _refused(failure) == "wrong"
            limits.append(f"{what}: {_why(failure)}")
            return None

    if _reads_text(scope.model):
        found = tried("no comparison", lambda: _attention_error(scope, row["family"]))
        error, row["length"] = max(error, found or 0.0), max(row["length"] or 0, LENGTHS[0])
    splits = tried(
        "no trace", lambda: [trace_error(scope, side) for side in scope.facts.sides or (None,)]
    )
    row["max_error"], row["trace_error"] = error, splits and max(splits)
    if "kind" not in FAMILIES[row["family"]]:
        (ids,) = short_ids(scope.model, LENGTHS[:1])
        prompt = Example(ids=tuple(ids.tolist()))
        tried("no why of a head", lambda: why(scope, prompt, scope.heads()[-1], draws=2))
        tried("no why without a head", lambda: why(scope, prompt))
    wrong = failed or not error <= CLOSE or not (row["trace_error"] or 0.0) <= CLOSE
    return row | {"reason": "; ".join(limits), "verdict": "wrong" if wrong else "right"}


@torch.no_grad()
def _attention_error(scope: Scope, family: str) -> float:
    """Attention of prompts in padded batches against what transformers reports of each prompt
    alone, run eagerly.
    """
    rows = short_ids(scope.model, LENGTHS)
    alone = [_reported(scope, family, ids[None]) for ids in rows]
    prompts = [
        Example(ids=tuple(ids.tolist()), queries=tuple((i, i + 1) for i in range(len(ids))))
        for ids in rows
    ]
    worst = 0.0
    for side in scope.facts.sides or (None,):
        for batch in [prompts] if side else [[prompt] for prompt in prompts]:
            encoded = scope.encode(batch, padding_side=side)
            mask = encoded.inputs["attention_mask"]
            places = Places.everywhere(encoded.places.row, encoded.places.query, mask)
            for width in {layer.d_head for layer in scope.facts.layers if layer.n_heads}:
                heads = [
                    head for head in scope.heads() if scope.facts.layers[head.layer].d_head == width
                ]
                ours = scope.capture_inputs(encoded.inputs, places=places, heads=heads).attention()
                for i, own in enumerate(encoded.example.unique().tolist()):
                    theirs = alone[prompts.index(batch[own])]
                    real = ours[encoded.example == own][..., mask[i].bool()]
                    length = real.shape[-1]
                    for slot, head in enumerate(heads):
                        there = theirs[head.layer][head.index, :, :length]
                        worst = max(worst, float((real[:, slot] - there).abs().max()))
    return worst


def _reported(scope: Scope, family: str, ids: Tensor) -> dict[int, Tensor]:
    """Attention by layer, as a model reports it; some report it of every layer, others of those
    with heads alone.
    """
    plain = tiny_model(family, attn_implementation="eager")
    plain.set_attn_implementation(
        "eager"
    )  # of a text part too; Falcon can be told only when it is built
    attentions = forward(plain, {"input_ids": ids, "output_attentions": True}).attentions
    found = [one[0] for one in attentions if one is not None]
    layers = [i for i, layer in enumerate(scope.facts.layers) if layer.n_heads]
    if len(found) == scope.n_layers:
        found = [found[i] for i in layers]
    if len(found) != len(layers):
        raise ValueError(
            f"{len(found)} attentions are reported of {len(layers)} layers, so they cannot be "
            "compared"
        )
    return dict(zip(layers, found, strict=True))


def _refused(failure: Exception) -> Verdict:
    return "refused" if isinstance(failure, BadInput) else "wrong"


def _why(failure: Exception) -> str:
    if isinstance(failure, BadInput):
        return str(failure)
    return (
        f"its tiny model failed with {type(failure).__name__}: "
        f"{next(iter(str(failure).splitlines()), '')}"
    )


def _limits(scope: Scope) -> Iterator[str]:
    refused = {one for layer in scope.facts.layers for one in layer.refusals.items()}
    for kind in dict.fromkeys(layer.instead for layer in scope.facts.layers if layer.instead):
        layers = ", ".join(
            str(i) for i, layer in enumerate(scope.facts.layers) if layer.instead == kind
        )
        yield f"no heads in layers {layers}: these have a {kind} instead of attention"
    for space, reason in sorted(refused):
        yield f"no {space}: {reason}"
    try:
        head_weights(scope)
    except BadInput as refusal:
        yield f"no weights: {refusal}"


@contextmanager
def _quietly() -> Iterator[None]:
    """No warnings (tiny configs make transformers warn about ratios and kernels that do not matter)
    and one thread.

    On matrices this small a second thread does nothing but wait, and on a busy machine it waits
    long.
    """
    verbosity = logging.get_verbosity()
    threads = torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)
