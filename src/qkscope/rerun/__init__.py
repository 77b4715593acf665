"""What if: the same prompt, run again with one thing changed.

In comes a prompt that was run (its attention calls) and a list of changes; out go attention and
next-token logits of each change, run in one batch. The changes are values of `qkscope.changes`;
those that hold for a whole ``with`` block (`Scope.ablate`, `hide`, `replace`) stand in
`qkscope.model.runner`.

`executor` (`rerun`: chooses the shortest of three roads for each tuple of changes) → `reference`
(whole prompts, one at a time, nothing shared: what all others are tested equal to) → `reads` (what is
read of a run) → `rerun_tokens` (other tokens, or one token's attention rows; what precedes the change
is computed once) → `alternatives` (other words for those of a prompt) → `later_layers` (layers before
a change hand on what they put out) → `rerun_layers` (heads and
MLPs that put out something else, and edits of a batch, run on from the first layer that they touch)
→ `nodes` (all writers at all tokens: scored, kept, replaced)
"""
