"""From marked text to padded ids and token positions.

Positions are read off the tokenizer's offsets on the ids that the model sees. A token belongs to a
marked piece when their characters overlap: ``start_t < stop and stop_t > start``. Whether a
byte-level tokenizer counts a leading space to the token or not then does not matter, and no piece
is tokenised alone.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from jinja2.sandbox import SandboxedEnvironment
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qkscope.errors import BadInput
from qkscope.examples import Example, Span
from qkscope.model import inputs as feed
from qkscope.model.capture_types import Places
from qkscope.model.inputs import PaddingSide
from qkscope.model.spaces import swapped

log = logging.getLogger(__name__)

#: What a token reads as whose bytes make no character with those of its neighbours.
PIECE = "(part of a character)"

_SENTINEL = "qkscope content"  # stands for the prompt, to see where a chat template puts it
_PLAIN = "ask without chat (no --chat, chat=False)"
_SECONDS = 5  # that a chat template may take
_ADDED = 1 << 20  # characters that it may add to a prompt
_CHUNK = 256  # texts tokenised at once: their offsets take more room than their ids
_CUT_CHARACTER = "�"  # how a tokenizer decodes a part of a character
_LONGEST_CHARACTER = 8  # tokens, at most


class Tokens(NamedTuple):
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
    example: Int[Tensor, " b"]
    labels: dict[str, Int[Tensor, "b k"]]
    examples: Sequence[Example] = ()

    def __repr__(self) -> str:
        sequences, tokens = self.inputs["input_ids"].shape
        queries, keys = self.places.keys.shape
        size = f"{sequences} sequences of {tokens} tokens"
        return f"Encoding({size}, {queries} queries, {keys} keys each at most)"

    def everywhere(self) -> Places:
        """The same queries, with every token of their sequence as a key."""
        mask = self.inputs["attention_mask"]
        return Places.everywhere(self.places.row, self.places.query, mask)


class Rendered(NamedTuple):
    """A text as the tokenizer sees it, and by how many characters the prompt moved in it."""

    text: str
    shift: int


TokenisedPrompt = tuple[Example, Tokens]


def padded(
    prompts: Sequence[TokenisedPrompt],
    side: PaddingSide,
    pad_id: int,
    positions: bool,
    device: torch.device,
) -> Encoding:
    """Prompts as one padded batch, with `position_ids` where the model takes them."""
    examples = [example for example, _ in prompts]
    ids = [torch.tensor(tokens.ids) for _, tokens in prompts]
    inputs = feed.pad_rows(ids, pad_id, side, positions)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    places = _places(prompts, inputs["attention_mask"])
    rows = places.row.tolist()
    labels = {}
    for name in _contrasts(examples):
        signs = [[key.label(name) for key in example.keys] for example in examples]
        by_row = [torch.tensor(signs[row]) for row in rows]
        labels[name] = pad_sequence(by_row, batch_first=True).to(device, torch.int8)
    return Encoding(inputs, places, places.row, labels, examples)


def _places(prompts: Sequence[TokenisedPrompt], mask: Int[Tensor, "n t"]) -> Places:
    """Columns of the queries and keys of padded prompts, one row for each query."""
    device = mask.device
    rows = []
    queries: list[int] = []
    keys = []
    for i, (_, tokens) in enumerate(prompts):
        n_queries = len(tokens.queries)
        rows += [i] * n_queries
        queries += tokens.queries
        keys += [torch.tensor(tokens.keys, dtype=torch.long)] * n_queries
    row = torch.tensor(rows).to(device)
    query = torch.tensor(queries).to(device)
    key = pad_sequence(keys, batch_first=True, padding_value=-1).to(device)
    shift = mask.argmax(dim=1)[row]  # the padding on the left
    columns = (key + shift[:, None]).masked_fill(key < 0, 0)
    return Places(row, shift + query, columns, key_mask=key >= 0)


def _contrasts(examples: Sequence[Example]) -> list[str]:
    """Names of the contrasts that some key has a label of."""
    keys = [key for example in examples for key in example.keys]
    return sorted({name for key in keys for name in key.labels})


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
    _warned: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: Any, tokenizer: Any | None, first_position: int) -> Encoder:
        """Make the encoder of a model and its tokenizer."""
        vocabulary = None
        # models of sounds and pictures may have none
        with suppress(NotImplementedError, AttributeError):
            vocabulary = model.get_input_embeddings().num_embeddings
        return cls(
            tokenizer,
            max_length=feed.context_limit(model, first_position),
            own_pad_id=feed.model_pad_id(model),
            vocabulary=vocabulary,
            first=feed.begin_token(model, tokenizer),
        )

    @property
    def pad_id(self) -> int:
        """The id in padded places, which are masked: the model's, the tokenizer's, or 0."""
        # the model's comes first: some models count positions from the ids that are not their own
        pad = getattr(self.tokenizer, "pad_token_id", None)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        for id in (self.own_pad_id, pad, eos):
            if isinstance(id, int) and (self.vocabulary is None or id < self.vocabulary):
                return id
        return 0

    @cached_property
    def adds_first(self) -> bool:
        """Whether a prompt that is not in a chat gets a token before its own first one."""
        return feed.added_token(self.tokenizer) is not None

    @cached_property
    def unknown(self) -> int | None:
        """The id of a word-level tokenizer's unknown words; others spell such words in pieces."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        kind = type(getattr(backend, "model", None)).__name__
        if kind != "WordLevel":
            return None
        return self.tokenizer.unk_token_id  # type: ignore[union-attr]

    def bare_ids(self, text: str) -> list[int]:
        """The ids of a text by itself, without special tokens."""
        if self.tokenizer is None:
            raise BadInput(
                f"this scope has no tokenizer to read {text!r} with: name a token by id."
            )
        if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise BadInput(f"{text!r} has half a surrogate pair, which no tokenizer reads.")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def check_id(self, token: int) -> None:
        """Refuse an id that the model does not know."""
        if token < 0 or (self.vocabulary is not None and token >= self.vocabulary):
            last = "" if self.vocabulary is None else f" to {self.vocabulary - 1}"
            raise BadInput(f"this model has no token {token}: its ids are 0{last}.")

    def prompts(self, examples: Sequence[Example | str], chat: bool) -> list[TokenisedPrompt]:
        """Pair examples with their tokens; a plain string is an example without marks."""
        marked = [
            Example(text=example) if isinstance(example, str) else example for example in examples
        ]
        return list(zip(marked, self.tokenise(marked, chat), strict=True))

    def tokenise(self, examples: Sequence[Example], chat: bool = False) -> list[Tokens]:
        """Ids and token positions of every example, unpadded."""
        rendered = [
            None if example.text is None else self.render(example.text, chat)
            for example in examples
        ]
        texts = [text.text for text in rendered if text is not None]
        encoded = self.ids_and_offsets(texts, chat)
        result = []
        for example, text in zip(examples, rendered, strict=True):
            if text is not None:
                ids, offsets = next(encoded)
                offsets = [(start - text.shift, stop - text.shift) for start, stop in offsets]
            elif chat:
                raise BadInput("a chat template needs text, but an example has ids: give its text.")
            else:
                ids = example.ids or ()
                offsets = [(i, i + 1) for i in range(len(ids))]
            self._check_ids(example, ids, offsets)
            result.append(self._place(example, ids, offsets))
        if self.first is not None:
            self._warn_without_first(result)
        return result

    def _warn_without_first(self, prompts: Sequence[Tokens]) -> None:
        """Warn of prompts that do not begin with the token the model expects there."""
        without = [tokens for tokens in prompts if tokens.ids[0] != self.first]
        if without:
            first = self._show((self.first,))  # type: ignore[arg-type]
            expects = f"this model expects {first} as the first token of every prompt"
            missing = f"{len(without)} of {len(prompts)} prompts start without it"
            untrained = "its attention there is not what it was trained for"
            self._warn("first", f"{expects}, but {missing}: {untrained}")

    def _warn(self, about: str, what: str) -> None:
        """Warn once about each matter."""
        if about not in self._warned:
            self._warned.add(about)
            log.warning("%s", what)

    def ids_and_offsets(
        self, texts: list[str], chat: bool
    ) -> Iterator[tuple[tuple[int, ...], list[Span]]]:
        """The ids of each text, and which characters each covers."""
        if texts and self.tokenizer is None:
            raise BadInput(
                "this scope has no tokenizer: give examples as ids, "
                "or load the model with a tokenizer."
            )
        if texts and not getattr(self.tokenizer, "is_fast", False):
            kind = f"{type(self.tokenizer).__name__} does not say which characters a token covers"
            raise BadInput(f"{kind}: load a fast tokenizer, or give examples as ids.")
        for start in range(0, len(texts), _CHUNK):
            batch = self.tokenizer(  # type: ignore[misc]
                texts[start : start + _CHUNK],
                add_special_tokens=not chat,
                return_offsets_mapping=True,
                padding=False,
                truncation=False,
                verbose=False,
            )
            for row, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
                ids = tuple(row)
                # a text that itself begins with the first token would have it twice
                if ids[:2] == (self.first, self.first) and not chat and self.adds_first:
                    yield ids[1:], offsets[1:]
                else:
                    yield ids, offsets

    def render(self, text: str, chat: bool) -> Rendered:
        """The text the tokenizer sees, and by how much the template moves the prompt in it."""
        if not chat:
            return Rendered(text, 0)
        if not getattr(self.tokenizer, "chat_template", None):
            raise BadInput(f"this tokenizer has no chat template: {_PLAIN}.")
        before, inside, after = self._template(_SENTINEL).partition(_SENTINEL)
        if not inside or _SENTINEL in after:
            raise BadInput(f"this chat template does not hold the prompt exactly once: {_PLAIN}.")
        rendered = self._template(text)
        if rendered == before + text + after:
            return Rendered(rendered, len(before))
        if rendered == before + text.strip() + after:  # some templates trim
            trimmed = len(text) - len(text.lstrip())
            return Rendered(rendered, len(before) - trimmed)
        raise BadInput(
            f"the chat template changes the prompt {text[:80]!r}, "
            f"so marks in it are lost: {_PLAIN}."
        )

    def _template(self, content: str) -> str:
        """A prompt in the chat template, a program from elsewhere: it gets seconds in a thread."""
        messages = [{"role": "user", "content": content}]
        outcome = list[Any]()

        def run() -> None:
            try:
                render = self.tokenizer.apply_chat_template  # type: ignore[union-attr]
                outcome.append(render(messages, tokenize=False, add_generation_prompt=True))
            except SystemExit:  # it was ended
                return
            except Exception as error:  # whatever it raises is its own fault
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        products = (SandboxedEnvironment, "intercepted_binops", frozenset({"*", "**"}))
        limited = (SandboxedEnvironment, "call_binop", _limited_product)
        with swapped(products, limited):
            thread.start()
            thread.join(_SECONDS)
            if thread.is_alive():
                _end(thread)
        if not outcome:
            why = f"takes more than {_SECONDS} s"
        elif isinstance(outcome[0], Exception):
            why = f"fails with {outcome[0]!r:.200}"
        elif len(outcome[0]) > len(content) + _ADDED:
            why = f"makes {len(outcome[0]):,} characters of {len(content):,}"
        else:
            return outcome[0]
        raise BadInput(f"this chat template {why}: {_PLAIN}, or mend the template.")

    def _check_ids(self, example: Example, ids: tuple[int, ...], offsets: Sequence[Span]) -> None:
        """Refuse a prompt that is too long, or of ids that the model does not know."""
        why = None
        if self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            unknown = max(ids) if min(ids) >= 0 else min(ids)
            giver = "the tokenizer gives" if example.text is not None else "the prompt has"
            known = f"this model's ids are 0 to {self.vocabulary - 1}"
            mend = "take the tokenizer that belongs to the model"
            why = f"{giver} the id {unknown}, but {known}: {mend}"
        elif self.max_length is not None and len(ids) > self.max_length:
            end = f"the model's context ends at {self.max_length}"
            why = f"the prompt has {len(ids)} tokens, but {end}: shorten it"
        elif self.unknown in ids:
            word = "other ids"
            if example.text is not None:
                start, stop = offsets[ids.index(self.unknown)]
                word = repr(example.text[start:stop])
            only = "this model has a token only for the words it was trained on"
            why = f"{only}, and none for {word}: take words of the tasks"
        if why is not None:
            raise BadInput(f"{why} ({example.show(80)}).")

    def _place(self, example: Example, ids: tuple[int, ...], offsets: Sequence[Span]) -> Tokens:
        """Find the tokens of an example's marks; marks that would mislead are refused."""
        if example.text is not None:
            for role, span in example.roles.items():
                self._check_whole(example, offsets, role, span)
        keys = tuple(self._token_of(example, key.span, ids, offsets) for key in example.keys)
        shared = [a for a, b in pairwise(sorted(keys)) if a == b]
        if shared:
            twice = f"two keys share token {shared[0]}, which would count it twice"
            raise BadInput(f"{twice}; the tokens are {self._show(ids)}.")
        queries = tuple(self._token_of(example, span, ids, offsets) for span in example.queries)
        tokens = Tokens(ids, queries or (len(ids) - 1,), keys)
        self._check_labels(example, tokens)
        return tokens

    def _token_of(
        self, example: Example, span: Span, ids: tuple[int, ...], offsets: Sequence[Span]
    ) -> int:
        """The last token that covers some of a marked piece."""
        start, stop = _trim(example, span)
        tokens = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
        if not tokens:
            raise BadInput(
                f"no token covers {example.piece(span)!r}; the tokens are {self._show(ids)}."
            )
        return tokens[-1]

    def _check_labels(self, example: Example, tokens: Tokens) -> None:
        """Refuse the label of a key that is a query, and warn of one of the first token."""
        for i, (key, token) in enumerate(zip(example.keys, tokens.keys, strict=True)):
            if not any(key.labels.values()):
                continue
            if token in tokens.queries:
                other = "a contrast is of other tokens, so remove its label, or mark another query"
                raise BadInput(f"{feed.key_in_words(example, i)} is the query token: {other}.")
            if token == 0:
                self._warn(feed.FIRST_TOKEN, f"{feed.FIRST_TOKEN} Mark later words.")

    def _check_whole(
        self, example: Example, offsets: Sequence[Span], role: str, span: Span
    ) -> None:
        """Refuse a token that holds more than (a part of) the place a role names, blanks aside."""
        text = example.text or ""
        start, stop = _trim(example, span)
        for a, b in offsets:
            if a >= stop or b <= start:
                continue
            a, b = _trim(example, (max(a, 0), min(b, len(text))))
            if a < start or b > stop:
                piece = f"{text[start:stop]!r} ({role})"
                merged = f"the tokenizer merges {piece} with its neighbour in the token"
                other = "take another word, or other words around it"
                raise BadInput(f"{merged} {text[a:b]!r}: {other} ({example.show(120)}).")

    def _show(self, ids: tuple[int, ...]) -> str:
        """Tokens as they stand in messages: those of a long prompt without its middle."""
        tokens: list[Any] = list(ids)
        if self.tokenizer is not None:
            tokens = self.tokenizer.convert_ids_to_tokens(tokens)
        if len(tokens) > 120:
            tokens = [*tokens[:60], "...", *tokens[-60:]]
        return str(tokens)


