"""Foresight: does a reason predict an edit that it was not made from?

Edits are made by others: words of WordNet's kinds, paraphrases and clauses written by hand
(``edits.json``), by people who see no head. An edit *breaks* a look if less than half of its
attention is left. Each method gives a number for every edit; AUC says how well it ranks them, the
log-loss of a logistic curve, fitted on the other half of the looks, how well it foresees them.

    python bench/foresight.py --looks 40 --out rows.jsonl [--model MODEL] [--random SEED]
    python bench/foresight.py --looks 40 --out rows.jsonl --beside older.jsonl
    python bench/foresight.py --say rows.jsonl

``--beside`` takes rows that older code measured on the same looks: its edits, what they leave and
the gradients are not run again, and its finding stands beside the new one as *older*.

*finding*: what is left, by the finding alone, with the words of an edit replaced: the mean over
the words that were tried in a place, those near the new word in the input embedding counted most
(`NEARNESS`); where none were tried, what random words leave; 1 where the table is silent; the
product over the words of an edit. *mean*: the same, all words counted alike. *gradient*: of log
attention, times the change of the embedding.
*integrated*: integrated gradients of log attention from the mean embedding, summed over the words
of an edit. *place*: attention, and whether the key or the query is edited. *nothing*: the share
that breaks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.stats import rankdata
from torch import Tensor

import qkscope as qk
from qkscope.findings.because import Because
from qkscope.findings.finding import Look, Reason
from qkscope.heads import Head
from qkscope.rerun.alternatives import Lexicon, lexicon_of
from qkscope.rerun.rerun_tokens import Again
from qkscope_papers.models import random_weights
from wordnet import FEWEST, FOLDER, WordNet

DATA = json.loads((Path(__file__).parent / "edits.json").read_text("utf-8"))
ATTENDED = 0.3
BROKEN = 0.5
STEPS = 8  # of integrated gradients
SAME, OTHER, ANY = 3, 2, 2  # edits of a word
PAIRS, CLAUSES = 12, 4  # edits of a look
DRAWS = 400  # of the bootstrap
NEARNESS = 0.1
"""Cosine by which a tried word that is nearer to the new one counts e times as much."""
MIXED = (0.15, 0.85)
"""Share of the tried words that keep a look, of *mixed* words, from and to."""
PEAK = 3.6  # W_Q and W_K of random weights, so much larger
Row = dict[str, Any]


# ---------------------------------------------------------------------- the edits


@dataclass(frozen=True)
class Edit:
    """A changed prompt, and where the look stands in it.

    Parameters
    ----------
    kind : how it was made.
    ids : of the changed prompt.
    query, key : of the look, there.
    touched : places of the unchanged prompt that are no longer what they were.
    inserted : place of the unchanged prompt before which something new stands; -1 if nothing does.
    """

    kind: str
    ids: Tensor
    query: int
    key: int
    touched: tuple[int, ...]
    inserted: int = -1


class Writer:
    """Makes edits of sentences.

    Parameters
    ----------
    lexicon : the tokens of a model.
    tokenizer : of the model.
    seed : of what is drawn.
    wordnet : folder of its files.
    """

    def __init__(
        self, lexicon: Lexicon, tokenizer: Any, seed: int = 0, wordnet: Path = FOLDER
    ) -> None:
        self.texts = lexicon.texts
        self.tokenizer = tokenizer
        self.draws = random.Random(seed)
        self.wordnet = WordNet(wordnet)
        self.functions = {
            word: f"f:{name}"
            for name, words in DATA["function_words"].items()
            for word in words.split()
        }
        small = [i for i, text in enumerate(self.texts) if re.fullmatch(r" [a-z]{2,}", text)]
        self.any = [i for i in small if 3000 <= i < 30000 and len(self.texts[i]) > 3]
        self.by_class = self._by_class(small)
        by_text = {self.texts[i]: i for i in small}
        kinds = self.wordnet.kinds(by_text)
        self.kinds = {word: [by_text[other] for other in kind] for word, kind in kinds.items()}

    def _by_class(self, tokens: Sequence[int]) -> dict[str, list[int]]:
        found = defaultdict[str, list[int]](list)
        for token in tokens:
            name = self.class_of(self.texts[token])
            if name is not None:
                found[name].append(token)
        return {name: words for name, words in found.items() if len(words) >= FEWEST}

    def class_of(self, text: str) -> str | None:
        """WordNet's class of a word, or its class of function words."""
        core = text.strip().lower()
        return self.functions.get(core) or self.wordnet.class_of(core)

    def edits(self, ids: Tensor, text: str, query: int, key: int) -> list[Edit]:
        """All edits of one look."""
        ones = list(self._words(ids, query, key))
        pairs = self._pairs(ids, ones, query, key)
        longer = [*self._clauses(ids, query, key), *self._paraphrases(text, ids, query, key)]
        return [*ones, *pairs, *longer]

    def _words(self, ids: Tensor, query: int, key: int) -> Iterator[Edit]:
        """One word replaced: by words of its class, of its finer kind, of another class, any."""
        for place in range(query + 1):
            text = self.texts[int(ids[place])]
            name = self.class_of(text)
            if not text.startswith(" ") or name not in self.by_class:
                continue
            same = self.draws.sample(self.by_class[name], SAME)
            alike = [other for other in self.by_class if other[0] == name[0] and other != name]
            other = self.draws.sample(self.by_class[self.draws.choice(alike)], OTHER)
            anything = self.draws.sample(self.any, ANY)
            kind = self.kinds.get(text.lower(), [])
            fine = self.draws.sample(kind, min(SAME, len(kind)))
            sources = {"class": same, "other class": other, "any": anything, "kind": fine}
            for source, words in sources.items():
                for word in words:
                    if word != ids[place]:
                        changed = ids.clone()
                        changed[place] = word
                        yield Edit(source, changed, query, key, (place,))

    def _pairs(self, ids: Tensor, ones: Sequence[Edit], query: int, key: int) -> Iterator[Edit]:
        """Two words replaced."""
        for _ in range(PAIRS):
            first, second = self.draws.choices(ones, k=2)
            if first.touched != second.touched:
                changed = ids.clone()
                for one in (first, second):
                    changed[one.touched[0]] = one.ids[one.touched[0]]
                yield Edit("two words", changed, query, key, first.touched + second.touched)

    def _clauses(self, ids: Tensor, query: int, key: int) -> Iterator[Edit]:
        """A clause put in before the query."""
        blank = [i for i in range(2, query + 1) if self.texts[int(ids[i])].startswith(" ")]
        for clause in DATA["clauses"][:CLAUSES]:
            if not blank:
                return
            at = self.draws.choice(blank)
            new = torch.tensor(self.tokenizer(clause, add_special_tokens=False)["input_ids"])
            changed = torch.cat([ids[:at], new, ids[at:]])
            moved = [place + len(new) * (place >= at) for place in (query, key)]
            yield Edit("clause", changed, moved[0], moved[1], (), at)

    def _paraphrases(self, text: str, ids: Tensor, query: int, key: int) -> Iterator[Edit]:
        """A phrase written otherwise, where key and query are not in it."""
        sentence = next(row for row in DATA["sentences"] if row["text"] == text)
        for old, new in sentence["paraphrases"]:
            changed = self.tokenizer(text.replace(old, new), add_special_tokens=False)
            other = torch.tensor(changed["input_ids"])
            start = _shared(ids, other)
            end = _shared(ids.flip(0), other.flip(0))
            inside = range(start, len(ids) - end)
            more = len(other) - len(ids)
            if key in inside or query in inside or start > query:
                continue
            moved = [place + more * (place >= start) for place in (query, key)]
            yield Edit("paraphrase", other, moved[0], moved[1], tuple(inside))


