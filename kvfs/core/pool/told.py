"""Tells what the index was told of an object before the record of the object changes.

Contract: immutable. The announcer compares a `Told` with the object's present record. From this it
knows whether the object has lost its content or its name. Not for what the index has now
(`pool/indexed`).
"""

from typing import NamedTuple

from kvfs.catalog import Batch, Inode
from kvfs.pool.records import Unlinked


class Told(NamedTuple):
    """An object as it was before its record changed, and what the index has by its name."""

    key: str
    version: int
    digest: bytes
    indexed: Unlinked  # the object itself, or the one that it is in conflict with
    link: tuple[int, int]  # the directory and the cookie of its first name
    shared: bool = True  # changes of its name are for all nodes
    there: str = ""  # the key at which another node may have stored it, if this node has not
    left: bool = False  # a program has taken the name, or rewritten the object
    # Later states that left as well: other nodes may have them from the bucket, and announce them.
    also: tuple[Unlinked, ...] = ()

    @classmethod
    def of(
        cls,
        inode: Inode,
        key: str,
        *,
        shared: bool = True,
        other: Unlinked | None = None,
        there: str = "",
    ) -> "Told":
        indexed = other or Unlinked(key, inode.digest, inode.backing_mtime_ns)
        return cls(key, inode.version, inode.digest, indexed, inode.links[0], shared, there)

    @property
    def all_left(self) -> tuple[Unlinked, ...]:
        """All that the index is to take back if a program has taken the name."""
        return self.indexed, *self.also

    def before(self, later: "Told") -> "Told":
        """This state, with what has left since: the index may know this one, or the later one."""
        since = later.all_left if later.left else later.also
        also = (*self.also, *(one for one in since if one not in self.all_left))
        return self._replace(left=self.left or later.left, also=also)

    def is_still(self, inode: Inode, key: str | None) -> bool:
        """Whether an object has the same content and key yet."""
        return self._has_content(inode) and key == self.key

    def _has_content(self, inode: Inode) -> bool:
        return inode.version == self.version and self.digest in {b"", inode.digest}

    def leaves(self, ino: int, batch: Batch) -> bool:
        """Whether an object loses its content or its name in a batch."""
        inode = batch.inode(ino)
        if inode is None or not self._has_content(inode):
            return True
        return self.link not in inode.links or batch.renames(*self.link)
