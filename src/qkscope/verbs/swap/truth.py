"""The truth of a swap: the row that the head has when the feature is exchanged in the text.

That attention moves shows only that a subspace holds what keys differ by, which their principal
components do as well. Whether it holds one feature *apart from the others* is another question: a
task exchanges the feature of two keys in its text (`Task.exchange`), the model runs on that text,
and every edited row is held against the true one.

A swap edits keys and leaves the query, but another text changes the query too: in ``jam: O, hat: Z,
jam:`` it looks for the place where the jam is now. So there are two truths: the other text's keys,
met by the query that the prompt itself has (``distance``), and the other text as it is
(``text_distance``). One run gives both: it is captured with every token as a key. Rows whose text
cannot be exchanged, or has other token positions then, are untested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope import BadInput, Example, Scope, tasks
from qkscope.attention import AttentionRows
from qkscope.findings.fit import Fit
from qkscope.findings.singular_rows import singular_basis
from qkscope.findings.swap_rows import Pairs, capture_rows, draw_pairs
from qkscope.model.capture_types import Capture
from qkscope.model.encode import Encoding
from qkscope.sums import swap_methods as methods
from qkscope.sums.bases import Projector
from qkscope.sums.swap_algebra import Condition
from qkscope.texts.task import ANSWER, Task
from qkscope.verbs.swap.features import Features

_NAMES = {
    "feature": "ΔC",
    "oblique": "oblique ΔC",
    "summed": "summed ΔC",
    "trained": "a trained subspace",
    "omega_svd": "Ω",
    "key_pca": "key PCA",
    "cov_qk": "Cov_q Cov_k",
    "random": "random subspaces",
    "nothing": "nothing done",
}


def exchanging_task(fit: Fit | None) -> Task:
    """The task of a fit, if it can exchange features in its text."""
    job: Mapping[str, Any] = {}
    if fit is not None:
        job = fit.provenance.get("asked", {})
    name = job.get("task", "a swap without a fit")
    task = None
    if name in tasks.BUILT_IN:
        task = tasks.BUILT_IN[name](seed=job["task_seed"], **job["asked"])
    if task is None or task.exchange is None:
        raise BadInput(
            f"{name} cannot exchange a feature in its text:"
            " fit binding, filter or ioi to ask for the truth."
        )
    return task


class TextExchange(NamedTuple):
    """Two keys of every row that exchange features in the text, and which readings that gives."""

    keys: tuple[Tensor, Tensor]
    reading: str  # the other text's keys, met by the prompt's own query
    text_reading: str | None  # the other text as it is


def truth_runner(
    scope: Scope, what: Features, pairs: Pairs, task: Task, tested: bool = True
) -> Callable[[list[int], Capture], dict[str, Any]]:
    """Make the function that runs the other texts of a batch of units beside its capture.

    It gives `SwapRows.truth` and ``frame``; without ``tested``, only what a subspace is trained on.
    """
    sets = {name: [name] for name in what.names} | {what.joint: what.names}
    exchanges = [TextExchange((pairs.orig, pairs.target), "distance", "text_distance")]
    if tested and pairs.others is not None:
        exchanges.append(TextExchange(pairs.others, "other_distance", None))
    takes_frame = tested and what.fit.space != "query_frame" and not _refused(scope, what)
    exchange = task.exchange
    width = max(len(example.keys) for example in pairs.examples)
    assert exchange is not None  # as `exchanging_task` gave it

    def run(indices: list[int], before: Capture) -> dict[str, Any]:
        rows = pairs.rows_of(indices).tolist()
        examples = [pairs.examples[row] for row in rows]
        encoded = scope.encode(examples, chat=what.fit.chat)
        truth = {}
        for which in exchanges:
            for name, features in sets.items():
                texts = []
                for row, example in zip(rows, examples, strict=True):
                    slots = [int(keys[row]) for keys in which.keys]
                    texts.append(exchange(example, features, *slots))
                other = OtherTexts.run(scope, what, encoded, examples, texts)
                met = replace(other.rows, q=before.q)
                truth[f"{which.reading}/{name}"] = other.attention(met, width)
                if which.text_reading is not None:
                    of_text = other.attention(other.rows, width)
                    truth[f"{which.text_reading}/{name}"] = of_text
        parts: dict[str, Any] = {"truth": truth}
        if takes_frame:
            frame = scope.capture_inputs(encoded, heads=what.heads, space="query_frame")
            parts["frame"] = dict(vars(frame.rows()))
        return parts

    return run


class OtherTexts(NamedTuple):
    """A batch with a feature exchanged in its texts, captured with every token as a key."""

    rows: AttentionRows
    keys: Int[Tensor, "b k"]
    key_mask: Bool[Tensor, "b k"]
    tested: Bool[Tensor, " b"]  # texts that can be exchanged, with the keys at the same places

    @classmethod
    def run(
        cls,
        scope: Scope,
        what: Features,
        usual: Encoding,
        examples: Sequence[Example],
        texts: Sequence[Example | None],
    ) -> OtherTexts:
        """Run the texts; in place of those that cannot be exchanged, the examples themselves."""
        listed = [text or example for text, example in zip(texts, examples, strict=True)]
        encoded = scope.encode(listed, chat=what.fit.chat)
        captured = scope.capture_inputs(
            encoded, places=encoded.everywhere(), heads=what.heads, space=what.fit.space
        )
        places = encoded.places
        is_exchanged = [text is not None for text in texts]
        exchanged = torch.tensor(is_exchanged).to(places.key_mask.device)
        tested = exchanged & _same_places(usual, encoded)
        return cls(captured.rows(), places.keys, places.key_mask, tested)

    def attention(self, rows: AttentionRows, width: int) -> Float[Tensor, "b h k"]:
        """Attention of these rows on the named keys, in ``width`` columns; NaN where untested."""
        attention = rows.attention()
        heads = attention.shape[1]
        columns = self.keys[:, None].expand(-1, heads, -1)
        is_padding = ~self.key_mask[:, None]
        on_keys = attention.gather(-1, columns).masked_fill(is_padding, 0.0)
        padded = pad(on_keys, (0, width - on_keys.shape[-1]))
        return padded.where(self.tested[:, None, None], torch.nan).cpu()


def _refused(scope: Scope, what: Features) -> bool:
    """Whether the components of Ω cannot be swapped: that takes the query's frame."""
    layers = [scope.facts.layers[head.layer] for head in what.heads]
    return any("query_frame" in layer.refusals for layer in layers)


