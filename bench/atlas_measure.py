"""What the rules of an atlas are worth: rows on unseen text, heads replaced, random weights.

    python bench/atlas_measure.py table RUN --texts DIR          # fit, test, beside baselines
    python bench/atlas_measure.py place RUN --texts DIR          # rules in heads' places
    python bench/atlas_measure.py ceiling RUN --texts DIR        # a softmax trained on text alone
    python bench/atlas_measure.py table RUN --texts python --random 0
    python bench/atlas_measure.py ship FILE --runs RUN RUN … --hardware "two CPU cores"

``--texts DIR`` takes 24 files to fit on and 12 others to test on, 96 tokens of each from its 2,000th
character on; ``--texts python`` Python's texts and, to test on, what packages say of themselves.
``table`` keeps the rules in RUN, where ``place`` finds them. ``ship`` writes the file that comes
with the package from the folders of ``qkscope atlas``, which may each have some of the heads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import because_measure
import qkscope as qk
from qkscope.changes import SaysAttention
from qkscope.findings.rules import At, First, Near, Rule
from qkscope.findings.shipped_atlas import Atlas, load_atlas, write_shipped
from qkscope.heads import Head
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.documents import package_texts, python_texts
from qkscope.texts.holdout import Passage
from qkscope.verbs.atlas import atlas
from qkscope.verbs.atlas.costs import NextTokens
from qkscope.verbs.atlas.head_patterns import Patterns, log_loss, row_overlap
from qkscope.verbs.atlas.rule_fit import RuleFit
from qkscope.verbs.atlas.word_classes import WordClasses
from qkscope_papers.models import random_weights

LENGTH, FIT, TEST = 96, 24, 12
BEGIN, END = 2000, 5000  # characters of a file
AHEAD = 0.02  # IoU beyond the mean row that counts
SHARES = (0.1, 0.25, 0.5, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["table", "place", "ceiling", "ship"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", default="python")
    parser.add_argument("--fit", type=int, default=FIT)
    parser.add_argument("--test", type=int, default=TEST)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--every", type=int, default=1, help="Every so many heads of all.")
    parser.add_argument("--random", type=int, help="Seed of random weights, peaked.")
    parser.add_argument("--flat", action="store_true", help="Random weights as initialised.")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--ways", nargs="*", default=["rule", "mean row"])
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--hardware", default="two CPU cores")
    given = parser.parse_args()
    if given.what == "ship":
        ship(given)
        return
    scope = qk.Scope.load(given.model)
    fitted, tested = passages(scope, given)
    if given.random is not None:
        scope = random_weights(scope.model.config, scope.tokenizer, scope.device, given.random)
        if not given.flat:
            because_measure.peaked(scope, torch.tensor(fitted[0].ids, device=scope.device))
    begun = time.process_time()
    {"table": table, "place": place, "ceiling": ceiling}[given.what](scope, fitted, tested, given)
    print(f"{time.process_time() - begun:.0f} CPU-seconds, {torch.get_num_threads()} threads")


def passages(scope: qk.Scope, given: argparse.Namespace) -> tuple[list[Passage], list[Passage]]:
    """What rules are fitted on, and what they are tested on."""
    if given.texts == "python":
        cut = lambda texts, count, side: atlas.passages_of(  # noqa: E731
            scope, texts, count, given.length, 0, side
        )
        return cut(python_texts(docstrings=True), given.fit, "fit"), cut(
            package_texts(), given.test, "test"
        )
    files = sorted(Path(given.texts).glob("*.txt"))[: given.fit + given.test]
    made = []
    for number, file in enumerate(files):
        text = file.read_text("utf-8")[BEGIN:END]
        ids = scope.tokenizer(text, add_special_tokens=False)["input_ids"][: given.length]
        made.append(Passage(file.name, number, tuple(ids)))
    return made[: given.fit], made[given.fit :]


def chosen_heads(scope: qk.Scope, given: argparse.Namespace) -> list[Head]:
    """Every so many heads."""
    return list(scope.heads())[:: given.every]


# ---------------------------------------------------------------------- rows on unseen text


@dataclass
class Scores:
    """What one way to say heads' rows reaches, by head.

    Attributes
    ----------
    iou, loss : by head, by tested document.
    rules : by head.
    """

    iou: list[Tensor] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)

    def add(self, rule: Rule, test: Patterns, h: int) -> None:
        """Score a head's rule."""
        says = test.rows(rule.attention(test.ids))
        own = test.of_head(h)
        self.rules.append(rule)
        self.iou.append(_by_group(row_overlap(says, own), test.groups))
        self.loss.append(_by_group(log_loss(says, own), test.groups))


