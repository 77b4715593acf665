"""Who wrote what a head matched on: in come a task, a prompt or texts and some heads; out goes a `Trace`.

Its files, in reading order:

- ``trace``: the verb, which takes a task, a prompt, or texts
- ``rows``: a batch of prompts as rows of one head, split among writers
- ``tally``: sums by word, that merge and give intervals
- ``choose``: what is learned on the words for choosing: means, and several orders of writers
- ``edges``: edges cut and kept on other words, beside whole heads taken out; writers and pairs with their intervals
- ``result``: the answer in words, and shards added up; ``verdicts``: what it may say of parts, cuts and their controls
- ``prompt``: one prompt, any query and any key; ``one``: one head on it, split and cut
- ``features``: a dictionary's features instead of writers; ``feature_rows``: its pairs, beside copies without meaning
- ``many``: first writers of every head, on a task or on texts
- ``graph``: the depth of one prompt: which tokens the writers read, who wrote there, and why they looked; over many
  prompts: how far away those tokens stood
"""
