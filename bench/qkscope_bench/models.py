"""Bench rows on the embedded language model: the cost of looking, and what closed forms save.

The plain way of the causal test is the published one: stock eager attention with the LM head, and
two forward passes (clean and edited) per head and condition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qkscope import tasks
from qkscope.findings.because import SCREEN, WORDS, Because
from qkscope.findings.finding import Look
from qkscope.findings.head_rows import HeadRows
from qkscope.findings.swap_rows import capture_rows, draw_pairs
from qkscope.findings.task_batches import batches_of
from qkscope.heads import Head, parse_heads
from qkscope.linear.attribution import values_of
from qkscope.linear.reader import Reader
from qkscope.model.encode import Encoding
from qkscope.model.scope import Scope
from qkscope.rerun.rerun_tokens import Again, prompt_of
from qkscope.sums.bases import Projector
from qkscope.sums.moments import Moments
from qkscope.sums.relative_logits import relative_weights
from qkscope.sums.swap_algebra import SwapRows, swapped_keys
from qkscope.texts.documents import python_texts
from qkscope.texts.holdout import Passage
from qkscope.texts.task import ANSWER, Unit
from qkscope.verbs.atlas.head_patterns import Patterns
from qkscope.verbs.atlas.rule_fit import RuleFit
from qkscope.verbs.atlas.word_classes import WordClasses
from qkscope.verbs.decompose import decompose
from qkscope.verbs.swap.features import Features
from qkscope_bench.harness import Row, Seconds, compare, hardware, row

_HEADS = "L18H6,L18H7,L17H5"
_CONDITIONS = ("order", "lexical", "both", "random_order", "random_lexical", "random_both")
_BATCH = 16


@cache
def _scope(attn: Any = None) -> Scope:
    return Scope.load("smollm2-135m", attn=attn)


def _order_prompts(scope: Scope, count: int) -> list[Encoding]:
    units = tasks.binding(9).fit("order", count)
    return [scope.encode([units[i][0] for i in part]) for part in batches_of(units, _BATCH)]


def against_body(
    scope: Scope, batches: Sequence[Encoding], look: Callable[[Encoding], object], repeats: int
) -> Seconds:
    """Batches looked at, against the plain way to run them: the model's body, nothing looked at."""

    @torch.no_grad()
    def plain() -> None:
        for batch in batches:
            scope.model.base_model(**batch.inputs, use_cache=False)

    def ours() -> None:
        for batch in batches:
            look(batch)

    return compare(plain, ours, repeats)


def sums_of(scope: Scope, contrast: str) -> Callable[[Encoding], None]:
    """Queries and keys of all heads, ΔC accumulated."""
    moments = Moments(
        scope.heads(), [contrast], scope.d_head, group_size=scope.group_size, device=scope.device
    )

    def update(batch: Encoding) -> None:
        captured = scope.capture_inputs(batch)
        moments.update(captured.q, captured.k, {contrast: captured.labels[contrast]})

    return update


@row
def capture_overhead() -> Row:
    """Queries and keys of all 270 heads at the last token and nine keys, ΔC accumulated, against
    the bare body.
    """
    scope = _scope()
    batches = _order_prompts(scope, 4 * _BATCH)
    seconds = against_body(scope, batches, sums_of(scope, "order"), repeats=7)
    return seconds.overhead(
        f"all {len(scope.heads())} heads, {4 * _BATCH} prompts; {hardware(scope.device)}"
    )


@row
def early_stop() -> Row:
    """Capturing layer 21 alone, with the pass ended there, against running all 30 layers."""
    scope = _scope()
    batches = _order_prompts(scope, 2 * _BATCH)
    heads = [Head(21, 0)]
    seconds = against_body(
        scope, batches, lambda batch: scope.capture_inputs(batch, heads=heads), repeats=7
    )
    return seconds.faster(
        f"head of layer 21 of {scope.n_layers}, against the bare body; {hardware(scope.device)}"
    )


