"""Why did this head attend to that token: one question about one prompt, one answer.

In come a model and a prompt that somebody just typed; out goes a `Why`: because of which words the
head looks there, who carried them, what cutting the strongest writers does, and what the head
changes. Files in reading order:

- ``why``: the verb; ``answer``: what it gives back
- ``one_head``: one head at one query; ``sentences``: the answer in words
- ``next_words``: what it says of the next token, the answer and its rival
- ``splits``: the relative logit split by writers, by singular vectors and by features
- ``many_prompts``: how often each reason over many prompts, and which heads decide most often
- ``many_pairs``: mean logit differences over pairs of prompts, each with its answer and rival
- ``circuit``: from the answer back: the graph, and its nodes kept in the running model
"""
