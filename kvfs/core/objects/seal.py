"""The end of writing: flush, seal, release; and writers that are cut off before.

Contract: an object is sealed when its last writer's FLUSH is answered. Copies and digests wait
until that writer's handle is released, because a duplicate of its descriptor may still write. If
the catalog refuses the release of a handle, the handle stays. It is released when the catalog takes
writes again (`Retries`). The catalog's record changes before the state in memory and the files do.
Synchronous, except for closing files on disks.
"""

import logging
import os
import time
from collections.abc import Callable
from functools import partial

import trio

from kvfs.catalog import Batch, Inode
from kvfs.core.capacity.bounds import Bounds
from kvfs.core.capacity.placement import Placement
from kvfs.core.capacity.refusals import QUIET, Told, code_of
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import UNSEALED, OpenObject
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.incoming import Incoming
from kvfs.core.objects.mappings import Mappings
from kvfs.core.objects.publishing import Publishing
from kvfs.errors import CatalogError, KvfsError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)


class Sealing:
    """Seals objects and releases handles. `verify(inode)` learns of objects sealed on NVMe."""

    def __init__(
        self,
        ledger: Ledger,
        placement: Placement,
        files: BackingFiles,
        publishing: Publishing,
        incoming: Incoming,
        verify: Callable[[Inode], None],
    ) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.placement = placement
        self.quota = placement.quota
        self.files = files
        self.backings = files.backings
        self.publishing = publishing
        self.incoming = incoming
        self.verify = verify
        self.mappings = Mappings(ledger.table, files.backings, partial(self._close, writable=True))
        self._told = Told()
        self.bounds = Bounds(ledger, placement.room, placement.quota, self.cut_off)

    async def close(self, held: OpenObject, *, writable: bool) -> None:
        """Flush and release a handle, as the kernel does. A failed flush does not stop this."""
        try:
            self.flush(held, writable=writable)
        finally:
            await self.release(held, writable=writable)

    async def close_lent(self, held: OpenObject) -> None:
        """Flush and release the handle of a writer that had a descriptor of the file itself."""
        try:
            self.flush(held, writable=True)
        finally:
            await self._release(held, writable=True, left=self.mappings.may_be_written(held))

    def flush(self, held: OpenObject, *, writable: bool) -> bool:
        """Handle the close of a descriptor; seal the object if it was the only writer's.

        Returns whether the object was sealed with new content.
        """
        if writable and held.doom is not None:
            raise held.doom
        if not writable or held.writers - held.mapped != 1:
            return False
        began = time.perf_counter()
        self.files.measure(held)
        if (error := self._too_large(held)) is not None:
            what = self.catalog.named(held.inode.ino)
            log.warning("%s is dropped at its close: %s", what, error)
            raise error
        staged = (
            self.ledger.table.staging.get(held.inode.ino) is held
        )  # a takeover seals others, too
        if staged and held.measured > held.staged and not held.just_closed:
            self.bounds.look_at_end(held)
        if held.publish is not None and held.inode.size:
            self.publishing.publish(held)
        if not held.inode.links:
            return False
        held.closed_at = trio.current_time()
        if not self._seal(held):
            return False
        self.ledger.latencies.seal[held.tier.name].observe(time.perf_counter() - began)
        return True

    def _too_large(self, held: OpenObject) -> KvfsError | None:
        """Return why the object is dropped at its close; None if it stays, or goes anyway."""
        if not held.inode.links and held.publish is None:
            return None
        return self.placement.too_large(held.inode, self.ledger.namespaces.of(held.inode))

    def _seal(self, held: OpenObject) -> bool:
        """Seal the object as it was measured. Returns whether it had new content."""
        inode = held.inode
        # The record in memory is no measure: each request for attributes has updated it.
        found = held.content
        if inode.sealed and found[:2] == held.sealed_as[:2]:
            if found != held.sealed_as:  # ext4 allocates late: accounts go by what the record says
                with self.catalog.batch() as batch:
                    batch.put(inode)
                held.sealed_as = found
            return False
        with self.catalog.batch() as batch:
            again = batch.change(inode).sealed
            inode.sealed, inode.session = True, self.ledger.session
            if again:  # a writer opened it while a takeover took the file for mapped
                self._forget_former(held, batch)
            batch.put(inode)
            batch.mark_finished(inode.ino)
            self.ledger.dirty.on_seal(inode, batch)
        # The end of a mapping is no further seal, nor is a close that the kernel ends late.
        self.ledger.counters["sealed"] += not again or held.sealed_as != UNSEALED
        held.sealed_as = found
        self.placement.learn(held, inode.blocks * 512)
        return True

    def _forget_former(self, held: OpenObject, batch: Batch) -> None:
        """Forget the digest and the other copies: this version has other bytes than they have."""
        inode, ledger = held.inode, self.ledger
        inode.digest = b""
        for tier in ledger.tiers.holders(inode):
            if tier is not held.tier:
                ledger.tiers.set_holder(inode, tier, holds=False)
                away = partial(ledger.trash.throw_away, space=ledger.namespaces.of(inode))
                batch.then(partial(away, tier, inode.ino, inode.version))

    async def release(self, held: OpenObject, *, writable: bool) -> None:
        """Release a handle: return its room, take it off the lists, and clear its leftovers."""
        left = (
            writable
            and held.backing_id > 0
            and (self._may_fill(held) or await self.mappings.outlives(held))
        )
        await self._release(held, writable=writable, left=left)

    def _may_fill(self, held: OpenObject) -> bool:
        """Whether mappings of its readers may take room: see `BackingFiles.register`."""
        return held.writers == 1 and held.readers > 0 and self.files.has_gaps(held)

    async def _release(self, held: OpenObject, *, writable: bool, left: bool) -> None:
        """left: a process has the file mapped, or open in another way, and stays a writer."""
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
            what = self.catalog.named(held.inode.ino)
            log.error("%s stays open until the catalog works: %s", what, error)
            self.ledger.retries.add(partial(self._close, held, writable=writable))
            return
        if held.lent >= 0 and not held.leases:
            os.close(held.lent)
            held.lent = -1
        if not last:
            if held.doom is not None and not held.writers:  # no watch looks at it any more
                await self.bounds.empty_file(held, os.dup(held.fd))
            return
        self.incoming.set_stream(held, None)
        # Before the await: after it, the inode may have another version, or an open object again.
        if held.backing_id and not self.ledger.fast_opens.offer(held, written=writable):
            self.backings.release(held.backing_id)
        if held.fd >= 0:
            if held.tier.slow and writable:
                await held.tier.calls.run_unlimited(partial(os.close, held.fd))
            else:
                os.close(held.fd)

    def _let_go(self, held: OpenObject, *, writable: bool) -> bool:
        """Remove one handle. Returns whether it was the last.

        Raises CatalogError with nothing changed.
        """
        ledger, inode = self.ledger, held.inode
        ledger.uses.commit()
        if not writable:
            ledger.trash.read.add(inode.ino)
        last = held.readers + held.writers == 1
        written = writable and held.writers == 1
        if written:
            self.files.measure(held)
        if held.doom is not None and inode.links:  # the catalog has refused that before
            ledger.removals.take_names(held, type(held.doom).__name__.encode())
        # A flush has asked this of the content that it sealed.
        why = self._too_large(held) if written and held.content != held.sealed_as else None
        if why is not None and not last:  # its readers keep it open, but none of its bytes
            ledger.table.weigh(held, held.taken)
            self.cut_off(held, why)
        lost = why is not None and last
        if written and held.publish is not None:
            self.publishing.publish(held)
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
            with self.catalog.batch() as batch:
                batch.put(inode)
        if written and inode.sealed and not inode.links and held.doom is None:
            self._count_written(held)  # it was closed before it lost its name
        if written or last:
            ledger.table.unstage(held, stays=not last and not inode.links)
        if written and inode.links and not lost:  # it counts once now, and stays: it is open
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
        """Drop a closed file that is too large; later if the catalog refuses that now."""
        try:
            self.ledger.removals.drop(inode, "too_large")
        except CatalogError as error:
            what = self.catalog.named(inode.ino)
            log.error("%s keeps its name until the catalog works: %s", what, error)
            again = partial(self._drop_too_large_again, inode.ino, inode.version)
            self.ledger.retries.add(again)

    async def _drop_too_large_again(self, ino: int, version: int) -> None:
        """Drop it, unless it was written to meanwhile. Raises CatalogError."""
        inode = self.ledger.table.inode(ino)
        if inode is not None and inode.links and inode.version == version:
            self.ledger.removals.drop(inode, "too_large")

    def _end_of_writing(self, held: OpenObject) -> None:
        ledger, inode = self.ledger, held.inode
        self._seal(held)
        held.reserve(0)
        ledger.accounts.enter(inode)
        held.accounted = True
        ledger.table.unstage(held)  # or its namespace's quota would count it twice
        ledger.misses.written(inode)
        self._count_written(held)
        if held.tier is ledger.tiers.nvme:
            self.verify(inode)

    def _count_written(self, held: OpenObject) -> None:
        size = held.written if held.changed else None
        self.ledger.namespaces.written(held.inode, held.charged, size)
        held.charged = 0

    def cut_off(self, held: OpenObject, why: KvfsError) -> None:
        """Cut off a file that may not grow further: its name goes, its writer's close fails.

        Its bytes go as well, and all bytes that its writer adds (`Bounds`).
        """
        inode, ledger = held.inode, self.ledger
        what = self.catalog.named(inode.ino)
        whys = getattr(why, "because", "").split(", ")
        if self._told.add({(inode.namespace, code_of(why), one) for one in whys}):
            log.warning(
                "%s is cut off: %s; its writer's close fails (said once in %.0f minutes per cause)",
                *(what, why, QUIET / 60),
            )
        else:
            log.debug("%s is cut off for a cause that the log has told", what)
        if held.staged > held.tier.configured_capacity:  # the next one begins in another tier
            self.placement.learn(held, held.staged)
        held.doom = why
        held.leaving = max(held.leaving, held.staged)
        ledger.table.weigh(held, 0)
        held.reserve(min(held.reserved, Tier.cost(0)))
        try:
            ledger.removals.take_names(held, type(why).__name__.encode())
        except CatalogError as error:  # it cannot be opened, and loses its name at its close
            log.error("%s keeps its name until the catalog works: %s", what, error)
