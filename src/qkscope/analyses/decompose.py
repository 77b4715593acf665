"""The features of chosen heads: one pass over the contrasts' prompts, with the nulls and the baselines beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from qkscope.analyses import prompts
from qkscope.analyses.fit import Fit, fit_of
from qkscope.analyses.fit_folder import ContrastSums, asked_of, check_job, checked_contrasts, is_finished, read_sums
from qkscope.analyses.neighbours import neighbour_notes
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import Count, Interval, Seed
from qkscope.maths.moments import Moments
from qkscope.maths.significance import NullKind
from qkscope.maths.subspace import Rank
from qkscope.maths.sums import Center
from qkscope.runs.work import BatchPart, Stage, current_work, out_of_memory, verb
from qkscope.tasks.task import Contrast, Task

MOST_REPLICATES = 100_000
Replicates = Annotated[int, Interval(ge=1, le=MOST_REPLICATES)]


@verb("decompose")
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
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
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
    part : ``(i, n)``: make every n-th piece of the work into ``out``, which n processes share; the last of them adds
        all up, and the others return a fit without subspaces. Under torchrun each process is a part by itself.
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
    chosen, names = parse_heads(heads), checked_contrasts(task, contrasts)
    _check_cuts(names, rank, center or {})
    asked: Any = {
        **asked_of(task), "heads": [str(head) for head in chosen], "n": n, "contrasts": names, "space": space,
        "batch_size": batch_size, "replicates": replicates, "seed": seed,
    }  # fmt: skip
    check_job(out, asked)
    options = prompts.Options(space, batch_size, task.chat, replicates, seed, progress)
    units = {name: task.fit(name, n) for name in names}
    passes = [_Pass(task, {name: units[name] for name in some}, options) for some in prompts.that_share(units)]
    scope = scope if isinstance(scope, Scope) else scope()
    chosen = [scope.check(head) for head in chosen]
    _check_ranks(rank, scope.d_head)
    about = prompts.made_from(scope, task, space)
    check_job(out, {**about, **asked})
    hashes = {name: prompts.units_hash(own) for name, own in units.items()}
    work = current_work().begin(scope, hashes, verb="decompose", **asked)
    if out is not None and is_finished(out, names):
        sums = read_sums(Path(out), {**about, **asked}, task, scope.device)
    else:
        with _room(len(chosen), replicates):
            empty = [one.empty(scope, chosen, {**about, "n": n}, hashes) for one in passes]
        stages = [one.stage(scope, chosen, own) for one, own in zip(passes, empty, strict=True)]
        cut = [part for values in work.run(stages, progress, last=True) for part in values]
        every = {name: own for some in empty for name, own in some.items()}
        sums = {name: every[name] for name in names}
        for name, own in sums.items():
            own.cut = sum(part.get(name, 0) for part in cut)
    noted = [*about.get("notes", ()), *neighbour_notes(scope, task, units, chosen, options)]
    about = {**about, "notes": noted} if noted else about
    fit = fit_of(sums, task, about, rank=rank, center=center)
    return fit if out is None else replace(fit, kept_in=Path(out))


class _Pass:
    """One pass over the prompts of contrasts that share some: its batches, and the sums that they leave."""

    def __init__(self, task: Task, units: prompts.Units, options: prompts.Options) -> None:
        self.units, self.options, self.joints = units, options, prompts.joined(units)
        self.contrasts = {name: task.contrasts[name] for name in units}
        self.prompts = [joint.prompts for joint in self.joints]

    def stage(self, scope: Scope, heads: Sequence[Head], sums: Mapping[str, ContrastSums]) -> Stage:
        """The work of this pass: its batches, added to these sums."""
        adds = {name: self._adder(name, own) for name, own in sums.items()}

        def add(part: BatchPart[prompts.Batch]) -> dict[str, int]:
            return {name: own(part) for name, own in adds.items()}

        run = prompts.unit_runner(
            scope, self.prompts, heads, space=self.options.space, chat=self.options.chat, rest=False
        )
        state = {f"{name}/{what}": tensor for name, one in sums.items() for what, tensor in one.tensors().items()}
        return Stage(next(iter(sums)), prompts.batches_of(self.prompts, self.options.batch_size), run, state, add)

    def empty(
        self, scope: Scope, heads: Sequence[Head], about: Mapping[str, Any], hashes: Mapping[str, str]
    ) -> dict[str, ContrastSums]:
        """The sums of each contrast, before the first batch."""
        return {name: self._empty(name, scope, heads, {**about, "examples": hashes[name]}) for name in self.units}

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
        return ContrastSums(moments)

    def _adder(self, name: str, sums: ContrastSums) -> Callable[[BatchPart[prompts.Batch]], int]:
        """What adds a contrast's rows of each batch, whole, to its sums; it gives 1 for one that came in parts."""
        contrast, moments = self.contrasts[name], sums.moments
        unit_of, parts = prompts.null_units(self.units[name], contrast), list[prompts.Rows]()

        def add(part: BatchPart[prompts.Batch]) -> int:
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


def _check_cuts(names: Sequence[str], rank: Any, center: Mapping[str, str]) -> None:
    for what, given in (("rank", rank if isinstance(rank, Mapping) else {}), ("center", center)):
        for name in given:
            if name not in names:
                raise BadInput(f"{what} is given for {name!r}, which is not fitted: there is {', '.join(names)}.")


def _check_ranks(rank: Any, d_head: int) -> None:
    for value in rank.values() if isinstance(rank, Mapping) else [rank]:
        if not isinstance(value, str) and not 1 <= value <= d_head:
            raise BadInput(f"rank is 'energy', 'null' or a number from 1 to {d_head}, but got {value!r}.")