def _shared(a: Tensor, b: Tensor) -> int:
    """How many first tokens two prompts share."""
    size = min(len(a), len(b))
    differs = (a[:size] != b[:size]).nonzero()
    return int(differs[0]) if len(differs) else size


# ---------------------------------------------------------------------- what they do


def left_after(again: Again, look: Look, before: float, edits: Sequence[Edit]) -> list[float]:
    """The share of a look that each edit leaves."""
    left = list[float]()
    same = [edit for edit in edits if len(edit.ids) == len(again.ids)]
    ids = torch.stack([edit.ids for edit in same])
    runs = again.behind(ids, torch.full((len(ids),), look.query))
    rows = again.run(ids, runs, [(look.head, look.query)]).attention
    by_edit = dict(zip(map(id, same), rows[:, 0, look.key].tolist(), strict=True))
    for edit in edits:
        if id(edit) not in by_edit:
            other = Again.of(again.scope, edit.ids, look.head.layer)
            row = other.attention([(look.head, edit.query)])[0]
            by_edit[id(edit)] = float(row[edit.key])
        left.append(by_edit[id(edit)] / before)
    return left


def gradients(scope: qk.Scope, ids: Tensor, look: Look) -> tuple[Tensor, Tensor]:
    """Gradient of log attention at the prompt's embeddings, and integrated gradients by token."""
    embeddings = scope.model.get_input_embeddings()(ids[None]).detach()
    mean = scope.model.get_input_embeddings().weight.detach().float().mean(0).to(embeddings)
    scope.model.set_attn_implementation("eager")
    total = torch.zeros_like(embeddings)
    for step in range(1, STEPS + 1):
        share = step / STEPS
        point = (mean + share * (embeddings - mean)).requires_grad_()
        out = scope.model(inputs_embeds=point, output_attentions=True, use_cache=False)
        attention = out.attentions[look.head.layer][0, look.head.index, look.query, look.key]
        (gradient,) = torch.autograd.grad(attention.clamp(min=1e-9).log(), point)
        total += gradient / STEPS
    scope.model.set_attn_implementation("sdpa")
    return gradient[0], (total * (embeddings - mean))[0].sum(-1)


