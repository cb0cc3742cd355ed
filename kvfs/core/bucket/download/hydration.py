"""Hydration: downloads objects that only the bucket has, when programs open them.

Contract: `fetch` returns when the object has a copy here. If a stream is enough for the caller,
`fetch` returns as soon as programs can read the object during its download. `header` returns the
first bytes, if the metadata of the object has a digest of them. A caller that has waited too long
gets a miss, and the download goes on. kvfs sends no request to a store that is down. If a store
fails, the caller gets a miss. `ahead` fetches an object for which no open waits, as long as a
`PrefetchRequest` wants it. An open that comes meanwhile joins the fetch, and the fetch becomes
urgent.

Invariants across awaits: an object has one fetch at a time, for all callers that wait, even if all
of them leave. The fetch is among the running ones from its first request until all callers and its
`PrefetchRequest` have heard of its end. The callers hear of the end first. All fetches together
have a bound on bytes (`budget`). While a handle uses a header, kvfs must not delete the key of the
object. A header takes no room of a tier. Not for the choice of a local copy
(`core/objects/copies.py`). Not for the choice of objects to fetch ahead, nor for scans
(`core/objects/scans.py`). Not for the download itself, nor for the meaning of its failures
(`download`).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import trio

from kvfs.catalog import Inode, Named
from kvfs.core.bucket.download.download import FINAL_ERRORS, Downloader
from kvfs.core.bucket.listing.bucket_lookup import BucketLookup
from kvfs.core.bucket.listing.remote_entries import is_stub
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.fetching.budget import Budget
from kvfs.core.fetching.fetch import Fetch, PrefetchRequest
from kvfs.core.ledger.header import Header
from kvfs.core.ledger.stream import Stream
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.shared_work import SharedWork, WorkByKey, wait_while_up
from kvfs.errors import KvfsError, NotFoundError, TierError
from kvfs.movement import looking
from kvfs.movement.remote import Remote
from kvfs.s3.header import LEAST, SIZE

log = logging.getLogger(__name__)

# Headers in use at the same time, 4 KiB each. A program that looks through many files opens and
# closes one after the other. So a program with more open files gets no headers.
HEADERS_MOST = 4096
IN_FLIGHT = 256 << 20  # bytes of all fetches together, or of one large one


class HeaderRequest(SharedWork):
    """A request for a header. `data`: b"" if the metadata has no digest of the header."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""


