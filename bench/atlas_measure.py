"""What the names of an atlas are worth, on unseen documents, labels and random weights.

    python bench/atlas_measure.py RUN [--model MODEL] [--texts DIR] [-n 40] [--on
    python,packages,DIR] python bench/atlas_measure.py RUN --ship FILE --hardware "two CPU
    cores" python bench/atlas_measure.py RUN --random 0 -n 16

RUN is a folder that ``qkscope atlas`` wrote; where it is none, the atlas is made there, and the
script says what it took (``--warm``: after a small one). Then it prints how well names predict on
passages of unseen documents, their areas under the curve against labels from repeated random
tokens, and what is left of copying with the heads named *induction* ablated, beside random heads of
the same layers. ``--ship`` writes the file that comes with the package.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from contextlib import ExitStack
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

import because_measure
import qkscope as qk
from qkscope.findings.head_jobs import DUPLICATE, INDUCTION, PREVIOUS
from qkscope.heads import Head
from qkscope.rerun.rerun_tokens import prompt_of
from qkscope.results.result import Result
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.documents import Document, package_texts, python_texts, read_documents
from qkscope.verbs.atlas import atlas
from qkscope.verbs.atlas import head_names as guesses
from qkscope_papers.models import random_weights

JOBS = (PREVIOUS, DUPLICATE, INDUCTION)
# passages of unseen documents, and random tokens that are repeated
TESTED = 60
LENGTH = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", default="python")
    parser.add_argument("-n", type=int, default=40)
    parser.add_argument("--on", default="")
    parser.add_argument("--random", type=int)
    parser.add_argument("--warm", action="store_true")
    for name in ("device", "ship", "hardware"):
        parser.add_argument(f"--{name}")
    asked = parser.parse_args()
    scope = qk.Scope.load(asked.model, device=asked.device)
    documents = texts(asked.texts)
    if asked.random is not None:
        scope = random_weights(scope.model.config, scope.tokenizer, scope.device, asked.random)
        (first,) = atlas.passages_of(scope, documents, 1, atlas.LENGTH, 0)
        because_measure.peaked(scope, torch.tensor(first.ids, device=scope.device))
    if not (asked.run / "results.json").exists():
        make = partial(qk.atlas, scope, None if asked.texts == "python" else documents)
        if asked.warm:
            make(2, test=2, progress=False)
        start = time.process_time()
        wall = make(asked.n, test=asked.n, out=asked.run).seconds
        cpu = time.process_time() - start
        print(
            f"{asked.n} passages on {scope.device.type}: {wall:.1f} s, {cpu:.1f} CPU-seconds",
            flush=True,
        )
    names = Result.read(asked.run)
    if asked.ship:
        ship(names, asked)
    print(names.answer)
    if asked.random is None and not asked.ship:
        score(scope, names, documents, asked.on)


def texts(name: str) -> tuple[Document, ...]:
    """Python's texts, what packages say of themselves, or a folder."""
    if name in ("python", "packages"):
        return python_texts(docstrings=True) if name == "python" else package_texts()
    return tuple(read_documents([Path(name)]))


def ship(names: Result, asked: argparse.Namespace) -> None:
    """Write the heads, their names and their jobs, with what made them."""
    heads = [
        {name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()}
        for row in names.table()
    ]
    for row in heads:
        own = (job for job in names.tables["jobs"] if job["head"] == row["head"])
        row["jobs"] = {job["job"]: round(job["share"], 3) for job in own}
    made = {name: names.provenance[name] for name in ("command", "asked", "versions")}
    command = (
        made["command"] or f"python bench/atlas_measure.py RUN --model {asked.model} -n {asked.n}"
    )
    made |= {
        "command": command,
        "date": f"{date.today()}",
        "hardware": asked.hardware,
        "answer": names.answer,
    }
    Path(asked.ship).write_text(
        json.dumps({"made": made, "heads": heads}, ensure_ascii=False, indent=0) + "\n"
    )


def score(scope: qk.Scope, names: Result, documents: tuple[Document, ...], on: str) -> None:
    """Say what the names of all heads are worth."""
    rows = names.tables["atlas"]
    jobs = names.tables["jobs"]
    heads = tuple(scope.heads())
    print(dict(Counter(row["kind"] for row in rows)))
    for kind in JOBS:
        print(
            f"  {kind}: "
            + "; ".join(f"{row['head']} {row['name']}" for row in rows if row["kind"] == kind)
        )
    labels(scope, jobs)
    ablated(scope, [row["head"] for row in rows if row["kind"] == INDUCTION], jobs)
    sights = partial(atlas.passages_of, scope, length=atlas.LENGTH, seed=0)
    fit = guesses.Sights.of(scope, heads, sights(documents, names.provenance["asked"]["n"]))
    for name in filter(None, on.split(",")):
        test = guesses.Sights.of(scope, heads, sights(texts(name), TESTED, side="test"))
        said(guesses.score_rows(rows, jobs, fit, test), name)
        pooled(rows, jobs, fit, test)


