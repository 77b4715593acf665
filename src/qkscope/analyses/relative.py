"""The singular basis of a model's heads, from its weights alone, and relative attention split over it:
``r = ℓ_i − mean_{j≠i} ℓ_j = Σ_m c_m``.

Queries and keys are taken in the query's frame, where the split is exact under RoPE too (`qkscope.maths.singular`); the
mean runs over the other keys that the query sees, so a sliding window counts its own keys alone. A sink has a logit but
no key, and takes no part. Where a family caps its logits, r is the logit before the cap: ``scale · qᵀ Δk``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.circuits import QUERY, locate, rows_from
from qkscope.analyses.prompts import check_same_model, made_with
from qkscope.capture.encode import token_texts
from qkscope.capture.pick import Capture
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.kinds import Count, Seed, checked_call
from qkscope.linear.weights import head_weights
from qkscope.maths import singular as measure
from qkscope.maths.attribution import split_rows
from qkscope.maths.singular import SingularBasis, basis_of_weights, singular_coordinates
from qkscope.runs.result import Result
from qkscope.runs.work import verb
from qkscope.tasks.task import ANSWER


@checked_call
def singular_basis(scope: Scope, heads: str | Head | Sequence[str | Head] | None = None) -> SingularBasis:
    """Singular vectors of ``Ω = W_Qᵀ W_K`` of some heads, all by default.

    Norm gains, biases (as a last coordinate, a constant 1) and QK-norm's gain are folded into W; where a norm centres,
    the part of W that reads the mean is taken out, as it reads nothing. Under RoPE it is the basis of the un-rotated
    Ω, over which a logit splits exactly in the query's frame (`qkscope.maths.singular`).

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
    return basis_of_weights(wanted, *tensors, rotary, weights.kv_of_head, about)


TOLERANCE = 0.99


