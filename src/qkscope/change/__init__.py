"""What if: the same prompt, run again with one thing changed.

In comes a prompt that was run (its attention calls) and a list of changes; out go attention and next-token logits of
each change, run in one batch. Changes that hold for a whole ``with`` block (`Scope.ablate`, `hide`, `replace`) stand in
`qkscope.capture.running`.

`rows` (one token's attention rows changed: writers' parts in a head's query or key ablated or restored, or a row set by
hand, and that token alone run again) → `whole` (edits of a batch, run on from the first layer that they touch)
"""
