"""The self-check of a model: facts that must hold on short prompts and beyond every length that its
config names.

Every layer is called (the probe refuses otherwise); the output under the tap is the output without
it; ``softmax([cap(scale · q·k) + mask, sink])`` is the attention the model itself reports when run
eagerly; a prompt padded in a batch is the prompt alone, on either side and in every space, and
stays so in the query's frame when its positions are shifted; and writing another key into a head
changes what comes out, while writing the same key does not. Whether the tokens behind a change may
run alone is tried, too (`prefix`): where they may not, whole prompts run.

One batch on both sides of a comparison would hide a model that counts positions its own way. So
batches as `Scope.encode` makes them stand against each prompt alone, as bare ids, run eagerly and
counted by the model itself.

What begins at a length (a window, a chunk, sparse attention, another rotation) is not seen in short
prompts. Where the length is short the model itself is given longer prompts, else a small copy of
its class is, in which every such length is short (`small`). A model whose files are known is
checked once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor

from qkscope import BadInput, Example
from qkscope.model.files import cache_dir, read_json, write_json
from qkscope.model.inputs import PaddingSide, context_limit, forward, short_ids, short_inputs
from qkscope.model.load import quiet
from qkscope.model.patch import Edit
from qkscope.model.prefix import agree, ways_of
from qkscope.model.probe import refusal
from qkscope.model.spaces import SPACES, Space, rows_rotate_alone, swapped
from qkscope.model.tap import Call, evaluated, tap
from qkscope.model.tiny_copy import loud_model, named_lengths, small_config

if TYPE_CHECKING:
    from qkscope.model.scope import Scope

log = logging.getLogger(__name__)

_VERSION = 6
_SHIFT = 3
# tokens of a prompt, and so many beyond a length
_SHORT = 9
_BEYOND = 33
_LONGEST = 64  # a longer length is made short in a small copy


@dataclass(frozen=True)
class Check:
    """Outcome of a self-check that passed.

    Attributes
    ----------
    attention_error : float
        Largest difference of attention made of q, k, scale, cap, mask and sink from the model's own
        eager attention, all heads, of prompts alone and in padded batches.
    sides : tuple of str
        Where prompts can be padded, as `Facts.sides`.
    length : int
        Tokens of the longest prompt that was checked.
    frame : str
        Why the query's frame is not defined at this length; empty where it is.
    alone : dict
        By kind of question (`prefix.Ways.kind`), whether tokens behind a change may run alone.
    """

    attention_error: float
    sides: tuple[PaddingSide, ...]
    length: int
    frame: str = ""
    alone: dict[str, bool] = field(default_factory=dict)


class _Pass(NamedTuple):
    """What one forward gave: its attention calls, its output, and where each example's tokens stand
    in the batch.
    """

    calls: dict[int, Call]
    output: Tensor
    columns: list[Tensor]


class _Alone(NamedTuple):
    """A prompt as bare ids: its pass, and by layer the attention that the model itself reports."""

    run: _Pass
    reported: dict[int, Tensor]


class _Difference(NamedTuple):
    """The error of attention, and the first thing that is not as it should be; empty if nothing."""

    error: float
    what: str


class _Trial:
    """One model, run several times and compared with itself."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.model = scope.model
        self.facts = scope.facts
        self.half = self.model.dtype in (torch.float16, torch.bfloat16)
        self.layers = sorted(set(self.facts.layer_of.values()))
        # in half precision rounding grows from layer to layer, so there the first two have to tell
        self.telling = self.layers[: 2 if self.half else None]
        self.tolerance = 0.0

    def run(self, length: int, strict: bool) -> Check:
        """All facts on prompts of so many tokens, or on an image."""
        prompts = self._prompts(length)
        batches = [self.scope.encode([prompt]).inputs for prompt in prompts]
        if not batches:
            batches = [short_inputs(self.model)]
        own = [self._alone(inputs) for inputs in batches]
        first = own[0]
        plain = first.run.output
        self._set_tolerance(first.run)
        error = self._check_reported(own)
        allowed = (1e-2 if self.half else 1e-4) * max(1.0, float(plain.abs().max()))
        tapped = self._watch(batches[0])
        self._check_tapped(tapped, first, allowed)
        wrong, worst = self._check_padded(prompts, own)
        frame = self._frame_apart(batches[0], first.run)
        sides = tuple(side for side in self.facts.sides if side not in wrong)
        if strict and frame:
            raise refusal(self.model, frame)
        if strict and wrong and not sides:
            raise refusal(self.model, next(iter(wrong.values())))
        self._write(batches[0], tapped.calls[self.layers[0]], plain, allowed)
        ways = self._alone_ways(batches[0], tapped.calls)
        return Check(max(error, worst), sides, length, frame, ways)

    def _set_tolerance(self, alone: _Pass) -> None:
        """Set the tolerance on attention: the model rounds its logits to its dtype, the check is
        float32.
        """
        if not bool(alone.output.isfinite().all()):
            kind = self.model.config.model_type
            raise BadInput(
                f"{kind} gives NaN or infinite logits: load it with dtype='float32', or check its weights."
            )
        largest = 0.0
        for call in alone.calls.values():
            logits = call.logits(list(range(call.q.shape[1])))
            largest = max(largest, float(logits[logits.isfinite()].abs().max()))
        rounding = torch.finfo(self.model.dtype).eps * largest
        self.tolerance = (1e-2 if self.half else 1e-3) + rounding

    def _check_reported(self, own: Sequence[_Alone]) -> float:
        """Refuse a model whose own attention is not ours; the largest error of prompts alone."""
        error = max(_error(alone.run, 0, alone.reported, alone.run) for alone in own)
        if not error <= self.tolerance:
            why = "softmax(scale q·k + mask) of what its attention call is given is not the attention that it reports"
            raise refusal(self.model, f"{why} (off by {error:.2g})")
        return error

    def _check_tapped(self, tapped: _Pass, alone: _Alone, allowed: float) -> None:
        """Refuse a model that gives something else under the tap."""
        changed = _largest(tapped.output - alone.run.output)
        if not changed <= allowed:
            raise refusal(self.model, f"its output changes by {changed:.2g} under the tap")
        what = self._difference(tapped, 0, alone).what
        if what:
            raise refusal(self.model, f"its {what} are not those of the same prompt run eagerly")

    def _check_padded(
        self, prompts: Sequence[Example], own: Sequence[_Alone]
    ) -> tuple[dict[PaddingSide, str], float]:
        """Why prompts cannot be padded on a side, and the largest error on sides where they can."""
        wrong = dict[PaddingSide, str]()
        error = 0.0
        if not prompts:
            return wrong, error
        for side in self.facts.sides:
            batch = self._watch(self.scope.encode(prompts, padding_side=side).inputs)
            for i, alone in enumerate(own):
                found = self._difference(batch, i, alone)
                if found.what:
                    beside = f"padded on the {side} beside a longer prompt"
                    why = f"its {found.what} are not those of the same prompt alone"
                    wrong[side] = (
                        f"{beside}, {why}, so it counts positions or hides padding in a way of its own"
                    )
                else:
                    error = max(error, found.error)
        return wrong, error

    def _frame_apart(self, inputs: dict[str, Tensor], alone: _Pass) -> str:
        """Why the query's frame is not defined; empty where only offsets count there."""
        rotates = any(layer.offset is not None for layer in self.facts.layers)
        if not self.facts.takes_positions or not rotates:
            return ""
        shifted = inputs | {"position_ids": inputs["position_ids"] + _SHIFT}
        what = self._vectors_apart(self._watch(shifted), 0, alone, ("query_frame",))
        if not what:
            return ""
        why = f"with every position {_SHIFT} further on, its {what} change"
        return f"{why}, although only offsets should count there"

    def _alone_ways(self, inputs: dict[str, Tensor], calls: dict[int, Call]) -> dict[str, bool]:
        """Whether tokens behind a change may run alone, read at the last token and in the middle."""
        if "input_ids" not in inputs or not self.facts.takes_positions:
            return {}
        ids = inputs["input_ids"][0]
        ends = [len(ids) - 1, len(ids) // 2]
        kinds = [ways_of(self.scope).kind(len(ids), end) for end in ends]
        return dict(zip(kinds, agree(self.scope, ids, calls, ends), strict=True))

    def _prompts(self, length: int) -> list[Example]:
        """Two prompts of different lengths; none for a model of images."""
        if self.model.main_input_name != "input_ids":
            return []
        start = (
            () if self.scope.encoder.first is None else (self.scope.encoder.first,)
        )  # or it would be missed
        rows = map(Tensor.tolist, short_ids(self.model, (length, length - 4)))
        return [Example(ids=(*start, *ids[len(start) :])) for ids in rows]

    def _output(self, inputs: dict[str, Tensor]) -> Tensor:
        """Logits, or what the model gives in their place: for each token, or for the sequence."""
        output = forward(self.model, inputs)
        return (output.logits if getattr(output, "logits", None) is not None else output[0]).float()

    def _watch(self, inputs: dict[str, Tensor]) -> _Pass:
        """A batch as a scope runs it."""
        calls: dict[int, Call] = {}
        with self._kept(calls):
            output = self._output(inputs)
        return _Pass(calls, output, _columns(inputs, calls))

    def _alone(self, inputs: dict[str, Tensor]) -> _Alone:
        """A prompt as bare ids, whose positions nobody but the model counts: its eager attention,
        as it reports it.

        Where its own code was watched, that is what its own softmax gave. The output is that
        without a tap.
        """
        bare = inputs
        if "input_ids" in inputs:
            bare = {"input_ids": inputs["input_ids"]}
        calls: dict[int, Call] = {}
        reported = self._reported(bare, calls)
        if len(reported) != len(self.layers):
            raise refusal(
                self.model, "it does not report its attention, so the tap cannot be checked on it"
            )
        with rows_rotate_alone(self.facts.anatomy.by_length):  # as under the tap
            plain = self._output(bare)
        there = {i: weights.float() for i, weights in zip(self.layers, reported, strict=True)}
        return _Alone(_Pass(calls, plain, _columns(bare, calls)), there)

    def _reported(self, bare: dict[str, Tensor], calls: dict[int, Call]) -> list[Tensor]:
        """What a model reports as its attention, layer by layer, run eagerly; calls are kept."""
        own = self.facts.anatomy.own
        eager = list[tuple[Any, str, Any]]()
        if not own:
            for config in self.facts.anatomy.configs.values():
                eager.append((config, "_attn_implementation_internal", "eager"))
        asked = {} if own else {"output_attentions": True}
        with swapped(*eager), self._kept(calls):
            output = forward(self.model.base_model, bare | asked)
        if own:
            return [calls[i].weights() for i in self.layers]  # type: ignore[misc]
        attentions = getattr(output, "attentions", None) or ()
        reported = [layer for layer in attentions if layer is not None]
        if len(reported) == self.scope.n_layers:  # some report what their linear layers did, too
            return [reported[layer] for layer in self.layers]
        return reported

    def _kept(self, calls: dict[int, Call]) -> AbstractContextManager[list[int]]:
        """Keep the attention calls of a run, by layer."""

        def keep(call: Call) -> None:
            calls[call.layer] = call

        return tap(self.model, keep, layers=self.facts.layer_of, rotary=True)

    def _difference(self, batch: _Pass, row: int, alone: _Alone) -> _Difference:
        """How a prompt in a batch differs from the prompt alone."""
        what = self._vectors_apart(batch, row, alone.run, SPACES)
        if what:
            return _Difference(0.0, what)
        # in half precision the model rounds its logits and we do not: there it is our own attention
        wanted = {i: alone.reported[i] for i in self.telling}
        if self.half:
            wanted = {i: _attention(alone.run.calls[i]) for i in self.telling}
        error = _error(batch, row, wanted, alone.run)
        if not error <= self.tolerance:
            return _Difference(error, f"attention (off by {error:.2g})")
        ours = batch.output[row]
        theirs = alone.run.output[0]
        if ours.shape != theirs.shape:
            ours = ours[batch.columns[row].to(ours.device)]
        # in half precision only what is far off counts: the last layer has gathered all rounding
        off = _apart(ours, theirs)
        if off <= (0.5 if self.half else 1e-3):
            return _Difference(error, "")
        return _Difference(error, f"logits (off by {off:.2g} of the largest)")

    def _vectors_apart(self, batch: _Pass, row: int, alone: _Pass, spaces: Sequence[Space]) -> str:
        """The first space and layer in which queries or keys of a prompt differ from those of the
        prompt alone.
        """
        allowed = 5e-2 if self.half else 1e-3
        for layer in self.telling:
            refused = self.facts.layers[layer].refusals
            for space in spaces:
                if space in refused:
                    continue
                ours = self._vectors(batch.calls[layer], space, row, batch.columns[row])
                theirs = self._vectors(alone.calls[layer], space, 0, alone.columns[0])
                for what, x, y in zip(("queries", "keys"), ours, theirs, strict=True):
                    off = _apart(x, y)
                    if not off <= allowed:
                        return f"{space} {what} in layer {layer} (off by {off:.2g} of the largest)"
        return ""

    def _vectors(self, call: Call, space: Space, row: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of one example in a space; in the query's frame keys as each query sees
        them.
        """
        q = call.q
        k = call.k
        offset = self.facts.layers[call.layer].offset
        at = at.to(q.device)
        turns = call.rotary if offset is not None else None
        if space == "pre_rope" and turns is not None:
            q, k = turns.unrotated(q, k, offset or 0)
        q = q[row][:, at].float()
        k = k[row][:, at].float()
        if space == "query_frame" and turns is not None:
            every = k.expand(len(at), -1, -1, -1)  # for each query
            return turns.turn_back(
                q.transpose(0, 1), every, torch.full_like(at, row), at, offset or 0
            )
        return q, k

    def _write(self, inputs: dict[str, Tensor], call: Call, plain: Tensor, allowed: float) -> None:
        """Refuse a model in which writing a key that is there changes the output, or another key
        does not.
        """
        head = self.scope.heads()[0]
        kind = self.model.config.model_type
        last = torch.tensor([call.q.shape[2] - 1], device=call.q.device)
        # the key that has least attention is raised: one that has all of it, or none, may not move
        # the other way
        mask = call.mask_rows(torch.zeros_like(last), last)[0, 0]
        row = call.attention([head.index])[0, 0, -1]
        least = row.masked_fill(mask == -torch.inf, torch.inf).argmin().view(1, 1)
        q = call.q[0, head.index, -1].float()
        same = call.k[0, 0, least].float()
        # along the query, so that the logit surely moves; 50 times its length, so that it moves far
        far = 50 * torch.nn.functional.normalize(q, dim=-1) * same.norm()
        moves = []
        for value in (same, far.view_as(same)):
            with self.scope.patched([Edit.keys(head, least, value)]):
                moves.append(_largest(self._output(inputs)[:1] - plain[:1]))
        # half precision rounds a recomputed head differently, and a router may then choose another
        # expert
        if not self.half and moves[0] > allowed:
            raise BadInput(
                f"{kind} cannot be patched: writing a key that is already there changes the output."
            )
        if moves[1] == 0.0:
            raise BadInput(f"{kind} cannot be patched: writing another key has no effect.")


def _columns(inputs: dict[str, Tensor], calls: dict[int, Call]) -> list[Tensor]:
    """The columns of each sequence's real tokens; of an image, patches and class token."""
    first = next(iter(calls.values()))
    mask = inputs.get(
        "attention_mask", torch.ones(len(first.q), first.q.shape[2], device=first.q.device)
    )
    return [row.nonzero()[:, 0] for row in mask]


def _attention(call: Call) -> Tensor:
    return call.attention(list(range(call.q.shape[1])))


def _error(batch: _Pass, row: int, wanted: dict[int, Tensor], alone: _Pass) -> float:
    """Largest error of attention between the tokens of one sequence; there may be further keys, or
    a sink reported.
    """
    errors = []
    for layer, weights in wanted.items():
        at = batch.columns[row].to(weights.device)
        there = alone.columns[0].to(weights.device)
        ours = _attention(batch.calls[layer])[row].to(weights.device)
        theirs = weights[0][:, there][:, :, there]
        errors.append((ours[:, at][:, :, at] - theirs).flatten().cpu())
    return _largest(torch.cat(errors))


def _largest(errors: Tensor) -> float:
    """The largest error; infinite where one is no number, which compares with nothing."""
    return float(errors.abs().max().nan_to_num(torch.inf))


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest."""
    off = (ours - theirs.to(ours.device)).abs().max()
    return float(off / theirs.abs().max().clamp_min(1e-12))


# ---------------------------------------------------------------- a model at all its lengths


@torch.no_grad()
def check_at(scope: Scope, length: int, strict: bool = True) -> Check:
    """Check the tap on prompts of so many tokens, or refuse the model with the fact that failed.

    One side on which prompts cannot be padded is left out of the outcome. Where the check is not
    strict, so are both, and the query's frame.
    """
    with evaluated(list(scope.model.modules())):
        return _Trial(scope).run(length, strict)


def check_once(scope: Scope) -> None:
    """Check a model whose files are known only where they never passed with these versions and
    settings.
    """
    model = scope.model
    setting = [
        _VERSION,
        transformers.__version__,
        torch.__version__,
        scope.device.type,
        model.dtype,
    ]
    key = " ".join(map(str, [*setting, model.config._attn_implementation]))
    place = cache_dir("checks", f"{scope.files_hash}.json")
    passed = (scope.files_hash and read_json(place)) or {}
    if key in passed:
        _trust(scope, Check(**passed[key]))
        return
    check = check_model(scope)
    if scope.files_hash is not None:
        write_json(place, {**passed, key: asdict(check)})


def check_model(scope: Scope) -> Check:
    """Check the tap on a model, also beyond the lengths that its config names, or refuse it with
    the fact that failed.

    A padding side that is wrong beyond a length is taken from `Scope.facts`, and so is the query's
    frame.
    """
    checks = [check_at(scope, _SHORT)]
    if scope.model.main_input_name != "input_ids":
        return checks[0]
    if (length := _beyond(scope)) > _SHORT:
        checks.append(check_at(scope, length, strict=False))
    alone = dict[str, bool]()
    for check in checks:
        alone |= check.alone
    far = sorted(
        name for name, length in named_lengths(scope.model.config).items() if length > _LONGEST
    )
    if far and (small := _small_check(scope, ", ".join(far))) is not None:
        checks.append(small)
    sides = tuple(side for side in checks[0].sides if all(side in check.sides for check in checks))
    worst = max(check.attention_error for check in checks)
    length = max(check.length for check in checks)
    check = Check(worst, sides, length, max(check.frame for check in checks), alone)
    _trust(scope, check)
    return check


def _beyond(scope: Scope) -> int:
    """A number of tokens beyond every short length, as far as a prompt may go."""
    limit = context_limit(scope.model, scope.facts.first_position) or _LONGEST + _BEYOND
    named = named_lengths(scope.model.config).values()
    short = [length for length in named if length <= _LONGEST]
    if not short:
        return 0
    return min(max(short) + _BEYOND, limit)


def _trust(scope: Scope, check: Check) -> None:
    """Keep only those padding sides, spaces and short ways of a model that passed."""
    ways_of(scope).alone.update(check.alone)
    layers = scope.facts.layers
    if check.frame:
        reason = f"beyond a length that its config names, {check.frame}"
        why: dict[Space, str] = {
            "pre_rope": reason,
            "query_frame": reason,
        }  # so a trace reads its own code instead
        layers = tuple(
            x if x.offset is None else x._replace(refusals=why | x.refusals) for x in layers
        )
    scope.facts = scope.facts._replace(sides=tuple(check.sides), layers=layers)


def _small_check(scope: Scope, names: str) -> Check | None:
    """The check of a small copy in which the lengths that a config names are short; None where none
    can be made.
    """
    model = scope.model
    try:
        with quiet():  # ratios in small configs are of no concern to anybody
            build = partial(
                type(model)._from_config, attn_implementation=model.config._attn_implementation
            )
            copy = type(scope)(loud_model(build, small_config(model.config)))
            return check_at(copy, _beyond(copy), strict=False)
    except BadInput as failure:
        why = str(failure).partition("cannot be looked into: ")[2] or str(failure)
        raise refusal(
            model, f"beyond its {names} (seen in a small copy of it) {why.rstrip('.')}"
        ) from failure
    except Exception as failure:  # whatever an unusual config makes of itself when it is small
        why = f"no small copy of it could be made ({failure})"
        log.warning("%s was not checked beyond its %s: %s.", scope.name, names, why)
        return None
