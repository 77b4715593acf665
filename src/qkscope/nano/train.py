"""``qkscope train nano``: train a nano model into a folder, and say how well it answers at every checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkscope.devices import check_device
from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.nano.score import CLAIMED
from qkscope.nano.trainer import PRESETS, STATE, NanoRecipe, NanoTrainer
from qkscope.runs.claims import Claim
from qkscope.runs.folder import check_folder, kept_if_stopped, only_writer
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result

_KEPT = (
    r"state\.safetensors|(\d+|\.\d+\.[0-9a-f]{32})/"
    r"(config\.json|model\.safetensors|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json)"
)
"""What a training run keeps besides what it lists: its state and its checkpoints."""


@checked_call
def train_nano(
    out: str | Path,
    *,
    preset: str = "default",
    steps: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    check_every: int | None = None,
    lr: float | None = None,
    show: Callable[[Result], object] = lambda result: None,
    draw: Callable[[Result], Mapping[str, str | bytes]] | None = None,
) -> Result:
    """Train into ``out/STEP``, going on where an earlier run in the same folder was stopped.

    Parameters
    ----------
    preset : ``default`` learns every task; ``smoke`` is too small and too short to, and ends in half a minute.
    steps, check_every, lr : instead of the preset's; a checkpoint is kept at every check.
    show : told the result before it is written.
    draw : gives the page and figures that are written beside the checkpoints; without it nothing is.
    """
    if preset not in PRESETS:
        raise BadInput(f"there is no preset {preset!r}: take {' or '.join(PRESETS)}.")
    if type(seed) is not int or seed < 0:
        raise BadInput(f"the seed should be a whole number of at least 0, but got {seed!r}.")
    changed: dict[str, Any] = {"steps": steps, "check_every": check_every, "lr": lr}
    recipe = replace(PRESETS[preset], **{name: value for name, value in changed.items() if value is not None})
    found = check_device(device)
    out = check_folder(out, "train/nano", state=_KEPT)
    with only_writer(out), kept_if_stopped(out, (out / STATE).exists):
        result = _trained(NanoTrainer(out, recipe, seed, found), recipe, preset, seed, device)
        show(result)
        if draw is not None:
            result.write(out, files=draw(result), state=_KEPT)
    return result


def _trained(trainer: NanoTrainer, recipe: NanoRecipe, preset: str, seed: int, device: str) -> Result:
    start = time.perf_counter()
    curve = trainer.run()
    seconds = time.perf_counter() - start
    final = {row["task"]: row for row in curve if row["step"] == recipe.steps}
    missed = [name for name in CLAIMED if final[name]["accuracy"] < 0.95]
    return Result(
        experiment="train/nano",
        answer=f"After {recipe.steps:,} steps the model answers the first question of {len(CLAIMED) - len(missed)} of "
        f"{len(CLAIMED)} tasks in 95% of prompts or more" + (f" (not {', '.join(missed)})." if missed else "."),
        claims=[
            Claim(
                f"{name}: the likeliest token is right in 95% of test prompts",
                "",
                final[name]["accuracy"],
                final[name]["chance"],
                "ours >= 0.95",
            )
            for name in CLAIMED
        ],
        tables={"accuracy": curve, "parts": [{"all_forms_from": trainer.all_forms_from}]},
        preset=preset,
        seed=seed,
        seconds=seconds,
        provenance=provenance(recipe={**recipe.about(), "steps": recipe.steps}, seed=seed, device=device),
    )


def last_rows(result: Result) -> list[dict[str, Any]]:
    """The table of the last checkpoint, for people."""
    rows = [dict(row) for row in result.tables["accuracy"]]
    return [row for row in rows if row["step"] == rows[-1]["step"]]
