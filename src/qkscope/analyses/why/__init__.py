"""Why did this head attend to that token: one question about one prompt, one answer.

In come a model and a prompt that somebody just typed; out goes a `Why`: because of which words the
head looks there, who carried them, what cutting the strongest writers does, and what the head
changes. Files in reading order:

- ``why``: the verb; ``sentences``: the answer in words
- ``carriers``: a word changed, and what few writers wrote put back
- ``output``: the next token, its rival, and every head tried
- ``parts``: the relative logit split by writers, by singular vectors and by features
- ``over``: how often each reason over many prompts, and which heads decide most often
"""
