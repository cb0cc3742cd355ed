"""The first bytes of an object that only the bucket has, read without the rest of it.

Contract: `read` gives bytes that were compared with their digest, or says that they are others
than it has. Where the object is nothing is deleted until `leave` is called, once: whoever reads on
finds the rest there, also of what was unlinked meanwhile. Not for how it came (`core/bucket`), nor
for who is given it (`core/objects/scans.py`).
"""

from collections.abc import Callable

from kvfs.catalog import Stored


class Header:
    """`stored`: where all of it is. `leave`: nobody reads it any more, or all of it is here.

    `read_on`: whether somebody has asked for more.
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
        """Those that it `has`."""
        return self._data[start : start + length]
