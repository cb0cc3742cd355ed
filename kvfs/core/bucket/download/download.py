"""One object from the bucket into a tier, and what each failure means for it.

Contract: `run` ends with a copy entered whose digest was compared, or raises why not. What
another node has unlinked or replaced is looked up again, once: a store that says of a key what it
does not give would say so at each look, and is a miss from then on. What the store gives wrongly is
a miss and loses its name here; what is there stays, as something between may have made it wrong.
Any other failure is one for those who wait only. An object that is fetched for a `PrefetchRequest`
takes no room from recently used objects. Its download ends when no request wants it any more.

Invariants across awaits: while it comes the object is in `jobs`, its room is reserved, and no
earlier file of its name waits to be unlinked. Whether it is still the version that was asked for is
looked at in the step in which the copy is entered; if not, the file goes again. While it is read as
it comes its key is in `reading`, and must not be deleted.
Not for who waits, how long, nor in which turn: `hydration`; nor for what comes when: `streaming`.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import trio

from kvfs import failpoints
from kvfs.catalog import Inode, Stored
from kvfs.compression.container import DamagedError
from kvfs.core.bucket.download import streaming
from kvfs.core.bucket.download.budget import Turn
from kvfs.core.bucket.listing.bucket_lookup import LastSeen
from kvfs.core.capacity.backpressure import Backpressure
from kvfs.core.capacity.room import Room
from kvfs.core.flights import Flight
from kvfs.core.ledger.stream import Stream
from kvfs.core.moves.transfers import PERIOD, Transfers
from kvfs.errors import KvfsError, NoSpaceError, NotFoundError, StaleError, TierError
from kvfs.movement import downloading
from kvfs.movement.downloading import Wanted
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

FOR_GOOD = (NoObjectError, ObjectChangedError, WrongBytesError, MetadataError, DamagedError)
OTHERS = (NoObjectError, ObjectChangedError)  # as after an unlink or a rewrite by another node
# s, beside what an open waits: between a fetch that found another object, or none, and the one
# after the look that the kernel takes then.
LOOK_AGAIN = 10.0


class PrefetchRequest(Protocol):
    """Who wants objects here that nobody has opened."""

    def wanted(self, inode: Inode) -> bool:
        """Whether still; asked before anything is done for it."""

    def take(self, inode: Inode, tier: Tier, cost: int) -> bool:
        """Whether it may have so many bytes of a tier. It has them when `ended` says so."""

    def ended(self, inode: Inode, problem: Exception | None, *, joined: bool) -> None:
        """It is here, or why not; `joined`: an open has come to wait for it meanwhile."""


class UnwantedError(NotFoundError):
    """It is not fetched ahead: nobody wants it any more, or it would be in the way."""


class Fetch(Flight):
    """One that runs, of an object as it was when somebody asked for it.

    streamed: it is to be read while it comes; then it has a stream when it is `ready`, mostly.
    """

    def __init__(
        self,
        inode: Inode,
        cost: int,
        request: PrefetchRequest | None = None,
        *,
        streamed: bool = False,
    ) -> None:
        super().__init__()
        self.inode = inode
        self.began = trio.current_time()
        self.turn = Turn(cost, urgent=request is None)
        self.request = request
        self.ready = trio.Event()
        self.streamed = streamed
        self.stream: Stream | None = None

    def begin(self, stream: Stream) -> None:
        """It can be read."""
        stream.join()
        self.stream = stream
        self.ready.set()

    def end(self) -> None:
        """Tell all that wait, and then the errand."""
        if self.stream is not None:
            self.stream.end(self.problem)
            self.stream.leave()
        super().end()
        self.ready.set()
        if self.request is not None:
            self.request.ended(self.inode, self.problem, joined=self.turn.urgent)


class Downloads:
    """`jobs` are inodes that movers work on."""

    def __init__(
        self,
        transfers: Transfers,
        room: Room,
        remote: Remote,
        jobs: set[int],
        matched: Callable[[int], None],
    ) -> None:
        """matched: told of what the bucket has as it is known."""
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.room = room
        self.backpressure = Backpressure(self.ledger.dirty)
        self.remote = remote
        self.bucket = remote.bucket
        self.reading: Counter[str] = Counter()  # keys of what is read before all of it is here
        self._matched = matched
        self._jobs = jobs
        self._said = ""  # the kind of failure that was logged, until something comes again
        self._spoiled: set[tuple[int, int]] = set()  # (inode, version): began well, ended wrongly
        self._belied: LastSeen[str] = LastSeen()  # keys at which was not what the store had said

    def stored(self, ino: int) -> Stored | None:
        """Where it is, or, of what was unlinked since its header was read, where it still is."""
        held = self.ledger.table.open.get(ino)
        header = None if held is None else held.header
        return self.ledger.dirty.stored(ino) or (header.stored if header is not None else None)

    def cost(self, inode: Inode) -> int:
        """Bytes of a tier that it takes to come; both forms are there while it is decompressed."""
        stored = self.stored(inode.ino)
        cost = max(Tier.cost(inode.blocks), Tier.cost(-(-inode.size // 4096) * 8))
        return cost if stored is None or stored.codec == "none" else cost * 2

    def may_stream(self, inode: Inode) -> bool:
        """Whether it can be read while it comes."""
        stored = self.stored(inode.ino)
        return (
            0 < self.bucket.stream <= inode.size
            and inode.size > LEAST
            and stored is not None
            and stored.codec == "none"
            and (inode.ino, inode.version) not in self._spoiled
        )

    async def run(self, running: Fetch) -> None:
        """Bring it, when its turn has come. Raises what it has told of: KvfsError, OSError."""
        inode = running.inode
        try:
            await self._fetch(inode, running)
            self._said = ""
        except FOR_GOOD as error:
            if running.stream is not None:  # its opens are to fail, not its reads
                self._spoiled.add((inode.ino, inode.version))
            raise self._give_up(inode, error, urgent=running.turn.urgent) from None
        except (StoreError, TierError) as error:
            self.bucket.failed("download", error)
            kind = type(error).__name__
            log.log(
                logging.DEBUG if kind == self._said else logging.WARNING,
                "inode %d stays in the bucket (said once for all): %s",
                *(inode.ino, error),
            )
            self._said = kind
            raise
        except (KvfsError, OSError) as error:
            expected = isinstance(error, StaleError) or not running.turn.urgent
            log.log(
                logging.DEBUG if expected else logging.WARNING,
                "inode %d stays in the bucket: %s",
                *(inode.ino, error),
            )
            raise

    async def _fetch(self, inode: Inode, running: Fetch) -> None:
        ino, version = inode.ino, inode.version
        await running.turn.come.wait()
        while ino in self._jobs:  # noqa: ASYNC110 (a job that tells of its end is none of ours)
            await trio.sleep(PERIOD)
        self._jobs.add(ino)
        try:
            with await self._find_room(inode, running) as room:
                stored = self.stored(ino)  # a job may have given it another name
                if stored is None:
                    place = self.bucket.place
                    raise NoObjectError(f"inode {ino}: nothing says where it is in {place}")
                await self.transfers.wait_for_trash(room.tier, ino, version)
                moved = await self._download(inode, stored, room.tier, running)
                self._enter(inode, room.tier, moved)
        finally:
            self._jobs.discard(ino)
            self.ledger.work.wake()

    async def _download(self, inode: Inode, stored: Stored, tier: Tier, running: Fetch) -> Moved:
        try:
            return await self._bring(inode, stored, tier, running)
        except WrongBytesError as error:  # before anything is given up for it
            if running.stream is not None:  # of that the chunk was fetched once more
                raise
            log.warning("inode %d is fetched once more: %s", inode.ino, error)
            return await self._bring(inode, stored, tier, running)

    async def _bring(self, inode: Inode, stored: Stored, tier: Tier, running: Fetch) -> Moved:
        path = tier.path(inode.ino, inode.version)
        wanted = Wanted(stored, path, inode.size, inode.digest, inode.backing_mtime_ns)
        if running.streamed:
            self.reading[stored.key] += 1
            try:
                return await streaming.bring(self.remote, inode, wanted, tier, running.begin)
            finally:
                self.reading -= Counter({stored.key: 1})
        return await self.remote.call("down", inode.size, [path], downloading.download, wanted)

    def _enter(self, inode: Inode, tier: Tier, moved: Moved) -> None:
        """It is here: say so. Raises CatalogError, StaleError if it has changed meanwhile."""
        ledger, ino, version = self.ledger, inode.ino, inode.version
        failpoints.reach("dispatcher.hydrated")
        current = self._fit(ino, version)
        if current is None or tier in ledger.tiers.holders(current):
            if current is None:
                ledger.trash.throw_away(tier, ino, version)
            raise StaleError(f"inode {ino} has changed while it was fetched")
        current.session = ledger.session  # it is not synced: after a crash its digest tells
        try:
            ledger.records.add_copy(current, tier, moved.blocks, moved.digest)
        except KvfsError:
            ledger.trash.throw_away(tier, ino, version)
            raise
        self._matched(ino)
        self.bucket.counters["downloads"] += 1
        self.bucket.counters["download_bytes"] += inode.size
        if moved.cpu_seconds:
            self.bucket.counters["decompressed"] += 1
            self.bucket.counters["decompress_cpu_us"] += round(moved.cpu_seconds * 1e6)

    def _fit(self, ino: int, version: int) -> Inode | None:
        """As `Transfers` has it. Who reads what was unlinked meanwhile has it to the end."""
        held = self.ledger.table.open.get(ino)
        if held is not None and held.coming and held.inode.version == version:
            return None if held.writers or held.lost else held.inode
        return self.transfers.still_current(ino, version)

    def _give_up(self, inode: Inode, error: KvfsError, *, urgent: bool) -> KvfsError:
        """The bucket cannot produce what it should have: a miss, now and later.

        Unless nobody means that any more; what it comes to for those who wait. urgent: an open
        does.
        """
        current, stored = (
            self.transfers.still_current(inode.ino, inode.version),
            self.stored(inode.ino),
        )
        if current is None:
            return StaleError(f"inode {inode.ino} has changed while it was fetched: {error}")
        ledger, place = self.ledger, self.bucket.place
        followed = self.bucket.shared and isinstance(error, OTHERS)
        if followed:
            log.info("inode %d: another node has unlinked or replaced it: %s", inode.ino, error)
        elif isinstance(error, OTHERS):
            log.error("inode %d is lost, %s: %s", inode.ino, place, error)
        else:
            log.error(
                "inode %d is lost here, what %s has of it stays there: look at what is between: %s",
                *(inode.ino, place, error),
            )
            if (there := ledger.dirty.stored(inode.ino)) is not None:
                self.bucket.gave_wrong_bytes(there.key, there.etag)
        if ledger.tiers.holders(current) or inode.ino in ledger.table.open:
            return error
        belied = False
        if followed and stored is not None:  # was it another object lately, too, or none?
            belied = self._belied.age(stored.key) < self.bucket.wait + LOOK_AGAIN
            self._belied.note(stored.key)
        if belied and not urgent:
            return error  # whoever has just looked it up is to find that out by an open
        try:
            if followed:
                ledger.removals.let_go(current)
                if belied:  # one ESTALE more, and the program would have it
                    return error
                return StaleError(f"inode {inode.ino}: another node has unlinked or replaced it")
            ledger.removals.drop(current, "lost", stored=False)
        except KvfsError as refused:
            log.error("inode %d keeps its name for now: %s", inode.ino, refused)
        return error

    # Room

    async def _find_room(self, inode: Inode, running: Fetch) -> Reservation:
        """As `_reserve`. An open waits for uploads to make room, as writers do, and no longer."""
        while True:
            deadline = running.began + self.bucket.wait
            try:
                return self._reserve(inode, running)
            except NoSpaceError:
                if not self.backpressure.helps(deadline):
                    raise
            await self.backpressure.upload(deadline)

    def _reserve(self, inode: Inode, running: Fetch) -> Reservation:
        """Set room aside in the fastest tier that has it. Raises NoSpaceError, UnwantedError."""
        ledger, cost = self.ledger, running.turn.cost
        request = None if running.turn.urgent else running.request
        if request is not None:
            self._check_wanted(inode, request)
        namespace = ledger.namespaces.of(inode)
        for tier in ledger.tiers.local:
            last = tier is ledger.tiers.local[-1]
            if not namespace.takes(tier) or tier.health.down:
                continue
            if not last and cost > tier.capacity // 2:
                continue
            if request is None:
                room = self.room.reserve(tier, cost)
            elif request.take(inode, tier, cost):
                room = self.room.reserve_gently(tier, cost, inode.ino)
            else:
                room = None
            if room is not None:
                return room
        if request is not None:
            raise UnwantedError("no tier has room that is free, or was not used lately")
        raise NoSpaceError(f"no tier has room for {cost} bytes")

    def _check_wanted(self, inode: Inode, request: PrefetchRequest) -> None:
        """Raises UnwantedError for what it would be useless to fetch ahead."""
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
