"""Unpacking: makes a copy that can be opened from a packed one, in RAM or else on NVMe.

Contract: `unpack` returns when there is a copy that can be opened, or when the packed copy was
lost; the log tells of the loss. A caller that has waited too long has a miss, and the work goes on.
`carry` is the work alone, for movements that have reserved the room and have the object among their
jobs. kvfs gives out no byte before it has compared the copy with the object's digest.

Invariants across awaits: an object has one unpacking at a time, for all callers that wait. While it
runs, the object is in `jobs`, together with at most its upload. Its room is reserved, and no
earlier file of its name waits to be unlinked. The step that enters the new copy checks that the
object still has the packed copy that was read; if not, it throws the new file away. Not for objects
in a bucket (`hydration`), nor for choosing objects to pack (`transfers`).
"""

import logging
from functools import partial

import trio

from kvfs import failpoints
from kvfs.catalog import Inode, Named
from kvfs.compression.container import DamagedError
from kvfs.core.capacity.room import Room
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.moves.transfers import PERIOD, TierTransfers
from kvfs.core.shared_work import SharedWork, WorkByKey, wait_while_up
from kvfs.errors import KvfsError, NoSpaceError, NotFoundError, StaleError
from kvfs.movement.movers import (
    MoverFailedError,
    MoverOverdueError,
    MoverPool,
    Repacked,
    SourceChangedError,
)
from kvfs.tiers import Reservation, Tier, TierCall

log = logging.getLogger(__name__)


