"""A GGUF file as a model folder in the user's cache: dequantised once, and checked before it is believed.

Only the file itself is read, never its neighbours. Every number of it must end up in the model and every weight of the
model must come from it. The folder keeps the hashes of its files, so that what was changed there is made anew instead
of being loaded.

The tokenizer must follow the file's own rules (``tokenizer.ggml.*``); what they leave unsaid is as in llama.cpp, where
these files come from. transformers reads the vocabulary but not whether a text starts with its first token, and Gemma
without its ``<bos>`` is another model: after "... John gave a drink to" it says " the" instead of " Mary".
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkscope.capture.files import cache_dir, check_report, file_hash, read_json, write_json, writing_cache
from qkscope.errors import BadInput
from qkscope.runs.progress import doing

log = logging.getLogger(__name__)

_BLANK, _WORDS = "▁", 64  # a space in front of a word, and how many words are tried
_LAYOUT = 2  # 1 kept neither the hashes nor the tokenizer's first token
_MANIFEST = "made.json"
_DAY = 86_400
_STRETCH = "rope_freqs.weight"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SENTENCEPIECE = ("llama", "gemma4")
_UNSAID = {"llama": {"bos": 1, "eos": 2, "unk": 0}}
_BPE_WITH_FIRST = {  # kinds of byte-level vocabulary with a first token, unless the file says otherwise
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "chameleon",
}  # fmt: skip


def dequantised(file: Path, digest: str) -> Path:
    """The folder with a GGUF file's weights as safetensors, made on first use."""
    folder = cache_dir("gguf", digest)
    _sweep(folder.parent)
    if _is_whole(folder):
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"reading {file.name} needs the package {package}: run `pip install {package}`.")
    log.info("dequantising %s once; later loads take a moment", file.name)
    # a folder appears under its name only when it is complete, so two processes or a crash cannot leave half of one
    temporary = _beside(folder)
    try:
        with writing_cache(folder.parent):
            temporary.mkdir(parents=True)
        _make(file, temporary)
        if file_hash(file) != digest:
            raise BadInput(f"{file} changed while it was read: try again when it is written.")
        with writing_cache(folder.parent):
            _put(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _make(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a file, and the hashes of both."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qkscope.capture.gguf_reader import opened_once  # needs a package that only GGUF files need

    alone = folder / "alone"  # what lies beside the file is none of its business
    with writing_cache(folder.parent):
        alone.mkdir()
        try:
            (alone / "model.gguf").symlink_to(file.resolve())
        except OSError:
            shutil.copy(file, alone / "model.gguf")
    options: dict[str, Any] = {"gguf_file": "model.gguf", "trust_remote_code": False}
    with doing(f"reading {file.name} once"), opened_once(file) as reader:
        header = _read_header(file, reader)
        rules = TokenRules.of(header.fields)
        model, report = AutoModelForCausalLM.from_pretrained(
            alone, dtype=torch.float32, output_loading_info=True, **options
        )
        _check_whole(file, header, model, report)
        tokenizer: Any = None if rules is None else AutoTokenizer.from_pretrained(alone, **options)
    # the weights are plain floats now, but transformers refuses to save a model marked as quantised
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with writing_cache(folder.parent):
        shutil.rmtree(alone)
        model.save_pretrained(folder)
        if rules is not None:
            rules.impose(tokenizer)
            tokenizer.save_pretrained(folder)
            _load_as_written(folder / "tokenizer_config.json")
            broken = rules.broken_by(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
            if broken is not None:
                raise BadInput(
                    f"the tokenizer of {file.name} cannot be made as the file says ({broken}): give a folder instead."
                )
        write_json(folder / _MANIFEST, _made(folder))


def _load_as_written(config: Path) -> None:
    """Have transformers take a saved tokenizer as it is.

    A family's class would build it a second time from its parts; and where no list of added tokens is given, even an
    empty one, the whole file is searched for them, though they are loaded with it. Both parse 33 MB for Gemma.
    """
    write_json(config, (read_json(config) or {}) | {"tokenizer_class": "TokenizersBackend", "added_tokens_decoder": {}})


# ---------------------------------------------------------------- what the file says, and whether it was heard


class _Header(NamedTuple):
    """What a file says of itself."""

    fields: Mapping[str, Any]
    rope_scaling: str
    numbers: int  # in its tensors
    stretch: Tensor | None  # by how much each of RoPE's wavelengths is longer


def _read_header(file: Path, reader: Any) -> _Header:
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    kind = fields["general.architecture"]
    layers = fields.get(f"{kind}.block_count", 0)
    if not isinstance(layers, int) or layers > len(tensors):
        raise BadInput(f"{file} asks for {layers:,} layers, but holds {len(tensors)} tensors: download it again.")
    over = [name for name in tensors if (at := re.match(r"blk\.(\d+)\.", name)) and layers and int(at[1]) >= layers]
    if over:
        raise BadInput(
            f"{file} says that it has {layers} layers, but holds weights such as {over[0]}: download it again."
        )
    stretch = tensors.pop(_STRETCH, None)
    return _Header(
        fields=fields,
        rope_scaling=fields.get(f"{kind}.rope.scaling.type", "none"),
        numbers=sum(int(tensor.n_elements) for tensor in tensors.values()),
        stretch=None if stretch is None else torch.tensor(stretch.data),
    )


def _check_whole(file: Path, header: _Header, model: Any, report: Mapping[str, Any]) -> None:
    """Every number of the file is in the model, each at its place, and what it says of RoPE was heard."""
    weights = model.state_dict()
    with torch.device("meta"):
        wanted = {name: blank.shape for name, blank in type(model)(model.config).state_dict().items()}
    # transformers compares shapes where it reads safetensors, but not where it reads GGUF
    other = [(name, weights[name].shape, shape) for name, shape in wanted.items() if weights[name].shape != shape]
    check_report(str(file), {**report, "mismatched_keys": other})
    rope = getattr(model.config, "rope_parameters", None) or {}
    heard = header.rope_scaling == "none" or rope.get("rope_type", "default") != "default"
    if not heard or (header.stretch is not None and not _stretched_as_llama3(model.config, header.stretch)):
        raise BadInput(
            f"{file} stretches RoPE in a way that transformers leaves out when it reads GGUF, so its attention would "
            "be wrong: give the model as a folder or a hub id."
        )
    ours = sum({tensor.data_ptr(): tensor.numel() for tensor in weights.values()}.values())
    if header.numbers != ours:
        raise BadInput(
            f"{file} holds {header.numbers:,} numbers, but the model that transformers makes of it has {ours:,}, so it "
            "would compute something else: give the model as a folder or a hub id."
        )


def _stretched_as_llama3(config: Any, factors: Tensor) -> bool:
    """Whether a file's factors for RoPE's wavelengths are those of Llama 3; the config then says so too.

    Such a file holds the factors alone. Llama 3's rule makes them of the largest one and three numbers that all of its
    releases share; what the rule makes is compared with what the file holds.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = dict(config.rope_parameters)
    if plain.get("rope_type", "default") != "default":
        return False
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    given = plain["rope_theta"] ** (-torch.arange(0, width, 2) / width) / factors
    config.rope_parameters = {
        **plain, "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    ruled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    return ruled.shape == given.shape and bool(torch.allclose(ruled, given, rtol=1e-3, atol=0))


@dataclass(frozen=True)
class TokenRules:
    """A file's rules for tokens: the ids of its special ones, their spelling, and what is added to a text."""

    ids: Mapping[str, int]
    tokens: Sequence[str]
    add_bos: bool
    add_eos: bool
    whole: bool  # a word of the vocabulary is one token, whether its merges lead there or not

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TokenRules | None:
        """The rules in a file's metadata; None where it has no vocabulary."""
        start = "tokenizer.ggml."
        said = {name.removeprefix(start): value for name, value in fields.items() if name.startswith(start)}
        tokens, kind, before = said.get("tokens"), said.get("model"), said.get("pre")
        if not isinstance(tokens, list) or not tokens:
            return None
        unsaid = _UNSAID.get(str(kind), {})
        named = {name: said.get(f"{word}_token_id", unsaid.get(name)) for name, word in _SPECIAL.items()}
        ids = {name: id for name, id in named.items() if isinstance(id, int) and 0 <= id < len(tokens)}
        late = kind == "gpt2" and before in _BPE_WITH_FIRST
        return cls(
            ids=ids,
            tokens=tokens,
            add_bos=bool(said.get("add_bos_token", kind in _SENTENCEPIECE or late)) and "bos" in ids,
            add_eos=bool(said.get("add_eos_token", kind == "t5")) and "eos" in ids,
            whole=late and before != "chameleon",
        )

    def impose(self, tokenizer: Any) -> None:
        """Make the tokenizer that transformers read from the file follow its rules."""
        for name, id in self.ids.items():
            if getattr(tokenizer, f"{name}_token_id") != id:
                setattr(tokenizer, f"{name}_token", self.tokens[id])
        tokenizer.add_bos_token, tokenizer.add_eos_token = self.add_bos, self.add_eos
        if self.whole:
            tokenizer.backend_tokenizer.model.ignore_merges = True

    def broken_by(self, tokenizer: Any) -> str | None:
        """The first rule that a tokenizer does not follow; None where it follows all."""
        for name, id in self.ids.items():
            if getattr(tokenizer, f"{name}_token_id") != id:
                return f"{name} is {getattr(tokenizer, f'{name}_token_id')} instead of {id}"
        bare, whole = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
        first = [self.ids["bos"]] if self.add_bos else []
        last = [self.ids["eos"]] if self.add_eos else []
        wanted = first + bare + last
        return self._split_word(tokenizer) if whole == wanted else f"a text becomes {whole} instead of {wanted}"

    def _split_word(self, tokenizer: Any) -> str | None:
        """Whether words of a vocabulary with scores come apart: older transformers give its merges in a wrong order."""
        found = [token for token in self.tokens if token[:1] == _BLANK and len(token) > 3 and token[1:].isalpha()]
        words = found[:: max(len(found) // _WORDS, 1)][:_WORDS]
        last = [tokenizer("a " + word[1:], add_special_tokens=False)["input_ids"][-1] for word in words]
        split = [word for word, token in zip(words, last, strict=True) if self.tokens[token] != word]
        if 2 * len(split) <= len(words):
            return None
        return f"{len(split)} of {len(words)} words of its vocabulary come apart: update transformers"


# ---------------------------------------------------------------- the folder in the cache


def _made(folder: Path) -> dict[str, Any]:
    """What the manifest of a folder says: the hashes of all of its files."""
    files = {path.name: file_hash(path) for path in sorted(folder.iterdir()) if path.name != _MANIFEST}
    return {"layout": _LAYOUT, "files": files}


def _is_whole(folder: Path) -> bool:
    """Whether a cached folder is what was written there, and in today's layout."""
    if not folder.is_dir():
        return False
    with suppress(OSError):  # a folder among the files, or one that is gone
        if read_json(folder / _MANIFEST) == _made(folder):
            return True
    log.warning("%s was changed since it was written, or by an older version, and is made anew", folder)
    return False


def _put(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name; one that was there and is not whole makes way."""
    aside = _beside(folder)
    with suppress(FileNotFoundError):
        folder.rename(aside)
    try:
        temporary.rename(folder)
    except OSError:
        if not _is_whole(folder):  # otherwise another process was first, and its folder is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _beside(folder: Path) -> Path:
    """A name for a folder in the making, which says whose it is."""
    return folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}")


def _sweep(cache: Path) -> None:
    """Remove what killed processes left: theirs, if they ran here and are gone, or a day old."""
    for left in cache.glob(".*"):
        whose, _, process = left.name.rpartition(".")[0].rpartition(".")
        with suppress(OSError, OverflowError):
            here = whose.endswith(f".{socket.gethostname()}") and process.isdecimal()
            if (here and not _runs(int(process))) or time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True
