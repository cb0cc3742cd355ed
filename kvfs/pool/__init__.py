"""The pool: nodes that read each other's objects, with Redis as the index and nginx for the bytes.

Contract: nothing here is trusted. An index or a peer that lies, hangs or is gone costs misses: a
mover compares the digest of all bytes before a program sees one. Nothing here knows the catalog:
`kvfs.core.pool` decides. Modules: `place` (what the mount options say), `connection`, `records` and
`index` (the Redis side), `nginx` (serves our objects), `fetching` (a mover reads a peer's).
"""
