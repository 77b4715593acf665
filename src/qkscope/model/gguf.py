"""A GGUF file as a model folder in the user's cache: dequantised once, checked before it is kept.

The folder is named by the file's hash. Only the file itself is read, never its neighbours. Every
number of it must end up in the model and every weight of the model must come from it.

The tokenizer must follow the file's own rules (``tokenizer.ggml.*``); what they leave unsaid is as
in llama.cpp, where these files come from. transformers reads the vocabulary but not whether a text
starts with its first token, and Gemma without its ``<bos>`` is another model: after "... John gave
a drink to" it says " the" instead of " Mary".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

import gguf
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qkscope.errors import BadInput
from qkscope.model.files import cache_dir, check_report, making, read_json, write_json
from qkscope.model.spaces import swapped
from qkscope.results.progress import doing

_LAYOUT = 3  # version of what the folders in the cache hold

#: What files call the special tokens, by transformers' names.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

#: Ids of special tokens that files of a kind of vocabulary may leave unsaid.
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unk": 0}}

#: Kinds of byte-level vocabulary with a first token, unless the file says otherwise.
_BPE_WITH_FIRST = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "tekken", "chameleon",
}  # fmt: skip


def dequantised(file: Path, digest: str) -> Path:
    """The folder with a GGUF file's weights as safetensors, made on first use.

    ``digest`` is the file's hash.
    """
    folder = cache_dir("gguf", f"{digest}-{_LAYOUT}")
    if folder.is_dir():
        return folder
    options: dict[str, Any] = {"gguf_file": "model.gguf", "trust_remote_code": False}
    with doing(f"reading {file.name} once"), TemporaryDirectory() as alone:
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        rules = TokenRules.of(fields)
        # in a folder of its own, as transformers would read what lies beside the file
        Path(alone, "model.gguf").symlink_to(file.resolve())
        read_before = (gguf, "GGUFReader", lambda *_: reader)  # reading it takes seconds
        silent = (modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors)
        with swapped(read_before, silent):
            model, report = AutoModelForCausalLM.from_pretrained(
                alone, dtype=torch.float32, output_loading_info=True, **options
            )
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
    """Refuse a model unless each number of the file is in it, and RoPE is as the file says."""
    weights = model.state_dict()
    _check_shapes(file, weights, model, report)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    # by how much each of RoPE's wavelengths is longer
    stretch = tensors.pop("rope_freqs.weight", None)
    if not _rope_was_read(fields, model.config, stretch):
        _refuse(file, "stretches RoPE in a way that transformers leaves out when it reads GGUF")
    n_file = sum(int(tensor.n_elements) for tensor in tensors.values())
    by_memory = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
    n_model = sum(by_memory.values())
    if n_file != n_model:
        in_model = f"the model that transformers makes of it has {n_model:,}"
        _refuse(file, f"holds {n_file:,} numbers, but {in_model}")


def _check_shapes(
    file: Path, weights: Mapping[str, Tensor], model: Any, report: Mapping[str, Any]
) -> None:
    """Refuse weights that are missing, left over, or of another shape than the config says.

    transformers compares shapes where it reads safetensors, but not where it reads GGUF.
    """
    with torch.device("meta"):
        blank = type(model)(model.config).state_dict()
    mismatched = []
    for name, tensor in blank.items():
        if weights[name].shape != tensor.shape:
            mismatched.append((name, weights[name].shape, tensor.shape))
    check_report(str(file), {**report, "mismatched_keys": mismatched})


def _rope_was_read(fields: Mapping[str, Any], config: Any, stretch: Any | None) -> bool:
    """Whether the config has the scaling of RoPE that the file's fields and its factors ask for."""
    scaling = fields.get(f"{fields['general.architecture']}.rope.scaling.type", "none")
    rope = getattr(config, "rope_parameters", None) or {}
    if scaling != "none" and rope.get("rope_type", "default") == "default":
        return False
    return stretch is None or _stretched_as_llama3(config, torch.tensor(stretch.data))


