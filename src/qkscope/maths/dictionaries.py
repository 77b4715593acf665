"""A dictionary's features in a query and its keys, how few pairs of them carry a logit, and what meaningless ones do.

A dictionary writes the residual stream of a token as ``x = Σ_f a_f d_f + b + e``: active features, its bias, and the
error, which is all the rest. A head reads each part by itself once its norms are held, so that a relative logit is

    ``ℓ = Σ_{g,f} q_g · Σ_t w_t k_f(t)``  over pairs of parts: features, error and bias on both sides.

With the error as a part everything sums, whatever the dictionary: that shows nothing. What counts is how much lies in
pairs of features, and in how few. Signs can cancel, so that a share of the logit may be large by luck; `held` is
therefore a share of ``Σ |pairs|``, error and bias included, which no cancelling makes larger.

`NULLS` are dictionaries without meaning: turned about its bias by a random rotation, with random rows and as many
active ones at every token, with the codes of other features, and with the codes of other tokens.

On disk a dictionary is a SAELens folder (``cfg.json`` and ``sae_weights.safetensors``), or one safetensors file. What
SAELens folds when it codes is folded here when it is read: a top-k dictionary whose codes are measured in lengths of
its rows, and a gated one, ``[z > −b_gate] · relu(z eʳ + b_mag)``, which is a JumpReLU whose threshold is
``b_mag − b_gate eʳ``. Pickles are not opened: reading one runs what it holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import normalize

from qkscope.errors import BadInput
from qkscope.kinds import Count, Natural, checked_class
from qkscope.maths.singular import random_rotations

#: The parts of a stream that are no features: what the dictionary misses, what was added after it, what is constant.
ERROR, AFTER, BIAS = "error", "after", "bias"
NULLS = ("rotated", "random", "features", "tokens")
#: How many of the largest pairs are taken together.
SIZES = (1, 2, 5, 10, 20, 50)
_RIDGE = 1e-8
CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_NEEDS = {"standard": (), "topk": (), "jumprelu": ("threshold",), "gated": ("b_gate", "b_mag", "r_mag")}
_PLACE = re.compile(r"(?:.*\.)?(?:blocks|layers|h)\.(\d+)(?:\.(\w+))?")
_BEFORE, _BEHIND = ("hook_resid_pre", "hook_in", "input"), ("hook_resid_post", "hook_out", "output", None)
_ADVICE = "save W_enc, W_dec, b_enc and b_dec with safetensors"
_TENSORS = ("decoder", "encoder", "decoder_bias", "encoder_bias", "threshold")


@checked_class
@dataclass(frozen=True, eq=False)
class Dictionary:
    """Features of the residual stream between two layers: directions, and how strongly each is in a token.

    Parameters
    ----------
    decoder : a direction for each feature, as rows.
    encoder : what each feature is read off with, as columns.
    layer : the layer whose input it describes; what leaves layer 17 enters layer 18.
    decoder_bias, encoder_bias : 0 by default.
    k : how many features are active in a token (top-k); any number by default (relu).
    threshold : what each feature must exceed to be active (JumpReLU).
    apply_b_dec_to_input : whether the decoder's bias is taken off before encoding.
    normalize_activations : ``none``, ``constant_norm_rescale`` (to the length √d), ``layer_norm``; undone behind the
        decoder.
    centred : whether a token's mean is taken out first, as where writing weights were centred.
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
    apply_b_dec_to_input: bool = True
    normalize_activations: Literal["none", "constant_norm_rescale", "layer_norm"] = "none"
    centred: bool = False
    name: str = "dictionary"

    def __post_init__(self) -> None:
        features, width = self.decoder.shape
        shapes = {"decoder": (features, width), "encoder": (width, features), "decoder_bias": (width,)}
        for name, value in self._tensors().items():
            need = shapes.get(name, (features,))
            if value.shape != need:
                said = f"{name} of {self.name} has shape {tuple(value.shape)}"
                raise BadInput(f"{said}, and {features} features of width {width} need {need}.")
            if not bool(value.isfinite().all()):
                raise BadInput(f"{name} of {self.name} holds values that are not finite: the dictionary is damaged.")
        if self.k is not None and self.k > features:
            raise BadInput(f"{self.name} has {features} features, of which {self.k} cannot be active.")

    def __repr__(self) -> str:
        how = f"top {self.k}" if self.k is not None else "relu" if self.threshold is None else "jumprelu"
        features, width = self.decoder.shape
        return f"Dictionary({features:,} features of width {width} entering layer {self.layer}, {how})"

    @classmethod
    def load(cls, path: str | Path, *, layer: Natural | None = None, k: Count | None = None) -> Dictionary:
        """Read a SAELens folder, or a safetensors file with ``W_enc``, ``W_dec``, ``b_enc``, ``b_dec``.

        Parameters
        ----------
        path : the folder or the file. A file is a relu dictionary; with a ``threshold`` in it jumprelu.
        layer : the layer whose input it describes, where the file does not say (``hook_name`` in its header).
        k : as many features are active in a token, where the file does not say.
        """
        return cls(**_read_dictionary(Path(path), layer, k))

    @property
    def fingerprint(self) -> str:
        """A hash of all that makes its codes."""
        digest = hashlib.sha256(repr((self, self.apply_b_dec_to_input, self.normalize_activations)).encode())
        for value in self._tensors().values():
            digest.update(value.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name in _TENSORS if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> Dictionary:
        """The same in float32 on a device.

        Parameters
        ----------
        device : as torch names it.
        """
        return replace(self, **{n: v.detach().to(device, torch.float32) for n, v in self._tensors().items()})

    def code(self, x: Float[Tensor, "*b d"], turn: Float[Tensor, "d d"] | None = None) -> Coded:
        """Which features are active in tokens, and how much of each.

        Parameters
        ----------
        x : what enters the layer.
        turn : a rotation about its bias, applied to the whole dictionary.
        """
        bias = x.new_zeros(x.shape[-1]) if self.decoder_bias is None else self.decoder_bias.to(x)
        normed = self.normalize_activations == "layer_norm"
        shift = x.mean(-1, keepdim=True) * (self.centred or normed)
        y, scale = x - shift, torch.ones_like(shift)
        if self.normalize_activations != "none":
            scale = y.std(-1, keepdim=True) if normed else y.norm(dim=-1, keepdim=True) / y.shape[-1] ** 0.5
            y = y / (scale + 1e-5 * normed)
        if turn is not None:
            y = bias + (y - bias) @ turn.to(y)
        strength = (y - bias if self.apply_b_dec_to_input else y) @ self.encoder.to(y)
        strength = strength if self.encoder_bias is None else strength + self.encoder_bias.to(y)
        if self.threshold is not None:
            strength = strength * (strength > self.threshold.to(y))
        most = min(self.k or strength.shape[-1], max(int((strength > 0).sum(-1).max()), 1))
        values, ids = strength.relu().topk(most)
        constant = scale * bias + shift
        return Coded(ids.masked_fill(values <= 0, -1), values * scale, constant, self.decoder.to(x), turn)


class Coded(NamedTuple):
    """Active features of tokens: their numbers (−1 in empty slots), how much of each, and what no token decides."""

    ids: Int[Tensor, "*b s"]
    values: Float[Tensor, "*b s"]
    bias: Float[Tensor, "*b d"]
    decoder: Float[Tensor, "f d"]
    turn: Float[Tensor, "d d"] | None = None

    def parts(self) -> Float[Tensor, "*b s d"]:
        """What each active feature puts into the stream."""
        rows = self.decoder[self.ids.clamp_min(0)]
        rows = rows if self.turn is None else rows @ self.turn.to(rows).mT
        return rows * self.values[..., None]

    def at(self, places: list[int]) -> Coded:
        """Some of the places, which are the second axis."""
        return self._replace(ids=self.ids[:, places], values=self.values[:, places], bias=self.bias[:, places])

    @property
    def active(self) -> Int[Tensor, "*b"]:
        """How many features are active."""
        return (self.ids >= 0).sum(-1)


def null_code(
    kind: str, dictionary: Dictionary, x: Float[Tensor, "n p d"], coded: Coded, seed: int, there: Tensor | None = None
) -> Coded:
    """Codes of a dictionary without meaning, one of `NULLS`; codes of places that are not ``there`` go to nobody."""
    generator = torch.Generator().manual_seed(seed)
    features, width = dictionary.decoder.shape
    if kind == "rotated":
        return dictionary.code(x, random_rotations(width, 1, seed)[0].to(x))
    if kind == "random":
        unit = normalize(torch.randn(features, width, generator=generator), dim=-1).to(x)
        return _nearest(unit, x - coded.bias, coded)
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
    """As many of these directions as were active at each place: the nearest, with the strengths that fit best."""
    ids = (x @ unit.mT).topk(coded.ids.shape[-1]).indices
    used = torch.arange(ids.shape[-1], device=ids.device) < coded.active[..., None]
    rows = (unit[ids] * used[..., None]).double()
    gram = rows @ rows.mT + torch.diag_embed((~used).double() + _RIDGE)
    values = torch.linalg.solve(gram, (rows @ x.double()[..., None]))[..., 0].to(x)
    return Coded(ids.masked_fill(~used, -1), values * used, coded.bias, unit)


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
        query: tuple[Int[Tensor, " s"], Float[Tensor, "s+r d"]],
        key: tuple[Int[Tensor, "p s"], Float[Tensor, "s+r p d"]],
        weights: Float[Tensor, " p"],
        scale: float,
        rest: tuple[str, ...],
    ) -> FeatureTerms:
        """From the numbers of features in slots of the query and of every key, and vectors of these and of the rest.

        A feature that is active in several keys is one part of the weighted keys.
        """
        asked, q = query[0], query[1].double()
        q = torch.cat([q[: len(asked)][asked >= 0], q[len(asked) :]])
        weighted = weights.double()[:, None] * key[1].double()
        there, slots = (key[0].mT >= 0) & (weights != 0), key[0].shape[1]
        numbers, where = key[0].mT[there].unique(return_inverse=True)
        k = q.new_zeros(len(numbers), q.shape[-1]).index_add(0, where, weighted[:slots][there])
        k = torch.cat([k, weighted[slots:].sum(1)])
        return cls(asked[asked >= 0], numbers, rest, scale * q @ k.mT)

    @property
    def pairs(self) -> Float[Tensor, "a b"]:
        """Of a feature with a feature."""
        return self.values[: len(self.query), : len(self.key)]

    def marginals(self) -> dict[str, dict[int | str, float]]:
        """By side, what each feature (by number) and each part of the rest gives; both sum to the logit."""
        parts = {"query": [*self.query.tolist(), *self.rest], "key": [*self.key.tolist(), *self.rest]}
        sums = self.values.sum(1).tolist(), self.values.sum(0).tolist()
        return {side: dict(zip(parts[side], values, strict=True)) for side, values in zip(parts, sums, strict=True)}

    def largest(self, count: int) -> list[tuple[int, int, float]]:
        """The largest pairs of features by size: of the query, of the key, and what they give."""
        flat = self.pairs.abs().flatten().topk(min(count, self.pairs.numel())).indices.tolist()
        places = [divmod(i, len(self.key)) for i in flat]
        return [(int(self.query[a]), int(self.key[b]), float(self.pairs[a, b])) for a, b in places]

    def numbers(self) -> Float[Tensor, " m"]:
        """`NUMBERS`: what is compared with dictionaries without meaning."""
        size = self.pairs.flatten().abs().sort(descending=True)
        gross = self.values.abs().sum()
        held = torch.stack([size.values[:count].sum() for count in SIZES]) / gross.clamp_min(1e-300)
        ordered, logit = self.pairs.flatten()[size.indices], self.values.sum()
        far = (ordered.cumsum(0) - logit).abs() > (1 - ENOUGH) * logit.abs()
        count = int(far.nonzero()[-1]) + 2 if bool(far.any()) else 1
        needed = float(count) if count <= len(ordered) else torch.inf
        own = [float(logit), float(self.pairs.sum()), float(gross), needed]
        return torch.cat([torch.tensor(own, dtype=torch.float64), held.cpu()])


