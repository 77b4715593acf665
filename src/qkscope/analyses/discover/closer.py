"""A closer look at one head's leading block: rows to swap, the token pairs behind it, and its directions.

The block of a query's part a and a key's part b is ``x_aᵀ M x_b`` with ``M = A_aᵀ R̄ B_b`` between features of tokens, R̄
being the head's mean rotation by what it attends to. The SVD of ``C^½ M C^½`` (C: features over the tokens of the text)
gives directions: tokens that ask, and tokens that answer. A direction is kept if its share of the logit is above 0 on
documents that it was not fitted on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.names.readings import BACK, SHAM
from qkscope.analyses.names.sight import Attended, Batch, Sight, Text, attend, by_length
from qkscope.analyses.names.study import Study
from qkscope.attention import AttentionRows
from qkscope.capture.gather import Plan
from qkscope.capture.tap import Call
from qkscope.capture.tokens import token_texts
from qkscope.draws import derived_seed
from qkscope.heads import Head
from qkscope.maths.bases import checked_svd
from qkscope.maths.factors import MEAN, shares
from qkscope.maths.swap import SwapRows
from qkscope.tasks.sides import Passage

DIRECTIONS = 6  # directions of a block that are looked at
PAIRS = 8  # token pairs that are shown
_QUERIES = 8  # queries of a passage that are swapped
_TOKENS = 8  # tokens that name a direction
_COUNT = 3  # times that a token has to occur to name one
_ROOT_FLOOR = 1e-6


class Directions(NamedTuple):
    """Directions of a block among features: ``Σ σ_i (α_i·x_a)(β_i·x_b)``."""

    sigma: Float[Tensor, " r"]
    query: Float[Tensor, "a r"]
    key: Float[Tensor, "b r"]


@dataclass
class Rows:
    """What one head did in some passages."""

    q: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    rest: list[Tensor] = field(default_factory=list)
    bias: list[Tensor] = field(default_factory=list)
    group: list[Tensor] = field(default_factory=list)
    pairs: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    shared: dict[int, Tensor] = field(default_factory=dict)  # by document: each direction's sum
    logit: dict[int, float] = field(default_factory=dict)
    scale: float = 1.0
    softcap: float | None = None

    def swaps(self, head: Head) -> SwapRows:
        """The most attended key against one drawn at random, in the query's frame."""
        q, keys, rest, bias = (torch.cat(parts)[:, None] for parts in (self.q, self.keys, self.rest, self.bias))
        cap = None if self.softcap is None else torch.tensor([self.softcap])
        rows = AttentionRows(q, keys, torch.tensor([self.scale]), softcap=cap, bias=bias, rest=rest)
        first = torch.zeros(len(q), dtype=torch.long)
        return SwapRows(rows, first, first + 1, torch.cat(self.group), [head])

    def covariances(self) -> tuple[Float[Tensor, "1 d d"], Float[Tensor, "1 d d"]]:
        """Of queries, and of keys drawn at random."""
        return torch.cat(self.q).T.cov()[None].double(), torch.cat(self.keys)[:, 1].T.cov()[None].double()


def mean_rotation(text: Text, head: Head, attended: Float[Tensor, " o"]) -> Float[Tensor, "d d"]:
    """``Σ_Δ p(Δ) R_Δᵀ`` over the distances that a head attends at: logit ``qᵀ R_Δᵀ k`` for a key Δ places back."""
    d, places = text.d_head, len(attended)
    found: list[Tensor] = []

    def take(call: Call, plan: Plan) -> None:
        if call.layer == head.layer:
            eye = torch.eye(d, device=call.q.device)[None, :, None].expand(1, d, places, d)
            found.append(text.rotate(call, eye)[0])  # [i, Δ, :] is R_Δ e_i

    row = Passage("", 0, tuple([int(text.readings.vocabulary[0])] * places))
    text.watch(text.batch([row], [0], [0]), take)
    weight = (attended / attended.sum().clamp_min(1e-30)).to(found[0])
    return torch.einsum("o,iod->id", weight, found[0]).cpu()  # transposed already: row i is R_Δ e_i


def directions_of(study: Study, h: int, query: str, key: str) -> Directions | None:
    """Directions of a block between two tokens at fixed distances; None for any other block."""
    fit, text = study.fit, study.text
    if query not in BACK or key not in BACK or SHAM in (query, key):
        return None
    turn = mean_rotation(text, text.heads[h], study.looked.attended[h])
    slot = len(text.heads) + text.kv_of_head[h]
    a, b = (fit.coefficients[fit.where(name)][:, s].double().cpu() for name, s in ((query, h), (key, slot)))
    matrix = a @ turn.double() @ b.T  # features × features
    roots = [_root(study, name) for name in (query, key)]
    u, s, v = checked_svd((roots[0][0] @ matrix @ roots[1][0])[None])
    cut = slice(DIRECTIONS)
    return Directions(s[0, cut].float(), (roots[0][1] @ u[0, :, cut]).float(), (roots[1][1] @ v[0, :, cut]).float())


