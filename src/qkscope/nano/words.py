"""The nano models' tokenizer: one token per word, mark or line break, and only the words that tasks are made of.

Blanks separate words and are no tokens; a text begins with ``<s>``, on which heads can rest. Decoding puts blanks back
where the tasks have them, so prompts survive the round trip.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from qkscope.tasks.binding import FILLER, LINES
from qkscope.tasks.filter import FORMS
from qkscope.tasks.ioi import TEMPLATES
from qkscope.tasks.words import BOXES, CATEGORIES, FIVE, NAMES, OBJECTS, PLACES, THINGS

BOS, PAD, UNKNOWN = SPECIAL = ("<s>", "<pad>", "<unk>")
_TOKEN = r"\n|\w+|[^\w\s]"
CONTEXT = 256


@cache
def vocabulary() -> tuple[str, ...]:
    """Every token: the special ones, marks, then the words of the tasks' lists and texts."""
    texts = [re.sub(r"\{\w*\}", " ", " ".join(parts)) for parts in (*LINES.values(), *FORMS.values())]
    texts += [re.sub(r"\{\w*\}", " ", template) for template in TEMPLATES]
    texts += ["Words:", *(word for filler in FILLER for word in (filler, filler.capitalize()))]
    texts += [*OBJECTS, *BOXES, *NAMES, *THINGS, *PLACES, *FIVE, *(w for own in CATEGORIES.values() for w in own)]
    found = sorted({token for text in texts for token in re.findall(_TOKEN, text)})
    marks = [token for token in found if not token[0].isalnum()]
    return (*SPECIAL, *marks, *(token for token in found if token[0].isalnum()))


@cache
def word_ids() -> dict[str, int]:
    """The id of every token."""
    return {token: i for i, token in enumerate(vocabulary())}


@cache
def nano_tokenizer() -> Any:
    """A fast tokenizer for `vocabulary`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = word_ids()
    rules = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    rules.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), "removed", invert=True)
    rules.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    rules.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=True),  # a blank before each word, none before . , ?
            decoders.Replace(" :", ":"),
            decoders.Replace(" \n", "\n"),
            decoders.Fuse(),
            decoders.Replace("\n ", "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=rules,
        bos_token=BOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
