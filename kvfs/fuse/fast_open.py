"""The gate of fast opens: a thread of the C part answers them (`_fast_open.c`).

Contract: `FastOpens` in core/ledger/fast_opens.py decides about the table, and this module carries
that out. Everything here runs in the daemon's loop. Handles of fast opens have numbers that
`Handles` gave ahead; they come back to it when an object is taken out. The thread starts when the
gate is turned on. That never happens without passthrough.
"""

import os
from collections.abc import Callable
from pathlib import Path
from struct import Struct

import trio
from pyfuse3 import EntryAttributes

from kvfs.catalog import Inode
from kvfs.core.ledger.absent_names import AbsentLookup
from kvfs.core.ledger.fast_opens import ObjectOpens, Taken
from kvfs.core.ledger.open_table import OpenObject
from kvfs.errors import TooManyOpenError
from kvfs.fuse.handles import Handles
from kvfs.fuse.passthrough import Passthrough, fast

# struct fuse_attr of linux/fuse.h: inode, size, blocks, atime, mtime, ctime; the ns of the three;
# mode, links, uid, gid, rdev, block size, flags.
_ATTRIBUTES = Struct("<QQQQQQIIIIIIIIII")
SECOND = 10**9
AHEAD = 1024  # numbers of handles that the thread has; opens beyond them take the longer way
AHEAD_LEAST = 768  # of them, before it gets more


def pack(entry: EntryAttributes) -> bytes:
    """The attributes as the kernel reads them."""
    times = [divmod(ns, SECOND) for ns in (entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns)]
    return _ATTRIBUTES.pack(
        *(entry.st_ino, entry.st_size, entry.st_blocks),
        *(seconds & 0xFFFF_FFFF_FFFF_FFFF for seconds, _ in times),
        *(ns for _, ns in times),
        *(entry.st_mode, entry.st_nlink, entry.st_uid, entry.st_gid, entry.st_rdev),
        *(entry.st_blksize, 0),
    )


class FastGate:
    """The table of the C part. `attributes(inode)` is the daemon's own answer to the kernel."""

    def __init__(
        self,
        kernel: Passthrough,
        handles: Handles,
        attributes: Callable[[Inode], EntryAttributes],
        root: Path,
    ) -> None:
        """root: of the RAM tier, which has all backing files of the table."""
        self.kernel = kernel
        self.handles = handles
        self.attributes = attributes
        self.root = str(root)
        self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def turn(self, *, on: bool) -> None:
        """Answer opens from the table, or hand all to the daemon.

        Raises OSError, the first time only: there was no memory for the table or the thread.
        """
        fast.fast_on(on, self._root)
        if on:
            self._give_handles()

    def answer_lookups(self, *, on: bool) -> None:
        """Answer lookups of absent names as well, while opens are answered. Raises OSError."""
        fast.lookup_on(on)

    # Absent names

    def complete(self, directory: int, *, complete: bool) -> bool:
        """Set whether all names of a directory are known. False: there is no room."""
        return fast.lookup_complete(directory, complete)

    def set_name(self, directory: int, name: bytes, *, given: bool) -> bool:
        """Add or remove a name. False: there is no room."""
        return fast.lookup_name(directory, name, given)

    def forget_names(self) -> None:
        """Know no directory any more."""
        fast.lookup_forget()

    def take_lookups(self) -> list[AbsentLookup]:
        """The lookups answered since the last call, in their order."""
        return [AbsentLookup(*one) for one in fast.lookup_take()]

    # Opens

    def _give_handles(self) -> None:
        if fast.fast_state()[4] >= AHEAD_LEAST:
            return
        try:
            for _ in range(AHEAD - AHEAD_LEAST):
                fast.fast_grant(self.handles.lend())
        except TooManyOpenError:
            return  # the daemon says so, at the next open

    def offer(self, held: OpenObject, deadline_ns: int, use_step_ns: int) -> bool:
        """Put an object with a backing id into the table. False: it is full, or off."""
        inode, entry = held.inode, self.attributes(held.inode)
        return fast.fast_offer(
            *(inode.ino, held.backing_id, held.tier.number, deadline_ns),
            *(int(entry.attr_timeout * SECOND), use_step_ns, inode.size, inode.backing_mtime_ns),
            *(os.path.relpath(held.path, self.root), pack(entry)),
        )

    def take(self, ino: int, *, even_open: bool) -> Taken | bool:
        """Take an object out. False: it is not in the table. True: it is, and stays: it is open."""
        found = fast.fast_take(ino, even_open)
        if isinstance(found, bool):
            return found
        backing_id, handles, *since, read = found
        return Taken(backing_id, handles, ObjectOpens(ino, *since), read)

    def has(self, ino: int) -> bool:
        """Whether an object is in the table."""
        return fast.fast_has(ino)

    def adopt(self, taken: Taken, held: OpenObject) -> None:
        """Serve the taken handles as those of `held` from now on."""
        for handle in taken.handles:
            self.handles.take_back(handle, held)

    def close(self, backing_id: int) -> None:
        """Close the backing id of an object without handles."""
        self.kernel.release(backing_id)

    def inode_of(self, handle: int) -> int:
        """The inode of a handle that was opened from the table; 0: no such handle."""
        return fast.fast_inode(handle)

    def opens(self) -> list[ObjectOpens]:
        """The opens since the last call, in the order of their objects' first ones."""
        return [ObjectOpens(*one) for one in fast.fast_uses()]

    def inodes(self, limit: int) -> list[int]:
        """Objects of the table, at most 256, the longest unused first."""
        return fast.fast_inodes(limit)

    def open_inodes(self) -> list[int]:
        """Objects of the table that programs have open."""
        return fast.fast_open_inodes()

    def surplus(self) -> int:
        """The object to take out of a full table for another one, or 0."""
        return fast.fast_surplus()

    async def used(self) -> None:
        """Wait until an object was opened from the table."""
        used = fast.fast_used()
        await trio.lowlevel.wait_readable(used)
        os.eventfd_read(used)
        self._give_handles()

    def describe(self) -> tuple[bool, int, int]:
        """Whether it answers, its objects, and their open handles."""
        on, objects, handles, _, _ = fast.fast_state()
        return on, objects, handles

    def stop(self) -> list[int]:
        """Read and answer nothing more; return the inodes that the kernel forgot meanwhile."""
        forgotten = fast.fast_stop()
        os.close(self._root)
        return forgotten
