"""The verbs: a model, findings and sums together give a `Result`.

In come a `Scope` and a task, prompts, or what an earlier verb found; out goes a `Result` with
tables and arrays that a page is drawn from, in a folder if one is named. In reading order:

- Features from contrasts: `find_heads` (which heads), `decompose` (their features in one pass, and
  whether a file's prompts depend on each other); ``swap/``: what the features do.
- One prompt's logits, split among features: `attribute`.
- The question itself, of one prompt or many: ``why/``. Who wrote what a head matched on:
  ``trace/``; one edge into a head, exchanged between two prompts: `path_patch`. Every head by the
  words that decide its looks: ``atlas/``.
- Features from weights: `sparsity` (how few singular vectors carry relative attention, over
  training too).
"""
