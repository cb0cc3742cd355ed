"""Into the bucket: what was sealed goes up in that order, what nobody means any more is deleted.

Contract: what goes up is decided by `Dirty`; here it is done, by movers, several at once, at most
one for a key. A record says that the bucket has its object after the bucket has it, in one batch
with all that follows. If the object has changed meanwhile, what went up takes an older version's
place, or goes again. A store that fails is left alone for a while that grows; one that is down is
not asked at all. Not for when an object is due (`Dirty`), nor for the store's health.
"""

import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Container
from typing import NamedTuple

import trio

from kvfs import failpoints
from kvfs.catalog import Inode, Stored
from kvfs.core.adoption import is_bare
from kvfs.core.flow.transfers import Transfers
from kvfs.core.residency import Residency
from kvfs.core.room import Room
from kvfs.errors import CatalogError, KvfsError, TierError
from kvfs.movement.copying import SourceChangedError
from kvfs.movement.packing import Packing
from kvfs.movement.publishing import About, Target, Uploaded
from kvfs.movement.remote import Remote
from kvfs.s3.errors import (
    NoObjectError,
    ObjectChangedError,
    ObjectExistsError,
    SourceError,
    StoreError,
    WrongBytesError,
)
from kvfs.s3.store import LIST_LIMIT
from kvfs.tiers import Bucket

log = logging.getLogger(__name__)

SECOND = 10**9
LOOK = 1.0  # s between two looks at what nothing tells of
BUSY = 0.05  # s until an object is looked at again that somebody writes
AGAIN = 10.0  # s until one is tried again that failed for itself
LONGEST_PAUSE = 20.0  # s without uploads after many that failed
GATHERED = 0.1  # s in which keys gather to be deleted by one request
PATIENCE = 60.0  # s without progress that end a drain


class _Later(NamedTuple):
    """It stays dirty, and is looked at again after so many seconds."""

    seconds: float