def _by_group(values: Float[Tensor, " r"], groups: Int[Tensor, " r"]) -> Float[Tensor, " g"]:
    """Means by document."""
    _, number = groups.unique(return_inverse=True)
    size = int(number.max()) + 1
    total = torch.zeros(size).index_add(0, number, values)
    return total / torch.bincount(number, minlength=size)


def conditional_rest(rule: Rule) -> float:
    """The weight of rest, and of all tokens by distance at a kind of query."""
    weight = rule.rest
    for share, part in rule.parts:
        then = part.then if isinstance(part, At) else part
        weight += share * isinstance(then, Near)
    return weight


def table(
    scope: qk.Scope, fitted: Sequence[Passage], tested: Sequence[Passage], given: argparse.Namespace
) -> None:
    """Print IoU, log-loss and shares of heads of every way; keep the rules."""
    heads = chosen_heads(scope, given)
    fit = Patterns.of(scope, heads, fitted)
    test = Patterns.of(scope, heads, tested)
    classes = WordClasses.of(scope, torch.tensor([i for passage in fitted for i in passage.ids]))
    with_kinds = RuleFit(fit, classes)
    without = RuleFit(fit, classes, kinds=False)
    ways: dict[str, Callable[[int], Rule]] = {
        "first token": lambda h: Rule([(1.0, First())]),
        "best offset": with_kinds.best_offset,
        "mean row": with_kinds.mean_row,
        "five, no kinds": without.rule,
        "rule": with_kinds.rule,
    }
    scores = {name: Scores() for name in ways}
    for h in range(len(heads)):
        for name, rule_of in ways.items():
            scores[name].add(rule_of(h), test, h)
    scores["another head's rule"] = Scores()
    for h in range(len(heads)):
        other = scores["rule"].rules[(h + len(heads) // 2) % len(heads)]
        scores["another head's rule"].add(other, test, h)
    print(f"{len(heads)} heads, {len(fitted)} passages to fit, {len(tested)} to test")
    for name, of_way in scores.items():
        print(_line(name, of_way, scores["mean row"]))
    given.run.mkdir(parents=True, exist_ok=True)
    kept = {
        name: {str(head): rule.to_json() for head, rule in zip(heads, own.rules, strict=True)}
        for name, own in scores.items()
    }
    kept["order"] = _easiest(heads, fit, scores["rule"].rules)
    kept["classes"] = classes.of_token.tolist()
    (given.run / "rules.json").write_text(json.dumps(kept), "utf-8")


def _line(name: str, of_way: Scores, mean_row: Scores) -> str:
    """A row of the table; intervals by document."""
    iou = torch.stack(of_way.iou)
    gain = iou - torch.stack(mean_row.iou)
    groups = torch.arange(iou.shape[1])
    low, high = clustered_bootstrap(iou.mean(0).double()[:, None], groups)
    ahead = float((gain.mean(1) > AHEAD).float().mean())
    worse = float((gain.mean(1) < -AHEAD).float().mean())
    rest = sum(rule.rest > 0.5 for rule in of_way.rules) / len(of_way.rules)
    with_near = sum(conditional_rest(rule) > 0.5 for rule in of_way.rules) / len(of_way.rules)
    loss = float(torch.stack(of_way.loss).mean())
    gained = clustered_bootstrap(gain.mean(0).double()[:, None], groups)
    ends = f"{float(gain.mean()):+.3f} [{float(gained[0]):+.3f}, {float(gained[1]):+.3f}]"
    best = float((iou.mean(1) >= 0.75).float().mean())
    return (
        f"{name:20} IoU {float(iou.mean()):.3f} [{float(low):.3f}, {float(high):.3f}], over the mean "
        f"row {ends}; > {AHEAD} ahead {ahead:.0%}, behind {worse:.0%}; >= .75 {best:.0%}; log-loss "
        f"{loss:.3f}; rest > .5 {rest:.0%}, with what goes by distance at a kind {with_near:.0%}; "
        f"{dict(Counter(rule.name for rule in of_way.rules).most_common(8))}"
    )


def _easiest(heads: Sequence[Head], fit: Patterns, rules: Sequence[Rule]) -> list[str]:
    """Heads by how well their rules give their rows in the passages that these were fitted on."""
    ious = []
    for h, rule in enumerate(rules):
        says = fit.rows(rule.attention(fit.ids))
        ious.append(float(row_overlap(says, fit.of_head(h)).mean()))
    order = torch.tensor(ious).argsort(descending=True).tolist()
    return [str(heads[h]) for h in order]


# ---------------------------------------------------------------------- in heads' places


class Remembered:
    """A rule that works out each text once."""

    def __init__(self, rule: SaysAttention) -> None:
        self.rule = rule
        self.known = dict[tuple[int, ...], Tensor]()

    def attention(self, ids: Int[Tensor, " t"]) -> Float[Tensor, "t t"]:
        """The rule's pattern."""
        key = tuple(ids.tolist())
        if key not in self.known:
            self.known[key] = self.rule.attention(ids)
        return self.known[key]


def place(
    scope: qk.Scope, fitted: Sequence[Passage], tested: Sequence[Passage], given: argparse.Namespace
) -> None:
    """Print the rise of perplexity with shares of heads replaced, the easiest first and at random."""
    kept = json.loads((given.run / "rules.json").read_text("utf-8"))
    order = kept["order"]
    tokens = NextTokens(scope, tested)
    before = tokens.log_loss()
    print(f"perplexity {float(torch.tensor(before).exp()):.1f}; rise in per cent:")
    for way in given.ways:
        after = _loss_with(scope, tokens, kept, way)
        for share in given.shares:
            count = int(share * len(order))
            orders = [order]
            if share < 1:
                orders += [_at_random(order, seed) for seed in range(given.draws)]
            rises = [100 * (after(own[:count]) - before) for own in orders]
            rises = [100 * float(torch.tensor(rise / 100).expm1()) for rise in rises]
            line = f"  {way:20} {share:.0%}: easiest first {rises[0]:.1f}"
            if rises[1:]:
                drawn = torch.tensor(rises[1:])
                each = " ".join(f"{rise:.0f}" for rise in rises[1:])
                line += f"; at random, {len(drawn)} draws: mean {drawn.mean():.1f} ({each})"
            print(line, flush=True)


def _at_random(order: Sequence[str], seed: int) -> list[str]:
    """The heads in another order."""
    numbers = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))
    return [sorted(order)[i] for i in numbers.tolist()]


