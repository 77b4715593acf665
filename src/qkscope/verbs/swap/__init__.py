"""Causal test of features: exchange them between keys, and watch attention and answers.

- ``swap``: the verb: features change places between two keys; where the attention goes
- ``features``: what is swapped at which heads
- ``downstream``: what the model answers
- ``truth``: how near it comes to the feature exchanged in the text
"""