def because_seconds(
    scope: Scope, ids: Tensor, looks: Sequence[Look], count: int, screen: int
) -> Seconds:
    """What decides some looks, against every word changed as often with plain forwards; CPU seconds
    on one.
    """
    again = Again.of(scope, ids)
    every = Because(again, looks, count=count, screen=screen)
    prompts = []
    for word in every.words:
        prompts += [every.with_change(change) for change in every.alternatives(word)]

    @torch.no_grad()
    def plain() -> None:
        for some in torch.stack(prompts).to(scope.device).split(_BATCH):
            scope.model.base_model(input_ids=some, use_cache=False)

    def ours() -> None:
        Because(Again.of(scope, ids), looks, count=count, screen=screen).reasons()

    if scope.device.type == "cpu":
        return compare(plain, ours, 1, warm=False, clock=time.process_time)
    return compare(plain, ours, 3)


def _passage(scope: Scope, length: int) -> Tensor:
    assert scope.tokenizer is not None
    ids = scope.tokenizer(python_texts()[3].text)["input_ids"]
    return torch.tensor(ids[:length], device=scope.device)


@row
def because() -> Row:
    """The words that decide a look of an induction head, against changing all eight times."""
    scope = _scope()
    ids = _passage(scope, 48)
    ids = torch.cat([ids, ids[8:16]])  # a copy, so that there is a reason
    seconds = because_seconds(scope, ids, [Look(Head(17, 3), len(ids) - 1, 16)], WORDS, SCREEN)
    return seconds.faster(f"one look of L17H3, {len(ids)} tokens; {hardware(scope.device)}")


@row
def atlas_overhead() -> Row:
    """The attention of all 270 heads in four passages, read and given rules for one layer, against
    the plain forward.
    """
    scope = _scope()
    ids = _passage(scope, 4 * 64).view(4, 64)
    passages = [Passage("topic", i, tuple(row)) for i, row in enumerate(ids.tolist())]
    heads = scope.heads()

    def rules() -> None:
        patterns = Patterns.of(scope, heads, passages)
        fit = RuleFit(patterns.of_heads(range(9)), WordClasses.of(scope, ids.flatten()))
        for h in range(9):
            fit.rule(h)

    @torch.no_grad()
    def plain() -> None:
        scope.model(**prompt_of(scope, ids), use_cache=False)

    seconds = compare(plain, rules)
    return seconds.overhead(f"{len(heads)} heads, 4×64 tokens; {hardware(scope.device)}")


# ---------------------------------------------------------------- who wrote the query and the key


class _FarEnough(Exception):
    """A plain forward has gone far enough."""


def forward_to(scope: Scope, batches: Sequence[Encoding], attention: Any) -> Callable[[], None]:
    """The plain forward, ended as soon as the queries and keys of an attention layer exist."""

    def stop(*_: Any) -> None:
        raise _FarEnough

    @torch.no_grad()
    def plain() -> None:
        hook = attention.v_proj.register_forward_hook(stop)  # the last of the three
        try:
            for batch in batches:
                with suppress(_FarEnough):
                    scope.model.base_model(**batch.inputs, use_cache=False)
        finally:
            hook.remove()

    return plain


def trace_seconds(
    scope: Scope, heads: Sequence[Head], batches: Sequence[Encoding], repeats: int
) -> Seconds:
    """Writers of both sides, recorded and split, against the plain forward until these heads'
    queries and keys exist.

    Heads ask with directions, one head by itself and several together, as `trace` does it.
    """
    reader = Reader(scope, heads)
    last = max(head.layer for head in heads)

    def ours() -> None:
        for batch in batches:
            run = reader.record(batch.inputs, batch.places)
            signs = batch.labels[ANSWER].long().masked_fill(~batch.places.key_mask, 0)
            if len(heads) == 1:
                _ = HeadRows(run, heads[0], signs).marginals
            else:
                weights = relative_weights(signs)[:, None].expand(-1, len(heads), -1)
                for _ in values_of(run, weights):
                    pass

    attention = reader.blocks[last].attention
    return compare(forward_to(scope, batches, attention), ours, repeats)


@row
def trace_one() -> Row:
    """One head's writers at the last token and nine keys, both sides, against the forward to its
    layer.
    """
    scope = _scope()
    seconds = trace_seconds(scope, [Head(18, 6)], _order_prompts(scope, 4 * _BATCH), repeats=7)
    return seconds.overhead(f"L18H6, {4 * _BATCH} prompts; {hardware(scope.device)}")


@row
def trace_all() -> Row:
    """Writers of all heads but the first layer's, both sides, against the forward to the last
    layer.
    """
    scope = _scope()
    heads = [head for head in scope.heads() if head.layer > 0]
    seconds = trace_seconds(scope, heads, _order_prompts(scope, 4 * _BATCH), repeats=5)
    return seconds.overhead(f"{len(heads)} heads, {4 * _BATCH} prompts; {hardware(scope.device)}")


