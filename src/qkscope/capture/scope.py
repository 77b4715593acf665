"""Scope: a loaded model that can be looked into.

Examples go in, batches of queries and keys come out, at about the cost of the forward pass: positions are picked inside
the attention calls, the pass ends after the deepest layer asked for, and the LM head runs only when logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Int
from torch import Tensor

from qkscope.capture import cache
from qkscope.capture import load as loading
from qkscope.capture.encode import Encoder, Encoding, Token, Tokens, choose_side, collate
from qkscope.capture.first import first_token, vocabulary_size
from qkscope.capture.inputs import PaddingSide, context_limit, forward_arguments, input_device, model_pad_id
from qkscope.capture.logits import logits_at
from qkscope.capture.patch import Edit, Patch
from qkscope.capture.pick import Capture, Picker, Places
from qkscope.capture.probe import probe
from qkscope.capture.selfcheck import Check, check_model
from qkscope.capture.shape import Shape
from qkscope.capture.spaces import Space, check_space
from qkscope.capture.tap import Call, tap
from qkscope.errors import BadInput, check_kind, check_least
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.kinds import checked_class
from qkscope.runs.stream import stream

_CHECK_VERSION = 2


@checked_class
class Scope(Shape):
    """A model and its tokenizer, checked. Make one with `Scope.load` or `Scope.from_model`.

    Attributes
    ----------
    model, tokenizer
        As transformers made them; the tokenizer may be None.
    name, revision : str
        Where the model came from.
    n_layers, n_heads, n_kv_heads, group_size, d_head : int
        Shape of the attention, read off live calls.
    """

    comes_from = "as Scope.load(name) gives"

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        name: str = "",
        revision: str | None = None,
        weights_hash: str | None = None,
    ) -> None:
        if not hasattr(model, "config"):
            raise BadInput(f"a model of transformers can be looked into, but got {type(model).__name__}.")
        if tokenizer is not None and not callable(tokenizer):
            raise BadInput(f"a tokenizer is one of transformers, or None, but got {type(tokenizer).__name__}.")
        self.model, self.tokenizer, self.revision = model, tokenizer, revision
        self.name = name or getattr(model.config, "name_or_path", "") or model.config.model_type
        self.facts = probe(model)
        self._weights_hash = weights_hash
        self._as_loaded = self._trace()
        self._hashed: tuple[tuple[object, ...], str] | None = None
        self._encoder = Encoder(
            tokenizer,
            context_limit(model, self.facts.first_position),
            model_pad_id(model),
            vocabulary_size(model),
            first_token(model, tokenizer),
        )

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any | None = None,
        revision: str | None = None,
        attn: str | None = None,
        check: bool = True,
    ) -> Scope:
        """Load a model by name and check that it can be looked into. Code that comes with a model is never run.

        Parameters
        ----------
        name : str or Path
            A hub id, a folder, a ``.gguf`` file, ``smollm2-135m`` (embedded: needs no network), or ``nano:NAME@STEP``
            (shipped; without the step, the last one).
        device : str, optional
            ``cpu``, ``cuda``, ``cuda:1``; the first GPU where there is one, if not given.
        dtype : str or torch.dtype, optional
            ``float32``, ``bfloat16``, ...; the one the weights are stored in, if not given.
        device_map : optional
            As in transformers, for a model larger than one device.
        revision : str, optional
            Branch, tag or commit of a hub model; step of a nano model; subfolder of a folder of checkpoints.
        attn : str, optional
            ``sdpa`` or ``eager``; transformers' own choice, if not given.
        check : bool
            Whether to run the self-check (once per weights; its outcome is kept in the user's cache).
        """
        loaded = loading.load(name, device, dtype, device_map, revision, attn)
        scope = cls(loaded.model, loaded.tokenizer, loaded.name, loaded.revision, loaded.weights_hash)
        if check:
            scope._check_once()
        return scope

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any | None = None, *, name: str = "", check: bool = True) -> Scope:
        """Look into a model already in memory.

        Parameters
        ----------
        model : PreTrainedModel
            Switched to eval mode; otherwise left as it is.
        tokenizer : optional
            Needed for examples that are text.
        name : str
            What to call it in results.
        check : bool
            Whether to run the self-check.
        """
        scope = cls(model, tokenizer, name)
        if check:
            scope.self_check()
        return scope

    def self_check(self) -> Check:
        """Run the self-check now; raises `BadInput` with the fact that failed."""
        return check_model(self)

    def _check_once(self) -> None:
        if self._weights_hash is None:
            self.self_check()
            return
        versions = [_CHECK_VERSION, transformers.__version__, torch.__version__]
        setting = [*versions, self.device.type, self.model.dtype, self.model.config._attn_implementation]
        place = cache.cache_dir("checks", f"{self._weights_hash}.json")
        known = cache.read_json(place)
        passed = known if isinstance(known, dict) else {}
        key = " ".join(map(str, setting))
        if key not in passed:
            cache.write_json(place, {**passed, key: self.self_check().as_dict()})

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return input_device(self.model)

    def _trace(self) -> tuple[object, ...]:
        config = cache.model_hash("", self.model.config.to_diff_dict())  # parts of it are read anew at every run
        return config, *cache.tensors_trace(self.model.state_dict().items())

    @property
    def weights_hash(self) -> str:
        """Fingerprint of weights and config: of the files they came from, or of what is in memory where it changed."""
        trace = self._trace()
        if self._hashed is None or self._hashed[0] != trace:
            of_files = self._weights_hash if trace == self._as_loaded else None
            self._hashed = trace, of_files or cache.in_memory_hash(self.model)
        return self._hashed[1]

    @cached_property
    def tokenizer_hash(self) -> str | None:
        """Fingerprint of the tokenizer and its chat template; None without a tokenizer."""
        return cache.tokenizer_hash(self.tokenizer)

    def encode(
        self,
        examples: Sequence[Example | str],
        *,
        chat: bool = False,
        padding_side: PaddingSide | None = None,
        token: Token = "last",
    ) -> Encoding:
        """Turn examples into one padded batch with token positions found on the ids the model sees.

        Parameters
        ----------
        examples : sequence of Example or str
            A plain string is an example without marks.
        chat : bool
            Whether to put each text into the tokenizer's chat template, as the user's turn.
        padding_side : str, optional
            ``left`` or ``right``; the captured numbers are the same. If not given it is ``left``, or ``right`` for a
            model that counts positions by columns of the batch.
        token : str
            Which token stands for a word of several: ``last`` or ``first``.
        """
        listed, tokens = self._tokenise(examples, chat, token)
        return self._collate(listed, tokens, range(len(listed)), padding_side)

    def _tokenise(
        self, examples: Sequence[Example | str], chat: bool, token: Token
    ) -> tuple[list[Example], list[Tokens]]:
        if isinstance(examples, str | Example):
            examples = [examples]
        listed = [Example(text=example) if isinstance(example, str) else example for example in examples]
        if not listed:
            raise BadInput("there are no examples: give at least one.")
        for example in listed:
            check_kind(example, Example, "an example is text, or an Example with marked keys")
        return listed, self._encoder.tokenise(listed, chat, token)

    def _collate(
        self, examples: list[Example], tokens: list[Tokens], indices: Sequence[int], padding_side: PaddingSide | None
    ) -> Encoding:
        padded = len({len(tokens[i].ids) for i in indices}) > 1
        side = choose_side(padding_side, self.facts.sides, padded, self.name)
        contrasts = sorted({name for example in examples for key in example.keys for name in key.labels})
        return collate(
            tokens,
            examples,
            indices,
            contrasts,
            self._encoder.pad_id,
            self.device,
            self.facts.takes_positions,
            side,
        )

    def capture(
        self,
        examples: Sequence[Example | str],
        heads: str | Head | Sequence[str | Head] | None = None,
        *,
        space: Space = "post_rope",
        batch_size: int = 32,
        rest: bool = True,
        logits: bool = False,
        chat: bool = False,
        padding_side: PaddingSide | None = None,
        token: Token = "last",
        shard: tuple[int, int] = (0, 1),
        progress: bool | None = None,
    ) -> Iterator[Capture]:
        """Stream queries and keys of some heads, batch by batch.

        Parameters
        ----------
        examples : sequence of Example or str
            What to run; `Capture.example` counts in this order, batches come sorted by length.
        heads : optional
            ``"L18H6,L17H5"``, heads, or None for every head.
        space : str
            ``post_rope``, ``pre_rope`` or ``query_frame``.
        batch_size : int
            Examples per batch; halved where memory runs out.
        rest : bool
            Whether to return the log-sum-exp of the keys not named.
        logits : bool
            Whether to return next-token logits at the query (this runs the whole model).
        chat, padding_side, token
            As in `encode`.
        shard : (int, int)
            ``(i, n)``: only every n-th batch of the fixed list, from the i-th on.
        progress : bool, optional
            A progress bar on stderr; if not given, where stderr is a terminal.

        Yields
        ------
        Capture
            One batch at a time; nothing is kept.
        """
        wanted = self.parse(heads)
        check_space(space)
        if batch_size < 1 or not 0 <= shard[0] < shard[1]:
            raise BadInput(f"batch_size is at least 1 and shard is (i, n) with 0 <= i < n, not {batch_size}, {shard}.")
        listed, tokens = self._tokenise(examples, chat, token)
        # sorted by length, so that little is padded; the list is fixed, so that shards agree on it
        order = sorted(range(len(listed)), key=lambda i: (len(tokens[i].ids), i))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)][
            shard[0] :: shard[1]
        ]

        def run(indices: list[int]) -> Capture:
            encoded = self._collate(listed, tokens, indices, padding_side)
            return self.capture_inputs(encoded, heads=wanted, space=space, rest=rest, logits=logits)

        return stream(batches, run, progress)

    @torch.no_grad()
    def capture_inputs(
        self,
        inputs: Encoding | dict[str, Tensor],
        *,
        places: Places | None = None,
        heads: str | Head | Sequence[str | Head] | None = None,
        space: Space = "post_rope",
        rest: bool = True,
        logits: bool = False,
        edits: Sequence[Edit] = (),
    ) -> Capture:
        """Run one batch and pick queries and keys; with edits, what comes after them.

        Parameters
        ----------
        inputs : Encoding or dict
            From `encode`, or any keyword arguments of the model's forward (ids, pixels, ...).
        places : Places, optional
            Where to look; those of an `Encoding` batch, if not given.
        heads, space, rest, logits
            As in `capture`.
        edits : sequence of Edit
            Replacements that are in force during the run.
        """
        wanted = self.parse(heads)
        check_space(space)
        encoded = inputs if isinstance(inputs, Encoding) else None
        given = encoded.inputs if encoded is not None else inputs
        assert isinstance(given, dict)
        if places is None:
            if encoded is None:
                raise BadInput("raw inputs do not say where to look: give places=Places(row, query, keys, key_mask).")
            places = encoded.places
        patch = Patch(edits, self.facts)
        picker = Picker(self.facts, wanted, places, space, rest, stop=not logits, own_keys=patch.own_keys)
        scores = None
        with self._tapped(patch, picker, rotary=space != "post_rope"):
            if logits:
                scores = logits_at(self, given, places)
            else:
                self._body(given)
        same = encoded is not None and places is encoded.places
        return picker.finish(
            example=encoded.example if encoded is not None and same else places.row,
            labels=encoded.labels if encoded is not None and same else {},
            logits=scores,
        )

    def _tapped(self, patch: Patch, picker: Picker | None = None, rotary: bool = False) -> Any:
        def visit(call: Call) -> None:
            patch.visit(call)
            if picker is not None:
                picker.visit(call)

        return tap(self.model, visit, self.facts.layer_of, rotary=rotary)

    def _body(self, inputs: dict[str, Tensor]) -> Any:
        body = self.model.base_model
        extra = {"use_cache": False} if "use_cache" in forward_arguments(body) else {}
        return body(**inputs, **extra)

    @contextmanager
    def patched(self, edits: Sequence[Edit]) -> Iterator[Any]:
        """Edits in force for a ``with`` block: call ``scope.model`` inside it in any way you like."""
        with self._tapped(Patch(edits, self.facts)):
            yield self.model

    @torch.no_grad()
    def generate(
        self, inputs: Encoding | dict[str, Tensor], *, edits: Sequence[Edit] = (), max_new_tokens: int = 16
    ) -> Int[Tensor, "b n"]:
        """Greedy continuation of each sequence, with edits in force at every step; new ids only.

        Parameters
        ----------
        inputs : Encoding or dict
            A left-padded batch.
        edits : sequence of Edit
            Positions are those of the batch.
        max_new_tokens : int
            How far to go.
        """
        check_least(1, max_new_tokens=max_new_tokens)
        given = dict(inputs.inputs if isinstance(inputs, Encoding) else inputs)
        if "input_ids" not in given:
            raise BadInput("generation needs input_ids: give a batch from encode.")
        mask = given.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise BadInput(
                "generation needs prompts that end together: "
                + ("encode with padding_side='left'." if "left" in self.facts.sides else "generate from one at a time.")
            )
        given.pop("position_ids", None)  # generation counts on from the mask
        with self.patched(edits):
            # without a cache every step is a whole patched forward, so edits hold wherever they point
            ids = self.model.generate(
                **given,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=False,
                pad_token_id=self._encoder.pad_id,
            )
        return ids[:, given["input_ids"].shape[1] :]