def _trim(example: Example, span: Span) -> Span:
    """Leave the blanks at the edges of a marked piece to its neighbours.

    The token " is" may hold the blank after a marked "hat ".
    """
    if example.text is None:
        return span
    start, stop = span
    piece = example.text[start:stop]
    if not piece.strip():
        return span
    before = len(piece) - len(piece.lstrip())
    after = len(piece) - len(piece.rstrip())
    return start + before, stop - after


def choose_side(
    wanted: PaddingSide | None, harmless: tuple[PaddingSide, ...], padded: bool, name: str
) -> PaddingSide:
    """The side to pad on: the one wanted, if the model sees the same prompts when padded there."""
    if not padded or wanted in harmless:
        return wanted or "left"
    if not harmless:
        raise BadInput(
            f"padding changes what {name} sees: give it prompts of one length, or one at a time."
        )
    if wanted is None:
        return harmless[0]
    moved = f"{name} counts positions by columns, so padding on the {wanted} would move its prompts"
    raise BadInput(f"{moved}: leave padding_side out, or say {harmless[0]!r}.")


def token_texts(scope: Any, ids: Sequence[int]) -> list[str]:
    """What each token reads as; a character cut in pieces is shown at its first piece, whole."""
    if scope.tokenizer is None:
        return [str(i) for i in ids]
    texts: list[str] = []
    while len(texts) < len(ids):
        start = len(texts)
        character = _character(scope.tokenizer, ids[start : start + _LONGEST_CHARACTER])
        texts.append(character.text)
        texts.extend([""] * (character.n_tokens - 1))
    return texts


