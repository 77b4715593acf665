"""``train_nano``: a small Llama on the tasks' own texts, with every checkpoint kept and scored.

It has RoPE and grouped keys. Binding has a long plateau when only answers are trained. Two things
carry over it: half of the first batches are repeated words, which make induction heads, and each
list is asked about several times. When binding in lists is solved, the other forms join. Step t's
batch is drawn from a generator seeded by (seed, t), so a run that was stopped goes on bit for bit
with no generator to restore.

A checkpoint is a folder as transformers writes it, its weights rounded to float16; accuracies are
those of the rounded weights.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from qkscope.checking import AtLeast, Count, Natural, checked_call, checked_class
from qkscope.errors import BadInput, check_device
from qkscope.model.files import tokenizer_hash
from qkscope.results.claims import Claim
from qkscope.results.folder import (
    add_to_run,
    check_folder,
    kept_if_stopped,
    read_tensors,
    tensor_bytes,
    writing,
)
from qkscope.results.progress import counting, doing
from qkscope.results.result import Result, provenance, write_result
from qkscope.seeds import derived_seed
from qkscope_papers.nano.score import CLAIMED, Exam, claimed_task
from qkscope_papers.nano.text import (
    BOS,
    CONTEXT,
    PAD,
    TextRows,
    Texts,
    nano_tokenizer,
    stacked,
    vocabulary,
    word_ids,
)

STATE = "state.safetensors"
_KIND = "nano training"
Shares = tuple[tuple[str, int], ...]


@checked_class
@dataclass(frozen=True)
class NanoRecipe:
    """Size and training of a nano model.

    Parameters
    ----------
    shares_first, shares_then : weights of the kinds of text in a batch, before and after binding in
        lists is solved.
    solved : accuracy on lists at which the second part begins.
    last : share of the steps at the end in which the learning rate falls to a tenth.
    """

    layers: Count = 3
    width: Count = 96
    heads: Count = 4
    kv_heads: Count = 2
    mlp: Count = 192
    init: float = 0.05
    lr: float = 1e-3
    warmup: Count = 50
    weight_decay: float = 0.01
    rows: Annotated[int, AtLeast(20)] = 96  # a batch mixes six kinds of text
    steps: Count = 3000
    check_every: Count = 25
    prompts: Count = 128
    solved: float = 0.95
    last: float = 0.25
    shares_first: Shares = (("repeats", 8), ("binding/list", 8), ("filter", 2), ("ioi", 2))
    shares_then: Shares = (
        ("repeats", 3),
        ("binding/list", 3),
        ("binding/sentence", 4),
        ("binding/question", 4),
        ("filter", 3),
        ("ioi", 3),
    )

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise BadInput(f"the learning rate should be positive and finite, but got {self.lr}.")

    def about(self) -> dict[str, Any]:
        """As JSON would have it; without the number of steps, so that a run can be made longer."""
        fields = asdict(self)
        del fields["steps"]
        return json.loads(json.dumps(fields))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a rise, a plateau, a fall to a tenth."""
        left = (self.steps - step) / max(self.steps * self.last, 1)
        return self.lr * min(1.0, (step + 1) / self.warmup, max(left, 0.1))


PRESETS: dict[str, NanoRecipe] = {
    "default": NanoRecipe(),
    "smoke": NanoRecipe(
        layers=2, width=64, mlp=128, rows=40, steps=200, check_every=50, prompts=64
    ),
}


