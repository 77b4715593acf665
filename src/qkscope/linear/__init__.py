"""The linear engine: which components write what a head reads, with norms frozen.

What comes in: a `Scope` and a batch. What goes out: a `Run`, in which queries, keys, values and
next-token logits are split among writers. Its files, in reading order:

- ``layer``: one layer by its own code and autograd; the two ways through a layer are explained here
- ``head_weights``: W_Q and W_K of heads, norms folded in, by the same gradient
- ``closed_form``: many heads of many layers in one product, compared with the true vectors
- ``run``: one forward pass at chosen places: writers pushed up through its blocks, directions
  pulled down
- ``recording``: the hooks that keep what a forward pass leaves there
- ``reader``: some heads of a model: its blocks and weights, and passes recorded as runs
- ``attribution``: relative logits of many heads at once, the next token's logits, and an MLP's
  neurons, as parts of writers
- ``row``: writers' parts in one head's query or key, ablated or restored
"""
