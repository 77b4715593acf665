"""Figure 20: how far a dictionary of features is from isotropic.

That is ``‖E‖`` with ``E = G/c − I``, ``G = Dᵀ D``. Rows are scaled to norm 1. The paper does not
say c: with ``c = tr G / d`` (= n/d for n rows) ‖E‖ cannot exceed d − 1; with ``c = 1``, the toy's,
it grows with the number of rows. Both are given, beside random rows of the same number. A
dictionary is an autoencoder's decoder (``--model sae.safetensors``; one for each layer, with commas
between, gives ‖E‖ by layer) or, as a stand-in, a model's token embeddings.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.model.dictionary import Dictionary
from qkscope.model.scope import Scope
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope_papers.figures import ORIGINAL, REST, new_figure
from qkscope_papers.registry import EMBEDDED, Settings, figure
from qkscope_papers.tables import Files, Row, column, files_of

_ROWS = {"smoke": 4096, "default": 1 << 20, "paper": 1 << 20}  # rows of a dictionary at most


@figure("franco2026", "fig20", "Isotropy of a dictionary", model=EMBEDDED)
def run(settings: Settings) -> Result:
    """‖E‖ of every dictionary."""
    rows = []
    for name in settings.model.split(","):
        found = isotropy(_dictionary(name, settings), settings.seed)
        rows.append({"dictionary": Path(name).name, **found})
    last = rows[-1]
    decoded = settings.model.endswith(".safetensors")
    claim = Claim(
        "‖E‖ of a dictionary of autoencoder features, c = tr G / d (control: random rows of "
        "the same number and width)",
        paper="C.2, Fig. 20: 10 to 55 over GPT-2's layers",
        ours=last["e_trace"] if decoded else None,
        control=last["random"] if decoded else None,
        rule="10 <= ours <= 55",
        reason="not run here",
        why=(
            "No autoencoder of GPT-2 can be had offline: --model sae.safetensors takes one; c "
            "is not said."
        ),
        changed="Token embeddings stood in for features, and passed at > 2 * control.",
    )
    answer = (
        f"{last['dictionary']}: ‖E‖ is {last['e_trace']:.1f} at c = tr G / d (random rows "
        f"{last['random']:.2f}, at most {last['d'] - 1}) and {last['e_one']:.0f} at c = 1; "
        f"without the mean row {last['e_centred']:.1f}."
    )
    about = {"model": settings.model}
    return settings.result(answer, {"isotropy": rows}, [claim], model=settings.model, about=about)


def isotropy(matrix: Float[Tensor, "n d"], seed: int = 0) -> Row:
    """‖E‖ of one dictionary at both scales, without its mean row, and of random rows."""
    there = matrix[matrix.norm(dim=-1) > 0].double()
    unit = torch.nn.functional.normalize(there, dim=-1)
    n, d = unit.shape
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return {
        "n": n,
        "d": d,
        "e_trace": _norm(unit, n / d),
        "e_one": _norm(unit, 1.0),
        "random": _norm(noise, n / d),
        "e_centred": _norm(unit - unit.mean(0), n / d),
    }


def _norm(rows: Float[Tensor, "n d"], c: float) -> float:
    """``‖G/c − I‖`` of the rows, scaled to norm 1."""
    unit = torch.nn.functional.normalize(rows, dim=-1)
    values = torch.linalg.eigvalsh(unit.mT @ unit)
    return float((values / c - 1).abs().max())


def _dictionary(name: str, settings: Settings) -> Float[Tensor, "n d"]:
    if name.endswith(".safetensors"):
        matrix = Dictionary.load(name, layer=0).decoder
    else:
        model = Scope.load(name, device=settings.device, check=False).model
        matrix = model.get_input_embeddings().weight.detach()
    return matrix[: _ROWS[settings.preset]].cpu()


@run.drawing
def draw(result: Result) -> Files:
    """‖E‖ beside random rows; grey: what the paper finds for GPT-2."""
    rows = result.tables["isotropy"]
    image = new_figure(5.0, 3.2)
    axis = image.subplots()
    axis.axhspan(10, 55, color=REST, alpha=0.3, lw=0)
    axis.plot(column(rows, "e_trace"), "o-", color=ORIGINAL, label="‖E‖, c = tr G / d")
    axis.plot(column(rows, "random"), "o-", color=REST, label="random rows")
    axis.set(yscale="log", xticks=range(len(rows)), xticklabels=column(rows, "dictionary"))
    axis.legend(frameon=False)
    return files_of(result, image)
