"""Loading: folders, GGUF files, fingerprints, and one sentence for everything that goes wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from gguf_writer import write_gguf
from qkscope.analyses.prompts import check_same_model
from qkscope.capture.families import tiny_model
from qkscope.capture.files import cache_dir, files_hash, tensors_hash, weights_part
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.examples import Example, Key

pytestmark = pytest.mark.usefixtures("own_cache")
EXAMPLE = Example(ids=[5, 6, 7, 8, 9], keys=[Key((1, 2))])


def test_a_folder_is_the_model_that_was_saved(folder: Path) -> None:
    scope = Scope.load(folder, device="cpu")
    want = next(iter(Scope.from_model(tiny_model("llama")).capture([EXAMPLE])))
    got = next(iter(scope.capture([EXAMPLE])))
    assert torch.equal(got.q, want.q)
    assert weights_part(scope.weights_hash) == files_hash([folder / "model.safetensors"])
    assert scope.tokenizer_hash is None
    assert list(cache_dir("checks").iterdir())  # the self-check is remembered
    assert Scope.load(folder, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16
    assert Scope.load(folder, device="cpu", attn="eager").model.config._attn_implementation == "eager"


def test_fingerprints_tell_weights_apart(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "other")
    first, same, other = (Scope.load(path, device="cpu", check=False) for path in (folder, copy, tmp_path / "other"))
    assert first.weights_hash == same.weights_hash != other.weights_hash
    model = tiny_model("llama")
    before = tensors_hash(model.state_dict().items())
    assert before == tensors_hash(tiny_model("llama").state_dict().items())
    with torch.no_grad():  # two values change places: the sum stays, the fingerprint does not
        weight = model.model.layers[0].mlp.up_proj.weight.view(-1)
        weight[[3, 7]] = weight[[7, 3]]
    assert tensors_hash(model.state_dict().items()) != before


def test_the_same_weights_with_another_config_are_another_model(folder: Path, tmp_path: Path) -> None:
    """RoPE's base is in no weight file: queries and keys differ all the same, and so do the hash and the check."""
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    rope = config.setdefault("rope_parameters", config)
    rope["rope_theta"] = 2 * rope.get("rope_theta", 10_000.0)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    first, other = (Scope.load(path, device="cpu") for path in (folder, tmp_path / "other"))
    assert not torch.equal(next(iter(first.capture([EXAMPLE]))).k, next(iter(other.capture([EXAMPLE]))).k)
    assert first.weights_hash != other.weights_hash
    assert weights_part(first.weights_hash) == weights_part(other.weights_hash)
    assert len(list(cache_dir("checks").iterdir())) == 2
    with pytest.raises(BadInput, match=r"other settings \(config.json, with the same weights\)"):
        check_same_model({"weights": first.weights_hash}, other, "the fit")


def test_what_says_only_where_a_config_came_from_makes_no_other_model(folder: Path) -> None:
    before = Scope.load(folder, device="cpu", check=False).weights_hash
    config = json.loads((folder / "config.json").read_text())
    config |= {"_name_or_path": "elsewhere", "transformers_version": "4.0.0", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert Scope.load(folder, device="cpu", check=False, dtype="float32").weights_hash == before


def test_a_config_changed_in_memory_changes_the_hash() -> None:
    scope = Scope.from_model(tiny_model("gemma2"), check=False)
    before = scope.weights_hash
    scope.model.config.sliding_window = 3
    assert scope.weights_hash != before
    scope.model.config._attn_implementation = "eager"
    assert weights_part(scope.weights_hash) == weights_part(before)


@pytest.mark.parametrize("names", [[1], [["a"]], [None], "a"])
def test_an_index_that_names_no_files_is_damaged(folder: Path, names: object) -> None:
    content = dict(enumerate(names)) if isinstance(names, list) else names
    (folder / "model.safetensors").unlink()  # one whole file goes before an index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": content}))
    with pytest.raises(
        BadInput, match=r"incomplete or damaged: .* is no file of weights in it: download or save the model again"
    ):
        Scope.load(folder, device="cpu")


def test_a_self_check_that_passed_is_not_run_again(folder: Path) -> None:
    Scope.load(folder, device="cpu")
    (record,) = cache_dir("checks").iterdir()
    before = record.stat().st_mtime_ns
    Scope.load(folder, device="cpu")
    assert record.stat().st_mtime_ns == before
    Scope.load(folder, device="cpu", dtype="bfloat16")  # another dtype is another check
    assert record.stat().st_mtime_ns != before


def test_half_loaded_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadInput, match="damaged or half downloaded"):
        Scope.load(folder, device="cpu")
    weights.unlink()
    with pytest.raises(BadInput, match="holds no weights"):
        Scope.load(folder, device="cpu")
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    shard = sorted((tmp_path / "sharded").glob("model-*.safetensors"))[1]
    assert Scope.load(tmp_path / "sharded", device="cpu").n_layers == 2
    shard.unlink()
    with pytest.raises(BadInput, match=rf"incomplete or damaged: '{shard.name}' is no file of weights in it"):
        Scope.load(tmp_path / "sharded", device="cpu")
    (folder / "config.json").unlink()
    with pytest.raises(BadInput, match=r"not a model folder: it has no config.json"):
        Scope.load(folder, device="cpu")