# ---------------------------------------------------------------------- what is foreseen


class Foretold:
    """What the finding of one look says of edits.

    Parameters
    ----------
    lexicon : the tokens of the model.
    weight : its input embedding.
    reason : the finding.
    """

    def __init__(self, lexicon: Lexicon, weight: Tensor, reason: Reason) -> None:
        self.reason = reason
        self.weight = weight
        self.centre = weight[: lexicon.size].mean(0)
        self.shares = {row["position"]: row["after"] / reason.before for row in reason.words}
        self.tried = defaultdict[int, dict[int, float]](dict)
        for row in reason.replaced:
            token = lexicon.by_text.get(row["word"])
            if token is not None:
                self.tried[row["position"]][token] = row["left"]

    def left(self, edit: Edit, nearness: float | None) -> float:
        """The share of the look that is left; ``nearness`` as in `NEARNESS`, None for the mean."""
        left = 1.0
        has_same_length = edit.inserted < 0 and len(edit.touched) <= 2
        for place in edit.touched:
            new = int(edit.ids[place]) if has_same_length and nearness else None
            left *= min(self._of_word(place, new, nearness or 1.0), 1.0)
        position = self.reason.first("position")
        is_between = self.reason.look.key < edit.inserted <= self.reason.look.query
        if is_between and position is not None and position.alone is not None and position.is_shown:
            left *= min(position.alone, 1.0)
        return left

    def _of_word(self, place: int, new: int | None, nearness: float) -> float:
        tried = self.tried.get(place)
        if not tried:
            return self.shares.get(place, 1.0)
        left = torch.tensor([*tried.values()]).clamp(max=1.0)
        if new is None:
            return float(left.mean())
        rows = self.weight[[*tried]] - self.centre
        cosine = torch.cosine_similarity(rows, (self.weight[new] - self.centre)[None])
        return float((cosine / nearness).softmax(0) @ left)

    def keeps(self, edit: Edit) -> float | None:
        """The share of the words tried in the one place of an edit that keep the look."""
        if len(edit.touched) != 1 or edit.touched[0] not in self.tried:
            return None
        left = [*self.tried[edit.touched[0]].values()]
        return sum(value >= BROKEN for value in left) / len(left)


