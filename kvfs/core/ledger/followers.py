"""Which spilled blocks come after a block in its prompt, where their names or a guess say it.

Contract: `count` is told of each object that the bucket alone has, as it comes and goes: by the
census beside the first operations, and by whatever moves it. What `after` says is a hint: names may
have changed since, and of very many the oldest are forgotten. About 250 bytes an object whose
predecessor is known, none for others. Synchronous, no I/O. Not for the order of what has no
`parent_key`.
"""

from collections import OrderedDict

from kvfs.catalog import Inode

MOST = 1 << 17  # blocks, about 32 MiB


class Followers:
    """By namespace and key of the block before, the files of all that come after it."""

    def __init__(self) -> None:
        self._after: OrderedDict[tuple[int, int], tuple[int, ...]] = OrderedDict()

    def count(self, inode: Inode, sign: int) -> None:
        """One more (1), or one that is in a tier again, or nowhere (-1)."""
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
        """Inodes of what comes after a block."""
        return self._after.get((namespace, key), ())
