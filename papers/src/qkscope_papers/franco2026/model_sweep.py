"""One sweep over the checkpoints of a language model, for figures 7b, 8, 9 and 25.

On a nano model all shipped checkpoints, on Pythia-160M its steps on the hub, in a folder of folders
all of them, else the one checkpoint there is. The sweep lies in the shared folder, so that a figure
asked for later finds it. Means are over edges, then over prompts; their intervals draw templates
(or texts) anew, not prompts, which share them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.findings.published import Duty, Edge
from qkscope.heads import Head
from qkscope.model.load import nano_steps
from qkscope.results.result import Result
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.verbs.sparsity import Checkpoint, Sparsity, checkpoints, sweep
from qkscope_papers.franco2026.prompts import IOI, TEXT, clusters_of, prompts_of
from qkscope_papers.registry import Settings
from qkscope_papers.tables import Estimate, Row, pick

# share of prompts answered right, of two names: up to here chance, from here on learned
CHANCE = 0.6
RIGHT = 0.95
GPT2 = "gpt2"
PYTHIA = "EleutherAI/pythia-160m"
_PYTHIA_STEPS = {
    "smoke": (0, 1000, 143000),
    "default": (0, 128, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 100000, 143000),
    "paper": tuple(range(0, 144000, 1000)),
}


@dataclass(frozen=True)
class SweepWork:
    """Counts of one preset."""

    n: int
    controls: int
    draws: int
    every: int  # of the shipped checkpoints, each so many


WORK = {
    "smoke": SweepWork(24, 2, 5, 5),
    "default": SweepWork(128, 8, 20, 1),
    "paper": SweepWork(128, 12, 50, 1),
}


@dataclass(frozen=True)
class Sweep:
    """A finished sweep: its tables, and every prompt's values at each checkpoint."""

    result: Sparsity
    found: list[Checkpoint]
    values: dict[str, dict[str, Tensor]]  # by the checkpoint's label
    clusters: Int[Tensor, " n"]  # which prompts go together
    prompts: str

    @property
    def first(self) -> dict[str, Tensor]:
        """Values at the start of training (or at the one checkpoint there is)."""
        return self.values[self.found[0].label]

    @property
    def last(self) -> dict[str, Tensor]:
        """Values at its end."""
        return self.values[self.found[-1].label]

    def learned(self) -> tuple[Checkpoint, Checkpoint] | None:
        """The last checkpoint that answers like chance and the first one after it that answers
        right, if there are.
        """
        scores = [
            float(self.values[c.label]["right"].mean())
            for c in self.found
            if "right" in self.values[c.label]
        ]
        right = next((i for i, score in enumerate(scores) if score >= RIGHT), None)
        before = (
            [i for i, score in enumerate(scores[:right]) if score <= CHANCE]
            if right is not None
            else []
        )
        return (self.found[before[-1]], self.found[right]) if before and right is not None else None

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The circuit's edges, then the controls."""
        return self.result.edges

    @property
    def trained(self) -> bool:
        """Whether there is a training run to speak of, or one checkpoint alone."""
        return len(self.found) > 1

    @property
    def inside(self) -> list[int]:
        """The circuit's edges, by number."""
        return [i for i, edge in enumerate(self.edges) if edge.circuit]

    @property
    def outside(self) -> list[int]:
        """The controls, by number."""
        return [i for i, edge in enumerate(self.edges) if not edge.circuit]

    def mean(
        self, values: Float[Tensor, "edges n"], chosen: list[int], level: float = 0.95
    ) -> Estimate:
        """The mean over some edges, and its interval."""
        by_prompt = values[chosen].nanmean(0)
        kept = by_prompt.isfinite()
        if not bool(kept.any()):
            return Estimate(float("nan"), float("nan"), float("nan"))
        low, high = clustered_bootstrap(by_prompt[kept], self.clusters[kept], level=level)
        return Estimate(float(by_prompt[kept].mean()), float(low), float(high))

    def unlike(self, paper: str) -> tuple[str, str]:
        """Why a statement of the paper may fail here: a reason, and the sentence that argues it."""
        model = str(self.result.model)
        if self.prompts != TEXT and model == paper:
            return "counter-finding", ""
        if model.startswith("nano:"):
            return (
                "small model",
                f"A nano of 0.3 million parameters stands in for {paper}, which was not at hand.",
            )
        text = " on natural text" if self.prompts == TEXT else ""
        return "other setting", f"This is {Path(model).name}{text}; {paper} was not at hand."

    def rows(self, checkpoint: Checkpoint, circuit: bool | None = None) -> list[Row]:
        """The table of one checkpoint."""
        step = checkpoint.step if checkpoint.label else None
        own = (row for row in self.result.table() if row["step"] == step)
        return [row for row in own if circuit is None or row["circuit"] is circuit]

    def training(self, circuit: bool = True) -> list[Row]:
        """Means over heads, checkpoint by checkpoint; of one checkpoint alone there are none."""
        return pick(self.result.tables.get("training", ()), circuit=circuit)

    def about(self) -> dict[str, Any]:
        """What the manifest says of the sweep."""
        return dict(self.result.provenance.get("asked", {}))


def revisions_of(model: str, preset: str) -> str | None:
    """Which checkpoints of a model a preset looks at; None where there is one."""
    if model.startswith("nano:") and "@" not in model:
        steps = nano_steps(model)
        kept = steps[:: WORK[preset].every]
        return ",".join(map(str, kept if kept[-1] == steps[-1] else [*kept, steps[-1]]))
    if model == PYTHIA:
        return ",".join(f"step{step}" for step in _PYTHIA_STEPS[preset])
    folder = Path(model).expanduser()
    return "all" if folder.is_dir() and not (folder / "config.json").is_file() else None


def swept(settings: Settings) -> Sweep:
    """The sweep of this model, prompts, preset and seed: made once."""
    prompts = settings.prompts or IOI
    return _swept(
        settings.model, prompts, settings.preset, settings.seed, settings.device, settings.shared
    )


@lru_cache(maxsize=2)
def _swept(model: str, prompts: str, preset: str, seed: int, device: str, shared: Path) -> Sweep:
    work = WORK[preset]
    revisions = revisions_of(model, preset)
    name = hashlib.sha256(f"{model} {prompts} {preset} {seed}".encode()).hexdigest()[:12]
    folder = shared / "franco2026" / "model_sweeps" / name  # no figure is called so
    found = checkpoints(model, revisions)
    task = prompts_of(prompts, model, found[-1].revision, seed)
    asked: Any = {"n": work.n, "controls": work.controls, "draws": work.draws}
    result = _kept(folder, found) or sweep(
        model, task, revisions, **asked, out=folder, seed=seed, device=device
    )
    values: dict[str, dict[str, Tensor]] = {checkpoint.label: {} for checkpoint in found}
    for name, value in result.arrays.items():
        label, slash, own = name.rpartition("/")
        values[label if slash else found[-1].label][own] = value
    return Sweep(result, found, values, clusters_of(task, work.n), prompts)


def _kept(folder: Path, found: list[Checkpoint]) -> Sparsity | None:
    """The sweep that is in a folder already; None where there is none of these weights."""
    try:
        kept = Result.read(folder)
    except BadInput:
        return None
    asked = kept.provenance["asked"]
    if any(point.weights not in (None, asked["weights"].get(point.label)) for point in found):
        return None
    edges = (
        Edge(Head(**edge["head"]), Duty(**edge["duty"]), edge["circuit"]) for edge in asked["edges"]
    )
    return Sparsity(**vars(kept), edges=tuple(edges))
