"""Every head of a model in one pass: how many directions it matches on, with false-discovery control over all heads.

A first pass carries the sums of all heads and a few null replicates each (`head_tests` pools them); a second one, over
passages that the first has not seen, says how much of the logit those directions carry, what swapping the first two
does, what the attended tokens are to the asking ones, and where the directions are strongest. Directions, not features:
taking a head's directions apart is `discover`'s work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.discover.discover import (
    ABOVE,
    NOT_ABOVE,
    RESTING,
    RESTS,
    UNTESTED,
    check_replicates,
    key_heads,
    untested_words,
)
from qkscope.analyses.discover.evidence import example_rows, swap_of
from qkscope.analyses.discover.relations import main_relation, relation_rows
from qkscope.analyses.discover.rows import QueryRows, gather
from qkscope.analyses.discover.texts import LENGTH, QUERIES, checked_texts, text_examples
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput, check_least
from qkscope.heads import Head
from qkscope.kinds import checked_call, checked_class
from qkscope.maths.baselines import key_pca
from qkscope.maths.bases import Projector, random_bases
from qkscope.maths.discovery import HeadTest, SelfContrast, head_tests, moving_basis
from qkscope.maths.svd import checked_svd
from qkscope.runs.job import Job
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result

_SWAPPED = 2  # directions of the causal test: the difference between methods shows at small sizes


@checked_class
@dataclass(frozen=True)
class Atlas(Result):
    """All heads, those with most directions first."""

    def table(self) -> list[dict[str, Any]]:
        """One row per head."""
        return [dict(row) for row in self.tables["atlas"]]


@checked_call
def atlas(
    scope: Scope,
    texts: Sequence[str],
    n: int = 384,
    *,
    heads: str | Head | Sequence[str | Head] | None = None,
    test: int = 64,
    queries: int = QUERIES,
    length: int = LENGTH,
    space: Space = "query_frame",
    skip: int = 1,
    replicates: int = 41,
    draws: int = 8,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool | None = None,
    job: Job | None = None,
) -> Atlas:
    """Look for directions above the null at every head.

    Parameters
    ----------
    texts : passages; ``n`` of them are taken for the sums and ``test`` others for the evidence.
    heads : heads by name; all by default.
    replicates : null replicates of each head, half of them of each kind; they are pooled over heads, so a few are
        enough.
    draws : random subspaces beside each swap.
    job : where finished pieces are kept, so that the same call goes on after it was stopped; nowhere by default.
    """
    start = time.perf_counter()
    check_least(1, queries=queries, length=length, draws=draws, batch_size=batch_size)
    check_least(0, skip=skip)
    chosen = scope.parse(heads)
    check_replicates(replicates)
    if space == "pre_rope":
        raise BadInput("pre_rope vectors do not give the model's attention: take query_frame or post_rope.")
    if n < 1 or test < 1:
        raise BadInput(f"an atlas needs passages to sum over and to test on, but got n {n} and test {test}.")
    unique = checked_texts(texts)
    if len(unique) < n + test:  # keep the shares of both
        n, test = max(len(unique) * n // (n + test), 1), max(len(unique) * test // (n + test), 1)
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(seed)).tolist()[: n + test]
    examples = text_examples(scope, [unique[i] for i in order], queries=queries, length=length, seed=seed)
    cut = len(examples) * n // (n + test)
    rows = sum(len(example.queries) for example in examples[:cut])
    least = 2 * scope.d_head
    if rows < least:
        raise BadInput(f"heads of {scope.d_head} dimensions need {least} queries, but this text gives {rows}: give "
                       f"about {-(-least // max(queries, 1))} passages.")  # fmt: skip
    about = {"model": scope.name, "weights": scope.weights_hash, "space": space}
    contrast = SelfContrast(
        chosen, scope.d_head, kv_of_head=key_heads(scope, chosen), replicates=replicates, seed=seed, about=about,
        device=scope.device,
    )  # fmt: skip
    options: Any = {"space": space, "skip": skip, "batch_size": batch_size, "seed": seed, "progress": progress}
    job = (job or Job()).begin(
        scope, examples, verb="atlas", heads=[str(head) for head in chosen], cut=cut, replicates=replicates,
        draws=draws,
        **{name: value for name, value in options.items() if name != "progress"},
    )  # fmt: skip
    gather(scope, examples[:cut], chosen, contrast=contrast, keep=False, job=job, name="sums", **options)
    tested = gather(scope, examples[cut:], chosen, draws=4, job=job, name="test", **options)
    assert tested is not None
    tests = head_tests(contrast)
    tables = _tables(scope, tested, contrast, tests, draws, seed, job)
    above = sum(row["directions"] > 0 for row in tables["atlas"])
    best = tables["atlas"][0]
    return Atlas(
        experiment="atlas",
        answer=f"In {above} of {len(chosen)} heads queries and attended keys go together above the shuffled "
        f"null (false-discovery rate 5%); most directions: {best['head']} with {best['directions']}, "
        f"{best['logit_share']:.0%} of its logit.{untested_words(tables['atlas'])}",
        tables=tables,
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**about, n=cut, test=len(examples) - cut, queries=queries, length=length, skip=skip,
                              replicates=replicates),
    )  # fmt: skip


def _tables(
    scope: Scope,
    tested: QueryRows,
    contrast: SelfContrast,
    tests: Sequence[HeadTest],
    draws: int,
    seed: int,
    job: Job,
) -> dict[str, list[dict[str, Any]]]:
    deltas = contrast.delta().cpu()
    u = checked_svd(deltas)[0]
    cov_k = contrast.covariances()[1].cpu()
    relations = job.once("relations", lambda: relation_rows(scope, tested))

    def of_head(h: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        head, test = contrast.heads[h], tests[h]
        mass = float(tested.mass[:, h].mean())
        rank = 0 if mass < RESTING else test.rank
        bases = {
            "feature": _one(moving_basis(deltas[h], _SWAPPED)),
            "key_pca": _one(key_pca(cov_k[h], _SWAPPED)),
            "random": Projector.orthogonal(random_bases(contrast.d_head, _SWAPPED, draws, seed)[:, None]),
        }
        effects, _ = swap_of(tested, h, bases)
        parts, share = _carried(tested, h, u[h, :, : max(rank, 1)])
        verdict = RESTS if mass < RESTING else ABOVE if rank else NOT_ABOVE if test.tested else UNTESTED
        row = {
            "head": str(head), "layer": head.layer, "index": head.index, "directions": rank, "z": test.z, "p": test.p,
            "q": test.q, "mass": mass, "top_weight": float(tested.top_weight[tested.valid[:, h], h].mean()),
            "logit_share": share if rank else 0.0,
            **{(kind if name == "feature" else f"{kind}_{name}"): float(getattr(effect, kind).mean())
               for kind in ("shift", "carried") for name, effect in effects.items()},
            **main_relation(relations, str(head)), "verdict": verdict,
        }  # fmt: skip
        return row, example_rows(scope, tested, h, 1, parts, count=3, around=5) if rank else []

    def of_heads(own: Sequence[int]) -> list[Any]:
        return [of_head(h) for h in own]

    rows: list[dict[str, Any]] = []
    examples: list[dict[str, Any]] = []
    for layer in sorted({head.layer for head in contrast.heads}):
        own = [h for h, head in enumerate(contrast.heads) if head.layer == layer]
        for row, texts in job.once(f"layer {layer}", partial(of_heads, own)):
            rows.append(row)
            examples += texts
    rows.sort(key=lambda row: (-row["directions"], -row["logit_share"]))
    return {"atlas": rows, "relations": relations, "examples": examples}


def _carried(looked: QueryRows, h: int, basis: Float[Tensor, "d r"]) -> tuple[Float[Tensor, " n"], float]:
    """Logit of the most attended key over a drawn one that some directions of the query carry, and its share."""
    rows, keep = looked.own_swaps(h)
    q, k = rows.q[:, 0].double(), rows.k[:, 0].double()
    apart, scale = k[:, 0] - k[:, 1], float(looked.scale[h])
    whole = scale * (q * apart).sum(dim=-1)
    part = scale * (((q - q.mean(dim=0)) @ basis) * (apart @ basis)).sum(dim=-1)
    share = float((part * whole).mean() / whole.square().mean().clamp_min(1e-300))
    out = torch.zeros(len(looked.q), dtype=torch.float64)
    out[keep] = part
    return out, share


def _one(basis: Float[Tensor, "d r"]) -> Projector:
    return Projector.orthogonal(basis[None])