class Spill:
    """`jobs` are inodes that movers work on; `notes` the directory for ids of uploads."""

    def __init__(
        self,
        transfers: Transfers,
        room: Room,
        remote: Remote,
        bucket: Bucket,
        jobs: set[int],
        *,
        notes: str,
        complete: Callable[[int], Awaitable[Inode | None]],
    ) -> None:
        """complete: brings the facts of what only a listing told of; None if they do not come."""
        self.residency: Residency = transfers.residency
        self.transfers = transfers
        self.room = room
        self.remote = remote
        self.bucket = bucket
        self.dirty = self.residency.dirty
        self.running = 0
        self._jobs = jobs
        self._notes = notes
        self._complete = complete
        self._locked: set[str] = set()  # keys about which a request is under way
        self.reading: Container[str] = ()  # keys of what was unlinked, perhaps, and is read yet
        self._failures = 0  # in a row
        self._refused = False  # the last upload
        self._quiet_until = 0.0
        self._said = ""
        self._said_packing = False
        self._swept = False

    async def run(self) -> None:
        """Upload and delete, for ever. Raises CatalogError before anything is begun."""
        await self.dirty.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._delete_all)
            while True:
                changed = self.dirty.changed
                if self._may():
                    await self._sweep()
                    self._begin(nursery)
                idle = self.running < self.remote.uploads and self._may()
                with trio.move_on_after(min(LOOK, self.dirty.next_due() if idle else LOOK)):
                    await changed.wait()

    def _may(self) -> bool:
        """Whether the store is to be asked for anything now."""
        if self.bucket.terms is None or self.bucket.health.down or self.transfers.trouble.down:
            return False
        return trio.current_time() >= self._quiet_until

    async def _sweep(self) -> None:
        """Abort what was cut short, by an earlier daemon or by a store that went away."""
        if self._swept or self.running:
            return
        try:
            found = await self.remote.sweep(self._notes)
        except (StoreError, TierError, OSError) as error:
            self._failed("sweep", error)
            return
        self._swept = True
        if found:
            log.info("%s: %d uploads that were cut short are aborted", self.bucket.place, found)

    # Up

    def _begin(self, nursery: trio.Nursery) -> None:
        while self.running < self.remote.uploads and (ino := self.dirty.take()) is not None:
            if ino in self._jobs or self.transfers.written(ino):
                self.dirty.put_back(ino, _in(BUSY))
                continue
            self._jobs.add(ino)
            self.running += 1
            nursery.start_soon(self.job, ino)

    async def job(self, ino: int) -> None:
        """One object, which is in `jobs` and counted as running."""
        later = _Later(AGAIN)
        try:
            later = await self._upload(ino) or _Later(0.0)
        except (StoreError, TierError) as error:
            self._failed("upload", error)
            self._refused = True
            self._swept = False  # it could not be aborted, perhaps
            later = _Later(0.0)  # all of them wait
        except (KvfsError, OSError, SourceChangedError) as error:
            if self.transfers.fit(ino) is not None:
                self.transfers.trouble.failed("upload", ino, error)
        finally:
            self.running -= 1
            self._jobs.discard(ino)
            self.dirty.give_back(ino, _in(later.seconds))
            self.dirty.wake()
            self.residency.wake()

    async def _upload(self, ino: int) -> _Later | None:
        """None when it is done. Raises StoreError, TierError, OSError, CatalogError."""
        residency, dirty = self.residency, self.dirty
        inode = self.transfers.fit(ino)
        if inode is None:
            return _Later(BUSY)
        key, stored = dirty.key(inode), dirty.stored(ino)
        if key is None or dirty.is_there(inode, stored, key):
            self._settle(inode, wanted=key is not None or dirty.wanted(inode))
            return None
        if key in self._locked:
            return _Later(BUSY)
        name = residency.namespaces.bucket_name(inode)
        assert name is not None  # it has a key
        if dirty.superseded.claims.get(key, ino) != ino:
            return await self._make_way(dirty.superseded.claims[key])
        self._locked.add(key)
        try:
            target = self._target(key, self.bucket.keys.record(name), stored)
            return await self._send(inode.copy(), stored, target)
        finally:
            self._locked.discard(key)

    def _target(self, key: str, record: tuple[str, bytes] | None, stored: Stored | None) -> Target:
        """Where it goes; what goes there for the first time is noted before. CatalogError.

        Or nobody would know of it when its answer is lost, and it is renamed or unlinked.
        """
        dirty, token = self.dirty, uuid.uuid4().hex
        ours = dirty.superseded.attempts(key)
        if (stored is not None and stored.key == key) or (
            key in dirty.superseded.deletes and not ours
        ):
            return Target(key, record, once=False, token=token)
        with self.residency.catalog.batch() as batch:
            dirty.superseded.attempt(key, token, batch)
        return Target(key, record, once=True, token=token, ours=ours)

    async def _make_way(self, ino: int) -> _Later:
        """The key is taken: another object is yet to get its new name in the bucket.

        It has its turn, unless it waits for a third one, which may be this one: names that were
        exchanged. Then it is put aside.
        """
        residency, dirty = self.residency, self.dirty
        other, stored = self.transfers.fit(ino), dirty.stored(ino)
        if stored is None:
            dirty.superseded.disclaim(ino)
            return _Later(0.0)
        if other is None or ino in self._jobs:
            return _Later(BUSY)
        wanted = dirty.key(other)
        if ino in dirty and wanted is not None and dirty.superseded.claims.get(wanted, ino) == ino:
            return _Later(BUSY)
        if residency.holders(other) or not other.in_bucket:  # it can go up anew
            residency.take_from_bucket(other, dirty=ino in dirty)
            return _Later(0.0)
        aside = self._target(f"{self.bucket.keys.aside}{uuid.uuid4().hex}", None, None)
        self._jobs.add(ino)
        try:
            await self._send(other.copy(), stored, aside)
        finally:
            self._jobs.discard(ino)
        return _Later(0.0)

    async def _send(self, inode: Inode, stored: Stored | None, target: Target) -> _Later | None:
        if is_bare(inode):  # it is to get another name with all its facts
            return _Later(AGAIN if await self._complete(inode.ino) is None else 0.0)
        holders = self.residency.holders(inode)
        copied = inode.in_bucket and stored is not None
        if not copied and not holders:
            self._settle(inode, wanted=True)
            return None
        try:
            if copied and stored is not None:
                about = self._about(inode)
                uploaded = await self.remote.copy(stored, about, target, self._notes)
            else:
                path = holders[0].path(inode.ino, inode.version)
                about, scratch = self._about(inode), self._scratch(inode)
                uploaded = await self.remote.upload(
                    path, inode.backing_mtime_ns, about, target, self._notes, scratch
                )
        except ObjectExistsError as error:
            if self.residency.namespaces.unaccounted:  # ours, perhaps: of a directory that moved
                return _Later(AGAIN)
            self._conflict(inode, target.key, error)
            return None
        except (NoObjectError, ObjectChangedError) as error:
            if not copied:
                raise
            return self._vanished(inode, error)
        except WrongBytesError as error:  # damaged on its way, more often than it may be
            log.warning("inode %d is not uploaded yet: %s", inode.ino, error)
            return _Later(AGAIN)
        except SourceError as error:
            current = self.transfers.fit(inode.ino, inode.version)
            if current is not None and holders[0] in self.residency.holders(current):
                log.error("inode %d is not uploaded: %s", inode.ino, error)
                self.transfers.rotten(current, holders[0])
                return _Later(BUSY)
            return _Later(AGAIN)
        except FileNotFoundError:
            current = self.transfers.fit(inode.ino, inode.version)
            if current is not None and holders[0] in self.residency.holders(current):
                raise
            return _Later(BUSY)  # its room was needed, and another tier has it
        if failpoints.active:
            failpoints.reach("flow.uploaded")
        self._enter(inode, uploaded, copied=copied)
        self._worked()
        return None

    def _scratch(self, inode: Inode) -> str | None:
        """Where it is compressed, "" for in memory only; None if its namespace does not want that.

        Without NVMe the notes are in memory, which large objects must not fill.
        """
        if self.residency.namespaces.of(inode).settings.compression == "off":
            return None
        return self._notes if self.residency.nvme is not None else ""

    def _about(self, inode: Inode) -> About:
        models = self.residency.namespaces.places.models
        engine_and_model = models.get(inode.model, ("", ""))
        return About(
            inode.size,
            inode.digest,
            inode.mtime_ns,
            inode.mode,
            inode.uid,
            inode.gid,
            inode.key,
            inode.parent_key,
            engine_and_model[1],
            inode.told,
            self.residency.namespaces.places.element_size(inode),
        )

    def _enter(self, inode: Inode, uploaded: Uploaded, *, copied: bool) -> None:
        """It is there: say so. Raises CatalogError; then it goes up again."""
        residency, dirty, key = self.residency, self.dirty, uploaded.stored.key
        counters = self.bucket.counters
        counters["copies" if copied else "uploads"] += 1
        counters["upload_bytes"] += 0 if copied else uploaded.stored.size
        if uploaded.packing is not None:
            self._count(inode, uploaded.stored, uploaded.packing)
        current = self.transfers.fit(inode.ino, inode.version)
        if current is not None:
            clean = dirty.key(current) == key and uploaded.stored.told == current.told
            residency.add_stored(current, uploaded.stored, uploaded.digest, clean=clean)
            self.room.trim(residency.namespaces.of(current))  # it may go now
            return
        changed = residency.inode(inode.ino)
        with residency.catalog.batch() as batch:
            if changed is not None and changed.links and changed.version != inode.version:
                dirty.replaced(inode.ino, uploaded.stored, batch)
            else:
                dirty.superseded.delete(key, batch)

    def _count(self, inode: Inode, stored: Stored, packing: Packing) -> None:
        """What compressing it came to."""
        counters = self.bucket.counters
        counters["compress_cpu_us"] += round(packing.cpu_seconds * 1e6)
        if packing.smaller:
            counters["compressed"] += 1
            counters["compressed_bytes"] += inode.size
            counters["compressed_to_bytes"] += stored.size
            return
        counters["not_compressed"] += 1
        if packing.failure:
            log.log(
                logging.DEBUG if self._said_packing else logging.WARNING,
                "inode %d is not compressed (said once): %s",
                *(inode.ino, packing.failure),
            )
            self._said_packing = True

    def _settle(self, inode: Inode, *, wanted: bool) -> None:
        """There is nothing to upload. What is not to be in the bucket leaves it, if it is here."""
        residency = self.residency
        if wanted or self.dirty.stored(inode.ino) is None or not residency.holders(inode):
            with residency.catalog.batch() as batch:
                self.dirty.settled(inode.ino, batch)
        else:
            residency.take_from_bucket(inode)

    def _conflict(self, inode: Inode, key: str, error: ObjectExistsError) -> None:
        """Another node was the first to publish the name: this version is for this mount only."""
        counters = self.bucket.counters
        counters["conflicts"] += 1
        log.log(
            logging.WARNING if counters["conflicts"] == 1 else logging.DEBUG,
            "inode %d stays on this node only: %s (said once)",
            *(inode.ino, error),
        )
        with self.residency.catalog.batch() as batch:
            self.dirty.superseded.settle(key, batch)  # what is there is not ours
            if self.transfers.fit(inode.ino, inode.version) is not None:
                self.dirty.settled(inode.ino, batch)

    def _vanished(self, inode: Inode, error: StoreError) -> _Later | None:
        """Somebody else has taken from the bucket what was to get another name there."""
        current = self.transfers.fit(inode.ino, inode.version)
        if current is None:
            return _Later(BUSY)
        log.warning("inode %d is not what the bucket has any more: %s", inode.ino, error)
        if not self.residency.holders(current):  # and nobody else has its bytes
            if current.ino in self.residency.busy:
                return _Later(BUSY)
            self.residency.let_go(current)
            self.bucket.counters["stale"] += 1
            return None
        self.residency.take_from_bucket(current, dirty=True, delete=False)
        return _Later(0.0)

    def _failed(self, what: str, error: Exception) -> float:
        """The store's failure, not the object's: nothing for so many seconds, more each time."""
        self.bucket.counters["failures"] += 1
        self.bucket.health.failed(time.monotonic(), f"{what}: {error}")
        kind = type(error).__name__
        log.log(
            logging.DEBUG if kind == self._said else logging.WARNING,
            "%s: the %s is tried again: %s",
            *(self.bucket.place, what, error),
        )
        self._said = kind
        self._failures += 1
        pause = min(LONGEST_PAUSE, 2.0 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)  # noqa: S311 (jitter)
        self._quiet_until = max(self._quiet_until, trio.current_time() + pause)
        return pause

    def _worked(self) -> None:
        self._failures, self._said, self._refused = 0, "", False

    @property
    def failing(self) -> bool:
        """Whether the store has refused the last upload, and something waits for one."""
        return self._refused and len(self.dirty) > 0

    def healthy_again(self) -> None:
        """The store answers: no use in waiting longer."""
        self._failures, self._quiet_until, self._refused = 0, 0.0, False

    # Down

    async def _delete_all(self) -> None:
        while True:
            changed = self.dirty.changed
            if not self.dirty.superseded.deletes or not self._may():
                with trio.move_on_after(LOOK):
                    await changed.wait()
                continue
            await trio.sleep(GATHERED)
            await self.delete_some()

    async def delete_some(self) -> None:
        """As many keys as one request can have."""
        kept = (self._locked, self.reading)
        keys = [
            key for key in self.dirty.superseded.deletes if not any(key in some for some in kept)
        ]
        keys = keys[: LIST_LIMIT // 2]
        if not keys:
            await trio.sleep(BUSY)
            return
        records = [record for key in keys if (record := self.bucket.keys.record_of(key))]
        self._locked.update(keys)
        try:
            attempts = {
                key: tokens for key in keys if (tokens := self.dirty.superseded.attempts(key))
            }
            left = await self.remote.remove([*keys, *records], attempts)
            if failpoints.active:
                failpoints.reach("flow.deleted")
            with self.residency.catalog.batch() as batch:
                for key in set(keys) - left.keys():
                    self.dirty.superseded.settle(key, batch)
            self.bucket.counters["deletes"] += len(set(keys) - left.keys())
            if left:
                self._failed("delete", next(iter(left.values())))
        except (StoreError, TierError) as error:
            self._failed("delete", error)
        except CatalogError as error:
            log.error("%d keys are deleted once more: %s", len(keys), error)
            await trio.sleep(LOOK)
        finally:
            self._locked.difference_update(keys)

    # Somebody waits

    def stranded(self) -> tuple[int, int]:
        """(bytes, objects) that only RAM has, and that no tier below takes but the bucket."""
        residency, nvme = self.residency, self.residency.nvme
        size = count = 0
        for ino in self.dirty:
            inode = residency.inode(ino)
            if inode is None or inode.on_nvme or inode.in_bucket or not residency.holders(inode):
                continue
            if nvme is None or not residency.namespaces.of(inode).takes(nvme):
                size, count = size + inode.size, count + 1
        return size, count

    async def drain(self) -> None:
        """Upload what would be lost with RAM, or until the store takes nothing for a minute."""
        least, since = self.stranded(), trio.current_time()
        while (left := self.stranded())[1]:
            self.dirty.hurry(LOOK)
            if left < least:
                least, since = left, trio.current_time()
            if self.bucket.health.down or trio.current_time() > since + PATIENCE:
                log.error(
                    "%d objects (%d bytes) are lost: they were in RAM, and not yet in %s: %s",
                    *(left[1], left[0], self.bucket.place, self.bucket.health.why or "no answer"),
                )
                return
            await trio.sleep(BUSY)


def _in(seconds: float) -> int:
    return time.time_ns() + int(seconds * SECOND)
