"""New files and new contents: room, a backing file, the record and the name, in this order.

Contract: `make` is called before room is made, and after the last await, so that its checks still
hold when its names are committed with the rest. It reads nothing again that has not changed. What a
failure leaves is thrown away. Not for where a file begins (`Placement`), nor for its end (`seal`).
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from kvfs.catalog import Inode
from kvfs.core.capacity.placement import Placement
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.publishing import Publishing
from kvfs.core.objects.versions import Versions
from kvfs.errors import NoSpaceError, StaleError, TierError
from kvfs.tiers import Job, OverdueError, Reservation, Tier

Make = Callable[[], tuple[Inode, Inode]]  # a directory, and an inode that is to be in it


class Creation:
    """Of files, and of new versions of a file that is truncated."""

    def __init__(
        self,
        ledger: Ledger,
        placement: Placement,
        files: BackingFiles,
        publishing: Publishing,
        versions: Versions,
    ) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.placement = placement
        self.room = placement.room
        self.files = files
        self.publishing = publishing
        self.versions = versions
        self._taken_back: dict[int, int] = {}  # inode -> version that a late create unlinks

    async def create(
        self, parent: int, name: bytes, make: Make, *, at_once: bool = False
    ) -> OpenObject:
        """A new file with its first writer.

        `make` gives its directory and its inode, or raises what forbids it. `at_once`: it has its
        name from now on, though `publish` may say otherwise. Raises NoSpaceError, TierError and
        what `make` raises.
        """
        with self.ledger.prefixes.entering(parent):
            namespace = self.ledger.namespaces.of(make()[0])
            late = namespace.settings.publish == "close" and not at_once
            publish = (parent, name) if late else None
            expected = self.placement.expect(parent, name, namespace)
            with await self.placement.choose(namespace, expected) as room:
                return await self._begin(parent, name, make, room, expected or 0, publish=publish)

    async def create_at_once(
        self, parent: int, name: bytes, make: Make, size: int
    ) -> OpenObject | None:
        """The same in RAM, for a file of so many bytes, if it has room now; else None.

        Without a turn of the loop. Raises TierError and what `make` raises.
        """
        with self.ledger.prefixes.entering(parent):
            namespace = self.ledger.namespaces.of(make()[0])
            room = self.placement.choose_at_once(namespace, size)
            if room is None:
                return None
            with room:
                return await self._begin(parent, name, make, room, size)

    async def _begin(
        self,
        parent: int,
        name: bytes,
        make: Make,
        room: Reservation,
        expected: int,
        *,
        publish: tuple[int, bytes] | None = None,
    ) -> OpenObject:
        """The object takes the room over, unless this raises."""
        catalog, ledger = self.catalog, self.ledger
        ino = catalog.next_id()
        with ExitStack() as rooms:
            try:
                fd = await self.files.make(room.tier, ino, 1)
            except (TierError, NoSpaceError):
                instead = self._room_in_ram(parent, room)  # NVMe fails, or is full
                if instead is None:
                    raise
                room = rooms.enter_context(instead)
                fd = room.tier.create(ino, 1)
            try:
                directory, inode = make()
                inode.ino = ino
                inode.version = 1
                ledger.tiers.set_holder(inode, room.tier, holds=True)
                with catalog.batch() as batch:
                    ledger.namespaces.places.place(inode, directory, name, batch)
                    if publish is None:
                        self.publishing.name(inode, directory, name, batch)
                    else:
                        self.publishing.is_to_get(ino, parent, name, batch)
                    batch.put(inode)
                    batch.mark_unfinished(ino)
                    batch.answers(ino)
            except BaseException:
                os.close(fd)
                ledger.trash.throw_away(room.tier, ino, 1)
                raise
            held = OpenObject(inode, room.tier, fd, writable=True, writers=1, publish=publish)
            held.reservation = room.keep()
        held.expected = expected
        held.backing_id = self.files.register(held)
        ledger.table.open[ino] = held
        ledger.table.stage(held)
        ledger.counters["created"] += 1
        return held

    def _room_in_ram(self, parent: int, room: Reservation) -> Reservation | None:
        """The same for a file that could not begin where it was to."""
        ram, directory = self.ledger.tiers.ram, self.ledger.table.inode(parent)
        if directory is None:
            raise StaleError(f"directory {parent} is gone")
        namespace = self.ledger.namespaces.of(directory)
        if ram is None or room.tier is ram or not namespace.takes(ram):
            return None
        least = min(room.size, ram.capacity // 4)  # what nothing is known of takes much
        return self.room.begin(ram, least, namespace)

    async def replace(self, inode: Inode) -> OpenObject:
        """Nobody has it open and its content is to go: begin a new one where there is room."""
        ledger = self.ledger
        parent, name = self.publishing.some_name(inode)
        namespace = ledger.namespaces.of(inode)
        had = Tier.cost(inode.blocks)
        expected = self.placement.expect(parent, name, namespace)
        with await self.placement.choose(namespace, expected, replaces=had) as room:
            tier = room.tier
            version = max(inode.version, self._taken_back.get(inode.ino, 0)) + 1
            try:
                current, fd = await self._make_version(inode, version, tier)
            except OverdueError:  # the next attempt must not make what then goes
                self._taken_back[inode.ino] = version
                raise
            self._taken_back.pop(inode.ino, None)
            held = OpenObject(current, tier, fd, writable=True, reservation=room.keep())
        held.expected = expected or 0
        held.backing_id = self.files.register(held)
        ledger.table.open[current.ino] = held
        ledger.table.stage(held)
        return held

    async def _make_version(self, inode: Inode, version: int, tier: Tier) -> tuple[Inode, int]:
        """Its record, being written from now on, and an empty file for that version."""
        fd = await self.files.make(tier, inode.ino, version)
        try:
            current = self.catalog.inode(inode.ino)
            if current is None or current.version != inode.version or not current.links:
                raise StaleError(f"inode {inode.ino} went away while it was opened")
            with self.catalog.batch() as batch:
                self.versions.restage(current, version, tier, batch, keep=False)
        except BaseException:
            os.close(fd)
            # Not into the trash: the next attempt makes a file of the same name.
            await self.files.io(tier, Job("unlink", partial(tier.unlink, inode.ino, version)))
            raise
        return current, fd
