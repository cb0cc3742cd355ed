"""The S3 tier, in four packages.

`listing` finds remote entries, `upload` and `download` move objects, `node` speaks for this mount.

Contract: if the bucket is unreachable, slow or corrupt, programs get misses; the mount keeps
working.
"""