class RelativeRows(NamedTuple):
    """Terms of rows (an example and one of its queries) and heads; NaN where a query does not see the key.

    ``terms = query · s · key``, with ``query = α`` (QK-norm's scalar included), ``key = γ / σ`` times the call's scale.
    ``constant`` is the part of QK-norm's own bias: ``terms.sum(-1) + constant = relative``.
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
    seen: Int[Tensor, "b h"]

    def values(self, draws: int, seed: int, prompts: Sequence[int]) -> dict[str, Float[Tensor, "b h"]]:
        """How few terms carry each row, beside what rotated bases and random terms would show.

        ``rotated`` turns the two sides' singular vectors independently, ``rotated_shared`` the head space as a whole;
        ``prompts`` are the numbers that address their draws.
        """
        terms, shared = self.terms, derived_seed(seed, "shared")
        turned = measure.turned_terms(self.query * self.key, self.s, draws, prompts, seed)
        return {
            "sparsity": measure.sparsity(terms),
            "rotated": measure.sparsity(turned).mean(0),
            "rotated_shared": measure.shared_sparsity(self.q, self.difference, draws, prompts, shared),
            "relative": self.relative,
            "attention": self.attention,
            "count": measure.reconstruction_count(terms),
            "count_tol": measure.reconstruction_count(terms, TOLERANCE),
            "count_null": measure.null_count(terms, draws=draws, seed=seed),
            "count_tol_null": measure.null_count(terms, TOLERANCE, draws, seed),
            "cancellation": measure.cancellation(terms),
            "sigma_correlation": measure.rank_correlation(terms.abs(), self.s.expand_as(terms)),
            "sigma_rotated": measure.rank_correlation(turned.abs(), self.s.expand_as(turned)).mean(0),
            "largest": measure.largest_place(terms),
            "largest_rotated": measure.largest_place(turned).mean(0),
        }


def relative_rows(
    captured: Capture, attended: Tensor, basis: SingularBasis, rows: Any = slice(None), heads: Any = None
) -> RelativeRows:
    """Split the relative attention of rows that were captured in the query's frame with every key of their sequence.

    Parameters
    ----------
    captured : from places `Places.everywhere`.
    attended : slot of the key asked about, for each row and head; (b, 1) where it is one for all heads.
    basis : the singular basis of its heads.
    rows, heads : which of them, by number; all by default.
    """
    columns = list(range(len(captured.heads))) if heads is None else list(heads)
    index = basis.index([captured.heads[column] for column in columns])
    k = captured.k[rows][:, captured.kv_of_head[columns]].double().cpu()
    q, scale = captured.q[rows][:, columns].double().cpu(), captured.scale[columns].double().cpu()[:, None]
    slot = attended.expand(-1, len(columns)).cpu().long()
    seen = captured.bias[rows][:, columns].isfinite().cpu()
    valid = seen.gather(-1, slot[..., None])[..., 0] & (seen.sum(-1) > 1)
    difference = measure.key_difference(k, slot, torch.where(valid[..., None], seen, torch.ones_like(seen)))
    difference = difference.masked_fill(~valid[..., None], torch.nan)
    constant, s = basis.c_Q[index].double(), basis.S[index].double()
    alpha, gamma = singular_coordinates(basis.read[index], q - constant, difference)
    floor = torch.finfo(torch.float64).eps * s.amax(-1, keepdim=True)
    attention = captured.attention()[rows][:, columns].cpu().gather(-1, slot[..., None])[..., 0].double()
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
        seen=seen.sum(-1),
    )


@verb("relative")
def relative_attention(
    scope: Scope,
    example: Example | str,
    head: str | Head,
    *,
    query: str | int | None = None,
    key: str | int | None = None,
    basis: SingularBasis | None = None,
    chat: bool = False,
    draws: Count = 20,
    seed: Seed = 0,
    out: str | Path | None = None,
) -> Result:
    """Split the relative attention of one head on one token over its singular vectors.

    Parameters
    ----------
    scope : the model.
    example : a text, or an example with its marks.
    head : the head that looks.
    query, key : where the head looks from and at: a role of the example ("END", "IO") or a token's position. By default
        the example's own query (or the last token), and its key labelled as the answer, or else the token that gets
        the most attention beside the first.
    basis : of this head, if there is one already.
    chat : whether the prompt goes into the chat template.
    draws, seed : of the rotated bases beside the sparsity.
    out : folder for the result and its page; nothing is written by default.

    Returns
    -------
    Result
        ``tables["terms"]`` (vector, sigma, query and key coordinate, term) sums with ``constant`` to ``relative``
        in ``tables["relative"]``; ``tables["split"]`` has the same terms as every split of a logit does.

    Examples
    --------
    >>> import qkscope as qk
    >>> found = qk.relative_attention(qk.Scope.load("nano:mixed"), "hat: O jam:", "L1H3", key=2)
    >>> relative, terms = found.tables["relative"][0], found.tables["terms"]
    >>> abs(sum(row["term"] for row in terms) - relative["relative"]) < 1e-6
    True
    """
    head = scope.check(head)
    example = Example(text=example) if isinstance(example, str) else example
    own = singular_basis(scope, [head]) if basis is None else basis
    check_same_model(own.about, scope, "this basis")
    if query is None and len(example.queries) > 1:
        raise BadInput(f"the example marks {len(example.queries)} queries: say which with query=.")
    if key is None and sum(k.label(ANSWER) > 0 for k in example.keys) == 1:
        key = ANSWER
    places = [QUERY if query is None else query, key]
    inputs, columns = locate(scope, [example], [place for place in places if isinstance(place, str)], chat)
    roles, length = iter(columns[0].tolist()), inputs["input_ids"].shape[1]
    at, slot = (next(roles) if isinstance(place, str) else place for place in places)
    assert at is not None
    for place in (at, slot):
        if place is not None and not 0 <= place < length:
            raise BadInput(f"there is no token {place}: the prompt has {length}, counted from 0.")
    if length < 2:
        raise BadInput("relative attention needs another key beside the attended one: give a longer prompt.")
    where = rows_from(inputs, torch.tensor([[at]]))
    captured = scope.capture_inputs(inputs, places=where, heads=[head], space="query_frame")
    if slot is None:  # the first token is where idle heads look
        slot = 1 + int(captured.attention()[0, 0, 1:].argmax())
    found = relative_rows(captured, torch.tensor([[slot]]), own)
    terms = found.terms[0, 0]
    if bool(terms.isnan().any()):
        raise BadInput(f"{head} does not see token {slot} from token {at}, or no other: ask about one in its window.")
    shown = [token_texts(scope, [i])[0] for i in inputs["input_ids"][0, [at, slot]].tolist()]
    values = {name: float(value) for name, value in found.values(draws, seed, [0]).items()}
    summary = {
        "head": str(head), "query": at, "key": slot, "query_token": shown[0], "key_token": shown[1], **values,
        "constant": float(found.constant), "others": int(found.seen) - 1,
    }  # fmt: skip
    rows = [
        {"vector": j, "sigma": float(found.s[0, j]), "query": float(found.query[0, 0, j]),
         "key": float(found.key[0, 0, j]), "term": float(terms[j])}
        for j in terms.abs().argsort(descending=True).tolist()
    ]  # fmt: skip
    parts = {f"vector {row['vector']}": terms[[row["vector"]]] for row in rows} | {"constant": found.constant[0]}
    split = split_rows(head, at, [slot], found.relative[0], parts, "both")
    count = values["count"]
    reached = f"{count:.0f} of {len(terms)} singular vectors reach it" if count == count else "it is not positive"
    answer = (
        f"From {shown[0]!r}, {head} gives {values['attention']:.2f} of its attention to {shown[1]!r}, a logit "
        f"{values['relative']:.2f} above the mean of the other {summary['others']}: {reached} (sparsity "
        f"{values['sparsity']:.2f}, under rotated vectors {values['rotated']:.2f})."
    )
    made = made_with(scope, head=str(head), prompt=example.show(2000), chat=chat, draws=draws)
    return Result("relative", {"relative": [summary], "terms": rows, "split": split}, answer=answer, seed=seed, **made)