def _refuse(file: Path, lost: str) -> NoReturn:
    """Refuse a file of which the model would lose something."""
    raise BadInput(
        f"{file} {lost}, so it would compute something else: "
        "give the model as a folder or a hub id."
    )


def _stretched_as_llama3(config: Any, factors: Tensor) -> bool:
    """Make the config's RoPE Llama 3's; whether a file's factors for its wavelengths are those.

    Such a file holds the factors alone. Llama 3's rule makes them of the largest one and three
    numbers that all of its releases share; what the rule makes is compared with what the file
    holds.
    """
    plain = dict(config.rope_parameters)
    if plain.get("rope_type", "default") != "default":
        return False
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = -torch.arange(0, width, 2) / width
    of_file = plain["rope_theta"] ** exponents / factors
    config.rope_parameters = plain | {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    of_rule, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    if of_rule.shape != of_file.shape:
        return False
    return bool(torch.allclose(of_rule, of_file, rtol=1e-3, atol=0))


class TokenRules(NamedTuple):
    """A file's rules for tokens: its special ones, and what is added to a text.

    Attributes
    ----------
    ids : mapping of str to int
        Ids of the special tokens that it has.
    tokens : sequence of str
        How each id is spelled.
    first, last : list of int
        What is put before and behind a text.
    whole : bool
        Whether a word of the vocabulary is one token even where its merges do not lead there.
    """

    ids: Mapping[str, int]
    tokens: Sequence[str]
    first: list[int]
    last: list[int]
    whole: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TokenRules | None:
        """The rules in a file's metadata; None where it has no vocabulary."""
        values = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
        tokens = values.get("tokens")
        if not tokens:
            return None
        kind = values.get("model")
        defaults = _DEFAULT_IDS.get(str(kind), {})
        ids = {}
        for name, word in _SPECIAL.items():
            id = values.get(f"{word}_token_id", defaults.get(name))
            if isinstance(id, int) and 0 <= id < len(tokens):
                ids[name] = id
        variant = values.get("pre")
        bpe_with_first = kind == "gpt2" and variant in _BPE_WITH_FIRST
        adds_first = values.get("add_bos_token", kind in ("llama", "gemma4") or bpe_with_first)
        adds_last = values.get("add_eos_token", kind == "t5")
        return cls(
            ids,
            tokens,
            first=[ids["bos"]] if adds_first and "bos" in ids else [],
            last=[ids["eos"]] if adds_last and "eos" in ids else [],
            whole=bpe_with_first and variant != "chameleon",
        )

    def save(self, tokenizer: Any, folder: Path) -> None:
        """Make a tokenizer that transformers read from the file follow its rules, and keep it.

        One that does not follow them is refused. It is loaded as it is written: a family's class
        would build it a second time from its parts; and where no list of added tokens is given,
        even an empty one, the whole file is searched for them, though they are loaded with it. Both
        parse 33 MB for Gemma.
        """
        for name, id in self.ids.items():
            if getattr(tokenizer, f"{name}_token_id") != id:
                setattr(tokenizer, f"{name}_token", self.tokens[id])
        tokenizer.add_bos_token = bool(self.first)
        tokenizer.add_eos_token = bool(self.last)
        if self.whole:
            tokenizer.backend_tokenizer.model.ignore_merges = True
        tokenizer.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        as_written = {"tokenizer_class": "TokenizersBackend", "added_tokens_decoder": {}}
        write_json(path, read_json(path) | as_written)
        self._check(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))

    def _check(self, tokenizer: Any) -> None:
        """Refuse a tokenizer that has other special tokens, or adds other ones to a text."""
        ids = {name: getattr(tokenizer, f"{name}_token_id") for name in self.ids}
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        text = tokenizer("a", add_special_tokens=True)["input_ids"]
        wanted = self.first + bare + self.last
        if ids != self.ids or text != wanted:
            special = f"special tokens are {ids} instead of {self.ids}"
            broken = f"{special}, and a text {text} instead of {wanted}"
            raise BadInput(
                f"the file's tokenizer cannot be made as it says ({broken}), "
                "so give a folder instead."
            )
