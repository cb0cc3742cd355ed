"""Watch: looks at facts that the kernel does not report, such as full or failing disks.

Contract: `tasks` run as long as the mount lives. Their findings change reservations, capacities and
the health of tiers, and lead to evictions where necessary. One task lets hot objects cool. Not for
the accounts themselves, nor for files that grow (`Bounds`).
"""

from collections.abc import Callable
from functools import partial

import trio

from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import TierError
from kvfs.fairness.hot_objects import HALF_LIFE
from kvfs.tiers import NvmeTier, TierCall, calls

PURGED_AT_ONCE = 16  # some 60 us each
SPACE_PERIOD = 1.0  # s between two looks at the free bytes of the NVMe file system
MOMENT = 0.002  # s in which the kernel releases closed files, and forgets further inodes
MAPPED_AT_ONCE = 64  # some 3 us each


class Watch:
    """The tasks that look. No task ends by itself."""

    def __init__(
        self,
        ledger: Ledger,
        room: Room,
        quota: Quota,
        spent: Callable[[], tuple[int, int]],
    ) -> None:
        """spent: returns the day, and the bytes written to NVMe on it."""
        self.ledger = ledger
        self.room = room
        self.quota = quota
        self.spent = spent
        self.tasks = (
            *(self.space, self.quotas, self.health, self.cool, self.mapped),
            *(self.forgotten, self.used),
        )

    async def space(self) -> None:
        """Measure the NVMe file system, which other programs may fill, and shrink the tier then.

        Each second it also removes orphans, looks at mapped files, counts misses, runs the retries
        and keeps the quotas.
        """
        ledger, nvme = self.ledger, self.ledger.tiers.nvme
        unlinked: set[int] = set()
        while True:
            for at, ino in enumerate(unlinked & ledger.orphans.rooms.keys(), 1):
                ledger.removals.purge(ino)  # the kernel has not reported that it forgot the inode
                if not at % PURGED_AT_ONCE:
                    await trio.lowlevel.checkpoint()
            unlinked = set(filter(self._may_be_unknown, ledger.orphans.rooms))
            for at, file in enumerate(tuple(ledger.trash.mapped), 1):
                ledger.trash.look_at(file)
                if not at % MAPPED_AT_ONCE:
                    await trio.lowlevel.checkpoint()
            while ledger.misses.settle():
                await trio.lowlevel.checkpoint()
            await ledger.retries.run()
            if nvme.mounted:
                await self._measure_space(nvme)
            if ledger.accounts.census_done.is_set():
                self.room.shrink()
                ledger.tiers.ram.shrink()
                self._keep_quotas()
            ledger.accounts.leave_estimate(self.spent())
            for namespace in list(ledger.namespaces):
                namespace.resize_policies(ledger.tiers.local)
            ledger.wakeup.wake()
            await trio.sleep(SPACE_PERIOD)

    def _keep_quotas(self) -> None:
        """Drop what could not go at the close of the last writer, and may go now.

        So a block goes whose directory had a file that was being written.
        """
        for namespace in self.ledger.namespaces:
            if namespace.has_hard_quota:
                self.quota.trim(namespace)

    def _may_be_unknown(self, ino: int) -> bool:
        """Whether the kernel may never have looked an orphan up, and so may never report a FORGET.

        The kernel has each directory that rmdir removed. Such a directory waits for the report,
        since a process may have it open.
        """
        inode = self.ledger.table.inode(ino)
        return inode is not None and (inode.is_file or inode.key != 0)

    async def mapped(self) -> None:
        """Count files that processes still have mapped, a moment after their unlink."""
        trash = self.ledger.trash
        while True:
            await trash.appeared.wait()
            await trio.sleep(MOMENT)
            for space in trash.count():
                self.quota.trim(space)
            self.ledger.wakeup.wake()

    async def forgotten(self) -> None:
        """Remove orphans that the kernel has forgotten."""
        removals = self.ledger.removals
        while True:
            await removals.appeared.wait()
            await trio.sleep(MOMENT)
            removals.purge_forgotten()

    async def used(self) -> None:
        """Commit times of access as soon as their open is answered."""
        while True:
            await self.ledger.uses.appeared.wait()
            self.ledger.uses.commit()

    async def cool(self) -> None:
        """Let hot objects cool, once each half-life."""
        while True:
            await trio.sleep(HALF_LIFE)
            self.ledger.namespaces.hot.decay()

    async def quotas(self) -> None:
        """Bring namespaces within their hard quotas when those have changed."""
        namespaces = self.ledger.namespaces
        await self.ledger.accounts.census_done.wait()
        while True:
            changed = namespaces.changed
            for namespace in list(namespaces):
                await self.quota.bring_within(namespace)
            await changed.wait()

    async def health(self) -> None:
        """Probe the disk, and wake the waiting tasks when its health changes."""
        nvme = self.ledger.tiers.nvme
        while nvme.mounted:
            was = nvme.health.state
            await nvme.calls.probe(nvme.probe)
            if nvme.health.state != was:
                self.ledger.wakeup.wake()
            await trio.sleep(calls.PROBE_PERIOD)

    async def _measure_space(self, nvme: NvmeTier) -> None:
        if nvme.health.down:
            return
        try:
            await nvme.calls.call(
                TierCall("statfs", partial(nvme.measure, self.room.written_of_reserved(nvme)))
            )
            if nvme.free > 0 and not nvme.shortage:
                await nvme.calls.call(
                    TierCall("fallocate", self.ledger.catalog.database.set_ballast)
                )
        except OSError as error:
            nvme.failed("statfs", str(nvme.root), error)
            return
        except TierError:
            return  # the tier has logged it
        if self.ledger.accounts.census_done.is_set():
            self.room.make_room(nvme)
