"""One held-out prompt whose keys are swapped: in closed form by `qk.swap`, with what a hook has to
know to do so.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import qkscope as qk
from qkscope.findings.swap_rows import draw_pairs


class Swapped(NamedTuple):
    ids: Tensor
    query: int
    tokens: tuple[int, int]  # of the right key and the one it is swapped with
    before: tuple[float, float]  # attention on the two
    after: tuple[float, float]


def own_feature(scope: qk.Scope, head: str, rank: int = 12) -> qk.sums.Subspace:
    """Directions that nobody chose, large enough to move attention."""
    delta = torch.randn(
        scope.d_head, scope.d_head, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return qk.sums.Subspace.from_delta(
        delta, rank, head=head, about={"group_size": scope.group_size}
    )


def swapped_prompt(scope: qk.Scope, feature: qk.sums.Subspace) -> Swapped:
    unit = qk.tasks.binding(4, form="sentence").test(1)[0][:1]
    example, pairs = unit[0], draw_pairs([unit])
    encoded = scope.encode([example])
    places = scope.capture_inputs(encoded, heads=[feature.head])
    swaps = qk.swap(
        scope, [unit], heads=[feature.head], subspaces={"mine": feature}, draws=1, progress=False
    )
    row = next(row for row in swaps.table() if row["kind"] == "feature")
    tokens = [int(places.key_positions[0, int(slot)]) for slot in (pairs.orig, pairs.target)]
    return Swapped(
        encoded.inputs["input_ids"],
        int(places.query_positions[0]),
        (tokens[0], tokens[1]),
        (row["orig_before"], row["target_before"]),
        (row["orig_after"], row["target_after"]),
    )


def difference(attention: Tensor, expected: tuple[float, float], tokens: tuple[int, int]) -> float:
    """The largest difference of a row of attention from what is expected at two tokens."""
    return float(
        (attention[list(tokens)].double() - torch.tensor(expected, dtype=torch.float64)).abs().max()
    )
