"""What a model is fed, how long a prompt may be, and marks that mean what they say.

A model is fed ids or pixels; the first token, the id of padded places and positions are settled
here. A labelled key must be one the query can look at, and an answer one token ahead.

Attention parks on the first token, so a model that expects one and gets none computes something
else without an error. A tokenizer that adds one says so by doing it. Where it adds none (or where
ids are given bare and there is no tokenizer), only families of which every release was trained with
one are taken to expect it: a ``bos_token_id`` in the config alone says nothing (SmolLM2 and GPT-2
name one, and never saw it first).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qkscope import BadInput, Example
from qkscope.heads import Head
from qkscope.model.spaces import rotary_settings

if TYPE_CHECKING:
    from qkscope.model.encode import Encoder, Encoding

PaddingSide = Literal["left", "right"]
PADDING_SIDES: tuple[PaddingSide, ...] = ("left", "right")

#: How the model types begin of families of which every release expects a first token.
_EXPECT_FIRST = ("gemma", "opt")

#: Fields of configs that hold the length of the context, the first that is there.
_LENGTH_FIELDS = ("max_position_embeddings", "max_target_positions", "max_seq_len")

FIRST_TOKEN = (
    "A labelled key is the first token of its prompt, which draws attention whatever it says."
)


def input_device(model: Any) -> torch.device:
    """The device that inputs go to: the embedding's, as a model may be split over devices."""
    try:
        return model.get_input_embeddings().weight.device
    except (AttributeError, NotImplementedError):
        return next(model.parameters()).device


def forward_arguments(module: Any) -> set[str]:
    """Names of the arguments that a module's forward takes.

    A wrapper that hands all of them on takes those of the one module inside it.
    """
    names = set(inspect.signature(module.forward).parameters)
    children = list(module.children())
    if names == {"args", "kwargs"} and len(children) == 1:
        return forward_arguments(children[0])
    return names


class _ScopeRuns(threading.local):
    """How deep runs that a scope makes are nested in this thread."""

    depth = 0


_SCOPE_RUNS = _ScopeRuns()


def in_scope_run() -> bool:
    """Whether a scope makes the run that is under way in this thread, rather than its user."""
    return _SCOPE_RUNS.depth > 0


@contextmanager
def scope_run() -> Iterator[None]:
    """Mark the runs inside a ``with`` block as a scope's own."""
    _SCOPE_RUNS.depth += 1
    try:
        yield
    finally:
        _SCOPE_RUNS.depth -= 1


def forward(module: Any, inputs: dict[str, Any]) -> Any:
    """Run a model, or its body, without a key-value cache."""
    if "use_cache" in forward_arguments(module):
        inputs = {"use_cache": False} | inputs
    with scope_run():
        return module(**inputs)


def logits_of(model: Any, inputs: dict[str, Any], row: Tensor, query: Tensor) -> Tensor:
    """Next-token logits [tokens, v] at some tokens, given by row and column.

    The LM head is a model's largest matrix, so it runs at these columns alone if it can.
    """
    if "logits_to_keep" in forward_arguments(model):
        columns, where = query.unique(return_inverse=True)
        output = forward(model, inputs | {"logits_to_keep": columns})
        return output.logits[row, where].float()
    logits = getattr(forward(model, inputs), "logits", None)
    if logits is None or logits.ndim != 3:
        raise BadInput(
            f"{type(model).__name__} gives no logits per token: capture it with logits=False."
        )
    return logits[row, query].float()


def model_pad_id(model: Any) -> int | None:
    """The padding id of the model itself; None where it names none of its vocabulary.

    RoBERTa's relatives count positions from the ids that are not it.
    """
    config = model.config.get_text_config()
    pad = getattr(config, "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < getattr(config, "vocab_size", 0):
        return pad
    return None


def begin_token(model: Any, tokenizer: Any | None) -> int | None:
    """The id that stood first in every prompt of a model's training; None where that is unknown."""
    added = added_token(tokenizer)
    if added is not None:
        return added
    if not getattr(model.config, "name_or_path", ""):  # made in memory, it was trained on nothing
        return None
    config = model.config.get_text_config()
    bos = getattr(config, "bos_token_id", None)
    if isinstance(bos, int) and config.model_type.startswith(_EXPECT_FIRST):
        return bos
    return None


def added_token(tokenizer: Any) -> int | None:
    """The id that a tokenizer puts before every text; None where it adds none."""
    try:
        whole = tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]
        bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    except Exception:  # there is none, or one that has no such word adds nothing that we know of
        return None
    if list(whole[:1]) == list(bare[:1]):
        return None
    return whole[0]


