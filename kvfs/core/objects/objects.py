"""The content of files: open, read, write, truncate.

Contract: handles come and go here; the layer that serves the kernel only numbers them. `creation`
makes new files; `sealing` ends writing and releases handles. An object with a writer is staging: it
has one copy, and kvfs does not move it.

In a namespace with `publish=close`, a new file has no name until its close (`publishing`). A file
that is still empty at a FLUSH gets it at the RELEASE: shells close a duplicate before the first
write.

Concurrency: a backing file is opened or replaced under the inode's lock (`OpenTable.lock`), the
only lock of the core. It is held across awaits of worker threads, never across another inode's
lock. Names may change meanwhile, so each step after an await checks its premises again.
Everything else is synchronous.
Not for names, nor for choosing victims. `copies` finds the copy that serves an open, `incoming` has
the bytes of objects that are on their way.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from kvfs.catalog import Inode
from kvfs.core.capacity.placement import Placement
from kvfs.core.ledger.header import Header
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.ledger.stream import Stream
from kvfs.core.objects.copies import BucketFetcher, Copies, Fetcher, Unpacker, Verifier
from kvfs.core.objects.create import Creation
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.incoming import Incoming
from kvfs.core.objects.publishing import Publishing
from kvfs.core.objects.seal import Sealing
from kvfs.errors import InUseError, KvfsError, NotFoundError, StaleError, TooLargeError
from kvfs.tiers import Bucket, OtherNodes, Tier, TierCall

SIZE_MAX = (1 << 63) - 4096


class Objects:
    """Opens, reads, writes and truncates the files of a mount.

    `promote(inode)` and `verify(inode)` learn of work for the movers. `promote` learns of opens
    for reading, except opens from RAM on a mount without a bucket.
    """

    def __init__(
        self,
        ledger: Ledger,
        placement: Placement,
        files: BackingFiles,
        verifier: Verifier,
        *,
        promote: Callable[[Inode], None],
        verify: Callable[[Inode], None],
        fetcher: BucketFetcher | None = None,
        unpacker: Unpacker | None = None,
        peers: Fetcher | None = None,
    ) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.quota = placement.quota
        self.files = files
        self.verifier = verifier
        self.promote = promote
        self.publishing = Publishing(ledger)
        self.creation = Creation(ledger, placement, files, self.publishing)
        self.copies = Copies(ledger, verifier, files, fetcher, unpacker, peers)
        self.scans = self.copies.scans
        self.incoming = Incoming(ledger, self.copies)
        self.sealing = Sealing(ledger, placement, files, self.publishing, self.incoming, verify)

    # Opening

    async def open(self, ino: int, *, writable: bool, truncate: bool = False) -> OpenObject:
        """Return the open object, with one handle more.

        Raises StaleError, NotFoundError (a miss), InUseError, NoSpaceError, TierError.
        """
        ledger = self.ledger
        async with ledger.table.locked(ino):
            held = ledger.table.open.get(ino)
            scanned = False
            if held is not None and held.lost:
                self._refuse_lost(held, writable=writable)
            if held is not None and held.doom is not None:  # a reader would find gaps in it
                what = self.catalog.named(ino)
                raise held.doom if writable else StaleError(f"{what} is cut off")
            if held is None:
                inode = self.catalog.inode(ino)
                if inode is None or ledger.removals.expire(inode):
                    raise StaleError(f"{self.catalog.named(ino)} is gone")
                if writable and truncate and inode.links:
                    held = await self.creation.begin_version(inode)
                    held.writers += 1
                    return held
                held = await self._open_first(inode, writable=writable)
                scanned = held.header is not None
            elif held.only_lent:
                self._join(held)
            elif held.header is not None and not writable:
                scanned = self.scans.opens(held.inode)
            held.readers += 1  # keeps it open during the awaits
            try:
                if held.direct and not scanned:
                    await self.incoming.ensure_bytes(held, whole=writable)
                if writable:
                    await self.creation.make_writable(held)
                if held.lost:  # during the awaits
                    self._refuse_lost(held, writable=writable)
            except BaseException:
                await self.sealing.release(held, writable=False)
                raise
            if writable:
                held.readers -= 1
                held.writers += 1
                if truncate:
                    await self._empty(held)
            return held

    def _refuse_lost(self, held: OpenObject, *, writable: bool) -> NoReturn:
        """Refuse an open whose copy was given up: the kernel takes no other while handles have it.

        Raises NotFoundError, a miss; InUseError for a writer: the bytes must not become new ones.
        StaleError for a writer if the object has lost its names: the kernel looks up the name
        again, which it may not have forgotten yet, and makes a new file.
        """
        what = self.catalog.named(held.inode.ino)
        if writable and not held.inode.links:
            raise StaleError(f"{what}: its damaged copy is open, and its names are gone")
        if writable:
            raise InUseError(f"{what}: its damaged copy is open")
        self.copies.missed(held.inode)
        raise NotFoundError(f"{what}: its damaged copy is open")

    async def _empty(self, held: OpenObject) -> None:
        try:
            await self.files.set_size(held, 0)
        except KvfsError:
            await self.sealing.close(held, writable=True)
            raise

    def open_at_once(self, ino: int) -> OpenObject | None:
        """Open for reading if that needs no wait: the object is open, or in RAM as it was sealed.

        This is the usual open. It uses no task and no lock, so it should be faster than `open`; the
        difference was not measured alone.
        """
        ledger = self.ledger
        if ino in ledger.table.busy:
            return None
        held = ledger.table.open.get(ino)
        if held is not None and (not held.readable or held.only_lent or held.refused):
            return None
        if held is None:
            inode = self.catalog.inode(ino)
            fd = -1 if inode is None else self.files.open_at_once(inode)
            if inode is None or fd < 0:
                return None
            if ledger.namespaces.mortal and ledger.removals.expire(inode):
                os.close(fd)
                return None
            held = self._opened(inode, ledger.tiers.ram, fd, writable=False)
        held.readers += 1
        return held

    def reopen(self, inode: Inode) -> OpenObject | None:
        """Open for readers that the kernel will serve alone; None if an open must do more.

        The object is in no table, and counts as no open. Only its backing id is left open.
        """
        if inode.ino in self.ledger.table.busy or not inode.sealed:
            return None
        fd = self.files.open_at_once(inode)
        if fd < 0:
            return None
        held = OpenObject(inode, self.ledger.tiers.ram, fd, writable=False, accounted=True)
        held.backing_id = 0 if self.files.has_gaps(held) else self.files.backings.register(fd)
        os.close(fd)
        held.fd = -1
        return held if held.backing_id else None

    def lend(self, inode: Inode) -> OpenObject | None:
        """Open for a reader that gets the read-only descriptor `lent`, without the kernel.

        inode: a record that `ledger` has. None if the object is not in RAM as it was sealed.
        """
        ledger, ram = self.ledger, self.ledger.tiers.ram
        if inode.ino in ledger.table.busy:
            return None
        held = ledger.table.open.get(inode.ino)
        if held is not None and (held.tier is not ram or held.direct or held.writers or held.lost):
            return None
        if held is None or held.lent < 0:
            fd = self.files.open_at_once(inode, lend=True)
            if fd < 0:
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
        """Open an object for the kernel that only leases had. Raises NotFoundError, TierError."""
        held.fd = held.tier.open(held.inode.ino, held.inode.version, writable=False)
        held.backing_id = self.files.register(held)
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
        where: Tier | Bucket | OtherNodes | None = None,
    ) -> OpenObject:
        """Enter an object that was opened. where: the place that its bytes were brought from."""
        held = OpenObject(inode, tier, fd, writable, accounted=bool(inode.links))
        if inode.ino in self.ledger.orphans.rooms:
            held.reservation = self.ledger.orphans.take_room(inode.ino)
        if not inode.links:
            held.publish = self.catalog.to_publish(inode.ino)
        held.backing_id = self.files.register(held)
        self._enter(held, where or tier)
        if not writable and held.backing_id:
            os.close(fd)  # the kernel has its own reference
            held.fd = -1
        return held

    def _enter(self, held: OpenObject, where: Tier | Bucket | OtherNodes) -> None:
        """Enter an object into the open table, and count the open."""
        inode, ledger = held.inode, self.ledger
        ledger.table.open[inode.ino] = held
        if held.writable:
            return
        where.hits += 1
        held.brought_from = where.name
        if not inode.links:  # a program has looked up the name before it went
            ledger.namespaces.read(inode, where, seen=0)
        else:
            ledger.namespaces.read(inode, where)
            ledger.accounts.touch(inode)
            if where is not ledger.tiers.ram or ledger.tiers.has_afar:
                self.promote(inode)  # or the next blocks of its prompt

    def _opened_early(self, inode: Inode, stream: Stream) -> OpenObject:
        """Open for a reader while bytes still come: the daemon serves all until the last closes.

        The kernel refuses to mix passthrough and served reads once a reader has the file mapped.
        """
        held = OpenObject(inode, stream.tier, -1, writable=False, accounted=bool(inode.links))
        held.direct, held.brought_from = True, stream.where.name
        self.incoming.set_stream(held, stream)
        self.ledger.table.open[inode.ino] = held
        self.ledger.counters["opens_served"] += 1
        self.incoming.count_open(held)
        self.promote(inode)
        return held

    def _scanned(self, inode: Inode, header: Header) -> OpenObject:
        """Open for a reader that likely needs only the header: this counts as no use of the object.

        The object is in no tier yet; its `tier` means nothing.
        """
        held = OpenObject(inode, self.ledger.tiers.local[-1], -1, writable=False, direct=True)
        held.accounted = bool(inode.links)
        held.header, held.brought_from = header, Bucket.name
        self.ledger.table.open[inode.ino] = held
        self.ledger.counters["opens_served"] += 1
        return held

    async def write(self, held: OpenObject, start: int, content: bytes) -> int:
        """Write the content at `start`. Raises NoSpaceError, QuotaError, TooLargeError, TierError.

        Returns the number of bytes written.
        """
        try:
            with self.sealing.bounds.room_for_write(held, start, len(content)):
                return await self.files.on_file(
                    held, "write", lambda fd: os.pwrite(fd, content, start)
                )
        except OSError as error:
            raise self.files.failed("write", held, error) from error

    async def read(self, held: OpenObject, start: int, length: int) -> bytes:
        """Read `length` bytes, or less at the end of the object. Raises TierError."""
        if held.header is not None and held.header.has(start, length):
            return held.header.read(start, length)
        fd = await self.incoming.wait_for_bytes(held, start, length) if held.direct else held.fd

        def do(own: int) -> bytes:
            return os.pread(own, length, start)

        try:
            if not held.tier.slow:
                return do(fd)
            return await self.files.io(held.tier, TierCall.on_file("read", fd, do))
        except OSError as error:
            raise self.files.failed("read", held, error) from error

    # Writing

    async def truncate(self, ino: int, size: int) -> Inode:
        """Set the size, growing with zeros. Raises TooLargeError and the errors of `open`."""
        if size > SIZE_MAX:
            raise TooLargeError(f"size {size}, expected at most {SIZE_MAX}")
        held = await self.open(ino, writable=True, truncate=size == 0)
        try:
            await self.files.set_size(held, size)
        finally:
            await self.sealing.close(held, writable=True)
        return held.inode

    async def touch(self, ino: int, mtime_ns: int) -> None:
        """Set the modification time of a file that is being written, and of its backing file.

        Meanwhile the object counts one writer more, so that no seal comes between the two.
        """
        held = self.ledger.table.staging.get(ino)
        if held is None:
            return
        held.writers += 1
        try:
            self.files.measure(held)
            changed, times = held.changed, (held.inode.atime_ns, mtime_ns)
            await self.files.on_file(held, "utime", partial(os.utime, ns=times))
            held.inode.backing_mtime_ns = os.fstat(held.fd).st_mtime_ns
            if not changed:
                held.unwritten = held.content[:2]
        except OSError as error:
            raise self.files.failed("utime", held, error) from error
        finally:
            await self.sealing.close(held, writable=True)
