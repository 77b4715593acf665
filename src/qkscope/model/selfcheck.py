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
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

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
        batches = [self.scope.encode([prompt]).inputs for prompt in prompts] or [
            short_inputs(self.model)
        ]
        alone, reported = zip(*map(self._alone, batches), strict=True)
        plain = alone[0].output
        if not bool(plain.isfinite().all()):
            kind = self.model.config.model_type
            raise BadInput(
                f"{kind} gives NaN or infinite logits: load it with dtype='float32', or check its weights."
            )
        # tolerance on attention: the model rounds its logits to its dtype, the check is float32
        every = [call.logits(list(range(call.q.shape[1]))) for call in alone[0].calls.values()]
        logits = torch.cat([logits.flatten().cpu() for logits in every])
        eps = torch.finfo(self.model.dtype).eps * float(logits[logits.isfinite()].abs().max())
        self.tolerance = (1e-2 if self.half else 1e-3) + eps
        error = max(
            _error(run, 0, weights, run) for run, weights in zip(alone, reported, strict=True)
        )
        if not error <= self.tolerance:
            why = "softmax(scale q·k + mask) of what its attention call is given is not the attention that it reports"
            raise refusal(self.model, f"{why} (off by {error:.2g})")
        tapped = self._watch(batches[0])
        allowed = (1e-2 if self.half else 1e-4) * max(1.0, float(plain.abs().max()))
        if not (changed := _largest(tapped.output - plain)) <= allowed:
            raise refusal(self.model, f"its output changes by {changed:.2g} under the tap")
        if what := self._difference(tapped, 0, alone[0], reported[0])[1]:
            raise refusal(self.model, f"its {what} are not those of the same prompt run eagerly")
        wrong = dict[PaddingSide, str]()
        for side in self.facts.sides if prompts else ():
            batch = self._watch(self.scope.encode(prompts, padding_side=side).inputs)
            for i in range(len(prompts)):
                padded, what = self._difference(batch, i, alone[i], reported[i])
                error = error if what else max(error, padded)
                if what:
                    why = f"padded on the {side} beside a longer prompt, its {what} are not those of the same prompt"
                    wrong[side] = (
                        f"{why} alone, so it counts positions or hides padding in a way of its own"
                    )
        frame = ""
        if self.facts.takes_positions and any(
            layer.offset is not None for layer in self.facts.layers
        ):
            shifted = self._watch(
                batches[0] | {"position_ids": batches[0]["position_ids"] + _SHIFT}
            )
            if what := self._vectors_apart(shifted, 0, alone[0], ("query_frame",)):
                why = f"with every position {_SHIFT} further on, its {what} change"
                frame = f"{why}, although only offsets should count there"
        sides = tuple(side for side in self.facts.sides if side not in wrong)
        if strict and (frame or (wrong and not sides)):
            raise refusal(self.model, frame or next(iter(wrong.values())))
        self._write(batches[0], tapped.calls[self.layers[0]], plain, allowed)
        return Check(error, sides, length, frame, self._alone_ways(batches[0], tapped.calls))

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
        with tap(
            self.model,
            lambda call: calls.update({call.layer: call}),
            layers=self.facts.layer_of,
            rotary=True,
        ):
            output = self._output(inputs)
        return _Pass(calls, output, _columns(inputs, calls))

    def _alone(self, inputs: dict[str, Tensor]) -> tuple[_Pass, dict[int, Tensor]]:
        """A prompt as bare ids, whose positions nobody but the model counts: its eager attention,
        as it reports it.

        Where its own code was watched, that is what its own softmax gave. The output is that
        without a tap.
        """
        bare = {"input_ids": inputs["input_ids"]} if "input_ids" in inputs else inputs
        calls: dict[int, Call] = {}
        own = self.facts.anatomy.own
        configs = self.facts.anatomy.configs.values()
        eager = (
            []
            if own
            else [(config, "_attn_implementation_internal", "eager") for config in configs]
        )
        asked = {} if own else {"output_attentions": True}
        visit = tap(
            self.model,
            lambda call: calls.update({call.layer: call}),
            layers=self.facts.layer_of,
            rotary=True,
        )
        with swapped(*eager), visit:
            attentions = getattr(forward(self.model.base_model, bare | asked), "attentions", None)
        reported = [layer for layer in attentions or () if layer is not None]
        if own:
            reported = [calls[i].weights() for i in self.layers]  # type: ignore[misc]
        elif len(reported) == self.scope.n_layers:  # some report what their linear layers did, too
            reported = [reported[layer] for layer in self.layers]
        if len(reported) != len(self.layers):
            raise refusal(
                self.model, "it does not report its attention, so the tap cannot be checked on it"
            )
        with rows_rotate_alone(self.facts.anatomy.by_length):  # as under the tap
            plain = self._output(bare)
        there = {i: weights.float() for i, weights in zip(self.layers, reported, strict=True)}
        return _Pass(calls, plain, _columns(bare, calls)), there

    def _difference(
        self, batch: _Pass, row: int, alone: _Pass, reported: dict[int, Tensor]
    ) -> tuple[float, str]:
        """The error of a prompt's attention in a batch, and the first thing that is not as in the
        prompt alone.
        """
        if what := self._vectors_apart(batch, row, alone, SPACES):
            return 0.0, what
        # in half precision the model rounds its logits and we do not: there it is our own attention
        wanted = {i: _attention(alone.calls[i]) if self.half else reported[i] for i in self.telling}
        if not (error := _error(batch, row, wanted, alone)) <= self.tolerance:
            return error, f"attention (off by {error:.2g})"
        # in half precision only what is far off counts: the last layer has gathered the rounding of
        # all
        ours = batch.output[row]
        theirs = alone.output[0]
        off = _apart(
            ours if ours.shape == theirs.shape else ours[batch.columns[row].to(ours.device)], theirs
        )
        return error, "" if off <= (
            0.5 if self.half else 1e-3
        ) else f"logits (off by {off:.2g} of the largest)"

    def _vectors_apart(self, batch: _Pass, row: int, alone: _Pass, spaces: Sequence[Space]) -> str:
        """The first space and layer in which queries or keys of a prompt differ from those of the
        prompt alone.
        """
        for layer in self.telling:
            for space in spaces:
                if space not in self.facts.layers[layer].refusals:
                    ours = self._vectors(batch.calls[layer], space, row, batch.columns[row])
                    theirs = self._vectors(alone.calls[layer], space, 0, alone.columns[0])
                    for what, x, y in zip(("queries", "keys"), ours, theirs, strict=True):
                        if not (off := _apart(x, y)) <= (5e-2 if self.half else 1e-3):
                            return (
                                f"{space} {what} in layer {layer} (off by {off:.2g} of the largest)"
                            )
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
        hidden = call.mask_rows(torch.zeros_like(last), last)[0, 0] == -torch.inf
        least = (
            call.attention([head.index])[0, 0, -1]
            .masked_fill(hidden, torch.inf)
            .argmin()
            .view(1, 1)
        )
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
        errors.append((ours[:, at][:, :, at] - weights[0][:, there][:, :, there]).flatten().cpu())
    return _largest(torch.cat(errors))


def _largest(errors: Tensor) -> float:
    """The largest error; infinite where one is no number, which compares with nothing."""
    return float(errors.abs().max().nan_to_num(torch.inf))


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs.to(ours.device)).abs().max() / theirs.abs().max().clamp_min(1e-12))


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
    alone = {kind: way for check in checks for kind, way in check.alone.items()}
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
    return min(max([0, *(length + _BEYOND for length in named if length <= _LONGEST)]), limit)


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