def measure(
    scope: qk.Scope, looks: int, seed: int, older: Sequence[Row] = (), wordnet: Path = FOLDER
) -> Iterator[Row]:
    """A row for every edit of some looks.

    Parameters
    ----------
    scope : the model.
    looks : how many.
    seed : of what is drawn.
    older : rows of the same looks, whose measured numbers are taken over.
    wordnet : folder of its files.
    """
    lexicon = lexicon_of(scope)
    writer = Writer(lexicon, scope.tokenizer, seed, wordnet)
    weight = scope.model.get_input_embeddings().weight.detach().float()
    runs = {row["text"]: _run(scope, row["text"]) for row in DATA["sentences"]}
    candidates = [(text, look) for text, again in runs.items() for look in looks_of(again)]
    writer.draws.shuffle(candidates)
    for number, (text, look) in enumerate(candidates[:looks]):
        again = runs[text]
        ids = again.ids.cpu()
        edits = writer.edits(ids, text, look.query, look.key)
        known = [row for row in older if row["look"] == number]
        measured = known or list(_measured(scope, again, look, edits, weight))
        reason = Because(again, [look], 0).reasons()[0]
        foretold = Foretold(lexicon, weight, reason)
        for edit, row in zip(edits, measured, strict=True):
            new = [lexicon.text(int(edit.ids[i])) for i in edit.touched if i < len(edit.ids)]
            if known and (row["new"], row["text"], row["head"]) != (new, text, str(look.head)):
                raise SystemExit(f"the rows of look {number} are of other edits: leave them out.")
            yield {
                "look": number, "head": str(look.head), "text": text, "query": look.query, "key": look.key,
                "reason": reason.kind, "kind": edit.kind, "touched": edit.touched, "new": new,
                "attention": reason.before, "at_key": look.key in edit.touched,
                "at_query": look.query in edit.touched, "left": row["left"],
                "gradient": row["gradient"], "integrated": row["integrated"],
                "finding": foretold.left(edit, NEARNESS), "mean": foretold.left(edit, None),
                "keeps": foretold.keeps(edit), "older": row.get("finding"),
            }  # fmt: skip


def _measured(
    scope: qk.Scope, again: Again, look: Look, edits: Sequence[Edit], weight: Tensor
) -> Iterator[Row]:
    """What each edit leaves, and its gradients."""
    ids = again.ids.cpu()
    before = float(again.attention([(look.head, look.query)])[0, look.key])
    gradient, integrated = gradients(scope, ids, look)
    left = left_after(again, look, before, edits)
    for edit, share in zip(edits, left, strict=True):
        slope = 0.0
        if edit.inserted < 0 and len(edit.ids) == len(ids):
            places = list(edit.touched)
            change = weight[edit.ids[places]] - weight[ids[places]]
            slope = float((gradient[places] * change).sum())
        total = -float(integrated[list(edit.touched)].sum())
        yield {"left": share, "gradient": slope, "integrated": total}


def _run(scope: qk.Scope, text: str) -> Again:
    ids = torch.tensor(scope.tokenizer(text, add_special_tokens=False)["input_ids"])
    return Again.of(scope, ids.to(scope.device))


