"""Everything that touches the disk: a `Result` goes in, a folder comes out, and the folder gives the result back.

A folder has one writer, is written file by file, and never over anybody's files. A long run keeps what is done, and the
same call goes on from there; what it was asked is said before any work, and a folder of another job is refused.

In reading order: `claims` (a claim and its rule), `result` (tables, arrays, claims), `folder` (whose a folder is; one
writer; reading and writing), `store` (tensors and a manifest in one file), `provenance` (what made a run), `stream`
(batches that memory may cut), `job` (a long run: kept, taken up), `shards` (one job in many processes).
"""
