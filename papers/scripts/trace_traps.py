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
        "two key writers cut": ("key", "cut", 2),
        "five writers a side kept": ("both", "keep", 5),
    }
    places = {
        name: next(i for i, e in enumerate(test.edges) if (e.side, e.kind, e.k, e.by) == (*cell, "share"))
        for name, cell in wanted.items()
    }
    units, found = task.test(N), {}
    for batch in batches_of(units, 32):
        _, (rows,) = how.rows(units, batch)
        plain = rows.edges(test.instead(rows, None))
        keys = plain.rows.k.clone()
        mean = chosen.mean["key"].sum(0).expand(1, len(keys), 1, -1)  # of the stream
        at = rows.run.slots([0, 1])
        at.columns[:, 1] = plain.first
        keys[torch.arange(len(keys)), 0, plain.first] = at.live(head, "key", mean)[0, :, 0].detach()
        for way, edges in (("as trace does it", plain), ("first key overwritten, too", replace_keys(plain, keys))):
            nothing = torch.zeros_like(test.masks[0][:1])
            found.setdefault((way, "before"), []).append(plain.replaced(nothing, nothing)[0])
            for name, i in places.items():
                masks = (mask[i : i + 1] for mask in test.masks)
                found.setdefault((way, name), []).append(edges.replaced(*masks)[0])
    for (way, name), parts in found.items():
        means = dict(zip(METRICS, torch.cat(parts).mean(0).tolist(), strict=True))
        shown = ", ".join(f"{metric} {means[metric]:.2f}" for metric in ("attention", "first", "accuracy"))
        print(f"{way}: {name}: {shown}")


def replace_keys(edges, keys):
    """The same rows with other keys."""
    return replace(edges, rows=replace(edges.rows, k=keys))


if __name__ == "__main__":
    main()