def looks_of(again: Again) -> Iterator[Look]:
    """Looks of the second half of a prompt, at a token that is neither the first nor the query."""
    rows = {layer: call.attention(range(call.q.shape[1])) for layer, call in again.calls.items()}
    for query in range(len(again.ids) // 2, len(again.ids)):
        for layer, weights in rows.items():
            strong = (weights[0, :, query, 1:query] >= ATTENDED).nonzero().tolist()
            for head, key in strong:
                yield Look(Head(layer, head), query, key + 1)


# ---------------------------------------------------------------------- how well


FEATURES: dict[str, Callable[[Row], list[float]]] = {
    "nothing": lambda row: [],
    "place": lambda row: [row["attention"], row["at_key"], row["at_query"]],
    "gradient": lambda row: [float(np.clip(row["gradient"], -5, 5))],
    "integrated": lambda row: [float(np.clip(row["integrated"], -5, 5))],
    "finding": lambda row: [row["finding"]],
    "mean": lambda row: [row.get("mean", row["finding"])],
    "older": lambda row: [row.get("older") or 0.0],
    "finding, place": lambda row: [row["finding"], *FEATURES["place"](row)],
}
RANKS: dict[str, Callable[[Row], float]] = {
    "place": lambda row: -2.0 * row["at_key"] - row["at_query"],
    "gradient": lambda row: row["gradient"],
    "integrated": lambda row: row["integrated"],
    "finding": lambda row: row["finding"],
    "mean": lambda row: row.get("mean", row["finding"]),
    "older": lambda row: row.get("older") or 0.0,
}


def auc(scores: Sequence[float], broken: np.ndarray) -> float:
    """How often an edit that breaks has the lower score."""
    ranks = rankdata(-np.asarray(scores))
    positive = int(broken.sum())
    negative = len(broken) - positive
    if not positive or not negative:
        return float("nan")
    return float((ranks[broken].sum() - positive * (positive + 1) / 2) / (positive * negative))


def log_loss(rows: Sequence[Row], features: Callable[[Row], list[float]]) -> float:
    """Mean log-loss of a logistic curve fitted on the other half of the looks."""
    looks = sorted({row["look"] for row in rows})
    random.Random(1).shuffle(looks)
    half = set(looks[: len(looks) // 2])
    losses = list[float]()
    for is_fitted in (True, False):
        fitted = [row for row in rows if (row["look"] in half) is is_fitted]
        tested = [row for row in rows if (row["look"] in half) is not is_fitted]
        weights = _logistic(_columns(fitted, features), _broken(fitted))
        losses += list(_losses(weights, _columns(tested, features), _broken(tested)))
    return float(np.mean(losses))


def _columns(rows: Sequence[Row], features: Callable[[Row], list[float]]) -> np.ndarray:
    return np.array([[1.0, *features(row)] for row in rows], dtype=float)


def _broken(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row["left"] < BROKEN for row in rows])


def _losses(weights: np.ndarray, columns: np.ndarray, broken: np.ndarray) -> np.ndarray:
    signs = np.where(broken, 1.0, -1.0)
    return np.logaddexp(0.0, -signs * (columns @ weights))


def _logistic(columns: np.ndarray, broken: np.ndarray) -> np.ndarray:
    def cost(weights: np.ndarray) -> float:
        penalty = 1e-4 * float(weights[1:] @ weights[1:])
        return float(_losses(weights, columns, broken).mean()) + penalty

    return minimize(cost, np.zeros(columns.shape[1])).x


def interval(rows: Sequence[Row], number: Callable[[Sequence[Row]], float]) -> tuple[float, float]:
    """The 95% interval of a number, looks drawn again and again."""
    by_look = defaultdict[int, list[Row]](list)
    for row in rows:
        by_look[row["look"]].append(row)
    draws = random.Random(0)
    values = list[float]()
    for _ in range(DRAWS):
        drawn = draws.choices(list(by_look), k=len(by_look))
        values.append(number([row for look in drawn for row in by_look[look]]))
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


GROUPS: dict[str, Callable[[Row], bool]] = {
    "all edits": lambda row: True,
    "one word": lambda row: len(row["touched"]) == 1,
    "at the key": lambda row: row["at_key"],
    "at the query": lambda row: row["at_query"],
    "elsewhere": lambda row: not row["at_key"] and not row["at_query"],
    "mixed words": lambda row: MIXED[0] <= (row.get("keeps") or 0.0) <= MIXED[1],
    "mixed, at the key": lambda row: GROUPS["mixed words"](row) and row["at_key"],
    "mixed, at the query": lambda row: GROUPS["mixed words"](row) and row["at_query"],
    "class": lambda row: row["kind"] == "class",
    "kind": lambda row: row["kind"] == "kind",
    "other class": lambda row: row["kind"] == "other class",
    "any": lambda row: row["kind"] == "any",
    "two words": lambda row: row["kind"] == "two words",
    "paraphrase": lambda row: row["kind"] == "paraphrase",
    "clause": lambda row: row["kind"] == "clause",
}


def say(rows: Sequence[Row]) -> None:
    """Print AUC and log-loss, by group of edits and by kind of reason."""
    looks = len({row["look"] for row in rows})
    print(f"{len(rows)} edits of {looks} looks, {_broken(rows).mean():.0%} break the look")
    reasons = sorted({row["reason"] for row in rows})
    groups = dict(GROUPS)
    for reason in reasons:
        groups[f"reason {reason}"] = lambda row, reason=reason: row["reason"] == reason
    names = "  ".join(f"{name:>10}" for name in RANKS)
    print(f"{'AUC':24} {'n':>5} {'broken':>6}  {names}")
    for name, belongs in groups.items():
        chosen = [row for row in rows if belongs(row)]
        broken = _broken(chosen)
        if len(chosen) and 0 < broken.sum() < len(chosen):
            _print_group(name, chosen, broken)
    for name in RANKS:
        low, high = interval(rows, lambda some, name=name: _auc_of(some, name))
        print(f"AUC {name}: {_auc_of(rows, name):.3f} [{low:.3f}, {high:.3f}]")
    low, high = interval(rows, lambda some: _auc_of(some, "finding") - _auc_of(some, "integrated"))
    print(f"finding less integrated gradients: [{low:.3f}, {high:.3f}]")
    if rows[0].get("older") is not None:
        low, high = interval(rows, lambda some: _auc_of(some, "finding") - _auc_of(some, "older"))
        print(f"finding less older finding: [{low:.3f}, {high:.3f}]")
    for name, features in FEATURES.items():
        print(f"log-loss {name}: {log_loss(rows, features):.3f}")


def _print_group(name: str, rows: Sequence[Row], broken: np.ndarray) -> None:
    values = [auc([rank(row) for row in rows], broken) for rank in RANKS.values()]
    numbers = "  ".join(f"{value:10.3f}" for value in values)
    print(f"{name:24} {len(rows):5} {broken.mean():6.2f}  {numbers}")


def _auc_of(rows: Sequence[Row], name: str) -> float:
    return auc([RANKS[name](row) for row in rows], _broken(rows))


# ---------------------------------------------------------------------- the command


def load(model: str, seed: int | None, layers: int | None = None) -> qk.Scope:
    """A model, or random weights of its shape with peaked attention; with fewer layers, if asked."""
    scope = qk.Scope.load(model)
    if seed is None:
        return scope
    config = deepcopy(scope.model.config)
    if layers is not None:
        config.num_hidden_layers = layers
    wild = random_weights(config, scope.tokenizer, scope.device, seed)
    with torch.no_grad():
        for name, weight in wild.model.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                draws = torch.Generator().manual_seed(seed + len(name))
                weight.copy_(0.04 * torch.randn(weight.shape, generator=draws))
            if "q_proj" in name or "k_proj" in name:
                weight *= PEAK
    return wild


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--looks", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", type=int, help="random weights of this seed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--beside", type=Path, help="rows that older code measured")
    parser.add_argument("--wordnet", type=Path, default=FOLDER)
    parser.add_argument("--say", type=Path, nargs="*")
    asked = parser.parse_args()
    if asked.say:
        lines = [line for file in asked.say for line in file.read_text().splitlines()]
        say([json.loads(line) for line in lines])
        return
    start = time.time()
    rows = list[Mapping[str, Any]]()
    older = [json.loads(line) for line in asked.beside.open()] if asked.beside else []
    scope = load(asked.model, asked.random)
    for row in measure(scope, asked.looks, asked.seed, older, asked.wordnet):
        if not rows or rows[-1]["look"] != row["look"]:
            print(f"look {row['look']}, {time.time() - start:.0f} s", flush=True)
        rows.append(row)
        if asked.out:
            with asked.out.open("a") as file:
                print(json.dumps(row), file=file)
    say([dict(row) for row in rows])


if __name__ == "__main__":
    main()
