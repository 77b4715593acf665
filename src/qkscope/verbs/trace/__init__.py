"""Who wrote what a head matched on: in come a task or a prompt and some heads; out goes a `Trace`.

- ``trace``: the verb, which takes a task or a prompt; tables and answers of each
- ``edges``: a task: writers chosen in several orders, edges cut and kept, whole heads taken out
- ``features``: a dictionary's features instead of writers, ablated and restored, beside copies
  without meaning, which ``null_dictionaries`` makes
"""
