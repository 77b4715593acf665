"""Examples in, queries and keys out: the only room that touches a Hugging Face model.

What comes in: the name of a model (`Scope.load`) and examples, text with marked queries and keys (`Example`).
What goes out: a `Capture` for each batch (queries, keys, and the rest of their attention rows, which `Capture.rows`
gives as `AttentionRows`), and patched runs (`Edit`).

Its files, in reading order. The way of a batch through a model:

- ``scope``: `Scope`, a model that can be looked into; every other file is a part of what it does
- ``wrapped``: the model inside a bridge of TransformerLens or a model of nnsight
- ``encode``: examples as padded ids, marks as token positions
- ``inputs``: what a model is fed, what it is asked for, and marks that mean what they say
- ``tap``: every attention call passes through us, nothing copied
- ``own_code``: the same for families with attention code of their own, watched while it runs
- ``spaces``: before the rotation, after it, and in the query's frame
- ``pick``: queries and keys at chosen places, and the log-sum-exp of everything else: `Capture`
- ``gather``: how they are taken layer by layer; layers that are alike wait, and are done together
- ``tokens``: what a token is before any context, and what it reads as
- ``patch``: other keys, queries or logits in chosen heads, and the model runs on

Whether a model can be trusted to be looked into:

- ``probe``: what its attention is and how it counts positions, read off live calls
- ``refused``: the true cause where a model cannot be looked into
- ``layers``: where a module stands among a model's layers
- ``selfcheck``: five facts that must hold before a number is believed
- ``families``: a tiny random model of every family, and the checks behind ``qkscope models``: also whether parts sum
  to the logit

Who wrote what a head reads:

- ``stream``: each block taken apart into what it adds to the residual stream, by looking
- ``notes``: what heads, MLPs and the embedding left at chosen places in one forward
- ``held``: a layer's own code as a linear map, its norms held, where it has no weights to read
- ``writers``: what was left, as another head's queries and keys read it
- ``marginals``: the relative logits of many heads at once, split among writers
- ``sources``: directions followed back to the writers at a token, and to the tokens that those read
- ``folded``: one head's queries and keys at many tokens, added up without carrying writers to each
- ``ablate``: whole heads taken out of the running model

From a name to a model: ``names``, ``packages`` and ``files`` find what makes it and its fingerprint (``fetch`` installs
the packages), ``load`` loads it and runs no code of its own, ``gguf`` turns a GGUF file into a checked folder, which
``gguf_reader`` reads quickly.
"""
