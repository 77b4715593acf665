"""Train many small models at once: each stops when it is done.

There is one stack of parameters and one optimiser. Parameters of m models stand side by side in one
matrix ``θ ∈ R^{m×p}``; a loss function maps it and a batch to m losses that do not touch each
other, so ``∂ Σ_i L_i / ∂θ_i = ∂ L_i / ∂θ_i`` and a single AdamW step, with a learning rate per row,
trains them all as if each were alone. A model whose validation loss has stopped improving leaves
the stack, which makes the steps of the others cheaper; one that diverges leaves it too, and is
named.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.checking import Count, checked_class
from qkscope.errors import BadInput
from qkscope.results.folder import read_tensors, write_tensors

log = logging.getLogger(__name__)

RUNNING, CONVERGED, OUT_OF_STEPS, DIVERGED = range(4)
REASONS = ("running", "converged", "out of steps", "diverged")


class Stack:
    """Named parameters of m models as views into one matrix (m, p): the optimiser sees the matrix,
    the loss the names.

    >>> stack = Stack({"w": torch.ones(3, 2, 4), "b": torch.zeros(3, 2)})
    >>> stack.flat.shape, stack["w"].shape
    (torch.Size([3, 10]), torch.Size([3, 2, 4]))
    """

    def __init__(self, tensors: Mapping[str, Float[Tensor, " m *s"]]) -> None:
        self.flat = torch.cat([tensor.flatten(1) for tensor in tensors.values()], dim=1)
        self._shapes = {name: tensor.shape[1:] for name, tensor in tensors.items()}

    def like(self, flat: Float[Tensor, "m p"]) -> Stack:
        """The same names over another matrix."""
        other = object.__new__(Stack)
        other.flat = flat
        other._shapes = self._shapes
        return other

    def __getitem__(self, name: str) -> Tensor:
        return self.named()[name]

    def named(self) -> dict[str, Tensor]:
        """All parameters by name, as views."""
        pieces = self.flat.split([shape.numel() for shape in self._shapes.values()], dim=1)
        return {
            name: piece.unflatten(1, shape) if len(shape) != 1 else piece
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }


class TrainingTask(ABC):
    """What is trained: m models that read the same stream of batches.

    A task gives its starting parameters, draws batches, and maps parameters and a batch to one loss
    per model. It may override `gradients` with hand-written ones; the default differentiates
    `loss`.
    """

    names: Sequence[str]  # one per model, for people
    device: torch.device
    _buffers: dict[tuple[str, tuple[int, ...]], Tensor]

    @abstractmethod
    def start(self) -> Stack:
        """Starting parameters, the same on every device."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Any:
        """A fresh batch, the same one for all models."""

    @abstractmethod
    def loss(self, params: Mapping[str, Tensor], batch: Any) -> Float[Tensor, " m"]:
        """One loss per model; a model's loss depends on its own parameters only."""

    @abstractmethod
    def validation_loss(self, params: Mapping[str, Tensor]) -> Float[Tensor, " m"]:
        """One loss per model on data that does not change."""

    @abstractmethod
    def select(self, keep: Int[Tensor, " k"]) -> TrainingTask:
        """The same task for some of its models."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What identifies the task, as JSON would have it: checkpoints of another are refused."""

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Memory that the steps use again and again."""
        key = (name, shape)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, device=self.device)
        return self._buffers[key]

    def gradients(self, params: Stack, batch: Any, out: Stack) -> Float[Tensor, " m"]:
        """Losses; their gradients go into ``out``."""
        leaf = params.flat.detach().requires_grad_()
        losses = self.loss(params.like(leaf).named(), batch)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        out.flat.copy_(gradient)
        return losses.detach()


Schedule = Literal["constant", "cosine", "quarter cosine"]
"""Of the learning rate: it falls to 0 by half a period of a cosine, or by a quarter."""


@checked_class
@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW and early stopping on the validation loss. Learning rates belong to the
    models.
    """

    steps: Count = 50_000
    validate_every: Count = 200
    patience: Count = 5
    min_delta: float = 1e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Schedule = "constant"
    diverged_above: float = 10.0  # times the loss before training

    def table(self) -> Float[Tensor, "steps 3"]:
        """Per step: learning-rate factor, the same over Adam's first correction, and the root of
        the second.
        """
        step = torch.arange(1, self.steps + 1, dtype=torch.float64)
        factor = torch.ones_like(step)
        if self.schedule == "cosine":
            factor = (1 + torch.cos(math.pi * (step - 1) / self.steps)) / 2
        if self.schedule == "quarter cosine":
            factor = torch.cos(math.pi * (step - 1) / (2 * self.steps))
        first = 1 - self.betas[0] ** step
        second = 1 - self.betas[1] ** step
        return torch.stack([factor, factor / first, second.sqrt()], dim=1).float()

    def about(self) -> dict[str, Any]:
        """As JSON would have it."""
        return {**vars(self), "betas": list(self.betas)}


