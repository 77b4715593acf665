"""How often each reason is found, on tasks and text where it should be, and on random weights where it should not.

    python papers/scripts/because_measure.py TEXTS --out because.json [--model MODEL] [--device cuda] [--looks 64]

Looks on text: attention above .4 on a token that is not the first, drawn at random among them, one a passage of 80
tokens for each head. Random weights: the model's shape, freshly initialised, W_Q and W_K scaled until half of the
heads' largest weights are above .9.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import qkscope as qk
from qkscope.analyses.because import Because, Look, Reason
from qkscope.analyses.trace.prompt import reader_of
from qkscope.analyses.why.carriers import Carriers
from qkscope.capture.pick import Places
from qkscope.change.again import Again
from qkscope.heads import Head
from qkscope.tasks.texts import read_documents

TASKS = {"binding": ("L18H6", "L17H5"), "induction": ("L17H4", "L18H6"), "ioi": ("L23H0", "L24H4")}
TEXT = ("L16H0", "L14H3", "L17H3", "L17H4", "L18H6", "L23H0", "L24H4")
LENGTH, ATTENDED, BEGUN = 80, 0.4, 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device")
    parser.add_argument("--looks", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--random", type=int, default=25, help="passages on random weights, 20 looks each")
    parser.add_argument("--only", default="tasks,text,random")
    asked = parser.parse_args()
    scope = qk.Scope.load(asked.model, device=asked.device)
    made: list[dict[str, Any]] = []
    for seed in range(asked.seeds):
        if "tasks" in asked.only:
            made += tasks(scope, asked.looks, seed)
        if "text" in asked.only:
            made += texts(scope, asked.texts, asked.looks, seed)
        if "random" in asked.only:
            made += at_random(scope, asked.texts, asked.random, seed)
        asked.out.write_text(json.dumps(made, indent=0))


def tasks(scope: qk.Scope, count: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    for name, heads in TASKS.items():
        start, kept = time.time(), defaultdict(list)
        for unit in getattr(qk.tasks, name)(seed=3 + seed).test(2 * count):
            ids = scope.encode([unit[0]]).inputs["input_ids"][0]
            again, query = Again.of(scope, ids), len(ids) - 1
            looks = [look for head in heads if (look := main_look(again, Head.parse(head), query, 0.3)) is not None]
            looks = [look for look in looks if len(kept[look.head]) < count]
            if looks:
                because = Because(again, looks, seed)
                for reason in because.reasons():
                    kept[reason.look.head].append(
                        (reason, carried(scope, because, reason) if name == "binding" else [])
                    )
        rows += [summary(name, head, seed, own) for head, own in kept.items()]
        say(rows[-len(kept) :], start)
    return rows


def texts(scope: qk.Scope, folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    draws, start, kept = random.Random(seed), time.time(), defaultdict(list)
    for ids in passages(scope, folder, draws, 8 * count):
        again = Again.of(scope, ids)
        looks = []
        for head in map(Head.parse, TEXT):
            if len(kept[head]) < count and (look := drawn_look(again, head, draws)) is not None:
                looks.append(look)
        if looks:
            for reason in Because(again, looks, seed).reasons():
                kept[reason.look.head].append((reason, []))
        if all(len(kept[Head.parse(head)]) >= count for head in TEXT):
            break
    rows = [summary("text", head, seed, own) for head, own in kept.items()]
    say(rows, start)
    return rows


def at_random(scope: qk.Scope, folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    draws, start = random.Random(seed), time.time()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(scope.model.config).to(scope.device, torch.float32).eval()
    wild = qk.Scope.from_model(model, scope.tokenizer, name="random", check=False)
    some = list(passages(scope, folder, draws, count))
    scale = peaked(wild, some[0])
    own = []
    for ids in some:
        again = Again.of(wild, ids)
        heads = draws.sample(list(wild.heads()), 60)
        looks = [look for head in heads if (look := drawn_look(again, head, draws, 0.3)) is not None][:20]
        if looks:
            because = Because(again, looks, seed)
            own += [
                (reason, carried(wild, because, reason) if i < 4 else []) for i, reason in enumerate(because.reasons())
            ]
    row = summary("random weights", "all", seed, own) | {"scale": scale}
    say([row], start)
    return [row]


def peaked(scope: qk.Scope, ids: torch.Tensor) -> float:
    """Scale W_Q and W_K until the median head's median largest weight is above .9."""
    total = 1.0
    while True:
        again, tops = Again.of(scope, ids), []
        for call in again.calls.values():
            tops.append(call.attention(list(range(call.q.shape[1])))[0, :, BEGUN:].amax(-1).median(-1).values.median())
        if float(torch.stack(tops).median()) > 0.9:
            return total
        with torch.no_grad():
            for name, weight in scope.model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    weight *= 1.25
        total *= 1.25


