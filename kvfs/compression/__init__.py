"""Objects made smaller without loss: byte planes, then zstd, for tiers that are slow or dear.

Contract: `files` compresses one file into another and back, in a mover process; `container` says
what the stored bytes are. Why it is so, with figures, is in
docs/compression.md. Not for deciding which objects are compressed, nor for hashing them: an
object's own digest is that of its bytes as its readers see them.
"""
