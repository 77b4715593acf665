"""The traps of tracing, shown: what cutting and keeping say when the first token's key is overwritten, too.

``python papers/scripts/trace_traps.py`` prints two rows for L18H6 on binding: edges cut and kept as `qkscope trace`
does it, and the same with the first token's key replaced by the mean key, as an edit of all tokens would.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import qkscope as qk
from qkscope.analyses.prompts import batches_of
from qkscope.analyses.trace.edges import EdgeTest, choose_writers
from qkscope.analyses.trace.rows import Pass
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.maths.writers import METRICS

N = 64


def main() -> None:
    """Print attention, first-token attention and accuracy among the boxes, before, cut and kept, both ways."""
    scope, task, head = qk.Scope.load("smollm2-135m"), qk.tasks.binding(seed=0), Head.parse("L18H6")
    how = Pass(Reader(scope, [head]))
    chosen = choose_writers(how, task.choose(N))[head]
    test = EdgeTest(head, how.reader.writers(head.layer), chosen, 0)
    wanted = {
        "two key writers cut": {"side": "key", "kind": "cut", "k": 2, "by": "share"},
        "five writers a side kept": {"side": "both", "kind": "keep", "k": 5, "by": "share"},
    }
    places = {
        name: next(i for i, (edge, _) in enumerate(test.edges) if cell.items() <= edge.items())
        for name, cell in wanted.items()
    }
    units, found = task.test(N), {}
    for batch in batches_of(units, 32):
        _, (rows,) = how.rows(units, batch)
        true, first = rows.rows, rows.rows.present().int().argmax(1)
        keys = true.k.clone()
        mean = chosen.mean["key"].sum(0).expand(1, len(keys), 1, -1)  # of the stream
        at = rows.run.slots([0, 1])
        at.columns[:, 1] = first
        keys[torch.arange(len(keys)), 0, first] = at.live(head, "key", mean)[0, :, 0].detach()
        for way, own in (("as trace does it", true), ("first key overwritten, too", replace(true, k=keys))):
            rows.rows = true
            found.setdefault((way, "before"), []).append(rows.measure()[0])
            rows.rows = own
            for name, i in places.items():
                replaced = rows.replaced(test.instead(rows), test.masks[:, i : i + 1])[0]
                found.setdefault((way, name), []).append(replaced)
    for (way, name), parts in found.items():
        means = dict(zip(METRICS, torch.cat(parts).mean(0).tolist(), strict=True))
        shown = ", ".join(f"{metric} {means[metric]:.2f}" for metric in ("attention", "first", "accuracy"))
        print(f"{way}: {name}: {shown}")


if __name__ == "__main__":
    main()
