"""Why did this head attend to that token: one question about one prompt, one answer.

In come a model and a prompt that somebody just typed; out goes a `Why`: where the head looks, what matched, who wrote
it there, whether it is so, and what it changes. Files in reading order:

- ``why``: the verb, and the answer in words
- ``parts``: the relative logit split by writers, by singular vectors, and by features: one table; and the strongest
  writers' parts exchanged between two tokens
- ``output``: what a head writes for the next token, and what changes where it may not look
"""
