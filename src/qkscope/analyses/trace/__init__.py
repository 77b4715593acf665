"""Who wrote the query and the key of a head: a relative logit split among the writers of the residual stream.

- `graph`: the depth of one prompt: which tokens the writers read, who wrote there, and why they looked
- `sources`: the same over many prompts: how far away the tokens stood that the writers read
"""
