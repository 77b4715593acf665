"""No model's code runs: real folders with real code, opened by a real process whose standard input
says "y".
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_writer import write_gguf
from tiny_llama import write_tiny_llama

OPEN = """
import json, sys
from qkscope import BadInput, Scope

said = {}
for name in sys.argv[1:]:
    try:
        scope = Scope.load(name, device="cpu", check=False)
        said[name] = f"loaded {type(scope.model).__name__} and {type(scope.tokenizer).__name__}"
    except BadInput as refusal:
        said[name] = str(refusal)
    except Exception as error:
        said[name] = f"{type(error).__name__} {error}"
print(json.dumps(said))
"""
MINE = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModel",
    "AutoConfig",
    "AutoProcessor",
)
OWN_TOKENIZER = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def _edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def _config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: _edit(
        folder / "config.json", auto_map=dict.fromkeys(MINE, "evil.Evil"), **changes
    )


def _tokenizer(name: str, **changes: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        _edit(folder / "tokenizer_config.json", tokenizer_class=name, **changes)
        _edit(
            folder / "processor_config.json",
            auto_map={"AutoProcessor": "evil.Evil"},
            processor_class="Evil",
        )

    return write


def _generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "evil.py").rename(folder / "custom_generate" / "generate.py")


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": _Bomb(folder / "ran")}))


def _beside_a_gguf(folder: Path) -> None:
    _config()(folder)
    _tokenizer("Evil", auto_map=OWN_TOKENIZER)(folder)
    write_gguf(folder / "model.gguf")


TRICKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "an Auto class as architecture": (
        _config(architectures=["AutoModelForSpeechSeq2Seq"]),
        "is no model of transfor",
    ),
    "a function as architecture": (
        _config(architectures=["pipeline"]),
        "is no model of transformers",
    ),
    "its own class as architecture": (
        _config(architectures=["Evil"]),
        "is no model of transformers",
    ),
    "a type nobody knows": (
        _config(model_type="evil", architectures=["Evil"]),
        "brings its own code",
    ),
    "a known model with code beside it": (_config(), "loaded LlamaForCausalLM"),
    "a tokenizer of its own": (
        _tokenizer("Evil", auto_map=OWN_TOKENIZER),
        "loaded LlamaForCausalLM",
    ),
    "a tokenizer that is an Auto class": (
        _tokenizer("AutoProcessor"),
        "loaded LlamaForCausalLM and NoneType",
    ),
    "generation of its own": (_generate, "loaded LlamaForCausalLM"),
    "weights that are code": (
        _config(transformers_weights="evil.py"),
        "'evil.py' is no file of weights",
    ),
    "weights that are a pickle": (_pickle, "is a pickle that holds more than tensors"),
    "an attention from the hub": (
        _config(attn_implementation="evil/attention"),
        "loaded LlamaForCausalLM",
    ),
    "beside a GGUF file": (_beside_a_gguf, "loaded LlamaForCausalLM and NoneType"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, bool, bool]]:
    """What one process said of every trick, whether it asked for leave, and whether the code ran."""
    base = tmp_path_factory.mktemp("tricks")
    places = {}
    for number, (trick, (plant, _)) in enumerate(TRICKS.items()):
        folder = write_tiny_llama(base / f"model{number}")
        (folder / "evil.py").write_text(
            f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: pass\ngenerate = Evil\n"
        )
        plant(folder)
        gguf = folder / "model.gguf"
        places[trick] = gguf if gguf.exists() else folder
    own = {
        "XDG_CACHE_HOME": str(base / "cache"),
        "HF_HOME": str(base / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *map(str, places.values())],
        input="y\n" * 100, capture_output=True, text=True, timeout=300, env=os.environ | own, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(
        done.stdout.splitlines()[-1].partition("? [y/N] ")[2] or done.stdout.splitlines()[-1]
    )
    asked = {trick: f"{place} contains" in done.stdout for trick, place in places.items()}
    ran = {
        trick: (place / "ran").exists() or (place.parent / "ran").exists()
        for trick, place in places.items()
    }
    return {
        trick: (answers[str(place)], asked[trick], ran[trick]) for trick, place in places.items()
    }


@pytest.mark.parametrize("trick", TRICKS)
def test_no_code_of_a_model_runs(said: dict[str, tuple[str, bool, bool]], trick: str) -> None:
    answer, asked, ran = said[trick]
    assert not ran, f"{trick}: its code ran"
    assert not asked, f"{trick}: somebody was asked whether it may run"
    assert TRICKS[trick][1] in answer