def _root(study: Study, name: str) -> tuple[Float[Tensor, "a a"], Float[Tensor, "a a"]]:
    """Square root of the features' covariance over the fitted tokens, and its inverse."""
    table, counts = token_table(study, name)
    p = (counts / counts.sum())[:, None]
    centred = table - (p * table).sum(0)
    values, axes = torch.linalg.eigh((p * centred).T @ centred)
    root = values.clamp_min(0).sqrt()
    inverse = torch.where(root > _ROOT_FLOOR * root.amax(), 1 / root.clamp_min(1e-12), 0.0)
    return axes * root @ axes.T, axes * inverse @ axes.T


def token_table(study: Study, name: str) -> tuple[Float[Tensor, "v a"], Float[Tensor, " v"]]:
    """Features that each known token has as such a factor, and how often it was fitted on."""
    readings = study.text.readings
    table = readings.token_features(readings.vocabulary, name).double().cpu()
    fitted = torch.tensor([token for passage in study.fitted for token in passage.ids])
    counts = torch.bincount(torch.searchsorted(readings.vocabulary.cpu(), fitted), minlength=len(table)).double()
    return table, counts


@torch.no_grad()
def look_closer(
    study: Study, h: int, pair: tuple[str, str] | None, passages: Sequence[Passage], found: Directions | None
) -> Rows:
    """Rows of one head over some passages, with the token pairs and the directions of its leading block."""
    text = Text(study.text.scope, [study.text.heads[h]], study.text.readings)
    rows, options = Rows(), study.options
    for indices in by_length(passages, options.batch_size):
        batch = text.batch(passages, indices, [passages[i].group for i in indices])
        sight = Sight.of(text, batch)

        def take(call: Call, plan: Plan, batch: Batch = batch, sight: Sight = sight) -> None:
            seen = attend(text, call, plan, sight.kept)
            rows.scale, rows.softcap = call.scale, None if call.softcap is None else float(call.softcap)
            drawn = _drawn(batch, sight.asked, options.seed).to(seen.q.device)  # [n, 3]: row, query, random key
            row, query, lot = drawn.unbind(1)
            top = seen.attention.argmax(dim=-1)[:, 0]
            named = torch.stack([top[row, query], lot], dim=1)
            # a window may hide the random key, or everything
            seen_both = seen.kept[row[:, None], 0, query[:, None], named].all(dim=1)
            used = seen_both & (named[:, 0] != named[:, 1])
            row, query, named = row[used], query[used], named[used]
            k = seen.k[row[:, None], 0, named]  # n 2 d
            bias = seen.bias[row[:, None], 0, query[:, None], named]
            logits = call.cap(seen.raw[row[:, None], 0, query[:, None], named] - bias) + bias
            held = (logits - seen.whole[row, 0, query, None]).exp().sum(1)
            rest = seen.whole[row, 0, query] + torch.log1p(-held.clamp(max=1 - 1e-6))
            framed = _turned_back(text, call, k, row, query)
            before = text.before_rotation(call, plan)[0][row, 0, query]
            for kept, value in ((rows.q, before), (rows.keys, framed), (rows.rest, rest), (rows.bias, bias)):
                kept.append(value.cpu())
            rows.group.append(batch.groups.cpu()[row.cpu()])
            _pairs(rows, batch, seen, top, pair, sight)
            if found is not None and pair is not None:
                _shared(rows, batch, seen, sight, study, pair, found)

        text.watch(batch, take)
    return rows


def _drawn(batch: Batch, asked: Tensor, seed: int) -> Tensor:
    """A few queries of each passage, and a key before each, drawn at random."""
    found = []
    for i, number in enumerate(batch.numbers.tolist()):
        generator = torch.Generator().manual_seed(derived_seed(seed, "swapped", number))
        places = asked[i].nonzero()[:, 0].cpu()
        for place in places[torch.randperm(len(places), generator=generator)[:_QUERIES]].tolist():
            found.append((i, place, int(torch.randint(1, place + 1, (1,), generator=generator))))
    return torch.tensor(found, dtype=torch.long).reshape(-1, 3)


