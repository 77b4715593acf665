"""Everything that touches the disk: a `Result` goes in, a folder comes out, and the folder gives the result back.

A folder has one writer, is written file by file, and never over anybody's files. A long run keeps what is done, and the
same call goes on from there; what it was asked is said before any work, and a folder of another job is refused.

In reading order: `claims` (a statement, its numbers, the rule that decides), `result` (tables, arrays and
claims), `folder` (whose a folder is; one writer; reading
and writing), `store` (tensors and a manifest in one file), `provenance` (what made a run), `progress` (how far
it is), `shards` (batches that memory may cut and processes may share), `job` (a long run: kept, taken up).
"""
