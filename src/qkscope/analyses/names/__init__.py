"""Names for heads: text comes in; a sentence for every head goes out, with its share, its interval and its tests.

In reading order: `readings` (what a person can read off a text at each token, and rules: which key a query should
attend to), `sight` (batches, heads, and what a query sees), `look` (the two passes over text), `sentence` (names and
sentences by template), `study` (text by side, both passes, and the tables that `atlas` and `discover` share).
"""