@dataclass
class Outcome:
    """Where every model ended: parameters, why and when it stopped, its validation losses along the
    way.
    """

    names: list[str]
    params: dict[str, Tensor]
    stopped_at: list[int]
    reasons: list[str]
    initial_loss: list[float]
    final_loss: list[float]
    curve_steps: list[int] = field(default_factory=list)
    curves: Float[Tensor, "checks m"] | None = None  # NaN after a model has left
    history: dict[str, Tensor] | None = (
        None  # name: (checks, m, …), where the trainer was asked to keep it
    )

    @property
    def diverged(self) -> list[str]:
        """Names of the models whose loss diverged."""
        ended = zip(self.names, self.reasons, strict=True)
        return [name for name, reason in ended if reason == REASONS[DIVERGED]]


class Trainer:
    """One task's training run, resumable at every validation.

    Parameters
    ----------
    task : what is trained.
    lr : one learning rate, or one per model.
    seed : of the stream of batches.
    checkpoint : file to write to, and to resume from where it exists.
    compact_below : drop finished models from the stack when at most this share of it still runs (1:
        at once).
    keep_history : keep the parameters of every check, as `Outcome.history`.
    """

    def __init__(
        self,
        task: TrainingTask,
        lr: float | Sequence[float],
        recipe: Recipe | None = None,
        *,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        checkpoint_seconds: float = 30.0,
        compact_below: float = 1.0,
        keep_history: bool = False,
    ) -> None:
        self.task = task
        self.recipe = recipe or Recipe()
        self.seed = seed
        self.names = list(task.names)
        m = len(self.names)
        rates = [float(lr)] * m if isinstance(lr, int | float) else [float(rate) for rate in lr]
        usable = all(0 < rate < math.inf for rate in rates)  # so nan is refused too
        if m == 0 or len(rates) != m or not usable:
            raise BadInput(
                f"training {m} models needs {m} positive, finite learning rates, but got "
                f"{rates[:5]}."
            )
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.checkpoint_seconds = checkpoint_seconds
        self.compact_below = compact_below
        self.lr = torch.tensor(rates, dtype=torch.float32)

        self.step = 0
        self.final = task.start()
        self.status = torch.zeros(m, dtype=torch.int64)
        self.stopped_at = torch.zeros(m, dtype=torch.int64)
        self.best = torch.full((m,), torch.inf, dtype=torch.float64)
        self.stale = torch.zeros(m, dtype=torch.int64)
        self.initial = torch.full((m,), torch.nan, dtype=torch.float64)
        self.last = torch.full((m,), torch.nan, dtype=torch.float64)
        self.curve_steps: list[int] = []
        self.curves: list[Tensor] = []
        self.keep_history = keep_history
        self.history: list[Tensor] = []
        self.generator = torch.Generator(device=task.device).manual_seed(seed)
        self._load(torch.arange(m), self.final.flat, None)
        self._saved = time.monotonic()
        if self.checkpoint is not None and self.checkpoint.exists():
            self._resume()

    # ------------------------------------------------------------------ the step

    def _load(self, models: Tensor, flat: Tensor, moments: tuple[Tensor, Tensor] | None) -> None:
        """Put these models on the stack."""
        device = self.task.device
        self.models = models
        whole = len(models) == len(self.names)
        self.active_task = self.task if whole else self.task.select(models)
        self.params = self.final.like(flat.to(device).clone())
        self.grads = self.final.like(torch.zeros_like(self.params.flat))
        zeros = torch.zeros_like(self.params.flat)
        first, second = moments or (zeros, zeros)
        self.first = first.to(device).clone()
        self.second = second.to(device).clone()
        self.scratch = torch.empty_like(self.params.flat)
        self.rates = (self.lr[models] * (self.status[models] == RUNNING)).to(device)[:, None]
        self.table = self.recipe.table().to(device)
        self.counter = torch.tensor([self.step], device=device)

    def train_step(self) -> None:
        """One batch, one AdamW step; nothing in it waits for the device, so that a graph can record
        it.
        """
        batch = self.active_task.draw(self.generator)
        self.active_task.gradients(self.params, batch, self.grads)
        beta1, beta2 = self.recipe.betas
        factor, corrected, root = self.table.index_select(0, self.counter)[0].unbind()
        gradient = self.grads.flat
        self.first.lerp_(gradient, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        torch.sqrt(self.second, out=self.scratch).div_(root).add_(self.recipe.eps)
        torch.div(self.first, self.scratch, out=self.scratch)
        self.params.flat.mul_(1 - self.rates * (factor * self.recipe.weight_decay))
        self.params.flat.sub_(self.scratch.mul_(self.rates * corrected))
        self.counter.add_(1)

    # ------------------------------------------------------------------ between steps

    @property
    def running(self) -> int:
        """How many models still train."""
        return int((self.status == RUNNING).sum())

    @property
    def done(self) -> bool:
        """Whether every model has stopped."""
        return self.running == 0

    def until_check(self) -> int:
        """Steps to the next validation."""
        every = self.recipe.validate_every
        return min(every - self.step % every, self.recipe.steps - self.step)

    def begin(self) -> None:
        """The validation loss before the first step, against which divergence is judged."""
        if self.step == 0 and bool(self.initial.isnan().any()):
            losses = self.active_task.validation_loss(self.params.named()).double().cpu()
            self.initial[self.models] = losses
            self._record(losses)

    def check(self, steps_taken: int) -> bool:
        """Validate, stop what is done, and say whether the stack has been made anew."""
        self.step += steps_taken
        losses = self.active_task.validation_loss(self.params.named()).double().cpu()
        rows = self.models
        alive = self.status[rows] == RUNNING
        self.last[rows[alive]] = losses[alive]
        self._record(losses.masked_fill(~alive, torch.nan))
        improved = losses < self.best[rows] - self.recipe.min_delta
        self.best[rows] = torch.where(alive & improved, losses, self.best[rows])
        self.stale[rows] = torch.where(improved, 0, self.stale[rows] + 1)
        verdict = torch.full_like(rows, RUNNING)
        verdict[self.stale[rows] >= self.recipe.patience] = CONVERGED
        if self.step >= self.recipe.steps:
            verdict[verdict == RUNNING] = OUT_OF_STEPS
        verdict[~(losses <= self.recipe.diverged_above * self.initial[rows])] = DIVERGED
        leaving = alive & (verdict != RUNNING)
        rebuilt = bool(leaving.any()) and self._leave(leaving, verdict)
        due = time.monotonic() - self._saved >= self.checkpoint_seconds
        if self.checkpoint and (self.done or due):
            self.save()
        return rebuilt

    def _leave(self, leaving: Tensor, verdict: Tensor) -> bool:
        """Keep the weights of models that stop here; say whether the stack has been made anew."""
        gone = self.models[leaving]
        kept_on = self.final.flat.device
        stopped = self.params.flat[leaving.to(self.task.device)]
        self.final.flat[gone.to(kept_on)] = stopped.to(kept_on)
        self.status[gone] = verdict[leaving]
        self.stopped_at[gone] = self.step
        for model in gone[self.status[gone] == DIVERGED].tolist():
            log.warning(
                f"{self.names[model]} diverged at step {self.step} (validation loss "
                f"{float(self.last[model]):.3g}, {float(self.initial[model]):.3g} before "
                "training): it is left out, the others go on; lower its learning rate of "
                f"{float(self.lr[model]):.3g}."
            )
        keep = (self.status[self.models] == RUNNING).nonzero()[:, 0]
        if 0 < len(keep) <= self.compact_below * len(self.models):
            where = keep.to(self.task.device)
            moments = (self.first[where], self.second[where])
            self._load(self.models[keep], self.params.flat[where], moments)
            return True
        running = self.status[self.models] == RUNNING
        self.rates.copy_((self.lr[self.models] * running)[:, None])
        return False

    def _record(self, losses: Tensor) -> None:
        row = torch.full((len(self.names),), torch.nan, dtype=torch.float64)
        row[self.models] = losses
        self.curves.append(row)
        self.curve_steps.append(self.step)
        if self.keep_history:
            self.history.append(self._everything())

    def run(
        self, told: Callable[[], None] = lambda: None, stopped: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Train to the end, one step after the other; ``told`` at every check, and asked there
        whether to stop.
        """
        self.begin()
        while not self.done and not stopped():
            steps = self.until_check()
            for _ in range(steps):
                self.train_step()
            self.check(steps)
            told()
        return self.result()

    def result(self) -> Outcome:
        """Where every model stands."""
        final = self.final.like(self._everything()).named()
        return Outcome(
            names=self.names,
            params={name: value.clone() for name, value in final.items()},
            stopped_at=self.stopped_at.tolist(),
            reasons=[REASONS[code] for code in self.status.tolist()],
            initial_loss=self.initial.tolist(),
            final_loss=self.last.tolist(),
            curve_steps=list(self.curve_steps),
            curves=torch.stack(self.curves) if self.curves else None,
            history=self._kept_history(),
        )

    def _kept_history(self) -> dict[str, Tensor] | None:
        """Parameters at every check, where they were kept."""
        if not self.history:
            return None
        checks = len(self.history)
        flat = torch.stack(self.history).flatten(0, 1)
        named = self.final.like(flat).named()
        return {name: value.unflatten(0, (checks, -1)) for name, value in named.items()}

    def _everything(self) -> Tensor:
        """Parameters of all models, where they stopped or where they are."""
        everything = self.final.flat.clone()
        going = self.status[self.models] == RUNNING
        running = self.params.flat[going.to(self.task.device)]
        everything[self.models[going]] = running.to(everything.device)
        return everything

    # ------------------------------------------------------------------ files

    def _about(self) -> dict[str, Any]:
        rates = [round(rate, 12) for rate in self.lr.tolist()]
        return {
            "task": self.task.about(),
            "recipe": self.recipe.about(),
            "seed": self.seed,
            "learning rates": rates,
            "device": self.task.device.type,
        }

    def save(self) -> None:
        """Write everything the run needs to go on as if it had not stopped."""
        assert self.checkpoint is not None
        tensors = {
            "final": self.final.flat,
            "models": self.models,
            "params": self.params.flat,
            "first": self.first,
            "second": self.second,
            "status": self.status,
            "stopped_at": self.stopped_at,
            "best": self.best,
            "stale": self.stale,
            "initial": self.initial,
            "last": self.last,
            "generator": self.generator.get_state(),
            "curve_steps": torch.tensor(self.curve_steps),
            "curves": torch.stack(self.curves),
            **({"history": torch.stack(self.history)} if self.keep_history else {}),
        }
        manifest = {"about": self._about(), "step": self.step}
        write_tensors(self.checkpoint, "training", tensors, manifest)
        self._saved = time.monotonic()

    def _resume(self) -> None:
        assert self.checkpoint is not None
        tensors, manifest = read_tensors(self.checkpoint, "training", self._about())
        self.step = int(manifest["step"])
        for name in ("status", "stopped_at", "best", "stale", "initial", "last"):
            getattr(self, name).copy_(tensors[name])
        self.final.flat.copy_(tensors["final"])
        self._load(tensors["models"], tensors["params"], (tensors["first"], tensors["second"]))
        self.generator.set_state(tensors["generator"])
        self.curve_steps = tensors["curve_steps"].tolist()
        self.curves = list(tensors["curves"])
        self.history = list(tensors["history"]) if self.keep_history else []
