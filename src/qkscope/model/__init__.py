"""Examples in, queries and keys out: the only room that touches a Hugging Face model.

What comes in: the name of a model (`Scope.load`) and examples, text with marked queries and keys
(`Example`). What goes out: a `Capture` for each batch (queries, keys, and the rest of their
attention rows, which `Capture.rows` gives as `AttentionRows`), and patched runs (`Edit`).

Its files, in reading order. The way of a batch through a model:

- ``scope``: `Scope`, a model that can be looked into; every other file is a part of what it does
- ``encode``: examples as padded ids, marks as token positions, and what a token reads as
- ``inputs``: what a model is fed, what it is asked for, and marks that mean what they say
- ``tap``: every attention call is shown to visitors, with nothing copied from the model's code
- ``own_code``: the same for families with attention code of their own, watched while it runs
- ``spaces``: queries and keys before the rotation, after it, and in the query's frame
- ``capture_types``: a model's layers and heads, the places to look at, and what is captured there:
  queries, keys, and the log-sum-exp of everything else
- ``batching``: how they are taken layer by layer; layers that are alike wait, and are done together
- ``patch``: other keys, queries, logits or outputs in chosen heads, and the model runs on
- ``prefix``: a few tokens of a changed prompt run alone, among keys and values of the unchanged one;
  and whether that is the changed prompt
- ``runner``: runs under the tap, watched, patched, continued, and changed for a ``with`` block
- ``what_if``: how a change acts on a run: writers ablated, keys hidden, tokens replaced,
  heads that follow a rule
- ``greedy``: what a greedy continuation asks of transformers

Whether a model can be trusted to be looked into:

- ``probe``: what its attention is and how it counts positions, read off live calls, or the true
  cause of a refusal
- ``selfcheck``: the facts that must hold before a number is believed, also beyond every length that
  a config names
- ``tiny_copy``: a config made small, its lengths made short, and loud weights for it
- ``block_tree``: each block taken apart into what it adds to the residual stream; norms as linear
  maps

From a name to a model: ``load`` finds it and loads it, and runs no code of the model's own;
``files`` are what makes it, its fingerprint, and models in packages; ``gguf`` turns a GGUF file
into a checked folder. ``dictionary`` codes a residual stream in a dictionary's features, and
``dictionary_files`` reads the dictionary, here or on the hub. A bridge of TransformerLens or a
model of nnsight is unwrapped in ``load``.
"""
