"""The linear engine: which components write what a head reads, with norms frozen.

What comes in: a `Scope` and a batch. What goes out: a `Run`, in which queries, keys, values and
next-token logits are split among writers. Its files, in reading order:

- ``layer``: one layer, by its own code and autograd, or many in closed form, checked against the
  model's own vectors
- ``run``: what one forward leaves at chosen places: writers pushed up through its blocks,
  directions pulled down
- ``reader``: some heads of a model, and forwards recorded as runs
- ``attribution``: relative logits of many heads at once, the next token's logits, and an MLP's neurons,
  as parts of writers
- ``row``: writers' parts in one head's query or key, ablated or restored
- ``head_weights``: W_Q and W_K of heads, norms folded in, by the same gradient
"""
