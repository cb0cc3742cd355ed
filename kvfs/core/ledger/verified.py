"""When copies on NVMe were last compared with their digests: a copy that rots says nothing.

Contract: who has compared one, or has just written it, says so by `note`, by the object's number;
an open asks by `due` whether it must compare it first. That is in memory only, for the MOST objects
that were compared last: after a mount nothing is known, and what fell out is compared once more. A
version needs no number here: a newer one was written later than anything that is noted of an older
one. A check that found a wrong copy, and is not to change anything, says so by `doubt`: an open
compares such a copy first, in whatever tier.
Not for comparing (`copies`), nor for packed copies, which are always compared.
"""

from collections import OrderedDict

import trio

DAY = 86400.0  # s
MOST = 65536  # objects; 13 MB


class Verified:
    """`after` so many seconds a copy is compared again, 0 for never; it may change at any time."""

    def __init__(self, after: float = DAY) -> None:
        self.after = after
        self._at: OrderedDict[int, float] = OrderedDict()
        self.doubted: set[tuple[int, int, str]] = set()  # inode, version, tier

    def note(self, ino: int) -> None:
        """Its copy on NVMe has its digest now."""
        self._at.pop(ino, None)
        self._at[ino] = trio.current_time()
        if len(self._at) > MOST:
            self._at.popitem(last=False)

    def forget(self, ino: int) -> None:
        """Its copy on NVMe is not what it was."""
        self._at.pop(ino, None)

    def doubt(self, ino: int, version: int, tier: str) -> None:
        """Its copy in a tier does not have its digest."""
        self.doubted.add((ino, version, tier))

    def end_doubt(self, ino: int, version: int, tier: str) -> None:
        """It was compared again, or is no more."""
        self.doubted.discard((ino, version, tier))

    def due(self, ino: int) -> bool:
        """Whether an open has to compare it."""
        if not self.after:
            return False
        at = self._at.get(ino)
        return at is None or trio.current_time() - at >= self.after
