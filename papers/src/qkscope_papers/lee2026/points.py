"""Queries and keys as labelled points, and the numbers behind the pictures of them.

Three statements are made of such pictures, and each has a number with a control:

- *keys and queries lie apart on PC 1*: the chance that a key's coordinate is above a query's (AUC,
  folded at 1/2);
- *queries and keys of one label align*: the cosine of their centroids, each side centred on its own
  mean, ``Σ_c m^q_c · m^k_c / √(Σ |m^q_c|² Σ |m^k_c|²)``, against the same with the centroids paired
  at random;
- *labels form clusters*: how often a point is nearest to its own label's centroid, on points the
  centroids do not know.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.findings.task_batches import batches_of, unit_runner
from qkscope.heads import Head
from qkscope.model.scope import Scope
from qkscope.results.work import stream
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.task import ANSWER, Task, Unit
from qkscope_papers.tables import Estimate, Row

_BLOCKS, _STUDENT = 10, 2.262  # of prompts; 97.5% of Student's t with nine degrees of freedom
_JUDGED = ("apart_on_pc1", "cosine", "cosine_pc23")  # numbers with intervals
_COMPONENTS = 3  # of a picture


@dataclass(frozen=True)
class Points:
    """Queries and keys of some heads on held-out prompts, in the order of the prompts and of the
    keys in them.
    """

    units: Sequence[Unit]
    heads: list[Head]
    q: Float[Tensor, "n h d"]
    k: Float[Tensor, "n k h d"]
    scale: Float[Tensor, " h"]

    def at(self, head: Head) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n k d"]]:
        """Queries and keys of one head, in float64."""
        i = self.heads.index(head)
        return self.q[:, i].double(), self.k[:, :, i].double()

    def key_texts(self) -> list[list[str]]:
        """What each key says."""
        return [
            [_text(example)[slice(*key.span)] for key in example.keys] for example, *_ in self.units
        ]

    def answers(self) -> Int[Tensor, " n"]:
        """The first right key of each prompt."""
        right = [
            [key.label(ANSWER) > 0 for key in example.keys].index(True)
            for example, *_ in self.units
        ]
        return torch.tensor(right)

    def key_words(self, vocabulary: Sequence[str]) -> list[list[str]]:
        """The word of this vocabulary that stands last before each key: what is in the box."""
        known = set(vocabulary)
        found = []
        for example, *_ in self.units:
            row = []
            start = 0
            for key in example.keys:
                before = re.findall(r"\w+", _text(example)[start : key.span[0]])
                row.append(next(word for word in reversed(before) if word in known))
                start = key.span[1]
            found.append(row)
        return found


def _text(example: object) -> str:
    text: str = example.text  # type: ignore[attr-defined]  # tasks write text, never ids
    return text


def capture_points(
    scope: Scope, task: Task, units: Sequence[Unit], heads: list[Head], batch_size: int
) -> Points:
    """Run the first prompt of every unit; each has the same number of keys."""
    single = [unit[:1] for unit in units]
    run = unit_runner(scope, single, heads, chat=task.chat, rest=False)
    batches = list(stream(batches_of(single, batch_size), run))
    order = torch.cat([batch.unit for batch in batches]).cpu().argsort()
    q = torch.cat([batch.captured.q for batch in batches]).cpu()[order]
    k = torch.cat(
        [batch.captured.k[:, batch.captured.kv_of_head].transpose(1, 2) for batch in batches]
    ).cpu()[order]
    return Points(single, heads, q, k, batches[0].captured.scale.cpu())


def principal(x: Float[Tensor, "n d"]) -> Float[Tensor, "n 3"]:
    """Coordinates on the first principal components; zeros where the points span fewer."""
    u, s, _ = torch.linalg.svd(x - x.mean(dim=0), full_matrices=False)
    shown = (u * s)[:, :_COMPONENTS]
    return torch.nn.functional.pad(shown, (0, _COMPONENTS - shown.shape[1]))


def separation(a: Float[Tensor, " n"], b: Float[Tensor, " m"]) -> float:
    """Chance that a value of one set lies above one of the other, folded: 1/2 mixed, 1 apart."""
    joined = torch.cat([a, b])
    _, inverse, counts = joined.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]  # ties share their mean rank
    auc = float((ranks[: len(a)].sum() - len(a) * (len(a) + 1) / 2) / (len(a) * len(b)))
    return max(auc, 1 - auc)


def centroids(
    x: Float[Tensor, "n d"], labels: Int[Tensor, " n"], count: int
) -> Float[Tensor, "c d"]:
    """Mean of each label's points."""
    sums = x.new_zeros(count, x.shape[1]).index_add(0, labels, x)
    sizes = x.new_zeros(count).index_add(0, labels, x.new_ones(len(x)))
    return sums / sizes[:, None].clamp_min(1)