@checked_call
def train_nano(
    out: str | Path,
    *,
    preset: Literal["default", "smoke"] = "default",
    steps: Count | None = None,
    seed: Natural = 0,
    device: str = "cpu",
    check_every: Count | None = None,
    lr: float | None = None,
    show: Callable[[Result], object] = lambda result: None,
) -> Result:
    """Train into ``out/STEP``, going on where an earlier run in the same folder was stopped.

    Parameters
    ----------
    out : folder of the run.
    preset : ``default`` learns every task; ``smoke`` is too small and too short to, and ends in
        half a minute.
    steps, check_every, lr : instead of the preset's; a checkpoint is kept at every check.
    seed : of the first weights and of every batch.
    device : where to train, as ``cpu`` or ``cuda``.
    show : told the result before it is written.
    """
    asked: dict[str, Any] = {"steps": steps, "check_every": check_every, "lr": lr}
    changed = {name: value for name, value in asked.items() if value is not None}
    recipe = replace(PRESETS[preset], **changed)
    found = check_device(device)
    out = check_folder(out, "train/nano")
    with kept_if_stopped(out, (out / STATE).exists):
        trainer = NanoTrainer(out, recipe, seed, found)
        start = time.perf_counter()
        curve = trainer.run()
        seconds = time.perf_counter() - start
        final = {row["task"]: row for row in curve if row["step"] == recipe.steps}
        about = {**recipe.about(), "steps": recipe.steps}
        result = Result(
            experiment="train/nano",
            answer=_answer(recipe.steps, final),
            claims=[_accuracy_claim(name, row) for name, row in final.items()],
            tables={"accuracy": curve, "parts": [{"all_forms_from": trainer.all_forms_from}]},
            preset=preset,
            seed=seed,
            seconds=seconds,
            provenance=provenance(recipe=about, seed=seed, device=device),
        )
        show(result)
        # matplotlib: a bad call need not wait for it
        from qkscope_papers.nano.drawing import draw_accuracy

        write_result(result, out, draw_accuracy(result), keep=rf"{STATE}|\d+/.*")
    return result


def _answer(steps: int, final: Mapping[str, Mapping[str, Any]]) -> str:
    """How many of the claimed tasks are solved, and which are not."""
    missed = [name for name in CLAIMED if final[name]["accuracy"] < 0.95]
    but = f" (not {', '.join(missed)})" if missed else ""
    return (
        f"After {steps:,} steps the model answers the first question of "
        f"{len(CLAIMED) - len(missed)} of {len(CLAIMED)} tasks in 95% of prompts or more{but}."
    )


def _accuracy_claim(name: str, row: Mapping[str, Any]) -> Claim:
    return Claim(
        f"{name}: the likeliest token is right in 95% of test prompts",
        paper="",
        ours=row["accuracy"],
        control=row["chance"],
        rule="ours >= 0.95",
    )


