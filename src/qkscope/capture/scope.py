"""Scope: a loaded model that can be looked into.

Examples go in, batches of queries and keys come out, at about the cost of the forward pass: positions are picked inside
the attention calls, the pass ends after the deepest layer asked for, and the LM head runs only when logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.capture import cache
from qkscope.capture import load as loading
from qkscope.capture.encode import Encoder, Encoding, Prompts, Token, choose_side
from qkscope.capture.inputs import (
    PaddingSide,
    context_limit,
    first_token,
    forward_arguments,
    input_device,
    model_pad_id,
    vocabulary_size,
)
from qkscope.capture.patch import Edit, Patch
from qkscope.capture.pick import Capture, Picker, Places
from qkscope.capture.probe import Shape, probe
from qkscope.capture.selfcheck import Check, check_model, check_once
from qkscope.capture.spaces import Space
from qkscope.capture.tap import Call, tap
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.kinds import Count, checked_class
from qkscope.runs.stream import stream


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
        self.files_hash = weights_hash
        self._as_loaded = self._trace()
        self._hashed: tuple[tuple[object, ...], str] | None = None
        self.encoder = Encoder(
            tokenizer,
            context_limit(model, self.facts.first_position),
            model_pad_id(model),
            vocabulary_size(model),
            first_token(model, tokenizer),
        )

    def __repr__(self) -> str:
        shape = f"{self.n_layers} layers, {len(self.heads())} heads"
        return f"Scope({self.name!r}, {shape}, {self.model.dtype} on {self.device})".replace("torch.", "")

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
            check_once(scope)
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
            of_files = self.files_hash if trace == self._as_loaded else None
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
        prompts = self.encoder.prompts(examples, chat, token)
        return self._pad(prompts, range(len(prompts)), padding_side)

    def _pad(self, prompts: Prompts, indices: Sequence[int], wanted: PaddingSide | None) -> Encoding:
        padded = len({len(prompts.tokens[i].ids) for i in indices}) > 1
        side = choose_side(wanted, self.facts.sides, padded, self.name)
        return prompts.batch(indices, side, self.encoder.pad_id, self.facts.takes_positions, self.device)

    def capture(
        self,
        examples: Sequence[Example | str],
        heads: str | Head | Sequence[str | Head] | None = None,
        *,
        space: Space = "post_rope",
        batch_size: Count = 32,
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
        if not 0 <= shard[0] < shard[1]:
            raise BadInput(f"shard is (i, n) with 0 <= i < n, but got {shard}.")
        prompts = self.encoder.prompts(examples, chat, token)
        # sorted by length, so that little is padded; the list is fixed, so that shards agree on it
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts.tokens[i].ids), i))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

        def run(indices: list[int]) -> Capture:
            encoded = self._pad(prompts, indices, padding_side)
            return self.capture_inputs(encoded, heads=wanted, space=space, rest=rest, logits=logits)

        return stream(batches[shard[0] :: shard[1]], run, progress)

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
        if isinstance(inputs, Encoding):
            given, example, labels = inputs.inputs, inputs.example, inputs.labels
            if places is None:
                places = inputs.places
            elif places is not inputs.places:
                example, labels = places.row, {}
        elif places is None:
            raise BadInput("raw inputs do not say where to look: give places=Places(row, query, keys, key_mask).")
        else:
            given, example, labels = inputs, places.row, {}
        patch = Patch(edits, self.facts)
        picker = Picker(self.facts, wanted, places, space, rest, stop=not logits, own_keys=patch.own_keys)
        at = places if logits else None
        scores = self.watch(given, patch.visit, picker.visit, rotary=space != "post_rope", logits_at=at)
        return picker.finish(example, labels, scores)

    @torch.no_grad()
    def watch(
        self,
        inputs: dict[str, Tensor],
        *visits: Callable[[Call], None],
        rotary: bool = False,
        logits_at: Places | None = None,
    ) -> Float[Tensor, "b v"] | None:
        """Run one batch under the tap: each visitor sees, and may change, every attention call.

        Parameters
        ----------
        inputs : dict
            Keyword arguments of the model's forward.
        *visits : callable
            Get each `Call` in turn, before it runs; one that raises `Stop` ends the forward.
        rotary : bool
            Whether to record what the model's rotary function was given (`Call.rotary`).
        logits_at : Places, optional
            Run the whole model, not its body alone, and return next-token logits at these queries.

        Examples
        --------
        >>> from qkscope import Scope
        >>> scope, shapes = Scope.load("nano:mixed"), []
        >>> scope.watch(scope.encode(["hat: O"]).inputs, lambda call: shapes.append(tuple(call.k.shape)))
        >>> shapes
        [(1, 2, 4, 24), (1, 2, 4, 24), (1, 2, 4, 24)]
        """
        with self._tapped(*visits, rotary=rotary):
            if logits_at is not None:
                return self._logits(inputs, logits_at)
            self._forward(self.model.base_model, inputs)
        return None

    def _tapped(self, *visits: Callable[[Call], None], rotary: bool = False) -> Any:
        def visit(call: Call) -> None:
            for one in visits:
                one(call)

        return tap(self.model, visit, self.facts.layer_of, rotary=rotary)

    def _forward(self, part: Any, inputs: dict[str, Any]) -> Any:
        return part(**inputs, **({"use_cache": False} if "use_cache" in forward_arguments(part) else {}))

    def _logits(self, inputs: dict[str, Tensor], at: Places) -> Float[Tensor, "b v"]:
        """The LM head is a model's largest matrix, so it runs at the queries alone where it can."""
        if "logits_to_keep" in forward_arguments(self.model):
            columns, where = at.query.unique(return_inverse=True)
            return self._forward(self.model, inputs | {"logits_to_keep": columns}).logits[at.row, where].float()
        found = getattr(self._forward(self.model, inputs), "logits", None)
        if found is None or found.ndim != 3:
            raise BadInput(f"{self.name} gives no logits per token: capture it with logits=False.")
        return found[at.row, at.query].float()

    @contextmanager
    def patched(self, edits: Sequence[Edit]) -> Iterator[Any]:
        """Edits in force for a ``with`` block: call ``scope.model`` inside it in any way you like."""
        with self._tapped(Patch(edits, self.facts).visit):
            yield self.model

    @torch.no_grad()
    def generate(
        self, inputs: Encoding | dict[str, Tensor], *, edits: Sequence[Edit] = (), max_new_tokens: Count = 16
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
                pad_token_id=self.encoder.pad_id,
            )
        return ids[:, given["input_ids"].shape[1] :]
