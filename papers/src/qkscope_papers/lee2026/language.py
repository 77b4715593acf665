"""What the figures of language models share: one model, the heads found in it, their fits, made
once per invocation.

On the two small models that packages hold, prompts are bare lists, which these can answer; any
other model gets the paper's prompts, in its chat template where it has one. Figures 19 and 20 are
the paper's second model: Gemma 3 270M where it is installed; where not, they repeat the test on the
first with a second form of prompt, from finding the heads on.

Binding features are estimated twice. ``paper``: as the authors' scripts do it, order uncentred,
lexical of each prompt's own query with copies from a pool of words of their own, both by adding
projectors (``both_summed``). ``ours``: order query-centred, lexical of one query, both in one joint
basis. What the paper says is judged by its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist, median
from typing import Any, Literal, TypeVar

from qkscope import tasks
from qkscope.findings.fit import Fit, fit_of
from qkscope.findings.task_batches import made_from
from qkscope.heads import Head
from qkscope.model.files import EMBEDDED as PACKAGED
from qkscope.model.files import is_installed
from qkscope.model.scope import Scope
from qkscope.results.progress import doing
from qkscope.sums.intervals import wilson
from qkscope.texts.list_tasks import POOLED
from qkscope.texts.task import Task
from qkscope.verbs.decompose import decompose
from qkscope.verbs.find_heads import Ranking, Score, find_heads
from qkscope_papers.models import random_weights
from qkscope_papers.registry import EMBEDDED, Settings
from qkscope_papers.tables import Estimate, Row, pick

T = TypeVar("T")
Kind = Literal["filter", "binding"]
Estimator = Literal["paper", "ours"]
ESTIMATORS: tuple[Estimator, Estimator] = ("paper", "ours")

SECOND = "gemma3-270m" if is_installed("gemma3-270m") else EMBEDDED
"""The second model; the first where there is no other."""

THRESHOLD = 0.30  # the paper's rule for binding heads
NO_SUCH_HEAD = "no such head"
RANDOM = "random:"
_FORMS: dict[Kind, tuple[str, str]] = {
    "filter": ("list", "bullets"),
    "binding": ("list", "sentence"),
}
_WIDE = 128
_PAPER_FORMS: dict[Kind, str] = {"filter": "find", "binding": "question"}


@dataclass(frozen=True)
class ModelWork:
    """Counts of one preset."""

    choose: int  # prompts to find heads on
    category: int  # prompts per category, five categories
    fine: int  # prompts per category, thirteen categories
    binding: int  # units per binding contrast
    counts: int  # units per point of figure 16
    test: int
    downstream: int  # test prompts whose answer is read from a patched run; 0: none
    replicates: int  # of each null
    pools: tuple[
        int, ...
    ]  # different words, three pairs in a prompt; the paper's estimator needs one to spare
    entities: tuple[int, ...]  # pairs in a prompt, all the words
    heads: int = 9  # look into at most so many binding heads: as many as the paper has
    draws: int = 20
    batch_size: int = 32


WORK = {
    "smoke": ModelWork(32, 8, 1, 24, 12, 32, 0, 39, (8, 16), (3, 6), heads=3),
    "default": ModelWork(256, 64, 24, 320, 96, 256, 256, 199, (4, 8, 16, 24, 32), (2, 4, 6, 9, 14)),
    "paper": ModelWork(1000, 400, 154, 3000, 1000, 1000, 1000, 199, (4, 6, 8, 10, 13, 16, 20, 24, 28, 32),
                  (2, 3, 4, 5, 7, 9, 12, 15, 18, 20), batch_size=128),
}  # fmt: skip


def few(work: ModelWork, n: int) -> ModelWork:
    """These counts with n prompts of each kind, for models that take seconds a prompt.

    What the model answers when a swap is written into it is left out: it takes a run for every swap.
    """
    return replace(
        work,
        choose=n,
        category=max(n // 5, 2),
        fine=max(n // 16, 1),
        binding=n,
        counts=n,
        test=n,
        downstream=0,
        batch_size=8,
    )


@dataclass(frozen=True)
class HeadChoice:
    """Heads chosen on a task, first the one to show, and a head at chance: the control."""

    ranking: Ranking
    heads: list[Head]
    control: Head
    reached: int  # how many heads pass the rule, shown or not; at 0 ``heads`` are only the best there are

    @property
    def all(self) -> list[Head]:
        """The heads, and the control last."""
        return [*self.heads, self.control]

    def row(self, head: Head) -> Row:
        """Scores of one head; intervals of its row accuracy and ratio hold for all heads at once
        (Bonferroni).

        It was chosen among them, on the same prompts.
        """
        row = pick(self.ranking.tables["heads"], head=str(head))[0]
        z = NormalDist().inv_cdf(1 - 0.025 / len(self.ranking.tables["heads"]))
        low, high = wilson(round(row["row_accuracy"] * row["n"]), row["n"], z)
        half = (row["ratio_high"] - row["ratio_low"]) / (2 * NormalDist().inv_cdf(0.975)) * z
        return {**row, "row_low": low, "row_high": high, "ratio_low": row["ratio"] - half,
                "ratio_high": row["ratio"] + half}  # fmt: skip

    def share_that_pass(self) -> Estimate:
        """The share of all heads that pass the paper's rule for binding.

        Its ends count heads whose corrected interval lies above the rule, and not below it.
        """
        rows = [self.row(Head.parse(row["head"])) for row in self.ranking.tables["heads"]]
        passing = {
            name: sum(row[name] >= THRESHOLD for row in rows) / len(rows)
            for name in ("row_accuracy", "row_low", "row_high")
        }
        return Estimate(*passing.values())


def choose_heads(ranking: Ranking, kind: Kind, most: int) -> HeadChoice:
    """Filter heads: the three of largest ratio. Binding heads: those that attend to the right box
    most of all tokens.

    The paper's rule for binding is 30% of prompts; ``most`` bounds how many of these are looked
    into. The control is the head whose ratio is nearest to chance among those that look at the keys
    at least as much as the median head.
    """
    by: Score = "ratio" if kind == "filter" else "row_accuracy"
    # In the first layer the last token has seen nothing: its query is the same in every prompt.
    best = [row for row in ranking.top(by) if Head.parse(row["head"]).layer > 0]
    passed = best[:3] if kind == "filter" else [row for row in best if row[by] >= THRESHOLD]
    # A swap can only move attention that is there: heads come in the order of what the right keys
    # get.
    chosen = sorted(passed[:most] or best[:3], key=lambda row: -row["ratio"] * row["mass"])
    heads = [Head.parse(row["head"]) for row in chosen]
    return HeadChoice(ranking, heads, _control(best, heads), len(passed))


def _control(rows: list[Row], heads: list[Head]) -> Head:
    """A head at chance, no deeper than the found ones, so that it costs no further layers; never
    one of them.

    Not the head that does worst: that one turns away from the right keys, for which it has to know
    them as well.
    """
    deepest = max(head.layer for head in heads)
    mass = median(row["mass"] for row in rows)
    others = [
        row for row in rows if (h := Head.parse(row["head"])).layer <= deepest and h not in heads
    ]
    looking = [row for row in others if row["mass"] >= mass] or others
    nearest = min(looking, key=lambda row: abs(row["ratio"] - row["chance"]), default=None)
    return Head.parse(nearest["head"]) if nearest else heads[-1]


class FigureSession:
    """A model and what was found in it so far."""

    def __init__(
        self, model: str, preset: str, seed: int, device: str, n: int | None = None
    ) -> None:
        self.model = model
        self.preset = preset
        self.seed = seed
        self.device = device
        self.work = WORK[preset] if n is None else few(WORK[preset], n)
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What ``make`` gives, made the first time the key is asked for."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def no_such_head(self, found: HeadChoice) -> str:
        """What to say of heads that do not attend to what is asked; empty where the best does."""
        share = found.row(found.heads[0])["row_accuracy"]
        if share >= THRESHOLD:
            return ""
        return f"{NO_SUCH_HEAD}: the best looks at an asked item first in {share:.0%} of prompts"

    @cached_property
    def scope(self) -> Scope:
        """The model, loaded when the first figure needs it; ``random:NAME`` is its shape with
        random weights.
        """
        name = self.model.removeprefix(RANDOM)
        scope = Scope.load(name, device=self.device)
        return (
            scope
            if name == self.model
            else random_weights(scope.model.config, scope.tokenizer, self.device)
        )

    @property
    def embedded(self) -> bool:
        """Whether this is the model that is always there."""
        return self.model.lower() == EMBEDDED

    @property
    def small(self) -> bool:
        """Whether this is a model that answers bare lists and no questions."""
        return self.model.lower().removeprefix(RANDOM) in PACKAGED

    def form(self, kind: Kind, second: bool = False) -> str:
        """The form of the prompts; there is a second one where no second model is."""
        return _FORMS[kind][second] if self.small else _PAPER_FORMS[kind]

    @property
    def chat(self) -> bool:
        """Whether prompts go into the chat template."""
        return not self.small and bool(getattr(self.scope.tokenizer, "chat_template", None))

    def filter_task(self, categories: int = 5, second: bool = False, **options: Any) -> Task:
        """Lists to pick a category from."""
        form: Any = self.form("filter", second)
        return tasks.filter(categories, form, self.seed, chat=self.chat, **options)

    def binding_task(self, entities: int = 9, second: bool = False, **options: Any) -> Task:
        """Boxes and what is in them."""
        form: Any = self.form("binding", second)
        return tasks.binding(entities, form, self.seed, chat=self.chat, **options)

    def task(self, kind: Kind, second: bool = False) -> Task:
        """The task of the causal tests."""
        return (
            self.filter_task(second=second)
            if kind == "filter"
            else self.binding_task(second=second)
        )

    def found(self, kind: Kind, second: bool = False) -> HeadChoice:
        """The heads that do this kind of task, and the control beside them."""
        return self.once(("found", kind, second), lambda: self._find(kind, second))

    def _find(self, kind: Kind, second: bool) -> HeadChoice:
        with doing(f"finding {kind} heads"):
            ranking = find_heads(
                self.scope,
                self.task(kind, second),
                self.work.choose,
                batch_size=self.work.batch_size,
            )
        return choose_heads(ranking, kind, self.work.heads)

    def fit(self, kind: Kind, second: bool = False) -> Fit:
        """The task's contrasts at the found heads and at the control head, as we estimate them.

        Categories are cut at their top direction, the pooled contrast at the number of categories
        less one.
        """
        return self.once(("fit", kind, second), lambda: self._fit(kind, second))

    def binding_fit(self, estimator: Estimator, second: bool = False) -> Fit:
        """Order and lexical, as the paper estimates them or as we do."""
        if estimator == "ours":
            return self.fit("binding", second)
        return self.once(("paper's fit", second), lambda: self._paper_fit(second))

    def _paper_fit(self, second: bool) -> Fit:
        """Order of the same sums, uncentred; lexical of prompts of its own."""
        task = self.binding_task(second=second, lexical="own_query")
        with doing("fitting binding as in the paper"):
            heads = self.found("binding", second).all
            lexical = self.decompose(task, heads, self.work.binding, contrasts=["lexical"])
        sums = {
            "order": self.fit("binding", second).sums["order"],
            "lexical": lexical.sums["lexical"],
        }
        return fit_of(sums, task, made_from(self.scope, task), center={"order": "none"})

    def _fit(self, kind: Kind, second: bool) -> Fit:
        task = self.task(kind, second)
        found = self.found(kind, second)
        with doing(f"fitting {kind}"):
            if kind == "binding":
                return self.decompose(
                    task, found.all, self.work.binding, contrasts=["order", "lexical"]
                )
            categories = [name for name in task.contrasts if name != POOLED]
            rank = {**dict.fromkeys(categories, 1), POOLED: len(categories) - 1}
            return self.decompose(task, found.all, self.work.category, rank=rank)

    def decompose(self, task: Task, heads: list[Head], n: int, **options: Any) -> Fit:
        """`decompose` with this preset's counts."""
        # Each replicate costs eigenvalues of d_head × d_head matrices, stage by stage: few do in
        # wide heads.
        replicates = (
            self.work.replicates if self.scope.d_head <= _WIDE else min(self.work.replicates, 19)
        )
        settings = {"replicates": replicates, "batch_size": self.work.batch_size, "seed": self.seed}
        return decompose(self.scope, task, heads, n, **{**settings, **options})

    def about(self, **more: Any) -> dict[str, Any]:
        """For a figure's provenance."""
        return {
            "model": self.scope.name, "revision": self.scope.revision, "weights": self.scope.weights_hash,
            "tokenizer": self.scope.tokenizer_hash, "chat": self.chat, "work": vars(self.work), **more,
        }  # fmt: skip


def session_of(settings: Settings) -> FigureSession:
    """The session of an invocation: figures asked for together find each other's fits."""
    return _session(settings.model, settings.preset, settings.seed, settings.device, settings.n)


@lru_cache(maxsize=1)  # one model in memory at a time
def _session(model: str, preset: str, seed: int, device: str, n: int | None) -> FigureSession:
    return FigureSession(model, preset, seed, device, n)
