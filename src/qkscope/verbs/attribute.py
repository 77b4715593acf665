"""A head's logits on one prompt, split: among features (Lee et al. 2026, Fig. 10), and over
singular vectors.

Among features the logit of every token is split, exactly before the softmax: in the paper's way,
one feature after the other with the smaller rank first, and order-free beside it; what no feature
explains is the residual.

Over the singular basis of the weights relative attention is split: ``r = ℓ_i − mean_{j≠i} ℓ_j = Σ_m
c_m``. Queries and keys are taken in the query's frame, where the split is exact under RoPE too
(`qkscope.sums.singular`); the mean runs over the other keys that the query sees, so a sliding
window counts its own keys alone. A sink has a logit but no key, and takes no part. Where a family
caps its logits, r is the logit before the cap: ``scale · qᵀ Δk``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Example, Head, Result, Scope, Subspace
from qkscope.checking import checked_call
from qkscope.findings.fit import Fit
from qkscope.findings.prompt_trace import Question
from qkscope.findings.task_batches import check_same_model, made_with
from qkscope.linear.head_weights import head_weights
from qkscope.model.capture_types import Capture
from qkscope.model.spaces import Space
from qkscope.results.work import verb
from qkscope.seeds import derived_seed
from qkscope.sums import singular as measure
from qkscope.sums.feature_split import Split, attribute_logits, part_name, split_rows
from qkscope.sums.singular import SingularBasis, basis_of_weights, singular_coordinates
from qkscope.verbs.swap.swap import default_features

TOLERANCE = 0.99


@checked_call
def singular_basis(
    scope: Scope, heads: str | Head | Sequence[str | Head] | None = None
) -> SingularBasis:
    """Singular vectors of ``Ω = W_Qᵀ W_K`` of some heads, all by default.

    Norm gains, biases (as a last coordinate, a constant 1) and QK-norm's gain are folded into W;
    where a norm centres, the part of W that reads the mean is taken out, as it reads nothing. Under
    RoPE it is the basis of the un-rotated Ω, over which a logit splits exactly in the query's frame
    (`qkscope.sums.singular`).

    Parameters
    ----------
    scope : the model.
    heads : heads by name; all of them need 4.3 GB for a model of 8 billion parameters.

    Examples
    --------
    >>> import qkscope as qk
    >>> qk.singular_basis(qk.Scope.load("nano:mixed"), ["L0H0", "L1H3"])
    SingularBasis(L0H0, L1H3: 24 vectors each)
    """
    weights = head_weights(scope, wanted := scope.parse(heads))
    about = {"weights": scope.weights_hash, "model": scope.name, "dtype": str(scope.model.dtype)}
    rotary = [scope.facts.layers[head.layer].offset is not None for head in wanted]
    tensors = weights.W_Q, weights.W_K, weights.scale, weights.c_Q
    return basis_of_weights(wanted, tensors, rotary, weights.kv_of_head, about)


class RelativeRows(NamedTuple):
    """Terms of rows (an example and one of its queries) and heads; NaN where a query does not see
    the key.

    ``terms = query · s · key``, with ``query = α`` (QK-norm's scalar included), ``key = γ / σ``
    times the call's scale. ``constant`` is the part of QK-norm's own bias: ``terms.sum(-1) +
    constant = relative``.
    """

    terms: Float[Tensor, "b h m"]
    constant: Float[Tensor, "b h"]
    relative: Float[Tensor, "b h"]
    attention: Float[Tensor, "b h"]
    query: Float[Tensor, "b h m"]
    s: Float[Tensor, "h m"]
    key: Float[Tensor, "b h m"]
    q: Float[Tensor, "b h d"]
    difference: Float[Tensor, "b h d"]

    def values(
        self, draws: int, seed: int, prompts: Sequence[int]
    ) -> dict[str, Float[Tensor, "b h"]]:
        """How few terms carry each row, beside what rotated bases and random terms would show.

        ``rotated`` turns the two sides' singular vectors independently, ``rotated_shared`` the head
        space as a whole; ``prompts`` are the numbers that address their draws.
        """
        terms = self.terms
        shared = derived_seed(seed, "shared")
        turned = measure.turned_terms(self.query * self.key, self.s, draws, prompts, seed)
        return {
            "sparsity": measure.sparsity(terms),
            "rotated": measure.sparsity(turned).mean(0),
            "rotated_shared": measure.shared_sparsity(
                self.q, self.difference, draws, prompts, shared
            ),
            "relative": self.relative,
            "attention": self.attention,
            "count": measure.reconstruction_count(terms),
            "count_tol": measure.reconstruction_count(terms, TOLERANCE),
            "count_null": measure.null_count(terms, draws=draws, seed=seed),
            "count_tol_null": measure.null_count(terms, TOLERANCE, draws, seed),
            "cancellation": measure.cancellation(terms),
            "sigma_correlation": measure.rank_correlation(terms.abs(), self.s.expand_as(terms)),
            "sigma_rotated": measure.rank_correlation(turned.abs(), self.s.expand_as(turned)).mean(
                0
            ),
            "largest": measure.largest_place(terms),
            "largest_rotated": measure.largest_place(turned).mean(0),
        }


def relative_rows(
    captured: Capture,
    attended: Tensor,
    basis: SingularBasis,
    rows: Any = slice(None),
    heads: Any = None,
) -> RelativeRows:
    """Split the relative attention of rows that were captured in the query's frame with every key
    of their sequence.

    Parameters
    ----------
    captured : from places `Places.everywhere`.
    attended : slot of the key asked about, for each row and head; (b, 1) where it is one for all
        heads.
    basis : the singular basis of its heads.
    rows, heads : which of them, by number; all by default.
    """
    columns = list(range(len(captured.heads))) if heads is None else list(heads)
    index = basis.index([captured.heads[column] for column in columns])
    k = captured.k[rows][:, captured.kv_of_head[columns]].double().cpu()
    q = captured.q[rows][:, columns].double().cpu()
    scale = captured.scale[columns].double().cpu()[:, None]
    slot = attended.expand(-1, len(columns)).cpu().long()
    seen = captured.bias[rows][:, columns].isfinite().cpu()
    valid = seen.gather(-1, slot[..., None])[..., 0] & (seen.sum(-1) > 1)
    difference = measure.key_difference(
        k, slot, torch.where(valid[..., None], seen, torch.ones_like(seen))
    )
    difference = difference.masked_fill(~valid[..., None], torch.nan)
    constant = basis.c_Q[index].double()
    s = basis.S[index].double()
    alpha, gamma = singular_coordinates(basis.read[index], q - constant, difference)
    floor = torch.finfo(torch.float64).eps * s.amax(-1, keepdim=True)
    attention = (
        captured.attention()[rows][:, columns].cpu().gather(-1, slot[..., None])[..., 0].double()
    )
    return RelativeRows(
        terms=scale * alpha * gamma,
        constant=scale[:, 0] * (constant * difference).sum(-1),
        relative=scale[:, 0] * (q * difference).sum(-1),
        attention=attention.masked_fill(~valid, torch.nan),
        query=alpha,
        s=s,
        key=scale * torch.where(s > floor, gamma / s.clamp_min(torch.finfo(s.dtype).tiny), 0.0),
        q=q,
        difference=scale * difference,
    )


@verb("explain")
def attribute(
    scope: Scope,
    prompt: str | Example,
    head: str | Head,
    features: Fit | Mapping[str, Subspace],
    *,
    split: Split = "sequential",
    chat: bool | None = None,
    out: str | Path | None = None,
) -> Result:
    """Split the logits of every token of a prompt, as the last token (or the marked query) sees
    them.

    Parameters
    ----------
    scope : the model.
    prompt : a text, or an example with at most one marked query.
    head : the head that looks.
    features : a `Fit`, or subspaces of this head by name.
    split : ``sequential`` (the paper's), ``average`` over all orders, or ``oblique``.
    chat : whether the prompt goes into the chat template; as the features were fitted, if not
        given.
    out : folder for the result and its page; nothing is written by default.

    Returns
    -------
    Result
        ``tables["tokens"]``: attention, logit and its parts, token by token; ``tables["split"]``:
        the same parts, one a row; ``tables["summary"]``: the share of each feature, also in the
        reverse order; ``tables["overlap"]``.

    Examples
    --------
    >>> import torch, qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> feature = qk.Subspace.from_delta(torch.eye(scope.d_head), rank=2)
    >>> found = qk.attribute(scope, "hat: O jam:", "L1H3", {"first two": feature})
    >>> [row["part"] for row in found.tables["split"][:2]]
    ['first two', 'residual']
    """
    head = scope.check(head)
    chosen, space = features_of(features, head, scope)
    fitted_chat = isinstance(features, Fit) and features.chat
    asked = Question.first_of(
        scope, scope.encode([prompt], chat=fitted_chat if chat is None else chat)
    )
    captured = scope.capture_inputs(asked.inputs, places=asked.places, heads=[head], space=space)
    query = asked.query
    ordered = sorted(
        chosen.items(), key=lambda item: item[1].rank
    )  # what features share goes to the smaller
    bases = {part_name(name): subspace.basis("query") for name, subspace in ordered}
    q = captured.q[0, 0]
    k = captured.k[0, captured.kv_of_head[0], : query + 1]
    scale = float(captured.scale[0])
    parts = attribute_logits(q, k, scale, bases, split)
    reverse = attribute_logits(q, k, scale, dict(reversed(bases.items())))
    attention = captured.attention()[0, 0, : query + 1].tolist()
    logits = parts.logits.tolist()
    shown: dict[str, Any] = {
        "position": range(query + 1),
        "token": asked.tokens[: query + 1],
        "attention": attention,
    }
    shown |= {"logit": logits, **{name: part.tolist() for name, part in parts.parts.items()}}
    rows = [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)]
    best = max(rows, key=lambda row: row["attention"])
    terms = ", ".join(f"{name} {best[name]:.2f}" for name in parts.parts)
    bias = float(captured.bias[0, 0, best["position"]])
    ranks = {part_name(name): subspace.rank for name, subspace in ordered}
    shares = {name: _share(part, parts.logits) for name, part in parts.parts.items()}
    backward = {name: _share(part, parts.logits) for name, part in reverse.parts.items()}
    answer = (
        f"{head} gives {best['attention']:.2f} of its attention to {best['token']!r} (token {best['position']}): "
        f"logit {best['logit']:.2f} = {terms}{f', and {bias:+.2f} for the distance' if bias else ''}."
    )
    tables = {
        "tokens": rows,
        "summary": [
            {
                "feature": name,
                "rank": ranks.get(name),
                "variance_share": share,
                "reverse_order": backward[name],
            }
            for name, share in shares.items()
        ],
        "overlap": [
            {"one": a, "other": b, "cosine": cosine} for (a, b), cosine in parts.overlap.items()
        ],
        "split": split_rows(head, query, range(query + 1), parts.logits, parts.parts, "query"),
    }
    told = {**asked.told(prompt), "head": str(head), "split": split, "space": space}
    return Result("explain", tables, answer=answer, **made_with(scope, **told))


def features_of(features: Any, head: Head, scope: Scope) -> tuple[dict[str, Subspace], Space]:
    """The features of this head, of a `Fit` or by name, made with this model; and the space they
    were all fitted in.
    """
    if isinstance(features, Fit):
        features = {name: features[name, head] for name in default_features(features.contrasts)}
    for name, subspace in features.items():
        if subspace.head not in (None, head):
            raise BadInput(
                f"feature {name!r} belongs to {subspace.head}, not to {head}: name features of one head."
            )
        check_same_model(subspace.about, scope, f"feature {name!r}")
    spaces: set[Any] = {subspace.about.get("space", "post_rope") for subspace in features.values()}
    if len(spaces) != 1:
        there = ", ".join(sorted(spaces))
        raise BadInput(
            f"no feature was given, or of different spaces ({there}): name those of one."
        )
    return dict(features), spaces.pop()


def _share(part: Tensor, logits: Tensor) -> float:
    """Share of the logits' variance over tokens that a part carries: covariance over variance;
    shares sum to 1.

    A constant added to all logits changes no attention, so only what varies over tokens counts.
    """
    varies = logits - logits.mean()
    total = float((varies * varies).sum())
    return float(((part - part.mean()) * varies).sum()) / total if total > 0 else 0.0
