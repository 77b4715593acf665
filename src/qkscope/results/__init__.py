"""Everything that touches the disk: a `Result` goes in, a folder comes out, and the folder gives
the result back.

A folder is written file by file, and never over anybody's files. A long verb works in pieces, and
the same call makes what is missing of them.

In reading order: `claims` (a statement, its numbers, the rule that decides), `folder` (whose a
folder is; reading and writing; files of tensors), `result` (tables, arrays and claims; what made
them), `progress` (how far a run is), `work` (pieces: kept, taken up, shared; the frame of every
verb).
"""
