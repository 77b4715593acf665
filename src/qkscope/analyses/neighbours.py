"""Whether the prompts of a file stand in an order that matters: neighbours alike are not independent of each other.

A null flips or deals what each unit adds to ΔC as if units were independent. What they add, ``X_i``, is compared with
what the next one in the file adds, ``r = Σ ⟨X_i − X̄, X_{i+1} − X̄⟩ / Σ ‖X_i − X̄‖²``, beside the same in random orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qkscope.analyses import prompts
from qkscope.capture.scope import Scope
from qkscope.heads import Head
from qkscope.maths.significance import lag_one
from qkscope.runs.work import stream
from qkscope.tasks.task import Contrast, Task, Unit

ALIKE = 0.01
"""The p-value from which on a file's neighbours are said to be alike."""
_HEADS, _UNITS, _LEAST = 8, 512, 12  # looked at, at most, and under how many units nothing is said


def neighbour_notes(
    scope: Scope, task: Task, units: Mapping[str, Sequence[Unit]], heads: Sequence[Head], options: prompts.Options
) -> list[str]:
    """A sentence for each contrast of a file whose neighbouring prompts add alike; tasks that draw have no order."""
    if "file" not in task.asked:
        return []
    said = []
    for name, own in units.items():
        found = _test(scope, task.contrasts[name], list(own[:_UNITS]), heads[:_HEADS], options)
        if found is not None and found[1] <= ALIKE:
            said.append(
                f"Neighbouring prompts of {task.asked['file']} are alike in {name} (correlation {found[0]:.2f} with the"
                f" next one, p = {found[1]:.2g}), so they are not independent, and the p-values are too small: give"
                ' prompts of one text the same "group" (`cluster` of an Example).'
            )
    return said


def _test(
    scope: Scope, contrast: Contrast, units: list[Unit], heads: Sequence[Head], options: prompts.Options
) -> tuple[float, float] | None:
    if len(units) < _LEAST:
        return None
    run = prompts.unit_runner(scope, units, heads, space=options.space, chat=options.chat, rest=False)
    found = []
    for batch in stream(prompts.batches_of(units, options.batch_size), run, options.progress):
        q, k, labels, unit = prompts.contrast_rows(batch, contrast)
        keys = k[:, batch.captured.kv_of_head].double()
        signed = [torch.einsum("bk,bhkd->bhd", (labels == sign).double(), keys) for sign in (1, -1)]
        counts = torch.stack([(labels == sign).sum() for sign in (1, -1)])
        found.append([x.cpu() for x in (q.double(), *signed, unit, counts)])
    q, plus, minus, unit = (torch.cat(column) for column in list(zip(*found, strict=True))[:4])
    pairs = torch.stack([row[4] for row in found]).sum(0)
    return lag_one(q, plus / pairs[0] - minus / pairs[1], unit, seed=options.seed)
