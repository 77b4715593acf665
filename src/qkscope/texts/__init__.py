"""Text with marked spans, and natural text by document.

In: a few numbers and a seed, or a file. Out: a `Task`, which draws units of `Example` for choosing
heads, for fitting each contrast and for testing; or passages of documents. In reading order:

- ``task``: what a task is, and how one is made of a walk
- ``word_pools`` (and ``word_pools.toml``): the words and the forms of prompts
- ``list_tasks``: `binding`, `filter`, `induction`; ``sentence_tasks``: `ioi`, `greater_than`,
  `pronoun`
- ``jsonl``: a file of your own; ``pairs``: a file of clean and corrupted prompts
- ``tasks``: the one list of all these, public as ``qkscope.tasks``
- ``documents``: natural text without marks, by document; ``holdout``: documents split so that no
  text stands on two sides
"""
