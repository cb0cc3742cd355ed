"""The first bytes of an object that only the bucket has, read without the rest of it.

Contract: `read` returns bytes that kvfs has compared with a digest; `has` tells whether it can. The
reader calls `leave` once. Until then kvfs does not delete the object's key in the bucket. So a
program that reads further finds the rest there, even if the object was unlinked meanwhile. Not for
the download of the bytes (`core/bucket`), nor for choosing which opens get a header
(`core/objects/scans.py`).
"""

from collections.abc import Callable

from kvfs.catalog import Stored


class Header:
    """The first bytes of one object.

    `stored` has its key in the bucket. The reader calls `leave` when no program reads the header
    any more, or when a local tier has the whole object. `read_on` says whether a program has read
    beyond the header.
    """

    def __init__(self, data: bytes, stored: Stored, leave: Callable[[], None]) -> None:
        self.stored = stored
        self.leave = leave
        self.read_on = False
        self._data = data

    def has(self, start: int, length: int) -> bool:
        """Whether the header has all of these bytes. start, length: bytes of the object."""
        return start + length <= len(self._data)

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the header. Call it only if `has` is true for them."""
        return self._data[start : start + length]
