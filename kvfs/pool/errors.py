"""Failures of the pool. None of them is an error for a program: an open is a miss.

Contract: each is a TierError, so that `kvfs.fuse.errnos` knows it.
"""

from kvfs.errors import TierError


class IndexDownError(TierError):
    """The index does not answer, or not in time; or it refuses commands."""


class IndexRefusedError(IndexDownError):
    """The index is no Redis server, or does not take our password: time does not mend that."""


class IndexFullError(IndexDownError):
    """The memory of the index is full: it refuses commands that may need some, and no others."""


class PeerError(TierError):
    """A peer did not give an object: it does not answer, or gives other bytes."""


class WrongChunkError(PeerError):
    """A chunk is not as the index says: the peer gave other bytes, or the index is wrong."""


class NoFileError(PeerError):
    """A peer does not have the file any more: it has moved or evicted the object."""
