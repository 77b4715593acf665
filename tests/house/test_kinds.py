"""Facts about checked calls: annotations decide what a call takes, and anything else is one
sentence.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput
from qkscope.checking import Count, Share, checked_call
from qkscope.heads import Head


@checked_call
def call(
    n: Count = 1, share: Share = 0.5, names: Sequence[str] = (), head: str | Head | None = None,
    x: Float[Tensor, "n d"] | None = None, side: Literal["query", "key"] = "key", span: tuple[int, int] = (0, 1),
    labels: Mapping[str, int] | None = None,
) -> tuple[object, ...]:  # fmt: skip
    """Every kind of annotation that our calls have."""
    return n, share, names, head, x, side, span, labels


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"n": True}, "n of call should be a valid integer, but got True."),
        ({"share": 30}, "share of call should be at most 1, but got 30."),
        ({"names": "order"}, "names of call should be a list, but got 'order'."),
        ({"head": 7}, "head of call should be a valid string or an instance of Head, but got 7."),
        (
            {"x": torch.ones(3)},
            "an instance of Float[Tensor, 'n d'], but got Tensor of shape (3,), float32.",
        ),
        ({"side": "left"}, "side of call should be 'query' or 'key', but got 'left'."),
        ({"sides": "key"}, "call: unexpected keyword argument 'sides'."),
    ],
)
def test_what_an_annotation_does_not_allow_is_one_sentence(given, says):
    with pytest.raises(BadInput) as error:
        call(**given)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_of_numpy_and_torch_are_numbers_and_lists_are_tuples():
    found = call(
        np.int64(3),
        np.float32(0.5),
        ["a"],
        "L0H1",
        torch.ones(2, 3),
        "query",
        [2, 3],
        {"a": torch.tensor(1)},
    )
    assert (found[0], found[1], found[6], found[7]) == (3, 0.5, (2, 3), {"a": 1})
    assert [type(found[0]), type(found[1]), type(found[7]["a"])] == [int, float, int]
