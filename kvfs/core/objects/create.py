"""Create files, begin new versions, and prepare sealed objects for another writer.

Contract: `create` calls `make` after its last await. So the checks of `make` still hold at the
commit. The order is: room, backing file, then the record with the name in one batch. If a step
fails, `create` removes the results of the steps before.

`make_writable` prepares an open object for a writer. The new version is in the same backing file,
and readers keep this file. This is the one exception to *the record first*: the file gets the name
of the new version before the record does. With the other order, a crash might leave a record
without a file. Before the first step, the inode is marked unfinished, so a crash between the steps
loses nothing: `recovery` finds the inode sealed, and gives the file its old name back. `restage`
changes the record. A version in a new file needs only `restage`. The caller holds the inode's lock.

Invariant: `OpenTable.renaming` has each inode whose backing file may have another name than the
record says: its rename is under way, or took too long. In the second case the tier may still carry
it out. kvfs undoes such a late rename, and then removes the inode from `renaming`.
Not for the tier in which a file begins (`Placement`), nor for the seal (`seal`).
"""

import logging
import os
import stat
from collections.abc import Callable
from functools import partial

from kvfs.catalog import Batch, Inode
from kvfs.core.capacity.placement import Placement
from kvfs.core.capacity.sizes import Expectation
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.publishing import Publishing
from kvfs.errors import (
    CatalogError,
    InUseError,
    KvfsError,
    NoSpaceError,
    StaleError,
    TierError,
)
from kvfs.tiers import OverdueError, Reservation, Tier, TierCall

log = logging.getLogger(__name__)

Make = Callable[[], tuple[Inode, Inode]]  # returns a directory, and a new inode to put into it