def _turned_back(text: Text, call: Call, k: Tensor, row: Tensor, query: Tensor) -> Tensor:
    """Keys in their query's frame: the query is then as it was before the rotation."""
    offset = text.scope.facts.layers[call.layer].offset
    if call.rotary is None or offset is None:
        return k
    return call.rotary.turn(k[:, :, None], row, query[:, None], offset, back=True)[:, :, 0]


def _pairs(rows: Rows, batch: Batch, seen: Attended, top: Tensor, pair: tuple[str, str] | None, sight: Sight) -> None:
    """Attention by the token that asks and the token that answers, as the block reads them."""
    if pair is None or not all(part == MEAN or part in BACK for part in pair):
        return
    ids = batch.ids
    weight = seen.attention[:, 0].amax(dim=-1).cpu()
    back = [BACK.get(part) for part in pair]
    for i, place in sight.asked.nonzero().tolist():
        key = int(top[i, place])
        tokens = [-1 if o is None or at < o else int(ids[i, at - o]) for at, o in zip((place, key), back, strict=True)]
        rows.pairs[tokens[0], tokens[1]] += float(weight[i, place])


def _shared(
    rows: Rows, batch: Batch, seen: Attended, sight: Sight, study: Study, pair: tuple[str, str], found: Directions
) -> None:
    """Each direction's part of the logit that attention gains over uniform, by document."""
    fit = study.fit
    mass = seen.attention.sum(dim=-1, keepdim=True)
    weights = (seen.attention - mass * seen.kept / seen.kept.sum(dim=-1, keepdim=True).clamp_min(1))[:, 0]
    scores = []
    for name, side in zip(pair, (found.query, found.key), strict=True):
        own = fit.where(name)
        x = sight.x[..., own].to(weights) - fit.x_mean[own].to(weights)
        scores.append(x @ side.to(weights))
    sums = torch.einsum("bts,btr,bsr->br", weights, *scores) * found.sigma.to(weights) * rows.scale
    logit = (weights * seen.raw[:, 0]).sum(dim=(1, 2))
    for group, value, whole in zip(batch.groups.tolist(), sums.cpu(), logit.tolist(), strict=True):
        rows.shared[group] = rows.shared.get(group, torch.zeros(len(value))) + value
        rows.logit[group] = rows.logit.get(group, 0.0) + whole


def direction_rows(study: Study, h: int, pair: tuple[str, str], found: Directions, rows: Rows) -> list[dict[str, Any]]:
    """Each direction with its share on the tested documents, and the tokens that name it on both sides."""
    groups = sorted(rows.shared)
    share, low, high = shares(
        torch.stack([rows.shared[g] for g in groups]),
        torch.tensor([rows.logit[g] for g in groups]),
        seed=study.options.seed,
    )
    scores = []
    for name, side in zip(pair, (found.query, found.key), strict=True):
        table, counts = token_table(study, name)
        score = table.float() @ side
        scores.append(torch.where((counts >= _COUNT)[:, None], score, torch.nan))
    return [
        {
            "head": str(study.text.heads[h]), "direction": i + 1, "share": float(share[i]), "low": float(low[i]),
            "high": float(high[i]), **_ends(study, *(score[:, i].nan_to_num(0.0) for score in scores)),
            "kept": bool(low[i] > 0),
        }
        for i in range(len(share))
    ]  # fmt: skip


def _ends(study: Study, query: Float[Tensor, " v"], key: Float[Tensor, " v"]) -> dict[str, str]:
    """The tokens at one end of a direction, the one that is stronger on the query's side: ends go together."""
    sign = 1 if query.max() >= -query.min() else -1
    names = study.text.readings.vocabulary.tolist()

    def top(score: Tensor) -> str:
        return " | ".join(token_text(study, names[i]) for i in (sign * score).topk(min(_TOKENS, len(score))).indices)

    return {"query_tokens": top(query), "key_tokens": top(key)}


def token_text(study: Study, token: int) -> str:
    """A token as text on one line; any for no token."""
    if token < 0:
        return "any"
    return token_texts(study.text.scope, [token])[0].replace("\n", "\\n")


def pair_rows(study: Study, h: int, rows: Rows) -> list[dict[str, Any]]:
    """The pairs of tokens with most attention, as the leading block reads them, and their share of it."""
    total = sum(rows.pairs.values()) or 1.0
    return [
        {"head": str(study.text.heads[h]), "query_token": token_text(study, query),
         "key_token": token_text(study, key), "share": weight / total}
        for (query, key), weight in sorted(rows.pairs.items(), key=lambda item: -item[1])[:PAIRS]
    ]  # fmt: skip
