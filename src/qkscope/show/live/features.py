"""What folders know of heads: features that decompose fitted, and names of an atlas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkscope.analyses.fit import Fit, load, read_job, task_of
from qkscope.analyses.prompts import check_same_model
from qkscope.analyses.swap import check_swappable, default_features
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.subspace import Subspace
from qkscope.runs.folder import RESULTS
from qkscope.runs.result import Result

_FITTED, _NAMES = "decompose", ("atlas",)  # verbs whose folders hold features, or name heads


class FeatureStore:
    """Features by head and name, and the name, sentence and texts that a folder has for a head."""

    def __init__(self, fit: Fit | None = None, folder: str = "") -> None:
        self.folder = folder
        self.of: dict[Head, dict[str, Subspace]] = {}
        self.names: dict[Head, str] = {}
        self.sentences: dict[Head, str] = {}
        self.texts: dict[Head, list[dict[str, Any]]] = {}
        if fit is not None:
            check_swappable(fit.space, downstream=True)
            names = default_features(fit.contrasts)
            self.of = {head: {name: fit[name, head] for name in names} for head in fit.heads}

    @classmethod
    def read(cls, folder: str | Path, scope: Scope) -> FeatureStore:
        """Those of a folder of decompose or atlas."""
        result, store = _result_of(folder), cls(folder=str(folder))
        if result.experiment.startswith(_FITTED):
            return cls(load(folder, scope), str(folder))
        check_same_model(result.provenance, scope, str(folder))
        for row in result.tables.get("atlas", []):
            named = Head.parse(row["head"])
            store.names[named], store.sentences[named] = row["kind"], f"On text: {row['name']} ({row['looks']} looks)."
        for row in result.tables.get("examples", []):
            store.texts.setdefault(Head.parse(row["head"]), []).append(dict(row))
        return store


def model_of(folder: str | Path) -> str:
    """The model that a folder's features are of; a folder without any is refused before a model is loaded."""
    result = _result_of(folder)
    if result.experiment.startswith(_FITTED):
        job = read_job(folder)
        check_swappable(job["space"], downstream=True)
        task_of(job, folder)
        return str(job["model"])
    return str(result.provenance.get("model") or "smollm2-135m")


def _result_of(folder: str | Path) -> Result:
    if not (Path(folder) / RESULTS).is_file():
        raise BadInput(f"{folder} holds no features: name a folder that decompose or atlas wrote, or none.")
    result = Result.read(folder)
    verb = result.experiment.partition("/")[0]
    if verb not in (_FITTED, *_NAMES):
        raise BadInput(f"{folder} was written by {verb}: the live page takes folders of decompose or atlas.")
    return result
