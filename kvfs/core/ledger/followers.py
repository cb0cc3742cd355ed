"""Which spilled blocks come after a block in its prompt, as far as names or a guess tell.

Contract: `count` is called for each object that comes to be in the bucket alone, or no longer is.
The census calls it beside the first operations, and so does each move of an object. The result of
`after` is a hint: names may have changed since, and beyond `MOST` blocks the oldest are forgotten.
An object takes about 250 bytes if its predecessor is known, else none. Synchronous, no I/O. Not
for objects without a `parent_key`.
"""

from collections import OrderedDict

from kvfs.catalog import Inode

MOST = 1 << 17  # blocks, about 32 MiB


class Followers:
    """By namespace and key of the block before, the files of all that come after it."""

    def __init__(self) -> None:
        self._after: OrderedDict[tuple[int, int], tuple[int, ...]] = OrderedDict()

    def count(self, inode: Inode, sign: int) -> None:
        """Add a spilled object (1), or remove one that is in a tier again, or nowhere (-1)."""
        if not inode.parent_key:
            return
        at = inode.namespace, inode.parent_key
        others = tuple(ino for ino in self._after.get(at, ()) if ino != inode.ino)
        if sign > 0:
            self._after[at] = (*others, inode.ino)
            if len(self._after) > MOST:
                self._after.popitem(last=False)
        elif others:
            self._after[at] = others
        else:
            self._after.pop(at, None)

    def after(self, namespace: int, key: int) -> tuple[int, ...]:
        """Inodes of the files that come after a block."""
        return self._after.get((namespace, key), ())
