"""Orphans: unlinked inodes that the kernel still knows. They stay until the kernel forgets them.

Contract: synchronous. An unlinked file that no process has open keeps its fastest copy. The room
of this copy is set aside and counted to its namespace. A process may have looked the name up and
be about to open the file, and must not get ESTALE.
A removed directory stays as well: a process that has it open may ask for its attributes. Not for
removing orphans (`Removals.purge`).
"""

from collections import OrderedDict
from functools import partial

from kvfs.catalog import Batch, Inode
from kvfs.core.ledger.accounts import Accounts
from kvfs.core.ledger.dirty import Dirty
from kvfs.core.ledger.open_table import OpenObject, OpenTable
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.ledger.trash import Trash, Unlinked
from kvfs.core.namespaces.namespace import Namespace
from kvfs.tiers import Reservation, Tier


class Orphans:
    """`rooms`: inode number -> the room of its copy; a directory has none. Oldest first."""

    def __init__(
        self, tiers: Tiers, table: OpenTable, accounts: Accounts, dirty: Dirty, trash: Trash
    ) -> None:
        self.tiers = tiers
        self.table = table
        self.accounts = accounts
        self.catalog = table.catalog
        self.dirty = dirty
        self.trash = trash
        self.rooms: OrderedDict[int, Unlinked | None] = OrderedDict()

    def unlinked_open(self, inode: Inode, batch: Batch) -> None:
        """Note that an open inode lost its last name; its record stays until it is closed."""
        before = batch.change(inode)
        self.dirty.on_unlink(inode.ino, batch)
        inode.in_bucket = False
        batch.put(inode)
        batch.mark_unfinished(inode.ino)
        held = self.table.open[inode.ino]
        if before.in_bucket and held.accounted:
            batch.then(partial(self.accounts.account_changed_copies, before, inode))

    def keep(self, inode: Inode, batch: Batch) -> None:
        """Keep the fastest copy of an inode that lost its last name, if no process has it open."""
        before = batch.change(inode)
        for tier in self.tiers.holders(inode)[1:]:
            self.tiers.set_holder(inode, tier, holds=False)
        self.dirty.on_unlink(inode.ino, batch)
        inode.in_bucket = False
        batch.put(inode)
        batch.mark_unfinished(inode.ino)
        batch.then(partial(self._kept, before))

    def _kept(self, inode: Inode) -> None:
        if inode.is_file:
            self.accounts.dismiss(inode)
        for tier in self.tiers.holders(inode)[1:]:
            space = self.table.namespaces.of(inode)
            self.trash.throw_away(tier, inode.ino, inode.version, space=space)
        self.enter(inode)

    def enter(self, inode: Inode) -> None:
        """Reserve the room of an inode's fastest copy, until the kernel has forgotten the inode."""
        if not inode.is_file:
            self.rooms[inode.ino] = None
            return
        keep = self.tiers.holders(inode)[0]
        self._reserve(inode, keep, self.tiers.cost(inode, keep))

    def _reserve(self, inode: Inode, tier: Tier, size: int) -> None:
        self.rooms[inode.ino] = Unlinked(tier, size, self.table.namespaces.of(inode))

    def keep_closed(self, held: OpenObject) -> None:
        """Keep an unlinked file after its last close: a process may have looked its name up."""
        inode = held.inode
        if held.accounted:
            with self.catalog.batch() as batch:
                self.keep(inode, batch)
        else:
            size = held.reserved
            held.reserve(0)
            self._reserve(inode, held.tier, size)

    def take_room(self, ino: int) -> Reservation | None:
        """Give up the room of an inode that is opened after all: the caller owns the room now."""
        room = self.rooms.pop(ino, None)
        if room is None:
            return None
        found = Reservation(room.tier, room.size)
        room.release()
        return found

    def any_of(self, space: Namespace) -> int | None:
        """The oldest orphan of a namespace that is a file; None if there is none."""
        if not space.unlinked:
            return None
        rooms = self.rooms.items()
        found = (ino for ino, room in rooms if room is not None and room.space is space)
        return next(found, None)

    def leave(self, ino: int) -> None:
        room = self.rooms.pop(ino)
        if room is not None:
            room.release()

    def bytes_in(self, tier: Tier) -> int:
        """Bytes of unlinked files in a tier that the kernel knows, or that a process has."""
        rooms = (*self.rooms.values(), *self.trash.mapped)
        return sum(room.size for room in rooms if room is not None and room.tier is tier)
