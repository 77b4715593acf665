"""What the names of an atlas are worth: predictions on unseen documents, labels, ablations, random weights.

    python papers/scripts/atlas_measure.py look FOLDER --kind python [--texts DIR] [--model MODEL] [--device cuda]
    python papers/scripts/atlas_measure.py look FOLDER --kind random0 --random 0 [--device cuda]
    python papers/scripts/atlas_measure.py score FOLDER --kind python --on python-test,packages-test [--model MODEL]

``look`` writes, passage by passage, the looks of all heads with their reasons (documents to fit on), and where every
head looks (documents to choose, fit and test on); ``--looks 0`` leaves the reasons out. ``score`` names the heads from
these files and prints how well names predict, their areas under the curve against labels from repeated random tokens,
and what is left of copying with the heads named *induction* ablated, beside random heads of the same layers.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import because_measure
import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForCausalLM

import qkscope as qk
from qkscope.analyses import atlas, guesses
from qkscope.change.again import prompt_of
from qkscope.draws import derived_seed
from qkscope.maths.significance import clustered_bootstrap
from qkscope.tasks.sides import Passage, split
from qkscope.tasks.texts import python_texts, read_documents

JOBS = (guesses.PREVIOUS, guesses.DUPLICATE, guesses.INDUCTION)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("look", "score"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device")
    parser.add_argument("--random", type=int)
    parser.add_argument("--looks", type=int, default=40)
    parser.add_argument("--passages", type=int, default=60)
    parser.add_argument("--on", default="")
    asked = parser.parse_args()
    scope = qk.Scope.load(asked.model, device=asked.device)
    if asked.random is not None:
        torch.manual_seed(asked.random)
        model = AutoModelForCausalLM.from_config(scope.model.config).to(scope.device, torch.float32).eval()
        scope = qk.Scope.from_model(model, scope.tokenizer, name="random", check=False)
    (look if asked.what == "look" else score)(scope, asked)


def look(scope: qk.Scope, asked: argparse.Namespace) -> None:
    """Write the looks of all heads."""
    documents = read_documents([asked.texts]) if asked.texts else python_texts(docstrings=True)
    sides = split(documents, lambda text: scope.tokenizer(text, verbose=False)["input_ids"], length=64, seed=0)
    heads, start = tuple(scope.parse(None)), time.time()
    if asked.random is not None:
        because_measure.peaked(scope, torch.tensor(sides["fit"][0].ids, device=scope.device))
    asked.folder.mkdir(parents=True, exist_ok=True)
    for side, passages in sides.items():
        whole = [passage for passage in passages if len(passage.ids) > 16]
        order = torch.Generator().manual_seed(derived_seed(0, "passages", side))
        some = [whole[i] for i in torch.randperm(len(whole), generator=order).tolist()[: asked.passages]]
        keys, attention = torch.zeros(2, len(some), len(heads), 64)
        for i, passage in enumerate(some):
            sight = guesses.Sight.of(scope, heads, passage)
            keys[i, :, : len(passage.ids)], attention[i, :, : len(passage.ids)] = sight.keys.float(), sight.attention
        name = str(asked.folder / f"{asked.kind}-{side}")
        save_file({"keys": keys.to(torch.uint8), "attention": attention.half()}, name + ".safetensors")
        Path(name + ".json").write_text(json.dumps([[p.document, p.group, p.ids] for p in some]))
        if side == "fit" and asked.looks:
            with Path(name + "-looks.jsonl").open("w") as file:
                for i, passage in enumerate(some[: asked.looks]):
                    for row in atlas.look_rows(scope, heads, passage, derived_seed(0, "atlas", i)):
                        row = {name: value for name, value in row.items() if name not in ("tokens", "text")}
                        print(json.dumps(row), file=file, flush=True)
                    print(f"{asked.kind}: passage {i + 1}, {time.time() - start:.0f} s", flush=True)


def sights(folder: Path, name: str) -> list[guesses.Sight]:
    tensors, made = load_file(folder / f"{name}.safetensors"), []
    for i, (document, group, ids) in enumerate(json.loads((folder / f"{name}.json").read_text())):
        keys, attention = (tensors[which][i, :, : len(ids)] for which in ("keys", "attention"))
        made.append(guesses.Sight(Passage(document, group, tuple(ids)), keys.long(), attention.float()))
    return made


def score(scope: qk.Scope, asked: argparse.Namespace) -> None:
    """Name heads, and say what the names are worth."""
    looks = [json.loads(line) for line in (asked.folder / f"{asked.kind}-fit-looks.jsonl").open()]
    if asked.random is not None:
        first = Counter(look["job"] for look in looks)
        kinds = Counter(
            Counter(x["job"] for x in looks if x["head"] == str(h)).most_common(1)[0][0] for h in scope.heads()
        )
        print(f"{asked.kind}: kinds of heads {dict(kinds)}; jobs of looks {dict(first)}")
        return
    fit = sights(asked.folder, f"{asked.kind}-fit")[: asked.looks]
    rows = [
        atlas.head_row(scope, head, h, [look for look in looks if look["head"] == str(head)], fit)
        for h, head in enumerate(scope.heads())
    ]
    jobs = atlas.job_rows(rows, looks)
    print(f"{asked.kind}: {dict(Counter(row['kind'] for row in rows))}")
    for kind in JOBS:
        print(f"  {kind}: " + "; ".join(f"{row['head']} {row['name']}" for row in rows if row["kind"] == kind))
    for name in filter(None, asked.on.split(",")):
        test = sights(asked.folder, name)
        said(guesses.score_rows(rows, jobs, fit, test), name)
        pooled(rows, jobs, fit, test)
    labels(scope, jobs)
    ablated(scope, [row["head"] for row in rows if row["kind"] == guesses.INDUCTION])


def said(scores: list[dict[str, Any]], on: str) -> None:
    """How often the name is right, beside the baselines."""
    for text, some in (
        ("names that are no offset", [row for row in scores if not row["kind"].startswith(guesses.NO_RULE)]),
        ("all heads", scores),
    ):
        n = len(some)
        means = {name: round(sum(row[name] for row in some) / n, 3) for name in ("name", *guesses.BASELINES)}
        better, worse = sum(row["low"] > 0 for row in some), sum(row["high"] < 0 for row in some)
        lower, higher = sum(row["loss_high"] < 0 for row in some), sum(row["loss_low"] > 0 for row in some)
        print(f"  on {on}, {text} ({n}): better than the best offset {better / n:.0%}, worse {worse / n:.0%}; {means};")
        print(f"    log-loss lower with the name at {lower} heads, higher at {higher}")


def pooled(rows: list[Any], jobs: list[Any], fit: list[guesses.Sight], test: list[guesses.Sight]) -> None:
    """Log-loss over all heads without and with the name; the interval is by document."""
    without, changes, groups = [], [], []
    for h, row in enumerate(rows):
        shares = {job["job"]: job["share"] for job in jobs if job["head"] == row["head"]}
        losses = guesses.Guesses(h, dict(list(shares.items())[:3]), fit).losses(fit, test)
        without.append(losses[0])
        changes.append(losses[1] - losses[0])
        groups += [sight.passage.group for sight in test for _ in range(int(sight.looks[h].sum()))]
    change = torch.cat(changes).double()
    low, high = clustered_bootstrap(change[:, None], torch.tensor(groups))
    ends = f"{change.mean():+.3f} [{low[0]:+.3f}, {high[0]:+.3f}]"
    print(f"    all looks: log-loss {torch.cat(without).mean():.3f}, with the name {ends}")


# ---------------------------------------------------------------------- repeated random tokens


def repeated(scope: qk.Scope, count: int = 16, length: int = 32) -> torch.Tensor:
    ids = torch.randint(1000, 40000, (count, length), generator=torch.Generator().manual_seed(0))
    return torch.cat([ids, ids], dim=1).to(scope.device)


def labels(scope: qk.Scope, jobs: list[dict[str, Any]]) -> None:
    """Areas under the curve of each job's share against labels from repeated random tokens (attention above .3)."""
    ids, scored = repeated(scope), dict[int, dict[str, torch.Tensor]]()
    half, index = ids.shape[1] // 2, torch.arange(ids.shape[1] // 2 - 2, device=ids.device)
    at = half + 1 + index

    def visit(call: Any) -> None:
        weights = call.attention(list(range(call.q.shape[1])))[:, :, at]
        targets = zip(JOBS, (at - 1, at - half, at - half + 1), strict=True)
        scored[call.layer] = {job: weights[:, :, index, key].mean((0, 2)) for job, key in targets}

    scope.watch(prompt_of(scope, ids), visit)
    for job in JOBS:
        truth = [float(scored[head.layer][job][head.index]) > 0.3 for head in scope.heads()]
        share = {row["head"]: row["share"] for row in jobs if row["job"] == job}
        area = roc_auc_score(truth, [share.get(str(head), 0.0) for head in scope.heads()])
        print(f"  labels from repeated random tokens, {job} ({sum(truth)} heads): area under the curve {area:.3f}")


