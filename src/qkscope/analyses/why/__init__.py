"""Why did this head attend to that token: one question about one prompt, one answer.

In come a model and a prompt that somebody just typed; out goes a `Why`: where the head looks, what matched, who wrote
it there, whether causal tests support it, and what it changes. Files in reading order:

- ``why``: the verb, and the answer in words
- ``parts``: its tables: the relative logit split by writers, by singular vectors and by features; a swap of the
  strongest writers' parts; what a head writes for the next token, and what changes where it may not look
"""