class Creation:
    """Creates files, and begins new versions of files.

    A program begins a new version when it truncates a file, or writes to a sealed file.
    """

    def __init__(
        self,
        ledger: Ledger,
        placement: Placement,
        files: BackingFiles,
        publishing: Publishing,
    ) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.placement = placement
        self.room = placement.room
        self.files = files
        self.publishing = publishing
        self._overdue: dict[int, int] = {}  # inode -> version whose late create unlinks its file

    async def create(
        self, directory: Inode, name: bytes, make: Make, *, named_at_once: bool = False
    ) -> OpenObject:
        """Create a file with its first writer.

        directory: its directory, in which the caller has found the name free.
        make: returns the directory and the inode, or raises the error that forbids the file.
        named_at_once: the file has its name from now on, even with `publish=close`.

        Raises NoSpaceError, TierError and the errors of `make`.
        """
        parent = directory.ino
        with self.ledger.prefixes.entering(parent):
            namespace = self.ledger.namespaces.of(directory)
            at_close = namespace.settings.publish == "close" and not named_at_once
            publish = (parent, name) if at_close else None
            expected = self.placement.expect(directory, name)
            with await self.placement.choose(namespace, expected) as room:
                return await self._begin(parent, name, make, room, expected, publish=publish)

    async def create_at_once(
        self, directory: Inode, name: bytes, make: Make, size: int
    ) -> OpenObject | None:
        """Create a file of `size` bytes in RAM if RAM has room now; else return None.

        The loop runs no other task meanwhile. Raises TierError and the errors of `make`.
        """
        with self.ledger.prefixes.entering(directory.ino):
            namespace = self.ledger.namespaces.of(directory)
            room = self.placement.choose_at_once(namespace, size)
            if room is None:
                return None
            expected = self.placement.expect(directory, name)._replace(size=size)
            with room:
                return await self._begin(directory.ino, name, make, room, expected)

    async def _begin(
        self,
        parent: int,
        name: bytes,
        make: Make,
        room: Reservation,
        expected: Expectation,
        *,
        publish: tuple[int, bytes] | None = None,
    ) -> OpenObject:
        """Make the file and its open object, which gets the reservation `room`.

        If this raises, the caller still has `room`. publish: the directory and the name that the
        file gets at its close; None: the file gets `name` now.
        """
        ino = self.catalog.next_id()
        try:
            fd = await self.files.make(room.tier, ino, 1)
        except (TierError, NoSpaceError):
            instead = self._room_in_ram(parent, room)  # NVMe fails, or is full
            if instead is None:
                raise
            with instead:
                fd = instead.tier.create(ino, 1)
                return self._enter(ino, fd, parent, name, make, instead, expected, publish)
        return self._enter(ino, fd, parent, name, make, room, expected, publish)

    def _enter(
        self,
        ino: int,
        fd: int,
        parent: int,
        name: bytes,
        make: Make,
        room: Reservation,
        expected: Expectation,
        publish: tuple[int, bytes] | None,
    ) -> OpenObject:
        """Commit a new inode, whose backing file is made, and enter its open object."""
        ledger, tier = self.ledger, room.tier
        try:
            directory, inode = make()
            inode.ino = ino
            inode.version = 1
            ledger.tiers.set_holder(inode, tier, holds=True)
            with self.catalog.batch() as batch:
                ledger.namespaces.places.place(inode, directory, name, batch)
                if publish is None:
                    self.publishing.give_name(inode, directory, name, batch)
                else:
                    self.publishing.note_name(ino, parent, name, batch)
                batch.put(inode)
                batch.mark_unfinished(ino)
                batch.answers(ino)
        except BaseException:
            os.close(fd)
            ledger.trash.throw_away(tier, ino, 1)
            raise
        held = OpenObject(inode, tier, fd, writable=True, writers=1, publish=publish)
        held.reservation = room.keep()
        self._note(held, expected)
        held.backing_id = self.files.register(held)
        ledger.table.open[ino] = held
        ledger.table.stage(held, taken=0)
        ledger.counters["created"] += 1
        return held

    def _note(self, held: OpenObject, expected: Expectation) -> None:
        """Note in an open object that has no bytes yet what kvfs expects of it."""
        held.kind, held.expected = expected.kind, expected.size or 0
        held.guess = expected.guess if held.tier is self.ledger.tiers.ram else 0

    def _room_in_ram(self, parent: int, room: Reservation) -> Reservation | None:
        """Reserve room in RAM for a file that its own tier cannot make. None if RAM has no room."""
        ram, directory = self.ledger.tiers.ram, self.ledger.table.inode(parent)
        if directory is None:
            raise StaleError(f"{self.catalog.named(parent)} is gone")
        namespace = self.ledger.namespaces.of(directory)
        if room.tier is ram or not namespace.takes(ram):
            return None
        least = min(room.size, ram.capacity // 4)  # a file of unknown size may have reserved more
        return self.room.reserve_for_file(ram, least, namespace)

    async def begin_version(self, inode: Inode) -> OpenObject:
        """Begin a new, empty version of an object that no program has open.

        The version may be in another tier than the old one. Raises NoSpaceError, StaleError,
        TierError.
        """
        ledger = self.ledger
        namespace = ledger.namespaces.of(inode)
        had = Tier.cost(inode.blocks)
        expected = self.placement.expect_version(inode)
        with await self.placement.choose(namespace, expected, replaces=had) as room:
            tier = room.tier
            version = max(inode.version, self._overdue.get(inode.ino, 0)) + 1
            try:
                current, fd = await self._make_version(inode, version, tier)
            except OverdueError:  # a late create unlinks its file: the next attempt needs another
                self._overdue[inode.ino] = version
                raise
            self._overdue.pop(inode.ino, None)
            held = OpenObject(current, tier, fd, writable=True, reservation=room.keep())
        self._note(held, expected)
        held.backing_id = self.files.register(held)
        ledger.table.open[current.ino] = held
        ledger.table.stage(held, taken=0)
        return held

    async def _make_version(self, inode: Inode, version: int, tier: Tier) -> tuple[Inode, int]:
        """Make an empty file for a version, and record the version as staging."""
        fd = await self.files.make(tier, inode.ino, version)
        try:
            current = self.catalog.inode(inode.ino)
            if current is None or current.version != inode.version or not current.links:
                raise StaleError(f"{self.catalog.named(inode.ino)} went away while it was opened")
            with self.catalog.batch() as batch:
                self.restage(current, version, tier, batch, keep=False)
        except BaseException:
            os.close(fd)
            # Not into the trash: the next attempt makes a file of the same name.
            await self.files.io(tier, TierCall("unlink", partial(tier.unlink, inode.ino, version)))
            raise
        return current, fd

    # Sealed objects that a program writes again

    def restage(self, inode: Inode, version: int, tier: Tier, batch: Batch, *, keep: bool) -> None:
        """Record that a sealed inode is staging in `tier`, as a new version.

        The inode leaves the accounts, and kvfs throws its copies away after the commit. keep: the
        copy in `tier` stays, because its file is the new version.
        """
        ledger = self.ledger
        before = batch.change(inode)
        batch.then(partial(ledger.accounts.dismiss, before))
        for holder in ledger.tiers.holders(inode):
            ledger.tiers.set_holder(inode, holder, holds=False)
            if not (keep and holder is tier):
                space = ledger.namespaces.of(before)
                away = partial(ledger.trash.throw_away, space=space)
                batch.then(partial(away, holder, inode.ino, before.version))
        ledger.tiers.set_holder(inode, tier, holds=True)
        if not keep:
            inode.size = inode.blocks = 0
        ledger.dirty.on_rewrite(inode, batch)
        inode.version = version
        inode.sealed = False
        inode.digest = b""
        inode.mode &= ~stat.S_ISUID  # a writer must not inherit the owner's rights
        if inode.mode & stat.S_IXGRP:
            inode.mode &= ~stat.S_ISGID
        batch.put(inode)
        batch.mark_unfinished(inode.ino)

    async def make_writable(self, held: OpenObject) -> None:
        """Prepare an open object for a writer. Readers and the writer share one backing file.

        Raises InUseError if kvfs distrusts the copy by now: damaged bytes must not become a new
        version.
        """
        ledger, inode, tier = self.ledger, held.inode, held.tier
        if not held.writable:
            opening = partial(tier.open, inode.ino, inode.version, writable=True)
            fd = await self.files.io(tier, TierCall("open", opening, os.close))
            if held.fd >= 0:
                os.close(held.fd)
            held.fd, held.writable, held.reopened = fd, True, True
            self._expect_not_lost(held)
        if held.writers:
            return
        if not held.accounted:  # it has no name, and this version was written to before
            ledger.table.stage(held)
            return
        if inode.links:
            await self._rename_and_restage(held)
        else:  # no open finds an inode without a name: its version and its file stay as they are
            with self.catalog.batch() as batch:
                self.restage(inode, inode.version, tier, batch, keep=True)
        held.accounted = False
        held.unwritten = held.content[:2]
        held.reserve(tier.cost(inode.blocks))
        ledger.table.stage(held)

    async def _rename_and_restage(self, held: OpenObject) -> None:
        inode, tier = held.inode, held.tier
        ino, old, new = inode.ino, inode.version, inode.version + 1
        with self.catalog.batch() as batch:
            batch.mark_unfinished(ino)
        renaming = partial(tier.rename, ino, old, new)
        back = partial(tier.rename, ino, new, old)
        self.ledger.table.renaming.add(ino)
        try:
            job = TierCall("rename", renaming, lambda _: self._renamed_late(ino, back))
            await self.files.io(tier, job)
        except OverdueError:
            raise  # the rename may still happen: the mark stays until `_renamed_late` has undone it
        except KvfsError:
            await self._unmark(ino)
            raise
        try:
            self._expect_not_lost(held)
            with self.catalog.batch() as batch:
                self.restage(inode, new, tier, batch, keep=True)
        except KvfsError:
            await self.files.io(tier, TierCall("rename", back))  # if it fails, the mark stays
            if held.lost:  # kvfs may not have found the file under its old name during the rename
                why = (
                    f"{self.catalog.named(ino)} was damaged when a program was about to write to it"
                )
                self.ledger.trash.throw_away(tier, ino, old, keep=True, why=why)
            await self._unmark(ino)
            raise
        self.ledger.table.renaming.discard(ino)

    def _expect_not_lost(self, held: OpenObject) -> None:
        """Raise InUseError if kvfs distrusts the open object's copy."""
        if held.lost:
            raise InUseError(f"{self.catalog.named(held.inode.ino)}: its damaged copy is open")

    def _renamed_late(self, ino: int, back: Callable[[], None]) -> None:
        """Undo a rename that ended after its caller's time limit. Runs in any thread."""
        back()
        self.ledger.retries.add(partial(self._unmark_late, ino))

    async def _unmark(self, ino: int) -> None:
        """Remove the mark "unfinished" of an object that was not written after all.

        The caller holds the inode's lock.
        """
        try:
            inode = self.ledger.table.inode(ino)
            written = ino in self.ledger.table.staging
            if inode is not None and inode.links and inode.sealed and not written:
                with self.catalog.batch() as batch:
                    batch.mark_finished(ino)
            self.ledger.table.renaming.discard(ino)
        except CatalogError as error:
            what = self.catalog.named(ino)
            log.error("%s stays marked as unfinished until the catalog works: %s", what, error)
            self.ledger.retries.add(partial(self._unmark_late, ino))

    async def _unmark_late(self, ino: int) -> None:
        async with self.ledger.table.locked(ino):
            await self._unmark(ino)