def positions_of(mask: Tensor) -> Tensor:
    """Position ids that count real tokens from 0, whatever the padding side."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def pad_rows(
    rows: list[Tensor], pad_id: int, side: PaddingSide, positions: bool
) -> dict[str, Tensor]:
    """Sequences of ids as one padded batch, with position ids where the model takes them."""
    ones = [torch.ones_like(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side=side)
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if positions:
        inputs["position_ids"] = positions_of(mask)
    return inputs


def short_ids(model: Any, lengths: tuple[int, ...]) -> list[Tensor]:
    """Random prompts for a check, of ids that are no special tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    shape = (len(lengths), max(lengths))
    ids = torch.randint(min(10, vocabulary // 2), vocabulary, shape, generator=generator)
    pad = model_pad_id(model)
    if pad is not None:  # it may stand anywhere in the vocabulary, and is no part of a prompt
        ids = torch.where(ids == pad, pad - 1 if pad else vocabulary - 1, ids)
    return [row[len(row) - length :] for row, length in zip(ids, lengths, strict=True)]


def short_inputs(
    model: Any, lengths: tuple[int, ...] = (6,), positions: bool = False
) -> dict[str, Tensor]:
    """Inputs for a check: ids padded on the left, or images for an image encoder."""
    device = input_device(model)
    if model.main_input_name == "pixel_values":
        images = _random_images(model.config, len(lengths))
        return {"pixel_values": images.to(device, model.dtype)}
    batch = pad_rows(short_ids(model, lengths), model_pad_id(model) or 0, "left", positions)
    return {name: value.to(device) for name, value in batch.items()}


def _random_images(config: Any, number: int) -> Float[Tensor, "n c height width"]:
    """Noise of the size that an image encoder takes."""
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(0)
    return torch.randn((number, config.num_channels, height, width), generator=generator)


def context_limit(model: Any, first_position: int = 0) -> int | None:
    """How many tokens a prompt may have, None where there is no end.

    It is the config's length, less the positions that are never given out (`first_position`).
    Dynamic RoPE is made for what lies beyond it, and YaRN and LongRoPE reach ``factor`` times the
    length they were extended from.
    """
    config = model.config.get_text_config()
    lengths = [getattr(config, name, None) for name in _LENGTH_FIELDS]
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    if not known:
        return None
    limit = known[0] - first_position
    for settings in rotary_settings(config):
        kind = settings["rope_type"]
        factor = settings.get("factor")
        if "dynamic" in kind:
            return None
        if kind in ("yarn", "longrope") and factor:
            original = settings.get("original_max_position_embeddings") or limit
            limit = max(limit, int(factor * original))
    return limit


def key_in_words(example: Example, key: int) -> str:
    """A key in a message: its line and number, or its prompt."""
    where = example.where or f"in {example.show(80)}"
    piece = example.piece(example.keys[key].span)
    return f"{where}, key {key + 1} ({piece!r})"


def check_visible(
    encoded: Encoding, heads: Sequence[Head], bias: Tensor, by_some: bool = False
) -> None:
    """Refuse a labelled key that a head cannot see from the query.

    What a query sees is read off the model's own mask, head by head, so it holds for models that
    look back only, for those that look both ways, and for sliding windows.

    Parameters
    ----------
    bias : Float [b, h, k]
        The model's mask at the marked keys, -inf where the query cannot look.
    by_some : bool
        Refuse only a key that no head can see.
    """
    if not encoded.labels or not encoded.examples:
        return
    places = encoded.places
    signs = torch.stack(list(encoded.labels.values()))
    labelled = (signs != 0).any(dim=0) & places.key_mask
    blind = (bias == -torch.inf) & labelled[:, None].to(bias.device)
    if by_some:
        blind = blind.all(dim=1, keepdim=True)
    if not bool(blind.any()):
        return
    row, head, key = blind.nonzero()[0].tolist()
    example = encoded.examples[int(encoded.example[row])]
    if int(places.keys[row, key]) <= int(places.query[row]):
        far = f"is out of sight of {heads[head]}, which looks only so far back"
        why = f"{far}: shorten the prompt, or leave this head out"
    else:
        after = "stands after the query, and this model looks back only"
        why = f"{after}: mark a key before the query, or another query"
    raise BadInput(f"{key_in_words(example, key)} {why}.")


def answer_tokens(
    encoder: Encoder, encoded: Encoding, chat: bool
) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b k"]]:
    """Tokens that an answer is read among, and their signs: +1 right, −1 wrong, 0 an empty slot.

    They are the answers that an example names, right ones first, or the tokens of its keys, in
    their slots.
    """
    places = encoded.places
    key_tokens = encoded.inputs["input_ids"][places.row[:, None], places.keys].cpu()
    key_signs = (encoded.labels["answer"] * places.key_mask).cpu().long()
    tokens = []
    signs = []
    for row, number in enumerate(encoded.example.tolist()):
        right, wrong = answer_ids(encoder, encoded.examples[number], chat)
        if right:
            tokens.append(torch.tensor([*right, *wrong]))
            signs.append(torch.tensor([1] * len(right) + [-1] * len(wrong)))
        else:
            tokens.append(key_tokens[row])
            signs.append(key_signs[row])
    return pad_sequence(tokens, batch_first=True), pad_sequence(signs, batch_first=True)


def answer_ids(
    encoder: Encoder, example: Example, chat: bool = False
) -> tuple[list[int], list[int]]:
    """First tokens of an example's right and wrong answers, as they would follow its query.

    None where the example names no answers. The answer is tokenised where it would stand. One that
    melts into the prompt's last token cannot be read there.
    """
    if example.answers is None:
        return [], []
    if example.text is None or len(example.queries) > 1:
        raise BadInput(
            "an answer follows one query of a text: give its text, and mark one "
            f"({example.show(80)})."
        )
    (tokens,) = encoder.tokenise([example], chat)
    rendered = encoder.render(example.text, chat).text
    ((_, offsets),) = encoder.ids_and_offsets([rendered], chat)
    query = tokens.queries[0]
    before = rendered[: offsets[query][1]]

    def first_of(answer: str) -> int:
        ((ids, _),) = encoder.ids_and_offsets([before + answer], chat)
        prompt_kept = ids[: query + 1] == tokens.ids[: query + 1]
        if not prompt_kept or ids[query + 1 : query + 2] in ((), (encoder.unknown,)):
            after = f"after {example.show(80)}: begin it with a blank, or name another"
            raise BadInput(f"the answer {answer!r} has no token of its own {after}.")
        return ids[query + 1]

    right = list(dict.fromkeys(map(first_of, example.answers.right)))
    wrong = list(dict.fromkeys(map(first_of, example.answers.wrong)))
    if set(right) & set(wrong):
        raise BadInput(
            "a right and a wrong answer begin with the same token after "
            f"{example.show(80)}: name others."
        )
    return right, wrong