def _same_places(one: Encoding, other: Encoding) -> Bool[Tensor, " b"]:
    """Whether two texts have as many tokens, and their keys at the same places, in any order."""
    return (_places(one) == _places(other)).all(1)


def _places(encoded: Encoding) -> Int[Tensor, "b k+1"]:
    """How far each row's keys are from its query, sorted, and how many tokens its text has."""
    places = encoded.places
    away = places.query[:, None] - places.keys
    away = away.masked_fill(~places.key_mask, -1).sort(dim=1).values
    tokens = encoded.inputs["attention_mask"].sum(1)[places.row, None]
    return torch.cat([away, tokens], dim=1)


def more_conditions(
    scope: Scope,
    what: Features,
    task: Task,
    projectors: Mapping[Condition, Projector],
    n: int,
    seed: int,
) -> dict[Condition, Projector]:
    """Conditions that are held against the truth beside the usual ones.

    Subspaces are trained on words of the fit, with twice as many prompts as are tested.
    """
    units = task.draw("fit", ANSWER, 2 * n)
    pairs = draw_pairs(units, seed=seed)
    exchanged = truth_runner(scope, what, pairs, task, tested=False)
    rows = capture_rows(scope, units, what.fit, what.heads, pairs, more=(None, exchanged))
    singular = None
    if not _refused(scope, what):
        with suppress(BadInput):  # weights of which no components can be made
            singular = singular_basis(scope, what.heads)
    return methods.beside_truth(projectors, rows, singular, seed)


def truth_sentence(table: Iterable[Mapping[str, Any]], head: str, names: Sequence[str]) -> str:
    """Say which conditions are nearest to the truth at one head, beside key PCA."""
    rows = [row for row in table if row["head"] == head]
    sentences = []
    for name in dict.fromkeys(names):
        by_kind = {row["kind"]: row for row in rows if row["feature"] == name}
        sentences.append(_nearest(name, head, by_kind))
    return " ".join(sentences)


def _nearest(name: str, head: str, by_kind: Mapping[str, Mapping[str, Any]]) -> str:
    """Say which condition is nearest to the truth of one feature."""
    ours = by_kind["feature"]
    if not ours["tested"]:
        return f"{name} cannot be exchanged in these texts, and is untested."
    distance = {}
    for kind, row in by_kind.items():
        if row["tested"]:
            distance[kind] = row["distance"]
    named = [kind for kind in _NAMES if kind in distance]
    best = min(named, key=distance.__getitem__)
    beside = ""
    if "key_pca" in distance:
        low = ours["nearer_low"]
        high = ours["nearer_high"]
        verdict = _verdict(low, high)
        interval = f"[{low:.2f}, {high:.2f}]"
        nearer = f"{verdict}: {ours['nearer']:.2f} {interval}"
        beside = f", key PCA's {distance['key_pca']:.2f} ({nearer})"
    given = f"the row that ΔC gives {head} is {distance['feature']:.2f} from the true one"
    nearest = f"nearest is {_NAMES[best]}, {distance[best]:.2f}"
    extremes = f"nothing done {distance['nothing']:.2f}, the whole key {distance['whole']:.2f}"
    prompts = f"{ours['tested']} prompts"
    return f"With {name} exchanged in the text, {given}{beside}; {nearest}; {extremes} ({prompts})."


def _verdict(low: float, high: float) -> str:
    """Whether an interval of differences lies on one side of 0."""
    if low > 0:
        return "nearer"
    return "farther" if high < 0 else "a tie"