def test_weights_that_are_missing_from_the_file_are_not_made_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        BadInput, match=r"1 weights such as model.layers.1.self_attn.q_proj.weight are missing from its files"
    ):
        Scope.load(folder, device="cpu")


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"does not exist: give a folder with config.json, a \.gguf file or a hub id"):
        Scope.load(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadInput, match=r"is no model folder and no \.gguf file"):
        Scope.load(tmp_path / "notes.txt")
    with pytest.raises(BadInput, match=r"does not exist: give a folder"):
        Scope.load(tmp_path / "model.gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match=r"not in the local cache and the hub cannot be reached: connect once"):
        Scope.load("nobody/no-such-model", device="cpu")


def test_settings_that_cannot_be_had(folder: Path) -> None:
    with pytest.raises(BadInput, match="attn is sdpa or eager"):
        Scope.load(folder, attn="flash_attention_2")
    with pytest.raises(BadInput, match="is no dtype"):
        Scope.load(folder, dtype="float33")
    with pytest.raises(BadInput, match="there is no device"):
        Scope.load(folder, device="gpu0")
    with pytest.raises(BadInput, match="exclude each other"):
        Scope.load(folder, device="cpu", device_map="auto")
    missing = f"cuda:{torch.cuda.device_count() + 7}"
    with pytest.raises(BadInput, match=f"there is no device '{missing}'"):
        Scope.load(folder, device=missing)


def test_a_gguf_file_is_dequantised_once(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    scope = Scope.load(tmp_path / "tiny.gguf", device="cpu")
    up = scope.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(up, tensors["blk.0.ffn_up.weight"])
    (kept,) = cache_dir("gguf").iterdir()
    assert kept.name == scope.weights_hash
    stamp = (kept / "model.safetensors").stat().st_mtime_ns
    (kept.parent / f".{kept.name}.left-by-a-crash").mkdir()
    again = Scope.load(tmp_path / "tiny.gguf", device="cpu")
    assert (kept / "model.safetensors").stat().st_mtime_ns == stamp
    assert torch.equal(again.model.model.layers[0].mlp.up_proj.weight, up)
    with pytest.raises(BadInput, match=r"tiny.gguf is one model, .*: leave out the revision 'main'"):
        Scope.load(tmp_path / "tiny.gguf", revision="main")
    (tmp_path / "broken.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:300])
    with pytest.raises(
        BadInput, match=r"broken.gguf could not be loaded .* damaged or half downloaded, so download it again"
    ):
        Scope.load(tmp_path / "broken.gguf", device="cpu")
    assert not list(cache_dir("gguf").glob(".*[0-9a-f]"))  # nothing half-written stays


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BadInput, match="set XDG_CACHE_HOME"):
        Scope.load(tmp_path / "tiny.gguf", device="cpu")


def test_a_weight_changed_in_memory_changes_the_hash():
    """Ablating a weight is everyday work: what was made with the old weights must not pass for the new."""
    scope = Scope.from_model(tiny_model("llama"), check=False)
    before = scope.weights_hash
    weight = scope.model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight.mul_(2)
    changed = scope.weights_hash
    with torch.no_grad():
        weight.div_(2)
    assert before != changed
    assert scope.weights_hash == before
    weight.data.zero_()
    assert scope.weights_hash not in (before, changed)
