"""A GGUF file's own rules for tokens: which ids are special, and which of them stand before and after every text.

They are in the file's metadata (``tokenizer.ggml.*``); what it leaves unsaid is as in llama.cpp, where these files come
from. transformers reads the vocabulary but not whether a text starts with its first token, and Gemma without its
``<bos>`` is another model: after "... John gave a drink to" it says " the" instead of " Mary".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SENTENCEPIECE = ("llama", "gemma4")
_UNSAID = {"llama": {"bos": 1, "eos": 2, "unk": 0}}
_BPE_WITH_FIRST = {  # kinds of byte-level vocabulary with a first token, unless the file says otherwise
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "chameleon",
}  # fmt: skip


@dataclass(frozen=True)
class TokenRules:
    """What a file says: the ids of its special tokens, their spelling, and what is added to a text."""

    ids: Mapping[str, int]
    tokens: Sequence[str]
    add_bos: bool
    add_eos: bool
    whole: bool  # a word of the vocabulary is one token, whether its merges lead there or not

    def broken_by(self, tokenizer: Any) -> str | None:
        """The first rule that a tokenizer does not follow; None where it follows all."""
        for name, id in self.ids.items():
            if getattr(tokenizer, f"{name}_token_id") != id:
                return f"{name} is {getattr(tokenizer, f'{name}_token_id')} instead of {id}"
        bare, whole = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
        first = [self.ids["bos"]] if self.add_bos else []
        last = [self.ids["eos"]] if self.add_eos else []
        if whole != first + bare + last:
            return f"a text becomes {whole} instead of {first + bare + last}"
        return None


def token_rules(fields: Mapping[str, Any]) -> TokenRules | None:
    """The rules of a file, from its metadata; None where it has no vocabulary."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        return None
    kind, before = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    ids = {}
    for name, word in _SPECIAL.items():
        id = fields.get(f"tokenizer.ggml.{word}_token_id", _UNSAID.get(str(kind), {}).get(name))
        if isinstance(id, int) and 0 <= id < len(tokens):
            ids[name] = id
    late = kind == "gpt2" and before in _BPE_WITH_FIRST
    starts = kind in _SENTENCEPIECE or late
    return TokenRules(
        ids=ids,
        tokens=tokens,
        add_bos=bool(fields.get("tokenizer.ggml.add_bos_token", starts)) and "bos" in ids,
        add_eos=bool(fields.get("tokenizer.ggml.add_eos_token", kind == "t5")) and "eos" in ids,
        whole=late and before != "chameleon",
    )


def follow_rules(tokenizer: Any, rules: TokenRules) -> None:
    """Make a tokenizer follow the rules of the file it was read from."""
    for name, id in rules.ids.items():
        if getattr(tokenizer, f"{name}_token_id") != id:
            setattr(tokenizer, f"{name}_token", rules.tokens[id])
    tokenizer.add_bos_token, tokenizer.add_eos_token = rules.add_bos, rules.add_eos
    if rules.whole:
        tokenizer.backend_tokenizer.model.ignore_merges = True