class Hydration:
    """Brings objects from the bucket for opens.

    `jobs` are inodes that movers work on. Hydration calls `opening(inode)` for each open before the
    open waits. `headers` is the number of headers in use.
    """

    def __init__(
        self,
        transfers: TierTransfers,
        room: Room,
        quota: Quota,
        remote: Remote,
        jobs: set[int],
        bucket_lookup: BucketLookup,
    ) -> None:
        self.ledger = transfers.ledger
        self.bucket = remote.bucket
        self._remote = remote
        self.downloader = Downloader(transfers, room, quota, remote, jobs, bucket_lookup.matched)
        self.headers = 0
        self._running: WorkByKey[int, Fetch] = WorkByKey(self._defect)
        # The keys are inode and version.
        self._header_requests: WorkByKey[tuple[int, int], HeaderRequest] = WorkByKey(
            lambda key, error: self._defect(key[0], error)
        )
        self.opening: Callable[[Inode], None] = lambda _inode: None
        self.fetch_metadata = bucket_lookup.fetch_metadata
        self.budget = Budget(IN_FLIGHT, remote.most_downloads)

    @property
    def streaming(self) -> int:
        """The number of objects that programs can read during their download."""
        return sum(one.stream is not None for one in self._running)

    @property
    def counters(self) -> Counter[str]:
        return self.bucket.counters

    @property
    def waiting(self) -> int:
        """The fetches that wait for their turn."""
        return self.budget.waiting

    async def fetch(self, inode: Inode, *, whole: bool = True) -> Stream | None:
        """Fetch the object, or join its fetch. Returns None if a copy is here now, else the stream.

        whole: the caller needs a copy; otherwise a stream is enough. Raises NotFoundError;
        StaleError if the object changed. The caller holds the inode's lock.
        """
        bucket, ino = self.bucket, inode.ino
        if bucket.health.down or bucket.terms is None:
            raise NotFoundError(
                f"{self._named(ino)} is in {bucket.place} only: {bucket.health.why}"
            )
        if is_stub(inode):
            raise NotFoundError(f"{self._named(ino)}: {bucket.place} has not said yet what it is")
        running = self._running.get(ino)
        if running is None:
            running = self._begin(inode, streamed=not whole and self.downloader.may_stream(inode))
        elif not running.turn.urgent:
            running.began = trio.current_time()  # the wait of the open begins now
            self.budget.hurry(running.turn)
        self.opening(inode)
        since = running.began if running.stream is None else trio.current_time()
        await self._wait(ino, running.ended if whole else running.ready, since)
        if not running.ended.is_set():
            return running.stream
        running.expect_done(self._named(ino))
        return None

    async def header(self, inode: Inode) -> Header | None:
        """The first bytes of an object, without the rest; None if the caller needs `fetch`.

        Raises NotFoundError. The caller holds the inode's lock.
        """
        if self.bucket.health.down or self.bucket.terms is None or is_stub(inode):
            return None
        stored = self.downloader.stored(inode.ino)
        if self._running.get(inode.ino) is not None or stored is None or stored.codec != "none":
            return None
        if inode.size <= LEAST or self.headers >= HEADERS_MOST:
            return None
        key = (inode.ino, inode.version)
        if (asked := self._header_requests.get(key)) is None:
            asked = HeaderRequest()
            self._header_requests.begin(key, asked, partial(self._ask, inode.copy(), asked))
        await self._wait(inode.ino, asked.ended, trio.current_time())
        asked.expect_done(self._named(inode.ino))
        now = self.downloader.stored(inode.ino)  # the object may have another key now
        if not asked.data or now is None:
            return None

        def leave() -> None:
            self.headers -= 1
            self.downloader.reading -= Counter({now.key: 1})

        self.headers += 1
        self.downloader.reading[now.key] += 1
        self.bucket.counters["headers"] += 1
        return Header(asked.data, now, leave)

    async def _ask(self, inode: Inode, asked: HeaderRequest) -> None:
        """Ask the bucket for the header. Logs each failure, and raises some."""
        stored = self.downloader.stored(inode.ino)
        if stored is None:
            return
        try:
            wanted = (stored, inode.size, inode.digest)
            asked.data = await self._remote.call("down", SIZE, (), looking.peek, *wanted)
        except FINAL_ERRORS as error:
            log.info("%s is to come as a whole: %s", self._named(inode.ino), error)
        except (KvfsError, OSError) as error:
            if isinstance(error, TierError):  # of which StoreErrors are some
                self.bucket.failed("download", error)
            what = self._named(inode.ino)
            log.warning("%s stays in the bucket, an open is a miss: %s", what, error)
            raise

    async def _wait(self, ino: int, enough: trio.Event, since: float) -> None:
        """Wait for an event, at most as long as an open may wait. Raises NotFoundError."""
        bucket = self.bucket
        await wait_while_up(enough, since + bucket.wait, bucket.health)
        if not enough.is_set() and bucket.health.down:
            raise NotFoundError(
                f"{self._named(ino)} is in {bucket.place} only: {bucket.health.why}"
            )
        if not enough.is_set():
            raise NotFoundError(f"{self._named(ino)} is not here within {bucket.wait:.0f} s")

    def brings(self, inode: Inode) -> bool:
        """Whether the bucket has an object, and it is not here."""
        return inode.in_bucket and not self.ledger.tiers.holders(inode)

    def ahead(self, inode: Inode, request: PrefetchRequest) -> bool:
        """Begin to fetch an object for a request. False if a fetch is under way or impossible."""
        if self.bucket.health.down or self.bucket.terms is None or is_stub(inode):
            return False
        if self._running.get(inode.ino) is not None:
            return False
        self._begin(inode, request)
        return True

    async def until_ended(self, ino: int) -> None:
        """Wait until the fetch that is under way is over, with any result."""
        running = self._running.get(ino)
        if running is not None:
            await running.ended.wait()

    def stop(self) -> None:
        """Stop all fetches after an unmount."""
        self._running.stop()
        self._header_requests.stop()

    def _begin(
        self, inode: Inode, request: PrefetchRequest | None = None, *, streamed: bool = False
    ) -> Fetch:
        cost = self.downloader.cost(inode)
        running = Fetch(inode.copy(), cost, request, streamed=streamed)
        self.budget.ask(running.turn)
        return self._running.begin(inode.ino, running, partial(self._run, running))

    async def _run(self, running: Fetch) -> None:
        began = time.perf_counter()
        try:
            await self.downloader.run(running)
        finally:
            self.budget.leave(running.turn)
        spent = time.perf_counter() - began
        self.ledger.latencies.hydrate[self.bucket.name].observe(spent)

    def _named(self, ino: int) -> Named:
        return self.ledger.catalog.named(ino)

    def _defect(self, ino: int, error: Exception) -> None:
        log.error("%s stays in the bucket: a defect of kvfs", self._named(ino), exc_info=error)