def ablated(scope: qk.Scope, heads: list[str]) -> None:
    """Accuracy on the second copy with heads ablated together, beside random sets of the same layers."""

    def accuracy(some: list[str]) -> float:
        ids = repeated(scope)
        with torch.no_grad(), ExitStack() as stack:
            if some:
                stack.enter_context(scope.ablate(*some))
            model = stack.enter_context(scope.patched([]))
            logits = model(**prompt_of(scope, ids), use_cache=False).logits
        half = ids.shape[1] // 2
        return float((logits[:, half:-1].argmax(-1) == ids[:, half + 1 :]).float().mean())

    draws, before = random.Random(0), accuracy([])
    others = {head: [str(h) for h in scope.heads() if h.layer == qk.Head.parse(head).layer] for head in heads}
    free = {head: [name for name in names if name not in heads] for head, names in others.items()}
    sets = sorted(accuracy([draws.choice(free[head]) for head in heads]) for _ in range(20))
    together, single = accuracy(heads), {head: f"{accuracy([head]) / before - 1:+.0%}" for head in [*heads, "L16H0"]}
    print(f"  second copy right {before:.2f}; {len(heads)} induction heads ablated {together / before - 1:+.0%};")
    low, median, high = (f"{sets[i] / before - 1:+.0%}" for i in (0, 10, -1))
    print(f"    20 random sets: median {median}, {low} to {high}; each alone {single}")


if __name__ == "__main__":
    main()
