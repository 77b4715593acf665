"""From marked text to padded ids and token positions, read off the tokenizer's offsets on the ids the model sees.

A token belongs to a marked piece when their characters overlap: ``start_t < stop and stop_t > start``. Whether a
byte-level tokenizer counts a leading space to the token or not then does not matter, and no piece is tokenised alone.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope.capture import inputs as feed
from qkscope.capture.inputs import PaddingSide
from qkscope.capture.pick import Places
from qkscope.errors import BadInput
from qkscope.examples import Example, Span

log = logging.getLogger(__name__)

Token = Literal["first", "last"]

_SENTINEL = "qkscope content"
_PLAIN = "ask without chat (no --chat, chat=False)"
_SECONDS, _ADDED = 5, 1 << 20  # that a chat template may take, and characters that it may add to a prompt
_CHUNK = 256


@dataclass(frozen=True)
class Tokens:
    """One example as ids, with the token positions of its queries and keys."""

    ids: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Encoding:
    """A padded batch: the model's keyword arguments, where to look, and whose row is whose.

    `example` and `labels` are as in `Capture`; `examples` is the list that `example` counts in.
    """

    inputs: dict[str, Tensor]
    places: Places
    example: Int[Tensor, "b"]
    labels: dict[str, Int[Tensor, "b k"]]
    examples: Sequence[Example] = ()

    def __repr__(self) -> str:
        (sequences, tokens), (queries, keys) = self.inputs["input_ids"].shape, self.places.keys.shape
        return f"Encoding({sequences} sequences of {tokens} tokens, {queries} queries, {keys} keys each at most)"

    def at(self, places: Places | None) -> Encoding:
        """The same batch with other places, whose rows are those of the batch; None leaves it as it is."""
        if places is None or places is self.places:
            return self
        return replace(self, places=places, example=places.row, labels={})

    def everywhere(self) -> Places:
        """The same queries, with every token of each one's own sequence as a key."""
        return Places.everywhere(self.places.row, self.places.query, self.inputs["attention_mask"])


@dataclass(frozen=True)
class Prompts:
    """Examples with their tokens, not yet padded; `contrasts` are the names of their labels."""

    examples: list[Example]
    tokens: list[Tokens]
    contrasts: list[str]

    def __len__(self) -> int:
        return len(self.examples)

    def batches(self, size: int) -> list[list[int]]:
        """Indices by length, so that little is padded; the list is fixed, so that shards agree on it."""
        order = sorted(range(len(self)), key=lambda i: (len(self.tokens[i].ids), i))
        return [order[start : start + size] for start in range(0, len(order), size)]

    def batch(
        self, indices: Sequence[int], side: PaddingSide, pad_id: int, positions: bool, device: torch.device
    ) -> Encoding:
        """Some of them as one padded batch, with `position_ids` where the model takes them."""
        tokens = self.tokens
        inputs = feed.pad_rows([torch.tensor(tokens[i].ids) for i in indices], pad_id, side, positions)
        shifts = inputs["attention_mask"].argmax(dim=1).tolist()
        rows = [  # batch row, example, column of the query
            (row, i, shift + query)
            for row, (i, shift) in enumerate(zip(indices, shifts, strict=True))
            for query in tokens[i].queries
        ]
        slots = max(len(tokens[i].keys) for i in indices)
        keys = torch.zeros((len(rows), slots), dtype=torch.long)
        key_mask = torch.zeros((len(rows), slots), dtype=torch.bool)
        labels = {name: torch.zeros((len(rows), slots), dtype=torch.int8) for name in self.contrasts}
        for r, (row, i, _) in enumerate(rows):
            own = slice(len(tokens[i].keys))
            keys[r, own] = torch.tensor(tokens[i].keys, dtype=torch.long) + shifts[row]
            key_mask[r, own] = True
            for name, table in labels.items():
                table[r, own] = torch.tensor([k.label(name) for k in self.examples[i].keys], dtype=torch.int8)
        row_of, example_of, query_of = torch.tensor(rows, dtype=torch.long).unbind(1)
        return Encoding(
            inputs={name: value.to(device) for name, value in inputs.items()},
            places=Places(*(part.to(device) for part in (row_of, query_of, keys, key_mask))),
            example=example_of.to(device),
            labels={name: value.to(device) for name, value in labels.items()},
            examples=self.examples,
        )


