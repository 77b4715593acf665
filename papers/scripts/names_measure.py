"""The numbers of docs/names.md: every head named on documents that no choice was made on, and three tests of the names.

``python papers/scripts/names_measure.py --model smollm2-135m --out runs/names`` reads Python's own texts; ``--texts
DIR`` reads a folder of documents whose names end in a year instead (choose: divisible by four, fit: the other even
years, test: odd). Labels come from repeated random tokens: a head is called a previous-token, duplicate-token or
induction head if it gives the token before, the earlier copy, or what followed it, three tenths of its attention. What
predicts them is read off the text alone: the attention that distance alone would give the token before, times the
head's attention off the first token; the share of current · current; the share of current · previous.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

from qkscope import Scope
from qkscope.analyses.discover.changes import change_row
from qkscope.analyses.names.sight import Options, attend
from qkscope.analyses.names.study import Study, documents_of, passages_of
from qkscope.capture.gather import Plan
from qkscope.capture.tap import Call
from qkscope.draws import derived_seed
from qkscope.runs.result import provenance
from qkscope.runs.work import Work
from qkscope.tasks.sides import LENGTH, Passage, check_apart
from qkscope.tasks.texts import read_documents

LABEL = 0.3  # of a head's attention
HALF, SEQUENCES = 64, 48  # tokens that are repeated, and in how many sequences
TOLD = ("offset_share", "current_current", "current_previous", "sham", "rest")


def by_year(scope: Scope, folder: Path) -> tuple[list[Passage], list[Passage]]:
    """Passages of even years that are not divisible by four, and of odd years."""
    assert scope.tokenizer is not None
    start = list(scope.tokenizer("")["input_ids"])
    sides: dict[str, list[Passage]] = {"fit": [], "test": []}
    for document in read_documents([folder]):
        year = int(Path(document.name).stem[-4:])
        if year % 4 == 0:
            continue
        ids = list(scope.tokenizer(document.text, verbose=False)["input_ids"])[len(start) :]
        parts = math.ceil(len(ids) / (LENGTH - len(start)))
        for piece in torch.tensor(ids).tensor_split(parts):
            sides["test" if year % 2 else "fit"].append(Passage(document.name, year, (*start, *piece.tolist())))
    runs = {tuple(p.ids[i : i + 8]) for p in sides["test"] for i in range(len(p.ids) - 7)}
    shared = [any(tuple(p.ids[i : i + 8]) in runs for i in range(len(p.ids) - 7)) for p in sides["fit"]]
    sides["fit"] = [p for p, both in zip(sides["fit"], shared, strict=True) if not both]
    check_apart(sides)
    return sides["fit"], sides["test"]


@torch.no_grad()
def labels(study: Study) -> dict[str, torch.Tensor]:
    """Each head's attention to three places in the second half of repeated random tokens."""
    text, scope = study.text, study.text.scope
    words = [t for t in study.text.readings.vocabulary.tolist() if _is_word(scope, t)]
    generator = torch.Generator().manual_seed(derived_seed(0, "repeated"))
    picks = torch.tensor(words)[torch.randint(len(words), (SEQUENCES, HALF), generator=generator)]
    start = list(scope.tokenizer("")["input_ids"]) if scope.tokenizer is not None else []
    passages = [Passage("", 0, (*start, *row, *row)) for row in picks.tolist()]
    back = {"previous": 1, "duplicate": HALF, "induction": HALF - 1}
    found = {name: torch.zeros(len(text.heads)) for name in back}
    first = len(start) + HALF + 1
    for i in range(0, len(passages), 16):
        batch = text.batch(passages, list(range(i, min(i + 16, len(passages)))), [0] * min(16, len(passages) - i))
        places = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        kept = (places[:, None] >= places).expand(len(batch.ids), -1, -1)

        def take(call: Call, plan: Plan, kept: torch.Tensor = kept) -> None:
            attention = attend(text, call, plan, kept).attention
            at = torch.arange(first, attention.shape[2] - 1, device=attention.device)
            for name, offset in back.items():
                own = attention[:, :, at, at - offset].mean(dim=2).sum(dim=0)
                found[name][plan.slots] += own.cpu() / len(passages)

        text.watch(batch, take)
    return found


def _is_word(scope: Scope, token: int) -> bool:
    return scope.tokenizer is not None and scope.tokenizer.decode([token]).strip().isalpha()


def auc(study: Study, rows: list[dict[str, Any]], distances: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How well the names' shares tell the labelled heads."""
    curves: dict[str, list[float]] = {}
    for row in distances:
        curves.setdefault(row["head"], []).append(row["mean"])
    distance = [float(torch.tensor(curves[row["head"]]).softmax(0)[1]) * row["mass"] for row in rows]
    scores = {
        "previous": distance,
        "duplicate": [row["current_current"] for row in rows],
        "induction": [row["current_previous"] for row in rows],
    }
    made = []
    for name, attention in labels(study).items():
        labelled = (attention >= LABEL).tolist()
        told = roc_auc_score(labelled, scores[name]) if 0 < sum(labelled) < len(labelled) else None
        which = [row["head"] for row, is_one in zip(rows, labelled, strict=True) if is_one]
        made.append({"label": name, "heads": sum(labelled), "auc": told, "which": " ".join(which)})
    return made


def main() -> None:
    """Run both passes, and write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default=None)
    parser.add_argument("--texts", type=Path, default=None)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--test", type=int, default=100_000)
    parser.add_argument("--heads", default="L14H3,L16H0,L17H3,L17H4,L17H5,L18H6,L19H3")
    parser.add_argument("--changes", type=int, default=384)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    start = time.perf_counter()
    scope = Scope.load(asked.model, device=asked.device)
    options = Options(asked.n, asked.test, batch_size=64 if asked.device == "cuda" else 16)
    sides = passages_of(scope, documents_of(None), options) if asked.texts is None else by_year(scope, asked.texts)
    study = Study.of(scope, scope.heads(), sides, options, Work(), verb="measure")
    tables = study.tables()
    rows = tables["heads"]
    named = sorted(1 - row["rest"] for row in rows)
    shams = [study.shares(h).sham for h in range(len(rows))]
    summary = {
        "heads": len(rows), "named": sum(row["name"] != "not named" for row in rows),
        "median_named_share": named[len(named) // 2], "half_named": sum(x >= 0.5 for x in named),
        "largest_sham": max(s[0] for s in shams), "shams_above": sum(s[1] > 0 and s[0] > 0.04 for s in shams),
        "fitted": sum(len(p.ids) for p in study.fitted), "tested": sum(len(p.ids) for p in study.tested),
        "documents": len({p.group for p in study.tested}),
    }  # fmt: skip
    wanted = [h for h, head in enumerate(scope.heads()) if str(head) in asked.heads.split(",")]
    changes = []
    for h in wanted:
        pair = next((p for p in study.shares(h).named() if p != ("mean", "mean")), None)
        row = None if pair is None else change_row(study, h, pair, asked.changes)
        changes += [] if row is None else [row]
    found = {
        "summary": summary, "auc": auc(study, rows, tables["distances"]), "changes": changes,
        "heads": rows, "blocks": tables["blocks"], "seconds": time.perf_counter() - start,
        "provenance": provenance(model=scope.name, weights=scope.weights_hash),
    }  # fmt: skip
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "names.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(summary))
    for row in found["auc"]:
        print(row)
    for row in (rows[h] for h in wanted):
        print(row["head"], row["name"], row["share"], [row["low"], row["high"]], {name: row[name] for name in TOLD})
    for row in changes:
        print(row)


if __name__ == "__main__":
    main()
