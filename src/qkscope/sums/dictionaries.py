"""A dictionary's features in a query and its keys, how few pairs of them carry a logit, and what
meaningless ones do.

A dictionary writes the residual stream of a token, or what one MLP wrote there, as ``x = Σ_f a_f
d_f + b + e``: active features, its bias, and the error, which is all the rest. A transcoder's codes
are made of what the MLP was given. A head reads each part by itself once its norms are held, so
that a relative logit is

    ``ℓ = Σ_{g,f} q_g · Σ_t w_t k_f(t)``  over pairs of parts: features, error and bias on both
    sides.

With the error as a part everything sums, whatever the dictionary: that shows nothing. What counts
is how much lies in pairs of features, and in how few. Signs can cancel, so that a share of the
logit may be large by luck; `held` is therefore a share of ``Σ |pairs|``, error and bias included,
which no cancelling makes larger.

`NULLS` are dictionaries without meaning: turned about its bias by a random rotation, with random
rows and as many active ones at every token, with the codes of other features, and with the codes of
other tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from qkscope.checking import Count, Natural, checked_class
from qkscope.errors import BadInput
from qkscope.sums.dictionary_files import read_dictionary
from qkscope.sums.singular import random_rotations

#: The parts of a stream that are no features: what the dictionary misses, what a transcoder passes on as it is, what
#: was added after the dictionary, what is not the MLP's, what is constant.
ERROR = "error"
SKIP = "skip"
AFTER = "after"
OTHERS = "other writers"
BIAS = "bias"
NULLS = ("rotated", "random", "features", "tokens")
#: How many of the largest pairs are taken together.
SIZES = (1, 10)
_RIDGE = 1e-8
_TENSORS = ("decoder", "encoder", "decoder_bias", "encoder_bias", "threshold", "skip")


@checked_class
@dataclass(frozen=True, eq=False)
class Dictionary:
    """Features of the residual stream, or of what an MLP writes: directions, and how strongly each
    is in a token.

    Parameters
    ----------
    decoder : a direction for each feature, as rows.
    encoder : what each feature is read off with, as columns.
    layer : the layer whose input it describes (what leaves layer 17 enters layer 18), or whose MLP.
    decoder_bias, encoder_bias : 0 by default.
    k : how many features are active in a token (top-k); any number by default (relu).
    threshold : what each feature must exceed to be active (JumpReLU).
    skip : of a transcoder, what it passes on linearly: its input times this matrix.
    apply_b_dec_to_input : whether the decoder's bias is taken off before encoding.
    normalize_activations : ``none``, ``constant_norm_rescale`` (to the length √d), ``layer_norm``;
        undone behind the decoder.
    centred : whether a token's mean is taken out first, as where writing weights were centred.
    splits : ``stream``; ``mlp``, what the MLP of its layer writes; ``transcoder``, the same, coded
        from what the MLP is given.
    name : what it is called.

    Examples
    --------
    >>> import qkscope as qk
    >>> axes = qk.Dictionary(torch.eye(3), torch.eye(3), layer=1)
    >>> axes
    Dictionary(3 features of width 3 entering layer 1, relu)
    >>> axes.code(torch.tensor([[2.0, 0.0, -1.0]])).ids
    tensor([[0]])
    """

    decoder: Float[Tensor, "f d"]
    encoder: Float[Tensor, "d f"]
    layer: Natural
    decoder_bias: Float[Tensor, " d"] | None = None
    encoder_bias: Float[Tensor, " f"] | None = None
    k: Count | None = None
    threshold: Float[Tensor, " f"] | None = None
    skip: Float[Tensor, "d d"] | None = None
    apply_b_dec_to_input: bool = True
    normalize_activations: Literal["none", "constant_norm_rescale", "layer_norm"] = "none"
    centred: bool = False
    splits: Literal["stream", "mlp", "transcoder"] = "stream"
    name: str = "dictionary"

    def __post_init__(self) -> None:
        for name, value in self._tensors().items():
            if not bool(value.isfinite().all()):
                raise BadInput(
                    f"{name} of {self.name} holds values that are not finite: the dictionary is damaged."
                )

    def __repr__(self) -> str:
        how = (
            f"top {self.k}"
            if self.k is not None
            else "relu"
            if self.threshold is None
            else "jumprelu"
        )
        features, width = self.decoder.shape
        where = {"stream": "entering layer ", "mlp": "written by M", "transcoder": "transcoding M"}[
            self.splits
        ]
        return f"Dictionary({features:,} features of width {width} {where}{self.layer}, {how})"

    @classmethod
    def load(
        cls,
        path: str | Path,
        folder: str | None = None,
        *,
        layer: Natural | None = None,
        k: Count | None = None,
    ) -> Dictionary:
        """Read a folder of SAELens or of Gemma Scope 2, here or on the hub, or a safetensors file.

        Parameters
        ----------
        path : the folder; the file (relu; with a ``threshold`` in it jumprelu); or a repository of
            the hub.
        folder : the dictionary's folder in the repository, as
            ``"resid_post/layer_12_width_16k_l0_medium"``; it can stand behind the repository's name
            as well.
        layer : the layer whose input it describes, where the file does not say (``hook_name`` in
            its header).
        k : as many features are active in a token, where the file does not say.
        """
        return cls(**read_dictionary(path, folder, layer, k))

    @property
    def fingerprint(self) -> str:
        """A hash of all that makes its codes."""
        digest = hashlib.sha256(
            repr((self, self.apply_b_dec_to_input, self.normalize_activations)).encode()
        )
        for value in self._tensors().values():
            digest.update(value.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name in _TENSORS if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> Dictionary:
        """Move to a device, in float32.

        Parameters
        ----------
        device : as torch names it.
        """
        return replace(
            self, **{n: v.detach().to(device, torch.float32) for n, v in self._tensors().items()}
        )

    def code(self, x: Float[Tensor, "*b d"], turn: Float[Tensor, "d d"] | None = None) -> Coded:
        """Which features are active in tokens, and how much of each.

        Parameters
        ----------
        x : what enters the layer, what the MLP wrote, or what a transcoder's MLP was given.
        turn : a rotation about its bias, applied to the whole dictionary.
        """
        bias = x.new_zeros(x.shape[-1]) if self.decoder_bias is None else self.decoder_bias.to(x)
        normed = self.normalize_activations == "layer_norm"
        shift = x.mean(-1, keepdim=True) * (self.centred or normed)
        y = x - shift
        scale = torch.ones_like(shift)
        if self.normalize_activations != "none":
            scale = (
                y.std(-1, keepdim=True)
                if normed
                else y.norm(dim=-1, keepdim=True) / y.shape[-1] ** 0.5
            )
            y = y / (scale + 1e-5 * normed)
        if turn is not None:
            centre = bias * (self.splits != "transcoder")  # whose bias is one of what it puts out
            y = centre + (y - centre) @ turn.to(y)
        strength = (y - bias if self.apply_b_dec_to_input else y) @ self.encoder.to(y)
        strength = strength if self.encoder_bias is None else strength + self.encoder_bias.to(y)
        if self.threshold is not None:
            strength = strength * (strength > self.threshold.to(y))
        most = min(self.k or strength.shape[-1], max(int((strength > 0).sum(-1).max()), 1))
        values, ids = strength.relu().topk(most)
        linear = torch.zeros_like(x) if self.skip is None else x @ self.skip.to(x)
        ids = ids.masked_fill(values <= 0, -1)
        return Coded(ids, values * scale, scale * bias + shift, linear, self.decoder.to(x), turn)


class Coded(NamedTuple):
    """Active features of tokens: their numbers (−1 in empty slots), how much of each, and what
    comes beside them.

    That is what no token decides, and what a transcoder passes on linearly.
    """

    ids: Int[Tensor, "*b s"]
    values: Float[Tensor, "*b s"]
    bias: Float[Tensor, "*b d"]
    skip: Float[Tensor, "*b d"]
    decoder: Float[Tensor, "f d"]
    turn: Float[Tensor, "d d"] | None = None

    def parts(self) -> Float[Tensor, "*b s d"]:
        """What each active feature puts into the stream."""
        return self.directions(self.ids) * self.values[..., None]

    def directions(self, ids: Int[Tensor, "*b s"]) -> Float[Tensor, "*b s d"]:
        """The directions of some features, by number."""
        rows = self.decoder[ids.clamp_min(0)]
        return rows if self.turn is None else rows @ self.turn.to(rows).mT

    def amounts(self, chosen: Int[Tensor, "n c"]) -> Float[Tensor, "n p c"]:
        """How much of some features there is at every place of each prompt."""
        return (
            (self.ids[..., None, :] == chosen[:, None, :, None]) * self.values[..., None, :]
        ).sum(-1)

    def at(self, places: list[int]) -> Coded:
        """Some of the places, which are the second axis."""
        return self._replace(
            **{name: getattr(self, name)[:, places] for name in ("ids", "values", "bias", "skip")}
        )

    @property
    def active(self) -> Int[Tensor, "*b"]:
        """How many features are active."""
        return (self.ids >= 0).sum(-1)


def null_code(
    kind: str,
    dictionary: Dictionary,
    x: Float[Tensor, "n p d"],
    coded: Coded,
    seed: int,
    there: Tensor | None = None,
    target: Float[Tensor, "n p d"] | None = None,
) -> Coded:
    """Codes of a dictionary without meaning, one of `NULLS`; codes of places that are not ``there``
    go to nobody.

    What is coded is ``x``, what is described ``target``, which differs from it for a transcoder.
    """
    generator = torch.Generator().manual_seed(seed)
    features, width = dictionary.decoder.shape
    if kind == "rotated":
        return dictionary.code(x, random_rotations(width, 1, seed)[0].to(x))
    if kind == "random":
        unit = normalize(torch.randn(features, width, generator=generator), dim=-1).to(x)
        return _nearest(unit, (x if target is None else target) - coded.bias - coded.skip, coded)
    if kind == "features":
        order = torch.randperm(features, generator=generator).to(coded.ids.device)
        return coded._replace(ids=torch.where(coded.ids >= 0, order[coded.ids.clamp_min(0)], -1))
    order = torch.arange(x.shape[1]).repeat(len(x), 1)
    for row, own in enumerate(order):
        places = own if there is None else there[row].cpu().nonzero()[:, 0]
        places = places[torch.randperm(len(places), generator=generator)]
        order[row, places] = places.roll(1)  # one cycle: no place keeps its own
    order = order.to(coded.ids.device)[..., None].expand_as(coded.ids)
    return coded._replace(ids=coded.ids.gather(1, order), values=coded.values.gather(1, order))


def _nearest(unit: Float[Tensor, "f d"], x: Float[Tensor, "n p d"], coded: Coded) -> Coded:
    """As many of these directions as were active at each place: the nearest, with the strengths
    that fit best.
    """
    ids = (x @ unit.mT).topk(coded.ids.shape[-1]).indices
    used = torch.arange(ids.shape[-1], device=ids.device) < coded.active[..., None]
    rows = (unit[ids] * used[..., None]).double()
    gram = rows @ rows.mT + torch.diag_embed((~used).double() + _RIDGE)
    values = torch.linalg.solve(gram, (rows @ x.double()[..., None]))[..., 0].to(x)
    return Coded(ids.masked_fill(~used, -1), values * used, coded.bias, coded.skip, unit)


# ---------------------------------------------------------------------- pairs


class FeatureTerms(NamedTuple):
    """One relative logit: every part of the query with every part of the weighted keys.

    Parameters
    ----------
    query, key : the features that are active there, in the order of rows and of columns.
    rest : the parts behind them on both sides, the bias last.
    values : what each pair gives; they sum to the logit.
    """

    query: Int[Tensor, " a"]
    key: Int[Tensor, " b"]
    rest: tuple[str, ...]
    values: Float[Tensor, "a+r b+r"]

    @classmethod
    def of(
        cls,
        ids: Int[Tensor, "p+1 s"],
        q: Float[Tensor, "s+r d"],
        keys: Tensor,
        weights: Float[Tensor, " p"],
        *rest: str,
    ) -> FeatureTerms:
        """From the numbers of features in slots of the query and of every key, and vectors of these
        and of the rest.

        Keys are vectors of every place (s+r p d). A feature that is active in several keys is one
        part of the weighted keys; weights hold the logit's scale.
        """
        (asked, others), slots = (ids[0], ids[1:].mT), ids.shape[1]
        q = torch.cat([q[:slots][asked >= 0], q[slots:]]).double()
        weighted = weights.double()[:, None] * keys.double()
        there = (others >= 0) & (weights != 0)
        numbers, where = others[there].unique(return_inverse=True)
        k = q.new_zeros(len(numbers), q.shape[-1]).index_add(0, where, weighted[:slots][there])
        return cls(asked[asked >= 0], numbers, rest, q @ torch.cat([k, weighted[slots:].sum(1)]).mT)

    @property
    def pairs(self) -> Float[Tensor, "a b"]:
        """Terms of a feature of the query with a feature of the key."""
        return self.values[: len(self.query), : len(self.key)]

    def marginals(self) -> dict[str, dict[int | str, float]]:
        """By side, what each feature (by number) and each part of the rest gives; both sum to the
        logit.
        """
        parts = {
            "query": [*self.query.tolist(), *self.rest],
            "key": [*self.key.tolist(), *self.rest],
        }
        sums = self.values.sum(1).tolist(), self.values.sum(0).tolist()
        return {
            side: dict(zip(parts[side], values, strict=True))
            for side, values in zip(parts, sums, strict=True)
        }

    def largest(self, count: int, signed: bool = False) -> list[tuple[int, int, float]]:
        """The largest pairs of features, by size or as they are: of the query, of the key, and what
        they give.
        """
        by = self.pairs if signed else self.pairs.abs()
        flat = by.flatten().topk(min(count, self.pairs.numel())).indices.tolist()
        places = [divmod(i, len(self.key)) for i in flat]
        return [(int(self.query[a]), int(self.key[b]), float(self.pairs[a, b])) for a, b in places]

    def first(self, count: int) -> list[list[int]]:
        """The pairs that give most, by the numbers of their features; −1 where there are no more
        above 0.
        """
        pairs = [[g, f] for g, f, value in self.largest(count, signed=True) if value > 0]
        return pairs + [[-1, -1]] * (count - len(pairs))

    def numbers(self) -> Float[Tensor, " m"]:
        """`NUMBERS`: what is compared with dictionaries without meaning."""
        size = self.pairs.flatten().abs().sort(descending=True).values
        gross = self.values.abs().sum()
        held = torch.stack([size[:count].sum() for count in SIZES]) / gross.clamp_min(1e-300)
        return torch.cat([torch.stack([self.values.sum(), self.pairs.sum(), gross]), held]).cpu()


#: The logit; what pairs of features give; all pairs, signs left out; shares of that by number of pairs.
NUMBERS = ("logit", "pairs", "gross", *(f"held_{count}" for count in SIZES))
