"""A tiny grouped-query Llama on disk, with a tokenizer that knows the words of the binding task."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qkscope.capture.families import tiny_model
from qkscope.tasks.words import BOXES, OBJECTS


def write_tiny_llama(path: Path) -> Path:
    words = ["[UNK]", "[EOS]", *BOXES, *OBJECTS, *":.,?", "The", "is", "in", "Box", "Which", "box", "the", "Answer"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]", pad_token="[EOS]")
    fast.chat_template = "{% for m in messages %}Answer : {{ m['content'] }} Which{% endfor %}"
    tiny_model("llama", vocab_size=len(words)).save_pretrained(path)
    fast.save_pretrained(path)
    return path
