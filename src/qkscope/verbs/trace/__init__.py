"""Who wrote what a head matched on: in come a task or a prompt and some heads; out goes a `Trace`.

One verb and four programs: of one prompt or of a task, by writers or by a dictionary's features.

- ``trace``: the verb, which checks what is asked and hands it to one of the four
- ``prompt_writers``, ``prompt_features``: one prompt, any query and any key
- ``task_writers``: a task; of all heads only the first writers; ``task_features``
- ``edges``: writers chosen in several orders, their edges cut and kept
- ``whole_heads``: heads taken out of the running model
- ``feature_pairs``: a dictionary's features instead of writers, ablated and restored, beside copies
  without meaning, which ``null_dictionaries`` makes
"""
