"""What features do: they are exchanged between keys, and attention and answers are watched.

- ``swap``: the verb: which keys change places, and where the attention goes
- ``downstream``: what the model answers
- ``truth``: how near it comes to the feature exchanged in the text
- ``clouds``: keys and queries as points
"""
