"""From marked text to padded ids and token positions, read off the tokenizer's offsets on the ids
the model sees.

A token belongs to a marked piece when their characters overlap: ``start_t < stop and stop_t >
start``. Whether a byte-level tokenizer counts a leading space to the token or not then does not
matter, and no piece is tokenised alone.
"""

from __future__ import annotations

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

_SENTINEL = "qkscope content"
_PLAIN = "ask without chat (no --chat, chat=False)"
# that a chat template may take, and characters that it may add to a prompt
_SECONDS = 5
_ADDED = 1 << 20
_CHUNK = 256
PIECE = "(part of a character)"


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
    example: Int[Tensor, "b"]
    labels: dict[str, Int[Tensor, "b k"]]
    examples: Sequence[Example] = ()

    def __repr__(self) -> str:
        (sequences, tokens), (queries, keys) = (
            self.inputs["input_ids"].shape,
            self.places.keys.shape,
        )
        return f"Encoding({sequences} sequences of {tokens} tokens, {queries} queries, {keys} keys each at most)"

    def everywhere(self) -> Places:
        """The same queries, with every token of each one's own sequence as a key."""
        return Places.everywhere(self.places.row, self.places.query, self.inputs["attention_mask"])


Prompt = tuple[Example, Tokens]


def padded(
    prompts: Sequence[Prompt], side: PaddingSide, pad_id: int, positions: bool, device: torch.device
) -> Encoding:
    """Prompts as one padded batch, with `position_ids` where the model takes them."""
    inputs = feed.pad_rows(
        [torch.tensor(tokens.ids) for _, tokens in prompts], pad_id, side, positions
    )
    inputs = {name: value.to(device) for name, value in inputs.items()}
    rows = [(row, query) for row, (_, tokens) in enumerate(prompts) for query in tokens.queries]
    row, query = torch.tensor(rows).to(device).unbind(1)
    shift = inputs["attention_mask"].argmax(dim=1)[row]
    keys = [torch.tensor(prompts[i][1].keys, dtype=torch.long) for i, _ in rows]
    at = pad_sequence(keys, batch_first=True, padding_value=-1).to(device)
    labels = {}
    for name in sorted(
        {name for example, _ in prompts for key in example.keys for name in key.labels}
    ):
        signs = [torch.tensor([key.label(name) for key in prompts[i][0].keys]) for i, _ in rows]
        labels[name] = pad_sequence(signs, batch_first=True).to(device, torch.int8)
    places = Places(row, shift + query, (at + shift[:, None]).masked_fill(at < 0, 0), at >= 0)
    return Encoding(inputs, places, row, labels, [example for example, _ in prompts])


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
        known = None
        with suppress(
            NotImplementedError, AttributeError
        ):  # models of sounds and pictures may have no vocabulary
            known = model.get_input_embeddings().num_embeddings
        limit = feed.context_limit(model, first_position)
        first = feed.first_token(model, tokenizer)
        return cls(tokenizer, limit, feed.model_pad_id(model), known, first)

    @property
    def pad_id(self) -> int:
        """The id in padded places: the model's own, the tokenizer's, or any where neither names one
        (it is masked).
        """
        # some models count positions from the ids that are not their own
        named = [
            self.own_pad_id,
            *(getattr(self.tokenizer, f"{name}_token_id", None) for name in ("pad", "eos")),
        ]
        known = [
            id
            for id in named
            if isinstance(id, int) and (self.vocabulary is None or id < self.vocabulary)
        ]
        return known[0] if known else 0

    @cached_property
    def adds_first(self) -> bool:
        """Whether a prompt that is not in a chat gets a token before its own first one."""
        return feed.added_token(self.tokenizer) is not None

    @cached_property
    def unknown(self) -> int | None:
        """The id of a word-level tokenizer's unknown words; other tokenizers spell such words in
        pieces.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return (
            self.tokenizer.unk_token_id
            if type(getattr(backend, "model", None)).__name__ == "WordLevel"
            else None
        )  # type: ignore[union-attr]

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

    def prompts(self, examples: Sequence[Example | str], chat: bool) -> list[Prompt]:
        """Examples with their tokens; a plain string is an example without marks."""
        listed = [
            Example(text=example) if isinstance(example, str) else example for example in examples
        ]
        return list(zip(listed, self.tokenise(listed, chat), strict=True))

    def tokenise(self, examples: Sequence[Example], chat: bool = False) -> list[Tokens]:
        """Ids and token positions of every example, unpadded."""
        rendered = [
            None if example.text is None else self.render(example.text, chat)
            for example in examples
        ]
        encoded = self.ids_and_offsets([text for text, _ in filter(None, rendered)], chat)
        result = []
        for example, text in zip(examples, rendered, strict=True):
            if text is not None:
                ids, offsets = next(encoded)
                offsets = [(start - text[1], stop - text[1]) for start, stop in offsets]
            elif chat:
                raise BadInput("a chat template needs text, but an example has ids: give its text.")
            else:
                ids = example.ids or ()
                offsets = [(i, i + 1) for i in range(len(example.ids or ()))]
            self._check_ids(example, ids, offsets)
            result.append(self._place(example, ids, offsets))
        without = sum(tokens.ids[0] != self.first for tokens in result)
        if self.first is not None and without:
            expects = (
                f"this model expects {self._show((self.first,))} as the first token of every prompt"
            )
            missing = f"{without} of {len(result)} prompts start without it"
            self._warn(
                "first",
                f"{expects}, but {missing}: its attention there is not what it was trained for",
            )
        return result

    def _warn(self, about: str, what: str) -> None:
        """Warn once."""
        if about not in self._warned:
            self._warned.add(about)
            log.warning("%s", what)

    def ids_and_offsets(
        self, texts: list[str], chat: bool
    ) -> Iterator[tuple[tuple[int, ...], list[Span]]]:
        """The ids of each text, and which characters each covers."""
        if texts and self.tokenizer is None:
            raise BadInput(
                "this scope has no tokenizer: give examples as ids, or load the model with a tokenizer."
            )
        if texts and not getattr(self.tokenizer, "is_fast", False):
            kind = f"{type(self.tokenizer).__name__} does not say which characters a token covers"
            raise BadInput(f"{kind}: load a fast tokenizer, or give examples as ids.")
        options = {
            "return_offsets_mapping": True,
            "padding": False,
            "truncation": False,
            "verbose": False,
        }
        for start in range(
            0, len(texts), _CHUNK
        ):  # offsets of many texts at once would take more room than their ids
            batch = self.tokenizer(
                texts[start : start + _CHUNK], add_special_tokens=not chat, **options
            )  # type: ignore[misc]
            for ids, offsets in zip(
                map(tuple, batch["input_ids"]), batch["offset_mapping"], strict=True
            ):
                twice = (
                    ids[:2] == (self.first, self.first) and not chat and self.adds_first
                )  # the text begins with it
                yield (ids[1:], offsets[1:]) if twice else (ids, offsets)

    def render(self, text: str, chat: bool) -> tuple[str, int]:
        """The text the tokenizer sees, and by how much the template moves the prompt in it."""
        if not chat:
            return text, 0
        if not getattr(self.tokenizer, "chat_template", None):
            raise BadInput(f"this tokenizer has no chat template: {_PLAIN}.")
        before, inside, after = self._template(_SENTINEL).partition(_SENTINEL)
        if not inside or _SENTINEL in after:
            raise BadInput(f"this chat template does not hold the prompt exactly once: {_PLAIN}.")
        rendered = self._template(text)
        for content, cut in (
            (text, 0),
            (text.strip(), len(text) - len(text.lstrip())),
        ):  # some templates trim
            if rendered == before + content + after:
                return rendered, len(before) - cut
        raise BadInput(
            f"the chat template changes the prompt {text[:80]!r}, so marks in it are lost: {_PLAIN}."
        )

    def _template(self, content: str) -> str:
        """A prompt in the chat template, a program from elsewhere: it gets some seconds in a thread
        of its own.
        """
        messages = [{"role": "user", "content": content}]
        outcome = list[Any]()

        def run() -> None:
            try:
                render = self.tokenizer.apply_chat_template  # type: ignore[union-attr]
                outcome.append(render(messages, tokenize=False, add_generation_prompt=True))
            except Exception as error:  # whatever it raises is its own fault
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        products = (SandboxedEnvironment, "intercepted_binops", frozenset({"*", "**"}))
        with swapped(products, (SandboxedEnvironment, "call_binop", _product)):
            thread.start()
            thread.join(_SECONDS)
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
        """Refuse a prompt that is empty or too long, or of ids that the model does not know."""
        why = ""
        if self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            over = max(ids) if min(ids) >= 0 else min(ids)
            fault = "the tokenizer gives" if example.text is not None else "the prompt has"
            known = f"this model's ids are 0 to {self.vocabulary - 1}: take the tokenizer that belongs to the model"
            why = f"{fault} the id {over}, but {known}"
        elif self.max_length is not None and len(ids) > self.max_length:
            why = f"the prompt has {len(ids)} tokens, but the model's context ends at {self.max_length}: shorten it"
        elif self.unknown in ids:
            word = (
                "other ids"
                if example.text is None
                else repr(example.text[slice(*offsets[ids.index(self.unknown)])])
            )
            only = "this model has a token only for the words it was trained on"
            why = f"{only}, and none for {word}: take words of the tasks"
        if why:
            raise BadInput(f"{why} ({example.show(80)}).")

    def _place(self, example: Example, ids: tuple[int, ...], offsets: Sequence[Span]) -> Tokens:
        def find(span: Span) -> int:
            start, stop = _trim(example, span)
            hits = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
            if not hits:
                raise BadInput(
                    f"no token covers {example.piece(span)!r}; the tokens are {self._show(ids)}."
                )
            return hits[-1]

        for role, span in example.roles.items() if example.text is not None else ():
            self._check_whole(example, offsets, role, span)
        keys = tuple(find(key.span) for key in example.keys)
        if shared := [a for a, b in pairwise(sorted(keys)) if a == b]:
            twice = f"two keys share token {shared[0]}, which would count it twice"
            raise BadInput(f"{twice}; the tokens are {self._show(ids)}.")
        queries = tuple(find(span) for span in example.queries) or (len(ids) - 1,)
        for i, (key, at) in enumerate(zip(example.keys, keys, strict=True)):
            if at in queries and any(key.labels.values()):
                other = "a contrast is of other tokens, so remove its label, or mark another query"
                raise BadInput(f"{feed.place_of(example, i)} is the query token: {other}.")
            if at == 0 and any(key.labels.values()):
                self._warn(feed.FIRST_TOKEN, f"{feed.FIRST_TOKEN} Mark later words.")
        return Tokens(ids, queries, keys)

    def _check_whole(
        self, example: Example, offsets: Sequence[Span], role: str, span: Span
    ) -> None:
        """Refuse a token that holds more than (a part of) the place a role names, blanks aside."""
        text = example.text or ""
        start, stop = _trim(example, span)
        for a, b in offsets:
            if a < stop and b > start:
                a, b = _trim(example, (max(a, 0), min(b, len(text))))
                if a < start or b > stop:
                    merged = f"the tokenizer merges {text[start:stop]!r} ({role}) with its neighbour in the token"
                    other = "take another word, or other words around it"
                    raise BadInput(f"{merged} {text[a:b]!r}: {other} ({example.show(120)}).")

    def _show(self, ids: tuple[int, ...]) -> str:
        tokens = (
            self.tokenizer.convert_ids_to_tokens(list(ids))
            if self.tokenizer is not None
            else list(ids)
        )
        return str(tokens if len(tokens) <= 120 else [*tokens[:60], "...", *tokens[-60:]])


def _trim(example: Example, span: Span) -> Span:
    """Leave blanks at the edges of a marked piece to its neighbours: " is" may own the blank after
    a marked "hat ".
    """
    start, stop = span
    if example.text is not None and (piece := example.text[start:stop]).strip():
        return start + len(piece) - len(piece.lstrip()), stop - len(piece) + len(piece.rstrip())
    return span


def choose_side(
    wanted: PaddingSide | None, harmless: tuple[PaddingSide, ...], padded: bool, name: str
) -> PaddingSide:
    """Where to pad: as asked, if prompts padded there are still the same prompts to the model."""
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
        some = ids[len(texts) : len(texts) + 8]
        reads = ((n, _decoded(scope.tokenizer, some[:n])) for n in range(1, len(some) + 1))
        count, text = next(((n, text) for n, text in reads if not text.endswith("�")), (1, PIECE))
        texts += [text, *[""] * (count - 1)]
    return texts


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of some tokens, with the blank before a word, which SentencePiece leaves out where a
    text begins.
    """
    text = tokenizer.decode(ids)
    first = tokenizer.convert_ids_to_tokens(ids[0])
    return f" {text}" if str(first).startswith("▁") and not text.startswith(" ") else text


def _product(_environment: Any, _context: Any, operator: str, left: Any, right: Any) -> Any:
    """A product in a template: one call that makes a text of any length would outlast every limit
    of time.
    """
    sizes = [abs(side) if isinstance(side, int | float) else len(side) for side in (left, right)]
    if (operator == "**" and sizes[1] > 64) or (operator == "*" and sizes[0] * sizes[1] > _ADDED):
        raise ValueError(f"{sizes[0]} {operator} {sizes[1]} is more than a template needs")
    return left**right if operator == "**" else left * right
