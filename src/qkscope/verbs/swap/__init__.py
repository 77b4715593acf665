"""What features do: they are exchanged between keys, and attention and answers are watched.

- ``swap``: the verb: features change places between two keys; where the attention goes
- ``features``: what is swapped at which heads
- ``downstream``: what the model answers
- ``truth``: how near it comes to the feature exchanged in the text
"""
