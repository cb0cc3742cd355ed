"""The S3 tier, in four rooms.

`listing` finds remote entries, `upload` and `download` move objects, `node` speaks for this
mount.

Contract: a bucket that is away, slow or lying costs misses, never the mount.
"""
