"""How often each reason is found, on tasks and text where it should be, and on random weights where
it should not.

    python bench/because_measure.py looks.jsonl --texts FOLDER [--model MODEL] [--device
    cuda] [--only text] python bench/because_measure.py looks.jsonl --say

The first command appends a line for every look as it is measured; the second prints the rates of a
file, or of several joined, with 95% intervals. Looks on text: attention above .4 on a token that is
not the first, drawn at random among them (``text``), or the largest (``peaks``), one a passage of
80 tokens for each head. Random weights: the model's shape, freshly initialised, W_Q and W_K scaled
until half of the heads' largest weights are above .9.

Levels of a cause (this word, a kind, any word) on whole sentences, many looks of each:

    python bench/because_measure.py looks.jsonl --texts FOLDER --only sentences,random-sentences

``sentences``: attention of .3 or more from the second half of a sentence at a token that is neither
the first nor the query, drawn at random among all heads. ``random-sentences``: the same on random
weights, W_Q and W_K times 3.6.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import qkscope as qk
from foresight import load, looks_of
from qkscope.findings.because import Because
from qkscope.findings.carriers import Carriers
from qkscope.findings.finding import NO_REASONS, Look, Reason
from qkscope.findings.prompt_trace import reader_of
from qkscope.findings.registry import LEVELS, relation_row
from qkscope.heads import Head
from qkscope.model.capture_types import Places
from qkscope.rerun.rerun_tokens import Again
from qkscope.sums.intervals import wilson
from qkscope.texts.documents import read_documents
from qkscope_papers.models import random_weights
from qkscope_papers.tables import mean, pick

HEADS = {
    "smollm2-135m": {
        "binding": "L18H6 L17H5", "induction": "L17H4 L18H6", "ioi": "L23H0 L24H4",
        "text": "L16H0 L14H3 L17H3 L17H4 L18H6 L23H0 L24H4",
    },
    "gemma3-270m": {"binding": "L5H1", "induction": "L5H2 L5H1", "ioi": "L12H1 L17H2", "text": "L5H1 L5H2 L12H1"},
    "qwen2.5-coder-1.5b": {"binding": "L8H7", "induction": "L2H3", "ioi": "L24H10", "text": "L2H3 L8H7 L24H10"},
}  # fmt: skip
BACK = ("restored", "others", "other_run", "whole_side")
LENGTH = 80
ATTENDED = 0.4
BEGUN = 20
KINDS = ("same word", "follows", "position", "self", "kind", "any word", "this word")
SENTENCE = (10, 20)
"""Tokens of a sentence, from and to."""
OF_SENTENCE = 12
"""Looks of a sentence."""
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device")
    parser.add_argument("--looks", type=int, default=64)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--passages", type=int, default=25, help="on random weights, 20 looks each")
    parser.add_argument("--layers", type=int, help="of the random weights of sentences")
    parser.add_argument("--only", default="binding,induction,ioi,text,peaks,random")
    parser.add_argument("--say", action="store_true")
    asked = parser.parse_args()
    if asked.say:
        say([json.loads(line) for line in asked.out.read_text().splitlines()])
        return
    scope = qk.Scope.load(asked.model, device=asked.device)
    heads = HEADS.get(asked.model, HEADS["smollm2-135m"])
    with asked.out.open("a") as file:
        for seed in map(int, asked.seeds.split(",")):
            for where in asked.only.split(","):
                start = time.time()
                if where in ("sentences", "random-sentences"):
                    weights = None if where == "sentences" else seed
                    weighted = load(asked.model, weights, asked.layers)
                    records = sentences(weighted, asked.texts, asked.looks, seed)
                elif where == "random":
                    records = at_random(scope, asked.texts, asked.passages, seed)
                elif where in ("text", "peaks"):
                    records = texts(
                        scope, heads["text"], asked.texts, asked.looks, seed, where == "peaks"
                    )
                else:
                    records = task(scope, where, heads[where], asked.looks, seed)
                for i, record in enumerate(records):
                    about = {"model": asked.model, "where": where, "seed": seed}
                    print(json.dumps(about | record), file=file, flush=True)
                    if i % 16 == 0:
                        print(
                            f"{where} seed {seed}: look {i + 1}, {time.time() - start:.0f} s",
                            flush=True,
                        )


# ---------------------------------------------------------------------- looks


def task(scope: qk.Scope, name: str, heads: str, count: int, seed: int) -> Iterator[Record]:
    """Looks of the last token of a task's prompts."""
    kept: dict[Head, int] = defaultdict(int)
    for number, unit in enumerate(getattr(qk.tasks, name)(seed=3 + seed).test(2 * count)):
        ids = scope.encode([unit[0]]).inputs["input_ids"][0]
        again = Again.of(scope, ids)
        query = len(ids) - 1
        looks = [
            look
            for head in heads.split()
            if (look := main_look(again, Head.parse(head), query)) is not None
        ]
        looks = [look for look in looks if kept[look.head] < count]
        for look in looks:
            kept[look.head] += 1
        carried = 1 if name == "binding" and number < count // 2 else 0
        for record in records(scope, again, looks, seed, carried):
            yield record | {"prompt": number}


