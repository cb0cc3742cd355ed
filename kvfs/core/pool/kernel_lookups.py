"""Counts the lookups of remote objects that the kernel has not given back.

Contract: synchronous. The kernel knows an inode until it has given back (FORGET) as many lookups as
were answered. It may give one back and keep another: after ESTALE it drops the answer of its first
lookup, and looks the name up once more. The record of an object that it knows must stay, because an
open would be ESTALE again. Only inodes that were remote at a lookup are counted. A new daemon
begins with no counts, so it may forget a name that the kernel knows.
"""

from kvfs.catalog import Inode


class KernelLookups:
    """The lookups of one mount, by inode number."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def answered(self, inode: Inode) -> None:
        """Note that the kernel gets an inode as the answer of a lookup."""
        if inode.in_pool or inode.ino in self._counts:
            self._counts[inode.ino] = self._counts.get(inode.ino, 0) + 1

    def given_back(self, ino: int, lookups: int) -> bool:
        """Note that the kernel gives lookups back. Return whether it knows the inode no more."""
        left = self._counts.pop(ino, 0) - lookups
        if left > 0:
            self._counts[ino] = left
        return left <= 0
