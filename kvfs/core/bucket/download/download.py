"""Downloads one object from the bucket into a tier, and decides what each failure means.

Contract: `run` ends with a copy entered whose digest was compared, or raises the reason. If another
node has unlinked or replaced the object, the kernel looks its name up again, once. Some stores list
an object at a key, and do not give its bytes, at each lookup anew. So such a key is a miss from the
second failure on. If the store gives wrong bytes, the object is a miss and loses its name here. The
bucket keeps the object, since the way to this node may have damaged the bytes. Any other failure
fails only the callers that wait. An object that is fetched for a `PrefetchRequest` takes no room
from recently used objects. Its download ends when no request wants it any more.

Invariants across awaits: during its download the object is in `jobs`, its room is reserved, and no
earlier file of its name waits to be unlinked. The step that records the copy checks that the object
still has the version of the request. If not, it removes the file. While programs read the object
during its download, its key is in `reading`: kvfs must not delete that key. Not for the callers,
the time that they wait, and their turns (`hydration`). Not for the order of the chunks
(`core/fetching/streaming`).
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

import trio

from kvfs import failpoints
from kvfs.catalog import Inode, Named, Stored
from kvfs.compression.container import DamagedError
from kvfs.core.bucket.listing.bucket_lookup import LastSeen
from kvfs.core.capacity.backpressure import Backpressure
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.fetching import streaming
from kvfs.core.fetching.fetch import Fetch, PrefetchRequest, UnwantedError, reserve
from kvfs.core.moves.transfers import PERIOD, TierTransfers
from kvfs.errors import KvfsError, NoSpaceError, StaleError, TierError
from kvfs.movement import downloading
from kvfs.movement.downloading import DownloadJob
from kvfs.movement.movers import Moved
from kvfs.movement.remote import Remote
from kvfs.s3.chunks import LEAST
from kvfs.s3.errors import (
    MetadataError,
    NoObjectError,
    ObjectChangedError,
    StoreError,
    WrongBytesError,
)
from kvfs.tiers import Reservation, Tier

log = logging.getLogger(__name__)

# After these failures the object is a miss. After others it stays in the bucket.
FINAL_ERRORS = (NoObjectError, ObjectChangedError, WrongBytesError, MetadataError, DamagedError)
# As after an unlink or a rewrite by another node.
CHANGED_BY_OTHERS = (NoObjectError, ObjectChangedError)
# s, in addition to the wait of an open. If two fetches of a key within this time find another
# object or none, the store does not give the object that it lists.
LOOK_AGAIN = 10.0


class Downloader:
    """Downloads objects. `jobs` are inodes that movers work on."""

    def __init__(
        self,
        transfers: TierTransfers,
        room: Room,
        quota: Quota,
        remote: Remote,
        jobs: set[int],
        matched: Callable[[int], None],
    ) -> None:
        """matched: called with each inode whose known version the bucket has."""
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.room = room
        self.quota = quota
        self.backpressure = Backpressure(self.ledger.dirty)
        self.remote = remote
        self.bucket = remote.bucket
        self.reading: Counter[str] = Counter()  # keys of objects that programs read from the bucket
        self._matched = matched
        self._jobs = jobs
        self._logged = ""  # the kind of the last failure that was logged, until a fetch succeeds
        self._spoiled: set[tuple[int, int]] = set()  # (inode, version): their streams failed
        self._not_given: LastSeen[str] = LastSeen()  # keys whose object the store did not give

    def stored(self, ino: int) -> Stored | None:
        """Where the object is in the bucket.

        After an unlink, a header that a program took keeps the object in the bucket. Then the
        header knows the place.
        """
        held = self.ledger.table.open.get(ino)
        header = None if held is None else held.header
        return self.ledger.dirty.stored(ino) or (header.stored if header is not None else None)

    def cost(self, inode: Inode) -> int:
        """The bytes of a tier that the fetch takes, twice if the object comes compressed."""
        stored = self.stored(inode.ino)
        cost = max(Tier.cost(inode.blocks), Tier.cost(-(-inode.size // 4096) * 8))
        return cost if stored is None or stored.codec == "none" else cost * 2

    def may_stream(self, inode: Inode) -> bool:
        """Whether programs can read the object during its download."""
        stored = self.stored(inode.ino)
        return (
            0 < self.bucket.stream <= inode.size
            and inode.size > LEAST
            and stored is not None
            and stored.codec == "none"
            and (inode.ino, inode.version) not in self._spoiled
        )

    async def run(self, running: Fetch) -> None:
        """Fetch the object when its turn has come, and log failures. Raises KvfsError, OSError."""
        inode = running.inode
        try:
            await self._fetch(inode, running)
            self._logged = ""
        except FINAL_ERRORS as error:
            if running.stream is not None:  # next time its opens fail, not its reads
                self._spoiled.add((inode.ino, inode.version))
            raise self._give_up(inode, error, urgent=running.turn.urgent) from None
        except (StoreError, TierError) as error:
            self.bucket.failed("download", error)
            kind = type(error).__name__
            log.log(
                logging.DEBUG if kind == self._logged else logging.WARNING,
                "%s stays in the bucket, an open is a miss (said once for all): %s",
                *(self._named(inode), error),
            )
            self._logged = kind
            raise
        except (KvfsError, OSError) as error:
            expected = isinstance(error, StaleError) or not running.turn.urgent
            log.log(
                logging.DEBUG if expected else logging.WARNING,
                "%s stays in the bucket, an open is a miss: %s",
                *(self._named(inode), error),
            )
            raise

    def _named(self, inode: Inode) -> Named:
        return self.ledger.catalog.named(inode.ino)

    async def _fetch(self, inode: Inode, running: Fetch) -> None:
        ino, version = inode.ino, inode.version
        await running.turn.come.wait()
        while ino in self._jobs:  # noqa: ASYNC110 (other jobs signal no end)
            await trio.sleep(PERIOD)
        self._jobs.add(ino)
        try:
            with await self._find_room(inode, running) as room:
                stored = self.stored(ino)  # a job may have given the object another key
                if stored is None:
                    place = self.bucket.place
                    raise NoObjectError(f"nothing says where it is in {place}")
                await self.transfers.wait_for_trash(room.tier, ino, version)
                moved = await self._download(inode, stored, room.tier, running)
                self._enter(inode, room.tier, moved)
        finally:
            self._jobs.discard(ino)
            self.ledger.wakeup.wake()

    async def _download(self, inode: Inode, stored: Stored, tier: Tier, running: Fetch) -> Moved:
        try:
            return await self._bring(inode, stored, tier, running)
        except WrongBytesError as error:  # try once more, before the object is lost
            if running.stream is not None:  # the chunk was already fetched once more
                raise
            log.warning("%s is fetched once more: %s", self._named(inode), error)
            return await self._bring(inode, stored, tier, running)

    async def _bring(self, inode: Inode, stored: Stored, tier: Tier, running: Fetch) -> Moved:
        path = tier.path(inode.ino, inode.version)
        wanted = DownloadJob(stored, path, inode.size, inode.digest, inode.backing_mtime_ns)
        if running.streamed:
            self.reading[stored.key] += 1
            try:
                return await streaming.bring(
                    *(partial(self.remote.stream, wanted), inode, self._named(inode), tier),
                    *(running.begin_stream, self.bucket),
                )
            finally:
                self.reading -= Counter({stored.key: 1})
        return await self.remote.call("down", inode.size, [path], downloading.download, wanted)

    def _enter(self, inode: Inode, tier: Tier, moved: Moved) -> None:
        """Record the copy. Raises CatalogError, StaleError if the object has changed meanwhile."""
        ledger, ino, version = self.ledger, inode.ino, inode.version
        failpoints.reach("dispatcher.hydrated")
        current = self.transfers.still_wanted(ino, version)
        if current is None or tier in ledger.tiers.holders(current):
            if current is None:
                ledger.trash.throw_away(tier, ino, version)
            raise StaleError(f"{self._named(inode)} has changed while it was fetched")
        current.session = ledger.session  # not synced: after a crash its digest proves the copy
        try:
            ledger.records.add_copy(current, tier, moved.blocks, moved.digest)
        except KvfsError:
            ledger.trash.throw_away(tier, ino, version)
            raise
        self.quota.trim(ledger.namespaces.of(current))  # others may have come at the same time
        self._matched(ino)
        self.bucket.counters["downloads"] += 1
        self.bucket.counters["download_bytes"] += inode.size
        if moved.cpu_seconds:
            self.bucket.counters["decompressed"] += 1
            self.bucket.counters["decompress_cpu_us"] += round(moved.cpu_seconds * 1e6)

    def _give_up(self, inode: Inode, error: KvfsError, *, urgent: bool) -> KvfsError:
        """Make an object that the bucket cannot give a miss, now and later.

        Does nothing if the object has changed meanwhile. Returns the error for the waiting callers.
        urgent: an open waits.
        """
        current, stored = (
            self.transfers.still_current(inode.ino, inode.version),
            self.stored(inode.ino),
        )
        if current is None:
            return StaleError(f"{self._named(inode)} has changed while it was fetched: {error}")
        ledger, place, named = self.ledger, self.bucket.place, str(self._named(inode))
        by_others = self.bucket.shared and isinstance(error, CHANGED_BY_OTHERS)
        if by_others:
            log.info("%s: another node has unlinked or replaced it: %s", named, error)
        elif isinstance(error, CHANGED_BY_OTHERS):
            log.error("%s is lost, %s: %s", named, place, error)
        else:
            log.error(
                "%s is lost on this node, %s keeps it: check the proxies on the way: %s",
                *(named, place, error),
            )
            if (there := ledger.dirty.stored(inode.ino)) is not None:
                self.bucket.gave_wrong_bytes(there.key, there.etag)
        if ledger.tiers.holders(current) or inode.ino in ledger.table.open:
            return error
        not_given = False
        if by_others and stored is not None:  # a second time within a short while?
            not_given = self._not_given.age(stored.key) < self.bucket.wait + LOOK_AGAIN
            self._not_given.note(stored.key)
        if not_given and not urgent:
            return error  # the next open finds the same, and acts on it
        try:
            if by_others:
                ledger.removals.let_go(current)
                if not_given:  # the kernel would pass a second ESTALE to the program
                    return error
                return StaleError(f"{named}: another node has unlinked or replaced it")
            ledger.removals.drop(current, "lost", stored=False)
        except KvfsError as refused:
            log.error("%s keeps its name, and its next open is a miss, too: %s", named, refused)
        return error

    # Room

    async def _find_room(self, inode: Inode, running: Fetch) -> Reservation:
        """Reserve room. If no tier has room, an open waits for uploads, within its own wait."""
        while True:
            deadline = running.began + self.bucket.wait
            try:
                return self._reserve(inode, running)
            except NoSpaceError:
                if not self.backpressure.helps(deadline):
                    raise
            await self.backpressure.upload(deadline)

    def _reserve(self, inode: Inode, running: Fetch) -> Reservation:
        """Reserve room in the fastest tier that has room. Raises NoSpaceError, UnwantedError."""
        ledger, cost = self.ledger, running.cost
        request = None if running.turn.urgent else running.request
        if request is not None:
            self._check_wanted(inode, request)
        return reserve(ledger, self.room, self.quota, inode, cost, request)

    def _check_wanted(self, inode: Inode, request: PrefetchRequest) -> None:
        """Raises UnwantedError if it is useless to fetch the object ahead."""
        ledger, bucket = self.ledger, self.bucket
        current = self.transfers.still_current(inode.ino, inode.version)
        if current is None or ledger.removals.is_gone(current):
            raise UnwantedError("it was unlinked or written meanwhile")
        if ledger.tiers.holders(current) or not current.in_bucket:
            raise UnwantedError("it is not in the bucket only any more")
        if bucket.health.down:
            raise UnwantedError(f"{bucket.place} is down: {bucket.health.why}")
        if not request.wanted(inode):
            raise UnwantedError("it is not wanted any more")