def passages(scope: qk.Scope, folder: Path, draws: random.Random, count: int) -> Any:
    documents = list(read_documents([folder]))
    for i in range(count):
        ids = scope.tokenizer(documents[i % len(documents)].text).input_ids
        at = draws.randrange(max(len(ids) - LENGTH, 1))
        yield torch.tensor(ids[at : at + LENGTH], device=scope.device)


def main_look(again: Again, head: Head, query: int, least: float) -> Look | None:
    row = again.calls[head.layer].rows(head.index, torch.tensor([0]), torch.tensor([query])).attention()[0, 0]
    key = 1 + int(row[1:].argmax())
    return Look(head, query, key) if float(row[key]) >= least else None


def drawn_look(again: Again, head: Head, draws: random.Random, least: float = ATTENDED) -> Look | None:
    weights = again.calls[head.layer].attention([head.index])[0, 0].clone()
    weights[:, 0] = 0
    top = weights[BEGUN:].max(-1)
    places = (top.values > least).nonzero()[:, 0].tolist()
    if not places:
        return None
    at = draws.choice(places)
    return Look(head, BEGUN + at, int(top.indices[at]))


def carried(scope: qk.Scope, because: Because, reason: Reason) -> list[dict[str, Any]]:
    inputs, row = because.again.inputs, torch.zeros(1, dtype=torch.long, device=scope.device)
    places = Places.everywhere(row, torch.full_like(row, reason.look.query), inputs["attention_mask"])
    run = reader_of(scope).record(inputs, places, deep=True, last=reason.look.head.layer)
    return Carriers(run, because, reason).rows()


def summary(where: str, head: object, seed: int, own: list[tuple[Reason, list[dict[str, Any]]]]) -> dict[str, Any]:
    reasons, n = [reason for reason, _ in own], max(len(own), 1)
    same = [row for reason in reasons for row in reason.relations if row["kind"] == "same word" and row["words"]]
    letters = [row for row in same if row["text"].strip().isalnum()]

    def shown(kind: str, words: bool = False) -> float:
        rows = ([row for row in reason.relations if row["kind"] == kind] for reason in reasons)
        fit = (any(r["verdict"] == "shown" and (not words or r["text"].strip().isalnum()) for r in own) for own in rows)
        return sum(fit) / n

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    before_key = [any(row["position"] < reason.look.key == row["end"] for row in reason.causes) for reason in reasons]
    carry, shares = [row for _, rows in own for row in rows], ("restored", "others", "other_run")

    def share(side: str, name: str) -> list[float]:
        """Of what was lost, how much comes back."""
        rows = [row for row in carry if row["side"] == side]
        return [(row[name] - row["changed"]) / (row["before"] - row["changed"]) for row in rows]

    return {
        "where": where, "head": str(head), "seed": seed, "looks": len(own), "same word": shown("same word"),
        "same word, letters": shown("same word", True), "follows": shown("follows"), "position": shown("position"),
        "key word": shown("key word"), "query word": shown("query word"), "self": shown("self"),
        "alone": mean([row["alone"] for row in letters or same]),
        "together": mean([row["together"] for row in letters or same]),
        "different": mean([row["different"] for row in letters or same]),
        "cause before key": mean(before_key), "causes": mean([len(reason.causes) for reason in reasons]),
        "many causes": mean([len(reason.causes) > 4 for reason in reasons]),
        "carriers": len(carry), "carriers shown": mean([row["verdict"] == "shown" for row in carry]),
        "carriers by side": {side: [mean(share(side, name)) for name in shares] for side in ("key", "query")},
        "first carriers": [row["writers"] for row in carry if row["side"] == "key"][:8],
    }  # fmt: skip


def say(rows: list[dict[str, Any]], start: float) -> None:
    for row in rows:
        short = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(short), f"{time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
