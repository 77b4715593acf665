"""How well a nano model answers the first question of the tasks' own test prompts.

Right is a prompt after which the likeliest of *all* tokens is a right key's. ``choice`` asks less:
whether a right key's token is likelier than the other candidates', whose chance level is the share
of right candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qkscope.model.encode import Encoder
from qkscope.sums.intervals import wilson
from qkscope.texts.task import ANSWER, Task
from qkscope.texts.tasks import BUILT_IN

_FORMS = {"binding": ("list", "sentence", "question"), "filter": ("list", "bullets", "question")}
CLAIMED = (
    *(f"{kind}/{form}" for kind, forms in _FORMS.items() for form in forms),
    "ioi",
    "induction",
)
"""What the nano models are trained to do, a name per task and form."""


def claimed_task(name: str, seed: int = 0) -> Task:
    """The task of this name, at its own size: nine boxes, five categories, eight words."""
    kind, _, form = name.partition("/")
    options: dict[str, Any] = {"form": form} if form else {}
    return BUILT_IN[kind](seed=seed, **options)


@dataclass(frozen=True)
class Exam:
    """Prompts of one task as ids, padded on the right, with the tokens that are right and those
    that are candidates.
    """

    ids: Int[Tensor, "n t"]
    last: Int[Tensor, " n"]
    right: Bool[Tensor, "n v"]
    candidates: Bool[Tensor, "n v"]

    @classmethod
    def of(cls, task: Task, tokenizer: Any, n: int, device: torch.device) -> Exam:
        """The first ``n`` test prompts of a task."""
        examples = [unit[0] for unit in task.test(n)]
        tokens = Encoder(tokenizer).tokenise(examples)
        ids = pad_sequence([torch.tensor(one.ids) for one in tokens], batch_first=True)
        right = torch.zeros(n, len(tokenizer), dtype=torch.bool)
        candidates = right.clone()
        for i, (example, one) in enumerate(zip(examples, tokens, strict=True)):
            for key, place in zip(example.keys, one.keys, strict=True):
                candidates[i, one.ids[place]] |= key.label(ANSWER) != 0
                right[i, one.ids[place]] |= key.label(ANSWER) > 0
        last = torch.tensor([len(one.ids) - 1 for one in tokens])
        return cls(*(part.to(device) for part in (ids, last, right, candidates)))

    @torch.no_grad()
    def score(self, model: Any) -> dict[str, Any]:
        """Accuracy of a model, its interval, and the choice among candidates."""
        hidden = model.model(input_ids=self.ids, use_cache=False).last_hidden_state
        logits = model.lm_head(
            hidden[torch.arange(len(self.last), device=self.ids.device), self.last]
        )
        hits = self.right.gather(1, logits.argmax(dim=1, keepdim=True))
        chosen = logits.masked_fill(~self.candidates, -torch.inf).argmax(dim=1, keepdim=True)
        choice = self.right.gather(1, chosen)
        n = len(hits)
        count = int(hits.sum())
        low, high = wilson(count, n)
        chance = float((self.right.sum(dim=1) / self.candidates.sum(dim=1)).mean())
        return {
            "accuracy": count / n,
            "low": low,
            "high": high,
            "choice": float(choice.float().mean()),
            "chance": chance,
            "n": n,
        }