def _loss_with(
    scope: qk.Scope, tokens: NextTokens, kept: dict[str, Any], way: str
) -> Callable[[Sequence[str]], float]:
    """The log-loss with some heads replaced in one way."""
    if way == "mean ablation":

        def ablated(heads: Sequence[str]) -> float:
            with scope.ablate(*heads):
                return tokens.log_loss()

        return ablated
    if way == "zero ablation":
        return lambda heads: _zeroed(scope, tokens, heads)
    rules = {
        name: Remembered(Rule.from_json(data, kept["classes"])) for name, data in kept[way].items()
    }
    return lambda heads: tokens.log_loss({Head.parse(name): rules[name] for name in heads})


def _zeroed(scope: qk.Scope, tokens: NextTokens, heads: Sequence[str]) -> float:
    """The log-loss with heads that put out nothing."""
    by_layer = dict[int, list[int]]()
    for name in heads:
        head = Head.parse(name)
        by_layer.setdefault(head.layer, []).append(head.index)

    def visit(call: Any) -> None:
        for index in by_layer.get(call.layer, ()):
            call.outputs[index] = torch.zeros_like

    logits = scope.watch(tokens.inputs, visit, logits_at=tokens.places)
    return float(torch.nn.functional.cross_entropy(logits.float(), tokens.next_ids))