@dataclass
class Encoder:
    """Tokenises examples with one tokenizer (or none, for examples that are ids).

    Attributes
    ----------
    tokenizer : optional
        A fast one, as transformers makes them.
    max_length, vocabulary : int, optional
        How long a prompt may be, and how many ids the model knows; None where there is no end.
    own_pad_id, first : int, optional
        The model's padding id, and the token it expects before every prompt, where it has such.
    """

    tokenizer: Any | None
    max_length: int | None = None
    own_pad_id: int | None = None
    vocabulary: int | None = None
    first: int | None = None
    _frame: tuple[str, str] | None = None  # what a chat template puts around a prompt
    _said_first = False  # that prompts lack the first token
    _said_key = False  # that a key is the first token

    @classmethod
    def of(cls, model: Any, tokenizer: Any | None, first_position: int) -> Encoder:
        """For prompts that go into a model."""
        limit, known = feed.context_limit(model, first_position), feed.vocabulary_size(model)
        return cls(tokenizer, limit, feed.model_pad_id(model), known, feed.first_token(model, tokenizer))

    @property
    def pad_id(self) -> int:
        """The id in padded places: the model's own, the tokenizer's, or any where neither names one (it is masked)."""
        if self.own_pad_id is not None:  # some models count positions from the ids that are not this one
            return self.own_pad_id
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(self.tokenizer, name, None)
            if isinstance(value, int) and (self.vocabulary is None or value < self.vocabulary):
                return value
        return 0

    @cached_property
    def adds_first(self) -> bool:
        """Whether a prompt that is not in a chat gets a token before its own first one."""
        if self.tokenizer is None:
            return False
        whole, bare = (self.tokenizer("a", add_special_tokens=add, verbose=False)["input_ids"] for add in (True, False))
        return list(whole[:1]) != list(bare[:1])

    @cached_property
    def unknown(self) -> int | None:
        """The id of a word-level tokenizer's unknown words; other tokenizers spell such words in pieces."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return self.tokenizer.unk_token_id if type(getattr(backend, "model", None)).__name__ == "WordLevel" else None  # type: ignore[union-attr]

    def prompts(self, examples: Sequence[Example | str], chat: bool, token: Token) -> Prompts:
        """Examples with their tokens; a plain string is an example without marks."""
        listed = [Example(text=example) if isinstance(example, str) else example for example in examples]
        if not listed:
            raise BadInput("there are no examples: give at least one.")
        for example in listed:
            if not isinstance(example, Example):
                given = type(example).__name__
                raise BadInput(f"an example is text, or an Example with marked keys, but got {given}.")
        contrasts = {name for example in listed for key in example.keys for name in key.labels}
        return Prompts(listed, self.tokenise(listed, chat, token), sorted(contrasts))

    def tokenise(self, examples: Sequence[Example], chat: bool = False, token: Token = "last") -> list[Tokens]:
        """Ids and token positions of every example, unpadded."""
        rendered = [None if example.text is None else self.render(example.text, chat) for example in examples]
        encoded = self.ids_and_offsets([text for text, _ in filter(None, rendered)], chat)
        result = []
        for example, text in zip(examples, rendered, strict=True):
            if text is not None:
                ids, offsets = next(encoded)
                offsets = [(start - text[1], stop - text[1]) for start, stop in offsets] if text[1] else offsets
            elif chat:
                raise BadInput("a chat template needs text, but an example has ids: give its text.")
            else:
                ids, offsets = example.ids or (), [(i, i + 1) for i in range(len(example.ids or ()))]
            self._check_ids(example, ids, offsets)
            result.append(self._place(example, ids, offsets, token))
        self._say_first([tokens.ids[0] for tokens in result])
        return result

    def _say_first(self, starts: list[int]) -> None:
        """Say once that prompts lack the token this model was trained to see first: its numbers are others then."""
        without = sum(id != self.first for id in starts)
        if self.first is None or not without or self._said_first:
            return
        self._said_first = True
        log.warning(
            "this model expects %s as the first token of every prompt, but %d of %d prompts start without it: its "
            "attention there is not what it was trained for",
            self._show((self.first,)),
            without,
            len(starts),
        )

    def ids_and_offsets(self, texts: list[str], chat: bool) -> Iterator[tuple[tuple[int, ...], list[Span]]]:
        """The ids of each text, and which characters each covers."""
        if texts and self.tokenizer is None:
            raise BadInput("this scope has no tokenizer: give examples as ids, or load the model with a tokenizer.")
        if texts and not getattr(self.tokenizer, "is_fast", False):
            raise BadInput(
                f"{type(self.tokenizer).__name__} does not say which characters a token covers:"
                " load a fast tokenizer, or give examples as ids."
            )
        options = {"return_offsets_mapping": True, "padding": False, "truncation": False, "verbose": False}
        for start in range(0, len(texts), _CHUNK):  # offsets of many texts at once would take more room than their ids
            batch = self.tokenizer(texts[start : start + _CHUNK], add_special_tokens=not chat, **options)  # type: ignore[misc]
            for ids, offsets in zip(map(tuple, batch["input_ids"]), batch["offset_mapping"], strict=True):
                twice = ids[:2] == (self.first, self.first) and not chat and self.adds_first  # the text begins with it
                yield (ids[1:], offsets[1:]) if twice else (ids, offsets)

    def render(self, text: str, chat: bool) -> tuple[str, int]:
        """The text the tokenizer sees, and by how much the template moves the prompt in it."""
        if not chat:
            return text, 0
        if not getattr(self.tokenizer, "chat_template", None):
            raise BadInput(f"this tokenizer has no chat template: {_PLAIN}.")
        if self._frame is None:
            before, found, after = self._template(_SENTINEL).partition(_SENTINEL)
            if not found or _SENTINEL in after:
                raise BadInput(f"this chat template does not hold the prompt exactly once: {_PLAIN}.")
            self._frame = before, after
        before, after = self._frame
        rendered = self._template(text)
        for content, cut in ((text, 0), (text.strip(), len(text) - len(text.lstrip()))):  # some templates trim
            if rendered == before + content + after:
                return rendered, len(before) - cut
        raise BadInput(f"the chat template changes the prompt {text[:80]!r}, so marks in it are lost: {_PLAIN}.")

    def _template(self, content: str) -> str:
        assert self.tokenizer is not None
        messages = [{"role": "user", "content": content}]
        try:
            with deadline(_SECONDS):
                found = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (Exception, TooLong) as error:  # it is a program from elsewhere: whatever it raises is its own fault
            why = f"takes more than {_SECONDS} s" if isinstance(error, TooLong) else f"fails with {error!r:.200}"
            raise BadInput(f"this chat template {why}: {_PLAIN}, or mend the template.") from None
        if len(found) > len(content) + _ADDED:
            raise BadInput(f"this chat template makes {len(found):,} characters of {len(content):,}: {_PLAIN}.")
        return found

    def _check_ids(self, example: Example, ids: tuple[int, ...], offsets: Sequence[Span]) -> None:
        """Refuse a prompt that is empty or too long, or of ids that the model does not know."""
        if not ids:
            raise BadInput("the prompt is empty: give at least one token.")
        if self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            over = max(ids) if min(ids) >= 0 else min(ids)
            fault = "the tokenizer gives" if example.text is not None else "the prompt has"
            raise BadInput(
                f"{fault} the id {over}, but this model's ids are 0 to {self.vocabulary - 1}: take the tokenizer that"
                f" belongs to the model ({example.show(80)})."
            )
        if self.max_length is not None and len(ids) > self.max_length:
            raise BadInput(
                f"the prompt has {len(ids)} tokens, but the model's context ends at {self.max_length}: shorten it"
                f" ({example.show(80)})."
            )
        if self.unknown in ids:
            only = "this model has a token only for the words it was trained on, and"
            if example.text is None:
                raise BadInput(f"{only} this text has others: take words of the tasks, or another model.")
            word = example.text[slice(*offsets[ids.index(self.unknown)])]
            raise BadInput(f"{only} none for {word!r}: take words of the tasks ({example.show(80)}).")

    def _place(self, example: Example, ids: tuple[int, ...], offsets: Sequence[Span], token: Token) -> Tokens:
        def find(span: Span) -> int:
            start, stop = _trim(example, span)
            hits = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
            if not hits:
                raise BadInput(f"no token covers {example.piece(span)!r}; the tokens are {self._show(ids)}.")
            return hits[0 if token == "first" else -1]

        for role, span in example.roles.items():
            self._check_whole(example, ids, offsets, role, span)
        keys = tuple(find(key.span) for key in example.keys)
        shared = next((a for a, b in pairwise(sorted(keys)) if a == b), None)
        if shared is not None:
            raise BadInput(
                f"two keys share token {shared}, which would count it twice; the tokens are {self._show(ids)}."
            )
        queries = tuple(find(span) for span in example.queries) or (len(ids) - 1,)
        feed.check_own_query(example, queries, keys)
        if not self._said_key and feed.has_first_token(example, keys):
            self._said_key = True
            log.warning("%s Mark later words.", feed.FIRST_TOKEN)
        return Tokens(ids, queries, keys)

    def _check_whole(
        self, example: Example, ids: tuple[int, ...], offsets: Sequence[Span], role: str, span: Span
    ) -> None:
        """Refuse a token that holds more than (a part of) the place a role names, blanks aside."""
        if example.text is None:
            return
        start, stop = _trim(example, span)
        for token, (a, b) in zip(ids, offsets, strict=True):
            if a < stop and b > start:
                a, b = _trim(example, (max(a, 0), min(b, len(example.text))))
                if a < start or b > stop:
                    raise BadInput(
                        f"the tokenizer merges {example.text[start:stop]!r} ({role}) with its neighbour in the token "
                        f"{example.text[a:b]!r}: take another word, or other words around it ({example.show(120)};"
                        f" token {self._show((token,))})."
                    )

    def _show(self, ids: tuple[int, ...]) -> str:
        tokens = self.tokenizer.convert_ids_to_tokens(list(ids)) if self.tokenizer is not None else list(ids)
        return str(tokens if len(tokens) <= 120 else [*tokens[:60], "...", *tokens[-60:]])


def _trim(example: Example, span: Span) -> Span:
    """Leave blanks at the edges of a marked piece to its neighbours: " is" may own the blank after a marked "hat "."""
    start, stop = span
    if example.text is not None and (piece := example.text[start:stop]).strip():
        return start + len(piece) - len(piece.lstrip()), stop - len(piece) + len(piece.rstrip())
    return span


class TooLong(BaseException):
    """Raised inside a `deadline` when it is over; code in between that catches every Exception does not catch it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Stop Python code of somebody else's after some time, in whatever thread it runs."""
    lock, over, thread = threading.Lock(), False, threading.get_ident()

    def stop() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TooLong))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over = True
        timer.cancel()


def choose_side(wanted: PaddingSide | None, harmless: tuple[PaddingSide, ...], padded: bool, name: str) -> PaddingSide:
    """Where to pad: as asked, if prompts padded there are still the same prompts to the model."""
    if not padded or wanted in harmless:
        return wanted or "left"
    if not harmless:
        raise BadInput(f"padding changes what {name} sees: give it prompts of one length, or one at a time.")
    if wanted is None:
        return harmless[0]
    raise BadInput(
        f"{name} counts positions by columns, so padding on the {wanted} would move its prompts: leave padding_side"
        f" out, or say {harmless[0]!r}."
    )