def said(scores: list[dict[str, Any]], on: str) -> None:
    """How often the name is right, beside the baselines."""
    for text, some in (
        (
            "names that are no offset",
            [row for row in scores if not row["kind"].startswith(guesses.NO_RULE)],
        ),
        ("all heads", scores),
    ):
        n = len(some)
        means = {
            name: round(sum(row[name] for row in some) / n, 3)
            for name in ("name", *guesses.BASELINES)
        }
        better = sum(row["low"] > 0 for row in some)
        worse = sum(row["high"] < 0 for row in some)
        lower = sum(row["loss_high"] < 0 for row in some)
        higher = sum(row["loss_low"] > 0 for row in some)
        print(
            f"  on {on}, {text} ({n}): better than the best offset {better / n:.0%}, worse "
            f"{worse / n:.0%}; {means};"
        )
        print(f"    log-loss lower with the name at {lower} heads, higher at {higher}")


def pooled(rows: list[Any], jobs: list[Any], fit: guesses.Sights, test: guesses.Sights) -> None:
    """Log-loss over all heads without and with the name; the interval is by document."""
    without = []
    changes = []
    groups = []
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


def repeated(scope: qk.Scope, count: int = 16, length: int = LENGTH) -> torch.Tensor:
    """So many tokens, drawn at random, twice in a row, behind what the tokenizer puts in front of
    any text.
    """
    ids = torch.randint(1000, 40000, (count, length), generator=torch.Generator().manual_seed(0))
    start = torch.tensor(scope.tokenizer("")["input_ids"], dtype=torch.long).expand(count, -1)
    return torch.cat([start, ids, ids], dim=1).to(scope.device)


def labels(scope: qk.Scope, jobs: list[dict[str, Any]]) -> None:
    """Areas under the curve of each job's share against labels from repeated random tokens
    (attention above .3).
    """
    ids = repeated(scope)
    scored = dict[int, dict[str, torch.Tensor]]()
    half = LENGTH
    index = torch.arange(LENGTH - 2, device=ids.device)
    at = ids.shape[1] - half + 1 + index

    def visit(call: Any) -> None:
        weights = call.attention(list(range(call.q.shape[1])))[:, :, at]
        targets = zip(JOBS, (at - 1, at - half, at - half + 1), strict=True)
        scored[call.layer] = {job: weights[:, :, index, key].mean((0, 2)) for job, key in targets}

    scope.watch(prompt_of(scope, ids), visit)
    for job in JOBS:
        truth = [float(scored[head.layer][job][head.index]) > 0.3 for head in scope.heads()]
        share = {row["head"]: row["share"] for row in jobs if row["job"] == job}
        area = roc_auc_score(truth, [share.get(str(head), 0.0) for head in scope.heads()])
        print(
            f"  labels from repeated random tokens, {job} ({sum(truth)} heads): area under the "
            f"curve {area:.3f}"
        )


def ablated(scope: qk.Scope, heads: list[str], jobs: list[dict[str, Any]]) -> None:
    """Accuracy on the second copy with heads ablated together, beside random sets of the same
    layers.
    """
    if not heads:
        return

    def accuracy(some: list[str]) -> float:
        ids = repeated(scope)
        with torch.no_grad(), ExitStack() as stack:
            if some:
                stack.enter_context(scope.ablate(*some))
            model = stack.enter_context(scope.patched([]))
            logits = model(**prompt_of(scope, ids), use_cache=False, logits_to_keep=LENGTH).logits
        return float((logits[:, :-1].argmax(-1) == ids[:, 1 - LENGTH :]).float().mean())

    draws = random.Random(0)
    before = accuracy([])
    previous = max((row for row in jobs if row["job"] == PREVIOUS), key=lambda row: row["share"])
    others = {
        head: [str(h) for h in scope.heads() if h.layer == Head.parse(head).layer] for head in heads
    }
    free = {head: [name for name in names if name not in heads] for head, names in others.items()}
    sets = sorted(accuracy([draws.choice(free[head]) for head in heads]) for _ in range(20))
    together = accuracy(heads)
    single = {head: f"{accuracy([head]) / before - 1:+.0%}" for head in [*heads, previous["head"]]}
    print(
        f"  second copy right {before:.2f}; {len(heads)} induction heads ablated "
        f"{together / before - 1:+.0%};"
    )
    low, median, high = (f"{sets[i] / before - 1:+.0%}" for i in (0, 10, -1))
    print(f"    20 random sets: median {median}, {low} to {high}; each alone {single}")


if __name__ == "__main__":
    main()
