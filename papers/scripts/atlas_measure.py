"""What the names of an atlas are worth: predictions on unseen documents, labels, ablations, random weights.

    python papers/scripts/atlas_measure.py look FOLDER --kind python [--texts DIR] [--model MODEL] [--device cuda]
    python papers/scripts/atlas_measure.py look FOLDER --kind random0 --random 0 [--device cuda]
    python papers/scripts/atlas_measure.py score FOLDER --kind python --on python-test,packages-test [--model MODEL]
    python papers/scripts/atlas_measure.py speed FOLDER [--looks 40] [--device cuda]

``look`` writes, passage by passage, the looks of all heads with their reasons (documents to fit on), and where every
head looks (documents to choose, fit and test on); ``--looks 0`` leaves the reasons out. ``score`` names the heads from
these files and prints how well names predict, their areas under the curve against labels from repeated random tokens,
and what is left of copying with the heads named *induction* ablated, beside random heads of the same layers. ``speed``
says what an atlas takes, and where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
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
from qkscope.tasks.sides import SIDES, Passage
from qkscope.tasks.texts import python_texts, read_documents

JOBS = (guesses.PREVIOUS, guesses.DUPLICATE, guesses.INDUCTION)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("look", "score", "speed"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", default="python")
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
    {"look": look, "score": score, "speed": speed}[asked.what](scope, asked)


def look(scope: qk.Scope, asked: argparse.Namespace) -> None:
    """Write the looks of all heads."""
    documents = read_documents([asked.texts]) if asked.texts else python_texts(docstrings=True)
    heads, start = tuple(scope.parse(None)), time.time()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.random is not None:
        (first,) = atlas.passages_of(scope, documents, 1, atlas.LENGTH, 0)
        because_measure.peaked(scope, torch.tensor(first.ids, device=scope.device))
    for side in SIDES:
        some = atlas.passages_of(scope, documents, asked.passages, atlas.LENGTH, 0, side)
        seen, name = guesses.Sights.of(scope, heads, some), str(asked.folder / f"{asked.kind}-{side}")
        tensors = {"ids": seen.ids.int(), "keys": seen.keys.to(torch.uint8), "attention": seen.attention.half()}
        save_file(tensors, name + ".safetensors")
        Path(name + ".json").write_text(json.dumps([[p.document, p.group, p.ids] for p in some]))
        if side == "fit" and asked.looks:
            with Path(name + "-looks.jsonl").open("w") as file:
                for i in range(len(some[: asked.looks])):
                    for row in atlas.look_rows(scope, heads, seen, i, derived_seed(0, "atlas", i)):
                        row = {name: value for name, value in row.items() if name not in ("tokens", "text")}
                        print(json.dumps(row), file=file, flush=True)
                    print(f"{asked.kind}: passage {i + 1}, {time.time() - start:.0f} s", flush=True)


def sights(folder: Path, name: str, count: int | None = None) -> guesses.Sights:
    tensors = load_file(folder / f"{name}.safetensors")
    ids, keys, attention = (tensors[which][:count] for which in ("ids", "keys", "attention"))
    passages = [Passage(*x[:2], tuple(x[2])) for x in json.loads((folder / f"{name}.json").read_text())[:count]]
    return guesses.Sights(passages, ids.long(), keys.long(), attention.float())


def speed(scope: qk.Scope, asked: argparse.Namespace) -> None:
    """Seconds of an atlas, warm, and where they go: of all functions that take part, with what they call."""
    make = partial(qk.atlas, scope, test=asked.looks, progress=False)
    make(n=2)
    wall, cpu = time.perf_counter(), time.process_time()
    make(n=asked.looks)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{asked.looks} passages on {scope.device.type}: {wall:.1f} s, {cpu:.1f} CPU-seconds; once more, profiled:")
    with cProfile.Profile() as profile:
        make(n=asked.looks)
    files = r"qkscope/(analyses/(atlas|guesses|because)|change/|capture/running|linear/|tasks/|runs/work)"
    pstats.Stats(profile).sort_stats("cumulative").print_stats(files, 40)


def score(scope: qk.Scope, asked: argparse.Namespace) -> None:
    """Name heads, and say what the names are worth."""
    looks = [json.loads(line) for line in (asked.folder / f"{asked.kind}-fit-looks.jsonl").open()]
    fit = sights(asked.folder, f"{asked.kind}-fit", asked.looks)
    by_head = {str(head): [look for look in looks if look["head"] == str(head)] for head in scope.heads()}
    rows = [atlas.head_row(scope, head, h, by_head[str(head)], fit) for h, head in enumerate(scope.heads())]
    jobs = atlas.job_rows(by_head)
    print(f"{asked.kind}: {dict(Counter(row['kind'] for row in rows))}")
    if asked.random is not None:
        return
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


def pooled(rows: list[Any], jobs: list[Any], fit: guesses.Sights, test: guesses.Sights) -> None:
    """Log-loss over all heads without and with the name; the interval is by document."""
    without, changes, groups = [], [], []
    for h, row in enumerate(rows):
        shares = {job["job"]: job["share"] for job in jobs if job["head"] == row["head"]}
        losses = guesses.Guesses(h, dict(list(shares.items())[:3]), fit).losses(fit, test)
        without.append(losses[0])
        changes.append(losses[1] - losses[0])
        groups += [test.passages[i].group for i in test.of_head(h)[0].tolist()]
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
