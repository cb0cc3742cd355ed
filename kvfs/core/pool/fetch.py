"""Fetches objects of other nodes, when programs open them.

Contract: `fetch` returns when the object has a copy here, or raises NotFoundError, a miss. If a
stream is enough for the caller, it returns as soon as programs can read a large object. It asks one
owner after the other, within `pool_wait` together with the lookup of the name before. An object has
one fetch at a time, for all callers. If no owner gives the object, its name goes, unless programs
have it open: the next lookup asks the index again. The caller holds the inode's lock. `ahead`
fetches an object for which no open waits, as long as a `PrefetchRequest` wants it; an open that
comes meanwhile joins the fetch. Not for the owners and their bytes (`sources`).
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from kvfs.catalog import Inode
from kvfs.core.bucket.listing.bucket_lookup import LastSeen
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.fetching import streaming
from kvfs.core.fetching.budget import Budget
from kvfs.core.fetching.fetch import Fetch, PrefetchRequest, UnwantedError, reserve
from kvfs.core.ledger.latencies import Histogram
from kvfs.core.ledger.stream import Stream
from kvfs.core.moves.transfers import PERIOD, TierTransfers
from kvfs.core.pool.chunk_digests import ChunkDigests
from kvfs.core.pool.lookup import PoolLookup
from kvfs.core.pool.sources import FETCHES, NotIndexedError, Sources
from kvfs.core.shared_work import WorkByKey, start_task
from kvfs.errors import KvfsError, NoSpaceError, NotFoundError, StaleError, TierError
from kvfs.movement.movers import Moved, MoverPool
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import PATIENCE
from kvfs.s3.chunks import Chunks
from kvfs.tiers import Reservation, Tier

log = logging.getLogger(__name__)

COUNTERS = ("fetched", "fetched_bytes", "prefetched", "prefetch_used", "prefetch_wasted")
IN_FLIGHT = 256 << 20  # bytes of all fetches together, or of one large one
# s of an open beside its wait: the lookup before it (an entry, a listing, leases), and the loop
BESIDE_S = 4 * PATIENCE
SENT_BACK = 5.0  # s in which a second failure of a name is a miss: a program would see ESTALE
RETRIED = 0.1  # s in which the kernel has looked up a name again, and opens what it found
SPOILED = 600.0  # s in which an object comes as a whole after one of its chunks was wrong


class PoolFetch:
    """Brings objects of other nodes. `jobs` are inodes that movers work on."""

    def __init__(
        self,
        transfers: TierTransfers,
        room: Room,
        quota: Quota,
        movers: MoverPool,
        lookup: PoolLookup,
        jobs: set[int],
        chunks: ChunkDigests,
        *,
        tls: Path | None = None,
    ) -> None:
        self.ledger = transfers.ledger
        self.nodes = self.ledger.tiers.nodes
        self.transfers = transfers
        self.room = room
        self.quota = quota
        self.lookup = lookup
        self.sources = Sources(lookup, movers, tls)
        self.peers = lookup.peers
        self.entries = lookup.entries
        self.chunks = chunks
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.opening: Callable[[Inode], None] = lambda _inode: None
        self.seconds = Histogram()  # of fetches that gave an object
        self.fetched: dict[int, int] = {}  # versions of inodes that came from the pool
        self._jobs = jobs
        self._sent_back: LastSeen[str] = LastSeen()
        self.budget = Budget(IN_FLIGHT, FETCHES)
        self._running: WorkByKey[int, Fetch] = WorkByKey(
            lambda ino, error: log.error(
                "%s is not fetched: a defect of kvfs", self._named(ino), exc_info=error
            )
        )

    @property
    def streaming(self) -> int:
        """The number of objects that programs can read while they come."""
        return sum(one.stream is not None for one in self._running)

    async def fetch(self, inode: Inode, *, whole: bool = True) -> Stream | None:
        """Fetch a remote object, or join its fetch. Returns None if a copy is here now.

        whole: the caller is a writer, and needs a copy; otherwise a stream is enough. Raises
        NotFoundError, StaleError. The caller holds the inode's lock.
        """
        running, wait = self._running.get(inode.ino), self.nodes.wait
        if running is None:
            running = self._begin(inode, None, streamed=not whole and self._may_stream(inode))
        elif not running.turn.urgent:
            running.began = trio.current_time()  # the wait of the open begins now
            self.budget.hurry(running.turn)
        self.opening(inode)
        # Opens of one object come one after the other: the wait of the first is the wait of all.
        since = running.began if running.stream is None else trio.current_time()
        enough = running.ended if whole else running.ready
        with trio.move_on_at(since + max(wait / 2, wait - BESIDE_S)):
            await enough.wait()
        if not enough.is_set():
            raise NotFoundError(f"{self._named(inode.ino)} is not here within {wait:g} s")
        if not running.ended.is_set():
            return running.stream
        if whole and isinstance(running.problem, NotIndexedError):
            self._send_writer_back(inode)
        running.expect_done(self._named(inode.ino))
        return None

    def _send_writer_back(self, inode: Inode) -> None:
        """Have the kernel look up the name again for a writer, which may make a file then.

        Raises StaleError, but not for the open that follows that lookup.
        """
        key = self.entries.key(inode)
        if key is not None and self._sent_back.age(key) >= RETRIED:
            self._sent_back.note(key)
            self.entries.forget(inode.ino)
            raise StaleError(f"{self._named(inode.ino)} was unlinked or replaced")

    def _may_stream(self, inode: Inode) -> bool:
        return self.chunks.may_stream(inode) and self.sources.spoiled.age(inode.digest) > SPOILED

    def stop(self) -> None:
        """Stop all fetches after an unmount."""
        self._running.stop()

    def _begin(
        self, inode: Inode, request: PrefetchRequest | None, *, streamed: bool = False
    ) -> Fetch:
        cost = Tier.cost(-(-inode.size // 4096) * 8)
        running = Fetch(inode.copy(), cost, request, streamed=streamed)
        self.budget.ask(running.turn)
        return self._running.begin(inode.ino, running, partial(self._run, running))

    async def _run(self, running: Fetch) -> None:
        try:
            await running.turn.come.wait()
            await self._fetch(running)
        finally:
            self.budget.leave(running.turn)

    # Ahead of opens

    @property
    def waiting(self) -> int:
        """The fetches that wait for their turn."""
        return self.budget.waiting

    def brings(self, inode: Inode) -> bool:
        """Whether only other nodes have an object."""
        return inode.in_pool

    def ahead(self, inode: Inode, request: PrefetchRequest) -> bool:
        """Begin to fetch an object for a request. False if a fetch is under way or impossible."""
        if self._running.get(inode.ino) is not None or not self.lookup.may_ask():
            return False
        self._begin(inode, request)
        return True

    # The fetch

    async def _fetch(self, running: Fetch) -> None:
        inode = running.inode
        key = self.entries.key(inode)
        if key is None or not self.entries.is_shared(inode):
            raise StaleError(f"{self._named(inode.ino)} has lost its name, or left the pool")
        began = trio.current_time()
        try:
            await self._bring(key, running)
            self.seconds.observe(trio.current_time() - began)
        except IndexDownError as error:
            self.lookup.failed(error)  # the name stays: the index will know more
            raise
        except UnwantedError:
            raise
        except NoSpaceError as error:
            log.info("%s is a miss: %s", self._named(inode.ino), error)
            raise
        except (NotFoundError, TierError) as error:
            log.info("%s is a miss: %s", self._named(inode.ino), error)
            self.lookup.forget(key)
            if running.turn.urgent and self._may_be_stored(inode, key):
                self.entries.forget(inode.ino)
                raise StaleError("it may be in the bucket, where no node gives it") from None
            start_task("a name that no node gives", partial(self._forget, inode.ino))
            raise

    def _may_be_stored(self, inode: Inode, key: str) -> bool:
        """Whether the kernel is to look a name up again, in the bucket now; once in a while."""
        bucket = self.ledger.tiers.bucket
        if not bucket.mounted or not bucket.shared or self._sent_back.age(key) < SENT_BACK:
            return False
        self._sent_back.note(key)
        return self.ledger.namespaces.of(inode).takes(bucket)

    async def _forget(self, ino: int) -> None:
        """Forget the name, once the open that failed has left the inode."""
        async with self.ledger.table.locked(ino):
            self.entries.forget(ino)

    async def _bring(self, key: str, running: Fetch) -> None:
        """Fetch the object into a tier, from the first node that gives it."""
        inode, named = running.inode, self._named(running.inode.ino)
        ino, version = inode.ino, inode.version
        # A failed read is an error, and no miss. After a takeover a program reads on before the new
        # daemon is connected.
        until = running.began + self.nodes.wait / 2 if running.streamed else 0.0
        found = await self.sources.find(key, inode, until=until)
        while ino in self._jobs:  # noqa: ASYNC110 (other jobs signal no end)
            await trio.sleep(PERIOD)
        self._jobs.add(ino)
        try:
            with self._reserve(running) as room:
                tier = room.tier
                await self.transfers.wait_for_trash(tier, ino, version)
                bring = partial(self.sources.bring, key, inode, found, tier.path(ino, version))
                if running.streamed and found.chunks is not None:
                    moved = await streaming.bring(
                        bring, inode, named, tier, running.begin_stream, self.nodes
                    )
                else:
                    moved = await bring()
                self._enter(inode, tier, moved, found.chunks)
        finally:
            self._jobs.discard(ino)
            self.ledger.wakeup.wake()

    def _enter(self, inode: Inode, tier: Tier, moved: Moved, chunks: Chunks | None) -> None:
        """Record the copy. Raises CatalogError, StaleError if the object has changed meanwhile."""
        ledger, ino = self.ledger, inode.ino
        current = self.transfers.still_wanted(ino, inode.version)
        if current is None or not current.in_pool:
            ledger.trash.throw_away(tier, ino, inode.version)
            raise StaleError(f"{self._named(ino)} has changed while it was fetched")
        current.session = ledger.session  # not synced: after a crash its digest proves the copy
        self.fetched[ino] = inode.version
        self.chunks.note(current, chunks)
        try:
            ledger.records.add_copy(current, tier, moved.blocks, moved.digest)
        except KvfsError:
            self.fetched.pop(ino, None)
            ledger.trash.throw_away(tier, ino, inode.version)
            raise
        ledger.namespaces.of(current).add_guest(ino, tier.name)
        self.quota.trim(ledger.namespaces.of(current))  # others may have come at the same time
        self.counters["fetched"] += 1
        self.counters["fetched_bytes"] += inode.size

    def _reserve(self, running: Fetch) -> Reservation:
        """Reserve room for the copy. Raises NoSpaceError, UnwantedError."""
        inode, request = running.inode, None if running.turn.urgent else running.request
        if request is not None:
            current = self.transfers.still_current(inode.ino, inode.version)
            if current is None or not current.in_pool or not request.wanted(inode):
                raise UnwantedError("it is not wanted any more")
        return reserve(self.ledger, self.room, self.quota, inode, running.cost, request)

    def _named(self, ino: int) -> object:
        return self.ledger.catalog.named(ino)
