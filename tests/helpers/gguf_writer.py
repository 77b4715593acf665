"""Tiny Llamas as GGUF files, written with llama.cpp's own package: whole, or damaged on purpose."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

SPECIAL = ["<unk>", "<s>", "</s>"]
SENTENCEPIECE = [
    *SPECIAL,
    "▁",
    "a",
    "b",
    "▁a",
    "▁b",
    "ab",
    "▁ab",
    *(f"<0x{byte:02X}>" for byte in range(30)),
]
"""Forty pieces; those of one byte stand at the end."""


def write_gguf(
    path: Path,
    *,
    drop: tuple[str, ...] = (),
    extra: Mapping[str, tuple[int, ...]] | None = None,
    theta: float = 10000.0,
    values: Mapping[str, torch.Tensor] | None = None,
    more: Callable[[Any], None] = lambda writer: None,
) -> dict[str, torch.Tensor]:
    """A tiny Llama in float32; the names on the left are GGUF's. `more` writes what else the file
    says.
    """
    gguf = pytest.importorskip("gguf")
    generator = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(40)
    more(writer)
    shapes = {"token_embd.weight": (40, 32), "output_norm.weight": (32,)}
    own = {
        "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
        "ffn_norm": (32,), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48),
    }  # fmt: skip
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in own.items()}
    shapes = {
        name: shape for name, shape in (shapes | dict(extra or {})).items() if name not in drop
    }
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()
    }
    tensors |= dict(values or {})
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def sentencepiece(**said: bool) -> Callable[[Any], None]:
    """A vocabulary as of Llama 2, and what the file says of first and last tokens (``bos=True``,
    ``eos=...``).
    """

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(SENTENCEPIECE)
        writer.add_token_scores([-float(i) for i in range(len(SENTENCEPIECE))])
        kinds = [2, 3, 3, *(6 if token.startswith("<0x") else 1 for token in SENTENCEPIECE[3:])]
        writer.add_token_types(kinds)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if "bos" in said:
            writer.add_add_bos_token(said["bos"])
        if "eos" in said:
            writer.add_add_eos_token(said["eos"])

    return write


BYTES = ["<|first|>", "<|last|>", "a", "b", "ab", "Ġ", "Ġa", *(f"<|{i}|>" for i in range(33))]


def byte_level(before: str, **said: bool) -> Callable[[Any], None]:
    """A vocabulary as of GPT-2 or Llama 3, named by how it cuts a text before it merges; "ab" has
    no merge.
    """

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(before)
        writer.add_token_list(BYTES)
        writer.add_token_types([3 if token.startswith("<|") else 1 for token in BYTES])
        writer.add_token_merges(["Ġ a"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        if "bos" in said:
            writer.add_add_bos_token(said["bos"])

    return write