class _Character(NamedTuple):
    """The text of the fewest tokens that make whole characters."""

    text: str
    n_tokens: int


def _character(tokenizer: Any, ids: Sequence[int]) -> _Character:
    """Decode as many of some tokens as their first character takes."""
    for n_tokens in range(1, len(ids) + 1):
        text = _decoded(tokenizer, ids[:n_tokens])
        if not text.endswith(_CUT_CHARACTER):
            return _Character(text, n_tokens)
    return _Character(PIECE, 1)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of some tokens, with the blank before a word.

    SentencePiece leaves that blank out where a text begins.
    """
    text = tokenizer.decode(ids)
    first = tokenizer.convert_ids_to_tokens(ids[0])
    if str(first).startswith("▁") and not text.startswith(" "):
        return f" {text}"
    return text


def _end(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread.

    A template's endless loop would go on for the life of the process, and every small operation
    on tensors would wait for it: the loop gives the interpreter's lock back every 5 ms only.
    """
    assert thread.ident is not None
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    thread.join(1)


def _limited_product(_environment: Any, _context: Any, operator: str, left: Any, right: Any) -> Any:
    """A product or power in a template, unless its result is large.

    One call that makes a text of any length would outlast every limit of time.
    """
    left_size = _size_of(left)
    right_size = _size_of(right)
    if operator == "**":
        too_large = right_size > 64
    else:
        too_large = left_size * right_size > _ADDED
    if too_large:
        raise ValueError(f"{left_size} {operator} {right_size} is more than a template needs")
    return left**right if operator == "**" else left * right


def _size_of(value: Any) -> Any:
    """A number's absolute value, or the length of a text or list."""
    return abs(value) if isinstance(value, int | float) else len(value)
