"""The content of files: open, create, rewrite, seal, release.

Contract: handles come and go here; the kernel's face only numbers them. An object with a writer
is staging: one copy, nothing moves. It is sealed when its last writer's FLUSH is answered, and
what follows (copies, digests) waits until that writer's handle is released, because a duplicate of
its descriptor may still write. A handle whose release the catalog refuses stays, and is released
when it takes writes again (`Residency.late`). The record goes first, as `Residency` has it; the one
exception is a file that gets its new version's name, see `_make_writable`.

Concurrency: a backing file is opened or replaced under the inode's lock, the only one there
is; it is held across awaits of worker threads, never across another inode's lock. Names may
change meanwhile, so what an await may have made untrue is looked at again after it. Everything
else is synchronous.
Not for names, nor for choosing victims.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import trio

from kvfs import failpoints
from kvfs.catalog import Batch, Dentry, Inode
from kvfs.core.residency import OpenObject, Residency
from kvfs.errors import (
    CatalogError,
    KvfsError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    TierError,
    TooLargeError,
)
from kvfs.tiers import Job, OverdueError, Tier

log = logging.getLogger(__name__)

T = TypeVar("T")
SIZE_MAX = (1 << 63) - 4096
MAPPED_PERIOD, MAPPED_PERIOD_MAX = 0.002, 0.5  # s between two looks at objects that are mapped


class Backings(Protocol):
    """Who lets the kernel read and write a backing file by itself."""

    def register(self, fd: int) -> int:
        """An id > 0 for the open file, or 0 if the daemon must serve its bytes."""
        ...

    def release(self, backing_id: int) -> None:
        """No handle uses the id any more."""
        ...


class Verifier(Protocol):
    """Who can read a file through and compare it with a digest, and give up what was not synced."""

    async def matches(self, tier: Tier, inode: Inode) -> bool: ...
    async def lose(self, ino: int, version: int) -> None: ...


class Objects:
    """`promote(inode)` and `settle(inode)` are told of what the movers might do."""

    def __init__(
        self,
        residency: Residency,
        backings: Backings,
        verifier: Verifier,
        *,
        promote: Callable[[Inode], None],
        settle: Callable[[Inode], None],
    ) -> None:
        self.residency = residency
        self.catalog = residency.catalog
        self.backings = backings
        self.verifier = verifier
        self.promote = promote
        self.settle = settle
        self._mapped = trio.Event()  # set while there may be an object that is mapped only
        # Of calls that were given up: what a late create unlinks, and who may have another name.
        self._taken_back: dict[int, int] = {}  # inode -> version
        self._renaming: set[int] = set()

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
        """One more handle. Raises StaleError, NotFoundError (a miss), NoSpaceError, TierError."""
        await self.residency.lock(ino)
        try:
            held = self.residency.open.get(ino)
            if held is None:
                inode = self.catalog.inode(ino)
                if inode is None:
                    raise StaleError(f"inode {ino} is gone")
                if writable and truncate and inode.links:
                    held = await self._replace(inode)
                    held.writers += 1
                    return held
                held = await self._begin(inode, writable=writable)
            held.readers += 1  # keeps it while we wait
            if writable:
                try:
                    await self._make_writable(held)
                except BaseException:
                    await self.release(held, writable=False)
                    raise
                held.readers -= 1
                held.writers += 1
                if truncate:
                    await self._empty(held)
            return held
        finally:
            self.residency.unlock(ino)

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
        residency = self.residency
        if ino in residency.busy:
            return None
        held = residency.open.get(ino)
        if held is None:
            inode, ram = self.catalog.inode(ino), residency.ram
            if inode is None or ram is None or inode.ram_epoch != ram.epoch:
                return None
            try:
                fd = ram.open(ino, inode.version, writable=False)
            except KvfsError:
                return None  # the other way finds out what that means
            if not self._untouched(inode, ram, fd):
                os.close(fd)
                return None
            held = self._opened(inode, ram, fd, writable=False)
        held.readers += 1
        return held

    async def _begin(self, inode: Inode, *, writable: bool) -> OpenObject:
        """Open the best copy that is what it should be."""
        lost = False
        for tier in self.residency.holders(inode):
            try:
                opening = partial(tier.open, inode.ino, inode.version, writable=writable)
                fd = await self._io(tier, Job("open", opening, os.close))
            except NotFoundError as error:
                lost |= await self._missing(inode, tier, str(error))
                continue
            except TierError:
                continue  # said by the tier; the copy may be readable again later
            try:
                untouched = self._untouched(inode, tier, fd)
                if untouched or await self._proven(inode, tier, fd):
                    if tier.slow or not untouched:
                        self._check_still(inode, tier)
                    return self._opened(inode, tier, fd, writable=writable)
            except TierError as error:  # the disk's fault, not the copy's
                log.debug("inode %d is not verified: %s", inode.ino, error)
                os.close(fd)
                continue
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            lost = True
        if not lost and self.catalog.inode(inode.ino) is None:  # its name may mean another file
            raise StaleError(f"inode {inode.ino} went away while it was opened")
        self.residency.counters["misses"] += 1
        self._drop_if_lost(inode)
        raise NotFoundError(f"inode {inode.ino}: no tier can produce its bytes")

    def _opened(self, inode: Inode, tier: Tier, fd: int, *, writable: bool) -> OpenObject:
        held = OpenObject(inode, tier, fd, writable, accounted=bool(inode.links))
        held.reserved = self.residency.from_limbo(inode.ino)
        held.backing_id = self.register(held)
        self.residency.open[inode.ino] = held
        tier.hits += 1
        if not writable and inode.links:
            self.residency.touch(inode)
            self.promote(inode)
        if not writable and held.backing_id:
            os.close(fd)  # the kernel has its own reference
            held.fd = -1
        return held

    def register(self, held: OpenObject) -> int:
        """A backing id for its file; 0 if the daemon must serve it."""
        backing_id = self.backings.register(held.fd)
        self.residency.counters["opens_passthrough" if backing_id else "opens_served"] += 1
        return backing_id

    def _check_still(self, inode: Inode, tier: Tier) -> None:
        """After an await: bring the record up to date, if it is the same content still."""
        current = self.catalog.inode(inode.ino)
        if (
            current is None
            or current.version != inode.version
            or tier not in self.residency.holders(current)  # promoted and unlinked while we waited
        ):
            raise StaleError(f"inode {inode.ino} went away while it was opened")
        inode.take(current)

    def _untouched(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Whether the file looks like what was sealed, and no crash has come between."""
        found = os.fstat(fd)
        return (
            found.st_size == inode.size
            and found.st_mtime_ns == inode.backing_mtime_ns
            and (inode.session not in self.residency.suspect or tier is self.residency.ram)
        )

    async def _proven(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Written to behind our back, or last written before a crash: only the digest can tell.

        What is not what it should be goes into quarantine.
        """
        found = os.fstat(fd)
        if found.st_size == inode.size and inode.digest:
            if await self.verifier.matches(tier, inode):
                current = self.catalog.inode(inode.ino)
                if current is not None and current.version == inode.version:
                    current.session = self.residency.session
                    current.backing_mtime_ns = found.st_mtime_ns
                    with self.catalog.batch() as batch:
                        batch.put(current)
                return True
            why = "its bytes do not match their digest"
        elif found.st_size != inode.size:
            why = f"it has {found.st_size} bytes, expected {inode.size}"
        else:
            why = "it was written to, or not synced before a crash, and has no digest"
        log.error(
            "%s tier: %s is quarantined: %s", tier.name, tier.path(inode.ino, inode.version), why
        )
        self.residency.counters["quarantined"] += 1
        self.residency.lose(inode, tier, quarantine=True)
        return False

    async def _missing(self, inode: Inode, tier: Tier, reason: str) -> bool:
        """A backing file is not there. False if that is because the object changed meanwhile."""
        try:
            present = await self._io(tier, Job("stat", tier.present))
        except TierError:
            return True  # what has no answer cannot say that the file is gone
        if not present:
            tier.failed("open", inode.ino, FileNotFoundError(errno.ENOENT, "directory lost"))
            return True
        current = self.catalog.inode(inode.ino)
        if current is None or current.version != inode.version:
            return False
        if inode.ino in self._renaming:  # late, and then it is taken back
            return True
        log.error("%s", reason)
        self.residency.counters["missing"] += 1
        self.residency.lose(inode, tier)
        return True

    def _drop_if_lost(self, inode: Inode) -> None:
        current = self.catalog.inode(inode.ino)
        if current is not None and self.residency.is_lost(current):
            self.residency.drop(current, "lost")

    # Writing

    async def create(self, parent: int, name: bytes, make: Callable[[], Inode]) -> OpenObject:
        """A new file with its first writer. `make` gives the inode, or raises what forbids it.

        It is called after the last await, so that its checks still hold when its names are
        committed with the rest. Raises NoSpaceError, TierError and what `make` raises.
        """
        catalog, residency = self.catalog, self.residency
        ino = catalog.next_id()
        tier, reserved = await residency.choose(parent, name)
        try:
            try:
                fd = await self._make(tier, ino, 1)
            except TierError:
                ram = residency.ram  # NVMe fails: go on with what there is
                if ram is None or tier is ram:
                    raise
                room = min(reserved, ram.capacity // 4)  # what nothing is known of takes much
                if not residency.reserve(ram, room):
                    raise
                tier.reserved -= reserved
                tier, reserved = ram, room
                fd = tier.create(ino, 1)
            try:
                inode = make()
                inode.ino = ino
                inode.version = 1
                inode.links = ((parent, ino),)
                residency.set_holder(inode, tier, holds=True)
                directory = residency.inode(parent)
                assert directory is not None  # make() has looked
                directory.mtime_ns = directory.ctime_ns = inode.ctime_ns
                with catalog.batch() as batch:
                    batch.put(inode)
                    batch.link(parent, Dentry(name, ino, ino))
                    batch.mark_unfinished(ino)
                    batch.put(directory)
                    batch.answers(ino)
            except BaseException:
                os.close(fd)
                residency.throw_away(tier, ino, 1)
                raise
        except BaseException:
            tier.reserved -= reserved
            raise
        held = OpenObject(inode, tier, fd, writable=True, writers=1, reserved=reserved)
        held.backing_id = self.register(held)
        residency.open[ino] = held
        residency.stage(held)
        residency.counters["created"] += 1
        return held

    async def _replace(self, inode: Inode) -> OpenObject:
        """Nobody has it open and its content is to go: begin a new one where there is room."""
        residency = self.residency
        parent, name = self._some_name(inode)
        tier, reserved = await residency.choose(parent, name)
        version = max(inode.version, self._taken_back.get(inode.ino, 0)) + 1
        try:
            fd = await self._make(tier, inode.ino, version)
            try:
                current = self.catalog.inode(inode.ino)
                if current is None or current.version != inode.version or not current.links:
                    raise StaleError(f"inode {inode.ino} went away while it was opened")
                with self.catalog.batch() as batch:
                    self._restage(current, version, tier, batch, keep=False)
            except BaseException:
                os.close(fd)
                # Not into the trash: the next attempt makes a file of the same name.
                await self._io(tier, Job("unlink", partial(tier.unlink, inode.ino, version)))
                raise
        except BaseException as error:
            tier.reserved -= reserved
            if isinstance(error, OverdueError):  # the next attempt must not make what then goes
                self._taken_back[inode.ino] = version
            raise
        self._taken_back.pop(inode.ino, None)
        held = OpenObject(current, tier, fd, writable=True, reserved=reserved)
        held.backing_id = self.register(held)
        residency.open[current.ino] = held
        residency.stage(held)
        return held

    def _some_name(self, inode: Inode) -> tuple[int, bytes]:
        for parent, cookie in inode.links:
            entry = self.catalog.dentry(parent, cookie)
            if entry is not None:
                return parent, entry.name
        return 0, b""

    def _restage(self, inode: Inode, version: int, tier: Tier, batch: Batch, *, keep: bool) -> None:
        """A sealed inode becomes staging in `tier`: out of the accounts, its copies thrown away.

        keep: but the one in `tier`, which has become the new version.
        """
        residency = self.residency
        before = inode.copy()
        batch.then(partial(residency.dismiss, before))
        for holder in residency.holders(inode):
            residency.set_holder(inode, holder, holds=False)
            if not (keep and holder is tier):
                batch.then(partial(residency.throw_away, holder, inode.ino, before.version))
        residency.set_holder(inode, tier, holds=True)
        if not keep:
            inode.size = inode.blocks = 0
        inode.version = version
        inode.sealed = False
        inode.digest = b""
        inode.mode &= ~stat.S_ISUID  # who writes a file must not inherit its owner's rights
        if inode.mode & stat.S_IXGRP:
            inode.mode &= ~stat.S_ISGID
        batch.put(inode)
        batch.mark_unfinished(inode.ino)

    async def _make_writable(self, held: OpenObject) -> None:
        """A writer comes. Readers keep what they have: all share one backing file.

        The file gets the new version's name before the record does, or a crash might leave a record
        that no file has. So that a crash between the two loses nothing the inode is marked
        unfinished before either; `recovery` finds it sealed, and gives the file its name back.
        """
        residency, inode, tier = self.residency, held.inode, held.tier
        if not held.writable:
            opening = partial(tier.open, inode.ino, inode.version, writable=True)
            fd = await self._io(tier, Job("open", opening, os.close))
            if held.fd >= 0:
                os.close(held.fd)
            held.fd, held.writable, held.reopened = fd, True, True
        if held.writers:
            return
        if not held.accounted:  # unlinked, and written to before
            residency.stage(held)
            return
        if inode.links:
            await self._rename_and_restage(held)
        else:  # nobody will look for the version of an unlinked file
            with self.catalog.batch() as batch:
                self._restage(inode, inode.version, tier, batch, keep=True)
        held.accounted = False
        held.reserved = tier.cost(inode.blocks)
        tier.reserved += held.reserved
        residency.stage(held)

    async def _rename_and_restage(self, held: OpenObject) -> None:
        inode, tier = held.inode, held.tier
        ino, old, new = inode.ino, inode.version, inode.version + 1
        with self.catalog.batch() as batch:
            batch.mark_unfinished(ino)
        renaming = partial(tier.rename, ino, old, new)
        back = partial(tier.rename, ino, new, old)
        self._renaming.add(ino)
        try:
            await self._io(tier, Job("rename", renaming, lambda _: self._renamed_late(ino, back)))
        except OverdueError:
            raise  # it may come yet: the mark stays until it is taken back
        except KvfsError:
            await self._unmark(ino)
            raise
        try:
            with self.catalog.batch() as batch:
                self._restage(inode, new, tier, batch, keep=True)
        except KvfsError:
            await self._io(tier, Job("rename", back))  # if it fails, the mark stays
            await self._unmark(ino)
            raise
        self._renaming.discard(ino)

    def _renamed_late(self, ino: int, back: Callable[[], None]) -> None:
        """Nobody waits for it any more. Called in any thread."""
        back()
        self.residency.late.append(partial(self._unmark_late, ino))

    async def _unmark(self, ino: int) -> None:
        """It was marked unfinished, and then not written: it is what it was. Holds the lock."""
        try:
            inode = self.residency.inode(ino)
            written = ino in self.residency.staging
            if inode is not None and inode.links and inode.sealed and not written:
                with self.catalog.batch() as batch:
                    batch.mark_finished(ino)
            self._renaming.discard(ino)
        except CatalogError as error:
            log.error("inode %d is called unfinished a while longer: %s", ino, error)
            self.residency.late.append(partial(self._unmark_late, ino))

    async def _unmark_late(self, ino: int) -> None:
        await self.residency.lock(ino)
        try:
            await self._unmark(ino)
        finally:
            self.residency.unlock(ino)

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

    async def close(self, held: OpenObject, *, writable: bool) -> None:
        """As the kernel closes: whatever the flush says, the handle is released."""
        try:
            self.flush(held, writable=writable)
        finally:
            await self.release(held, writable=writable)

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

    def flush(self, held: OpenObject, *, writable: bool) -> None:
        """A descriptor was closed; if it was the only writer's the object is sealed."""
        if writable and held.writers - held.mapped == 1 and held.inode.links:
            self._seal(held)

    def _seal(self, held: OpenObject) -> None:
        inode = held.inode
        self.measure(held)
        # What the record in memory says is no measure: whoever asked for attributes has updated it.
        found = (inode.size, inode.backing_mtime_ns)
        if inode.sealed and found == held.sealed_as:
            return
        inode.sealed = True
        inode.session = self.residency.session
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.mark_finished(inode.ino)
        held.sealed_as = found
        self.residency.counters["sealed"] += 1

    async def release(self, held: OpenObject, *, writable: bool) -> None:
        """The handle is gone. Its room, its place in the lists and its leftovers are settled."""
        another = held.mapped
        if writable and held.backing_id and (another or self._shared(held)):
            self._keep_mapped(held)
            if not another:
                return
        await self._close(held, writable=writable)

    def _keep_mapped(self, held: OpenObject) -> None:
        """A mapping stays a writer until `watch_mappings` finds it gone."""
        held.mapped = True
        self._mapped.set()
        try:
            with self.catalog.batch() as batch:
                batch.mark_unfinished(held.inode.ino)  # for a next daemon, which sees no handle
        except CatalogError as error:
            log.error("a next daemon will not see inode %d mapped: %s", held.inode.ino, error)

    def _shared(self, held: OpenObject) -> bool:
        """Whether somebody besides the daemon and one writer has the file; not told with readers.

        That nobody else's open is under way also means that the lease disturbs none.
        """
        if not self._alone(held):
            return False
        if held.reopened and held.backing_id:  # the kernel has both, and would count one as shared
            self.backings.release(held.backing_id)
            held.backing_id = self.backings.register(held.fd)
            held.reopened = False
        return held.tier.shared(held.fd)

    @staticmethod
    def _alone(held: OpenObject) -> bool:
        return held.writers == 1 and not held.readers

    async def _close(self, held: OpenObject, *, writable: bool) -> None:
        try:
            last = self._let_go(held, writable=writable)
        except CatalogError as error:
            log.error("inode %d stays open until the catalog works: %s", held.inode.ino, error)
            self.residency.late.append(partial(self._close, held, writable=writable))
            return
        if not last:
            return
        if held.fd >= 0:
            if held.tier.slow and writable:
                await held.tier.calls.wait(partial(os.close, held.fd))
            else:
                os.close(held.fd)
        if held.backing_id:
            self.backings.release(held.backing_id)

    async def watch_mappings(self) -> None:
        """End the writing of objects that were mapped, when that is over; as long as the mount.

        Under passthrough a mapping keeps the backing file, not the handle, and the kernel does not
        tell of its end. What was released a moment ago looks mapped, too: the first look is soon.
        An object that others have open is looked at when they have closed it.
        """
        period = MAPPED_PERIOD
        while True:
            if not any(held.mapped for held in self.residency.staging.values()):
                self._mapped, period = trio.Event(), MAPPED_PERIOD
                await self._mapped.wait()
            await trio.sleep(period)
            period = min(2 * period, MAPPED_PERIOD_MAX)
            await self.end_mappings(lambda held: self._alone(held) and not self._shared(held))

    async def end_mappings(self, gone: Callable[[OpenObject], bool]) -> None:
        """One look at what was mapped."""
        for held in [held for held in self.residency.staging.values() if held.mapped]:
            if gone(held):
                held.mapped = False
                held.sealed_as = (-1, -1)  # the catalog has it as unfinished
                await self._close(held, writable=True)

    def _let_go(self, held: OpenObject, *, writable: bool) -> bool:
        """One handle less; whether it was the last. Raises CatalogError with nothing changed."""
        residency, inode = self.residency, held.inode
        last = held.readers + held.writers == 1
        written = writable and held.writers == 1
        if inode.links:
            if written:
                self._end_of_writing(held)
        elif last:
            with self.catalog.batch() as batch:
                residency.forget(inode, batch, accounted=held.accounted)
            held.tier.reserved -= held.reserved
        elif written:  # readers that stay may still ask for its size
            self.measure(held)
            with self.catalog.batch() as batch:
                batch.put(inode)
        if written:
            residency.staging.pop(inode.ino, None)
        if writable:
            held.writers -= 1
        else:
            held.readers -= 1
        if last:
            del residency.open[inode.ino]
        return last

    def _end_of_writing(self, held: OpenObject) -> None:
        residency, inode = self.residency, held.inode
        parent, name = self._some_name(inode)
        self._seal(held)
        held.tier.reserved -= held.reserved
        held.reserved = 0
        residency.sizes.learn(parent, name, inode.blocks * 512)
        residency.admit(inode)
        held.accounted = True
        if held.tier is residency.nvme:
            self.settle(inode)


def _set_size(fd: int, size: int) -> None:
    """Raises OSError."""
    if failpoints.active:
        failpoints.reach("objects.truncate")
    os.ftruncate(fd, size)
    if failpoints.active:
        failpoints.reach("objects.truncated")
