"""Nano models: small Llamas (RoPE, grouped keys) trained on the tasks' own texts, with every checkpoint kept.

Binding has a long plateau when only answers are trained. Two things carry over it: half of the first batches are
repeated words, which make induction heads, and each list is asked about several times. When binding in lists is
solved, the other forms join. Step t's batch is drawn from a generator seeded by (seed, t), so a run that was stopped
goes on bit for bit with no generator to restore.

A checkpoint is a folder as transformers writes it, its weights rounded to float16; accuracies are those of the
rounded weights.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qkscope.capture.cache import tokenizer_hash
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.nano.score import Exam, exams
from qkscope.nano.text import Rows, Texts, stacked
from qkscope.nano.words import BOS, CONTEXT, PAD, nano_tokenizer, vocabulary, word_ids
from qkscope.runs.store import read_tensors, write_tensors

log = logging.getLogger(__name__)

STATE = "state.safetensors"
_KIND = "nano training"


@dataclass(frozen=True)
class NanoRecipe:
    """Size and training of a nano model.

    Parameters
    ----------
    shares_first, shares_then : weights of the kinds of text in a batch, before and after binding in lists is solved.
    solved : accuracy on lists at which the second part begins.
    last : share of the steps at the end in which the learning rate falls to a tenth.
    """

    layers: int = 3
    width: int = 96
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 192
    init: float = 0.05
    lr: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.01
    rows: int = 96
    steps: int = 3000
    check_every: int = 25
    prompts: int = 128
    solved: float = 0.95
    last: float = 0.25
    shares_first: tuple[tuple[str, int], ...] = (("repeats", 8), ("binding/list", 8), ("filter", 2), ("ioi", 2))
    shares_then: tuple[tuple[str, int], ...] = (
        ("repeats", 3), ("binding/list", 3), ("binding/sentence", 4), ("binding/question", 4), ("filter", 3),
        ("ioi", 3),
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "mlp", "rows", "steps", "check_every", "prompts"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise BadInput(f"{name} should be a whole number of at least 1, but got {getattr(self, name)!r}.")
        if self.heads % self.kv_heads or self.width % (2 * self.heads):
            raise BadInput(
                f"{self.heads} heads should be a multiple of {self.kv_heads} key heads, and the width "
                f"{self.width} of twice the heads (rotations pair dimensions)."
            )
        if not 0 < self.lr < math.inf:
            raise BadInput(f"the learning rate should be positive and finite, but got {self.lr}.")
        if self.rows < 20:
            raise BadInput(f"a batch mixes six kinds of text and needs 20 rows or more, but got {self.rows}.")

    def about(self) -> dict[str, Any]:
        """As JSON would have it; without the number of steps, so that a run can be made longer."""
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if name != "steps"}))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a rise, a plateau, a fall to a tenth."""
        left = (self.steps - step) / max(self.steps * self.last, 1)
        return self.lr * min(1.0, (step + 1) / self.warmup, max(left, 0.1))


PRESETS: dict[str, NanoRecipe] = {
    "default": NanoRecipe(),
    "smoke": NanoRecipe(layers=2, width=64, mlp=128, rows=40, steps=200, check_every=50, prompts=64),
}


