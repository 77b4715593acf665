"""The second real model: parts joined and believed by their hash, and what is known of it."""

import hashlib
import importlib
import sys
from pathlib import Path

import pytest

import qkscope as qk
from gguf_writer import sentencepiece, write_gguf
from qkscope import BadInput, Scope
from qkscope.findings.prompt_trace import AskedPrompt
from qkscope.model import files
from qkscope.model.files import EMBEDDED, Package, cache_dir, is_installed, packaged_file
from test_gguf_files import TEXTS, check_rules

MODEL = "gemma3-270m"
needs_gemma = pytest.mark.skipif(not is_installed(MODEL), reason="needs `make gemma`")
PROMPT = "When Mary and John went to the store, John gave a drink to"


def install(folder: Path, package: str, data: str, content: bytes) -> None:
    """What pip leaves of a package that holds one file."""
    inside = package.replace("-", "_")
    about = folder / f"{inside}-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "RECORD").write_text(f"{inside}/__init__.py,,\n{inside}/{data},,\n")
    (folder / inside).mkdir(exist_ok=True)
    (folder / inside / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / inside / data).write_bytes(content)
    importlib.invalidate_caches()


def test_parts_are_joined_once_and_believed_by_their_hash(own_cache, tmp_path, monkeypatch) -> None:
    write_gguf(tmp_path / "whole.gguf", more=sentencepiece())
    whole, site = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "site"
    (tmp_path / "tiny.txt").write_text(
        "# tiny\ntiny-part1==1.0 --hash=sha256:0\ntiny-part2==1.0 --hash=sha256:0\n"
    )
    cut = Package(tmp_path / "tiny.txt", "tiny", hashlib.sha256(whole).hexdigest(), "its terms")
    monkeypatch.setattr(files, "EMBEDDED", {**EMBEDDED, "tiny": cut})
    monkeypatch.syspath_prepend(str(site))
    install(site, "tiny-part1", "x.gguf.part00", whole[:5000])
    with pytest.raises(
        BadInput, match=r"not installed: run `qkscope fetch tiny` \(tiny\); who uses .* its terms"
    ):
        packaged_file("tiny")
    install(site, "tiny-part2", "x.gguf.part01", whole[5001:])
    with pytest.raises(
        BadInput, match="do not join to the file they were cut from: install them again"
    ):
        packaged_file("tiny")
    assert not cache_dir("tiny.gguf").exists()
    install(site, "tiny-part2", "x.gguf.part01", whole[5000:])
    assert is_installed("tiny")
    packaged_file("tiny").write_bytes(b"GGUF")  # what was changed is joined anew
    joined = packaged_file("tiny")
    assert joined.read_bytes() == whole
    assert list(joined.parent.glob(".*")) == []
    (site / "tiny_part2" / "x.gguf.part01").unlink()
    assert packaged_file("tiny") == joined


@pytest.fixture(scope="module")
def gemma() -> Scope:
    return Scope.load(MODEL, device="cpu")


@needs_gemma
def test_it_gives_the_drink_to_mary_has_the_tokens_of_its_file_and_l5h1_binds(gemma: Scope) -> None:
    assert (gemma.n_layers, gemma.n_heads, gemma.n_kv_heads, gemma.d_head) == (18, 4, 1, 256)
    assert gemma.weights_hash == EMBEDDED[MODEL].sha256
    assert not [name for name in sys.modules if name.startswith("gemma3_270m")]
    first = gemma.tokenizer.bos_token_id
    ids = gemma.encode([PROMPT]).inputs["input_ids"]
    assert ids[0].tolist().count(first) == 1
    assert int(ids[0, 0]) == first
    probabilities = next(iter(gemma.capture([PROMPT], "L0H0", logits=True))).logits[0].softmax(-1)
    assert gemma.tokenizer.decode([int(probabilities.argmax())]) == " Mary"
    assert abs(float(probabilities.max()) - 0.853) < 0.01
    assert AskedPrompt.of(gemma, PROMPT, None, chat=False).tokens.count("<bos>") == 1
    assert (
        gemma.encode([gemma.tokenizer.bos_token + PROMPT]).inputs["input_ids"].tolist()
        == ids.tolist()
    )
    padded = gemma.encode([PROMPT, "hat: O"])
    assert (padded.inputs["input_ids"] == first).sum(1).tolist() == [1, 1]
    check_rules(packaged_file(MODEL), gemma, TEXTS)
    ranking = qk.find_heads(gemma, qk.tasks.binding(), 8, progress=False)
    (head,) = [row for row in ranking.tables["heads"] if row["head"] == "L5H1"]
    assert head["row_accuracy"] >= 0.9
