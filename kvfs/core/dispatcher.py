"""Dispatch the movers' work, and run all other tasks that live as long as the mount.

Contract: no operation waits for this module. A job moves a few sealed objects; a job that fails
leaves everything as it was and logs this once. An object has at most one job (`_jobs`). No job
begins before the trash is empty: the file that the job makes may be in there. A kind of movement
chooses its next objects itself (`Demotion`), or gets them as requests (`MovementQueue`).
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvfs.catalog import Inode
from kvfs.core.bucket.download.hydration import Hydration
from kvfs.core.bucket.listing.bucket_listing import BucketListing
from kvfs.core.bucket.listing.bucket_lookup import BucketLookup
from kvfs.core.bucket.listing.contests import Contests
from kvfs.core.bucket.listing.importing import Importing
from kvfs.core.bucket.listing.remote_entries import RemoteEntries
from kvfs.core.bucket.node import Availability, NodeRecord
from kvfs.core.bucket.upload.backlog import Backlog
from kvfs.core.bucket.upload.uploader import Uploader
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.capacity.watch import Watch
from kvfs.core.check import Background
from kvfs.core.fetching.prefetch import Prefetch
from kvfs.core.jobs.evict import Evict
from kvfs.core.jobs.scrub import Scrub
from kvfs.core.jobs.tree_jobs import TreeJobs
from kvfs.core.jobs.warm import Warm
from kvfs.core.ledger.census import Census
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.moves.breaker import CircuitBreaker
from kvfs.core.moves.demotion import Demotion
from kvfs.core.moves.movement import Movement, MovementQueue
from kvfs.core.moves.promotion import Promotion
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.moves.trash import TrashBin
from kvfs.core.moves.unpacking import Unpacking
from kvfs.core.moves.verification import Verification
from kvfs.core.moves.write_back import WriteBack
from kvfs.core.names.tree import Tree
from kvfs.errors import KvfsError
from kvfs.fairness.admission import Admission
from kvfs.live import LiveConfig
from kvfs.movement.movers import MoverPool, SourceChangedError
from kvfs.movement.remote import Remote
from kvfs.pool.member import Membership

if TYPE_CHECKING:
    from kvfs.core.pool.pool import Pool

log = logging.getLogger(__name__)

PAUSE = 1.0  # s until a task that failed goes on


class Dispatcher:
    """Runs the background work of a mount.

    Run `run()` in a nursery as long as the mount lives; `write_back.drain()` before it ends.
    """

    def __init__(
        self,
        ledger: Ledger,
        room: Room,
        quota: Quota,
        movers: MoverPool,
        live: LiveConfig,
        *,
        urgent: MoverPool | None = None,
        remote: Remote | None = None,
        member: Membership | None = None,
        tree: Tree | None = None,
        notes: str = "",
        identity: str = "",
        mountpoint: str = "",
    ) -> None:
        """urgent: movers for callers that wait; remote: calls of the bucket, for names in `tree`.

        member: of a pool; None: of none. live: the options of the objects that are made here. Those
        objects describe the other arguments.
        """
        self.ledger = ledger
        self.room = room
        self._jobs: set[int] = set()
        self._running = 0
        self._slots = 2 * movers.workers
        self._tasks: list[Callable[[], Awaitable[None]]] = []  # they run as long as the mount
        self.admission = Admission(0, spent=ledger.accounts.nvme_written())
        self.breaker = CircuitBreaker(ledger.tiers.nvme, ledger.counters)
        self.requests = MovementQueue(ledger.wakeup.wake)
        transfers = TierTransfers(ledger, movers, self.breaker)
        self.write_back = WriteBack(transfers)
        self.demotion = Demotion(transfers, room, self.admission, self.write_back, self._jobs)
        self.unpacking = Unpacking(transfers, room, urgent or movers, self._jobs)
        self.promotion = Promotion(transfers, room, self.requests, self.unpacking)
        self.verification = Verification(transfers, self.admission, self.requests)
        self.transfers = transfers
        self.hydration: Hydration | None = None
        self.prefetch: Prefetch | None = None
        self.uploader: Uploader | None = None
        self.availability: Availability | None = None
        self.bucket_listing: BucketListing | None = None
        self.contests: Contests | None = None
        self.importing: Importing | None = None
        self.node_record: NodeRecord | None = None
        if remote is not None and tree is not None:
            bucket_lookup = BucketLookup(RemoteEntries(tree, remote.bucket), remote)
            self.bucket_listing = BucketListing(bucket_lookup)
            self.contests = Contests(bucket_lookup)
            self.importing = Importing(self.bucket_listing)
            self.hydration = Hydration(transfers, room, quota, remote, self._jobs, bucket_lookup)
            self.uploader = Uploader(
                *(transfers, quota, remote, self._jobs),
                notes=notes,
                fetch_metadata=bucket_lookup.fetch_metadata,
                reading=self.hydration.downloader.reading,
            )
            self.availability = Availability(remote, self.uploader, identity)
            self.node_record = NodeRecord(ledger.dirty, remote, identity, mountpoint)
            self._tasks += [self.uploader.run, self.availability.watch, remote.start_workers]
            self._tasks += [Backlog(transfers).run, bucket_lookup.warm_up, self.contests.run]
            self._tasks.append(self.node_record.watch)
        self.pool: Pool | None = None
        if member is not None and tree is not None:
            from kvfs.core.pool import pool  # noqa: PLC0415 (it needs the extra)

            self.pool = pool.Pool(
                member, transfers, room, quota, tree, urgent or movers, self._jobs
            )
            self._tasks.append(self.pool.run)
            live.observe("pool_wait", partial(setattr, ledger.tiers.nodes, "wait"))
            live.observe("pool_stream", partial(setattr, ledger.tiers.nodes, "stream"))
            live.observe("pool_copies", self.pool.set_copies)
        if self.pool is not None and self.uploader and self.bucket_listing:
            self.uploader.stands = self.pool.recheck.stands
            self.bucket_listing.doubted = self.pool.listing.doubted
            self.bucket_listing.remote_entries.has_left = self.pool.lookup.has_left
        fetchers = [one for one in (self.hydration, self.pool and self.pool.fetcher) if one]
        if fetchers:
            self.prefetch = Prefetch(ledger, fetchers)
            for one in fetchers:
                one.opening = self.prefetch.opening
        self.warm = Warm(transfers, room, self.hydration, self.unpacking, self._jobs)
        self.tree_jobs = TreeJobs(ledger.table)
        self.scrub = Scrub(transfers, movers, 0)
        self.trash = TrashBin(ledger, self._jobs)
        self.census = Census(ledger, self._jobs, self.verification.met)
        self.watch = Watch(ledger, room, quota, lambda: self.admission.spent)
        self.checks = Background(ledger, movers, self._jobs, remote)
        self._tasks += [self.census.run, self.checks.run, self.warm.run, self.tree_jobs.run]
        self._tasks += [self.scrub.run, *self.watch.tasks]
        live.observe("promote_after", partial(setattr, self.promotion, "after"))
        live.observe("reclaimable", partial(setattr, self.demotion, "reclaimable"))
        live.observe("nvme_writes", partial(setattr, self.admission, "budget"))
        live.observe("scrub", partial(setattr, self.scrub, "period"))
        live.observe("verify_after", partial(setattr, ledger.verified, "after"))

    @property
    def jobs(self) -> int:
        """Count the objects that are being moved, or were requested to move."""
        return len(self._jobs) + len(self.requests)

    def evict(self, inos: Sequence[int], *, to: str, drop: bool, dry: bool) -> int:
        """Start a job that evicts the objects, and return its number. Raises ConfigError."""
        visitor = Evict(self.transfers, self.room, self._jobs, to=to, drop=drop, dry=dry)
        return self.tree_jobs.start(inos, visitor, visitor.log_dropped)

    def opened(self, inode: Inode) -> None:
        """Note that an object was opened for reading."""
        self.promotion.opened(inode)
        if self.prefetch is not None:
            self.prefetch.opened(inode)
        if self.pool is not None:
            self.pool.opened(inode)

    def end_ahead(self) -> None:
        """Begin no more work for which no caller waits: the mount ends."""
        if self.prefetch is not None:
            self.prefetch.end()
        if self.pool is not None:
            self.pool.set_copies("drop")
        self.warm.cancel_all()
        self.scrub.stop()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for task in self._tasks:
                nursery.start_soon(self.keep_up, task)
            nursery.start_soon(self.keep_up, partial(self._dispatch, nursery))

    @staticmethod
    async def keep_up(task: Callable[[], Awaitable[None]]) -> None:
        """Run a task again after PAUSE if it fails: a failing disk must not end the mount."""
        while True:
            try:
                return await task()
            except (KvfsError, OSError) as error:
                log.error("background work goes on in %.0f s after: %s", PAUSE, error)
                await trio.sleep(PAUSE)

    async def _dispatch(self, nursery: trio.Nursery) -> None:
        ledger = self.ledger
        while True:
            ledger.wakeup.rearm()
            await self.trash.empty()
            if ledger.accounts.census_done.is_set():
                for tier in ledger.tiers.local:
                    if tier.free < 0:  # a file has become larger than expected
                        self.room.make_room(tier)
                while self._running < self._slots and (job := self._next_job()):
                    movement, inos = job
                    self._jobs.update(inos)
                    self._running += 1
                    nursery.start_soon(self._job, movement, inos)
            if not ledger.trash.files or self.breaker.down:
                await ledger.wakeup.event.wait()

    def _next_job(self) -> tuple[Movement, list[int]] | None:
        if self.breaker.down:
            return None
        if inos := self.demotion.next():
            return self.demotion, inos
        if asked := self.requests.take(self._jobs):
            movement, ino = asked
            return movement, [ino]
        return None

    async def _job(self, movement: Movement, inos: list[int]) -> None:
        about: list[tuple[int, int]] = []
        try:
            found = [inode for ino in inos if (inode := self.transfers.still_current(ino))]
            about = [(inode.ino, inode.version) for inode in found]
            if found:
                await movement.move(found)
        except (OSError, SourceChangedError, KvfsError) as error:
            if self.concerns(about):
                self.breaker.failed(movement.name, self.ledger.catalog.named(inos[0]), error)
        finally:
            self._running -= 1
            self._jobs.difference_update(inos)
            self.ledger.wakeup.wake()

    def concerns(self, about: list[tuple[int, int]]) -> bool:
        """Whether a job's failure matters: not if one of its objects has changed meanwhile.

        The failure may be of that object's file. One that lasts comes again without it.
        """
        try:
            return all(self.transfers.still_current(ino, version) for ino, version in about)
        except KvfsError:
            return True  # the catalog itself is in trouble
