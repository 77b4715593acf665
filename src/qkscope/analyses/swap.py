"""The causal test on a model: swap features between the right key and another, and see where the attention goes.

One capture of the held-out prompts serves every condition: the edited rows have a closed form (`qkscope.maths.swap`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.clouds import Seen, make_clouds
from qkscope.analyses.decompose import Fit
from qkscope.analyses.find import check_same_model, clusters_of, with_notes
from qkscope.analyses.steps import Steps
from qkscope.analyses.units import batches_of, unit_runner
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput, check_kind
from qkscope.heads import Head, parse_heads
from qkscope.kinds import checked_call, checked_class
from qkscope.maths.attention import AttentionRows
from qkscope.maths.baselines import cov_qk, key_pca
from qkscope.maths.bases import Projector, joint_basis, oblique_projectors, random_bases
from qkscope.maths.swap import SwapEffect, draw_targets, swap_attention, swap_table
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.tasks.task import ANSWER, ASKED, Unit

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 12)
_CAPTURED = ("q", "k", "scale", "kv_of_head", "softcap", "bias", "rest", "key_mask")


@dataclass(frozen=True)
class Rows:
    """Held-out rows of some heads: attention, which key is right, and which one it is swapped with."""

    attention: AttentionRows
    orig: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    others: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None  # two keys for the sham swap; None where there are none
    unit: Int[Tensor, " n"]
    member: Int[Tensor, " n"]  # which of its unit's prompts
    cluster: Int[Tensor, " n"]  # rows that ask for the same word, or are of the same unit: resampled together


@checked_class
@dataclass(frozen=True)
class Swaps(Result):
    """Attention before and after, per head and condition; and the keys and queries as points, for the page."""

    def table(self) -> list[dict[str, Any]]:
        """One row per head and condition."""
        return [dict(row) for row in self.tables["swap"]]


@checked_call
def swap(
    scope: Scope,
    units: Sequence[Unit],
    fit: Fit,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    features: Sequence[str] | None = None,
    draws: int = 20,
    sizes: Sequence[int] = (),
    batch_size: int = 32,
    seed: int = 0,
    progress: bool | None = None,
    steps: Steps | None = None,
) -> Swaps:
    """Swap each feature alone, all together, obliquely, and the baselines of the same size, on held-out units.

    Parameters
    ----------
    units : from ``task.test(n)``: words that nothing was fitted on.
    features : contrasts to swap; by default ``order`` and ``lexical`` of binding, the categories of a filter task, or
        all that were fitted.
    draws : random subspaces per size.
    sizes : also a curve over the number of dimensions swapped (``tables["curve"]``), for each feature and baseline.
    steps : where finished pieces are kept, so that the same call goes on after it was stopped; nowhere by default.
    """
    start = time.perf_counter()
    chosen, names = checked_features(fit, heads, features)
    if draws < 1:
        raise BadInput(f"draws is the number of random subspaces, at least 1, but got {draws}.")
    for k in sizes:
        if not 1 <= k <= scope.d_head:
            raise BadInput(f"a curve of {k} dimensions does not fit into a head of {scope.d_head}.")
    check_rows(scope, units, fit)
    steps = (steps or Steps()).begin(scope, list(units), verb="swap", heads=[str(h) for h in chosen], space=fit.space,
                                     chat=fit.chat, batch_size=batch_size)  # fmt: skip
    rows = capture_rows(scope, units, fit, chosen, batch_size, seed, progress, steps)
    projectors, against = conditions(fit, chosen, names, draws, seed)
    effects = {name: swap_attention(rows.attention, rows.orig, rows.target, p) for name, p in projectors.items()}
    joint = joint_name(names)
    if rows.others is not None:
        read = (rows.orig, rows.target)
        effects[f"sham_{joint}"] = swap_attention(rows.attention, *rows.others, projectors[joint], read=read)
    table = [
        {**row, "condition_number": _condition_number(fit, names, row["head"]) if _is_oblique(row) else None}
        for row in swap_table(effects, chosen, rows.cluster, against=against, seed=seed)
        if row["rank"] or not _is_oblique(row)
    ]
    tables: dict[str, list[dict[str, Any]]] = {"swap": table}
    if sizes:
        tables["curve"] = size_curve(rows, fit, chosen, names, sizes, draws, seed)
    arrays, tables["clouds"] = _clouds(rows, units, fit, chosen, names)
    return Swaps(
        experiment="swap",
        answer=with_notes(_answer(table, joint) + one_cluster(rows.cluster), fit.provenance.get("asked", {})),
        tables=tables,
        arrays=arrays,
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**{**fit.provenance.get("asked", {}), "test_units": len(units), "draws": draws}),
    )


def _clouds(
    rows: Rows, units: Sequence[Unit], fit: Fit, heads: list[Head], names: Sequence[str]
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    examples = [units[i][m] for i, m in zip(rows.unit.tolist(), rows.member.tolist(), strict=True)]
    subspaces = {(name, head): fit[name, head] for head in heads for name in names}
    words = fit.provenance.get("asked", {}).get("asked", {}).get("words", ())
    return make_clouds(Seen(rows.attention, rows.orig, examples), heads, subspaces, words)


def _answer(table: list[dict[str, Any]], joint: str) -> str:
    row = next(r for r in table if r["condition"] == joint)
    random = next(r for r in table if r["condition"] == f"random_{joint}" and r["head"] == row["head"])
    size = "1 dimension" if row["rank"] == 1 else f"{row['rank']} dimensions"
    return (
        f"Swapping {joint} at {row['head']} ({size}) takes its attention on the right key from "
        f"{row['orig_before']:.2f} to {row['orig_after']:.2f} and on the target from {row['target_before']:.2f} to "
        f"{row['target_after']:.2f}; random subspaces of the same size leave {random['orig_after']:.2f}."
    )


def one_cluster(cluster: Int[Tensor, " n"]) -> str:
    """What to say where there is nothing to resample."""
    alone = len(cluster.unique()) < 2
    return " All its prompts are one or ask for one word: there are no intervals." if alone else ""


def _is_oblique(row: Mapping[str, Any]) -> bool:
    return bool(row["condition"].endswith("_oblique"))


def _condition_number(fit: Fit, features: Sequence[str], head: str) -> float:
    """How close to dependent the features are at this head: 1 when orthogonal; an oblique swap of many is noise."""
    return oblique_projectors([fit[name, head].basis("key") for name in features])[1]


def checked_features(
    fit: Fit, heads: str | Head | Sequence[str | Head] | None, features: Sequence[str] | None
) -> tuple[list[Head], list[str]]:
    """Heads and features to swap, all by default; what was not fitted is refused before the model runs."""
    check_kind(fit, Fit, "features to swap are a fit, as decompose gives")
    chosen = list(fit.heads) if heads is None else parse_heads(heads)
    names = default_features(fit) if features is None else list(features)
    if not names or len(set(names)) < len(names):
        raise BadInput(f"features are different contrasts of {', '.join(fit.contrasts)}, but got {names}.")
    for name in names:
        for head in chosen:
            _ = fit[name, head]
    return chosen, names


def default_features(fit: Fit) -> list[str]:
    """``order`` and ``lexical`` where both were fitted, else every contrast but the pooled one."""
    fitted = fit.contrasts
    if {"order", "lexical"} <= set(fitted):
        return ["order", "lexical"]
    return [name for name in fitted if name != "category"] or fitted


def joint_name(features: Sequence[str]) -> str:
    """What the swap of all features together is called."""
    return features[0] if len(features) == 1 else "both" if len(features) == 2 else "all"


def capture_rows(
    scope: Scope,
    units: Sequence[Unit],
    fit: Fit,
    heads: Sequence[Head],
    batch_size: int,
    seed: int,
    progress: bool | None = None,
    steps: Steps | None = None,
    name: str = "rows",
) -> Rows:
    """Attention rows of held-out units, and the pairs of keys to swap: drawn once, for every condition."""
    check_rows(scope, units, fit)
    capture = unit_runner(scope, units, heads, space=fit.space, chat=fit.chat)

    def run(indices: list[int]) -> dict[str, Any]:
        batch = capture(indices)
        own = {column: getattr(batch.captured, column) for column in _CAPTURED}
        return {**own, "labels": batch.captured.labels[ANSWER].long(), "unit": batch.unit, "member": batch.member}

    parts = (steps or Steps()).stream(name, batches_of(units, batch_size), run, progress)
    width = max(part["k"].shape[2] for part in parts)
    first = parts[0]

    def wide(tensors: list[Tensor], dim: int, fill: float) -> Tensor:
        shape = [list(t.shape) for t in tensors]
        out = []
        for t, size in zip(tensors, shape, strict=True):
            size[dim] = width - size[dim]
            out.append(torch.cat([t, t.new_full(size, fill)], dim=dim))
        return torch.cat(out).cpu()

    labels = wide([p["labels"] for p in parts], 1, 0)
    attention = AttentionRows(
        q=torch.cat([p["q"] for p in parts]).cpu(),
        k=wide([p["k"] for p in parts], 2, 0.0),
        scale=first["scale"].cpu(),
        kv_of_head=first["kv_of_head"].cpu(),
        softcap=None if first["softcap"] is None else first["softcap"].cpu(),
        bias=wide([p["bias"] for p in parts], 2, -torch.inf),
        rest=torch.cat([p["rest"] for p in parts if p["rest"] is not None]).cpu(),
        key_mask=wide([p["key_mask"].long() for p in parts], 1, 0).bool(),
    )
    orig, target = draw_pairs(labels, seed)
    unit, member = (torch.cat([p[column] for p in parts]).cpu() for column in ("unit", "member"))
    cluster = word_clusters(units, unit.tolist(), member.tolist())
    return Rows(attention, orig, target, _sham(labels, orig, target, seed), unit, member, cluster)


def check_rows(scope: Scope, units: Sequence[Unit], fit: Fit) -> None:
    """Refuse what cannot be swapped before the model runs."""
    check_swappable(fit.space)
    check_same_model(fit.provenance.get("asked", {}), scope, "this fit")
    check_answers(units)
    if not units:
        raise BadInput("there are no examples: give at least one.")


def word_clusters(units: Sequence[Unit], unit: list[int], member: list[int]) -> Int[Tensor, " n"]:
    """A number for each row, the same for rows that ask for the same word; for rows of one unit where none is marked.

    A task has a few dozen words and any number of prompts: resampling prompts alone would trust the words too much.
    """
    examples = [units[i][m] for i, m in zip(unit, member, strict=True)]
    if all(ASKED in example.roles for example in examples):
        numbers: dict[str, int] = {}
        asked = [example.piece(example.roles[ASKED]) for example in examples]
        return torch.tensor([numbers.setdefault(word, len(numbers)) for word in asked])
    return clusters_of(units, torch.tensor(unit))


def check_swappable(space: str, downstream: bool = False) -> None:
    """Refuse a space in which attention, and so a swap, cannot be had."""
    if space == "pre_rope":
        raise BadInput("pre_rope vectors do not give the model's attention: fit in post_rope or query_frame for this.")
    if downstream and space != "post_rope":
        raise BadInput("a patched run writes post_rope keys: fit in post_rope to swap downstream.")


def check_answers(units: Sequence[Unit]) -> None:
    """Every example to be swapped needs a right key and a wrong one."""
    check_kind(units, Sequence, "what is swapped are held-out units, as task.test(512) gives")
    for unit in units:
        if not unit:
            raise BadInput("a unit holds no example: give one prompt or more in each.")
        for example in unit:
            signs = {key.label(ANSWER) for key in example.keys}
            if not {1, -1} <= signs:
                raise BadInput(
                    f"a swap needs keys labelled {ANSWER!r} 1 and -1 in every example, as not in {example.show(80)}."
                )


def draw_pairs(labels: Int[Tensor, "n k"], seed: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """A right key and a wrong one of every row, uniformly drawn."""
    orig = draw_targets(torch.full((len(labels),), -1), labels > 0, seed)
    return orig, draw_targets(orig, labels < 0, seed + 1)


def _sham(
    labels: Int[Tensor, "n k"], orig: Int[Tensor, " n"], target: Int[Tensor, " n"], seed: int
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None:
    """Two keys whose swap should do nothing: two right ones (a filter list), or two wrong ones beside the target."""
    right = labels > 0
    if bool((right.sum(dim=1) > 1).all()):
        return orig, draw_targets(orig, right, seed + 2)
    free = (labels < 0) & (torch.arange(labels.shape[1]) != target[:, None])
    if not bool((free.sum(dim=1) > 1).all()):
        return None
    one = draw_targets(target, free, seed + 2)
    return one, draw_targets(one, free, seed + 3)


def conditions(
    fit: Fit, heads: Sequence[Head], features: Sequence[str], draws: int, seed: int
) -> tuple[dict[str, Projector], dict[str, str]]:
    """Projectors of every condition (one per head, stacked), and which random baseline each is compared with."""
    bases = {name: [fit[name, head].basis("key") for head in heads] for name in features}
    joint = joint_name(features)
    together = [joint_basis([bases[name][i] for name in features]) for i in range(len(heads))]
    projectors = {name: _stacked(each) for name, each in bases.items()}
    projectors[joint] = _stacked(together)
    against = {name: f"random_{name}" for name in [*features, joint]}
    if len(features) > 1:
        sets = [_oblique(head, [bases[name][i] for name in features]) for i, head in enumerate(heads)]
        for j, name in enumerate(features):
            projectors[f"{name}_oblique"] = Projector.stack([each[j] for each in sets])
            against[f"{name}_oblique"] = f"random_{name}"
    sizes = {name: [basis.shape[1] for basis in each] for name, each in {**bases, joint: together}.items()}
    for name in dict.fromkeys([*features, joint]):
        projectors[f"random_{name}"] = _random(fit, sizes[name], draws, seed)
        cov_q, cov_k = _covariances(fit, features if name == joint else [name], heads)
        projectors[f"key_pca_{name}"] = _stacked([key_pca(c, r) for c, r in zip(cov_k, sizes[name], strict=True)])
        projectors[f"cov_qk_{name}"] = _stacked(
            [cov_qk(a, b, r) for a, b, r in zip(cov_q, cov_k, sizes[name], strict=True)]
        )
        against |= {f"{kind}_{name}": f"random_{name}" for kind in ("key_pca", "cov_qk")}
    return projectors, against


def size_curve(
    rows: Rows, fit: Fit, heads: Sequence[Head], features: Sequence[str], sizes: Sequence[int], draws: int, seed: int
) -> list[dict[str, Any]]:
    """Attention after swapping the first k directions of each feature and of each baseline."""
    cov_q, cov_k = _covariances(fit, features, heads)
    table = []
    for k in sizes:
        methods: dict[str, Projector] = {
            name: _stacked([fit[name, head].V[:, :k] for head in heads]) for name in features
        }
        methods["key_pca"] = _stacked([key_pca(c, k) for c in cov_k])
        methods["cov_qk"] = _stacked([cov_qk(a, b, k) for a, b in zip(cov_q, cov_k, strict=True)])
        methods["random"] = _random(fit, [k] * len(heads), draws, seed)
        effects: dict[str, SwapEffect] = {
            name: swap_attention(rows.attention, rows.orig, rows.target, p) for name, p in methods.items()
        }
        for row in swap_table(effects, list(heads), rows.cluster, seed=seed):
            kept = ("orig_before", "target_before", "orig_after", "target_after", "shift")
            table.append({
                "head": row["head"], "method": row["condition"], "k": k, **{name: row[name] for name in kept},
                "low": row["shift_low"], "high": row["shift_high"], "n": row["n"],
            })  # fmt: skip
    return table


def _oblique(head: Head, bases: Sequence[Float[Tensor, "d r"]]) -> list[Projector]:
    """Oblique projectors of one head; where its subspaces depend on each other there are none, and they are zero."""
    try:
        return oblique_projectors(bases)[0]
    except BadInput as error:
        log.info("%s has no oblique swaps: %s", head, error)
        return [Projector.orthogonal(torch.zeros_like(basis)) for basis in bases]


def _stacked(bases: Sequence[Tensor]) -> Projector:
    return Projector.stack([Projector.orthogonal(basis) for basis in bases])


def _random(fit: Fit, ranks: Sequence[int], draws: int, seed: int) -> Projector:
    """Many random subspaces per head, each of the head's own rank."""
    d_head = next(iter(fit.subspaces.values())).d_head
    width = max(ranks)
    each = [random_bases(d_head, rank, draws, seed + i) for i, rank in enumerate(ranks)]
    padded = torch.stack([torch.nn.functional.pad(b, (0, width - b.shape[-1])) for b in each], dim=1)
    return Projector.orthogonal(padded)


def _covariances(fit: Fit, features: Sequence[str], heads: Sequence[Head]) -> tuple[Tensor, Tensor]:
    """Covariances of the queries and keys that these features were fitted on."""
    index = [fit.heads.index(head) for head in heads]
    sums = [fit.sums[name] for name in features]
    cov_q = sums[0].cov_q.merge(*(s.cov_q for s in sums[1:])).matrix()
    cov_k = sums[0].cov_k.merge(*(s.cov_k for s in sums[1:])).matrix()
    return cov_q[index].cpu(), cov_k[index].cpu()
