"""What the live page asks of a model: a prompt's attention, its split among features, and what a swap does.

One prompt is captured once, at every head; splits and swaps then need no second pass, but for the patched run that says
what the model would answer. The last token asks. Answers are plain values, ready for JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from qkscope import tasks
from qkscope.analyses.attribute import split_logits, token_rows
from qkscope.analyses.decompose import decompose
from qkscope.analyses.fit import Fit, load
from qkscope.analyses.fit_folder import read_job, task_of
from qkscope.analyses.swap import check_swappable, default_features
from qkscope.capture.encode import Encoding
from qkscope.capture.files import cache_dir
from qkscope.capture.patch import Edit
from qkscope.capture.pick import Capture, Places
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_class
from qkscope.maths import methods
from qkscope.maths.bases import Projector, joint_basis
from qkscope.maths.subspace import Subspace
from qkscope.maths.swap import SwapRows, swapped_keys
from qkscope.runs.folder import file_name
from qkscope.tasks.task import Task

PROMPT = "hat: O\njam: Z\ncat: B\npen: K\njam:"
_LONGEST = 2048  # tokens
_CHARACTERS = 64 * _LONGEST
_KEPT = 2  # prompts whose keys stay in memory
_SHOWN = 8  # next tokens
_DRAWS = 20
_FITTED_ON = 40  # prompts, for a head that is fitted while one waits
_FACTS = ("position", "token", "attention", "logit")
_FIRST = {"smollm2-135m": "L18H6"}  # where the embedded model's boxes are found


@dataclass(frozen=True)
class _Prompt:
    """One prompt, captured at every head: all its tokens as keys of the last one."""

    encoding: Encoding
    places: Places
    capture: Capture
    texts: list[str]


def _rows(capture: Capture, head: Head, features: Mapping[str, Subspace], texts: Sequence[str]) -> list[dict[str, Any]]:
    return token_rows(capture, head, split_logits(capture, head, features), texts)


@checked_class
class Session:
    """A model that is looked into by several requests, one at a time."""

    def __init__(self, scope: Scope, fit: Fit | None = None, task: Task | None = None, folder: str = "") -> None:
        if scope.tokenizer is None:
            raise BadInput(f"{scope.name} has no tokenizer, so that no prompt can be typed: add one to its folder.")
        self.scope, self.folder, self._decode = scope, folder, scope.tokenizer.decode
        self._task = task or tasks.binding(entities=9, form="list", seed=0)
        self._contrasts = default_features(list(self._task.contrasts) if fit is None else fit.contrasts)
        self._features: dict[Head, dict[str, Subspace]] = {}
        self._lock = threading.Lock()
        self._capture = lru_cache(_KEPT)(self._captured)
        if fit is not None:
            check_swappable(fit.space, downstream=True)
            for head in fit.heads:
                self._features[head] = {name: fit[name, head] for name in self._contrasts}

    @classmethod
    def load(cls, scope: Scope, folder: str | Path | None = None) -> Session:
        """With the features of a fit folder, or with none yet."""
        if folder is None:
            return cls(scope)
        return cls(scope, load(folder, scope), task_of(read_job(folder), folder), str(folder))

    # ------------------------------------------------------------------ what is asked

    def describe(self) -> dict[str, Any]:
        """The model, its heads, and what was fitted already."""
        fitted = [str(head) for head in list(self._features)]  # another request may be fitting one more
        first = _FIRST.get(self.scope.name, str(self.scope.heads()[-1]))
        return {
            "model": self.scope.name, "heads": [str(head) for head in self.scope.heads()], "fitted": fitted,
            "head": fitted[0] if fitted else first, "prompt": PROMPT, "longest": self._longest, "folder": self.folder,
            "task": self._task.name, "fitted_on": _FITTED_ON, "quick": self.scope.name in _FIRST,
        }  # fmt: skip

    def look(self, prompt: str) -> dict[str, Any]:
        """Tokens, the attention of every head from the last one (a byte each), and the likeliest next tokens."""
        with self._lock:
            start = time.perf_counter()
            known = self._capture(prompt)
            shares = (known.capture.attention()[0] * 255).round().to(torch.uint8)
            return {
                "tokens": known.texts,
                "attention": base64.b64encode(shares.numpy().tobytes()).decode(),
                "next": self._next(known.capture),
                "seconds": time.perf_counter() - start,
            }

    def split(self, prompt: str, head: str, features: Sequence[str] | None = None) -> dict[str, Any]:
        """One head's logits split among features; all that were fitted there, if none are named."""
        with self._lock:
            at, known = self.scope.check(head), self._capture(prompt)
            chosen = self._chosen(at, features)
            rows = _rows(known.capture, at, chosen, known.texts)
            there = {name: subspace.rank for name, subspace in self._features.get(at, {}).items()}
            parts = [name for name in rows[0] if name not in _FACTS]
            return {"head": str(at), "rows": rows, "parts": parts, "features": there, "chosen": list(chosen)}

    def swap(self, prompt: str, head: str, a: int, b: int, features: Sequence[str] | None = None) -> dict[str, Any]:
        """Exchange two tokens' coordinates in some features (their whole keys, if there are none) and let it run on."""
        with self._lock:
            start = time.perf_counter()
            at, known = self.scope.check(head), self._capture(prompt)
            for place in (a, b):
                if not 0 <= place < len(known.texts):
                    raise BadInput(f"the prompt has no token {place}: choose from 0 to {len(known.texts) - 1}.")
            if a == b:
                raise BadInput("a token cannot be swapped with itself: choose two.")
            chosen = self._chosen(at, features)
            d = self.scope.d_head
            basis = joint_basis([s.basis("key") for s in chosen.values()]) if chosen else torch.eye(d)
            after = self._patched(known, at, a, b, Projector.orthogonal(basis))
            random = self._random(known.capture, at, a, b, basis.shape[1])
            return {
                "head": str(at), "a": a, "b": b, "rank": basis.shape[1], "features": list(chosen),
                "rows": _rows(after, at, chosen, known.texts), "random": random,
                "next": self._next(known.capture, after), "seconds": time.perf_counter() - start,
            }  # fmt: skip

    def fit(self, head: str) -> dict[str, Any]:
        """Fit the task's features at one more head; kept in the user's cache."""
        with self._lock:
            at = self.scope.check(head)
            if at not in self._features:
                place = cache_dir("explorer", self.scope.weights_hash, self._job(), str(at))
                fit = decompose(self.scope, self._task, [at], _FITTED_ON, contrasts=self._contrasts, out=place)
                self._features[at] = {name: fit[name, at] for name in self._contrasts}
            return {"head": str(at), "features": {name: s.rank for name, s in self._features[at].items()}}

    # ------------------------------------------------------------------ how it is answered

    def _job(self) -> str:
        """What else a fit depends on, for its place in the cache: another size, form or file is another fit."""
        task = self._task
        asked = [
            task.name,
            dict(task.asked),
            task.seed,
            task.chat,
            self._contrasts,
            _FITTED_ON,
            self.scope.tokenizer_hash,
            str(self.scope.model.dtype),
        ]
        return f"{file_name(task.name)}-{hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]}"

    @property
    def _longest(self) -> int:
        limit = getattr(self.scope.model.config.get_text_config(), "max_position_embeddings", None)
        return min(_LONGEST, limit) if isinstance(limit, int) and limit > 0 else _LONGEST

    def _captured(self, prompt: str) -> _Prompt:
        if not prompt.strip():
            raise BadInput("the prompt is empty: type a few words.")
        if len(prompt) > _CHARACTERS:
            raise BadInput(f"the prompt has {len(prompt)} characters: at most {_CHARACTERS} are looked at here.")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise BadInput("the prompt holds half of a character: type it again.") from None
        encoding = self.scope.encode([prompt])
        ids, places = encoding.inputs["input_ids"][0].tolist(), encoding.everywhere()
        if len(ids) > self._longest:
            raise BadInput(f"the prompt has {len(ids)} tokens: at most {self._longest} are looked at here.")
        capture = self.scope.capture_inputs(encoding.inputs, places=places, logits=True).to("cpu")
        return _Prompt(encoding, places, capture, [self._decode([i]) for i in ids])

    def _chosen(self, head: Head, features: Sequence[str] | None) -> dict[str, Subspace]:
        """Features by name (``lexical``, or ``lexical@L18H6``); all that were fitted at the head, if none are named."""
        there = self._features.get(head, {})
        if features is None:
            return dict(there)
        chosen = {}
        for given in features:
            name, _, where = given.partition("@")
            if where and Head.parse(where) != head:
                raise BadInput(f"feature {name!r} belongs to {where}, not to {head}: name features of one head.")
            if name not in there:
                raise BadInput(f"nothing was fitted for {name!r} at {head}: there is {', '.join(there) or 'nothing'}.")
            chosen[name] = there[name]
        return chosen

    def _patched(self, known: _Prompt, head: Head, a: int, b: int, projector: Projector) -> Capture:
        """The head as it is when the two tokens' keys have changed places in the subspace, and the model runs on."""
        row = known.capture.rows().of_head(known.capture.heads.index(head))
        one, other = (row.keys_of_heads(torch.tensor([place]))[0, 0] for place in (a, b))
        pair = torch.stack(swapped_keys(one, other, projector))
        edit = Edit.keys(head, torch.tensor([[a, b]]), pair[None])
        inputs, places = known.encoding.inputs, known.places
        return self.scope.capture_inputs(inputs, places=places, heads=[head], logits=True, edits=[edit]).to("cpu")

    def _random(self, capture: Capture, head: Head, a: int, b: int, rank: int) -> dict[str, float]:
        """Attention on the two tokens when random subspaces of the same size are swapped: the mean over draws."""
        row = capture.rows().of_head(capture.heads.index(head))
        rows = SwapRows(row, torch.tensor([a]), torch.tensor([b]), torch.zeros(1), [head])
        effect = rows.swap(methods.random([head], self.scope.d_head, _DRAWS, 0)(rank))
        return {"a": float(effect.orig_after.mean()), "b": float(effect.target_after.mean()), "draws": _DRAWS}

    def _next(self, before: Capture, after: Capture | None = None) -> list[dict[str, Any]]:
        """The likeliest next tokens, before and after."""
        runs = [
            run.logits[0].float().softmax(-1) for run in (before, after) if run is not None and run.logits is not None
        ]
        best: list[int] = list(dict.fromkeys(i for p in runs for i in p.topk(_SHOWN).indices.tolist()))
        best.sort(key=lambda i: -max(float(p[i]) for p in runs))
        return [
            {"token": self._decode([i]), "before": float(runs[0][i]), "after": float(runs[-1][i]) if after else None}
            for i in best[:_SHOWN]
        ]
