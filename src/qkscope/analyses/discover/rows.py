"""One pass over examples: the sums of the self-contrast for all heads, and, where asked, the rows behind them.

Examples with the same text are one random unit, whatever they ask in it: they stay in one batch, exchange what they
attended to as one, and are resampled as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.capture.pool import Pooling, pool
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.maths.discovery import SelfContrast
from qkscope.runs.job import Job


@dataclass(frozen=True)
class QueryRows:
    """What some heads looked at, one row per query; vectors as in `Pooling`, places as token numbers of the example."""

    heads: tuple[Head, ...]
    q: Float[Tensor, "n h d"]
    attended: Float[Tensor, "n h d"]
    mean: Float[Tensor, "n h d"]
    top: Float[Tensor, "n h d"]
    valid: Bool[Tensor, "n h"]
    mass: Float[Tensor, "n h"]
    top_weight: Float[Tensor, "n h"]
    top_logit: Float[Tensor, "n h"]
    whole: Float[Tensor, "n h"]
    top_place: Int[Tensor, "n h"]
    drawn: Float[Tensor, "n h s d"]
    drawn_logits: Float[Tensor, "n h s"]
    drawn_place: Int[Tensor, "n h s"]
    drawn_mask: Bool[Tensor, "n h s"]
    example: Int[Tensor, " n"]
    query: Int[Tensor, " n"]
    scale: Float[Tensor, " h"]
    softcap: Float[Tensor, " h"]
    ids: dict[int, list[int]]

    def own_swaps(self, h: int) -> tuple[AttentionRows, Int[Tensor, " n"]]:
        """Rows of one head for a swap of its own choice: slot 0 is the key with most attention, slot 1 the one
        with the largest logit of a few drawn by lot (an utterly different key tells little of what was matched).

        Rows without another key to take are left out; the second value says which rows these are.
        """
        other = self.drawn_mask[:, h] & (self.drawn_place[:, h] != self.top_place[:, h, None])
        keep = (other.any(dim=1) & self.valid[:, h]).nonzero()[:, 0]
        slot = self.drawn_logits[keep, h].masked_fill(~other[keep], -torch.inf).argmax(dim=1)
        target, logit = self.drawn[keep, h, slot], self.drawn_logits[keep, h, slot]
        held = (self.top_logit[keep, h] - self.whole[keep, h]).exp() + (logit - self.whole[keep, h]).exp()
        rest = self.whole[keep, h] + torch.log1p(-held.clamp(max=1 - 1e-7))
        capped = bool(self.softcap[h].isfinite())
        rows = AttentionRows(
            q=self.q[keep, h, None], k=torch.stack([self.top[keep, h], target], dim=1)[:, None],
            scale=self.scale[h : h + 1], softcap=self.softcap[h : h + 1] if capped else None, rest=rest[:, None],
        )  # fmt: skip
        return rows, keep


def gather(
    scope: Scope,
    examples: Sequence[Example],
    heads: Sequence[Head],
    *,
    contrast: SelfContrast | None = None,
    keep: bool = True,
    space: Space = "query_frame",
    skip: int = 1,
    draws: int = 2,
    batch_size: int = 16,
    chat: bool = False,
    seed: int = 0,
    progress: bool | None = None,
    job: Job | None = None,
    name: str = "rows",
) -> QueryRows | None:
    """Pool the examples batch by batch into ``contrast``; with ``keep``, also return the rows (on the CPU).

    Batches are sorted by length and fixed, so that a rerun gives the same numbers; with ``job``, what is done is kept
    there under ``name``.
    """
    units = unit_numbers(examples)
    batches = _batches(examples, units, batch_size)

    def run(indices: list[int]) -> dict[str, Any] | None:
        encoded = scope.encode([examples[i] for i in indices], chat=chat)
        unit = torch.tensor([units[i] for i in indices], device=encoded.example.device)
        encoded = dataclasses.replace(encoded, example=unit[encoded.example])
        pooled = pool(scope, encoded, list(heads), space=space, skip=skip, draws=draws, seed=seed)
        if contrast is not None:
            contrast.update(
                pooled.q, pooled.attended, pooled.mean, prompts=pooled.example, valid=pooled.valid,
                drawn=pooled.drawn, drawn_mask=pooled.drawn_mask,
            )  # fmt: skip
        if not keep:
            return None
        mask = encoded.inputs["attention_mask"].bool()
        words = {"units": unit.cpu(), "lengths": mask.sum(dim=1).cpu(), "ids": encoded.inputs["input_ids"][mask].cpu()}
        return {**_kept(pooled, mask.long().argmax(dim=1)[pooled.row]), **words}

    sums = None if contrast is None else contrast.tensors()
    parts = (job or Job()).stream(name, batches, run, progress, sums)
    if not keep:
        return None
    ids: dict[int, list[int]] = {}
    for part in parts:
        texts = part.pop("ids").split(part.pop("lengths").tolist())
        ids |= {unit: text.tolist() for unit, text in zip(part.pop("units").tolist(), texts, strict=True)}
    scale, softcap = parts[0].pop("scale"), parts[0].pop("softcap")
    whole = {column: torch.cat([part[column] for part in parts]) for column in parts[0]}
    return QueryRows(heads=tuple(heads), ids=ids, scale=scale, softcap=softcap, **whole)


def unit_numbers(examples: Sequence[Example]) -> list[int]:
    """For each example the first one with the same text or ids."""
    first: dict[Any, int] = {}
    return [first.setdefault((example.text, example.ids), i) for i, example in enumerate(examples)]


def _batches(examples: Sequence[Example], units: Sequence[int], batch_size: int) -> list[list[int]]:
    """Examples by length, about ``batch_size`` in each; the examples of a unit together."""
    batches: list[list[int]] = []
    for i in sorted(range(len(examples)), key=lambda i: (len(examples[i]), units[i], i)):
        if not batches or (len(batches[-1]) >= batch_size and units[i] != units[batches[-1][-1]]):
            batches.append([])
        batches[-1].append(i)
    return batches


def _kept(pooled: Pooling, first: Int[Tensor, " b"]) -> dict[str, Any]:
    same = ("q", "attended", "mean", "top", "valid", "mass", "top_weight", "top_logit", "whole", "drawn_logits",
            "example", "scale", "softcap")  # fmt: skip
    kept = {name: getattr(pooled, name).cpu() for name in same}
    kept["top_place"] = (pooled.top_column - first[:, None]).cpu()
    for name, value in (("drawn", pooled.drawn), ("drawn_mask", pooled.drawn_mask)):
        kept[name] = value[:, pooled.kv_of_head].cpu()
    kept["drawn_place"] = (pooled.drawn_columns[:, pooled.kv_of_head] - first[:, None, None]).cpu()
    kept["query"] = (pooled.query_positions - first).cpu()
    return kept