def texts(
    scope: qk.Scope, heads: str, folder: Path, count: int, seed: int, peaks: bool
) -> Iterator[Record]:
    """Looks on natural text, drawn at random or at each head's largest attention."""
    draws = random.Random(seed)
    kept = defaultdict[Head, int](int)
    for ids in passages(scope.tokenizer, folder, draws, 6 * count):
        again = Again.of(scope, ids.to(scope.device))
        looks = []
        for head in map(Head.parse, heads.split()):
            if (
                kept[head] < count
                and (look := drawn_look(again, head, draws, peaks=peaks)) is not None
            ):
                looks.append(look)
                kept[head] += 1
        yield from records(scope, again, looks, seed)


def at_random(scope: qk.Scope, folder: Path, count: int, seed: int) -> Iterator[Record]:
    """Looks of all heads on random weights of a model's shape."""
    wild = random_weights(scope.model.config, scope.tokenizer, scope.device, seed)
    draws = random.Random(seed)
    some = [ids.to(wild.device) for ids in passages(scope.tokenizer, folder, draws, count)]
    peaked(wild, some[0])
    for ids in some:
        again = Again.of(wild, ids)
        heads = draws.sample(list(wild.heads()), 60)
        looks = [
            look for head in heads if (look := drawn_look(again, head, draws, 0.3)) is not None
        ][:20]
        yield from records(wild, again, looks, seed, carried=4)


def sentences(scope: qk.Scope, folder: Path, count: int, seed: int) -> Iterator[Record]:
    """Looks of all heads within sentences, with the level of every word that was compared."""
    draws = random.Random(seed)
    done = 0
    for ids in whole_sentences(scope.tokenizer, folder, draws):
        again = Again.of(scope, ids.to(scope.device))
        every = list(looks_of(again))
        looks = draws.sample(every, min(OF_SENTENCE, len(every)))
        if looks:
            yield from levels(again, looks, seed)
        done += len(looks)
        if done >= count:
            return


def whole_sentences(tokenizer: Any, folder: Path, draws: random.Random) -> Iterator[torch.Tensor]:
    """A short sentence of each document in turn."""
    documents = list(read_documents([folder]))
    draws.shuffle(documents)
    for document in documents:
        parts = re.split(r"(?<=[.!?])\s+", document.text.replace("\n", " "))
        draws.shuffle(parts)
        for part in parts:
            ids = tokenizer(part, add_special_tokens=False).input_ids
            if SENTENCE[0] <= len(ids) <= SENTENCE[1] and part[:1].isupper():
                yield torch.tensor(ids)
                break


def levels(again: Again, looks: Sequence[Look], seed: int) -> Iterator[Record]:
    """What is found of each look, and of each of its words."""
    for reason in Because(again, looks, seed).reasons(follow=False):
        look = reason.look
        yield {
            "head": str(look.head), "before": reason.before, "kind": reason.kind, "query": look.query,
            "key": look.key, "matters": any(row["after"] < 0.5 * reason.before for row in reason.words),
            "relations": [relation_row(finding) for finding in reason.findings],
            "ids": again.ids.tolist(),
        }  # fmt: skip


