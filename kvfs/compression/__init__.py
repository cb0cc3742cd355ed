"""Objects made smaller without loss: byte planes, then zstd, for slow or expensive tiers.

Contract: `files` compresses one file into another and back, in a mover process; `container` defines
the stored bytes. docs/compression.md has the reasons, with figures. Not for deciding which objects
are compressed, nor for hashing them: an object's own digest is that of the bytes that its readers
see.
"""