class NanoTrainer:
    """One training run in a folder: goes on from where it was stopped.

    Parameters
    ----------
    out : ``out/STEP`` are the checkpoints, ``out/state.safetensors`` is what a stopped run goes on
        from.
    """

    def __init__(self, out: Path, recipe: NanoRecipe, seed: int, device: torch.device) -> None:
        self.out = out
        self.recipe = recipe
        self.seed = seed
        self.device = device
        self.tokenizer = nano_tokenizer()
        self.texts = Texts(self.tokenizer, device)
        self.model = _new_model(recipe, seed).to(device)
        self.named = dict(self.model.named_parameters())
        matrices = [p for p in self.named.values() if p.dim() > 1]
        gains = [p for p in self.named.values() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98), fused=True)
        self.step = 0
        self.all_forms_from = -1
        self.curve = list[dict[str, Any]]()
        if (out / STATE).exists():
            self._resume()

    @cached_property
    def exams(self) -> dict[str, Exam]:
        """An exam for each claimed task."""
        prompts = self.recipe.prompts
        return {
            name: Exam.of(claimed_task(name), self.tokenizer, prompts, self.device)
            for name in CLAIMED
        }

    def run(self) -> list[dict[str, Any]]:
        """Train to the end; a row per checkpoint and task comes back."""
        if self.step == 0 and not self.curve:
            self._check(None)
        losses: list[Tensor] = []
        with doing("training"), counting(self.recipe.steps - self.step, "steps") as advance:
            while self.step < self.recipe.steps:
                losses.append(self._train_step())
                if self.step % self.recipe.check_every == 0 or self.step == self.recipe.steps:
                    self._check(float(sum(losses)) / len(losses))
                    losses.clear()
                advance(1)
        return self.curve

    # ------------------------------------------------------------------ the step

    def _draw(self, step: int) -> list[TextRows]:
        """The batch of a step, one group of rows per kind of text."""
        seed = derived_seed(self.seed, 2, step)
        draw = torch.Generator(device=self.device).manual_seed(seed)
        sizes = torch.Generator().manual_seed(seed)
        entities = int(torch.randint(2, 11, (), generator=sizes))
        length = int(torch.randint(4, 25, (), generator=sizes))
        titled = bool(torch.randint(0, 2, (), generator=sizes))
        list_form = ("list", "bullets", "question")[step % 3]
        shares = self.recipe.shares_then if self.all_forms_from >= 0 else self.recipe.shares_first
        total = sum(share for _, share in shares)
        kinds: dict[str, Callable[[int, str], TextRows]] = {
            "repeats": lambda n, form: self.texts.repeats(n, length, titled, draw),
            "binding": lambda n, form: self.texts.binding(n, form, entities, draw),
            "filter": lambda n, form: self.texts.filter(n, list_form, draw),
            "ioi": lambda n, form: self.texts.ioi(n, draw),
        }
        groups = []
        for name, share in shares:
            kind, _, form = name.partition("/")
            groups.append(kinds[kind](max(self.recipe.rows * share // total, 1), form))
        return groups

    def _train_step(self) -> Tensor:
        """One batch, one AdamW step; each kind of text counts by its share of the rows."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        groups = self._draw(self.step)
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

    def _loss(self, groups: list[TextRows], rows: int) -> Tensor:
        """Mean over rows of the mean loss of a row's asked tokens."""
        ids, asked = stacked(groups)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = asked[:, 1:]
        weight = (wanted / wanted.sum(dim=1, keepdim=True))[wanted]
        logits = self.model.lm_head(hidden[wanted])
        right = ids[:, 1:][wanted]
        losses = torch.nn.functional.cross_entropy(logits, right, reduction="none")
        return (losses * weight).sum() / rows

    # ------------------------------------------------------------------ between steps

    def _check(self, loss: float | None) -> None:
        """Score the rounded weights, keep them as a checkpoint, decide which texts come next."""
        if loss is not None and not math.isfinite(loss):
            raise BadInput(
                f"the loss is {loss} at step {self.step}: lower the learning rate of "
                f"{self.recipe.lr:g}."
            )
        rounded = copy.deepcopy(self.model).half().float()
        scores = {name: exam.score(rounded) for name, exam in self.exams.items()}
        for name, row in scores.items():
            self.curve.append({"step": self.step, "task": name, **row, "loss": loss})
        if self.all_forms_from < 0 and scores["binding/list"]["accuracy"] >= self.recipe.solved:
            self.all_forms_from = self.step
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named.items():
            parts = {"weight": parameter, **self.optimizer.state.get(parameter, {})}
            for part, value in parts.items():
                tensors[f"{part}/{name}"] = value
        about = {"step": self.step, "all_forms_from": self.all_forms_from, "curve": self.curve}
        files = _model_files(rounded, self.tokenizer)
        checkpoint = {f"{self.step}/{name}": data for name, data in files.items()}
        state = tensor_bytes(_KIND, tensors, {"about": self._about(), **about})
        add_to_run(self.out, {**checkpoint, STATE: state}, "train/nano")

    def _about(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.about(),
            "seed": self.seed,
            "vocabulary": tokenizer_hash(self.tokenizer),
        }

    def _resume(self) -> None:
        tensors, manifest = read_tensors(self.out / STATE, _KIND, self._about())
        self.step = manifest["step"]
        self.curve = manifest["curve"]
        self.all_forms_from = manifest["all_forms_from"]
        asked = self.recipe.steps
        if self.step > asked:
            raise BadInput(
                f"{self.out} has been trained for {self.step} steps already, more than the {asked} "
                "asked for: name another folder."
            )
        for key, value in tensors.items():
            part, _, name = key.partition("/")
            if part == "weight":
                self.named[name].data.copy_(value)
            else:
                self.optimizer.state[self.named[name]][part] = value.to(self.device)


def _new_model(recipe: NanoRecipe, seed: int) -> Any:
    """An untrained model on the CPU; the same on every machine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = word_ids()
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=recipe.width,
        intermediate_size=recipe.mlp,
        dtype="float32",
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=recipe.init,
        bos_token_id=ids[BOS],
        eos_token_id=None,
        pad_token_id=ids[PAD],
    )
    model = LlamaForCausalLM(config)
    draw = torch.Generator().manual_seed(derived_seed(seed, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # gains of norms stay 1
                parameter.normal_(0.0, recipe.init, generator=draw)
    return model


def _model_files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """The files of a model folder: weights in float16, to be computed with in float32."""
    model.config.architectures = [type(model).__name__]
    with writing(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    weights = {}
    for name, value in model.named_parameters():
        weights[name] = value.detach().half().cpu().contiguous()
    return {**files, "model.safetensors": save(weights, {"format": "pt"})}
