"""Loading: what is loaded is what is hashed, nothing is loaded that does not fit together, errors
are one sentence.
"""

import json
import logging
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from gguf_writer import write_gguf
from qkscope.errors import BadInput
from qkscope.examples import Example, Key
from qkscope.findings.task_batches import check_same_model
from qkscope.model.files import cache_dir, files_hash, tensors_hash, weights_part
from qkscope.model.scope import Scope
from qkscope_papers.families import tiny_model
from tiny_llama import write_tiny_llama

pytestmark = pytest.mark.usefixtures("own_cache")
EXAMPLE = Example(ids=[5, 6, 7, 8, 9], keys=[Key((1, 2))])


def load(folder: Path | str, **options: object) -> Scope:
    return Scope.load(folder, device="cpu", check=False, **options)


def refused(folder: Path | str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        load(folder)


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def embedding(scope: Scope) -> torch.Tensor:
    return scope.model.get_input_embeddings().weight


def test_a_folder_is_the_model_that_was_saved_and_is_checked_once(folder: Path) -> None:
    scope = Scope.load(folder, device="cpu")
    want = next(iter(Scope.from_model(tiny_model("llama")).capture([EXAMPLE])))
    assert torch.equal(next(iter(scope.capture([EXAMPLE]))).q, want.q)
    assert weights_part(scope.weights_hash) == files_hash([folder / "model.safetensors"])
    (record,) = cache_dir("checks").iterdir()
    before = record.stat().st_mtime_ns
    Scope.load(folder, device="cpu")
    assert record.stat().st_mtime_ns == before
    assert Scope.load(folder, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16
    assert record.stat().st_mtime_ns != before  # another dtype is another check
    assert load(folder, attn="eager").model.config._attn_implementation == "eager"


def test_the_hash_is_of_the_weights_that_are_loaded(folder: Path, tmp_path: Path) -> None:
    """One whole file goes before an index and its parts, and a file the config names goes before
    both.
    """
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    parts = load(tmp_path / "parts")
    for path in (tmp_path / "parts").glob("model*"):
        shutil.copy(path, folder)
    whole = load(folder)
    assert torch.equal(embedding(whole), tiny_model("llama").get_input_embeddings().weight)
    assert whole.weights_hash != parts.weights_hash
    sorted(folder.glob("model-*.safetensors"))[0].write_bytes(
        b"other"
    )  # is not loaded, so it changes nothing
    assert load(folder).weights_hash == whole.weights_hash
    shutil.copy(folder / "model.safetensors", folder / "named.safetensors")
    content = load_file(folder / "named.safetensors")
    content["model.norm.weight"] += 1
    save_file(content, folder / "named.safetensors", metadata={"format": "pt"})
    edit(folder, transformers_weights="named.safetensors")
    assert load(folder).weights_hash != whole.weights_hash
    for name in ("../parts/model.safetensors", "nowhere.safetensors"):
        edit(folder, transformers_weights=name)
        refused(folder, r"is no file of weights in it")


def test_the_same_weights_with_another_config_are_another_model(
    folder: Path, tmp_path: Path
) -> None:
    """RoPE's base is in no weight file: queries and keys differ all the same, and so do the hash
    and the check.
    """
    for name in ("copy", "other"):
        shutil.copytree(folder, tmp_path / name)
    edit(
        tmp_path / "copy",
        _name_or_path="elsewhere",
        transformers_version="4.0.0",
        torch_dtype="bfloat16",
    )
    config = json.loads((folder / "config.json").read_text())
    rope = config.setdefault("rope_parameters", config)
    rope["rope_theta"] = 2 * rope.get("rope_theta", 10_000.0)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    first, other = (Scope.load(path, device="cpu") for path in (folder, tmp_path / "other"))
    assert (
        load(tmp_path / "copy", dtype="float32").weights_hash
        == first.weights_hash
        != other.weights_hash
    )
    assert not torch.equal(
        next(iter(first.capture([EXAMPLE]))).k, next(iter(other.capture([EXAMPLE]))).k
    )
    assert weights_part(first.weights_hash) == weights_part(other.weights_hash)
    assert len(list(cache_dir("checks").iterdir())) == 2
    with pytest.raises(BadInput, match=r"other settings \(config.json, with the same weights\)"):
        check_same_model({"weights": first.weights_hash}, other, "the fit")


def test_a_model_changed_in_memory_has_another_hash(folder: Path) -> None:
    """Ablating a weight is everyday work: what was made with the old weights must not pass for the
    new.
    """
    scope = load(folder)
    before, weight = scope.weights_hash, scope.model.model.layers[0].self_attn.q_proj.weight
    kept = weight.data.clone()
    weight.data.view(-1)[[3, 7]] = weight.data.view(-1)[
        [7, 3]
    ]  # the sum stays, the fingerprint does not
    assert scope.weights_hash != before
    weight.data.copy_(kept)
    assert scope.weights_hash == before
    memory = Scope.from_model(tiny_model("gemma2"), check=False)
    assert weights_part(memory.weights_hash) == tensors_hash(
        tiny_model("gemma2").state_dict().items()
    )
    before = memory.weights_hash
    memory.model.config.sliding_window = 3
    assert weights_part(memory.weights_hash) == weights_part(before)
    assert memory.weights_hash != before


def test_a_folder_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    refused(folder, "damaged or half downloaded")
    weights.rename(tmp_path / "elsewhere.safetensors")
    refused(folder, "holds no weights")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(
        folder,
        r"incomplete or damaged: .* is no file of weights in it: download or save the model again",
    )
    for name in ("shard-00001-model-00001-of-00002.safetensors", "adapter_config.json"):
        (folder / name).write_text("{}")
        refused(folder, "an adapter to another model or a part of a distributed run")
        (folder / name).unlink()
    (folder / "config.json").write_text("{")
    refused(folder, r"not a model folder: it has no config.json that can be read")


def test_weights_and_config_must_fit_each_other(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")

    def save(**tensors: torch.Tensor) -> None:
        save_file(weights | tensors, folder / "model.safetensors", metadata={"format": "pt"})

    edit(folder, num_hidden_layers=1)
    refused(folder, r"\d+ weights such as model.layers.1.* have no place in the model")
    edit(folder, num_hidden_layers=2)
    save(
        **{
            "model.layers.0.self_attn.q_proj.bias": torch.ones(
                len(weights["model.layers.0.self_attn.q_proj.weight"])
            )
        }
    )
    refused(folder, r"1 weights such as model.layers.0.self_attn.q_proj.bias have no place")
    save(**{"model.norm.weight": torch.ones(7)})
    refused(
        folder,
        r"1 weights such as model.norm.weight \(\[7\] instead of \[64\]\) have another shape",
    )
    save(
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "cls.seq_relationship.bias": torch.ones(2),
        }
    )
    assert (
        load(folder).n_layers == 2
    )  # what old files carry, and a head on top, change no attention
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save()
    refused(
        folder,
        r"1 weights such as model.layers.1.self_attn.q_proj.weight are missing from its files",
    )


def test_names_that_lead_nowhere_and_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(
        tmp_path / "nothing",
        r"does not exist: give a folder with config.json, a \.gguf file or a hub id",
    )
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", r"is no model folder and no \.gguf file")
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(tmp_path / "tiny.gguf", "set XDG_CACHE_HOME")


def test_a_hub_that_cannot_be_reached_is_asked_once_and_never_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(seconds: float) -> None:
        pytest.fail(f"its client sleeps {seconds} s before it tries again")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9"
    )  # where nobody answers
    monkeypatch.setattr("time.sleep", wait)
    refused(
        "nobody/no-such-model",
        r"not in the local cache and the hub cannot be reached: connect once",
    )
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_hub_model_is_held_to_the_same_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    edit(commit, architectures=["AutoModel"])
    refused("some/tiny", "AutoModel, which is no model of transformers")


def test_a_gguf_file_is_dequantised_once(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    scope = Scope.load(tmp_path / "tiny.gguf", device="cpu")
    up = scope.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(up, tensors["blk.0.ffn_up.weight"])
    (kept,) = cache_dir("gguf").iterdir()
    assert kept.name.startswith(scope.weights_hash)
    inode = kept.stat().st_ino
    assert torch.equal(load(tmp_path / "tiny.gguf").model.model.layers[0].mlp.up_proj.weight, up)
    assert kept.stat().st_ino == inode
    with pytest.raises(
        BadInput, match=r"tiny.gguf is one model, .*: leave out the revision 'main'"
    ):
        Scope.load(tmp_path / "tiny.gguf", revision="main")
    (tmp_path / "broken.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:300])
    refused(
        tmp_path / "broken.gguf", r"broken.gguf could not be loaded .* damaged or half downloaded"
    )
    assert list(cache_dir("gguf").iterdir()) == [kept]  # nothing half-written stays


def test_ids_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    words = json.loads((folder / "tokenizer.json").read_text())
    last = max(words["model"]["vocab"].values())
    word = next(word for word, id in words["model"]["vocab"].items() if id == last)
    words["model"]["vocab"][word] = last + 7
    (folder / "tokenizer.json").write_text(json.dumps(words))
    scope = load(folder)
    with pytest.raises(
        BadInput,
        match=rf"the tokenizer gives the id {last + 7}, but this model's ids are 0 to {last}",
    ):
        scope.encode([word])
    with pytest.raises(BadInput, match=r"the prompt has the id -1, but this model's ids are"):
        scope.encode([Example(ids=(0, -1))])


def test_a_model_that_misses_its_first_token_is_said_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = load(write_tiny_llama(tmp_path / "model"))
    tokenizer = silent.tokenizer
    tokenizer.bos_token = "[EOS]"
    with caplog.at_level(logging.WARNING):
        silent.encode([Example(ids=(5, 6))])
        load("nano:mixed").encode(["hat : O"])
        assert not caplog.messages  # these start without one
        tokenizer.add_bos_token = True
        scope = Scope.from_model(silent.model, tokenizer, check=False)
        scope.encode(["The hat"])
        scope.encode([Example(ids=(1, 6))])
        assert not caplog.messages
        for _ in range(2):
            scope.encode([Example(ids=(5, 6)), Example(ids=(1, 6))])
    (message,) = caplog.messages
    assert (
        "expects ['[EOS]'] as the first token of every prompt, but 1 of 2 prompts start without it"
        in message
    )
