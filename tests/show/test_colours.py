"""Facts about colours: one for each name in charts and in figures, told apart by everybody, seen on
both papers.
"""

from itertools import combinations

import pytest

from qkscope.show.page import asset
from qkscope_papers.figures import colours_of, palette

# Machado, Oliveira and Fernandes (2009): how linear RGB looks to who has no red, or no green,
# receptors
EYES = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}
CONES = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.2119035, 0.68069955, 0.10739696],
    [0.08830246, 0.28171884, 0.6299787],
]
OKLAB = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.9779985, -2.4285922, 0.45059371],
    [0.02590404, 0.78277177, -0.80867577],
]
PAPERS = ("#ffffff", "#15181d")
DRAWN = (
    "turquoise",
    "purple",
    "rust",
    "gold",
    "navy",
    "wine",
    "olive",
    "violet",
    "petrol",
    "sand",
    "grey",
)


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def distance(one, other, eye):
    """In Oklab, times 100: two is what one can just tell."""
    seen = ([max(v, 0) for v in times(EYES[eye], linear(colour))] for colour in (one, other))
    at = [times(OKLAB, [max(c, 0) ** (1 / 3) for c in times(CONES, light)]) for light in seen]
    return 100 * sum((a - b) ** 2 for a, b in zip(*at, strict=True)) ** 0.5


def contrast(one, other):
    low, high = sorted(
        0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(one), linear(other))
    )
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", [0, 1])
def test_hues_are_told_apart_by_all_readers_and_seen_on_the_paper(paper):
    hues = {name: palette()["hues"][name][paper] for name in DRAWN}
    for name, colour in hues.items():
        assert contrast(colour, PAPERS[paper]) >= 3, name
    for one, other in combinations(hues, 2):
        for eye in EYES:
            assert distance(hues[one], hues[other], eye) > 5, (one, other, eye)


def test_a_name_has_its_colour_whoever_stands_beside_it_in_figures_and_on_the_page(browser):
    """The table is one; names that it lacks take a colour each."""
    for names in (
        ["order", "lexical"],
        ["lexical"],
        ["random", "lexical", "mine"],
        ["lexical", "box", "key_pca"],
    ):
        assert colours_of(names)["lexical"] == colours_of(["lexical"])["lexical"]
    names = [
        "mine",
        "order",
        "a",
        "b",
        "c",
        "d",
        "e",
        "f",
        "",
        "größer",
        "constructor",
        "__proto__",
        "key_pca",
    ]
    page = browser.new_page(color_scheme="light")
    page.set_content(f"<!doctype html><style>{asset('page.css')}</style><body></body>")
    page.add_script_tag(content="const qk = {};" + asset("colours.js"))
    code = """(names) => Object.entries(qk.partColours(names)).map(([name, colour]) => {
      document.body.style.background = colour;
      return [name, getComputedStyle(document.body).backgroundColor];
    })"""
    drawn = dict(page.evaluate(code, names))
    assert len(set(drawn.values())) == len(names)
    for name in ("order", "key_pca"):
        parts = [int(colours_of([name])[name][i : i + 2], 16) for i in (1, 3, 5)]
        assert drawn[name] == f"rgb({', '.join(map(str, parts))})"
