"""A dictionary of features: how a token's residual stream, or what an MLP writes, is coded in it.

A dictionary writes the residual stream of a token, or what one MLP wrote there, as::

    x = Σ_f a_f d_f + b + e

with active features f, the dictionary's bias b, and the error e, which is all the rest. A
transcoder's codes are made of what the MLP was given.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.checking import Count, Natural, checked_class
from qkscope.errors import BadInput
from qkscope.model.dictionary_files import read_dictionary

_TENSORS = ("decoder", "encoder", "decoder_bias", "encoder_bias", "threshold", "skip")
_SITES = {"stream": "entering layer ", "mlp": "written by M", "transcoder": "transcoding M"}
_LAYER_NORM_EPSILON = 1e-5


@checked_class
@dataclass(frozen=True, eq=False)
class Dictionary:
    """Features of the residual stream, or of what an MLP writes, as directions.

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
        if self.k is not None:
            activation = f"top {self.k}"
        elif self.threshold is not None:
            activation = "jumprelu"
        else:
            activation = "relu"
        features, width = self.decoder.shape
        site = f"{_SITES[self.splits]}{self.layer}"
        return f"Dictionary({features:,} features of width {width} {site}, {activation})"

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
        settings = repr((self, self.apply_b_dec_to_input, self.normalize_activations))
        digest = hashlib.sha256(settings.encode())
        for value in self._tensors().values():
            values = value.detach().cpu().float().contiguous()
            digest.update(values.numpy().tobytes())
        return digest.hexdigest()[:16]

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return {name: value for name, value in tensors.items() if value is not None}

    def to(self, device: torch.device | str) -> Dictionary:
        """Move to a device, in float32.

        Parameters
        ----------
        device : as torch names it.
        """
        moved: dict[str, Any] = {}
        for name, value in self._tensors().items():
            moved[name] = value.detach().to(device, torch.float32)
        return replace(self, **moved)

    def code(self, x: Float[Tensor, "*b d"], turn: Float[Tensor, "d d"] | None = None) -> Coded:
        """Which features are active in tokens, and how much of each.

        Parameters
        ----------
        x : what enters the layer, what the MLP wrote, or what a transcoder's MLP was given.
        turn : a rotation about its bias, applied to the whole dictionary.
        """
        bias = x.new_zeros(x.shape[-1]) if self.decoder_bias is None else self.decoder_bias.to(x)
        y, scale, shift = self._normalised(x)
        if turn is not None:
            y = self._turned(y, bias, turn)
        strength = self._strengths(y, bias)
        most_active = int((strength > 0).sum(-1).max())
        slots = min(self.k or strength.shape[-1], max(most_active, 1))
        values, ids = strength.relu().topk(slots)
        ids = ids.masked_fill(values <= 0, -1)
        skip = torch.zeros_like(x) if self.skip is None else x @ self.skip.to(x)
        return Coded(ids, values * scale, scale * bias + shift, skip, self.decoder.to(x), turn)

    def _normalised(
        self, x: Float[Tensor, "*b d"]
    ) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b 1"], Float[Tensor, "*b 1"]]:
        """Tokens as the encoder was trained on them, and the scale and shift that this took out."""
        is_layer_norm = self.normalize_activations == "layer_norm"
        shift = torch.zeros_like(x[..., :1])
        if self.centred or is_layer_norm:
            shift = x.mean(-1, keepdim=True)
        y = x - shift
        if self.normalize_activations == "none":
            return y, torch.ones_like(shift), shift
        if is_layer_norm:
            scale = y.std(-1, keepdim=True)
            return y / (scale + _LAYER_NORM_EPSILON), scale, shift
        scale = y.norm(dim=-1, keepdim=True) / y.shape[-1] ** 0.5
        return y / scale, scale, shift

    def _turned(
        self, y: Float[Tensor, "*b d"], bias: Float[Tensor, " d"], turn: Float[Tensor, "d d"]
    ) -> Float[Tensor, "*b d"]:
        """Tokens turned about the dictionary's bias; a transcoder's is one of what it puts out."""
        if self.splits == "transcoder":
            return y @ turn.to(y)
        return bias + (y - bias) @ turn.to(y)

    def _strengths(
        self, y: Float[Tensor, "*b d"], bias: Float[Tensor, " d"]
    ) -> Float[Tensor, "*b f"]:
        """How strongly each feature is in normalised tokens, below 0 where it is not active."""
        inputs = y - bias if self.apply_b_dec_to_input else y
        strength = inputs @ self.encoder.to(y)
        if self.encoder_bias is not None:
            strength = strength + self.encoder_bias.to(y)
        if self.threshold is not None:
            strength = strength * (strength > self.threshold.to(y))
        return strength


class Coded(NamedTuple):
    """Active features of tokens: their numbers (−1 in empty slots), and how much of each.

    Beside them stands what no token decides (``bias``), and what a transcoder passes on linearly
    (``skip``).
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
        if self.turn is None:
            return rows
        return rows @ self.turn.to(rows).mT

    def amounts(self, chosen: Int[Tensor, "n c"]) -> Float[Tensor, "n p c"]:
        """How much of some features there is at every place of each prompt."""
        is_chosen = self.ids[..., None, :] == chosen[:, None, :, None]
        return (is_chosen * self.values[..., None, :]).sum(-1)

    def at(self, places: list[int]) -> Coded:
        """Some of the places, which are the second axis."""
        return self._replace(
            ids=self.ids[:, places],
            values=self.values[:, places],
            bias=self.bias[:, places],
            skip=self.skip[:, places],
        )

    @property
    def active(self) -> Int[Tensor, "*b"]:
        """How many features are active."""
        return (self.ids >= 0).sum(-1)
