"""Tiny models: a batch for any of them, and a Llama on disk whose tokenizer knows the words of the
binding task.
"""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qkscope.model.inputs import model_pad_id, pad_rows, short_ids, short_inputs
from qkscope.texts.list_tasks import FILLER
from qkscope.texts.word_pools import BOXES, CATEGORIES, OBJECTS
from qkscope_papers.families import tiny_model


def tiny_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Two sequences, the second one padded on the side on which the family pads; or two images."""
    lengths = (11, 7)
    if not type(model).__name__.endswith("MaskedLM"):
        return short_inputs(model, lengths)
    return pad_rows(short_ids(model, lengths), model_pad_id(model) or 0, "right", positions=False)


def write_tiny_llama(path: Path, seed: int = 0) -> Path:
    named = [word for words in CATEGORIES.values() for word in words]
    said = [
        "The", "is", "in", "Box", "Which", "box", "the", "Answer", "hatA", "Items", "list", "are", "red", "green",
        "blue", *FILLER,
    ]  # fmt: skip
    words = [
        "[UNK]",
        "[EOS]",
        *BOXES,
        *OBJECTS,
        *":.,?-",
        *said,
        *map(str.capitalize, FILLER),
        *CATEGORIES,
    ]
    words = list(dict.fromkeys([*words, *(part for text in named for part in text.split())]))
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]", pad_token="[EOS]"
    )
    fast.chat_template = "{% for m in messages %}Answer : {{ m['content'] }} Which{% endfor %}"
    tiny_model("llama", seed, vocab_size=len(words)).save_pretrained(path)
    fast.save_pretrained(path)
    return path