def peaked(scope: qk.Scope, ids: torch.Tensor) -> None:
    """Scale W_Q and W_K until the median head's median largest weight is above .9."""
    while True:
        again = Again.of(scope, ids)
        tops = []
        for call in again.calls.values():
            tops.append(
                call.attention(list(range(call.q.shape[1])))[0, :, BEGUN:]
                .amax(-1)
                .median(-1)
                .values.median()
            )
        if float(torch.stack(tops).median()) > 0.9:
            return
        with torch.no_grad():
            for name, weight in scope.model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    weight *= 1.25


def passages(
    tokenizer: Any, folder: Path, draws: random.Random, count: int
) -> Iterator[torch.Tensor]:
    documents = list(read_documents([folder]))
    for i in range(count):
        ids = tokenizer(documents[i % len(documents)].text).input_ids
        at = draws.randrange(max(len(ids) - LENGTH, 1))
        yield torch.tensor(ids[at : at + LENGTH])


def main_look(again: Again, head: Head, query: int, least: float = 0.3) -> Look | None:
    row = again.row(query, head).attention()[0, 0]
    key = 1 + int(row[1:].argmax())
    return Look(head, query, key) if float(row[key]) >= least else None


def drawn_look(
    again: Again, head: Head, draws: random.Random, least: float = ATTENDED, peaks: bool = False
) -> Look | None:
    weights = again.calls[head.layer].attention([head.index])[0, 0].clone()
    weights[:, 0] = 0
    top = weights[BEGUN:].max(-1)
    places = (top.values > least).nonzero()[:, 0].tolist()
    if not places:
        return None
    at = int(top.values.argmax()) if peaks else draws.choice(places)
    return Look(head, BEGUN + at, int(top.indices[at]))


def records(
    scope: qk.Scope, again: Again, looks: Sequence[Look], seed: int, carried: int = 0
) -> Iterator[Record]:
    """What is found of each look."""
    if not looks:
        return
    because = Because(again, looks, seed)
    asked = [word.core for word in because.words if word.core[:1].isalnum()][-1:]
    ends = [word.stop for word in because.words if [word.core] == asked]
    for i, reason in enumerate(because.reasons()):
        rows = carriers(scope, because, reason, seed) if i < carried else []
        yield {
            "head": str(reason.look.head), "before": reason.before, "kind": reason.kind, "tried": reason.tried,
            "causes": len(reason.causes), "asked": asked[0] if asked else "",
            "at a copy": any(end <= reason.look.key <= end + 1 for end in ends[:-1]),
            "cause before key": any(row["position"] < reason.look.key == row["end"] for row in reason.causes),
            "relations": [relation_row(finding) for finding in reason.findings], "carriers": rows,
        }  # fmt: skip


def carriers(scope: qk.Scope, because: Because, reason: Reason, seed: int) -> list[Record]:
    inputs = because.again.inputs
    row = torch.zeros(1, dtype=torch.long, device=scope.device)
    places = Places.everywhere(
        row, torch.full_like(row, reason.look.query), inputs["attention_mask"]
    )
    run = reader_of(scope).record(inputs, places, deep=True, last=reason.look.head.layer)
    return Carriers(run, because, reason, seed).rows()


# ---------------------------------------------------------------------- rates


def say_levels(looks: list[Record]) -> None:
    """Print how often each reason is shown, and the level of the key's, the query's and other words."""
    for where in dict.fromkeys(look["where"] for look in looks):
        own = pick(looks, where=where)
        matter = [look for look in own if look["matters"]]
        print(f"\n{where}: {len(own)} looks, a word matters in {len(matter)}")
        for name, some in (("all looks", own), ("a word matters", matter)):
            counts = Counter(look["kind"] for look in some)
            print(f"  first reason, {name}")
            for kind, count in counts.most_common():
                print(f"    {kind:18s} {rate([look['kind'] == kind for look in some])} {count}")
            reasons = [look["kind"] not in NO_REASONS for look in some]
            print(f"    any reason         {rate(reasons)}")
        for place in ("key", "query", "elsewhere"):
            levels = [level for look in own for level in levels_at(look, place)]
            print(f"  words at {place}: {len(levels)}")
            for kind in (*LEVELS, ""):
                print(
                    f"    {kind or 'none of these':18s} {rate([level == kind for level in levels])}"
                )


