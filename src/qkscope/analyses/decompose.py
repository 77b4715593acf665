"""The features of chosen heads: one pass over the contrasts' prompts, with the nulls and the baselines beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from qkscope.analyses import prompts
from qkscope.analyses.fit import Fit, fit_of, merge_together
from qkscope.analyses.fit_folder import ContrastSums, FitJob, asked_of, checked_contrasts, read_sums, task_file
from qkscope.analyses.neighbours import neighbour_notes
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import Count, Interval, checked_call
from qkscope.maths.moments import Moments
from qkscope.maths.significance import NullKind
from qkscope.maths.subspace import Rank
from qkscope.maths.sums import Center
from qkscope.runs.job import Job
from qkscope.runs.shards import Part, Shard, is_shard, out_of_memory, shard_folder, torchrun_shard
from qkscope.tasks.task import Contrast, Task

MOST_REPLICATES = 100_000
Replicates = Annotated[int, Interval(ge=1, le=MOST_REPLICATES)]


@checked_call
def decompose(
    scope: Scope | Callable[[], Scope],
    task: Task,
    heads: str | Head | Sequence[str | Head],
    n: Count = 256,
    *,
    contrasts: Sequence[str] | None = None,
    rank: Rank | Mapping[str, Rank] = "energy",
    center: Mapping[str, Center] | None = None,
    space: Space = "post_rope",
    batch_size: Count = 32,
    replicates: Replicates = 199,
    seed: int = 0,
    out: str | Path | None = None,
    shard: Shard | Literal["torchrun"] | None = None,
    show: Callable[[Fit], object] = lambda fit: None,
    progress: bool | None = None,
) -> Fit:
    """Fit the task's contrasts at these heads, controls included.

    Parameters
    ----------
    scope : the model, or what loads it once all that can be checked without it is.
    task : whose contrasts are fitted.
    heads : like ``"L18H6,L18H7"``, or a list.
    n : units of each contrast: a prompt, or a prompt and its copy. A prompt that several contrasts label runs once.
    contrasts : names; all of the task's by default.
    rank : how subspaces are cut: the paper's 99% ``energy``, the directions detected against the ``null`` of the
        matrix that the contrast's centring gives, a number, or one of these per contrast. One direction is kept also
        where there is none.
    center : overrides a contrast's own centring: ``none``, ``query`` or ``both``.
    space : ``post_rope`` (the papers'), ``pre_rope`` or ``query_frame``.
    batch_size : prompts that run together.
    replicates : of each null; they are pooled over heads, so that 199 do for any number of them.
    seed : of the nulls.
    out : folder for the sums and the results, which `load` reads; a run that died there is taken up where it stopped,
        and a folder of another job is refused.
    shard : ``(i, n)`` takes every n-th batch from the i-th on and leaves its sums in ``out``; `merge` adds them up when
        all are there. ``"torchrun"`` does both, where torchrun started this process: the first returns the whole fit.
        The fit of a share has no subspaces.
    show : told the fit before it is written, as the disk may be full.
    progress : whether to show a bar; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import Scope, decompose, tasks
    >>> scope = Scope.load("nano:mixed")
    >>> fit = decompose(scope, tasks.binding(5), "L1H0", 32, contrasts=["lexical"], replicates=19, progress=False)
    >>> fit["lexical", "L1H0"].U.shape == (scope.d_head, scope.d_head)
    True
    >>> [(row["head"], row["contrast"]) for row in fit.table()]
    [('L1H0', 'lexical')]
    """
    start = time.perf_counter()
    chosen, names = parse_heads(heads), checked_contrasts(task, contrasts)
    _check_cuts(names, rank, center or {})
    process = torchrun_shard() if shard == "torchrun" else None
    share = process if shard == "torchrun" else shard
    _check_share(share, process, out, rank, center)
    asked = {
        **asked_of(task), "heads": [str(head) for head in chosen], "n": n, "contrasts": names, "space": space,
        "batch_size": batch_size, "replicates": replicates, "seed": seed,
    }  # fmt: skip
    own = asked if share is None else {**asked, "shard": list(share)}
    job = FitJob(out, own if process is None else asked)
    if process is not None and job.is_finished:  # by an earlier run: the first process reads it, the others need not
        if process[0] != 0:
            return Fit(experiment=f"decompose/{task.name}", tables={})
        process = share = None
    if process is not None and out is not None:
        job = FitJob(shard_folder(out, process), own)
    options = prompts.Options(space, batch_size, task.chat, replicates, seed, share or (0, 1), progress)
    units = {name: task.fit(name, n) for name in names}
    passes = [_Pass(task, {name: units[name] for name in some}, options) for some in prompts.that_share(units)]
    scope = scope if isinstance(scope, Scope) else scope()
    chosen = [scope.check(head) for head in chosen]
    _check_ranks(rank, scope.d_head)
    about = prompts.made_from(scope, task, space)
    with job.hold():
        job.of_model(about)
        hashes = {name: prompts.units_hash(own) for name, own in units.items()}
        job.begin(scope, hashes, verb="decompose", **job.asked)
        if job.out is not None and job.is_finished:
            sums = read_sums(job.out, job.asked, task, options.shard, scope.device)
        else:
            made = [one.sums(scope, chosen, {**about, "n": n}, hashes, job) for one in passes]
            sums = {name: one[name] for name in names for one in made if name in one}
        if share is None:
            noted = [*about.get("notes", ()), *neighbour_notes(scope, task, units, chosen, options)]
            about = {**about, "notes": noted} if noted else about
            fit = replace(fit_of(sums, task, about, rank=rank, center=center), seconds=time.perf_counter() - start)
            show(fit)
            job.finish(sums, task_file(asked), fit)
            return replace(fit, kept_in=job.out)
        job.finish(sums, task_file(asked))
    if process is not None and out is not None:
        whole = merge_together(out, process, rank=rank, center=center, show=show)
        if whole is not None:
            return whole
    said = f"Shard {share[0]}/{share[1]} is in {job.out}: merge it with the others when all are done."
    return Fit(experiment=f"decompose/{task.name}", tables={}, answer=said, model=scope.name, sums=sums)


class _Pass:
    """One pass over the prompts of contrasts that share some: its batches, and the sums that they leave."""

    def __init__(self, task: Task, units: prompts.Units, options: prompts.Options) -> None:
        self.units, self.options, self.joints = units, options, prompts.joined(units)
        self.contrasts = {name: task.contrasts[name] for name in units}
        every, (index, count) = prompts.batches_of(prompts.Prompts(self.joints), options.batch_size), options.shard
        if len(every) < count:
            raise BadInput(
                f"{len(self.joints)} examples of {', '.join(units)} in batches of {options.batch_size} cannot be "
                f"shared among {count}: take fewer shards or smaller batches."
            )
        self.batches = every[index::count]

    def sums(
        self, scope: Scope, heads: Sequence[Head], about: Mapping[str, Any], hashes: Mapping[str, str], job: Job
    ) -> dict[str, ContrastSums]:
        """Sums over this shard's batches, saved now and then and taken up from there."""
        options = self.options
        with _room(len(heads), options.replicates):
            sums = {name: self._empty(name, scope, heads, {**about, "examples": hashes[name]}) for name in self.units}
        adds = {name: self._adder(name, sums[name]) for name in sums}

        def add(part: Part[prompts.Batch]) -> dict[str, int]:
            return {name: own(part) for name, own in adds.items()}

        run = prompts.unit_runner(
            scope, prompts.Prompts(self.joints), heads, space=options.space, chat=options.chat, rest=False
        )
        state = {f"{name}/{what}": tensor for name, one in sums.items() for what, tensor in one.tensors().items()}
        cut = job.stream(next(iter(sums)), self.batches, run, options.progress, state, add)
        for name, one in sums.items():
            one.cut = sum(part[name] for part in cut)
        return sums

    def _empty(self, name: str, scope: Scope, heads: Sequence[Head], about: Mapping[str, Any]) -> ContrastSums:
        options = self.options
        moments = Moments(
            heads,
            [name],
            scope.d_head,
            group_size=scope.group_size,
            nulls=_nulls(self.contrasts[name]),
            replicates=options.replicates,
            seed=options.seed,
            device=scope.device,
            about={**about, "batch_size": options.batch_size},
        )
        return ContrastSums(moments, shard=options.shard)

    def _adder(self, name: str, sums: ContrastSums) -> Callable[[Part[prompts.Batch]], int]:
        """What adds a contrast's rows of each batch, whole, to its sums; it gives 1 for one that came in parts."""
        contrast, moments = self.contrasts[name], sums.moments
        unit_of, parts = prompts.null_units(self.units[name], contrast), list[prompts.Rows]()

        def add(part: Part[prompts.Batch]) -> int:
            batch = prompts.rows_of(part.value, self.joints, name)
            if batch is not None:
                q, k, labels, _ = prompts.contrast_rows(batch, contrast)
                parts.append((q, k, labels, unit_of(batch)))
                captured = batch.captured
                sums.cov_q.update(captured.q)
                own = captured.k[:, captured.kv_of_head].transpose(1, 2)  # b k h d
                sums.cov_k.update(own[captured.key_mask])
            if not part.last or not parts:
                return 0
            q, k, labels, numbers = prompts.whole_rows(parts)
            cut = int(len(parts) > 1)
            parts.clear()
            with _room(len(moments.heads), moments.replicates):
                moments.update(q, k, {name: labels}, prompts=numbers)
            return cut

        return add


def _nulls(contrast: Contrast) -> tuple[NullKind, ...]:
    """Which nulls a contrast needs.

    Across a prompt and its copy each difference stands with both signs, so there is nothing but the interaction. Labels
    are dealt out again within a prompt; where words are the unit, their signs are flipped instead.
    """
    if contrast.across:
        return ("interaction",)
    return ("label_permutation" if contrast.unit == "prompt" and not contrast.paired else "sign_flip", "interaction")


@contextmanager
def _room(heads: int, replicates: int) -> Iterator[None]:
    """Say what to do where the sums do not fit into memory: halving a batch would not help, as they do not grow."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise BadInput(
            f"the null sums of {heads} heads with {replicates} replicates do not fit into memory: take fewer heads at "
            "a time, or fewer replicates."
        ) from None


def _check_share(share: Shard | None, process: Shard | None, out: Any, rank: Any, center: Any) -> None:
    if share is None:
        return
    if not is_shard(list(share)):
        raise BadInput(f"a shard is (i, n) with i from 0 to n - 1, but got {share}.")
    if out is None:
        raise BadInput("a shard leaves its sums in a folder, to be merged: name one with out.")
    if process is None and (rank != "energy" or center):
        raise BadInput("a shard has no subspaces yet: say rank and center to merge.")


def _check_cuts(names: Sequence[str], rank: Any, center: Mapping[str, str]) -> None:
    for what, given in (("rank", rank if isinstance(rank, Mapping) else {}), ("center", center)):
        for name in given:
            if name not in names:
                raise BadInput(f"{what} is given for {name!r}, which is not fitted: there is {', '.join(names)}.")


def _check_ranks(rank: Any, d_head: int) -> None:
    for value in rank.values() if isinstance(rank, Mapping) else [rank]:
        if not isinstance(value, str) and not 1 <= value <= d_head:
            raise BadInput(f"rank is 'energy', 'null' or a number from 1 to {d_head}, but got {value!r}.")
