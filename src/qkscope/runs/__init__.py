"""Everything that touches the disk: a `Result` goes in, a folder comes out, and the folder gives the result back.

A folder is written file by file, and never over anybody's files. A long verb works in pieces, and the same call makes
what is missing of them.

In reading order: `claims` (a statement, its numbers, the rule that decides), `result` (tables, arrays and claims),
`folder` (whose a folder is; reading and writing), `store` (tensors and a manifest in one file), `provenance` (what made
a run), `progress` (how far it is), `work` (pieces: kept, taken up, shared), `verb` (the frame of every verb).
"""