#: A logit counts as explained by pairs that, the largest first, come as near as this and stay there.
ENOUGH = 0.8
#: The logit; what pairs of features give; all pairs, signs left out; pairs for 80%; shares of gross by number.
NUMBERS = ("logit", "pairs", "gross", "needed", *(f"held_{count}" for count in SIZES))


# ---------------------------------------------------------------------- files


def _read_dictionary(path: Path, layer: int | None, k: int | None) -> dict[str, Any]:
    """The fields of a `Dictionary`, from a folder of SAELens or a file of tensors."""
    if path.name == WEIGHTS and (path.parent / CONFIG).is_file():
        path = path.parent
    said: dict[str, Any] = _settings(path) if path.is_dir() else {}
    tensors, header = _read_tensors(path / WEIGHTS if path.is_dir() else path)
    if not path.is_dir():
        said = {"architecture": "jumprelu" if "threshold" in tensors else "standard", **header}
        k = int(header["k"]) if k is None and "k" in header else k
    coded = said.get("activation_fn") or said.get("activation_fn_str") or "relu"  # before SAELens 6
    kind = "topk" if k is not None or coded == "topk" else said["architecture"]
    k = k or said.get("k") or (said.get("activation_fn_kwargs") or {}).get("k")
    missing = [name for name in ("W_enc", "W_dec", *_NEEDS.get(kind, ())) if name not in tensors]
    normalises, hook = said.get("normalize_activations") or "none", said.get("hook_name") or said.get("hook_point")
    place, scaled = _PLACE.fullmatch(str(hook)), said.get("finetuning_scaling_factor")
    stands = place is not None and place[2] in (*_BEFORE, *_BEHIND)
    refusals = {
        f"is a {kind} dictionary, which is not served: {', '.join(_NEEDS)} are": kind not in _NEEDS,
        f"codes with {coded!r}, which is not served: relu, topk and jumprelu are": coded not in ("relu", "topk"),
        "codes with topk and does not say how many features are active: give k": kind == "topk" and not k,
        "scales its codes after training, which is not served: fold the factor into W_dec": scaled,
        f"was trained on activations scaled by {normalises}, and does not say by how much: fold the scale into its"
        " weights and save it again": normalises not in ("none", "constant_norm_rescale", "layer_norm"),
        f"has no {' and no '.join(missing)}, from which codes are made; it holds {', '.join(tensors)}": missing,
        "does not say where it stands: name the layer whose input it describes (`--dictionary-layer 18` in the shell,"
        " layer=18 in Python)": layer is None and not hook,
        f"stands at {hook}, and trace splits the residual stream between layers: take a dictionary of hook_resid_pre or"
        " hook_resid_post": layer is None and not stands,
    }
    for why, holds in refusals.items():
        if holds:
            raise BadInput(f"{path} {why}.")
    loaded = said.get("model_from_pretrained_kwargs")
    return {
        **_folded(kind, tensors, bool(said.get("rescale_acts_by_decoder_norm"))),
        "layer": layer if place is None or layer is not None else int(place[1]) + (place[2] in _BEHIND),
        "k": k if kind == "topk" else None,
        "apply_b_dec_to_input": str(said.get("apply_b_dec_to_input", True)).lower() != "false",
        "normalize_activations": normalises,
        "centred": isinstance(loaded, dict) and bool(loaded.get("center_writing_weights")),
        "name": path.name if path.is_dir() else path.stem,
    }


