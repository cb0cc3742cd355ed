"""When copies on NVMe were last compared with their digests: a copy that rots gives no error.

Contract: a task that has compared or just written a copy calls `note` with the inode number. An
open asks `due` whether it must compare the copy first. The times are in memory only, for the MOST
objects that were compared last. So after a mount no time is known, and an object that fell out is
compared once more. Versions need no number here: a newer version was written later than any time
noted for an older one. A check that found a wrong copy, and is not to change it, calls `doubt`: an
open compares such a copy first, in any tier.
Not for comparing (`copies`), nor for packed copies, which are always compared.
"""

from collections import OrderedDict
from collections.abc import Callable

import trio

DAY = 86400.0  # s
MOST = 65536  # objects; 13 MB


class VerifiedTimes:
    """The times of comparisons. `after`: seconds until a copy is compared again, 0 for never.

    `after` may change at any time.
    """

    def __init__(self, after: float = DAY) -> None:
        self.after = after
        self._at: OrderedDict[int, float] = OrderedDict()
        self.doubted: set[tuple[int, int, str]] = set()  # inode, version, tier
        self.doubting: Callable[[int], None] = lambda _: None  # called before a doubt is noted

    def note(self, ino: int) -> None:
        """Note that an object's copy on NVMe has its digest now."""
        self._at.pop(ino, None)
        self._at[ino] = trio.current_time()
        if len(self._at) > MOST:
            self._at.popitem(last=False)

    def forget(self, ino: int) -> None:
        """Forget when an object was compared: its copy on NVMe has changed."""
        self._at.pop(ino, None)

    def doubt(self, ino: int, version: int, tier: str) -> None:
        """Note that a copy in a tier does not have its digest."""
        self.doubting(ino)
        self.doubted.add((ino, version, tier))

    def end_doubt(self, ino: int, version: int, tier: str) -> None:
        """End the doubt of a copy that was compared again, or is gone."""
        self.doubted.discard((ino, version, tier))

    def due(self, ino: int) -> bool:
        """Whether an open has to compare an object's copy on NVMe."""
        if not self.after:
            return False
        at = self._at.get(ino)
        return at is None or trio.current_time() - at >= self.after
