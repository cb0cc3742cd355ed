"""The first bytes of an object that only the bucket has, read without the rest of it.

Contract: `read` gives bytes that were compared with their digest; `has` tells which those are. The
object's key in the bucket is not deleted until `leave` is called, once. So a program that reads on
finds the rest there, even if the object was unlinked meanwhile. Not for the download of the bytes
(`core/bucket`), nor for the choice of their readers (`core/objects/scans.py`).
"""

from collections.abc import Callable

from kvfs.catalog import Stored


class Header:
    """The first bytes of one object.

    `stored` is its key in the bucket. A reader calls `leave` when no program reads the header any
    more, or the whole object is here. `read_on` says whether a program has asked for more.
    """

    def __init__(self, data: bytes, stored: Stored, leave: Callable[[], None]) -> None:
        self.stored = stored
        self.leave = leave
        self.read_on = False
        self._data = data

    def has(self, start: int, length: int) -> bool:
        """Whether these bytes are among the first."""
        return start + length <= len(self._data)

    def read(self, start: int, length: int) -> bytes:
        """Return bytes that it `has`."""
        return self._data[start : start + length]
