"""What folders know of heads: features of a fit, of `discover`, and what an atlas calls a head."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.fit import Fit, load
from qkscope.analyses.fit_folder import read_job, task_of
from qkscope.analyses.prompts import check_same_model
from qkscope.analyses.swap import check_swappable, default_features
from qkscope.capture.files import cache_dir
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.subspace import Subspace
from qkscope.runs.folder import JOB, RESULTS, file_name
from qkscope.runs.result import Result
from qkscope.tasks.task import Task

FITTED_ON = 40
"""Prompts, for a head that is fitted while one waits."""

_WITHOUT_LABELS = ("discover", "atlas")


@dataclass(frozen=True)
class Pattern:
    """What `discover` found at a head: a basis of queries and keys alike.

    ``framed`` where it is of the query's frame, and turns with the token that asks.
    """

    directions: Float[Tensor, "d r"]
    framed: bool = False

    @property
    def rank(self) -> int:
        """Its dimension."""
        return self.directions.shape[1]

    def basis(self, side: Literal["query", "key"]) -> Float[Tensor, "d r"]:
        """The same for both sides."""
        return self.directions

    def at(self, scope: Scope, call: Call, query: int) -> Pattern:
        """As the dot product at the token that asks sees it."""
        offset = scope.facts.layers[call.layer].offset
        if not self.framed or call.rotary is None or offset is None:
            return self
        row, at = torch.zeros(1, dtype=torch.long), torch.tensor([[query]])
        return Pattern(call.rotary.turn(self.directions.T[None, :, None].float(), row, at, offset)[0, :, 0].T)


Feature: TypeAlias = Subspace | Pattern


class Features:
    """By head and name, with what a folder says of each head.

    Parameters
    ----------
    task : whose contrasts are fitted where nothing was; binding, if not given.
    folder : where they came from.
    """

    def __init__(self, task: Task | None = None, folder: str = "") -> None:
        self.task, self.folder = task or tasks.binding(entities=9, form="list", seed=0), folder
        self.contrasts = default_features(list(self.task.contrasts))
        self.of: dict[Head, dict[str, Feature]] = {}
        self.said: dict[Head, tuple[str, str]] = {}  # name and sentence
        self.texts: dict[Head, list[dict[str, Any]]] = {}

    @classmethod
    def of_fit(cls, fit: Fit, task: Task | None = None, folder: str = "") -> Features:
        """Those of a fit."""
        check_swappable(fit.space, downstream=True)
        made = cls(task, folder)
        made.contrasts = default_features(fit.contrasts)
        for head in fit.heads:
            made.of[head] = {name: fit[name, head] for name in made.contrasts}
        return made

    @classmethod
    def of_result(cls, result: Result, scope: Scope, folder: str = "") -> Features:
        """Directions of `discover`, and the name and sentence of every head that it or an atlas names."""
        check_same_model(result.provenance, scope, folder or "the folder")
        made, framed = cls(folder=folder), result.provenance.get("space", "query_frame") == "query_frame"
        for name, value in (result.arrays or {}).items():
            head, _, what = name.partition("/")
            if what == "key_pattern":
                basis = torch.linalg.qr(torch.as_tensor(value).float())[0]
                made.of[Head.parse(head)] = {"discovered": Pattern(basis, framed)}
        for row in [*result.tables.get("heads", []), *result.tables.get("atlas", [])]:
            if "sentence" in row:
                made.said[Head.parse(row["head"])] = row["name"], row["sentence"]
        for row in result.tables.get("examples", []):
            made.texts.setdefault(Head.parse(row["head"]), []).append(dict(row))
        return made

    @classmethod
    def read(cls, folder: str | Path, scope: Scope) -> Features:
        """Those of any folder that knows some."""
        if kind_of(folder) == "decompose":
            return cls.of_fit(load(folder, scope), task_of(read_job(folder), folder), str(folder))
        return cls.of_result(Result.read(folder), scope, str(folder))

    def fit(self, scope: Scope, head: Head) -> None:
        """Fit the task's features at one more head; kept in the user's cache."""
        if not set(self.contrasts) <= set(self.of.get(head, {})):
            place = cache_dir("explorer", scope.weights_hash, self._job(scope), str(head))
            fit = decompose(scope, self.task, [head], FITTED_ON, contrasts=self.contrasts, out=place)
            own = {name: fit[name, head] for name in self.contrasts}
            self.of[head] = {**self.of.get(head, {}), **own}

    def _job(self, scope: Scope) -> str:
        """What else a fit depends on, for its place in the cache: another size, form or file is another fit."""
        task = self.task
        asked = [
            task.name, dict(task.asked), task.seed, task.chat, self.contrasts, FITTED_ON, scope.tokenizer_hash,
            str(scope.model.dtype),
        ]  # fmt: skip
        return f"{file_name(task.name)}-{hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]}"


def kind_of(folder: str | Path) -> str:
    """Which verb wrote a folder whose features can be looked at; another is refused before a model is loaded."""
    if (Path(folder) / JOB).is_file():
        return "decompose"
    if (Path(folder) / RESULTS).is_file():
        experiment = Result.read(folder).experiment.partition("/")[0]
        if experiment in _WITHOUT_LABELS:
            return experiment
        raise BadInput(
            f"{folder} was written by {experiment}: the live page takes folders of decompose, discover or atlas."
        )
    raise BadInput(f"{folder} holds no features: name a folder that decompose, discover or atlas wrote, or none.")


def model_of(folder: str | Path) -> str:
    """The model that a folder's features are of; a damaged folder is refused before one is loaded."""
    if kind_of(folder) == "decompose":
        job = read_job(folder)
        check_swappable(job["space"], downstream=True)
        task_of(job, folder)
        return str(job["model"])
    about: Mapping[str, Any] = Result.read(folder).provenance
    return str(about.get("model") or "smollm2-135m")