def align(
    q: Float[Tensor, "n d"],
    q_labels: Int[Tensor, " n"],
    k: Float[Tensor, "m d"],
    k_labels: Int[Tensor, " m"],
    seed: int,
    draws: int = 999,
    where: str = "",
) -> Row:
    """How well queries and keys of one label point the same way, each side centred on its own mean.

    The cosine of their centroids, below what 95% of random pairings are, and how often a query
    finds its own keys.
    """
    present = torch.unique(torch.cat([q_labels, k_labels]))
    present = present[torch.isin(present, q_labels) & torch.isin(present, k_labels)]
    keep_q = torch.isin(q_labels, present)
    keep_k = torch.isin(k_labels, present)
    q_labels = torch.searchsorted(present, q_labels[keep_q])
    k_labels = torch.searchsorted(present, k_labels[keep_k])
    count = len(present)
    q = q[keep_q] - q[keep_q].mean(dim=0)
    k = k[keep_k] - k[keep_k].mean(dim=0)
    mq = centroids(q, q_labels, count)
    mk = centroids(k, k_labels, count)
    size = (mq.square().sum() * mk.square().sum()).sqrt().clamp_min(torch.finfo(mq.dtype).tiny)
    generator = torch.Generator().manual_seed(seed)
    shuffled = (
        torch.stack(
            [(mq[torch.randperm(count, generator=generator)] * mk).sum() for _ in range(draws)]
        )
        / size
    )
    nearest = (q @ torch.nn.functional.normalize(mk, dim=1).mT).argmax(dim=1)
    cosine = float((mq * mk).sum() / size)
    hits = float((nearest == q_labels).double().mean())
    numbers = {
        f"cosine{where}": cosine,
        f"cosine{where}_shuffled_high": float(shuffled.quantile(0.95)),
    }
    return numbers | {"query_finds_keys": hits, "chance": 1 / count}


class PointView(NamedTuple):
    """Queries and keys on their first three principal components together, and what the picture
    shows in numbers.
    """

    q: Float[Tensor, "n 3"]
    k: Float[Tensor, "m 3"]
    row: Row  # with half of each number's 95% interval, as ``cosine_half``


def view(
    q: Float[Tensor, "n d"],
    asked: Int[Tensor, " n"],
    k: Float[Tensor, "m d"],
    of_key: Int[Tensor, " m"],
    seed: int,
) -> PointView:
    """Points and numbers; intervals by a jackknife, a tenth of the prompts left out in turn."""
    seen = _seen(q, asked, k, of_key, seed)
    block = torch.arange(len(q)) % _BLOCKS
    left = list[list[float]]()
    for i in range(_BLOCKS):
        kept = block != i
        keys = kept.repeat_interleave(len(k) // len(q))
        row = _seen(q[kept], asked[kept], k[keys], of_key[keys], seed, draws=1).row
        left.append([row[name] for name in _JUDGED])
    halves = _STUDENT * (_BLOCKS - 1) ** 0.5 * torch.tensor(left).std(dim=0, correction=0)
    return seen._replace(
        row=seen.row | {f"{name}_half": float(x) for name, x in zip(_JUDGED, halves, strict=True)}
    )


def _seen(
    q: Tensor, asked: Tensor, k: Tensor, of_key: Tensor, seed: int, draws: int = 999
) -> PointView:
    """As many queries as keys go into the components, so that these are not the keys' alone."""
    per = len(k) // len(q)
    repeated = q.repeat_interleave(per, dim=0)
    coordinates = principal(torch.cat([repeated, k]))
    q_at = coordinates[: len(repeated) : per]
    k_at = coordinates[len(repeated) :]
    row = align(q_at[:, 1:], asked, k_at[:, 1:], of_key, seed, draws, "_pc23")
    row |= align(q, asked, k, of_key, seed, draws) | {
        "apart_on_pc1": separation(q_at[:, 0], k_at[:, 0])
    }
    return PointView(q_at, k_at, row)


def ends_of(row: Row, name: str, beside: float = 0.0) -> Row:
    """The interval of a number of a view; ``beside``, that of another it is compared with (as if
    not paired).
    """
    half = row[f"{name}_half"] + beside
    return {"low": row[name] - half, "high": row[name] + half}


def nearest_hits(
    x: Float[Tensor, "n d"], labels: Int[Tensor, " n"], known: Bool[Tensor, " n"]
) -> Float[Tensor, " m"]:
    """1 for each point that is nearest to its own label's centroid, of points not ``known``; of
    these it is made.
    """
    means = centroids(x[known], labels[known], int(labels.max()) + 1)
    return (torch.cdist(x[~known], means).argmin(dim=1) == labels[~known]).double()


def share_of(hits: Float[Tensor, " m"], cluster: Int[Tensor, " m"]) -> Estimate:
    """A mean with its interval; points that share a word or a prompt are resampled together."""
    low, high = clustered_bootstrap(hits, cluster)
    return Estimate(float(hits.mean()), float(low), float(high))