def levels_at(look: Record, place: str) -> list[str]:
    """The levels shown of the words at a place of a look; empty where none is.

    Of the key's and the query's word that no screening word breaks it is not said that any word
    does: it counts as that.
    """
    levels = list[str]()
    for row in look["relations"]:
        if row["kind"] in LEVELS and row["together"] is not None:
            start = int(row["positions"])
            at = (
                "key"
                if start == look["key"]
                else "query"
                if start == look["query"]
                else "elsewhere"
            )
            if at == place:
                levels.append(row["kind"] if row["verdict"] == "shown" else "")
    return levels or ["any word"] * (place != "elsewhere")


def say(looks: list[Record]) -> None:
    """Print the rates of every head and place, all seeds together and the range of seeds beside it."""
    of_sentences = [look for look in looks if look["where"].endswith("sentences")]
    say_levels(of_sentences)
    looks = [look for look in looks if look not in of_sentences]
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for look in looks:
        groups[
            look["model"], look["where"], "all" if look["where"] == "random" else look["head"]
        ].append(look)
    for (model, where, head), own in sorted(groups.items()):
        print(
            f"\n{model} {where} {head}: {len(own)} looks, {mean([look['causes'] for look in own]):.1f} causes"
        )
        marks = {
            **{kind: (lambda look, kind=kind: shown(look, kind)) for kind in KINDS},
            "same word, letters": lambda look: any(map(str.isalnum, shown(look, "same word"))),
            "same word, asked": lambda look: look["asked"] in shown(look, "same word"),
            "more than four causes": lambda look: look["causes"] > 4,
            "no cause": lambda look: look["causes"] == 0,
            "cause just before the key": lambda look: look["cause before key"],
        }  # fmt: skip
        for name, mark in marks.items():
            print(
                f"  {name:28s} {rate([bool(mark(look)) for look in own], [look['seed'] for look in own])}"
            )
        same = (pick(look["relations"], kind="same word") for look in own)
        tested = [
            row for rows in same for row in [row for row in rows if row["together"] is not None][:1]
        ]
        if tested:
            left = {
                name: mean([row[name] for row in tested])
                for name in ("alone", "together", "different")
            }
            print(
                "  left of the attention        "
                + ", ".join(f"{name} {value:.2f}" for name, value in left.items())
            )
        carried = [row for look in own for row in look["carriers"]]
        if carried:
            print(
                f"  carriers shown               {rate([row['verdict'] == 'shown' for row in carried])}"
            )
        for side in ("key", "query") if carried else ():
            rows = pick(carried, side=side)
            share = (f"{name} {mean(back(row, name) for row in rows):.2f}" for name in BACK)
            print(f"  put back into the {side:11s}{', '.join(share)} ({len(rows)})")
            print("     ", Counter(row["writers"] for row in rows).most_common(4))


def shown(look: Record, kind: str) -> list[str]:
    """The words of the relations of a kind that are shown."""
    return [
        row["text"].strip().lower() for row in pick(look["relations"], kind=kind, verdict="shown")
    ]


def back(row: Record, name: str) -> float:
    """Of what was lost, how much comes back."""
    return float((row[name] - row["changed"]) / (row["before"] - row["changed"]))


def rate(marks: Sequence[bool], seeds: Sequence[int] = ()) -> str:
    low, high = wilson(sum(marks), len(marks))
    each = [
        mean([mark for mark, seed in zip(marks, seeds, strict=True) if seed == s])
        for s in sorted(set(seeds))
    ]
    by_seed = f"; seeds {', '.join(f'{value:.0%}' for value in each)}" if len(each) > 1 else ""
    return f"{mean(marks):.1%} [{low:.1%}, {high:.1%}]  {sum(marks)} of {len(marks)}{by_seed}"


if __name__ == "__main__":
    main()
