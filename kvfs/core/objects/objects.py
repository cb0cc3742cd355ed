"""The content of files: open, create, rewrite, seal, release.

Contract: handles come and go here; the kernel's face only numbers them. An object with a writer
is staging: one copy, nothing moves. It is sealed when its last writer's FLUSH is answered, and
what follows (copies, digests) waits until that writer's handle is released, because a duplicate of
its descriptor may still write. A handle whose release the catalog refuses stays, and is released
when it takes writes again (`Ledger.late`). The record goes first, as `Ledger` has it; the one
exception is in `versions`.

Where a namespace publishes at close, a new file has no name until then; it keeps what it is to be
called (`OpenObject.publish`), and gets it unless somebody else was the first to be complete. What
is still empty at a FLUSH waits for the RELEASE: shells close a duplicate before the first write.

Concurrency: a backing file is opened or replaced under the inode's lock, the only one there
is; it is held across awaits of worker threads, never across another inode's lock. Names may
change meanwhile, so what an await may have made untrue is looked at again after it. Everything
else is synchronous.
Not for names, nor for choosing victims. Which copy an open is served from is found by `copies`,
what is read while it comes has its bytes from `incoming`, and mappings that outlive their
descriptor are watched by `mappings`.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from struct import Struct
from typing import NoReturn, TypeVar

from kvfs import failpoints
from kvfs.catalog import Batch, Dentry, Inode
from kvfs.core.capacity.bounds import Bounds
from kvfs.core.capacity.placement import Placement
from kvfs.core.ledger.header import Header
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.ledger.removals import NOWHERE
from kvfs.core.ledger.stream import Stream
from kvfs.core.objects.backings import Backings
from kvfs.core.objects.copies import Copies, Fetcher, Unpacker, Verifier
from kvfs.core.objects.incoming import Incoming
from kvfs.core.objects.mappings import Mappings
from kvfs.core.objects.versions import Versions
from kvfs.errors import (
    CatalogError,
    InUseError,
    KvfsError,
    NoSpaceError,
    NotFoundError,
    QuotaError,
    StaleError,
    TierError,
    TooLargeError,
)
from kvfs.tiers import Bucket, Job, OverdueError, Reservation, Tier

log = logging.getLogger(__name__)

T = TypeVar("T")
Make = Callable[[], tuple[Inode, Inode]]  # a directory, and an inode that is to be in it
SIZE_MAX = (1 << 63) - 4096
_PARENT = Struct(">Q")


class Objects:
    """`promote(inode)` and `settle(inode)` are told of what the movers might do."""

    def __init__(
        self,
        ledger: Ledger,
        placement: Placement,
        backings: Backings,
        verifier: Verifier,
        *,
        promote: Callable[[Inode], None],
        settle: Callable[[Inode], None],
        fetcher: Fetcher | None = None,
        unpacker: Unpacker | None = None,
    ) -> None:
        self.ledger = ledger
        self.placement = placement
        self.room = placement.room
        self.quota = placement.quota
        self.catalog = ledger.catalog
        self.backings = backings
        self.promote = promote
        self.settle = settle
        self.versions = Versions(ledger, self._io)
        self.copies = Copies(ledger, verifier, self._io, self.versions.renaming, fetcher, unpacker)
        self.scans = self.copies.scans
        self.incoming = Incoming(ledger, self.copies, fetcher)
        self.verifier = verifier
        self.mappings = Mappings(ledger, backings, partial(self._close, writable=True))
        self.bounds = Bounds(ledger, self.room, self.quota, self.cut_off)
        self._taken_back: dict[int, int] = {}  # inode -> version that a late create unlinks

    @staticmethod
    async def _io(tier: Tier, call: Callable[[], T]) -> T:
        """Run a tier's system call where it may take its time, but not for ever."""
        return await tier.calls.call(call) if tier.slow else call()

    async def on_file(
        self, held: OpenObject, what: str, do: Callable[[int], T], patience: float | None = None
    ) -> T:
        """A system call on an open backing file. Raises OSError, TierError."""
        if not held.tier.slow:
            return do(held.fd)
        return await self._io(held.tier, Job.on_file(what, held.fd, do, patience))

    async def _make(self, tier: Tier, ino: int, version: int) -> int:
        late = partial(tier.uncreate, ino=ino, version=version)
        return await self._io(tier, Job("create", lambda: tier.create(ino, version), late))

    # Opening

    async def open(self, ino: int, *, writable: bool, truncate: bool = False) -> OpenObject:
        """One more handle.

        Raises StaleError, NotFoundError (a miss), InUseError, NoSpaceError, TierError.
        """
        ledger = self.ledger
        await ledger.table.lock(ino)
        try:
            held = ledger.table.open.get(ino)
            scanned = False
            if held is not None and held.lost:
                self._refuse_lost(held, writable=writable)
            if held is not None and held.doom is not None:  # a reader would find gaps in it
                raise held.doom if writable else StaleError(f"inode {ino} is cut off")
            if held is None:
                inode = self.catalog.inode(ino)
                if inode is None or ledger.removals.expire(inode):
                    raise StaleError(f"inode {ino} is gone")
                if writable and truncate and inode.links:
                    held = await self._replace(inode)
                    held.writers += 1
                    return held
                held = await self._open_first(inode, writable=writable)
                scanned = held.header is not None
            elif held.only_lent:
                self._join(held)
            elif held.header is not None and not writable:
                scanned = self.scans.opens(held.inode)
            held.readers += 1  # keeps it while we wait
            try:
                if held.direct and not scanned:
                    await self.incoming.have(held, whole=writable)
                if writable:
                    await self.versions.make_writable(held)
                if held.lost:  # while we waited
                    self._refuse_lost(held, writable=writable)
            except BaseException:
                await self.release(held, writable=False)
                raise
            if writable:
                held.readers -= 1
                held.writers += 1
                if truncate:
                    await self._empty(held)
            return held
        finally:
            ledger.table.unlock(ino)

    def _refuse_lost(self, held: OpenObject, *, writable: bool) -> NoReturn:
        """Its copy was given up, and the kernel takes no other one while handles have that.

        Raises NotFoundError, a miss; InUseError for a writer: the bytes must not become new ones.
        """
        ino = held.inode.ino
        if writable:
            raise InUseError(f"inode {ino}: its damaged copy is open")
        self.copies.missed(held.inode)
        raise NotFoundError(f"inode {ino}: its damaged copy is open")

    async def _empty(self, held: OpenObject) -> None:
        try:
            await self._set_size(held, 0)
        except KvfsError:
            await self.close(held, writable=True)
            raise

    async def _set_size(self, held: OpenObject, size: int) -> None:
        try:
            await self.on_file(held, "truncate", partial(_set_size, size=size))
        except OSError as error:
            raise self.failed("truncate", held, error) from error

    def open_at_once(self, ino: int) -> OpenObject | None:
        """A reader's handle if nothing is to be waited for: it is open, or in RAM as it was sealed.

        This is the usual open; without the tasks and locks of the others it is meant to be faster;
        that was not measured apart.
        """
        ledger = self.ledger
        if ino in ledger.table.busy:
            return None
        held = ledger.table.open.get(ino)
        if held is not None and (not held.readable or held.only_lent or held.refused):
            return None
        if held is None:
            inode = self.catalog.inode(ino)
            found = None if inode is None else self.copies.open_at_once(inode)
            if inode is None or found is None:
                return None
            if ledger.removals.expire(inode):
                os.close(found[1])
                return None
            held = self._opened(inode, *found, writable=False)
        held.readers += 1
        return held

    def lend(self, inode: Inode) -> OpenObject | None:
        """A reader's handle without the kernel, by the descriptor `lent`, which cannot be written.

        Of what `ledger` knows by this record, in RAM as it was sealed; else None.
        """
        ledger, ram = self.ledger, self.ledger.tiers.ram
        if ram is None or inode.ino in ledger.table.busy:
            return None
        held = ledger.table.open.get(inode.ino)
        if held is not None and (held.tier is not ram or held.direct or held.writers or held.lost):
            return None
        if held is None or held.lent < 0:
            fd = self.copies.lend(inode)
            if fd is None:
                return None
            if held is None:
                held = OpenObject(inode, ram, -1, writable=False, accounted=True)
                ledger.counters["opens_lent"] += 1
                self._enter(held, ram)
            held.lent = fd
        held.readers += 1
        held.leases += 1
        return held

    def _join(self, held: OpenObject) -> None:
        """The kernel comes to what only leases have had. Raises NotFoundError, TierError."""
        held.fd = held.tier.open(held.inode.ino, held.inode.version, writable=False)
        held.backing_id = self.register(held)
        if held.backing_id:
            os.close(held.fd)
            held.fd = -1

    async def _open_first(self, inode: Inode, *, writable: bool) -> OpenObject:
        found = await self.copies.open(inode, writable=writable)
        if isinstance(found, tuple):
            tier, fd, where = found
            return self._opened(inode, tier, fd, writable=writable, where=where)
        if isinstance(found, Stream):
            return self._opened_early(inode, found)
        return self._scanned(inode, found)

    def _opened(
        self,
        inode: Inode,
        tier: Tier,
        fd: int,
        *,
        writable: bool,
        where: Tier | Bucket | None = None,
    ) -> OpenObject:
        """where: its bytes were there, if they had to be brought here for it."""
        held = OpenObject(inode, tier, fd, writable, accounted=bool(inode.links))
        held.reservation = self.ledger.orphans.take(inode.ino)
        if not inode.links:
            held.publish = self.to_publish(inode.ino)
        held.backing_id = self.register(held)
        self._enter(held, where or tier)
        if not writable and held.backing_id:
            os.close(fd)  # the kernel has its own reference
            held.fd = -1
        return held

    def _enter(self, held: OpenObject, where: Tier | Bucket) -> None:
        """It is open from now on."""
        inode, ledger = held.inode, self.ledger
        ledger.table.open[inode.ino] = held
        where.hits += 1
        held.brought_from = where.name
        if not held.writable and inode.links:
            ledger.namespaces.read(inode, where)
            ledger.accounts.touch(inode)
            self.promote(inode)

    def _opened_early(self, inode: Inode, stream: Stream) -> OpenObject:
        """A reader comes before all bytes have; until the last one goes, all are served so.

        Two ways at a time are not taken by the kernel once one of them has it mapped.
        """
        held = OpenObject(inode, stream.tier, -1, writable=False, accounted=bool(inode.links))
        held.direct, held.brought_from = True, Bucket.name
        self.incoming.read_from(held, stream)
        self.ledger.table.open[inode.ino] = held
        self.ledger.counters["opens_served"] += 1
        self.incoming.opened(held)
        self.promote(inode)
        return held

    def _scanned(self, inode: Inode, header: Header) -> OpenObject:
        """A reader comes who will hardly want more than that: no use of the object is counted.

        It is in no tier yet, whatever `tier` says.
        """
        held = OpenObject(inode, self.ledger.tiers.local[-1], -1, writable=False, direct=True)
        held.accounted = bool(inode.links)
        held.header, held.brought_from = header, Bucket.name
        self.ledger.table.open[inode.ino] = held
        self.ledger.counters["opens_served"] += 1
        return held

    async def write(self, held: OpenObject, start: int, content: bytes) -> int:
        """Raises NoSpaceError, QuotaError, TooLargeError, TierError."""
        try:
            with self.bounds.admitted(held, start, len(content)):
                return await self.on_file(held, "write", lambda fd: os.pwrite(fd, content, start))
        except OSError as error:
            raise self.failed("write", held, error) from error

    async def read(self, held: OpenObject, start: int, length: int) -> bytes:
        """Less only at the end of the object. Raises TierError."""
        if held.header is not None and held.header.has(start, length):
            return held.header.read(start, length)
        fd = await self.incoming.bytes_here(held, start, length) if held.direct else held.fd

        def do(own: int) -> bytes:
            return os.pread(own, length, start)

        try:
            if not held.tier.slow:
                return do(fd)
            return await self._io(held.tier, Job.on_file("read", fd, do))
        except OSError as error:
            raise self.failed("read", held, error) from error

    def register(self, held: OpenObject) -> int:
        """A backing id for its file; 0 if the daemon must serve it."""
        backing_id = self.backings.register(held.fd)
        self.ledger.counters["opens_passthrough" if backing_id else "opens_served"] += 1
        return backing_id

    # Writing

    async def create(
        self, parent: int, name: bytes, make: Make, *, at_once: bool = False
    ) -> OpenObject:
        """A new file with its first writer.

        `make` gives its directory and its inode, or raises what forbids it. `at_once`: it has its
        name from now on, though `publish` may say otherwise.
        `make` is called after the last await, so that its checks still hold when its names are
        committed with the rest. Raises NoSpaceError, TierError and what `make` raises.
        """
        with self.ledger.prefixes.entering(parent):
            return await self._create(parent, name, make, at_once=at_once)

    async def _create(self, parent: int, name: bytes, make: Make, *, at_once: bool) -> OpenObject:
        namespace = self.ledger.namespaces.of(self._directory(parent))
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
            namespace = self.ledger.namespaces.of(self._directory(parent))
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
                fd = await self._make(room.tier, ino, 1)
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
                        self._name(inode, directory, name, batch)
                    else:
                        batch.mark(b"p", ino, _PARENT.pack(parent) + name)
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
        held.backing_id = self.register(held)
        ledger.table.open[ino] = held
        ledger.table.stage(held)
        ledger.counters["created"] += 1
        return held

    def _room_in_ram(self, parent: int, room: Reservation) -> Reservation | None:
        """The same for a file that could not begin where it was to."""
        ram = self.ledger.tiers.ram
        namespace = self.ledger.namespaces.of(self._directory(parent))
        if ram is None or room.tier is ram or not namespace.takes(ram):
            return None
        least = min(room.size, ram.capacity // 4)  # what nothing is known of takes much
        return self.room.begin(ram, least, namespace)

    @staticmethod
    def _name(inode: Inode, directory: Inode, name: bytes, batch: Batch) -> None:
        """Its first name."""
        inode.links = ((directory.ino, inode.ino),)
        directory.mtime_ns = directory.ctime_ns = inode.ctime_ns
        batch.link(directory.ino, Dentry(name, inode.ino, inode.ino))
        batch.put(directory)

    def to_publish(self, ino: int) -> tuple[int, bytes] | None:
        """The name that an inode without one is to get; None if it has lost its last."""
        value = self.catalog.mark(b"p", ino)
        if value is None or len(value) <= _PARENT.size or value.startswith(NOWHERE):
            return None
        return _PARENT.unpack_from(value)[0], value[_PARENT.size :]

    def doom_of(self, ino: int) -> KvfsError | None:
        """Why an inode without a name was cut off by the daemon before this one, if it was."""
        value = self.catalog.mark(b"p", ino) or b""
        if not value.startswith(NOWHERE):
            return None
        kind = QuotaError if value[len(NOWHERE) :] == b"QuotaError" else NoSpaceError
        return kind(f"inode {ino} was cut off before the daemon was another one")

    def _publish(self, held: OpenObject) -> None:
        """It is complete: give it its name. Another one that has the name was complete before."""
        assert held.publish is not None
        parent, name = held.publish
        inode, directory = held.inode, self.ledger.table.inode(parent)
        with self.catalog.batch() as batch:
            batch.unmark(b"p", inode.ino)
            if (
                directory is not None
                and directory.links
                and not self.ledger.removals.expire(directory)
                and self.catalog.lookup(parent, name) is None
            ):
                self._name(inode, directory, name, batch)
                self.ledger.namespaces.places.place(
                    inode, directory, name, batch
                )  # it may have moved
                batch.put(inode)
            else:
                batch.then(partial(self.ledger.counters.update, outrun=1))
        if failpoints.active:
            failpoints.reach("objects.published")
        held.publish = None

    async def _replace(self, inode: Inode) -> OpenObject:
        """Nobody has it open and its content is to go: begin a new one where there is room."""
        ledger = self.ledger
        parent, name = self._some_name(inode)
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
        held.backing_id = self.register(held)
        ledger.table.open[current.ino] = held
        ledger.table.stage(held)
        return held

    async def _make_version(self, inode: Inode, version: int, tier: Tier) -> tuple[Inode, int]:
        """Its record, being written from now on, and an empty file for that version."""
        fd = await self._make(tier, inode.ino, version)
        try:
            current = self.catalog.inode(inode.ino)
            if current is None or current.version != inode.version or not current.links:
                raise StaleError(f"inode {inode.ino} went away while it was opened")
            with self.catalog.batch() as batch:
                self.versions.restage(current, version, tier, batch, keep=False)
        except BaseException:
            os.close(fd)
            # Not into the trash: the next attempt makes a file of the same name.
            await self._io(tier, Job("unlink", partial(tier.unlink, inode.ino, version)))
            raise
        return current, fd

    def _directory(self, ino: int) -> Inode:
        found = self.ledger.table.inode(ino)
        if found is None:
            raise StaleError(f"directory {ino} is gone")
        return found

    def _some_name(self, inode: Inode) -> tuple[int, bytes]:
        for parent, cookie in inode.links:
            entry = self.catalog.dentry(parent, cookie)
            if entry is not None:
                return parent, entry.name
        return 0, b""

    async def truncate(self, ino: int, size: int) -> Inode:
        """Set the size, growing with zeros. Raises TooLargeError and what `open` raises."""
        if size > SIZE_MAX:
            raise TooLargeError(f"size {size}, expected at most {SIZE_MAX}")
        held = await self.open(ino, writable=True, truncate=size == 0)
        try:
            await self._set_size(held, size)
        finally:
            await self.close(held, writable=True)
        return held.inode

    def cut_off(self, held: OpenObject, why: KvfsError) -> None:
        """It may not grow further: nobody finds it any more, and its writer is told at its close.

        What it has goes as well, and what its writer adds (`Bounds`).
        """
        inode, ledger = held.inode, self.ledger
        parent, name = held.publish or self._some_name(inode)
        log.warning("%s is cut off: %s", self._called(held), why)
        if name and held.staged > held.tier.configured:  # the next one begins in another tier
            space = ledger.namespaces.of(inode)
            self.placement.learn(parent, name, space, held.staged)
        held.doom = why
        held.leaving = max(held.leaving, held.staged)
        ledger.table.weigh(held, 0)
        held.reserve(min(held.reserved, Tier.cost(0)))
        try:
            ledger.removals.take_names(held, type(why).__name__.encode())
        except CatalogError as error:  # it cannot be opened, and loses its name at its close
            log.error("inode %d keeps its name until the catalog works: %s", inode.ino, error)

    async def touch(self, ino: int, mtime_ns: int) -> None:
        """Give a file that is being written a time of change; its backing file must have it, too.

        Meanwhile it counts a writer more: a seal would take either time for granted.
        """
        held = self.ledger.table.staging.get(ino)
        if held is None:
            return
        held.writers += 1
        try:
            self.measure(held)
            times = (held.inode.atime_ns, mtime_ns)
            await self.on_file(held, "utime", partial(os.utime, ns=times))
            held.inode.backing_mtime_ns = os.fstat(held.fd).st_mtime_ns
        except OSError as error:
            raise self.failed("utime", held, error) from error
        finally:
            await self.close(held, writable=True)

    async def close(self, held: OpenObject, *, writable: bool) -> None:
        """As the kernel closes: whatever the flush says, the handle is released."""
        try:
            self.flush(held, writable=writable)
        finally:
            await self.release(held, writable=writable)

    async def close_lent(self, held: OpenObject) -> None:
        """The same for a writer who had a descriptor of the file itself."""
        try:
            self.flush(held, writable=True)
        finally:
            await self._release(held, writable=True, left=self.mappings.may_be_written(held))

    @staticmethod
    def failed(verb: str, held: OpenObject, error: OSError) -> KvfsError:
        """What a failed call on a backing file means. Only a tier's own failure is logged."""
        what = f"{held.tier.name} tier: {verb} of inode {held.inode.ino}: {error}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return NoSpaceError(what)
        if error.errno == errno.EFBIG:
            return TooLargeError(what)
        return held.tier.failed(verb, held.inode.ino, error)

    # Sealing

    def measure(self, held: OpenObject) -> None:
        """Bring the record of an object that is being written up to what its file says now."""
        if held.writers and held.fd >= 0:
            found = os.fstat(held.fd)
            inode = held.inode
            inode.size, inode.blocks = found.st_size, found.st_blocks
            if found.st_mtime_ns != inode.backing_mtime_ns:
                inode.mtime_ns = inode.backing_mtime_ns = found.st_mtime_ns
                inode.ctime_ns = max(inode.ctime_ns, found.st_mtime_ns)

    def flush(self, held: OpenObject, *, writable: bool) -> bool:
        """A descriptor was closed; if it was the only writer's the object is sealed.

        Whether it was, with something new in it.
        """
        if writable and held.doom is not None:
            raise held.doom
        if not writable or held.writers - held.mapped != 1:
            return False
        began = time.perf_counter()
        if (error := self._too_large(held)) is not None:
            log.warning("%s is lost with its close: %s", self._called(held), error)
            raise error
        if held.publish is not None:
            self.measure(held)
            if held.inode.size:
                self._publish(held)
        if not held.inode.links or not self._seal(held):
            return False
        self.ledger.latencies.seal[held.tier.name].observe(time.perf_counter() - began)
        return True

    def _too_large(self, held: OpenObject) -> KvfsError | None:
        """Why it goes with its close; None if it stays, or goes anyway."""
        if not held.inode.links and held.publish is None:
            return None
        self.measure(held)
        return self.placement.too_large(held.inode, self.ledger.namespaces.of(held.inode))

    def _called(self, held: OpenObject) -> str:
        parent, name = held.publish or self._some_name(held.inode)
        return f"inode {held.inode.ino}, {os.fsdecode(name)!r} in directory {parent},"

    def _seal(self, held: OpenObject) -> bool:
        inode = held.inode
        self.measure(held)
        # What the record in memory says is no measure: whoever asked for attributes has updated it.
        found = (inode.size, inode.backing_mtime_ns, inode.blocks)
        if inode.sealed and found[:2] == held.sealed_as[:2]:
            if found != held.sealed_as:  # ext4 allocates late: accounts go by what the record says
                with self.catalog.batch() as batch:
                    batch.put(inode)
                held.sealed_as = found
            return False
        again, inode.sealed = inode.sealed, True
        inode.session = self.ledger.session
        with self.catalog.batch() as batch:
            if again:  # by a writer who was let in while a takeover took the file for mapped
                self._forget_former(held, batch)
            batch.put(inode)
            batch.mark_finished(inode.ino)
            self.ledger.dirty.sealed(inode, batch)
        held.sealed_as = found
        self.ledger.counters["sealed"] += 1
        space = self.ledger.namespaces.of(inode)
        self.placement.learn(*self._some_name(inode), space, inode.blocks * 512)
        return True

    def _forget_former(self, held: OpenObject, batch: Batch) -> None:
        """Its version has other bytes than before: neither digest nor other copies are of them."""
        inode, ledger = held.inode, self.ledger
        inode.digest = b""
        for tier in ledger.tiers.holders(inode):
            if tier is not held.tier:
                ledger.tiers.set_holder(inode, tier, holds=False)
                batch.then(partial(ledger.trash.throw_away, tier, inode.ino, inode.version))

    async def release(self, held: OpenObject, *, writable: bool) -> None:
        """The handle is gone. Its room, its place in the lists and its leftovers are settled."""
        left = writable and held.backing_id > 0 and await self.mappings.outlives(held)
        await self._release(held, writable=writable, left=left)

    async def _release(self, held: OpenObject, *, writable: bool, left: bool) -> None:
        """left: somebody has it mapped, or open in another way: he stays a writer."""
        another = writable and held.mapped
        if another or left:
            self.mappings.keep(held)
            if not another:
                return
        await self._close(held, writable=writable)

    async def _close(self, held: OpenObject, *, writable: bool) -> None:
        try:
            last = self._let_go(held, writable=writable)
        except CatalogError as error:
            log.error("inode %d stays open until the catalog works: %s", held.inode.ino, error)
            self.ledger.retries.add(partial(self._close, held, writable=writable))
            return
        if held.lent >= 0 and not held.leases:
            os.close(held.lent)
            held.lent = -1
        if not last:
            if held.doom is not None and not held.writers:  # nobody looks at it any more
                await self.bounds.empty(held, os.dup(held.fd))
            return
        if held.fd >= 0:
            if held.tier.slow and writable:
                await held.tier.calls.wait(partial(os.close, held.fd))
            else:
                os.close(held.fd)
        self.incoming.read_from(held, None)
        if held.backing_id:
            self.backings.release(held.backing_id)

    def _let_go(self, held: OpenObject, *, writable: bool) -> bool:
        """One handle less; whether it was the last. Raises CatalogError with nothing changed."""
        ledger, inode = self.ledger, held.inode
        last = held.readers + held.writers == 1
        written = writable and held.writers == 1
        if held.doom is not None and inode.links:  # the catalog has refused that before
            ledger.removals.take_names(held, type(held.doom).__name__.encode())
        why = self._too_large(held) if written else None
        if why is not None and not last:  # who reads it keeps it open, but none of its bytes
            ledger.table.weigh(held, held.taken)
            self.cut_off(held, why)
        lost = why is not None and last
        if written and held.publish is not None:
            self._publish(held)
        if inode.links:
            if written:
                self._end_of_writing(held)
        elif (
            last
            and not writable
            and held.doom is None
            and inode.sealed
            and ledger.tiers.can_open(inode)
        ):
            ledger.orphans.keep_closed(held)
        elif last:
            with self.catalog.batch() as batch:
                ledger.removals.forget(inode, batch, accounted=held.accounted)
            held.reserve(0)
        elif written:  # readers that stay may still ask for its size
            self.measure(held)
            with self.catalog.batch() as batch:
                batch.put(inode)
        if written or last:
            ledger.table.unstage(held, stays=not last and not inode.links)
        if written and inode.links and not lost:  # counted once from here; open yet: it stays
            self.quota.trim(ledger.namespaces.of(inode))
        if writable:
            held.writers -= 1
        else:
            held.readers -= 1
        if last:
            del ledger.table.open[inode.ino]
        if lost and inode.links:
            self._drop_too_large(inode)
        elif written and inode.links:
            self.quota.trim(ledger.namespaces.of(inode))
        return last

    def _drop_too_large(self, inode: Inode) -> None:
        """Its handles are gone, whatever the catalog says to this."""
        try:
            self.ledger.removals.drop(inode, "too_large")
        except CatalogError as error:
            log.error("inode %d keeps its name until the catalog works: %s", inode.ino, error)
            again = partial(self._drop_too_large_again, inode.ino, inode.version)
            self.ledger.retries.add(again)

    async def _drop_too_large_again(self, ino: int, version: int) -> None:
        """Unless it was written to meanwhile. Raises CatalogError."""
        inode = self.ledger.table.inode(ino)
        if inode is not None and inode.links and inode.version == version:
            self.ledger.removals.drop(inode, "too_large")

    def _end_of_writing(self, held: OpenObject) -> None:
        ledger, inode = self.ledger, held.inode
        self._seal(held)
        held.reserve(0)
        ledger.accounts.admit(inode)
        held.accounted = True
        ledger.table.unstage(held)  # or its namespace's quota would count it twice
        ledger.namespaces.written(inode, held.charged)
        held.charged = 0
        if held.tier is ledger.tiers.nvme:
            self.settle(inode)


def _set_size(fd: int, size: int) -> None:
    """Raises OSError."""
    if failpoints.active:
        failpoints.reach("objects.truncate")
    os.ftruncate(fd, size)
    if failpoints.active:
        failpoints.reach("objects.truncated")
