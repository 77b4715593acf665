"""Everything that touches the disk: a `Result` is written to a folder, and read back from it.

A folder is written file by file, and never over other files. A long verb works in pieces, and
the same call makes the missing ones.

In reading order: `claims` (a statement, its numbers, the rule that decides), `folder` (a run's
folder, read and written; files of tensors), `result` (tables, arrays, claims, provenance),
`tables` (``tables.toml``: which columns each verb's tables have, and what is printed of them),
`progress` (the line that shows how far a run is), `work` (pieces: kept, resumed, shared; the frame
of every verb).
"""
