"""Facts about a model's files: what is loaded is what is hashed, and nothing is loaded that does not fit together."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from qkscope import BadInput, Example, Scope
from qkscope.capture.families import tiny_model
from qkscope.capture.files import check_counts, file_hash
from tiny_llama import write_tiny_llama

pytestmark = pytest.mark.usefixtures("own_cache")


def load(folder: Path | str) -> Scope:
    return Scope.load(folder, device="cpu", check=False)


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def embedding(scope: Scope) -> torch.Tensor:
    return scope.model.get_input_embeddings().weight


def test_the_hash_is_of_the_weights_that_are_loaded(folder: Path, tmp_path: Path) -> None:
    """One whole file goes before an index and its parts, and a file the config names goes before both."""
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    parts = load(tmp_path / "parts")
    for path in (tmp_path / "parts").glob("model*"):
        shutil.copy(path, folder)
    whole = load(folder)
    assert torch.equal(embedding(whole), tiny_model("llama").get_input_embeddings().weight)
    assert whole.weights_hash != parts.weights_hash
    before = whole.weights_hash
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes(b"other")  # is not loaded, so it changes nothing
    assert load(folder).weights_hash == before
    tiny_model("llama", seed=2).save_pretrained(tmp_path / "third")
    shutil.copy(tmp_path / "third" / "model.safetensors", folder / "named.safetensors")
    edit(folder, transformers_weights="named.safetensors")
    named = load(folder)
    assert torch.equal(embedding(named), tiny_model("llama", seed=2).get_input_embeddings().weight)
    content = load_file(folder / "named.safetensors")
    content["model.norm.weight"] += 1
    save_file(content, folder / "named.safetensors", metadata={"format": "pt"})
    assert load(folder).weights_hash != named.weights_hash
    for name in ("../third/model.safetensors", "/etc/passwd", "nowhere.safetensors", 7):
        edit(folder, transformers_weights=name)
        with pytest.raises(BadInput, match=r"is no file of weights in it"):
            load(folder)


def test_a_file_edited_under_its_old_size_and_time_has_another_hash(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 1000)
    old = path.stat().st_mtime_ns - 10**10
    os.utime(path, ns=(old, old))
    before = file_hash(path)
    path.write_bytes(b"b" * 1000)
    os.utime(path, ns=(old, old))
    assert file_hash(path) != before


def test_a_file_is_read_again_only_when_it_may_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("ab" * 32)  # the name of a file in the hub's cache is not believed either
    path.write_bytes(b"a")
    monkeypatch.setattr("qkscope.capture.files._TICK", 0)
    digest = file_hash(path)
    assert digest != path.name
    (memo,) = (tmp_path / "cache" / "qkscope" / "hashes").iterdir()
    record = memo.read_text()
    memo.write_text(record[:10])  # a damaged memory is none
    assert file_hash(path) == digest


def test_weights_that_the_config_has_no_place_for_are_refused(folder: Path) -> None:
    edit(folder, num_hidden_layers=1)
    with pytest.raises(BadInput, match=r"\d+ weights such as model.layers.1.* have no place in the model"):
        load(folder)
    edit(folder, num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    width = weights["model.layers.0.self_attn.q_proj.weight"].shape[0]
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(width)}, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"1 weights such as model.layers.0.self_attn.q_proj.bias have no place"):
        load(folder)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "cls.seq_relationship.bias": torch.ones(2)}
    save_file(weights | extra, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder).n_layers == 2  # what old files carry, and a head on top, change no attention


def test_weights_of_another_shape_are_refused_by_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(7)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        BadInput, match=r"1 weights such as model.norm.weight \(\[7\] instead of \[64\]\) have another shape"
    ):
        load(folder)


def test_a_config_that_asks_for_more_than_there_can_be_is_refused_at_once(folder: Path) -> None:
    whole = (folder / "config.json").read_text()
    for changes, said in (
        ({"num_hidden_layers": 10**9}, "1,000,000,000 as its num_hidden_layers, more than any model has"),
        ({"num_hidden_layers": 90}, r"weights such as .* are missing from its files"),
        ({"num_attention_heads": 10**12}, "as its num_attention_heads, more than any model has"),
        ({"text_config": {"n_routed_experts": 10**7}}, "as its n_routed_experts, more than any model has"),
    ):
        (folder / "config.json").write_text(whole)
        edit(folder, **changes)
        with pytest.raises(BadInput, match=said):
            load(folder)
    sizes = {"shared_expert_intermediate_size": 20_480, "vocab_size": 262_144, "block_size": 131_072}
    check_counts(sizes, "a large model")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_too_large_to_be_what_it_is_called_is_not_read(folder: Path, name: str) -> None:
    with open(folder / name, "wb") as file:
        os.truncate(file.fileno(), 10 << 30)  # sparse: it costs nothing unless somebody reads it
    with pytest.raises(BadInput, match=rf"{name} has 10,240 MB, more than any such file"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "special_tokens_map.json"])
def test_nobody_waits_for_a_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    said: list[str] = []

    def run() -> None:
        with pytest.raises(BadInput) as refusal:
            load(folder)
        said.append(str(refusal.value))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert f"{name} is no plain file" in "".join(said)


def test_a_pipe_is_no_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(BadInput, match=r"is no model folder and no \.gguf file"):
        load(tmp_path / "model.gguf")


def test_parts_of_other_things_are_no_model(folder: Path) -> None:
    (folder / "shard-00001-model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(BadInput, match="a part of a distributed run"):
        load(folder)
    (folder / "shard-00001-model-00001-of-00002.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match="adapter to another model"):
        load(folder)


def test_too_little_memory_is_called_that(folder: Path) -> None:
    """A real process that may not take more memory than it has."""
    header = {"t": {"dtype": "F32", "shape": [64, 2**20], "data_offsets": [0, 1 << 28]}}
    raw = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + (1 << 28))
    code = (
        "import resource, sys, torch, transformers, qkscope\n"
        "from transformers import LlamaForCausalLM, AutoTokenizer\n"
        "from qkscope import Scope, BadInput\n"
        "Scope.load('nano:mixed', device='cpu', check=False)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))\n"
        "try: Scope.load(sys.argv[1], device='cpu', check=False)\n"
        "except BadInput as refusal: print(refusal)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert "there is not enough memory to load" in done.stdout, done.stderr[-2000:]


def test_ids_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    words = json.loads((folder / "tokenizer.json").read_text())
    last = max(words["model"]["vocab"].values())
    word = next(word for word, id in words["model"]["vocab"].items() if id == last)
    words["model"]["vocab"][word] = last + 7
    (folder / "tokenizer.json").write_text(json.dumps(words))
    scope = load(folder)
    with pytest.raises(BadInput, match=rf"the tokenizer gives the id {last + 7}, but this model's ids are 0 to {last}"):
        scope.encode([word])
    for id in (last + 1, -1):
        with pytest.raises(BadInput, match=rf"the prompt has the id {id}, but this model's ids are"):
            scope.encode([Example(ids=(0, id))])


def test_a_model_that_misses_its_first_token_is_said_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    silent = load(folder)
    tokenizer = silent.tokenizer
    tokenizer.bos_token = "[EOS]"
    with caplog.at_level(logging.WARNING):
        silent.encode([Example(ids=(5, 6))])
        silent.encode(["The hat"])
        Scope.load("nano:mixed", device="cpu", check=False).encode(["hat : O"])
        Scope.from_model(tiny_model("gemma2"), check=False).encode([Example(ids=(5, 6))])
    assert not caplog.messages  # these start without one
    tokenizer.add_bos_token = True
    scope = Scope.from_model(silent.model, tokenizer, check=False)
    with caplog.at_level(logging.WARNING):
        scope.encode(["The hat"])
        scope.encode([Example(ids=(1, 6))])
        assert not caplog.messages
        for _ in range(2):
            scope.encode([Example(ids=(5, 6)), Example(ids=(1, 6))])
    (message,) = caplog.messages
    assert "expects ['[EOS]'] as the first token of every prompt, but 1 of 2 prompts start without it" in message


def test_a_family_that_always_has_a_first_token_misses_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_model("gemma2").save_pretrained(tmp_path / "gemma")
    scope = load(tmp_path / "gemma")
    with caplog.at_level(logging.WARNING):
        scope.encode([Example(ids=(scope.model.config.bos_token_id, 6))])
        assert not caplog.messages
        scope.encode([Example(ids=(5, 6))])
    assert "as the first token" in caplog.text


def test_a_hub_model_is_held_to_the_same_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache of its own, and nothing is downloaded."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "hub" / "models--some--tiny"
    commit = write_tiny_llama(place / "snapshots" / ("ab" * 20))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit.name)
    scope, same = load("some/tiny"), load(commit)
    assert (scope.name, scope.revision) == ("some/tiny", commit.name)
    assert (scope.weights_hash, scope.tokenizer_hash) == (same.weights_hash, same.tokenizer_hash)
    whole = (commit / "config.json").read_text()
    for change, said in (
        ({"num_hidden_layers": 10**9}, "1,000,000,000 as its num_hidden_layers"),
        ({"architectures": ["AutoModel"]}, "AutoModel, which is no model of transformers"),
    ):
        (commit / "config.json").write_text(json.dumps(json.loads(whole) | change))
        with pytest.raises(BadInput, match=said):
            load("some/tiny")
    os.truncate(commit / "config.json", 10 << 30)
    with pytest.raises(BadInput, match="has 10,240 MB, more than any such file"):
        load("some/tiny")
