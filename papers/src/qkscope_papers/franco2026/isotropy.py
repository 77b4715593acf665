"""Figure 20: how far a dictionary of features is from isotropic.

Rows are scaled to norm 1, ``G = Dᵀ D`` is their Gram matrix over dimensions, ``E = G/c − I``. The paper's measure is
the spectral norm of E. Its scale c is not said: with ``c = tr G / d`` (= n/d for n rows) ‖E‖ cannot exceed d − 1; with
``c = 1``, the toy's, it grows with the number of rows. Both are given, beside a random dictionary of the same size.
The dictionary is any matrix: a decoder in a ``.safetensors`` file, or the token embeddings of a model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result
from qkscope_papers.franco2026.model_sweep import revisions_of
from qkscope_papers.registry import EMBEDDED, NANO, Settings, figure
from qkscope_papers.tables import Row

_ROWS = {"smoke": 4096, "default": 1 << 20, "paper": 1 << 20}  # rows of a dictionary at most
_DECODERS = ("W_dec", "decoder.weight", "W_D", "dictionary")


@figure("franco2026", "fig20", "Isotropy of a dictionary", model=NANO)
def run(settings: Settings) -> Result:
    """‖E‖ of every dictionary, and its spectrum."""
    rows, arrays = [], {}
    for name, matrix in _dictionaries(settings).items():
        kept = matrix[: _ROWS[settings.preset]].double()
        row, spectrum = isotropy(kept, settings.seed)
        rows.append({"dictionary": name, **row})
        arrays[f"spectrum/{name}"] = spectrum
    main = rows[-1]
    features = settings.model.endswith(".safetensors")
    claims = [
        Claim("‖E‖ of a dictionary of autoencoder features, c = tr G / d (control: random rows of the same number and "
              "width)", "C.2, Fig. 20: 10 to 55 over GPT-2's layers", main["e_trace"] if features else None,
              main["random"] if features else None, "10 <= ours <= 55", reason="not run here",
              why="No autoencoder of GPT-2 can be had offline: --model sae.safetensors takes one; c is not said.",
              changed="Token embeddings stood in for features, and passed at > 2 * control."),
    ]  # fmt: skip
    if not features:
        claims.append(Claim("token embeddings, which are no autoencoder's features, are anisotropic (‖E‖, c = tr G / "
                            "d; control: random rows of the same number and width)", "", main["e_trace"],
                            main["random"], "ours > 2 * control"))  # fmt: skip
    answer = (
        f"{main['dictionary']}: ‖E‖ is {main['e_trace']:.1f} at c = tr G / d (random rows {main['random']:.2f}, at "
        f"most {main['d'] - 1}) and {main['e_one']:.0f} at c = 1; without the mean row {main['e_centred']:.1f}."
    )
    return settings.result(answer, {"isotropy": rows}, claims, arrays, settings.model, {"model": settings.model})


def isotropy(matrix: Float[Tensor, "n d"], seed: int = 0) -> tuple[Row, Float[Tensor, " d"]]:
    """The numbers of one dictionary, and the eigenvalues of ``G / c`` at ``c = tr G / d``, largest first."""
    norms = matrix.norm(dim=-1)
    unit = matrix[norms > 0] / norms[norms > 0, None]
    n, d = unit.shape
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, d, generator=generator, dtype=torch.float64)
    spectrum = _spectrum(unit)
    share = spectrum / spectrum.sum()
    row = {
        "n": n, "d": d, "e_trace": _norm(spectrum), "e_one": float((spectrum * n / d - 1).abs().max()),
        "random": _norm(_spectrum(noise / noise.norm(dim=-1, keepdim=True))),
        "e_centred": _norm(_spectrum(torch.nn.functional.normalize(unit - unit.mean(0), dim=-1))),
        "effective_dimension": float(1 / share.square().sum()), "top_share": float(share[0]),
    }  # fmt: skip
    return row, spectrum


def _spectrum(unit: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    n, d = unit.shape
    return torch.linalg.eigvalsh(unit.mT @ unit).flip(0) * d / n


def _norm(spectrum: Tensor) -> float:
    """‖E‖: E has the eigenvalues of ``G / c``, less 1."""
    return float((spectrum - 1).abs().max())


def _dictionaries(settings: Settings) -> dict[str, Tensor]:
    """The matrices to look at, the one that the claim is about last."""
    if settings.model.endswith(".safetensors"):
        return read_dictionary(Path(settings.model))
    if not settings.model.startswith("nano:"):
        return {settings.model: _embeddings(settings.model, None, settings.device)}
    steps = (revisions_of(settings.model, "smoke") or "").split(",")
    found = {
        f"{settings.model}@{step}": _embeddings(settings.model, step, settings.device) for step in (steps[0], steps[-1])
    }
    return {**found, EMBEDDED: _embeddings(EMBEDDED, None, settings.device)}


def _embeddings(model: str, revision: str | None, device: str) -> Tensor:
    scope = Scope.load(model, revision=revision, device=device, check=False)
    return scope.model.get_input_embeddings().weight.detach().cpu()


def read_dictionary(path: Path) -> dict[str, Tensor]:
    """The decoder in a file: by its usual names, or else its only matrix; features are rows."""
    from safetensors.torch import load_file

    if not path.is_file():
        raise BadInput(f"there is no file {path}: name a .safetensors file with a decoder matrix.")
    matrices = {name: tensor.float() for name, tensor in load_file(path).items() if tensor.ndim == 2}
    named = [name for name in matrices if name.endswith(_DECODERS)] or list(matrices)
    if len(named) != 1:
        raise BadInput(f"{path} should hold one decoder matrix (W_dec), but its matrices are: {', '.join(matrices)}.")
    matrix = matrices[named[0]]
    # there are more features than dimensions: some save one per column
    return {f"{path.name}:{named[0]}": matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT}
