"""Features of heads without labels: text or a task comes in, `discover` gives the features of some heads, and
`qkscope.analyses.atlas` the directions of every head.

In reading order: `texts` (plain text as examples), `rows` (what heads attended to, one row per query, and what the
attended token is to the asking one), `study` (what both verbs share: options, the pass over the examples, the
row of a head), `evidence` (what speaks for a feature), `curve` (a subspace beside its rivals at every size), `discover`
(the verb).
"""
