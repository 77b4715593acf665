"""Compiled programs as models: what every head reads is known.

Tracr made them of RASP programs. No norms, no biases, places added to the embedding, and every
token sees every other. What a model puts out are not logits over tokens but its residual stream,
whose dimensions have names. `bench/compile_programs.py` compiles them.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

from qkscope.model.scope import Scope

_FOLDER = Path(str(files("qkscope_bench"))) / "known"
FIRST = "BOS"
PAD = "compiler_pad"
LONGEST = 5  # tokens behind the first


class CompiledConfig(PretrainedConfig):
    """Sizes of a compiled program."""

    model_type = "compiled_program"


class CompiledAttention(nn.Module):
    """Heads of one layer, each of its own width in the stream."""

    is_causal = False

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.head_dim = config.head_dim
        wide = config.head_dim * config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(
        self, x: Float[Tensor, "b t d"], mask: Tensor | None
    ) -> tuple[Float[Tensor, "b t d"], Tensor | None]:
        """What the heads write, and their attention where the implementation reports it."""
        named = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(named, eager_attention_forward)
        q = self._by_head(self.q_proj(x))
        k = self._by_head(self.k_proj(x))
        v = self._by_head(self.v_proj(x))
        out, attention = attend(self, q, k, v, mask, scaling=self.head_dim**-0.5)
        return self.o_proj(out.flatten(2)), attention

    def _by_head(self, x: Float[Tensor, "b t w"]) -> Float[Tensor, "b h t e"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class CompiledLayer(nn.Module):
    """Heads, then an MLP, each added to the stream."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = CompiledAttention(config, layer)
        wide = config.hidden_size
        inside = config.intermediate_size
        up = nn.Linear(wide, inside, bias=False)
        down = nn.Linear(inside, wide, bias=False)
        self.mlp = nn.Sequential(up, nn.ReLU(), down)

    def forward(
        self, x: Float[Tensor, "b t d"], mask: Tensor | None
    ) -> tuple[Float[Tensor, "b t d"], Tensor | None]:
        """The stream behind the layer, and the attention in it."""
        out, attention = self.self_attn(x, mask)
        return x + out + self.mlp(x + out), attention


class CompiledProgram(PreTrainedModel):
    """A program's weights as a model of transformers, which asks its attention interface."""

    config_class = CompiledConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(LONGEST + 1, config.hidden_size)
        self.layers = nn.ModuleList(
            CompiledLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b t"] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """The residual stream behind the last layer, as logits."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        places = (places if position_ids is None else position_ids).clamp(
            max=LONGEST
        )  # none lies behind in a program
        x = self.embed_tokens(input_ids) + self.places(places)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask
        )
        every = []
        for layer in self.layers:
            x, attention = layer(x, mask)
            every.append(attention)
        return CausalLMOutput(logits=x, attentions=tuple(every))


@cache
def programs() -> dict[str, dict[str, Any]]:
    """By name: sizes, vocabulary, names of dimensions, and of every head the true writers of its
    query and key.
    """
    return json.loads((_FOLDER / "programs.json").read_text(encoding="utf-8"))


def load_program(name: str) -> Scope:
    """A compiled program, ready to be looked into."""
    said = programs()[name]
    stored = load_file(_FOLDER / "programs.safetensors")
    sizes = {key: value for key, value in said.items() if isinstance(value, int)}
    words = said["vocabulary"]
    config = CompiledConfig(vocab_size=len(words), **sizes)
    model = CompiledProgram(config).eval().requires_grad_(False)
    row = torch.zeros(sum(weight.numel() for weight in model.parameters()))
    row[stored[f"{name}.at"].long()] = stored[f"{name}.is"]
    nn.utils.vector_to_parameters(row, model.parameters())
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=FIRST, pad_token=PAD)
    # not checked by writing a key of the first layer, where many a program has no head: Tracr's own
    # logits are compared
    return Scope.from_model(model, fast, check=False, name=f"known:{name}")
