"""Who wrote what a head matched on: in come a task, a prompt or texts and some heads; out goes a
`Trace`.

Its files, in reading order:

- ``trace``: the verb, which takes a task, a prompt, or texts; tables and answers of a prompt, a
  task and all heads
- ``rows``: one head on a batch of prompts, split among writers, with parts replaced; a pass over
  all batches
- ``verdicts``: what an answer may say of parts, cuts and their controls: the one rule
- ``prompt``: one head on one prompt, any query and any key, split and cut
- ``edges``: a task: writers chosen in several orders, edges cut and kept, whole heads taken out
- ``features``: a dictionary's features instead of writers, ablated and restored, beside copies
  without meaning
- ``graph``: the depth of one prompt: which tokens the writers read, who wrote there, and why they
  looked; over many prompts: how far away those tokens stood
"""
