"""Some heads in depth: text or a task comes in, `discover` gives what each head matches on, named and tested.

In reading order: `closer` (token pairs and directions of a head's leading block, and rows to swap), `changes` (a token
is changed in the text), `discover` (the verb). The names themselves are `qkscope.analyses.names`.
"""