def new_model(recipe: NanoRecipe, seed: int) -> Any:
    """An untrained model on the CPU; the same on every machine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = word_ids()
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=recipe.width,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=recipe.init,
        bos_token_id=ids[BOS],
        eos_token_id=None,
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    draw = torch.Generator().manual_seed(derived_seed(seed, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # gains of norms stay 1
                parameter.normal_(0.0, recipe.init, generator=draw)
    return model


class NanoTrainer:
    """One training run in a folder: goes on from where it was stopped.

    Parameters
    ----------
    out : ``out/STEP`` are the checkpoints, ``out/state.safetensors`` is what a stopped run goes on from.
    """

    def __init__(self, out: Path, recipe: NanoRecipe, seed: int, device: torch.device) -> None:
        self.out, self.recipe, self.seed, self.device = out, recipe, seed, device
        self.tokenizer = nano_tokenizer()
        self.texts = Texts(self.tokenizer, device)
        self.model = new_model(recipe, seed).to(device)
        self.named = dict(self.model.named_parameters())
        matrices = [p for p in self.named.values() if p.dim() > 1]
        gains = [p for p in self.named.values() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=recipe.lr,
            betas=(0.9, 0.98),
            fused=True,
        )
        self.step, self.all_forms_from, self.curve = 0, -1, []  # type: int, int, list[dict[str, Any]]
        self._exams: Mapping[str, Exam] | None = None
        if (out / STATE).exists():
            self._resume()

    # ------------------------------------------------------------------ the step

    def draw(self, step: int) -> list[Rows]:
        """The batch of a step, one group of rows per kind of text."""
        seed = derived_seed(self.seed, 2, step)
        draw = torch.Generator(device=self.device).manual_seed(seed)
        sizes = torch.Generator().manual_seed(seed)
        entities, length, titled = (
            int(torch.randint(low, high, (), generator=sizes)) for low, high in ((2, 11), (4, 25), (0, 2))
        )
        shares = self.recipe.shares_then if self.all_forms_from >= 0 else self.recipe.shares_first
        total = sum(share for _, share in shares)
        groups = []
        for name, share in shares:
            n = max(self.recipe.rows * share // total, 1)
            kind, _, form = name.partition("/")
            if kind == "repeats":
                groups.append(self.texts.repeats(n, length, bool(titled), draw))
            elif kind == "binding":
                groups.append(self.texts.binding(n, form, entities, draw))
            elif kind == "filter":
                forms = ("list", "bullets", "question")
                groups.append(self.texts.filter(n, forms[step % 3], draw))
            else:
                groups.append(self.texts.ioi(n, draw))
        return groups

    def train_step(self) -> Tensor:
        """One batch, one AdamW step; each kind of text counts by its share of the rows."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        groups = self.draw(self.step)
        rows = sum(len(group.ids) for group in groups)
        # padding costs time on a CPU, calls cost time on a GPU
        batches = [groups] if self.device.type == "cuda" else [[group] for group in groups]
        total = torch.zeros((), device=self.device)
        self.optimizer.zero_grad()
        for batch in batches:
            loss = self._loss(batch, rows)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return total

    def _loss(self, groups: list[Rows], rows: int) -> Tensor:
        """Mean over rows of the mean loss of a row's asked tokens."""
        ids, asked = stacked(groups)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = asked[:, 1:]
        weight = (wanted / wanted.sum(dim=1, keepdim=True))[wanted]
        logits = self.model.lm_head(hidden[wanted])
        return (torch.nn.functional.cross_entropy(logits, ids[:, 1:][wanted], reduction="none") * weight).sum() / rows

    def run(self, tell: Callable[[str], None] = log.info) -> list[dict[str, Any]]:
        """Train to the end; a row per checkpoint and task comes back."""
        if self.step == 0 and not self.curve:
            self.check(float("nan"), tell)
        loss = torch.zeros((), device=self.device)
        since = 0
        while self.step < self.recipe.steps:
            loss += self.train_step()
            since += 1
            if self.step % self.recipe.check_every == 0 or self.step == self.recipe.steps:
                self.check(float(loss) / since, tell)
                loss.zero_()
                since = 0
        return self.curve

    # ------------------------------------------------------------------ between steps

    def check(self, loss: float, tell: Callable[[str], None]) -> None:
        """Score the rounded weights, keep them as a checkpoint, and decide which texts come next."""
        if not math.isfinite(loss) and self.step > 0:
            raise BadInput(f"the loss is {loss} at step {self.step}: lower the learning rate of {self.recipe.lr:g}.")
        if self._exams is None:
            self._exams = exams(self.tokenizer, self.recipe.prompts, self.device)
        rounded = copy.deepcopy(self.model).half().float()
        scores = {name: exam.score(rounded) for name, exam in self._exams.items()}
        kept = [row for row in self.curve if row["step"] < self.step]
        shown = None if math.isnan(loss) else loss
        self.curve = kept + [{"step": self.step, "task": name, **row, "loss": shown} for name, row in scores.items()]
        save_checkpoint(rounded, self.tokenizer, self.out / str(self.step))
        if self.all_forms_from < 0 and scores["binding/list"]["accuracy"] >= self.recipe.solved:
            self.all_forms_from = self.step
        self._save()
        said = "" if shown is None else f"loss {loss:.3f}; "
        tell(f"step {self.step}: {said}" + ", ".join(f"{k} {v['accuracy']:.2f}" for k, v in scores.items()))

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named.items():
            tensors[f"weight/{name}"] = parameter
            for part, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{part}/{name}"] = value
        manifest = {"about": self._about(), "step": self.step, "all_forms_from": self.all_forms_from,
                    "curve": self.curve}  # fmt: skip
        write_tensors(self.out / STATE, _KIND, tensors, manifest)

    def _about(self) -> dict[str, Any]:
        return {"recipe": self.recipe.about(), "seed": self.seed, "vocabulary": tokenizer_hash(self.tokenizer)}

    def _resume(self) -> None:
        tensors, manifest = read_tensors(self.out / STATE, _KIND, self._about())
        self.step, self.curve = manifest["step"], manifest["curve"]
        self.all_forms_from = manifest["all_forms_from"]
        if self.step > self.recipe.steps:
            raise BadInput(
                f"{self.out} has been trained for {self.step} steps already, more than the "
                f"{self.recipe.steps} asked for: name another folder."
            )
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(tensors[f"weight/{name}"])
                state = {key.partition("/")[0]: value for key, value in tensors.items() if key.endswith(f"/{name}")}
                state.pop("weight")
                if state:
                    self.optimizer.state[parameter] = {part: value.to(self.device) for part, value in state.items()}


def save_checkpoint(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model folder, whole or not at all: weights in float16, to be computed with in float32."""
    fresh = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        fresh.mkdir(parents=True)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        weights = {name: value.detach().half().cpu().contiguous() for name, value in model.named_parameters()}
        save_file(weights, fresh / "model.safetensors", {"format": "pt"})
        (fresh / "model.safetensors").chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror}): choose another folder.") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
