"""A GGUF file as a model folder in the user's cache, by the file's hash: dequantised once, checked
before it is kept.

Only the file itself is read, never its neighbours. Every number of it must end up in the model and
every weight of the model must come from it.

The tokenizer must follow the file's own rules (``tokenizer.ggml.*``); what they leave unsaid is as
in llama.cpp, where these files come from. transformers reads the vocabulary but not whether a text
starts with its first token, and Gemma without its ``<bos>`` is another model: after "... John gave
a drink to" it says " the" instead of " Mary".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qkscope.errors import BadInput
from qkscope.model.files import cache_dir, check_report, making, read_json, write_json
from qkscope.model.spaces import swapped
from qkscope.results.progress import doing

_LAYOUT = 3  # of the folders in the cache
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_UNSAID = {"llama": {"bos": 1, "eos": 2, "unk": 0}}
_BPE_WITH_FIRST = {  # kinds of byte-level vocabulary with a first token, unless the file says otherwise
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "chameleon",
}  # fmt: skip


def dequantised(file: Path, digest: str) -> Path:
    """The folder with a GGUF file's weights as safetensors, made on first use."""
    folder = cache_dir("gguf", f"{digest}-{_LAYOUT}")
    if folder.is_dir():
        return folder
    options: dict[str, Any] = {"gguf_file": "model.gguf", "trust_remote_code": False}
    with doing(f"reading {file.name} once"), TemporaryDirectory() as alone:
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        rules = TokenRules.of(fields)
        Path(alone, "model.gguf").symlink_to(
            file.resolve()
        )  # what lies beside the file is none of its business
        silent = (modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors)
        with swapped((gguf, "GGUFReader", lambda *_: reader), silent):  # reading it takes seconds
            whole = options | {"dtype": torch.float32, "output_loading_info": True}
            model, report = AutoModelForCausalLM.from_pretrained(alone, **whole)
            tokenizer = AutoTokenizer.from_pretrained(alone, **options) if rules else None
    _check_whole(file, reader, fields, model, report)
    # the weights are plain floats now, but transformers refuses to save a model marked as quantised
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    with making(folder) as temporary:
        model.save_pretrained(temporary)
        if rules:
            rules.save(tokenizer, temporary)
    return folder


def _check_whole(
    file: Path, reader: Any, fields: Mapping[str, Any], model: Any, report: Mapping[str, Any]
) -> None:
    """Every number of the file is in the model, each at its place, and what it says of RoPE was
    heard.
    """
    weights = model.state_dict()
    with torch.device("meta"):
        wanted = {
            name: blank.shape for name, blank in type(model)(model.config).state_dict().items()
        }
    # transformers compares shapes where it reads safetensors, but not where it reads GGUF
    other = [
        (name, weights[name].shape, shape)
        for name, shape in wanted.items()
        if weights[name].shape != shape
    ]
    check_report(str(file), {**report, "mismatched_keys": other})
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    stretch = tensors.pop(
        "rope_freqs.weight", None
    )  # by how much each of RoPE's wavelengths is longer
    scaling = fields.get(f"{fields['general.architecture']}.rope.scaling.type", "none")
    rope = getattr(model.config, "rope_parameters", None) or {}
    heard = scaling == "none" or rope.get("rope_type", "default") != "default"
    if stretch is not None:
        heard = heard and _stretched_as_llama3(model.config, torch.tensor(stretch.data))
    theirs = sum(int(tensor.n_elements) for tensor in tensors.values())
    ours = sum({tensor.data_ptr(): tensor.numel() for tensor in weights.values()}.values())
    if not heard or theirs != ours:
        counted = (
            f"holds {theirs:,} numbers, but the model that transformers makes of it has {ours:,}"
        )
        lost = (
            counted
            if heard
            else "stretches RoPE in a way that transformers leaves out when it reads GGUF"
        )
        raise BadInput(
            f"{file} {lost}, so it would compute something else: give the model as a folder or a hub id."
        )


def _stretched_as_llama3(config: Any, factors: Tensor) -> bool:
    """Whether a file's factors for RoPE's wavelengths are those of Llama 3; the config then says so
    too.

    Such a file holds the factors alone. Llama 3's rule makes them of the largest one and three
    numbers that all of its releases share; what the rule makes is compared with what the file
    holds.
    """
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


class TokenRules(NamedTuple):
    """A file's rules for tokens: the ids of its special ones, their spelling, and what is added to
    a text.
    """

    ids: Mapping[str, int]
    tokens: Sequence[str]
    first: list[int]
    last: list[int]
    whole: bool  # a word of the vocabulary is one token, whether its merges lead there or not

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TokenRules | None:
        """The rules in a file's metadata; None where it has no vocabulary."""
        said = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
        tokens = said.get("tokens")
        kind = said.get("model")
        before = said.get("pre")
        if not tokens:
            return None
        unsaid = _UNSAID.get(str(kind), {})
        named = {
            name: said.get(f"{word}_token_id", unsaid.get(name)) for name, word in _SPECIAL.items()
        }
        ids = {
            name: id for name, id in named.items() if isinstance(id, int) and 0 <= id < len(tokens)
        }
        late = kind == "gpt2" and before in _BPE_WITH_FIRST
        first = said.get("add_bos_token", kind in ("llama", "gemma4") or late)
        last = said.get("add_eos_token", kind == "t5")
        start = [ids["bos"]] if first and "bos" in ids else []
        end = [ids["eos"]] if last and "eos" in ids else []
        return cls(ids, tokens, start, end, whole=late and before != "chameleon")

    def save(self, tokenizer: Any, folder: Path) -> None:
        """Make the tokenizer that transformers read from the file follow its rules, and keep it if
        it does.

        It is loaded as it is written: a family's class would build it a second time from its parts;
        and where no list of added tokens is given, even an empty one, the whole file is searched
        for them, though they are loaded with it. Both parse 33 MB for Gemma.
        """
        for name, id in self.ids.items():
            if getattr(tokenizer, f"{name}_token_id") != id:
                setattr(tokenizer, f"{name}_token", self.tokens[id])
        tokenizer.add_bos_token = bool(self.first)
        tokenizer.add_eos_token = bool(self.last)
        if self.whole:
            tokenizer.backend_tokenizer.model.ignore_merges = True
        tokenizer.save_pretrained(folder)
        config = folder / "tokenizer_config.json"
        write_json(
            config,
            read_json(config)
            | {"tokenizer_class": "TokenizersBackend", "added_tokens_decoder": {}},
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        ids = {name: getattr(tokenizer, f"{name}_token_id") for name in self.ids}
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        text = tokenizer("a", add_special_tokens=True)["input_ids"]
        wanted = self.first + bare + self.last
        if ids != self.ids or text != wanted:
            broken = f"special tokens are {ids} instead of {self.ids}, and a text {text} instead of {wanted}"
            raise BadInput(
                f"the file's tokenizer cannot be made as it says ({broken}), so give a folder instead."
            )
