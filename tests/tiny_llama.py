"""Tiny models: a batch for any of them, and a Llama on disk whose tokenizer knows the words of the binding task."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qkscope.capture.inputs import model_pad_id, pad_rows, short_ids, short_inputs
from qkscope.tasks.binding import FILLER
from qkscope.tasks.words import BOXES, CATEGORIES, OBJECTS
from qkscope_papers.families import tiny_model

SOME = [
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "gemma", "gemma2", "gemma3_text", "gemma3",
    "olmo", "olmo2", "olmo3", "olmoe", "gpt_neox", "gpt2", "opt", "gpt_oss", "starcoder2", "stablelm",
    "cohere", "cohere2", "granite", "granitemoe", "smollm3", "phi", "phimoe", "qwen2_moe", "qwen3_moe", "glm",
    "glm4", "glm4_moe", "nemotron", "helium", "ministral", "exaone4", "arcee", "seed_oss", "ernie4_5",
    "persimmon", "gpt_bigcode", "biogpt", "ctrl", "jetmoe", "apertus", "nanochat", "diffllama",
    "hunyuan_v1_dense", "qwen2_vl", "gemma3n_text", "falcon_h1", "llama4_text", "bert", "roberta",
    "xlm-roberta", "layoutlm", "electra", "distilbert", "modernbert", "vit", "dinov2", "falcon", "bloom",
    "gptj", "gpt_neo", "codegen", "mpt", "openai-gpt", "mpnet", "mamba", "deberta-v2", "qwen3_next", "lfm2",
    "jamba", "granitemoehybrid", "mllama", "deepseek_v3", "bart", "mbart", "pegasus", "blenderbot",
    "blenderbot-small", "plbart", "marian", "whisper", "xglm", "t5",
]  # fmt: skip
"""Families of every kind of attention, residual stream and position; all others: `qkscope models`."""


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
    words = ["[UNK]", "[EOS]", *BOXES, *OBJECTS, *":.,?-", *said, *map(str.capitalize, FILLER), *CATEGORIES]
    words = list(dict.fromkeys([*words, *(part for text in named for part in text.split())]))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]", pad_token="[EOS]")
    fast.chat_template = "{% for m in messages %}Answer : {{ m['content'] }} Which{% endfor %}"
    tiny_model("llama", seed, vocab_size=len(words)).save_pretrained(path)
    fast.save_pretrained(path)
    return path
