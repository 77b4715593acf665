"""Figures 5, 6 and 24: relative attention of single token pairs, term by term, early and late in training.

With the first pair alone in the tokens one term should carry the relative logit late in training (figure 5); with no
feature of interest none should (figure 24). Figure 6: a term's size against the strength ``x_q x_k`` of its pair, as a
correlation; control: the same term and the strengths of other pairs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.maths.draws import derived_seed
from qkscope.maths.sparsity import rotated_terms, sparsity
from qkscope.papers.fleet import one_thread
from qkscope.papers.franco2026.cells import PRESETS, toys_of
from qkscope.papers.franco2026.token_pairs import coordinates, draw_token_pairs
from qkscope.papers.franco2026.toy.superposition import by_logit
from qkscope.papers.franco2026.toy.trained import TrainedToy
from qkscope.papers.registry import Settings
from qkscope.papers.rows import Row, mean
from qkscope.result import Claim, Result, provenance

_SHOWN = 40  # contexts of a heat map


@one_thread()
def run(settings: Settings) -> Result:
    """Terms of many token pairs before and after training."""
    toys = next(iter(toys_of(settings).values()))
    if settings.figure == "fig6":
        return _strengths(toys, settings)
    work = PRESETS[settings.preset]
    none = settings.figure == "fig24"
    rows: list[Row] = []
    arrays: dict[str, Tensor] = {}
    for trained in toys:
        for name, check in (("early", 0), ("late", -1)):
            task = trained.cell.task
            present, only = ("none", None) if none else ("one", 0)
            seed = derived_seed(settings.seed, 32, trained.cell.seed)
            pairs = draw_token_pairs(task, present, work.contexts, seed, only)  # type: ignore[arg-type]
            at = coordinates(trained.at(check), pairs)
            turned = rotated_terms(at.query, at.s, at.difference, work.rotations, derived_seed(settings.seed, 33))
            if trained is toys[0]:
                arrays[f"terms/{name}"] = at.terms[:_SHOWN].float()
                arrays[f"rotated/{name}"] = turned[0, :_SHOWN].float()
            rows.append({
                "when": name, "seed": trained.cell.seed, "step": trained.steps[check],
                "present": "none" if none else "one", "sparsity": float(sparsity(at.terms).nanmean()),
                "rotated": float(sparsity(turned).nanmean()), "first_share": float(_first_share(at.terms)),
                "rotated_share": float(_first_share(turned)), "size": float(at.terms.abs().sum(-1).mean()),
            })  # fmt: skip
    late, early = ([row for row in rows if row["when"] == when] for when in ("late", "early"))
    share, control = mean(r["first_share"] for r in late), mean(r["first_share"] for r in early)
    what = "no feature of interest" if none else "the pair 0-4 alone"
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=(
            f"With {what} in the tokens the largest term holds {share:.2f} of Σ|c| after training, {control:.2f} "
            "before; "
            f"sparsity {mean(r['sparsity'] for r in late):.3f} (rotated basis {mean(r['rotated'] for r in late):.3f})."
        ),
        tables={"terms": rows},
        claims=_none_claims(late, early) if none else _one_claims(late, early),
        arrays=arrays,
        preset=settings.preset,
        seed=settings.seed,
        provenance=provenance(figure=settings.figure, preset=settings.preset, work=vars(work)),
    )


def _first_share(terms: Float[Tensor, "*c m"]) -> Tensor:
    """Mean share of the largest |c| in Σ|c|."""
    return (terms.abs().amax(-1) / terms.abs().sum(-1)).nanmean()


def _one_claims(late: list[Row], early: list[Row]) -> list[Claim]:
    return [
        Claim("with one pair present a single term carries relative attention (share of the largest |c|; control: "
              "early)",
              "only one", mean(r["first_share"] for r in late), mean(r["first_share"] for r in early),
              "ours >= 0.9 and ours > control"),
        Claim("... which a rotated basis does not show (sparsity, worst seed; control: rotated, best seed)", "sparse",
              max(r["sparsity"] for r in late), min(r["rotated"] for r in late), "ours < control"),
    ]  # fmt: skip


def _none_claims(late: list[Row], early: list[Row]) -> list[Claim]:
    return [
        Claim("without features of interest no single term stands out (share of the largest |c|; control: early)",
              "not sparse", mean(r["first_share"] for r in late), mean(r["first_share"] for r in early),
              "ours < 2 * control"),
        Claim("... it is no sparser than in a rotated basis (sparsity; control: rotated)", "not in the paper",
              mean(r["sparsity"] for r in late), mean(r["rotated"] for r in late), "ours >= 0.8 * control"),
        Claim("... and the terms are small (mean Σ|c| late; control: early)", "absent", mean(r["size"] for r in late),
              mean(r["size"] for r in early), "ours < control"),
    ]  # fmt: skip


# ---------------------------------------------------------------------- figure 6


def _strengths(toys: list[TrainedToy], settings: Settings) -> Result:
    work = PRESETS[settings.preset]
    rows: list[Row] = []
    arrays: dict[str, Tensor] = {}
    for trained in toys:
        task, ranked = trained.cell.task, by_logit(trained.cell.task.pairs)  # term k belongs to the k-th largest target
        # as in training: any number of pairs present
        generator = torch.Generator().manual_seed(derived_seed(settings.seed, 34, trained.cell.seed))
        shape = (work.contexts, 1 + task.context, task.n)
        x = task.strengths(torch.rand(shape, generator=generator, dtype=torch.float64))
        for control, check in ((False, -1), (True, 0)):
            toy = trained.at(check)
            at = coordinates(toy, draw_token_pairs(task, "none", work.contexts, 0)._replace(x_q=x[:, 0], x_k=x[:, 1:]))
            others = x[:, 2:].mean(1)
            strength = torch.stack([x[:, 0, q] * (x[:, 1, k] - others[:, k]) for q, k, _ in ranked], dim=1)
            found = torch.corrcoef(torch.cat([at.terms[:, : len(ranked)], strength], dim=1).mT)
            cross = found[: len(ranked), len(ranked) :]
            if trained is toys[0]:
                arrays[f"terms/{'early' if control else 'late'}"] = at.terms[:, : len(ranked)].float()
                arrays["strength"] = strength.float()
            for i, (q, k, logit) in enumerate(ranked):
                off = torch.cat([cross[i, :i], cross[i, i + 1 :]])
                rows.append({"seed": trained.cell.seed, "step": trained.steps[check], "pair": f"{q}-{k}",
                             "target_logit": logit, "correlation": float(cross[i, i]),
                             "other_correlation": float(off.abs().max()) if len(off) else float("nan"),
                             "slope": float(_slope(strength[:, i], at.terms[:, i])), "control": control})  # fmt: skip
    late = [row for row in rows if not row["control"]]
    early = [row for row in rows if row["control"]]
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=(
            "The least correlation of a term with the strength of its own pair is "
            f"{min(r['correlation'] for r in late):.3f}, the largest with another pair's "
            f"{max(r['other_correlation'] for r in late):.2f}; before training |correlation| with its own pair is "
            f"{mean(abs(r['correlation']) for r in early):.2f} on average."
        ),
        tables={"strength": rows},
        claims=[
            Claim("a term's contribution correlates with its pair's strength (least over pairs and seeds; control: "
                  "with "
                  "the strengths of other pairs, largest)", "correlates", min(r["correlation"] for r in late),
                  max(r["other_correlation"] for r in late), "ours >= 0.9 and ours > 2 * control"),
            Claim("... which an untrained head does not show (mean |correlation|; control: untrained)", "implied",
                  mean(abs(r["correlation"]) for r in late), mean(abs(r["correlation"]) for r in early),
                  "ours > 2 * control"),
        ],
        arrays=arrays,
        preset=settings.preset,
        seed=settings.seed,
        provenance=provenance(figure=settings.figure, preset=settings.preset, work=vars(work)),
    )  # fmt: skip


def _slope(x: Tensor, y: Tensor) -> Tensor:
    return ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
