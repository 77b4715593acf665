"""The verbs: capture and maths together give a `Result`.

In come a `Scope` and a task, prompts, or what an earlier verb found; out goes a `Result` with tables and arrays that a
page is drawn from, in a folder if one is named. Files in reading order:

- What verbs share: `prompts` (a task through a model, in batches; a prompt that several contrasts label runs once; what
  a result was made from).
- Features from contrasts: `find` (which heads), `decompose` (their features in one pass, and whether a file's prompts
  depend on each other) and `fit` (what it gives: sums, subspaces, and the folder they are kept in and read from).
- What features do: `swap` (which keys change places, and where the attention goes), `downstream` (what the model
  answers), `attribute` (one prompt's logits split), `clouds` (keys and queries as points).
- Who wrote what a head matched on: ``trace/``. The question itself, of one prompt: ``why/``.
- By changing words: `because` (the words that decide a look, and their relations), `atlas` (every head named so),
  `guesses` (what names predict).
- Features from weights: `relative` (every head's singular basis, and one prompt's relative attention split over it),
  `circuits` (which heads look from where to where), `sparsity` (how few vectors carry it), `sweep` (over training,
  at `checkpoints`).
"""
