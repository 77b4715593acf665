"""What folders know of heads: features that decompose or discover fitted, and names of discover or an atlas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qkscope.analyses.fit import Fit, load, read_job, task_of
from qkscope.analyses.prompts import check_same_model
from qkscope.analyses.swap import check_swappable, default_features
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.subspace import Subspace
from qkscope.runs.folder import RESULTS
from qkscope.runs.result import Result

_FITTED, _NAMES = "decompose", ("discover", "atlas")  # verbs whose folders hold features, or name heads


class FeatureStore:
    """Features by head and name, and the name, sentence and texts that a folder has for a head."""

    def __init__(self, fit: Fit | None = None, folder: str = "") -> None:
        self.folder = folder
        self.of: dict[Head, dict[str, Subspace]] = {}
        self.names: dict[Head, str] = {}
        self.sentences: dict[Head, str] = {}
        self.texts: dict[Head, list[dict[str, Any]]] = {}
        self._framed = False  # whether directions are of the query's frame, and turn with the token that asks
        if fit is not None:
            check_swappable(fit.space, downstream=True)
            names = default_features(fit.contrasts)
            self.of = {head: {name: fit[name, head] for name in names} for head in fit.heads}

    @classmethod
    def read(cls, folder: str | Path, scope: Scope) -> FeatureStore:
        """Those of a folder of decompose, discover or atlas."""
        result, store = _result_of(folder), cls(folder=str(folder))
        if result.experiment.startswith(_FITTED):
            return cls(load(folder, scope), str(folder))
        check_same_model(result.provenance, scope, str(folder))
        store._framed = result.provenance.get("space", "query_frame") == "query_frame"
        for name, value in (result.arrays or {}).items():
            head, _, what = name.partition("/")
            if what == "key_pattern":
                basis = torch.linalg.qr(torch.as_tensor(value).float())[0]
                rank = basis.shape[1]
                store.of[Head.parse(head)] = {"discovered": Subspace(basis, torch.ones(rank), basis, rank)}
        for row in [*result.tables.get("heads", []), *result.tables.get("atlas", [])]:
            named = Head.parse(row["head"])
            store.names[named], store.sentences[named] = row["name"], row["sentence"]
        for row in result.tables.get("examples", []):
            store.texts.setdefault(Head.parse(row["head"]), []).append(dict(row))
        return store

    def at(self, head: Head, scope: Scope, call: Call, query: int) -> dict[str, Subspace]:
        """A head's features as the dot product sees them at the token that asks."""
        offset, features = scope.facts.layers[head.layer].offset, self.of.get(head, {})
        if not self._framed or call.rotary is None or offset is None or "discovered" not in features:
            return features
        directions = features["discovered"].U.T[None, :, None]
        row, at = torch.zeros(1, dtype=torch.long), torch.tensor([[query]])
        basis = call.rotary.turn(directions, row, at, offset)[0, :, 0].T
        return {**features, "discovered": Subspace(basis, torch.ones(basis.shape[1]), basis, basis.shape[1])}


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
        raise BadInput(f"{folder} holds no features: name a folder that decompose, discover or atlas wrote, or none.")
    result = Result.read(folder)
    verb = result.experiment.partition("/")[0]
    if verb not in (_FITTED, *_NAMES):
        raise BadInput(f"{folder} was written by {verb}: the live page takes folders of decompose, discover or atlas.")
    return result
