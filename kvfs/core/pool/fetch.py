"""Fetches objects of other nodes, when programs open them.

Contract: `fetch` returns when the object has a copy here, or raises NotFoundError, a miss. If a
stream is enough for the caller, it returns as soon as programs can read a large object. It asks one
owner after the other, within `pool_wait` together with the lookup of the name before. An object has
one fetch at a time, for all callers. A mover compares the digest before the copy gets a
name (`kvfs.pool.fetching`). If no owner gives the object, its name goes, unless programs have it
open: the next lookup asks the index again. The caller holds the inode's lock. `ahead` fetches an
object for which no open waits, as long as a `PrefetchRequest` wants it; an open that comes
meanwhile joins the fetch.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
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
from kvfs.core.shared_work import WorkByKey, start_task
from kvfs.errors import KvfsError, NotFoundError, StaleError, TierError
from kvfs.movement.movers import Moved, MoverPool, patience_for
from kvfs.movement.streams import Ends
from kvfs.pool import fetching
from kvfs.pool.errors import IndexDownError, NoFileError, PeerError
from kvfs.pool.fetching import FetchJob
from kvfs.pool.index import PATIENCE, Lease, Owner
from kvfs.pool.peer_file import PeerFile
from kvfs.s3.chunks import Chunks
from kvfs.tiers import Reservation, Tier
from kvfs.tiers.tier import FANOUT

log = logging.getLogger(__name__)

FETCHES = 16  # under way at once, of small objects and of others
COUNTERS = (
    *("fetched", "fetched_bytes", "failed"),
    *("prefetched", "prefetch_used", "prefetch_wasted"),
)
IN_FLIGHT = 256 << 20  # bytes of all fetches together, or of one large one
LOOKUP_S = 2 * PATIENCE  # s of the lookup that comes before an open: an entry, and its leases
SENT_BACK = 5.0  # s in which a second failure of a name is a miss: a program would see ESTALE
SPOILED = 600.0  # s in which an object comes as a whole after its stream failed
SMALL = 256 << 10  # bytes up to which a thread fetches: a mover takes 1 ms more to begin


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
        self.movers = movers
        self.lookup = lookup
        self.peers = lookup.peers
        self.entries = lookup.entries
        self.chunks = chunks
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.opening: Callable[[Inode], None] = lambda _inode: None
        self.seconds = Histogram()  # of fetches that gave an object
        self.fetched: dict[int, int] = {}  # versions of inodes that came from the pool
        self._tls = "" if tls is None else str(tls)
        self._jobs = jobs
        self._threads = trio.CapacityLimiter(FETCHES)
        self._limiter = trio.CapacityLimiter(FETCHES)
        self._sent_back: LastSeen[str] = LastSeen()
        self._spoiled: LastSeen[bytes] = LastSeen()  # digests of objects whose streams failed
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

        whole: the caller needs a copy; otherwise a stream is enough. Raises NotFoundError,
        StaleError. The caller holds the inode's lock.
        """
        running, wait = self._running.get(inode.ino), self.nodes.wait
        if running is None:
            running = self._begin(inode, None, streamed=not whole and self._may_stream(inode))
        elif not running.turn.urgent:
            self.budget.hurry(running.turn)
        self.opening(inode)
        enough = running.ended if whole else running.ready
        with trio.move_on_after(max(wait / 2, wait - LOOKUP_S)):
            await enough.wait()
        if not enough.is_set():
            raise NotFoundError(f"{self._named(inode.ino)} is not here within {wait:g} s")
        if not running.ended.is_set():
            return running.stream
        running.expect_done(self._named(inode.ino))
        return None

    def _may_stream(self, inode: Inode) -> bool:
        return self.chunks.may_stream(inode) and self._spoiled.age(inode.digest) > SPOILED

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
            if running.streamed:
                await self._ask_patiently(key, running)
            await self._bring(key, running)
            self.seconds.observe(trio.current_time() - began)
        except IndexDownError as error:
            self.lookup.failed(error)  # the name stays: the index will know more
            raise
        except UnwantedError:
            raise
        except (NotFoundError, TierError) as error:
            log.info("%s is a miss: %s", self._named(inode.ino), error)
            if running.stream is not None:  # next time its open fails, not its reads
                self._spoiled.note(inode.digest)
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

    async def _ask_patiently(self, key: str, running: Fetch) -> None:
        """Ask the index for as long as a read may wait: a failed read is an error, and no miss.

        After a takeover a program reads on before the new daemon is connected. Raises
        IndexDownError.
        """
        while True:
            try:
                await self.lookup.entry(key)
            except IndexDownError:
                if trio.current_time() > running.began + self.nodes.wait / 2:
                    raise
                await trio.sleep(PATIENCE)
            else:
                return

    async def _owners(
        self, key: str, inode: Inode
    ) -> tuple[list[tuple[Owner, Lease]], Chunks | None]:
        """The live owners of an object, and its chunks. Raises NotFoundError, IndexDownError."""
        entry = await self.lookup.entry(key)
        if entry is None or entry.facts.digest != inode.digest or entry.facts.size != inode.size:
            raise NotFoundError("the index has another object by its name, or none")
        found = await self.peers.usable(entry)
        # A client of the index could announce a server of its own, without a certificate.
        usable = [(owner, lease) for owner, lease in found if lease.tls or not self._tls]
        return usable, entry.facts.chunks

    async def _bring(self, key: str, running: Fetch) -> None:
        """Fetch the object into a tier, from the first owner that gives it."""
        inode = running.inode
        ino, version = inode.ino, inode.version
        owners, chunks = await self._owners(key, inode)
        while ino in self._jobs:  # noqa: ASYNC110 (other jobs signal no end)
            await trio.sleep(PERIOD)
        self._jobs.add(ino)
        try:
            with self._reserve(running) as room:
                tier = room.tier
                await self.transfers.wait_for_trash(tier, ino, version)
                nowhere = PeerFile("", "", self._tls)
                wanted = FetchJob(
                    *(nowhere, tier.path(ino, version), inode.size, inode.digest),
                    inode.backing_mtime_ns,
                )
                if running.streamed and chunks is not None:
                    moved = await streaming.bring(
                        partial(self._try_owners, key, inode, owners, wanted, chunks),
                        *(inode, self._named(ino), tier, running.begin_stream, self.nodes),
                    )
                else:
                    moved = await self._try_owners(key, inode, owners, wanted)
                self._enter(inode, tier, moved, chunks)
        finally:
            self._jobs.discard(ino)
            self.ledger.wakeup.wake()

    async def _try_owners(
        self,
        key: str,
        inode: Inode,
        owners: Sequence[tuple[Owner, Lease]],
        wanted: FetchJob,
        chunks: Chunks | None = None,
        ends: Ends | None = None,
    ) -> Moved:
        """Fetch the object from the first owner that gives it. chunks, ends: of its stream.

        Raises NotFoundError if no owner gives it.
        """
        failures: list[str] = []
        for again in (False, True):
            if again:  # it has moved since the lookup
                owners, _ = await self._owners(key, inode)
            for owner, lease in owners:
                source = PeerFile(lease.address, path_of(owner), self._tls)
                try:
                    moved = await self._run_job(wanted._replace(source=source), chunks, ends)
                except NoFileError as error:
                    failures.append(str(error))
                except PeerError as error:
                    self.peers.failed(owner.node, str(error))
                    self.counters["failed"] += 1
                    failures.append(str(error))
                else:
                    self.peers.gave(owner.node)
                    return moved
            if not self.lookup.forget_answer(key):
                break
        raise NotFoundError("no live node gives it: " + ("; ".join(failures) or "none has it"))

    async def _run_job(self, wanted: FetchJob, chunks: Chunks | None, ends: Ends | None) -> Moved:
        """Fetch in a thread or a mover. Raises PeerError, OSError, TierError."""
        if wanted.size <= SMALL:
            return await trio.to_thread.run_sync(fetching.fetch, wanted, limiter=self._threads)
        patience, destinations = patience_for(wanted.size), [wanted.destination]
        run = partial(
            self.movers.run, patience=patience, destinations=destinations, limiter=self._limiter
        )
        if chunks is None or ends is None:
            return await run(fetching.fetch, wanted)
        return await run(fetching.stream, wanted, chunks, ends)

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
        return reserve(self.ledger, self.room, self.quota, inode, running.turn.cost, request)

    def _named(self, ino: int) -> object:
        return self.ledger.catalog.named(ino)


def path_of(owner: Owner) -> str:
    """The path at which an owner's nginx serves its file."""
    ino = int(owner.file.partition(".")[0], 16)
    return f"/{owner.tier}/{ino % FANOUT:02x}/{owner.file}"