# ---------------------------------------------------------------------- the ceiling of text alone


def ceiling(
    scope: qk.Scope, fitted: Sequence[Passage], tested: Sequence[Passage], given: argparse.Namespace
) -> None:
    """Print the IoU of a softmax trained for each head: a bias by distance, copies, and 64
    directions of the embedding as a bias of the key.
    """
    heads = chosen_heads(scope, given)
    fit = Patterns.of(scope, heads, fitted)
    test = Patterns.of(scope, heads, tested)
    weight = scope.model.get_input_embeddings().weight.detach().float()
    rows = weight - weight.mean(0)
    directions = torch.linalg.svd(rows[fit.ids.flatten()], full_matrices=False).Vh[:64]
    codes = rows @ directions.T
    codes = codes / codes[fit.ids.flatten()].std(0)
    scores = []
    for h in range(len(heads)):
        logits = _trained(fit, h, codes)
        says = test.rows(logits(test.ids).softmax(-1).detach())
        scores.append(float(row_overlap(says, test.of_head(h)).mean()))
    print(f"trained softmax, {len(heads)} heads: IoU {sum(scores) / len(scores):.3f}")


def _trained(
    fit: Patterns, h: int, codes: Float[Tensor, "v k"], steps: int = 150
) -> Callable[[Tensor], Tensor]:
    """Logits of one head from text, trained by Adam."""
    length = fit.ids.shape[1]
    places = torch.arange(length)
    back = (places[:, None] - places).clamp(min=0)
    later = torch.ones(length, length).triu(1).bool()
    by_distance = torch.zeros(length, requires_grad=True)
    on_first = torch.zeros(length, requires_grad=True)
    of_copies = torch.zeros(2, requires_grad=True)
    of_key = torch.zeros(codes.shape[1], requires_grad=True)
    parameters = [by_distance, on_first, of_copies, of_key]

    def logits(ids: Int[Tensor, "p t"]) -> Float[Tensor, "p t t"]:
        before = torch.cat([torch.full_like(ids[:, :1], -1), ids[:, :-1]], 1)
        same = (ids[:, :, None] == ids[:, None]) & (back > 0)
        after = (ids[:, :, None] == before[:, None]) & (back > 0)
        scores = by_distance[back] + (codes[ids] @ of_key)[:, None]
        scores = scores + of_copies[0] * same + of_copies[1] * after
        first = torch.zeros_like(scores)
        first[:, :, 0] = on_first
        return (scores + first).masked_fill(later, -torch.inf)

    own = fit.of_head(h)
    train = torch.optim.Adam(parameters, lr=0.1)
    for _ in range(steps):
        said = fit.rows(logits(fit.ids).log_softmax(-1).clamp(min=-30))
        loss = -(own * said).sum(-1).mean() + 1e-4 * of_key.square().sum()
        train.zero_grad()
        loss.backward()
        train.step()
    return logits


# ---------------------------------------------------------------------- the file that ships


def ship(given: argparse.Namespace) -> None:
    """Write the atlas that comes with the package."""
    parts = [load_atlas(run) for run in given.runs]
    first = parts[0]
    by_head: Callable[[Any], Head] = lambda row: Head.parse(row["head"])  # noqa: E731
    tables = {
        name: sorted((row for part in parts for row in part.tables[name]), key=by_head)
        for name in ("heads", "rules", "baselines")
    }
    asked = first.provenance["asked"]
    answer = atlas.sentence(tables["heads"], tables["baselines"], asked["n"], asked["test"])
    whole = Atlas("atlas", tables, arrays=first.arrays, model=first.model, answer=answer)
    made = {name: first.provenance[name] for name in ("asked", "versions")}
    made |= {
        "command": f"qkscope atlas -n {asked['n']} --test {asked['test']} --model {first.model}",
        "date": f"{date.today()}",
        "hardware": given.hardware,
        "answer": answer,
    }
    write_shipped(whole, given.run, made)
    print(answer)


if __name__ == "__main__":
    main()
