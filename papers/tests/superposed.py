"""Small toys of superposition: every kind of head, loss and target."""

from qkscope_papers.franco2026.toy.stack import ToyCell
from qkscope_papers.franco2026.toy.superposition import Superposition, distort, isotropic_dictionary

SMALL = {"n": 6, "d": 4, "d_head": 4, "pairs": ((0, 2, 6.0), (1, 3, 4.0))}
TOYS = [
    ToyCell(Superposition(**SMALL), steps=40, every=20),
    ToyCell(Superposition(**{**SMALL, "d_head": 2, "p": 0.2}), steps=40, every=20),
    ToyCell(
        Superposition(**{**SMALL, "reading": "B", "weight": 2.0, "scaled": True}),
        steps=40,
        every=20,
    ),
    ToyCell(Superposition(**{**SMALL, "weight": 0.0, "p": 1.0}), steps=40, every=20),
    ToyCell(Superposition(**{**SMALL, "pairs": ((0, 0, -3.0), (5, 1, 2.0))}), steps=40, every=20),
]
FROZEN = [
    ToyCell(
        Superposition.frozen(distort(isotropic_dictionary(), 5.0, 0), scaled=True),
        steps=40,
        every=20,
    )
]