class Unpacking:
    """Unpacks objects for opens, with `movers`. `jobs` are inodes that movers work on."""

    def __init__(
        self, transfers: TierTransfers, room: Room, movers: MoverPool, jobs: set[int]
    ) -> None:
        self.ledger: Ledger = transfers.ledger
        self.transfers = transfers
        self.room = room
        self.movers = movers
        self._jobs = jobs
        self._running: WorkByKey[int, SharedWork] = WorkByKey(
            lambda ino, error: log.error(
                "%s stays packed: a defect of kvfs", self._named(ino), exc_info=error
            )
        )

    async def unpack(self, inode: Inode) -> None:
        """Wait until the object can be opened, or is lost. The caller holds the inode's lock.

        Raises NotFoundError (a miss), StaleError if the object has changed meanwhile.
        """
        ino, nvme, bucket = inode.ino, self.ledger.tiers.nvme, self.ledger.tiers.bucket
        if not nvme.works:
            why = f"is down: {nvme.health.why}" if nvme.mounted else "is not mounted"
            raise NotFoundError(f"{self._named(ino)} is on NVMe only, which {why}")
        running = self._running.get(ino)
        if running is None:
            work = partial(self._run, ino, inode.version)
            running = self._running.begin(ino, SharedWork(), work)
        patience = bucket.wait
        await wait_while_up(running.ended, trio.current_time() + patience, nvme.health)
        if not running.ended.is_set() and nvme.health.down:
            why = nvme.health.why
            raise NotFoundError(f"{self._named(ino)} is on NVMe only, which is down: {why}")
        if not running.ended.is_set():
            raise NotFoundError(f"{self._named(ino)} is not decompressed within {patience:.0f} s")
        running.expect_done(self._named(ino))

    def _named(self, ino: int) -> Named:
        return self.ledger.catalog.named(ino)

    def stop(self) -> None:
        """Stop all unpacking after an unmount."""
        self._running.stop()

    async def _run(self, ino: int, version: int) -> None:
        """Unpack one object, and log each failure before it is raised."""
        try:
            await self._bring(ino, version)
        except (OSError, MoverOverdueError) as error:
            self.transfers.breaker.failed("decompression", self._named(ino), error)
            raise
        except KvfsError as error:
            level = logging.DEBUG if isinstance(error, StaleError) else logging.WARNING
            log.log(level, "%s stays packed, this open is a miss: %s", self._named(ino), error)
            raise

    async def _bring(self, ino: int, version: int) -> None:
        sending, unpacking = self.transfers.uploading, self.transfers.unpacking
        while ino in self._jobs and ino not in sending:  # noqa: ASYNC110 (as `download` waits)
            await trio.sleep(PERIOD)
        self._jobs.add(ino)
        unpacking.add(ino)
        try:
            inode = self._fit(ino, version)
            if not self._only_packed(inode):
                return
            with self._reserve(inode, Tier.cost(inode.blocks)) as room:
                inode = self._fit(ino, version)
                if self._only_packed(inode):  # else the packed copy was evicted for the room
                    await self.carry(inode, room.tier)
        finally:
            unpacking.discard(ino)
            if ino not in sending:
                self._jobs.discard(ino)
            self.ledger.wakeup.wake()

    def _fit(self, ino: int, version: int) -> Inode:
        """The object. Raises StaleError if it has changed."""
        found = self.transfers.still_current(ino, version)
        if found is None:
            raise StaleError(f"{self._named(ino)} has changed while it was to be decompressed")
        return found

    def _only_packed(self, inode: Inode) -> bool:
        return inode.packed is not None and self.ledger.tiers.holders(inode) == [
            self.ledger.tiers.nvme
        ]

    def _reserve(self, inode: Inode, cost: int) -> Reservation:
        """Reserve room: in RAM, if it may be there and fits, else on NVMe.

        Raises NoSpaceError.
        """
        ledger = self.ledger
        ram, nvme, namespace = ledger.tiers.ram, ledger.tiers.nvme, ledger.namespaces.of(inode)
        fits = namespace.takes(ram) and cost <= ram.capacity // 2
        if fits and (room := self.room.reserve(ram, cost)) is not None:
            return room
        if (room := self.room.reserve(nvme, cost)) is not None:
            return room
        raise NoSpaceError(f"no tier has room for {cost} bytes")

    async def carry(self, inode: Inode, target: Tier) -> None:
        """Make a plain copy of an object in a tier, from its packed copy on NVMe.

        Raises StaleError, TierError, OSError if nothing has changed. A packed copy with wrong bytes
        is lost.
        """
        ledger, nvme, packed = self.ledger, self.ledger.tiers.nvme, inode.packed
        assert packed is not None
        ino, version, digest = inode.ino, inode.version, inode.digest
        await self.transfers.wait_for_trash(target, ino, version)
        path, to = nvme.path(ino, version), target.path(ino, version)
        try:
            found = await self.movers.unpack(
                *(path, to, packed, inode.size, digest), sync=target.slow
            )
        except (DamagedError, SourceChangedError) as error:
            self._expect_packed(inode)
            ledger.removals.lose(inode, nvme, quarantine=True, why=str(error))
            return
        except FileNotFoundError as error:
            if error.filename != path or not await nvme.calls.call(TierCall("stat", nvme.present)):
                raise nvme.failed("unpack", path, error) from error
            self._expect_packed(inode)
            log.error("%s: a copy is missing, opens are misses: %s", self._named(ino), path)
            ledger.counters["missing"] += 1
            ledger.removals.lose(inode, nvme)
            return
        except (MoverFailedError, MoverOverdueError):  # the mover may have renamed its file before
            if target is not nvme:
                ledger.trash.throw_away(target, ino, version)
            raise
        self._enter(inode, target, found)

    def _enter(self, inode: Inode, target: Tier, found: Repacked) -> None:
        """Record the new copy in the catalog. Raises CatalogError, StaleError."""
        ledger, ino, version, nvme = (
            self.ledger,
            inode.ino,
            inode.version,
            self.ledger.tiers.nvme,
        )
        if failpoints.active:
            failpoints.reach("dispatcher.unpacked")
        if found.in_place:
            target = nvme
        current = self.transfers.still_current(ino, version)
        if current is None or current.packed != inode.packed:
            if current is None or target not in ledger.tiers.holders(current):
                ledger.trash.throw_away(target, ino, version)
            raise StaleError(f"{self._named(ino)} has changed while it was decompressed")
        try:
            ledger.records.add_copy(current, target, found.moved.blocks, found.moved.digest)
        except KvfsError:
            if target is not nvme:  # on NVMe, the file's size tells what it is
                ledger.trash.throw_away(target, ino, version)
            raise
        nvme.counters["decompressed"] += 1
        nvme.counters["decompress_cpu_us"] += round(found.moved.cpu_seconds * 1e6)

    def _expect_packed(self, inode: Inode) -> None:
        """Raises StaleError if the object's packed copy is not in use any more."""
        current = self.transfers.still_current(inode.ino, inode.version)
        if current is None or current.packed != inode.packed:
            raise StaleError(f"{self._named(inode.ino)} has changed while it was decompressed")
