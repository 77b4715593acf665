"""Scope: a loaded model that can be looked into.

Examples go in, batches of queries and keys come out, at about the cost of the forward pass:
positions are picked inside the attention calls, the pass ends after the deepest layer asked for,
and the LM head runs only when logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput, Example
from qkscope.checking import Count, checked_class
from qkscope.heads import Head
from qkscope.hooks import Hook
from qkscope.model.batching import Picker
from qkscope.model.capture_types import Capture, Places
from qkscope.model.encode import (
    Encoder,
    Encoding,
    TokenisedPrompt,
    choose_side,
    padded,
    token_texts,
)
from qkscope.model.files import Fingerprint, tokenizer_hash
from qkscope.model.inputs import PaddingSide, input_device
from qkscope.model.load import load, unwrapped
from qkscope.model.patch import Edit, Patch
from qkscope.model.probe import probe
from qkscope.model.runner import Runner
from qkscope.model.selfcheck import Check, check_model, check_once
from qkscope.model.spaces import Space
from qkscope.results.work import stream


@checked_class
class Scope(Runner):
    """A model and its tokenizer, checked. Make one with `Scope.load` or `Scope.from_model`.

    Parameters
    ----------
    model : PreTrainedModel
        As transformers made it.
    tokenizer : optional
        Its tokenizer; None where examples are ids.
    name, revision : str
        Where the model came from.
    files_hash : str, optional
        Fingerprint of the files that the weights came from.

    Attributes
    ----------
    n_layers, n_heads, n_kv_heads, group_size, d_head : int
        Shape of the attention, read off live calls.

    Examples
    --------
    >>> scope = Scope.load("nano:mixed")
    >>> scope.n_layers, scope.n_heads, scope.n_kv_heads, scope.d_head
    (3, 4, 2, 24)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        name: str = "",
        revision: str | None = None,
        files_hash: str | None = None,
    ) -> None:
        super().__init__()
        if not hasattr(model, "config"):
            raise BadInput(
                f"a model of transformers can be looked into, but got {type(model).__name__}."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.revision = revision
        self.name = name or getattr(model.config, "name_or_path", "") or model.config.model_type
        self.facts = probe(model)
        self.files_hash = files_hash
        self._fingerprint = Fingerprint(model, files_hash)
        self.encoder = Encoder.of(model, tokenizer, self.facts.first_position)

    def __repr__(self) -> str:
        shape = f"{self.n_layers} layers, {len(self.heads())} heads"
        return f"Scope({self.name!r}, {shape}, {self.model.dtype} on {self.device})".replace(
            "torch.", ""
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
        attn: Literal["sdpa", "eager"] | None = None,
        check: bool = True,
    ) -> Scope:
        """Load a model by name and check that it can be looked into.

        Code that comes with a model is never run.

        Parameters
        ----------
        name : str or Path
            A hub id, a folder, a ``.gguf`` file, a name that `fetch` takes as ``smollm2-135m`` (no
            network), or ``nano:NAME@STEP`` (shipped; without the step, the last one).
        device : str, optional
            ``cpu``, ``cuda``, ``cuda:1``; the first GPU where there is one, if not given.
        dtype : str or torch.dtype, optional
            ``float32``, ``bfloat16``, ...; the one the weights are stored in, if not given.
        device_map : optional
            As in transformers, for a model larger than one device.
        revision : str, optional
            Branch, tag or commit of a hub model; step of a nano model; subfolder of a folder of
            checkpoints.
        attn : str, optional
            ``sdpa`` or ``eager``; transformers' own choice, if not given.
        check : bool
            Whether to run the self-check (once per weights; its outcome is kept in the user's
            cache).

        Examples
        --------
        >>> Scope.load("nano:mixed")
        Scope('nano:mixed', 3 layers, 12 heads, float32 on cpu)
        """
        if not str(name).strip():
            raise BadInput(
                "the name of the model is empty: give a hub id, a folder or a .gguf file."
            )
        scope = cls(*load(name, device, dtype, device_map, revision, attn))
        if check:
            check_once(scope)
        return scope

    from_pretrained = load
    """The same by the name that other libraries give it."""

    @classmethod
    def from_model(
        cls, model: Any, tokenizer: Any | None = None, *, name: str = "", check: bool = True
    ) -> Scope:
        """Look into a model already in memory.

        Parameters
        ----------
        model : PreTrainedModel, TransformerBridge or nnsight model
            Left as it is; measured in eval mode. Wrapped ones are looked into beside, on their
            weights.
        tokenizer : optional
            Needed for examples that are text; that of the bridge or nnsight model, if not given.
        name : what to call it in results.
        check : whether to run the self-check.

        Examples
        --------
        >>> import transformers
        >>> config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)
        >>> Scope.from_model(transformers.GPT2LMHeadModel(config), name="mine", check=False).d_head
        8
        """
        scope = cls(*unwrapped(model, tokenizer), name)
        if check:
            scope.self_check()
        return scope

    def self_check(self) -> Check:
        """Run the self-check now; raises `BadInput` with the fact that failed.

        Examples
        --------
        >>> Scope.load("nano:mixed", check=False).self_check().attention_error < 1e-4
        True
        """
        return check_model(self)

    @property
    def has_changes(self) -> bool:
        """Whether a ``with`` block of this thread changes the model or the prompt now."""
        return bool(self._changes.open)

    def unchanged(self) -> AbstractContextManager[None]:
        """Leave out the changes of the blocks around, for a ``with`` block of their own.

        Examples
        --------
        >>> scope = Scope.load("nano:mixed")
        >>> with scope.ablate("L0H2"), scope.unchanged():
        ...     scope.has_changes
        False
        """
        return self._changes.suspended()

    def rerunning(self, ids: Int[Tensor, " t"]) -> AbstractContextManager[None]:
        """A ``with`` block in which changed versions of one prompt run: a token that a change names
        by its text stays where it stood, also where that word is another one now.

        Parameters
        ----------
        ids : of the unchanged prompt.
        """
        return self._changes.rerunning(ids.tolist())

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return input_device(self.model)

    @property
    def weights_hash(self) -> str:
        """Fingerprint of weights and config.

        It is that of the files they came from, or of what is in memory where it changed.
        """
        return self._fingerprint()

    @cached_property
    def tokenizer_hash(self) -> str | None:
        """Fingerprint of the tokenizer and its chat template; None without a tokenizer."""
        return tokenizer_hash(self.tokenizer)

    def encode(
        self,
        examples: Sequence[Example | str],
        *,
        chat: bool = False,
        padding_side: PaddingSide | None = None,
    ) -> Encoding:
        """Turn examples into one padded batch.

        A mark is the last token of its words, found on the ids the model sees.

        Parameters
        ----------
        examples : sequence of Example or str
            A plain string is an example without marks.
        chat : bool
            Whether to put each text into the tokenizer's chat template, as the user's turn.
        padding_side : str, optional
            ``left`` or ``right``; the captured numbers are the same. If not given it is ``left``,
            or ``right`` for a model that counts positions by columns of the batch.

        Examples
        --------
        >>> Scope.load("nano:mixed").encode(["hat jam hat", "hat: O"])
        Encoding(2 sequences of 4 tokens, 2 queries, 0 keys each at most)
        """
        return self._pad(self.encoder.prompts(examples, chat), padding_side)

    def _pad(self, prompts: Sequence[TokenisedPrompt], wanted: PaddingSide | None) -> Encoding:
        """One padded batch, with the tokens in place that a block has replaced."""
        if not prompts:
            raise BadInput("a batch holds one prompt at least, but got none.")
        uneven = len({len(tokens.ids) for _, tokens in prompts}) > 1
        side = choose_side(wanted, self.facts.sides, uneven, self.name)
        batch = padded(prompts, side, self.encoder.pad_id, self.facts.takes_positions, self.device)
        batch.inputs["input_ids"] = self.replaced(
            batch.inputs["input_ids"], batch.inputs["attention_mask"]
        )
        return batch

    def tokens(self, prompt: Example | str, *, chat: bool = False) -> list[str]:
        """What the tokens of a prompt read as: the rows and columns of `attention`.

        A character that is cut into pieces stands at its first piece, and the others are empty.

        Parameters
        ----------
        prompt : as the model is given it.
        chat : whether it goes into the chat template.

        Examples
        --------
        >>> Scope.load("nano:mixed").tokens("hat: O jam:")
        ['<s>', 'hat', ':', 'O', 'jam', ':']
        """
        ids = self.encode([prompt], chat=chat).inputs["input_ids"][0].tolist()
        return token_texts(self, ids)

    @torch.no_grad()
    def logits(self, prompt: Example | str, *, chat: bool = False) -> Float[Tensor, " v"]:
        """Next-token logits after a prompt, with the changes of the blocks around in force.

        Parameters
        ----------
        prompt : as the model is given it; of an example with a marked query, after that token.
        chat : whether it goes into the chat template.

        Examples
        --------
        >>> scope = Scope.load("nano:mixed")
        >>> scope.tokenizer.decode(scope.logits("hat: O jam: Z jam:").argmax())
        'Z'
        """
        encoded = self.encode([prompt], chat=chat)
        scores = self.watch(encoded.inputs, logits_at=encoded.places)
        assert scores is not None
        return scores[0].float().cpu()

    def logit_difference(
        self, prompt: Example | str, answer: str | int, rival: str | int, *, chat: bool = False
    ) -> float:
        """The logit of a next token less that of another one.

        Parameters
        ----------
        prompt : as the model is given it.
        answer, rival : texts of one token each, or ids.
        chat : whether the prompt goes into the chat template.

        Examples
        --------
        >>> scope = Scope.load("nano:mixed")
        >>> scope.logit_difference("hat: O jam: Z jam:", "Z", "O") > 0
        True
        """
        ids = [self._read_one(text) for text in (answer, rival)]
        logits = self.logits(prompt, chat=chat)
        return float(logits[ids[0]] - logits[ids[1]])

    def _read_one(self, text: str | int) -> int:
        """The id of a text of one token, besides blanks before it."""
        if isinstance(text, int):
            self.encoder.check_id(text)
            return text
        ids = [i for i in self.encoder.bare_ids(text) if token_texts(self, [i])[0].strip()]
        if len(ids) != 1 or ids[0] == self.encoder.unknown:
            pieces = f"{len(ids)} tokens" if len(ids) > 1 else "no token"
            raise BadInput(
                f"{text!r} is {pieces} of this model, and a logit is of one: name another text, or"
                " the token's id."
            )
        return ids[0]

    def place(
        self, prompt: Example | str, token: int | str | None, *, chat: bool = False
    ) -> int | None:
        """The place of a token in a prompt, where it is named by its text.

        A place that is there, or None, is given back.

        Parameters
        ----------
        prompt : as the model is given it.
        token : as it reads (``" John"``), with its number where it stands several times
            (``"to#2"``); or its place.
        chat : whether the prompt goes into the chat template.

        Examples
        --------
        >>> scope = Scope.load("nano:mixed")
        >>> scope.place("hat: O jam: Z jam:", "jam#2"), scope.place("hat: O jam: Z jam:", "Z")
        (7, 6)
        """
        if token is None:
            return None
        inputs = self.encode([prompt], chat=chat).inputs
        column = self.column(inputs["input_ids"][0], inputs["attention_mask"][0].bool(), token)
        return column if isinstance(token, str) else token

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
        progress: bool | None = None,
    ) -> Iterator[Capture]:
        """Stream queries and keys of some heads, one `Capture` per batch; nothing is kept.

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
        chat, padding_side : as in `encode`.
        progress : bool, optional
            Whether to say on stderr how far it is; if not given, where stderr is a terminal.

        Examples
        --------
        >>> prompts = [Example.mark("hat jam hat", keys=["jam"])] * 3
        >>> for batch in Scope.load("nano:mixed").capture(prompts, "L1H0,L2H3", batch_size=2):
        ...     print(batch)
        Capture(2 rows of L1H0, L2H3; 1 keys of 2 key heads, width 24, post_rope)
        Capture(1 rows of L1H0, L2H3; 1 keys of 2 key heads, width 24, post_rope)
        """
        wanted = self.parse(heads)
        prompts = self.encoder.prompts(examples, chat)
        lengths = [len(tokens.ids) for _, tokens in prompts]
        # sorted, so that little is padded
        order = sorted(range(len(prompts)), key=lambda i: (lengths[i], i))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

        def run(indices: list[int]) -> Capture:
            encoded = self._pad([prompts[i] for i in indices], padding_side)
            captured = self.capture_inputs(
                encoded, heads=wanted, space=space, rest=rest, logits=logits
            )
            numbers = torch.tensor(indices, device=self.device)
            return replace(captured, example=numbers[captured.example])

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
        edits: Sequence[Edit | Hook] = (),
    ) -> Capture:
        """Run one batch and pick queries and keys; with edits, what comes after them.

        Parameters
        ----------
        inputs : Encoding or dict
            From `encode`, or any keyword arguments of the model's forward (ids, pixels, ...).
        places : Places, optional
            Where to look; those of an `Encoding` batch, if not given.
        heads, space, rest, logits : as in `capture`.
        edits : sequence of Edit or Hook
            Replacements that are in force during the run.

        Examples
        --------
        >>> scope = Scope.load("nano:mixed")
        >>> encoded = scope.encode(["hat jam hat"])
        >>> scope.capture_inputs(encoded, places=encoded.everywhere(), heads="L2H3").attention().sum().round(decimals=4)
        tensor(1.)
        """
        wanted = self.parse(heads)
        if places is not None:
            fed = inputs.inputs if isinstance(inputs, Encoding) else inputs
            batch = Encoding(fed, places, places.row, {})
        elif isinstance(inputs, Encoding):
            batch = inputs
        else:
            raise BadInput(
                "raw inputs do not say where to look: give places=Places(row, query, keys, key_mask)."
            )
        patch = Patch(edits, self)
        picker = Picker(
            self.facts, wanted, batch.places, space, rest, stop=not logits, own_keys=patch.own_keys
        )
        at = batch.places if logits else None
        scores = self.watch(
            batch.inputs, patch.visit, picker.visit, rotary=space != "post_rope", logits_at=at
        )
        return picker.finish(batch.example, batch.labels, scores)