# ---------------------------------------------------------------- the causal test


def _plain_swap(units: Sequence[Unit], rows: SwapRows, projectors: dict[str, Projector]) -> Tensor:
    """Two forwards per head and condition; returns the edited attention on the right key,
    (condition, head, prompt).
    """
    scope = _scope("eager")
    heads = parse_heads(_HEADS)
    after = torch.zeros(len(_CONDITIONS), len(heads), len(units))
    batches = batches_of(units, _BATCH)
    starts = torch.tensor([0, *map(len, batches)]).cumsum(0)
    for c, condition in enumerate(_CONDITIONS):
        left, right = (f[0] if f.ndim == 4 else f for f in projectors[condition])
        for h, head in enumerate(heads):
            own = Projector(left[h], right[h])
            for part, first in zip(batches, starts, strict=False):
                encoded = scope.encode([units[i][0] for i in part])
                index = torch.arange(len(part))
                orig = rows.orig[first : first + len(part)]
                target = rows.target[first : first + len(part)]
                keys = encoded.places.keys
                columns = (keys[index, orig], keys[index, target])
                with torch.no_grad():
                    scope.model(**encoded.inputs, use_cache=False)
                weights = _edited_forward(scope, encoded.inputs, head, columns, own)
                found = weights[index, encoded.places.query, columns[0]]
                after[c, h, first : first + len(part)] = found
    return after


@torch.no_grad()
def _edited_forward(
    scope: Scope,
    inputs: dict[str, Tensor],
    head: Head,
    columns: tuple[Tensor, Tensor],
    projector: Projector,
) -> Tensor:
    """One head's attention in a stock forward whose keys are swapped on their way into the
    attention function.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    kept: list[Tensor] = []

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if module.layer_idx != head.layer:
            return eager_attention_forward(module, q, k, v, mask, **kwargs)
        groups = module.num_key_value_groups
        rows = torch.arange(len(k))
        keys = k.repeat_interleave(groups, dim=1)
        values = v.repeat_interleave(groups, dim=1)
        at = [(rows, head.index, column) for column in columns]
        keys[at[0]], keys[at[1]] = swapped_keys(keys[at[0]], keys[at[1]], projector)
        module.num_key_value_groups = 1
        try:
            output, weights = eager_attention_forward(module, q, keys, values, mask, **kwargs)
        finally:
            module.num_key_value_groups = groups
        kept.append(weights[:, head.index])
        return output, weights

    ALL_ATTENTION_FUNCTIONS.register("qkscope_plain", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("qkscope_plain", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    scope.model.config._attn_implementation_internal = "qkscope_plain"
    try:
        scope.model(**inputs, use_cache=False)
    finally:
        scope.model.config._attn_implementation_internal = "eager"
    return kept[0]


@row
def swap_pipeline() -> Row:
    """48 held-out prompts, 3 heads × 6 conditions: one capture and closed forms, against two
    forwards for each.
    """
    scope = _scope()
    task = tasks.binding(9)
    heads = parse_heads(_HEADS)
    fit = decompose(
        scope, task, heads, 48, contrasts=["order", "lexical"], batch_size=_BATCH, progress=False
    )
    every, _ = Features.of(scope, fit, heads, ["order", "lexical"]).conditions(draws=1, seed=0)
    units = task.test(48)
    projectors = {condition.name: projector for condition, projector in every.items()}
    rows = capture_rows(scope, units, fit, heads, draw_pairs(units, _BATCH))
    found: dict[str, Tensor] = {}

    def plain() -> None:
        found["plain"] = _plain_swap(units, rows, projectors)

    def ours() -> None:
        again = capture_rows(scope, units, fit, heads, draw_pairs(units, _BATCH))
        found["ours"] = torch.stack(
            [again.swap(projectors[name]).orig_after[0].T for name in _CONDITIONS]
        )

    seconds = compare(plain, ours, warm=False)
    error = float((found["plain"] - found["ours"]).abs().max())
    assert error < 1e-5, f"the closed form must equal the edited forward, but differs by {error}"
    return seconds.faster(
        f"3 heads × 6 conditions, 48 prompts; equal to {error:.0e}; {hardware(scope.device)}"
    )