def _settings(folder: Path) -> dict[str, Any]:
    """What ``cfg.json`` says."""
    try:
        said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {"architecture": "standard", **said.get("metadata", {}), **said}
    except FileNotFoundError:
        why = f"holds no {CONFIG}: name a folder that SAELens wrote, or a .safetensors file"
    except (OSError, ValueError, AttributeError, TypeError):
        why = f"holds a {CONFIG} that is damaged: it should be what SAELens wrote"
    raise BadInput(f"{folder} {why}.")


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise BadInput(f"there is no dictionary {path}: name a SAELens folder or a .safetensors file.")
    if path.suffix != ".safetensors":
        raise BadInput(f"{path} is no .safetensors file, and pickles run what they hold when read: {_ADVICE}.")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name).float() for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError):
        raise BadInput(f"{path} is damaged or no safetensors file: {_ADVICE}.") from None


def _folded(kind: str, tensors: Mapping[str, Tensor], rescaled: bool) -> dict[str, Tensor | None]:
    """Encoder and decoder as `Dictionary` codes with them."""
    encoder, decoder, bias = tensors["W_enc"], tensors["W_dec"], tensors.get("b_enc")
    threshold = tensors["threshold"] if kind == "jumprelu" else None
    if kind == "gated":
        size, bias = tensors["r_mag"].exp(), tensors["b_mag"]
        encoder, threshold = encoder * size, bias - tensors["b_gate"] * size
    if kind == "topk" and rescaled:
        lengths = decoder.norm(dim=-1)
        encoder, bias = encoder * lengths, None if bias is None else bias * lengths
        decoder = decoder / lengths.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    made = (decoder, encoder, tensors.get("b_dec"), bias, threshold)
    return dict(zip(_TENSORS, made, strict=True))
