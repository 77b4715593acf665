"""The verbs: capture and maths together give a `Result`.

In come a `Scope` and a task, prompts, or what an earlier verb found; out goes a `Result` with
tables and arrays that a page is drawn from, in a folder if one is named. Files in reading order:

- What verbs share: `prompts` (a task through a model, in batches; a prompt that several contrasts
  label runs once; what a result was made from).
- Features from contrasts: `find` (which heads), `decompose` (their features in one pass, and
  whether a file's prompts depend on each other) and `fit` (what it gives: sums, subspaces, and the
  folder they are kept in and read from).
- What features do: `swap` (which keys change places, and where the attention goes), `downstream`
  (what the model answers), `truth` (how near it comes to the feature exchanged in the text),
  `clouds` (keys and queries as points).
- One prompt's logits: `split` (among features; relative attention, over every head's singular
  basis).
- Who wrote what a head matched on: ``trace/``. The question itself, of one prompt: ``why/``; from
  the answer back: `circuit` (the graph, and its nodes kept in the running model).
- By changing words: `because` (the words that decide a look, and their relations), `atlas` (every
  head named so), `guesses` (what names predict).
- Features from weights: `circuits` (which heads look from where to where), `sparsity` (how few
  singular vectors carry it, over training too).
"""
