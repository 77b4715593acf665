"""The features of chosen heads: one pass over each contrast's prompts, with the nulls and the baselines beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkscope.analyses.about import made_from
from qkscope.analyses.fit import Fit, fit_of
from qkscope.analyses.sums import Sums, accumulate, sums_file
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import checked_call
from qkscope.maths.subspace import Rank
from qkscope.maths.sums import Center
from qkscope.runs.folder import check_writable
from qkscope.runs.shards import Shard
from qkscope.tasks.task import Task

MOST_REPLICATES = 100_000


@checked_call
def decompose(
    scope: Scope,
    task: Task,
    heads: str | Head | Sequence[str | Head],
    n: int = 1024,
    *,
    contrasts: Sequence[str] | None = None,
    rank: Rank | Mapping[str, Rank] = "energy",
    center: Mapping[str, Center] | None = None,
    space: Space = "post_rope",
    batch_size: int = 32,
    replicates: int = 199,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Fit:
    """Fit the task's contrasts at these heads on ``n`` units each, controls included.

    Parameters
    ----------
    contrasts : names; all of the task's by default.
    rank : how subspaces are cut: the paper's 99% ``energy``, the directions detected against the ``null`` of the
        matrix that the contrast's centring gives, a number, or one of these per contrast. One direction is kept also
        where there is none.
    replicates : of each null; they are pooled over heads, so that 199 do for any number of them.
    center : overrides a contrast's own centring.
    out : folder for the sums; a run that died there is taken up where it stopped.
    """
    start = time.perf_counter()
    if out is not None and not Path(out).is_dir():  # a finished fit may well be read-only
        check_writable(Path(out))
    chosen = [scope.check(head) for head in parse_heads(heads)]
    names = checked_contrasts(task, contrasts)
    _check_options(names, rank, center or {}, scope.d_head)
    check_replicates(replicates)
    about = made_from(scope, task, space)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    sums = collect(
        scope, task, chosen, n, contrasts=names, space=space, batch_size=batch_size, replicates=replicates, seed=seed,
        out=out, progress=progress,
    )  # fmt: skip
    fit = fit_of(sums, task, about, rank=rank, center=center)
    return replace(fit, seed=seed, seconds=time.perf_counter() - start)


def collect(
    scope: Scope,
    task: Task,
    heads: Sequence[Head],
    n: int,
    *,
    contrasts: Sequence[str],
    space: Space = "post_rope",
    batch_size: int = 32,
    replicates: int = 199,
    seed: int = 0,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool | None = None,
) -> dict[str, Sums]:
    """The sums of every contrast, as in `decompose`; of a shard ``(i, n)``, over every n-th batch from the i-th on."""
    about = {**made_from(scope, task, space), "n": n}
    return {
        name: accumulate(
            scope, task, task.contrasts[name], heads, n, space, batch_size, replicates, seed, about,
            None if out is None else sums_file(out, name), shard, progress,
        )
        for name in contrasts
    }  # fmt: skip


def checked_contrasts(task: Task, contrasts: Sequence[str] | None) -> list[str]:
    """The contrasts to fit, all by default; an unknown one is refused before the model runs."""
    if isinstance(contrasts, str):
        raise BadInput(f"contrasts are a list of names, as [{contrasts!r}], but got one name.")
    names = list(task.contrasts) if contrasts is None else list(contrasts)
    for i, name in enumerate(names):
        task.fit(name, 1)
        if name in names[:i]:
            raise BadInput(f"contrast {name!r} is named twice: name each once.")
    if not names:
        raise BadInput(f"no contrast was named: there is {', '.join(task.contrasts)}.")
    return names


def check_replicates(replicates: int) -> None:
    """A null needs some, and no one needs a million of them."""
    if type(replicates) is not int or not 1 <= replicates <= MOST_REPLICATES:
        many = f", and {MOST_REPLICATES:,} at most" if type(replicates) is int and replicates > 0 else ""
        raise BadInput(f"a null needs replicates, but got {replicates!r}: take 199 or more{many}.")


def _check_options(names: list[str], rank: Any, center: Mapping[str, str], d_head: int) -> None:
    ranks = dict(rank) if isinstance(rank, Mapping) else {}
    for what, given in (("rank", ranks), ("center", center)):
        for name in given:
            if name not in names:
                raise BadInput(f"{what} is given for {name!r}, which is not fitted: there is {', '.join(names)}.")
    for value in ranks.values() if ranks else [rank]:
        if value not in ("energy", "null") and (type(value) is not int or not 1 <= value <= d_head):
            raise BadInput(f"rank is 'energy', 'null' or a number from 1 to {d_head}, but got {value!r}.")
    for value in center.values():
        if value not in ("none", "query", "both"):
            raise BadInput(f"center is one of none, query, both, but got {value!r}.")
